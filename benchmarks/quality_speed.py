"""Speed against quality of the policies that change the output, on one model and one text.

    python benchmarks/quality_speed.py MODEL --text FILE --profile DIR [-o quality_speed.svg]

Quality is measured: windows of the text are fed to the exact run and to each policy (``daop.quality``). Speed
is simulated on the exact run's own recorded routing, weights, forecasts and distances, on DAOP's machine with
its experts of 352 MB: an expert on the CPU 8.5 ms, a copy 210 ms (pageable, as published) or 14 ms (pinned).
DAOP's first forecasting layer is 4 of its 32; both 4 and the same share of this model's layers are run.

The profile is one that ``daop train`` made from a trace with features of *other* text. Prints a table, writes
a plot (needs matplotlib) if ``-o`` is given, and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import daop
from daop.comparison import traffic_of
from daop.core import Geometry
from daop.hardware import load
from daop.quality import Batch, Quality, Spool, measure, teacher, windows
from daop.runtime.costs import Hardware, HardwareCosts
from daop.runtime.policies.base import make_policy
from daop.runtime.profile import Profile
from daop.runtime.sim_traffic import Traffic
from daop.runtime.simulator import Simulator
from daop.training.parquet import read_trace

EXPERT_BYTES = 352_321_536
SHARES = (0.25, 0.469)
EXACT = ("fiddler", "prefill_swap", "adaptive")
TOLERANCES = (0.1, 0.15, 0.2, 0.3)


def candidates(layers: int) -> list[tuple[str, dict[str, Any]]]:
    """Policy and options of every row."""
    scaled = max(1, round(layers * 4 / 32))
    return [
        ("daop", {"first": 4}),
        ("daop", {"first": scaled}),
        ("deferral", {}),
        *(("bounded", {"tolerance": tolerance}) for tolerance in TOLERANCES),
    ]


def machines() -> list[Hardware]:
    """DAOP's machine, with its pageable copies and with pinned ones."""
    known = load("a6000").hardware
    assert known.link_pageable_gbs is not None
    slow = replace(known, name="a6000, pageable", link_gbs=known.link_pageable_gbs)
    return [slow, replace(known, name="a6000, pinned")]


