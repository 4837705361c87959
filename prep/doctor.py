"""Looking at a machine and at directories for what would stop a run or slow it down; each finding with its cure.

Nothing is believed that a transfer can prove: a record of random bytes is written, read back past the page cache and compared. GPUs are not
looked at here.
"""

import ctypes
import errno
import mmap
import os
import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import xxhash

from layout.direct import PAGE, Extent, ReadMode, aligned_buffer, probe_directory, read_extent, round_up, span_bytes
from layout.drives import (
    BlockDevice,
    DirectoryFacts,
    best_link_bytes_per_s,
    default_reserve,
    describe_directory,
    free_bytes,
    link_limit_bytes_per_s,
    temperature_of,
)
from layout.findings import MACHINE, Finding, Level, cgroup_finding, huge_pages_finding, locked_memory_finding
from layout.memory import available_host_bytes, meminfo_bytes
from layout.record import parse_expert_file_name
from layout.sizes import counted, format_rate, format_size
from layout.writer import PARTIAL_SUFFIX, write_record
from manifests.errors import BadInputError, Interrupted, KtierError

LEAST_OPEN_FILES = 1024
# What every kprep command stays below.
LEAST_MEMORY_BYTES = 2 << 30

_PLAIN_FILE_SYSTEMS = ("ext4", "xfs")
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "virtiofs", "lustre", "beegfs", "glusterfs", "afs")
_CHECKSUMS_OFF = frozenset(("nodatasum", "nodatacow"))
_PREFER = "keep experts on a local drive with XFS or ext4"
_STEPS = (512, 1024, 2048, PAGE, 16384, 65536)
# A read through the cache brings in every page; a few may be there by accident.
_MOST_CACHED = 0.1

_libc = ctypes.CDLL(None, use_errno=True)


