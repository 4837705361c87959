"""A checkpoint's headers: every tensor's place, checked against the files before anything is read or written.

Only the headers are read. All faults of a checkpoint are found in one pass and told together.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import xxhash

from layout.config import ConfigFacts, read_config
from layout.direct import Extent, ReadMode, probe_directory
from layout.record import SEGMENT_NAMES, RecordLayout, record_layout
from layout.sizes import counted
from layout.tensors import FLOAT_DTYPES, SpineTensor, expert_tensor, expert_tensor_names, is_vision, spine_tensors
from manifests.errors import BadInputError, listed
from manifests.geometry import Geometry

INDEX_NAME = "model.safetensors.index.json"
SINGLE_SHARD_NAME = "model.safetensors"
# safetensors itself refuses headers above 100 MB; the largest shard of K3 has 1.1 MB.
MAX_HEADER_BYTES = 100_000_000
DTYPE_BYTES = {"U8": 1, "I8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "BF16": 2, "F16": 2, "I16": 2, "F32": 4, "I32": 4, "F64": 8}


class Tensor(NamedTuple):
    """Where a tensor lies: shard number, type, shape, and its bytes' place in the file."""

    shard: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class Shard(NamedTuple):
    """One file of the checkpoint, with the hash of its header."""

    name: str
    n_bytes: int
    header_xxh3_128: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every tensor is known, lies within its file, and has the shape that the geometry asks for.

    released  names of shards that are gone, and known by their saved headers alone
    """

    directory: Path
    config: Mapping[str, Any]
    facts: ConfigFacts
    shards: tuple[Shard, ...]
    tensors: Mapping[str, Tensor]
    digest: str
    read_mode: ReadMode
    released: frozenset[str] = frozenset()

    @property
    def geometry(self) -> Geometry:
        return self.facts.geometry

    @property
    def record(self) -> RecordLayout:
        return record_layout(self.geometry)

    @property
    def vision_tensors(self) -> list[str]:
        return [name for name in self.tensors if is_vision(name)]

    def extent(self, name: str) -> Extent:
        tensor = self.tensors[name]
        return Extent(self.directory / self.shards[tensor.shard].name, tensor.offset, tensor.n_bytes)

    def spine_tensors(self) -> list[SpineTensor]:
        """Return the spine's tensors that this checkpoint has, in writing order."""
        return [t for t in spine_tensors(self.geometry) if not t.is_optional or t.sources[0].name in self.tensors]

    def expert_layers_of_shards(self) -> np.ndarray:
        """Return which layers have experts in which shard, bool [n_shards, n_layers]."""
        found = np.zeros((len(self.shards), self.geometry.n_layers), np.bool_)
        for layer in self.geometry.moe_layers:
            for expert in range(self.geometry.n_experts):
                found[self.tensors[expert_tensor_names(layer, expert)[0]].shard, layer] = True
        return found

    def expert_extents(self, layer: int, expert: int) -> list[Extent]:
        """Return an expert's bytes in record order: one extent where its six tensors are one run of the file, else six."""
        extents = [self.extent(name) for name in expert_tensor_names(layer, expert)]
        is_one_run = all(a.path == b.path and a.offset + a.n_bytes == b.offset for a, b in pairwise(extents))
        return [Extent(extents[0].path, extents[0].offset, self.record.n_bytes)] if is_one_run else extents


def open_checkpoint(directory: Path, *, saved_headers: Mapping[str, Path] = MappingProxyType({}), most_faults: int = 20) -> Checkpoint:
    """Read and check all headers of a checkpoint. Raises BadInputError that lists the first `most_faults` faults and counts the rest.

    saved_headers  files with the headers of shards that may be gone: they were released after their contents had been proved elsewhere
    """
    if not directory.is_dir():
        raise BadInputError(f"{directory}: no such directory; expected a checkpoint with config.json and {INDEX_NAME}")
    config = read_json(directory / "config.json")
    weight_map = _weight_map(directory)
    names = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_SHARD_NAME]
    faults: list[str] = []
    shards, tensors = _read_shards(directory, names, saved_headers, faults)
    unread = {name for name, shard in zip(names, shards, strict=True) if shard is None}
    if weight_map is not None:
        faults += _index_faults(weight_map, names, tensors, unread)
    try:
        facts = read_config(config, {name: t.shape for name, t in tensors.items()})
    except BadInputError as error:
        if not faults:
            raise
        raise BadInputError(listed([*faults, str(error)], f"{directory}: the checkpoint cannot be used:", most=most_faults)) from None
    expected_elsewhere = {name for name, shard in (weight_map or {}).items() if shard in unread}
    faults += _tensor_faults(facts.geometry, tensors, expected_elsewhere)
    if faults:
        raise BadInputError(listed(faults, f"{directory}: the checkpoint cannot be used; {counted(len(faults), 'fault')}:", most=most_faults))
    released = frozenset(name for name in saved_headers if not (directory / name).exists())
    good = tuple(shard for shard in shards if shard is not None)
    return Checkpoint(directory, config, facts, good, tensors, _digest(config, good), probe_directory(directory), released)


