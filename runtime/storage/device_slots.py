"""Slots for records in a device's memory, and the uploads into them.

On CUDA uploads run beside the computation, on streams of their own, and events keep the order: work on a slot waits for its upload, an upload
waits for the last work on what was there before, and the host memory it comes from is free only once it has ended. On the CPU a copy is a copy.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from layout.direct import round_up
from layout.reader import TO_MEMORY, Target, Uploader
from layout.sizes import format_size
from manifests.errors import DeviceError
from runtime.kernels.driver import raw_stream, refused_upload, upload, upload_functions

# Kernels read rows of 16 bytes and more; every slot begins at a multiple of this.
SLOT_STEP = 256
# Copies to a device share its link, so a few streams fill it.
N_STREAMS = 3
# What threads that read copy at least in one call: while a dozen of them call the driver for a megabyte each, a launch waits for half a millisecond.
LEAST_COPY = 8 << 20


class Upload(Protocol):
    """A record on its way to a device."""

    def is_done(self) -> bool: ...

    def wait(self) -> None: ...


class DeviceSlots(Protocol):
    """Slots for records: see the module. `uploader` is how threads that read fill them; what it refuses, `refused` says."""

    n_slots: int
    uploader: Uploader

    def record(self, slot: int) -> Tensor:
        """Return a slot's record, uint8 [record_bytes]."""
        ...

    def address(self, slot: int) -> int:
        """Return where a slot begins, for kernels that are given addresses."""
        ...

    def begin(self, slot: int) -> None:
        """Order the uploads that follow behind the last work on the slot."""
        ...

    def copy(self, slot: int, source: Tensor, begin: int, end: int) -> None:
        """Upload bytes begin to end of the record that `source`, uint8, begins with."""
        ...

    def target(self, slot: int, begin: int) -> Target:
        """Return where the uploader copies a record's bytes from `begin` on to."""
        ...

    def refused(self, status: int) -> Exception:
        """Return the error for what the uploader said."""
        ...

    def finish(self, slot: int) -> Upload:
        """Say that all of a record is under way; it may be made ready now."""
        ...

    def make_ready(self, slots: Sequence[int]) -> None:
        """Let the work that is launched on the current stream from now on wait for these slots' uploads."""
        ...

    def used(self, slots: Sequence[int]) -> None:
        """Say that all work on these slots has been launched on the current stream."""
        ...


class _Done:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None: ...


_DONE = _Done()


class CpuSlots:
    """Slots in host memory, for computing on the CPU."""

    uploader = TO_MEMORY

    def __init__(self, n_slots: int, record_bytes: int) -> None:
        self.n_slots, self._slots = n_slots, _allocate(n_slots, record_bytes, torch.device("cpu"))
        self._records = list(self._slots[:, :record_bytes].unbind())

    def record(self, slot: int) -> Tensor:
        return self._records[slot]

    def address(self, slot: int) -> int:
        return self._records[slot].data_ptr()

    def begin(self, slot: int) -> None: ...

    def copy(self, slot: int, source: Tensor, begin: int, end: int) -> None:
        self._records[slot][begin:end] = source[begin:end]

    def target(self, slot: int, begin: int) -> Target:
        return Target(self.address(slot) + begin, 0)

    def refused(self, status: int) -> Exception:
        raise AssertionError("memory refuses no copy")

    def finish(self, slot: int) -> Upload:
        return _DONE

    def make_ready(self, slots: Sequence[int]) -> None: ...

    def used(self, slots: Sequence[int]) -> None: ...


