"""Decode and the prompt pass with K3.1's indexer, of a top_k that a short text goes beyond: the plain model's logits, and the bits of plain steps."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from manifests.errors import DeviceError
from manifests.geometry import Geometry, load_geometry
from runtime.decode import Decoder, empty_state
from runtime.draft.ngram import NgramDrafter
from runtime.engine import Engine, Options, room_for_text
from runtime.kernels.rows import TILE_ROWS, Arithmetic
from runtime.model import IndexedMlaState, Model
from runtime.prompt import PromptPass, prompt_bytes, rows_that_fit
from runtime.sampler import Sampler
from runtime.saved_state import SavedState, made_on, on_device, read_state, write_state
from runtime.speculate import Drafting, Limits, continue_text
from runtime.state import KdaState, MlaState, State, tensors_of
from runtime.storage.incoming import Phase

N_TOKENS, TOP_K = 40, 8
SIZES = range(2, TILE_ROWS + 1)


@pytest.fixture(scope="module")
def engine(extractions: dict[str, Path], device: str) -> Iterator[Engine]:
    with Engine(extractions["tiny-k3.1"], Options(device=device), on_remark=lambda _: None) as engine, torch.inference_mode():
        engine.store.phase = Phase.DECODE
        yield engine


def geometry_of(engine: Engine, top_k: int = TOP_K) -> Geometry:
    assert engine.geometry.indexer is not None
    return replace(engine.geometry, indexer=replace(engine.geometry.indexer, top_k=top_k))


def decoder_of(engine: Engine, top_k: int = TOP_K, context: int = N_TOKENS) -> Decoder:
    geometry = geometry_of(engine, top_k)
    return Decoder(geometry, engine.weights, engine.prepared.record, engine.store, context=context, is_long_context=True)


def model_of(engine: Engine) -> Model:
    return Model(geometry_of(engine), engine.weights, engine.model.experts, is_long_context=True)


def text_of(engine: Engine, n_tokens: int = N_TOKENS, seed: int = 0) -> list[int]:
    return torch.randint(0, engine.geometry.vocab_size, (n_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def decoded(decoder: Decoder, text: list[int], n_rows: int = 1) -> Tensor:
    """Return the logits of tokens given n_rows at a time."""
    blocks = [text[start : start + n_rows] for start in range(0, len(text), n_rows)]
    return torch.cat([decoder.step(block, can_cut=True).to("cpu", copy=True) for block in blocks])


def modelled(engine: Engine, text: list[int], arithmetic: Arithmetic) -> tuple[Tensor, State]:
    """Return the plain model's logits [tokens, vocabulary], and the state after the text."""
    model = model_of(engine)
    logits, state = model.forward(torch.tensor([text], device=engine.device), model.initial_state(1), arithmetic=arithmetic)
    return logits[0].cpu(), state


def has_equal_bits(a: State, b: State) -> bool:
    pairs = [(tensors_of(x), tensors_of(y)) for x, y in zip(a.layers, b.layers, strict=True)]
    return a.n_tokens == b.n_tokens and all(x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x) for x, y in pairs)


@pytest.fixture(scope="module")
def decoder(engine: Engine) -> Decoder:
    return decoder_of(engine)


@pytest.fixture(scope="module")
def steps(engine: Engine, decoder: Decoder) -> tuple[Tensor, list[State]]:
    """The logits of every position in plain steps, and the states before the first and after each."""
    decoder.state.reset()
    logits, states = [], [decoder.state.copied()]
    for token in text_of(engine):
        logits.append(decoder.step([token]).to("cpu", copy=True))
        states.append(decoder.state.copied())
    return torch.cat(logits), states


# Decode


def test_logits_and_caches_are_those_of_the_plain_model(engine: Engine, steps: tuple[Tensor, list[State]]) -> None:
    logits, states = steps
    for arithmetic in Arithmetic:
        expected, state = modelled(engine, text_of(engine), arithmetic)
        assert (logits - expected).abs().max() < 1e-4
        for found, plain in zip(states[-1].layers, state.layers, strict=True):
            assert type(found) is type(plain)
            for name, tensor in tensors_of(plain).items():
                assert (tensors_of(found)[name] - tensor).abs().max() < 1e-4
    assert {type(layer) for layer in states[-1].layers} == {KdaState, IndexedMlaState}


