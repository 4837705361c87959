"""Reading a range of a file past the page cache: the one place where bytes come in.

O_DIRECT moves whole aligned blocks, so a read takes the aligned superset of its range and hands out the slice. Where a file system refuses
direct reads the mode says so and why, and the same calls go through the page cache.
"""

import contextlib
import ctypes
import errno
import mmap
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from manifests.errors import BadInputError, DamagedDataError

PAGE = 4096
_HUGE_PAGE = 2 << 20
# Not among mmap's constants in every Python.
_MADV_POPULATE_WRITE = 23
_ALIGNMENTS = (PAGE, 16384, 65536)
# Refusals that mean "not here"; anything else is a real error.
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


class Extent(NamedTuple):
    """A range of a file, in bytes."""

    path: Path
    offset: int
    n_bytes: int


class ReadMode(NamedTuple):
    """How a directory's files are read. `alignment` is in bytes; `reason` says why direct reads are not used."""

    is_direct: bool
    alignment: int = PAGE
    reason: str = ""

    def __str__(self) -> str:
        return f"direct, {self.alignment} B aligned" if self.is_direct else f"buffered ({self.reason})"


BUFFERED = ReadMode(is_direct=False, reason="asked for")


class ShortReadError(DamagedDataError):
    """A file ended before the range that was asked of it."""

    @classmethod
    def of(cls, extent: Extent, end: int) -> "ShortReadError":
        """Return the error of a read of a file that ended, as the read saw it, at `end`; the file may have grown since."""
        size = min(end, extent.path.stat().st_size)
        return cls(f"{extent.path}: ends at {size} bytes, expected at least {extent.offset + extent.n_bytes}")


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def span_bytes(n_bytes: int, alignment: int = PAGE) -> int:
    """Return how large a buffer must be to receive any range of n_bytes, wherever it begins."""
    return round_up(n_bytes, alignment) + alignment


