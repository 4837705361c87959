"""Bytes at rest: the expert record, MXFP4, Q8_0, the spine's GGUF, and the table of tensor names. Literal where a format is literal."""

import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors
import xxhash
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize

from layout.checkpoint import Checkpoint, open_checkpoint
from layout.gguf_header import GgufTensor, read_gguf_header
from layout.mxfp4 import decode_mxfp4
from layout.q8_0 import decode_q8_0, split_q8_0
from layout.record import RecordLayout, expert_file_name, parse_expert_file_name, record_layout
from layout.tensor_data import as_float32, raw_blocks, read_float_tensor
from layout.tensors import SpineTensor, expert_tensor, expert_tensor_names, is_vision, spine_tensors
from manifests.errors import BadInputError
from manifests.geometry import load_geometry
from prep.extraction.spine import SpineFile, write_spine

DATA = Path(__file__).parent / "data"


def bits(values: np.ndarray) -> np.ndarray:
    """Return the bit patterns of float32 values: they tell -0 from 0, and NaN from another NaN."""
    assert values.dtype == np.float32
    return np.ascontiguousarray(values).view(np.uint32)


# The record.


def test_segments_of_a_square_expert_lie_at_these_places() -> None:
    record = RecordLayout(latent_size=32, intermediate_size=32)
    assert [tuple(segment) for segment in record.segments] == [
        ("w1.packed", 0, 32, 16),
        ("w1.scale", 512, 32, 1),
        ("w2.packed", 544, 32, 16),
        ("w2.scale", 1056, 32, 1),
        ("w3.packed", 1088, 32, 16),
        ("w3.scale", 1600, 32, 1),
    ]
    assert record.n_bytes == 1632


def test_w2_maps_the_other_way() -> None:
    record = RecordLayout(latent_size=32, intermediate_size=64)
    assert [tuple(segment) for segment in record.segments] == [
        ("w1.packed", 0, 64, 16),
        ("w1.scale", 1024, 64, 1),
        ("w2.packed", 1088, 32, 32),
        ("w2.scale", 2112, 32, 2),
        ("w3.packed", 2176, 64, 16),
        ("w3.scale", 3200, 64, 1),
    ]
    assert record.n_bytes == 3264
    assert [s.name for s in record.scale_segments] == ["w1.scale", "w2.scale", "w3.scale"]


def test_the_published_expert_has_its_published_size() -> None:
    record = record_layout(load_geometry("k3.1"))
    assert [s.n_bytes for s in record.segments] == [5_505_024, 344_064] * 3
    assert record.n_bytes == 17_547_264 == 4284 * 4096


def test_a_hand_made_record_is_read_at_its_places() -> None:
    # Every nibble of w1 is 0.5, of w2 -1, of w3 6; the scales are 1, 2 and 4; row 5 of w2 begins with 1.5 and -0.5.
    raw = bytearray(b"\x11" * 512 + b"\x7f" * 32 + b"\xaa" * 512 + b"\x80" * 32 + b"\x77" * 512 + b"\x81" * 32)
    raw[512 + 32 + 5 * 16] = 0x93
    record = RecordLayout(latent_size=32, intermediate_size=32)

    def part(name: str) -> np.ndarray:
        segment = record.segment(name)
        return np.frombuffer(raw, np.uint8)[segment.offset : segment.end].reshape(segment.n_rows, segment.n_cols)

    w1, w2, w3 = (decode_mxfp4(part(f"{w}.packed"), part(f"{w}.scale")) for w in ("w1", "w2", "w3"))
    assert w1.shape == w2.shape == w3.shape == (32, 32)
    assert (w1 == 0.5).all() and (w3 == 24).all()
    assert w2[5, :3].tolist() == [3, -1, -2]
    assert (np.delete(w2.reshape(-1), [160, 161]) == -2).all()


@pytest.mark.parametrize(("layer", "expert", "name"), [(1, 0, "L1-E0.bin"), (92, 895, "L92-E895.bin")])
def test_an_expert_file_is_named_by_its_numbers(layer: int, expert: int, name: str) -> None:
    assert expert_file_name(layer, expert) == name
    assert parse_expert_file_name(name) == (layer, expert)


