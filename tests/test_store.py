"""The store: the right bytes in the right slot whatever the caches, the drives and their failures; and what it counts."""

import dataclasses
import errno
import gc
import os
import random
import shutil
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from loop_mounts import mounted_ext4, run

import runtime.storage.drives
import runtime.storage.schedule
import runtime.storage.store
from layout.direct import Extent, ReadMode, read_extent
from layout.prepared import Copies, Prepared, open_prepared
from layout.reader import ReadRequest
from layout.record import expert_file_name
from manifests.errors import DamagedDataError
from manifests.manifest import Drive
from runtime.stats import ExpertCounts, new_counts
from runtime.storage.cache import ExpertKey
from runtime.storage.incoming import Phase
from runtime.storage.store import Store

N_BYTES = 9792
N_EXPERTS = 16
LAYERS = range(1, 10)
ALL = list(range(N_EXPERTS))
# Two drives that are known to be alike: else the first that is late on a busy machine is hardly asked again.
EQUALS = (20e6, 20e6)
# For so long a read may hang before its test has failed.
LONGEST_STALL_S = 12


@dataclasses.dataclass
class Model:
    """tiny-k3.1 with its experts on directories of the test's own; all of them on each unless told otherwise."""

    prepared: Prepared
    copies: Copies
    contents: dict[tuple[int, int], bytes]
    remarks: list[str]

    def path(self, drive: int, layer: int, expert: int) -> Path:
        return self.prepared.drive_directories[drive] / expert_file_name(layer, expert)

    def store(
        self,
        *,
        n_device: int = 4,
        n_host: int = 6,
        verify_every: int = 0,
        phase: Phase = Phase.DECODE,
        servers: Sequence[int] | None = None,
        device: str = "cpu",
        limits: Sequence[float] | None = None,
    ) -> Store:
        store = Store(
            self.prepared,
            self.copies,
            device=torch.device(device),
            n_device_slots=n_device,
            n_host_slots=n_host,
            verify_every=verify_every,
            counts=self.counts(),
            on_remark=self.remarks.append,
            servers=servers,
            limits=limits,
        )
        store.phase = phase
        return store

    def counts(self) -> ExpertCounts:
        return new_counts(len(self.prepared.manifest.drives))

    def fetch(self, store: Store, layer: int, experts: Sequence[int], *, n_most: int = N_EXPERTS) -> list[list[int]]:
        """Fetch and compare: a group's records are right when it comes, and still so when the next is asked for. Return the groups' experts."""
        groups = []
        for group in store.fetch_groups(layer, experts):
            assert 0 < len(group) <= n_most and len({slot for _, slot in group}) == len(group)
            for _ in range(2):
                for expert, slot in group:
                    assert bytes(store.record(slot).cpu().numpy()) == self.contents[layer, expert], (layer, expert)
            groups.append([expert for expert, _ in group])
        assert sorted(expert for group in groups for expert in group) == sorted(experts)
        return groups


Place = Callable[..., Model]


@pytest.fixture
def place(extractions: dict[str, Path], tmp_path: Path) -> Place:
    def make(*roots: Path | None, n_drives: int = 1, shares: Sequence[float] = ()) -> Model:
        prepared = open_prepared(extractions["tiny-k3.1"])
        directories = [root or tmp_path / f"drive-{n}" for n, root in enumerate(roots or (None,) * n_drives)]
        rng, old, drives = np.random.default_rng(1), prepared.manifest.drives[0], list[Drive]()
        for n, directory in enumerate(directories):
            holds = old.holds & (rng.random(old.holds.shape) < (shares[n] if shares else 1))
            directory.mkdir(exist_ok=True)
            for layer, expert in np.argwhere(holds).tolist():
                shutil.copyfile(prepared.expert_extent(0, layer, expert).path, directory / expert_file_name(layer, expert))
            drives.append(dataclasses.replace(old, directory=str(directory), tier="ABCD"[n], holds=holds))
        contents = {(layer, e): prepared.expert_extent(0, layer, e).path.read_bytes() for layer in LAYERS for e in ALL}
        changed = Prepared(prepared.path, dataclasses.replace(prepared.manifest, drives=tuple(drives)), prepared.hashes)
        return Model(changed, Copies(tuple(d.holds for d in drives), []), contents, [])

    return make


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize(("n_device", "n_host"), [(1, 1), (1, 20), (3, 2), (20, 1), (5, 7), (144, 144)])
def test_every_record_arrives_right_whatever_the_caches(place: Place, device: str, phase: Phase, n_device: int, n_host: int) -> None:
    model = place(n_drives=2)
    store = model.store(device=device, n_device=n_device, n_host=n_host, phase=phase, verify_every=3)
    for _ in range(2):
        for layer in LAYERS:
            model.fetch(store, layer, ALL, n_most=n_device)
    store.close()
    assert not model.remarks


