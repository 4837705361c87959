"""Guesses in the store: they give way to what is needed, evict nothing that was used, and what was right stays."""

from test_store import ALL, N_BYTES, N_EXPERTS, Place, place, wait_for  # noqa: F401 (a fixture)

from runtime.storage.cache import ExpertKey

# Ten milliseconds a record.
SLOW = (1e6, 1e6)


def test_it_is_guessed_only_once_no_demand_waits_for_a_drive(place: Place) -> None:  # noqa: F811
    model = place(n_drives=2)
    store, waiting = model.store(n_device=20, n_host=40, servers=(0, 1), limits=SLOW), list[bool]()
    for _ in store.fetch_groups(1, ALL, meanwhile=lambda: waiting.append(store._scheduler.has_waiting)):
        pass
    # It did wait before.
    assert waiting and not any(waiting) and store.counts.n_waits > len(waiting)
    store.close()


def test_a_wrong_guess_that_waits_for_a_drive_is_never_read(place: Place) -> None:  # noqa: F811
    model = place(n_drives=2)
    store = model.store(n_device=20, n_host=40, servers=(0, 1), limits=SLOW)
    store.prefetch(1, range(14))
    n_begun = store._scheduler.n_in_flight
    model.fetch(store, 1, [15])
    wait_for(lambda: not store._scheduler.n_in_flight, store)
    # Those that were under way, and the demand's three chunks.
    assert store.counts.n_reads <= n_begun + 3 < 14
    store.close()


def test_guesses_wait_behind_a_demand_that_comes_later(place: Place) -> None:  # noqa: F811
    model = place(n_drives=2)
    store = model.store(n_device=20, n_host=40, servers=(0, 1), limits=SLOW)
    store.prefetch(2, range(14))
    model.fetch(store, 1, [15])
    assert store._scheduler._groups and not store._scheduler.has_waiting
    store.close()


def test_a_guess_evicts_nothing_that_was_used(place: Place) -> None:  # noqa: F811
    model = place()
    store = model.store(n_device=2, n_host=16)
    model.fetch(store, 1, ALL)
    for n in range(40):
        store.prefetch(2 + n % 8, [n % 16])
    # But for a prompt's room.
    assert sum(ExpertKey(1, e) in store._host for e in ALL) >= N_EXPERTS - 8
    store.close()


def test_a_guess_that_is_needed_stays_as_what_decode_used(place: Place) -> None:  # noqa: F811
    model = place()
    store = model.store(n_device=20, n_host=40, limits=[1e6])
    store.prefetch(2, [3])
    model.fetch(store, 2, [3])
    assert store.counts.read_bytes == N_BYTES and ExpertKey(2, 3) in store._host._decode
    store.close()
