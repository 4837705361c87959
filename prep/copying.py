"""Copying an expert's record from an intact copy, proved before it takes its name."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from layout.direct import Extent, ReadMode, probe_directory, read_extent
from layout.prepared import Prepared
from layout.reader import check_hash
from layout.record import expert_file_name
from layout.writer import write_record
from manifests.errors import DamagedDataError


class Sources:
    """The copies that may be read: `holds` says, per drive of the manifest, which files are there."""

    def __init__(self, prepared: Prepared, holds: Sequence[np.ndarray]) -> None:
        self.prepared, self.holds = prepared, holds
        self._modes = [probe_directory(d) if h.any() else None for d, h in zip(prepared.drive_directories, holds, strict=True)]

    @property
    def alignment(self) -> int:
        return max((mode.alignment for mode in self._modes if mode is not None), default=1)

    def read(self, layer: int, expert: int, buffer: memoryview) -> None:
        """Bring a record to the buffer's start from the first copy whose hash is right. Raises DamagedDataError if none is."""
        faults = []
        for drive, (holds, mode) in enumerate(zip(self.holds, self._modes, strict=True)):
            if mode is None or not holds[layer, expert]:
                continue
            extent = self.prepared.expert_extent(drive, layer, expert)
            try:
                check_hash(extent, read_extent(extent, buffer, mode), self.prepared.hashes.get(layer, expert))
                return
            except (OSError, DamagedDataError) as error:
                faults.append(str(error))
        raise DamagedDataError(f"layer {layer} expert {expert}: no intact copy to read: {'; '.join(faults) or 'no file is there'}")


def copy_expert(sources: Sources, layer: int, expert: int, *, directory: Path, mode: ReadMode, buffer: memoryview) -> None:
    """Put an expert's file into a directory: written aside, synced, read back, its hash compared, then renamed.

    A file that is already there with the right bytes is left as it is.
    buffer  aligned, at least span_bytes of a record for the widest alignment in play
    """
    n_bytes, expected = sources.prepared.record.n_bytes, sources.prepared.hashes.get(layer, expert)
    target = directory / expert_file_name(layer, expert)

    def prove(path: Path) -> None:
        extent = Extent(path, 0, n_bytes)
        check_hash(extent, read_extent(extent, buffer, mode), expected)

    if target.exists() and target.stat().st_size == n_bytes:
        try:
            return prove(target)
        except (OSError, DamagedDataError):
            # Unreadable or other bytes: it is replaced below.
            pass
    sources.read(layer, expert, buffer)
    write_record(target, buffer, n_bytes, mode, check=prove)
