"""The journal of an extraction: what is done and durable, appended line by line.

A line is written only when what it tells of is on the disk. A line that a kill has cut short is dropped at the next opening; the work behind it is
done again. The open file carries the lock that keeps a second extraction out.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from layout.hash_lists import ExpertHashes
from layout.writer import sync_directory
from manifests.errors import BadInputError, DamagedDataError, KtierError, NoSpaceError
from manifests.geometry import Geometry
from manifests.manifest import CarriedFile
from manifests.ranges import format_ranges, parse_ranges

JOURNAL_NAME = "extract.journal"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class JournalDrive:
    """A drive that the extraction writes to, and the experts that it shall hold, bool [n_layers, n_experts]."""

    tier: str
    directory: str
    holds: np.ndarray


@dataclass(frozen=True, slots=True)
class SpineEntry:
    """The finished spine: size, hash, and the hash of each tensor's bytes."""

    n_bytes: int
    xxh3_128: str
    tensors: dict[str, str]


@dataclass(slots=True)
class Done:
    """What the journal vouches for."""

    hashes: ExpertHashes
    drives: list[JournalDrive] = field(default_factory=list)
    carried: list[CarriedFile] = field(default_factory=list)
    spine: SpineEntry | None = None
    released: list[str] = field(default_factory=list)


class Journal:
    """An open, locked journal. `done` is what it held when it was opened, kept up to date by the writing methods."""

    def __init__(self, out: Path, digest: str, geometry: Geometry) -> None:
        self._path, self._geometry = out / JOURNAL_NAME, geometry
        self._fd = _open_locked(self._path)
        self.done = Done(ExpertHashes(geometry.n_layers, geometry.n_experts))
        lines = _whole_lines(self._fd)
        self.is_new = not lines
        if self.is_new:
            self._append([{"extract": digest, "schema": SCHEMA}])
            sync_directory(out)
            return
        try:
            self._replay(lines, digest)
        except (ValueError, KeyError, TypeError, IndexError, AssertionError) as error:
            os.close(self._fd)
            raise DamagedDataError(f"{self._path}: cannot be understood ({error}); remove the output and start again") from None
        except KtierError:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)

    def remove(self) -> None:
        """End the extraction: the manifest vouches for everything now."""
        self._path.unlink()

    def add_drives(self, drives: Iterable[JournalDrive]) -> None:
        for drive in drives:
            layers = {str(layer): format_ranges(drive.holds[layer]) for layer in self._geometry.moe_layers}
            self._append([{"drive": drive.tier, "directory": drive.directory, "holds": layers}])
            self.done.drives.append(drive)

    def add_carried(self, files: Iterable[CarriedFile]) -> None:
        self.done.carried = list(files)
        self._append({"carried": f.name, "n_bytes": f.n_bytes, "hash": f.xxh3_128} for f in self.done.carried)

    def add_spine(self, spine: SpineEntry) -> None:
        self._append([{"spine": spine.n_bytes, "hash": spine.xxh3_128, "tensors": spine.tensors}])
        self.done.spine = spine

    def add_experts(self, experts: Iterable[tuple[int, int, str]]) -> None:
        experts = list(experts)
        self._append({"expert": [layer, expert], "hash": digest} for layer, expert, digest in experts)
        for layer, expert, digest in experts:
            self.done.hashes.set(layer, expert, digest)

    def add_released(self, shard: str) -> None:
        self._append([{"released": shard}])
        self.done.released.append(shard)

    def _append(self, entries: Iterable[dict[str, Any]]) -> None:
        data, end = "".join(json.dumps(entry) + "\n" for entry in entries).encode(), os.fstat(self._fd).st_size
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)
        except OSError as error:
            # Half a line must not be followed by another.
            os.ftruncate(self._fd, end)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise NoSpaceError(f"{self._path}: paused: no room left on the file system; make room and run the same command again") from None

    def _replay(self, lines: list[bytes], digest: str) -> None:
        try:
            head = json.loads(lines[0])
        except ValueError:
            head = None
        if not isinstance(head, dict) or "extract" not in head:
            raise BadInputError(f"{self._path.parent}: is not empty and holds no output of this checkpoint; name a new or empty directory")
        if head.get("schema") != SCHEMA:
            found = head.get("schema")
            raise DamagedDataError(f"{self._path}: has schema {found!r}, this program writes {SCHEMA}; remove the output and start again")
        if head["extract"] != digest:
            raise BadInputError(f"{self._path.parent}: holds an unfinished extraction of another checkpoint; name a new or empty directory")
        for line in lines[1:]:
            self._replay_entry(json.loads(line))

    def _replay_entry(self, entry: dict[str, Any]) -> None:
        done, g = self.done, self._geometry
        match entry:
            case {"drive": tier, "directory": directory, "holds": layers}:
                holds = np.zeros((g.n_layers, g.n_experts), np.bool_)
                for layer, text in layers.items():
                    holds[int(layer)] = parse_ranges(text, g.n_experts, where=str(self._path))
                done.drives.append(JournalDrive(tier, directory, holds))
            case {"carried": name, "n_bytes": n_bytes, "hash": digest}:
                done.carried.append(CarriedFile(name, n_bytes, digest))
            case {"spine": n_bytes, "hash": digest, "tensors": tensors}:
                done.spine = SpineEntry(n_bytes, digest, tensors)
            case {"expert": [layer, expert], "hash": digest}:
                done.hashes.set(layer, expert, digest)
            case {"released": shard}:
                done.released.append(shard)
            case _:
                raise ValueError(f"unknown entry {str(entry)[:80]}")


def released_shards(out: Path) -> list[str]:
    """Return the names of the shards that an unfinished extraction into `out` has released; none where there is no journal."""
    try:
        lines = (out / JOURNAL_NAME).read_bytes().splitlines()
    except OSError:
        return []
    return [json.loads(line)["released"] for line in lines if line.startswith(b'{"released": ') and line.endswith(b"}")]


def _open_locked(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise KtierError(f"{path.parent}: another extraction is at work there; wait for it, or name another directory") from None
        # Whoever held the lock before may have finished and removed the file.
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _whole_lines(fd: int) -> list[bytes]:
    """Return the journal's lines; what follows the last end of line was cut short by a kill, and is cut off."""
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        data = file.read()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.ftruncate(fd, end)
        os.fsync(fd)
    return data[:end].splitlines()
