"""kprep place where something is wrong: full disks, bad copies, drives that are gone, flags that cannot be honoured."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import DATA, command, succeed
from loop_mounts import mounted_ext4, run
from placing import (
    N_RECORDS,
    check_drives,
    check_manifest_is_true,
    directory_in_memory,
    experts_in,
    flip_a_byte,
    place,
    refused,
    tier_flags,
    tree,
)

from layout.drives import default_reserve, free_bytes
from layout.parallel import run_parallel
from manifests.errors import NoSpaceError
from manifests.load import load_manifest
from prep.extraction.room import Reserves
from prep.placement.journal import PlaceJournal
from prep.placement.place import Options
from prep.placement.place import place as run_place
from prep.requests import DriveRequest

USAGE, BAD_INPUT, DAMAGED, NO_SPACE = 2, 3, 4, 5


@pytest.fixture
def memory() -> Iterator[Path]:
    with directory_in_memory() as directory:
        yield directory


@contextmanager
def mounted(device: str, where: Path, *flags: str) -> Iterator[None]:
    try:
        run("mount", *flags, device, where)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"nothing may be mounted here: {getattr(error, 'stderr', error)}")
    try:
        yield
    finally:
        run("umount", "--lazy", where)


# Room


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for about 200 experts."""
    with mounted_ext4(tmp_path / "small", n_bytes=4 << 20) as directory:
        yield directory


def test_a_drive_without_room_for_the_base_is_refused_with_what_is_missing(prepared_copy: Path, small: Path) -> None:
    (small / "ballast").write_bytes(bytes(free_bytes(small) - 800_000))
    refused(prepared_copy, f"A={small}", code=NO_SPACE, parts=("of 144 experts", " too many", "lower the reserve"), flags=("--reserve", "0"))
    assert experts_in(small) == set() and not (prepared_copy / "place.journal").exists()


def test_what_is_there_is_no_room_for_new_files_unless_it_is_removed(
    prepared_copy: Path, extractions: dict[str, Path], small: Path, memory: Path
) -> None:
    """A full drive stays as it is without --remove-unplanned."""
    place(prepared_copy, f"A={small}", flags=("--reserve", "0"))
    (small / "ballast").write_bytes(bytes(max(0, free_bytes(small) - 60_000)))
    held = experts_in(small)
    place(prepared_copy, f"A={small}", f"B={memory}", flags=("--reserve", "0", "--limit", "B=70slots"))
    assert experts_in(small) == held
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS, 70]


def test_the_reserve_holds_while_others_write_and_the_same_command_goes_on(prepared_copy: Path, extractions: dict[str, Path], small: Path) -> None:
    """Somebody fills the drive while copies are made: a pause with code 5, room is made, and it ends."""
    reserve = default_reserve(small)
    words = ["kprep", "place", prepared_copy / "manifest.yaml", "--tier", f"A={small}"]
    process = subprocess.Popen([str(Path(sys.executable).with_name("kprep")), *map(str, words[1:])], stderr=subprocess.PIPE, text=True)
    while process.poll() is None and len(experts_in(small)) < 5:
        time.sleep(0.0005)
    with (small / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, free_bytes(small) - reserve - 200_000))
    _, err = process.communicate(timeout=60)
    assert process.returncode == NO_SPACE and "paused: " in err and "run the same command again" in err, (process.returncode, err)
    assert free_bytes(small) >= reserve
    assert load_manifest(prepared_copy / "manifest.yaml").generation == 1
    (small / "ballast").unlink()
    outcome = command(*words)
    assert outcome.code == 0 and "going on with the placement that was interrupted" in outcome.err
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS]


