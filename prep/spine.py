"""The spine: everything that every token needs, in one GGUF file with llama.cpp's names, matrices in Q8_0.

gguf-py writes the header; the data follow tensor by tensor in blocks of rows, so memory does not grow with the model.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import xxhash
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from layout.checkpoint import Checkpoint
from layout.record import LAYOUT_NAME, NIBBLE_ORDER, SCALE_KIND
from layout.tensor_data import float_blocks, raw_blocks, read_float_tensor
from layout.tensors import SpineTensor
from layout.writer import replaced_file
from manifests.geometry import Geometry

ALIGNMENT = 4096
ARCHITECTURE = "kimi-k3"
Progress = Callable[[str, int, int], None]

_TYPES = {
    "Q8_0": GGMLQuantizationType.Q8_0,
    "F32": GGMLQuantizationType.F32,
    "BF16": GGMLQuantizationType.BF16,
    "F16": GGMLQuantizationType.F16,
}


class SpineFile(NamedTuple):
    n_bytes: int
    xxh3_128: str


def write_spine(checkpoint: Checkpoint, path: Path, *, expert_directories: list[str], on_progress: Progress) -> SpineFile:
    """Write the spine of a checkpoint and return its size and hash.

    Raises BadInputError on values that are not finite, and on A_log padding that is not zero.
    """
    tensors = checkpoint.spine_tensors()
    with replaced_file(path) as partial:
        _write_header(checkpoint, tensors, partial, expert_directories)
        state = xxhash.xxh3_128(partial.read_bytes())
        with partial.open("ab") as file:
            source_bytes = [sum(checkpoint.tensors[s.name].n_bytes for s in t.sources) for t in tensors]
            done, total = 0, sum(source_bytes)
            for tensor, n_source_bytes in zip(tensors, source_bytes, strict=True):
                for block in _padded(_tensor_blocks(checkpoint, tensor)):
                    file.write(block)
                    state.update(block)
                done += n_source_bytes
                on_progress("spine", done, total)
            n_bytes = file.tell()
    return SpineFile(n_bytes, state.hexdigest())


def stored_type(checkpoint: Checkpoint, tensor: SpineTensor) -> str:
    """Return the name of the type that a tensor has in the spine."""
    return checkpoint.tensors[tensor.sources[0].name].dtype if tensor.storage == "shipped" else tensor.storage


def _write_header(checkpoint: Checkpoint, tensors: list[SpineTensor], path: Path, expert_directories: list[str]) -> None:
    writer = GGUFWriter(path, ARCHITECTURE)
    writer.add_custom_alignment(ALIGNMENT)
    for key, value in _keys(checkpoint, expert_directories).items():
        _add_key(writer, key, value)
    for tensor in tensors:
        kind = _TYPES[stored_type(checkpoint, tensor)]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        n_bytes = int(np.prod(tensor.shape)) // block * block_bytes
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), n_bytes, raw_dtype=kind)
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
    return {"general.name": checkpoint.directory.resolve().name, **model, **{f"ktier.{key}": value for key, value in own.items()}}


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


def _padded(blocks: Iterator[bytes]) -> Iterator[bytes]:
    n_bytes = 0
    for block in blocks:
        n_bytes += len(block)
        yield block
    yield bytes(-n_bytes % ALIGNMENT)


def _tensor_blocks(checkpoint: Checkpoint, tensor: SpineTensor) -> Iterator[bytes]:
    """Yield a spine tensor's bytes in blocks of rows."""
    name = tensor.sources[0].name
    if tensor.storage == "shipped":
        yield from (raw.tobytes() for raw in raw_blocks(checkpoint, name))
    elif tensor.storage == "Q8_0":
        yield from (quantize(block, GGMLQuantizationType.Q8_0).tobytes() for block in float_blocks(checkpoint, name))
    else:
        yield read_float_tensor(checkpoint, tensor).tobytes()
