"""Findings of the two doctors: one thing that was looked at, each with its cure; and those of the machine that both look at."""

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from layout.memory import cgroup_limits, is_under_cgroup_v1
from layout.sizes import format_size

MACHINE = "machine"
MEMLOCK_CURE = "ulimit -l unlimited, memlock in /etc/security/limits.conf, or docker run --ulimit memlock=-1"

Level = Literal["good", "note", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    what   its short name; `where` is "machine", "GPU", or the directory or manifest as it was given
    level  good; note: it works, at a cost that the text names; bad: a run would fail
    cure   a command or a sentence; empty when good
    """

    what: str
    where: str
    level: Level
    text: str
    cure: str = ""

    def __post_init__(self) -> None:
        assert (self.level == "good") == (not self.cure)


def finding_line(finding: Finding) -> str:
    """Return a finding as people read it; its cure, where there is one, on a line of its own."""
    line = f"{finding.level:4}  {finding.where}: {finding.what}: {finding.text}"
    return f"{line}\n      to do: {finding.cure}" if finding.cure else line


def cgroup_finding(*, sys_root: Path, proc_root: Path) -> Finding:
    """Say how much memory the tightest limit above us leaves."""
    limits = cgroup_limits(proc_root=proc_root, sys_root=sys_root)
    if limits:
        least = min(limits, key=lambda limit: limit.room_bytes)
        text = f"{least.folder} allows {format_size(least.limit_bytes)}, {format_size(least.room_bytes)} of it free; krun's host pool must fit"
        cure = "if that is too little: docker run --memory SIZE, or systemctl set-property UNIT MemoryMax=infinity"
        return Finding("cgroup limit", MACHINE, "note", text, cure)
    if is_under_cgroup_v1(proc_root=proc_root):
        cure = "compare memory.limit_in_bytes below /sys/fs/cgroup/memory by hand, or boot with systemd.unified_cgroup_hierarchy=1"
        return Finding("cgroup limit", MACHINE, "note", "memory is counted by cgroup version 1, whose limits are not looked at", cure)
    return Finding("cgroup limit", MACHINE, "good", "no memory limit above this process")


def huge_pages_finding(*, sys_root: Path) -> Finding:
    """Judge by the kernel's words, such as `always [madvise] never`."""
    file = sys_root / "kernel/mm/transparent_hugepage/enabled"
    setting = file.read_text().strip() if file.is_file() else None
    if setting is not None and "[never]" not in setting:
        return Finding("huge pages", MACHINE, "good", f"transparent huge pages: {setting}")
    text = f"transparent huge pages: {setting or 'not in this kernel'}; memory comes in 4 KiB pages: slower reads, much processor time, long pinning"
    return Finding("huge pages", MACHINE, "note", text, "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled")


def locked_memory_finding() -> Finding:
    """Judge by this process's limit of locked memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", MACHINE, "good", "unlimited")
    most = "unlimited" if hard == resource.RLIM_INFINITY else format_size(hard)
    text = f"{format_size(soft)}; may be raised to {most}; matters only where the GPU's driver counts krun's pinned memory against it"
    return Finding("locked memory", MACHINE, "note", text, f"if pinning fails: {MEMLOCK_CURE}")
