"""A random-weight checkpoint in the published format, of any geometry.

It has what a download has: shards, index, configuration and tokenizer. The values are random but healthy (activations near unit size), and
the bytes of each tensor follow from the seed and the tensor's name alone. No more than one block of one tensor is held in memory.
"""

import base64
import json
import math
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from layout.checkpoint import DTYPE_BYTES, INDEX_NAME
from layout.config import ARCHITECTURES, K31, LORA_NORM_EPS, MODEL_TYPES
from layout.mxfp4 import BLOCK_SIZE, E2M1_VALUES
from layout.record import record_layout
from layout.tensors import HEAD_NAME, MODEL_PREFIX, expert_tensor_names, spine_tensors
from layout.writer import replaced_file, write_bytes
from manifests.errors import BadInputError, NoSpaceError, UsageError
from manifests.geometry import Geometry

# Elements made at a time: 32 MiB of float32.
_BLOCK_ELEMENTS = 8 << 20
# Vocabularies up to this size get 32 special tokens, larger ones 256 as the published model has.
_SMALL_VOCABULARY = 4096
_N_BYTE_RANKS = 256

_F32_SUFFIXES = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias", "k_norm.weight", "k_norm.bias")
# Mean and deviation by the end of the name; every other float tensor is a matrix.
_MEAN_AND_STD = {
    "A_log": (0.5, 0.5),
    "dt_bias": (-0.5, 0.5),
    "e_score_correction_bias": (0.0, 0.05),
    "norm.weight": (1.0, 0.1),
    "norm.bias": (0.0, 0.1),
    "embed_tokens.weight": (0.0, 1.0),
}
# A matrix's deviation times sqrt(columns), where it is not 1: branches add little to the residual, and the logits are far enough apart.
_GAINS = {".o_proj.weight": 0.35, ".down_proj.weight": 0.35, ".routed_expert_up_proj.weight": 0.35, "lm_head.weight": 3.0}


class _Tensor(NamedTuple):
    """A tensor to be written. Its last `n_zeros` elements are padding."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_zeros: int = 0

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return self.n_elements * DTYPE_BYTES[self.dtype]


class _Shard(NamedTuple):
    """A file to be written, its tensors in the order in which they lie there."""

    name: str
    tensors: list[_Tensor]

    @property
    def header(self) -> bytes:
        """The safetensors header with its length before it, padded with spaces to 8 bytes."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in self.tensors:
            begin, end = end, end + tensor.n_bytes
            entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (begin, end)}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    @property
    def data_bytes(self) -> int:
        return sum(t.n_bytes for t in self.tensors)


def make_checkpoint(
    out: Path,
    geometry: Geometry,
    *,
    architecture: str,
    seed: int,
    on_progress: Callable[[str, int, int], None] | None = None,
    pad_a_log: bool = True,
    is_sparse: bool = False,
) -> None:
    """Write a random-weight checkpoint that differs from a published one only in its values, and in its vision tower, which is a token one.

    architecture  as config.json names it; K3.1 needs a geometry with an indexer, K3 one without
    on_progress   called with the shard's name, the tensor bytes written so far, and those of all shards, after every block
    pad_a_log     lengthen A_log with zeros to the size of a head, as the published models do
    is_sparse     leave a hole in the place of all tensor data: every size and header is true, and next to nothing lies on the disk

    The index is written last: a directory without it is unfinished. Raises BadInputError if `out` is not empty or the geometry does not fit
    the architecture, NoSpaceError before the first write if the file system has too little room.
    """
    _check_request(out, geometry, architecture)
    shards = _shards(geometry, pad_a_log=pad_a_log)
    _check_space(out, shards, is_sparse=is_sparse)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"{out}: cannot be created: {error.strerror}; choose another directory") from None
    n_done, n_total = 0, sum(shard.data_bytes for shard in shards)
    for shard in shards:
        for n_bytes in _write_hole(out, shard) if is_sparse else _write_shard(out, shard, seed):
            n_done += n_bytes
            if on_progress is not None:
                on_progress(shard.name, n_done, n_total)
    for name, data in _small_files(geometry, architecture, shards):
        write_bytes(out / name, data)


def limit_layers(geometry: Geometry, n: int) -> Geometry:
    """Return the model's first n layers; if none of them has full attention, the last one gets it, as the real model ends so.

    Raises UsageError unless n leaves at least one layer with experts.
    """
    least = geometry.n_dense_layers + 1
    if not least <= n <= geometry.n_layers:
        raise UsageError(f"layers is {n}, expected {least} to {geometry.n_layers}: the first {geometry.n_dense_layers} have no experts")
    kept = tuple(layer for layer in geometry.full_attention_layers if layer < n)
    return replace(geometry, n_layers=n, full_attention_layers=kept or (n - 1,))


