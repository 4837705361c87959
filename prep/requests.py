"""What a user asks of the drives."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from layout.direct import round_up
from layout.hash_lists import HASH_LIST_NAME
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


def check_requests(requests: Sequence[DriveRequest], *, home: Path | None = None) -> None:
    """Raise UsageError unless the directories are there, each once and none within another, and some are of the base tiers.

    home  the model's own directory, which is none of them: a drive's hash list would replace the list of all experts
    """
    if not any(request.tier in BASE_TIERS for request in requests):
        raise UsageError("--tier: name at least one drive of tier A or B; together they hold the base, one copy of every expert")
    seen: dict[tuple[int, int], DriveRequest] = {}
    for request in requests:
        try:
            str(request.directory.resolve()).encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"--tier {request.tier}={str(request.directory)!a}: the path is not UTF-8, which a manifest cannot hold; rename it"
            ) from None
        if not request.directory.is_dir():
            raise UsageError(f"{_flag(request)}: no such directory; make it, on the drive that you mean")
        if home is not None and home.is_dir() and identity(request.directory) == identity(home):
            raise UsageError(
                f"{_flag(request)}: is the model's own directory, whose {HASH_LIST_NAME} lists all experts; "
                "name a directory within it or elsewhere, where a drive's list can lie"
            )
        if (other := seen.get(identity(request.directory))) is not None:
            same = "" if other.directory == request.directory else f", also as {other.directory}"
            raise UsageError(f"{_flag(request)}: this directory is named twice{same}")
        seen[identity(request.directory)] = request
    for request in requests:
        for parent in request.directory.resolve().parents:
            if (outer := seen.get(identity(parent))) is not None:
                raise UsageError(f"{_flag(request)}: lies within {outer.directory}, which is named too; a drive's directory holds its own files only")


def identity(directory: Path) -> tuple[int, int]:
    """Return what a directory is, whatever links or bind mounts lead to it."""
    found = os.stat(directory)
    return found.st_dev, found.st_ino


def check_writable(requests: Iterable[DriveRequest]) -> None:
    """Raise UsageError for a directory in which no file may be made."""
    for request in requests:
        if not os.access(request.directory, os.W_OK | os.X_OK):
            is_read_only = bool(os.statvfs(request.directory).f_flag & os.ST_RDONLY)
            why = "its file system is mounted read-only; mount it writable" if is_read_only else "no permission; change its owner or mode"
            raise UsageError(f"{_flag(request)}: no file can be written there: {why}, or leave the drive out")


def _flag(request: DriveRequest) -> str:
    return f"--tier {request.tier}={request.directory}"
