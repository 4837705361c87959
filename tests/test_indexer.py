"""K3.1 beyond its indexer's top_k: selection and attention against float64 written from the formulas, and dense attention while all is selected."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import runtime.model
from manifests.geometry import Geometry
from runtime.engine import Engine, Options
from runtime.kernels.indexer import attend_selected, index_keys, index_scores, select_positions
from runtime.kernels.mla import attend_absorbed
from runtime.kernels.rows import Arithmetic
from runtime.model import IndexedMlaState, Layer, Model, Weights, attention
from runtime.state import KdaState, MlaState, State

N_TOKENS, TOP_K = 40, 8
ARITHMETICS = pytest.mark.parametrize("arithmetic", list(Arithmetic))


@pytest.fixture(scope="module")
def engine(extractions: dict[str, Path], device: str) -> Iterator[Engine]:
    with Engine(extractions["tiny-k3.1"], Options(device=device), on_remark=lambda _: None) as engine:
        yield engine


def model_of(engine: Engine, top_k: int = TOP_K, weights: Weights | None = None) -> Model:
    g = engine.geometry
    assert g.indexer is not None
    return Model(replace(g, indexer=replace(g.indexer, top_k=top_k)), weights or engine.weights, engine.model.experts, is_long_context=True)


def text_of(engine: Engine, n_texts: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, engine.geometry.vocab_size, (n_texts, N_TOKENS), generator=generator).to(engine.device)


@torch.inference_mode()
def run(model: Model, ids: Tensor, arithmetic: Arithmetic, n_rows: int = N_TOKENS) -> tuple[Tensor, State]:
    """Return the logits of texts given n_rows tokens at a time, and the state after them."""
    state, parts = model.initial_state(ids.shape[0]), []
    for block in ids.split(n_rows, dim=1):
        logits, state = model.forward(block, state, arithmetic=arithmetic)
        parts.append(logits)
    return torch.cat(parts, dim=1), state


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# The formulas in numpy and float64, one token, head and position after another; nothing of the code under test is used.


def exhaustive_scores(q: np.ndarray, weights: np.ndarray, k: np.ndarray) -> list[float]:
    """Return one token's score of every position in k: q [I, D], weights [I], k [n, D]."""
    n_heads, size = q.shape
    return [sum(weights[i] * n_heads**-0.5 * size**-0.5 * max(0.0, float(q[i] @ key)) for i in range(n_heads)) for key in k]


def exhaustive_choice(scores: list[float], n_most: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda s: (-scores[s], s))[:n_most])


def mla_in_float64(weights: Weights, number: int, g: Geometry, x: np.ndarray) -> np.ndarray:
    """Return what an MLA layer with an indexer makes of a whole text: x [T, hidden] -> [T, hidden]."""

    def w(name: str) -> np.ndarray:
        return weights.matrix(f"blk.{number}.{name}.weight").double().cpu().numpy()

    def v(name: str) -> np.ndarray:
        return weights.vector(f"blk.{number}.{name}").double().cpu().numpy()

    def rms(y: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * gain

    assert g.indexer is not None
    n_tok, heads, nope, size = len(x), g.n_heads, g.qk_nope_head_dim, g.kv_lora_rank
    low = rms(x @ w("attn_q_a").T, v("attn_q_a_norm.weight"))
    q = (low @ w("attn_q_b").T).reshape(n_tok, heads, -1)
    kv = x @ w("attn_kv_a_mqa").T
    k_rot = kv[:, size:]
    keys_values = (rms(kv[:, :size], v("attn_kv_a_norm.weight")) @ w("attn_kv_b").T).reshape(n_tok, heads, -1)
    index_q = (low @ w("indexer.attn_q_b").T).reshape(n_tok, g.indexer.n_heads, -1)
    index_k = x @ w("indexer.attn_k").T
    index_k = (index_k - index_k.mean(-1, keepdims=True)) / np.sqrt(index_k.var(-1, keepdims=True) + 1e-5)
    index_k = index_k * v("indexer.k_norm.weight") + v("indexer.k_norm.bias")
    index_w = x @ w("indexer.proj").T
    out = np.zeros((n_tok, heads, g.v_head_dim))
    for t in range(n_tok):
        chosen = exhaustive_choice(exhaustive_scores(index_q[t], index_w[t], index_k[: t + 1]), g.indexer.top_k)
        for h in range(heads):
            scores = [q[t, h, :nope] @ keys_values[s, h, :nope] + q[t, h, nope:] @ k_rot[s] for s in chosen]
            shares = np.exp(np.array(scores) * q.shape[-1] ** -0.5)
            out[t, h] = shares @ keys_values[chosen, h, nope:] / shares.sum()
    gate = 1 / (1 + np.exp(-x @ w("attn_gate").T))
    return (out.reshape(n_tok, -1) * gate) @ w("attn_output").T


# The parts


def test_keys_are_layer_normalised_with_and_without_a_bias() -> None:
    x, gain, bias = normal(2, 5, 32) * 3 + 1, normal(32, seed=1), normal(32, seed=2)
    y = x.double().numpy()
    expected = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5) * gain.double().numpy()
    for is_tiled in (False, True):
        found = index_keys(x, gain, None, eps=1e-5, is_tiled=is_tiled)
        np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=3e-6)
        found = index_keys(x, gain, bias, eps=1e-5, is_tiled=is_tiled)
        np.testing.assert_allclose(found.numpy(), expected + bias.double().numpy(), rtol=0, atol=3e-6)


