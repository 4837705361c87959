"""What a user asks of the drives."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from layout.direct import round_up
from manifests.errors import UsageError
from manifests.manifest import BASE_TIERS

FILE_SYSTEM_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class DriveRequest:
    """A drive as it was named. `limit_bytes` is the most that its experts may take."""

    tier: str
    directory: Path
    limit_bytes: int | None = None


def disk_bytes(record_bytes: int) -> int:
    """Return the room that an expert's file takes on a drive: whole blocks of the file system."""
    return round_up(record_bytes, FILE_SYSTEM_BLOCK)


def check_requests(requests: Sequence[DriveRequest]) -> None:
    """Raise UsageError unless the directories are there, each once, and some are of the base tiers."""
    if not any(request.tier in BASE_TIERS for request in requests):
        raise UsageError("--tier: name at least one drive of tier A or B; together they hold the base, one copy of every expert")
    seen: set[Path] = set()
    for request in requests:
        try:
            str(request.directory.resolve()).encode()
        except UnicodeEncodeError:
            raise UsageError(f"--tier {request.tier}={request.directory!a}: the path is not UTF-8, which a manifest cannot hold; rename it") from None
        if not request.directory.is_dir():
            raise UsageError(f"--tier {request.tier}={request.directory}: no such directory; make it, on the drive that you mean")
        if request.directory.resolve() in seen:
            raise UsageError(f"--tier {request.tier}={request.directory}: this directory is named twice")
        seen.add(request.directory.resolve())
