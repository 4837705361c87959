"""The slot cache: who stays, who goes, and how often that turns out well."""

import random
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from runtime.storage.cache import ExpertKey, HostPool, SlotCache

# Tokens, layers, experts chosen: ids.
Trace = list[list[list[int]]]


def key(n: int) -> ExpertKey:
    return ExpertKey(1, n)


def filled(n_slots: int) -> SlotCache:
    cache = SlotCache(n_slots)
    for n in range(n_slots):
        use(cache, n)
    return cache


def use(cache: SlotCache, n: int, *, is_prompt: bool = False) -> bool:
    """Look an expert up and bring it in if it is absent; return whether it was there."""
    if cache.find(key(n), is_prompt=is_prompt) is not None:
        return True
    cache.take(key(n), is_prompt=is_prompt)
    cache.unpin(key(n))
    return False


def held(cache: SlotCache, n_most: int = 1000) -> set[int]:
    return {n for n in range(n_most) if key(n) in cache}


def test_each_expert_has_a_slot_of_its_own() -> None:
    cache = filled(5)
    assert sorted(cache.find(key(n)) for n in range(5)) == list(range(5))


def test_evicts_the_least_recently_used() -> None:
    cache = filled(3)
    slot = cache.find(key(1))
    cache.find(key(0))
    cache.find(key(2))
    assert cache.take(key(9)) == slot
    assert cache.find(key(1)) is None
    assert cache.n_evictions == 1


def test_evicts_the_slot_not_pinned() -> None:
    cache = filled(3)
    cache.pin(key(0))
    cache.pin(key(2))
    slot = cache.find(key(1))
    assert cache.take(key(9)) == slot


def test_gives_no_slot_when_all_are_pinned() -> None:
    cache = filled(2)
    cache.pin(key(0))
    cache.pin(key(1))
    assert cache.take(key(9)) is None
    assert len(cache) == 2


def test_a_dropped_expert_frees_its_slot() -> None:
    cache = SlotCache(1)
    assert cache.take(key(0)) == 0
    cache.drop(key(0))
    assert cache.find(key(0)) is None
    assert cache.take(key(1)) == 0


def test_clear_keeps_what_is_pinned() -> None:
    cache = filled(3)
    cache.pin(key(1))
    cache.clear()
    assert [cache.find(key(n)) is not None for n in range(3)] == [False, True, False]


def test_who_leaves_is_told() -> None:
    told: list[ExpertKey] = []
    cache = SlotCache(2, on_evict=told.append)
    for n in range(4):
        use(cache, n)
    cache.drop(key(3))
    assert told == [key(0), key(1)]


@pytest.mark.parametrize("make", [SlotCache, HostPool])
def test_a_prompt_pass_takes_nothing_from_decode_but_its_room(make: type[SlotCache]) -> None:
    cache = make(100, prompt_room=8)
    for n in range(100):
        use(cache, n)
    taken = [cache.take(key(n), is_prompt=True) for n in range(200, 210)]
    assert [slot is None for slot in taken] == [False] * 8 + [True] * 2
    for n in range(200, 208):
        cache.unpin(key(n))
    for n in range(300, 900):
        use(cache, n, is_prompt=True)
    assert held(cache) == set(range(8, 100)) | set(range(892, 900))


@pytest.mark.parametrize("make", [SlotCache, HostPool])
def test_a_prompt_pass_fills_what_is_free(make: type[SlotCache]) -> None:
    cache = make(100, prompt_room=8)
    for n in range(40):
        use(cache, n)
    for n in range(200, 600):
        use(cache, n, is_prompt=True)
    assert held(cache) == set(range(40)) | set(range(540, 600))


def test_what_a_prompt_brought_in_leaves_first_unless_decode_uses_it() -> None:
    cache = SlotCache(4)
    for n in (0, 1, 2):
        use(cache, n, is_prompt=True)
    use(cache, 3)
    assert use(cache, 1)
    for n in (10, 11):
        use(cache, n)
    assert held(cache) == {1, 3, 10, 11}


