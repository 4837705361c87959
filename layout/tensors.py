"""One table of every tensor that a K3 or K3.1 checkpoint holds: its role, its shape, and where it goes.

The names on the right are llama.cpp's for the `kimi-k3` architecture. Two things differ, and lose nothing: `attn_kv_b` is kept whole, and
`ssm_a` holds A_log of the real heads. Whatever no line of the table matches is unknown, and the caller must stop.
"""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from layout.record import SEGMENT_NAMES
from manifests.geometry import Geometry

Storage = Literal["Q8_0", "F32", "shipped"]
Rule = Literal["plain", "fold", "a_log"]

MODEL_PREFIX = "language_model.model."
HEAD_NAME = "language_model.lm_head.weight"
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
FLOAT_DTYPES = ("BF16", "F32", "F16")

_NUMBER = "(0|[1-9][0-9]{0,8})"
_EXPERT = re.compile(rf"language_model\.model\.layers\.{_NUMBER}\.block_sparse_moe\.experts\.{_NUMBER}\.(w[123])\.weight_(packed|scale)")


class SourceTensor(NamedTuple):
    """A tensor of the checkpoint: its name and shape there."""

    name: str
    shape: tuple[int, ...]


class SpineTensor(NamedTuple):
    """A tensor of the spine and the checkpoint tensors that it is made of.

    storage  Q8_0, F32, or the checkpoint's own type
    rule     plain: copied; fold: the elementwise product of two vectors; a_log: the first heads of a zero-padded vector
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage
    rule: Rule
    sources: tuple[SourceTensor, ...]
    is_optional: bool = False


class ExpertTensor(NamedTuple):
    """Which segment of which expert a checkpoint tensor is."""

    layer: int
    expert: int
    segment: str


def expert_tensor(name: str) -> ExpertTensor | None:
    """Return the place of an expert's tensor, or None if the name is not one."""
    match = _EXPERT.fullmatch(name)
    return ExpertTensor(int(match[1]), int(match[2]), f"{match[3]}.{match[4]}") if match else None


def expert_tensor_names(layer: int, expert: int) -> list[str]:
    """Return the checkpoint names of an expert's six tensors, in record order."""
    prefix = f"{MODEL_PREFIX}layers.{layer}.block_sparse_moe.experts.{expert}."
    return [prefix + segment.replace(".", ".weight_") for segment in SEGMENT_NAMES]


def is_vision(name: str) -> bool:
    return name.startswith(VISION_PREFIXES)


def spine_tensors(g: Geometry) -> list[SpineTensor]:
    """Return every tensor of the spine in the order in which it is written."""
    return [*_top(g), *(t for layer in range(g.n_layers) for t in _layer(g, layer))]


def _top(g: Geometry) -> Iterator[SpineTensor]:
    d = g.hidden_size
    yield _plain("token_embd.weight", MODEL_PREFIX + "embed_tokens.weight", "Q8_0", g.vocab_size, d)
    yield _plain("output.weight", HEAD_NAME, "Q8_0", g.vocab_size, d)
    yield _plain("output_norm.weight", MODEL_PREFIX + "norm.weight", "F32", d)
    yield _folded("output_res_score.weight", MODEL_PREFIX + "output_attn_res_norm.weight", MODEL_PREFIX + "output_attn_res_proj.weight", d)


def _layer(g: Geometry, layer: int) -> Iterator[SpineTensor]:
    d, block, source = g.hidden_size, f"blk.{layer}.", f"{MODEL_PREFIX}layers.{layer}."
    yield _plain(block + "attn_norm.weight", source + "input_layernorm.weight", "F32", d)
    yield _plain(block + "ffn_norm.weight", source + "post_attention_layernorm.weight", "F32", d)
    yield _folded(block + "attn_res_score.weight", source + "self_attention_res_norm.weight", source + "self_attention_res_proj.weight", d)
    yield _folded(block + "ffn_res_score.weight", source + "mlp_res_norm.weight", source + "mlp_res_proj.weight", d)
    rows = _mla(g) if g.is_full_attention(layer) else _kda(g)
    yield from _prefixed(rows, block, source + "self_attn.")
    if layer < g.n_dense_layers:
        yield from _prefixed(_dense(g), block, source + "mlp.")
    else:
        yield from _prefixed(_moe(g), block, source + "block_sparse_moe.")


# One row: spine name, checkpoint name, storage, shape in the checkpoint.
_Row = tuple[str, str, Storage, tuple[int, ...]]