def examine(paths: list[Path], *, record_bytes: int = 17_547_264, sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> list[Finding]:
    """Return what was found of the machine, and then of each directory.

    record_bytes         what is written to each directory, read back and removed; by default an expert of K3 and K3.1
    sys_root, proc_root  where sysfs and procfs are mounted

    What is wrong is a finding, not an exception.
    """
    findings = [*_machine_findings(sys_root, proc_root)]
    mountinfo = (proc_root / "self/mountinfo").read_text()
    earlier: list[tuple[Path, DirectoryFacts]] = []
    for path in paths:
        try:
            facts = describe_directory(path, sys_root=sys_root, mountinfo=mountinfo)
        except BadInputError as error:
            findings.append(_absent_finding(path, error))
            continue
        findings += _directory_findings(path, facts, record_bytes, sys_root)
        findings += [_shared_finding(path, facts, *other) for other in earlier if not facts.physical_names.isdisjoint(other[1].physical_names)]
        earlier.append((path, facts))
    return findings


def _machine_findings(sys_root: Path, proc_root: Path) -> Iterator[Finding]:
    versions = f"Python {platform.python_version()}, numpy {np.__version__}, xxhash {xxhash.VERSION}"
    yield Finding("versions", MACHINE, "good", f"Linux {platform.release()}, {versions}")
    yield _memory_finding(sys_root, proc_root)
    yield cgroup_finding(sys_root=sys_root, proc_root=proc_root)
    yield huge_pages_finding(sys_root=sys_root)
    yield _open_files_finding()
    yield locked_memory_finding()


def _memory_finding(sys_root: Path, proc_root: Path) -> Finding:
    available = available_host_bytes(proc_root=proc_root, sys_root=sys_root)
    text = f"{format_size(available)} to be had of {format_size(meminfo_bytes('MemTotal', proc_root=proc_root))}"
    if available < LEAST_MEMORY_BYTES:
        text += f"; kprep alone may take {format_size(LEAST_MEMORY_BYTES)}"
        return Finding("memory", MACHINE, "bad", text, "end other programs, or raise the memory limit of the container or unit")
    return Finding("memory", MACHINE, "good", text)


def _open_files_finding() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_limit(soft)} at once; may be raised to {_limit(hard)}"
    if _reaches(soft, LEAST_OPEN_FILES):
        return Finding("open files", MACHINE, "good", text)
    raising = "ulimit -n {0}" if _reaches(hard, LEAST_OPEN_FILES) else "nofile {0} in /etc/security/limits.conf, or docker run --ulimit nofile={0}"
    text += f"; shards and reads in flight may want {LEAST_OPEN_FILES}"
    return Finding("open files", MACHINE, "note", text, raising.format(LEAST_OPEN_FILES))


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _reaches(limit: int, least: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= least


def _absent_finding(path: Path, error: BadInputError) -> Finding:
    cure = "name a directory that this user may enter"
    try:
        path.stat()
    except FileNotFoundError:
        cure = f"mount its drive, or: mkdir -p {path}"
    except OSError:
        # The error says it already.
        pass
    return Finding("directory", str(path), "bad", str(error).removeprefix(f"{path}: "), cure)


def _directory_findings(path: Path, facts: DirectoryFacts, record_bytes: int, sys_root: Path) -> Iterator[Finding]:
    existing = _existing_file(path)
    access = _access_finding(path, existing)
    yield access
    yield _file_system_finding(path, facts)
    yield from _drive_findings(path, facts, sys_root)
    yield _space_finding(path, record_bytes, existing)
    if access.level == "bad":
        return
    try:
        yield from _transfer_findings(path, facts, record_bytes, existing)
    except Interrupted:
        raise
    except (OSError, KtierError) as error:
        text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        yield Finding("transfers", str(path), "bad", f"none could be proved: {text}", "make room if there is none; else ask dmesg about the drive")


def _file_system_finding(path: Path, facts: DirectoryFacts) -> Finding:
    text = f"{facts.file_system} on {facts.source}, mounted at {facts.mount_point}"
    if (trait := _trait(facts)) is None:
        return Finding("file system", str(path), "good", text)
    return Finding("file system", str(path), "note", f"{text}; {trait[0]}", trait[1])


def _trait(facts: DirectoryFacts) -> tuple[str, str] | None:
    """Return what a file system costs, and what to do about it; None for those that cost nothing."""
    kind = facts.file_system
    if kind in _PLAIN_FILE_SYSTEMS or (kind == "btrfs" and not _CHECKSUMS_OFF.isdisjoint(facts.options.split(","))):
        return None
    if facts.is_ram_backed:
        return "it lies in memory: its files are gone at the next boot and count as memory used", "good for trials; keep the only copy on a drive"
    if kind == "btrfs":
        text = "it may buffer direct writes to files with checksums, and direct reads of compressed ones, without a word"
        return text, f"{_PREFER}; or mount it with -o nodatasum before the experts are written"
    if kind == "overlay":
        return "a container's layers: direct reads depend on the file system below", "mount the drive into the container: docker run -v"
    if kind == "zfs":
        return "it keeps a cache of its own, which cannot be seen here, and reads direct only from OpenZFS 2.3 on", _PREFER
    if kind in _NETWORK_FILE_SYSTEMS:
        return "a network or host file system: its rate and its caches are those of the other side", _PREFER
    if kind.startswith("fuse"):
        return "its own program decides whether direct reads are direct", _PREFER
    return "not among the file systems that were tried", f"{_PREFER}, unless the other findings and kprep place --measure-drives please"


def _drive_findings(path: Path, facts: DirectoryFacts, sys_root: Path) -> Iterator[Finding]:
    if not facts.physical and not facts.is_ram_backed:
        text = f"the kernel names no drive below ({', '.join(sorted(facts.physical_names))}): link, temperature and sharing are not looked at"
        yield Finding("device", str(path), "note", text, "make sure that each directory is a drive of its own")
    for device in facts.physical:
        yield _device_finding(path, device)
        if (link := _link_finding(path, device)) is not None:
            yield link
        if (temperature := _temperature_finding(path, device, sys_root)) is not None:
            yield temperature


def _device_finding(path: Path, device: BlockDevice) -> Finding:
    node = "NUMA node not told" if device.numa_node is None else f"NUMA node {device.numa_node}"
    paths = f", {device.n_paths} paths" if device.n_paths > 1 else ""
    text = f"{device.name} ({device.model or device.kind}), {format_size(device.n_bytes)}, {node}{paths}"
    if device.is_rotational:
        return Finding("device", str(path), "note", f"{text}; a rotating disk, tens of times slower than NVMe", "keep experts on NVMe drives")
    return Finding("device", str(path), "good", text)


def _link_finding(path: Path, device: BlockDevice) -> Finding | None:
    now = link_limit_bytes_per_s(device)
    if now is None:
        return None
    text = f"{device.name}: {device.link_speed} x{device.link_width}, at most {format_rate(now)}"
    best = best_link_bytes_per_s(device)
    if best is None or now >= best:
        return Finding("link", str(path), "good", text)
    text += f"; the drive can do {device.max_link_speed} x{device.max_link_width}, {format_rate(best)}: {format_rate(best - now)} are lost"
    cure = "seat the drive anew or move it to a faster slot; look at the slot's lanes (bifurcation) and speed in the firmware's settings"
    return Finding("link", str(path), "note", text, cure)


def _temperature_finding(path: Path, device: BlockDevice, sys_root: Path) -> Finding | None:
    temperature = temperature_of(device, sys_root=sys_root)
    if temperature is None:
        return None
    text = f"{device.name}: {int(temperature.now)} °C"
    if temperature.most is None:
        return Finding("temperature", str(path), "good", text)
    text += f", warns at {int(temperature.most)} °C"
    if temperature.now < temperature.most:
        return Finding("temperature", str(path), "good", text)
    return Finding("temperature", str(path), "note", f"{text}: it reads slower to cool down", "give the drive a heat sink or more air")


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _existing_file(directory: Path) -> Path | None:
    """Return a file that can be read where none can be written: an expert's, or else any of a page or more."""
    try:
        names = sorted(os.listdir(directory), key=lambda name: (parse_expert_file_name(name) is None, name))
    except PermissionError:
        return None
    return next((path for name in names if _size_of_file(path := directory / name) >= (1 if parse_expert_file_name(name) else PAGE)), None)


def _size_of_file(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        # Gone since it was listed, or behind a directory that may not be entered.
        return 0


def _access_finding(path: Path, existing: Path | None) -> Finding:
    owning = f"sudo chown -R $USER {path}"
    if not os.access(path, os.R_OK | os.X_OK):
        return Finding("directory", str(path), "bad", "this user may not read it", owning)
    if os.access(path, os.W_OK):
        return Finding("directory", str(path), "good", "can be read and written")
    cure = f"for kprep to write here: mount -o remount,rw if it is mounted read-only, else {owning}"
    if existing is not None:
        return Finding("directory", str(path), "note", "can be read, not written: enough for krun; kprep can put and repair nothing here", cure)
    return Finding("directory", str(path), "bad", "cannot be written, and holds nothing to read", cure)


def _space_finding(path: Path, record_bytes: int, existing: Path | None) -> Finding:
    n_records = _room_records(path, record_bytes)
    if n_records is None:
        return Finding("free space", str(path), "good", "this file system gives no size")
    text = f"{format_size(free_bytes(path))} free; less a reserve of {format_size(default_reserve(path))}, "
    text += f"room for {counted(n_records, 'record')} of {format_size(record_bytes)}"
    if n_records > 0:
        return Finding("free space", str(path), "good", text)
    level: Level = "bad" if existing is None else "note"
    return Finding("free space", str(path), level, text, "make room, or name another drive; kprep place --reserve SIZE keeps less free")


def _room_records(path: Path, record_bytes: int) -> int | None:
    """Return how many records may still be written, None where the file system gives no size."""
    free, reserve = free_bytes(path), default_reserve(path)
    return None if free == reserve == 0 else max(0, free - reserve) // record_bytes


class _Trial(NamedTuple):
    """A file to read, and the bytes that must come."""

    path: Path
    content: np.ndarray
    is_new: bool


def _transfer_findings(path: Path, facts: DirectoryFacts, record_bytes: int, existing: Path | None) -> list[Finding]:
    """Read a record in the mode that krun would use, and see what comes. Raises OSError or KtierError."""
    mode = probe_directory(path)
    if existing is None or (os.access(path, os.W_OK) and _room_records(path, record_bytes) != 0):
        source = _written_trial(path, record_bytes, mode)
    else:
        source = _existing_trial(existing, record_bytes)
    with source as trial:
        was_dropped = _drop(trial.path)
        fault = _fault_of_reads(trial, mode)
        cached = _cached_fraction(trial.path)
        fault = fault or _fault_of_plain_read(trial)
        findings = [_bytes_finding(path, trial, mode, fault)]
        if mode.is_direct:
            findings.append(_alignment_finding(path, trial))
        if mode.is_direct and not facts.is_ram_backed:
            findings.append(_page_cache_finding(path, cached if was_dropped else None))
    return findings


@contextmanager
def _written_trial(directory: Path, record_bytes: int, mode: ReadMode) -> Iterator[_Trial]:
    """Give a new file of random bytes, which is gone afterwards."""
    path = directory / f".doctor-{os.getpid()}{PARTIAL_SUFFIX}"
    buffer = aligned_buffer(round_up(record_bytes, mode.alignment))
    content = np.frombuffer(buffer, np.uint8)
    content[:] = np.random.default_rng().integers(0, 256, len(content), np.uint8)
    try:
        write_record(path, buffer, record_bytes, mode)
        yield _Trial(path, content[:record_bytes], is_new=True)
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _existing_trial(path: Path, record_bytes: int) -> Iterator[_Trial]:
    yield _Trial(path, np.fromfile(path, np.uint8, count=record_bytes), is_new=False)


def _fault_of_reads(trial: _Trial, mode: ReadMode) -> str:
    """Return the first difference in reads at several offsets, or "" if there is none."""
    n_bytes = len(trial.content)
    buffer = aligned_buffer(span_bytes(n_bytes, mode.alignment))
    # btrfs goes through the page cache if it meets a destination that was never touched; the runtime's are.
    np.frombuffer(buffer, np.uint8)[:] = 0xEE
    for begin, end in _ranges(n_bytes):
        found = np.frombuffer(read_extent(Extent(trial.path, begin, end - begin), buffer, mode), np.uint8)
        differs = np.flatnonzero(found != trial.content[begin:end])
        if len(differs):
            return f"bytes {begin} to {end}, read {mode}: {len(differs)} are wrong, the first at {begin + differs[0]}"
    return ""


def _ranges(n_bytes: int) -> list[tuple[int, int]]:
    """Return the ranges to read: all, a third, ones that begin and end beside a page, the last byte."""
    third, half = n_bytes // 3, n_bytes // 2
    return [(0, n_bytes), (third, 2 * third), (1, n_bytes - 1), (half + 13, min(n_bytes, half + 13 + PAGE)), (n_bytes - 1, n_bytes)]


def _fault_of_plain_read(trial: _Trial) -> str:
    plain = np.fromfile(trial.path, np.uint8, count=len(trial.content))
    return "" if np.array_equal(plain, trial.content) else "a plain read gives other bytes"


def _bytes_finding(path: Path, trial: _Trial, mode: ReadMode, fault: str) -> Finding:
    source = f"{len(trial.content)} random bytes written" if trial.is_new else f"{len(trial.content)} bytes of {trial.path.name}"
    if fault:
        cure = "put nothing on this drive; ask dmesg and smartctl -a about it, and test the memory"
        return Finding("transfers", str(path), "bad", f"{source}: {fault}", cure)
    text = f"{source}, read {mode}, at {len(_ranges(1))} offsets: equal, and equal to a plain read"
    if mode.is_direct:
        return Finding("transfers", str(path), "good", text)
    return Finding("transfers", str(path), "note", f"{text}; buffered reads are slower and take many times the processor time", _PREFER)


def _alignment_finding(path: Path, trial: _Trial) -> Finding:
    outcomes = {step: _outcome_of_step(trial, step) for step in _STEPS if 2 * step <= len(trial.content)}
    accepted = [step for step, outcome in outcomes.items() if outcome != "refused"]
    direct = [step for step, outcome in outcomes.items() if outcome == "direct"]
    if direct and direct[0] > accepted[0]:
        return Finding("alignment", str(path), "good", f"{direct[0]} B; smaller steps are taken, but through the page cache")
    return Finding("alignment", str(path), "good", f"{accepted[0] if accepted else PAGE} B is the smallest step taken; we read in steps of {PAGE} B")


def _outcome_of_step(trial: _Trial, step: int) -> Literal["refused", "cached", "direct"]:
    """Read `step` bytes at offset `step` into memory aligned to no more than `step`."""
    buffer = aligned_buffer(2 * step)
    np.frombuffer(buffer, np.uint8)[:] = 0xEE
    _drop(trial.path)
    fd = os.open(trial.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        os.preadv(fd, [buffer[step:]], step)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return "refused"
    finally:
        os.close(fd)
    return "cached" if _cached_fraction(trial.path) else "direct"


def _page_cache_finding(path: Path, cached: float | None) -> Finding:
    """Judge by the part of the file that the direct reads left in the page cache; None if the kernel would not empty or show it."""
    if cached is None:
        cure = "compare the rate of kprep place --measure-drives with the drive's data sheet: above it, a cache was measured"
        return Finding("page cache", str(path), "note", "the kernel does not show whether direct reads pass it by", cure)
    if cached <= _MOST_CACHED:
        return Finding("page cache", str(path), "good", "direct reads pass it by")
    text = f"direct reads go through it ({cached:.0%} of the file was there afterwards): slower, and memory is taken for it"
    return Finding("page cache", str(path), "note", text, _PREFER)


def _drop(path: Path) -> bool:
    """Ask the kernel to forget a file's pages; say whether it did, and shows it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    cached = _cached_fraction(path)
    return cached is not None and cached <= _MOST_CACHED


def _cached_fraction(path: Path) -> float | None:
    """Return the part of a file's pages that are in the page cache, None if it cannot be mapped. Source: mincore(2)."""
    try:
        with path.open("rb") as file:
            mapping = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    except OSError:
        return None
    pages = np.zeros(-(-len(mapping) // mmap.PAGESIZE), np.uint8)
    if _libc.mincore(ctypes.c_void_p(mapping.ctypes.data), ctypes.c_size_t(len(mapping)), ctypes.c_void_p(pages.ctypes.data)):
        return None
    return float((pages & 1).mean())


def _shared_finding(path: Path, facts: DirectoryFacts, other: Path, other_facts: DirectoryFacts) -> Finding:
    names = ", ".join(sorted(facts.physical_names & other_facts.physical_names))
    text = f"{path} and {other} both lie on {names}: they count as one drive, and a copy on each makes nothing faster"
    return Finding("shared device", str(path), "note", text, "name one directory per drive")
