"""Room on file systems: is there enough for an extraction to end, and, while it or a placement goes on, is the reserve still free?"""

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np

from layout.checkpoint import Checkpoint
from layout.drives import default_reserve, free_bytes
from layout.record import expert_file_name
from layout.sizes import format_size
from layout.tensors import expert_tensor_names
from manifests.errors import KtierError, NoSpaceError
from prep.drive_facts import drive_text
from prep.extraction.base_split import Candidate, plan_base
from prep.extraction.spine import spine_bytes
from prep.requests import DriveRequest, disk_bytes

Place = tuple[int, int]


class Reserves:
    """The room that stays free on each file system (`n_bytes`, by device number) while many threads write."""

    def __init__(self, directories: Iterable[Path], reserve_bytes: int | None) -> None:
        self.n_bytes = {device(path): default_reserve(path) if reserve_bytes is None else reserve_bytes for path in directories}
        self._changed, self._in_flight = threading.Condition(), defaultdict[int, int](int)

    @contextmanager
    def taking(self, directory: Path, n_bytes: int) -> Iterator[None]:
        """Write n_bytes within this context, once they fit beside all that others are writing now.

        Raises NoSpaceError if the reserve would be touched, KtierError if another file system shows at the directory than at the start.
        """
        number = device(directory)
        if number not in self.n_bytes:
            raise KtierError(
                f"{directory}: another file system shows there than at the start; has the drive gone? Mount it and run the same command again"
            )
        with self._changed:
            # What others write may be counted as free or not: only with nothing in flight is the room known.
            while (free := free_bytes(directory)) - self._in_flight[number] - n_bytes < self.n_bytes[number]:
                if not self._in_flight[number]:
                    raise NoSpaceError(
                        f"{directory}: paused: {format_size(free)} are free and {format_size(self.n_bytes[number])} are kept in reserve; "
                        "make room and run the same command again: it goes on where it stopped"
                    )
                self._changed.wait()
            self._in_flight[number] += n_bytes
        try:
            yield
        finally:
            with self._changed:
                self._in_flight[number] -= n_bytes
                self._changed.notify_all()


