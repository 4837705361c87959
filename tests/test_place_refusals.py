"""Directories and flags that kprep refuses since they would cost data, or would count for nothing."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import DATA, Outcome, command, succeed
from loop_mounts import mounted_ext4
from placing import N_RECORDS, check_drives, directory_in_memory, experts_in, flip_a_byte, names_in, place, refused, tier_flags

from manifests.load import load_manifest
from prep.measuring.measure import is_older_than_files

CHECKPOINT = DATA / "tiny-k3.1"
USAGE, BAD_INPUT, DAMAGED = 2, 3, 4


def is_usage(outcome: Outcome, *parts: str) -> None:
    assert outcome.code == USAGE and "Traceback" not in outcome.err and all(part in outcome.err for part in parts), outcome


# The model's own directory


def test_the_models_own_directory_is_no_drive_for_its_list_would_be_replaced(prepared_copy: Path, tmp_path: Path) -> None:
    before = (prepared_copy / "experts.xxh128").read_bytes()
    flags = ("--limit", "A=100slots", "--limit", "B=72slots")
    refused(prepared_copy, f"A={prepared_copy}", f"B={tmp_path / 'b'}", code=USAGE, parts=("is the model's own directory",), flags=flags)
    for path in (prepared_copy / "experts").glob("L1-*"):
        shutil.copy(path, prepared_copy)
    manifest = prepared_copy / "manifest.yaml"
    is_usage(command("kprep", "adopt", prepared_copy, "--manifest", manifest, "--tier", "C"), "is the model's own directory")
    only = ("--only", "1:0", "--tier", f"B={prepared_copy}")
    is_usage(command("kprep", "extract", CHECKPOINT, prepared_copy, *only), "is the model's own directory")
    assert (prepared_copy / "experts.xxh128").read_bytes() == before
    succeed("kprep", "verify-hashes", prepared_copy)


def test_nor_is_it_for_an_extraction(tmp_path: Path) -> None:
    out, b = tmp_path / "out", tmp_path / "b"
    out.mkdir()
    b.mkdir()
    is_usage(command("kprep", "extract", CHECKPOINT, out, "--tier", f"A={out}", "--tier", f"B={b}"), "is the model's own directory")
    assert names_in(out) == names_in(b) == set()


# Another model's experts


def test_another_models_drive_is_not_written_over(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    drive, other = tmp_path / "drive", tmp_path / "other"
    place(prepared_copy, f"A={drive}", flags=("--remove-unplanned",))
    shutil.copytree(extractions["tiny-k3"], other)
    refused(other, f"A={drive}", code=USAGE, parts=(f"it holds {N_RECORDS} experts of another model",))
    is_usage(
        command("kprep", "extract", DATA / "tiny-k3", tmp_path / "new", "--tier", f"A={drive}"),
        "holds 144 files of experts already, the first L1-E0.bin",
    )
    assert not (tmp_path / "new").exists()
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS]


def test_a_damaged_list_does_not_make_a_drive_another_models(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    place(prepared_copy, f"A={drive}")
    path = drive / "experts.xxh128"
    first, rest = path.read_text().split("\n", 1)
    path.write_text(f"{'0' * 32}{first[32:]}\n{rest}")
    place(prepared_copy, f"A={drive}")
    flip_a_byte(path)
    place(prepared_copy, f"A={drive}")
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS]


# Drives that are not mounted


def test_what_an_unmounted_drive_held_is_not_written_below_its_mount_point(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    with directory_in_memory() as memory:
        with mounted_ext4(tmp_path / "b", n_bytes=16 << 20) as b:
            limits = ("--limit", "A=90slots", "--limit", "B=90slots", "--remove-unplanned")
            place(prepared_copy, f"A={memory}", f"B={b}", flags=limits)
            n_there = len(experts_in(memory))
        outcome = refused(prepared_copy, f"A={memory}", code=DAMAGED, parts=(f"{N_RECORDS - n_there} experts have no copy left",))
        assert f" --tier A={memory}" in outcome.err
        only = ("kprep", "extract", CHECKPOINT, prepared_copy, "--only", "missing")
        is_usage(command(*only), "belong on drives that are gone")
        for flags in ((), ("--checkpoint", CHECKPOINT)):
            is_usage(command("kprep", "verify-hashes", prepared_copy, "--repair", *flags), f"{b} (tier B): none of its", "mount the drive")
        assert names_in(b) == set()
        succeed(*only, "--tier", f"A={memory}")
        place(prepared_copy, f"A={memory}")
        assert names_in(b) == set() and check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS]


# A record without an intact copy


def test_the_command_that_writes_a_spoilt_record_again_is_named_and_works(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    flip_a_byte(prepared_copy / "experts" / "L4-E4.bin")
    parts = ("layer 4 expert 4: no intact copy to read", "With model-00005-of-000013.safetensors in CHECKPOINT")
    outcome = refused(prepared_copy, f"A={tmp_path / 'a'}", code=DAMAGED, parts=parts)
    words = outcome.err[outcome.err.rindex("kprep extract") :].split(" writes it again")[0].split()
    assert words[-2:] == ["--only", "4:4"]
    succeed(*[str(CHECKPOINT) if word == "CHECKPOINT" else word for word in words])
    place(prepared_copy, f"A={tmp_path / 'a'}")
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS]


def test_a_placement_that_goes_on_does_not_fill_the_root_file_system_either(
    prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path
) -> None:
    home, image = prepared_copy, tmp_path / "b"
    with directory_in_memory() as memory:
        tiers = (f"A={memory}", f"B={image}")
        with mounted_ext4(image, n_bytes=16 << 20) as b:
            words = [str(Path(sys.executable).with_name("kprep")), "place", str(home), *tier_flags(tiers)]
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while process.poll() is None and not experts_in(b):
                time.sleep(0.0005)
            process.kill()
            process.wait()
        assert (home / "place.journal").exists()
        refused(home, *tiers, code=USAGE, parts=(f"--tier B={image}: when the interrupted placement was decided", "mount the drive"))
        assert names_in(image) == set()
        place(home, tiers[0])
        assert check_drives(home, extractions["tiny-k3.1"]) == [N_RECORDS]


# Flags and edited manifests


def test_more_drives_than_can_be_planned_for_are_refused_before_they_are_measured(prepared_copy: Path, tmp_path: Path) -> None:
    tiers = [f"A={tmp_path / str(n)}" for n in range(9)]
    outcome = refused(prepared_copy, *tiers, code=USAGE, parts=("--tier: 9 drives",), flags=("--measure-drives", "--measure-seconds", "0.05"))
    assert " at depth " not in outcome.err


@pytest.mark.parametrize("flags", [("--seed", "4"), ("--measure-seconds", "1"), ("--with-uploads",), ("--reserve", "0")])
def test_a_flag_that_means_nothing_beside_rollback_is_refused(prepared_copy: Path, flags: tuple[str, ...]) -> None:
    is_usage(command("kprep", "place", prepared_copy, "--rollback", "list", *flags), "--rollback stands alone")


def test_two_limits_for_one_tier_are_refused(prepared_copy: Path, tmp_path: Path) -> None:
    refused(prepared_copy, f"A={tmp_path / 'a'}", code=USAGE, parts=("tier A has a limit already",), flags=("--limit", "A=2MB", "--limit", "A=1MB"))


def edit(home: Path, *changes: tuple[str, str]) -> None:
    """Change a manifest as a user does, its last line removed."""
    path = home / "manifest.yaml"
    text = "\n".join(path.read_text().splitlines()[:-1]) + "\n"
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


def test_rates_of_zero_are_refused_by_the_names_of_the_drives(prepared_copy: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    place(prepared_copy, f"A={a}", f"B={b}", flags=("--measure-drives", "--measure-seconds", "0.05"))
    good = (prepared_copy / "manifest.yaml").read_text()
    # Both lie on one device, which they share.
    (link,) = load_manifest(prepared_copy / "manifest.yaml").links
    edit(prepared_copy, (f"    read_bytes_per_s: {link.read_bytes_per_s!r}\n\n", "    read_bytes_per_s: 0.0\n\n"))
    refused(prepared_copy, f"A={a}", f"B={b}", code=BAD_INPUT, parts=(f"manifest.yaml: the link that {a}, {b} share has a rate of 0 B/s",))
    (prepared_copy / "manifest.yaml").write_text(good)
    edit(prepared_copy, ("with_uploads_bytes_per_s: null", "with_uploads_bytes_per_s: 0.0"))
    refused(prepared_copy, f"A={a}", f"B={b}", code=BAD_INPUT, parts=(f"the profile of {a} has a rate of 0 B/s",))


@pytest.mark.parametrize(("date", "is_older"), [("9999-12-31", False), ("0001-01-01", True), ("9999-12-31T23:59:59-14:00", False)])
def test_any_date_that_a_manifest_may_have_can_be_compared(prepared_copy: Path, tmp_path: Path, date: str, is_older: bool) -> None:
    a = tmp_path / "a"
    place(prepared_copy, f"A={a}", flags=("--measure-drives", "--measure-seconds", "0.05"))
    profile = load_manifest(prepared_copy / "manifest.yaml").drives[0].profile
    assert profile is not None
    # The manifest may have been made within the same second.
    edit(prepared_copy, (f' date: "{profile.date}"', f' date: "{date}"'))
    edited = load_manifest(prepared_copy / "manifest.yaml").drives[0].profile
    assert edited is not None and is_older_than_files(edited, a) is is_older
    place(prepared_copy, f"A={a}", flags=("--dry-run",))
