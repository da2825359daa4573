"""What moves experts, as the conductor drives it: the contract, and the window on it that policies have.

``transfers.FileTransfers`` reads files with a pool of threads, ``cuda.transfers.LinkTransfers`` fills a copy
stream, ``sim_engine.VirtualEngine`` reckons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from daop.core import BoolArray

from .residency import Residency


class Engine(Protocol):
    """What moves bytes into slots.

    A fetch ends exactly once: its flat id comes out of ``poll``, or out of ``failed``, or ``cancel``
    returned True for it.
    """

    @property
    def now(self) -> float: ...

    @property
    def link_free_at(self) -> float: ...

    @property
    def host_free_at(self) -> float: ...

    def fetch(self, flat: int, slot: int, *, demand: bool) -> None:
        """Start to move an expert into a slot; demand goes before speculation."""

    def promote(self, flat: int) -> None:
        """A speculative fetch under way has become a demand."""

    def cancel(self, flat: int) -> bool:
        """Drop a speculative fetch that has not begun; False if it has."""

    def poll(self) -> Sequence[int]:
        """Fetches that have arrived since the last call."""

    def failed(self) -> Sequence[int]:
        """Fetches that have failed since the last call."""


class EngineView:
    """The policy's read-only window on residency and engine (see ``policies.base.View``)."""

    def __init__(self, residency: Residency, engine: Engine) -> None:
        self.resident: BoolArray = _read_only(residency.resident)
        self.filling: BoolArray = _read_only(residency.filling)
        self.evictable: BoolArray = _read_only(residency.evictable)
        self.prefetched: BoolArray = _read_only(residency.prefetched)
        self.held: Sequence[int] = residency.held
        self.free_slots = residency.free_slots
        self.same_slot = residency.same_slot
        self._engine = engine

    @property
    def now(self) -> float:
        return self._engine.now

    @property
    def link_free_at(self) -> float:
        return self._engine.link_free_at

    @property
    def host_free_at(self) -> float:
        return self._engine.host_free_at


def _read_only(flags: BoolArray) -> BoolArray:
    view = flags.view()
    view.flags.writeable = False
    return view
