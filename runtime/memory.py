"""How much memory there is to have, and what a budget that was asked for becomes."""

from dataclasses import dataclass
from pathlib import Path

import torch

from layout.sizes import format_size, parse_size
from manifests.errors import DeviceError, UsageError

AUTO = "auto"
# Left free on a GPU for activations and expanded matrices.
GPU_RESERVE_BYTES = 4_000_000_000


@dataclass(frozen=True, slots=True)
class Budget:
    """Slots for records: what was asked for, and how many it became."""

    flag: str
    asked: str
    n_slots: int
    record_bytes: int
    n_all: int

    def __str__(self) -> str:
        whole = " (all experts)" if self.n_slots == self.n_all else ""
        return f"{self.flag} {self.asked}: {self.n_slots} slots, {format_size(self.n_slots * self.record_bytes)}{whole}"


def budget_of(asked: str, *, flag: str, record_bytes: int, n_all: int, available_bytes: int, auto_bytes: int) -> Budget:
    """Turn a budget's text into slots, never more than there are experts.

    Raises UsageError if it is no size or holds no record, DeviceError if there is not that much memory.
    """
    n_bytes = auto_bytes if asked == AUTO else parse_size(asked, flag=flag, record_bytes=record_bytes)
    n_slots = min(n_bytes // record_bytes, n_all)
    if asked != AUTO and n_slots < 1:
        raise UsageError(f"{flag} {asked}: holds no expert; one needs {format_size(record_bytes)} (1slots)")
    if n_slots * record_bytes > available_bytes:
        raise DeviceError(f"{flag} {asked}: {format_size(n_slots * record_bytes)} asked for, but {format_size(available_bytes)} are to be had")
    return Budget(flag, asked, max(1, n_slots), record_bytes, n_all)


def available_host_bytes() -> int:
    """Return the memory that this process may still take: what the kernel calls available, or less under a cgroup's limit."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    return min([available, *_cgroup_rooms()])


def available_device_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return available_host_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, free - GPU_RESERVE_BYTES)


def _cgroup_rooms() -> list[int]:
    """Return the room left under each memory limit above us (cgroup v2)."""
    own = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), "/")
    root = Path("/sys/fs/cgroup")
    rooms = []
    for folder in [root / own.lstrip("/"), *(root / own.lstrip("/")).parents]:
        limit, used = folder / "memory.max", folder / "memory.current"
        if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
            rooms.append(max(0, int(text) - int(used.read_text())))
        if folder == root:
            break
    return rooms