@pytest.mark.parametrize(
    "name", ["L01-E0.bin", "L1-E00.bin", "L1-E0.bin.partial", "L1-E0", "L-1-E0.bin", "l1-e0.bin", "L1-E٣.bin", "a/L1-E0.bin", "L1-E0.bin\n"]
)
def test_other_names_are_no_expert_files(name: str) -> None:
    assert parse_expert_file_name(name) is None


# MXFP4.


def e2m1(nibble: int) -> float:
    """The OCP formula: sign, two bits of exponent with bias 1, one bit of fraction; exponent 0 is subnormal."""
    exponent, fraction = (nibble >> 1) & 3, nibble & 1
    size = fraction * 0.5 if exponent == 0 else (1 + fraction * 0.5) * 2.0 ** (exponent - 1)
    return math.copysign(size, -1 if nibble & 8 else 1)


@pytest.mark.parametrize("scale", [0, 1, 126, 127, 128, 252, 253, 254])
def test_each_nibble_at_each_scale_is_what_the_formula_says(scale: int) -> None:
    # 16 bytes: the low nibbles count up, the high ones down.
    packed = np.array([[n | (15 - n) << 4 for n in range(16)]], np.uint8)
    expected = [e2m1(n) * 2.0 ** (scale - 127) for pair in zip(range(16), range(15, -1, -1), strict=True) for n in pair]
    with np.errstate(over="ignore"):
        # At the two largest scales, the larger elements are beyond float32, and infinite there.
        decoded, rounded = decode_mxfp4(packed, np.array([[scale]], np.uint8)), np.array(expected).astype(np.float32)
    assert (bits(decoded) == bits(rounded[None])).all()
    if scale <= 252:
        assert decoded[0].astype(np.float64).tolist() == expected


def test_the_low_nibble_is_the_even_column() -> None:
    packed = np.zeros((1, 16), np.uint8)
    packed[0, :3] = [0x21, 0x0F, 0x70]
    assert decode_mxfp4(packed, np.array([[127]], np.uint8))[0, :6].tolist() == [0.5, 1, -6, 0, 0, 6]


def test_a_scale_holds_for_32_columns_of_its_row() -> None:
    scale = np.array([[127, 128], [129, 130]], np.uint8)
    decoded = decode_mxfp4(np.full((2, 32), 0x22, np.uint8), scale)
    assert decoded.dtype == np.float32 and decoded.flags.c_contiguous
    assert decoded.tolist() == [[1] * 32 + [2] * 32, [4] * 32 + [8] * 32]


