"""Files that appear whole or not at all: a partial name, the bytes, fsync, rename, and fsync of the directory."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from layout.direct import ReadMode, round_up
from manifests.errors import KtierError, NoSpaceError

PARTIAL_SUFFIX = ".partial"


def write_record(path: Path, buffer: memoryview, n_bytes: int, mode: ReadMode, *, check: Callable[[Path], None] | None = None) -> None:
    """Make a file of the buffer's first n_bytes, past the page cache where the mode is direct.

    buffer  aligned, and as long as n_bytes rounded up to the alignment
    check   called with the partial file's path once its bytes are on the disk; what it raises keeps the file from appearing

    The name is durable once `sync_directory` has been called. Raises NoSpaceError if the file system is full.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    padded = round_up(n_bytes, mode.alignment) if mode.is_direct else n_bytes
    with _partial(path) as partial:
        fd = _open_for_writing(partial, flags, is_direct=mode.is_direct)
        try:
            _reserve(fd, padded)
            _write_all(fd, buffer[:padded], alignment=mode.alignment if mode.is_direct else 1)
            # The last block was written whole; the file ends where its bytes end.
            os.ftruncate(fd, n_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)
        if check is not None:
            check(partial)


def write_bytes(path: Path, data: bytes) -> None:
    """Make or replace a small file, durably."""
    with _partial(path) as partial, partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Give a partial path to write; what is there at the end is synced and takes the name, unless an error comes first."""
    with _partial(path) as partial:
        yield partial
        fd = os.open(partial, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        _remove(partial)
        if error.filename is not None and str(error.filename) not in (str(path), str(partial)):
            # What was to be read, not what was to be written.
            raise KtierError(f"{error.filename}: cannot be read: {error.strerror}") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(f"{path}: no room left on the file system; make room and run the same command again") from None
        raise KtierError(f"{path}: cannot be written: {error.strerror}") from error
    except BaseException:
        _remove(partial)
        raise


def _remove(partial: Path) -> None:
    # On a read-only file system not even the absence of a file can be brought about; the error that led here is what counts.
    with contextlib.suppress(OSError):
        partial.unlink()


def _reserve(fd: int, n_bytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, n_bytes)
    except OSError as error:
        # Only a help against fragments: some file systems cannot, and the C library's substitute cannot write direct.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def _open_for_writing(path: Path, flags: int, *, is_direct: bool) -> int:
    return os.open(path, flags | (os.O_DIRECT if is_direct else 0), 0o644)


def _write_all(fd: int, data: memoryview, *, alignment: int) -> None:
    done = 0
    while done < len(data):
        end = done + os.pwrite(fd, data[done:], done)
        # A direct write that the disk cut short goes on from an aligned place.
        former, done = done, end - end % alignment if end < len(data) else end
        if done <= former:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
