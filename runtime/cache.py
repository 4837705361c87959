"""Which record is in which slot: least recently used goes first. No bytes here, only numbers."""

from collections import OrderedDict
from typing import NamedTuple


class ExpertKey(NamedTuple):
    layer: int
    expert: int


class SlotCache:
    """A fixed number of slots and the experts in them. A pinned slot is not evicted."""

    def __init__(self, n_slots: int) -> None:
        assert n_slots > 0
        self.n_slots = n_slots
        self.n_evictions = 0
        self._free = list(range(n_slots - 1, -1, -1))
        # Oldest use first.
        self._slots: OrderedDict[ExpertKey, int] = OrderedDict()
        self._pinned: set[ExpertKey] = set()

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, key: ExpertKey) -> int | None:
        """Return the slot of an expert and count this as its latest use; None if it has none."""
        slot = self._slots.get(key)
        if slot is not None:
            self._slots.move_to_end(key)
        return slot

    def take(self, key: ExpertKey) -> int | None:
        """Give an expert a slot, pinned, evicting the least recently used if need be; None if all are pinned."""
        assert key not in self._slots
        slot = self._free.pop() if self._free else self._evict()
        if slot is not None:
            self._slots[key] = slot
            self._pinned.add(key)
        return slot

    def pin(self, key: ExpertKey) -> None:
        assert key in self._slots
        self._pinned.add(key)

    def unpin(self, key: ExpertKey) -> None:
        self._pinned.discard(key)

    def drop(self, key: ExpertKey) -> None:
        """Forget an expert whose bytes did not arrive."""
        self._pinned.discard(key)
        self._free.append(self._slots.pop(key))

    def clear(self) -> None:
        """Forget every expert that is not pinned."""
        for key in [key for key in self._slots if key not in self._pinned]:
            self.drop(key)

    def _evict(self) -> int | None:
        oldest = next((key for key in self._slots if key not in self._pinned), None)
        if oldest is None:
            return None
        self.n_evictions += 1
        return self._slots.pop(oldest)