@pytest.mark.parametrize(
    ("packed", "scale", "fault"),
    [
        ((2, 16), [[127], [255]], "a scale byte is 255, which E8M0 defines as NaN"),
        ((2, 16), [[127]], r"packed \(2, 16\) and scale \(1, 1\) do not fit"),
        ((1, 32), [[127]], "do not fit"),
        ((1, 15), [[127]], "do not fit"),
        ((1, 24), [[127]], "do not fit"),
    ],
)
def test_nan_scales_and_shapes_that_do_not_fit_are_refused(packed: tuple[int, int], scale: list[list[int]], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        decode_mxfp4(np.zeros(packed, np.uint8), np.array(scale, np.uint8))


def test_rows_of_a_released_matrix_decode_to_their_values(request: pytest.FixtureRequest) -> None:
    path = request.config.getoption("--real-rows")
    if path is None:
        pytest.skip("rows of a released matrix are not shipped with the project; name their file: --real-rows FILE")
    tensors = read_safetensors(Path(path))
    packed, scale = (tensors[name].raw.reshape(tensors[name].shape) for name in ("weight_packed", "weight_scale"))
    expected = tensors["expected"].raw.view(np.float32).reshape(tensors["expected"].shape)
    assert (bits(decode_mxfp4(packed, scale)) == bits(expected)).all()
    # The rows can tell: with the nibbles exchanged they are others.
    assert (bits(decode_mxfp4(packed >> 4 | packed << 4, scale)) != bits(expected)).mean() > 0.5


# Q8_0.


def q8_0_block(scale: float, quants: list[int]) -> bytes:
    return struct.pack("<e32b", scale, *quants)


def test_a_q8_0_block_is_a_float16_and_32_signed_bytes() -> None:
    raw = np.frombuffer(q8_0_block(0.5, [*range(-16, 16)]) + q8_0_block(-2.0, [127, -128] * 16), np.uint8).reshape(1, 68)
    quants, scales = split_q8_0(raw)
    assert quants.tolist() == [[*range(-16, 16), *[127, -128] * 16]] and quants.dtype == np.int8
    assert scales.tolist() == [[0.5, -2]] and scales.dtype == np.float16
    assert decode_q8_0(raw).tolist() == [[n / 2 for n in range(-16, 16)] + [-254, 256] * 16]


@pytest.mark.parametrize(
    "blocks",
    [
        [q8_0_block(0.0, [*range(-128, -96)])],
        [q8_0_block(scale, [*range(-128, -112), *range(112, 128)]) for scale in (1.0, -1.0, 6e-8, 6.1e-5, 65504.0, 0.0999755859375)],
    ],
)
def test_edge_blocks_decode_as_ggml_decodes_them(blocks: list[bytes]) -> None:
    raw = np.frombuffer(b"".join(blocks), np.uint8).reshape(len(blocks), 34)
    assert (bits(decode_q8_0(raw)) == bits(dequantize(raw, GGMLQuantizationType.Q8_0))).all()


def test_random_rows_decode_as_ggml_decodes_them() -> None:
    rng = np.random.default_rng(4)
    values = rng.standard_normal((7, 96), np.float32) * np.exp2(rng.integers(-20, 12, (7, 1))).astype(np.float32)
    values[3] = 0
    raw = quantize(values, GGMLQuantizationType.Q8_0)
    assert raw.shape == (7, 102)
    assert (bits(decode_q8_0(raw)) == bits(dequantize(raw, GGMLQuantizationType.Q8_0))).all()


def test_bf16_f16_and_f32_expand_exactly() -> None:
    def expand(dtype: str, raw: bytes) -> list[float]:
        values: list[float] = as_float32(np.frombuffer(raw, np.uint8), dtype).tolist()
        return values

    assert expand("BF16", bytes.fromhex("803f00c00100807f")) == [1, -2, 2.0**-133, math.inf]
    assert expand("F16", bytes.fromhex("003c00c00100ff7b")) == [1, -2, 2.0**-24, 65504]
    assert expand("F32", bytes.fromhex("0000803f01000000")) == [1, 2.0**-149]


# The table of tensors, against the published list.


def test_the_published_model_has_the_published_tensors() -> None:
    g = load_geometry("k3")
    spine = spine_tensors(g)
    sources = [source for tensor in spine for source in tensor.sources]
    assert len({s.name for s in sources}) == len(sources) == 2460
    assert len({t.name for t in spine}) == len(spine)
    # With 82,432 experts of six tensors and 168 of the vision tower they are the 497,220 of the index.
    assert len(sources) + g.n_routed_experts * 6 + 168 == 497_220
    assert sum(math.prod(s.shape) for s in sources) == 56_743_645_792
    n_bytes = {"Q8_0": 34 / 32, "shipped": 2, "F32": 4}
    # Two residual vectors become one, in 93 layers twice and once at the end.
    assert sum(int(math.prod(t.shape) * n_bytes[t.storage]) for t in spine) == 60_889_657_728 - 187 * 7168 * 4


def of_layer(model: str, layer: int) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Return what the spine's tensors of a layer are made of, without the parts that all their names share."""
    source = f"language_model.model.layers.{layer}."
    return {
        t.name.removeprefix(f"blk.{layer}."): ("+".join(s.name.removeprefix(source) for s in t.sources), t.sources[-1].shape, t.storage)
        for t in spine_tensors(load_geometry(model))
        if t.name.startswith(f"blk.{layer}.")
    }


NORMS = {
    "attn_norm.weight": ("input_layernorm.weight", (7168,), "F32"),
    "ffn_norm.weight": ("post_attention_layernorm.weight", (7168,), "F32"),
    "attn_res_score.weight": ("self_attention_res_norm.weight+self_attention_res_proj.weight", (1, 7168), "F32"),
    "ffn_res_score.weight": ("mlp_res_norm.weight+mlp_res_proj.weight", (1, 7168), "F32"),
}
KDA = {
    "attn_q.weight": ("self_attn.q_proj.weight", (12288, 7168), "Q8_0"),
    "attn_k.weight": ("self_attn.k_proj.weight", (12288, 7168), "Q8_0"),
    "attn_v.weight": ("self_attn.v_proj.weight", (12288, 7168), "Q8_0"),
    "ssm_conv1d_q.weight": ("self_attn.q_conv1d.weight", (12288, 1, 4), "F32"),
    "ssm_conv1d_k.weight": ("self_attn.k_conv1d.weight", (12288, 1, 4), "F32"),
    "ssm_conv1d_v.weight": ("self_attn.v_conv1d.weight", (12288, 1, 4), "F32"),
    "ssm_f_a.weight": ("self_attn.f_a_proj.weight", (128, 7168), "Q8_0"),
    "ssm_f_b.weight": ("self_attn.f_b_proj.weight", (12288, 128), "Q8_0"),
    "ssm_beta.weight": ("self_attn.b_proj.weight", (96, 7168), "Q8_0"),
    "ssm_a": ("self_attn.A_log", (96,), "F32"),
    "ssm_dt.bias": ("self_attn.dt_bias", (12288,), "F32"),
    "ssm_g.weight": ("self_attn.g_proj.weight", (12288, 7168), "Q8_0"),
    "ssm_norm.weight": ("self_attn.o_norm.weight", (128,), "F32"),
    "attn_output.weight": ("self_attn.o_proj.weight", (7168, 12288), "Q8_0"),
}
MLA = {
    "attn_q_a.weight": ("self_attn.q_a_proj.weight", (1536, 7168), "Q8_0"),
    "attn_q_a_norm.weight": ("self_attn.q_a_layernorm.weight", (1536,), "F32"),
    "attn_q_b.weight": ("self_attn.q_b_proj.weight", (18432, 1536), "Q8_0"),
    "attn_kv_a_mqa.weight": ("self_attn.kv_a_proj_with_mqa.weight", (576, 7168), "Q8_0"),
    "attn_kv_a_norm.weight": ("self_attn.kv_a_layernorm.weight", (512,), "F32"),
    "attn_kv_b.weight": ("self_attn.kv_b_proj.weight", (24576, 512), "Q8_0"),
    "attn_gate.weight": ("self_attn.g_proj.weight", (12288, 7168), "Q8_0"),
    "attn_output.weight": ("self_attn.o_proj.weight", (7168, 12288), "Q8_0"),
}
INDEXER = {
    "indexer.attn_q_b.weight": ("self_attn.indexer.wq_b.weight", (4096, 1536), "Q8_0"),
    "indexer.attn_k.weight": ("self_attn.indexer.wk.weight", (128, 7168), "Q8_0"),
    "indexer.k_norm.weight": ("self_attn.indexer.k_norm.weight", (128,), "F32"),
    "indexer.k_norm.bias": ("self_attn.indexer.k_norm.bias", (128,), "F32"),
    "indexer.proj.weight": ("self_attn.indexer.weights_proj.weight", (32, 7168), "Q8_0"),
}
DENSE = {
    "ffn_gate.weight": ("mlp.gate_proj.weight", (33792, 7168), "Q8_0"),
    "ffn_up.weight": ("mlp.up_proj.weight", (33792, 7168), "Q8_0"),
    "ffn_down.weight": ("mlp.down_proj.weight", (7168, 33792), "Q8_0"),
}
MOE = {
    "ffn_gate_inp.weight": ("block_sparse_moe.gate.weight", (896, 7168), "shipped"),
    "exp_probs_b.bias": ("block_sparse_moe.gate.e_score_correction_bias", (896,), "F32"),
    "ffn_routed_down.weight": ("block_sparse_moe.routed_expert_down_proj.weight", (3584, 7168), "Q8_0"),
    "ffn_routed_norm.weight": ("block_sparse_moe.routed_expert_norm.weight", (3584,), "F32"),
    "ffn_routed_up.weight": ("block_sparse_moe.routed_expert_up_proj.weight", (7168, 3584), "Q8_0"),
    "ffn_gate_shexp.weight": ("block_sparse_moe.shared_experts.gate_proj.weight", (6144, 7168), "Q8_0"),
    "ffn_up_shexp.weight": ("block_sparse_moe.shared_experts.up_proj.weight", (6144, 7168), "Q8_0"),
    "ffn_down_shexp.weight": ("block_sparse_moe.shared_experts.down_proj.weight", (7168, 6144), "Q8_0"),
}


@pytest.mark.parametrize(
    ("model", "layer", "expected"),
    [
        ("k3", 0, NORMS | KDA | DENSE),
        ("k3", 1, NORMS | KDA | MOE),
        ("k3", 3, NORMS | MLA | MOE),
        ("k3", 91, NORMS | MLA | MOE),
        ("k3", 92, NORMS | MLA | MOE),
        ("k3.1", 90, NORMS | KDA | MOE),
        ("k3.1", 92, NORMS | MLA | INDEXER | MOE),
    ],
)
def test_a_layer_has_these_tensors(model: str, layer: int, expected: dict[str, tuple[str, tuple[int, ...], str]]) -> None:
    assert of_layer(model, layer) == expected


def test_the_tensors_of_no_layer_are_four() -> None:
    top = [(t.name, [s.name for s in t.sources], t.storage) for t in spine_tensors(load_geometry("k3")) if not t.name.startswith("blk.")]
    prefix = "language_model.model."
    assert top == [
        ("token_embd.weight", [prefix + "embed_tokens.weight"], "Q8_0"),
        ("output.weight", ["language_model.lm_head.weight"], "Q8_0"),
        ("output_norm.weight", [prefix + "norm.weight"], "F32"),
        ("output_res_score.weight", [prefix + "output_attn_res_norm.weight", prefix + "output_attn_res_proj.weight"], "F32"),
    ]


def test_experts_tensors_are_named_in_record_order() -> None:
    prefix = "language_model.model.layers.7.block_sparse_moe.experts.12."
    names = [prefix + part for part in ("w1.weight_packed", "w1.weight_scale", "w2.weight_packed", "w2.weight_scale", "w3.weight_packed",
                                        "w3.weight_scale")]  # fmt: skip
    assert expert_tensor_names(7, 12) == names
    assert expert_tensor(names[3]) == (7, 12, "w2.scale")


@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.layers.7.block_sparse_moe.experts.12.w4.weight_packed",
        "language_model.model.layers.7.block_sparse_moe.experts.12.w1.weight",
        "language_model.model.layers.7.block_sparse_moe.experts.12.w1.weight_packed2",
        "layers.7.block_sparse_moe.experts.12.w1.weight_packed",
        # Two names for one expert would hide that another is missing.
        "language_model.model.layers.7.block_sparse_moe.experts.012.w1.weight_packed",
        "language_model.model.layers.07.block_sparse_moe.experts.12.w1.weight_packed",
        "language_model.model.layers.7.block_sparse_moe.experts.١.w1.weight_packed",
    ],
)
def test_other_names_are_no_experts_tensors(name: str) -> None:
    assert expert_tensor(name) is None


