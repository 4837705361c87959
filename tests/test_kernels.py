"""Each kernel's plain-torch form against its formula in float64, and the properties that the model builds on."""

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from layout.mxfp4 import decode_mxfp4 as decode_mxfp4_numpy
from layout.q8_0 import decode_q8_0, split_q8_0
from layout.record import RecordLayout
from runtime.kernels.expert import expert_forward
from runtime.kernels.kda import kda_chunked, kda_recurrent, log_decay, short_conv
from runtime.kernels.mla import attend_absorbed, attend_expanded
from runtime.kernels.mxfp4 import decode_mxfp4
from runtime.kernels.norms import l2_norm, rms_norm
from runtime.kernels.q8_0 import expand_q8_0
from runtime.kernels.residual import mix_residuals
from runtime.kernels.router import choose_experts, combine_experts, expert_weights
from runtime.kernels.rows import TILE_ROWS, by_rows, forbid_tf32, linear
from runtime.kernels.sigmoid import sigmoid, silu, softplus
from runtime.kernels.situ import situ

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]),
]


@pytest.fixture(autouse=True)
def _real_float32() -> None:
    forbid_tf32()


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(scale).to(dtype)


def bits(x: Tensor) -> np.ndarray:
    """Return the bit patterns of float32 values, so that -0 differs from 0."""
    return x.detach().cpu().contiguous().numpy().view(np.uint32)


# Number formats


@pytest.mark.parametrize("device", DEVICES)
def test_mxfp4_equals_layout_for_every_byte_and_scale(device: str) -> None:
    packed = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    scale = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 16, axis=1)
    with np.errstate(over="ignore"):
        expected = decode_mxfp4_numpy(packed, scale)
    found = decode_mxfp4(torch.from_numpy(packed).to(device), torch.from_numpy(scale).to(device))
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(bits(found), expected.view(np.uint32))


def test_mxfp4_has_the_low_nibble_in_the_even_column_and_subnormal_scales() -> None:
    packed, scale = torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8)
    packed[0, 0] = 0x72  # low nibble 2 is 1.0, high nibble 7 is 6.0
    assert decode_mxfp4(packed, scale)[0, :3].tolist() == [2.0**-127, 6 * 2.0**-127, 0]


def test_mxfp4_scale_255_is_nan() -> None:
    values = decode_mxfp4(torch.full((1, 16), 0x22, dtype=torch.uint8), torch.full((1, 1), 255, dtype=torch.uint8))
    assert values.isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_q8_0_equals_layout(device: str) -> None:
    values = randn(7, 96).numpy() * np.logspace(-9, 4, 7, dtype=np.float32)[:, None]
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    quants, scales = split_q8_0(raw)
    found = expand_q8_0(torch.from_numpy(quants).to(device), torch.from_numpy(scales).to(device))
    np.testing.assert_array_equal(bits(found), decode_q8_0(raw).view(np.uint32))


# Rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n_in", "n_out"), [(96, 512), (7168, 64), (32, 4)])
def test_tiled_product_of_a_row_is_the_same_in_any_place_among_any_rows(n_in: int, n_out: int, device: str) -> None:
    weight, row = randn(n_out, n_in, seed=1).to(device), randn(1, n_in, seed=2).to(device)
    alone = linear(row[None], weight, is_tiled=True)[0, 0]
    for n_rows in (2, 5, 15, 16, 17, 40):
        for place in {0, 1, n_rows // 2, n_rows - 1}:
            rows = randn(n_rows, n_in, seed=n_rows).to(device)
            rows[place] = row[0]
            assert torch.equal(linear(rows[None], weight, is_tiled=True)[0, place], alone)


@pytest.mark.parametrize("is_tiled", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (2, 17), (3, 5)])
def test_product_is_that_of_float64(shape: tuple[int, int], is_tiled: bool) -> None:
    x, weight = randn(*shape, 96, seed=1), randn(40, 96, seed=2)
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(linear(x, weight, is_tiled=is_tiled), expected, rtol=0, atol=2e-5)


