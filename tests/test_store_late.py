"""The store over a GPU whose work happens late: no room and no slot may be used anew before what was launched on it is done."""

import ctypes
import random
import time
from collections.abc import Generator
from typing import cast

import pytest
from simulated_gpu import SimulatedGpu
from test_store import ALL, LAYERS, N_BYTES, Model, Place, place  # noqa: F401 (a fixture)

import runtime.storage.device_slots
import runtime.storage.drives
import runtime.storage.schedule
from runtime.storage.incoming import Phase
from runtime.storage.store import Store

SECONDS = 0.7


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    # The records of a tiny model are cut too, into pieces of which two are copied at once.
    monkeypatch.setattr(runtime.storage.drives, "LEAST_PIECE", 4096)
    monkeypatch.setattr(runtime.storage.device_slots, "LEAST_COPY", 8192)
    return SimulatedGpu(monkeypatch)


class Reader:
    """Launches work that looks at records, as decode does, and keeps what was not as it should be."""

    def __init__(self, gpu: SimulatedGpu, model: Model, store: Store) -> None:
        self.gpu, self.model, self.store = gpu, model, store
        self.wrong, self.n_looked_at = list[tuple[str, int, int]](), 0

    def look(self, what: str, layer: int, expert: int, address: int) -> None:
        self.n_looked_at += 1
        if ctypes.string_at(address, N_BYTES) != self.model.contents[layer, expert]:
            self.wrong.append((what, layer, expert))

    def fetch(self, layer: int, experts: list[int], *, n_groups: int | None = None, guesses: tuple[int, list[int]] | None = None) -> None:
        """Fetch a layer's experts, or only the first groups of them."""
        store = self.store
        self.gpu.wait_for_results()
        told = [(expert, int(address)) for expert in experts if (address := store.addresses(layer)[expert])]
        # What the device was told that it has is used from now on.
        self.gpu.launch(lambda: [self.look("resident", layer, expert, address) for expert, address in told])
        meanwhile = None if guesses is None else lambda: store.prefetch(*guesses)
        groups = cast(Generator[list[tuple[int, int]]], store.fetch_groups(layer, experts, meanwhile=meanwhile))
        for n, group in enumerate(groups):
            if n == n_groups:
                break
            there = [(expert, store.address(slot)) for expert, slot in group]
            self.gpu.launch(lambda there=there: [self.look("arrived", layer, expert, address) for expert, address in there])  # type: ignore[misc]
        groups.close()


@pytest.mark.parametrize("n_host", [2, 9, 40])
@pytest.mark.parametrize(("phase", "verify_every"), [(Phase.DECODE, 0), (Phase.DECODE, 3), (Phase.PROMPT, 0)])
def test_records_are_right_whatever_is_broken_off(place: Place, gpu: SimulatedGpu, phase: Phase, verify_every: int, n_host: int) -> None:  # noqa: F811
    model, rng, layer = place(n_drives=2), random.Random(n_host), 0
    store = model.store(n_device=9, n_host=n_host, phase=phase, verify_every=verify_every, servers=(0, 1))
    reader, until = Reader(gpu, model, store), time.monotonic() + SECONDS
    while time.monotonic() < until:
        layer = rng.choice([other for other in LAYERS[:4] if other != layer])
        guesses = (layer + 1, rng.sample(ALL, 2)) if phase is Phase.DECODE and rng.random() < 0.5 else None
        reader.fetch(layer, rng.sample(ALL, rng.randint(1, len(ALL))), n_groups=rng.choice([0, 1, 2, 99, 99, 99, 99]), guesses=guesses)
    gpu.wait_for_results()
    store.close()
    assert not model.remarks and not reader.wrong and reader.n_looked_at > 100


def test_records_are_right_while_every_read_is_late_and_asked_of_the_other_drive(
    place: Place,  # noqa: F811
    gpu: SimulatedGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"SLOW_AT_LEAST_S": 0.004, "SLOW_FACTOR": 2.0, "FIRST_PAUSE_S": 0.003, "LONGEST_PAUSE_S": 0.02}.items():
        monkeypatch.setattr(runtime.storage.schedule, name, value)
    monkeypatch.setattr(runtime.storage.store, "_TICK_S", 0.002)
    model: Model = place(n_drives=2)
    store, rng, layer = model.store(n_device=20, n_host=20, servers=(0, 1), limits=(4e6, 4e6)), random.Random(1), 0
    # What it believes of the drives is a hundred times what they do.
    for server in store._scheduler._servers:
        server.prior = 1e9
    reader, until = Reader(gpu, model, store), time.monotonic() + 2 * SECONDS
    while time.monotonic() < until:
        layer = rng.choice([other for other in LAYERS if other != layer])
        reader.fetch(layer, rng.sample(ALL, rng.randint(1, len(ALL))))
    gpu.wait_for_results()
    assert sum(drive.n_slow for drive in store.counts.drives) > 0 and not reader.wrong
    assert len(set(store._spares)) == len(store._spares)
    store.close()


def test_waiting_for_an_upload_to_free_a_host_slot_is_counted(place: Place, gpu: SimulatedGpu) -> None:  # noqa: F811
    model = place()
    store = model.store(n_device=20, n_host=1)
    began = time.perf_counter()
    Reader(gpu, model, store).fetch(1, ALL)
    elapsed, counts = time.perf_counter() - began, store.counts
    assert 0 < counts.upload_wait_s <= elapsed and counts.idle_s + counts.host_s <= elapsed
    gpu.wait_for_results()
    store.close()
