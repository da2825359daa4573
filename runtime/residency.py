"""What is in fast memory now: slots, their experts, and the fate of every prefetch.

Pure bookkeeping, shared by the executor and the simulator: no bytes, threads or clocks. One thread
changes it, at layer boundaries. An expert is absent, filling (it has a slot whose bytes are under
way) or resident. Experts of the same stored size share a *slot class*; a slot is only ever reused
inside its class.

State is kept in bytearrays with numpy views over the same memory: single experts are read and
written as plain ints, policies look at whole vectors, and neither pays for the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daop.core import BoolArray, DaopError, Geometry


def _flags(total: int) -> tuple[bytearray, BoolArray]:
    raw = bytearray(total)
    return raw, np.frombuffer(raw, dtype=np.bool_)


class Residency:
    """Slots and states of all experts of a geometry.

    ``slots_of_class[c]`` is the number of slots of class ``c``; ``class_of_layer[l]`` the class of a
    layer's experts. Slots are numbered from 0 within their class. Where a class has a slot for every one of
    its experts, each always gets the same, in order, so that a layer's experts lie side by side.
    """

    def __init__(
        self, geometry: Geometry, slots_of_class: Sequence[int], class_of_layer: Sequence[int] | None = None
    ) -> None:
        if min(slots_of_class) < 0:
            raise DaopError("the number of slots must not be negative")
        classes = list(class_of_layer) if class_of_layer is not None else [0] * geometry.layers
        total = geometry.total
        self.geometry = geometry
        self.class_of = [classes[int(layer)] for layer in geometry.layer_of]
        self.slot_of = [-1] * total
        self._resident, self.resident = _flags(total)
        self._filling, self.filling = _flags(total)
        self._protected, self.protected = _flags(total)
        self._evictable, self.evictable = _flags(total)
        self._prefetched, self.prefetched = _flags(total)
        self._classes = [
            np.asarray([c == which for c in self.class_of], dtype=np.bool_)
            for which in range(len(slots_of_class))
        ]
        self.used_slots = 0
        self.held = [0] * geometry.layers  # slots that each layer's experts hold, resident or filling
        self._layer_of: list[int] = geometry.layer_of.tolist()
        members = [0] * len(slots_of_class)
        self._place_in_class = []
        for kind in self.class_of:
            self._place_in_class.append(members[kind])
            members[kind] += 1
        self._members = members
        self.resize(slots_of_class)

    # -- questions -------------------------------------------------------------------------------

    def is_resident(self, flat: int) -> bool:
        return bool(self._resident[flat])

    def is_filling(self, flat: int) -> bool:
        return bool(self._filling[flat])

    def is_prefetched(self, flat: int) -> bool:
        """Brought by speculation and not used since."""
        return bool(self._prefetched[flat])

    def free_slots(self, flat: int) -> int:
        return len(self._free[self.class_of[flat]])

    def same_slot(self, flat: int) -> BoolArray | None:
        return None if len(self._free) == 1 else self._classes[self.class_of[flat]]

    def missing(self, experts: Sequence[int]) -> list[int]:
        """Those of ``experts`` that are neither resident nor filling."""
        resident, filling = self._resident, self._filling
        return [flat for flat in experts if not (resident[flat] or filling[flat])]

    def sort_out(self, experts: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """The running layer needs these: none is a victim until ``unprotect``. Returns those that are
        resident, filling, and missing."""
        is_resident, is_filling = self._resident, self._filling
        protected, evictable = self._protected, self._evictable
        resident: list[int] = []
        filling: list[int] = []
        missing: list[int] = []
        for flat in experts:
            protected[flat] = 1
            evictable[flat] = 0
            if is_resident[flat]:
                resident.append(flat)
            elif is_filling[flat]:
                filling.append(flat)
            else:
                missing.append(flat)
        return resident, filling, missing

    # -- changes ---------------------------------------------------------------------------------

    def resize(self, slots_of_class: Sequence[int]) -> None:
        """So many slots from now on; no expert may hold one."""
        if self.used_slots:
            raise AssertionError("slots in use cannot be renumbered")
        self.capacity = sum(slots_of_class)
        self._free = [list(range(count - 1, -1, -1)) for count in slots_of_class]
        self._complete = [
            count >= members for count, members in zip(slots_of_class, self._members, strict=True)
        ]

    def reserve(self, flat: int, *, speculative: bool) -> int:
        """Give ``flat`` a free slot and mark it filling; returns the slot."""
        if self._resident[flat] or self._filling[flat]:
            raise AssertionError(f"expert {self.geometry.pair(flat)} already has a slot")
        kind = self.class_of[flat]
        slot = self._free[kind].pop()
        if self._complete[kind]:
            slot = self._place_in_class[flat]
        self.slot_of[flat] = slot
        self._filling[flat] = 1
        self._prefetched[flat] = speculative
        self.used_slots += 1
        self.held[self._layer_of[flat]] += 1
        return slot

    def complete(self, flat: int) -> None:
        """The bytes of a filling expert have arrived."""
        if not self._filling[flat]:
            raise AssertionError(f"expert {self.geometry.pair(flat)} was not under way")
        self._filling[flat] = 0
        self._resident[flat] = 1
        self._evictable[flat] = not self._protected[flat]

    def abandon(self, flat: int) -> None:
        """A filling expert will not arrive: its slot is free again."""
        if not self._filling[flat]:
            raise AssertionError(f"expert {self.geometry.pair(flat)} was not under way")
        self._filling[flat] = 0
        self._release(flat)

    def evict(self, flat: int) -> None:
        """Give up a resident expert that nothing needs now."""
        if not self._evictable[flat]:
            raise AssertionError(f"expert {self.geometry.pair(flat)} may not be evicted now")
        self._resident[flat] = 0
        self._evictable[flat] = 0
        self._release(flat)

    def _release(self, flat: int) -> None:
        self._free[self.class_of[flat]].append(self.slot_of[flat])
        self.slot_of[flat] = -1
        self._prefetched[flat] = 0
        self.used_slots -= 1
        self.held[self._layer_of[flat]] -= 1

    def use(self, flat: int) -> bool:
        """Note that the running forward computes ``flat``; True if speculation brought it, first use."""
        first = bool(self._prefetched[flat])
        self._prefetched[flat] = 0
        return first

    def unprotect(self, experts: Sequence[int]) -> None:
        """The layer was computed: see ``sort_out``."""
        protected, evictable, resident = self._protected, self._evictable, self._resident
        for flat in experts:
            protected[flat] = 0
            evictable[flat] = resident[flat]


def share_by_class(geometry: Geometry, slots: int) -> list[int]:
    """Divide slots among the sizes of experts, in proportion to how many experts have each size."""
    sizes = sorted(set(geometry.expert_bytes))
    counts = [
        sum(n for n, size in zip(geometry.experts, geometry.expert_bytes, strict=True) if size == one)
        for one in sizes
    ]
    shares = [slots * count // geometry.total for count in counts]
    for index in range(slots - sum(shares)):
        shares[index % len(shares)] += 1
    return [min(share, count) for share, count in zip(shares, counts, strict=True)]