def test_a_prompt_s_use_does_not_refresh_what_decode_holds() -> None:
    cache = filled(3)
    assert use(cache, 0, is_prompt=True)
    use(cache, 9)
    assert held(cache) == {1, 2, 9}


def test_a_pinned_prompt_slot_is_not_given_away() -> None:
    cache = SlotCache(2, prompt_room=1)
    use(cache, 0)
    cache.take(key(1), is_prompt=True)
    assert cache.take(key(2), is_prompt=True) is None
    cache.unpin(key(1))
    assert cache.take(key(2), is_prompt=True) is not None and held(cache) == {0, 2}


def pool_of(n: int, keep_share: float) -> HostPool:
    pool = HostPool(n, keep_share=keep_share)
    for e in range(n):
        use(pool, e)
    return pool


def test_what_the_device_holds_leaves_the_pool_first() -> None:
    pool = pool_of(5, 0.0)
    for n in (3, 4):
        pool.passed_to_device(key(n))
    use(pool, 9)
    assert held(pool) == {0, 1, 2, 4, 9}
    pool.off_device(key(4))
    use(pool, 10)
    assert held(pool) == {1, 2, 4, 9, 10}


def test_the_share_that_is_kept_stays_although_the_device_holds_it() -> None:
    pool = pool_of(8, 0.5)
    for n in range(8):
        pool.passed_to_device(key(n))
    for n in range(20, 24):
        use(pool, n)
    assert held(pool) == {1, 3, 5, 7, 20, 21, 22, 23}


def test_room_made_ahead_is_made_of_those_that_would_leave_next() -> None:
    pool = pool_of(6, 0.0)
    pool.passed_to_device(key(4))
    pool.pin(key(0))
    pool.make_room(3)
    assert held(pool) == {0, 3, 5}
    for n in (10, 11, 12):
        use(pool, n)
    assert held(pool) == {0, 3, 5, 10, 11, 12} and pool.n_evictions == 3


def test_the_pool_keeps_what_the_device_lacks_often() -> None:
    pool = pool_of(4, 1.0)
    for n in (0, 0, 1, 2, 3):
        pool.lacked(key(n))
    for n in range(10, 13):
        use(pool, n)
        pool.lacked(key(n))
    assert 0 in held(pool) and held(pool) != {0, 1, 2, 3}


def test_a_use_long_ago_counts_less() -> None:
    pool = pool_of(2, 1.0)
    for n in (0, 0, 0):
        pool.lacked(key(n))
    for n in range(2000):
        pool.lacked(key(50 + n % 7))
    pool.lacked(key(1))
    use(pool, 9)
    assert held(pool) == {1, 9}


@pytest.mark.parametrize("make", [SlotCache, HostPool])
@settings(deadline=None, max_examples=150)
@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4), st.booleans()), max_size=80))
def test_slots_are_never_shared_nor_lost(make: type[SlotCache], n_slots: int, steps: list[tuple[int, int, bool]]) -> None:
    cache, pinned, n_pins = make(n_slots), dict[int, int](), Counter[int]()
    for n, what, is_prompt in steps:
        if what == 0 and key(n) not in cache:
            slot = cache.take(key(n), is_prompt=is_prompt)
            assert (slot is not None) or pinned or is_prompt
            if slot is not None:
                pinned[n], n_pins[n] = slot, 1
        elif what == 1:
            cache.unpin(key(n))
            n_pins[n] = max(0, n_pins[n] - 1)
            if not n_pins[n]:
                pinned.pop(n, None)
        elif what == 2 and key(n) in cache:
            cache.pin(key(n))
            slot = cache.find(key(n), is_prompt=is_prompt)
            assert slot is not None
            pinned[n], n_pins[n] = slot, n_pins[n] + 1
        elif what == 3 and isinstance(cache, HostPool):
            cache.lacked(key(n))
            cache.passed_to_device(key(n))
        elif what == 4 and isinstance(cache, HostPool):
            cache.off_device(key(n))
        assert len(cache) <= n_slots and cache.n_pinned == len(pinned)
        slots = [cache.find(key(n), is_prompt=True) for n in sorted(held(cache, 13))]
        assert len(set(slots)) == len(slots) and all(slot in range(n_slots) for slot in slots)
        assert all(cache.find(key(n), is_prompt=True) == slot for n, slot in pinned.items())