def test_records_arrive_right_in_memory_and_through_the_page_cache(place: Place) -> None:
    root = Path("/dev/shm")
    if not os.access(root, os.W_OK):
        pytest.skip("no /dev/shm to write to")
    directory = root / f"ktier-test-{os.getpid()}"
    try:
        model = place(directory, None)
        store = model.store(servers=(0, 1))
        assert store.depths == [16, 3]
        for layer in LAYERS:
            model.fetch(store, layer, ALL)
        assert all(counts.n_reads > 0 for counts in store.counts.drives)
        store.close()
    finally:
        shutil.rmtree(directory)


def test_random_use_gives_the_right_bytes_and_counts_that_add_up(place: Place, device: str) -> None:
    """Phases, prefetches, broken-off layers and cold starts in any order."""
    model = place(n_drives=3, shares=(1.0, 0.5, 0.5))
    rng = random.Random(2)
    for n_device, n_host in ((2, 3), (6, 20), (30, 40)):
        store = model.store(device=device, n_device=n_device, n_host=n_host, verify_every=2, servers=(0, 1, 2))
        n_asked = 0
        for _ in range(150):
            layer, experts = rng.choice(LAYERS), sorted(rng.sample(ALL, rng.randint(1, 8)))
            store.phase = rng.choice(list(Phase))
            what = rng.random()
            if what < 0.3:
                store.prefetch(layer, rng.sample(ALL, 2))
            if what < 0.03:
                store.forget()
            if what > 0.95:
                groups = store.fetch_groups(layer, experts)
                next(groups)
                groups.close()
                store.counts = model.counts()
                n_asked = 0
                continue
            model.fetch(store, layer, experts, n_most=n_device)
            n_asked += len(experts)
        counts = store.counts
        assert counts.n_device_hits + counts.n_host_hits + counts.n_records == n_asked
        store.close()
    assert not model.remarks


def test_what_is_on_the_device_comes_first_then_the_pool_then_the_drives(place: Place) -> None:
    model = place()
    store = model.store(n_device=8, n_host=20)
    model.fetch(store, 1, range(8))
    # Four leave the device; the pool still holds them.
    model.fetch(store, 2, range(4))
    groups = model.fetch(store, 1, range(12))
    assert groups[0] == [4, 5, 6, 7] and groups[1][:4] == [0, 1, 2, 3]
    assert (store.counts.n_device_hits, store.counts.n_host_hits, store.counts.n_records) == (4, 4, 16)
    store.close()


def test_what_is_on_the_device_stays_while_others_are_uploaded(place: Place) -> None:
    model = place()
    store = model.store(n_device=4, n_host=20)
    model.fetch(store, 1, [4, 5])
    model.fetch(store, 1, [0, 1, 2, 3])
    assert model.fetch(store, 1, [0, 1, 2, 3, 4, 5])[0] == [0, 1, 2, 3]
    assert (store.counts.n_device_hits, store.counts.n_host_hits) == (4, 2)
    store.close()