def _check_request(out: Path, g: Geometry, architecture: str) -> None:
    if architecture not in ARCHITECTURES:
        raise BadInputError(f"architecture is {architecture!r}, expected one of {', '.join(ARCHITECTURES)}")
    if (architecture == K31) != (g.indexer is not None):
        found, expected = ("no", "one") if architecture == K31 else ("an", "none")
        raise BadInputError(f"{architecture}: the geometry has {found} indexer, expected {expected}; change architecture or geometry")
    if g.lora_norm_eps != LORA_NORM_EPS:
        raise BadInputError(f"lora_norm_eps is {g.lora_norm_eps}, expected {LORA_NORM_EPS}: config.json has no place for another value")
    n_ranks = _n_ranks(g.vocab_size)
    if n_ranks < _N_BYTE_RANKS or len(_tokens(n_ranks)) < n_ranks:
        raise BadInputError(f"vocab_size is {g.vocab_size}, expected 288 to about a million: a tokenizer must be made for it")
    if out.exists() and not out.is_dir():
        raise BadInputError(f"{out}: is a file, expected a new or empty directory")
    if out.is_dir() and any(out.iterdir()):
        raise BadInputError(f"{out}: the directory is not empty; nothing is overwritten: choose another one, or empty it")


def _check_space(out: Path, shards: list[_Shard], *, is_sparse: bool) -> None:
    # The index is about as large as all headers together.
    needed = sum(2 * len(shard.header) + (0 if is_sparse else shard.data_bytes) for shard in shards)
    home = next(directory for directory in (out.absolute(), *out.absolute().parents) if directory.is_dir())
    free = shutil.disk_usage(home).free
    if needed > free:
        raise NoSpaceError(
            f"{out}: the checkpoint needs {needed:,} bytes, but {home} has {free:,} bytes free; "
            "make room, choose another directory, or take fewer layers or a smaller geometry"
        )


def _shards(g: Geometry, *, pad_a_log: bool) -> list[_Shard]:
    """Return the files: one per layer, then the top of the model, then the two parts of the vision tower."""
    groups: list[list[_Tensor]] = [[] for _ in range(g.n_layers + 1)]
    for spine in spine_tensors(g):
        for source in spine.sources:
            tensor = _Tensor(source.name, "F32" if source.name.endswith(_F32_SUFFIXES) else "BF16", source.shape)
            if spine.rule == "a_log" and pad_a_log:
                tensor = _padded(tensor, g.kda_head_dim)
            groups[_group_of(source.name, g.n_layers)].append(tensor)
    for tensors in groups:
        tensors.sort(key=lambda t: (t.name == HEAD_NAME, t.name))
    for layer in g.moe_layers:
        groups[layer][:0] = _expert_tensors(g, layer)
    groups += _vision()
    return [_Shard(f"model-{i:05}-of-{len(groups):06}.safetensors", tensors) for i, tensors in enumerate(groups, 1)]


def _group_of(name: str, n_layers: int) -> int:
    prefix = MODEL_PREFIX + "layers."
    return int(name.removeprefix(prefix).split(".")[0]) if name.startswith(prefix) else n_layers


def _padded(tensor: _Tensor, n: int) -> _Tensor:
    n_zeros = max(0, n - tensor.n_elements)
    return tensor._replace(shape=(tensor.n_elements + n_zeros,), n_zeros=n_zeros)


def _expert_tensors(g: Geometry, layer: int) -> Iterator[_Tensor]:
    shapes = [(s.n_rows, s.n_cols) for s in record_layout(g).segments]
    for expert in range(g.n_experts):
        for name, shape in zip(expert_tensor_names(layer, expert), shapes, strict=True):
            yield _Tensor(name, "U8", shape)


def _vision() -> list[list[_Tensor]]:
    projector = [_Tensor("mm_projector.proj.0.weight", "BF16", (64, 64)), _Tensor("mm_projector.post_norm.weight", "BF16", (64,))]
    tower = [
        _Tensor("vision_tower.patch_embed.proj.weight", "BF16", (16, 3, 14, 14)),
        _Tensor("vision_tower.encoder.blocks.0.wqkv.weight", "BF16", (48, 16)),
    ]
    return [projector, tower]


def _write_shard(out: Path, shard: _Shard, seed: int) -> Iterator[int]:
    """Write a shard block by block; yield each block's bytes once they are handed over."""
    with replaced_file(out / shard.name) as partial, partial.open("wb") as file:
        file.write(shard.header)
        for tensor in shard.tensors:
            for block in _blocks(tensor, seed):
                yield file.write(block.data)