def aligned_buffer(n_bytes: int) -> memoryview:
    """Return zeroed, page-aligned, writable memory that is really there; from 2 MiB on it begins on a huge page and lies in huge pages.

    Memory that was never touched would be faulted in during the first read: btrfs then reads through the page cache, and every first read is slow.
    Small pages at the ends of a record's buffer cost a drive of 3 GB/s a fifth of its rate.
    """
    length, step = round_up(max(n_bytes, 1), PAGE), _HUGE_PAGE if n_bytes >= _HUGE_PAGE else PAGE
    # One huge page more than is needed, whole ones at both ends included; what is not touched takes no memory.
    memory = mmap.mmap(-1, round_up(length, step) + (step if step > PAGE else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % step
    if step > PAGE:
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)[first : first + length]
    try:
        memory.madvise(_MADV_POPULATE_WRITE, first, length)
    except OSError:
        # Before Linux 5.14: touch every page.
        view[::PAGE] = bytes(len(view[::PAGE]))
    return view


def read_extent(extent: Extent, buffer: memoryview, mode: ReadMode) -> memoryview:
    """Read a range of a file into the buffer and return the slice of the buffer that holds it.

    buffer  writable, aligned to `mode.alignment`, at least `span_bytes(extent.n_bytes, mode.alignment)` long

    Raises ShortReadError if the file ends early, OSError if the device fails.
    """
    lead = extent.offset % mode.alignment if mode.is_direct else 0
    begin, needed = extent.offset - lead, lead + extent.n_bytes
    room = round_up(needed, mode.alignment) if mode.is_direct else needed
    fd = os.open(extent.path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if mode.is_direct else 0))
    try:
        try:
            got = _fill(fd, buffer[:room], begin, needed, mode)
        except OSError as error:
            # The kernel does not say which file failed, and a writer that reads meanwhile must not take the error for its own.
            error.filename = str(extent.path)
            raise
        if not mode.is_direct:
            os.posix_fadvise(fd, begin, needed, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    if got < needed:
        raise ShortReadError.of(extent, begin + got)
    return buffer[lead:needed]


def _fill(fd: int, buffer: memoryview, begin: int, needed: int, mode: ReadMode) -> int:
    """Read until `needed` bytes are there or the file ends; return how many are."""
    done = 0
    while done < needed:
        # A direct read goes on from an aligned place: what lies between is read once more.
        start = done - done % mode.alignment if mode.is_direct else done
        got = os.preadv(fd, [buffer[start:]], begin + start)
        if start + got <= done:
            break
        done = start + got
    return min(done, needed)


def file_blocks(path: Path, begin: int, end: int, mode: ReadMode, *, block_bytes: int = 16 << 20, n_ahead: int = 3) -> Iterator[memoryview]:
    """Yield a range of a file in order, block by block, the next n_ahead being read meanwhile; each is valid until the next.

    Raises as read_extent does.
    """
    extents = [Extent(path, offset, min(block_bytes, end - offset)) for offset in range(begin, end, block_bytes)]
    n_ahead = min(n_ahead, len(extents))
    buffers = [aligned_buffer(span_bytes(min(block_bytes, end - begin), mode.alignment)) for _ in range(n_ahead + 1)]
    if n_ahead <= 1:
        yield from (read_extent(extent, buffers[0], mode) for extent in extents)
        return
    under_way: deque[Future[memoryview]] = deque()
    waiting = iter(zip(extents, cycle(buffers), strict=False))
    with ThreadPoolExecutor(n_ahead) as pool:
        for extent, buffer in islice(waiting, n_ahead):
            under_way.append(pool.submit(read_extent, extent, buffer, mode))
        while under_way:
            block = under_way.popleft().result()
            # Into the buffer that was lent before, so that as many reads are under way while this block is used.
            for extent, buffer in islice(waiting, 1):
                under_way.append(pool.submit(read_extent, extent, buffer, mode))
            yield block


def probe_directory(directory: Path) -> ReadMode:
    """Find out by a transfer how the files of a directory can be read.

    An existing file is read where there is one; an empty directory gets a small file for the moment of the probe.
    Raises BadInputError if the directory is not there.
    """
    try:
        entries = list(os.scandir(directory))
    except OSError as error:
        raise BadInputError(f"{directory}: cannot be opened as a directory: {error.strerror}") from None
    for entry in entries:
        try:
            is_usable = entry.is_file() and entry.stat().st_size >= PAGE
        except OSError:
            # Such as a link that leads in a circle. Whether a file that is needed can be read is told where it is.
            continue
        try:
            if is_usable:
                return _probe_file(Path(entry.path))
        except FileNotFoundError:
            # Someone is at work in the directory: a partial file has just got its name.
            continue
    return _probe_with_new_file(directory)


def _probe_with_new_file(directory: Path) -> ReadMode:
    data = bytes(range(256)) * (_ALIGNMENTS[-1] // 128)
    try:
        # Without a name, so that nothing stays behind whatever happens.
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            return _probe_with_named_file(directory, data)
        return ReadMode(is_direct=False, reason=f"no file to try, and none can be made: {error.strerror}")
    try:
        os.write(fd, data)
        return _probe_file(Path(f"/proc/self/fd/{fd}"))
    except OSError as error:
        return ReadMode(is_direct=False, reason=f"no file to try, and none can be made: {error.strerror}")
    finally:
        os.close(fd)


def _probe_with_named_file(directory: Path, data: bytes) -> ReadMode:
    path = directory / f".probe-{os.getpid()}.partial"
    try:
        path.write_bytes(data)
        return _probe_file(path)
    except OSError as error:
        return ReadMode(is_direct=False, reason=f"no file to try, and none can be made: {error.strerror}")
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _probe_file(path: Path) -> ReadMode:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return ReadMode(is_direct=False, reason=f"the file system refuses O_DIRECT: {error.strerror}")
    try:
        for alignment in _ALIGNMENTS:
            buffer = aligned_buffer(alignment)
            try:
                got = os.preadv(fd, [buffer], 0)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                continue
            with path.open("rb") as file:
                if file.read(got) != buffer[:got]:
                    return ReadMode(is_direct=False, reason=f"a direct read of {path.name} gave other bytes than a plain one")
            return ReadMode(is_direct=True, alignment=alignment)
    finally:
        os.close(fd)
    return ReadMode(is_direct=False, reason=f"direct reads are refused at every alignment up to {_ALIGNMENTS[-1]} B")