def read_json(path: Path, *, default: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Return the JSON object in a file. Raises BadInputError unless `default` stands in for a missing file."""
    _check_regular(path)
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if default is not None:
            return default
        raise BadInputError(f"{path}: no such file; is the download complete?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInputError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadInputError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _check_regular(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise BadInputError(f"{path.name}: is no regular file; fetch it again")


def _weight_map(directory: Path) -> dict[str, str] | None:
    if not (directory / INDEX_NAME).exists() and (directory / SINGLE_SHARD_NAME).exists():
        return None
    weight_map = read_json(directory / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise BadInputError(f"{directory / INDEX_NAME}: weight_map is missing or is no mapping from tensor to file")
    strays = sorted({v for v in weight_map.values() if "/" in v or v.startswith(".")})
    if strays:
        raise BadInputError(f"{directory / INDEX_NAME}: weight_map names files outside the checkpoint: {strays[:5]}")
    return weight_map


def _read_shards(
    directory: Path, names: list[str], saved_headers: Mapping[str, Path], faults: list[str]
) -> tuple[list[Shard | None], dict[str, Tensor]]:
    shards: list[Shard | None] = []
    tensors: dict[str, Tensor] = {}
    for number, name in enumerate(names):
        try:
            path = directory / name
            is_released = name in saved_headers and not path.exists()
            shard, found = _read_shard(saved_headers[name] if is_released else path, number, is_released=is_released)
        except BadInputError as error:
            faults.append(str(error))
            shards.append(None)
            continue
        for twice in sorted(tensors.keys() & found.keys()):
            faults.append(f"{name}: tensor {twice} is also in {names[tensors[twice].shard]}")
        tensors |= found
        shards.append(shard)
    return shards, tensors


def _read_shard(path: Path, number: int, *, is_released: bool) -> tuple[Shard, dict[str, Tensor]]:
    _check_regular(path)
    try:
        with path.open("rb") as file:
            n_bytes = file.seek(0, 2)
            file.seek(0)
            start = file.read(8)
            if len(start) < 8:
                raise BadInputError(f"{path.name}: {n_bytes} bytes are no safetensors file; fetch it again")
            (header_bytes,) = struct.unpack("<Q", start)
            if header_bytes > min(n_bytes - 8, MAX_HEADER_BYTES):
                raise BadInputError(
                    f"{path.name}: its first 8 bytes announce a header of {header_bytes} bytes, but the file has {n_bytes} "
                    f"(and no header exceeds {MAX_HEADER_BYTES}); this is no safetensors file, or one cut short: fetch it again"
                )
            raw = file.read(header_bytes)
    except FileNotFoundError:
        raise BadInputError(f"{path.name}: missing, but the index names it; fetch it") from None
    except OSError as error:
        raise BadInputError(f"{path.name}: cannot be read: {error.strerror}") from None
    tensors = _parse_header(path.name, raw, number)
    data_end = max((t.offset + t.n_bytes for t in tensors.values()), default=8 + header_bytes)
    if is_released:
        n_bytes = data_end
    if data_end > n_bytes:
        raise BadInputError(
            f"{path.name}: short by {data_end - n_bytes} bytes: it has {n_bytes}, its header needs {data_end}; the download is incomplete"
        )
    if data_end < n_bytes:
        raise BadInputError(f"{path.name}: {n_bytes - data_end} bytes follow the last tensor ({n_bytes}, its header needs {data_end})")
    return Shard(path.name, n_bytes, xxhash.xxh3_128_hexdigest(start + raw)), tensors


def header_bytes(path: Path) -> bytes:
    """Return a shard's header with its length before it, as it stands in the file."""
    with path.open("rb") as file:
        start = file.read(8)
        return start + file.read(struct.unpack("<Q", start)[0])


def _parse_header(name: str, raw: bytes, number: int) -> dict[str, Tensor]:
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{name}: the header is not JSON ({error}); fetch the file again") from None
    if not isinstance(header, dict):
        raise BadInputError(f"{name}: the header is a JSON {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    data_start = 8 + len(raw)
    tensors = {tensor: _parse_entry(name, tensor, entry, number, data_start) for tensor, entry in header.items()}
    at = data_start
    for tensor, place in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].n_bytes)):
        if place.offset != at:
            raise BadInputError(f"{name}: {tensor} begins at {place.offset}, expected {at}: ranges overlap or leave a gap")
        at += place.n_bytes
    return tensors


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} appears twice")
    return found


