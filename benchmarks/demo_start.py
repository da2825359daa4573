"""A head start for training: embedding and output layer fitted to the bigram counts of the training text.

Rank H least cross-entropy: find U, W [V, H] with softmax(W rmsnorm(U[a])) close to p(. | a). A batch is a
set of tokens a with their whole next-token distributions, so it says as much as all the text has on them,
for the price of the output layer alone. The layers between then start from a bigram model instead of
from nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional

ROWS = 512  # contexts in a batch
SCALE = 0.5  # root mean square of an embedding row


def pair_counts(streams: list[np.ndarray[Any, Any]], vocabulary: int) -> torch.Tensor:
    """[V, V] frequencies of (token, next token), each stream weighing the same."""
    counts = np.zeros(vocabulary * vocabulary)
    for stream in streams:
        ids = np.asarray(stream, dtype=np.int64)
        pairs = np.bincount(ids[:-1] * vocabulary + ids[1:], minlength=vocabulary * vocabulary)
        counts += pairs / (len(ids) - 1)
    return torch.from_numpy(counts.astype(np.float32)).view(vocabulary, vocabulary) / len(streams)


def fit(
    streams: list[np.ndarray[Any, Any]], vocabulary: int, hidden: int, path: Path, batches: int = 500
) -> None:
    """Write ``embedding`` and ``head`` to ``path``; prints the loss on the way."""
    torch.set_num_threads(1)  # a second thread waits more than it works when the machine is shared
    torch.manual_seed(0)
    counts = pair_counts(streams, vocabulary)
    often = counts.sum(1)
    embedding = torch.randn(vocabulary, hidden).requires_grad_()
    head = (0.02 * torch.randn(vocabulary, hidden)).requires_grad_()
    optimizer = torch.optim.Adam([embedding, head], lr=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=batches, pct_start=0.1)
    for number in range(batches):
        rows = torch.unique(torch.multinomial(often, ROWS, replacement=True))
        target = counts[rows] / often[rows, None]
        state = functional.rms_norm(embedding[rows], (hidden,))
        weight = often[rows] / often[rows].sum()
        loss = (functional.cross_entropy(state @ head.T, target, reduction="none") * weight).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if number % 100 == 99:
            print(f"bigram start {number + 1} of {batches}: loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        scaled = SCALE * functional.rms_norm(embedding, (hidden,))
    save_file({"embedding": scaled.contiguous(), "head": head.detach()}, path)
