"""What the manifest keeps of the devices under a drive's directory."""

from dataclasses import fields

from layout.drives import DirectoryFacts
from manifests.manifest import Device


def manifest_devices(facts: DirectoryFacts) -> tuple[Device, ...]:
    """Return the devices under a directory as the manifest writes them down."""
    return tuple(Device(**{f.name: getattr(device, f.name) for f in fields(Device)}) for device in facts.devices)