# How often it turns out well. Shares of all reads that the most used experts take, as published for K3.
SHARE_OF_EXPERTS = (0, 0.01, 0.05, 0.10, 0.20, 0.30, 0.50, 0.65, 1)
SHARE_OF_READS = (0, 0.10, 0.26, 0.40, 0.58, 0.71, 0.88, 0.95, 1)
N_EXPERTS = 896


def synthetic_trace(*, n_layers: int, n_tokens: int, seed: int) -> Trace:
    """Choose 16 experts per token and layer: from the published shares, times a log-normal of this text, a quarter being those of the token before."""
    rng = np.random.default_rng(seed)
    popularity = np.diff(np.interp(np.arange(N_EXPERTS + 1) / N_EXPERTS, SHARE_OF_EXPERTS, SHARE_OF_READS))
    layers = []
    for _ in range(n_layers):
        weights = np.log(rng.permutation(popularity) * rng.lognormal(0, 1, N_EXPERTS))
        chosen = [np.argpartition(-(weights + rng.gumbel(size=N_EXPERTS)), 16)[:16]]
        for _ in range(n_tokens - 1):
            scores = weights + rng.gumbel(size=N_EXPERTS)
            scores[chosen[-1][rng.random(16) < 0.25]] = np.inf
            chosen.append(np.argpartition(-scores, 16)[:16])
        layers.append([ids.tolist() for ids in chosen])
    return [[layer[token] for layer in layers] for token in range(n_tokens)]


@pytest.fixture(scope="module")
def synthetic() -> Trace:
    return synthetic_trace(n_layers=10, n_tokens=160, seed=5)


def recorded_trace(path: Path) -> Trace:
    return load_file(path)["experts"].tolist()


@pytest.fixture(scope="module")
def of_the_small_model() -> Trace:
    return recorded_trace(DATA / "mini-routing.safetensors")


# Recorded routing and numbers of slots: from a little more than a token needs to all that the trace needs.
@pytest.fixture(scope="module", params=["small", "real"])
def recorded(request: pytest.FixtureRequest, of_the_small_model: Trace) -> tuple[Trace, tuple[int, int, int]]:
    if request.param == "small":
        return of_the_small_model, (57, 173, 576)
    path = request.config.getoption("--router-trace")
    if path is None:
        pytest.skip("no --router-trace FILE: recorded routing of a real model is not shipped with the project")
    return recorded_trace(Path(path)), (1567, 4000, 20_000)


def uses(trace: Trace) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for token in trace for layer, experts in enumerate(token) for expert in experts]


def lru_hits(keys: list[ExpertKey], n_slots: int) -> int:
    """The plain way: a list of what was used last."""
    last: OrderedDict[ExpertKey, None] = OrderedDict()
    n_hits = 0
    for k in keys:
        n_hits += k in last
        last[k] = None
        last.move_to_end(k)
        if len(last) > n_slots:
            last.popitem(last=False)
    return n_hits


def two_tier_hits(keys: list[ExpertKey], n_device: int, pool: HostPool) -> int:
    """Return how many uses need no drive when the device's cache stands before the pool."""
    device = SlotCache(n_device, on_evict=pool.off_device)
    n_hits = 0
    for k in keys:
        if device.find(k) is not None:
            n_hits += 1
            continue
        pool.lacked(k)
        if pool.find(k) is not None:
            n_hits += 1
        else:
            pool.take(k)
            pool.unpin(k)
            pool.passed_to_device(k)
        device.take(k)
        device.unpin(k)
    return n_hits


