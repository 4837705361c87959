"""Records with a wrong hash in the store: whose copy it is, and that it is not asked again."""

import time

import pytest
from test_store import EQUALS, Place, flip, place  # noqa: F401 (a fixture)

from layout.reader import ReadRequest
from manifests.errors import DamagedDataError
from runtime.storage.incoming import Phase


def test_a_copy_with_a_wrong_hash_is_not_asked_again_and_its_drive_is_set_aside(place: Place) -> None:  # noqa: F811
    model = place(n_drives=2)
    store = model.store(n_device=1, n_host=1, verify_every=1, phase=Phase.PROMPT, servers=(0, 1), limits=(40e6, 20e6))
    flip(model.path(0, 1, 3))
    for _ in range(30):
        model.fetch(store, 1, [3])
        if store.counts.drives[0].n_failed:
            break
        model.fetch(store, 2, [3])
    assert store.counts.drives[0].n_failed == 1 and store._scheduler.is_paused(0, time.perf_counter())
    # The drive is asked again for others, but not for this one, not even where no other copy is left.
    store._scheduler._paused_until = [-1.0, -1.0]
    for _ in range(10):
        model.fetch(store, 1, [3])
        model.fetch(store, 2, [3])
    model.path(1, 1, 3).unlink()
    with pytest.raises(DamagedDataError, match="layer 1 expert 3: no readable copy is left"):
        model.fetch(store, 1, [3])
    assert store.counts.drives[0].n_failed == 1
    store.close()


def test_a_record_in_parts_with_a_wrong_hash_is_read_whole_from_one_drive_at_a_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    model = place(n_drives=2)
    store = model.store(verify_every=1, servers=(0, 1), limits=EQUALS)
    # In the part that the first drive delivers.
    flip(model.path(0, 1, 3), at=100)
    submit, asked = store._reader.submit, list[tuple[int, int]]()

    def spy(*requests: ReadRequest) -> list[int]:
        asked.extend((request.drive, request.extent.n_bytes) for request in requests)
        assert len(asked) <= 5, "it is read in parts again"
        return submit(*requests)

    monkeypatch.setattr(store._reader, "submit", spy)
    model.fetch(store, 1, [3])
    whole = sum(n_bytes for _, n_bytes in asked[:3])
    assert {drive for drive, _ in asked[:3]} == {0, 1} and asked[3:] == [(0, whole), (1, whole)]
    assert (store.counts.n_verified, [drive.n_failed for drive in store.counts.drives]) == (3, [1, 0])
    in_parts, (name, *_) = model.remarks[0], store._names
    assert f"in parts from {name}, " in in_parts and in_parts.endswith("reading it whole from one drive at a time")
    store.close()