def _write_hole(out: Path, shard: _Shard) -> Iterator[int]:
    """Write a shard's header and a hole of the size of its data; yield that size."""
    with replaced_file(out / shard.name) as partial, partial.open("wb") as file:
        file.write(shard.header)
        file.truncate(file.tell() + shard.data_bytes)
    yield shard.data_bytes


def _blocks(tensor: _Tensor, seed: int) -> Iterator[np.ndarray]:
    """Yield a tensor's values in pieces of bounded size, in the type in which they are stored (BF16 as uint16)."""
    rng = _rng(tensor.name, seed)
    n_left = tensor.n_elements - tensor.n_zeros
    while n_left:
        n = min(n_left, _BLOCK_ELEMENTS)
        yield _values(tensor, rng, n)
        n_left -= n
    if tensor.n_zeros:
        yield np.zeros(tensor.n_zeros * DTYPE_BYTES[tensor.dtype], np.uint8)


def _rng(name: str, seed: int) -> np.random.Generator:
    digest = blake2b(f"{seed} {name}".encode(), digest_size=32).digest()
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(int.from_bytes(digest, "little"))))


def _values(tensor: _Tensor, rng: np.random.Generator, n: int) -> np.ndarray:
    if tensor.name.endswith("weight_packed"):
        return rng.integers(0, 2**64, -(-n // 8), np.uint64).view(np.uint8)[:n]
    if tensor.name.endswith("weight_scale"):
        return _scales(rng, n, n_cols=tensor.shape[1] * BLOCK_SIZE)
    mean, std = _mean_and_std(tensor)
    values = rng.standard_normal(n, np.float32)
    values *= np.float32(std)
    values += np.float32(mean)
    return values if tensor.dtype == "F32" else _bf16(values)


def _scales(rng: np.random.Generator, n: int, *, n_cols: int) -> np.ndarray:
    """Return n E8M0 bytes of two neighbouring values, mixed so that uniform nibbles become weights of variance 1/n_cols."""
    exponent = 127 - math.log2(math.sqrt(n_cols * np.mean(E2M1_VALUES**2)))
    low = math.floor(exponent)
    # The variance is 4**low with one value and 4 * 4**low with the other.
    is_high = rng.random(n, np.float32) < (4 ** (exponent - low) - 1) / 3
    return is_high.astype(np.uint8) + np.uint8(low)


def _mean_and_std(tensor: _Tensor) -> tuple[float, float]:
    for suffix, known in _MEAN_AND_STD.items():
        if tensor.name.endswith(suffix):
            return known
    gain = next((gain for suffix, gain in _GAINS.items() if tensor.name.endswith(suffix)), 1.0)
    return 0.0, gain / math.sqrt(math.prod(tensor.shape[1:]))


def _bf16(values: np.ndarray) -> np.ndarray:
    """Round finite float32 to bfloat16, ties to even; returns the upper halves as uint16."""
    bits = values.view(np.uint32)
    odd = (bits >> 16) & 1
    return ((bits + 0x7FFF + odd) >> 16).astype(np.uint16)


def _small_files(g: Geometry, architecture: str, shards: list[_Shard]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of all files that are not shards, the index last."""
    n_ranks = _n_ranks(g.vocab_size)
    index = {
        "metadata": {"total_size": sum(shard.data_bytes for shard in shards)},
        "weight_map": dict(sorted((tensor.name, shard.name) for shard in shards for tensor in shard.tensors)),
    }
    yield "tiktoken.model", b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(_tokens(n_ranks)))
    yield "tokenizer_config.json", _json(_tokenizer_config(g))
    yield "generation_config.json", _json({"eos_token_id": n_ranks + 2, "do_sample": True, "temperature": 1.0})
    yield "config.json", _json(_config(g, architecture))
    yield INDEX_NAME, _json(index)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"


def _n_specials(n: int) -> int:
    return 32 if n <= _SMALL_VOCABULARY else 256


def _n_ranks(vocab_size: int) -> int:
    return vocab_size - _n_specials(vocab_size)


def _tokens(n_ranks: int) -> list[bytes]:
    """Return the ordinary tokens by rank: the single bytes, then the merged ones."""
    return list(islice(chain((bytes([b]) for b in range(_N_BYTE_RANKS)), _merged_tokens()), n_ranks))


def _merged_tokens() -> Iterator[bytes]:
    """Yield syllables, then words of two and of three syllables, the more usual letters first.

    Each is found by merging pairs of lower rank, wherever the list is cut: only consonant and vowel merge at first, a space joins its
    first syllable before syllables join each other, and longer words begin once any two neighbouring syllables make a known one.
    """
    syllables = [f"{consonant}{vowel}".encode() for consonant in "tnshrdlcmwfgypbvkjxqz" for vowel in "eaoiu"]
    words = [a + b for a in syllables for b in syllables]
    yield from syllables
    yield from (b" " + syllable for syllable in syllables)
    yield from words
    yield from (b" " + word for word in words)
    yield from (word + syllable for word in words for syllable in syllables)


def _special_names(vocab_size: int) -> dict[int, str]:
    """Return the named special tokens by id; the others are reserved and have no entry."""
    # The published model has its media tokens 18 after its first special one; 32 specials have them at 9.
    media = 9 if _n_specials(vocab_size) == 32 else 18
    first = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"]
    names = dict(enumerate(first)) | dict(enumerate(["<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>"], media))
    n_ranks = _n_ranks(vocab_size)
    return {n_ranks + i: name for i, name in names.items()} | {vocab_size - 2: "[UNK]", vocab_size - 1: "[PAD]"}


def _tokenizer_config(g: Geometry) -> dict[str, Any]:
    flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {
        "added_tokens_decoder": {str(i): {"content": name} | flags for i, name in _special_names(g.vocab_size).items()},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
        "model_max_length": g.max_position_embeddings,
    }


def _config(g: Geometry, architecture: str) -> dict[str, Any]:
    names = {name: i for i, name in _special_names(g.vocab_size).items()}
    ids = {"bos_token_id": names["[BOS]"], "eos_token_id": names["<|end_of_msg|>"], "pad_token_id": names["[PAD]"]}
    return {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture][0],
        "dtype": "bfloat16",
        **ids,
        "tie_word_embeddings": False,
        "media_placeholder_token_id": names["<|media_pad|>"],
        "text_config": {**_text_config(g), **ids, **_layer_configs(g)},
        "vision_config": {"patch_size": 14, "vt_hidden_size": 16, "vt_num_hidden_layers": 1},
    }


def _text_config(g: Geometry) -> dict[str, Any]:
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": g.vocab_size,
        "hidden_size": g.hidden_size,
        "intermediate_size": g.dense_intermediate_size,
        "num_hidden_layers": g.n_layers,
        "num_attention_heads": g.n_heads,
        "num_key_value_heads": g.n_heads,
        "hidden_act": "situ",
        "activation_situ_beta": g.situ_beta,
        "activation_situ_linear_beta": g.situ_linear_beta,
        "attn_res_block_size": g.residual_block_size,
        "rms_norm_eps": g.rms_norm_eps,
        "first_k_dense_replace": g.n_dense_layers,
        "moe_layer_freq": 1,
        "num_experts": g.n_experts,
        "num_experts_per_token": g.n_experts_per_token,
        "num_shared_experts": g.n_shared_experts,
        "moe_intermediate_size": g.expert_intermediate_size,
        "routed_expert_hidden_size": g.latent_size,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": g.routed_scaling_factor,
        "topk_method": "noaux_tc",
        "num_expert_group": 1,
        "topk_group": 1,
        "use_grouped_topk": True,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": g.q_lora_rank,
        "kv_lora_rank": g.kv_lora_rank,
        "qk_nope_head_dim": g.qk_nope_head_dim,
        "qk_rope_head_dim": g.qk_rope_head_dim,
        "v_head_dim": g.v_head_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "max_position_embeddings": g.max_position_embeddings,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _layer_configs(g: Geometry) -> dict[str, Any]:
    """Return the blocks that list layers, which config.json counts from 1, and the one on quantisation."""
    full = [layer + 1 for layer in g.full_attention_layers]
    blocks: dict[str, Any] = {
        "linear_attn_config": {
            "num_heads": g.kda_n_heads,
            "head_dim": g.kda_head_dim,
            "short_conv_kernel_size": g.conv_kernel_size,
            "gate_lower_bound": g.kda_gate_lower_bound,
            "use_full_rank_gate": True,
            "full_attn_layers": full,
            "kda_layers": [layer for layer in range(1, g.n_layers + 1) if layer not in full],
        },
        "quantization_config": _quantization_config(),
    }
    if g.indexer is not None:
        blocks["dsa_config"] = {
            "index_n_heads": g.indexer.n_heads,
            "index_head_dim": g.indexer.head_dim,
            "index_topk": g.indexer.top_k,
            "full_attn_layers": full,
        }
    return blocks


def _quantization_config() -> dict[str, Any]:
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": BLOCK_SIZE,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    parts = ("self_attn.*", "shared_experts.*", r"mlp\.(gate|up|gate_up|down)_proj.*", "lm_head.*", "vision_tower.*", "mm_projector.*")
    return {
        "config_groups": {"group_0": group},
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": [f"re:.*{part}" for part in parts],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