def test_rows_come_back_in_order_with_their_own_trailing_shape() -> None:
    x, y = randn(2, 19, 3, 4), randn(2, 19, 4, seed=1)
    seen = []

    def product(a: Tensor, b: Tensor) -> Tensor:
        seen.append((a.shape[0], a.is_contiguous()))
        return (a @ b.unsqueeze(-1)).squeeze(-1)

    found = by_rows(product, x.transpose(2, 3).contiguous().transpose(2, 3), y, is_tiled=True)
    assert seen == [(TILE_ROWS, True)] * 3
    torch.testing.assert_close(found, (x @ y.unsqueeze(-1)).squeeze(-1))


@pytest.mark.parametrize("function", [sigmoid, silu, softplus])
def test_elementwise_bits_do_not_depend_on_the_place_in_the_tensor(function) -> None:
    x = randn(4099, scale=4)
    whole = function(x)
    assert torch.equal(function(x[1:]), whole[1:])
    assert torch.equal(torch.cat([function(part) for part in x.split(7)]), whole)
    strided = torch.stack([x, x], dim=1)[:, 0]
    assert torch.equal(function(strided), whole)


@pytest.mark.parametrize(("function", "reference"), [(sigmoid, torch.sigmoid), (silu, F.silu), (softplus, F.softplus)])
def test_sigmoid_and_its_kin_are_right_and_have_gradients_at_all_sizes(function, reference) -> None:
    x = torch.cat([torch.tensor([-200.0, -90, -79, -20, -1e-3, 0, 1e-3, 20, 21, 90, 200]), randn(100, scale=8)]).requires_grad_()
    expected_x = x.detach().double().requires_grad_()
    function(x).sum().backward()
    reference(expected_x).sum().backward()
    torch.testing.assert_close(function(x), reference(expected_x).float(), rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(x.grad, expected_x.grad.float(), rtol=1e-6, atol=1e-6)


def test_forbid_tf32_undoes_a_lower_precision() -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    forbid_tf32()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32


# Norms, SiTU, residuals


@pytest.mark.parametrize("is_tiled", [False, True])
def test_rms_norm_by_hand(is_tiled: bool) -> None:
    x, gain = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]]]), torch.tensor([1.0, 2.0])
    found = rms_norm(x, gain, eps=0.5, is_tiled=is_tiled)
    torch.testing.assert_close(found, torch.tensor([[[3 / 13**0.5, 8 / 13**0.5]], [[0.0, 0.0]]]))


def test_l2_norm_has_its_eps_inside_the_root() -> None:
    x = torch.tensor([[[3e-3, 4e-3]]])
    torch.testing.assert_close(l2_norm(x, is_tiled=False), x / (25e-6 + 1e-6) ** 0.5)


