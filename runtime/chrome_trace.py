"""Writes a timeline in Chrome's trace-event format (JSON), which ui.perfetto.dev and chrome://tracing open.

    ph X    a slice: an expert read, copied or computed, with layer, expert, cause and outcome; a decision
    ph s/t/f  an arrow from the decision to prefetch, through the transfer, to the computation that used it
    ph C    counters: slots in use, transfers under way, stall of the layer
    ph M    names of the tracks

cause     start, demand, prefetch, pre-calculation; of a computation also: resident
outcome   useful, late, wasted, dropped, failed, pending; of a computation also: hit, miss
Where several experts were worked on by one call, its time is divided evenly and ``together`` says so.
Format: the document "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from daop.core import Geometry

from .conductor import Work
from .timeline import Timeline
from .watching import Busy

Event = dict[str, Any]
ORDER = ("policy", "predictor", "device", "host", "link in", "link out", "disk")
TRANSFERS = ("link in", "link out", "disk")
PID = 1


def write_chrome_trace(timeline: Timeline, file: TextIO, about: dict[str, Any] | None = None) -> None:
    """Write everything the timeline holds; ``about`` stands in the file's ``otherData``."""
    other = {"complete": timeline.complete, **(about or {})}
    if not timeline.complete:
        other["note"] = "the recorder was full: the earliest part of the run is not in this file"
    file.write(f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(other)},\n"traceEvents": [\n')
    for number, event in enumerate(events(timeline)):
        file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
    file.write("\n]}\n")


@dataclass(slots=True)
class _Life:
    """One fetch into a slot, from being asked for to its fate."""

    asked: float
    cause: str
    number: int
    fate: str = ""


@dataclass(slots=True)
class _Plan:
    """Who was computed how in one layer of one pass: flat -> (cause, outcome)."""

    at: float
    roles: dict[int, tuple[str, str]]


@dataclass(slots=True)
class _Told:
    """What the conductor said, put in order for looking up by time."""

    lives: defaultdict[int, list[_Life]] = field(default_factory=lambda: defaultdict(list))
    plans: defaultdict[int, list[_Plan]] = field(default_factory=lambda: defaultdict(list))
    counters: list[Event] = field(default_factory=list)
    passes: list[Event] = field(default_factory=list)

    def life(self, flat: int, at: float) -> _Life | None:
        lives = self.lives.get(flat, [])
        index = bisect_right(lives, at, key=lambda life: life.asked)
        return lives[index - 1] if index else None

    def plan(self, layer: int, at: float) -> _Plan | None:
        plans = self.plans.get(layer, [])
        index = bisect_right(plans, at, key=lambda plan: plan.at)
        return plans[index - 1] if index else None


def events(timeline: Timeline) -> Iterator[Event]:
    """Every event of the file, the names of the tracks first."""
    geometry = timeline.geometry
    if geometry is None:
        return
    told = _listen(timeline)
    busy = sorted(timeline.busy, key=lambda span: (span.begin, -span.end))
    threads, lanes = _lanes(busy)
    yield {"ph": "M", "pid": PID, "name": "process_name", "args": {"name": "daop"}}
    for name, thread in threads.items():
        yield {"ph": "M", "pid": PID, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {
            "ph": "M",
            "pid": PID,
            "tid": thread,
            "name": "thread_sort_index",
            "args": {"sort_index": thread},
        }
    decides = next((thread for name, thread in threads.items() if name == "predictor"), None)
    begun: set[int] = set()
    for span, thread in zip(busy, lanes, strict=True):
        if not span.flats:
            yield {**_slice(span.begin, span.end, thread), "name": span.what, "args": _place(span)}
        for flat, begin, end in _parts(span):
            yield from _expert(geometry, told, span, flat, begin, end, thread, decides, begun)
    yield from told.passes
    yield from told.counters


def _listen(timeline: Timeline) -> _Told:
    told = _Told()
    useful: set[int] = set()
    asked = 0
    for kind, at, flat, of in timeline.said:
        if kind == "asked":
            asked += 1
            told.lives[flat].append(_Life(at, of, asked))
        elif kind == "fate":
            if told.lives[flat]:
                told.lives[flat][-1].fate = of
            if of == "useful":
                useful.add(flat)
        elif kind == "planned":
            layer, work = of
            told.plans[layer].append(_Plan(at, _roles(work, useful)))
            useful.clear()
        elif kind == "finished":
            for name, value in zip(
                ("slots in use", "transfers under way", "stall of the layer (ms)"), of, strict=True
            ):
                shown = round(value * 1e3, 4) if isinstance(value, float) else value
                told.counters.append(
                    {"ph": "C", "pid": PID, "name": name, "ts": _us(at), "args": {"value": shown}}
                )
        else:
            phase, rows = of
            told.passes.append(
                {"ph": "i", "pid": PID, "tid": 0, "s": "p", "ts": _us(at), "name": f"{phase}, {rows} tokens"}
            )
    return told


def _roles(work: Work, useful: set[int]) -> dict[int, tuple[str, str]]:
    roles = {flat: ("prefetch", "useful") if flat in useful else ("resident", "hit") for flat in work.ready}
    roles.update(dict.fromkeys(work.coming[: work.late], ("prefetch", "late")))
    roles.update(dict.fromkeys((*work.coming[work.late :], *work.stream, *work.host), ("demand", "miss")))
    return roles


def _expert(
    geometry: Geometry,
    told: _Told,
    span: Busy,
    flat: int,
    begin: float,
    end: float,
    thread: int,
    decides: int | None,
    begun: set[int],
) -> Iterator[Event]:
    """The slice of one expert, and the arrow that passes through it."""
    layer, expert = geometry.pair(flat)
    life, plan = told.life(flat, begin), told.plan(layer, begin)
    cause, outcome = plan.roles.get(flat, ("", "")) if plan is not None else ("", "")
    moves = span.track in TRANSFERS
    if moves:
        aside = cause == "demand" and plan is not None and (life is None or life.asked < plan.at)
        if life is not None and not aside:
            cause, outcome = life.cause, life.fate or ("pending" if life.cause == "prefetch" else "")
    if span.what.startswith("pre-calculation"):
        cause, outcome = "pre-calculation", "wasted" if span.what.endswith("unused") else "useful"
    args = {"layer": layer, "expert": expert, "cause": cause, "outcome": outcome}
    args = {name: value for name, value in args.items() if value != ""}
    if span.shares is None and len(span.flats) > 1:
        args["together"] = len(span.flats)
    name = f"{span.what} {layer}.{expert}"
    yield {**_slice(begin, end, thread), "name": name, "cat": cause or "expert", "args": args}
    if life is None or life.cause != "prefetch" or decides is None or cause != "prefetch":
        return
    arrow = {"pid": PID, "cat": "prefetch", "name": "prefetch", "id": life.number}
    if moves and life.number not in begun:
        begun.add(life.number)
        yield {**arrow, "ph": "s", "tid": decides, "ts": _us(life.asked)}
        last = life.fate not in ("useful", "late")
        yield {**arrow, "ph": "f" if last else "t", "bp": "e", "tid": thread, "ts": _us(begin)}
    elif not moves and life.number in begun:
        yield {**arrow, "ph": "f", "bp": "e", "tid": thread, "ts": _us(begin)}


def _parts(span: Busy) -> Iterator[tuple[int, float, float]]:
    """(flat, begin, end) of every expert of a span."""
    shares = span.shares or [1.0] * len(span.flats)
    whole = sum(shares) or 1.0
    at = span.begin
    for flat, share in zip(span.flats, shares, strict=True):
        end = at + (span.end - span.begin) * share / whole
        yield flat, at, end
        at = end


def _lanes(busy: list[Busy]) -> tuple[dict[str, int], list[int]]:
    """Threads by name, more for a track that did several things at once, and the thread of each span."""
    ends: dict[str, list[float]] = {}
    places: list[tuple[str, int]] = []
    for span in busy:
        lanes = ends.setdefault(span.track, [])
        lane = next((n for n, end in enumerate(lanes) if end <= span.begin), len(lanes))
        if lane == len(lanes):
            lanes.append(0.0)
        lanes[lane] = span.end
        places.append((span.track, lane))
    tracks = sorted(ends, key=lambda track: (ORDER.index(track) if track in ORDER else len(ORDER), track))
    threads: dict[tuple[str, int], int] = {}
    for track in tracks:
        for lane in range(len(ends[track])):
            threads[track, lane] = len(threads) + 1
    names = {
        track if len(ends[track]) == 1 else f"{track} {lane + 1}": thread
        for (track, lane), thread in threads.items()
    }
    return names, [threads[place] for place in places]


def _slice(begin: float, end: float, thread: int) -> Event:
    return {"ph": "X", "pid": PID, "tid": thread, "ts": _us(begin), "dur": _us(end - begin)}


def _place(span: Busy) -> Event:
    return {} if span.layer is None else {"layer": span.layer}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