def test_positions_are_selected_and_the_first_are_dense(engine: Engine, steps: tuple[Tensor, list[State]]) -> None:
    engine.decoder.state.reset()
    dense = decoded(engine.decoder, text_of(engine))
    assert (steps[0][:TOP_K] - dense[:TOP_K]).abs().max() < 1e-5
    assert ((steps[0] - dense)[2 * TOP_K :].abs().amax(-1) > 1e-2).all()


@pytest.mark.parametrize("top_k", [N_TOKENS, 2048])
def test_while_all_positions_are_selected_the_bits_are_those_of_dense_attention(engine: Engine, top_k: int, device: str) -> None:
    for n_rows in (5, 16):
        engine.decoder.state.reset()
        dense, found = decoded(engine.decoder, text_of(engine), n_rows), decoded(decoder_of(engine, top_k), text_of(engine), n_rows)
        assert torch.equal(found, dense) if device == "cpu" else (found - dense).abs().max() < 1e-4


@pytest.mark.parametrize("n_rows", SIZES)
def test_blocks_have_the_bits_of_plain_steps_at_every_position(
    engine: Engine, decoder: Decoder, steps: tuple[Tensor, list[State]], n_rows: int
) -> None:
    decoder.state.reset()
    assert torch.equal(decoded(decoder, text_of(engine), n_rows), steps[0])
    assert has_equal_bits(decoder.state.copied(), steps[1][-1])


@pytest.mark.parametrize("n_before", [TOP_K - 5, 20])
def test_what_is_kept_of_a_block_has_the_bits_of_plain_steps(
    engine: Engine, decoder: Decoder, steps: tuple[Tensor, list[State]], n_before: int
) -> None:
    logits, states = steps
    text = text_of(engine)
    for n_rows, n_kept in [(2, 1), (5, 5), (9, 3), (16, 1), (16, 11)]:
        decoder.begin(states[n_before])
        decoder.step([*text[n_before : n_before + n_kept], *text_of(engine, n_rows - n_kept, seed=1)], can_cut=True)
        decoder.keep(n_kept)
        assert has_equal_bits(decoder.state.copied(), states[n_before + n_kept])
        at = n_before + n_kept
        assert torch.equal(decoder.step(text[at : at + 4]).cpu(), logits[at : at + 4])


def test_the_room_for_a_text_changes_no_bit(engine: Engine, steps: tuple[Tensor, list[State]]) -> None:
    assert torch.equal(decoded(decoder_of(engine, context=700), text_of(engine), 16), steps[0])


def test_drafts_change_no_token(engine: Engine, decoder: Decoder) -> None:
    prompt = text_of(engine, 6) * 3

    def continued(drafting: Drafting | None) -> list[int]:
        decoder.state.reset()
        logits = decoded(decoder, prompt, 16)[-1]
        limits = Limits(N_TOKENS - len(prompt), N_TOKENS, ())
        return [step.token for step in continue_text(decoder, Sampler(0, 1, 0), logits, text=prompt, limits=limits, drafting=drafting)]

    drafting = Drafting(NgramDrafter(shortest_match=1), engine.geometry.vocab_size, lambda _: None, economy=None)
    assert continued(drafting) == continued(None)
    assert drafting.counts.n_proposed > 0


def test_a_saved_state_goes_on_with_the_bits_of_plain_steps(engine: Engine, steps: tuple[Tensor, list[State]], tmp_path: Path) -> None:
    (logits, states), text, path, manifest = steps, text_of(engine), tmp_path / "state", engine.prepared.manifest
    saved = SavedState(tuple(text[:25]), states[25], logits[24], Arithmetic.DECODE, made_on(engine.device))
    write_state(path, saved, manifest)
    found = read_state(path, manifest, context=N_TOKENS, arithmetic=Arithmetic.DECODE, is_long_context=True)
    other = decoder_of(engine)
    other.begin(on_device(found.state, engine.device))
    assert has_equal_bits(other.state.copied(), states[25])
    assert torch.equal(decoded(other, text[25:], 5), logits[25:])