def _kda(g: Geometry) -> list[_Row]:
    d, p, heads, head = g.hidden_size, g.kda_size, g.kda_n_heads, g.kda_head_dim
    return [
        ("attn_q.weight", "q_proj.weight", "Q8_0", (p, d)),
        ("attn_k.weight", "k_proj.weight", "Q8_0", (p, d)),
        ("attn_v.weight", "v_proj.weight", "Q8_0", (p, d)),
        ("ssm_conv1d_q.weight", "q_conv1d.weight", "F32", (p, 1, g.conv_kernel_size)),
        ("ssm_conv1d_k.weight", "k_conv1d.weight", "F32", (p, 1, g.conv_kernel_size)),
        ("ssm_conv1d_v.weight", "v_conv1d.weight", "F32", (p, 1, g.conv_kernel_size)),
        ("ssm_f_a.weight", "f_a_proj.weight", "Q8_0", (head, d)),
        ("ssm_f_b.weight", "f_b_proj.weight", "Q8_0", (p, head)),
        ("ssm_beta.weight", "b_proj.weight", "Q8_0", (heads, d)),
        ("ssm_a", "A_log", "F32", (heads,)),
        ("ssm_dt.bias", "dt_bias", "F32", (p,)),
        ("ssm_g.weight", "g_proj.weight", "Q8_0", (p, d)),
        ("ssm_norm.weight", "o_norm.weight", "F32", (head,)),
        ("attn_output.weight", "o_proj.weight", "Q8_0", (d, p)),
    ]


def _mla(g: Geometry) -> list[_Row]:
    d, heads = g.hidden_size, g.n_heads
    rows: list[_Row] = [
        ("attn_q_a.weight", "q_a_proj.weight", "Q8_0", (g.q_lora_rank, d)),
        ("attn_q_a_norm.weight", "q_a_layernorm.weight", "F32", (g.q_lora_rank,)),
        ("attn_q_b.weight", "q_b_proj.weight", "Q8_0", (heads * (g.qk_nope_head_dim + g.qk_rope_head_dim), g.q_lora_rank)),
        ("attn_kv_a_mqa.weight", "kv_a_proj_with_mqa.weight", "Q8_0", (g.kv_lora_rank + g.qk_rope_head_dim, d)),
        ("attn_kv_a_norm.weight", "kv_a_layernorm.weight", "F32", (g.kv_lora_rank,)),
        ("attn_kv_b.weight", "kv_b_proj.weight", "Q8_0", (heads * (g.qk_nope_head_dim + g.v_head_dim), g.kv_lora_rank)),
        ("attn_gate.weight", "g_proj.weight", "Q8_0", (heads * g.v_head_dim, d)),
        ("attn_output.weight", "o_proj.weight", "Q8_0", (d, heads * g.v_head_dim)),
    ]
    if g.indexer is not None:
        rows += [
            ("indexer.attn_q_b.weight", "indexer.wq_b.weight", "Q8_0", (g.indexer.n_heads * g.indexer.head_dim, g.q_lora_rank)),
            ("indexer.attn_k.weight", "indexer.wk.weight", "Q8_0", (g.indexer.head_dim, d)),
            ("indexer.k_norm.weight", "indexer.k_norm.weight", "F32", (g.indexer.head_dim,)),
            ("indexer.k_norm.bias", "indexer.k_norm.bias", "F32", (g.indexer.head_dim,)),
            ("indexer.proj.weight", "indexer.weights_proj.weight", "Q8_0", (g.indexer.n_heads, d)),
        ]
    return rows


def _dense(g: Geometry) -> list[_Row]:
    d, wide = g.hidden_size, g.dense_intermediate_size
    return [
        ("ffn_gate.weight", "gate_proj.weight", "Q8_0", (wide, d)),
        ("ffn_up.weight", "up_proj.weight", "Q8_0", (wide, d)),
        ("ffn_down.weight", "down_proj.weight", "Q8_0", (d, wide)),
    ]


def _moe(g: Geometry) -> list[_Row]:
    d, wide = g.hidden_size, g.shared_intermediate_size
    return [
        ("ffn_gate_inp.weight", "gate.weight", "shipped", (g.n_experts, d)),
        ("exp_probs_b.bias", "gate.e_score_correction_bias", "F32", (g.n_experts,)),
        ("ffn_routed_down.weight", "routed_expert_down_proj.weight", "Q8_0", (g.latent_size, d)),
        ("ffn_routed_norm.weight", "routed_expert_norm.weight", "F32", (g.latent_size,)),
        ("ffn_routed_up.weight", "routed_expert_up_proj.weight", "Q8_0", (d, g.latent_size)),
        ("ffn_gate_shexp.weight", "shared_experts.gate_proj.weight", "Q8_0", (wide, d)),
        ("ffn_up_shexp.weight", "shared_experts.up_proj.weight", "Q8_0", (wide, d)),
        ("ffn_down_shexp.weight", "shared_experts.down_proj.weight", "Q8_0", (d, wide)),
    ]


def _prefixed(rows: list[_Row], block: str, source: str) -> Iterator[SpineTensor]:
    for name, from_name, storage, shape in rows:
        tensor = _plain(block + name, source + from_name, storage, *shape)
        # The key norm is a LayerNorm by all accounts, but whether its bias is shipped is not known.
        yield tensor._replace(rule="a_log" if name == "ssm_a" else "plain", is_optional=name == "indexer.k_norm.bias")


def _plain(name: str, source: str, storage: Storage, *shape: int) -> SpineTensor:
    return SpineTensor(name, shape, storage, "plain", (SourceTensor(source, shape),))


def _folded(name: str, norm: str, proj: str, size: int) -> SpineTensor:
    return SpineTensor(name, (size,), "F32", "fold", (SourceTensor(norm, (size,)), SourceTensor(proj, (1, size))))