@pytest.mark.parametrize(("n_device", "n_leaving"), [(40, 8), (20, 0)])
def test_half_of_what_is_read_leaves_the_pool_first_where_the_device_holds_more_than_a_token_needs(
    place: Place, n_device: int, n_leaving: int
) -> None:
    model = place()
    store = model.store(n_device=n_device, n_host=20)
    model.fetch(store, 1, ALL)
    assert len(store._host._leaving) == n_leaving
    store.close()


def test_counts_add_up(place: Place) -> None:
    model = place(n_drives=2)
    store = model.store(n_device=10, n_host=30, servers=(0, 1))
    start, counts, n_reads = time.perf_counter(), store.counts, 0
    for _ in range(3):
        for layer in (1, 2):
            before = counts.n_records
            model.fetch(store, layer, ALL)
            # A layer's last eight records come in three chunks each.
            n_read = counts.n_records - before
            n_reads += n_read + 2 * min(n_read, 8)
    elapsed = time.perf_counter() - start
    store.close()
    assert counts.n_device_hits + counts.n_host_hits + counts.n_records == 96
    assert counts.read_bytes == counts.n_records * N_BYTES
    assert counts.n_reads == n_reads
    assert counts.uploaded_bytes == (counts.n_records + counts.n_host_hits) * N_BYTES
    assert sum(counts.device_hits_by_layer.values()) == counts.n_device_hits
    assert sum(counts.host_hits_by_layer.values()) == counts.n_host_hits
    assert sum(counts.records_by_layer.values()) == counts.n_records
    assert sum(drive.n_last for drive in counts.drives) == counts.n_layers == 6
    assert {tier: (c.n_reads, c.read_bytes) for tier, c in counts.tiers.items()} == {
        tier: (c.n_reads, c.read_bytes) for tier, c in zip("AB", counts.drives, strict=True)
    }
    assert all(0 < drive.busy_s <= elapsed for drive in counts.drives)
    assert 0 < counts.wait_s + counts.host_s <= elapsed


def test_the_prompt_pass_reads_whole_records(place: Place) -> None:
    model = place()
    store = model.store(phase=Phase.PROMPT)
    model.fetch(store, 1, ALL)
    assert store.counts.n_reads == N_EXPERTS and store.counts.read_bytes == N_EXPERTS * N_BYTES
    store.close()


def test_a_prompt_pass_leaves_what_decode_used(place: Place) -> None:
    model = place()
    store = model.store(n_device=24, n_host=30)
    model.fetch(store, 1, ALL)
    store.phase = Phase.PROMPT
    for layer in LAYERS:
        model.fetch(store, layer, ALL)
    store.phase, store.counts = Phase.DECODE, model.counts()
    model.fetch(store, 1, ALL)
    assert store.counts.n_device_hits == N_EXPERTS
    store.close()


def test_a_layer_that_is_broken_off_leaves_everything_usable(place: Place) -> None:
    model = place()
    store = model.store(n_device=3, n_host=3)
    for n in range(20):
        for _ in zip(store.fetch_groups(1 + n % 9, ALL), range(n % 4)):  # noqa: B905
            pass
    for layer in LAYERS:
        model.fetch(store, layer, ALL)
    store.close()


def test_reads_that_go_on_after_a_layer_was_broken_off_touch_no_slot(place: Place, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.storage.drives, "LEAST_PIECE", 4096)
    model = place(n_drives=2)
    slow, fast = ALL[:12], ALL[12:]
    model.copies.holds[0][:, fast] = model.copies.holds[1][:, slow] = False
    # A twentieth of a second for a record from the first drive, in three pieces.
    store = model.store(n_device=8, n_host=20, device=device, servers=(0, 1), limits=[200_000.0, 1e9])
    for layer in (1, 2, 3):
        groups = cast(Generator[object], store.fetch_groups(layer, slow))
        next(groups)
        groups.close()
        assert store._draining
        model.fetch(store, layer, fast)
        wait_for(lambda: not store._draining, store)
        n_records = store.counts.n_records
        model.fetch(store, layer, fast)
        assert store.counts.n_records == n_records
    store.close()


