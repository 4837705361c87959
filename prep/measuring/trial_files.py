"""The files that a drive is measured on: its experts, or trial files that are made for the time of the measurement.

Trial files lie in a directory of their own that is locked while they are in use. One that nobody has locked was left by a process that was
killed, and goes when the drive is next measured.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from layout.direct import ReadMode, aligned_buffer, round_up
from layout.drives import default_reserve, free_bytes
from layout.record import parse_expert_file_name
from layout.sizes import format_size
from layout.writer import write_record
from manifests.errors import KtierError, NoSpaceError
from prep.requests import disk_bytes

# A drive with fewer experts is measured on trial files.
LEAST_FILES = 16
MOST_TRIAL_FILES = 64
_PREFIX = ".measure-"


class RecordFiles(NamedTuple):
    """Files of one record each; `are_trials` if they are there for the measurement alone."""

    paths: list[Path]
    are_trials: bool


@contextmanager
def record_files(directory: Path, *, record_bytes: int, mode: ReadMode, reserve_bytes: int | None) -> Iterator[RecordFiles]:
    """Give the drive's own experts, or trial files that vanish afterwards, made within the reserve (by default `default_reserve`).

    Removes trial files that a killed process has left. Raises NoSpaceError if there is no room, KtierError if none can be made.
    """
    _remove_leftovers(directory)
    own = _own_files(directory, record_bytes)
    if len(own) >= LEAST_FILES:
        yield RecordFiles(own, are_trials=False)
        return
    n_files = _n_that_fit(directory, record_bytes, default_reserve(directory) if reserve_bytes is None else reserve_bytes)
    with _locked_folder(directory) as folder:
        yield RecordFiles(_make_files(folder, n_files, record_bytes, mode), are_trials=True)


def _own_files(directory: Path, record_bytes: int) -> list[Path]:
    with os.scandir(directory) as entries:
        return sorted(Path(e.path) for e in entries if parse_expert_file_name(e.name) and e.is_file() and e.stat().st_size == record_bytes)


def _n_that_fit(directory: Path, record_bytes: int, reserve_bytes: int) -> int:
    each = disk_bytes(record_bytes)
    # A file system in memory may have no size, and then says that nothing is free.
    if not shutil.disk_usage(directory).total:
        return LEAST_FILES
    free = free_bytes(directory)
    n_fit = (free - reserve_bytes) // each
    if n_fit < LEAST_FILES:
        raise NoSpaceError(
            f"{directory}: has no experts to measure it on, and no room for {LEAST_FILES} trial files of {format_size(each)}: "
            f"{format_size(free)} are free and {format_size(reserve_bytes)} are kept in reserve; make room, or lower --reserve"
        )
    return int(min(n_fit, MOST_TRIAL_FILES))


def _make_files(folder: Path, n_files: int, record_bytes: int, mode: ReadMode) -> list[Path]:
    buffer = aligned_buffer(round_up(record_bytes, mode.alignment))
    # Random, for some drives compress, and no two alike, for some drives keep equal blocks once.
    data = np.frombuffer(buffer, np.uint8)
    data[:] = np.frombuffer(np.random.default_rng(0).bytes(len(buffer)), np.uint8)
    paths = [folder / str(n) for n in range(n_files)]
    for path in paths:
        data += 1
        write_record(path, buffer, record_bytes, mode)
    return paths


@contextmanager
def _locked_folder(directory: Path) -> Iterator[Path]:
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
    except OSError as error:
        raise KtierError(f"{directory}: has no experts to measure it on, and no trial files can be made: {error.strerror}") from None
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Where a file system knows no locks, the next measurement removes what it finds.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
        finally:
            os.close(fd)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(directory: Path) -> None:
    for folder in directory.glob(f"{_PREFIX}*"):
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if not _is_in_use(fd):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)


def _is_in_use(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # A file system that knows no locks.
        return False
    return False