def test_scores_follow_the_formula_and_the_future_has_none() -> None:
    q, weights, k = normal(2, 6, 3, 32), normal(2, 6, 3, seed=1), normal(2, 11, 32, seed=2)
    found = index_scores(q, weights, k)
    for b in range(2):
        for t in range(6):
            expected = exhaustive_scores(*(y.double().numpy() for y in (q[b, t], weights[b, t], k[b, : 5 + t + 1])))
            np.testing.assert_allclose(found[b, t, : 5 + t + 1].numpy(), expected, rtol=1e-5, atol=1e-6)
            assert (found[b, t, 5 + t + 1 :] == -torch.inf).all()


@pytest.mark.parametrize(("n_past", "n_tok", "n_most"), [(0, 12, 4), (20, 9, 8), (3, 10, 6), (30, 1, 31), (30, 1, 30), (5, 4, 100)])
def test_the_highest_are_selected_and_of_equals_the_lower_position(n_past: int, n_tok: int, n_most: int) -> None:
    # Small whole numbers are exact in float32 and give many equal scores, some of them 0 with either sign.
    draw = np.random.default_rng(n_past).integers
    q, weights = draw(-1, 2, (2, n_tok, 2, 4)), draw(-2, 3, (2, n_tok, 2))
    k = draw(-1, 2, (2, n_past + n_tok, 4))
    found = select_positions(*(torch.from_numpy(y).float() for y in (q, weights, k)), n_most)
    assert found.shape == (2, n_tok, min(n_most, n_past + n_tok)) and found.dtype == torch.int64
    n_ties = 0
    for b in range(2):
        for t in range(n_tok):
            scores = exhaustive_scores(q[b, t], weights[b, t], k[b, : n_past + t + 1])
            expected = exhaustive_choice(scores, n_most)
            assert found[b, t, : len(expected)].tolist() == expected
            assert (found[b, t, len(expected) :] > n_past + t).all()
            n_ties += any(scores[s] in [scores[e] for e in expected] for s in set(range(len(scores))) - set(expected))
    assert n_ties > 0 or n_most >= n_past + 1