# Prefetch.


def test_a_right_guess_is_a_host_hit_and_a_wrong_one_is_told(place: Place) -> None:
    model = place()
    store = model.store(n_device=20, n_host=40)
    store.prefetch(2, [3, 4])
    model.fetch(store, 1, [0, 1])
    wait_for(lambda: not store._incoming, store)
    model.fetch(store, 2, [3, 5])
    counts = store.counts
    assert (counts.n_prefetch_issued, counts.n_prefetch_used, counts.n_prefetch_cancelled, counts.n_prefetch_wasted) == (2, 1, 0, 1)
    assert counts.n_host_hits == 1 and counts.n_records == 3
    store.close()


def test_a_guess_that_is_under_way_when_it_is_needed_is_not_read_twice(place: Place) -> None:
    model = place()
    store = model.store(n_device=20, n_host=40)
    store.prefetch(1, [3])
    model.fetch(store, 1, [3, 4])
    assert store.counts.n_prefetch_used == 1
    assert store.counts.read_bytes == 2 * N_BYTES
    store.close()


def test_what_is_guessed_while_a_layer_s_reads_are_under_way_is_read_behind_them(place: Place) -> None:
    model = place()
    store, asked = model.store(n_device=20, n_host=40, limits=[2e6]), list[bool]()

    def guess() -> None:
        if not asked:
            store.prefetch(2, [3, 4])
        # Neither a demand nor a guess waits for a drive.
        asked.append(bool(store._scheduler._groups))

    for group in store.fetch_groups(1, ALL[:10], meanwhile=guess):
        for expert, slot in group:
            assert bytes(store.record(slot).cpu().numpy()) == model.contents[1, expert]
    assert asked and not any(asked) and store.counts.n_prefetch_issued == 2
    model.fetch(store, 2, [3, 4, 5])
    counts = store.counts
    assert counts.n_prefetch_used == 2 and counts.read_bytes == 13 * N_BYTES and counts.n_failed == 0
    store.close()


def test_a_chosen_expert_that_is_on_the_device_stays_where_the_device_was_told_until_it_is_handed_out(place: Place) -> None:
    model = place()
    store = model.store(n_device=4, n_host=20)
    for layer, experts in ((1, [0, 1]), (2, [0, 1])):
        model.fetch(store, layer, experts)
    told, n_found = store.addresses(1).copy(), 0
    # The cache is full, and these two are the least recently used.
    for group in store.fetch_groups(1, [5, 0, 1]):
        for expert, slot in group:
            assert bytes(store.record(slot).cpu().numpy()) == model.contents[1, expert]
            if told[expert]:
                assert store.address(slot) == told[expert]
                n_found += 1
    assert n_found == 2
    store.close()


