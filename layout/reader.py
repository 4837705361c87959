"""The one reader of records: threads per drive that read past the page cache into the caller's buffers.

The runtime, `--measure-drives` and `verify-hashes` all read through it, so what is measured is what is used. It knows nothing of experts;
which drive to ask is the caller's decision.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

import xxhash

from layout.direct import Extent, ReadMode
from layout.parallel import start_threads
from layout.read_backends import TO_MEMORY, Completion, ReadRequest, Target, Uploader, native_library, open_backend
from manifests.errors import DamagedDataError

__all__ = [
    "CLOSE_S",
    "TO_MEMORY",
    "Completion",
    "ReadRequest",
    "Reader",
    "Target",
    "Uploader",
    "check_hash",
    "reader_name",
    "spare_requests",
    "why_slower",
]

# One thread hashes what several read: xxh3-128 takes 20 GB/s and more from memory on one core.
READS_PER_HASH = 4
# Nobody who ends a run waits longer for a drive that hangs.
CLOSE_S = 5.0
# How long a wait may keep an interrupt.
_TICK_S = 0.1


class Reader:
    """Reads for several drives at once, each with its own mode and its own number of requests in flight. One thread submits and takes.

    Hashes are taken by threads of their own, since a thread that hashes does not read. Whoever wants hashes and a drive that is never idle submits
    `spare_requests(depth)` more than its depth: those are hashed, or wait, while `depth` are read.
    """

    def __init__(
        self,
        modes: Sequence[ReadMode],
        depths: Sequence[int],
        *,
        limits: Sequence[float | None] | None = None,
        pieces: Sequence[int | None] | None = None,
        uploader: Uploader = TO_MEMORY,
        is_native: bool | None = None,
    ) -> None:
        """Start the threads.

        limits     bytes per second that drives are slowed down to; None leaves them as they are
        pieces     bytes into which a drive's requests are cut, to be read side by side by its threads: a multiple of its alignment, None for whole
        uploader   how bytes are copied on to targets; Python's threads read whole requests and copy none
        is_native  whether C's threads read, or Python's; None: C's if they can be had
        """
        self.modes = tuple(modes)
        self._to_hash: SimpleQueue[Completion | None] = SimpleQueue()
        self._over: deque[Completion] = deque()
        self._is_closed = threading.Event()
        limits = limits or [None] * len(modes)
        self._backend = open_backend(self.modes, depths, limits, pieces=pieces, uploader=uploader, is_native=is_native)
        n_hashing = min(-(-sum(depths) // READS_PER_HASH), len(os.sched_getaffinity(0)))
        self._hashing_threads = [threading.Thread(target=self._hash, name=f"reader-hash-{n}", daemon=True) for n in range(n_hashing)]
        start_threads(self._hashing_threads)

    def submit(self, *requests: ReadRequest) -> list[int]:
        """Begin reads; return their numbers."""
        return self._backend.submit(requests)

    def cancel(self, number: int) -> None:
        """Give up a request that was submitted: when this returns, no copy to its target will begin. It ends without what was not being read."""
        self._backend.cancel(number)

    def take(self, timeout_s: float = 0.0, *, least: int = 1, linger_s: float = 0.0) -> list[Completion]:
        """Return what has ended, in the order of the ends, after waiting up to timeout_s for the first; one with a hash ends when that is checked.

        least  how many it is worth while to wait linger_s longer for; Python's threads do not wait
        """
        until, waiting_s = time.perf_counter() + timeout_s, timeout_s
        while True:
            done = list(self._over)
            self._over.clear()
            for completion, is_checked in self._backend.take(0.0 if done else waiting_s, least, linger_s):
                if completion.request.expected_hash is None or completion.error is not None or is_checked:
                    done.append(completion)
                else:
                    self._to_hash.put(completion)
            waiting_s = until - time.perf_counter()
            if done or waiting_s <= 0:
                return done

    def wait(self) -> Completion:
        """Return the next read that has ended."""
        while not self._over:
            self._over.extend(self.take(_TICK_S))
        return self._over.popleft()

    def check(self, request: ReadRequest) -> None:
        """Have the hash of bytes that are there checked; it ends like a read."""
        self._to_hash.put(Completion(request, request.buffer, None, 0.0, time.perf_counter()))

    def close(self) -> None:
        """End the threads after the reads and hashes that they are in; requests not yet begun are dropped.

        A read that never returns is left behind after CLOSE_S: its thread ends with the process.
        """
        until = time.perf_counter() + CLOSE_S
        self._is_closed.set()
        for _ in self._hashing_threads:
            self._to_hash.put(None)
        for thread in self._hashing_threads:
            thread.join(max(0.0, until - time.perf_counter()))
        self._backend.close(max(0.0, until - time.perf_counter()))

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hash(self) -> None:
        while (done := self._to_hash.get()) is not None:
            if self._is_closed.is_set():
                continue
            assert done.payload is not None
            try:
                check_hash(done.request.extent, done.payload, done.request.expected_hash)
            except Exception as caught:
                done = done._replace(payload=None, error=caught)
            self._backend.post(done)


def reader_name() -> str:
    """Return which threads read here."""
    return "preadv in Python's threads" if native_library()[0] is None else "pread in C threads"


def why_slower() -> str | None:
    """Return what to say where Python's threads have to do, or None."""
    library, why = native_library()
    return None if library is not None else f"reads run in Python's threads, which take the interpreter from the engine: {why}; install gcc"


def spare_requests(depth: int) -> int:
    """Return how many requests beyond a drive's depth keep it at that depth while hashes are checked and buffers change hands."""
    return 1 + -(-depth // READS_PER_HASH)


def check_hash(extent: Extent, payload: memoryview, expected: str | None) -> None:
    """Raise DamagedDataError if the bytes do not have the expected xxh3-128."""
    if expected is None:
        return
    found = xxhash.xxh3_128_hexdigest(payload)
    if found != expected:
        raise DamagedDataError(f"{extent.path}: xxh3-128 {found} differs from the expected {expected}")
