"""Measuring drives, on the disk here, in memory, and on a sysfs of files: profiles, trial files, remarks and refusals."""

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from test_drives import PCI, FakeSys
from test_measure_reads import make_files

from layout.direct import probe_directory
from layout.drives import describe_directory, device_read_bytes, temperature_of
from manifests.errors import KtierError, NoSpaceError, UsageError
from manifests.manifest import Profile
from prep.measuring.measure import DEPTHS, first_and_last, is_older_than_files, last_gain, measure_drive, measure_drives, soak
from prep.measuring.timed_reads import Run
from prep.measuring.trial_files import LEAST_FILES, MOST_TRIAL_FILES

RECORD = 1 << 20
PROFILE = Profile("2026-11-05T10:00:00+00:00", "preadv", True, 3, 7e9, 1.0, 2.0, 3.0, 4.0, 100, 0.1)


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """A directory with enough experts, written long ago."""
    for path in make_files(tmp_path / "drive", 24, RECORD):
        os.utime(path, (1e9, 1e9))
    return tmp_path / "drive"


@pytest.fixture
def memory() -> Iterator[Path]:
    """An empty directory on a file system in memory."""
    root = Path("/dev/shm")
    if not os.access(root, os.W_OK) or not describe_directory(root).is_ram_backed:
        pytest.skip("no file system in memory at /dev/shm")
    with tempfile.TemporaryDirectory(dir=root) as directory:
        yield Path(directory)


@pytest.fixture
def fake(tmp_path: Path) -> FakeSys:
    """A sysfs in which the file system of tmp_path lies on nvme0n1."""
    fake = FakeSys(tmp_path / "fake")
    disk = Path(fake.nvme(0)).parent
    by_number(fake, tmp_path).unlink(missing_ok=True)
    fake.link(str(by_number(fake, tmp_path).relative_to(fake.root)), str(disk))
    if [d.name for d in describe_directory(tmp_path, sys_root=fake.root).physical] != ["nvme0n1"]:
        pytest.skip("the file system of the tests has no number that a file of sysfs could stand for")
    fake.files(str(disk), {"stat": "1 2 3000 4"})
    return fake


def by_number(fake: FakeSys, directory: Path) -> Path:
    number = os.stat(directory).st_dev
    return fake.root / f"dev/block/{os.major(number)}:{os.minor(number)}"


def test_a_drive_with_experts_is_measured_on_them(drive: Path) -> None:
    names, steps = sorted(os.listdir(drive)), list[str]()
    measured = measure_drives([drive], record_bytes=RECORD, seconds=0.05, on_progress=steps.append)
    (profile,) = measured.profiles
    assert sorted(os.listdir(drive)) == names
    assert not profile.is_on_trial_files and profile.is_direct == probe_directory(drive).is_direct
    assert profile.n_bytes % RECORD == 0 and profile.seconds >= 0.05
    assert profile.read_bytes_per_s == pytest.approx(profile.n_bytes / profile.seconds)
    assert 0 < profile.p50_us <= profile.p95_us <= profile.p99_us <= profile.max_us <= profile.seconds * 1e6
    depths = [point.depth for point in profile.curve]
    assert depths == list(DEPTHS[: len(depths)])
    assert next(p.read_bytes_per_s for p in profile.curve if p.depth == profile.depth) == profile.read_bytes_per_s
    assert [step.rpartition(" ")[2] for step in steps] == [str(depth) for depth in depths]
    assert datetime.now(UTC).timestamp() - datetime.fromisoformat(profile.date).timestamp() < 60
    assert (measured.servers, measured.server_bytes_per_s, measured.links) == ((0,), (profile.read_bytes_per_s,), ())
    assert measured.together_bytes_per_s == measured.each_together_bytes_per_s[0] == profile.read_bytes_per_s
    assert measured.uploads is None and profile.with_uploads_bytes_per_s is None


def test_the_kernel_sees_what_a_direct_read_reads(drive: Path) -> None:
    if device_read_bytes(describe_directory(drive)) is None or not probe_directory(drive).is_direct:
        pytest.skip("the kernel does not count the reads of this file system's devices, or they are not direct")
    profile = measure_drive(drive, record_bytes=RECORD, seconds=0.1)
    assert profile.device_bytes is not None and profile.device_bytes >= profile.n_bytes and not profile.is_cache_suspected


def test_fewer_files_than_were_read_are_told_and_so_are_young_ones(drive: Path) -> None:
    assert any("24 files (25.2MB) are fewer than were read: each was read " in r for r in remarks_of(drive))
    assert not any("younger" in r for r in remarks_of(drive))
    for path in list(drive.iterdir())[:13]:
        os.utime(path)
    assert any("half of its files are younger than 1 h; a drive may read fresh files faster" in r for r in remarks_of(drive))