# The prompt pass


def prompt_pass(engine: Engine, decoder: Decoder) -> PromptPass:
    decoder.state.reset()
    return PromptPass(decoder.geometry, engine.weights, engine.prepared.record, engine.store, decoder.state)


@pytest.mark.parametrize("split", [[N_TOKENS], [5, 15, 20], [TOP_K, 1, 17, 14], [3, 37]])
def test_a_prompt_s_logits_and_caches_are_those_of_the_plain_model(engine: Engine, decoder: Decoder, split: list[int]) -> None:
    text = text_of(engine)
    expected, state = modelled(engine, text, Arithmetic.PROMPT)
    runner, at = prompt_pass(engine, decoder), 0
    for n_tokens in split:
        assert (runner.score(text[at : at + n_tokens]) - expected[at : at + n_tokens]).abs().max() < 2e-4
        at += n_tokens
    for found, plain in zip(decoder.state.copied().layers, state.layers, strict=True):
        assert all((tensors_of(found)[name] - tensor).abs().max() < 1e-4 for name, tensor in tensors_of(plain).items())


def test_a_text_goes_on_after_a_prompt_pass(engine: Engine, decoder: Decoder, steps: tuple[Tensor, list[State]]) -> None:
    text, runner = text_of(engine), prompt_pass(engine, decoder)
    assert (runner.run(text[:31]).cpu() - steps[0][30]).abs().max() < 2e-4
    assert (decoder.step(text[31:]).cpu() - steps[0][31:]).abs().max() < 2e-4


def test_a_prompt_that_selects_everything_has_the_bits_of_the_dense_pass(engine: Engine, decoder: Decoder) -> None:
    text, long = text_of(engine), decoder_of(engine, top_k=N_TOKENS)
    engine.decoder.state.reset()
    dense = PromptPass(engine.geometry, engine.weights, engine.prepared.record, engine.store, engine.decoder.state)
    assert torch.equal(prompt_pass(engine, long).score(text), dense.score(text))


# The engine


def test_the_engine_s_decoder_and_prompts_evaluate_the_indexer(extractions: dict[str, Path], device: str) -> None:
    with Engine(extractions["tiny-k3.1"], Options(device=device, context=3000, is_long_context=True), on_remark=lambda _: None) as engine:
        text = text_of(engine, 20)
        logits = engine.prompt(text)
        kept = engine.saved_state(text, logits)
        assert {type(layer) for layer in kept.state.layers} == {KdaState, IndexedMlaState}
        cache = next(layer for layer in engine.decoder.state.layers if isinstance(layer, MlaState))
        assert isinstance(cache, IndexedMlaState) and cache.index_k.shape[1] == 3000 and cache.index_k[:, :20].any()
        assert "long context, unverified" in engine.effective()[0]


def test_a_context_too_long_for_the_device_is_refused_beforehand() -> None:
    geometry, device = load_geometry("k3.1"), torch.device("cpu")
    assert (
        room_for_text(load_geometry("tiny"), 100, device, spine_bytes=0)
        == empty_state(load_geometry("tiny"), 100, device, is_long_context=True).n_bytes
    )
    with pytest.raises(DeviceError, match=r"-c 1048576: a text of so many tokens takes 71.3GB of cpu, but beside the spine 0 ?B are free"):
        room_for_text(geometry, 1_048_576, device, spine_bytes=10**15)


def test_a_prompt_s_memory_hardly_grows_with_what_is_selected_from() -> None:
    geometry = load_geometry("k3.1")
    short, long, longest = (prompt_bytes(geometry, 2048, n, is_long_context=True) for n in (4096, 131_072, 1_048_576))
    assert prompt_bytes(geometry, 2048, 4096) <= short <= long <= longest < prompt_bytes(geometry, 2048, 1_048_576)
    assert rows_that_fit(geometry, 131_072, 4_000_000_000, is_long_context=True) == 2048
