"""Whether a file is what it has to be, told without reading it: it is a file, it has its size, and it has no hole.

A hole is a part that was never written and reads as zeros. A shard with one is a download that stopped, or a sparse trial. A file system that does
not tell of holes says that a file has none.
"""

import errno
import os
import stat
from pathlib import Path
from typing import NamedTuple

from layout.checkpoint import Checkpoint
from layout.sizes import counted
from manifests.errors import BadInputError

_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def size_fault(path: str | Path, n_bytes: int) -> str | None:
    """Return in words what keeps a path from being a file of n_bytes, such as `is a FIFO, expected a file`; or None."""
    try:
        found = os.stat(path)
    except OSError as error:
        return f"is missing or cannot be opened: {error.strerror}; expected a file of {counted(n_bytes, 'byte')}"
    if (fault := _kind_fault(found)) is not None:
        # Anything but a directory gives way to a file that takes its name.
        return f"{fault}: move it away" if stat.S_ISDIR(found.st_mode) else fault
    return None if found.st_size == n_bytes else f"has {counted(found.st_size, 'byte')}, expected {n_bytes}"


def kind_fault(path: Path) -> str | None:
    """Return in words what keeps a path from being a file; or None.

    Who opens a FIFO waits for its writer: what may be one is looked at first.
    """
    try:
        return _kind_fault(os.stat(path))
    except OSError as error:
        return f"is missing or cannot be opened: {error.strerror}; expected a file"


def _kind_fault(found: os.stat_result) -> str | None:
    return None if stat.S_ISREG(found.st_mode) else f"is {_KINDS.get(stat.S_IFMT(found.st_mode), 'of another kind')}, expected a file"


def file_fault(path: Path, n_bytes: int) -> str | None:
    """Return what keeps a path from being a file of n_bytes without a hole, as `size_fault` does; or None."""
    if (fault := size_fault(path, n_bytes)) is not None:
        return fault
    try:
        return None if first_hole(path) is None else "has a hole: a part of it was never written"
    except OSError as error:
        return f"cannot be opened: {error.strerror}"


class Hole(NamedTuple):
    """A range of a file, in bytes, that was never written."""

    offset: int
    n_bytes: int


def first_hole(path: Path) -> Hole | None:
    """Return a file's first hole, None if it has none. Raises OSError if the file cannot be opened."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        end = os.fstat(fd).st_size
        # The kernel counts the end of a file as a hole; an empty file has not even that.
        begin = os.lseek(fd, 0, os.SEEK_HOLE) if end else end
        return Hole(begin, _end_of_hole(fd, begin, end) - begin) if begin < end else None
    finally:
        os.close(fd)


def _end_of_hole(fd: int, begin: int, end: int) -> int:
    try:
        return os.lseek(fd, begin, os.SEEK_DATA)
    except OSError as error:
        # No data up to the end of the file.
        if error.errno != errno.ENXIO:
            raise
        return end


def find_holes(checkpoint: Checkpoint) -> list[str]:
    """Return a message for each shard that has a hole: the first hole, and the tensor there.

    Raises BadInputError if a shard cannot be opened.
    """
    holes: dict[int, Hole] = {}
    for number, shard in enumerate(checkpoint.shards):
        if shard.name in checkpoint.released:
            continue
        try:
            hole = first_hole(checkpoint.directory / shard.name)
        except OSError as error:
            raise BadInputError(f"{checkpoint.directory / shard.name}: cannot be read: {error.strerror}") from None
        if hole is not None:
            holes[number] = hole
    names = _tensors_at(checkpoint, {number: hole.offset for number, hole in holes.items()}) if holes else {}
    return [
        f"{checkpoint.shards[number].name}: {hole.n_bytes} bytes from byte {hole.offset} on (tensor {names[number]}) are a hole, never written; "
        "if it was downloaded, that was cut short: fetch the file again"
        for number, hole in holes.items()
    ]


def _tensors_at(checkpoint: Checkpoint, offset_of: dict[int, int]) -> dict[int, str]:
    """Return for each shard number the tensor that holds the given byte, or the first one behind it where the hole begins in the header."""
    found: dict[int, str] = {}
    for name, tensor in checkpoint.tensors.items():
        offset = offset_of.get(tensor.shard)
        if offset is None or tensor.offset + tensor.n_bytes <= offset:
            continue
        if tensor.shard not in found or tensor.offset < checkpoint.tensors[found[tensor.shard]].offset:
            found[tensor.shard] = name
    return found
