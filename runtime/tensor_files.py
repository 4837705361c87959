"""Token numbers and logits in safetensors files."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from layout.holes import kind_fault
from layout.writer import PARTIAL_SUFFIX, write_bytes
from manifests.errors import BadInputError, UsageError

LOGITS_KEY = "logits"


def read_ids(path: Path, key: str) -> list[int]:
    """Return the token numbers under a key. Raises BadInputError if they are not there or are no one-dimensional whole numbers."""
    ids = _read(path, key, cure="; name one with --key")
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise BadInputError(f"{path}: {key} is {ids.dtype} {list(ids.shape)}, expected whole numbers [tokens]")
    return [int(i) for i in ids.tolist()]


def read_logits(path: Path) -> Tensor:
    """Return the float32 logits in a file. Raises BadInputError if they are not there, or are no finite numbers."""
    logits = _read(path, LOGITS_KEY)
    if not logits.is_floating_point() or not bool(logits.float().isfinite().all()):
        what = f"{LOGITS_KEY} is {logits.dtype} {list(logits.shape)}, not of finite numbers alone"
        raise BadInputError(f"{path}: {what}; expected logits as krun score writes them")
    return logits.float()


def same_shape(other: Tensor, logits: Tensor, path: Path) -> Tensor:
    """Return the other logits. Raises BadInputError if they are of another text or vocabulary."""
    if other.shape != logits.shape:
        found, expected = list(other.shape), list(logits.shape)
        raise BadInputError(f"{path}: {LOGITS_KEY} is {found}, expected {expected}: was it made from the same text and vocabulary?")
    return other


def write_logits(path: Path, logits: Tensor, facts: dict[str, str]) -> None:
    """Write float32 logits, whole or not at all, with facts of how they were made."""
    write_bytes(path, safetensors.torch.save({LOGITS_KEY: logits.contiguous()}, metadata=facts))


def check_writable(path: Path, *, flag: str = "--out") -> None:
    """Raise UsageError if no file can be made at a path: known before the work, not after it."""
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: {'is a directory' if path.is_dir() else 'there is no directory ' + str(path.parent)}; name a file")
    if path.exists() and (fault := kind_fault(path)) is not None:
        raise UsageError(f"{flag} {path}: {fault}, which it would be replaced by; name another place")
    if len(os.fsencode(path.name + PARTIAL_SUFFIX)) > os.pathconf(path.parent, "PC_NAME_MAX"):
        raise UsageError(f"{flag} {path}: the name is too long for that file system; give a shorter one")


@contextmanager
def opened(path: Path, framework: str) -> Iterator[Any]:
    """Open a safetensors file, for "pt" or "np". Raises BadInputError if it is no file: the library would wait for a FIFO's writer for ever."""
    if (fault := kind_fault(path)) is not None:
        raise BadInputError(f"{path}: {fault}")
    with safe_open(path, framework=framework) as file:
        yield file


def _read(path: Path, key: str, *, cure: str = "") -> Tensor:
    try:
        with opened(path, "pt") as file:
            if key not in file.keys():  # noqa: SIM118 (the file object is no mapping)
                raise BadInputError(f"{path}: holds no {key!r}; it holds {', '.join(sorted(file.keys())[:20])}{cure}")
            tensor: Tensor = file.get_tensor(key)
            return tensor
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"{path}: cannot be read as safetensors: {error}") from None


def parse_ids(text: str, *, flag: str) -> list[int]:
    """Return the token numbers of a text like `1,2,3`. Raises BadInputError."""
    if not re.fullmatch(r"[0-9]{1,18}(,[0-9]{1,18})*", text):
        raise BadInputError(f"{flag} {text[:60]!r}: expected token numbers separated by commas, like 1,2,3")
    return [int(part) for part in text.split(",")]
