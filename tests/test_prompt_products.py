"""What the prompt pass computes for many rows at once, against float64: its product, and its attention over a latent cache."""

import weakref

import pytest
import torch
from interpreted import accept_numpy_2_4, run_interpreted
from torch import Tensor

from runtime.kernels import prompt_q8_0
from runtime.kernels.launch import IS_INTERPRETED
from runtime.kernels.mla import attend_expanded
from runtime.kernels.products_check import random_q8_0
from runtime.kernels.prompt_mla import attend_by_heads, block_sizes
from runtime.kernels.prompt_q8_0 import columns_at_once, expand_halves, halves, q8_0_product_of_many, split_rows
from runtime.kernels.q8_0 import Q8Matrix, expand_q8_0, pack_q8_0

if IS_INTERPRETED:
    accept_numpy_2_4()

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu")
HAS_KERNELS = IS_INTERPRETED or DEVICE.type == "cuda"
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="kernels run on a GPU and under the interpreter")
# Of the result's root mean square.
TOLERANCE = 4e-6


@pytest.fixture
def source() -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(7)


def normal(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=source, device=DEVICE)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.isfinite().all() and ((found - expected).abs().max() <= TOLERANCE * expected.pow(2).mean().sqrt()).item()


@pytest.mark.parametrize(("n_cols", "at_once"), [(32, 32), (7168, 1024), (12288, 1024), (1536, 768), (33792, 1024), (2112, 704), (32 * 67, 32)])
def test_columns_are_cut_evenly(n_cols: int, at_once: int) -> None:
    assert columns_at_once(n_cols) == at_once


@pytest.mark.parametrize("scratch_bytes", [1, 30_000, 400_000_000])
@pytest.mark.parametrize(("m", "n", "k"), [(17, 4, 32), (33, 35, 96), (1, 48, 160), (20, 150, 2112)])
def test_product_agrees_with_float64(m: int, n: int, k: int, scratch_bytes: int, source: torch.Generator) -> None:
    w, x = random_q8_0(n, k, source), normal((m, k), source)
    assert_close(q8_0_product_of_many(x, w, scratch_bytes=scratch_bytes), x.double() @ w.expand().double().T)


