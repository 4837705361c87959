"""Measuring drives with the reader that the runtime uses: whole records, direct, in random order.

Each drive alone at rising depth, drives that share a device or a link together, all together, and on request all of that beside uploads to
the GPU. What is found goes into profiles; it decides nothing.
"""

import datetime
import itertools
import math
import os
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from layout.drives import DirectoryFacts, group_by_device
from layout.reader import reader_name
from layout.record import parse_expert_file_name
from layout.sizes import format_rate, format_size
from manifests.errors import UsageError
from manifests.manifest import DepthRate, Profile, SharedLink
from prep.measuring.measured_drive import MeasuredDrive, looks_cached, measured_drive
from prep.measuring.timed_reads import Run, n_requests, read_feeds
from prep.measuring.timed_reads import read_for as read_for
from prep.measuring.upload_process import UploadProcess, UploadRate

DEPTHS = (1, 2, 4, 8, 16, 32)
# Another step in depth must bring at least this much; one that does not is confirmed by the next, for single readings are noisy.
LEAST_GAIN = 1.05
N_STEPS_WITHOUT_GAIN = 2
# Drives that together give less than this part of the sum share something.
SHARED_BELOW = 0.9
DEFAULT_SECONDS = 1.0
# Buffers of all drives together; a kprep command stays below 2 GiB.
MOST_BUFFER_BYTES = 1_200_000_000
SOAK_WINDOW_S = 5.0
SOAK_DEPTH = 4
_DAY_S = 86400

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Link:
    """Servers that give clearly less together than the sum of what each gives alone."""

    servers: tuple[int, ...]
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Uploads:
    """The same beside uploads: their own rate, and that of all drives together."""

    device: str
    upload_bytes_per_s: float
    together_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured of some directories.

    profiles                   one per directory, in their order
    servers                    for each directory the number of what serves it: directories with a device in common are one server
    server_bytes_per_s         for each server, all its directories read together
    links                      groups of servers whose joint rate is clearly below their sum
    together_bytes_per_s       all directories at once
    each_together_bytes_per_s  the same, per directory
    uploads                    None unless uploads ran beside
    remarks                    for the user, each once
    """

    profiles: tuple[Profile, ...]
    servers: tuple[int, ...]
    server_bytes_per_s: tuple[float, ...]
    links: tuple[Link, ...]
    together_bytes_per_s: float
    each_together_bytes_per_s: tuple[float, ...]
    uploads: Uploads | None
    remarks: tuple[str, ...]

    def manifest_links(self, directories: Sequence[str]) -> tuple[SharedLink, ...]:
        """Return what a manifest keeps of servers with several directories and of links; `directories` as the manifest names them."""
        groups: list[tuple[tuple[int, ...], float]] = [((n,), rate) for n, rate in enumerate(self.server_bytes_per_s) if self.servers.count(n) > 1]
        groups += [(link.servers, link.bytes_per_s) for link in self.links]
        return tuple(
            SharedLink(tuple(d for d, server in zip(directories, self.servers, strict=True) if server in members), rate) for members, rate in groups
        )


@dataclass(frozen=True, slots=True)
class Soak:
    """A long read of one drive: its rate in the first and the last seconds, and degrees Celsius per device that tells them."""

    seconds: float
    n_bytes: int
    depth: int
    window_s: float
    first_bytes_per_s: float
    last_bytes_per_s: float
    celsius_before: dict[str, float]
    celsius_after: dict[str, float]
    remarks: tuple[str, ...]


def measure_drive(directory: Path, *, record_bytes: int, seconds: float, seed: int = 0) -> Profile:
    """Return the profile of one drive; see `measure_drives`."""
    return measure_drives([directory], record_bytes=record_bytes, seconds=seconds, seed=seed).profiles[0]


def measure_drives(
    directories: Sequence[Path],
    *,
    record_bytes: int,
    seconds: float,
    seed: int = 0,
    with_uploads: Sequence[str] | None = None,
    reserve_bytes: int | None = None,
    on_progress: Say = lambda text: None,
    sys_root: Path = Path("/sys"),
) -> Measurement:
    """Measure directories, `seconds` long at each step.

    with_uploads   the command line of a program that uploads to the GPU meanwhile; `uploads_command` makes it
    reserve_bytes  free space that trial files may not touch, by default `default_reserve`
    on_progress    is told each step's result in a line
    sys_root       where sysfs is mounted

    Directories with fewer than 16 experts get trial files for the time. Raises UsageError for a time that is none, NoSpaceError if trial files
    have no room, DeviceError or KtierError if uploads fail, and KtierError if a read fails or a rate is above what the device's link can carry.
    """
    assert directories and record_bytes > 0
    _check_seconds(seconds)
    if with_uploads is not None:
        # Without a GPU all that is measured before them would be lost.
        on_progress("trying whether uploads can be had")
        UploadProcess(with_uploads).close()
    rng = random.Random(seed)
    with ExitStack() as stack:
        drives = [
            stack.enter_context(measured_drive(d, record_bytes=record_bytes, reserve_bytes=reserve_bytes, rng=rng, sys_root=sys_root))
            for d in directories
        ]
        session = _Session(drives, seconds, on_progress)
        profiles = [session.profile(drive) for drive in drives]
        session.measure_servers(profiles)
        links = session.measure_links()
        each = session.each_together
        uploads = None
        if with_uploads is not None:
            profiles, uploads = session.beside_uploads(with_uploads, profiles)
        remarks = [remark for drive, profile in zip(drives, profiles, strict=True) for remark in (*drive.remarks(), *_cache_remarks(drive, profile))]
        return Measurement(
            tuple(profiles),
            session.servers,
            tuple(session.server_rates),
            tuple(links),
            sum(each),
            tuple(each),
            uploads,
            tuple(dict.fromkeys([*remarks, *session.remarks])),
        )


class _Session:
    """The steps of a measurement over drives that are ready."""

    def __init__(self, drives: Sequence[MeasuredDrive], seconds: float, say: Say) -> None:
        self._drives, self._seconds, self._say = drives, seconds, say
        self.servers = group_by_device([drive.facts for drive in drives])
        self.server_rates: list[float] = []
        self.each_together: list[float] = []
        self.remarks: list[str] = []
        self._depths: list[int] = []
        self._joint: dict[tuple[int, ...], list[float]] = {}

    def profile(self, drive: MeasuredDrive) -> Profile:
        """Measure a drive alone, depth rising until it gains nothing."""
        # The first reads wake a sleeping drive and find the files.
        drive.read(1, min(0.2, self._seconds / 4))
        steps: list[tuple[int, Run, int | None]] = []
        for depth in DEPTHS:
            if steps and n_requests(depth) * drive.deck.record_bytes > MOST_BUFFER_BYTES:
                break
            run, device_bytes = drive.read(depth, self._seconds)
            steps.append((depth, run, device_bytes))
            self._say(f"{drive.directory}: {format_rate(run.bytes_per_s)} at depth {depth}")
            best = last_gain([run.bytes_per_s for _, run, _ in steps])
            if len(steps) - 1 - best == N_STEPS_WITHOUT_GAIN:
                break
        self._depths.append(steps[best][0])
        return _profile(drive, *steps[best], [DepthRate(depth, run.bytes_per_s) for depth, run, _ in steps])

    def measure_servers(self, profiles: Sequence[Profile]) -> None:
        for server in range(max(self.servers) + 1):
            members = self._members((server,))
            if len(members) == 1:
                self.server_rates.append(profiles[members[0]].read_bytes_per_s)
                continue
            rates = self._joint_rates(members)
            self.server_rates.append(sum(rates))
            names = ", ".join(str(self._drives[n].directory) for n in members)
            device = ", ".join(sorted(frozenset[str]().union(*(self._drives[n].facts.physical_names for n in members))))
            self.remarks.append(f"{names} lie on one device ({device}) and count as one drive: {format_rate(sum(rates))} together")

    def measure_links(self) -> list[Link]:
        """Read what may share a link together, then everything; return the groups that give less than their parts."""
        links: list[Link] = []
        everything = tuple(range(len(self.server_rates)))
        for group in groups_by_bridge([drive.facts for drive in self._drives], self.servers):
            if group != everything:
                links += self._link_of(group, links)
        self.each_together = self._joint_rates(range(len(self._drives))) if len(self._drives) > 1 else list(self.server_rates)
        if len(everything) > 1:
            links += self._link_of(everything, links)
        return links

    def beside_uploads(self, command: Sequence[str], profiles: Sequence[Profile]) -> tuple[list[Profile], Uploads]:
        """Read each drive and all together while a process uploads."""
        self._say("waiting for the uploads to begin")
        with UploadProcess(command) as process:
            alone = [self._read_together([n])[0] for n in range(len(self._drives))]
            together = self._read_together(range(len(self._drives)))
            rate: UploadRate = process.finish()
        self._say(f"beside uploads of {format_rate(rate.bytes_per_s)} to {rate.device}: {format_rate(sum(together))} together")
        beside = [replace(profile, with_uploads_bytes_per_s=one) for profile, one in zip(profiles, alone, strict=True)]
        return beside, Uploads(rate.device, rate.bytes_per_s, sum(together))

    def _members(self, servers: Sequence[int]) -> list[int]:
        return [n for n, server in enumerate(self.servers) if server in servers]

    def _link_of(self, group: tuple[int, ...], known: Sequence[Link]) -> list[Link]:
        expected = expected_rate(group, self.server_rates, known)
        joint = sum(self._joint_rates(self._members(group)))
        if joint >= SHARED_BELOW * expected:
            return []
        # A drive may have slowed down meanwhile: the parts are read once more, and only what holds both times counts.
        rates = [sum(self._read_together(self._members((server,)))) if server in group else 0.0 for server in range(len(self.server_rates))]
        again, expected_again = sum(self._read_together(self._members(group))), expected_rate(group, rates, known)
        if again >= SHARED_BELOW * expected_again:
            return []
        names = ", ".join(str(self._drives[n].directory) for n in self._members(group))
        # Never less than the fastest of them reaches alone: others may slow it down, but it need not be asked for all.
        mean = max((joint + again) / 2, *(self.server_rates[server] for server in group))
        self.remarks.append(
            f"{names} share a link or the machine's limits: {format_rate(mean)} together, {format_rate(expected)} if each had its own"
        )
        return [Link(group, mean)]

    def _joint_rates(self, members: Sequence[int]) -> list[float]:
        """Return the rates of the first time that these drives were read together."""
        if tuple(members) not in self._joint:
            self._joint[tuple(members)] = self._read_together(members)
        return self._joint[tuple(members)]

    def _read_together(self, members: Sequence[int]) -> list[float]:
        n_bytes = self._drives[0].deck.record_bytes * len(members)
        most = max((depth for depth in DEPTHS if n_requests(depth) * n_bytes <= MOST_BUFFER_BYTES), default=1)
        if any(self._depths[n] > most for n in members):
            self.remarks.append(f"together the drives were read at most {most} deep, for buffers of {format_size(MOST_BUFFER_BYTES)} in all")
        runs = read_feeds([self._drives[n].feed(min(most, self._depths[n])) for n in members], self._seconds)
        rates = [run.bytes_per_s for run in runs]
        names = " + ".join(str(self._drives[n].directory) for n in members)
        self._say(f"{names}: {' + '.join(map(format_rate, rates))}")
        return rates


def soak(
    directory: Path,
    seconds: float,
    *,
    record_bytes: int,
    depth: int = SOAK_DEPTH,
    seed: int = 0,
    reserve_bytes: int | None = None,
    sys_root: Path = Path("/sys"),
) -> Soak:
    """Read a drive for long, to see whether it slows down as it warms up; the windows are 5 s, or half of a time that is shorter than 10 s.

    Raises what `measure_drives` raises.
    """
    _check_seconds(seconds)
    drive_of = measured_drive(directory, record_bytes=record_bytes, reserve_bytes=reserve_bytes, rng=random.Random(seed), sys_root=sys_root)
    with drive_of as drive:
        before = {device.name: temperature.now for device, temperature in drive.temperatures()}
        run, device_bytes = drive.read(depth, seconds)
        after = {device.name: temperature.now for device, temperature in drive.temperatures() if device.name in before}
        remarks = [*drive.remarks(), *_cache_remarks(drive, _profile(drive, depth, run, device_bytes, []))]
    return Soak(run.seconds, run.n_bytes, depth, *first_and_last(run, seconds), {name: before[name] for name in after}, after, tuple(remarks))


def first_and_last(run: Run, seconds: float) -> tuple[float, float, float]:
    """Return the length of the two windows of a soak, and the rate in the first and in the last."""
    window = min(SOAK_WINDOW_S, seconds / 2)
    return window, run.bytes_per_s_between(0, window), run.bytes_per_s_between(seconds - window, seconds)


def is_older_than_files(profile: Profile, directory: Path) -> bool:
    """Say whether any of a directory's experts was written after the profile was measured; a date without a time is the end of that day."""
    with os.scandir(directory) as entries:
        newest = max((e.stat().st_mtime for e in entries if parse_expert_file_name(e.name)), default=-math.inf)
    date = datetime.datetime.fromisoformat(profile.date)
    measured = (date if date.tzinfo is not None else date.replace(tzinfo=datetime.UTC)).timestamp()
    if "T" not in profile.date and " " not in profile.date:
        measured += _DAY_S
    return newest > measured + 1


