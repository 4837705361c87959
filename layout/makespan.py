"""How long a layer's reads take: a model of the drives, as fluid, as whole chunks, and as the runtime's rule of assignment.

A server is what serves one request after another: a device, whatever number of drives (directories) lies on it. Servers may share a link. A mask is
a set of servers, bit i standing for server i; an expert's mask is the set of servers that hold a copy.
Source: with every record split at will the shortest time is, by max-flow and min-cut, the maximum over sets S of the time that S needs for the
records that only S holds. That set is the bottleneck.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

MOST_SERVERS = 8
# What a server's own queue counts beside the time that its link allows: enough to choose among equals.
_TIE = 1e-6


@dataclass(frozen=True)
class Servers:
    """What drives there are. Raises ValueError where that is no model: a rate of zero, or link groups that cross each other.

    rates      bytes/s of each server alone
    server_of  for each drive, its server
    links      groups of servers and the bytes/s that they reach together; groups may be nested or apart
    """

    rates: tuple[float, ...]
    server_of: tuple[int, ...]
    links: tuple[tuple[tuple[int, ...], float], ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.rates) <= MOST_SERVERS:
            raise ValueError(f"{len(self.rates)} servers; expected 1 to {MOST_SERVERS}")
        if any(not 0 < rate < float("inf") for rate in (*self.rates, *(limit for _, limit in self.links))):
            raise ValueError(f"rates {self.rates} and links {self.links}: every rate must be above zero and finite")
        known = set(range(len(self.rates)))
        if not {*self.server_of, *(server for group, _ in self.links for server in group)} <= known:
            raise ValueError(f"drives on servers {self.server_of}, links {self.links}: expected servers 0 to {len(self.rates) - 1}")
        groups = [set(group) for group, _ in self.links]
        if any(a & b and not (a <= b or b <= a) for a in groups for b in groups):
            raise ValueError(f"links {self.links}: two groups must be nested or have no server in common")

    @property
    def n_servers(self) -> int:
        return len(self.rates)

    @cached_property
    def joint_rates(self) -> np.ndarray:
        """bytes/s that each set of servers reaches together, float64 [2**n_servers]; [0] is 0."""
        return self._joint(np.array(self.rates), np.array([limit for _, limit in self.links]))

    @cached_property
    def is_within(self) -> np.ndarray:
        """Whether mask m is a subset of set s and not empty, bool [m, s]."""
        masks = np.arange(1 << self.n_servers)
        return ((masks[:, None] & ~masks) == 0) & (masks[:, None] > 0)

    def masks(self, holds: Sequence[np.ndarray]) -> np.ndarray:
        """Return for each expert the servers that hold it, given what each drive holds (bool, all of one shape); uint8 of that shape."""
        masks = np.zeros(np.shape(holds[0]), np.uint8)
        for held, server in zip(holds, self.server_of, strict=True):
            masks |= held.astype(np.uint8) << np.uint8(server)
        return masks

    def _joint(self, per_server: np.ndarray, per_link: np.ndarray) -> np.ndarray:
        """Return what each set of servers can do, from what servers and links can do; the same unit, [..., n] to [..., 2**n_servers].

        Inner groups first: each one counts as no more than its link lets through.
        """
        members = (np.arange(1 << self.n_servers)[:, None] >> np.arange(self.n_servers) & 1).astype(per_server.dtype)
        open_parts = list[tuple[tuple[int, ...], np.ndarray]]()
        for server in range(self.n_servers):
            open_parts.append(((server,), per_server[..., None, server] * members[:, server]))
        for number in sorted(range(len(self.links)), key=lambda n: len(set(self.links[n][0]))):
            group = set(self.links[number][0])
            inner = [part for part in open_parts if set(part[0]) <= group]
            together = np.minimum(sum(amount for _, amount in inner), per_link[..., None, number])
            open_parts = [part for part in open_parts if not set(part[0]) <= group] + [(tuple(group), together)]
        return np.asarray(sum(amount for _, amount in open_parts))


def counts_within(servers: Servers, masks: np.ndarray) -> np.ndarray:
    """Return how many of each draw's experts are on no server outside each set, int [n_draws, 2**n_servers].

    masks  of the experts drawn, int [n_draws, n_picks]; 0 stands for no expert
    """
    n_draws, n_sets = len(masks), 1 << servers.n_servers
    by_mask = np.bincount((np.arange(n_draws)[:, None] * n_sets + masks).ravel(), minlength=n_draws * n_sets).reshape(n_draws, n_sets)
    return by_mask @ servers.is_within.astype(np.int64)


class Makespan(NamedTuple):
    """Seconds until a draw's last byte, float64 [n_draws], and the set of servers that it waits for, int [n_draws]; nothing drawn: 0 and 0."""

    seconds: np.ndarray
    bottleneck: np.ndarray


def makespan(servers: Servers, masks: np.ndarray, *, record_bytes: float, offsets_s: Sequence[float] | None = None) -> Makespan:
    """Return the shortest time in which every draw can be read if a record may be split at any byte.

    masks      as for `counts_within`
    offsets_s  when each server begins: its latency and backlog; None for at once

    T = max over S of (bytes only on S + sum over S of rate * offset) / sum over S of rate, servers that begin later than T left out.
    """
    offsets = np.zeros(servers.n_servers) if offsets_s is None else np.asarray(offsets_s, np.float64)
    left = counts_within(servers, masks) * float(record_bytes)
    times = np.zeros(left.shape)
    sets = np.arange(1 << servers.n_servers)
    starts = sorted(set(offsets.tolist()))
    # Between two starts the same servers run, and each set of them reads at its joint rate.
    for start, end in zip(starts, [*starts[1:], np.inf], strict=True):
        running = sum(1 << server for server, offset in enumerate(offsets) if offset <= start)
        rates = servers.joint_rates[sets & running]
        with np.errstate(divide="ignore", invalid="ignore"):
            ends = start + left / rates
        is_ending = (left > 0) & (rates > 0) & (ends <= end)
        times[is_ending] = ends[is_ending]
        left = np.where(is_ending, 0, left - (rates * (end - start) if end < np.inf else 0))
    bottleneck = times.argmax(axis=1)
    return Makespan(times[np.arange(len(times)), bottleneck], bottleneck)


