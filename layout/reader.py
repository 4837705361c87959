"""The one reader of records: threads per drive that read past the page cache into the caller's buffers.

The runtime, `--measure-drives` and `verify-hashes` all read through it, so what is measured is what is used. It knows nothing of experts;
which drive to ask is the caller's decision.
"""

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import xxhash

from layout.direct import Extent, ReadMode, read_extent
from layout.parallel import start_threads
from manifests.errors import DamagedDataError

NAME = "preadv threads"


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
    """Reads for several drives at once, each with its own mode and its own number of requests in flight."""

    def __init__(self, modes: Sequence[ReadMode], depths: Sequence[int]) -> None:
        self.modes = tuple(modes)
        self._inboxes: list[SimpleQueue[ReadRequest | None]] = [SimpleQueue() for _ in modes]
        self._done: SimpleQueue[Completion] = SimpleQueue()
        self._is_closed = threading.Event()
        self._inbox_of_thread = [self._inboxes[drive] for drive, depth in enumerate(depths) for _ in range(depth)]
        self._threads = [
            threading.Thread(target=self._serve, args=(drive,), name=f"reader-{drive}-{n}", daemon=True)
            for drive, depth in enumerate(depths)
            for n in range(depth)
        ]
        start_threads(self._threads)

    def submit(self, request: ReadRequest) -> None:
        self._inboxes[request.drive].put(request)

    def wait(self) -> Completion:
        """Return the next read that has ended, in the order of their ends."""
        return self._done.get()

    def close(self) -> None:
        """End the threads after the reads that they are in; requests not yet begun are dropped."""
        self._is_closed.set()
        for inbox in self._inbox_of_thread:
            inbox.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, drive: int) -> None:
        inbox, mode = self._inboxes[drive], self.modes[drive]
        while (request := inbox.get()) is not None:
            if self._is_closed.is_set():
                continue
            start = time.perf_counter()
            payload, error = None, None
            try:
                payload = read_extent(request.extent, request.buffer, mode)
                seconds = time.perf_counter() - start
                check_hash(request.extent, payload, request.expected_hash)
            except Exception as caught:
                payload, error, seconds = None, caught, time.perf_counter() - start
            self._done.put(Completion(request, payload, error, seconds))


def check_hash(extent: Extent, payload: memoryview, expected: str | None) -> None:
    """Raise DamagedDataError if the bytes do not have the expected xxh3-128."""
    if expected is None:
        return
    found = xxhash.xxh3_128_hexdigest(payload)
    if found != expected:
        raise DamagedDataError(f"{extent.path}: xxh3-128 {found} differs from the expected {expected}")
