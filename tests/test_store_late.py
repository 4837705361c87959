"""The store over a device whose copies happen late: no room and no slot may be used anew before they have."""

import random
import time

import pytest
from late_copies import LateSlots
from test_store import ALL, LAYERS, Model, Place, place  # noqa: F401 (a fixture)

import runtime.storage.device_cache
import runtime.storage.drives
import runtime.storage.schedule
from runtime.storage.incoming import Phase

SECONDS = 0.7


@pytest.fixture(autouse=True)
def late_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.storage.device_cache, "open_device_slots", LateSlots)
    # The records of a tiny model are cut too.
    monkeypatch.setattr(runtime.storage.drives, "LEAST_PIECE", 4096)


@pytest.mark.parametrize("n_host", [2, 9, 40])
@pytest.mark.parametrize(("phase", "verify_every"), [(Phase.DECODE, 0), (Phase.DECODE, 3), (Phase.PROMPT, 0)])
def test_records_are_right_whatever_is_broken_off(place: Place, phase: Phase, verify_every: int, n_host: int) -> None:  # noqa: F811
    model = place(n_drives=2)
    store, rng, until = (
        model.store(n_device=9, n_host=n_host, phase=phase, verify_every=verify_every, servers=(0, 1)),
        random.Random(n_host),
        time.monotonic(),
    )
    until += SECONDS
    while time.monotonic() < until:
        layer, experts = rng.choice(LAYERS), rng.sample(ALL, rng.randint(1, len(ALL)))
        if rng.random() < 0.2:
            next(iter(store.fetch_groups(layer, experts)))
        else:
            model.fetch(store, layer, experts)
    store.close()
    assert not model.remarks


def test_records_are_right_while_every_read_is_late_and_asked_of_the_other_drive(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    for name, value in {"SLOW_AT_LEAST_S": 0.004, "SLOW_FACTOR": 2.0, "FIRST_PAUSE_S": 0.003, "LONGEST_PAUSE_S": 0.02}.items():
        monkeypatch.setattr(runtime.storage.schedule, name, value)
    monkeypatch.setattr(runtime.storage.store, "_TICK_S", 0.002)
    model: Model = place(n_drives=2)
    store, rng = model.store(n_device=20, n_host=20, servers=(0, 1), limits=(4e6, 4e6)), random.Random(1)
    # What it believes of the drives is a hundred times what they do.
    for server in store._scheduler._servers:
        server.prior = 1e9
    until = time.monotonic() + 2 * SECONDS
    while time.monotonic() < until:
        model.fetch(store, rng.choice(LAYERS), rng.sample(ALL, rng.randint(1, len(ALL))))
    assert sum(drive.n_slow for drive in store.counts.drives) > 0
    assert len(set(store._spares)) == len(store._spares)
    store.close()
