"""kprep place: what the command leaves on the drives, and what it says."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import succeed
from loop_mounts import mounted_ext4
from placing import (
    N_RECORDS,
    SLOT_BYTES,
    check_drives,
    directory_in_memory,
    experts_in,
    flip_a_byte,
    named,
    names_in,
    place,
    tree,
)

from layout.drives import RAM_FILE_SYSTEMS
from manifests.load import load_manifest

MEASURE = ("--measure-drives", "--measure-seconds", "0.05")


@pytest.fixture
def memory() -> Iterator[Path]:
    with directory_in_memory() as directory:
        yield directory


def test_the_base_is_split_over_a_and_b_and_copies_fill_other_devices(
    prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path, memory: Path
) -> None:
    outcome = place(prepared_copy, f"A={tmp_path / 'a'}", f"B={memory}")
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS] * 2
    assert outcome.out.count("holds 144 experts, 1.41MB") == 2
    assert outcome.out.count("144 to copy, 1.41MB (144 from") == 2
    assert "generation 2; the former one is kept in manifest.history/" in outcome.out
    assert load_manifest(prepared_copy / "manifest.yaml").drives[1].file_system in RAM_FILE_SYSTEMS


def test_directories_on_one_device_get_no_second_copies_and_it_is_said(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    outcome = place(prepared_copy, f"A={tmp_path / 'a'}", f"C={tmp_path / 'c'}")
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS, 0]
    assert f"{tmp_path / 'c'} (tier C): gets nothing: it lies on one device with {tmp_path / 'a'} (tier A)" in outcome.err


def test_a_limit_holds_for_each_drive_of_its_tier(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path, memory: Path) -> None:
    tiers = [f"A={tmp_path / 'a'}", f"B={tmp_path / 'b'}", f"C={memory / 'c'}", f"C={memory / 'd'}"]
    place(prepared_copy, *tiers, flags=("--limit", "C=100KB", "--limit", "B=60slots", "--limit", f"A={100 * SLOT_BYTES}B"))
    held = check_drives(prepared_copy, extractions["tiny-k3.1"])
    assert sum(held[:2]) == N_RECORDS and held[0] <= 100 and held[1] <= 60 and held[2:] == [8, 8]
    for directory, limit in ((tmp_path / "a", 100 * SLOT_BYTES), (tmp_path / "b", 60 * SLOT_BYTES), (memory / "c", 100_000)):
        assert sum(path.stat().st_blocks * 512 for path in directory.glob("*.bin")) <= limit


def test_the_new_set_may_be_smaller_and_the_files_left_behind_stay(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    place(prepared_copy, f"A={a}", f"B={b}", flags=("--limit", "A=80slots", "--limit", "B=80slots"))
    n_b = check_drives(prepared_copy, extractions["tiny-k3.1"])[1]
    left_behind = tree(a)
    outcome = place(prepared_copy, f"A={b}")
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS]
    assert f"{N_RECORDS - n_b} to copy" in outcome.out
    assert f"left out {a} (tier A): {N_RECORDS - n_b} unplanned files" in outcome.out in outcome.out
    assert ", stay; from now on no command knows of them: --remove-unplanned with this very command removes them" in outcome.out
    assert tree(a) == left_behind
    assert len(names_in(prepared_copy / "experts")) == N_RECORDS + 1


def test_a_dry_run_changes_nothing(prepared_copy: Path, tmp_path: Path, memory: Path) -> None:
    (tmp_path / "a").mkdir()
    before = tree(tmp_path), tree(memory)
    outcome = place(prepared_copy, f"A={tmp_path / 'a'}", f"C={memory}", flags=("--limit", "C=10slots", "--dry-run", "--remove-unplanned"))
    assert (tree(tmp_path), tree(memory)) == before
    assert "144 to copy" in outcome.out and "10 to copy" in outcome.out and outcome.out.endswith("dry run: nothing was changed\n")
    assert "144 unplanned files, 1.41MB, will be removed once another copy is proved" in outcome.out


def test_a_drive_with_a_single_expert_is_told_so(prepared_copy: Path, tmp_path: Path, memory: Path) -> None:
    outcome = place(prepared_copy, f"A={tmp_path / 'a'}", f"C={memory}", flags=("--limit", "C=1slots", "--dry-run"))
    assert "holds 1 expert, 9.79KB; " in outcome.out


def test_a_dry_run_counts_only_files_that_are_really_to_be_copied(prepared_copy: Path, tmp_path: Path) -> None:
    a = tmp_path / "a"
    shutil.copytree(prepared_copy / "experts", a)
    for n in range(5):
        (a / f"L3-E{n}.bin").unlink()
    outcome = place(prepared_copy, f"A={a}", flags=("--dry-run",))
    assert "5 to copy, 49KB (5 from" in outcome.out and "139 that are there to prove" in outcome.out
    assert "at the peak, beyond what is there now: 61.4KB on" in outcome.out


def test_placing_again_with_the_same_flags_copies_nothing(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path, memory: Path) -> None:
    tiers = [f"A={tmp_path / 'a'}", f"B={tmp_path / 'b'}", f"C={memory}"]
    flags = ("--limit", "A=90slots", "--limit", "B=70slots", "--limit", "C=33slots")
    place(prepared_copy, *tiers, flags=flags)
    first = load_manifest(prepared_copy / "manifest.yaml")
    before = {path: data for path, data in {**tree(tmp_path), **tree(memory)}.items() if path.endswith(".bin")}
    outcome = place(prepared_copy, *tiers, flags=flags)
    assert outcome.out.count(" 0 to copy, 0B") == 3
    assert {path: data for path, data in {**tree(tmp_path), **tree(memory)}.items() if path.endswith(".bin")} == before
    second = load_manifest(prepared_copy / "manifest.yaml")
    assert second.generation == 3
    assert named(first, prepared_copy) == named(second, prepared_copy)
    check_drives(prepared_copy, extractions["tiny-k3.1"])


def test_every_drive_s_hash_list_is_one_that_xxhsum_checks(prepared_copy: Path, tmp_path: Path, memory: Path) -> None:
    xxhsum = shutil.which("xxhsum")
    if xxhsum is None:
        pytest.skip("xxhsum is not installed: the lists were not checked by it")
    place(prepared_copy, f"A={tmp_path / 'a'}", f"C={memory}", flags=("--limit", "C=50slots"))
    for directory, n in ((tmp_path / "a", N_RECORDS), (memory, 50)):
        done = subprocess.run([xxhsum, "-c", "experts.xxh128"], cwd=directory, capture_output=True, text=True)
        assert done.returncode == 0, done
        assert len(re.findall(r"\.bin: OK", done.stdout)) == n
    # It would notice.
    flip_a_byte(next(memory.glob("L*.bin")))
    assert subprocess.run([xxhsum, "-c", "experts.xxh128"], cwd=memory, capture_output=True).returncode != 0


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


def test_measuring_writes_a_profile_and_leaves_no_trial_files(prepared_copy: Path, tmp_path: Path, memory: Path) -> None:
    outcome = place(prepared_copy, f"A={tmp_path / 'a'}", f"B={memory}", flags=(*MEASURE, "--limit", "B=100slots"))
    drives = load_manifest(prepared_copy / "manifest.yaml").drives
    for one in drives:
        assert one.profile is not None
        assert one.profile.read_bytes_per_s > 0 and one.profile.n_bytes >= 9792 and one.profile.seconds >= 0.05
        assert 0 < one.profile.p50_us <= one.profile.p95_us <= one.profile.p99_us <= one.profile.max_us
        directory = Path(one.directory)
        assert names_in(directory) == {*experts_in(directory), "experts.xxh128"}
    assert len(re.findall(r"B/s at depth \d+ \((?:direct|buffered)\), p50 \d+ us, p99 \d+ us", outcome.out)) == 2
    assert "tokens   " not in outcome.out, "what an H200 does says nothing of a tiny geometry"
    assert outcome.out.count("fio --name=experts --readonly") == 2 and "sysctl vm.nr_hugepages=" in outcome.out
    times = r"a layer's 4 reads take \d\.\d{3} times \(p95 \d\.\d{3}\) what they would with every drive busy to the end \([\d.e-]+ ms\)"
    assert re.search(rf"^layers   {times}; bound by .* in \d+% of layers$", outcome.out, re.M)


def test_a_measured_dry_run_leaves_the_drives_empty(prepared_copy: Path, tmp_path: Path) -> None:
    outcome = place(prepared_copy, f"A={tmp_path / 'a'}", flags=(*MEASURE, "--no-fio", "--dry-run"))
    assert outcome.out.endswith(
        "dry run: nothing was changed; what was measured is not kept: to place measures again, and may plan a little otherwise\n"
    )
    assert "fio" not in outcome.out
    assert names_in(tmp_path / "a") == set()


def test_profiles_of_the_manifest_stay_and_an_unmeasured_drive_counts_as_their_mean(prepared_copy: Path, tmp_path: Path, memory: Path) -> None:
    a, b = tmp_path / "a", memory / "b"
    place(prepared_copy, f"A={a}", flags=MEASURE)
    profile = load_manifest(prepared_copy / "manifest.yaml").drives[0].profile
    outcome = place(prepared_copy, f"A={a}", f"B={b}")
    drives = load_manifest(prepared_copy / "manifest.yaml").drives
    assert drives[0].profile == profile and drives[1].profile is None
    assert f"the mean of the others: {b}" in outcome.err
    shares = re.findall(r"(\d+)% of reads", outcome.out)
    assert len(shares) == 2 and all(40 <= int(share) <= 60 for share in shares)


def test_files_that_lie_in_a_target_are_proved_and_the_wrong_ones_replaced(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    a = tmp_path / "a"
    shutil.copytree(prepared_copy / "experts", a)
    for name in ("L1-E0.bin", "L9-E15.bin"):
        flip_a_byte(a / name)
    (a / "L4-E4.bin").write_bytes(b"short")
    (a / "L5-E5.bin").unlink()
    (a / "L77-E0.bin").write_bytes(b"of another model")
    changed = {"L1-E0.bin", "L9-E15.bin", "L4-E4.bin", "L5-E5.bin"}
    good = {path.name: path.stat().st_ino for path in a.glob("*.bin") if path.name not in changed}
    outcome = place(prepared_copy, f"A={a}")
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS]
    assert {name: (a / name).stat().st_ino for name in good} == good
    assert outcome.err.count("bad copy: ") == 2 and "layer 9 expert 15" in outcome.err and "written anew" in outcome.err


def test_files_that_lie_in_a_target_need_no_further_room(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    """As after a placement that was interrupted: no manifest names them yet."""
    shutil.copytree(prepared_copy / "experts", tmp_path / "a")
    place(prepared_copy, f"A={tmp_path / 'a'}", flags=("--reserve", "900TB"))
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == [N_RECORDS]


def test_drives_within_the_output_are_named_relative_to_it_so_that_it_can_be_moved(prepared_copy: Path, tmp_path: Path) -> None:
    place(prepared_copy, f"A={prepared_copy / 'experts'}", f"C={prepared_copy / 'more'}")
    assert [one.directory for one in load_manifest(prepared_copy / "manifest.yaml").drives] == ["experts", "more"]
    moved = prepared_copy.rename(tmp_path / "moved")
    succeed("kprep", "verify-hashes", moved)


def test_json_is_the_plan_as_one_document(prepared_copy: Path, tmp_path: Path, memory: Path) -> None:
    flags = (*MEASURE, "--limit", "B=44slots", "--json")
    plan = json.loads(place(prepared_copy, f"A={tmp_path / 'a'}", f"B={memory}", flags=flags).out)
    a, b = plan["drives"]
    assert (a["n_files"], a["n_to_copy"], a["n_to_prove"]) == (len(experts_in(tmp_path / "a")),) * 2 + (0,)
    assert b["n_files"] == 44 and sum(b["from"].values()) == 44
    assert plan["generation"] == 2 and plan["is_dry_run"] is False and plan["is_heat_given"] is False and plan["tok_per_s"] is None
    assert plan["score"]["mean_ratio"] >= 1 and abs(sum(d["read_share"] for d in plan["drives"]) - 1) < 1e-6
    assert plan["what_if"] == {}


@pytest.mark.parametrize("as_json", [False, True])
def test_what_if_answers_and_changes_nothing(prepared_copy: Path, tmp_path: Path, memory: Path, as_json: bool) -> None:
    before = tree(prepared_copy)
    flags = (*MEASURE, "--what-if", "rate=7,capacity=1MB", *(["--json"] if as_json else []))
    outcome = place(prepared_copy, f"A={tmp_path / 'a'}", f"B={memory}", flags=flags)
    assert tree(prepared_copy) == before and load_manifest(prepared_copy / "manifest.yaml").generation == 1
    assert names_in(tmp_path / "a") == names_in(memory) == set()
    if as_json:
        plan = json.loads(outcome.out)
        assert plan["is_dry_run"] is True and plan["generation"] is None
        assert len(plan["what_if"]) == 2 and all(score["mean_ratio"] > 1 - 1e-9 for score in plan["what_if"].values())
    else:
        assert outcome.out.count("what if  ") == 2 and "\n--what-if: nothing was changed; what was measured is not kept: " in outcome.out


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted_ext4(tmp_path_factory.mktemp("loop") / "mount", n_bytes=64 << 20) as directory:
        yield directory


def test_three_tiers_in_memory_on_the_disk_and_on_a_loop_device_give_the_same_text(
    prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path, memory: Path, disk: Path
) -> None:
    """The ids that krun generates do not change with the placement."""
    generate = ("krun", "generate", "-m", prepared_copy, "--ids", "1,2,3", "-n", "6", "--device", "cpu", "--json")
    before = json.loads(succeed(*generate).out)["ids"]
    flags = (*MEASURE, "--limit", "A=60slots", "--limit", "B=100slots", "--limit", "C=20slots")
    outcome = place(prepared_copy, f"A={memory}", f"B={tmp_path / 'b'}", f"C={disk}", flags=flags)
    held = check_drives(prepared_copy, extractions["tiny-k3.1"])
    assert held[0] == 60 and 84 <= held[1] <= 100 and 0 < held[2] <= 20
    profiles = [one.profile for one in load_manifest(prepared_copy / "manifest.yaml").drives]
    assert len({p.read_bytes_per_s for p in profiles if p is not None}) == 3
    shutil.rmtree(prepared_copy / "experts")
    assert json.loads(succeed(*generate).out)["ids"] == before
    assert "lie on one device" in outcome.err
