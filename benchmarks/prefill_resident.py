"""All experts in memory: how fast is the prefill of a long prompt, with the weights in bf16?

    python benchmarks/prefill_resident.py [MODEL] [--tokens 512] [--repeats 3] [--threads N]

MODEL and method are those of decode_resident.py; here ``--tokens`` is the length of the prompt, and the
figure is its length over the time to the first token. Bound: 60 tokens/s on two AVX2 cores.
"""

from __future__ import annotations

import tempfile

import torch
from decode_resident import arguments, compare, contenders, random_model, report

from daop.runtime.native import native_status

RIVALS = ("eager", "grouped_mm")  # batched_mm copies the weights for every token


def main() -> None:
    options = arguments(__doc__, 512)
    conditions = {"native": native_status()[1] or "none", "threads": torch.get_num_threads()}
    prompt = [(7 * i + 100) % 30000 for i in range(options.tokens)]
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or random_model(folder)
        with contenders(path, RIVALS) as runs:
            figures = compare(runs, prompt, 1, options.repeats, lambda answer: options.tokens / answer.ttft_s)
    report(figures, RIVALS, {**conditions, "prompt_tokens": options.tokens, "repeats": options.repeats})


if __name__ == "__main__":
    main()