class _CudaUpload:
    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class CudaSlots:
    """Slots in a GPU's memory. One stream computes: whoever makes slots ready on one stream uses them there."""

    def __init__(self, n_slots: int, record_bytes: int, device: torch.device, *, n_streams: int = N_STREAMS) -> None:
        self.n_slots, self._device = n_slots, device
        self._slots = _allocate(n_slots, record_bytes, device)
        self._records = list(self._slots[:, :record_bytes].unbind())
        self._first, self._stride = self._slots.data_ptr(), self._slots.stride(0)
        self._streams = [torch.cuda.Stream(device) for _ in range(n_streams)]
        # The memory may have had other work before.
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(device))
        self.uploader = Uploader(*upload_functions(), least=LEAST_COPY)
        self._n_begun = 0
        self._record_bytes, self._raw = record_bytes, [stream.cuda_stream for stream in self._streams]
        # Which stream fills a slot.
        self._stream_of = [0] * n_slots
        # When each slot was finished last, counted.
        self._n_finished, self._finished = 0, [0] * n_slots
        # Of each stream, the last work on slots that it waited for.
        self._awaited: list[torch.cuda.Event | None] = [None] * n_streams
        # The stream that computes, as it was seen last.
        self._computing = torch.cuda.current_stream(device)
        # One event per slot for all of its uploads: a later one says more.
        self._events = [torch.cuda.Event() for _ in range(n_slots)]
        self._ready: list[torch.cuda.Event | None] = [None] * n_slots
        self._used: list[torch.cuda.Event | None] = [None] * n_slots

    def record(self, slot: int) -> Tensor:
        return self._records[slot]

    def address(self, slot: int) -> int:
        return self._first + slot * self._stride

    def begin(self, slot: int) -> None:
        number = self._stream_of[slot] = self._n_begun % len(self._streams)
        stream = self._streams[number]
        self._n_begun += 1
        # Slots that were handed out together share an event.
        if (event := self._used[slot]) is not None and event is not self._awaited[number]:
            stream.wait_event(event)
            self._awaited[number] = event
        # An upload that was given up may still be on its way into the slot, on another stream.
        if (event := self._ready[slot]) is not None:
            stream.wait_event(event)

    def copy(self, slot: int, source: Tensor, begin: int, end: int) -> None:
        assert 0 <= begin <= end <= min(self._record_bytes, source.numel())
        upload(self.address(slot) + begin, source.data_ptr() + begin, end - begin, self._raw[self._stream_of[slot]])

    def target(self, slot: int, begin: int) -> Target:
        return Target(self.address(slot) + begin, self._raw[self._stream_of[slot]])

    def refused(self, status: int) -> Exception:
        return refused_upload(status)

    def finish(self, slot: int) -> Upload:
        event = self._events[slot]
        event.record(self._streams[self._stream_of[slot]])
        self._n_finished += 1
        self._finished[slot] = self._n_finished
        self._ready[slot] = event
        return _CudaUpload(event)

    def make_ready(self, slots: Sequence[int]) -> None:
        # What was finished last on a stream stands for all before it.
        last = dict[int, int]()
        for slot in slots:
            if self._ready[slot] is not None:
                number = self._stream_of[slot]
                if number not in last or self._finished[slot] > self._finished[last[number]]:
                    last[number] = slot
        stream = self._compute_stream()
        for slot in last.values():
            stream.wait_event(self._events[slot])
        for slot in slots:
            # The event of the work that follows comes behind these.
            self._ready[slot] = None

    def used(self, slots: Sequence[int]) -> None:
        event = torch.cuda.Event()
        event.record(self._compute_stream())
        for slot in slots:
            self._used[slot] = event

    def _compute_stream(self) -> torch.cuda.Stream:
        if raw_stream(self._device) != self._computing.cuda_stream:
            self._computing = torch.cuda.current_stream(self._device)
        return self._computing


def open_device_slots(n_slots: int, record_bytes: int, device: torch.device) -> DeviceSlots:
    """Return slots in a device's memory. Raises DeviceError if there is not that much of it."""
    return CudaSlots(n_slots, record_bytes, device) if device.type == "cuda" else CpuSlots(n_slots, record_bytes)


def _allocate(n_slots: int, record_bytes: int, device: torch.device) -> Tensor:
    stride = round_up(record_bytes, SLOT_STEP)
    try:
        return torch.empty((n_slots, stride), dtype=torch.uint8, device=device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and "memory" not in str(error):
            raise
        size = format_size(n_slots * stride)
        raise DeviceError(f"--vram-cache: {size} for {n_slots} experts cannot be had on {device}; ask for less") from None