def _check_seconds(seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"a drive cannot be measured for {seconds} s; give a time above zero")


def _profile(drive: MeasuredDrive, depth: int, run: Run, device_bytes: int | None, curve: Sequence[DepthRate]) -> Profile:
    times = np.array(run.times) * 1e6
    p50, p95, p99 = (float(np.percentile(times, q)) for q in (50, 95, 99))
    return Profile(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        reader=reader_name(),
        is_direct=drive.mode.is_direct,
        depth=depth,
        read_bytes_per_s=run.bytes_per_s,
        p50_us=p50,
        p95_us=p95,
        p99_us=p99,
        max_us=float(times.max()),
        n_bytes=run.n_bytes,
        seconds=run.seconds,
        curve=tuple(curve),
        device_bytes=device_bytes,
        is_cache_suspected=looks_cached(run.n_bytes, device_bytes),
        is_on_trial_files=drive.are_trials,
    )


def _cache_remarks(drive: MeasuredDrive, profile: Profile) -> list[str]:
    if not profile.is_cache_suspected:
        return []
    assert profile.device_bytes is not None
    return [
        f"{drive.directory}: {format_size(profile.n_bytes)} were read, but its devices read only {format_size(profile.device_bytes)}: "
        f"{format_rate(profile.read_bytes_per_s)} is in part the rate of a cache, or of compression, below the file system"
    ]


def last_gain(rates: Sequence[float]) -> int:
    """Return the place of the last rate that was at least LEAST_GAIN times the best before it that was."""
    best = 0
    for n, rate in enumerate(rates):
        if rate >= LEAST_GAIN * rates[best]:
            best = n
    return best


def groups_by_bridge(facts: Sequence[DirectoryFacts], servers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the groups of servers that hang on one PCI bridge or function, smaller ones first."""
    below: dict[str, set[int]] = {}
    for one, server in zip(facts, servers, strict=True):
        for address in itertools.chain.from_iterable(device.pci_path for device in one.physical):
            below.setdefault(address, set()).add(server)
    groups = {tuple(sorted(members)) for members in below.values() if len(members) > 1}
    return sorted(groups, key=lambda group: (len(group), group))


def expected_rate(group: Sequence[int], rates: Sequence[float], known: Sequence[Link]) -> float:
    """Return what a group of servers should give together: the links within it that are known, and the rest alone."""
    left, total = set(group), 0.0
    for link in sorted(known, key=lambda link: -len(link.servers)):
        if left.issuperset(link.servers):
            total += min(link.bytes_per_s, sum(rates[n] for n in link.servers))
            left.difference_update(link.servers)
    return total + sum(rates[n] for n in left)
