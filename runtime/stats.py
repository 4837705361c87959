"""What a run counts: where the experts came from, and when."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class DriveCounts:
    """One drive's reads. `busy_s` adds up the time of single reads, which overlap; `n_last` counts layers that waited for it last."""

    n_reads: int = 0
    read_bytes: int = 0
    n_failed: int = 0
    busy_s: float = 0.0
    n_last: int = 0


@dataclass(slots=True)
class ExpertCounts:
    """Where the experts came from in one phase, prompt pass or decode."""

    drives: list[DriveCounts]
    n_device_hits: int = 0
    n_host_hits: int = 0
    uploaded_bytes: int = 0
    wait_s: float = 0.0
    needed: set[tuple[int, int]] = field(default_factory=set)

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
