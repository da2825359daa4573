"""Discrete events on a virtual clock: the same policies and bookkeeping, without bytes or threads.

Of one layer of one forward pass:

    attention, norms, router        on the device                             costs.layer
    the policy decides              on the main thread, everything waits      policy.plan_us
    demand is asked for, speculation and forecasts are made while the rest runs
    device                          what is ready, then what arrives, in order of arrival
    host pool                       what is computed where it lies (tier ``device`` only)
    the layer ends when device, host pool and main thread have ended

Deterministic: equal inputs give equal outputs, to the last digit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from daop.core import DaopError, Forecast, Geometry, Phase, Step

from .conductor import Conductor, Work
from .costs import HardwareCosts, stretched
from .policies.approximate import Approximate
from .policies.base import Policy
from .residency import Residency, share_by_class
from .sim_early import SimulatedEarly
from .sim_engine import VirtualEngine
from .sim_forecasts import Forecaster
from .sim_run import Run
from .sim_traffic import Forward, Traffic, forwards
from .statistics import Statistics
from .watching import Busy, Watcher


class Simulator:
    """Runs one policy over traffic on a described machine, with ``slots`` experts in fast memory."""

    def __init__(
        self,
        policy: Policy,
        geometry: Geometry,
        costs: HardwareCosts,
        slots: int,
        forecaster: Forecaster | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        if not 0 <= slots <= geometry.total:
            raise DaopError(f"a budget of {slots} experts is impossible: the model has {geometry.total}")
        self.geometry = geometry
        self.costs = costs
        self.policy = policy
        self.engine = VirtualEngine(
            costs.link_seconds,
            costs.chunk_seconds,
            costs.link_delay,
            "link in" if costs.host_beside else "disk",
        )
        self.statistics = Statistics(geometry)
        classes = sorted(set(geometry.expert_bytes))
        self.residency = Residency(
            geometry,
            share_by_class(geometry, slots),
            [classes.index(size) for size in geometry.expert_bytes],
        )
        self.conductor = Conductor(policy, self.residency, self.engine, costs, self.statistics, watchers)
        if watchers:
            self.engine.span = self.conductor.span
        self.result = Run(self.statistics)
        self._watched = bool(watchers)
        self._forecaster = forecaster if policy.horizon else None
        self._reads = not costs.host_beside
        self._looks = type(policy).look_ahead is not Policy.look_ahead
        self._one = [costs.device(flat, 1) for flat in range(geometry.total)]
        self._forward = 0
        self._early: SimulatedEarly | None = None

    def run(self, traffic: Traffic, batch: int = 1, prefill_chunk: int = 512) -> Run:
        """Load the start's experts, then serve the whole trace."""
        passes: Iterable[Forward] = forwards(traffic, batch, prefill_chunk)
        if self.policy.needs_future:
            passes = list(passes)
            self.policy.foresee([experts for forward in passes for experts in forward.experts])
        if isinstance(self.policy, Approximate):
            self._early = SimulatedEarly(
                self.policy, traffic, self.costs, self.engine, self.residency, self.statistics
            )
        self.start()
        for forward in passes:
            self.forward(forward)
        return self.finish()

    def start(self) -> None:
        """Load what the policy wants before the first token; the clock of the run begins after it."""
        engine = self.engine
        for flat in self.conductor.start():
            engine.now = max(engine.now, engine.arrives_at.pop(flat))
            self.conductor.arrived(flat)
        self._began = engine.now
        engine.busy_seconds = 0.0

    def finish(self) -> Run:
        self.statistics.bytes.pending = self.conductor.pending_bytes
        self.result.seconds = self.engine.now - self._began
        self.result.link_busy_seconds = self.engine.busy_seconds
        if self._early is not None:
            self.result.host_seconds += self._early.busy_seconds
        return self.result

    def forward(self, forward: Forward) -> None:
        """One pass through all layers."""
        engine, result = self.engine, self.result
        began = engine.now
        self.conductor.begin(forward.phase, forward.rows, len(forward.starts))
        if self._forecaster is not None:
            self._forecaster.forward(forward)
        if self._early is not None:
            self._early.begin(forward)
        outside = self.costs.forward(forward.rows)
        engine.now += outside
        result.forward_seconds += outside
        weights = forward.weights
        number, phase, rows = self._forward, forward.phase, forward.rows
        before = self.costs.layer(rows, forward.context)
        for layer, experts in enumerate(forward.experts):
            if not experts:
                continue  # the trace does not say: nothing to place
            step = Step(
                layer,
                phase,
                number,
                rows,
                experts,
                forward.tokens[layer],
                weights[layer] if weights else None,
            )
            self._layer(step, before)
        self._forward += 1
        took = engine.now - began
        result.tokens += rows
        if phase is Phase.DECODE:
            result.decode_tokens += rows
            result.decode_seconds += took
            result.tpot.append(took)
        if forward.first:
            result.ttft += [took] * len(forward.first)

    def _layer(self, step: Step, before: float) -> None:
        """One layer; ``before``: seconds from the layer before to the router's choice."""
        engine, result, conductor = self.engine, self.result, self.conductor
        engine.now += before
        result.layer_seconds += before
        early, due = self._early, 0.0
        if early is not None:
            step = early.enter(step)
            due = early.due
        work = conductor.plan(step)
        decided = self.policy.plan_us * 1e-6
        engine.now = begin = engine.now + decided
        wanted = work.stream or work.host or due > begin
        elsewhere = self._serve_elsewhere(step, work, due) if wanted else None
        main = begin
        if early is not None:
            main += early.look_ahead(step, begin)
        if self._looks:
            forecasts: Sequence[Forecast] = ()
            if self._forecaster is not None:
                forecasts = self._forecaster.after(step, self.policy.horizon)
                main += self._forecaster.seconds
            conductor.look_ahead(step, forecasts)
            main += self.policy.look_ahead_us * 1e-6
        result.decision_seconds += decided + main - begin
        if elsewhere is None and not work.coming:
            compute = self._compute(step, work.ready)
            if self.costs.link_slows != 1.0:
                compute = self._beside_link(begin, compute)
            if self._watched:
                self._tell_ready(step, work, begin, compute)
            end = begin + compute
            stall = 0.0
            result.device_seconds += compute
            if main > end:
                stall = main - end
                self.statistics.stall_seconds["forecast"] += stall
                end = main
        else:
            end, stall, compute = self._wait(step, work, elsewhere or ([], begin), begin, main)
        if self._watched:
            self._tell(step, begin, before, decided, main)
        engine.now = end
        self.statistics.compute_seconds += compute
        conductor.finish(step, work, stall, compute)

    def _tell(self, step: Step, begin: float, before: float, decided: float, main: float) -> None:
        """What the watchers of an executor hear; what arrived later was told when it was computed."""
        span, layer, planned = self.conductor.span, step.layer, begin - decided
        span(Busy("device", "attention", planned - before, planned, (), layer))
        span(Busy("policy", "plan", planned, begin, (), layer))
        if self._looks:
            span(Busy("predictor", "look ahead", begin, main, (), layer))

    def _tell_ready(self, step: Step, work: Work, begin: float, seconds: float) -> None:
        if work.ready and self._watched:
            tokens = dict(zip(step.experts, step.tokens, strict=True))
            shares = [self.costs.device(flat, tokens[flat]) for flat in work.ready]
            self.conductor.span(Busy("device", "compute", begin, begin + seconds, work.ready, None, shares))

    def _compute(self, step: Step, experts: Iterable[int]) -> float:
        if step.rows == 1:
            one = self._one
            return sum([one[flat] for flat in experts])
        device, tokens = self.costs.device, dict(zip(step.experts, step.tokens, strict=True))
        return sum(device(flat, tokens[flat]) for flat in experts)

    def _beside_link(self, begin: float, seconds: float) -> float:
        """What a computation that shares its memory with the link takes while that is busy, and after."""
        slows = self.costs.link_slows
        if slows == 1.0 or not (self._reads and seconds):
            return seconds
        return stretched(seconds, slows, self.engine.link_free_at - begin)

    def _serve_elsewhere(self, step: Step, work: Work, due: float) -> tuple[list[tuple[float, int]], float]:
        """Ask for the misses without a slot: arrivals of the streamed ones, and the host pool's end, which is
        not before ``due``."""
        engine, costs = self.engine, self.costs
        stream = [*work.stream, *work.host] if self._reads else work.stream
        arrivals = [(engine.demand(flat), flat) for flat in stream]
        host, tokens = self._host_work(step, work)
        if self._reads or not host:
            return arrivals, max(engine.now, due)
        begin = max(engine.now, engine.host_free_at)
        took = sum(costs.host(flat, tokens[flat]) for flat in host)
        if costs.link_slows != 1.0:
            took = stretched(took, costs.link_slows, engine.link_free_at - begin)
        engine.host_free_at = begin + took
        self.result.host_seconds += took
        if self._watched:
            shares = [costs.host(flat, tokens[flat]) for flat in host]
            self.conductor.span(Busy("host", "compute", begin, begin + took, host, None, shares))
        return arrivals, max(begin + took, due)

    def _host_work(self, step: Step, work: Work) -> tuple[Sequence[int], dict[int, int]]:
        """What the host computes for this layer now, and tokens of each; early and late calls are not."""
        tokens = dict(zip(step.experts, step.tokens, strict=True))
        apart = self._early.apart if self._early is not None else None
        if not apart:
            return work.host, tokens
        left = {flat: tokens[flat] - apart.get(flat, 0) for flat in work.host}
        return [flat for flat in work.host if left[flat] > 0], left

    def _wait(
        self,
        step: Step,
        work: Work,
        elsewhere: tuple[list[tuple[float, int]], float],
        begin: float,
        main: float,
    ) -> tuple[float, float, float]:
        """Compute what is ready, then what arrives; returns end, stall and compute seconds."""
        engine, stalls, device = self.engine, self.statistics.stall_seconds, self.costs.device
        streamed, host_end = elsewhere
        one = self._one if step.rows == 1 else None
        tokens = {} if one is not None else dict(zip(step.experts, step.tokens, strict=True))
        alone = self.costs.link_slows == 1.0
        late = work.coming[: work.late]
        compute = self._beside_link(begin, self._compute(step, work.ready))
        if self._watched:
            self._tell_ready(step, work, begin, compute)
        at = begin + compute
        waited = 0.0
        arrives = engine.arrives_at
        streamed += [(arrives.pop(flat), flat) for flat in work.coming]
        if len(streamed) > 1:
            streamed.sort()
        for arrival, flat in streamed:
            if arrival > at:
                stalls["late" if flat in late else "demand"] += arrival - at
                waited += arrival - at
                at = arrival
            took = device(flat, tokens[flat]) if one is None else one[flat]
            if not alone:
                took = self._beside_link(at, took)
            if self._watched:
                self.conductor.span(Busy("device", "compute", at, at + took, (flat,)))
            at += took
            compute += took
        for flat in work.coming:
            self.conductor.arrived(flat)
        self.result.device_seconds += compute
        for cause, end in (("host", host_end), ("forecast", main)):
            if end > at:
                stalls[cause] += end - at
                waited += end - at
                at = end
        return at, waited, compute
