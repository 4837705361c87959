"""The indexer's kernels and attention to selected positions against their plain forms, and row for row against themselves.

On a CPU these tests see the plain forms. `test_kernels_under_the_interpreter` runs this file once more in a process where Triton's interpreter
executes the kernels, and a GPU runs them as they are.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from interpreted import accept_numpy_2_4, run_interpreted
from torch import Tensor

import runtime.kernels.launch as launch
from runtime.kernels.indexer import append_index_keys_, attend_selected, index_keys, select_in_cache, select_positions
from runtime.kernels.mla import SPLIT_POSITIONS, attend_in_cache
from runtime.kernels.q8_0 import expand_q8_0
from runtime.kernels.rows import forbid_tf32

if launch.IS_INTERPRETED:
    accept_numpy_2_4()

only_cpu = pytest.mark.skipif(launch.IS_INTERPRETED, reason="starts the interpreter")


@pytest.fixture(autouse=True)
def _fills_what_is_empty_with_nan() -> Iterator[None]:
    forbid_tf32()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@only_cpu
def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


def whole(*shape: int, seed: int, high: int) -> Tensor:
    """Small whole numbers: their products and sums are exact, and many are equal."""
    return torch.randint(-high, high + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def past(n: int, device: str) -> Tensor:
    return torch.tensor([n], dtype=torch.int32, device=device)


# Keys


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("n_past", "n_tok", "size"), [(0, 1, 32), (5, 3, 96), (7, 20, 128)])
def test_new_keys_are_normalised_and_nothing_else_is_written(n_past: int, n_tok: int, size: int, has_bias: bool, device: str) -> None:
    # A part of a wider product.
    k = (3 * randn(n_tok, size + 64) + 1).to(device)[:, 32 : size + 32]
    gain, bias, cache = randn(size, seed=1).to(device), randn(size, seed=2).to(device), randn(n_past + n_tok + 9, size, seed=3).to(device)
    cache[n_past:] = math.nan
    before = cache.clone()
    append_index_keys_(k, cache, past(n_past, device), gain=gain, bias=bias if has_bias else None, eps=1e-5)
    expected = index_keys(k[None].double(), gain.double(), bias.double() if has_bias else None, eps=1e-5, is_tiled=False)[0]
    assert torch.equal(cache[:n_past], before[:n_past]) and cache[n_past + n_tok :].isnan().all()
    torch.testing.assert_close(cache[n_past : n_past + n_tok].double(), expected, rtol=0, atol=3e-6)


def test_a_key_has_the_same_bits_among_any_others(device: str) -> None:
    k, gain, bias = (randn(*shape, seed=n).to(device) for n, shape in enumerate([(16, 128), (128,), (128,)]))
    arguments = {"gain": gain, "bias": bias, "eps": 1e-5}
    alone, among = (torch.zeros(20, 128, device=device) for _ in range(2))
    append_index_keys_(k[5:6], alone, past(8, device), **arguments)
    for value in (1.0, 0.0, math.nan):
        others = k * value
        others[5] = k[5]
        append_index_keys_(others, among, past(3, device), **arguments)
        assert torch.equal(among[8], alone[8])


# Selection


SELECTIONS = [(0, 12, 4), (20, 9, 8), (3, 10, 6), (30, 1, 31), (30, 1, 30), (5, 4, 100), (SPLIT_POSITIONS - 2, 5, 70), (300, 2, 150)]


@pytest.mark.parametrize(("n_past", "n_tok", "n_most"), SELECTIONS)
def test_the_highest_are_selected_and_of_equals_the_lower_position(n_past: int, n_tok: int, n_most: int, device: str) -> None:
    n_seen = n_past + n_tok
    q, weights, k = whole(n_tok, 3, 32, seed=1, high=1), whole(n_tok, 3, seed=2, high=2), whole(n_seen, 32, seed=3, high=1)
    # Some have only scores of 0, of either sign.
    k[::3] = 0
    expected = select_positions(q[None].double(), weights[None].double(), k[None].double(), n_most)[0]
    for room in (n_seen, n_seen + 1, n_seen + 200):
        cache = torch.full((room, 32), math.nan)
        cache[:n_seen] = k
        found = select_in_cache(*(x.to(device) for x in (q, weights, cache)), past(n_past, device), n_most).cpu()
        assert found.dtype == torch.int32 and found.shape == (n_tok, min(n_most, room))
        assert (found.diff() > 0).all() and found.max() < room
        for t in range(n_tok):
            n_chosen = min(n_most, n_past + t + 1)
            assert found[t, :n_chosen].tolist() == expected[t, :n_chosen].tolist()


def test_a_score_of_minus_0_ties_with_0(device: str) -> None:
    # The least number there is, times the scale, is 0 with its sign.
    q, weights, k = torch.ones(1, 1, 32), torch.full((1, 1), -(2.0**-149)), torch.full((20, 32), -1.0)
    k[:4] = 2.0**-5
    assert select_in_cache(*(x.to(device) for x in (q, weights, k)), past(19, device), 6).tolist() == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("n_heads", [1, 4, 17, 32])
def test_the_selection_is_that_of_float64(n_heads: int, device: str) -> None:
    q, weights, k = randn(3, n_heads, 128), randn(3, n_heads, seed=1), randn(150, 128, seed=2)
    expected = select_positions(q[None].double(), weights[None].double(), k[None].double(), 20)[0]
    found = select_in_cache(*(x.to(device) for x in (q, weights, k)), past(147, device), 20)
    assert found.tolist() == expected.tolist()


def test_a_row_s_selection_is_its_own_in_any_place_and_room(device: str) -> None:
    n_past, q, weights, k = 125, randn(9, 4, 32), randn(9, 4, seed=1), randn(150, 32, seed=2)
    q, weights, k = (x.to(device) for x in (q, weights, k))
    for place in (0, 4, 8):
        row = slice(place, place + 1)
        alone = select_in_cache(q[row], weights[row], k[: n_past + place + 1], past(n_past + place, device), 50)
        for value in (1.0, 0.0, math.nan):
            others, shares, cache = q * value, weights * value, k.clone()
            others[place], shares[place], cache[n_past + place + 1 :] = q[place], weights[place], math.nan
            assert torch.equal(select_in_cache(others, shares, cache, past(n_past, device), 50)[place], alone[0])


def test_a_score_that_is_no_number_is_above_all_and_positions_stay_valid(device: str) -> None:
    q, weights, k = randn(1, 4, 32), randn(1, 4, seed=1), randn(40, 32, seed=2)
    k[3], k[30] = math.nan, -torch.tensor(math.nan)
    found = select_in_cache(*(x.to(device) for x in (q, weights, k)), past(38, device), 5)[0].tolist()
    assert {3, 30} <= set(found) and found == sorted(set(found)) and found[-1] < 39
    everything_nan = select_in_cache(*(x.to(device) for x in (q, weights * math.nan, k)), past(38, device), 5)
    assert everything_nan.tolist() == [[0, 1, 2, 3, 4]]


# Attention


class Cache:
    """Queries of n_tok tokens after n_past, and a cache of `room` positions."""

    def __init__(self, device: str, n_past: int, n_tok: int, room: int) -> None:
        self.q, self.gate, self.past = randn(n_tok, 3, 48).to(device), randn(n_tok, 3, 48, seed=1).to(device), past(n_past, device)
        self.latent, self.k_rot = randn(room, 96, seed=2).to(device), randn(room, 16, seed=3).to(device)
        quants = torch.randint(-127, 128, (3, 80, 96), generator=torch.Generator().manual_seed(4), dtype=torch.int8)
        self.kv_b = quants.to(device), (torch.rand(3, 80, 3, generator=torch.Generator().manual_seed(5)) * 1e-3).half().to(device)

    def run(self, positions: Tensor | None, rows: slice = slice(None), past: Tensor | None = None) -> Tensor:
        gate, n_past = self.gate[rows], self.past if past is None else past
        return attend_in_cache(self.q[rows], self.latent, self.k_rot, n_past, kv_b=self.kv_b, gate=gate, positions=positions)


@pytest.mark.parametrize(("n_past", "n_tok", "n_most"), [(0, 3, 50), (126, 4, 300), (290, 5, 300)])
def test_while_all_positions_are_selected_attention_is_the_dense_one(n_past: int, n_tok: int, n_most: int, device: str) -> None:
    cache = Cache(device, n_past, n_tok, n_past + n_tok + 30)
    positions = torch.arange(min(n_most, n_past + n_tok + 30), dtype=torch.int32, device=device).expand(n_tok, -1).contiguous()
    found, expected = cache.run(positions), cache.run(None)
    # A GPU's bits have not been compared.
    assert torch.equal(found, expected) if device == "cpu" else (found - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize("n_most", [1, 8, SPLIT_POSITIONS, 150])
def test_attention_to_selected_positions_is_that_of_float64(n_most: int, device: str) -> None:
    n_past, n_tok = 200, 3
    cache = Cache(device, n_past, n_tok, 240)
    generator = torch.Generator().manual_seed(6)
    chosen = torch.stack([torch.randperm(n_past + t + 1, generator=generator)[:n_most].sort().values for t in range(n_tok)])
    found = cache.run(chosen.int().to(device))
    q_nope, q_rot = cache.q.cpu().double()[None].split([32, 16], dim=-1)
    seen = slice(n_past + n_tok)
    matrix = expand_q8_0(*(part.cpu().flatten(0, 1) for part in cache.kv_b)).view(3, 80, 96).double()
    cached = (x.cpu().double()[None, seen] for x in (cache.latent, cache.k_rot))
    expected = attend_selected(q_nope, q_rot, *cached, matrix, chosen[None])[0] * torch.sigmoid(cache.gate.cpu().double())
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=3e-6 * float(expected.abs().max()))


def test_what_is_not_selected_is_not_touched(device: str) -> None:
    cache = Cache(device, 200, 2, 210)
    chosen = torch.tensor([[0, 9, 127, 128, 200], [1, 9, 128, 199, 201]], dtype=torch.int32, device=device)
    expected = cache.run(chosen)
    is_other = torch.ones(210, dtype=torch.bool)
    is_other[chosen.flatten().cpu().long()] = False
    cache.latent[is_other], cache.k_rot[is_other] = math.nan, math.nan
    found = cache.run(chosen)
    assert torch.equal(found, expected) and found.isfinite().all()


def test_a_row_s_attention_has_the_same_bits_in_any_block(device: str) -> None:
    n_past, n_tok, n_most = 150, 7, 140
    cache = Cache(device, n_past, n_tok, 200)
    generator = torch.Generator().manual_seed(7)
    chosen = torch.stack([torch.randperm(n_past + t + 1, generator=generator)[:n_most].sort().values for t in range(n_tok)]).int().to(device)
    block = cache.run(chosen)
    for t in (0, 3, 6):
        row = slice(t, t + 1)
        assert torch.equal(cache.run(chosen[row], row, past(n_past + t, device)), block[row])
    clean, cache.q = cache.q, torch.full_like(cache.q, math.nan)
    cache.q[3] = clean[3]
    assert torch.equal(cache.run(chosen)[3], block[3])


# What only a GPU shows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_one_graph_serves_all_positions() -> None:
    n_most, n_tok, room = 64, 2, 3000
    cache, k = Cache("cuda", 0, n_tok, room), randn(room, 128, seed=8).cuda()
    q, weights = randn(n_tok, 32, 128, seed=9).cuda(), randn(n_tok, 32, seed=10).cuda()

    def run() -> tuple[Tensor, Tensor]:
        positions = select_in_cache(q, weights, k, cache.past, n_most)
        return positions, cache.run(positions)

    run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = run()
    for n_past in (0, 62, 63, 64, 500, room - n_tok):
        cache.past.fill_(n_past)
        graph.replay()
        for one, other in zip(captured, run(), strict=True):
            assert torch.equal(one, other)