def test_a_disk_that_is_full_in_the_middle_leaves_the_former_manifest_and_no_half_file(
    prepared_copy: Path, extractions: dict[str, Path], small: Path
) -> None:
    """With no reserve the file system itself says that it is full."""
    words = [str(Path(sys.executable).with_name("kprep")), "place", str(prepared_copy / "manifest.yaml"), "--tier", f"A={small}", "--reserve", "0"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and len(experts_in(small)) < 5:
        time.sleep(0.0005)
    with (small / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free_bytes(small) - 100_000)
    _, err = process.communicate(timeout=60)
    assert process.returncode == NO_SPACE and "Traceback" not in err, err
    assert list(small.glob("*.partial")) == []
    assert check_manifest_is_true(prepared_copy, extractions["tiny-k3.1"]).generation == 1


def test_more_than_memory_has_is_not_copied_into_memory(prepared_copy: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file system in memory promises is one thing, what there is another."""
    monkeypatch.setattr("prep.placement.place.available_host_bytes", lambda: 1_000_000)
    options = Options(requests=[DriveRequest("A", memory)])
    with pytest.raises(NoSpaceError, match=r"in memory; 1\.77MB would be copied there, but only 1MB of memory are available"):
        run_place(
            prepared_copy / "manifest.yaml",
            options,
            is_dry_run=False,
            on_decided=lambda _: None,
            on_progress=lambda *_: None,
            on_remark=lambda _: None,
        )
    assert experts_in(memory) == set() and not (prepared_copy / "place.journal").exists()


def test_room_that_is_just_enough_is_used_up_by_many_writers_and_not_exceeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While others write, what they have reserved may be counted twice; a writer then waits, and gives up only when nobody writes."""
    free = [100]
    monkeypatch.setattr("prep.extraction.room.free_bytes", lambda _: free[0])
    reserves = Reserves([tmp_path], 20)

    def make_worker() -> Callable[[int], None]:
        def write(_: int) -> None:
            with reserves.taking(tmp_path, 10):
                free[0] -= 10
                time.sleep(0.002)

        return write

    assert len(list(run_parallel(range(8), make_worker, n_workers=8))) == 8 and free == [20]
    with pytest.raises(NoSpaceError, match="paused: 20B are free and 20B are kept in reserve"), reserves.taking(tmp_path, 10):
        pass


# Copies that are bad or gone


def test_a_flipped_source_is_found_not_copied_and_said_and_another_copy_is_used(
    prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path, memory: Path
) -> None:
    place(prepared_copy, f"A={tmp_path / 'a'}", f"B={memory}")
    for path in (tmp_path / "a").glob("L*.bin"):
        flip_a_byte(path)
    outcome = place(prepared_copy, f"A={tmp_path / 'c'}")
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS]
    assert re.search(
        rf"bad copy: layer \d+ expert \d+ on {tmp_path / 'a'} \(tier A\): .* xxh3-128 .* differs from .*; it was not copied", outcome.err
    )


def test_a_planned_copy_that_turns_out_bad_is_written_anew(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path, memory: Path) -> None:
    """Found while it is read for another drive."""
    a, c, good = tmp_path / "a", memory / "c", extractions["tiny-k3.1"] / "experts"
    place(prepared_copy, f"A={a}", f"C={c}")
    for path in a.glob("L*.bin"):
        flip_a_byte(path)
    outcome = place(prepared_copy, f"A={a}", f"C={memory / 'd'}")
    found = re.findall(r"bad copy: layer (\d+) expert (\d+) on .* differs from the expected .*; written anew from another copy", outcome.err)
    assert found
    for name in [f"L{layer}-E{expert}.bin" for layer, expert in found]:
        assert (a / name).read_bytes() == (good / name).read_bytes()
    assert experts_in(memory / "d") == experts_in(c) and all(p.read_bytes() == (good / p.name).read_bytes() for p in (memory / "d").glob("*.bin"))


def test_a_record_with_no_intact_copy_is_named_and_the_former_manifest_stays(prepared_copy: Path, tmp_path: Path) -> None:
    flip_a_byte(prepared_copy / "experts" / "L6-E7.bin")
    before = (prepared_copy / "manifest.yaml").read_bytes()
    refused(prepared_copy, f"A={tmp_path / 'a'}", code=DAMAGED, parts=("kprep: layer 6 expert 7: no intact copy to read: ",))
    assert (prepared_copy / "manifest.yaml").read_bytes() == before
    assert list(tmp_path.rglob("*.partial")) == [] and not (tmp_path / "a" / "L6-E7.bin").exists()


def test_a_drive_that_is_gone_is_left_out_and_the_base_comes_from_other_copies(
    prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path, memory: Path
) -> None:
    """The copies of tier C become the base."""
    a, c = tmp_path / "a", memory / "c"
    place(prepared_copy, f"A={a}", f"C={c}")
    shutil.rmtree(prepared_copy / "experts")
    shutil.rmtree(a)
    outcome = place(prepared_copy, f"A={tmp_path / 'b'}", f"C={c}")
    assert f"{a} (tier A): no such directory; is the drive mounted? Its 144 copies are left out" in outcome.err
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS, N_RECORDS]


