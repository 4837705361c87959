"""What the store knows of records on their way: those that are being read, and what a layer still waits for."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from runtime.stats import DriveCounts
from runtime.storage.cache import ExpertKey
from runtime.storage.schedule import Chunk, Job, Read

# Experts that are handed out together, except for a layer's last: each group costs the host about a tenth of a millisecond.
LEAST_GROUP = 8


class Phase(Enum):
    """What the engine is doing: it decides how records are cut and who may evict whom."""

    PROMPT = "prompt"
    DECODE = "decode"


@dataclass(slots=True, eq=False, kw_only=True)
class Incoming:
    """A record that is being read into a host slot, `room`.

    is_spare     whether the room is none of the pool's
    is_wanted    whether a layer waits for it; a prefetch otherwise
    expected     the hash that it must have, None if it is not looked at
    arrived      chunks that are there and not on their way to the device
    numbers      of its reads, by which they are given up
    is_copying   whether reads copy what they read on to the device
    is_uploading whether chunks of it were uploaded from the room otherwise
    sources      drives that chunks came from
    refused      drives that it is not asked of (again)
    n_out        reads and hashes under way that use the room
    slow         drives that were said to be late with it
    is_dead      whether nobody waits for it any more: its room is free once n_out is 0, and given back once: is_retired
    is_single    whether it is read whole from one drive at a time, because a record of several drives had a wrong hash
    rival        the same record on its way from another drive
    """

    key: ExpertKey
    room: int
    is_spare: bool
    is_wanted: bool
    expected: str | None
    job: Job | None = None
    chunks: tuple[Chunk, ...] = ()
    arrived: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    is_copying: bool = False
    is_uploading: bool = False
    sources: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    slow: set[int] = field(default_factory=set)
    n_out: int = 0
    is_dead: bool = False
    is_retired: bool = False
    is_single: bool = False
    rival: "Incoming | None" = None


class Room(NamedTuple):
    """Where a record lies in host memory: a slot that is the pool's, or a spare one."""

    key: ExpertKey
    slot: int
    is_spare: bool


class Ticket(NamedTuple):
    """What travels with a read: whom it is for, and where it is counted, by drive and by tier."""

    read: Read
    incoming: Incoming
    counts: tuple[DriveCounts, DriveCounts]


@dataclass(slots=True, eq=False)
class LayerFetch:
    """One layer's fetch: what it still waits for, and what is ready to be handed out.

    wanted   asked for and not handed out yet
    queue    those of them that have no host slot so far
    n_unseen those of which some were not looked for yet; 0 once it is known where each is
    hits     on the device since before
    ready    on the device by now, or on their way to it
    passing  used by too few rows to stay
    meanwhile  what the caller does while reads are under way
    began, first_read  when it began, and when its first read was handed to the reader, 0 before that
    """

    number: int
    passing: frozenset[ExpertKey] = frozenset()
    wanted: dict[ExpertKey, None] = field(default_factory=dict)
    queue: deque[ExpertKey] = field(default_factory=deque)
    meanwhile: Callable[[], None] | None = None
    n_unseen: int = 0
    hits: list[tuple[ExpertKey, int]] = field(default_factory=list)
    ready: list[tuple[ExpertKey, int]] = field(default_factory=list)
    last_by_drive: dict[int, float] = field(default_factory=dict)
    began: float = 0.0
    first_read: float = 0.0
    waited_s: float = 0.0
    n_alarms: int = 0

    @property
    def n_left(self) -> int:
        """Return how many may still have to be read."""
        return self.n_unseen or len(self.queue)

    @property
    def n_until_group(self) -> int:
        """Return how many more must be ready before a group is handed out."""
        return min(LEAST_GROUP, len(self.wanted)) - len(self.ready)

    def next_group(self, *, is_pressed: bool) -> list[tuple[ExpertKey, int]]:
        """Return what may be handed out: first what needs no upload, so that work on it waits for nothing, then a few at once.

        is_pressed  whether what is ready stands in the way of what is to come
        """
        if self.hits:
            group, self.hits = self.hits, []
        elif is_pressed or self.n_until_group <= 0:
            group, self.ready = self.ready, []
        else:
            return []
        return group