def test_vision_is_known_by_its_prefix() -> None:
    assert is_vision("vision_tower.patch_embed.proj.weight") and is_vision("mm_projector.proj.0.weight")
    assert not is_vision("language_model.model.vision_tower.weight")


# The spine, read back by gguf-py.


class SourceTensor(NamedTuple):
    dtype: str
    shape: list[int]
    raw: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """Float32, expanded here and not by the code under test."""
        if self.dtype == "F32":
            return self.raw.view("<f4").reshape(self.shape)
        assert self.dtype == "BF16"
        halves = np.zeros((self.raw.size // 2, 2), "<u2")
        halves[:, 1] = self.raw.view("<u2")
        return halves.view("<f4").reshape(self.shape)


def read_safetensors(path: Path) -> dict[str, SourceTensor]:
    """Return all tensors of a file, by the format's own library."""
    found = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    return {name: SourceTensor(t["dtype"], t["shape"], np.frombuffer(bytes(t["data"]), np.uint8)) for name, t in found}


class Written(NamedTuple):
    checkpoint: Checkpoint
    source: dict[str, SourceTensor]
    path: Path
    outcome: SpineFile
    progress: list[tuple[str, int, int]]
    reader: GGUFReader

    def stored(self, tensor: SpineTensor) -> bytes:
        (found,) = [t for t in self.reader.tensors if t.name == tensor.name]
        return found.data.tobytes()


@pytest.fixture(scope="module", params=["tiny-k3", "tiny-k3.1"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    checkpoint, path = open_checkpoint(DATA / request.param), tmp_path_factory.mktemp("spine") / "spine.gguf"
    source: dict[str, SourceTensor] = {}
    for shard in DATA.joinpath(request.param).glob("model-*.safetensors"):
        source |= read_safetensors(shard)
    progress: list[tuple[str, int, int]] = []
    outcome = write_spine(checkpoint, path, expert_directories=["experts", "/mnt/b"], on_progress=lambda *step: progress.append(step))
    return Written(checkpoint, source, path, outcome, progress, GGUFReader(path))


def test_matrices_are_ggmls_q8_0_of_the_checkpoints_values(written: Written) -> None:
    matrices = [t for t in written.checkpoint.spine_tensors() if t.storage == "Q8_0"]
    assert len(matrices) > 60
    for tensor in matrices:
        values = written.source[tensor.sources[0].name].values
        assert written.stored(tensor) == quantize(values, GGMLQuantizationType.Q8_0).tobytes(), tensor.name


def test_vectors_are_the_checkpoints_values_and_folded_ones_their_product(written: Written) -> None:
    vectors = [t for t in written.checkpoint.spine_tensors() if t.storage == "F32"]
    assert {t.rule for t in vectors} == {"plain", "fold", "a_log"}
    for tensor in vectors:
        first, *rest = (written.source[s.name].values for s in tensor.sources)
        expected = first * rest[0][0] if rest else first
        assert expected.dtype == np.float32
        if tensor.rule == "a_log":
            expected = expected[: written.checkpoint.geometry.kda_n_heads]
        assert written.stored(tensor) == expected.tobytes(), tensor.name


def test_router_gates_are_the_shipped_bytes(written: Written) -> None:
    gates = [t for t in written.checkpoint.spine_tensors() if t.storage == "shipped"]
    assert len(gates) == len(written.checkpoint.geometry.moe_layers)
    for tensor in gates:
        assert written.stored(tensor) == written.source[tensor.sources[0].name].raw.tobytes()
    assert {t.tensor_type for t in written.reader.tensors if "ffn_gate_inp" in t.name} == {GGMLQuantizationType.BF16}


def test_the_spine_holds_every_tensor_once_each_at_a_page(written: Written) -> None:
    assert [t.name for t in written.reader.tensors] == [t.name for t in written.checkpoint.spine_tensors()]
    assert all(t.data_offset % 4096 == 0 for t in written.reader.tensors)
    assert any(t.n_bytes % 4096 for t in written.reader.tensors)
    data = written.path.read_bytes()
    assert (written.outcome.n_bytes, written.outcome.xxh3_128) == (len(data), xxhash.xxh3_128_hexdigest(data)) and len(data) % 4096 == 0
    assert [p.name for p in written.path.parent.iterdir()] == ["spine.gguf"]


def test_progress_ends_at_all_of_the_spines_source_bytes(written: Written) -> None:
    done = [n for _, n, _ in written.progress]
    total = sum(written.source[s.name].raw.size for t in written.checkpoint.spine_tensors() for s in t.sources)
    assert done == sorted(done) and done[-1] == total and {(what, n) for what, _, n in written.progress} == {("spine", total)}


def test_our_header_reader_agrees_with_gguf_pys(written: Written) -> None:
    header = read_gguf_header(written.path)
    theirs = [
        GgufTensor(t.name, t.tensor_type.name, tuple(reversed(t.shape.tolist())), int(t.data_offset), int(t.n_bytes)) for t in written.reader.tensors
    ]
    assert list(header.tensors.values()) == theirs and list(header.tensors) == [t.name for t in theirs]
    assert (header.alignment, header.data_offset) == (written.reader.alignment, written.reader.data_offset) == (4096, theirs[0].offset)
    keys = {name: field.contents() for name, field in written.reader.fields.items() if not name.startswith("GGUF.")}
    assert header.keys == keys


def test_the_spine_tells_its_model_and_its_origin(written: Written) -> None:
    keys, g = read_gguf_header(written.path).keys, written.checkpoint.geometry
    expected = {
        "general.architecture": "kimi-k3",
        "kimi-k3.block_count": g.n_layers,
        "kimi-k3.expert_count": g.n_experts,
        "kimi-k3.expert_used_count": g.n_experts_per_token,
        "kimi-k3.attention.head_count_kv": [int(layer in g.full_attention_layers) for layer in range(g.n_layers)],
        "kimi-k3.attention.key_length": 48,
        "kimi-k3.attention.key_length_mla": 48,
        "kimi-k3.attention.value_length": 32,
        "kimi-k3.kda.gate_lower_bound": -5.0,
        "kimi-k3.expert_weights_norm": True,
        "ktier.architecture": written.checkpoint.facts.architecture,
        "ktier.source_digest": written.checkpoint.digest,
        "ktier.record_layout": "w1.packed+w1.scale+w2.packed+w2.scale+w3.packed+w3.scale",
        "ktier.record_bytes": written.checkpoint.record.n_bytes,
        "ktier.nibbles": "low nibble is the even column",
        "ktier.scale": "E8M0, one per 32 columns",
        "ktier.ssm_a": "A_log",
        "ktier.expert_directory.primary": "experts",
        "ktier.expert_directory.secondary": "/mnt/b",
    }
    assert {name: keys.get(name) for name in expected} == expected
    assert "ktier.expert_directory.third" not in keys
    assert keys.get("kimi-k3.attention.indexer.top_k") == (g.indexer.top_k if g.indexer else None)


def test_gguf_dump_shows_the_spine(written: Written) -> None:
    done = subprocess.run([Path(sys.executable).with_name("gguf-dump"), written.path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for word in ("ktier.record_layout", "ktier.ssm_a", "ktier.source_digest", "ktier.expert_directory.primary", "token_embd.weight", "Q8_0", "BF16"):
        assert word in done.stdout


@pytest.mark.parametrize("block_bytes", [1, 255, 256, 1000, 1 << 20])
def test_a_tensor_comes_in_blocks_of_whole_rows(written: Written, block_bytes: int) -> None:
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    n_rows, n_cols = written.source[name].shape
    blocks = [block.copy() for block in raw_blocks(written.checkpoint, name, block_bytes=block_bytes)]
    assert np.concatenate(blocks).tobytes() == written.source[name].raw.tobytes()
    at_once = min(n_rows, max(1, block_bytes // (2 * n_cols)))
    assert [b.shape for b in blocks[:-1]] == [(at_once, 2 * n_cols)] * (math.ceil(n_rows / at_once) - 1)


def test_a_spine_tensor_is_read_as_float32_in_its_shape(written: Written) -> None:
    for tensor in written.checkpoint.spine_tensors():
        values = read_float_tensor(written.checkpoint, tensor)
        assert values.shape == tensor.shape and values.dtype == np.float32
        if tensor.rule == "plain":
            assert (bits(values) == bits(written.source[tensor.sources[0].name].values)).all()


# GGUF headers by hand.


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor_info(name: str, ne: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset)


def gguf_file(entries: list[bytes], infos: list[bytes], *, n_data: int = 0, alignment: int = 32, start: bytes = b"GGUF\3\0\0\0") -> bytes:
    header = start + struct.pack("<QQ", len(infos), len(entries)) + b"".join(entries) + b"".join(infos)
    return header + bytes(-len(header) % alignment + n_data)


SCALARS = [
    entry("u8", 0, b"\xff"), entry("i8", 1, b"\xff"), entry("u16", 2, b"\xff\xff"), entry("i16", 3, b"\xfe\xff"), entry("u32", 4, b"\1\0\0\0"),
    entry("i32", 5, b"\xff\xff\xff\xff"), entry("f32", 6, b"\0\0\x80\x3f"), entry("bool", 7, b"\1"), entry("text", 8, text("é")),
    entry("u64", 10, b"\1" + bytes(7)), entry("i64", 11, b"\xff" * 8), entry("f64", 12, struct.pack("<d", 0.1)),
    entry("list", 9, struct.pack("<IQ", 4, 2) + b"\7\0\0\0\x08\0\0\0"), entry("texts", 9, struct.pack("<IQ", 8, 2) + text("a") + text("")),
    entry("lists", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 0, 3) + b"\1\2\3"),
]  # fmt: skip
INFOS = [tensor_info("a", (64, 3), 8, 0), tensor_info("b", (5,), 0, 224), tensor_info("c", (2, 1, 4), 30, 256), tensor_info("d", (4,), 1, 288)]
N_DATA = 296


@pytest.fixture
def gguf_path(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(data: bytes) -> Path:
        path = tmp_path / "x.gguf"
        path.write_bytes(data)
        return path

    return write


GgufPath = Callable[[bytes], Path]


def test_a_header_made_by_hand_is_read(gguf_path: GgufPath) -> None:
    header = read_gguf_header(gguf_path(gguf_file(SCALARS, INFOS, n_data=N_DATA)))
    expected: dict[str, Any] = {
        "u8": 255, "i8": -1, "u16": 65535, "i16": -2, "u32": 1, "i32": -1, "f32": 1.0, "bool": True, "text": "é", "u64": 1, "i64": -1,
        "f64": 0.1, "list": [7, 8], "texts": ["a", ""], "lists": [[1, 2, 3]],
    }  # fmt: skip
    assert header.keys == expected and header.keys["bool"] is True
    at = header.data_offset
    assert header.alignment == 32 and at % 32 == 0
    assert list(header.tensors.values()) == [
        ("a", "Q8_0", (3, 64), at, 204), ("b", "F32", (5,), at + 224, 20), ("c", "BF16", (4, 1, 2), at + 256, 16), ("d", "F16", (4,), at + 288, 8),
    ]  # fmt: skip


def test_a_header_names_its_own_alignment(gguf_path: GgufPath) -> None:
    data = gguf_file([entry("general.alignment", 4, b"\0\x10\0\0")], INFOS[:1], n_data=204, alignment=4096)
    header = read_gguf_header(gguf_path(data))
    assert (header.alignment, header.data_offset, header.tensors["a"].offset) == (4096, 4096, 4096)


def test_a_gguf_file_that_was_cut_off_anywhere_is_refused(gguf_path: GgufPath) -> None:
    data = gguf_file(SCALARS, INFOS, n_data=N_DATA)
    path = gguf_path(data)
    for n_bytes in reversed(range(len(data))):
        os.truncate(path, n_bytes)
        with pytest.raises(BadInputError, match=rf"x\.gguf: not a usable GGUF file of {n_bytes} bytes: ") as caught:
            read_gguf_header(path)
        n_header = len(data) - N_DATA
        assert n_bytes < n_header or str(caught.value).endswith(f"its tensors need {len(data)} bytes: {len(data) - n_bytes} are missing")


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (gguf_file([], [], start=b"GGUX\3\0\0\0"), "does not begin with the mark of GGUF version 3"),
        (gguf_file([], [], start=b"GGUF\2\0\0\0"), "does not begin with the mark of GGUF version 3"),
        (gguf_file([], [], start=b"GGUF\0\0\0\3"), "does not begin with the mark of GGUF version 3"),
        (gguf_file([], [tensor_info("w", (32,), 12, 0)], n_data=99), "tensor w has the type number 12; known are [0, 1, 8, 30]"),
        (gguf_file([entry("k", 13, b"\0")], []), "unknown value type 13"),
        (gguf_file([entry("k", 9, struct.pack("<IQ", 77, 1))], []), "unknown value type 77"),
        (gguf_file([struct.pack("<Q", 1) + b"\xff" + struct.pack("<IB", 0, 0)], []), "utf-8"),
        (gguf_file([entry("k", 8, struct.pack("<Q", 1 << 60))], []), "the file ends inside the header"),
        (gguf_file([entry("general.alignment", 4, bytes(4))], []), "general.alignment"),
        (gguf_file([entry("general.alignment", 9, struct.pack("<IQ", 0, 0))], []), "general.alignment"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_usable_gguf_file_is_refused_with_the_reason(gguf_path: GgufPath, data: bytes, fault: str) -> None:
    with pytest.raises(BadInputError) as caught:
        read_gguf_header(gguf_path(data))
    assert fault in str(caught.value) and "x.gguf" in str(caught.value)


def test_a_gguf_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"absent\.gguf: cannot be read: No such file"):
        read_gguf_header(tmp_path / "absent.gguf")
