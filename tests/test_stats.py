"""What is counted of drives: the time in which they are busy, and which of them a layer waits for last."""

import time
from pathlib import Path

import pytest
from test_store import ALL, Place, place  # noqa: F401 (a fixture)
from test_synthetic import folders, stats_of  # noqa: F401 (a fixture)

from runtime.stats import DriveCounts


def test_a_drive_is_busy_while_at_least_one_read_is_under_way() -> None:
    counts = DriveCounts()
    counts.begin(0.0)
    counts.begin(1.0)
    counts.end(2.0)
    counts.end(3.0)
    counts.begin(10.0)
    counts.end(11.0)
    assert counts.busy_s == 4.0 and counts.n_reads == 3


def test_the_drive_that_a_layer_waited_for_longest_is_last(place: Place) -> None:  # noqa: F811
    model = place(n_drives=2)
    model.copies.holds[0][:, 8:] = model.copies.holds[1][:, :8] = False
    # Eighty milliseconds for the first drive's half.
    store = model.store(n_device=20, n_host=40, servers=(0, 1), limits=(1e6, 100e6))
    began = time.perf_counter()
    model.fetch(store, 1, ALL)
    elapsed = time.perf_counter() - began
    slow, fast = store.counts.drives
    assert (slow.n_last, fast.n_last) == (1, 0) and 0.02 < slow.last_by_s < elapsed and fast.last_by_s == 0
    store.close()


def test_a_drive_of_a_run_is_slowed_down_and_shares_of_being_last_add_up(folders: tuple[Path, Path]) -> None:  # noqa: F811
    a, b = folders
    drives = [drive["decode"] for drive in stats_of("--dir", f"{a}:0.001", "--dir", f"{b}:0.002")["drives"]]
    rates = [drive["bytes_per_s_while_busy"] for drive in drives]
    assert 0 < rates[0] < 1.5e6 and 0 < rates[1] < 3e6, rates
    assert sum(drive["share_of_being_last"] for drive in drives) == pytest.approx(1)
