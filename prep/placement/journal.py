"""The journal of a placement: what was decided, so that the same command goes on with it after a kill, and the lock that keeps a second one out.

It lies beside the manifest while a placement is under way. It vouches for no file: what is on the drives is looked at, and proved, again.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import NamedTuple

from layout.writer import write_bytes
from manifests.errors import DamagedDataError, KtierError
from manifests.load import parse_manifest
from manifests.manifest import Manifest
from manifests.store import manifest_text

JOURNAL_NAME = "place.journal"


class Decided(NamedTuple):
    """What a placement is to bring about.

    manifest  to be published; its generation and date are given when that happens
    left_out  tier and directory of each former drive that is in the new set no more; once published, no manifest names them
    """

    manifest: Manifest
    left_out: list[tuple[str, Path]]


class PlaceJournal:
    """The journal of the output at `home`, whose lock is held until `close`. Raises KtierError if another command holds it."""

    def __init__(self, home: Path) -> None:
        self._path = home / JOURNAL_NAME
        self._fd = _locked(home)

    def is_empty(self) -> bool:
        return not self._path.exists()

    def decided(self, flags: str) -> Decided | None:
        """Return what an interrupted command with the same flags had decided; None if there is none."""
        try:
            entry = json.loads(self._path.read_bytes())
            text, left_out = entry["manifest"], [(tier, Path(directory)) for tier, directory in entry["left_out"]]
            if entry["flags"] != flags:
                return None
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedDataError(f"{self._path}: cannot be understood ({error}); remove it and start again: nothing is lost with it") from None
        return Decided(parse_manifest(text, where=str(self._path)), left_out)

    def decide(self, flags: str, decided: Decided) -> None:
        """Keep what was decided."""
        left_out = [(tier, str(directory)) for tier, directory in decided.left_out]
        write_bytes(self._path, json.dumps({"flags": flags, "left_out": left_out, "manifest": manifest_text(decided.manifest)}).encode())

    def close(self, *, is_done: bool) -> None:
        """Give the lock back. What was decided is forgotten if it is done."""
        if is_done:
            self._path.unlink(missing_ok=True)
        os.close(self._fd)


def _locked(home: Path) -> int:
    """Return a descriptor that holds the lock of a directory; a file of its own would have to be removed at the right moment."""
    fd = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise KtierError(f"{home}: another kprep is placing experts of this model; wait for it to end") from None
    except OSError as error:
        os.close(fd)
        raise KtierError(f"{home}: cannot be locked against a second command: {error.strerror}; its file system must know locks (flock)") from None
    return fd
