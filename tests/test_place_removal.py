"""The order of copies and removals, and --remove-unplanned: no file goes before another copy of its expert has been read and proved."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_mounts import mounted_ext4
from placing import N_RECORDS, check_drives, directory_in_memory, experts_in, flip_a_byte, names_in, place, refused

from layout.drives import free_bytes
from manifests.load import load_manifest
from prep.placement.schedule import Directory, make_schedule

SHAPE = (2, 8)

# The order


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Directory], dict[int, int]]:
    """Up to four directories on up to two file systems; every expert is somewhere now, and on a base drive afterwards."""
    n, rng = draw(st.integers(2, 4)), np.random.default_rng(draw(st.integers(0, 9999)))
    there, wanted = rng.random((2, n, *SHAPE)) < draw(st.sampled_from([0.2, 0.5]))
    there[rng.integers(0, n, SHAPE), np.arange(2)[:, None], np.arange(8)] = True
    wanted[0] |= ~wanted[:-1].any(axis=0)
    room = {0: draw(st.integers(0, 20)), 1: draw(st.integers(0, 20))}
    return [Directory(int(rng.integers(0, 2)), k < n - 1, there[k], wanted[k]) for k in range(n)], room


@given(problems(), st.booleans())
@settings(deadline=None, max_examples=300)
def test_room_is_never_exceeded_no_last_copy_goes_and_copies_have_a_source(
    problem: tuple[list[Directory], dict[int, int]], is_removing: bool
) -> None:
    directories, room = problem
    made = make_schedule(directories, room, is_removing=is_removing)
    there = [d.there.copy() for d in directories]
    used = dict.fromkeys(room, 0)
    peak = dict(used)
    for removals, copies in made.steps:
        safe = np.any([t & d.wanted for t, d in zip(there, directories, strict=True) if d.is_base], axis=0)
        for k, d in enumerate(directories):
            assert not (removals[k] & (d.wanted | ~there[k] | ~safe)).any() and (is_removing or not removals[k].any())
            there[k] &= ~removals[k]
            used[d.pool] -= int(removals[k].sum())
        assert np.any(there, axis=0).all()
        for k, d in enumerate(directories):
            assert not (copies[k] & (there[k] | ~d.wanted)).any()
            there[k] |= copies[k]
            used[d.pool] += int(copies[k].sum())
        assert all(used[pool] <= room[pool] or not any(c.any() for c in copies) for pool in room)
        peak = {pool: max(peak[pool], n) for pool, n in used.items()}
    assert made.n_peak == peak
    missing = {pool: sum(int((d.wanted & ~t).sum()) for d, t in zip(directories, there, strict=True) if d.pool == pool) for pool in room}
    assert made.n_left == {pool: n for pool, n in missing.items() if n}


@given(problems())
@settings(deadline=None, max_examples=100)
def test_without_removals_everything_is_copied_at_once_if_and_only_if_it_fits(problem: tuple[list[Directory], dict[int, int]]) -> None:
    directories, room = problem
    needed = {pool: sum(int((d.wanted & ~d.there).sum()) for d in directories if d.pool == pool) for pool in room}
    made = make_schedule(directories, room, is_removing=False)
    assert bool(made.n_left) == any(needed[pool] > room[pool] for pool in room) and len(made.steps) <= 1


def test_two_full_drives_change_places_through_the_room_for_one_record() -> None:
    half = np.zeros(SHAPE, np.bool_)
    half[0] = True
    directories = [Directory(0, True, half, ~half), Directory(1, True, ~half, half)]
    made = make_schedule(directories, {0: 1, 1: 0}, is_removing=True)
    assert made.n_left == {} and made.n_peak == {0: 1, 1: 0} and len(made.steps) > 8
    assert make_schedule(directories, {0: 0, 1: 0}, is_removing=True).n_left == {0: 8, 1: 8}


# The command


@pytest.fixture
def memory() -> Iterator[Path]:
    with directory_in_memory() as directory:
        yield directory


def test_removes_what_the_plan_does_not_name_and_nothing_else(
    prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path, memory: Path
) -> None:
    a, b = tmp_path / "a", memory / "b"
    place(prepared_copy, f"A={a}", f"B={b}")
    for directory in (a, prepared_copy / "experts"):
        (directory / "notes.txt").write_text("mine")
        (directory / "L77-E0.bin").write_bytes(b"of another model")
    outcome = place(prepared_copy, f"A={b}", flags=("--remove-unplanned",))
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS]
    # a was left out and gave all; OUT/experts was no drive of the manifest any more.
    assert names_in(a) == {"notes.txt", "L77-E0.bin"}
    assert len(experts_in(prepared_copy / "experts")) == N_RECORDS + 1
    assert f"removed from {a} (tier A): 144 files, 1.41MB" in outcome.err


def test_no_file_goes_whose_other_copy_is_bad_until_that_is_written_anew(
    prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path, memory: Path
) -> None:
    """The copies that shall stay are read first: a flipped one is replaced from the one that was to go."""
    a, b = tmp_path / "a", memory / "b"
    place(prepared_copy, f"A={a}", f"B={b}")
    shutil.rmtree(prepared_copy / "experts")
    for n in range(4):
        flip_a_byte(b / f"L6-E{n}.bin")
    outcome = place(prepared_copy, f"A={b}", flags=("--remove-unplanned",))
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS]
    assert outcome.err.count("written anew from another copy") == 4 and experts_in(a) == set()


def test_nothing_goes_while_a_bad_copy_cannot_be_replaced(prepared_copy: Path, tmp_path: Path, memory: Path) -> None:
    a, b = tmp_path / "a", memory / "b"
    place(prepared_copy, f"A={a}", f"B={b}")
    for directory in (a, b):
        flip_a_byte(directory / "L6-E7.bin")
    shutil.rmtree(prepared_copy / "experts")
    refused(prepared_copy, f"A={b}", code=4, parts=("layer 6 expert 7: no intact copy to read",), flags=("--remove-unplanned",))
    assert len(experts_in(a)) == len(experts_in(b)) == N_RECORDS
    assert load_manifest(prepared_copy / "manifest.yaml").generation == 2


def test_a_drive_without_room_takes_new_files_in_place_of_removed_ones(
    prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path, memory: Path
) -> None:
    """A full drive is left with the half that the other one does not take; the manifest in between is kept, too."""
    with mounted_ext4(tmp_path / "small", n_bytes=4 << 20) as small:
        place(prepared_copy, f"A={small}", f"B={memory}", flags=("--reserve", "0", "--limit", "A=90slots", "--limit", "B=90slots"))
        shutil.rmtree(prepared_copy / "experts")
        (small / "ballast").write_bytes(bytes(max(0, free_bytes(small) - 40_000)))
        flags = ("--reserve", "0", "--limit", "A=90slots", "--limit", "B=144slots", "--remove-unplanned", "--seed", "3")
        place(prepared_copy, f"A={small}", f"B={memory}", flags=flags)
        held = check_drives(prepared_copy, extractions["tiny-k3.1"])
        assert held[0] <= 90 and held[1] == N_RECORDS
        assert len(experts_in(small)) == held[0]


def test_what_is_removed_can_be_told_beforehand(prepared_copy: Path, tmp_path: Path) -> None:
    outcome = place(prepared_copy, f"A={tmp_path / 'a'}", flags=("--remove-unplanned", "--dry-run"))
    assert "144 unplanned files, 1.41MB, will be removed once another copy is proved" in outcome.out
    assert len(experts_in(prepared_copy / "experts")) == N_RECORDS
