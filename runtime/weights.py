"""The spine's tensors for the model: from the GGUF file, kept as they are stored, or straight from a checkpoint, unquantised."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from layout.checkpoint import Checkpoint
from layout.direct import Extent, ReadMode, aligned_buffer, file_blocks, probe_directory, read_extent, span_bytes
from layout.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from layout.hash_lists import xxh3_128_of_file
from layout.holes import size_fault
from layout.prepared import Prepared
from layout.sizes import counted
from layout.tensor_data import as_float32, float_blocks, read_float_tensor
from layout.tensors import SpineTensor, spine_tensors
from manifests.errors import BadInputError, DamagedDataError
from manifests.geometry import Geometry
from runtime.kernels.bf16 import bf16_product
from runtime.kernels.q8_0 import Q8Matrix, expand_q8_0, pack_q8_0, q8_0_product
from runtime.kernels.rows import TILE_ROWS, linear

CURE = "kprep extract with the same checkpoint and output restores it"
# What takes the same input is multiplied at once.
_KDA_INPUTS = ("attn_q", "attn_k", "attn_v", "ssm_g", "ssm_f_a", "ssm_beta")
_MLA_INPUTS = ("attn_q_a", "attn_kv_a_mqa", "attn_gate")
_MOE_INPUTS = ("ffn_routed_down", "ffn_gate_shexp", "ffn_up_shexp")
_DENSE_INPUTS = ("ffn_gate", "ffn_up")
_FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Part(NamedTuple):
    """Rows of a matrix that is kept together with others."""

    whole: str
    start: int
    end: int


def together(geometry: Geometry) -> dict[str, list[str]]:
    """Return which matrices are kept as one since they take the same input, one below the other: {name of the whole: names of its parts}."""
    wholes = {}
    for layer in range(geometry.n_layers):
        block = f"blk.{layer}."
        attention = _MLA_INPUTS if geometry.is_full_attention(layer) else _KDA_INPUTS
        feed_forward = _DENSE_INPUTS if layer < geometry.n_dense_layers else _MOE_INPUTS
        wholes[f"{block}attn_in.weight"] = [f"{block}{name}.weight" for name in attention]
        wholes[f"{block}ffn_in.weight"] = [f"{block}{name}.weight" for name in feed_forward]
    return wholes


class SpineWeights:
    """The spine on one device. Matrices stay in Q8_0; the prompt pass expands them for each product."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._matrices: dict[str, Q8Matrix] = {}
        self._parts: dict[str, _Part] = {}
        self._by_head: dict[str, tuple[Tensor, Tensor]] = {}
        self._tensors: dict[str, Tensor] = {}

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def n_bytes(self) -> int:
        tensors = [*self._tensors.values(), *(m.data for m in self._matrices.values()), *(t for pair in self._by_head.values() for t in pair)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def matrix(self, name: str) -> Tensor:
        """Return a matrix [out, in] as float32."""
        if name in self._tensors:
            return self._tensors[name].float()
        if name in self._by_head:
            return expand_q8_0(*self._by_head[name])
        if name in self._matrices:
            return self._matrices[name].expand()
        whole, start, end = self._parts[name]
        matrix, first = self._matrices[whole], start // TILE_ROWS
        tiles = Q8Matrix(matrix.data[first : -(-end // TILE_ROWS)], end - first * TILE_ROWS, matrix.n_cols)
        return tiles.expand()[start - first * TILE_ROWS :]

    def quantised(self, name: str) -> Q8Matrix:
        """Return a matrix as it is kept; names are those of `together` where matrices are kept together."""
        return self._matrices[name]

    def by_head(self, name: str, n_heads: int) -> tuple[Tensor, Tensor]:
        """Return a matrix of heads as int8 [heads, rows, cols] and float16 [heads, rows, cols/32]."""
        quants, scales = self._by_head[name]
        return quants.unflatten(0, (n_heads, -1)), scales.unflatten(0, (n_heads, -1))

    def vector(self, name: str) -> Tensor:
        """Return a tensor in the shape in which the spine holds it, as float32."""
        return self._tensors[name].float()

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Return the rows [..., in] of a matrix whose numbers are ids [...]."""
        if name in self._tensors:
            return self._tensors[name][ids].float()
        return self._matrices[name].rows(ids)

    def product(self, name: str, x: Tensor) -> Tensor:
        """Return x @ matrix^T in decode arithmetic: [1, rows, in] -> [1, rows, out], at most 16 rows. Names of `together` are known here too."""
        if name not in self._tensors:
            return q8_0_product(x[0], self._matrices[name]).unsqueeze(0)
        weight = self._tensors[name]
        return bf16_product(x[0], weight).unsqueeze(0) if weight.dtype is torch.bfloat16 else linear(x, weight.float(), is_tiled=True)


class SpineBuilder:
    """Takes the spine's tensors one by one, in any order, and keeps them in the form in which they are used."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._weights, self._raw = SpineWeights(device), dict[str, Tensor]()
        self._wholes = together(geometry)
        self._whole_of = {part: whole for whole, parts in self._wholes.items() for part in parts}

    def add_float(self, name: str, tensor: Tensor) -> None:
        """Take a tensor that is not quantised."""
        self._weights._tensors[name] = tensor

    def add_blocks(self, name: str, blocks: Tensor) -> None:
        """Take a Q8_0 matrix as the file has it: uint8 [rows, cols / 32 * BLOCK_BYTES]."""
        weights = self._weights
        whole = self._whole_of.get(name)
        if name.endswith("attn_kv_b.weight"):
            weights._by_head[name] = pack_q8_0(blocks).split()
        elif whole is None:
            weights._matrices[name] = pack_q8_0(blocks)
        else:
            self._raw[name] = blocks
            parts = self._wholes[whole]
            if all(part in self._raw for part in parts):
                self._join(whole, [self._raw.pop(part) for part in parts])

    def _join(self, whole: str, blocks: list[Tensor]) -> None:
        ends = np.cumsum([len(b) for b in blocks]).tolist()
        for name, start, end in zip(self._wholes[whole], [0, *ends], ends, strict=False):
            self._weights._parts[name] = _Part(whole, start, end)
        self._weights._matrices[whole] = pack_q8_0(torch.cat(blocks))

    def finished(self) -> SpineWeights:
        assert not self._raw, f"parts without the rest: {sorted(self._raw)}"
        weights = self._weights
        for name in [name for name in weights._tensors if name.endswith("ssm_conv1d_q.weight")]:
            block = name.removesuffix("ssm_conv1d_q.weight")
            parts = [weights._tensors[f"{block}ssm_conv1d_{part}.weight"].squeeze(1) for part in "qkv"]
            weights._tensors[f"{block}ssm_conv1d"] = torch.cat(parts)
        return weights


def load_spine(prepared: Prepared, device: torch.device) -> SpineWeights:
    """Read the spine past the page cache, checking names, shapes and the hash of the whole file.

    Raises BadInputError if it is not the spine of this geometry, DamagedDataError if its bytes are not those that were written.
    """
    path, facts = prepared.spine_path, prepared.manifest.spine
    if (fault := size_fault(path, facts.n_bytes)) is not None:
        raise DamagedDataError(f"{path}: {fault}; {CURE}")
    header, mode, state = _read_header(prepared), probe_directory(path.parent), xxhash.xxh3_128()
    for block in file_blocks(path, 0, header.data_offset, mode):
        state.update(block)
    builder = SpineBuilder(prepared.geometry, device)
    places = sorted(header.tensors.values(), key=lambda t: t.offset)
    ends = [*(t.offset for t in places[1:]), facts.n_bytes]
    for place, end in zip(places, ends, strict=True):
        raw = torch.empty(end - place.offset, dtype=torch.uint8)
        at = 0
        for block in file_blocks(path, place.offset, end, mode):
            state.update(block)
            raw[at : at + len(block)] = torch.frombuffer(block, dtype=torch.uint8)
            at += len(block)
        _add(builder, raw[: place.n_bytes].to(device), place)
    if state.hexdigest() != facts.xxh3_128:
        raise DamagedDataError(f"{path}: xxh3-128 {state.hexdigest()} differs from the manifest's {facts.xxh3_128}; {CURE}")
    return builder.finished()


def _read_header(prepared: Prepared) -> GgufHeader:
    """Read and check the header. Raises DamagedDataError, not BadInputError, where the file is no longer the one that was written."""
    path, facts = prepared.spine_path, prepared.manifest.spine
    try:
        header = read_gguf_header(path)
        _check_header(prepared, header)
        return header
    except BadInputError:
        if (found := xxh3_128_of_file(path, facts.n_bytes)) != facts.xxh3_128:
            raise DamagedDataError(f"{path}: xxh3-128 {found} differs from the manifest's {facts.xxh3_128}; {CURE}") from None
        raise


def _has_type(found: GgufTensor, expected: SpineTensor) -> bool:
    return found.type in _FLOAT_TYPES if expected.storage == "shipped" else found.type == expected.storage


def _add(builder: SpineBuilder, raw: Tensor, place: GgufTensor) -> None:
    if place.type in _FLOAT_TYPES:
        builder.add_float(place.name, raw.view(_FLOAT_TYPES[place.type]).view(place.shape).clone())
    else:
        builder.add_blocks(place.name, raw.view(place.shape[0], -1))


def _check_header(prepared: Prepared, header: GgufHeader) -> None:
    path = prepared.spine_path
    if (kind := header.keys.get("ktier.ssm_a")) != "A_log":
        raise BadInputError(f"{path}: ktier.ssm_a is {kind!r}, expected 'A_log': this GGUF file was not made by kprep")
    wanted = {t.name: t for t in spine_tensors(prepared.geometry)}
    faults = [f"{name} is missing" for name, t in wanted.items() if name not in header.tensors and not t.is_optional]
    faults += [f"{name} is unknown" for name in header.tensors if name not in wanted]
    known = [(t, wanted[name].shape) for name, t in header.tensors.items() if name in wanted]
    places = sorted(header.tensors.values(), key=lambda t: t.offset)
    faults += [f"{a.name} runs into {b.name}" for a, b in pairwise(places) if a.offset + a.n_bytes > b.offset]
    faults += [f"{t.name} is {t.type}, expected {wanted[t.name].storage}" for t in places if t.name in wanted and not _has_type(t, wanted[t.name])]
    faults += [f"{t.name} is {list(t.shape)}, expected {list(shape)}" for t, shape in known if t.shape != shape]
    if faults:
        raise BadInputError(f"{path}: not the spine of this geometry: {'; '.join(faults[:5])}; {counted(len(faults), 'fault')} in all")


class CheckpointWeights:
    """The unquantised spine, read from the checkpoint's shards each time it is asked for: one tensor is in memory at a time."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self._checkpoint, self._device = checkpoint, device
        self._tensors = {t.name: t for t in checkpoint.spine_tensors()}

    @property
    def device(self) -> torch.device:
        return self._device

    def matrix(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        values, at = np.empty(tensor.shape, np.float32), 0
        for block in float_blocks(self._checkpoint, tensor.sources[0].name):
            values[at : at + len(block)] = block
            at += len(block)
        return torch.from_numpy(values).to(self._device)

    def vector(self, name: str) -> Tensor:
        return torch.from_numpy(read_float_tensor(self._checkpoint, self._tensors[name])).to(self._device)

    def rows(self, name: str, ids: Tensor) -> Tensor:
        source = self._tensors[name].sources[0].name
        extent, dtype = self._checkpoint.extent(source), self._checkpoint.tensors[source].dtype
        row_bytes = extent.n_bytes // self._checkpoint.tensors[source].shape[0]
        mode: ReadMode = self._checkpoint.read_mode
        buffer = aligned_buffer(span_bytes(row_bytes, mode.alignment))
        rows = []
        for number in ids.flatten().tolist():
            raw = read_extent(Extent(extent.path, extent.offset + number * row_bytes, row_bytes), buffer, mode)
            rows.append(as_float32(np.frombuffer(raw, np.uint8), dtype).copy())
        return torch.from_numpy(np.stack(rows)).to(self._device).unflatten(0, ids.shape)