def test_situ_caps_both_factors_but_not_the_sigmoid() -> None:
    gate, up = torch.tensor([100.0, -3.0, 0.0]), torch.tensor([1000.0, 30.0, 1.0])
    expected = [100.0, 4 * np.tanh(-0.75) / (1 + np.exp(3)) * 25 * np.tanh(1.2), 0.0]
    torch.testing.assert_close(situ(gate, up, beta=4.0, linear_beta=25.0), torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("is_tiled", [False, True])
def test_residuals_are_scored_normalised_and_mixed_raw(is_tiled: bool) -> None:
    bank, total, score = [randn(2, 5, 8, seed=n, scale=n) for n in (1, 2)], randn(2, 5, 8, seed=3, scale=9), randn(8, seed=4)
    sources = [v.double() for v in (*bank, total)]
    scores = torch.stack([(v / ((v * v).mean(-1, keepdim=True) + 1e-5).sqrt() * score.double()).sum(-1) for v in sources])
    share = torch.exp(scores) / torch.exp(scores).sum(0)
    expected = sum(s.unsqueeze(-1) * v for s, v in zip(share, sources, strict=True))
    torch.testing.assert_close(mix_residuals(bank, total, score, eps=1e-5, is_tiled=is_tiled), expected.float())


# Router


def test_router_takes_the_lowest_number_of_equals_and_returns_them_rising() -> None:
    scores = torch.zeros(1, 3, 40)
    scores[0, 0, [7, 39]] = 1.0
    scores[0, 2, [30, 20, 10]] = torch.tensor([3.0, 2.0, 1.0])
    assert choose_experts(scores, torch.zeros(40), 4)[0].tolist() == [[0, 1, 7, 39], [0, 1, 2, 3], [0, 10, 20, 30]]


def test_router_bias_decides_the_choice_and_not_the_weights() -> None:
    scores = torch.tensor([[[0.5, 0.25, 0.1, 0.9]]])
    ids = choose_experts(scores, torch.tensor([0.0, 1.0, 1.0, -1.0]), 2)
    assert ids.tolist() == [[[1, 2]]]
    found = expert_weights(scores, ids, scaling=2.0, is_tiled=True)
    torch.testing.assert_close(found, torch.tensor([[[0.5 / 0.35, 0.2 / 0.35]]]))


def test_expert_outputs_are_summed_one_by_one_in_the_order_given() -> None:
    outputs = torch.tensor([1e8, 1.0, -1e8, 1.0]).view(1, 1, 4, 1)
    assert combine_experts(outputs, torch.ones(1, 1, 4)).item() == 1.0
    assert combine_experts(outputs.flip(2), torch.tensor([[[3.0, 1.0, 1.0, 1.0]]])).item() == 0.0


def random_record(layout: RecordLayout, seed: int = 0) -> np.ndarray:
    """Return a record whose weights are around 1/8."""
    record = np.random.default_rng(seed).integers(0, 256, layout.n_bytes, dtype=np.uint8)
    for segment in layout.scale_segments:
        record[segment.offset : segment.end] = record[segment.offset : segment.end] % 4 + 121
    return record


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_tiled", [False, True])
def test_expert_is_w2_of_situ_of_w1_and_w3(is_tiled: bool, device: str) -> None:
    layout, z = RecordLayout(latent_size=32, intermediate_size=64), randn(5, 32)
    record = random_record(layout)

    def matrix(name: str) -> Tensor:
        packed, scale = (layout.segment(f"{name}.{part}") for part in ("packed", "scale"))
        parts = (record[s.offset : s.end].reshape(s.n_rows, s.n_cols) for s in (packed, scale))
        return torch.from_numpy(decode_mxfp4_numpy(*parts)).double()

    w1, w2, w3 = (matrix(name) for name in ("w1", "w2", "w3"))
    gate, up = z.double() @ w1.T, z.double() @ w3.T
    expected = (4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)) @ w2.T
    found = expert_forward(torch.from_numpy(record).to(device), layout, z.to(device), situ_beta=4.0, situ_linear_beta=25.0, is_tiled=is_tiled)
    torch.testing.assert_close(found.cpu(), expected.float(), rtol=1e-5, atol=1e-5)


# KDA


def kda_inputs(n_tok: int, *, dtype: torch.dtype, lower_bound: float | None = -5.0) -> tuple[Tensor, ...]:
    b, h, k, v = 2, 3, 8, 6
    q, key = (F.normalize(randn(b, n_tok, h, k, seed=seed, dtype=dtype), dim=-1) for seed in (1, 2))
    g = log_decay(randn(b, n_tok, h, k, seed=3, dtype=dtype, scale=3), randn(h, seed=4, dtype=dtype), lower_bound=lower_bound)
    beta = torch.sigmoid(randn(b, n_tok, h, seed=5, dtype=dtype))
    return q, key, randn(b, n_tok, h, v, seed=6, dtype=dtype), g, beta, randn(b, h, k, v, seed=7, dtype=dtype)


