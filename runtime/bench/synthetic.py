"""A model without its weights: the full geometry over a random spine and a few record files that stand for all experts.

The bytes that are read, uploaded and multiplied are those of the real model; their values are not, so the text means nothing.
"""

import contextlib
import fcntl
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from layout.direct import Extent, aligned_buffer, probe_directory, round_up
from layout.drives import default_reserve, describe_directory, free_bytes
from layout.hash_lists import ExpertHashes, xxh3_128_hex
from layout.prepared import Prepared
from layout.q8_0 import BLOCK_BYTES, BLOCK_SIZE
from layout.record import LAYOUT_NAME, NIBBLE_ORDER, SCALE_KIND, RecordLayout, record_layout
from layout.sizes import format_size
from layout.tensors import SpineTensor, spine_tensors
from layout.writer import write_record
from manifests.errors import BadInputError, NoSpaceError, UsageError
from manifests.geometry import Geometry
from manifests.manifest import Drive, HashList, Manifest, Profile, Record, Source, Spine, Tokenizer
from runtime.weights import SpineBuilder, SpineWeights

# Root mean squares of random E2M1 values and of random int8: weights are to be of about 1 / sqrt(columns).
_E2M1_RMS = 2.9
# An emulated drive has as many requests in flight as its rate takes from files in memory, and at least as many as an NVMe drive.
LEAST_DEPTH = 3
THREAD_BYTES_PER_S = 2.5e9
_INT8_RMS = 73.6
# Matrices whose products are added to the running sum, and what they are multiplied with where a text is to repeat itself.
_ADDENDS = ("attn_output.weight", "ffn_down.weight", "ffn_down_shexp.weight", "ffn_routed_up.weight")
_QUIET = 1 / 256


_DECIMAL = r"[0-9]{1,18}(?:\.[0-9]{1,18})?"
_DRIVE = re.compile(rf"([^:@]+)(?::({_DECIMAL}))?(?:@({_DECIMAL}))?")
# GB/s: with the least a record of the large models takes 18 s.
_LEAST_RATE, _NO_RATE = 0.001, 1000


class EmulatedDrive(NamedTuple):
    """A directory that stands for a drive: at most bytes_per_s if given, holding a share of every layer's experts.

    profile_bytes_per_s  what its profile says, if that is not bytes_per_s
    """

    directory: Path
    bytes_per_s: float | None
    share: float
    profile_bytes_per_s: float | None = None


def parse_emulated_drive(text: str) -> EmulatedDrive:
    """Read DIR[:GB_PER_S][@SHARE], such as /mnt/a:14 or /mnt/c:3.5@0.5. Raises UsageError."""
    if (parts := _DRIVE.fullmatch(text)) is None:
        raise UsageError(f"--dir {text}: expected DIR[:GB_PER_S][@SHARE], such as /mnt/c:3.5@0.5")
    path, rate_text, share_text = parts.groups()
    rate, share = None if rate_text is None else float(rate_text), float(share_text or 1)
    if not 0 < share <= 1 or (rate is not None and not _LEAST_RATE <= rate < _NO_RATE):
        raise UsageError(f"--dir {text}: expected a rate from {_LEAST_RATE} GB/s, below {_NO_RATE}, and a share above 0, at most 1")
    return EmulatedDrive(Path(path), None if rate is None else rate * 1e9, share)


def emulated_servers(drives: Sequence[EmulatedDrive]) -> list[int] | None:
    """Return a number per drive: emulated ones share no device, whatever their directories lie on. None where nothing is emulated."""
    return list(range(len(drives))) if any(drive.bytes_per_s for drive in drives) else None


@dataclass(frozen=True)
class SyntheticModel(Prepared):
    """A prepared model whose experts share `n_files` record files per drive."""

    n_files: int

    @property
    def record_names(self) -> list[str]:
        return [record_name(number) for number in range(self.n_files)]

    @cached_property
    def _paths(self) -> list[list[Path]]:
        return [[directory / name for name in self.record_names] for directory in self.drive_directories]

    def expert_extent(self, drive: int, layer: int, expert: int) -> Extent:
        return Extent(self._paths[drive][(layer * self.geometry.n_experts + expert) % self.n_files], 0, self.record.n_bytes)


def record_name(number: int) -> str:
    return f"synthetic-{number}.bin"


