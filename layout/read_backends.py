"""Threads that read: C's where a compiler is there, Python's where not. Both do the same; what a caller sees is reader.py.

Python's threads take the interpreter's lock several times per read. Beside a main thread that is busy they read at half the rate.
"""

import ctypes
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from layout.compiled import cached_library, compile_once, why_it_failed
from layout.direct import Extent, ReadMode, ShortReadError, read_extent, round_up
from layout.parallel import start_threads
from layout.throttle import Throttle

SOURCE = Path(__file__).with_name("read_pool.c")
CC_FLAGS = ("-O2", "-std=c11", "-shared", "-fPIC", "-pthread")
# Ends that one call takes at most.
_MOST_TAKEN = 64
# Reads whose threads were still at them when their reader closed: their buffers must stay.
_abandoned: "list[dict[int, ToRead]]" = []


class ToRead(NamedTuple):
    """A read to do, under a number that its end carries; `buffer` is as read_extent wants it."""

    number: int
    drive: int
    extent: Extent
    buffer: memoryview


class Ended(NamedTuple):
    """A read that ended: what it read, or its error, the seconds it took, and when that was by the performance counter.

    Neither payload nor error for a number that was posted.
    """

    number: int
    payload: memoryview | None
    error: Exception | None
    seconds: float
    ended: float


class Backend(Protocol):
    """What reads. Submitting and taking are one thread's; any thread may post."""

    def submit(self, reads: Sequence[ToRead]) -> None: ...

    def take(self, timeout_s: float) -> list[Ended]:
        """Return what has ended, after waiting up to timeout_s for the first of it."""
        ...

    def post(self, number: int) -> None:
        """Have `take` return a number that no read has."""
        ...

    def close(self, timeout_s: float) -> None:
        """Drop what was not begun, and wait for the rest up to timeout_s."""
        ...


class PythonThreads:
    """Reads in Python's threads."""

    def __init__(self, modes: Sequence[ReadMode], depths: Sequence[int], limits: Sequence[float | None]) -> None:
        self._modes = modes
        self._throttles = [None if limit is None else Throttle(limit) for limit in limits]
        self._inboxes: list[SimpleQueue[ToRead | None]] = [SimpleQueue() for _ in modes]
        self._ended: SimpleQueue[Ended] = SimpleQueue()
        self._is_closed = threading.Event()
        self._inbox_of_thread = [self._inboxes[drive] for drive, depth in enumerate(depths) for _ in range(depth)]
        self._threads = [
            threading.Thread(target=self._serve, args=(drive,), name=f"reader-{drive}-{n}", daemon=True)
            for drive, depth in enumerate(depths)
            for n in range(depth)
        ]
        start_threads(self._threads)

    def submit(self, reads: Sequence[ToRead]) -> None:
        for read in reads:
            self._inboxes[read.drive].put(read)

    def take(self, timeout_s: float) -> list[Ended]:
        ended = list[Ended]()
        try:
            ended.append(self._ended.get(timeout=timeout_s) if timeout_s > 0 else self._ended.get_nowait())
            while True:
                ended.append(self._ended.get_nowait())
        except Empty:
            return ended

    def post(self, number: int) -> None:
        self._ended.put(Ended(number, None, None, 0.0, time.perf_counter()))

    def close(self, timeout_s: float) -> None:
        self._is_closed.set()
        for inbox in self._inbox_of_thread:
            inbox.put(None)
        until = time.perf_counter() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.perf_counter()))

    def _serve(self, drive: int) -> None:
        inbox, mode, throttle = self._inboxes[drive], self._modes[drive], self._throttles[drive]
        while (read := inbox.get()) is not None:
            if self._is_closed.is_set():
                continue
            start = time.perf_counter()
            payload, error = None, None
            try:
                payload = read_extent(read.extent, read.buffer, mode)
                if throttle is not None:
                    throttle.delay(len(payload), start)
            except Exception as caught:
                error = caught
            ended = time.perf_counter()
            self._ended.put(Ended(read.number, payload, error, ended - start, ended))


class _Request(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int64),
        ("path", ctypes.c_char_p),
        ("buffer", ctypes.c_void_p),
        ("begin", ctypes.c_int64),
        ("needed", ctypes.c_int64),
        ("room", ctypes.c_int64),
        ("drive", ctypes.c_int64),
    )


class _Completion(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int64),
        ("got", ctypes.c_int64),
        ("error", ctypes.c_int64),
        ("seconds", ctypes.c_double),
        ("ended", ctypes.c_double),
    )


