"""Blocks of 2 to 16 rows: the bits of plain steps, and a block that is cut leaves the state as if its last rows had never run."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MODELS

from manifests.geometry import load_geometry
from runtime.decode import LEAST_RETAINING_ROWS, Decoder
from runtime.engine import Engine, Options
from runtime.heat import RoutingLog
from runtime.kernels.rows import TILE_ROWS
from runtime.state import KdaState, State, rewind_bytes
from runtime.storage.cache import ExpertKey, SlotCache
from runtime.storage.incoming import Phase
from runtime.storage.store import Store

N_POSITIONS = 200
# What the text is when a block begins that will be cut.
N_BEFORE = 5
SIZES = range(2, TILE_ROWS + 1)


def quiet(_: str) -> None: ...


def text_of(n_tokens: int, vocab_size: int, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab_size, (n_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def digests(logits: torch.Tensor) -> list[str]:
    return [sha256(row.numpy().tobytes()).hexdigest() for row in logits.cpu()]


def has_equal_bits(a: State, b: State) -> bool:
    def tensors(state: State) -> list[torch.Tensor]:
        return [x for layer in state.layers for x in ((layer.memory, layer.conv) if isinstance(layer, KdaState) else (layer.latent, layer.k_rot))]

    return a.n_tokens == b.n_tokens and all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


@contextmanager
def opened(manifest: Path, device: str, **options: Any) -> Iterator[Engine]:
    with Engine(manifest, Options(device=device, context=256, **options), on_remark=quiet) as engine, torch.inference_mode():
        engine.store.phase = Phase.DECODE
        yield engine


@pytest.fixture(scope="module")
def engine(extractions: dict[str, Path], device: str) -> Iterator[Engine]:
    with opened(extractions["tiny-k3.1"], device) as engine:
        yield engine


@pytest.fixture(scope="module")
def text(engine: Engine) -> list[int]:
    return text_of(N_POSITIONS, engine.geometry.vocab_size)


def plain_digests(engine: Engine, text: list[int]) -> list[str]:
    """Return the digest of every position's logits in plain steps."""
    engine.decoder.state.reset()
    return digests(torch.cat([engine.decoder.step([token]).to("cpu", copy=True) for token in text]))


@pytest.fixture(scope="module")
def plain(engine: Engine, text: list[int]) -> list[str]:
    return plain_digests(engine, text)


@pytest.fixture(scope="module")
def states(engine: Engine, text: list[int], plain: list[str]) -> list[State]:
    """The state after each of the first tokens, in plain steps."""
    decoder = engine.decoder
    decoder.state.reset()
    states = [decoder.state.copied()]
    for token in text[: N_BEFORE + TILE_ROWS]:
        decoder.step([token])
        states.append(decoder.state.copied())
    return states


@pytest.mark.parametrize("n_rows", SIZES)
def test_blocks_have_the_bits_of_plain_steps_at_every_position(engine: Engine, text: list[int], plain: list[str], n_rows: int) -> None:
    engine.decoder.state.reset()
    blocks = [text[start : start + n_rows] for start in range(0, N_POSITIONS, n_rows)]
    assert digests(torch.cat([engine.decoder.step(block, can_cut=True).to("cpu", copy=True) for block in blocks])) == plain


@pytest.mark.parametrize("n_rows", SIZES)
def test_what_is_kept_of_a_block_has_the_bits_of_plain_steps(engine: Engine, text: list[int], states: list[State], n_rows: int) -> None:
    decoder, rejected = engine.decoder, text_of(n_rows, engine.geometry.vocab_size, seed=n_rows)
    for n_kept in range(1, n_rows + 1):
        decoder.begin(states[N_BEFORE])
        decoder.step([*text[N_BEFORE : N_BEFORE + n_kept], *rejected[n_kept:]], can_cut=True)
        decoder.keep(n_kept)
        assert has_equal_bits(decoder.state.copied(), states[N_BEFORE + n_kept])


# As little as a block of 16 rows needs, and what is guessed of the next layer read meanwhile.
SMALL = {"vram_cache": "16slots", "host_pool": "20slots", "n_prefetch": 2}


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in MODELS), (MODELS[-1], SMALL)])
def test_a_text_of_cut_blocks_goes_on_with_the_bits_of_plain_steps(
    extractions: dict[str, Path], device: str, name: str, options: dict[str, Any]
) -> None:
    cuts = [(3, 1), (16, 7), (2, 2), (5, 4), (1, 1), (16, 1), (16, 15), (8, 3), (4, 1), (4, 3)]
    text = text_of(sum(n_kept for _, n_kept in cuts), 256)
    with opened(extractions[name], device) as engine:
        expected = plain_digests(engine, text)
    with opened(extractions[name], device, **options) as engine:
        decoder, counts, at, rows = engine.decoder, engine.store.counts, 0, []
        decoder.state.reset()
        for n_rows, n_kept in cuts:
            block = [*text[at : at + n_kept], *text_of(n_rows - n_kept, engine.geometry.vocab_size, seed=at)]
            rows.append(decoder.step(block, can_cut=True)[:n_kept].to("cpu", copy=True))
            decoder.keep(n_kept)
            at += n_kept
        assert counts.n_prefetch_used > 10 or not options
    assert decoder.state.n_tokens == at
    assert digests(torch.cat(rows)) == expected


