"""The spine: everything that every token needs, in one GGUF file with llama.cpp's names, matrices in Q8_0.

gguf-py writes the header. The data follow in pieces of bounded size: threads read and quantise the next ones while this thread hashes and
writes those that are done, in the order of the file and past the page cache. Memory does not grow with the model.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import xxhash
from gguf import GGMLQuantizationType, GGUFWriter

from layout.checkpoint import Checkpoint
from layout.direct import Extent, aligned_buffer, probe_directory, read_extent, round_up, span_bytes
from layout.record import LAYOUT_NAME, NIBBLE_ORDER, SCALE_KIND
from layout.tensor_data import as_float32, check_finite, read_float_tensor
from layout.tensors import SpineTensor
from layout.writer import replaced_file
from manifests.errors import BadInputError
from manifests.geometry import Geometry
from prep.extraction.quantise import Quantiser

ALIGNMENT = 4096
ARCHITECTURE = "kimi-k3"
# Checkpoint bytes read and quantised at a time. As a multiple of 2**18 it gives whole pages of Q8_0 from every source type.
PIECE_BYTES = 16 << 20
# One thread waits for the drive while others quantise; beyond a few they queue for Python's lock.
N_WORKERS = min(4, (os.cpu_count() or 1) + 1)
# Two more, so that a slow write does not stop the workers at once.
N_SLOTS = N_WORKERS + 2
Progress = Callable[[str, int, int], None]

_TYPES = {
    "Q8_0": GGMLQuantizationType.Q8_0,
    "F32": GGMLQuantizationType.F32,
    "BF16": GGMLQuantizationType.BF16,
    "F16": GGMLQuantizationType.F16,
}


class SpineFile(NamedTuple):
    """A written spine; `tensors` holds the xxh3-128 of each tensor's stored bytes, without the padding behind them."""

    n_bytes: int
    xxh3_128: str
    tensors: dict[str, str]


class _Piece(NamedTuple):
    """What is read and converted in one go: a run of bytes of a tensor's only source, or, where F32 is stored, a whole tensor."""

    tensor: SpineTensor
    begin: int
    n_source_bytes: int


class _Slot:
    """The memory that a piece is read into, converted with and written from; used again for a later piece."""

    def __init__(self, alignment: int) -> None:
        self.incoming = aligned_buffer(span_bytes(PIECE_BYTES, alignment))
        self.outgoing = aligned_buffer(PIECE_BYTES)
        self.quantiser = Quantiser()


class _Made(NamedTuple):
    """A piece ready to be written: `padded` is page-aligned, whole pages, and zero behind its first n_bytes."""

    piece: _Piece
    padded: memoryview
    n_bytes: int


def write_spine(checkpoint: Checkpoint, path: Path, *, expert_directories: list[str], on_progress: Progress) -> SpineFile:
    """Write the spine of a checkpoint and return its size and hashes.

    Raises BadInputError on values that are not finite or too large for Q8_0, and on A_log padding that is not zero.
    """
    tensors = checkpoint.spine_tensors()
    pieces = [piece for tensor in tensors for piece in _pieces(checkpoint, tensor)]
    done, total = 0, sum(piece.n_source_bytes for piece in pieces)
    hashes = {tensor.name: xxhash.xxh3_128() for tensor in tensors}
    with replaced_file(path) as partial:
        _write_header(checkpoint, tensors, partial, expert_directories)
        header = partial.read_bytes()
        whole, n_bytes = xxhash.xxh3_128(header), len(header)
        with open(partial, "r+b", buffering=0, opener=_open_for_pages) as file, ThreadPoolExecutor(N_WORKERS) as pool:
            for made in _made_in_order(checkpoint, pieces, pool):
                hashes[made.piece.tensor.name].update(made.padded[: made.n_bytes])
                whole.update(made.padded)
                _write_pages(file.fileno(), made.padded, n_bytes)
                n_bytes += len(made.padded)
                done += made.piece.n_source_bytes
                on_progress("spine", done, total)
    return SpineFile(n_bytes, whole.hexdigest(), {name: state.hexdigest() for name, state in hashes.items()})