@needs_kernels
def test_the_sums_of_some_rows_are_let_go_of_before_the_next_are_made(source: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    made, n_alive, real = list[weakref.ref[Tensor]](), list[int](), prompt_q8_0.expand_halves

    def expand(w: Q8Matrix, start: int, end: int) -> Tensor:
        n_alive.append(sum(sums() is not None for sums in made))
        return real(w, start, end)

    def keep(x: Tensor, w: Tensor) -> Tensor:
        sums = torch.bmm(x.float(), w.float().transpose(1, 2))
        made.append(weakref.ref(sums))
        return sums

    monkeypatch.setattr(prompt_q8_0, "expand_halves", expand)
    monkeypatch.setattr(prompt_q8_0, "_float32_sums", keep)
    q8_0_product_of_many(normal((20, 2112), source), random_q8_0(150, 2112, source), scratch_bytes=30_000)
    assert len(n_alive) > 2 and not any(n_alive)


@needs_kernels
@pytest.mark.parametrize("size", [1e-35, 1e-12, 1e12, 1e30])
def test_a_row_of_any_size_is_computed_as_exactly_as_the_others(size: float, source: torch.Generator) -> None:
    w, x = random_q8_0(20, 96, source), normal((18, 96), source)
    x[5] *= size
    found, expected = q8_0_product_of_many(x, w).double() / torch.where(torch.arange(18) == 5, size, 1.0).to(DEVICE)[:, None], x.double()
    expected[5] /= size
    assert_close(found, expected @ w.expand().double().T)


@needs_kernels
def test_what_is_in_other_rows_changes_no_bit_of_a_row(source: torch.Generator) -> None:
    w, x = random_q8_0(35, 96, source), normal((19, 96), source)
    expected = q8_0_product_of_many(x, w)[[0, 7, 18]]
    other = torch.full_like(x, torch.inf)
    other[3], other[4] = 1e30, torch.nan
    other[[0, 7, 18]] = x[[0, 7, 18]]
    found = q8_0_product_of_many(other, w)
    assert torch.equal(found[[0, 7, 18]], expected) and found[1].isnan().all() and found[4].isnan().all()


@needs_kernels
def test_a_row_of_zeros_gives_zeros(source: torch.Generator) -> None:
    assert not q8_0_product_of_many(torch.zeros(17, 64, device=DEVICE), random_q8_0(20, 64, source)).any()


def test_the_parts_of_a_row_hold_all_of_its_bits(source: torch.Generator) -> None:
    x = normal((9, 192), source) * torch.logspace(-20, 20, 9, device=DEVICE)[:, None]
    parts, factors = split_rows(x, 64)
    low, high, again = parts.view(3, 9, 3, 64).double().unbind(2)
    assert torch.equal(high, again)
    found = ((low + high).transpose(0, 1).flatten(1) * factors).double()
    largest = x.double().abs().amax(-1, keepdim=True)
    assert ((found - x.double()).abs() <= torch.maximum(x.double().abs() * 2.0**-23, largest * 2.0**-40)).all()
    assert torch.equal(torch.frexp(factors).mantissa, torch.full_like(factors, 0.5))


def matrix_with_scales(exponents: list[int], source: torch.Generator) -> Tensor:
    """Return blocks of Q8_0, one row each, with scales of odd fractions around powers of two, down to the least of float16."""
    blocks = torch.randint(0, 256, (len(exponents), 34), generator=source, device=DEVICE, dtype=torch.uint8)
    scales = torch.tensor([1.2345 * 2.0**e for e in exponents], device=DEVICE).half()
    blocks[:, :2] = scales.view(torch.uint8).view(-1, 2)
    return blocks


@pytest.mark.parametrize("exponents", [list(range(-24, -8)), list(range(-8, 8)), [-24, 8] * 10])
def test_the_parts_of_a_matrix_add_up_to_it_exactly(exponents: list[int], source: torch.Generator) -> None:
    w = pack_q8_0(matrix_with_scales(exponents, source))
    parts = expand_halves(w, 0, w.n_rows) if HAS_KERNELS else halves(w.expand()).unsqueeze(0)
    high, low, again = parts[0].view(-1, 3, 32).unbind(1)
    assert torch.equal(high.double() + low.double(), w.expand().double()) and torch.equal(high, again)


@needs_kernels
@pytest.mark.parametrize(("rows", "cols", "start", "end"), [(35, 96, 0, 35), (48, 2112, 16, 48), (20, 32, 16, 20)])
def test_a_part_of_a_matrix_is_written_out_as_in_plain_torch(rows: int, cols: int, start: int, end: int, source: torch.Generator) -> None:
    w, n_columns = random_q8_0(rows, cols, source), columns_at_once(cols)
    found = expand_halves(w, start, end)
    for cut, values in enumerate(w.expand()[start:end].split(n_columns, dim=1)):
        assert torch.equal(found[cut], halves(values))


@pytest.mark.parametrize("n_past", [0, 5])
@pytest.mark.parametrize(("n_tok", "score_bytes"), [(1, 1), (37, 1), (37, 3_000), (37, 100_000_000)])
def test_attention_by_heads_agrees_with_float64(n_tok: int, n_past: int, score_bytes: int, source: torch.Generator) -> None:
    n_heads, nope, rope, value, latents = 5, 16, 8, 24, 32
    q, latent, k_rot = (normal(shape, source) for shape in ((n_tok, n_heads, nope + rope), (n_past + n_tok, latents), (n_past + n_tok, rope)))
    quants, scales = random_q8_0(n_heads * (nope + value), latents, source).split()
    kv_b = quants.unflatten(0, (n_heads, -1)), scales.unflatten(0, (n_heads, -1))
    found = attend_by_heads(q, latent, k_rot, kv_b, score_bytes=score_bytes)
    q_nope, q_rot = q[None].double().split([nope, rope], dim=-1)
    matrix = expand_q8_0(quants, scales).double().unflatten(0, (n_heads, -1))
    assert_close(found, attend_expanded(q_nope, q_rot, latent[None].double(), k_rot[None].double(), matrix)[0])


@pytest.mark.parametrize(("n_tok", "n_seen"), [(1, 1), (2048, 2048), (2048, 100_000), (16, 1_000_000)])
def test_scores_fit_what_is_set_aside_for_them(n_tok: int, n_seen: int) -> None:
    n_queries, n_heads = block_sizes(n_tok, n_seen, 96, 100_000_000)
    assert n_queries >= 1 and n_heads >= 1
    assert 8 * n_queries * n_heads * n_seen <= 100_000_000 or (n_queries <= 16 and n_heads == 1)


@pytest.mark.skipif(IS_INTERPRETED, reason="this is the run under the interpreter")
def test_kernels_pass_under_the_interpreter() -> None:
    run_interpreted(__file__, "-k", "product or part or row")


@pytest.mark.skipif(IS_INTERPRETED, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize("n_columns", [32, 1792])
def test_the_kernel_compiles_for_a_gpu(n_columns: int) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from runtime.kernels.launch import OPTIONS
    from runtime.kernels.prompt_q8_0 import _halves_kernel

    types = {"data": "*u8", "parts": "*fp16", "n_rows": "i32", "n_blocks": "i32", "C": "constexpr", "AT_ONCE": "constexpr"}
    source = ASTSource(_halves_kernel, types, {"C": n_columns, "AT_ONCE": 128})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **OPTIONS}).asm["cubin"]