def remarks_of(drive: Path) -> tuple[str, ...]:
    remarks = measure_drives([drive], record_bytes=RECORD, seconds=0.02).remarks
    assert len(set(remarks)) == len(remarks)
    return remarks


def test_a_drive_without_experts_gets_trial_files_for_the_time(tmp_path: Path) -> None:
    during = list[int]()

    def look(step: str) -> None:
        during.append(sum(path.stat().st_size == RECORD for path in tmp_path.rglob("*") if path.is_file()))

    # One expert is too few, and a file of another size is none.
    make_files(tmp_path, 1, RECORD)
    (tmp_path / "L2-E0.bin").write_bytes(b"short")
    measured = measure_drives([tmp_path], record_bytes=RECORD, seconds=0.02, on_progress=look)
    assert set(during) == {MOST_TRIAL_FILES + 1}
    assert sorted(os.listdir(tmp_path)) == ["L1-E0.bin", "L2-E0.bin"]
    assert measured.profiles[0].is_on_trial_files
    assert any(f"measured on {MOST_TRIAL_FILES} files made for it (67.1MB)" in r and "fresh files faster" in r for r in measured.remarks)


def test_trial_files_are_random_and_no_two_alike(tmp_path: Path) -> None:
    contents = list[bytes]()

    def look(step: str) -> None:
        contents.extend(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and not contents[MOST_TRIAL_FILES:])

    measure_drives([tmp_path], record_bytes=9792, seconds=0.02, on_progress=look)
    assert len(set(contents[:MOST_TRIAL_FILES])) == MOST_TRIAL_FILES
    assert all(len(set(one)) == 256 for one in contents)


