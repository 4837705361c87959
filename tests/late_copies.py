"""Device slots in host memory whose copies happen late: in the order of their streams, and only when something waits for them, as on a GPU that is busy."""

import ctypes
import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from layout.reader import Target, Uploader

N_STREAMS = 3
_COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class Mark:
    """A point in a stream, passed once all before it has happened."""

    def __init__(self, slots: "LateSlots", stream: int) -> None:
        self._slots, self.stream, self.is_passed = slots, stream, False

    def is_done(self) -> bool:
        return self.is_passed

    def wait(self) -> None:
        while not self.is_passed:
            self._slots.step(self.stream)


class LateSlots:
    """See the module. Stands for CudaSlots where there is no GPU."""

    def __init__(self, n_slots: int, record_bytes: int, device: torch.device) -> None:
        self.n_slots = n_slots
        self._records = list(torch.zeros(n_slots, record_bytes, dtype=torch.uint8).unbind())
        self._streams: list[deque[Mark | tuple[int, int, int]]] = [deque() for _ in range(N_STREAMS)]
        self._stream_of, self._n_begun = [0] * n_slots, 0
        self._ready: list[Mark | None] = [None] * n_slots
        self._lock = threading.RLock()
        self._copy = _COPY(self._append)
        self.uploader = Uploader(ctypes.cast(self._copy, ctypes.c_void_p).value or 0, 0, 0)

    def record(self, slot: int) -> Tensor:
        return self._records[slot]

    def address(self, slot: int) -> int:
        return self._records[slot].data_ptr()

    def begin(self, slot: int) -> None:
        self._stream_of[slot] = self._n_begun % N_STREAMS
        self._n_begun += 1
        if (former := self._ready[slot]) is not None:
            former.wait()

    def copy(self, slot: int, source: Tensor, begin: int, end: int) -> None:
        self._append(self.address(slot) + begin, source.data_ptr() + begin, end - begin, self._stream_of[slot] + 1)

    def target(self, slot: int, begin: int) -> Target:
        return Target(self.address(slot) + begin, self._stream_of[slot] + 1)

    def refused(self, status: int) -> Exception:
        raise AssertionError(status)

    def finish(self, slot: int) -> Mark:
        mark = self._ready[slot] = Mark(self, self._stream_of[slot])
        with self._lock:
            self._streams[mark.stream].append(mark)
        return mark

    def make_ready(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if (mark := self._ready[slot]) is not None:
                mark.wait()
                self._ready[slot] = None

    def used(self, slots: Sequence[int]) -> None: ...

    def step(self, stream: int) -> None:
        """Let the next thing of a stream happen."""
        with self._lock:
            work = self._streams[stream].popleft()
        if isinstance(work, Mark):
            work.is_passed = True
        else:
            ctypes.memmove(*work)

    def _append(self, target: int, source: int, n_bytes: int, stream: int) -> int:
        with self._lock:
            self._streams[stream - 1].append((target, source, n_bytes))
        return 0
