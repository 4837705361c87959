"""The slot cache: who stays, who goes."""

from runtime.cache import ExpertKey, SlotCache


def key(n: int) -> ExpertKey:
    return ExpertKey(1, n)


def filled(n_slots: int) -> SlotCache:
    cache = SlotCache(n_slots)
    for n in range(n_slots):
        cache.take(key(n))
        cache.unpin(key(n))
    return cache


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
