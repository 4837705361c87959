"""Drives that share a device or a link: who is one server, who is read together, and what is called a link."""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from loop_mounts import mounted_ext4, run
from test_drives import PCI, FakeSys
from test_measure import RECORD, memory  # noqa: F401
from test_measure_reads import make_files

from layout.drives import describe_directory, group_by_device
from manifests.errors import NoSpaceError
from manifests.manifest import SharedLink
from prep.measuring.measure import Link, Measurement, expected_rate, groups_by_bridge, measure_drives


@pytest.fixture
def fake(tmp_path: Path) -> FakeSys:
    return FakeSys(tmp_path)


@pytest.fixture
def mounts() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def behind_switch(fake: FakeSys, n: int, *, switch: str, number: str) -> Path:
    """Mount a drive below a switch: root port, the switch's upstream and downstream ports, the drive."""
    function = f"{PCI}/{switch}/0000:1{n}:00.0/0000:2{n}:00.0"
    fake.device(f"{function}/nvme/nvme{n}/nvme{n}n1", number, {"size": "8"})
    return fake.mount(f"switched {n}", number)


def test_directories_with_a_device_in_common_are_one_server_even_through_a_third(fake: FakeSys) -> None:
    partitions = [fake.nvme(n) for n in range(4)]
    fake.device("devices/virtual/block/md0", "9:0", {"size": "1"}, slaves=(partitions[0], partitions[2]))
    names = [fake.mount(name, number) for name, number in (("a", "259:1"), ("b", "259:31"), ("c", "259:21"), ("d", "9:0"), ("e", "259:11"))]
    facts = [fake.facts(name) for name in names]
    assert group_by_device(facts[:3]) == (0, 1, 2)
    # The array d lies on the drives of a and c, which had nothing in common.
    assert group_by_device(facts) == (0, 1, 0, 0, 2)
    assert group_by_device([facts[4], facts[4]]) == (0, 0)


def test_drives_below_one_switch_are_a_group_and_those_with_ports_of_their_own_are_none(fake: FakeSys) -> None:
    fake.nvme(0)
    facts = [fake.facts(fake.mount("own", "259:1"))]
    facts += [fake.facts(behind_switch(fake, n, switch=f"0000:0{4 + n // 3}:00.0", number=f"259:{100 + n}")) for n in range(1, 5)]
    assert facts[1].physical[0].pci_path == ("0000:00:01.1", "0000:04:00.0", "0000:11:00.0", "0000:21:00.0")
    servers = group_by_device(facts)
    # The root port of this sysfs is one for all.
    assert groups_by_bridge(facts, servers) == [(1, 2), (3, 4), (0, 1, 2, 3, 4)]
    assert groups_by_bridge(facts[:2], servers[:2]) == [(0, 1)]
    assert groups_by_bridge(facts, (0, 1, 1, 2, 2)) == [(0, 1, 2)]


def test_a_virtual_disk_has_a_function_of_its_own(fake: FakeSys) -> None:
    fake.nvme(0)
    facts = [fake.facts(fake.mount("a", "254:0")), fake.facts(fake.mount("b", "259:0"))]
    assert [one.physical[0].pci_path for one in facts] == [("0000:00:02.0",), ("0000:00:01.1", "0000:01:00.0")]
    assert groups_by_bridge(facts, (0, 1)) == []


def test_what_a_group_should_give_is_its_known_links_and_the_rest_alone() -> None:
    rates = (7.0, 7.0, 5.0, 3.0)
    assert expected_rate((0, 1, 2, 3), rates, []) == 22
    assert expected_rate((0, 1, 2, 3), rates, [Link((0, 1), 9.0)]) == 17
    assert expected_rate((0, 2, 3), rates, [Link((0, 1), 9.0)]) == 15
    # A larger link stands for the smaller ones within it, and no link gives more than its drives.
    assert expected_rate((0, 1, 2, 3), rates, [Link((0, 1), 9.0), Link((0, 1, 2), 10.0)]) == 13
    assert expected_rate((0, 1), rates, [Link((0, 1), 99.0)]) == 14


def test_a_manifest_keeps_links_and_servers_of_several_directories() -> None:
    links = (Link((0, 2), 7.0),)
    measured = Measurement((), (0, 1, 1, 2), (6.0, 5.0, 2.0), links, 12.0, (), None, ())
    assert measured.manifest_links(["a", "b", "c", "d"]) == (SharedLink(("b", "c"), 5.0), SharedLink(("a", "d"), 7.0))
    assert Measurement((), (0, 1), (6.0, 5.0), (), 11.0, (), None, ()).manifest_links(["a", "b"]) == ()


def slow_reads(monkeypatch: pytest.MonkeyPatch, lock_of: Callable[[str], threading.Lock]) -> None:
    """Let each read hold a lock for 30 ms: a model of drives that read one record at a time."""
    real = os.preadv

    def preadv(fd, buffers, offset):
        with lock_of(os.readlink(f"/proc/self/fd/{fd}")):
            time.sleep(0.03)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)