def chunked_makespan(
    servers: Servers, masks: np.ndarray, *, record_bytes: float, n_chunks: int, offsets_s: Sequence[float] | None = None
) -> np.ndarray:
    """Return the shortest time in seconds, float64 [n_draws], if records are read in n_chunks equal chunks, each from one server.

    A server has read floor((T - offset) * rate / chunk) chunks at T, a link floor(T * limit / chunk); T is enough if, for every set S, that many are
    no fewer than those that only S holds. Chunks being equal, the least such T is one at which a server or link ends a chunk: exact.
    """
    chunk = record_bytes / n_chunks
    offsets = np.zeros(servers.n_servers) if offsets_s is None else np.asarray(offsets_s, np.float64)
    rates, limits = np.array(servers.rates), np.array([limit for _, limit in servers.links])
    demand = counts_within(servers, masks) * n_chunks
    steps = np.arange(demand.max(initial=0) + 1)
    ends = [*(offset + steps * chunk / rate for offset, rate in zip(offsets, rates, strict=True)), *(steps * chunk / limit for limit in limits)]
    times = np.unique(np.concatenate([np.zeros(1), *ends]))
    # A hair more than a whole number of chunks, as floats have it, is that number.
    done = np.floor(np.maximum(0, times[:, None] - offsets) * rates / chunk + 1e-9)
    passed = np.floor(times[:, None] * limits / chunk + 1e-9)
    supply = servers._joint(done, passed)
    low, high = np.zeros(len(demand), np.int64), np.full(len(demand), len(times) - 1)
    while (low < high).any():
        middle = (low + high) // 2
        is_enough = (demand <= supply[middle]).all(axis=1)
        low, high = np.where(is_enough, low, np.minimum(middle + 1, high)), np.where(is_enough, middle, high)
    return times[low]


class Assigned(NamedTuple):
    """What a rule of assignment makes of drawn layers.

    seconds     until the last chunk of each draw, float64 [n_draws]
    read_share  of all bytes that each server reads, last_share of the draws in which it is the last to end; float64 [n_servers] each
    """

    seconds: np.ndarray
    read_share: np.ndarray
    last_share: np.ndarray


def assign(servers: Servers, masks: np.ndarray, *, record_bytes: float, n_chunks: int) -> Assigned:
    """Return what the runtime's rule of assignment comes to at exact rates, where no chunk changes its server later.

    The rule: experts on the fewest servers first, of those the ones on slow servers first; chunk by chunk, each to the server that would complete it
    earliest. A chunk passes its server and that server's links, and is complete when the last of them has passed it. masks as for `counts_within`.
    """
    n_draws, n_servers = len(masks), servers.n_servers
    queue = _Queues(servers, n_draws, record_bytes / n_chunks)
    n_copies = np.bitwise_count(np.arange(1 << n_servers))
    order = np.lexsort((masks, servers.joint_rates[masks], n_copies[masks]), axis=1)
    for masks_now in np.take_along_axis(masks, order, axis=1).T:
        for _ in range(n_chunks):
            queue.put(masks_now)
    is_drawn = queue.ends.any(axis=0)
    # Those that end together are last together.
    is_last = (queue.ends == queue.ends.max(axis=0))[:, is_drawn]
    last = (is_last / np.maximum(is_last.sum(axis=0), 1)).sum(axis=1)
    return Assigned(queue.ends.max(axis=0), queue.n_read / max(queue.n_read.sum(), 1), last / max(int(is_drawn.sum()), 1))


class _Queues:
    """When each server and link has passed what it was given, by draw; `ends` is when each server's last chunk is complete."""

    def __init__(self, servers: Servers, n_draws: int, chunk_bytes: float) -> None:
        # A stage passes a chunk in so many seconds, for these servers.
        self._stages = [(chunk_bytes / rate, [server]) for server, rate in enumerate(servers.rates)]
        self._stages += [(chunk_bytes / limit, list(group)) for group, limit in servers.links]
        self._busy = np.zeros((len(self._stages), n_draws))
        self.ends = np.zeros((servers.n_servers, n_draws))
        self.n_read = np.zeros(servers.n_servers)

    def put(self, masks: np.ndarray) -> None:
        """Give one chunk of each draw to the server of its mask that completes it first; int [n_draws], 0 for none."""
        complete, own = np.zeros(self.ends.shape), np.zeros(self.ends.shape)
        for stage, (busy, (seconds, members)) in enumerate(zip(self._busy, self._stages, strict=True)):
            complete[members] = np.maximum(complete[members], busy + seconds)
            if stage < len(own):
                own[stage] = busy + seconds
        is_holder = masks >> np.arange(len(self.ends))[:, None] & 1 == 1
        # Where a link makes them all as late, the one that would be done first without it.
        chosen = np.where(is_holder, complete + _TIE * own, np.inf).argmin(axis=0)
        taken = np.arange(len(self.ends))[:, None] == np.where(masks > 0, chosen, -1)
        self.ends = np.where(taken, complete, self.ends)
        self.n_read += taken.sum(axis=1)
        for busy, (seconds, members) in zip(self._busy, self._stages, strict=True):
            busy += seconds * taken[members].any(axis=0)
