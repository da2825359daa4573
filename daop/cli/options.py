"""Options that several commands share: one name, one meaning and one help text each.

A command names them as types: ``ecr: options.Ecr = None``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from daop.runtime.policies.base import POLICIES


def runnable_policies() -> list[str]:
    """Policies that can run a model; those that know the future can only be simulated."""
    return [name for name, policy in POLICIES.items() if not policy.needs_future]


Model = Annotated[str, Argument(help="A folder of safetensors, or a hub id (owner/name).")]
Prompts = Annotated[Path | None, Option(metavar="FILE", help="Prompts: text, one a line, or .jsonl.")]
PromptFile = Annotated[Path, Option(metavar="FILE", help="Prompts: text, one a line, or .jsonl.")]
Limit = Annotated[int | None, Option(min=1, help="Use only so many prompts of the file.")]
MaxNewTokens = Annotated[int, Option(min=1, help="Tokens to generate for each answer, at most.")]
Policy = Annotated[
    str, Option(help=f"Placement policy: {', '.join(runnable_policies())}; or module:Class for your own.")
]
Tolerance = Annotated[
    float | None, Option(help="Short for --policy-option tolerance=..., of the policy bounded.")
]
PolicyOption = Annotated[list[str] | None, Option(metavar="NAME=VALUE", help="An option of the policy.")]
FastMemory = Annotated[
    str | None,
    Option(metavar="SIZE", help="Memory for resident experts, like 2GiB; auto (default): as many as fit."),
]
Ecr = Annotated[float | None, Option(help="Share of the experts that is resident instead, 0 to 1.")]
Device = Annotated[str, Option(help="Where experts are computed: host or cuda.")]
DirectIo = Annotated[bool, Option("--direct-io", help="Read past the page cache.")]
Dtype = Annotated[str | None, Option(help="Numbers outside the experts: bfloat16, float16 or float32.")]
Threads = Annotated[int | None, Option(min=1, help="Threads that compute (default: one a core).")]
Context = Annotated[int, Option(min=1, help="Tokens of a prompt and its answer to plan for.")]
Batch = Annotated[int, Option(min=1, help="Prompts that are run side by side.")]
Temperature = Annotated[float, Option(min=0.0, help="0: the likeliest token; above 0: sample.")]
Seed = Annotated[int, Option(min=0, help="Seed of the sampling.")]
ProfileFolder = Annotated[Path | None, Option(metavar="DIR", help="What training learnt from other traffic.")]
PredictorFolder = Annotated[
    Path | None, Option(metavar="DIR", help="A trained predictor (visits) for policies that forecast.")
]
Hardware = Annotated[
    str | None,
    Option(metavar="FILE", help="What things cost here: a .toml of daop calibrate. [the saved one, if any]"),
]
Exact = Annotated[bool, Option("--exact", help="Refuse policies whose output is approximate.")]
Json = Annotated[
    str | None, Option(metavar="FILE", help="Write every figure as JSON; - for standard output.")
]
Html = Annotated[
    Path | None, Option(metavar="FILE", help="Write a report to read in a browser, in one file.")
]
Timeline = Annotated[
    Path | None, Option(metavar="FILE", help="Write what happened when, for ui.perfetto.dev (Chrome trace).")
]
Force = Annotated[bool, Option(help="Replace the output if it exists.")]


def sampling(temperature: float) -> dict[str, Any]:
    """``--temperature`` as transformers' ``generate`` takes it."""
    return {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