def test_a_log_of_routing_holds_what_was_kept_alone(engine: Engine, text: list[int]) -> None:
    decoder = engine.decoder

    def logged(cuts: Iterable[tuple[int, int]]) -> RoutingLog:
        log, at = RoutingLog(engine.geometry), 0
        decoder.state.reset()
        decoder.on_layer, decoder.on_cut = log.add_layer, log.drop
        for n_rows, n_kept in cuts:
            decoder.step([*text[at : at + n_kept], *text_of(n_rows - n_kept, engine.geometry.vocab_size, seed=at)], can_cut=True)
            decoder.keep(n_kept)
            at += n_kept
        decoder.on_layer = decoder.on_cut = None
        return log

    plain, cut = logged([(1, 1)] * 14), logged([(3, 1), (16, 7), (2, 2), (5, 4)])
    assert plain.trace().shape[0] == 14 and np.array_equal(plain.trace(), cut.trace())
    assert np.array_equal(plain.heat(), cut.heat())


def test_a_block_may_be_cut_again(engine: Engine, text: list[int], states: list[State]) -> None:
    decoder = engine.decoder
    decoder.begin(states[N_BEFORE])
    decoder.step(text[N_BEFORE : N_BEFORE + 9], can_cut=True)
    for n_kept in (8, 8, 3, 1):
        decoder.keep(n_kept)
        assert has_equal_bits(decoder.state.copied(), states[N_BEFORE + n_kept])


def test_logits_outlive_the_cut(engine: Engine, text: list[int], states: list[State]) -> None:
    engine.decoder.begin(states[N_BEFORE])
    logits = engine.decoder.step(text[N_BEFORE : N_BEFORE + 6], can_cut=True)
    before = logits.clone()
    engine.decoder.keep(2)
    assert torch.equal(logits, before)


def test_only_the_last_step_can_be_cut_and_only_if_it_was_meant_to_be(engine: Engine, text: list[int], states: list[State]) -> None:
    decoder = engine.decoder
    decoder.begin(states[N_BEFORE])
    decoder.step(text[:4], can_cut=True)
    for n_kept in (0, 5):
        with pytest.raises(AssertionError):
            decoder.keep(n_kept)
    decoder.step(text[4:8])
    decoder.keep(4)
    with pytest.raises(AssertionError):
        decoder.keep(3)


def test_plain_steps_and_blocks_that_are_never_cut_take_no_room_for_a_cut(engine: Engine, text: list[int]) -> None:
    decoder = Decoder(engine.geometry, engine.weights, engine.prepared.record, engine.store, context=64)
    decoder.step(text[:1], can_cut=True)
    decoder.keep(1)
    decoder.step(text[1:9])
    assert decoder.rewind_bytes == 0
    decoder.step(text[9:11], can_cut=True)
    assert decoder.rewind_bytes == rewind_bytes(engine.geometry, TILE_ROWS) > 0


def test_the_room_for_a_cut_of_the_real_model_is_known_beforehand() -> None:
    g = load_geometry("k3.1")
    n_kda = g.n_layers - len(g.full_attention_layers)
    memory, conv = g.kda_n_heads * g.kda_head_dim**2, (g.conv_kernel_size - 1) * 3 * g.kda_size
    inputs = TILE_ROWS * (5 * g.kda_size + g.kda_head_dim + g.kda_n_heads)
    assert rewind_bytes(g, TILE_ROWS) == 4 * n_kda * (memory + conv + inputs)


# Who stays in the caches after a block.


def test_what_was_used_in_passing_leaves_first_and_its_use_refreshes_nothing() -> None:
    a, b, c, d, e = (ExpertKey(0, n) for n in range(5))
    cache = SlotCache(3)
    for key, is_passing in ((a, False), (b, False), (c, True)):
        cache.take(key, is_passing=is_passing)
        cache.unpin(key)
    assert cache.find(a, is_passing=True) is not None
    cache.take(d)
    cache.unpin(d)
    assert c not in cache
    cache.take(e, is_passing=True)
    assert a not in cache and b in cache and d in cache


def test_a_use_by_enough_rows_keeps_what_came_in_passing() -> None:
    a, b, c = (ExpertKey(0, n) for n in range(3))
    cache = SlotCache(2)
    for key in (a, b):
        cache.take(key, is_passing=True)
        cache.unpin(key)
    cache.find(a)
    cache.take(c)
    assert a in cache and b not in cache


class Watched:
    """Records that note what was said to be used in passing."""

    def __init__(self, store: Store) -> None:
        self.address, self.addresses, self.prefetch, self._store = store.address, store.addresses, store.prefetch, store
        self.passing: list[set[int]] = []

    def fetch_groups(
        self, layer: int, experts: Sequence[int], *, passing: Collection[int] = (), meanwhile: Callable[[], None] | None = None
    ) -> Iterable[list[tuple[int, int]]]:
        self.passing.append(set(passing))
        return self._store.fetch_groups(layer, experts, passing=passing)


@pytest.mark.parametrize("n_rows", [1, 2, LEAST_RETAINING_ROWS - 1, LEAST_RETAINING_ROWS, 9, 16])
def test_experts_of_a_single_row_pass_in_blocks_of_enough_rows(engine: Engine, text: list[int], n_rows: int) -> None:
    records, chosen = Watched(engine.store), list[list[int]]()
    decoder = Decoder(engine.geometry, engine.weights, engine.prepared.record, records, context=32)
    decoder.on_layer = lambda facts: chosen.append(facts.chosen.flatten().tolist())
    decoder.step(text[:n_rows])
    singles = [{expert for expert, n_uses in Counter(layer).items() if n_uses == 1} for layer in chosen]
    assert any(singles)
    assert records.passing == (singles if n_rows >= LEAST_RETAINING_ROWS else [set()] * len(chosen))
