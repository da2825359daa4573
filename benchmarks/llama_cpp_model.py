"""A whole model, all experts resident: decode on daop and on llama.cpp, equal weights, and what takes time.

    python benchmarks/llama_cpp_model.py FOLDER [--format bf16 int8 int4] [--tokens 24] [--repeats 5]
                                         [--threads 2] [--prepare]

FOLDER keeps the random qwen3_moe of ``decode_resident.py``, its packs and their GGUF files; what is missing
there is written first (9 GB in all). llama.cpp's experts are BF16, Q8_0 and Q4_0 made from daop's own
numbers, everything else is BF16 on both sides; the KV cache is FP16 there, BF16 here. Before anything is
timed, llama.cpp is given daop's greedy answer token by token and its logits are compared with daop's at each.

In every repeat, one after the other, each side in a process of its own: daop, transformers' model with
experts that do nothing, daop's experts alone (one layer's, times the layers), llama.cpp, its experts alone.
Tokens/s are 1 / the median of an answer's tokens after the first; ratios are formed within each repeat.
Prints a table and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_resident import random_model
from llama_cpp_common import GGML_NAMES, Side, bindings
from llama_cpp_experts import Ours, Task, Theirs, begin, calling, seconds
from llama_cpp_gguf import write_gguf
from numpy.typing import NDArray

import daop
from daop.generation import generate
from daop.runtime.checkpoint import open_checkpoint
from daop.runtime.model import build_model
from daop.runtime.packing import pack

PROMPT = list(range(100, 132))
CONTEXT = 512
TOLERANCE = 0.03  # of the logits' norm: both sides round to BF16 or 8 bits on the way, at different places
Floats = NDArray[np.float32]
KEPT: dict[str, Any] = {}  # of a process: the model that it has open


def prepare(folder: Path, formats: list[str]) -> dict[str, tuple[Path, Path]]:
    """(folder for daop, file for llama.cpp) of each format; written if missing."""
    source = folder / "bf16"
    if not (source / "config.json").exists():
        random_model(str(source))
    found = {}
    for name in formats:
        model, gguf = folder / name, folder / f"{name}.gguf"
        if name != "bf16" and not (model / "daop-pack.json").exists():
            pack(open_checkpoint(source), model, dtype=name, told=lambda what, share: None)
        if not gguf.exists():
            write_gguf(model, gguf)
        found[name] = model, gguf
    return found


def open_ours(path: Path, threads: int) -> None:
    close()
    torch.set_num_threads(threads)
    nothing: Any = build_model(open_checkpoint(path), lambda layer, hidden, ids, weights: hidden).model
    KEPT["nothing"] = nothing
    KEPT["runtime"] = daop.load(path, policy="static", ecr=1.0, threads=threads)


def close() -> None:
    if "runtime" in KEPT:
        KEPT["runtime"].close()
    if "context" in KEPT:
        llama = bindings()
        llama.llama_free(KEPT["context"])
        llama.llama_model_free(KEPT["model"])
    KEPT.clear()


def ours_decodes(tokens: int) -> float:
    """Seconds a token."""
    runtime: daop.Runtime = KEPT["runtime"]
    return statistics.median(runtime.generate([PROMPT], tokens)[0].tpot_s)


def nothing_decodes(tokens: int) -> float:
    return statistics.median(generate(KEPT["nothing"], None, [PROMPT], max_new_tokens=tokens)[0].tpot_s)


def products(rounds: int) -> float:
    """Seconds of all products outside the experts (attention, routers, output layer), of one token."""
    linears = [module for module in KEPT["nothing"].modules() if isinstance(module, torch.nn.Linear)]
    inputs = [torch.ones(1, 1, module.in_features, dtype=module.weight.dtype) for module in linears]
    taken = []
    with torch.no_grad():
        for _ in range(rounds):
            began = time.perf_counter()
            for module, x in zip(linears, inputs, strict=True):
                module(x)
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def ours_answers(tokens: int) -> tuple[list[int], Floats]:
    """A greedy answer, and the logits [tokens, vocabulary] that chose it."""
    runtime = KEPT["runtime"]
    answer: list[int] = runtime.generate([PROMPT], tokens)[0].token_ids
    with torch.no_grad():
        logits = runtime.model(torch.tensor([PROMPT + answer[:-1]])).logits[0, len(PROMPT) - 1 :]
    return answer, logits.float().numpy()


def open_theirs(path: Path, threads: int) -> None:
    close()
    llama = bindings()
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    settings = llama.llama_context_default_params()
    settings.n_ctx = CONTEXT
    settings.n_threads = settings.n_threads_batch = threads
    KEPT.update(model=model, context=llama.llama_init_from_model(model, settings))
    vocabulary = llama.llama_model_get_vocab(model)
    KEPT["vocabulary"] = llama.llama_vocab_n_tokens(vocabulary)


def step(tokens: list[int]) -> Floats:
    """Append tokens; the last one's logits."""
    llama, context = bindings(), KEPT["context"]
    ids = (ctypes.c_int32 * len(tokens))(*tokens)  # the batch only points at it
    if llama.llama_decode(context, llama.llama_batch_get_one(ids, len(tokens))):
        raise RuntimeError("llama.cpp could not decode")
    return np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), (KEPT["vocabulary"],))


def forget() -> None:
    llama = bindings()
    llama.llama_memory_clear(llama.llama_get_memory(KEPT["context"]), True)


