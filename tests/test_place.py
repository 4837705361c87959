"""kprep place: the plan as a pure function, and what the command leaves on the drives."""

import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Outcome, command, succeed
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from layout.drives import RAM_FILE_SYSTEMS, describe_directory
from layout.record import expert_file_name
from manifests.errors import NoSpaceError
from manifests.geometry import load_geometry
from manifests.load import load_manifest
from manifests.manifest import BASE_TIERS, TIERS
from prep.placement_plan import Candidate, plan_placement

TINY = load_geometry("tiny")
N_RECORDS = 144
# An expert of tiny-k3.1 has 9792 bytes, which are three blocks of a file system.
SLOT_BYTES = 12288

# The plan


def nothing() -> np.ndarray:
    return np.zeros((TINY.n_layers, TINY.n_experts), np.bool_)


def drive(tier: str, weight: float = 1.0, *, pool: int = 0, limit: int | None = None, present: np.ndarray | None = None) -> Candidate:
    return Candidate(tier, weight, pool, limit, nothing() if present is None else present)


@st.composite
def presences(draw: st.DrawFn) -> np.ndarray:
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    present = np.random.default_rng(draw(st.integers(0, 99))).random((TINY.n_layers, TINY.n_experts)) < share
    present[: TINY.n_dense_layers] = False
    return present


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Candidate], list[int]]:
    """Up to five drives on up to three file systems, with room for too little up to more than enough."""
    n_pools = draw(st.integers(1, 3))
    limits = st.none() | st.integers(0, 2 * N_RECORDS)
    candidates = [
        drive(
            draw(st.sampled_from(TIERS)),
            draw(st.sampled_from([0.1, 1.0, 1.7, 3.0, 7.2])),
            pool=draw(st.integers(0, n_pools - 1)),
            limit=draw(limits),
            present=draw(presences()),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]
    return candidates, draw(st.lists(st.integers(0, 4 * N_RECORDS), min_size=n_pools, max_size=n_pools))


def most_base_experts(candidates: list[Candidate], pool_room: list[int]) -> int:
    """Room of tiers A and B, a file system counted once."""
    room = 0
    for pool, n in enumerate(pool_room):
        limits = [c.limit for c in candidates if c.pool == pool and c.tier in BASE_TIERS]
        room += min(n, sum(n if limit is None else limit for limit in limits))
    return room


@given(problems())
@settings(deadline=None, max_examples=300)
def test_the_base_is_complete_within_every_limit_or_refused_for_want_of_room(problem: tuple[list[Candidate], list[int]]) -> None:
    candidates, pool_room = problem
    if most_base_experts(candidates, pool_room) < N_RECORDS:
        with pytest.raises(NoSpaceError, match=f"room for {most_base_experts(candidates, pool_room)} of {N_RECORDS} experts"):
            plan_placement(TINY, candidates, pool_room=pool_room)
        return
    holds = plan_placement(TINY, candidates, pool_room=pool_room)
    base = np.any([h for h, c in zip(holds, candidates, strict=True) if c.tier in BASE_TIERS], axis=0)
    assert base[TINY.n_dense_layers :].all()
    assert not np.any([h[: TINY.n_dense_layers] for h in holds])
    for held, candidate in zip(holds, candidates, strict=True):
        assert candidate.limit is None or held.sum() <= candidate.limit
    for pool, n in enumerate(pool_room):
        assert sum(int(h.sum()) for h, c in zip(holds, candidates, strict=True) if c.pool == pool) <= n


def test_room_for_all_experts_is_enough_and_for_one_less_is_not() -> None:
    for room in ([100, 44], [144, 0], [7, 137]):
        plan_placement(TINY, [drive("A", 3.0, pool=0), drive("B", pool=1)], pool_room=room)
        with pytest.raises(NoSpaceError, match="room for 143 of 144"):
            plan_placement(TINY, [drive("A", 3.0, pool=0), drive("B", pool=1)], pool_room=[room[0] - 1, room[1]])


@given(problems())
@settings(deadline=None, max_examples=50)
def test_the_same_problem_has_the_same_plan(problem: tuple[list[Candidate], list[int]]) -> None:
    candidates, pool_room = problem
    assume(most_base_experts(candidates, pool_room) >= N_RECORDS)
    first, second = (plan_placement(TINY, candidates, pool_room=pool_room) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@given(st.lists(st.floats(0.05, 20), min_size=1, max_size=5))
@settings(deadline=None, max_examples=200)
def test_a_base_with_room_is_split_so_that_the_slowest_drive_of_a_layer_is_soonest_done(weights: list[float]) -> None:
    """No drive gets less than its proportion rounded down, and no expert would be read sooner on another drive."""
    # With one copy of each expert there is room for nothing but the base: what each drive holds is its share.
    candidates = [drive("AB"[n % 2], weight) for n, weight in enumerate(weights)]
    holds = plan_placement(TINY, candidates, pool_room=[N_RECORDS])
    for layer in TINY.moe_layers:
        shares = [int(h[layer].sum()) for h in holds]
        assert sum(shares) == TINY.n_experts
        for share, weight in zip(shares, weights, strict=True):
            assert share >= math.floor(TINY.n_experts * weight / sum(weights) - 1e-9)
        slowest = max(share / weight for share, weight in zip(shares, weights, strict=True))
        assert all((share + 1) / weight >= slowest * (1 - 1e-9) for share, weight in zip(shares, weights, strict=True))


@given(st.floats(0.05, 20), st.floats(0.05, 20))
@settings(deadline=None)
def test_two_drives_share_a_layer_within_one_expert_of_their_rates(a: float, b: float) -> None:
    holds = plan_placement(TINY, [drive("A", a), drive("B", b)], pool_room=[N_RECORDS])
    for layer in TINY.moe_layers:
        assert abs(holds[0][layer].sum() - TINY.n_experts * a / (a + b)) <= 1 + 1e-9


def test_a_drive_too_small_for_its_share_takes_what_it_can_evenly_over_the_layers() -> None:
    holds = plan_placement(TINY, [drive("A", 9.0, limit=40), drive("B", 1.0)], pool_room=[N_RECORDS])
    per_layer = holds[0].sum(axis=1)[TINY.n_dense_layers :]
    assert holds[0].sum() == 40
    assert per_layer.min() >= 4 and per_layer.max() <= 5


@given(st.lists(st.integers(10, 60), min_size=1, max_size=3), st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_planning_again_from_where_a_plan_led_to_copies_nothing(limits: list[int], seed: int) -> None:
    first = [drive("A", 2.0, limit=90), drive("B", limit=80), *(drive("C", limit=limit) for limit in limits)]
    holds = plan_placement(TINY, first, pool_room=[9 * N_RECORDS], seed=seed)
    again = [replace(candidate, present=held) for candidate, held in zip(first, holds, strict=True)]
    # Another seed, so that what is there decides and not the same lot drawn twice.
    for planned, held in zip(plan_placement(TINY, again, pool_room=[9 * N_RECORDS], seed=seed + 1), holds, strict=True):
        assert np.array_equal(planned, held)


def test_what_is_there_is_kept() -> None:
    present = nothing()
    present[TINY.n_dense_layers :, 3:11] = True
    holds = plan_placement(TINY, [drive("A"), drive("B", present=present)], pool_room=[N_RECORDS])
    assert np.array_equal(holds[1], present)


def test_further_copies_go_to_the_experts_with_the_fewest() -> None:
    holds = plan_placement(TINY, [drive("A"), drive("C", limit=72), drive("C", limit=72), drive("D", limit=36)], pool_room=[9 * N_RECORDS])
    n_copies = np.sum(holds, axis=0)[TINY.n_dense_layers :]
    assert n_copies.sum() == N_RECORDS + 72 + 72 + 36
    assert n_copies.max() - n_copies.min() == 1


# The command


def place(home: Path, *tiers: str, flags: tuple[object, ...] = ()) -> Outcome:
    """Place on `A=DIR` and so on, making the directories."""
    for tier in tiers:
        Path(tier[2:]).mkdir(exist_ok=True)
    return succeed("kprep", "place", home / "manifest.yaml", *(word for tier in tiers for word in ("--tier", tier)), *flags)


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def tree(directory: Path) -> dict[str, tuple[int, bytes | None]]:
    """Every file and directory with its time of change, and its bytes."""
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None) for path in [directory, *directory.rglob("*")]}


def check_drives(home: Path, extraction: Path) -> list[int]:
    """Every drive has the files that the manifest names, with the right bytes, and a list of them; return how many each holds."""
    drives = load_manifest(home / "manifest.yaml").drives
    for one in drives:
        directory = home / one.directory
        held = {expert_file_name(layer, expert) for layer, expert in np.argwhere(one.holds).tolist()}
        assert all((directory / name).read_bytes() == (extraction / "experts" / name).read_bytes() for name in held)
        assert {line.split("  ")[1] for line in (directory / "experts.xxh128").read_text().splitlines()} == held
    succeed("kprep", "verify-hashes", home)
    return [int(one.holds.sum()) for one in drives]


@pytest.mark.parametrize("tiers", ["A", "AB", "ABC", "AABD"])
def test_fills_one_to_four_drives(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path, tiers: str) -> None:
    outcome = place(prepared_copy, *(f"{tier}={tmp_path / f'd{n}'}" for n, tier in enumerate(tiers)))
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS] * len(tiers)
    assert [one.tier for one in load_manifest(prepared_copy / "manifest.yaml").drives] == list(tiers)
    assert outcome.out.count("holds 144 experts, 1.41MB; 144 to copy") == len(tiers)
    assert "generation 2; the former one is kept in manifest.history/" in outcome.out


