"""Small transfers between host and device, and large ones in pieces."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from cuda_runs import DEVICES, check_faults, open_gpu_of
from cuda_standin import StandIn
from hypothesis import given, settings
from hypothesis import strategies as st

from daop.runtime.cuda.mailbox import BLOCK, Inbox, Outbox


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=6), seed=st.integers(0, 100))
def test_what_is_sent_and_brought_is_the_same(device: str, sizes: list[int], seed: int) -> None:
    gpu = open_gpu_of(device, Random(seed))
    outbox, inbox = Outbox(gpu), Inbox(gpu)
    random = np.random.default_rng(seed)
    for _ in range(3):
        arrays = [random.integers(0, 99, size) for size in sizes]
        sent = inbox.send(arrays)
        more = inbox.send(arrays[:1])
        back = outbox.bring([*sent, *more])
        for array, tensor in zip([*arrays, arrays[0]], back, strict=True):
            assert array.tolist() == tensor.tolist()
        inbox.reset()
    check_faults(gpu)


@pytest.mark.parametrize("device", DEVICES)
def test_large_tensors_travel_in_pieces(device: str) -> None:
    gpu = open_gpu_of(device, Random(0))
    tensor = torch.randn(2 * BLOCK // 4 // 1024 + 7, 1024)
    outbox, inbox = Outbox(gpu), Inbox(gpu)
    there = inbox.send_large(tensor)
    assert there.device == gpu.device
    assert torch.equal(there.cpu(), tensor)
    assert torch.equal(outbox.bring_large(there), tensor)
    assert all(buffer.numel() <= BLOCK for buffer in inbox._host)
    assert outbox._host.numel() <= BLOCK
    check_faults(gpu)


def test_reusing_a_pinned_buffer_too_early_shows() -> None:
    """The stand-in's own eye: without it the tests above would prove nothing."""
    gpu = StandIn(None)
    inbox = Inbox(gpu)
    inbox.send([np.arange(5)])
    inbox.reset()
    inbox.send([np.arange(5) + 1])
    gpu.synchronize()
    assert gpu.faults
