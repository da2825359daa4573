"""Does the device ``cuda`` do what it should, and how fast? One command on a CUDA machine, under eight
minutes.

    python benchmarks/gpu_check.py [--folder DIR] [--output gpu_check.json] [--machine machine.toml]
    [--minutes 8] python benchmarks/gpu_check.py --dry-run     walks the whole plan on the CPU with tiny
    models, in seconds

It makes its own random checkpoints (a qwen3_moe of 8 GB, one of Mixtral's expert shape with 8 layers) and
runs sections, each within its own share of the time: one that fails is reported and the next begins. What is
known is saved after every section.
    kernels    those of the CPU, built if need be
    model      the checkpoint, written and loaded
    link       copies of 1 to 64 MB, pinned and pageable
    experts    one expert on device and host, by tokens
    rivals     transformers with everything on the GPU, and with accelerate's offload
    correct    logits of policies, slots poisoned first, against transformers' on the same weights and tokens
    overlap    host and device on one layer, alone and together
    policies   decode and prefill tokens/s by policy and ECR
    simulated  the same policies simulated on the machine just measured
    tests      pytest -m gpu: families, policies, faults
    mixtral    the same in short for large experts
Prints a table, what of the wanted figures was reached, and last one line of JSON. A dry run's figures say
nothing of a GPU. Exit code 1 if a section failed or logits differ."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_bench import Bench, Driven
from gpu_dry import CpuGpu
from gpu_models import LARGE, TINY, Shape, topical_tokens, write_model
from gpu_report import report
from gpu_rivals import run_offload, run_whole
from gpu_sections import (
    check_experts,
    check_link,
    check_logits,
    check_overlap,
    check_policies,
    check_simulated,
    save_machine,
)

from daop.runtime import native_library
from daop.runtime.cuda.device import open_gpu
from daop.runtime.cuda.streams import Gpu
from daop.runtime.native import native_status

RAW = argparse.RawDescriptionHelpFormatter
SHARES = (0.125, 0.25, 0.5, 1.0)
SECONDS = {  # of each section, at most
    **{
        "kernels": 90,
        "model": 60,
        "link": 10,
        "experts": 15,
        "rivals": 75,
        "correct": 25,
        "overlap": 10,
        "policies": 120,
    },
    **{"simulated": 30, "mixtral": 90, "tests": 120},
}


@dataclass
class State:
    """What sections hand to each other, and everything that was found."""

    gpu: Gpu
    shape: Shape
    mixtral: Shape
    folder: Path
    seed: int
    steps: int
    prompt: int
    dry: bool
    machine: Path
    bench: Bench | None = None
    tokens: list[int] = field(default_factory=list)
    truth: Driven | None = None
    found: dict[str, Any] = field(default_factory=dict)

    def need_bench(self) -> Bench:
        if self.bench is None:
            raise RuntimeError("the model could not be loaded: see above")
        return self.bench


def section_model(state: State) -> dict[str, Any]:
    began = time.perf_counter()
    path = write_model(state.shape, state.folder / "qwen", state.gpu.device, state.seed)
    written = time.perf_counter()
    state.tokens = topical_tokens(state.shape, state.prompt + state.steps, state.seed)
    state.bench = Bench(path, state.gpu)
    weights = state.bench.base.weights
    stored = int(state.bench.checkpoint.geometry.bytes_of.sum())
    return {
        "expert_bytes": stored,
        "write_s": written - began,
        "load_s": time.perf_counter() - written,
        "pinned_over_weights": weights.pinned_bytes / stored,
        "not_pinned": weights.describe(),
    }


def section_rivals(state: State) -> dict[str, Any]:
    path, device = state.folder / "qwen", state.gpu.device
    found, state.truth = run_whole(path, device, state.tokens, state.steps, state.gpu.synchronize)
    state.gpu.release()
    found["offload"] = run_offload(
        path, state.gpu, state.tokens, 2 if state.dry else 4, state.shape.bytes // 4, state.folder
    )
    state.gpu.release()
    return found


def section_policies(state: State) -> dict[str, Any]:
    return check_policies(state.need_bench(), state.shape, state.seed, state.steps, state.prompt, SHARES)


def section_simulated(state: State) -> dict[str, Any]:
    bench = state.need_bench()
    save_machine(state.machine, bench.base.hardware, state.found, state.shape.top_k, state.shape.expert_bytes)
    return check_simulated(bench, state.machine, state.found["policies"], state.folder / "trace.parquet")


def section_mixtral(state: State) -> dict[str, Any]:
    if state.bench is not None:
        state.bench.close()
        state.bench = None
        state.gpu.release()
    path = write_model(state.mixtral, state.folder / "mixtral", state.gpu.device, state.seed)
    bench = Bench(path, state.gpu)
    try:
        logits = check_logits(bench, topical_tokens(state.mixtral, 24, state.seed), 8, None)
        figures = check_policies(bench, state.mixtral, state.seed, max(4, state.steps // 4), 32, (0.25,))
        return {**figures, "correct": logits, "machine": vars(bench.base.hardware)}
    finally:
        bench.close()


def section_tests(state: State) -> dict[str, Any]:
    """The tests that are marked ``gpu``, in a process of their own; a dry run collects them only."""
    root = Path(__file__).resolve().parent.parent
    names = sorted(str(path) for path in (root / "tests/runtime").glob("test_cuda_*.py"))
    if not names:
        return {"skipped": "the tests are not here"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *names]
    if state.dry:
        command.append("--collect-only")
    done = subprocess.run(
        command,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS["tests"],
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    if done.returncode:
        raise RuntimeError(
            f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
        )
    return {"said": done.stdout.strip().splitlines()[-1]}


def section_kernels(_: State) -> dict[str, Any]:
    """The native kernels of the CPU, built if they are not there: without them the host's share is slow."""
    if native_library.library_path() is None:
        native_library.build()
    used, variant, fault = native_status()
    return {"used": used, "variant": variant, "fault": fault}


