"""The fused operations of decode against their plain forms in float64, and row for row against themselves.

On a CPU these tests see the plain forms in float32. `test_kernels_under_the_interpreter` runs this file once more in a process where Triton's
interpreter executes the kernels, and a GPU runs them as they are. Wherever a kernel leaves an output unwritten, a NaN is found there.
"""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interpreted import accept_numpy_2_4, run_interpreted
from torch import Tensor

import runtime.kernels.kda
import runtime.kernels.launch as launch
import runtime.kernels.mla
import runtime.kernels.norms
import runtime.kernels.residual
import runtime.kernels.router
import runtime.kernels.sigmoid
import runtime.kernels.situ
from runtime.kernels.kda import kda_decode, kda_decode_, kda_recurrent
from runtime.kernels.launch import constexpr, jit, tensor, tl
from runtime.kernels.mla import SPLIT_POSITIONS, attend_absorbed, mla_decode_
from runtime.kernels.norms import l2_norm, rms_norm, rms_norm_gated
from runtime.kernels.q8_0 import expand_q8_0
from runtime.kernels.residual import MAX_SOURCES, add_mix_and_norm_, mix_and_norm, mix_residuals
from runtime.kernels.router import combine_and_norm, combine_experts, route
from runtime.kernels.rows import forbid_tf32
from runtime.kernels.sigmoid import exp_f32, expm1_f32, gate_by_sigmoid, sigmoid_f32, silu_f32, softplus_f32
from runtime.kernels.situ import situ_f32, situ_halves, tanh_f32

if launch.IS_INTERPRETED:
    accept_numpy_2_4()

# Half a unit in the last place of float32: what one rounding costs.
U = 2.0**-24
# No chain of dependent additions in a kernel is longer: up to 32 in a thread, then a tree over threads and warps.
DEPTH = 48
ROW_COUNTS = (1, 2, 3, 5, 8, 13, 16)
KERNEL_MODULES = [
    runtime.kernels.kda, runtime.kernels.mla, runtime.kernels.norms, runtime.kernels.residual, runtime.kernels.router, runtime.kernels.sigmoid,
    runtime.kernels.situ,
]  # fmt: skip
only_cpu = pytest.mark.skipif(launch.IS_INTERPRETED, reason="starts or needs the compiler, not the interpreter")


@pytest.fixture(autouse=True)
def _fills_what_is_empty_with_nan() -> Iterator[None]:
    forbid_tf32()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@only_cpu
def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__)


@only_cpu
def test_without_triton_the_plain_forms_remain() -> None:
    script = "import sys; sys.modules['triton'] = None; import runtime.model, runtime.kernels.launch as launch; assert not launch.HAS_TRITON"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(scale).float()


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x: Any) -> Any:
    """Return the tensors in x as float64 on the CPU, where the plain forms take them."""
    if isinstance(x, Tensor):
        return x.cpu().double() if x.is_floating_point() else x.cpu()
    return [exact(y) for y in x] if isinstance(x, list) else x


def on(device: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.to(device) for x in tensors)


def assert_near(found: Tensor, expected: Tensor, atol: float | Tensor) -> None:
    """Every element within `atol`, one number or one for each; no NaN."""
    assert found.dtype == torch.float32 and found.shape == expected.shape
    error = (found.cpu().double() - expected).abs()
    assert (error <= torch.as_tensor(atol)).all(), (error / torch.as_tensor(atol).clamp(min=1e-300)).max().item()


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Bit for bit, NaN and the sign of 0 too."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    as_bits = torch.int32 if found.dtype == torch.float32 else found.dtype
    assert torch.equal(found.contiguous().view(as_bits), expected.contiguous().view(as_bits))


# Elementwise functions


@jit()
def _apply(x: tensor, y: tensor, WHICH: constexpr, BLOCK: constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at)
    if WHICH == 0:
        out = exp_f32(v)
    elif WHICH == 1:
        out = expm1_f32(v)
    elif WHICH == 2:
        out = sigmoid_f32(v)
    elif WHICH == 3:
        out = silu_f32(v)
    elif WHICH == 4:
        out = softplus_f32(v)
    elif WHICH == 5:
        out = tanh_f32(v)
    else:
        out = situ_f32(v, v * 3.0, 4.0, 25.0)
    tl.store(y + at, out)


