"""What the manifest keeps of a drive."""

from dataclasses import fields
from pathlib import Path

import numpy as np

from layout.drives import DirectoryFacts, describe_directory
from manifests.manifest import Device, Drive, Profile


def manifest_devices(facts: DirectoryFacts) -> tuple[Device, ...]:
    """Return the devices under a directory as the manifest writes them down."""
    return tuple(Device(**{f.name: getattr(device, f.name) for f in fields(Device)}) for device in facts.devices)


def manifest_drive(tier: str, directory: Path, home: Path, profile: Profile | None, holds: np.ndarray) -> Drive:
    """Return a drive as the manifest of the output at `home` has it."""
    facts = describe_directory(directory)
    return Drive(tier, drive_text(directory, home), facts.file_system, manifest_devices(facts), profile, holds)


def drive_text(directory: Path, home: Path) -> str:
    """Return how the output at `home` names a drive's directory: relative within the output, so that the whole can be moved, else absolute."""
    directory, home = directory.resolve(), home.resolve()
    return str(directory.relative_to(home)) if directory.is_relative_to(home) else str(directory)