def _parse_entry(name: str, tensor: str, entry: Any, number: int, data_start: int) -> Tensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        expected = math.prod(shape) * DTYPE_BYTES[dtype]
        if not (0 <= begin <= end) or end - begin != expected:
            raise ValueError(f"{dtype} {list(shape)} needs {expected} bytes, data_offsets give {end - begin}")
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(f"{name}: the header's entry for {tensor} is malformed: {type(error).__name__} {error}") from None
    return Tensor(number, dtype, shape, data_start + begin, end - begin)


def _index_faults(weight_map: Mapping[str, str], names: list[str], tensors: Mapping[str, Tensor], unread: set[str]) -> Iterator[str]:
    for tensor, shard in weight_map.items():
        if shard not in unread and (tensor not in tensors or names[tensors[tensor].shard] != shard):
            yield f"{shard}: tensor {tensor} is missing, but the index places it there"
    for tensor, place in tensors.items():
        if tensor not in weight_map:
            yield f"{names[place.shard]}: tensor {tensor} is not in the index"


def _tensor_faults(g: Geometry, tensors: Mapping[str, Tensor], unread: set[str]) -> Iterator[str]:
    """Yield what is missing, unknown or of the wrong shape; `unread` are names in shards that could not be read."""
    spine = spine_tensors(g)
    sources = {source.name: (tensor, source.shape) for tensor in spine for source in tensor.sources}
    for name, (tensor, shape) in sources.items():
        if name in tensors:
            yield from _spine_faults(name, tensors[name], tensor, shape)
        elif name not in unread and not tensor.is_optional:
            yield f"tensor {name} is missing"
    segments = {s.name: (s.n_rows, s.n_cols) for s in record_layout(g).segments}
    n_seen = 0
    for name, found in tensors.items():
        if name in sources or is_vision(name):
            continue
        place = expert_tensor(name)
        if place is None or place.layer not in g.moe_layers or place.expert >= g.n_experts:
            yield f"tensor {name} is unknown: no role for it in {g.n_layers} layers of {g.n_experts} experts"
            continue
        n_seen += 1
        if found.dtype != "U8" or found.shape != segments[place.segment]:
            yield f"tensor {name} is {found.dtype} {list(found.shape)}, expected U8 {list(segments[place.segment])}"
    if n_seen < g.n_routed_experts * len(SEGMENT_NAMES):
        wanted = (n for layer in g.moe_layers for e in range(g.n_experts) for n in expert_tensor_names(layer, e))
        yield from (f"tensor {name} is missing" for name in wanted if name not in tensors and name not in unread)


def _spine_faults(name: str, found: Tensor, tensor: SpineTensor, shape: tuple[int, ...]) -> Iterator[str]:
    is_padded_a_log = tensor.rule == "a_log" and len(found.shape) == 1 and found.shape[0] >= shape[0]
    if found.shape != shape and not is_padded_a_log:
        yield f"tensor {name} is {list(found.shape)}, expected {list(shape)}"
    if found.dtype not in FLOAT_DTYPES:
        yield f"tensor {name} is {found.dtype}, expected one of {', '.join(FLOAT_DTYPES)}"


def _digest(config: Mapping[str, Any], shards: tuple[Shard, ...]) -> str:
    """Return one hash of the configuration and of every shard's name, size and header."""
    state = xxhash.xxh3_128(json.dumps(config, sort_keys=True).encode())
    for shard in shards:
        state.update(f"{shard.name}\0{shard.n_bytes}\0{shard.header_xxh3_128}\n".encode())
    return str(state.hexdigest())