SECTIONS: tuple[tuple[str, Callable[[State], dict[str, Any]]], ...] = (
    ("kernels", section_kernels),
    ("model", section_model),
    ("link", lambda state: check_link(state.gpu, state.dry)),
    ("experts", lambda state: check_experts(state.need_bench())),
    ("rivals", section_rivals),
    ("correct", lambda state: check_logits(state.need_bench(), state.tokens, state.steps, state.truth)),
    ("overlap", lambda state: check_overlap(state.need_bench())),
    ("policies", section_policies),
    ("simulated", section_simulated),
    ("tests", section_tests),
    ("mixtral", section_mixtral),
)


class OutOfTimeError(Exception):
    """A section's time is over."""


def _ring(*_: object) -> None:
    raise OutOfTimeError


def run_sections(state: State, output: Path, minutes: float, only: list[str]) -> list[str]:
    """Run them one after another; returns the names of those that failed."""
    failed: list[str] = []
    ends = time.monotonic() + 60 * minutes
    signal.signal(signal.SIGALRM, _ring)
    for name, section in SECTIONS:
        left = ends - time.monotonic()
        if (only and name not in only) or left < 5:
            state.found[name] = {"skipped": "not asked for" if left >= 5 else "no time left"}
            continue
        began = time.monotonic()
        print(f"-- {name} (at most {min(SECONDS[name], left):.0f} s)", flush=True)
        signal.setitimer(signal.ITIMER_REAL, min(SECONDS[name], left))
        try:
            state.found[name] = section(state)
        except Exception as error:  # noqa: BLE001 - whatever it was, the next section says something else
            failed.append(name)
            state.found[name] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
            traceback.print_exc()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        state.found[name]["seconds"] = time.monotonic() - began
        print(f"   {json.dumps(state.found[name], default=str)[:1500]}", flush=True)
        output.write_text(json.dumps(state.found, default=str))
    return failed


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--folder", type=Path, help="where checkpoints are made: 32 GB")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--machine", type=Path, default=Path("machine.toml"))
    parser.add_argument("--minutes", type=float, default=7.8)
    parser.add_argument("--seed", type=int, help="of weights and tokens (default: a new one each time)")
    parser.add_argument("--only", action="append", default=[], choices=[name for name, _ in SECTIONS])
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    torch.manual_seed(0)
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "little")
    gpu: Gpu = CpuGpu() if options.dry_run else open_gpu()
    sizes = TINY if options.dry_run else LARGE
    if options.folder is not None:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        state = State(
            gpu=gpu,
            shape=sizes["qwen3_moe"],
            mixtral=sizes["mixtral"],
            folder=Path(folder),
            seed=seed,
            steps=6 if options.dry_run else 48,
            prompt=16 if options.dry_run else 256,
            dry=options.dry_run,
            machine=options.machine,
        )
        state.found["conditions"] = conditions(gpu)
        failed = run_sections(state, options.output, options.minutes, options.only)
        if state.bench is not None:
            state.bench.close()
        report(state.found, SHARES, failed, state.dry, state.seed)
    options.output.write_text(json.dumps(state.found, default=str))
    wrong = state.found.get("correct", {}).get("wrong") or []
    return 1 if failed or wrong else 0


def conditions(gpu: Gpu) -> dict[str, Any]:
    import transformers

    on_cuda = gpu.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(gpu.device) if on_cuda else "cpu (dry run)",
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    sys.exit(main())
