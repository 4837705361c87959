"""The one JSON document of a run: what ran, on what, with which settings, and every repeat with its whole statistics.

`krun generate --stats-json` and `krun bench --out` write the same form, so that each can be compared with the other.
"""

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from layout.memory import meminfo_bytes
from manifests.manifest import Manifest

SCHEMA = 1
_ROOT = Path(__file__).resolve().parents[2]


class Configuration(NamedTuple):
    """One way of running: the command line behind `krun`, and what its settings became, as they were printed."""

    command: list[str]
    effective: list[str]


def stats_document(
    *,
    command: Sequence[str],
    configurations: Mapping[str, Configuration],
    manifest: Mapping[str, Any] | None,
    device: Mapping[str, Any] | None,
    repeats: Sequence[Mapping[str, Any]],
    failure: str | None = None,
) -> dict[str, Any]:
    """Return the document; it holds nothing that JSON does not know.

    command         the whole command line that led to it
    configurations  by name; a plain run has one, "A"
    manifest        as `manifest_facts` gives it; None for a model without one
    device          as `device_facts` gives it; None if nothing ran
    repeats         as `repeat_facts` gives them, in the order in which they ran
    failure         why there are no more repeats, or why they must not be compared; None if all is well
    """
    return {
        "schema": SCHEMA,
        "command": list(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": checkout_commit(),
        "versions": version_facts(),
        "device": None if device is None else dict(device),
        "manifest": None if manifest is None else dict(manifest),
        "configurations": {name: configuration._asdict() for name, configuration in configurations.items()},
        "repeats": [dict(repeat) for repeat in repeats],
        "failure": failure,
    }


def repeat_facts(generated: Mapping[str, Any], *, configuration: str, repeat: int) -> dict[str, Any]:
    """Return one repeat: the whole document of `krun generate --json`, whose it is, which one (from 1), and a hash of its ids."""
    return {"configuration": configuration, "repeat": repeat, "ids_xxh3_128": ids_digest(generated["ids"]), **generated}


def ids_digest(ids: Sequence[int]) -> str:
    """Return the xxh3-128 of token numbers, written as little-endian int64."""
    return xxhash.xxh3_128_hexdigest(np.asarray(ids, "<i8").tobytes())


def manifest_facts(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Return what tells one prepared model, and one placement of it, from any other. `path` is the manifest file's."""
    return {
        "path": str(path),
        "generation": manifest.generation,
        "created": manifest.created,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "source_digest": manifest.source.digest,
        "spine_xxh3_128": manifest.spine.xxh3_128,
    }


def device_facts(device: torch.device) -> dict[str, Any]:
    """Return what a device is."""
    if device.type != "cuda":
        return {"kind": "cpu", "name": _processor_name(), "n_cores": len(os.sched_getaffinity(0)), "memory_bytes": meminfo_bytes("MemTotal")}
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    return {
        "kind": "cuda",
        "name": properties.name,
        "compute_capability": capability,
        "memory_bytes": properties.total_memory,
        "driver": driver_version(),
    }


def _processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def driver_version(*, proc_root: Path = Path("/proc")) -> str | None:
    """Return the loaded NVIDIA driver's version, None if none is loaded. Source: the NVRM line of /proc/driver/nvidia/version."""
    file = proc_root / "driver/nvidia/version"
    words = file.read_text().splitlines()[0].split() if file.is_file() else []
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def version_facts() -> dict[str, str | None]:
    """Return the versions of what computes; None for what is not there."""
    return {
        "ktier": _package_version("ktier"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "triton": _package_version("triton"),
        "numpy": np.__version__,
        "linux": platform.release(),
    }


def _package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def checkout_commit(root: Path = _ROOT) -> str | None:
    """Return the commit of the git checkout that this program runs from, marked if files differ from it; None if it is no checkout."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", root, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
