"""Threads that read: C's where a compiler is there, Python's where not; what a caller sees is reader.py. Both read the same bytes; only C's cut
requests into pieces and copy on what they have read.

Python's threads take the interpreter's lock several times per read, which the engine's thread wants too.
"""

import ctypes
import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from layout.compiled import cached_library, compile_once, why_it_failed
from layout.direct import Extent, ReadMode, ShortReadError, read_extent, round_up
from layout.parallel import start_threads
from layout.throttle import Throttle

SOURCE = Path(__file__).with_name("read_pool.c")
CC_FLAGS = ("-O2", "-std=c11", "-shared", "-fPIC", "-pthread")
# Ends that one call takes at most.
_MOST_TAKEN = 64
# Pools that are open, or whose threads were still at a read when they closed: C's threads write into buffers that must stay.
_open: "set[NativeThreads]" = set()


class Target(NamedTuple):
    """Where what was read is copied on to, by the reader's uploader: an address, and the stream that orders the copy."""

    address: int
    stream: int


class ReadRequest(NamedTuple):
    """A read to do, into a buffer as read_extent wants it. `drive` is an index into the reader's drives.

    expected_hash  xxh3-128, hex, that is checked where it is given: by the reader, not by what reads
    target         where the bytes are copied on to as they arrive, unchecked; C's threads do it, Python's leave it to the caller
    """

    tag: Any
    drive: int
    extent: Extent
    buffer: memoryview
    expected_hash: str | None = None
    target: Target | None = None


class Completion(NamedTuple):
    """A read that ended: its bytes, or the error that it met, the time of the read alone, and when that ended by the performance counter.

    is_copied  whether all of it is under way to the request's target
    refused    what the uploader said where it refused a copy, otherwise 0
    """

    request: ReadRequest
    payload: memoryview | None
    error: Exception | None
    seconds: float
    ended: float
    is_copied: bool = False
    refused: int = 0

    @property
    def is_cancelled(self) -> bool:
        """Whether it ended because it was given up."""
        return isinstance(self.error, OSError) and self.error.errno == errno.ECANCELED


class Uploader(NamedTuple):
    """How threads copy on what they have read: addresses of C functions, both 0 if all is well.

    copy     int copy(uint64_t target, const void *source, size_t n, void *stream); 0 stands for a copy within memory
    enter    int enter(void *context), which each thread calls once before; 0 for none
    context  what it is given
    least    bytes that a copy takes at least, as far as a request has so many side by side
    """

    copy: int
    enter: int
    context: int
    least: int = 0


TO_MEMORY = Uploader(0, 0, 0)


class Backend(Protocol):
    """What reads. Submitting, taking and cancelling are one thread's; any thread may post."""

    def submit(self, requests: Sequence[ReadRequest]) -> list[int]:
        """Begin reads; return their numbers."""
        ...

    def take(self, timeout_s: float, least: int = 1, linger_s: float = 0.0) -> list[tuple[Completion, bool]]:
        """Return what has ended, after waiting up to timeout_s for the first of it, and whether it was posted.

        least  how many it is worth while to wait linger_s longer for
        """
        ...

    def post(self, done: Completion) -> None:
        """Have `take` return this."""
        ...

    def cancel(self, number: int) -> None:
        """Give up a request, given by the number that `submit` returned: nothing more is copied to its target, nor read if that is not under way."""
        ...

    def close(self, timeout_s: float) -> None:
        """Drop what was not begun, and wait for the rest up to timeout_s."""
        ...


