"""Writes a manifest for people to read, replaces the former one in a single step, and keeps all former ones."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from manifests.errors import BadInputError, KtierError, NoSpaceError
from manifests.load import load_manifest, parse_manifest
from manifests.manifest import Manifest
from manifests.ranges import format_ranges
from manifests.seal import sealed

_HEAD = """\
# A model that kprep prepared: what it is, where its parts lie, and which drive holds which experts.
# Paths start from this file's directory, unless they start with a slash. Texts are in double quotes.
# holds: for each layer, the experts in that directory. Tiers A and B together hold every expert; C and D hold further copies.
# kprep keeps each former version in manifest.history/.

"""
_ESCAPES = {'"': '\\"', "\\": "\\\\"}
_COPY_NAME = re.compile(r"([0-9]{6,})\.yaml")


def manifest_text(manifest: Manifest) -> str:
    """Return the YAML text of a manifest; equal manifests give equal text. Raises BadInputError for a text that is not Unicode."""
    values = asdict(manifest)
    for drive, drive_values in zip(manifest.drives, values["drives"], strict=True):
        drive_values["holds"] = {layer: format_ranges(drive.holds[layer]) for layer in manifest.geometry.moe_layers}
    entries = [_entry(key, value, "") for key, value in values.items()]
    lines = entries[0]
    for before, entry in pairwise(entries):
        is_long = len(before) > 1 or len(entry) > 1
        lines = [*lines, "", *entry] if is_long else [*lines, *entry]
    return _HEAD + "\n".join(lines) + "\n"


def write_manifest(path: Path, manifest: Manifest) -> Path:
    """Publish a manifest at `path` and return `path`.

    The former manifest is first copied to manifest.history/. Whatever goes wrong, `path` holds the old manifest or the new one, whole.
    Raises KtierError if the generation is not `next_generation(path)` or a file cannot be written (NoSpaceError if for lack of space), and
    BadInputError if `load_manifest` would refuse the new manifest or refuses the present one.
    """
    text = manifest_text(manifest)
    parse_manifest(text, where=f"the new {path.name}")
    former = _generation(path)
    expected = _generation_after(former, path)
    if manifest.generation != expected:
        raise KtierError(
            f"{path}: the new manifest is generation {manifest.generation}, expected {expected}: "
            "another command has written in between; look at its result and start again"
        )
    if former:
        _keep_former(path, former)
    _write_whole(path, sealed(text).encode())
    return path


def next_generation(path: Path) -> int:
    """Return the generation after that of `path` and of all its history; 1 where nothing is.

    Raises BadInputError if `path` is there and is no manifest.
    """
    return _generation_after(_generation(path), path)


def history(path: Path) -> list[tuple[int, Path]]:
    """Return (generation, file) of each former manifest, oldest first.

    A copy of the present manifest, which a write that was cut short has left, is not among them.
    """
    present = path.read_bytes() if path.exists() else None
    return [(generation, copy) for generation, copy in _copies(path) if copy.read_bytes() != present]


def _generation(path: Path) -> int:
    return load_manifest(path).generation if path.exists() else 0


def _generation_after(present: int, path: Path) -> int:
    # The history counts too: someone may have put an older manifest back by hand, and a number must not be used twice.
    return 1 + max([present, *(generation for generation, _ in _copies(path))])


def _copies(path: Path) -> list[tuple[int, Path]]:
    folder = _history_folder(path)
    names = [match for name in os.listdir(folder) if (match := _COPY_NAME.fullmatch(name))] if folder.is_dir() else []
    return sorted((int(match[1]), folder / match[0]) for match in names)


def _history_folder(path: Path) -> Path:
    return path.with_suffix(".history")


def _keep_former(path: Path, generation: int) -> None:
    data, folder = path.read_bytes(), _history_folder(path)
    copy = folder / f"{generation:06d}.yaml"
    if copy.exists():
        if copy.read_bytes() != data:
            raise KtierError(f"{copy}: differs from {path}, which has the same generation; move one of them away")
        return
    with _explained(folder):
        folder.mkdir(exist_ok=True)
        _sync_directory(folder.parent)
    _write_whole(copy, data)


def _write_whole(path: Path, data: bytes) -> None:
    """Put `data` at `path` so that, after a crash too, either the old file is there or the new one."""
    partial = path.with_name(path.name + ".partial")
    # Opened outside of the try: what could not be opened is not ours to remove.
    with _explained(path), open(partial, "wb") as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    with _explained(path.parent):
        _sync_directory(path.parent)


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = NoSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else KtierError
        raise kind(f"{path}: cannot be written: {error}; put that right and start again, the former file is unharmed") from None


def _entry(key: str | int, value: Any, indent: str) -> list[str]:
    if isinstance(value, dict):
        return [f"{indent}{key}:", *_block(value, indent + "  ")]
    if isinstance(value, tuple) and value and isinstance(value[0], dict):
        return [f"{indent}{key}:", *(line for item in value for line in _item(key, item, indent + "  "))]
    return [f"{indent}{key}: {_inline(value)}"]


def _block(values: dict[Any, Any], indent: str) -> list[str]:
    return [line for key, value in values.items() for line in _entry(key, value, indent)]


def _item(key: str | int, values: dict[Any, Any], indent: str) -> list[str]:
    # A checkpoint has a hundred files, a curve six points: one line each.
    if key in ("files", "curve"):
        return [f"{indent}- {_inline(values)}"]
    first, *others = _block(values, indent + "  ")
    return [f"{indent}- {first.lstrip()}", *others]


def _inline(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return _quoted(value)
        case int():
            return str(value)
        case float():
            return _float_text(value)
        case dict():
            return "{" + ", ".join(f"{key}: {_inline(item)}" for key, item in value.items()) + "}"
        case tuple():
            return "[" + ", ".join(map(_inline, value)) + "]"
    raise TypeError(f"a manifest cannot hold {value!r}")


def _float_text(value: float) -> str:
    # YAML takes 1e-05 for a text; it wants 1.0e-05.
    text = float.__repr__(value)
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def _quoted(text: str) -> str:
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise BadInputError(f"the name {text!r} is not Unicode, which a manifest cannot hold; rename it")
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in text) + '"'
