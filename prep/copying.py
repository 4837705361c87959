"""Copying an expert's record from an intact copy, proved before it takes its name."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from layout.direct import Extent, ReadMode, probe_directory, read_extent
from layout.prepared import Prepared
from layout.reader import check_hash
from layout.record import expert_file_name
from layout.writer import write_record
from manifests.errors import BadInputError, DamagedDataError
from prep.placement.sites import shards_of

# A directory whose reads fail so many times in a row is asked last from then on.
_FAILURES_TO_SET_ASIDE = 3


class Sources:
    """The copies that may be read: `holds` says, per directory, which files are there. Many threads may read at once.

    directories  those of the manifest's drives unless given, with `names` for messages
    bad          what was found wrong with a copy, by (directory's number, layer, expert)
    """

    def __init__(
        self, prepared: Prepared, holds: Sequence[np.ndarray], *, directories: Sequence[Path] | None = None, names: Sequence[str] | None = None
    ) -> None:
        self.prepared, self.holds = prepared, holds
        self.directories = prepared.drive_directories if directories is None else directories
        self.names = [prepared.drive_name(n) for n in range(len(self.directories))] if names is None else names
        self.bad: dict[tuple[int, int, int], str] = {}
        self._modes = [probe_directory(d) if h.any() else None for d, h in zip(self.directories, holds, strict=True)]
        self._lock = threading.Lock()
        self._in_flight, self._n_failures = [0] * len(holds), [0] * len(holds)

    @property
    def alignment(self) -> int:
        return max((mode.alignment for mode in self._modes if mode is not None), default=1)

    def read(self, layer: int, expert: int, buffer: memoryview) -> None:
        """Bring a record to the buffer's start from a copy whose hash is right, the directory with the fewest reads in flight first.

        Raises DamagedDataError if no copy is intact.
        """
        faults: list[str] = []
        tried: set[int] = set()
        while (number := self._begin(layer, expert, tried)) is not None:
            tried.add(number)
            try:
                self._read_from(number, layer, expert, buffer)
                return
            except (OSError, BadInputError, DamagedDataError) as error:
                self.bad[number, layer, expert] = f"layer {layer} expert {expert} on {self.names[number]}: {_in_words(error)}"
                faults.append(f"{self.names[number]}: {_in_words(error)}")
            finally:
                with self._lock:
                    self._in_flight[number] -= 1
        raise DamagedDataError(
            f"layer {layer} expert {expert}: no intact copy to read: {'; '.join(faults) or 'no file is there'}. "
            f"With {' or '.join(shards_of(self.prepared, layer))} in CHECKPOINT, "
            f"kprep extract CHECKPOINT {self.prepared.directory} --only {layer}:{expert} writes it again"
        )

    def _read_from(self, number: int, layer: int, expert: int, buffer: memoryview) -> None:
        mode = self._modes[number] or probe_directory(self.directories[number])
        self._modes[number] = mode
        extent = Extent(self.directories[number] / expert_file_name(layer, expert), 0, self.prepared.record.n_bytes)
        try:
            payload = read_extent(extent, buffer, mode)
        except OSError:
            self._n_failures[number] += 1
            raise
        self._n_failures[number] = 0
        check_hash(extent, payload, self.prepared.hashes.get(layer, expert))

    def _begin(self, layer: int, expert: int, tried: set[int]) -> int | None:
        with self._lock:
            places = [n for n, holds in enumerate(self.holds) if n not in tried and holds[layer, expert]]
            if not places:
                return None
            chosen = min(places, key=lambda n: (self._n_failures[n] >= _FAILURES_TO_SET_ASIDE, self._in_flight[n]))
            self._in_flight[chosen] += 1
            return chosen


def _in_words(error: Exception) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)


def prove_file(path: Path, expected: str | None, *, n_bytes: int, mode: ReadMode, buffer: memoryview) -> None:
    """Read a record's file back, uncached, and compare its hash. Raises OSError or DamagedDataError."""
    extent = Extent(path, 0, n_bytes)
    check_hash(extent, read_extent(extent, buffer, mode), expected)


def copy_expert(sources: Sources, layer: int, expert: int, *, directory: Path, mode: ReadMode, buffer: memoryview) -> bool:
    """Put an expert's file into a directory: written aside, synced, read back, its hash compared, then renamed. Say whether it was written.

    A file that is already there with the right bytes is left as it is.
    buffer  aligned, at least span_bytes of a record for the widest alignment in play
    """
    n_bytes, expected = sources.prepared.record.n_bytes, sources.prepared.hashes.get(layer, expert)
    target = directory / expert_file_name(layer, expert)

    def prove(path: Path) -> None:
        prove_file(path, expected, n_bytes=n_bytes, mode=mode, buffer=buffer)

    if target.exists() and target.stat().st_size == n_bytes:
        try:
            prove(target)
            return False
        except (OSError, DamagedDataError):
            # Unreadable or other bytes: it is replaced below.
            pass
    sources.read(layer, expert, buffer)
    write_record(target, buffer, n_bytes, mode, check=prove)
    return True
