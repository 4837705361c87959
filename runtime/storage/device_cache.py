"""Which experts lie on the device, which are on their way there, and where: the slots of device_slots.py with keys to them.

A record lands in a slot when the first of it is to be uploaded, and is in the cache from then on, pinned, so that nothing takes the slot. What was
uploaded from a room in host memory needs it until the upload has ended.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from layout.reader import Target, Uploader
from runtime.storage.cache import ExpertKey, SlotCache
from runtime.storage.device_slots import DeviceSlots, Upload, open_device_slots
from runtime.storage.incoming import Room


class DeviceCache(SlotCache):
    """The cache of a device's slots. A slot is pinned from landing until what was handed out of it is used."""

    def __init__(self, n_slots: int, n_bytes: int, device: torch.device, *, shape: tuple[int, int], on_evict: Callable[[ExpertKey], None]) -> None:
        """Make the slots, for records of n_bytes of experts [layers, experts]. Raises DeviceError if there is not that much memory."""
        self._slots: DeviceSlots = open_device_slots(n_slots, n_bytes, device)
        super().__init__(n_slots, on_evict=self._left)
        self._tell_evicted = on_evict
        # Where each record that work may use begins, 0 where there is none.
        self._addresses = np.zeros(shape, np.int64)
        self._landing: dict[ExpertKey, int] = {}
        self._uploads: deque[tuple[Upload, Room]] = deque()

    @property
    def uploader(self) -> Uploader:
        return self._slots.uploader

    @property
    def has_uploads(self) -> bool:
        return bool(self._uploads)

    def address(self, slot: int) -> int:
        return self._slots.address(slot)

    def addresses(self, layer: int) -> np.ndarray:
        return self._addresses[layer]

    def record(self, slot: int) -> Tensor:
        return self._slots.record(slot)

    def refused(self, status: int) -> Exception:
        """Return the error for what the uploader said."""
        return self._slots.refused(status)

    def is_landing(self, key: ExpertKey) -> bool:
        return key in self._landing

    def land(self, key: ExpertKey, *, is_prompt: bool, is_passing: bool) -> int | None:
        """Return the slot that a record goes into, None if all are in use."""
        slot = self._landing.get(key)
        if slot is None and (slot := self.take(key, is_prompt=is_prompt, is_passing=is_passing)) is not None:
            self._landing[key] = slot
            self._slots.begin(slot)
        return slot

    def target(self, slot: int, begin: int) -> Target:
        """Return where the uploader copies a record's bytes from `begin` on to."""
        return self._slots.target(slot, begin)

    def copy(self, slot: int, source: Tensor, begin: int, end: int) -> None:
        """Upload bytes begin to end of the record that `source`, uint8, begins with."""
        self._slots.copy(slot, source, begin, end)

    def landed(self, key: ExpertKey, room: Room) -> int:
        """Say that all of a record is under way, from a room that is freed once it has ended; return its slot."""
        slot = self._landing.pop(key)
        self._uploads.append((self._slots.finish(slot), room))
        return slot

    def settle(self, key: ExpertKey) -> None:
        """Wait for what is on its way into the slot of a record that has not landed."""
        if (slot := self._landing.get(key)) is not None:
            self._slots.finish(slot).wait()

    def give_up(self, key: ExpertKey) -> None:
        """Forget a record that has not landed, or let go of one that has."""
        if key in self._landing:
            # What is on its way into the slot must end before the slot is used again.
            self.settle(key)
            del self._landing[key]
            self.drop(key)
        else:
            self.unpin(key)

    def freed_rooms(self) -> Iterator[Room]:
        """Yield the rooms whose uploads have ended."""
        while self._uploads and self._uploads[0][0].is_done():
            yield self._uploads.popleft()[1]

    def wait_for_room(self) -> None:
        """Wait for the oldest upload."""
        self._uploads[0][0].wait()

    def close(self) -> None:
        """Give the device's memory back once nothing is on its way into it."""
        self.wait_for_uploads()
        self._uploads.clear()
        del self._slots

    def wait_for_uploads(self) -> None:
        for upload, _ in self._uploads:
            upload.wait()

    def hand_out(self, group: Sequence[tuple[ExpertKey, int]]) -> None:
        """Have the work that is launched from now on find these records."""
        self._slots.make_ready([slot for _, slot in group])
        for key, slot in group:
            self._addresses[key] = self._slots.address(slot)

    def take_back(self, group: Sequence[tuple[ExpertKey, int]]) -> None:
        """Say that all work on these records has been launched."""
        self._slots.used([slot for _, slot in group])
        for key, _ in group:
            self.unpin(key)

    def clear(self) -> None:
        super().clear()
        self._addresses[:] = 0

    def _left(self, key: ExpertKey) -> None:
        self._addresses[key] = 0
        self._tell_evicted(key)