def test_reads_go_on_to_the_device_while_right_guesses_wait_in_the_pool(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    model = place()
    store = model.store(n_device=8, n_host=40)
    store.prefetch(2, [6, 7])
    model.fetch(store, 1, [0, 1])
    wait_for(lambda: not store._incoming, store)
    asked, submit = list[ReadRequest](), store._reader.submit

    def spy(*requests: ReadRequest) -> list[int]:
        asked.extend(requests)
        return submit(*requests)

    monkeypatch.setattr(store._reader, "submit", spy)
    model.fetch(store, 2, [6, 7, 0, 1, 2, 3, 4, 5])
    assert store.counts.n_host_hits == 2 and len(asked) == 6
    # As many slots as the layer needs: none of the reads takes one of those that the guesses wait for.
    assert all(request.target is not None for request in asked)
    store.close()


def test_what_comes_while_a_guess_is_begun_is_not_waited_for_again(place: Place) -> None:
    model = place()
    store = model.store(n_device=20, n_host=40)
    monotonic = time.perf_counter

    def guess() -> None:
        # By now the layer's last record is there.
        until = monotonic() + 0.05
        while monotonic() < until:
            pass
        store.prefetch(2, [])

    began = store.counts.wait_s
    for _ in store.fetch_groups(1, [0, 1], meanwhile=guess):
        pass
    # A wait for what has come already would take a tenth of a second.
    assert store.counts.wait_s - began < 0.09
    store.close()


# The first is also how reads end that the store gave up itself.
@pytest.mark.parametrize("code", [errno.ECANCELED, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.usefixtures("python_reads")
def test_a_drive_that_answers_with_an_error_in_mid_run_has_failed(place: Place, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = place(n_drives=2)
    bad = model.prepared.drive_directories[1]

    def read(extent: Extent, buffer: memoryview, mode: ReadMode) -> memoryview:
        if extent.path.is_relative_to(bad):
            raise OSError(code, os.strerror(code), str(extent.path))
        return read_extent(extent, buffer, mode)

    store = model.store(n_device=20, n_host=40, servers=(0, 1))
    model.fetch(store, 1, ALL)
    assert store.counts.n_failed == 0
    monkeypatch.setattr("layout.read_backends.read_extent", read)
    model.fetch(store, 2, ALL)
    assert store.counts.drives[1].n_failed > 0 and store.counts.drives[0].n_failed == 0
    assert any(os.strerror(code) in remark and "set aside" in remark for remark in model.remarks)
    store.close()


@pytest.mark.parametrize("threads", ["C", "Python"])
def test_what_a_broken_off_layer_had_asked_for_is_hardly_read(place: Place, threads: str, request: pytest.FixtureRequest) -> None:
    if threads == "Python":
        request.getfixturevalue("python_reads")
    model = place()
    # Twenty milliseconds a record.
    store = model.store(n_device=20, n_host=40, limits=[5e5])
    groups = cast(Generator[object], store.fetch_groups(1, ALL))
    next(groups)
    groups.close()
    n_read = store.counts.read_bytes
    model.fetch(store, 2, [0])
    wait_for(lambda: not store._draining, store)
    assert store.counts.read_bytes - n_read <= (1 + store.depths[0]) * N_BYTES and store.counts.n_failed == 0
    store.close()


def test_guesses_do_not_outlive_a_layer_that_is_broken_off(place: Place) -> None:
    model = place()
    store = model.store(n_device=20, n_host=40, limits=[5e5])
    groups = cast(Generator[object], store.fetch_groups(1, ALL, meanwhile=lambda: store.prefetch(2, [3, 4])))
    next(groups)
    groups.close()
    assert not store._prefetched and store.counts.n_prefetch_cancelled == store.counts.n_prefetch_issued == 2
    wait_for(lambda: not store._draining, store)
    model.fetch(store, 3, ALL)
    store.close()


def test_a_guess_that_turns_out_wrong_is_given_up(place: Place) -> None:
    model = place()
    # Ten milliseconds a record.
    store = model.store(n_device=20, n_host=40, limits=[1e6])
    store.prefetch(1, [3, 4, 5, 6, 7, 8])
    model.fetch(store, 1, [9])
    assert store.counts.n_prefetch_cancelled > 0
    wait_for(lambda: not store._scheduler.n_in_flight and not store._scheduler.has_waiting, store)
    # At most what was under way already was read for nothing.
    assert store.counts.read_bytes <= (1 + store.depths[0]) * N_BYTES < (1 + 6) * N_BYTES
    model.fetch(store, 1, ALL)
    store.close()


def wait_for(is_true: Callable[[], bool], store: Store, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.001)
        # Takes in what has arrived and starts what may start.
        store.prefetch(1, [])


# Failures.


def flip(path: Path, at: int = 5000) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, 5000)


@pytest.mark.parametrize("damage", [Path.unlink, cut, flip])
@pytest.mark.parametrize("phase", list(Phase))
def test_a_record_that_goes_bad_in_mid_run_comes_from_its_other_copy(place: Place, phase: Phase, damage: Callable[[Path], None]) -> None:
    model = place(n_drives=2)
    store = model.store(n_device=4, n_host=4, verify_every=1, phase=phase, servers=(0, 1), limits=EQUALS)
    model.fetch(store, 1, ALL)
    for layer in LAYERS:
        for expert in ALL:
            damage(model.path(0, layer, expert))
    for layer in LAYERS:
        model.fetch(store, layer, ALL)
    assert store.counts.drives[0].n_failed > 0 and store.counts.drives[1].n_failed == 0
    assert any(str(model.prepared.drive_directories[0]) in remark for remark in model.remarks)
    store.close()


def test_a_drive_that_failed_is_set_aside_and_asked_where_it_has_the_only_copy(place: Place) -> None:
    model = place(n_drives=2, shares=(1.0, 0.5))
    store = model.store(n_device=4, n_host=4, servers=(0, 1))
    both = [(layer, e) for layer in LAYERS for e in ALL if model.copies.holds[1][layer, e]]
    for layer, expert in both:
        model.path(0, layer, expert).unlink()
    for layer in LAYERS:
        model.fetch(store, layer, ALL)
    # After the first failures the drive is not asked for what the other has.
    assert 0 < store.counts.drives[0].n_failed <= 6
    assert store.counts.drives[0].n_pauses > 0
    store.close()


@pytest.mark.parametrize("damage", [Path.unlink, cut, flip])
@pytest.mark.parametrize("phase", list(Phase))
def test_the_last_copy_failing_ends_the_run_with_names(place: Place, phase: Phase, damage: Callable[[Path], None]) -> None:
    model = place(n_drives=2)
    store = model.store(n_device=20, n_host=20, verify_every=1, phase=phase)
    for drive in (0, 1):
        damage(model.path(drive, 1, 7))
    seen: list[int] = []
    with pytest.raises(
        DamagedDataError, match=r"layer 1 expert 7: no readable copy is left \(tried .*drive-0 \(tier A\), .*drive-1 \(tier B\)\)"
    ) as caught:
        for group in store.fetch_groups(1, ALL):
            seen += [expert for expert, _ in group]
    assert caught.value.exit_code == 4
    assert 7 not in seen
    model.fetch(store, 1, [e for e in ALL if e != 7])
    store.close()


def test_a_guess_whose_copies_are_all_bad_ends_nothing(place: Place) -> None:
    model = place()
    store = model.store(n_device=20, n_host=20)
    model.path(0, 2, 3).unlink()
    store.prefetch(2, [3])
    model.fetch(store, 1, ALL)
    model.fetch(store, 2, [4, 5])
    with pytest.raises(DamagedDataError):
        model.fetch(store, 2, [3])
    store.close()


@pytest.fixture
def stalled(place: Place) -> Iterator[tuple[Model, Callable[[Path], None]]]:
    """A model, and a way to let reads of a file hang: it becomes a pipe that nobody writes to.

    All are let go at the end, or once the test has failed because it waits for them.
    """
    pipes, is_over = list[Path](), threading.Event()

    def stall(path: Path) -> None:
        path.unlink()
        os.mkfifo(path)
        pipes.append(path)

    def let_go() -> None:
        is_over.wait(LONGEST_STALL_S)
        while True:
            for pipe in pipes:
                release(pipe)
            if is_over.wait(0.01):
                return

    model, watchdog, began = place(n_drives=2), threading.Thread(target=let_go), time.monotonic()
    watchdog.start()
    yield model, stall
    is_over.set()
    watchdog.join()
    assert time.monotonic() - began < LONGEST_STALL_S, "a read that hung was waited for"


def release(pipe: Path) -> None:
    """Let a hanging open() of a pipe go on; without one there is nothing to do."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return


def test_a_read_that_hangs_comes_from_the_other_copy_and_its_slot_is_not_used_meanwhile(stalled: tuple[Model, Callable[[Path], None]]) -> None:
    model, stall = stalled
    store = model.store(n_device=3, n_host=3, servers=(0, 1), limits=EQUALS)
    model.fetch(store, 1, ALL)
    stall(model.path(0, 2, 5))
    # Until it is the first drive's turn to deliver it.
    rng = random.Random(1)
    for _ in range(50):
        for layer in LAYERS:
            model.fetch(store, layer, rng.sample(ALL, len(ALL)))
        if store.counts.drives[0].n_slow:
            break
    assert store.counts.drives[0].n_slow >= 1
    assert any("layer 2 expert 5" in remark and "no answer for" in remark for remark in model.remarks)
    # The slow read may write into its slot yet.
    assert ExpertKey(2, 5) in store._draining
    wait_for(lambda: release(model.path(0, 2, 5)) or not store._draining, store)
    assert len(store._spares) == 2
    store.close()


def close_letting_go(store: Store, pipes: Sequence[Path]) -> None:
    """Close a store whose threads hang in reads of pipes."""
    closing = threading.Thread(target=store.close)
    closing.start()
    while closing.is_alive():
        for pipe in pipes:
            release(pipe)
        closing.join(0.01)


@pytest.fixture
def soon_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.storage.schedule, "SLOW_AT_LEAST_S", 0.2)


@pytest.mark.usefixtures("soon_late")
def test_a_room_is_given_back_once_where_a_drive_hangs_and_the_other_copy_fails(stalled: tuple[Model, Callable[[Path], None]]) -> None:
    model, stall = stalled
    stall(model.path(0, 1, 5))
    model.path(1, 1, 5).unlink()
    store = model.store(n_device=20, n_host=20, phase=Phase.PROMPT, servers=(0, 1), limits=EQUALS)
    # Long after the other copy was asked.
    released = threading.Timer(1.5, release, [model.path(0, 1, 5)])
    released.start()
    with pytest.raises(DamagedDataError, match="layer 1 expert 5: no readable copy is left"):
        model.fetch(store, 1, [5])
    released.join()
    wait_for(lambda: not store._draining, store)
    assert len(store._spares) == len(set(store._spares)) == 2
    store.close()


@pytest.mark.usefixtures("soon_late")
@pytest.mark.parametrize("phase", list(Phase))
def test_however_many_reads_of_a_drive_hang_the_other_one_brings_them_all(stalled: tuple[Model, Callable[[Path], None]], phase: Phase) -> None:
    model, stall = stalled
    for expert in ALL[:8]:
        stall(model.path(0, 1, expert))
    store = model.store(n_device=20, n_host=20, phase=phase, servers=(0, 1), limits=EQUALS)
    model.fetch(store, 1, ALL[:8])
    said = [remark for remark in model.remarks if "no answer for" in remark]
    assert len(said) == len({remark.split(":")[0] for remark in said}) > 2
    close_letting_go(store, [model.path(0, 1, expert) for expert in ALL[:8]])


@pytest.mark.usefixtures("soon_late")
def test_a_record_that_has_its_slot_does_not_wait_behind_others_that_need_one(stalled: tuple[Model, Callable[[Path], None]]) -> None:
    model, stall = stalled
    stall(model.path(0, 1, 0))
    # The only slot is the first record's; the fourth that is begun is its other copy, which is hashed, and whole only behind the second and third.
    store = model.store(n_device=1, n_host=20, phase=Phase.PROMPT, servers=(0, 1), limits=EQUALS, verify_every=4)
    model.fetch(store, 1, [0, 1, 2])
    assert store.counts.n_verified == 1
    close_letting_go(store, [model.path(0, 1, 0)])


def test_after_a_while_it_says_what_a_layer_waits_for(stalled: tuple[Model, Callable[[Path], None]], monkeypatch: pytest.MonkeyPatch) -> None:
    model, stall = stalled
    assert runtime.storage.store._ALARM_S == 10.0
    monkeypatch.setattr(runtime.storage.store, "_ALARM_S", 0.3)
    for drive in (0, 1):
        stall(model.path(drive, 3, 5))
    store = model.store(n_device=20, n_host=20, servers=(0, 1))

    def let_go() -> None:
        # Once the fetch is over without them there will be no more.
        while sum("waiting for" in remark for remark in model.remarks) < 3 and not is_over.is_set():
            time.sleep(0.01)
        while not is_over.wait(0.01):
            for drive in (0, 1):
                release(model.path(drive, 3, 5))

    is_over = threading.Event()
    helper = threading.Thread(target=let_go, daemon=True)
    helper.start()
    with pytest.raises(DamagedDataError, match="layer 3 expert 5: no readable copy is left"):
        model.fetch(store, 3, ALL)
    # Its threads must be let go, too.
    store.close()
    is_over.set()
    helper.join()
    alarms = [remark for remark in model.remarks if "waiting for" in remark]
    assert len(alarms) >= 3 and all("layer 3" in alarm and "for experts 5" in alarm for alarm in alarms)
    assert any(str(directory) in alarms[0] for directory in model.prepared.drive_directories)


def test_a_directory_that_is_unmounted_in_mid_run_costs_nothing_but_its_reads(place: Place, tmp_path: Path) -> None:
    with mounted_ext4(tmp_path / "disk", n_bytes=64 << 20) as root:
        model = place(root / "experts", None)
        store = model.store(n_device=4, n_host=4)
        model.fetch(store, 1, ALL)
        run("umount", "--lazy", root)
        try:
            for layer in LAYERS:
                model.fetch(store, layer, ALL)
        finally:
            # For the fixture to unmount.
            run("mount", "-t", "tmpfs", "none", root)
        assert store.counts.drives[0].n_failed > 0 and store.counts.drives[1].n_failed == 0
        store.close()


def test_a_device_that_gives_errors_in_mid_run_costs_nothing_but_its_reads(place: Place, tmp_path: Path) -> None:
    name = f"ktier-test-{os.getpid()}"
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    n_sectors = (64 << 20) // 512
    try:
        loop = run("losetup", "--find", "--show", image).strip()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no loop device may be made here: {getattr(error, 'stderr', error)}")
    try:
        try:
            run("dmsetup", "create", name, "--table", f"0 {n_sectors} linear {loop} 0")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no device may be mapped here: {getattr(error, 'stderr', error)}")
        try:
            fail_in_mid_run(place, tmp_path / "mount", name, n_sectors)
        finally:
            run("dmsetup", "remove", "--force", name)
    finally:
        run("losetup", "--detach", loop)


def fail_in_mid_run(place: Place, root: Path, name: str, n_sectors: int) -> None:
    run("mkfs.ext4", "-q", f"/dev/mapper/{name}")
    root.mkdir()
    run("mount", f"/dev/mapper/{name}", root)
    try:
        model = place(root / "experts", None)
        run("sync")
        store = model.store(n_device=4, n_host=4, servers=(0, 1))
        model.fetch(store, 1, ALL)
        assert store.counts.drives[0].n_failed == 0
        run("dmsetup", "reload", name, "--table", f"0 {n_sectors} error")
        run("dmsetup", "resume", name)
        for layer in LAYERS:
            model.fetch(store, layer, ALL)
        assert store.counts.drives[0].n_failed > 0 and store.counts.drives[1].n_failed == 0
        assert any("Input/output error" in remark and str(root) in remark for remark in model.remarks)
        store.close()
    finally:
        run("umount", "--lazy", root)


def test_a_store_that_is_closed_gives_its_device_memory_back_at_once(place: Place) -> None:
    store = place().store(n_device=20, n_host=20)
    slots = weakref.ref(store._device._slots)
    gc.disable()
    try:
        store.close()
        assert slots() is None
    finally:
        gc.enable()
