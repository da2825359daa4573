"""``daop trace capture``: run prompts through a model and record its routing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from daop.cli.output import Output, mended

if TYPE_CHECKING:
    from daop.core import Geometry
    from daop.training.recorder import TraceRecorder


def capture(
    model: Annotated[str, Argument(help="A folder of safetensors, or a hub id (owner/name).")],
    prompts: Annotated[Path, Option(metavar="FILE", help="Prompts: text, one a line, or .jsonl.")],
    output: Annotated[Path, Option("-o", "--output", help="The trace file to write.")],
    limit: Annotated[int | None, Option(min=1, help="Use only so many prompts of the file.")] = None,
    max_new_tokens: Annotated[int, Option(min=1, help="Tokens to generate for each prompt, at most.")] = 64,
    features: Annotated[
        bool, Option("--features", help="Also keep a sample of the routers' inputs beside the trace.")
    ] = False,
    feature_bytes: Annotated[
        str, Option(metavar="SIZE", help="At most so much of them; generated tokens are drawn at random.")
    ] = "256MiB",
    token_ids: Annotated[bool, Option("--token-ids", help="Also store the input tokens' ids.")] = False,
    fast_memory: Annotated[
        str | None, Option(metavar="SIZE", help="Memory for resident experts (default: as fits).")
    ] = None,
    ecr: Annotated[float | None, Option(help="Share of the experts that is resident instead.")] = None,
    context: Annotated[int, Option(min=1, help="Tokens of a prompt and its answer to plan for.")] = 2048,
    batch: Annotated[int, Option(min=1, help="Prompts side by side; 1 with --features.")] = 1,
    temperature: Annotated[float, Option(min=0.0, help="0: the likeliest token; above 0: sample.")] = 0.0,
    seed: Annotated[int, Option(min=0, help="Seed of the sampling.")] = 0,
    json: Annotated[
        str | None, Option(metavar="FILE", help="What was recorded; - for standard output.")
    ] = None,
) -> None:
    """Run prompts through a model and record which experts it chooses."""
    from daop.config import fast_memory_bytes
    from daop.core import DaopError
    from daop.prompts import encode, read_prompts

    out = Output(json)
    if features and batch > 1:
        raise DaopError("--features needs --batch 1: padded rows could not be told apart")
    if output.exists():
        raise DaopError(f"{output} exists; name another -o")
    asked = read_prompts(prompts, limit)
    recorders: list[TraceRecorder] = []

    def make(geometry: Geometry) -> TraceRecorder:
        recorders.append(_recorder(output, geometry, model, token_ids, feature_bytes if features else None))
        return recorders[0]

    import daop

    start = time.perf_counter()
    options: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
    with mended():
        runtime = daop.load(
            model,
            fast_memory=fast_memory_bytes(fast_memory),
            ecr=ecr,
            context=context,
            batch=min(batch, len(asked)),
            seed=seed,
            recorder=make,
        )
        with runtime, out.progress() as progress:
            _attach(recorders[0], runtime.model)
            for first in range(0, len(asked), batch):
                progress(f"prompt {first + 1} of {len(asked)}", first / len(asked))
                group = asked[first : first + batch]
                ids = [encode(p.messages, runtime.tokenizer, p.source) for p in group]
                too_long = max(len(i) for i in ids) + max_new_tokens - context
                if too_long > 0:
                    raise DaopError(
                        f"{group[0].source}: a prompt and its answer take {too_long} tokens more than "
                        f"--context {context}; raise it, or lower --max-new-tokens"
                    )
                runtime.generate(ids, max_new_tokens, **options)
    seconds = time.perf_counter() - start
    tokens = recorders[0].tokens
    out.say(f"{output}: {tokens} tokens of {len(asked)} prompts in {seconds:.1f} s")
    out.json({"trace": str(output), "tokens": tokens, "sequences": len(asked), "seconds": seconds})


def _recorder(
    path: Path, geometry: Geometry, model: str, token_ids: bool, feature_bytes: str | None
) -> TraceRecorder:
    from daop.training.features import FeatureRecorder
    from daop.training.recorder import TraceRecorder
    from daop.units import parse_size

    source = {"format": "daop", "model": Path(model).name}
    if feature_bytes is None:
        return TraceRecorder(path, geometry, source=source, store_token_ids=token_ids)
    limit = parse_size(feature_bytes, "--feature-bytes")
    return FeatureRecorder(path, geometry, source=source, store_token_ids=token_ids, max_bytes=limit)


def _attach(recorder: TraceRecorder, model: Any) -> None:
    from daop.training.features import FeatureRecorder

    if isinstance(recorder, FeatureRecorder):
        recorder.attach(model)