def stored_type(checkpoint: Checkpoint, tensor: SpineTensor) -> str:
    """Return the name of the type that a tensor has in the spine."""
    return checkpoint.tensors[tensor.sources[0].name].dtype if tensor.storage == "shipped" else tensor.storage


def spine_bytes(checkpoint: Checkpoint, *, expert_directories: list[str]) -> int:
    """Return the size of the file that `write_spine` makes, to the byte. The header is made in memory; nothing is written."""
    tensors = checkpoint.spine_tensors()
    fd = os.memfd_create("spine-header", os.MFD_CLOEXEC)
    try:
        _write_header(checkpoint, tensors, Path(f"/proc/self/fd/{fd}"), expert_directories)
        return os.fstat(fd).st_size + sum(round_up(_stored_bytes(checkpoint, tensor), ALIGNMENT) for tensor in tensors)
    finally:
        os.close(fd)


def _stored_bytes(checkpoint: Checkpoint, tensor: SpineTensor) -> int:
    n_elements, n_bytes = gguf.GGML_QUANT_SIZES[_TYPES[stored_type(checkpoint, tensor)]]
    return math.prod(tensor.shape) // n_elements * n_bytes


def _write_header(checkpoint: Checkpoint, tensors: list[SpineTensor], path: Path, expert_directories: list[str]) -> None:
    writer = GGUFWriter(path, ARCHITECTURE)
    writer.add_custom_alignment(ALIGNMENT)
    for key, value in _keys(checkpoint, expert_directories).items():
        _add_key(writer, key, value)
    for tensor in tensors:
        kind = _TYPES[stored_type(checkpoint, tensor)]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), _stored_bytes(checkpoint, tensor), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        file.write(bytes(-file.tell() % ALIGNMENT))


def _add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def _keys(checkpoint: Checkpoint, expert_directories: list[str]) -> dict[str, Any]:
    facts, record = checkpoint.facts, checkpoint.record
    named = dict(zip(("primary", "secondary", "third", "fourth"), expert_directories, strict=False))
    own = {
        "architecture": facts.architecture,
        "source_digest": checkpoint.digest,
        "record_layout": LAYOUT_NAME,
        "record_bytes": record.n_bytes,
        "nibbles": NIBBLE_ORDER,
        "scale": SCALE_KIND,
        "ssm_a": "A_log",
        **{f"expert_directory.{name}": directory for name, directory in named.items()},
    }
    model = {f"{ARCHITECTURE}.{key}": value for key, value in _model_keys(facts.geometry).items()}
    return {"general.name": facts.architecture, **model, **{f"ktier.{key}": value for key, value in own.items()}}


def _model_keys(g: Geometry) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "vocab_size": g.vocab_size,
        "context_length": g.max_position_embeddings,
        "embedding_length": g.hidden_size,
        "block_count": g.n_layers,
        "feed_forward_length": g.dense_intermediate_size,
        "attention.head_count": g.n_heads,
        "attention.head_count_kv": [int(g.is_full_attention(layer)) for layer in range(g.n_layers)],
        "attention.layer_norm_rms_epsilon": g.rms_norm_eps,
        "attention.q_lora_rank": g.q_lora_rank,
        "attention.kv_lora_rank": g.kv_lora_rank,
        "attention.key_length": g.kv_lora_rank + g.qk_rope_head_dim,
        "attention.value_length": g.kv_lora_rank,
        "attention.key_length_mla": g.qk_nope_head_dim + g.qk_rope_head_dim,
        "attention.value_length_mla": g.v_head_dim,
        "rope.dimension_count": g.qk_rope_head_dim,
        "ssm.conv_kernel": g.conv_kernel_size,
        "kda.head_dim": g.kda_head_dim,
        "expert_count": g.n_experts,
        "expert_used_count": g.n_experts_per_token,
        "expert_feed_forward_length": g.expert_intermediate_size,
        "expert_shared_count": g.n_shared_experts,
        "leading_dense_block_count": g.n_dense_layers,
        "expert_weights_scale": g.routed_scaling_factor,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "expert_latent_length": g.latent_size,
        "activation.situ_beta": g.situ_beta,
        "activation.situ_linear_beta": g.situ_linear_beta,
        "attn_res.block_size": g.residual_block_size,
    }
    if g.kda_gate_lower_bound is not None:
        keys["kda.gate_lower_bound"] = g.kda_gate_lower_bound
    if g.indexer is not None:
        keys |= {
            "attention.indexer.head_count": g.indexer.n_heads,
            "attention.indexer.key_length": g.indexer.head_dim,
            "attention.indexer.top_k": g.indexer.top_k,
            "attention.indexer.types": [int(g.is_full_attention(layer)) for layer in range(g.n_layers)],
        }
    return keys