def slot_cache_hits(keys: list[ExpertKey], n_slots: int) -> int:
    cache, n_hits = SlotCache(n_slots), 0
    for k in keys:
        if cache.find(k) is not None:
            n_hits += 1
        else:
            cache.take(k)
            cache.unpin(k)
    return n_hits


@pytest.mark.parametrize("share", [0.019, 0.056, 0.2])
def test_the_device_cache_hits_as_plain_recency_does(synthetic: Trace, share: float) -> None:
    keys, n_slots = uses(synthetic), int(share * len(synthetic[0]) * N_EXPERTS)
    assert slot_cache_hits(keys, n_slots) == lru_hits(keys, n_slots) > 0.2 * len(keys)


def test_the_device_cache_hits_as_plain_recency_does_on_recorded_routing(recorded: tuple[Trace, tuple[int, int, int]]) -> None:
    trace, slot_counts = recorded
    keys = uses(trace)
    for n_slots in slot_counts:
        assert slot_cache_hits(keys, n_slots) == lru_hits(keys, n_slots) > 0
    # Every repeat hits where there is room for all.
    assert slot_cache_hits(keys, slot_counts[-1]) == len(keys) - len(set(keys))


# Shares of all experts on the device and in the pool; the share of copies to keep.
@pytest.mark.parametrize(("device", "pool", "keep"), [(0.019, 0.037, 0.5), (0.01, 0.05, 1.0), (0.08, 0.04, 0.5), (0.02, 0.2, 0.5)])
def test_the_pool_saves_more_reads_than_plain_recency(synthetic: Trace, device: float, pool: float, keep: float) -> None:
    n_all = len(synthetic[0]) * N_EXPERTS
    keys, n_device, n_pool = uses(synthetic), int(device * n_all), int(pool * n_all)
    plain = lru_hits(keys, max(n_device, n_pool))
    assert two_tier_hits(keys, n_device, HostPool(n_pool, keep_share=keep)) > plain


# Slots for the 576 experts of the small model, of which a token uses 54; as in the engine half keep their copy where the device holds a token's.
@pytest.mark.parametrize(("n_device", "n_pool"), [(57, 115), (57, 230), (115, 57)])
def test_the_pool_saves_more_reads_than_plain_recency_on_recorded_routing(of_the_small_model: Trace, n_device: int, n_pool: int) -> None:
    keys = uses(of_the_small_model)
    plain = lru_hits(keys, max(n_device, n_pool))
    assert two_tier_hits(keys, n_device, HostPool(n_pool, keep_share=0.5)) > plain > 0


def test_a_prompt_pass_in_between_costs_decode_few_hits(synthetic: Trace) -> None:
    """Decode, a prompt that uses nearly every expert, decode: the second decode hits as if the prompt had not been."""
    n_slots = int(0.056 * len(synthetic[0]) * N_EXPERTS)
    first, second = uses(synthetic[:80]), uses(synthetic[80:90])
    rng = random.Random(1)
    prompt = [ExpertKey(layer, rng.randrange(N_EXPERTS)) for layer in range(len(synthetic[0])) for _ in range(800)]

    def hits(between: list[ExpertKey]) -> int:
        cache = SlotCache(n_slots)
        n_hits = 0
        for keys, is_prompt in ((first, False), (between, True), (second, False)):
            for k in keys:
                if cache.find(k, is_prompt=is_prompt) is not None:
                    n_hits += keys is second
                else:
                    cache.take(k, is_prompt=is_prompt)
                    cache.unpin(k)
        return n_hits

    undisturbed = hits([])
    assert undisturbed > 0.3 * len(second)
    assert hits(prompt) >= 0.95 * undisturbed


def test_a_slot_that_was_pinned_twice_is_let_go_twice() -> None:
    cache = SlotCache(1)
    cache.take(key(1))
    cache.pin(key(1))
    cache.unpin(key(1))
    assert cache.take(key(2)) is None and cache.n_pinned == 1
    cache.unpin(key(1))
    cache.unpin(key(1))
    assert cache.take(key(2)) is not None
