"""A GPU's streams and events without a GPU: its work happens late, and in any order that streams and events allow. CudaSlots runs on it as it is."""

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
import torch

import runtime.storage.device_cache
import runtime.storage.device_slots
from runtime.storage.device_slots import CudaSlots

_COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class Event:
    """A point in a stream. Recorded again it is another point; who waits, waits for the last one recorded by then."""

    def __init__(self, gpu: "SimulatedGpu") -> None:
        self._gpu, self.stream, self.version, self.passed = gpu, gpu.computing, 0, {0}

    def record(self, stream: "Stream") -> None:
        with self._gpu.lock:
            self.version, self.stream = self.version + 1, stream
            stream.work.append(partial(self.passed.add, self.version))

    def query(self) -> bool:
        self._gpu.do_some()
        return self.version in self.passed

    def synchronize(self) -> None:
        self._gpu.do_until(Wait(self))


class Wait:
    """A stream's wait for an event, as it was when this was asked for."""

    def __init__(self, event: Event) -> None:
        self.event, self.version, self.stream = event, event.version, event.stream

    def is_over(self) -> bool:
        return self.version in self.event.passed


class Stream:
    """Work in order."""

    def __init__(self, gpu: "SimulatedGpu", device: object = None) -> None:
        self._gpu, self.work = gpu, deque[Callable[[], object] | Wait]()
        self.cuda_stream = len(gpu.streams) + 1
        gpu.streams[self.cuda_stream] = self

    def wait_event(self, event: Event) -> None:
        with self._gpu.lock:
            self.work.append(Wait(event))

    def wait_stream(self, other: "Stream") -> None:
        event = Event(self._gpu)
        event.record(other)
        self.wait_event(event)


class SimulatedGpu:
    """See the module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lock, self.streams, self._rng = threading.RLock(), dict[int, Stream](), random.Random(3)
        self.computing = Stream(self)
        self._copy = _COPY(self._append_copy)
        slots = runtime.storage.device_slots
        monkeypatch.setattr(runtime.storage.device_cache, "open_device_slots", CudaSlots)
        monkeypatch.setattr(slots, "raw_stream", lambda device: self.computing.cuda_stream)
        monkeypatch.setattr(slots, "upload", self._append_copy)
        monkeypatch.setattr(slots, "upload_functions", lambda: (ctypes.cast(self._copy, ctypes.c_void_p).value, 0, 0))
        monkeypatch.setattr(torch.cuda, "Event", partial(Event, self))
        monkeypatch.setattr(torch.cuda, "Stream", partial(Stream, self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.computing)

    def launch(self, work: Callable[[], object]) -> None:
        """Have the computing stream do something, later."""
        with self.lock:
            self.computing.work.append(work)

    def wait_for_results(self) -> None:
        """Wait for what the computing stream has been given so far."""
        event = Event(self)
        event.record(self.computing)
        event.synchronize()

    def do_some(self) -> None:
        for _ in range(self._rng.choice((0, 0, 1, 2, 8, 30))):
            self._do_next(self._rng.choice(list(self.streams.values())))

    def do_until(self, awaited: Wait) -> None:
        while not awaited.is_over():
            stream = awaited.stream
            # What a stream waits for comes first, and what that waits for.
            while stream.work and isinstance(wait := stream.work[0], Wait) and not wait.is_over():
                stream = wait.stream
            assert stream.work, "streams wait for each other, or for nothing"
            self._do_next(stream)

    def _do_next(self, stream: Stream) -> None:
        with self.lock:
            if not stream.work:
                return
            work = stream.work[0]
            if isinstance(work, Wait):
                if work.is_over():
                    stream.work.popleft()
                return
            stream.work.popleft()
            work()

    def _append_copy(self, target: int, source: int, n_bytes: int, stream: int) -> int:
        with self.lock:
            self.streams[stream].work.append(partial(ctypes.memmove, target, source, n_bytes))
        return 0
