"""Arguments that several commands share."""

from pathlib import Path

from layout.sizes import parse_size
from manifests.errors import UsageError
from manifests.manifest import TIERS
from prep.requests import DriveRequest

RESERVE_HELP = "Room to leave free on each file system; 0 for none; default: the smaller of 20GB and 5 %."
MANIFEST_HELP = "manifest.yaml, or its directory."
LIMIT_HELP = "The most that experts may take on each drive of a tier."


def drive_requests(tiers: list[str], limits: list[str], *, record_bytes: int | None) -> list[DriveRequest]:
    """Return the drives that --tier and --limit name; limits may be in slots if record_bytes is given. Raises UsageError."""
    limit_of = {}
    for text in limits:
        letter, size = split_tier(text, flag="--limit", form="C=500GB")
        if letter in limit_of:
            raise UsageError(f"--limit {text}: tier {letter} has a limit already; give one, which holds for each of its drives")
        limit_of[letter] = parse_size(size, flag=f"--limit {letter}", record_bytes=record_bytes)
    named = [split_tier(text, flag="--tier", form="A=/mnt/nvme0") for text in tiers]
    strays = sorted(set(limit_of) - {letter for letter, _ in named})
    if strays:
        raise UsageError(f"--limit: no drive of tier {', '.join(strays)} is named by --tier")
    return [DriveRequest(letter, Path(directory), limit_of.get(letter)) for letter, directory in named]


def split_tier(text: str, *, flag: str, form: str) -> tuple[str, str]:
    letter, equals, value = text.partition("=")
    if not equals or not value or len(letter) != 1 or letter not in TIERS:
        raise UsageError(f"{flag} {text}: expected a tier letter {', '.join(TIERS)}, an equals sign and a value, like {form}")
    return letter, value


def reserve_of(text: str | None) -> int | None:
    """Return the bytes of --reserve, None for the default."""
    return None if text is None else 0 if text == "0" else parse_size(text, flag="--reserve")