def theirs_decodes(tokens: int) -> float:
    forget()
    token, taken = int(step(PROMPT).argmax()), []
    for _ in range(tokens - 1):
        began = time.perf_counter()
        token = int(step([token]).argmax())
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def theirs_follows(answer: list[int]) -> Floats:
    """The logits that llama.cpp has at every token of daop's answer."""
    forget()
    rows = [step(PROMPT).copy()]
    for token in answer[:-1]:
        rows.append(step([token]).copy())
    return np.stack(rows)


def check(ours: Side, theirs: Side, tokens: int) -> dict[str, float]:
    """How far the two sides' logits are apart, and how often their greedy token is the same."""
    answer, mine = ours.call(ours_answers, tokens)
    other = theirs.call(theirs_follows, answer)
    apart = float(np.linalg.norm(mine - other) / np.linalg.norm(mine))
    equal = float((mine.argmax(-1) == other.argmax(-1)).mean())
    if apart > TOLERANCE:
        raise SystemExit(f"not the same model: logits differ by {apart:.1%} of their norm")
    return {"logits_apart": apart, "equal_greedy_tokens": equal}


def measure(sides: dict[str, Side], layers: int, tokens: int, repeats: int) -> dict[str, float]:
    """Milliseconds a token of everything, and the ratios; the first round only warms up."""
    rows = []
    for repeat in range(repeats + 1):
        rows.append(
            {
                "daop": sides["daop"].call(ours_decodes, tokens),
                "transformers_rest": sides["daop"].call(nothing_decodes, tokens),
                "transformers_products": sides["daop"].call(products, tokens),
                "daop_experts": layers * sides["daop experts"].call(seconds, "run", 1, repeat),
                "daop_calling": layers * sides["daop experts"].call(calling, repeat, sides["daop"].threads),
                "read": layers * sides["daop experts"].call(seconds, "read", 1, repeat),
                "llama": sides["llama.cpp"].call(theirs_decodes, tokens),
                "llama_experts": layers * sides["llama.cpp experts"].call(seconds, "run", 1, repeat),
            }
        )
    del rows[0]
    found = {f"{name}_ms": 1e3 * statistics.median(row[name] for row in rows) for name in rows[0]}
    own = [row["daop"] - row["transformers_rest"] - row["daop_experts"] for row in rows]
    rest = [row["llama"] - row["llama_experts"] for row in rows]
    found |= {"daop_own_ms": 1e3 * statistics.median(own), "llama_rest_ms": 1e3 * statistics.median(rest)}
    ratios = [row["llama"] / row["daop"] for row in rows]
    found |= {
        "times_llama": statistics.median(ratios),
        "times_llama_min": min(ratios),
        "times_llama_max": max(ratios),
    }
    return found | {
        "daop_tokens_per_s": 1e3 / found["daop_ms"],
        "llama_tokens_per_s": 1e3 / found["llama_ms"],
    }


def show(name: str, got: dict[str, float]) -> None:
    inside = got["transformers_products_ms"]
    print(
        f"{name}: daop {got['daop_tokens_per_s']:.1f} tokens/s, llama.cpp {GGML_NAMES[name]} "
        f"{got['llama_tokens_per_s']:.1f}; daop {got['times_llama']:.2f} x ({got['times_llama_min']:.2f} .. "
        f"{got['times_llama_max']:.2f}); logits {got['logits_apart']:.2%} apart, "
        f"{got['equal_greedy_tokens']:.0%} of greedy tokens equal"
    )
    print(
        f"      ms a token: daop {got['daop_ms']:.1f} = experts {got['daop_experts_ms']:.1f} "
        f"({got['daop_calling_ms']:.1f} of it calling them) + transformers {got['transformers_rest_ms']:.1f} "
        f"({inside:.1f} of it products) + between them {got['daop_own_ms']:.1f}"
    )
    print(
        f"      llama.cpp {got['llama_ms']:.1f} = experts {got['llama_experts_ms']:.1f} + the rest "
        f"{got['llama_rest_ms']:.1f}; reading experts {got['read_ms']:.1f}"
    )


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--format", nargs="+", default=["bf16", "int8", "int4"], choices=["bf16", "int8", "int4"]
    )
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prepare", action="store_true", help="write what is missing in FOLDER, and end")
    options = parser.parse_args()
    bindings()
    options.folder.mkdir(parents=True, exist_ok=True)
    files = prepare(options.folder, options.format)
    if options.prepare:
        return
    sides = {
        name: Side(options.threads) for name in ("daop", "llama.cpp", "daop experts", "llama.cpp experts")
    }
    results: list[dict[str, object]] = []
    for name, (model, gguf) in files.items():
        geometry = open_checkpoint(model).geometry
        config: Any = json.loads((model / "config.json").read_text())
        task = Task(
            config["hidden_size"], config["moe_intermediate_size"], geometry.top_k, geometry.experts[0], name
        )
        sides["daop"].call(open_ours, model, options.threads)
        sides["llama.cpp"].call(open_theirs, gguf, options.threads)
        said = [
            sides[f"{side} experts"].call(begin, kind, task, options.threads)
            for side, kind in (("daop", Ours), ("llama.cpp", Theirs))
        ]
        if not results:
            print(
                f"{' beside '.join(said)}, {options.threads} threads, {options.repeats} repeats, "
                f"{len(PROMPT)} + {options.tokens} tokens"
            )
        got = check(sides["daop"], sides["llama.cpp"], options.tokens)
        got |= measure(sides, geometry.layers, options.tokens, options.repeats)
        show(name, got)
        results.append({"format": name, **got})
    for side in sides.values():
        side.call(close)
        side.close()
    print(json.dumps({"benchmark": "llama_cpp_model", "threads": options.threads, "results": results}))


if __name__ == "__main__":
    main()