def applied(which: int, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _apply[(x.numel() // 1024,)](x, y, which, 1024, num_warps=4, **launch.OPTIONS)
    return y


def needs_kernels(device: str) -> None:
    if device == "cpu" and not launch.IS_INTERPRETED:
        pytest.skip("tests what only a kernel calls")


@pytest.mark.parametrize(
    ("which", "function", "low", "high", "n_ulp"),
    [
        (0, torch.exp, -86.9, 87.9, 2),
        (1, torch.expm1, 0.0, 80.0, 3),
        (2, torch.sigmoid, -79.0, 100.0, 3),
        (3, lambda x: x * torch.sigmoid(x), -79.0, 100.0, 4),
        (4, lambda x: x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())), -80.0, 100.0, 4),
        (5, torch.tanh, -12.0, 12.0, 4),
        (6, lambda x: 4 * torch.tanh(x / 4) * torch.sigmoid(x) * 25 * torch.tanh(3 * x / 25), -60.0, 60.0, 14),
    ],
)
def test_functions_of_the_kernels_are_right_to_a_few_units(which: int, function: Callable, low: float, high: float, n_ulp: int, device: str) -> None:
    needs_kernels(device)
    small = torch.logspace(-30, 1, 1024) * (1 if low >= 0 else torch.tensor([1.0, -1.0]).repeat(512))
    x = torch.cat([torch.linspace(low, high, 4096), small.clamp(low, high), torch.linspace(max(low, -1.0), 1.0, 1024)])
    expected = function(x.double())
    found = applied(which, x.to(device)).cpu()
    unit = torch.from_numpy(np.spacing(expected.float().abs().numpy())).double()
    assert_near(found, expected, n_ulp * unit)


def test_functions_of_the_kernels_at_the_ends(device: str) -> None:
    needs_kernels(device)
    x = torch.zeros(1024)
    x[:6] = torch.tensor([-math.inf, -1000.0, 1000.0, math.inf, math.nan, -0.0])
    found = [applied(which, x.to(device)).cpu()[:6] for which in (0, 2, 4, 5)]
    cap = math.exp(88)
    expected = [
        [0, 0, cap, cap, math.nan, 1],
        [0, 0, 1, 1, math.nan, 0.5],
        [0, 0, 1000, math.inf, math.nan, math.log(2)],
        [-1, -1, 1, 1, math.nan, 0],
    ]
    for one, values in zip(found, expected, strict=True):
        torch.testing.assert_close(one, torch.tensor(values, dtype=torch.float32), equal_nan=True, rtol=1e-6, atol=1e-30)


# Operations on rows: each takes rows [1, n, ...] and parameters


def fused_norm(x: Tensor, gain: Tensor) -> Tensor:
    return rms_norm(x, gain, eps=1e-5, is_tiled=True)


def fused_l2(x: Tensor) -> Tensor:
    return l2_norm(x, is_tiled=True)


def fused_gated_norm(x: Tensor, gate: Tensor, gain: Tensor) -> Tensor:
    return rms_norm_gated(x, gain, gate, eps=1e-5, is_tiled=True)


def fused_situ(gate_up: Tensor) -> Tensor:
    return situ_halves(gate_up, beta=4.0, linear_beta=25.0)


def fused_mix(first: Tensor, second: Tensor, total: Tensor, score: Tensor, gain: Tensor) -> Tensor:
    return torch.cat(mix_and_norm(torch.stack([first, second]), total, score, gain, eps=1e-5, is_tiled=True), -1)


def fused_route(logits: Tensor, bias: Tensor) -> Tensor:
    ids, weights = route(logits, bias, 5, scaling=2.5, is_tiled=True)
    return torch.cat([ids.to(torch.float32), weights], -1)


def fused_combine(outputs: Tensor, weights: Tensor, gain: Tensor) -> Tensor:
    return combine_and_norm(outputs, weights, gain, eps=1e-5, is_tiled=True)


ROW_OPERATIONS = [
    pytest.param(fused_norm, [(200,)], [(200,)], id="rms_norm"),
    pytest.param(fused_l2, [(3, 33)], [], id="l2_norm"),
    pytest.param(fused_gated_norm, [(3, 96), (3, 96)], [(96,)], id="rms_norm_gated"),
    pytest.param(fused_situ, [(2 * 70,)], [], id="situ_halves"),
    pytest.param(fused_mix, [(100,), (100,), (100,)], [(100,), (100,)], id="mix_and_norm"),
    pytest.param(fused_route, [(77,)], [(77,)], id="route"),
    pytest.param(fused_combine, [(5, 100), (5,)], [(100,)], id="combine_and_norm"),
    pytest.param(gate_by_sigmoid, [(100,), (100,)], [], id="gate_by_sigmoid"),
]


@pytest.mark.parametrize(("operation", "shapes", "parameters"), ROW_OPERATIONS)
def test_a_row_has_the_same_bits_in_any_place_among_any_rows(operation: Callable, shapes: list, parameters: list, device: str) -> None:
    fixed = [randn(*shape, seed=90 + n).to(device) for n, shape in enumerate(parameters)]
    row = [randn(1, 1, *shape, seed=n).to(device) for n, shape in enumerate(shapes)]
    alone = operation(*row, *fixed)[0, 0]
    assert not alone.isnan().any()
    others = [randn(1, 16, *shape, seed=50 + n).to(device) for n, shape in enumerate(shapes)]
    cases = [(n, place, factor) for n in ROW_COUNTS for place in sorted({0, n // 2, n - 1}) for factor in (1.0, 0.0, math.nan)]
    # Every fifth keeps all counts, places and factors; the interpreter is slow.
    for n_rows, place, factor in cases[:: 5 if launch.IS_INTERPRETED else 1]:
        block = [other[:, :n_rows] * factor for other in others]
        for target, mine in zip(block, row, strict=True):
            target[0, place] = mine[0, 0]
        assert_same(operation(*block, *fixed)[0, place], alone)


@pytest.mark.parametrize(("operation", "shapes", "parameters"), ROW_OPERATIONS)
def test_a_part_of_a_wider_product_counts_as_its_copy(operation: Callable, shapes: list, parameters: list, device: str) -> None:
    fixed = [randn(*shape, seed=90 + n).to(device) for n, shape in enumerate(parameters)]
    flat = [math.prod(shape) for shape in shapes]
    # 32 elements lie before, between and behind the parts.
    wide = randn(1, 3, sum(flat) + 32 * (len(flat) + 1)).to(device)
    starts = [32 * (n + 1) + sum(flat[:n]) for n in range(len(flat))]
    parts = [wide[..., start : start + size].unflatten(-1, shape) for start, size, shape in zip(starts, flat, shapes, strict=True)]
    assert_same(operation(*parts, *fixed), operation(*(part.contiguous() for part in parts), *fixed))


@pytest.mark.parametrize("scale", [30, 1e-3])
@pytest.mark.parametrize("shape", [(2, 3, 1), (2, 3, 100), (1, 2, 1536), (2, 2, 3, 33)])
def test_norms_are_those_of_float64(shape: tuple[int, ...], scale: float, device: str) -> None:
    x, gain, gate = on(device, randn(*shape, seed=1, scale=scale), randn(shape[-1], seed=2), randn(*shape, seed=3))
    # Half the sum's relative error, and the square, mean, root, quotient and three products.
    expected = rms_norm(exact(x), exact(gain), eps=1e-5, is_tiled=False)
    assert_near(fused_norm(x, gain), expected, (DEPTH / 2 + 8) * U * expected.abs())
    expected = rms_norm_gated(exact(x), exact(gain), exact(gate), eps=1e-5, is_tiled=False)
    assert_near(fused_gated_norm(x, gate, gain), expected, (DEPTH / 2 + 16) * U * expected.abs())
    expected = l2_norm(exact(x), is_tiled=False)
    assert_near(fused_l2(x), expected, (DEPTH / 2 + 8) * U * expected.abs())


@pytest.mark.parametrize("size", [1, 70, 1100])
def test_situ_and_gating_are_those_of_float64(size: int, device: str) -> None:
    (gate_up,) = on(device, randn(1, 2, 2 * size, scale=20))
    expected = fused_situ(exact(gate_up))
    assert_near(fused_situ(gate_up), expected, 32 * U * expected.abs() + 1e-37)
    x, gate = gate_up.split(size, dim=-1)
    expected = exact(x) * torch.sigmoid(exact(gate))
    assert_near(gate_by_sigmoid(x, gate), expected, 8 * U * expected.abs() + 1e-33)


def mix_tolerance(sources: Tensor, score: Tensor, eps: float) -> Tensor:
    """Return the error of the mixture per row [B, T, 1]: of the scores, through the softmax, times the values; float64 [n, B, T, size]."""
    rms = (sources**2).mean(-1, keepdim=True).add(eps).sqrt()
    score_error = ((sources / rms * score).abs().sum(-1) * (1.5 * DEPTH + 8) * U).amax(0)
    return ((2 * score_error + 24 * U) * sources.abs().amax((0, -1))).unsqueeze(-1)


@pytest.mark.parametrize(("n_bank", "size"), [(1, 100), (3, 1), (8, 260), (MAX_SOURCES - 1, 33)])
def test_mixture_and_its_norm_are_those_of_float64(n_bank: int, size: int, device: str) -> None:
    bank, total, score, gain = on(
        device, randn(n_bank, 2, 3, size, scale=3), randn(2, 3, size, seed=1), randn(size, seed=2) / size**0.5, randn(size, seed=3)
    )
    mixed, normed = mix_and_norm(bank, total, score, gain, eps=1e-5, is_tiled=True)
    expected, expected_normed = mix_and_norm(exact(bank), exact(total), exact(score), exact(gain), eps=1e-5, is_tiled=False)
    tolerance = mix_tolerance(torch.cat([exact(bank), exact(total)[None]]), exact(score), 1e-5)
    assert_near(mixed, expected, tolerance)
    # The norm divides by the root mean square, and its own sum adds its error.
    rms = (expected**2).mean(-1, keepdim=True).add(1e-5).sqrt()
    assert_near(normed, expected_normed, exact(gain).abs() * (2 * tolerance / rms + DEPTH * U * expected.abs() / rms))
    assert_same(mix_residuals(list(bank), total, score, eps=1e-5, is_tiled=True), mixed)


def test_bank_may_be_the_corner_of_a_larger_buffer(device: str) -> None:
    buffer, total, score, gain = on(device, randn(9, 1, 16, 64), randn(1, 5, 64, seed=1), randn(64, seed=2), randn(64, seed=3))
    buffer[3:], buffer[:, :, 5:] = math.nan, math.nan
    corner = buffer[:3, :, :5]
    found = mix_and_norm(corner, total, score, gain, eps=1e-5, is_tiled=True)
    expected = mix_and_norm(corner.contiguous(), total, score, gain, eps=1e-5, is_tiled=True)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_running_sum_may_be_added_to_on_the_way(device: str) -> None:
    bank, total, wide, score, gain = on(
        device, randn(3, 1, 5, 100), randn(1, 5, 100, seed=1), randn(1, 5, 264, seed=2), randn(100, seed=3), randn(100, seed=4)
    )
    first, second = wide[..., 32:132], wide[..., 164:]
    for addends, sum_of_them in (([first], first), ([first, second], first + second)):
        found_total, expected_total = total.clone(), total + sum_of_them
        found = add_mix_and_norm_(bank, found_total, addends, score, gain, eps=1e-5)
        expected = mix_and_norm(bank, expected_total, score, gain, eps=1e-5, is_tiled=True)
        for one, other in zip((found_total, *found), (expected_total, *expected), strict=True):
            assert_same(one, other)


# Router


@pytest.mark.parametrize(("n_experts", "n_chosen"), [(1, 1), (16, 4), (77, 5), (896, 16)])
def test_route_chooses_and_weighs_as_float64_does(n_experts: int, n_chosen: int, device: str) -> None:
    logits, bias = on(device, randn(2, 3, n_experts, scale=2), rand(n_experts, seed=1) / 8)
    ids, weights = route(logits, bias, n_chosen, scaling=2.5, is_tiled=True)
    expected_ids, expected = route(exact(logits), exact(bias), n_chosen, scaling=2.5, is_tiled=False)
    assert ids.dtype == torch.int64 and torch.equal(ids.cpu(), expected_ids)
    assert_near(weights, expected, (DEPTH + 8) * U * expected)


def test_route_takes_the_lower_number_of_equals_and_survives_nan(device: str) -> None:
    logits, bias = torch.zeros(1, 3, 40), torch.zeros(40)
    logits[0, 1, [7, 39]] = 1.0
    bias[20] = -0.0
    logits[0, 2, 5], logits[0, 2, 9] = math.nan, -math.nan
    ids, weights = route(*on(device, logits, bias), 4, scaling=1.0, is_tiled=True)
    # A NaN counts as the highest, as torch sorts.
    assert ids[0].tolist() == [[0, 1, 2, 3], [0, 1, 7, 39], [0, 1, 5, 9]]
    assert weights[0, 0].tolist() == [0.25] * 4 and weights[0, 2].isnan().all()


def test_bias_changes_the_choice_and_not_the_weights(device: str) -> None:
    logits, bias = torch.zeros(1, 1, 40), torch.zeros(40)
    logits[0, 0, 3], bias[30], bias[3] = -2.0, 1.0, 1.0
    ids, weights = route(*on(device, logits, bias), 2, scaling=1.0, is_tiled=True)
    share = torch.sigmoid(torch.tensor(-2.0)).item() / (torch.sigmoid(torch.tensor(-2.0)).item() + 0.5)
    assert ids[0, 0].tolist() == [3, 30]
    torch.testing.assert_close(weights[0, 0].cpu(), torch.tensor([share, 1 - share]))


@pytest.mark.parametrize(("n_chosen", "size"), [(1, 33), (4, 64), (16, 300)])
def test_combination_and_its_norm_are_those_of_float64(n_chosen: int, size: int, device: str) -> None:
    outputs, weights, gain = on(device, randn(2, 3, n_chosen, size), rand(2, 3, n_chosen, seed=1), randn(size, seed=2))
    expected = combine_and_norm(exact(outputs), exact(weights), exact(gain), eps=1e-5, is_tiled=False)
    total = combine_experts(exact(outputs), exact(weights))
    rms = (total**2).mean(-1, keepdim=True).add(1e-5).sqrt()
    error = (n_chosen + 1) * U * (exact(outputs) * exact(weights).unsqueeze(-1)).abs().sum(-2)
    largest = error.amax(-1, keepdim=True)
    tolerance = exact(gain).abs() * (error + total.abs() / rms * largest + (DEPTH / 2 + 8) * U * total.abs()) / rms
    assert_near(fused_combine(outputs, weights, gain), expected, tolerance)


def test_combination_adds_in_expert_order(device: str) -> None:
    # In another order a 1 is lost beside 2^25.
    values = torch.tensor([2.0**25, -(2.0**25), 1.0, 1.0])
    outputs = values[None, None, :, None].expand(1, 1, 4, 64).contiguous()
    found = fused_combine(*on(device, outputs, torch.ones(1, 1, 4), torch.full((64,), 10.0)))
    torch.testing.assert_close(found.cpu(), torch.full((1, 1, 64), 20 / math.sqrt(4 + 1e-5)))


# KDA


class Kda:
    """Inputs of a KDA step: n_tok tokens of `batch` texts, heads of `size`."""

    def __init__(self, n_tok: int, *, batch: int = 1, n_heads: int = 3, size: int = 32, n_taps: int = 4, lower_bound: float | None = -5.0) -> None:
        width = n_heads * size
        self.new = [randn(batch, n_tok, 3 * width, seed=1), randn(batch, n_tok, width, seed=2), randn(batch, n_tok, n_heads, seed=3)]
        self.state = [randn(batch, n_taps - 1, 3 * width, seed=4), randn(batch, n_heads, size, size, seed=5, scale=0.3)]
        self.fixed: dict[str, Any] = {
            "kernel": randn(3 * width, n_taps, seed=6, scale=0.5),
            "dt_bias": randn(width, seed=7),
            "a_log": randn(n_heads, seed=8, scale=0.5),
        }
        self.bound = {"lower_bound": lower_bound}

    def to(self, device: str) -> "Kda":
        self.new, self.state = [x.to(device) for x in self.new], [x.to(device) for x in self.state]
        self.fixed = {name: x.to(device) for name, x in self.fixed.items()}
        return self

    def run(self, first: int = 0, end: int | None = None, state: list[Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return o, memory, past of a part of the tokens."""
        return kda_decode(*(x[:, first:end] for x in self.new), *(state or self.state), **self.fixed, **self.bound)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize(("n_tok", "batch", "size", "n_taps"), [(1, 1, 32, 4), (5, 2, 96, 4), (17, 1, 32, 3)])
def test_kda_step_is_that_of_float64(n_tok: int, batch: int, size: int, n_taps: int, lower_bound: float | None, device: str) -> None:
    step = Kda(n_tok, batch=batch, size=size, n_taps=n_taps, lower_bound=lower_bound).to(device)
    o, memory, past = step.run()
    fixed = {name: exact(x) for name, x in step.fixed.items()}
    expected_o, expected_memory, expected_past = kda_decode(*exact(step.new), *exact(step.state), **fixed, **step.bound)
    # Keys have length 1 and decays are at most 1, so that errors add up and do not grow: per token those of two sums over keys, and
    # those of q, k, v and the decay, whose exponent is at most 5 in size.
    largest = max(exact(step.state)[1].abs().max(), expected_memory.abs().max()).item() * math.sqrt(size)
    assert_near(memory, expected_memory, n_tok * (2 * DEPTH + 16) * U * largest)
    assert_near(o, expected_o, n_tok * (2 * DEPTH + 16) * U * largest)
    assert_same(past.cpu(), expected_past.float())


def test_kda_recurrence_alone_is_that_of_float64(device: str) -> None:
    q, k, v, g, beta, memory = on(
        device, randn(2, 3, 5, 48), randn(2, 3, 5, 48, seed=1) / 7, randn(2, 3, 5, 33, seed=2), -rand(2, 3, 5, 48, seed=3), rand(2, 3, 5, seed=4),
        randn(2, 5, 48, 33, seed=5),
    )  # fmt: skip
    found = kda_recurrent(q, k, v, g, beta, memory)
    for one, other in zip(found, kda_recurrent(*(exact(x) for x in (q, k, v, g, beta, memory))), strict=True):
        assert_near(one, other, 3 * (2 * DEPTH + 16) * U * other.abs().max().item())


@pytest.mark.parametrize("n_heads", [2, 96])
def test_kda_block_equals_its_tokens_one_by_one(n_heads: int, device: str) -> None:
    if n_heads > 2 and device == "cpu":
        pytest.skip("full size needs a GPU")
    step = Kda(16, n_heads=n_heads, size=32 if n_heads == 2 else 128).to(device)
    state, singles = step.state, []
    for t in range(16):
        o, memory, past = step.run(t, t + 1, state)
        state = [past, memory]
        singles.append(o)
    for n_tok in ROW_COUNTS:
        o, memory, past = step.run(0, n_tok)
        assert_same(o, torch.cat(singles[:n_tok], dim=1))
    assert_same(memory, state[1])
    assert_same(past, state[0])


def test_kda_token_does_not_see_later_ones(device: str) -> None:
    step = Kda(13).to(device)
    expected = step.run()[0]
    for value in (0.0, math.nan):
        for x in step.new:
            x[:, 5:] = value
        assert_same(step.run()[0][:, :5], expected[:, :5])


def test_kda_in_place_equals_the_functional_form(device: str) -> None:
    for n_tok in (1, 2, 5):
        step = Kda(n_tok, batch=2, n_heads=1).to(device)
        o, memory, past = step.run()
        before = [x.clone() for x in step.state]
        step.run()
        assert_same(step.state[0], before[0])
        assert_same(step.state[1], before[1])
        assert_same(kda_decode_(*step.new, *step.state, **step.fixed, **step.bound), o)
        assert_same(step.state[0], past)
        assert_same(step.state[1], memory)


def test_kda_takes_parts_of_one_wide_product(device: str) -> None:
    step = Kda(5).to(device)
    expected = step.run()
    wide = torch.cat([step.new[0], randn(1, 5, 32).to(device), step.new[2], randn(1, 5, 29).to(device)], dim=-1)
    step.new[0], step.new[2] = wide[..., : step.new[0].shape[-1]], wide[..., step.new[0].shape[-1] + 32 :][..., :3]
    for one, other in zip(step.run(), expected, strict=True):
        assert_same(one, other)


# MLA


class Mla:
    """Inputs of an MLA step of n_tok tokens after n_past, with a cache of `room` positions; what is not known yet is NaN."""

    def __init__(
        self, n_past: int, n_tok: int, *, room: int = 270, n_heads: int = 3, nope: int = 32, rope: int = 16, values: int = 48, latents: int = 96
    ) -> None:
        self.q, self.kv = randn(n_tok, n_heads, nope + rope, seed=1), randn(n_tok, latents + rope, seed=2)
        self.latent, self.k_rot = randn(room, latents, seed=3), randn(room, rope, seed=4)
        self.latent[n_past:], self.k_rot[n_past:] = math.nan, math.nan
        rng = np.random.default_rng(5)
        quants = torch.from_numpy(rng.integers(-128, 128, (n_heads, nope + values, latents), dtype=np.int8))
        self.q8_0 = quants, torch.from_numpy(rng.uniform(1e-4, 2e-3, (n_heads, nope + values, latents // 32)).astype(np.float16))
        self.gain, self.gate = randn(latents, seed=6), randn(n_tok, n_heads, values, seed=7)
        self.past = torch.tensor([n_past], dtype=torch.int32)

    @property
    def kv_b(self) -> Tensor:
        quants, scales = self.q8_0
        return expand_q8_0(quants.flatten(0, 1), scales.flatten(0, 1)).view(quants.shape)

    def to(self, device: str) -> "Mla":
        for name in ("q", "kv", "latent", "k_rot", "gain", "gate", "past"):
            setattr(self, name, getattr(self, name).to(device))
        self.q8_0 = tuple(x.to(device) for x in self.q8_0)
        return self

    def run(self, *, n_tok: int | None = None, kv_b: Any = None, has_gate: bool = True) -> Tensor:
        """Return the first n_tok tokens' outputs; the caches change."""
        gate = self.gate[:n_tok] if has_gate else None
        kv_b = self.q8_0 if kv_b is None else kv_b
        return mla_decode_(self.q[:n_tok], self.kv[:n_tok], self.latent, self.k_rot, self.past, kv_b=kv_b, gain=self.gain, eps=1e-6, gate=gate)


def assert_mla_near(found: Tensor, expected: Tensor, q: Tensor, kv_b: Tensor, latent: Tensor, k_rot: Tensor) -> None:
    """Compare [T, H, V]: errors of the scores act through the softmax on values no larger than the largest that any position has."""
    q, kv_b, latent, k_rot = (exact(x) for x in (q, kv_b, latent, k_rot))
    n_nope = q.shape[-1] - k_rot.shape[-1]
    w_k, w_v = kv_b[:, :n_nope], kv_b[:, n_nope:]
    reach = torch.einsum("thn,hnl->thl", q[..., :n_nope].abs(), w_k.abs()) @ latent.abs().T + q[..., n_nope:].abs() @ k_rot.abs().T
    score_error = (3 * DEPTH + 8) * U * reach.amax(-1) * q.shape[-1] ** -0.5
    largest = torch.einsum("hvl,sl->hvs", w_v.abs(), latent.abs()).amax(-1)
    assert_near(found, expected, (2 * score_error + (3 * DEPTH + 24) * U).unsqueeze(-1) * largest)


@pytest.mark.parametrize("is_q8_0", [True, False])
@pytest.mark.parametrize(("n_past", "n_tok"), [(0, 1), (0, 3), (SPLIT_POSITIONS - 1, 2), (SPLIT_POSITIONS, 1), (255, 5)])
def test_mla_step_is_that_of_float64(n_past: int, n_tok: int, is_q8_0: bool, device: str) -> None:
    step = Mla(n_past, n_tok)
    kv_b = step.kv_b
    latent, k_rot = exact(step.latent), exact(step.k_rot)
    expected = mla_decode_(
        exact(step.q), exact(step.kv), latent, k_rot, step.past, kv_b=exact(kv_b), gain=exact(step.gain), eps=1e-6, gate=exact(step.gate)
    )
    step.to(device)
    found = step.run(kv_b=None if is_q8_0 else kv_b.to(device))
    end = n_past + n_tok
    assert step.latent[end:].isnan().all() and step.k_rot[end:].isnan().all() and step.past.tolist() == [n_past]
    assert_near(step.latent[:end], latent[:end], (DEPTH / 2 + 8) * U * latent[:end].abs())
    assert_same(step.k_rot[:end].cpu(), k_rot[:end].float())
    assert_mla_near(found, expected, step.q, kv_b, latent[:end], k_rot[:end])


def test_mla_with_q8_0_equals_its_expansion(device: str) -> None:
    step = Mla(130, 3).to(device)
    found, expected = step.run(), step.run(kv_b=step.kv_b)
    if device == "cpu":
        assert_same(found, expected)
    else:
        # Triton lays bytes and floats out over the threads in other ways, and with them the order of the sums.
        torch.testing.assert_close(found, expected, rtol=0, atol=8 * U * float(expected.abs().max()))


def test_mla_without_gate(device: str) -> None:
    step = Mla(10, 2).to(device)
    torch.testing.assert_close(step.run(has_gate=False) * torch.sigmoid(step.gate), step.run(), rtol=8 * U, atol=0)


@pytest.mark.parametrize("n_heads", [1, 96])
def test_mla_block_equals_its_tokens_one_by_one_in_any_room(n_heads: int, device: str) -> None:
    if n_heads > 1 and device == "cpu":
        pytest.skip("full size needs a GPU")
    # The block crosses the border between two splits.
    n_past, sizes = 120, {"n_heads": n_heads} | ({"nope": 128, "rope": 64, "values": 128, "latents": 512} if n_heads > 1 else {})
    found, singles = Mla(n_past, 16, **sizes).to(device).run(), []
    step = Mla(n_past, 16, room=SPLIT_POSITIONS + 10, **sizes).to(device)
    for t in range(16):
        step.past.fill_(n_past + t)
        gate = step.gate[t : t + 1]
        row = mla_decode_(
            step.q[t : t + 1], step.kv[t : t + 1], step.latent, step.k_rot, step.past, kv_b=step.q8_0, gain=step.gain, eps=1e-6, gate=gate
        )
        singles.append(row)
    assert_same(found, torch.cat(singles))
    for n_tok in ROW_COUNTS[:-1]:
        assert_same(Mla(n_past, 16, **sizes).to(device).run(n_tok=n_tok), found[:n_tok])


def test_mla_token_does_not_see_later_ones(device: str) -> None:
    expected = Mla(125, 5, n_heads=2).to(device).run()
    for value in (0.0, math.nan):
        step = Mla(125, 5, n_heads=2).to(device)
        for x in (step.q, step.kv, step.gate):
            x[2:] = value
        assert_same(step.run()[:2], expected[:2])


def test_attention_over_a_grown_cache_is_that_of_float64(device: str) -> None:
    step = Mla(140, 4)
    latent, k_rot = randn(2, 144, 96, seed=3), randn(2, 144, 16, seed=4)
    q = torch.stack([step.q, step.q.flip(0)])
    q_nope, q_rot = q.split([32, 16], dim=-1)
    found = attend_absorbed(*on(device, q_nope, q_rot, latent, k_rot, step.kv_b))
    expected = attend_absorbed(*(exact(x) for x in (q_nope, q_rot, latent, k_rot, step.kv_b)))
    for text in range(2):
        assert_mla_near(found[text], expected[text], q[text], step.kv_b, latent[text], k_rot[text])


# What only a GPU, or only a compiler, shows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_one_graph_serves_all_positions() -> None:
    step, kda = Mla(0, 2).to("cuda"), Kda(2).to("cuda")
    start = [x.clone() for x in kda.state]

    def run() -> tuple[Tensor, Tensor]:
        return step.run(), kda_decode_(*kda.new, *kda.state, **kda.fixed, **kda.bound)

    run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        attended, o = run()
    for x, before in zip(kda.state, start, strict=True):
        x.copy_(before)
    for n_past in (0, 127, 250):
        expected = Mla(n_past, 2).to("cuda")
        step.latent.copy_(expected.latent)
        step.k_rot.copy_(expected.k_rot)
        step.past.fill_(n_past)
        expected_o, memory, past = kda.run()
        graph.replay()
        assert_same(attended, expected.run())
        assert_same(o, expected_o)
        assert_same(kda.state[0], past)
        assert_same(kda.state[1], memory)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_one_binary_serves_all_row_counts() -> None:
    def n_binaries() -> int:
        kernels = [x for name in KERNEL_MODULES for x in vars(name).values() if hasattr(x, "device_caches")]
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    counts = []
    for n_tok in ROW_COUNTS:
        launch_all("cuda", n_tok)
        counts.append(n_binaries())
    assert counts[0] > 0 and len(set(counts)) == 1


def launch_all(device: str, n_tok: int) -> None:
    """Launch every kernel at the tiny model's kind of sizes."""
    for parameter in ROW_OPERATIONS:
        operation, shapes, parameters = parameter.values
        operation(*(randn(1, n_tok, *shape).to(device) for shape in shapes), *(randn(*shape).to(device) for shape in parameters))
    h, bank, gain = randn(1, n_tok, 64).to(device), randn(3, 1, n_tok, 64).to(device), randn(64).to(device)
    for addends in ([h], [h, h]):
        add_mix_and_norm_(bank, h.clone(), addends, gain, gain, eps=1e-5)
    for lower_bound in (-5.0, None):
        Kda(n_tok, lower_bound=lower_bound).to(device).run()
    step = Mla(100, n_tok).to(device)
    step.run()
    step.run(kv_b=step.kv_b, has_gate=False)


@only_cpu
def test_compiled_kernels_fuse_nothing_and_are_special_to_no_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    compiled = []

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        types = {torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64", torch.int8: "*i8", torch.float16: "*fp16"}
        signature, constants, aligned = {}, {}, {}
        for n, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
            if parameter.is_constexpr:
                signature[parameter.name], constants[(n,)] = "constexpr", value
            elif isinstance(value, Tensor):
                assert value.data_ptr() % 16 == 0
                signature[parameter.name], aligned[(n,)] = types[value.dtype], [["tt.divisibility", 16]]
            else:
                # Else Triton would compile again for 1 and for multiples of 16.
                assert isinstance(value, float) or parameter.do_not_specialize, parameter.name
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        assert options["enable_fp_fusion"] is False
        source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
        compiled.append((kernel.__name__, triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(launch, "IS_INTERPRETED", True)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    launch_all("cpu", 3)
    kernels = {name for module in KERNEL_MODULES for name, x in vars(module).items() if name.endswith("_kernel") and x.__module__ == module.__name__}
    assert {name for name, _ in compiled} == kernels
    assert all("fma.rn" not in code.asm["ptx"] for _, code in compiled)
