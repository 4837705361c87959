"""Holes: parts of a file that were never written and read as zeros. A shard with one is a download that stopped, or a sparse trial.

A file system that does not tell of holes says that a file has none.
"""

import errno
import os
from pathlib import Path
from typing import NamedTuple

from layout.checkpoint import Checkpoint
from manifests.errors import BadInputError


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
        f"{checkpoint.shards[number].name}: {hole.n_bytes} bytes from byte {hole.offset} on (tensor {names[number]}) are a hole, "
        "never written; if it was downloaded, that was cut short: fetch the file again"
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