def _pieces(checkpoint: Checkpoint, tensor: SpineTensor) -> Iterator[_Piece]:
    n_bytes = sum(checkpoint.tensors[s.name].n_bytes for s in tensor.sources)
    step = n_bytes if tensor.storage == "F32" else PIECE_BYTES
    for begin in range(0, n_bytes, step):
        yield _Piece(tensor, begin, min(step, n_bytes - begin))


def _made_in_order(checkpoint: Checkpoint, pieces: list[_Piece], pool: ThreadPoolExecutor) -> Iterator[_Made]:
    """Yield every piece, made by the pool, in order; each is valid until the next."""
    slots = [_Slot(checkpoint.read_mode.alignment) for _ in range(N_SLOTS)]
    under_way: deque[Future[_Made]] = deque()
    for number, piece in enumerate(pieces):
        if len(under_way) == N_SLOTS:
            yield under_way.popleft().result()
        # This slot held the piece that was just yielded, which has been written by now.
        under_way.append(pool.submit(_make, checkpoint, piece, slots[number % N_SLOTS]))
    while under_way:
        yield under_way.popleft().result()


def _make(checkpoint: Checkpoint, piece: _Piece, slot: _Slot) -> _Made:
    outgoing = slot.outgoing
    if piece.tensor.storage == "F32":
        values = read_float_tensor(checkpoint, piece.tensor)
        n_bytes = values.nbytes
        outgoing = aligned_buffer(round_up(n_bytes, ALIGNMENT))
        outgoing[:n_bytes] = values.tobytes()
    elif piece.tensor.storage == "Q8_0":
        n_bytes = _quantise(checkpoint, piece, slot)
    else:
        raw = _read(checkpoint, piece, slot)
        n_bytes = len(raw)
        check_finite(as_float32(np.frombuffer(raw, np.uint8), stored_type(checkpoint, piece.tensor)), checkpoint, piece.tensor.sources[0].name)
        outgoing[:n_bytes] = raw
    padded = outgoing[: round_up(n_bytes, ALIGNMENT)]
    padded[n_bytes:] = bytes(len(padded) - n_bytes)
    return _Made(piece, padded, n_bytes)


def _read(checkpoint: Checkpoint, piece: _Piece, slot: _Slot) -> memoryview:
    path, offset, _ = checkpoint.extent(piece.tensor.sources[0].name)
    return read_extent(Extent(path, offset + piece.begin, piece.n_source_bytes), slot.incoming, checkpoint.read_mode)


def _quantise(checkpoint: Checkpoint, piece: _Piece, slot: _Slot) -> int:
    name = piece.tensor.sources[0].name
    raw, out = np.frombuffer(_read(checkpoint, piece, slot), np.uint8), np.frombuffer(slot.outgoing, np.uint8)
    try:
        return slot.quantiser.quantise(raw, checkpoint.tensors[name].dtype, out)
    except ValueError as error:
        raise BadInputError(f"tensor {name} in {checkpoint.extent(name).path.name} {error}; fetch the file again") from None


def _open_for_pages(path: str, flags: int) -> int:
    """Open a file past the page cache where its directory lets whole pages through."""
    mode = probe_directory(Path(path).parent)
    return os.open(path, flags | os.O_DIRECT if mode.is_direct and mode.alignment <= ALIGNMENT else flags)


def _write_pages(fd: int, pages: memoryview, offset: int) -> None:
    done = 0
    while done < len(pages):
        # A write that the disk cut short goes on from a whole page, or fails there with its reason.
        done = (done + os.pwrite(fd, pages[done:], offset + done)) // ALIGNMENT * ALIGNMENT