@contextmanager
def records_removed_afterwards(directories: Sequence[Path], n_files: int) -> Iterator[int]:
    """Give the number of record files that are there; those that came since are removed at the end, whatever the end is.

    Raises UsageError if another process does the same in one of the directories: it would lose its files.
    """
    with contextlib.ExitStack() as locks:
        for directory in directories:
            locks.enter_context(_locked(directory))
        paths = [directory / record_name(number) for directory in directories for number in range(n_files)]
        there = {path for path in paths if path.exists()}
        try:
            yield len(there)
        finally:
            try:
                _remove(path for path in paths if path not in there)
            except BaseException:
                # Interrupted while at it: no further interrupt comes.
                _remove(path for path in paths if path not in there)
                raise


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a directory's lock, which ends with the process whatever the end is."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{directory}: cannot be opened to be locked: {error.strerror}; name another directory") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{directory}: another bench uses this directory; wait for it, or name another") from None
        except OSError as error:
            raise UsageError(f"{directory}: cannot be locked against a second bench: {error.strerror}; name a directory that can be") from None
        yield
    finally:
        os.close(fd)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def make_records(
    layout: RecordLayout, directories: Sequence[Path], n_files: int, *, seed: int, on_made: Callable[[int], None] | None = None
) -> list[str]:
    """Make the record files that are not there yet, the same in every directory; return their hashes.

    on_made  is told how many files are in every directory by now

    Directories on one file system share the files' room by hard links. Raises NoSpaceError if the reserve would be touched.
    """
    hashes = []
    for number in range(n_files):
        buffer = aligned_buffer(round_up(layout.n_bytes, 4096))
        buffer[: layout.n_bytes] = _random_record(layout, np.random.default_rng((seed, number)))
        hashes.append(xxh3_128_hex(buffer[: layout.n_bytes]))
        for place, directory in enumerate(directories):
            _put_record(directory / record_name(number), buffer, layout.n_bytes, [d / record_name(number) for d in directories[:place]])
        if on_made is not None:
            on_made(number + 1)
    return hashes


def _random_record(layout: RecordLayout, rng: np.random.Generator) -> bytes:
    parts = []
    for segment in layout.segments:
        if segment.name.endswith("packed"):
            parts.append(rng.integers(0, 256, segment.n_bytes, np.uint8))
        else:
            n_columns = segment.n_cols * 32
            exponent = 127 - round(np.log2(_E2M1_RMS * n_columns**0.5))
            parts.append(np.full(segment.n_bytes, exponent, np.uint8) - rng.integers(0, 2, segment.n_bytes, np.uint8))
    return np.concatenate(parts).tobytes()


def _put_record(path: Path, buffer: memoryview, n_bytes: int, twins: list[Path]) -> None:
    if path.exists():
        if path.stat().st_size != n_bytes:
            raise BadInputError(f"{path}: has {path.stat().st_size} bytes, expected {n_bytes}: remove it, or use another directory")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if twin := next((twin for twin in twins if twin.stat().st_dev == path.parent.stat().st_dev), None):
        os.link(twin, path)
        return
    if free_bytes(path.parent) - n_bytes < default_reserve(path.parent):
        raise NoSpaceError(f"{path.parent}: no room for one more record of {format_size(n_bytes)} beside the reserve; use fewer --expert-files")
    write_record(path, buffer, n_bytes, probe_directory(path.parent))


def synthetic_model(geometry: Geometry, drives: Sequence[EmulatedDrive], n_files: int, hashes: list[str], *, seed: int) -> SyntheticModel:
    """Return a model over emulated drives: the first ones are tier A and B, the others C and D.

    Raises UsageError if the first two do not hold every expert together.
    """
    shape, rng = (geometry.n_layers, geometry.n_experts), np.random.default_rng(seed)
    holdings = [_holding(geometry, drive.share, rng) for drive in drives]
    if len(drives) > 1:
        # What the first drive lacks is on the second, whatever its share: the base is complete, as in a real plan.
        holdings[1] |= ~holdings[0]
        holdings[1][: geometry.n_dense_layers] = False
    listed = tuple(
        Drive("ABCD"[min(n, 3)], str(drive.directory.resolve()), describe_directory(drive.directory).file_system, (), _profile(drive), holding)
        for n, (drive, holding) in enumerate(zip(drives, holdings, strict=True))
    )
    base = np.logical_or.reduce(holdings[:2])
    if not base[geometry.n_dense_layers :].all():
        raise UsageError("--dir: the first two directories must hold every expert together; give the first one the share 1")
    table = ExpertHashes(*shape)
    for layer in geometry.moe_layers:
        for expert in range(geometry.n_experts):
            table.set(layer, expert, hashes[(layer * geometry.n_experts + expert) % n_files])
    return SyntheticModel(Path("synthetic"), _manifest(geometry, listed), table, n_files)