class Room:
    """The file systems of the output and of its drives. Directories that share one share its room."""

    def __init__(self, checkpoint: Checkpoint, out: Path, requests: Sequence[DriveRequest], reserve_bytes: int | None) -> None:
        self._checkpoint, self._requests = checkpoint, requests
        self._paths = {out: _existing(out)} | {r.directory: _existing(r.directory) for r in requests}
        self._home = out
        self._kept = Reserves(self._paths.values(), reserve_bytes)
        self._reserves = self._kept.n_bytes
        self.spine_bytes = spine_bytes(checkpoint, expert_directories=[drive_text(r.directory, out) for r in requests])
        self.record_bytes = disk_bytes(checkpoint.record.n_bytes)

    def plan_base(self, *, is_releasing: bool) -> list[np.ndarray]:
        """Return what each drive shall hold, one copy of every expert in all, bool [n_layers, n_experts] each.

        Raises NoSpaceError if the drives cannot hold them, the spine and the reserve counted.
        """
        g = self._checkpoint.geometry
        nothing = np.zeros((g.n_layers, g.n_experts), np.bool_)
        devices = sorted({device(self._paths[r.directory]) for r in self._requests})
        candidates = [
            Candidate(
                r.tier,
                1.0,
                devices.index(device(self._paths[r.directory])),
                None if r.limit_bytes is None else r.limit_bytes // self.record_bytes,
                nothing,
            )
            for r in self._requests
        ]
        self._check_total(devices, is_releasing=is_releasing)
        return plan_base(g, candidates, pool_room=[self._experts_that_fit(d, is_releasing=is_releasing) for d in devices])

    def _check_total(self, devices: Sequence[int], *, is_releasing: bool) -> None:
        """Say in bytes that it cannot fit, where even all drives together are too small; the plan itself counts experts."""
        needed = self.spine_bytes + self._checkpoint.geometry.n_routed_experts * self.record_bytes
        numbers = {*devices, device(self._paths[self._home])}
        paths = [next(p for p in self._paths.values() if device(p) == number) for number in numbers]
        free, reserve = sum(map(self._free_for_us, paths)), sum(self._reserves[number] for number in numbers)
        if needed + reserve > free and not is_releasing:
            raise NoSpaceError(
                f"{self._home}: on {', '.join(map(str, paths))} {format_size(needed)} needed and {format_size(reserve)} kept in reserve, "
                f"but {format_size(free)} are free; nothing was written"
            )

    def _free_for_us(self, path: Path) -> int:
        """Return the free bytes of a file system, what an unfinished output of ours holds there included: it is replaced file by file."""
        ours = (p for r in self._requests if device(self._paths[r.directory]) == device(path) for p in r.directory.glob("L*-E*.bin"))
        return free_bytes(path) + sum(map(_disk_bytes_of, ours))

    def _experts_that_fit(self, number: int, *, is_releasing: bool) -> int:
        path = next(p for p in self._paths.values() if device(p) == number)
        free = self._free_for_us(path) - self._reserves[number]
        if number == device(self._paths[self._home]):
            free -= self.spine_bytes
        if is_releasing and number == device(self._checkpoint.directory):
            # The shards make room as the work goes on; whether it comes in time is for `check` to say.
            free += sum(shard.n_bytes for shard in self._checkpoint.shards if can_release(self._checkpoint.directory / shard.name))
        return max(0, free // self.record_bytes)

    def check(self, missing: Sequence[Place], home: np.ndarray, *, needs_spine: bool, is_releasing: bool) -> None:
        """Raise NoSpaceError unless what is missing can be written with every reserve kept; released shards give their room back."""
        peaks = self._peaks(missing, home, needs_spine=needs_spine, is_releasing=is_releasing)
        faults = []
        for number, needed in peaks.items():
            path = next(p for p in self._paths.values() if device(p) == number)
            free, reserve = free_bytes(path), self._reserves[number]
            if needed + reserve > free:
                faults.append(f"{path}: {format_size(needed)} needed and {format_size(reserve)} kept in reserve, but {format_size(free)} are free")
        if faults:
            raise NoSpaceError("; ".join(faults) + "; make room, add a --tier, or lower --reserve; nothing more was written")

    def _peaks(self, missing: Sequence[Place], home: np.ndarray, *, needs_spine: bool, is_releasing: bool) -> dict[int, int]:
        used: dict[int, int] = defaultdict(int)
        peaks: dict[int, int] = defaultdict(int)
        if needs_spine:
            number = device(self._paths[self._home])
            used[number] = peaks[number] = self.spine_bytes
        checkpoint = self._checkpoint
        source = device(checkpoint.directory)
        shards = [checkpoint.tensors[expert_tensor_names(*place)[0]].shard for place in missing]
        last = {shard: n for n, shard in enumerate(shards)}
        if is_releasing:
            kept = {checkpoint.tensors[name].shard for name in checkpoint.vision_tensors}
            idle = (s for n, s in enumerate(checkpoint.shards) if n not in last and n not in kept)
            used[source] -= sum(s.n_bytes for s in idle if can_release(checkpoint.directory / s.name))
        for n, place in enumerate(missing):
            number = device(self._paths[self._requests[home[place]].directory])
            used[number] += max(0, self.record_bytes - _disk_bytes_of(self._requests[home[place]].directory / expert_file_name(*place)))
            peaks[number] = max(peaks[number], used[number])
            if is_releasing and last[shards[n]] == n and can_release(checkpoint.directory / checkpoint.shards[shards[n]].name):
                used[source] -= checkpoint.shards[shards[n]].n_bytes
        return {number: peak for number, peak in peaks.items() if peak > 0}

    def taking(self, directory: Path, n_bytes: int) -> AbstractContextManager[None]:
        """See `Reserves.taking`."""
        return self._kept.taking(directory, n_bytes)


def can_release(shard: Path) -> bool:
    """Return whether removing a shard frees its bytes: a link to it would go and the bytes would stay."""
    return shard.exists() and not shard.is_symlink() and shard.stat().st_nlink == 1


def _disk_bytes_of(path: Path) -> int:
    """Return the room that a file takes, 0 if it is not there."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def device(path: Path) -> int:
    return os.stat(path).st_dev


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent that is there."""
    path = path.resolve()
    return next(p for p in (path, *path.parents) if p.exists())
