"""What the doctor finds: on this machine by real transfers, and of other machines in trees of plain files like sysfs and procfs."""

import errno
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from inside import kprep
from test_drives import PCI, FakeSys

from layout.direct import probe_directory
from layout.findings import Finding, finding_line
from layout.memory import CgroupLimit, available_host_bytes, cgroup_limits, is_under_cgroup_v1
from manifests.errors import Interrupted
from prep.doctor import LEAST_OPEN_FILES, examine

RECORD = 3 << 20
GIB = 1 << 30


class FakeMachine(FakeSys):
    """A machine in plain files: sysfs, and the parts of procfs that are read. Its directories lie on the real disk."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.proc = root / "proc"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self/cgroup").write_text("0::/box/inner\n")
        self.memory(16)
        self.huge_pages("always [madvise] never")

    def memory(self, available_gib: int) -> None:
        (self.proc / "meminfo").write_text(f"MemTotal: {32 << 20} kB\nMemFree: 1 kB\nMemAvailable: {available_gib << 20} kB\n")

    def huge_pages(self, setting: str) -> None:
        self.files("kernel/mm/transparent_hugepage", {"enabled": setting})

    def cgroup(self, folder: str, *, most: str, used: int, inactive_file: int) -> None:
        statistics = f"anon 5\nfile 7\ninactive_anon 3\ninactive_file {inactive_file}\nactive_file 4"
        self.files(f"fs/cgroup/{folder}", {"memory.max": most, "memory.current": str(used), "memory.stat": statistics})

    def examine(self, *paths: Path) -> list[Finding]:
        (self.proc / "self/mountinfo").write_text("\n".join(self.lines) + "\n")
        return examine(list(paths), record_bytes=RECORD, sys_root=self.root, proc_root=self.proc)

    def on_nvme(self) -> Path:
        self.nvme(0)
        return self.mount("a", "259:1", source="/dev/nvme0n1p1")


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def only(findings: Sequence[Finding], what: str, where: Path | str | None = None) -> Finding:
    (found,) = (f for f in findings if f.what == what and (where is None or f.where == str(where)))
    return found


def levels(findings: Sequence[Finding]) -> dict[str, str]:
    return {f.what: f.level for f in findings}


def test_a_good_directory_is_proved_by_a_transfer_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("stays")
    found = [f for f in examine([tmp_path]) if f.where == str(tmp_path)]
    assert "bad" not in levels(found).values()
    transfers = only(found, "transfers")
    assert transfers.text.startswith("17547264 random bytes written, read ")
    if probe_directory(tmp_path).is_direct:
        assert transfers.level == "good" and ", read direct, 4096 B aligned, at 5 offsets: equal, " in transfers.text
        assert only(found, "alignment").level == "good"
    assert os.listdir(tmp_path) == ["mine"]


def test_without_a_path_only_the_machine_is_looked_at() -> None:
    found = examine([])
    assert {f.where for f in found} == {"machine"}
    assert {f.what for f in found} == {"versions", "memory", "cgroup limit", "huge pages", "open files", "locked memory"}
    assert f"Python {sys.version.split()[0]}, numpy {np.__version__}, xxhash " in only(found, "versions").text


def test_json_says_the_same(tmp_path: Path) -> None:
    outcome = kprep("doctor", "--json", tmp_path / "nowhere")
    document = json.loads(outcome.out)
    assert outcome.code == 1 and document["would_work"] is False
    assert document["findings"][-1]["what"] == "directory" and document["findings"][-1]["level"] == "bad"
    assert [f["what"] for f in document["findings"][:-1]] == [f.what for f in examine([])]
    assert json.loads(kprep("doctor", "--json").out)["would_work"] is True


def test_every_finding_that_is_not_good_has_a_cure_and_one_that_is_has_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = examine([tmp_path, tmp_path, tmp_path / "absent", tmp_path / "file"], record_bytes=RECORD)
    assert {f.level for f in found} == {"good", "note", "bad"}
    for finding in found:
        assert bool(finding.cure) == (finding.level != "good")
    with pytest.raises(AssertionError):
        Finding("x", "machine", "bad", "a sorry state")


def test_a_line_shows_level_place_and_cure() -> None:
    assert finding_line(Finding("link", "/mnt/a", "good", "fast")) == "good  /mnt/a: link: fast"
    assert finding_line(Finding("link", "/mnt/a", "bad", "slow", "seat it anew")) == "bad   /mnt/a: link: slow\n      to do: seat it anew"


@pytest.mark.parametrize(
    ("name", "text"), [("absent", "there is no such directory"), ("file", "is not a directory"), ("file/x", "cannot be looked at")]
)
def test_what_is_no_directory_is_bad_and_the_others_are_still_looked_at(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "file").touch()
    found = examine([tmp_path / name, tmp_path], record_bytes=RECORD)
    bad = only(found, "directory", tmp_path / name)
    assert bad.level == "bad" and bad.text.startswith(text)
    assert ("mkdir -p" in bad.cure) == (name == "absent")
    assert only(found, "transfers", tmp_path).text.startswith(f"{RECORD} random bytes written")


def test_two_directories_of_one_device_count_as_one_drive(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    shared = only(examine([tmp_path / "a", tmp_path / "b"], record_bytes=RECORD), "shared device")
    assert (shared.level, shared.where) == ("note", str(tmp_path / "b"))
    assert str(tmp_path / "a") in shared.text and "count as one drive" in shared.text


def lying(change: Callable[[memoryview, int], None], least: int) -> Callable[[int, Sequence[memoryview], int], int]:
    real = os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        n = real(fd, buffers, offset)
        if n >= least:
            change(buffers[0], n)
        return n

    return preadv


@pytest.mark.parametrize("at", [0, RECORD // 2, RECORD - 1])
def test_one_wrong_bit_in_a_large_read_is_bad_and_its_place_is_named(tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(buffer: memoryview, n: int) -> None:
        buffer[at] ^= 1

    monkeypatch.setattr("layout.direct.os.preadv", lying(flip, RECORD))
    transfers = only(examine([tmp_path], record_bytes=RECORD), "transfers")
    assert transfers.level == "bad" and "smartctl" in transfers.cure
    assert f"bytes 0 to {RECORD}, read " in transfers.text and f": 1 are wrong, the first at {at}" in transfers.text
    assert os.listdir(tmp_path) == []


def test_a_wrong_byte_at_one_offset_only_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def wrong_in_the_middle(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        n = real(fd, buffers, offset)
        if offset == RECORD // 3:
            buffers[0][100] ^= 0x80
        return n

    assert RECORD // 3 % 4096 == 0
    monkeypatch.setattr("layout.direct.os.preadv", wrong_in_the_middle)
    assert f"1 are wrong, the first at {RECORD // 3 + 100}" in only(examine([tmp_path], record_bytes=RECORD), "transfers").text


def test_a_plain_read_that_gives_other_bytes_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = np.fromfile

    def stale_fromfile(path: Path, dtype: type[np.uint8], *, count: int) -> np.ndarray:
        content = real(path, dtype, count=count)
        content[4096:8192] = 0
        return content

    monkeypatch.setattr("prep.doctor.np.fromfile", stale_fromfile)
    transfers = only(examine([tmp_path], record_bytes=RECORD), "transfers")
    assert transfers.level == "bad" and transfers.text.endswith("a plain read gives other bytes")


def test_a_failing_drive_is_a_finding_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("layout.direct.os.preadv", fail)
    transfers = only(examine([tmp_path], record_bytes=RECORD), "transfers")
    assert (transfers.level, transfers.text) == ("bad", "none could be proved: Input/output error")
    assert os.listdir(tmp_path) == []


def test_an_interruption_is_no_finding_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted("interrupted")

    monkeypatch.setattr("layout.direct.os.preadv", lying(interrupt, RECORD))
    with pytest.raises(Interrupted):
        examine([tmp_path], record_bytes=RECORD)
    assert os.listdir(tmp_path) == []


def test_where_o_direct_is_refused_the_transfer_is_buffered_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing_open(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *mode)

    monkeypatch.setattr("layout.direct.os.open", refusing_open)
    found = examine([tmp_path], record_bytes=RECORD)
    transfers = only(found, "transfers")
    assert transfers.level == "note" and "read buffered (the file system refuses O_DIRECT: Invalid argument)" in transfers.text
    assert not {"alignment", "page cache"} & {f.what for f in found}


def needs_direct(directory: Path) -> None:
    if not probe_directory(directory).is_direct:
        pytest.skip("the temporary directory takes no direct reads")


def test_direct_reads_that_fill_the_page_cache_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_direct(tmp_path)
    good = only(examine([tmp_path], record_bytes=RECORD), "page cache")
    if good.level != "good":
        pytest.skip(f"page cache: {good.text}")
    real = os.open
    monkeypatch.setattr("layout.direct.os.open", lambda path, flags, *mode: real(path, flags & ~os.O_DIRECT, *mode))
    cached = only(examine([tmp_path], record_bytes=RECORD), "page cache")
    assert cached.level == "note" and cached.text.startswith("direct reads go through it (100% of the file")


@pytest.mark.parametrize("least", [512, 1024, 4096])
def test_the_smallest_step_that_reads_is_named(tmp_path: Path, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_direct(tmp_path)
    real = os.preadv

    def coarse_preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset % least or len(buffers[0]) % least:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    if "512 B is the smallest" not in only(examine([tmp_path], record_bytes=RECORD), "alignment").text:
        pytest.skip("the temporary directory does not take steps of 512 B")
    monkeypatch.setattr("prep.doctor.os.preadv", coarse_preadv)
    assert only(examine([tmp_path], record_bytes=RECORD), "alignment").text.startswith(f"{least} B is the smallest step taken")


def as_nobody(directory: Path) -> dict[str, tuple[str, str]]:
    """Return what a user without rights finds of a directory, by name: level and text. Root itself may read and write everything."""
    if os.geteuid() != 0:
        pytest.skip("only root can look as another user")
    code = (
        "import os, sys; from pathlib import Path; from prep.doctor import examine\n"
        "import numpy.random\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"for f in examine([Path(sys.argv[1])], record_bytes={RECORD}):\n"
        "    if f.where == sys.argv[1]: print(f.what, f.level, f.text, sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", code, directory], check=True, capture_output=True, text=True)
    return {what: (level, text) for what, level, text in (line.split("|") for line in done.stdout.splitlines())}


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that anyone may enter; pytest's own are for their owner alone."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        yield directory


def test_a_directory_that_may_not_be_read_is_bad(open_to_all: Path) -> None:
    open_to_all.chmod(0o711)
    found = as_nobody(open_to_all)
    assert found["directory"] == ("bad", "this user may not read it")
    assert "transfers" not in found


def test_a_directory_with_experts_that_may_only_be_read_is_enough_to_run(open_to_all: Path) -> None:
    (open_to_all / "A-note").write_bytes(bytes(8000))
    (open_to_all / "L3-E7.bin").write_bytes(os.urandom(9792))
    found = as_nobody(open_to_all)
    assert found["directory"][0] == "note" and "enough for krun" in found["directory"][1]
    assert found["transfers"][0] != "bad" and found["transfers"][1].startswith("9792 bytes of L3-E7.bin, read ")
    assert sorted(os.listdir(open_to_all)) == ["A-note", "L3-E7.bin"]


def test_an_empty_directory_that_may_only_be_read_is_bad(open_to_all: Path) -> None:
    found = as_nobody(open_to_all)
    assert found["directory"] == ("bad", "cannot be written, and holds nothing to read")
    assert "transfers" not in found


def test_a_drive_below_its_link_is_a_note_with_the_loss(machine: FakeMachine) -> None:
    directory = machine.on_nvme()
    found = machine.examine(directory)
    link = only(found, "link")
    assert (link.level, link.where) == ("note", str(directory))
    assert link.text == ("nvme0n1: 16.0 GT/s PCIe x4, at most 7.88GB/s; the drive can do 32.0 GT/s PCIe x4, 15.8GB/s: 7.88GB/s are lost")
    assert only(found, "device").text == "nvme0n1 (Fast 0), 1.02MB, NUMA node 1"


@pytest.mark.parametrize(
    ("width", "speed", "level"), [("4", "32.0 GT/s PCIe", "good"), ("2", "32.0 GT/s PCIe", "note"), ("4", "2.5 GT/s PCIe", "note")]
)
def test_a_link_is_good_only_at_full_speed_and_width(machine: FakeMachine, width: str, speed: str, level: str) -> None:
    directory = machine.on_nvme()
    machine.files(f"{PCI}/0000:01:00.0", {"current_link_speed": speed, "current_link_width": width})
    assert only(machine.examine(directory), "link").level == level


@pytest.mark.parametrize("place", ["nvme/nvme0/hwmon2", "nvme/nvme0/hwmon/hwmon2", "hwmon/hwmon2"])
@pytest.mark.parametrize(("degrees", "level"), [(46850, "good"), (82850, "note")])
def test_a_drive_as_hot_as_its_warning_is_a_note(machine: FakeMachine, place: str, degrees: int, level: str) -> None:
    directory, function = machine.on_nvme(), f"{PCI}/0000:01:00.0"
    machine.link(f"{function}/nvme/nvme0/device", function)
    machine.files(f"{function}/{place}", {"temp1_input": str(degrees), "temp1_max": "82850"})
    temperature = only(machine.examine(directory), "temperature")
    assert temperature.level == level and temperature.text.startswith(f"nvme0n1: {degrees // 1000} °C, warns at 82 °C")


def test_without_a_sensor_or_a_link_nothing_is_said_of_them(machine: FakeMachine) -> None:
    found = machine.examine(machine.mount("a", "254:0", source="/dev/vda"))
    assert not {"temperature", "link"} & {f.what for f in found}
    assert only(found, "device").text == "vda (virtio), 2.1MB, NUMA node not told"


def test_a_rotating_disk_is_a_note(machine: FakeMachine) -> None:
    machine.device("devices/pci0000:00/0000:00:05.0/ata1/block/sda", "8:0", {"size": "2000", "queue/rotational": "1"})
    assert only(machine.examine(machine.mount("a", "8:0", source="/dev/sda")), "device").level == "note"


def test_two_partitions_of_one_drive_are_a_shared_device_and_two_drives_are_not(machine: FakeMachine) -> None:
    disk = Path(machine.nvme(0)).parent
    machine.device(f"{disk}/nvme0n1p2", "259:2", {"size": "1000", "partition": "2"})
    machine.nvme(1)
    a, b, c = (machine.mount(name, number) for name, number in (("a", "259:1"), ("b", "259:2"), ("c", "259:11")))
    shared = only(machine.examine(a, b, c), "shared device")
    assert shared.where == str(b) and f"{b} and {a} both lie on nvme0n1:" in shared.text


@pytest.mark.parametrize(
    ("kind", "options", "remark"),
    [
        ("ext4", "rw", None),
        ("xfs", "rw", None),
        ("btrfs", "rw,space_cache=v2", "may buffer direct writes to files with checksums"),
        ("btrfs", "rw,nodatasum", None),
        ("tmpfs", "rw", "lies in memory"),
        ("zfs", "rw", "OpenZFS 2.3"),
        ("nfs4", "rw", "a network or host file system"),
        ("fuse.sshfs", "rw", "its own program decides"),
        ("reiserfs", "rw", "not among the file systems that were tried"),
    ],
)
def test_each_file_system_has_its_remark(machine: FakeMachine, kind: str, options: str, remark: str | None) -> None:
    found = only(machine.examine(machine.mount("a", "0:60", kind=kind, source="tank/x", options=options)), "file system")
    assert found.text.startswith(f"{kind} on tank/x, mounted at ")
    assert (found.level, remark or "") == ("note" if remark else "good", remark or "")
    assert remark is None or remark in found.text


def test_drives_that_cannot_be_seen_are_a_note(machine: FakeMachine) -> None:
    found = machine.examine(machine.mount("a", "0:60", kind="zfs", source="tank/x"))
    assert only(found, "device").level == "note" and "(zfs:tank)" in only(found, "device").text


def test_huge_pages_that_are_never_given_are_a_note(machine: FakeMachine) -> None:
    for setting, level in (("always [madvise] never", "good"), ("[always] madvise never", "good"), ("always madvise [never]", "note")):
        machine.huge_pages(setting)
        assert only(machine.examine(), "huge pages").level == level
    (machine.root / "kernel/mm/transparent_hugepage/enabled").unlink()
    assert "not in this kernel" in only(machine.examine(), "huge pages").text


def test_less_memory_than_kprep_may_take_is_bad(machine: FakeMachine) -> None:
    for gib, level in ((2, "good"), (1, "bad")):
        machine.memory(gib)
        assert only(machine.examine(), "memory").level == level


def test_the_tightest_cgroup_above_us_is_named_and_bounds_the_memory(machine: FakeMachine) -> None:
    machine.cgroup("box/inner", most="max", used=GIB, inactive_file=0)
    machine.cgroup("box", most=str(4 * GIB), used=3 * GIB + GIB // 2, inactive_file=GIB)
    machine.cgroup(".", most=str(20 * GIB), used=GIB, inactive_file=0)
    assert cgroup_limits(proc_root=machine.proc, sys_root=machine.root) == [
        CgroupLimit(machine.root / "fs/cgroup/box", 4 * GIB, 5 * GIB // 2),
        CgroupLimit(machine.root / "fs/cgroup", 20 * GIB, GIB),
    ]
    assert available_host_bytes(proc_root=machine.proc, sys_root=machine.root) == 3 * GIB // 2
    limit, memory = only(machine.examine(), "cgroup limit"), only(machine.examine(), "memory")
    assert limit.level == "note" and limit.text.startswith(f"{machine.root}/fs/cgroup/box allows 4.29GB, 1.61GB of it free")
    assert memory.level == "bad" and memory.text.startswith("1.61GB to be had of 34.4GB")


def test_of_two_cgroups_the_outer_one_bounds_the_memory_where_it_is_tighter(machine: FakeMachine) -> None:
    machine.cgroup("box/inner", most=str(8 * GIB), used=0, inactive_file=0)
    machine.cgroup("box", most=str(4 * GIB), used=0, inactive_file=0)
    assert available_host_bytes(proc_root=machine.proc, sys_root=machine.root) == 4 * GIB
    assert only(machine.examine(), "cgroup limit").text.startswith(f"{machine.root}/fs/cgroup/box allows 4.29GB")


def test_a_cgroup_above_its_limit_has_no_room(machine: FakeMachine) -> None:
    machine.cgroup("box/inner", most=str(GIB), used=GIB + 4096, inactive_file=0)
    assert available_host_bytes(proc_root=machine.proc, sys_root=machine.root) == 0


def test_without_a_limit_the_kernels_count_stands(machine: FakeMachine) -> None:
    machine.cgroup("box", most="max", used=GIB, inactive_file=0)
    assert available_host_bytes(proc_root=machine.proc, sys_root=machine.root) == 16 * GIB
    assert only(machine.examine(), "cgroup limit").level == "good"
    (machine.proc / "self/cgroup").unlink()
    assert available_host_bytes(proc_root=machine.proc, sys_root=machine.root) == 16 * GIB


def test_a_cgroup_of_version_1_is_said_to_go_unseen(machine: FakeMachine) -> None:
    assert not is_under_cgroup_v1(proc_root=machine.proc)
    (machine.proc / "self/cgroup").write_text("5:cpu,memory:/box\n1:name=systemd:/\n0::/\n")
    assert is_under_cgroup_v1(proc_root=machine.proc)
    limit = only(machine.examine(), "cgroup limit")
    assert limit.level == "note" and "version 1" in limit.text


@contextmanager
def soft_limit(kind: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def test_too_few_open_files_are_a_note_with_the_command(machine: FakeMachine) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < LEAST_OPEN_FILES:
        pytest.skip("this process may not open enough files to compare with")
    with soft_limit(resource.RLIMIT_NOFILE, LEAST_OPEN_FILES):
        assert only(machine.examine(), "open files").level == "good"
    with soft_limit(resource.RLIMIT_NOFILE, LEAST_OPEN_FILES - 1):
        found = only(machine.examine(), "open files")
    assert (found.level, found.cure) == ("note", f"ulimit -n {LEAST_OPEN_FILES}")
    assert found.text.startswith(f"{LEAST_OPEN_FILES - 1} at once")


def test_a_limit_of_locked_memory_is_a_note_with_its_size(machine: FakeMachine) -> None:
    with soft_limit(resource.RLIMIT_MEMLOCK, 65536):
        found = only(machine.examine(), "locked memory")
    assert found.level == "note" and found.text.startswith("65.5KB; may be raised to ")
