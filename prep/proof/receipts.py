"""Receipts: for each expert file that was found intact, what it looked like then. A file that still looks so has most likely not changed.

They are kept beside the manifest and are believed only when the user says so: a drive that rots in silence does not change a time stamp.
"""

import io
import zipfile
from pathlib import Path

import numpy as np

from layout.prepared import Prepared
from layout.writer import write_bytes

RECEIPTS_NAME = "verify.receipts.npz"
# What a receipt holds of a file: size in bytes, time of change in ns, inode.
N_FIELDS = 3


class Receipts:
    """The receipts of one prepared model, by drive directory."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared, self._path = prepared, prepared.directory / RECEIPTS_NAME
        self.remark = ""
        saved = self._load()
        g = prepared.geometry
        shape = (g.n_layers, g.n_experts)
        self._looks, self._digests = {}, {}
        for n, directory in enumerate(prepared.drive_directories):
            looks, digests = saved.get(f"looks:{directory}"), saved.get(f"digests:{directory}")
            is_usable = looks is not None and digests is not None and looks.shape == (*shape, N_FIELDS) and digests.shape == (*shape, 16)
            self._looks[n] = looks if is_usable and looks is not None else np.zeros((*shape, N_FIELDS), np.int64)
            self._digests[n] = digests if is_usable and digests is not None else np.zeros((*shape, 16), np.uint8)

    def _load(self) -> dict[str, np.ndarray]:
        try:
            with np.load(self._path, allow_pickle=False) as file:
                return dict(file)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            self.remark = f"{self._path}: cannot be read ({error}); everything is read again"
            return {}

    def unchanged(self, drive: int, records: np.ndarray) -> np.ndarray:
        """Return which of the records (bool [n_layers, n_experts]) look as they did when their present hash was proved."""
        same = records & (self._digests[drive] == self._prepared.hashes.digests).all(-1) & (self._looks[drive] != 0).any(-1)
        for layer, expert in np.argwhere(same).tolist():
            same[layer, expert] = self._look(drive, layer, expert) == self._looks[drive][layer, expert].tolist()
        return same

    def add(self, drive: int, layer: int, expert: int) -> None:
        """Keep a receipt for a file that was just found intact."""
        self._looks[drive][layer, expert] = self._look(drive, layer, expert) or 0
        self._digests[drive][layer, expert] = self._prepared.hashes.digests[layer, expert]

    def forget(self, drive: int, layer: int, expert: int) -> None:
        self._looks[drive][layer, expert] = 0

    def save(self) -> None:
        """Write all receipts, whole or not at all."""
        arrays: dict[str, np.ndarray] = {}
        for n, directory in enumerate(self._prepared.drive_directories):
            arrays |= {f"looks:{directory}": self._looks[n], f"digests:{directory}": self._digests[n]}
        data = io.BytesIO()
        np.savez_compressed(data, **arrays)  # type: ignore[arg-type]
        write_bytes(self._path, data.getvalue())

    def _look(self, drive: int, layer: int, expert: int) -> list[int] | None:
        path: Path = self._prepared.expert_extent(drive, layer, expert).path
        try:
            stat = path.stat()
        except OSError:
            return None
        return [stat.st_size, stat.st_mtime_ns, stat.st_ino]