class NativeThreads:
    """Reads in the threads of read_pool.c."""

    def __init__(self, library: ctypes.CDLL, modes: Sequence[ReadMode], depths: Sequence[int], limits: Sequence[float | None]) -> None:
        """Raises OSError if the threads cannot be started."""
        self._library, self._modes, n = library, modes, len(modes)
        self._reads: dict[int, ToRead] = {}
        self._failed: dict[int, Exception] = {}
        self._taken = (_Completion * _MOST_TAKEN)()
        error = ctypes.c_int()
        self._pool = library.pool_open(
            n,
            (ctypes.c_int64 * n)(*depths),
            (ctypes.c_int64 * n)(*(mode.is_direct for mode in modes)),
            (ctypes.c_int64 * n)(*(mode.alignment for mode in modes)),
            (ctypes.c_double * n)(*(limit or 0.0 for limit in limits)),
            ctypes.byref(error),
        )
        if not self._pool:
            raise MemoryError
        if error.value:
            self.close(1.0)
            raise OSError(error.value, f"{sum(depths)} threads that read: {os.strerror(error.value)}")

    def submit(self, reads: Sequence[ToRead]) -> None:
        requests = []
        for read in reads:
            self._reads[read.number] = read
            try:
                requests.append(self._request(read))
            except (TypeError, ValueError, BufferError) as error:
                self._failed[read.number] = error
                self.post(read.number)
        self._check(self._library.pool_submit(self._pool, len(requests), (_Request * len(requests))(*requests)))

    def take(self, timeout_s: float) -> list[Ended]:
        n = self._library.pool_take(self._pool, self._taken, _MOST_TAKEN, timeout_s) if self._pool else 0
        return [self._ended(self._taken[k]) for k in range(n)]

    def post(self, number: int) -> None:
        if self._pool:
            self._check(self._library.pool_post(self._pool, number))

    def close(self, timeout_s: float) -> None:
        until = time.perf_counter() + timeout_s
        # In steps, so that an interrupt is heard.
        while self._pool and (n_alive := self._library.pool_close(self._pool, 0.1)):
            if time.perf_counter() > until:
                break
        pool, self._pool = self._pool, None
        if pool and n_alive:
            # A thread that never comes back may still write into its buffer.
            _abandoned.append(self._reads)
        elif pool:
            self._library.pool_free(pool)
            self._reads.clear()

    def _request(self, read: ToRead) -> _Request:
        extent, mode = read.extent, self._modes[read.drive]
        lead = extent.offset % mode.alignment if mode.is_direct else 0
        needed = lead + extent.n_bytes
        room = round_up(needed, mode.alignment) if mode.is_direct else needed
        if len(read.buffer) < room:
            raise ValueError(f"{extent.path}: a buffer of {len(read.buffer)} bytes for a read of {room}")
        address = ctypes.addressof(ctypes.c_char.from_buffer(read.buffer))
        return _Request(read.number, os.fsencode(extent.path), address, extent.offset - lead, needed, room, read.drive)

    def _ended(self, completion: _Completion) -> Ended:
        number, got, code, times = completion.id, completion.got, completion.error, (completion.seconds, completion.ended)
        read = self._reads.pop(number, None)
        if read is None or number in self._failed:
            return Ended(number, None, self._failed.pop(number, None), 0.0, time.perf_counter())
        extent, mode = read.extent, self._modes[read.drive]
        if code:
            return Ended(number, None, OSError(code, os.strerror(code), str(extent.path)), *times)
        lead = extent.offset % mode.alignment if mode.is_direct else 0
        if got < lead + extent.n_bytes:
            return Ended(number, None, ShortReadError.of(extent, extent.offset - lead + got), *times)
        # Linux's performance counter is the monotonic clock.
        return Ended(number, read.buffer[lead : lead + extent.n_bytes], None, *times)

    def _check(self, status: int) -> None:
        if status:
            raise MemoryError


@cache
def native_library() -> tuple[ctypes.CDLL | None, str]:
    """Return read_pool.c compiled, or None and why it cannot be had."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    path = cached_library("read_pool", (SOURCE.read_text(), *CC_FLAGS))
    try:
        if not path.exists() and compiler is None:
            return None, "there is no C compiler (cc) on the PATH"
        compile_once(path, lambda made: [compiler or "cc", *CC_FLAGS, "-o", str(made), str(SOURCE)])
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        return None, f"{SOURCE.name} could not be compiled: {why_it_failed(error)}"
    library.pool_open.restype = library_pool = ctypes.c_void_p
    library.pool_open.argtypes = (ctypes.c_int64, *[ctypes.c_void_p] * 5)
    library.pool_submit.argtypes = (library_pool, ctypes.c_int64, ctypes.c_void_p)
    library.pool_post.argtypes = (library_pool, ctypes.c_int64)
    library.pool_take.argtypes = (library_pool, ctypes.c_void_p, ctypes.c_int64, ctypes.c_double)
    library.pool_take.restype = library.pool_close.restype = ctypes.c_int64
    library.pool_close.argtypes = (library_pool, ctypes.c_double)
    library.pool_free.argtypes = (library_pool,)
    library.pool_free.restype = None
    return library, ""


def open_backend(modes: Sequence[ReadMode], depths: Sequence[int], limits: Sequence[float | None], *, is_native: bool | None = None) -> Backend:
    """Return threads that read, a depth of them for each drive; `limits` slows drives down to so many bytes per second.

    is_native  which threads; None: C's if they can be had
    """
    library, why = native_library() if is_native is not False else (None, "")
    if library is not None:
        return NativeThreads(library, modes, depths, limits)
    assert not is_native, why
    return PythonThreads(modes, depths, limits)