class PythonThreads:
    """Reads in Python's threads."""

    def __init__(self, modes: Sequence[ReadMode], depths: Sequence[int], limits: Sequence[float | None]) -> None:
        self._modes = modes
        self._throttles = [None if limit is None else Throttle(limit) for limit in limits]
        self._inboxes: list[SimpleQueue[tuple[int, ReadRequest] | None]] = [SimpleQueue() for _ in modes]
        # Numbers of the reads that have not ended and were not given up.
        self._numbers, self._wanted = count(1), set[int]()
        self._ended: SimpleQueue[tuple[Completion, bool]] = SimpleQueue()
        self._is_closed = threading.Event()
        self._inbox_of_thread = [self._inboxes[drive] for drive, depth in enumerate(depths) for _ in range(depth)]
        self._threads = [
            threading.Thread(target=self._serve, args=(drive,), name=f"reader-{drive}-{n}", daemon=True)
            for drive, depth in enumerate(depths)
            for n in range(depth)
        ]
        start_threads(self._threads)

    def submit(self, requests: Sequence[ReadRequest]) -> list[int]:
        numbered = [(next(self._numbers), request) for request in requests]
        for number, request in numbered:
            self._wanted.add(number)
            self._inboxes[request.drive].put((number, request))
        return [number for number, _ in numbered]

    def take(self, timeout_s: float, least: int = 1, linger_s: float = 0.0) -> list[tuple[Completion, bool]]:
        ended = list[tuple[Completion, bool]]()
        try:
            ended.append(self._ended.get(timeout=timeout_s) if timeout_s > 0 else self._ended.get_nowait())
            while True:
                ended.append(self._ended.get_nowait())
        except Empty:
            return ended

    def post(self, done: Completion) -> None:
        self._ended.put((done, True))

    def cancel(self, number: int) -> None:
        self._wanted.discard(number)

    def close(self, timeout_s: float) -> None:
        self._is_closed.set()
        for inbox in self._inbox_of_thread:
            inbox.put(None)
        until = time.perf_counter() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.perf_counter()))

    def _serve(self, drive: int) -> None:
        inbox, mode, throttle = self._inboxes[drive], self._modes[drive], self._throttles[drive]
        while (item := inbox.get()) is not None:
            number, request = item
            if self._is_closed.is_set():
                continue
            start = time.perf_counter()
            payload, error = None, None
            try:
                if number not in self._wanted:
                    raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), str(request.extent.path))
                payload = read_extent(request.extent, request.buffer, mode)
                if throttle is not None:
                    throttle.delay(len(payload), start)
            except Exception as caught:
                error = caught
            self._wanted.discard(number)
            ended = time.perf_counter()
            self._ended.put((Completion(request, payload, error, ended - start, ended), False))


class _Request(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int64),
        ("path", ctypes.c_char_p),
        ("buffer", ctypes.c_void_p),
        ("begin", ctypes.c_int64),
        ("needed", ctypes.c_int64),
        ("room", ctypes.c_int64),
        ("drive", ctypes.c_int64),
        ("piece", ctypes.c_int64),
        ("lead", ctypes.c_int64),
        ("target", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
    )


class _Completion(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int64),
        ("got", ctypes.c_int64),
        ("error", ctypes.c_int64),
        ("copied", ctypes.c_int64),
        ("refused", ctypes.c_int64),
        ("seconds", ctypes.c_double),
        ("ended", ctypes.c_double),
    )


class _Uploader(ctypes.Structure):
    _fields_ = (("copy", ctypes.c_void_p), ("enter", ctypes.c_void_p), ("context", ctypes.c_void_p), ("least", ctypes.c_int64))


