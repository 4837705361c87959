"""What the tests of kprep place share: the real command, and what must be true on the drives whatever happened."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from conftest import Outcome, command, succeed

from layout.drives import RAM_FILE_SYSTEMS, describe_directory
from layout.record import expert_file_name
from manifests.load import load_manifest
from manifests.manifest import Manifest

N_RECORDS = 144
# An expert of tiny-k3.1 has 9792 bytes, which are three blocks of a file system.
SLOT_BYTES = 12288


def tier_flags(tiers: tuple[str, ...]) -> list[str]:
    """Return `A=DIR` and so on as flags, making the directories."""
    for tier in tiers:
        Path(tier[2:]).mkdir(exist_ok=True)
    return [word for tier in tiers for word in ("--tier", tier)]


def place(home: Path, *tiers: str, flags: tuple[object, ...] = ()) -> Outcome:
    return succeed("kprep", "place", home / "manifest.yaml", *tier_flags(tiers), *flags)


def refused(home: Path, *tiers: str, code: int, parts: tuple[str, ...], flags: tuple[object, ...] = ()) -> Outcome:
    """A placement ends with a code and one message that has these parts."""
    outcome = command("kprep", "place", home / "manifest.yaml", *tier_flags(tiers), *flags)
    assert outcome.code == code and "Traceback" not in outcome.err, outcome
    assert all(part in outcome.err for part in parts), outcome.err
    return outcome


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def experts_in(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("L*-E*.bin")}


def tree(directory: Path) -> dict[str, tuple[int, bytes | None]]:
    """Every file and directory with its time of change, and its bytes."""
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None) for path in [directory, *directory.rglob("*")]}


def named(manifest: Manifest, home: Path) -> dict[Path, set[str]]:
    """The expert files that a manifest names, by directory."""
    return {
        Manifest.drive_directory(drive, home / "manifest.yaml"): {expert_file_name(*place) for place in np.argwhere(drive.holds).tolist()}
        for drive in manifest.drives
    }


def check_manifest_is_true(home: Path, extraction: Path) -> Manifest:
    """Every file that the manifest names has the right bytes, and no half-written file has an expert's name."""
    manifest = load_manifest(home / "manifest.yaml")
    for directory, names in named(manifest, home).items():
        assert all((directory / name).read_bytes() == (extraction / "experts" / name).read_bytes() for name in names)
    return manifest


def check_drives(home: Path, extraction: Path, *, is_verifying: bool = True) -> list[int]:
    """The manifest is true, every drive has a list of what it holds, kprep verifies it; return how many experts each holds."""
    manifest = check_manifest_is_true(home, extraction)
    for directory, names in named(manifest, home).items():
        assert {line.split("  ")[1] for line in (directory / "experts.xxh128").read_text().splitlines()} == names
    if is_verifying:
        succeed("kprep", "verify-hashes", home)
    assert not (home / "place.journal").exists()
    return [int(one.holds.sum()) for one in manifest.drives]


def add_copies(home: Path, directory: Path, *, tier: str = "C") -> None:
    """Register a second copy of every expert in a directory, on whichever device: kprep place makes none on a device that has one."""
    source = next(iter(named(load_manifest(home / "manifest.yaml"), home)))
    shutil.copytree(source, directory, dirs_exist_ok=True)
    succeed("kprep", "adopt", directory, "--manifest", home / "manifest.yaml", "--tier", tier)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@contextmanager
def directory_in_memory() -> Iterator[Path]:
    """A directory on a file system in memory: another device than the disk."""
    root = Path("/dev/shm")
    if not root.is_dir() or describe_directory(root).file_system not in RAM_FILE_SYSTEMS:
        pytest.skip("no file system in memory at /dev/shm")
    with tempfile.TemporaryDirectory(dir=root) as directory:
        yield Path(directory)
