"""Which drive reads which chunk of which record, and when: decisions only, no reads and no clock of its own.

A record's chunks may come from different drives. Drives on one device are one server: they share its rate, its counter of bytes in flight and its
depth. Only what fits in flight is bound to a drive; everything else is decided anew whenever a read ends, so that a chunk which has not started
goes to whichever drive would finish it first by then. Times are seconds of the caller's clock.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import NamedTuple

# What one more completion leaves of the weight of those before it: about the last twenty count.
_MEMORY = 0.95
# A measured profile weighs as much as this many completions.
_PRIOR_READS = 4
# A server that is not used is trusted to be what it was measured as again after about this long.
_FORGET_S = 20.0
# No rate is believed to have fallen below this part of the profile, or a drive that stalled once would never be asked again.
_LEAST_OF_PRIOR = 0.02
_UNKNOWN_BYTES_PER_S = 1e9
# Chunks of a group that are looked at one by one, a token's in a layer; beyond, only their bytes count.
_N_PLANNED = 48

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
SLOW_FACTOR = 10.0
SLOW_AT_LEAST_S = 1.0


class Chunk(NamedTuple):
    """A byte range of a record."""

    begin: int
    end: int

    @property
    def n_bytes(self) -> int:
        return self.end - self.begin


def chunks_in_order_of_need(*, w1_end: int, w2_end: int, w3_end: int, step: int) -> tuple[Chunk, ...]:
    """Cut a record (w1, w2, w3) at its matrices' ends, rounded up to `step` bytes, and return the pieces in the order w1, w3, w2; none is empty."""
    edges = [0, *(min(-(-end // step) * step, w3_end) for end in (w1_end, w2_end)), w3_end]
    pieces = [Chunk(begin, end) for begin, end in pairwise(edges)]
    return tuple(piece for piece in (pieces[0], pieces[2], pieces[1]) if piece.n_bytes)


@dataclass(frozen=True, slots=True)
class DriveFacts:
    """What is known of a drive before the run.

    server       drives with the same number share a device
    depth        requests, or pieces of them, that it has at once: those that saturate it and those that wait behind them
    bytes_per_s  measured, or None
    piece        bytes of the pieces into which a request is cut, each of which counts; None: a request counts as one
    """

    server: int
    tier: str
    depth: int
    bytes_per_s: float | None = None
    piece: int | None = None

    def n_pieces(self, n_bytes: int) -> int:
        return 1 if self.piece is None else -(-n_bytes // self.piece)


@dataclass(slots=True, eq=False)
class Job:
    """A record to read: the drives that may be asked for it, and its chunks' bytes in the order of need."""

    tag: Hashable
    drives: tuple[int, ...]
    sizes: tuple[int, ...]
    is_prefetch: bool = False
    is_cancelled: bool = False
    waiting: list[int] = field(init=False)
    n_left: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.drives and self.sizes
        self.waiting, self.n_left = list(range(len(self.sizes))), len(self.sizes)

    @property
    def is_started(self) -> bool:
        return len(self.waiting) < len(self.sizes)


@dataclass(slots=True, eq=False)
class Read:
    """A chunk on its way from a drive."""

    job: Job
    chunk: int
    drive: int
    n_bytes: int
    n_pieces: int
    began: float
    expected_s: float
    is_reported: bool = False


class NoCopyLeft(Exception):
    """Every drive that was to deliver a record has failed."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.tag)
        self.job = job


class _Server:
    """One device: what is in flight on it, and how fast it has been."""

    __slots__ = ("depth", "in_flight_bytes", "mark", "n_in_flight", "prior", "seen_bytes", "seen_s")

    def __init__(self, depth: int, prior: float | None) -> None:
        self.depth, self.prior = depth, prior
        self.n_in_flight = self.in_flight_bytes = 0
        # Busy time is accounted up to here; while nothing is in flight, the end of the last read.
        self.mark = -math.inf
        self.seen_bytes = self.seen_s = 0.0

    @property
    def is_full(self) -> bool:
        return self.n_in_flight >= self.depth

    def begin(self, n_bytes: int, n_pieces: int, now: float) -> None:
        if not self.n_in_flight:
            self.mark = now
        self.n_in_flight += n_pieces
        self.in_flight_bytes += n_bytes

    def end(self, n_bytes: int, n_pieces: int, now: float, *, is_good: bool) -> None:
        self.n_in_flight -= n_pieces
        self.in_flight_bytes -= n_bytes
        busy_s, self.mark = max(0.0, now - self.mark), max(now, self.mark)
        if not is_good:
            return
        if self.seen_s == 0.0 and self.prior is not None:
            self.seen_bytes, self.seen_s = float(_PRIOR_READS * n_bytes), _PRIOR_READS * n_bytes / self.prior
        self.seen_bytes = self.seen_bytes * _MEMORY + n_bytes
        self.seen_s = self.seen_s * _MEMORY + busy_s

    def rate(self, now: float, otherwise: float) -> float:
        """Return bytes per second; a read that is overdue counts against it before it ends."""
        prior = self.prior or otherwise
        if self.seen_s <= 0.0:
            return prior
        since_s = max(0.0, now - self.mark)
        if self.n_in_flight:
            return max(self.seen_bytes / (self.seen_s + since_s), _LEAST_OF_PRIOR * prior)
        trust = math.exp(-since_s / _FORGET_S) if since_s > 1.0 else 1.0
        return max(trust * self.seen_bytes / self.seen_s + (1 - trust) * prior, _LEAST_OF_PRIOR * prior)


class _Group:
    """Jobs that may be read from the same drives; which of them goes first does not matter."""

    __slots__ = ("drives", "is_prefetch", "jobs", "n_bytes", "servers")

    def __init__(self, drives: tuple[int, ...], servers: tuple[int, ...], is_prefetch: bool) -> None:
        self.drives, self.servers, self.is_prefetch = drives, servers, is_prefetch
        # In the order of their coming; a dictionary, so that one can be taken out of the middle.
        self.jobs: dict[Job, None] = {}
        # Of what has not started.
        self.n_bytes = 0

    def waiting(self) -> Iterator[tuple[Job, int]]:
        return ((job, chunk) for job in self.jobs for chunk in job.waiting)

    def remove(self, job: Job, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            self.n_bytes -= job.sizes[chunk]
            job.waiting.remove(chunk)
        if not job.waiting:
            self.jobs.pop(job, None)


class Scheduler:
    """Decides reads. Every read that `starts` returns must come back through `succeeded`, `failed` or `given_up`."""

    def __init__(self, drives: Sequence[DriveFacts], *, tier_caps: Mapping[str, int] | None = None) -> None:
        self._drives = tuple(drives)
        self._server_of = [drive.server for drive in drives]
        self._tier_caps = dict(tier_caps or {})
        assert all(cap > 0 for cap in self._tier_caps.values()) and all(drive.depth > 0 for drive in drives)
        self._servers = [_server([d for d in drives if d.server == n]) for n in range(max(self._server_of) + 1)]
        self._n_open = len(self._servers)
        self._tier_in_flight: Counter[str] = Counter()
        # Demands before prefetches, and among both those with the fewest copies first: they have the least choice.
        self._groups: list[_Group] = []
        self._reads: set[Read] = set()
        self._pause_s = [0.0] * len(drives)
        self._paused_until = [-math.inf] * len(drives)
        self._last_pause = -math.inf

    @property
    def n_in_flight(self) -> int:
        return len(self._reads)

    @property
    def has_waiting(self) -> bool:
        """Return whether a demand waits for a drive."""
        return bool(self._groups) and not self._groups[0].is_prefetch

    @property
    def reads(self) -> frozenset[Read]:
        return frozenset(self._reads)

    def rates(self, now: float) -> list[float]:
        """Return each server's rate in bytes per second as it is believed now; a server that nothing is known of is taken for an average one."""
        known = [rate for s in self._servers if (rate := s.seen_bytes / s.seen_s if s.seen_s > 0 else s.prior)]
        otherwise = sum(known) / len(known) if known else _UNKNOWN_BYTES_PER_S
        return [server.rate(now, otherwise) for server in self._servers]

    def add(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            group = self._group_of(job)
            group.jobs[job] = None
            group.n_bytes += sum(job.sizes[chunk] for chunk in job.waiting)

    def promote(self, job: Job) -> None:
        """Make a prefetch a demand."""
        waiting = self._take_out(job)
        job.is_prefetch, job.waiting = False, waiting
        if waiting:
            self.add([job])

    def cancel(self, job: Job) -> int:
        """Give up what has not started; return how many of the job's reads are still under way."""
        self._take_out(job)
        job.is_cancelled = True
        return sum(read.job is job for read in self._reads)

    def starts(self, now: float) -> list[Read]:
        """Return the reads to start now, and count them as in flight.

        A chunk whose best drive is busy is charged to that drive in thought, so that the next ones see it.
        """
        if not self._groups or not self._n_open:
            return []
        rates, loads = self.rates(now), [float(server.in_flight_bytes) for server in self._servers]
        started: list[Read] = []
        demands = [group for group in self._groups if not group.is_prefetch]
        while demands and self._n_open:
            group = self._most_pressing(demands, rates, loads)
            demands.remove(group)
            started += self._start_group(group, rates, loads, now)
        if self._n_open and self._groups[-1].is_prefetch:
            started += self._start_prefetches(rates, loads, now)
        self._groups = [group for group in self._groups if group.jobs]
        return started

    def succeeded(self, read: Read, now: float) -> bool:
        """Account for a chunk that is there, at the time at which it was; return whether it was its job's last."""
        self._end(read, now, is_good=True)
        self._pause_s[read.drive] = 0.0
        read.job.n_left -= 1
        return read.job.n_left == 0

    def failed(self, read: Read, now: float) -> float:
        """Give a chunk that did not arrive to another copy, and set its drive aside; return for how many seconds.

        Raises NoCopyLeft if no other drive has the record; a prefetch or a cancelled job is merely given up.
        """
        self._end(read, now, is_good=False)
        pause_s, job = self.pause(read.drive, now), read.job
        if job.is_cancelled:
            return pause_s
        job.waiting = sorted([*self._take_out(job), read.chunk])
        job.drives = tuple(drive for drive in job.drives if drive != read.drive)
        if job.drives:
            self.add([job])
            return pause_s
        job.waiting, job.is_cancelled = [], True
        if not job.is_prefetch:
            raise NoCopyLeft(job)
        return pause_s

    def given_up(self, read: Read, now: float) -> None:
        """Account for a chunk that was not read because its job was cancelled: the time was others'."""
        self._end(read, min(now, self._servers[self._server_of[read.drive]].mark), is_good=False)

    def pause(self, drive: int, now: float) -> float:
        """Ask a drive only where there is no other copy, for 5 s, doubled at each pause without a good read between; return the seconds."""
        if now >= self._paused_until[drive]:
            self._pause_s[drive] = min(LONGEST_PAUSE_S, 2 * self._pause_s[drive] or FIRST_PAUSE_S)
            self._paused_until[drive] = now + self._pause_s[drive]
            self._last_pause = max(self._last_pause, self._paused_until[drive])
        return self._pause_s[drive]

    def is_paused(self, drive: int, now: float) -> bool:
        return now < self._paused_until[drive]

    def overdue(self, now: float) -> list[Read]:
        """Return, once each, the reads that take more than ten times as long as expected, and over a second."""
        late = [read for read in self._reads if not read.is_reported and now - read.began > max(SLOW_AT_LEAST_S, SLOW_FACTOR * read.expected_s)]
        for read in late:
            read.is_reported = True
        return late

    def _group_of(self, job: Job) -> _Group:
        for group in self._groups:
            if group.drives == job.drives and group.is_prefetch == job.is_prefetch:
                return group
        group = _Group(job.drives, tuple({self._server_of[drive] for drive in job.drives}), job.is_prefetch)
        self._groups.append(group)
        self._groups.sort(key=lambda group: (group.is_prefetch, len(group.drives)))
        return group

    def _take_out(self, job: Job) -> list[int]:
        """Take a job out of its group; return the chunks that had not started."""
        waiting = list(job.waiting)
        if waiting:
            group = self._group_of(job)
            group.remove(job, waiting)
            if not group.jobs:
                self._groups.remove(group)
        return waiting

    def _most_pressing(self, groups: list[_Group], rates: list[float], loads: list[float]) -> _Group:
        """Return, of the groups with the fewest copies, the one whose drives would be done last with it and with what they are charged with."""
        n_copies = len(groups[0].drives)
        equals = [group for group in groups if len(group.drives) == n_copies]
        if len(equals) == 1 or n_copies == 1:
            return equals[0]

        def done_at(group: _Group) -> float:
            n_bytes, rate = float(group.n_bytes), 0.0
            for server in group.servers:
                n_bytes += loads[server]
                rate += rates[server]
            return n_bytes / rate

        return max(equals, key=done_at)

    def _start_group(self, group: _Group, rates: list[float], loads: list[float], now: float) -> list[Read]:
        """Start what a group's drives have room for, and charge the rest of it to them."""
        drives = [(drive, self._server_of[drive]) for drive in self._askable(group.drives, now)]
        is_single, n_charged, started = len(drives) == 1, 0, list[Read]()
        for job, chunk in islice(group.waiting(), _N_PLANNED) if not is_single or self._has_room(drives[0][0]) else ():
            n_bytes = job.sizes[chunk]
            drive, server = drives[0] if is_single else min(drives, key=lambda at: (loads[at[1]] + n_bytes) / rates[at[1]])
            loads[server] += n_bytes
            n_charged += n_bytes
            if self._has_room(drive):
                started.append(self._start(job, chunk, drive, loads[server] / rates[server], now))
                if (is_single and not self._has_room(drive)) or not self._n_open:
                    break
        _spread(group.n_bytes - n_charged, group.servers, rates, loads)
        for read in started:
            group.remove(read.job, (read.chunk,))
        return started

    def _start_prefetches(self, rates: list[float], loads: list[float], now: float) -> list[Read]:
        """Start prefetches, behind what is under way, on servers that no demand waits for; `loads` holds what demands have claimed."""
        claimed = {n for n, server in enumerate(self._servers) if loads[n] > server.in_flight_bytes}
        started = []
        for group in self._groups:
            if not group.is_prefetch:
                continue
            in_group = list[Read]()
            for job, chunk in group.waiting():
                idle = [d for d in group.drives if self._server_of[d] not in claimed and self._has_room(d) and not self.is_paused(d, now)]
                if not idle:
                    break
                drive = min(idle, key=lambda d: loads[s := self._server_of[d]] / rates[s])
                server = self._server_of[drive]
                loads[server] += job.sizes[chunk]
                in_group.append(self._start(job, chunk, drive, loads[server] / rates[server], now))
            for read in in_group:
                group.remove(read.job, (read.chunk,))
            started += in_group
        return started

    def _askable(self, drives: tuple[int, ...], now: float) -> tuple[int, ...]:
        """Return those drives that are not paused; all of them if there is no other way."""
        if now >= self._last_pause:
            return drives
        return tuple(drive for drive in drives if not self.is_paused(drive, now)) or drives

    def _has_room(self, drive: int) -> bool:
        server, tier = self._servers[self._server_of[drive]], self._drives[drive].tier
        return not server.is_full and (not self._tier_caps or self._tier_in_flight[tier] < self._tier_caps.get(tier, math.inf))

    def _start(self, job: Job, chunk: int, drive: int, expected_s: float, now: float) -> Read:
        n_bytes = job.sizes[chunk]
        read = Read(job, chunk, drive, n_bytes, self._drives[drive].n_pieces(n_bytes), now, expected_s)
        server = self._servers[self._server_of[drive]]
        # A request's last pieces may be more than there is room for.
        assert not server.is_full
        server.begin(n_bytes, read.n_pieces, now)
        self._n_open -= server.is_full
        self._tier_in_flight[self._drives[drive].tier] += 1
        self._reads.add(read)
        return read

    def _end(self, read: Read, now: float, *, is_good: bool) -> None:
        self._reads.remove(read)
        server = self._servers[self._server_of[read.drive]]
        was_full = server.is_full
        server.end(read.n_bytes, read.n_pieces, now, is_good=is_good)
        self._n_open += was_full and not server.is_full
        self._tier_in_flight[self._drives[read.drive].tier] -= 1


def _spread(n_bytes: int, servers: tuple[int, ...], rates: list[float], loads: list[float]) -> None:
    """Charge bytes to servers so that they end at the same time, but for those that end later anyhow."""
    if n_bytes <= 0:
        return
    ends_at = (n_bytes + sum(loads[server] for server in servers)) / sum(rates[server] for server in servers)
    for server in servers:
        loads[server] = max(loads[server], ends_at * rates[server])


def _server(drives: Sequence[DriveFacts]) -> _Server:
    assert drives, "server numbers have a gap"
    rates = [drive.bytes_per_s for drive in drives if drive.bytes_per_s]
    return _Server(max(drive.depth for drive in drives), max(rates, default=None))
