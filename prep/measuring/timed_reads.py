"""Timed reads: whole records through the runtime's reader, a number in flight on each drive, for a time. It knows nothing of profiles."""

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from layout.direct import Extent, ReadMode, aligned_buffer, span_bytes
from layout.holes import first_hole
from layout.reader import Completion, Reader, ReadRequest, spare_requests
from layout.sizes import counted
from manifests.errors import BadInputError, DamagedDataError, KtierError

_HUGE_PAGE = 2 << 20


class Feed(NamedTuple):
    """What one drive is asked for, `depth` at a time. `deal` gives ranges of one size; `device` is named when a read fails."""

    deal: Callable[[], Extent]
    mode: ReadMode
    depth: int
    device: str = ""


class Run(NamedTuple):
    """The reads of one drive, in the order of their ends.

    read_bytes  of each read
    times       seconds that each took
    ends        seconds from the first request to each end
    """

    read_bytes: int
    times: list[float]
    ends: list[float]

    @property
    def n_bytes(self) -> int:
        return self.read_bytes * len(self.times)

    @property
    def seconds(self) -> float:
        return self.ends[-1]

    @property
    def bytes_per_s(self) -> float:
        return self.n_bytes / self.seconds

    def bytes_per_s_between(self, begin: float, end: float) -> float:
        return self.read_bytes * sum(begin < at <= end for at in self.ends) / (end - begin)


class Deck:
    """Deals a drive's record files in random order: none a second time while another has not been read.

    Files with holes are left out, for a hole is read at the speed of memory. Where reads go through the page cache, a file's pages are
    dropped from it before its first read.
    """

    def __init__(self, paths: Sequence[Path], record_bytes: int, mode: ReadMode, rng: random.Random) -> None:
        self._rng, self._mode = rng, mode
        self._unseen = [Extent(path, 0, record_bytes) for path in rng.sample(list(paths), len(paths))]
        self._seen: list[Extent] = []
        self._left: list[Extent] = []
        self.record_bytes = record_bytes
        self.n_files = len(paths)
        self.n_dealt = 0
        self.n_with_holes = 0

    def deal(self) -> Extent:
        """Return the next file's range. Raises BadInputError if all have holes, KtierError if one has gone."""
        self.n_dealt += 1
        while self._unseen:
            extent = self._unseen.pop()
            if self._is_whole(extent.path):
                self._seen.append(extent)
                return extent
            self.n_with_holes += 1
        if not self._seen:
            what = f"{counted(self.n_files, 'file')}, none without holes, parts never written"
            raise BadInputError(f"{what}, so a rate would be false; extract the experts again")
        if not self._left:
            self._left = self._rng.sample(self._seen, len(self._seen))
        return self._left.pop()

    def _is_whole(self, path: Path) -> bool:
        try:
            is_whole = first_hole(path) is None
            if not self._mode.is_direct:
                _drop_cached_pages(path)
        except OSError as error:
            raise KtierError(f"{path}: cannot be opened to measure its drive: {error.strerror}") from None
        return is_whole


def read_feeds(feeds: Sequence[Feed], seconds: float) -> list[Run]:
    """Keep each feed's number of reads in flight, on all drives at once, for a time; return what each drive did.

    Raises KtierError, or DamagedDataError for a file that is too short, naming the file and its device.
    """
    # Some more than are in flight, so that a thread that is done finds its next request waiting.
    requests = [request for number, feed in enumerate(feeds) for request in _requests(number, feed)]
    runs = [Run(next(r.extent.n_bytes for r in requests if r.drive == number), [], []) for number in range(len(feeds))]
    with Reader([feed.mode for feed in feeds], [feed.depth for feed in feeds]) as reader:
        start = time.perf_counter()
        for request in requests:
            reader.submit(request)
        n_in_flight = len(requests)
        while n_in_flight:
            done = reader.wait()
            now = time.perf_counter() - start
            n_in_flight -= 1
            feed, run = feeds[done.request.drive], runs[done.request.drive]
            if done.error is not None:
                raise _failure(done, feed.device)
            run.times.append(done.seconds)
            run.ends.append(now)
            if now < seconds:
                reader.submit(done.request._replace(extent=feed.deal()))
                n_in_flight += 1
    return runs


def n_requests(depth: int) -> int:
    """Return how many requests, each with a buffer, keep `depth` reads in flight."""
    return depth + spare_requests(depth)


def read_for(extents: list[Extent], mode: ReadMode, depth: int, seconds: float, rng: random.Random) -> tuple[list[float], float]:
    """Keep `depth` reads of ranges drawn at random in flight for a time.

    Returns the seconds that each read took, and those from the first request to the last end.
    """
    run = read_feeds([Feed(lambda: rng.choice(extents), mode, depth)], seconds)[0]
    return run.times, run.seconds


def _requests(number: int, feed: Feed) -> list[ReadRequest]:
    extents = [feed.deal() for _ in range(n_requests(feed.depth))]
    n_bytes = span_bytes(extents[0].n_bytes, feed.mode.alignment)
    buffers = [aligned_buffer(n_bytes) for _ in extents]
    return [ReadRequest(None, number, extent, buffer) for extent, buffer in zip(extents, buffers, strict=True)]


def _failure(done: Completion, device: str) -> KtierError:
    path, error = done.request.extent.path, done.error
    if isinstance(error, DamagedDataError):
        return type(error)(f"{error}; found while its drive was measured: kprep verify-hashes names what else is damaged")
    what = error.strerror if isinstance(error, OSError) else error
    return KtierError(
        f"{path}: a read failed while its drive {f'({device}) ' if device else ''}was measured: {what}; "
        "ask dmesg about the drive; kprep verify-hashes names what else is damaged, and --repair restores it from other copies"
    )


def _drop_cached_pages(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
