"""What a run counts: where the experts came from, and when. Times are seconds."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class DriveCounts:
    """Reads of one drive, or of all drives of a tier.

    n_reads    requests that ended, those that failed too; a record may be several
    busy_s     the time in which at least one was under way, so that read_bytes / busy_s is the rate while busy
    n_last     layers that waited for it last
    last_by_s  how much longer they waited for it than for any other drive
    """

    n_reads: int = 0
    read_bytes: int = 0
    n_failed: int = 0
    n_slow: int = 0
    n_pauses: int = 0
    busy_s: float = 0.0
    n_last: int = 0
    last_by_s: float = 0.0
    _n_in_flight: int = 0
    _counted_until: float = 0.0

    def begin(self, now: float) -> None:
        if not self._n_in_flight:
            self._counted_until = now
        self._n_in_flight += 1

    def end(self, now: float) -> None:
        self._n_in_flight -= 1
        self.n_reads += 1
        self.busy_s += max(0.0, now - self._counted_until)
        self._counted_until = max(now, self._counted_until)


@dataclass(slots=True)
class ExpertCounts:
    """Where the experts came from in one phase, prompt pass or decode.

    drives      in the manifest's order; tiers holds the same by letter
    n_records   records that came whole from drives because they were needed; what a guess had read before it was needed is a host hit
    n_prefetch_*  guesses, and of those that are over: needed, given up in time, and read for nothing
    wait_s      time in which nothing could be done but wait for a drive, in n_waits pieces
    upload_wait_s  time in which nothing could be done but wait for an upload to free its host slot
    host_s      time in the store's own code, waits left out
    to_first_read_s, after_last_read_s  of n_reading_layers: time from a layer's choice to its first read, and from its last read's end to its last
                expert handed out; the drives idle meanwhile
    *_by_layer  the same counts as above, by layer
    """

    drives: list[DriveCounts]
    tiers: dict[str, DriveCounts] = field(default_factory=dict)
    n_device_hits: int = 0
    n_host_hits: int = 0
    n_records: int = 0
    n_verified: int = 0
    uploaded_bytes: int = 0
    wait_s: float = 0.0
    n_waits: int = 0
    upload_wait_s: float = 0.0
    host_s: float = 0.0
    to_first_read_s: float = 0.0
    after_last_read_s: float = 0.0
    n_reading_layers: int = 0
    n_layers: int = 0
    n_prefetch_issued: int = 0
    n_prefetch_used: int = 0
    n_prefetch_cancelled: int = 0
    n_prefetch_wasted: int = 0
    device_hits_by_layer: Counter[int] = field(default_factory=Counter)
    host_hits_by_layer: Counter[int] = field(default_factory=Counter)
    records_by_layer: Counter[int] = field(default_factory=Counter)
    needed: set[tuple[int, int]] = field(default_factory=set)

    @property
    def idle_s(self) -> float:
        return self.wait_s + self.upload_wait_s

    @property
    def n_reads(self) -> int:
        return sum(drive.n_reads for drive in self.drives)

    @property
    def read_bytes(self) -> int:
        return sum(drive.read_bytes for drive in self.drives)

    @property
    def n_failed(self) -> int:
        return sum(drive.n_failed for drive in self.drives)


def new_counts(n_drives: int) -> ExpertCounts:
    return ExpertCounts([DriveCounts() for _ in range(n_drives)])
