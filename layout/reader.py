"""The one reader of records: threads per drive that read past the page cache into the caller's buffers.

The runtime, `--measure-drives` and `verify-hashes` all read through it, so what is measured is what is used. It knows nothing of experts;
which drive to ask is the caller's decision.
"""

import os
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import xxhash

from layout.direct import Extent, ReadMode, read_extent
from layout.parallel import start_threads
from layout.throttle import Throttle
from manifests.errors import DamagedDataError

NAME = "preadv threads"
# One thread hashes what several read: xxh3-128 takes 20 GB/s and more from memory on one core.
READS_PER_HASH = 4
CLOSE_S = 30.0


class ReadRequest(NamedTuple):
    """A read to do. `drive` is an index into the reader's drives; `expected_hash` (xxh3-128, hex) is checked where it is given."""

    tag: Any
    drive: int
    extent: Extent
    buffer: memoryview
    expected_hash: str | None = None


class Completion(NamedTuple):
    """A read that ended: its bytes, or the error that it met. `seconds` is the time of the read alone."""

    request: ReadRequest
    payload: memoryview | None
    error: Exception | None
    seconds: float


class Reader:
    """Reads for several drives at once, each with its own mode and its own number of requests in flight.

    Hashes are taken by threads of their own, since a thread that hashes does not read. Whoever wants hashes and a drive that is never idle submits
    `spare_requests(depth)` more than its depth: those are hashed, or wait, while `depth` are read.
    """

    def __init__(self, modes: Sequence[ReadMode], depths: Sequence[int], *, limits: Sequence[float | None] | None = None) -> None:
        """Start the threads. `limits` slows drives down to so many bytes per second; None leaves them as they are."""
        self.modes = tuple(modes)
        self._throttles = [None if limit is None else Throttle(limit) for limit in limits or [None] * len(modes)]
        self._inboxes: list[SimpleQueue[ReadRequest | None]] = [SimpleQueue() for _ in modes]
        self._to_hash: SimpleQueue[Completion | None] = SimpleQueue()
        self._done: SimpleQueue[Completion] = SimpleQueue()
        self._is_closed = threading.Event()
        self._inbox_of_thread = [self._inboxes[drive] for drive, depth in enumerate(depths) for _ in range(depth)]
        self._threads = [
            threading.Thread(target=self._serve, args=(drive,), name=f"reader-{drive}-{n}", daemon=True)
            for drive, depth in enumerate(depths)
            for n in range(depth)
        ]
        n_hashing = min(-(-sum(depths) // READS_PER_HASH), len(os.sched_getaffinity(0)))
        self._hashing_threads = [threading.Thread(target=self._hash, name=f"reader-hash-{n}", daemon=True) for n in range(n_hashing)]
        start_threads([*self._threads, *self._hashing_threads])

    def submit(self, request: ReadRequest) -> None:
        self._inboxes[request.drive].put(request)

    def wait(self) -> Completion:
        """Return the next read that has ended, in the order of their ends; one with a hash to check ends when that is done."""
        return self._done.get()

    @property
    def completions(self) -> SimpleQueue[Completion]:
        """What `wait` takes from: for a caller that waits with a limit."""
        return self._done

    def check(self, request: ReadRequest) -> None:
        """Have the hash of bytes that are there checked; it ends like a read."""
        self._to_hash.put(Completion(request, request.buffer, None, 0.0))

    def close(self) -> None:
        """End the threads after the reads and hashes that they are in; requests not yet begun are dropped.

        A read that never returns is left behind after CLOSE_S: its thread ends with the process.
        """
        self._is_closed.set()
        for inbox in self._inbox_of_thread:
            inbox.put(None)
        for _ in self._hashing_threads:
            self._to_hash.put(None)
        until = time.perf_counter() + CLOSE_S
        for thread in (*self._threads, *self._hashing_threads):
            thread.join(max(0.0, until - time.perf_counter()))

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, drive: int) -> None:
        inbox, mode, throttle = self._inboxes[drive], self.modes[drive], self._throttles[drive]
        while (request := inbox.get()) is not None:
            if self._is_closed.is_set():
                continue
            start = time.perf_counter()
            payload, error = None, None
            try:
                payload = read_extent(request.extent, request.buffer, mode)
                if throttle is not None:
                    throttle.delay(len(payload), start)
            except Exception as caught:
                error = caught
            done = Completion(request, payload, error, time.perf_counter() - start)
            if error is None and request.expected_hash is not None:
                self._to_hash.put(done)
            else:
                self._done.put(done)

    def _hash(self) -> None:
        while (done := self._to_hash.get()) is not None:
            if self._is_closed.is_set():
                continue
            assert done.payload is not None
            try:
                check_hash(done.request.extent, done.payload, done.request.expected_hash)
            except Exception as caught:
                done = done._replace(payload=None, error=caught)
            self._done.put(done)


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
