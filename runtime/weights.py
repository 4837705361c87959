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
from layout.prepared import Prepared
from layout.q8_0 import BLOCK_BYTES
from layout.tensor_data import as_float32, float_blocks, read_float_tensor
from layout.tensors import SpineTensor, spine_tensors
from manifests.errors import BadInputError, DamagedDataError
from runtime.kernels.q8_0 import expand_q8_0

CURE = "kprep extract with the same checkpoint and output restores it"
_FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Quantised(NamedTuple):
    """A Q8_0 matrix with its quants and scales apart: int8 [rows, cols], float16 [rows, cols/32]."""

    quants: Tensor
    scales: Tensor


class SpineWeights:
    """The spine on one device. Matrices stay in Q8_0 and are expanded for each product."""

    def __init__(self, device: torch.device, tensors: dict[str, Tensor | _Quantised]) -> None:
        self._device, self._tensors = device, tensors

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def n_bytes(self) -> int:
        parts = (part for t in self._tensors.values() for part in (t if isinstance(t, _Quantised) else (t,)))
        return sum(part.numel() * part.element_size() for part in parts)

    def matrix(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return expand_q8_0(*tensor) if isinstance(tensor, _Quantised) else tensor.float()

    def vector(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        assert isinstance(tensor, Tensor)
        return tensor.float()

    def rows(self, name: str, ids: Tensor) -> Tensor:
        tensor = self._tensors[name]
        if not isinstance(tensor, _Quantised):
            return tensor[ids].float()
        flat = ids.flatten()
        return expand_q8_0(tensor.quants[flat], tensor.scales[flat]).unflatten(0, ids.shape)


def load_spine(prepared: Prepared, device: torch.device) -> SpineWeights:
    """Read the spine past the page cache, checking names, shapes and the hash of the whole file.

    Raises BadInputError if it is not the spine of this geometry, DamagedDataError if its bytes are not those that were written.
    """
    path, facts = prepared.spine_path, prepared.manifest.spine
    found = path.stat().st_size if path.exists() else 0
    if found != facts.n_bytes:
        raise DamagedDataError(f"{path}: has {found} bytes, expected {facts.n_bytes}; {CURE}")
    header, mode, state = _read_header(prepared), probe_directory(path.parent), xxhash.xxh3_128()
    for block in file_blocks(path, 0, header.data_offset, mode):
        state.update(block)
    tensors: dict[str, Tensor | _Quantised] = {}
    places = sorted(header.tensors.values(), key=lambda t: t.offset)
    ends = [*(t.offset for t in places[1:]), facts.n_bytes]
    for place, end in zip(places, ends, strict=True):
        raw = torch.empty(end - place.offset, dtype=torch.uint8)
        at = 0
        for block in file_blocks(path, place.offset, end, mode):
            state.update(block)
            raw[at : at + len(block)] = torch.frombuffer(block, dtype=torch.uint8)
            at += len(block)
        tensors[place.name] = _on_device(raw[: place.n_bytes], place, device)
    if state.hexdigest() != facts.xxh3_128:
        raise DamagedDataError(f"{path}: xxh3-128 {state.hexdigest()} differs from the manifest's {facts.xxh3_128}; {CURE}")
    return SpineWeights(device, tensors)


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


def _on_device(raw: Tensor, place: GgufTensor, device: torch.device) -> Tensor | _Quantised:
    raw = raw.to(device)
    if place.type in _FLOAT_TYPES:
        return raw.view(_FLOAT_TYPES[place.type]).view(place.shape).clone()
    blocks = raw.view(place.shape[0], -1, BLOCK_BYTES)
    scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
    return _Quantised(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), scales)


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
        raise BadInputError(f"{path}: not the spine of this geometry: {'; '.join(faults[:5])}; {len(faults)} faults in all")


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