def test_a_limit_holds_for_each_drive_of_its_tier(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    tiers = [f"{tier}={tmp_path / name}" for tier, name in (("A", "a"), ("B", "b"), ("C", "c"), ("C", "d"))]
    place(prepared_copy, *tiers, flags=("--limit", "C=100KB", "--limit", "B=60slots", "--limit", f"A={100 * SLOT_BYTES}B"))
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [100, 60, 8, 8]
    for name, limit in (("a", 100 * SLOT_BYTES), ("b", 60 * SLOT_BYTES), ("c", 100_000)):
        assert sum(path.stat().st_blocks * 512 for path in (tmp_path / name).glob("*.bin")) <= limit


def test_the_new_set_may_be_smaller_and_the_files_left_behind_stay(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    place(prepared_copy, f"A={a}", f"B={b}", flags=("--limit", "A=80slots", "--limit", "B=80slots"))
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [80, 80]
    left_behind = tree(a)
    outcome = place(prepared_copy, f"A={b}")
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS]
    assert "64 to copy" in outcome.out
    assert tree(a) == left_behind
    assert len(names_in(prepared_copy / "experts")) == N_RECORDS + 1


def test_a_dry_run_changes_nothing(prepared_copy: Path, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    before = tree(tmp_path)
    outcome = place(prepared_copy, f"A={tmp_path / 'a'}", f"C={tmp_path / 'b'}", flags=("--limit", "C=10slots", "--dry-run"))
    assert tree(tmp_path) == before
    assert "144 to copy" in outcome.out and "10 to copy" in outcome.out and outcome.out.endswith("dry run: nothing was changed\n")


def test_placing_again_with_the_same_flags_copies_nothing(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    tiers = [f"A={tmp_path / 'a'}", f"B={tmp_path / 'b'}", f"C={tmp_path / 'c'}"]
    flags = ("--limit", "A=90slots", "--limit", "B=70slots", "--limit", "C=33slots")
    place(prepared_copy, *tiers, flags=flags)
    first = load_manifest(prepared_copy / "manifest.yaml")
    before = {path: data for path, data in tree(tmp_path).items() if path.endswith(".bin")}
    outcome = place(prepared_copy, *tiers, flags=flags)
    assert outcome.out.count("; 0 to copy, 0B") == 3
    assert {path: data for path, data in tree(tmp_path).items() if path.endswith(".bin")} == before
    second = load_manifest(prepared_copy / "manifest.yaml")
    assert second.generation == 3
    assert all(np.array_equal(a.holds, b.holds) for a, b in zip(first.drives, second.drives, strict=True))
    check_drives(prepared_copy, extractions["tiny-k3.1"])


def test_every_drive_s_hash_list_is_one_that_xxhsum_checks(prepared_copy: Path, tmp_path: Path) -> None:
    xxhsum = shutil.which("xxhsum")
    if xxhsum is None:
        pytest.skip("xxhsum is not installed: the lists were not checked by it")
    drives = [tmp_path / "a", tmp_path / "b"]
    place(prepared_copy, f"A={drives[0]}", f"C={drives[1]}", flags=("--limit", "C=50slots"))
    for directory, n in zip(drives, (N_RECORDS, 50), strict=True):
        done = subprocess.run([xxhsum, "-c", "experts.xxh128"], cwd=directory, capture_output=True, text=True)
        assert done.returncode == 0, done
        assert len(re.findall(r"\.bin: OK", done.stdout)) == n
    # It would notice.
    path = next(drives[1].glob("L*.bin"))
    path.write_bytes(bytes(path.stat().st_size))
    assert subprocess.run([xxhsum, "-c", "experts.xxh128"], cwd=drives[1], capture_output=True).returncode != 0


def test_the_history_keeps_each_former_manifest_and_the_spine_is_not_touched(prepared_copy: Path, tmp_path: Path) -> None:
    texts = [(prepared_copy / "manifest.yaml").read_bytes()]
    spine = (prepared_copy / "spine.gguf").stat().st_mtime_ns
    for name in "ab":
        place(prepared_copy, f"A={tmp_path / name}")
        texts.append((prepared_copy / "manifest.yaml").read_bytes())
    history = sorted((prepared_copy / "manifest.history").iterdir())
    assert [path.name for path in history] == ["000001.yaml", "000002.yaml"]
    assert [path.read_bytes() for path in history] == texts[:2]
    assert (prepared_copy / "spine.gguf").stat().st_mtime_ns == spine


def test_measuring_writes_a_profile_and_leaves_no_trial_files(prepared_copy: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    flags = ("--measure-drives", "--measure-seconds", "0.05", "--limit", "B=100slots")
    outcome = place(prepared_copy, f"A={a}", f"B={b}", flags=flags)
    drives = load_manifest(prepared_copy / "manifest.yaml").drives
    for one in drives:
        assert one.profile is not None
        assert one.profile.read_bytes_per_s > 0 and one.profile.n_bytes >= 9792 and one.profile.seconds >= 0.05
        assert 0 < one.profile.p50_us <= one.profile.p95_us <= one.profile.p99_us <= one.profile.max_us
        assert one.profile.depth in (1, 2, 4, 8, 16, 32)
        held = {expert_file_name(layer, expert) for layer, expert in np.argwhere(one.holds).tolist()}
        assert names_in(Path(one.directory)) == {*held, "experts.xxh128"}
    assert len(re.findall(r"B/s at depth \d+ \((?:direct|buffered)\), p50 \d+ us, p99 \d+ us", outcome.out)) == 2


def test_a_measured_dry_run_leaves_the_drives_empty(prepared_copy: Path, tmp_path: Path) -> None:
    place(prepared_copy, f"A={tmp_path / 'a'}", flags=("--measure-drives", "--measure-seconds", "0.05", "--dry-run"))
    assert names_in(tmp_path / "a") == set()


def test_files_that_lie_in_a_target_are_proved_and_the_wrong_ones_replaced(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    a = tmp_path / "a"
    shutil.copytree(prepared_copy / "experts", a)
    for name in ("L1-E0.bin", "L9-E15.bin"):
        (a / name).write_bytes(bytes((a / name).stat().st_size))
    (a / "L4-E4.bin").write_bytes(b"short")
    (a / "L5-E5.bin").unlink()
    (a / "L77-E0.bin").write_bytes(b"of another model")
    changed = {"L1-E0.bin", "L9-E15.bin", "L4-E4.bin", "L5-E5.bin"}
    good = {path.name: path.stat().st_ino for path in a.glob("*.bin") if path.name not in changed}
    place(prepared_copy, f"A={a}")
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS]
    assert {name: (a / name).stat().st_ino for name in good} == good


def test_files_that_lie_in_a_target_need_no_further_room(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    """As after a placement that was interrupted: no manifest names them yet."""
    shutil.copytree(prepared_copy / "experts", tmp_path / "a")
    place(prepared_copy, f"A={tmp_path / 'a'}", flags=("--reserve", "900TB"))
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS]


def test_a_bad_source_is_passed_over_where_another_copy_is_intact(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    place(prepared_copy, f"A={a}", f"B={b}")
    for source, name in ((a, "L1-E0.bin"), (b, "L2-E0.bin")):
        (source / name).write_bytes(bytes((source / name).stat().st_size))
    (a / "L3-E0.bin").unlink()
    outcome = place(prepared_copy, f"A={c}")
    assert f"left out of the sources: layer 3 expert 0 on {a} (tier A)" in outcome.err
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS]


def test_a_record_with_no_intact_copy_is_named_and_the_former_manifest_stays(prepared_copy: Path, tmp_path: Path) -> None:
    path = prepared_copy / "experts" / "L6-E7.bin"
    path.write_bytes(bytes(path.stat().st_size))
    (tmp_path / "a").mkdir()
    before = (prepared_copy / "manifest.yaml").read_bytes()
    outcome = command("kprep", "place", prepared_copy / "manifest.yaml", "--tier", f"A={tmp_path / 'a'}")
    assert outcome.code == 4
    assert "kprep: layer 6 expert 7: no intact copy to read: " in outcome.err and "Traceback" not in outcome.err
    assert (prepared_copy / "manifest.yaml").read_bytes() == before
    assert list(tmp_path.rglob("*.partial")) == [] and not (tmp_path / "a" / "L6-E7.bin").exists()


@pytest.fixture
def memory_directory() -> Iterator[Path]:
    """A directory on a file system in memory."""
    root = Path("/dev/shm")
    if not os.access(root, os.W_OK) or describe_directory(root).file_system not in RAM_FILE_SYSTEMS:
        pytest.skip("no file system in memory at /dev/shm")
    with tempfile.TemporaryDirectory(dir=root) as directory:
        yield Path(directory)


def test_a_drive_on_another_file_system(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path, memory_directory: Path) -> None:
    place(prepared_copy, f"A={tmp_path / 'a'}", f"C={memory_directory}", flags=("--measure-drives", "--measure-seconds", "0.05"))
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS, N_RECORDS]
    assert load_manifest(prepared_copy / "manifest.yaml").drives[1].file_system in RAM_FILE_SYSTEMS


def test_drives_within_the_output_are_named_relative_to_it_so_that_it_can_be_moved(prepared_copy: Path, tmp_path: Path) -> None:
    place(prepared_copy, f"A={prepared_copy / 'experts'}", f"C={prepared_copy / 'more'}")
    assert [one.directory for one in load_manifest(prepared_copy / "manifest.yaml").drives] == ["experts", "more"]
    moved = prepared_copy.rename(tmp_path / "moved")
    succeed("kprep", "verify-hashes", moved)
