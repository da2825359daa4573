"""Does the simulator say what the executor does? A run on the device ``host``, and the same run simulated.

The run's routing is recorded, the machine is calibrated, and the trace is replayed with the same policy, as
many slots and the calibrated costs. Hits of policies whose decisions look at no clock must be equal to the
last one; tokens per second as far as the machine is steady. A disk may not be: one in a cloud gave between
0.85 and 2.1 GB/s within an hour. So every run's own reads are timed too, and the run is simulated twice: with
the calibrated disk, and with a disk that takes as long for an expert as it took in that run.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from daop import api
from daop.comparison import traffic_of
from daop.core import Geometry
from daop.prompts import Prompt, encode
from daop.report.figures import run_figures
from daop.runtime.calibrate import Calibration
from daop.runtime.costs import Hardware, HardwareCosts
from daop.runtime.policies.base import make_policy
from daop.runtime.profile import Profile
from daop.runtime.sim_forecasts import OnlineForecaster
from daop.runtime.simulator import Simulator
from daop.runtime.watching import Busy, Watcher
from daop.training.parquet import read_trace

WHOLE = 1 << 30  # the executor runs a prompt in one pass, however long

CLOCKLESS = frozenset(
    {"on_demand", "static", "static_front", "static_frequency", "lru", "lru_per_layer", "lfu"}
)
"""Policies that look at no clock, no queue and no forecast: the same trace gives the same decisions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One run, measured and simulated, as JSON-ready figures; ``link_gbs``: the disk during the run."""

    policy: str
    ecr: float
    measured: dict[str, Any]
    simulated: dict[str, Any]
    simulated_with_calibration: dict[str, Any]
    link_gbs: float

    @property
    def ratio(self) -> float:
        """Simulated over measured tokens per second, the disk as it was during the run."""
        return float(self.simulated["tokens_per_second"] / self.measured["tokens_per_second"])

    @property
    def ratio_with_calibration(self) -> float:
        """The same, the disk as it was calibrated."""
        speed = self.simulated_with_calibration["tokens_per_second"]
        return float(speed / self.measured["tokens_per_second"])

    @property
    def same_hits(self) -> bool:
        """Whether hits, misses, late prefetches and hit rates of every layer are equal."""
        names = ("requests", "hit_rate", "hit_rate_prefill", "hit_rate_by_layer")
        return all(self.measured[name] == self.simulated[name] for name in names)


def run_and_replay(
    model: str | Path,
    asked: Sequence[Prompt | list[int]],
    policy: str,
    ecr: float,
    calibration: Calibration,
    *,
    profile: Profile | None = None,
    max_new_tokens: int = 24,
    direct_io: bool = True,
) -> Comparison:
    """Run, record and simulate. ``asked``: prompts, or their token ids."""
    disk = Disk()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "run.parquet"
        told = make_policy(policy, profile)
        with api.load(
            model, policy=told, ecr=ecr, direct_io=direct_io, trace=trace, watchers=[disk]
        ) as runtime:
            runtime.reset_statistics()
            ids = [
                p if isinstance(p, list) else encode(p.messages, runtime.tokenizer, p.source) for p in asked
            ]
            answers = [runtime.generate([one], max_new_tokens) for one in ids]
            measured = run_figures(runtime.statistics(), answers)
            geometry = runtime.geometry
        seen = disk.during(calibration.hardware, calibration.expert_bytes)
        found = []
        for hardware in (seen, calibration.hardware):
            costs = HardwareCosts(hardware, geometry, calibration.weight_bits, calibration.format)
            found.append(replay(trace, geometry, costs, policy, measured["slots"], profile))
    return Comparison(
        policy=policy,
        ecr=ecr,
        measured=measured,
        simulated=found[0],
        simulated_with_calibration=found[1],
        link_gbs=seen.link_gbs,
    )


def replay(
    trace: Path, geometry: Geometry, costs: HardwareCosts, policy: str, slots: int, profile: Profile | None
) -> dict[str, Any]:
    """What a recorded run would have been on a machine of these costs."""
    told = make_policy(policy, profile)
    forecaster = OnlineForecaster(geometry, profile) if told.horizon else None
    run = Simulator(told, geometry, costs, slots, forecaster).run(
        traffic_of(read_trace(trace), geometry), prefill_chunk=WHOLE
    )
    return run.as_dict()


class Disk(Watcher):
    """Notes when the reading threads were busy with which experts."""

    def __init__(self) -> None:
        self._reads: list[tuple[float, float]] = []

    def reset(self) -> None:
        self._reads = []

    def span(self, busy: Busy) -> None:
        if busy.track == "disk":
            self._reads.append((busy.begin, busy.end))

    def during(self, hardware: Hardware, expert_bytes: int) -> Hardware:
        """The machine with the bandwidth that the reads had: time in which any was under way, less one
        latency each time that the first of some began, by the number of experts."""
        reads = sorted(self._reads)
        if not reads:
            return hardware
        busy, bursts, until = 0.0, 0, float("-inf")
        for begin, end in reads:
            bursts += begin > until
            busy += max(0.0, end - max(begin, until))
            until = max(until, end)
        own = (busy - bursts * hardware.link_latency_us * 1e-6) / len(reads)
        return dataclasses.replace(hardware, link_gbs=expert_bytes / max(own, busy / len(reads) / 4) / 1e9)