def test_lost_experts_are_listed_with_their_shards_and_the_command_that_extracts_them(
    prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("L3-E2.bin", "L3-E3.bin", "L3-E4.bin", "L7-E15.bin"):
        (prepared_copy / "experts" / name).unlink()
    outcome = refused(prepared_copy, f"A={tmp_path / 'a'}", code=DAMAGED, parts=("4 experts have no copy left", "layer 3: experts 2-4; in model-"))
    line = next(line.strip() for line in outcome.err.splitlines() if "kprep extract" in line)
    assert line == f"kprep extract CHECKPOINT {prepared_copy} --only 3:2-4,7:15"
    succeed(*line.replace("CHECKPOINT", str(DATA / "tiny-k3.1")).split())
    place(prepared_copy, f"A={tmp_path / 'a'}")
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS]


def test_an_unmounted_drive_does_not_fill_the_root_file_system(
    prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path, memory: Path
) -> None:
    with mounted_ext4(tmp_path / "b", n_bytes=16 << 20) as b:
        place(prepared_copy, f"A={memory}", f"B={b}", flags=("--limit", "A=100slots", "--limit", "B=60slots"))
    assert experts_in(b) == set()
    refused(prepared_copy, f"A={memory}", f"B={b}", code=USAGE, parts=(f"--tier B={b}: the manifest has", "mount the drive, leave it out"))
    assert experts_in(b) == set()
    # Without it: the base comes from what is left.
    place(prepared_copy, f"A={memory}", f"B={prepared_copy / 'experts'}")
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS, N_RECORDS]


def test_a_drive_that_vanishes_in_the_middle_leaves_the_former_manifest_and_writes_nothing_below_it(
    prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path
) -> None:
    with mounted_ext4(tmp_path / "b", n_bytes=16 << 20) as b:
        words = [str(Path(sys.executable).with_name("kprep")), "place", str(prepared_copy / "manifest.yaml"), *tier_flags((f"A={b}",))]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and len(experts_in(b)) < 5:
            time.sleep(0.0005)
        run("umount", "--lazy", b)
        _, err = process.communicate(timeout=60)
        left = experts_in(b)
        # For the end of the context.
        run("mount", "-t", "tmpfs", "tmpfs", b)
    assert process.returncode == 1 and "has the drive gone?" in err and "Traceback" not in err, (process.returncode, err)
    assert left == set()
    assert check_manifest_is_true(prepared_copy, extractions["tiny-k3.1"]).generation == 1


def test_a_source_that_vanishes_in_the_middle_is_said_and_another_one_is_used(
    prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path, memory: Path
) -> None:
    c = tmp_path / "c"
    with mounted_ext4(tmp_path / "a", n_bytes=16 << 20) as a:
        place(prepared_copy, f"A={a}", f"B={memory}")
        words = [str(Path(sys.executable).with_name("kprep")), "place", str(prepared_copy / "manifest.yaml"), *tier_flags((f"A={c}",))]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and len(experts_in(c)) < 5:
            time.sleep(0.0005)
        run("umount", "--lazy", a)
        _, err = process.communicate(timeout=60)
        # For the end of the context.
        run("mount", "-t", "tmpfs", "tmpfs", a)
    assert process.returncode == 0 and "bad copy: layer" in err and "No such file or directory; it was not copied" in err, err
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS]


def test_a_second_placement_at_the_same_time_is_refused(prepared_copy: Path, tmp_path: Path) -> None:
    journal = PlaceJournal(prepared_copy)
    try:
        refused(prepared_copy, f"A={tmp_path / 'a'}", code=1, parts=("another kprep is placing experts of this model",))
        outcome = command("kprep", "place", prepared_copy, "--rollback", "1")
        assert outcome.code == 1 and "another kprep" in outcome.err
    finally:
        journal.close(is_done=True)
    place(prepared_copy, f"A={tmp_path / 'a'}")


# Flags that cannot be honoured