def _profile(drive: EmulatedDrive) -> Profile | None:
    """Return the profile of an emulated drive, as if it had been measured."""
    rate = drive.profile_bytes_per_s or drive.bytes_per_s
    if rate is None:
        return None
    depth = max(LEAST_DEPTH, math.ceil(rate / THREAD_BYTES_PER_S))
    return Profile(datetime.now(UTC).isoformat(timespec="seconds"), "emulated", True, depth, rate, 0.0, 0.0, 0.0, 0.0, 0, 0.0)


def _holding(geometry: Geometry, share: float, rng: np.random.Generator) -> np.ndarray:
    holds = np.zeros((geometry.n_layers, geometry.n_experts), np.bool_)
    n_held = round(share * geometry.n_experts)
    for layer in geometry.moe_layers:
        holds[layer, rng.permutation(geometry.n_experts)[:n_held]] = True
    return holds


def _manifest(geometry: Geometry, drives: tuple[Drive, ...]) -> Manifest:
    return Manifest(
        generation=0,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        geometry=geometry,
        end_ids=(),
        source=Source("synthetic", "synthetic", "0" * 32, ()),
        record=Record(LAYOUT_NAME, NIBBLE_ORDER, SCALE_KIND, record_layout(geometry).n_bytes),
        spine=Spine("none", 0, "0" * 32),
        tokenizer=Tokenizer("none", ()),
        experts=HashList("none", "0" * 32),
        drives=drives,
    )


def spine_bytes(geometry: Geometry) -> int:
    """Return about how much device memory a spine takes."""
    bytes_of = {"Q8_0": BLOCK_BYTES / BLOCK_SIZE, "shipped": 2.0}
    tensors = (tensor for tensor in spine_tensors(geometry) if ".indexer." not in tensor.name)
    return round(sum(math.prod(tensor.shape) * bytes_of.get(tensor.storage, 4.0) for tensor in tensors))


def random_spine(geometry: Geometry, device: torch.device, *, seed: int, period: int = 0) -> SpineWeights:
    """Return a spine made on the device: matrices keep the size of what they multiply, gains are 1, biases and decays 0.

    period  so many tokens, the first ones, follow one another round and round: where greedy decoding begins with one of them, its text repeats
            itself. For that embeddings are as large as what layers make of them, and what layers add is small
    """
    generator = torch.Generator(device).manual_seed(seed)
    builder, embeddings = SpineBuilder(geometry, device), torch.empty(0)
    for tensor in spine_tensors(geometry):
        if ".indexer." in tensor.name:
            continue
        if tensor.storage == "Q8_0":
            blocks = _random_blocks(tensor.shape, generator, device)
            if period and tensor.name == "token_embd.weight":
                embeddings = blocks[:period].clone()
                blocks[:period] = _scaled(embeddings, geometry.hidden_size**0.5)
            elif period and tensor.name == "output.weight":
                blocks[:period] = embeddings.roll(1, 0)
            elif period and tensor.name.endswith(_ADDENDS):
                blocks = _scaled(blocks, _QUIET)
            builder.add_blocks(tensor.name, blocks)
        elif tensor.storage == "shipped":
            builder.add_float(tensor.name, _random_floats(tensor, generator, device).bfloat16())
        else:
            builder.add_float(tensor.name, _random_floats(tensor, generator, device))
    return builder.finished()


def _random_blocks(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    """Return random Q8_0 as the file has it."""
    n_rows, n_columns = shape
    blocks = torch.randint(0, 256, (n_rows, n_columns // BLOCK_SIZE, BLOCK_BYTES), dtype=torch.uint8, device=device, generator=generator)
    # Quants of -128 do not occur in Q8_0.
    quants = blocks[..., 2:]
    quants[quants == 128] = 127
    scale = torch.tensor([n_columns**-0.5 / _INT8_RMS], dtype=torch.float16, device=device)
    blocks[..., :2] = scale.view(torch.uint8)
    return blocks.flatten(1)


def _scaled(blocks: Tensor, factor: float) -> Tensor:
    """Return Q8_0 as the file has it with all scales multiplied."""
    parts = blocks.unflatten(1, (-1, BLOCK_BYTES)).clone()
    parts[..., :2] = (parts[..., :2].contiguous().view(torch.float16) * factor).view(torch.uint8)
    return parts.flatten(1)


def _random_floats(tensor: SpineTensor, generator: torch.Generator, device: torch.device) -> Tensor:
    if "norm" in tensor.name:
        return torch.ones(tensor.shape, device=device)
    if tensor.name.endswith(("bias", "ssm_a")):
        return torch.zeros(tensor.shape, device=device)
    return torch.randn(tensor.shape, generator=generator, device=device) * tensor.shape[-1] ** -0.5