def two_servers(tmp_path: Path, memory: Path) -> list[Path]:  # noqa: F811
    directories = [tmp_path / "disk", memory]
    if describe_directory(tmp_path).is_ram_backed:
        pytest.skip("the tests' directory lies in memory too")
    for directory in directories:
        make_files(directory, 20, 9792)
    return directories


@pytest.mark.usefixtures("python_reads")
def test_drives_that_slow_each_other_down_are_a_link(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    directories, lock = two_servers(tmp_path, memory), threading.Lock()
    slow_reads(monkeypatch, lambda path: lock)
    measured = measure_drives(directories, record_bytes=9792, seconds=0.4)
    assert measured.servers == (0, 1)
    (link,) = measured.links
    assert link.servers == (0, 1)
    assert 0.3 * sum(measured.server_bytes_per_s) < link.bytes_per_s < 0.9 * sum(measured.server_bytes_per_s)
    assert any(f"{directories[0]}, {directories[1]} share a link or the machine's limits: " in r for r in measured.remarks)
    (kept,) = measured.manifest_links(["x", "y"])
    assert kept == SharedLink(("x", "y"), link.bytes_per_s)


@pytest.mark.usefixtures("python_reads")
def test_drives_that_do_not_are_none(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    directories = two_servers(tmp_path, memory)
    locks = {str(directory): threading.Lock() for directory in directories}
    slow_reads(monkeypatch, lambda path: locks.get(str(Path(path).parent)) or threading.Lock())
    measured = measure_drives(directories, record_bytes=9792, seconds=0.4)
    assert measured.servers == (0, 1) and measured.links == ()
    assert len(measured.each_together_bytes_per_s) == 2 and measured.together_bytes_per_s == sum(measured.each_together_bytes_per_s)
    assert not any("share" in r or "one device" in r for r in measured.remarks)


def test_two_loop_files_on_one_disk_are_one_server(tmp_path: Path, memory: Path, mounts: ExitStack) -> None:  # noqa: F811
    if describe_directory(tmp_path).is_ram_backed:
        pytest.skip("the tests' directory lies in memory too")
    loops = [mounts.enter_context(mounted_ext4(tmp_path / name, n_bytes=96 << 20)) for name in ("one", "two")]
    make_files(loops[0], 20, RECORD)
    steps: list[str] = []
    measured = measure_drives([loops[0], memory, loops[1]], record_bytes=RECORD, seconds=0.1, reserve_bytes=0, on_progress=steps.append)
    assert measured.servers == (0, 1, 0)
    assert [profile.is_on_trial_files for profile in measured.profiles] == [False, True, True]
    assert len(measured.server_bytes_per_s) == 2 and len(measured.each_together_bytes_per_s) == 3
    assert any(r.startswith(f"{loops[0]}, {loops[1]} lie on one device (") and "count as one drive" in r for r in measured.remarks)
    assert any(step.startswith(f"{loops[0]} + {loops[1]}: ") for step in steps)
    assert any(step.startswith(f"{loops[0]} + {memory} + {loops[1]}: ") for step in steps)
    assert measured.manifest_links(["a", "m", "b"])[0] == SharedLink(("a", "b"), measured.server_bytes_per_s[0])
    assert list(memory.iterdir()) == [] and [p.name for p in loops[1].iterdir()] == ["lost+found"]


def test_a_full_loop_file_cannot_take_trial_files(tmp_path: Path, mounts: ExitStack) -> None:
    full = mounts.enter_context(mounted_ext4(tmp_path / "small", n_bytes=16 << 20))
    with pytest.raises(NoSpaceError, match=r"small: has no experts to measure it on, and no room for 16 trial files of 1\.05MB"):
        measure_drives([full], record_bytes=RECORD, seconds=0.05)
    assert [p.name for p in full.iterdir()] == ["lost+found"]


def test_a_bind_mount_is_the_server_of_what_is_behind_it(tmp_path: Path, mounts: ExitStack) -> None:
    (tmp_path / "behind").mkdir()
    bound = tmp_path / "bound"
    bound.mkdir()
    try:
        run("mount", "--bind", tmp_path / "behind", bound)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"nothing may be bound here: {getattr(error, 'stderr', error)}")
    mounts.callback(run, "umount", bound)
    assert group_by_device([describe_directory(tmp_path / "behind"), describe_directory(bound)]) == (0, 0)


def test_subvolumes_of_a_btrfs_are_one_server(tmp_path: Path, mounts: ExitStack) -> None:
    image, where = tmp_path / "image", tmp_path / "btrfs"
    image.touch()
    os.truncate(image, 320 << 20)
    where.mkdir()
    try:
        run("mkfs.btrfs", "-q", image)
        run("mount", "-o", "loop", image, where)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no btrfs may be mounted here: {getattr(error, 'stderr', error)}")
    mounts.callback(run, "umount", "--lazy", where)
    directories = [where / name for name in ("one", "two")]
    for directory in directories:
        run("btrfs", "subvolume", "create", directory)
    assert len({os.stat(directory).st_dev for directory in directories}) == 2
    measured = measure_drives(directories, record_bytes=RECORD, seconds=0.05, reserve_bytes=0)
    assert measured.servers == (0, 0) and all(profile.is_on_trial_files for profile in measured.profiles)