def test_one_directory_by_two_names_or_within_another_is_refused(prepared_copy: Path, tmp_path: Path) -> None:
    a = tmp_path / "a"
    (a / "within").mkdir(parents=True)
    (tmp_path / "link").symlink_to(a)
    refused(prepared_copy, f"A={a}", f"B={tmp_path / 'link'}", code=USAGE, parts=("named twice", f"also as {a}"))
    refused(prepared_copy, f"A={a}", f"B={a / 'within'}", code=USAGE, parts=(f"lies within {a}",))
    refused(prepared_copy, f"A={tmp_path / 'link' / 'within'}", f"B={a}", code=USAGE, parts=(f"lies within {a}",))
    (tmp_path / "bound").mkdir()
    with mounted(str(a), tmp_path / "bound", "--bind"):
        refused(prepared_copy, f"A={a}", f"B={tmp_path / 'bound'}", code=USAGE, parts=("named twice",))
        refused(prepared_copy, f"A={tmp_path / 'bound' / 'within'}", f"B={a}", code=USAGE, parts=("lies within",))


def test_a_directory_that_cannot_be_written_is_refused(prepared_copy: Path, tmp_path: Path) -> None:
    a = tmp_path / "a"
    a.mkdir()
    with mounted("tmpfs", a, "-t", "tmpfs", "-o", "ro"):
        refused(prepared_copy, f"A={a}", code=USAGE, parts=(f"--tier A={a}: no file can be written there", "mounted read-only"))
        refused(prepared_copy, f"A={a}", code=USAGE, parts=("mounted read-only",), flags=("--dry-run",))


def test_heat_for_experts_that_do_not_exist_is_refused(prepared_copy: Path, tmp_path: Path) -> None:
    heat = tmp_path / "heat.json"
    heat.write_text(json.dumps({"L1-E0": 3, "L99-E0": 1}))
    refused(prepared_copy, f"A={tmp_path / 'a'}", code=BAD_INPUT, parts=("L99-E0",), flags=("--heat", heat))


def test_heat_is_held_out_and_both_numbers_are_printed(prepared_copy: Path, tmp_path: Path, memory: Path) -> None:
    heat = tmp_path / "heat.json"
    heat.write_text(json.dumps({f"L{layer}-E{expert}": 1000 // (1 + expert) for layer in range(1, 10) for expert in range(16)}))
    outcome = place(
        prepared_copy, f"A={tmp_path / 'a'}", f"B={memory}", flags=("--heat", heat, "--limit", "A=90slots", "--limit", "B=90slots", "--dry-run")
    )
    assert "heat     planned with one half of the reads: " in outcome.out and "on the other; planned without heat: " in outcome.out


def test_a_rate_of_zero_in_an_edited_manifest_and_a_profile_older_than_the_files(prepared_copy: Path, tmp_path: Path) -> None:
    a = tmp_path / "a"
    place(prepared_copy, f"A={a}", flags=("--measure-drives", "--measure-seconds", "0.05"))
    path = prepared_copy / "manifest.yaml"
    os.utime(a / "L1-E0.bin", (2e9, 2e9))
    outcome = place(prepared_copy, f"A={a}", flags=("--dry-run",))
    assert "is older than files there; --measure-drives makes a new one" in outcome.err
    # Without its last line, the hash of the others, an edited manifest is read.
    lines = path.read_text().splitlines()[:-1]
    profile = load_manifest(path).drives[0].profile
    assert profile is not None
    text = "\n".join(lines).replace(f"      read_bytes_per_s: {profile.read_bytes_per_s!r}", "      read_bytes_per_s: 0.0") + "\n"
    path.write_text(text)
    refused(prepared_copy, f"A={a}", code=BAD_INPUT, parts=(f"the profile of {a} has a rate of 0 B/s",), flags=("--dry-run",))


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--with-uploads",), ("goes with --measure-drives",)),
        (("--measure-seconds", "1"), ("goes with --measure-drives",)),
        (("--what-if", "rate=fast,capacity=2TB"), ("--what-if", "rate=7,capacity=2TB")),
        (("--what-if", "rate=7,capacity=2TB"), ("no drive has been measured",)),
        (("--rollback", "1"), ("--rollback stands alone",)),
    ],
)
def test_flags_that_do_not_go_together_are_refused(prepared_copy: Path, tmp_path: Path, flags: tuple[str, ...], parts: tuple[str, ...]) -> None:
    before = tree(prepared_copy)
    refused(prepared_copy, f"A={tmp_path / 'a'}", code=USAGE, parts=parts, flags=flags)
    assert {path: data for path, (_, data) in tree(prepared_copy).items()} == {path: data for path, (_, data) in before.items()}
