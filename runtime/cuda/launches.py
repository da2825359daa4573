"""What the device computes of a layer, in groups: what each waits for, and when its copies start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from daop.runtime.conductor import Work

from .arenas import HostWeights
from .transfers import LinkTransfers, Ticket

GROUP_BYTES = 16 << 20  # experts on their way are computed together in groups of so many bytes


@dataclass(slots=True)
class Launch:
    """Experts computed together, from slots or staging slots of one class. ``tickets``: what they wait for,
    under the ``cause``; ``next``: who takes over the staging slot."""

    flats: list[int]
    slots: list[int]
    tickets: list[Ticket] = field(default_factory=list)
    cause: str = ""
    staged: bool = False
    pinned: bool = True  # so is everything that its staging slot holds before
    next: Launch | None = None

    @property
    def prompt(self) -> bool:
        """Whether launching it does not make the host wait for reads."""
        return self.pinned and all(ticket.pinned for ticket in self.tickets)

    def takes(self, ticket: Ticket) -> bool:
        """Whether one more fits into the group."""
        held = sum(other.nbytes for other in self.tickets)
        return held + ticket.nbytes <= GROUP_BYTES and ticket.pinned == self.prompt


def from_slots(work: Work, slot_of: Sequence[int], transfers: LinkTransfers) -> list[Launch]:
    """What is computed from slots, in the order in which it becomes readable."""
    out: list[Launch] = []
    if work.ready:
        out.append(Launch(list(work.ready), [slot_of[flat] for flat in work.ready]))
    for index, flat in enumerate(work.coming):
        cause = "late" if index < work.late else "demand"
        ticket = transfers.ticket(flat)
        last = out[-1] if out else None
        if last is not None and last.cause == cause and last.takes(ticket):
            last.flats.append(flat)
            last.slots.append(slot_of[flat])
            last.tickets.append(ticket)
        else:
            out.append(Launch([flat], [slot_of[flat]], [ticket], cause))
    return out


def from_staging(
    flats: Sequence[int], slots: int, transfers: LinkTransfers, weights: HostWeights
) -> list[Launch]:
    """What is computed from ``slots`` staging slots. The first copies start at once, each further one when
    the computation before it in its slot has been launched (``next``)."""
    out: list[Launch] = []
    for index, flat in enumerate(flats):
        before = out[index - slots] if index >= slots else None
        tickets = [] if before is not None else [transfers.stream(flat, index)]
        launch = Launch([flat], [index % slots], tickets, "demand", staged=True)
        launch.pinned = weights.is_pinned(flat) and (before is None or before.pinned)
        out.append(launch)
        if before is not None:
            before.next = launch
    transfers.kick()
    return out
