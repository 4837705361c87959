"""A manifest and its drives' hash lists, published together."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from layout.early_exit import REQUESTS_TO_END
from layout.hash_lists import HASH_LIST_NAME
from layout.prepared import Prepared
from layout.writer import replaced_file
from manifests.manifest import Drive, Manifest


def publish_with_lists(prepared: Prepared, drives: Sequence[Drive], publish: Callable[[], object]) -> None:
    """Call `publish`; right after it the hash list of each drive says what the drive holds.

    The lists lie ready, synced, beforehand: between the manifest and them there are only renames. If `publish` raises, they stay as they were.
    A drive whose directory is gone has no list.
    """
    with _uninterrupted(), ExitStack() as stack:
        for drive in drives:
            path = Manifest.drive_directory(drive, prepared.path) / HASH_LIST_NAME
            data = prepared.hashes.to_text(drive.holds).encode()
            if path.parent.is_dir() and not _holds(path, data):
                _write_synced(stack.enter_context(replaced_file(path)), data)
        publish()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back: between the manifest and its lists is no place to stop."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS_TO_END)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