class NativeThreads:
    """Reads in the threads of read_pool.c."""

    def __init__(
        self,
        library: ctypes.CDLL,
        modes: Sequence[ReadMode],
        depths: Sequence[int],
        limits: Sequence[float | None],
        *,
        pieces: Sequence[int | None] | None = None,
        uploader: Uploader = TO_MEMORY,
    ) -> None:
        """Raises OSError if the threads cannot be started. `pieces` as the reader has them."""
        self._library, self._modes, n = library, modes, len(modes)
        self._numbers = count(1)
        self._pieces = [piece or 0 for piece in pieces or [None] * n]
        self._reads: dict[int, ReadRequest] = {}
        self._posted: dict[int, Completion] = {}
        self._taken = (_Completion * _MOST_TAKEN)()
        error = ctypes.c_int()
        self._pool = library.pool_open(
            n,
            (ctypes.c_int64 * n)(*depths),
            (ctypes.c_int64 * n)(*(mode.is_direct for mode in modes)),
            (ctypes.c_int64 * n)(*(mode.alignment for mode in modes)),
            (ctypes.c_double * n)(*(limit or 0.0 for limit in limits)),
            ctypes.byref(_Uploader(*uploader)),
            ctypes.byref(error),
        )
        if not self._pool:
            raise MemoryError
        _open.add(self)
        if error.value:
            self.close(1.0)
            raise OSError(error.value, f"{sum(depths)} threads that read: {os.strerror(error.value)}")

    def submit(self, requests: Sequence[ReadRequest]) -> list[int]:
        made, numbers = [], []
        for request in requests:
            number = next(self._numbers)
            numbers.append(number)
            try:
                made.append(self._request(number, request))
            except (TypeError, ValueError, BufferError) as error:
                self._post(number, Completion(request, None, error, 0.0, time.perf_counter()))
            else:
                self._reads[number] = request
        self._check(self._library.pool_submit(self._pool, len(made), (_Request * len(made))(*made)))
        return numbers

    def take(self, timeout_s: float, least: int = 1, linger_s: float = 0.0) -> list[tuple[Completion, bool]]:
        n = self._library.pool_take(self._pool, self._taken, _MOST_TAKEN, timeout_s, least, linger_s) if self._pool else 0
        return [self._ended(self._taken[k]) for k in range(n)]

    def post(self, done: Completion) -> None:
        self._post(next(self._numbers), done)

    def cancel(self, number: int) -> None:
        if self._pool:
            self._library.pool_cancel(self._pool, number)

    def close(self, timeout_s: float) -> None:
        until = time.perf_counter() + timeout_s
        # In steps, so that an interrupt is heard.
        while self._pool and (n_alive := self._library.pool_close(self._pool, 0.1)):
            if time.perf_counter() > until:
                break
        pool, self._pool = self._pool, None
        if pool and not n_alive:
            self._library.pool_free(pool)
            _open.discard(self)

    def _post(self, number: int, done: Completion) -> None:
        self._posted[number] = done
        if self._pool:
            self._check(self._library.pool_post(self._pool, number))

    def _request(self, number: int, request: ReadRequest) -> _Request:
        extent, mode = request.extent, self._modes[request.drive]
        lead = extent.offset % mode.alignment if mode.is_direct else 0
        needed = lead + extent.n_bytes
        room = round_up(needed, mode.alignment) if mode.is_direct else needed
        if len(request.buffer) < room:
            raise ValueError(f"{extent.path}: a buffer of {len(request.buffer)} bytes for a read of {room}")
        address = ctypes.addressof(ctypes.c_char.from_buffer(request.buffer))
        target, stream = request.target or (0, 0)
        path, piece = os.fsencode(extent.path), self._pieces[request.drive]
        return _Request(number, path, address, extent.offset - lead, needed, room, request.drive, piece, lead, target, stream)

    def _ended(self, completion: _Completion) -> tuple[Completion, bool]:
        number, got, code = completion.id, completion.got, completion.error
        request = self._reads.pop(number, None)
        if request is None:
            return self._posted.pop(number), True
        extent, payload = request.extent, None
        error: Exception | None = None
        lead = extent.offset % mode.alignment if (mode := self._modes[request.drive]).is_direct else 0
        if code:
            error = OSError(code, os.strerror(code), str(extent.path))
        elif got < lead + extent.n_bytes:
            error = _short(extent, extent.offset - lead + got)
        else:
            payload = request.buffer[lead : lead + extent.n_bytes]
        # Linux's performance counter is the monotonic clock.
        return Completion(request, payload, error, completion.seconds, completion.ended, completion.copied != 0, completion.refused), False

    def _check(self, status: int) -> None:
        if status:
            raise MemoryError


def _short(extent: Extent, end: int) -> Exception:
    try:
        return ShortReadError.of(extent, end)
    except OSError as error:
        # It is gone since.
        return error


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
    library.pool_open.argtypes = (ctypes.c_int64, *[ctypes.c_void_p] * 6)
    library.pool_submit.argtypes = (library_pool, ctypes.c_int64, ctypes.c_void_p)
    library.pool_post.argtypes = (library_pool, ctypes.c_int64)
    library.pool_cancel.argtypes = (library_pool, ctypes.c_int64)
    library.pool_cancel.restype = None
    library.pool_take.argtypes = (library_pool, ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int64, ctypes.c_double)
    library.pool_take.restype = library.pool_close.restype = ctypes.c_int64
    library.pool_close.argtypes = (library_pool, ctypes.c_double)
    library.pool_free.argtypes = (library_pool,)
    library.pool_free.restype = None
    return library, ""


def open_backend(
    modes: Sequence[ReadMode],
    depths: Sequence[int],
    limits: Sequence[float | None],
    *,
    pieces: Sequence[int | None] | None = None,
    uploader: Uploader = TO_MEMORY,
    is_native: bool | None = None,
) -> Backend:
    """Return threads that read, a depth of them for each drive; `limits` slows drives down to so many bytes per second.

    pieces, uploader  as the reader has them; Python's threads read a request as a whole, and copy nothing on
    is_native         which threads; None: C's if they can be had
    """
    library, why = native_library() if is_native is not False else (None, "")
    if library is not None:
        return NativeThreads(library, modes, depths, limits, pieces=pieces, uploader=uploader)
    assert not is_native, why
    return PythonThreads(modes, depths, limits)
