"""Counters and histograms of a run in Prometheus's conventions, for a server to expose.

    metrics = Metrics()
    runtime = daop.load(model, watchers=[metrics])
    metrics.register()                  # with prometheus-client's registry, which a server exposes
    text = metrics.text()               # or as text, without any registry

Counters are read from the run's statistics when somebody asks, so they cost the run nothing; only the
histograms are kept while it goes on. Needs ``pip install 'daop[metrics]'``. ``DOCUMENTATION`` lists all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from daop.core import DaopError, Phase, Step

from .watching import Watcher

if TYPE_CHECKING:
    from .conductor import Conductor, Work

DOCUMENTATION = {
    "daop_expert_hits_total": "Experts that were in fast memory when the router chose them, by phase",
    "daop_expert_misses_total": "Experts that were not in fast memory nor on their way, by phase",
    "daop_expert_late_total": "Experts whose prefetch was still under way, by phase",
    "daop_prefetches_total": "Prefetches by fate; 'issued' counts all",
    "daop_moved_bytes_total": "Bytes of experts moved into fast memory, by cause or fate",
    "daop_stall_seconds_total": "Time in which a layer could only wait, by cause",
    "daop_compute_seconds_total": "Time of computing routed experts",
    "daop_tokens_total": "Tokens run through the model, by phase",
    "daop_resident_experts": "Slots of fast memory in use",
    "daop_slots": "Slots of fast memory",
    "daop_prefetching": "1 while the policy looks ahead, 0 while it has switched that off",
    "daop_forward_seconds": "Time of a forward pass, first layer to last, by phase",
    "daop_layer_stall_seconds": "Stall of a layer that had to wait",
}
BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper ends in seconds."""


class Histogram:
    """Counts of observations by bucket, the last for all that are beyond ``BUCKETS``."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulated, as Prometheus wants them."""
        total, out = 0, []
        for end, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            total += count
            out.append((end, float(total)))
        return out


class Metrics(Watcher):
    """Watches one run; ``collect`` is what prometheus-client calls a collector's."""

    def __init__(self) -> None:
        self._conductor: Conductor | None = None
        self._phase = Phase.PREFILL
        self._began = 0.0
        self._tokens = dict.fromkeys(Phase, 0)
        self._forward = {phase: Histogram() for phase in Phase}
        self._stall = Histogram()

    def register(self, registry: Any = None) -> None:
        """With prometheus-client's default registry, or another."""
        library = _prometheus()
        (registry or library.REGISTRY).register(self)

    def text(self) -> str:
        """In Prometheus's text format."""
        library = _prometheus()
        registry = library.CollectorRegistry()
        registry.register(self)
        out: str = library.generate_latest(registry).decode()
        return out

    # -- watching --------------------------------------------------------------------------------

    def attach(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self._last = conductor.residency.geometry.layers - 1
        self._engine = conductor.engine

    def begin(self, phase: Phase, rows: int) -> None:
        self._phase, self._began = phase, self._engine.now
        self._tokens[phase] += rows

    def finished(self, step: Step, work: Work, stall_seconds: float, compute_seconds: float) -> None:
        if stall_seconds > 0:
            self._stall.observe(stall_seconds)
        if step.layer == self._last:
            self._forward[self._phase].observe(self._engine.now - self._began)

    # -- telling ---------------------------------------------------------------------------------

    def collect(self) -> Iterator[Any]:
        """Metric families of prometheus-client."""
        core = _prometheus().core
        conductor = self._conductor
        if conductor is None:
            return
        statistics, residency = conductor.statistics, conductor.residency
        by_phase = {
            "daop_expert_hits_total": statistics.hits,
            "daop_expert_misses_total": statistics.misses,
            "daop_expert_late_total": statistics.lates,
        }
        for name, counts in by_phase.items():
            yield self._counter(name, "phase", dict(zip(map(str, Phase), counts.sum(axis=1), strict=True)))
        yield self._counter("daop_tokens_total", "phase", {str(p): n for p, n in self._tokens.items()})
        yield self._counter("daop_prefetches_total", "fate", statistics.prefetches)
        moved = {what: n for what, n in statistics.bytes.as_dict().items() if what != "pending"}
        yield self._counter("daop_moved_bytes_total", "cause", moved)
        yield self._counter("daop_stall_seconds_total", "cause", statistics.stall_seconds)
        yield self._counter("daop_compute_seconds_total", "", {"": statistics.compute_seconds})
        gauges = {
            "daop_resident_experts": residency.used_slots,
            "daop_slots": residency.capacity,
            "daop_prefetching": int(conductor.policy.prefetching),
        }
        for name, value in gauges.items():
            yield core.GaugeMetricFamily(name, DOCUMENTATION[name], value=value)
        name = "daop_forward_seconds"
        family = core.HistogramMetricFamily(name, DOCUMENTATION[name], labels=["phase"])
        for phase, histogram in self._forward.items():
            family.add_metric([str(phase)], histogram.buckets(), histogram.sum)
        yield family
        name = "daop_layer_stall_seconds"
        yield core.HistogramMetricFamily(
            name, DOCUMENTATION[name], buckets=self._stall.buckets(), sum_value=self._stall.sum
        )

    def _counter(self, name: str, label: str, values: dict[str, Any]) -> Any:
        labels: Sequence[str] = [label] if label else []
        family = _prometheus().core.CounterMetricFamily(name, DOCUMENTATION[name], labels=labels)
        for value, count in values.items():
            family.add_metric([value] if label else [], float(count))
        return family


def _prometheus() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise DaopError("metrics need prometheus-client: pip install 'daop[metrics]'") from error
    return prometheus_client
