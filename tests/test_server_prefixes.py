"""States kept between requests: what is found again, what is computed, and where a prompt pass can be stopped."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import DATA
from hypothesis import given
from hypothesis import strategies as st

from runtime.engine import Options, Step
from runtime.kernels.rows import Arithmetic
from runtime.sampler import Sampler
from runtime.saved_state import SavedState
from runtime.serving.prefixes import KeptStates, ServingEngine, n_saying_the_same, on_host
from runtime.serving.queue import Cancelled
from runtime.state import KdaState, MlaState, State
from runtime.tokens import load_tokenizer

TINY = load_tokenizer(DATA / "tiny-k3.1", vocab_size=512)
NOTHING = torch.zeros(1)
PROMPT = TINY.encode("some text to begin with, and a little more")


def saved(ids: list[int]) -> SavedState:
    return SavedState(tuple(ids), State(len(ids), ()), NOTHING, Arithmetic.PROMPT, "cpu")


@pytest.fixture(scope="module")
def engines(extractions: dict[str, Path], device: str) -> Iterator[dict[str, ServingEngine]]:
    """One that keeps no states, and two that do: with prompt arithmetic and with exact prefill."""
    options = {"none": (0, True), "kept": (4, False), "exact": (4, True)}

    def opened(n_kept: int, is_exact: bool) -> ServingEngine:
        asked = Options(device=device, is_exact_prefill=is_exact, chunk=16)
        return ServingEngine(extractions["tiny-k3.1"], asked, n_kept=n_kept, on_remark=lambda remark: None)

    found = {name: opened(*wish) for name, wish in options.items()}
    yield found
    for engine in found.values():
        engine.store.close()


def answered(engine: ServingEngine, ids: list[int], n: int) -> list[Step]:
    engine.begin_request(lambda: None)
    steps = list(engine.generate(ids, n_tokens=n, sampler=Sampler(0, 1, None)))
    engine.keep_reply(ids + [step.token for step in steps], steps[-1].logits)
    return steps


def same(a: list[Step], b: list[Step]) -> bool:
    return all(x.token == y.token and torch.equal(x.logits, y.logits) for x, y in zip(a, b, strict=True))


def test_with_exact_prefill_going_on_gives_the_bits_of_a_fresh_start(engines: dict[str, ServingEngine]) -> None:
    first = answered(engines["exact"], PROMPT, 6)
    longer = PROMPT + [step.token for step in first] + TINY.encode(" go on")
    kept, fresh = answered(engines["exact"], longer, 10), answered(engines["none"], longer, 10)
    assert engines["exact"].n_cached == len(PROMPT) + 5 and engines["none"].n_cached == 0
    assert same(kept, fresh)


def test_the_same_prompt_again_is_not_computed_and_gives_the_same_bits(engines: dict[str, ServingEngine]) -> None:
    prompt = TINY.encode("asked twice")
    first = answered(engines["kept"], prompt, 8)
    n_layers = engines["kept"].prompt_counts.n_layers
    again = answered(engines["kept"], prompt, 8)
    assert n_layers > 0 and engines["kept"].prompt_counts.n_layers == 0 and engines["kept"].n_cached == len(prompt)
    assert same(first, again)


def test_going_on_with_prompt_arithmetic_is_near_a_fresh_start(engines: dict[str, ServingEngine]) -> None:
    engine = engines["kept"]
    head, tail = PROMPT[:20], PROMPT[20:]
    assert tail
    answered(engine, head, 1)
    going_on = answered(engine, head + tail, 1)[0].logits
    assert engine.n_cached == 20
    engine.kept = KeptStates(4)
    torch.testing.assert_close(going_on, answered(engine, head + tail, 1)[0].logits, rtol=0, atol=2e-4)


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    kept = KeptStates(2)
    for ids in ([1], [2], [3]):
        kept.keep(saved(ids))
    assert len(kept) == 2 and kept.find([1, 9]) is None
    # Found: now 3 is the one that was used longest ago.
    assert kept.find([2, 9]) is not None
    kept.keep(saved([4]))
    assert kept.find([3]) is None and kept.find([2]) is not None


def test_the_longest_beginning_is_found() -> None:
    kept = KeptStates(9)
    for ids in ([5], [5, 6, 7], [5, 6], [5, 6, 8]):
        kept.keep(saved(ids))
    found = [kept.find(ids) for ids in ([5, 6, 7, 1], [5, 6], [5, 1], [6])]
    assert [None if entry is None else entry.ids for entry in found] == [(5, 6, 7), (5, 6), (5,), None]


@pytest.mark.parametrize("kind", ["kept", "exact"])
def test_a_prompt_pass_ends_with_the_layer_in_which_nobody_waits_any_more(engines: dict[str, ServingEngine], kind: str) -> None:
    engine, n_looks = engines[kind], 0

    def check() -> None:
        nonlocal n_looks
        n_looks += 1
        if n_looks == 5:
            raise Cancelled

    engine.begin_request(check)
    with pytest.raises(Cancelled):
        next(engine.generate(TINY.encode("a prompt that nobody waits for"), n_tokens=3, sampler=Sampler(0, 1, None)))
    assert engine.prompt_counts.n_layers == 4 and 0 < engine.prompt_share < 1
    # What was left half-done changes nothing.
    prompt = TINY.encode("afterwards, as before")
    assert same(answered(engine, prompt, 4), answered(_fresh(engine), prompt, 4))


def _fresh(engine: ServingEngine) -> ServingEngine:
    engine.kept = KeptStates(4)
    return engine


def test_progress_of_a_prompt_in_chunks_goes_from_none_to_all(engines: dict[str, ServingEngine]) -> None:
    engine, seen = engines["kept"], list[float]()
    engine.begin_request(lambda: seen.append(engine.prompt_share))
    prompt = TINY.encode("x" * 40)
    next(engine.generate(prompt, n_tokens=1, sampler=Sampler(0, 1, None)))
    assert seen == sorted(seen) and seen[0] == 0 and engine.prompt_share == 1 and len(set(seen)) == len(seen)


def test_the_size_told_is_that_of_a_kept_state(engines: dict[str, ServingEngine]) -> None:
    engine = engines["exact"]
    answered(engine, PROMPT, 2)
    state = on_host(engine.decoder.state)
    tensors = [t for layer in state.layers for t in ((layer.memory, layer.conv) if isinstance(layer, KdaState) else (layer.latent, layer.k_rot))]
    assert sum(t.nbytes for t in tensors) == engine.kept_bytes(state.n_tokens)
    assert any(isinstance(layer, MlaState) for layer in state.layers)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)


MARKER = TINY.special_id("<|sep|>")


def spelled(text: str) -> list[int]:
    """The text in tokens of one byte each."""
    return [TINY.encode(chr(byte))[0] if byte < 128 else byte_token(byte) for byte in text.encode()]


def byte_token(byte: int) -> int:
    return next(token for token in range(TINY.n_ranks) if TINY.token_bytes(token) == bytes([byte]))


@given(st.text(), st.text(min_size=1))
def test_a_reply_that_comes_back_in_other_tokens_is_recognised(reply: str, more: str) -> None:
    prompt = [*TINY.encode("q"), MARKER]
    told = prompt + TINY.encode(reply) + [MARKER] + TINY.encode(more)
    kept = KeptStates(2)
    kept.keep(saved(prompt + spelled(reply)))
    assert kept.retold(told, TINY) == prompt + spelled(reply) + [MARKER] + TINY.encode(more)


def test_a_reply_that_was_cut_within_its_text_is_recognised_by_its_last_token_too() -> None:
    prompt, reply = [*TINY.encode("q"), MARKER], spelled("cut her")
    kept = KeptStates(2)
    kept.keep(saved(prompt + reply[:-1]), told=prompt + reply)
    told = [*prompt, *TINY.encode("cut her"), MARKER, *TINY.encode("go on")]
    assert kept.retold(told, TINY) == [*prompt, *reply, MARKER, *TINY.encode("go on")]


def test_text_that_spells_a_marker_is_not_that_marker() -> None:
    kept, forged = [*TINY.encode("a"), MARKER], TINY.encode("a<|sep|>")
    assert TINY.decode(kept) == TINY.decode(forged)
    assert n_saying_the_same(kept, [*forged, MARKER], TINY) is None
    assert n_saying_the_same(forged, [*kept, MARKER], TINY) is None


def test_a_kept_text_that_ends_within_a_run_of_text_is_left_alone() -> None:
    assert n_saying_the_same(TINY.encode("hello"), TINY.encode("hello there"), TINY) is None
    assert n_saying_the_same([*TINY.encode("hello"), MARKER], TINY.encode("hello"), TINY) is None