def speed(
    name: str, options: dict[str, Any], traffic: Traffic, known: Profile, share: float, on: Hardware
) -> float:
    """Simulated tokens per second of decode at batch 1."""
    from daop.runtime.sim_forecasts import OnlineForecaster

    geometry = traffic.geometry
    policy = make_policy(name, known, options)
    forecaster = OnlineForecaster(geometry, known) if policy.horizon else None
    simulator = Simulator(
        policy, geometry, HardwareCosts(on, geometry), round(geometry.total * share), forecaster
    )
    return simulator.run(traffic).tokens_per_second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=48)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("-o", "--plot", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        spool, batches, traffic, known = exact_run(options, Path(folder))
        for share in SHARES:
            speeds = {
                (on.name, name): speed(name, {}, traffic, known, share, on)
                for on in machines()
                for name in EXACT
            }
            for name, chosen in [*((name, {}) for name in EXACT), *candidates(traffic.geometry.layers)]:
                row: dict[str, Any] = {"policy": name, "options": chosen, "ecr": share}
                for on in machines():
                    found = speeds.get((on.name, name)) or speed(name, chosen, traffic, known, share, on)
                    row[on.name] = {
                        "tokens_per_second": found,
                        "of_fiddler": found / speeds[on.name, "fiddler"],
                    }
                if name not in EXACT:
                    row["quality"] = judge(options, name, chosen, share, spool, batches).as_dict()
                rows.append(row)
                print(line(row), flush=True)
    if options.plot:
        plot(rows, options.plot)
    about = {"window": options.window, "prefill": options.prefill, "batch": options.batch}
    print(json.dumps({"benchmark": "quality_speed", "simulated_speed": True, **about, "rows": rows}))


def exact_run(options: argparse.Namespace, folder: Path) -> tuple[Spool, list[Batch], Traffic, Profile]:
    """The reference: its logits, and its traffic with what was foretold of each layer."""
    trace = folder / "exact.parquet"
    spool = Spool(folder)
    with daop.load(
        options.model, policy="static", ecr=1.0, profile=options.profile, trace=trace, trace_distances=True
    ) as runtime:
        text = options.text.read_text(encoding="utf-8")
        batches = windows(
            runtime.tokenizer(text, verbose=False)["input_ids"],
            length=options.window,
            prompt=options.prefill,
            batch=options.batch,
            limit=options.limit,
        )
        score = teacher(runtime)
        for batch in batches:
            spool.keep(batch, score(batch))
    recorded = read_trace(trace).grouped()
    geometry: Geometry = replace(recorded.geometry, expert_bytes=(EXPERT_BYTES,) * recorded.geometry.layers)
    return spool, batches, traffic_of(recorded, geometry), Profile.load(options.profile, geometry)


def judge(
    options: argparse.Namespace,
    name: str,
    chosen: dict[str, Any],
    share: float,
    spool: Spool,
    batches: list[Batch],
) -> Quality:
    with daop.load(
        options.model, policy=name, policy_options=chosen, ecr=share, profile=options.profile
    ) as runtime:
        return measure(spool, teacher(runtime), batches)


def line(row: dict[str, Any]) -> str:
    """A row for a person."""
    asked = ",".join(f"{key}={value:g}" for key, value in row["options"].items())
    speeds = "  ".join(f"x{row[on.name]['of_fiddler']:.3f}" for on in machines())
    text = f"ECR {row['ecr']:<6g}{row['policy']:>13} {asked:<15} {speeds}"
    if "quality" not in row:
        return f"{text}  exact"
    q = row["quality"]
    kl, changed, calls = (q[name] for name in ("mean_kl", "changed_tokens", "approximated"))
    return (
        f"{text}  KL {kl['value']:.2e} [{kl['low']:.2e}, {kl['high']:.2e}] p99 {q['p99_kl']['value']:.3f}"
        f"  changed {changed['value']:.1%}  calls {calls['value']:.1%}"
        f"  ppl {q['perplexity']['value']:.2f} ({q['perplexity_reference']['value']:.2f})"
    )


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Speed of fiddler's against KL divergence, a panel for each machine; exact policies at the left."""
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.fonttype"] = "none"
    pyplot.rcParams["svg.hashsalt"] = "daop"
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 5))
    colours = {"daop": "tab:red", "deferral": "tab:orange", "bounded": "tab:blue"}
    colours |= {"fiddler": "tab:gray", "prefill_swap": "tab:brown", "adaptive": "tab:green"}
    for panel, on in zip(panels, machines(), strict=True):
        for row in rows:
            kl = row["quality"]["mean_kl"]["value"] if "quality" in row else 0.0
            marker = "o" if row["ecr"] == SHARES[0] else "s"
            panel.plot(kl, row[on.name]["of_fiddler"], marker, color=colours[row["policy"]])
            told = ",".join(f"{value:g}" for value in row["options"].values())
            if "tolerance" in row["options"] and row["options"]["tolerance"] not in (0.1, 0.3):
                continue  # between its neighbours
            panel.annotate(
                f" {row['policy']} {told}",
                (kl, row[on.name]["of_fiddler"]),
                fontsize=6,
                color=colours[row["policy"]],
            )
        panel.set_xscale("symlog", linthresh=2e-4)
        panel.set_xlim(left=-2e-5)
        panel.set_xlabel("mean KL(exact || policy), nats a token")
        panel.set_ylabel("speed, of fiddler's (simulated)")
        panel.set_title(f"{on.name}; circles ECR {SHARES[0]:g}, squares {SHARES[1]:g}", fontsize=9)
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
