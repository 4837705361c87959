"""Libraries that are compiled where they are used: once, kept in the user's cache directory by what they were made of."""

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path


def cached_library(name: str, parts: tuple[str, ...]) -> Path:
    """Return where a library lies, or will, that was made of these parts: its source, its compiler's flags and whatever else it depends on."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return root / "ktier" / f"{name}-{digest}.so"


def compile_once(path: Path, command: Callable[[Path], list[str]]) -> None:
    """Make a library unless it is there; `command` is given where the compiler is to write. Several processes may do so at once.

    Raises CalledProcessError if the compiler fails, OSError if it is missing or the cache directory cannot be written.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory) / path.name
        subprocess.run(command(made), check=True, capture_output=True, text=True)
        made.replace(path)


def why_it_failed(error: OSError | subprocess.CalledProcessError) -> str:
    """Return a compiler's last line, or what the system said, without the places where it was tried."""
    output = (error.stderr if isinstance(error, subprocess.CalledProcessError) else None) or str(error)
    return str(output).strip().splitlines()[-1]