def test_trial_files_stay_out_of_the_reserve(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(NoSpaceError, match=f"no room for {LEAST_FILES} trial files of 1.05MB: .* are kept in reserve; make room, or lower --reserve"):
        measure_drives([tmp_path], record_bytes=RECORD, seconds=0.02, reserve_bytes=free - 10 * RECORD)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_trial_files_go_when_the_measurement_is_broken_off(tmp_path: Path, error: type[BaseException]) -> None:
    def stop(step: str) -> None:
        assert len(list(tmp_path.iterdir())) == 1
        raise error

    with pytest.raises(error):
        measure_drives([tmp_path], record_bytes=9792, seconds=0.02, on_progress=stop)
    assert list(tmp_path.iterdir()) == []


def start_measuring(directory: Path) -> subprocess.Popen[str]:
    """Measure in a process of its own; it has its trial files and is at work when this returns."""
    code = (
        # Tests that were started in the background would pass on that interrupts are ignored.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import sys; from pathlib import Path; from prep.measuring.measure import measure_drives\n"
        "measure_drives([Path(sys.argv[1])], record_bytes=9792, seconds=0.5, on_progress=lambda text: print(text, flush=True))"
    )
    root = Path(__file__).parent.parent
    process = subprocess.Popen([sys.executable, "-c", code, directory], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root)
    assert process.stdout is not None
    assert "at depth 1" in process.stdout.readline()
    return process


def test_ctrl_c_removes_the_trial_files(tmp_path: Path) -> None:
    process = start_measuring(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode != 0 and list(tmp_path.iterdir()) == []


def test_what_a_killed_measurement_left_goes_at_the_next_one_and_what_a_living_one_uses_stays(tmp_path: Path) -> None:
    (tmp_path / "a file of the user").touch()
    killed = start_measuring(tmp_path)
    killed.kill()
    killed.communicate(timeout=300)
    (left,) = tmp_path.glob(".measure-*")
    living = start_measuring(tmp_path)
    assert not left.exists()
    (used,) = tmp_path.glob(".measure-*")
    measure_drive(tmp_path, record_bytes=9792, seconds=0.02)
    assert used.exists() or living.poll() is not None
    living.communicate(timeout=300)
    assert living.returncode == 0
    assert os.listdir(tmp_path) == ["a file of the user"]


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(drive: Path, seconds: float) -> None:
    for call in (lambda: measure_drive(drive, record_bytes=RECORD, seconds=seconds), lambda: soak(drive, seconds, record_bytes=RECORD)):
        with pytest.raises(UsageError, match="give a time above zero"):
            call()


def test_memory_has_no_devices_and_no_age(memory: Path) -> None:
    measured = measure_drives([memory], record_bytes=RECORD, seconds=0.02)
    (profile,) = measured.profiles
    assert profile.device_bytes is None and not profile.is_cache_suspected and profile.is_on_trial_files
    assert not any("fresh" in remark or "fewer" in remark for remark in measured.remarks)
    assert list(memory.iterdir()) == []


def test_a_rate_above_the_link_is_refused(drive: Path, fake: FakeSys, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.files(f"{PCI}/0000:01:00.0", {"current_link_speed": "2.5 GT/s PCIe", "current_link_width": "1"})
    # Reads that take no time, as from a cache.
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: len(buffers[0]))
    with pytest.raises(KtierError, match=r"drive: measured .*/s, but its link carries at most 250MB/s: a cache was measured"):
        measure_drives([drive], record_bytes=RECORD, seconds=0.1, sys_root=fake.root)


def test_a_drive_of_unknown_and_known_links_has_no_limit(tmp_path: Path, drive: Path, fake: FakeSys) -> None:
    fake.files(f"{PCI}/0000:01:00.0", {"current_link_speed": "2.5 GT/s PCIe", "current_link_width": "1"})
    by_number(fake, tmp_path).unlink()
    slaves = (f"{PCI}/0000:01:00.0/nvme/nvme0/nvme0n1", "devices/pci0000:00/0000:00:02.0/virtio1/block/vda")
    fake.device("devices/virtual/block/md0", by_number(fake, tmp_path).name, {"size": "1"}, slaves=slaves)
    assert len(describe_directory(drive, sys_root=fake.root).physical) == 2
    assert measure_drives([drive], record_bytes=RECORD, seconds=0.02, sys_root=fake.root).profiles[0].read_bytes_per_s > 0


def test_a_link_below_its_best_is_told(drive: Path, fake: FakeSys) -> None:
    for speed, width, text in (("16.0 GT/s PCIe", "4", "16.0 GT/s PCIe x4 (7.88GB/s)"), ("32.0 GT/s PCIe", "1", "32.0 GT/s PCIe x1 (3.94GB/s)")):
        fake.files(f"{PCI}/0000:01:00.0", {"current_link_speed": speed, "current_link_width": width})
        remarks = measure_drives([drive], record_bytes=RECORD, seconds=0.02, sys_root=fake.root).remarks
        assert any(f"nvme0n1 is linked at {text}, but can do 32.0 GT/s PCIe x4 (15.8GB/s)" in r for r in remarks)
    fake.files(f"{PCI}/0000:01:00.0", {"current_link_speed": "32.0 GT/s PCIe", "current_link_width": "4"})
    assert not any("linked" in r for r in measure_drives([drive], record_bytes=RECORD, seconds=0.02, sys_root=fake.root).remarks)


def test_devices_that_read_less_than_was_asked_for_are_called_a_cache(drive: Path, fake: FakeSys) -> None:
    measured = measure_drives([drive], record_bytes=RECORD, seconds=0.05, sys_root=fake.root)
    assert measured.profiles[0].device_bytes == 0 and measured.profiles[0].is_cache_suspected
    assert any("were read, but its devices read only 0B: " in remark for remark in measured.remarks)


def test_a_hot_drive_is_told_and_soaking_it_gives_the_temperatures(drive: Path, fake: FakeSys) -> None:
    sensor = f"{PCI}/0000:01:00.0/nvme/nvme0/hwmon3"
    fake.files(sensor, {"temp1_input": "61850"})
    assert not any("°C" in r for r in measure_drives([drive], record_bytes=RECORD, seconds=0.02, sys_root=fake.root).remarks)
    fake.files(sensor, {"temp1_max": "60000"})
    remarks = measure_drives([drive], record_bytes=RECORD, seconds=0.02, sys_root=fake.root).remarks
    assert any("nvme0n1 has 62 °C, and warns at 60 °C" in r for r in remarks)
    long = soak(drive, 0.2, record_bytes=RECORD, sys_root=fake.root)
    assert long.celsius_before == long.celsius_after == {"nvme0n1": 61.85}
    assert any("warns at 60" in r for r in long.remarks)


def test_soak_compares_the_first_window_with_the_last(drive: Path) -> None:
    long = soak(drive, 0.4, record_bytes=RECORD, depth=2)
    assert (long.window_s, long.depth) == (0.2, 2)
    assert long.seconds >= 0.4 and long.n_bytes % RECORD == 0
    assert long.first_bytes_per_s > 0 and long.last_bytes_per_s > 0
    in_windows = 0.2 * (long.first_bytes_per_s + long.last_bytes_per_s)
    # The reads that were under way at the end are in neither window.
    assert long.n_bytes - 4 * RECORD <= in_windows <= long.n_bytes


def test_soak_removes_its_trial_files(tmp_path: Path) -> None:
    assert any("made for it" in r for r in soak(tmp_path, 0.1, record_bytes=9792).remarks)
    assert list(tmp_path.iterdir()) == []


def test_the_windows_of_a_soak_are_its_first_and_last_five_seconds_or_halves() -> None:
    """A drive that reads ten records a second, and after twelve seconds two."""
    run = Run(RECORD, [0.1] * 136, [*(0.1 * n for n in range(1, 121)), *(12 + 0.5 * n for n in range(1, 17))])
    assert first_and_last(run, 20) == (5, 10 * RECORD, 2 * RECORD)
    assert first_and_last(run, 1) == (0.5, 10 * RECORD, 10 * RECORD)


@pytest.mark.parametrize(
    ("date", "is_older"),
    [("2026-11-05T10:00:00+00:00", True), ("2026-11-05T12:30:00+02:00", True), ("2026-11-05T13:00:00+02:00", False), ("2026-11-05T11:00:00+00:00", False), ("2026-11-05T10:30:00", True),
     ("2026-11-04", True), ("2026-11-05", False), ("2027-01-01", False)],
)  # fmt: skip
def test_a_profile_is_stale_once_an_expert_is_newer(tmp_path: Path, date: str, is_older: bool) -> None:
    profile = replace(PROFILE, date=date)
    assert not is_older_than_files(profile, tmp_path)
    first, second = make_files(tmp_path, 2)
    (tmp_path / "experts.xxh128").touch()
    os.utime(first, (1e9, 1e9))
    os.utime(second, (1e9, 1e9))
    assert not is_older_than_files(profile, tmp_path)
    written = datetime(2026, 11, 5, 10, 59, 59, tzinfo=UTC).timestamp()
    os.utime(second, (written, written))
    assert is_older_than_files(profile, tmp_path) == is_older


def test_the_last_gain_is_where_depth_stops_to_pay() -> None:
    assert last_gain([1.0]) == 0
    assert last_gain([1.0, 1.04, 1.04]) == 0
    assert last_gain([1.0, 2.0, 2.05, 2.08]) == 1
    # Small gains that add up count, and one bad reading does not end the search.
    assert last_gain([1.0, 1.04, 1.08]) == 2
    assert last_gain([1.0, 0.5, 3.0]) == 2


def test_counters_are_those_of_the_devices_below(fake: FakeSys, tmp_path: Path) -> None:
    facts = describe_directory(tmp_path, sys_root=fake.root)
    assert device_read_bytes(facts, sys_root=fake.root) == 3000 * 512
    for text in ("", "1 2", "1 2 x 4"):
        fake.files(f"{PCI}/0000:01:00.0/nvme/nvme0/nvme0n1", {"stat": text})
        assert device_read_bytes(facts, sys_root=fake.root) is None


def test_counters_of_multipath_are_at_the_head_or_at_the_paths(fake: FakeSys) -> None:
    subsystem = "devices/virtual/nvme-subsystem/nvme-subsys3"
    head = fake.device(f"{subsystem}/nvme3n1", "259:30", {"size": "8", "stat": "0 0 0 0"})
    for n in (4, 5):
        fake.device(f"{PCI}/0000:0{n}:00.0/nvme/nvme{n}/nvme3c{n}n1", None, {"size": "8", "stat": f"9 9 {n} 9"})
    facts = fake.facts(fake.mount("a", "259:30"))
    assert device_read_bytes(facts, sys_root=fake.root) == 9 * 512
    fake.files(head, {"stat": "1 1 11 1"})
    assert device_read_bytes(facts, sys_root=fake.root) == 11 * 512


def test_a_drive_partly_in_memory_is_not_counted(fake: FakeSys) -> None:
    memory = fake.mount("memory", "0:40", kind="tmpfs", source="tmpfs")
    layers = f"lowerdir={fake.mount('lower', '259:1')},upperdir={memory}"
    facts = fake.facts(fake.mount("a", "0:60", "overlay", "overlay", f"rw,{layers}"))
    assert facts.physical_names == {"nvme0n1", "ram"} and device_read_bytes(facts, sys_root=fake.root) is None


def test_a_drive_without_a_sensor_has_no_temperature(fake: FakeSys, tmp_path: Path) -> None:
    (device,) = describe_directory(tmp_path, sys_root=fake.root).physical
    assert temperature_of(device, sys_root=fake.root) is None
