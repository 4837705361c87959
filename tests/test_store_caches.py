"""What stays in the store's two caches: the pool knows what the device lacks, and a prompt leaves decode what it has."""

import math

import pytest
from test_store import ALL, LAYERS, Place, place  # noqa: F401 (a fixture)

from runtime.storage.cache import ExpertKey
from runtime.storage.incoming import Phase


def test_the_pool_learns_from_the_store_what_the_device_lacks(place: Place) -> None:  # noqa: F811
    model = place()
    store = model.store(n_device=40, n_host=100)
    for layer in (1, 2, 3, 4):
        model.fetch(store, layer, ALL)
    # The device has let go of layer 1: no copy of it leaves the pool before others.
    assert store._host._leaving and not any(key.layer == 1 for key in store._host._leaving)
    assert all(store._host._lacked[ExpertKey(1, e)] > -math.inf for e in ALL)
    store.close()


def test_a_prompt_pass_leaves_what_decode_has_in_the_pool(place: Place) -> None:  # noqa: F811
    model = place()
    store = model.store(n_device=2, n_host=30)
    model.fetch(store, 1, ALL)
    store.phase = Phase.PROMPT
    for layer in LAYERS[1:]:
        model.fetch(store, layer, ALL)
    store.phase, store.counts = Phase.DECODE, model.counts()
    model.fetch(store, 1, ALL)
    assert store.counts.n_records == 0
    store.close()


# The pool compares its 16 oldest before it lets one go.
@pytest.mark.parametrize(("where", "n_device", "n_experts"), [("_device", 8, 4), ("_host", 1, 16)])
def test_a_prompt_s_use_refreshes_nothing_that_decode_has(place: Place, where: str, n_device: int, n_experts: int) -> None:  # noqa: F811
    model = place()
    store = model.store(n_device=n_device, n_host=40)
    for phase, layer in ((Phase.DECODE, 1), (Phase.DECODE, 2), (Phase.PROMPT, 1), (Phase.DECODE, 3)):
        store.phase = phase
        model.fetch(store, layer, range(n_experts))
    cache = getattr(store, where)
    n_left = {layer: sum(ExpertKey(layer, e) in cache for e in range(n_experts)) for layer in (1, 2)}
    assert n_left[1] < n_left[2] == n_experts
    store.close()
