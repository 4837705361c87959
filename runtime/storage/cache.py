"""Which record is in which slot, and who leaves. No bytes here, only numbers.

Two kinds of entry: what decode used, and fills, which only a prompt pass or too few rows of a block brought in. They must not wash out what decode
needs: fills leave first, the oldest of them first, and a prompt pass takes free slots and theirs. Among the entries of decode the least recently
used leaves; the host pool has a rule of its own.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

# A prompt pass gets this many slots even where decode holds all of them.
PROMPT_ROOM = 8


class ExpertKey(NamedTuple):
    layer: int
    expert: int


class SlotCache:
    """A fixed number of slots and the experts in them. A pinned slot is not evicted; it may be pinned more than once, and must be let go as often."""

    def __init__(self, n_slots: int, *, prompt_room: int = PROMPT_ROOM, on_evict: Callable[[ExpertKey], None] | None = None) -> None:
        assert n_slots > 0 and prompt_room > 0
        self.n_slots = n_slots
        self.n_evictions = 0
        self._prompt_room, self._on_evict = prompt_room, on_evict
        self._free = list(range(n_slots - 1, -1, -1))
        # Oldest use first in both.
        self._decode: OrderedDict[ExpertKey, int] = OrderedDict()
        self._prompt: OrderedDict[ExpertKey, int] = OrderedDict()
        self._pinned: dict[ExpertKey, int] = {}

    def __len__(self) -> int:
        return len(self._decode) + len(self._prompt)

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._decode or key in self._prompt

    @property
    def n_pinned(self) -> int:
        return len(self._pinned)

    def find(self, key: ExpertKey, *, is_prompt: bool = False, is_passing: bool = False) -> int | None:
        """Return the slot of an expert and count this as its latest use; None if it has none.

        is_passing  whether too few rows of a block use it for more to be expected

        A use by decode makes a fill one of decode's; a use by a prompt, or in passing, does not refresh what decode holds.
        """
        slot = self._decode.get(key)
        if slot is not None:
            if not (is_prompt or is_passing):
                self._decode.move_to_end(key)
            return slot
        slot = self._prompt.get(key)
        if slot is not None:
            if is_prompt or is_passing:
                self._prompt.move_to_end(key)
            else:
                self._decode[key] = self._prompt.pop(key)
        return slot

    def take(self, key: ExpertKey, *, is_prompt: bool = False, is_passing: bool = False) -> int | None:
        """Give an expert a slot, pinned, evicting another if need be; None if none may be.

        In passing it may evict whatever decode may, and is a fill itself.
        """
        assert key not in self
        slot = self._free.pop() if self._free else self._evict(is_prompt)
        if slot is not None:
            (self._prompt if is_prompt or is_passing else self._decode)[key] = slot
            self._pinned[key] = 1
        return slot

    def pin(self, key: ExpertKey) -> None:
        assert key in self
        self._pinned[key] = self._pinned.get(key, 0) + 1

    def unpin(self, key: ExpertKey) -> None:
        """Let go of an expert once; of one that is not pinned nothing is to be let go."""
        n_pins = self._pinned.pop(key, 0)
        if n_pins > 1:
            self._pinned[key] = n_pins - 1

    def drop(self, key: ExpertKey) -> None:
        """Forget an expert whose bytes did not arrive."""
        self._pinned.pop(key, None)
        self._free.append(self._remove(key))

    def clear(self) -> None:
        """Forget every expert that is not pinned."""
        for key in [key for key in (*self._decode, *self._prompt) if key not in self._pinned]:
            self.drop(key)

    def _evict(self, is_prompt: bool) -> int | None:
        victim = self._victim(is_prompt)
        if victim is None:
            return None
        self.n_evictions += 1
        slot = self._remove(victim)
        if self._on_evict is not None:
            self._on_evict(victim)
        return slot

    def _victim(self, is_prompt: bool) -> ExpertKey | None:
        oldest_fill = next((key for key in self._prompt if key not in self._pinned), None)
        if oldest_fill is not None:
            return oldest_fill
        if is_prompt and len(self._prompt) >= self._prompt_room:
            return None
        return self._decode_victim()

    def _decode_victim(self) -> ExpertKey | None:
        return next((key for key in self._decode if key not in self._pinned), None)

    def _remove(self, key: ExpertKey) -> int:
        return self._decode.pop(key) if key in self._decode else self._prompt.pop(key)


class HostPool(SlotCache):
    """The slots in host memory, which should hold what device memory lacks.

    Everything that is read passes through here and is on the device afterwards. While it is there too, its copy here serves nobody; once it has left
    the device, the copy saves a read. If all copies of what the device holds left at once, nothing would be here when the device lets go of it; if
    none did, they would fill the pool. So of what is read, `keep_share` keeps its copy here and the others' copies leave first. Beyond these, of the
    64 least recently used, in a small pool of fewer, the one leaves that the device has lacked least often, uses long ago counting less.
    """

    _N_COMPARED = 64
    # Uses after which a use counts half, in slots of the pool.
    _HALF_LIFE = 32

    def __init__(self, n_slots: int, *, keep_share: float = 1.0, prompt_room: int = PROMPT_ROOM) -> None:
        assert 0.0 <= keep_share <= 1.0
        super().__init__(n_slots, prompt_room=prompt_room)
        self._keep_share, self._kept = keep_share, 0.0
        self._leaving: OrderedDict[ExpertKey, None] = OrderedDict()
        # log2 of the sum of 2**(time of use / half-life): it never needs to be decayed, and compares as the decayed sums do.
        self._lacked: dict[ExpertKey, float] = {}
        self._n_uses = 0
        self._n_compared = min(self._N_COMPARED, max(16, n_slots // 8))

    def lacked(self, key: ExpertKey) -> None:
        """Count that decode asked for an expert that the device did not hold."""
        self._n_uses += 1
        now = self._n_uses / (self._HALF_LIFE * self.n_slots)
        before = self._lacked.get(key, -math.inf)
        self._lacked[key] = before + math.log2(1.0 + 2.0 ** (now - before)) if now - before < 60 else now

    def passed_to_device(self, key: ExpertKey) -> None:
        """Take note that an entry which has just been read is on the device, or next to go there."""
        self._kept += self._keep_share
        if self._kept >= 1.0:
            self._kept -= 1.0
        elif key in self:
            self._leaving[key] = None

    def off_device(self, key: ExpertKey) -> None:
        """Take note that the device has let go of an expert: a copy that is still here is worth keeping."""
        self._leaving.pop(key, None)

    def make_room(self, n_free: int) -> None:
        """Let entries leave until this many slots are free: at a moment when there is time for the choice."""
        while len(self._free) < n_free and (slot := self._evict(is_prompt=False)) is not None:
            self._free.append(slot)

    def clear(self) -> None:
        super().clear()
        self._lacked = {key: -math.inf for key in (*self._decode, *self._prompt)}

    def _victim(self, is_prompt: bool) -> ExpertKey | None:
        leaving = next((key for key in self._leaving if key not in self._pinned and (not is_prompt or key in self._prompt)), None)
        return leaving if leaving is not None else super()._victim(is_prompt)

    def _decode_victim(self) -> ExpertKey | None:
        score, n = self._lacked.__getitem__, self._n_compared
        victim = min(islice(self._decode, n), key=score, default=None)
        if victim in self._pinned:
            victim = min(islice((key for key in self._decode if key not in self._pinned), n), key=score, default=None)
        return victim

    def take(self, key: ExpertKey, *, is_prompt: bool = False, is_passing: bool = False) -> int | None:
        self._lacked.setdefault(key, -math.inf)
        return super().take(key, is_prompt=is_prompt, is_passing=is_passing)

    def _remove(self, key: ExpertKey) -> int:
        self._leaving.pop(key, None)
        return super()._remove(key)
