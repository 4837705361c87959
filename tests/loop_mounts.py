"""Small real file systems on loop devices, for tests that need a disk of their own."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted_ext4(where: Path, *, n_bytes: int) -> Iterator[Path]:
    """Mount a new ext4 of the given size; the test is skipped, visibly, where that is not allowed."""
    image = where.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(n_bytes)
    where.mkdir()
    try:
        run("mkfs.ext4", "-q", "-m", "0", image)
        device = run("losetup", "--find", "--show", "--direct-io=on", image).strip()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no loop device may be made here: {getattr(error, 'stderr', error)}")
    try:
        try:
            run("mount", device, where)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"nothing may be mounted here: {error.stderr}")
        try:
            yield where
        finally:
            run("umount", "--lazy", where)
    finally:
        run("losetup", "--detach", device)


def run(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout
