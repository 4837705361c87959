"""make_plan: every figure is what extraction then makes, all faults are told at once, room is counted once, and nothing is written."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from inside import prepared

from layout.checkpoint import INDEX_NAME, open_checkpoint
from layout.config import K31
from layout.drives import default_reserve, free_bytes
from manifests.errors import BadInputError, NoSpaceError, UsageError
from manifests.geometry import load_geometry
from prep.extraction.base_split import Candidate, plan_base
from prep.extraction.plan import ExtractionPlan, _duration, make_plan
from prep.extraction.spine import spine_bytes, write_spine
from prep.requests import DriveRequest
from prep.tiny import limit_layers, make_checkpoint

DATA = Path(__file__).parent / "data"
GB = 10**9
FULL = load_geometry("k3.1")
SCRIPT = """
import resource, sys, time
from pathlib import Path
from prep.extraction.plan import make_plan
start = time.monotonic()
plan = make_plan(Path(sys.argv[1]), [], reserve_bytes=None)
print(time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print("\\n".join(plan.lines()))
"""


def plan_of(name: str, *requests: DriveRequest, reserve_bytes: int | None = None, seconds: float = 0.05) -> ExtractionPlan:
    return make_plan(DATA / name, requests, reserve_bytes=reserve_bytes, seconds=seconds)


@pytest.fixture
def drives(tmp_path: Path) -> list[DriveRequest]:
    """Two directories on one file system."""
    for name in "ab":
        (tmp_path / name).mkdir()
    return [DriveRequest("A", tmp_path / "a"), DriveRequest("B", tmp_path / "b")]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One layer of experts of the real size, 15.7 GB, all of it a hole."""
    out = tmp_path_factory.mktemp("large") / "checkpoint"
    make_checkpoint(out, limit_layers(FULL, 2), architecture=K31, seed=0, is_sparse=True)
    yield out
    shutil.rmtree(out)


def test_every_size_is_that_of_the_files_that_extraction_makes(model: str, extracted: Path) -> None:
    plan = plan_of(model)
    files = [path.stat().st_size for path in (extracted / "experts").glob("L*.bin")]
    assert (plan.n_expert_files, plan.expert_bytes, {plan.record_bytes}) == (len(files), sum(files), set(files))
    assert plan.spine_bytes == (extracted / "spine.gguf").stat().st_size
    carried = [path.stat().st_size for path in (extracted / "tokenizer").iterdir()]
    assert (plan.n_small_files, plan.small_file_bytes) == (len(carried), sum(carried))


def test_the_peak_covers_all_that_extraction_leaves_on_the_disk(model: str, extracted: Path) -> None:
    on_disk = sum(path.stat().st_blocks * 512 for path in extracted.rglob("*") if path.is_file())
    assert on_disk <= plan_of(model).peak_bytes <= on_disk + 2_000_000


@pytest.mark.parametrize("directories", [["experts"], ["/mnt/" + 1000 * "x", "/mnt/" + 4000 * "y"], []])
def test_the_spine_is_measured_with_its_header_whatever_that_holds(tmp_path: Path, model: str, directories: list[str]) -> None:
    checkpoint = open_checkpoint(DATA / model)
    written = write_spine(checkpoint, tmp_path / "spine", expert_directories=directories, on_progress=lambda *_: None)
    assert spine_bytes(checkpoint, expert_directories=directories) == written.n_bytes == (tmp_path / "spine").stat().st_size


def test_the_directories_names_count_in_the_spine(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d" * 200] * 10)
    beside = deep.with_name("e" * 200)
    deep.mkdir(parents=True)
    beside.mkdir()
    long = [DriveRequest("A", beside), DriveRequest("A", deep)]
    checkpoint = open_checkpoint(DATA / "tiny-k3")
    expected = spine_bytes(checkpoint, expert_directories=[str(request.directory) for request in long])
    assert plan_of("tiny-k3", *long).spine_bytes == expected > plan_of("tiny-k3").spine_bytes


def test_vision_is_left_out_and_counted() -> None:
    checkpoint = open_checkpoint(DATA / "tiny-k3.1")
    plan = plan_of("tiny-k3.1")
    assert (plan.n_vision_tensors, plan.vision_bytes) == (4, 28_672)
    assert plan.read_bytes + plan.vision_bytes == sum(tensor.n_bytes for tensor in checkpoint.tensors.values())


def test_the_real_model_is_planned_in_a_minute_and_two_gigabytes(tmp_path: Path) -> None:
    out = tmp_path / "checkpoint"
    make_checkpoint(out, FULL, architecture=K31, seed=0, is_sparse=True)
    try:
        assert sum(path.stat().st_size for path in out.iterdir()) > 1_560 * GB
        assert sum(path.stat().st_blocks * 512 for path in out.iterdir()) < 1 * GB
        done = subprocess.run([sys.executable, "-c", SCRIPT, out], capture_output=True, text=True, check=True)
    finally:
        shutil.rmtree(out)
    first, *lines = done.stdout.splitlines()
    seconds, peak_memory = map(float, first.split())
    assert seconds < 60
    assert peak_memory < 2 << 30
    assert "experts    1,446,456,066,048 bytes (1.45TB): 82,432 files of 17,547,264 bytes" in lines
    assert "spine      61,075,349,504 bytes (61.1GB)" in lines
    assert any("93 layers, 24 with full attention and 69 with KDA; 1 dense, 92 of 896 experts, 16 for each token" in line for line in lines)


def test_holes_are_not_measured_and_each_shard_is_named(large: Path) -> None:
    plan = make_plan(large, [], reserve_bytes=None)
    assert (plan.read_rate, plan.read_seconds) == (None, None)
    assert len(plan.holes) == plan.n_shards == 5
    text = "\n".join(plan.lines())
    assert "time not measured: the checkpoint is sparse, and extraction would refuse it:" in text
    assert all(hole in text for hole in plan.holes)


def test_the_time_is_that_of_reading_at_the_measured_rate(model: str) -> None:
    plan = plan_of(model, seconds=0.2)
    assert plan.read_rate is not None
    assert plan.read_seconds == pytest.approx(plan.read_bytes / plan.read_rate.bytes_per_s)
    assert plan.read_rate.n_bytes == pytest.approx(plan.read_rate.bytes_per_s * plan.read_rate.seconds)
    assert plan.read_rate.n_bytes % plan.record_bytes == 0
    assert 0.2 <= plan.read_rate.seconds < 2
    assert plan.lines()[-1].endswith("writing is not measured")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.1, "1 s"), (119, "119 s"), (120, "2 min"), (3599, "1 h 0 min"), (9060, "2 h 31 min"), (200_000, "55 h 33 min")],
)
def test_times_are_told_in_words(seconds: float, words: str) -> None:
    assert _duration(seconds) == words


def test_nothing_is_written(drives: list[DriveRequest], checkpoint_copy: Path) -> None:
    directories = [checkpoint_copy, *(request.directory for request in drives)]
    before = [path.stat().st_mtime_ns for path in directories]
    make_plan(checkpoint_copy, drives, reserve_bytes=None, seconds=0.05)
    # A file made and removed would change them.
    assert [path.stat().st_mtime_ns for path in directories] == before


def test_all_faults_of_a_checkpoint_are_told(checkpoint_copy: Path) -> None:
    index = json.loads((checkpoint_copy / INDEX_NAME).read_bytes())
    dropped = [name for name in index["weight_map"] if ".layers.1.block_sparse_moe.experts." in name][:30]
    index["weight_map"] = {name: shard for name, shard in index["weight_map"].items() if name not in dropped}
    (checkpoint_copy / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(BadInputError) as caught:
        make_plan(checkpoint_copy, [], reserve_bytes=None)
    assert [name for name in dropped if f"tensor {name} is not in the index" not in str(caught.value)] == []
    with pytest.raises(BadInputError, match="and 10 more"):
        open_checkpoint(checkpoint_copy)


def test_a_missing_tokenizer_is_a_fault(checkpoint_copy: Path) -> None:
    (checkpoint_copy / "tiktoken.model").unlink()
    with pytest.raises(BadInputError, match=r"tiktoken\.model: missing"):
        make_plan(checkpoint_copy, [], reserve_bytes=None)


def test_without_drives_only_totals_are_planned() -> None:
    plan = plan_of("tiny-k3.1")
    assert (plan.drives, plan.fits, plan.reason) == ((), True, "")
    assert not [line for line in plan.lines() if line.startswith(("tier", "fits"))]


def test_the_base_is_split_over_the_drives(drives: list[DriveRequest]) -> None:
    plan = plan_of("tiny-k3.1", *drives)
    assert plan.fits
    assert [(d.tier, d.directory, d.n_files, d.n_bytes) for d in plan.drives] == [
        ("A", drives[0].directory, 72, 72 * 12_288),
        ("B", drives[1].directory, 72, 72 * 12_288),
    ]
    assert {d.reserve_bytes for d in plan.drives} == {default_reserve(drives[0].directory)}
    assert {d.is_with_source for d in plan.drives} == {drives[0].directory.stat().st_dev == DATA.stat().st_dev}
    assert any(f"{drives[0].directory}: 72 files, 884,736 bytes (885KB)" in line for line in plan.lines())


def test_a_limit_moves_experts_to_the_other_drive(drives: list[DriveRequest]) -> None:
    limited = [DriveRequest("A", drives[0].directory, 20 * 12_288), drives[1]]
    assert [d.n_files for d in plan_of("tiny-k3.1", *limited).drives] == [20, 124]


def test_a_drive_does_not_fit_beyond_its_limit(drives: list[DriveRequest]) -> None:
    limited = DriveRequest("A", drives[0].directory, 20 * 12_288)
    plan = plan_of("tiny-k3.1", limited)
    line = next(line for line in plan.lines() if line.startswith("tier A"))
    assert not plan.fits and not plan.drives[0].fits and plan.drives[0].left_bytes > 0
    assert "in reserve: does not fit: 1.52MB beyond its limit of 246KB" in line
    second = plan_of("tiny-k3.1", limited, DriveRequest("B", drives[1].directory, 50 * 12_288))
    assert [d.fits for d in second.drives] == [False, False]
    assert ", counted there: does not fit: 270KB beyond its limit of 614KB" in "\n".join(second.lines())


def test_a_limit_may_be_in_slots(drives: list[DriveRequest]) -> None:
    a, b = (drive.directory for drive in drives)
    flags = ("--tier", f"A={a}", "--tier", f"B={b}", "--limit", "A=20slots", "--measure-seconds", 0.05)
    assert f"tier A     {a}: 20 files, " in prepared("plan", DATA / "tiny-k3.1", *flags).out


def reserve_leaving(directory: Path, n_bytes: int) -> int:
    """Return the reserve that leaves so many bytes of a file system for us; other programs may change that by a little."""
    free = free_bytes(directory)
    if free < n_bytes:
        pytest.skip(f"{directory} has {free} bytes free, {n_bytes} are needed")
    return free - n_bytes


def test_directories_on_one_file_system_share_its_room(drives: list[DriveRequest], large: Path) -> None:
    # 10 GB for each would be enough, 10 GB for both are not.
    reserve = reserve_leaving(drives[0].directory, 10 * GB)
    plan = make_plan(large, drives, reserve_bytes=reserve)
    assert [d.file_system for d in plan.drives] == [0, 0]
    assert {d.reserve_bytes for d in plan.drives} == {reserve}
    assert not plan.fits
    assert "tiers A and B have room for " in plan.reason
    assert " of 896 experts" in plan.reason
    assert sum(d.n_files for d in plan.drives) == 896
    # What is missing is told once for both.
    assert [d.left_bytes for d in plan.drives] == pytest.approx([(10 - 15.7) * GB] * 2, abs=1 * GB)
    assert [d.fits for d in plan.drives] == [False, False]
    text = "\n".join(plan.lines())
    assert f"fits       no: {plan.reason}" in plan.lines()
    a, b = (drive.directory for drive in drives)
    assert f" free, shared with {b}, " in text and f"; no room of its own: on the file system of {a}, counted there" in text
    assert (text.count(" free, "), text.count("does not fit: ")) == (1, 1)


def test_a_drive_fits_with_what_is_left_beyond_the_reserve(drives: list[DriveRequest], large: Path) -> None:
    plan = make_plan(large, drives, reserve_bytes=reserve_leaving(drives[0].directory, 18 * GB))
    assert plan.fits
    assert plan.drives[0].left_bytes == pytest.approx((18 - 15.7) * GB, abs=1 * GB)
    assert "fits       yes" in plan.lines()


def test_room_for_the_output_directory_is_told(drives: list[DriveRequest], large: Path) -> None:
    # The experts leave 1 GB; the spine alone has about 4 GB.
    tight = make_plan(large, drives, reserve_bytes=reserve_leaving(drives[0].directory, 17 * GB))
    assert tight.fits
    assert any("of the file systems, none has room for it too" in line for line in tight.lines())
    ample = make_plan(large, drives, reserve_bytes=reserve_leaving(drives[0].directory, 22 * GB))
    home = f"of the file systems, that of {drives[0].directory} and {drives[1].directory} has room for it too"
    assert any(home in line for line in ample.lines())


def test_json_holds_every_figure(drives: list[DriveRequest]) -> None:
    plan = plan_of("tiny-k3.1", *drives)
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["geometry"] == plan.geometry.to_dict()
    assert [d["directory"] for d in values["drives"]] == [str(d.directory) for d in drives]
    assert [d["fits"] for d in values["drives"]] == [True, True]
    for name in ("n_expert_files", "record_bytes", "expert_bytes", "spine_bytes", "peak_bytes", "out_bytes", "read_seconds", "reason"):
        assert values[name] == getattr(plan, name), name


def test_a_plan_without_drives_and_rate_is_json_too(large: Path) -> None:
    values = json.loads(json.dumps(make_plan(large, [], reserve_bytes=None).to_dict()))
    assert (values["drives"], values["read_rate"], values["read_seconds"], len(values["holes"])) == ([], None, None, 5)


@pytest.mark.parametrize("tier", ["C", "D"])
def test_refuses_tiers_that_extraction_does_not_fill(drives: list[DriveRequest], tier: str) -> None:
    with pytest.raises(UsageError, match=f"--tier {tier}=.*made afterwards by kprep place"):
        plan_of("tiny-k3", drives[0], DriveRequest(tier, drives[1].directory))


def test_refuses_a_directory_that_is_not_there_or_named_twice(drives: list[DriveRequest], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        plan_of("tiny-k3", DriveRequest("A", tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="named twice"):
        plan_of("tiny-k3", drives[0], drives[0])


def candidates_of(*tiers: str, limits: tuple[int | None, ...] = (None, None, None)) -> list[Candidate]:
    """One drive of its own file system for each tier, empty."""
    nothing = np.zeros((FULL.n_layers, FULL.n_experts), np.bool_)
    return [Candidate(tier, 1.0, number, limits[number], nothing) for number, tier in enumerate(tiers)]


def test_the_base_holds_every_expert_once_and_is_balanced_within_every_layer() -> None:
    holds = np.stack(plan_base(FULL, candidates_of("A", "B", "C"), pool_room=[10**6] * 3))
    assert holds.sum(axis=0)[FULL.n_dense_layers :].tolist() == [[1] * FULL.n_experts] * len(FULL.moe_layers)
    assert holds[:, 0].sum() == 0
    assert np.unique(holds.sum(axis=2)[:, 1:], axis=1).tolist() == [[448], [448], [0]]


def test_a_small_drive_gets_its_part_of_every_layer() -> None:
    holds = np.stack(plan_base(FULL, candidates_of("A", "B"), pool_room=[9200, 10**6]))
    counts = holds.sum(axis=2)[:, 1:]
    assert counts.sum(axis=1).tolist() == [9200, 82_432 - 9200]
    assert np.unique(counts[0]).tolist() == [100]


def test_the_base_needs_no_more_room_than_the_experts_take() -> None:
    assert np.stack(plan_base(FULL, candidates_of("A", "B"), pool_room=[40_001, 42_431])).sum(axis=(1, 2)).tolist() == [40_001, 42_431]
    with pytest.raises(NoSpaceError, match="room for 82431 of 82432 experts"):
        plan_base(FULL, candidates_of("A", "B"), pool_room=[40_000, 42_431])
