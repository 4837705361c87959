"""How much memory there is to have: the kernel's own count, and the limits of the cgroups (v2) that we are in.

Nothing here knows what the memory is wanted for.
"""

from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_SYS = Path("/sys")


class CgroupLimit(NamedTuple):
    """A memory limit above us. `used_bytes` leaves out the page cache that the kernel gives back first."""

    folder: Path
    limit_bytes: int
    used_bytes: int

    @property
    def room_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


def available_host_bytes(*, proc_root: Path = _PROC, sys_root: Path = _SYS) -> int:
    """Return the memory that this process may still take: what the kernel calls available, or less under a cgroup's limit."""
    rooms = [limit.room_bytes for limit in cgroup_limits(proc_root=proc_root, sys_root=sys_root)]
    return min([meminfo_bytes("MemAvailable", proc_root=proc_root), *rooms])


def meminfo_bytes(name: str, *, proc_root: Path = _PROC) -> int:
    """Return a line of /proc/meminfo."""
    lines = dict(line.split(":", 1) for line in (proc_root / "meminfo").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def cgroup_limits(*, proc_root: Path = _PROC, sys_root: Path = _SYS) -> list[CgroupLimit]:
    """Return each memory limit above us, the nearest first; cgroup v1 is not looked at (see `is_under_cgroup_v1`)."""
    own = next((line[3:] for line in _cgroup_lines(proc_root) if line.startswith("0::")), "/")
    root = sys_root / "fs/cgroup"
    limits = []
    for folder in [root / own.lstrip("/"), *(root / own.lstrip("/")).parents]:
        limit, used = folder / "memory.max", folder / "memory.current"
        if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
            limits.append(CgroupLimit(folder, int(text), int(used.read_text()) - _inactive_file_bytes(folder)))
        if folder == root:
            break
    return limits


def is_under_cgroup_v1(*, proc_root: Path = _PROC) -> bool:
    """Say whether memory is counted by a cgroup of version 1, so that a limit would go unseen."""
    return any("memory" in line.split(":")[1].split(",") for line in _cgroup_lines(proc_root))


def _cgroup_lines(proc_root: Path) -> list[str]:
    own = proc_root / "self/cgroup"
    return own.read_text().splitlines() if own.is_file() else []


def _inactive_file_bytes(folder: Path) -> int:
    statistics = folder / "memory.stat"
    lines = statistics.read_text().splitlines() if statistics.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