def test_kda_decays_then_writes_then_reads_the_new_memory() -> None:
    half = torch.tensor(0.5).log()
    q, k, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]), torch.tensor([10.0])
    memory, g = torch.tensor([[4.0], [8.0]]), torch.stack([half, half * 2])
    # Decayed [2, 2]; the value read at k is 2, the write 0.5 * (10 - 2) = 4, the memory [6, 2], the output 6 + 2 * 2.
    o, new = kda_recurrent(*(x.view(1, 1, 1, -1) for x in (q, k, v, g)), torch.tensor([[[0.5]]]), memory[None, None])
    torch.testing.assert_close(o.flatten(), torch.tensor([10.0]))
    torch.testing.assert_close(new.flatten(), torch.tensor([6.0, 2.0]))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("n_tok", [1, 2, 15, 16, 17, 47, 64])
def test_kda_chunked_equals_recurrent_in_float64(n_tok: int, lower_bound: float | None) -> None:
    inputs = kda_inputs(n_tok, dtype=torch.float64, lower_bound=lower_bound)
    for found, expected in zip(kda_chunked(*inputs), kda_recurrent(*inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("log_decay_per_token", [-5.0, -50.0])
def test_kda_chunked_is_finite_under_the_strongest_decay(log_decay_per_token: float) -> None:
    q, k, v, g, beta, memory = kda_inputs(40, dtype=torch.float32)
    inputs = [x.requires_grad_() for x in (q, k, v, torch.full_like(g, log_decay_per_token), beta, memory)]
    o, new = kda_chunked(*inputs)
    torch.testing.assert_close(o, kda_recurrent(*inputs)[0], rtol=1e-5, atol=1e-5)
    (o.sum() + new.sum()).backward()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_kda_recurrent_has_the_same_bits_for_any_split() -> None:
    *inputs, memory = kda_inputs(23, dtype=torch.float32)
    whole, _ = kda_recurrent(*inputs, memory)
    parts = []
    for start in range(0, 23, 7):
        o, memory = kda_recurrent(*(x[:, start : start + 7] for x in inputs), memory)
        parts.append(o)
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_short_conv_is_causal_and_weighs_the_current_token_last() -> None:
    u, past = torch.arange(1.0, 6).view(1, 5, 1), torch.tensor([[[10.0], [20.0], [30.0]]])
    y, new = short_conv(u, torch.tensor([[1000.0, 100.0, 10.0, 1.0]]), past)
    assert y.flatten().tolist() == [12301, 23012, 30123, 1234, 2345]
    assert new.flatten().tolist() == [3, 4, 5]


def test_short_conv_with_fewer_tokens_than_taps_keeps_the_older_inputs() -> None:
    _, new = short_conv(torch.ones(1, 1, 1), torch.ones(1, 4), torch.tensor([[[10.0], [20.0], [30.0]]]))
    assert new.flatten().tolist() == [20, 30, 1]


def test_log_decay_is_bounded_or_softplus() -> None:
    z, a_log = randn(1, 3, 2, 4, scale=5), torch.tensor([0.3, -1.2])
    a = torch.exp(a_log.double())[:, None]
    bounded, free = -5 * torch.sigmoid(a * z.double()), -a * F.softplus(z.double())
    torch.testing.assert_close(log_decay(z, a_log, lower_bound=-5.0), bounded.float())
    torch.testing.assert_close(log_decay(z, a_log, lower_bound=None), free.float())


# MLA


def mla_inputs(n_tok: int, n_past: int, *, b: int = 2, v: int = 6, rank: int = 10, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    h, n, r = 3, 8, 4
    q_nope, q_rot = randn(b, n_tok, h, n, seed=1, dtype=dtype), randn(b, n_tok, h, r, seed=2, dtype=dtype)
    latent, k_rot = randn(b, n_past + n_tok, rank, seed=3, dtype=dtype), randn(b, n_past + n_tok, r, seed=4, dtype=dtype)
    return q_nope, q_rot, latent, k_rot, randn(h, n + v, rank, seed=5, dtype=dtype)


@pytest.mark.parametrize(("n_tok", "n_past"), [(1, 0), (1, 9), (7, 0), (19, 5)])
def test_mla_absorbed_and_expanded_equal_the_formula(n_tok: int, n_past: int) -> None:
    q_nope, q_rot, latent, k_rot, kv_b = inputs = mla_inputs(n_tok, n_past)
    expected = torch.zeros(2, n_tok, 3, 6, dtype=torch.float64)
    for b, t, h in np.ndindex(2, n_tok, 3):
        known = slice(0, n_past + t + 1)
        kv = latent[b, known] @ kv_b[h].T
        scores = (kv[:, :8] @ q_nope[b, t, h] + k_rot[b, known] @ q_rot[b, t, h]) / 12**0.5
        expected[b, t, h] = torch.softmax(scores, 0) @ kv[:, 8:]
    torch.testing.assert_close(attend_absorbed(*inputs), expected)
    torch.testing.assert_close(attend_expanded(*inputs), expected)
    torch.testing.assert_close(attend_expanded(*inputs, n_query_rows=3), expected)


def test_mla_absorbed_has_the_same_bits_for_any_split() -> None:
    # v and rank are multiples of 32, as a geometry's are: a CPU product of 10 columns depends on a row's place even within a tile.
    q_nope, q_rot, latent, k_rot, kv_b = mla_inputs(21, 3, b=1, v=32, rank=32, dtype=torch.float32)
    whole = attend_absorbed(q_nope, q_rot, latent, k_rot, kv_b)
    for n in (1, 5, 16):
        parts = [
            attend_absorbed(q_nope[:, s : s + n], q_rot[:, s : s + n], latent[:, : 3 + s + n].clone(), k_rot[:, : 3 + s + n].clone(), kv_b)
            for s in range(0, 21, n)
        ]
        assert torch.equal(torch.cat(parts, dim=1), whole)


# Gradients


def _grad_inputs(*inputs: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in inputs]


@pytest.mark.parametrize("is_tiled", [False, True])
def test_gradients_of_row_kernels(is_tiled: bool) -> None:
    x, gain, weight = _grad_inputs(*(randn(*s, seed=n, dtype=torch.float64) for n, s in enumerate([(1, 3, 6), (6,), (4, 6)])))
    assert torch.autograd.gradcheck(lambda *a: rms_norm(*a, eps=1e-5, is_tiled=is_tiled), (x, gain))
    assert torch.autograd.gradcheck(lambda a: l2_norm(a, is_tiled=is_tiled), (x,))
    assert torch.autograd.gradcheck(lambda *a: linear(*a, is_tiled=is_tiled), (x, weight))
    assert torch.autograd.gradcheck(lambda a, b, c: mix_residuals([a], b, c, eps=1e-5, is_tiled=is_tiled), (x, 2 * x.detach() + 1, gain))
    assert torch.autograd.gradcheck(lambda a, b: situ(a, b, beta=4.0, linear_beta=25.0), (x, 1 - x.detach()))
    ids = torch.tensor([[[0, 2], [1, 5], [3, 4]]])
    assert torch.autograd.gradcheck(lambda a: expert_weights(sigmoid(a), ids, scaling=1.0, is_tiled=is_tiled), (x,))


@pytest.mark.parametrize("kernel", [kda_recurrent, kda_chunked])
def test_gradients_of_kda(kernel) -> None:
    # Two tokens into the second chunk.
    inputs = _grad_inputs(*(x[:1, :, :1, :2] for x in kda_inputs(18, dtype=torch.float64)[:4]))
    beta, memory = _grad_inputs(torch.full((1, 18, 1), 0.4, dtype=torch.float64), randn(1, 1, 2, 2, dtype=torch.float64))
    assert torch.autograd.gradcheck(kernel, (*inputs, beta, memory))


@pytest.mark.parametrize("kernel", [attend_absorbed, attend_expanded])
def test_gradients_of_mla(kernel) -> None:
    assert torch.autograd.gradcheck(kernel, tuple(_grad_inputs(*mla_inputs(3, 2))))