def queries_and_cache(n_past: int, n_tok: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q_nope, q_rot, latent, k_rot and kv_b of two texts."""
    shapes = ((2, n_tok, 4, 32), (2, n_tok, 4, 16), (2, n_past + n_tok, 32), (2, n_past + n_tok, 16), (4, 64, 32))
    q_nope, q_rot, latent, k_rot, kv_b = (normal(*shape, seed=n).to(device) for n, shape in enumerate(shapes))
    return q_nope, q_rot, latent, k_rot, kv_b


def test_with_all_positions_selected_attention_is_the_dense_one(device: str) -> None:
    tensors = queries_and_cache(21, 19, device)
    positions = torch.arange(40, device=device).expand(2, 19, -1)
    found, expected = attend_selected(*tensors, positions), attend_absorbed(*tensors)
    # A GPU's library adds the selected positions in another order.
    assert torch.equal(found, expected) if device == "cpu" else (found - expected).abs().max() < 2e-6 * expected.abs().max()


def test_what_is_not_selected_is_not_touched() -> None:
    q_nope, q_rot, latent, k_rot, kv_b = queries_and_cache(39, 1)
    positions = torch.tensor([[[0, 7, 8, 39]], [[1, 2, 30, 31]]])
    clean = attend_selected(q_nope, q_rot, latent, k_rot, kv_b, positions)
    is_kept = torch.zeros(2, 40, 1, dtype=torch.bool).scatter(1, positions[:, 0, :, None], True)
    spoilt = attend_selected(q_nope, q_rot, latent.where(is_kept, torch.nan), k_rot.where(is_kept, torch.nan), kv_b, positions)
    assert torch.equal(spoilt, clean) and clean.isfinite().all()


def test_gradients_pass_through_the_selected_positions() -> None:
    tensors = [y.double().requires_grad_() for y in queries_and_cache(3, 2)]
    positions = torch.tensor([[[0, 2, 3], [1, 3, 4]], [[0, 1, 2], [0, 2, 4]]])
    assert torch.autograd.gradcheck(lambda *y: attend_selected(*y, positions), tensors, fast_mode=True)


# One layer


@ARITHMETICS
@pytest.mark.parametrize("n_rows", [N_TOKENS, 7, 1])
def test_a_layer_with_an_indexer_is_the_float64_one(engine: Engine, arithmetic: Arithmetic, n_rows: int) -> None:
    model = model_of(engine)
    x = normal(1, N_TOKENS, model.geometry.hidden_size)
    for number in model.geometry.full_attention_layers:
        layer = Layer(model.geometry, model.weights, number, arithmetic.is_tiled)
        past, parts = model.initial_state(1).layers[number], []
        for block in x.to(engine.device).split(n_rows, dim=1):
            y, past = attention(layer, block, past)
            parts.append(y)
        expected = mla_in_float64(model.weights, number, model.geometry, x[0].double().numpy())
        np.testing.assert_allclose(torch.cat(parts, dim=1)[0].cpu().numpy(), expected, rtol=0, atol=2e-6 * max(1, np.abs(expected).max()))
        assert isinstance(past, IndexedMlaState) and past.index_k.shape == (1, N_TOKENS, 32)


class WithoutBias:
    """The spine's tensors but for the indexer's biases."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    @property
    def device(self) -> torch.device:
        return self._weights.device

    def matrix(self, name: str) -> Tensor:
        return self._weights.matrix(name)

    def rows(self, name: str, ids: Tensor) -> Tensor:
        return self._weights.rows(name, ids)

    def vector(self, name: str) -> Tensor:
        if name.endswith("indexer.k_norm.bias"):
            raise KeyError(name)
        return self._weights.vector(name)


def test_a_spine_without_the_bias_has_none_added(engine: Engine) -> None:
    ids = text_of(engine)
    _, without = run(model_of(engine, weights=WithoutBias(engine.weights)), ids[:, :5], Arithmetic.DECODE)
    _, with_bias = run(model_of(engine), ids[:, :5], Arithmetic.DECODE)
    first = engine.geometry.full_attention_layers[0]
    found, expected = without.layers[first], with_bias.layers[first]
    assert isinstance(found, IndexedMlaState) and isinstance(expected, IndexedMlaState)
    bias = engine.weights.vector(f"blk.{first}.indexer.k_norm.bias")
    assert bias.any()
    torch.testing.assert_close(found.index_k + bias, expected.index_k, rtol=0, atol=1e-6)


# The whole model


@ARITHMETICS
def test_logits_beyond_top_k_are_those_of_the_float64_selection(engine: Engine, arithmetic: Arithmetic, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_of(engine), text_of(engine)
    found, _ = run(model, ids, arithmetic)
    dense, _ = run(engine.model, ids, arithmetic)

    def in_float64(layer: Layer, x: Tensor, past: MlaState) -> tuple[Tensor, MlaState]:
        y = mla_in_float64(layer.weights, layer.number, layer.geometry, x[0].double().cpu().numpy())
        return torch.from_numpy(y)[None].to(x), past

    monkeypatch.setattr(runtime.model, "_mla", in_float64)
    expected, _ = run(model, ids, arithmetic)
    assert (found - expected).abs().max() < 2e-5
    assert (found[:, :TOP_K] - dense[:, :TOP_K]).abs().max() < 2e-5
    assert ((found - dense)[:, 20:].abs().amax(-1) > 1e-2).all()


@ARITHMETICS
def test_while_all_positions_are_selected_the_bits_are_those_of_dense_attention(engine: Engine, arithmetic: Arithmetic) -> None:
    ids = text_of(engine)
    for n_rows in (N_TOKENS, 16, 7):
        dense, dense_state = run(engine.model, ids, arithmetic, n_rows)
        for top_k in (N_TOKENS, 2048):
            found, state = run(model_of(engine, top_k), ids, arithmetic, n_rows)
            assert torch.equal(found, dense)
            for layer, other in zip(state.layers, dense_state.layers, strict=True):
                assert all(torch.equal(getattr(layer, f.name), getattr(other, f.name)) for f in fields(other))
    found, _ = run(model_of(engine, N_TOKENS - 1), ids, arithmetic)
    assert not torch.equal(found[:, -1], dense[:, -1])


def test_decode_arithmetic_gives_the_same_bits_for_any_split(engine: Engine) -> None:
    model, ids = model_of(engine), text_of(engine)
    whole, _ = run(model, ids, Arithmetic.DECODE)
    for n_rows in (1, 5, 7, 16):
        assert torch.equal(run(model, ids, Arithmetic.DECODE, n_rows)[0], whole), f"blocks of {n_rows}"


@ARITHMETICS
def test_texts_of_a_batch_have_their_own_selection(engine: Engine, arithmetic: Arithmetic) -> None:
    model, ids = model_of(engine), text_of(engine, n_texts=3, seed=1)
    together, _ = run(model, ids, arithmetic, 10)
    alone = torch.cat([run(model, text[None], arithmetic, 10)[0] for text in ids])
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-5)


def test_without_the_flag_there_are_no_index_keys_and_no_longer_text(engine: Engine) -> None:
    long = model_of(engine)
    plain = Model(long.geometry, long.weights, long.experts)
    assert {type(layer) for layer in plain.initial_state(1).layers} == {KdaState, MlaState}
    assert {type(layer) for layer in long.initial_state(1).layers} == {KdaState, IndexedMlaState}
    with pytest.raises(AssertionError):
        run(plain, text_of(engine), Arithmetic.PROMPT)
    limited = Model(replace(long.geometry, max_position_embeddings=30), long.weights, long.experts, is_long_context=True)
    with pytest.raises(AssertionError):
        run(limited, text_of(engine), Arithmetic.PROMPT)
