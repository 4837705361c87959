import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from layout.drives import (
    DirectoryFacts,
    default_reserve,
    describe_directory,
    free_bytes,
    link_limit_bytes_per_s,
    physical_devices,
    shares_device,
)
from manifests.errors import BadInputError

PCI = "devices/pci0000:00/0000:00:01.1"


class FakeSys:
    """A sysfs tree of plain files and links below a temporary directory, and the mountinfo that goes with it."""

    def __init__(self, root: Path) -> None:
        self.root = root / "sys"
        self.disks = root / "disks"
        self.lines = ["1 0 254:0 / / rw,relatime - ext4 /dev/vda rw"]
        self.device("devices/pci0000:00/0000:00:02.0/virtio1/block/vda", "254:0", {"size": "4096", "queue/rotational": "1", "serial": "V0"})

    def files(self, directory: str, contents: dict[str, str]) -> None:
        for name, content in contents.items():
            file = self.root / directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content + "\n")

    def link(self, link: str, target: str) -> None:
        (self.root / link).parent.mkdir(parents=True, exist_ok=True)
        (self.root / link).symlink_to(os.path.relpath(self.root / target, (self.root / link).parent))

    def device(self, directory: str, number: str | None, contents: dict[str, str], *, slaves: tuple[str, ...] = ()) -> str:
        (self.root / directory / "slaves").mkdir(parents=True)
        self.files(directory, contents)
        self.link(f"class/block/{Path(directory).name}", directory)
        if number:
            self.link(f"dev/block/{number}", directory)
        for slave in slaves:
            self.link(f"{directory}/slaves/{Path(slave).name}", slave)
        return directory

    def nvme(self, n: int, *, pci: str | None = None, width: str = "4") -> str:
        """Add a drive with a partition, numbers 259:<10 n> and 259:<10 n + 1>; return the partition."""
        function = f"{PCI}/{pci or f'0000:0{n + 1}:00.0'}"
        self.files(function, {"current_link_speed": "16.0 GT/s PCIe", "current_link_width": width, "numa_node": "1",
                              "max_link_speed": "32.0 GT/s PCIe", "max_link_width": "4"})  # fmt: skip
        self.files(f"{function}/nvme/nvme{n}", {"model": f"Fast {n}", "serial": f"S{n}  "})
        disk = f"{function}/nvme/nvme{n}/nvme{n}n1"
        self.device(disk, f"259:{10 * n}", {"size": "2000", "queue/rotational": "0", "queue/logical_block_size": "4096"})
        self.link(f"{disk}/device", f"{function}/nvme/nvme{n}")
        return self.device(f"{disk}/nvme{n}n1p1", f"259:{10 * n + 1}", {"size": "1000", "partition": "1"})

    def mount(self, name: str, number: str, kind: str = "ext4", source: str = "/dev/whatever", options: str = "rw") -> Path:
        directory = self.disks / name
        directory.mkdir(parents=True)
        escaped = str(directory).replace("\\", "\\134").replace(" ", "\\040")
        self.lines.append(f"{len(self.lines) + 1} 1 {number} / {escaped} rw,noatime shared:7 - {kind} {source} {options}")
        return directory

    def facts(self, directory: Path) -> DirectoryFacts:
        return describe_directory(directory, sys_root=self.root, mountinfo="\n".join(self.lines) + "\n")


@pytest.fixture
def fake(tmp_path: Path) -> FakeSys:
    return FakeSys(tmp_path)


def _names(facts: DirectoryFacts) -> list[str]:
    return [device.name for device in facts.devices]


def test_a_partition_is_its_whole_nvme_drive(fake: FakeSys) -> None:
    fake.nvme(0)
    directory = fake.mount("a", "259:1", source="/dev/nvme0n1p1", options="rw,discard")
    (directory / "experts").mkdir()
    facts = fake.facts(directory / "experts")
    assert (facts.path, facts.mount_point) == (directory / "experts", directory)
    assert (facts.file_system, facts.source, facts.options) == ("ext4", "/dev/nvme0n1p1", "rw,noatime,discard")
    assert not facts.is_ram_backed
    (drive,) = facts.devices
    assert (drive.name, drive.kind, drive.model, drive.serial) == ("nvme0n1", "nvme", "Fast 0", "S0")
    assert (drive.n_bytes, drive.logical_block_bytes, drive.is_rotational, drive.n_paths) == (2000 * 512, 4096, False, 1)
    assert (drive.pci_address, drive.numa_node, drive.backing_file) == ("0000:01:00.0", 1, None)
    assert (drive.link_speed, drive.link_width) == ("16.0 GT/s PCIe", "4")
    assert (drive.max_link_speed, drive.max_link_width) == ("32.0 GT/s PCIe", "4")
    assert facts.physical == facts.devices and facts.physical_names == {"nvme0n1"}


def test_an_md_array_is_the_drives_of_its_members(fake: FakeSys) -> None:
    fake.device("devices/virtual/block/md0", "9:0", {"size": "1"}, slaves=(fake.nvme(1), fake.nvme(0)))
    assert _names(fake.facts(fake.mount("a", "9:0"))) == ["nvme0n1", "nvme1n1"]


def test_a_partition_of_an_md_array_is_the_drives_of_its_members(fake: FakeSys) -> None:
    fake.device("devices/virtual/block/md0", "9:0", {"size": "1"}, slaves=(fake.nvme(0), fake.nvme(1)))
    fake.device("devices/virtual/block/md0/md0p1", "259:90", {"size": "1", "partition": "1"})
    assert _names(fake.facts(fake.mount("a", "259:90"))) == ["nvme0n1", "nvme1n1"]


def test_stacked_device_mapper_targets_lead_to_the_drive_once(fake: FakeSys) -> None:
    partition = fake.nvme(0)
    crypt = fake.device("devices/virtual/block/dm-0", "253:0", {"size": "1", "dm/name": "crypt"}, slaves=(partition,))
    fake.device("devices/virtual/block/dm-1", "253:1", {"size": "1"}, slaves=(crypt, partition))
    assert _names(fake.facts(fake.mount("a", "253:1"))) == ["nvme0n1"]


def test_two_partitions_of_one_drive_are_one_device(fake: FakeSys) -> None:
    disk = Path(fake.nvme(0)).parent
    fake.device(f"{disk}/nvme0n1p2", "259:2", {"size": "1000", "partition": "2"})
    one, other = fake.mount("a", "259:1"), fake.mount("b", "259:2")
    assert fake.facts(one).physical_names == fake.facts(other).physical_names == {"nvme0n1"}


def test_a_multipath_drive_has_the_links_of_its_paths(fake: FakeSys) -> None:
    subsystem = "devices/virtual/nvme-subsystem/nvme-subsys3"
    fake.files(subsystem, {"model": "Dual", "serial": "D3"})
    head = fake.device(f"{subsystem}/nvme3n1", "259:30", {"size": "8", "queue/rotational": "0"})
    fake.link(f"{head}/device", subsystem)
    for n in (4, 5):
        function = f"{PCI}/0000:0{n}:00.0"
        fake.files(function, {"current_link_speed": "8.0 GT/s PCIe", "current_link_width": "2", "numa_node": "0"})
        fake.device(f"{function}/nvme/nvme{n}/nvme3c{n}n1", None, {"size": "8"})
    fake.nvme(0)
    (drive,) = fake.facts(fake.mount("a", "259:30")).devices
    assert (drive.name, drive.kind, drive.model, drive.serial) == ("nvme3n1", "nvme", "Dual", "D3")
    assert (drive.n_paths, drive.pci_address, drive.numa_node) == (2, "0000:04:00.0", 0)
    assert link_limit_bytes_per_s(drive) == pytest.approx(2 * 2 * 985e6, rel=1e-3)


def test_a_virtual_disk_tells_little(fake: FakeSys) -> None:
    (disk,) = fake.facts(fake.mount("a", "254:0")).devices
    assert (disk.name, disk.kind, disk.serial, disk.n_bytes, disk.pci_address) == ("vda", "virtio", "V0", 4096 * 512, "0000:00:02.0")
    assert disk.is_rotational is None and disk.model is None and disk.numa_node is None
    assert link_limit_bytes_per_s(disk) is None


def test_numa_node_minus_one_is_unknown(fake: FakeSys) -> None:
    fake.nvme(0)
    fake.files(f"{PCI}/0000:01:00.0", {"numa_node": "-1"})
    assert fake.facts(fake.mount("a", "259:0")).devices[0].numa_node is None


def test_two_loop_files_on_one_drive_are_one_device(fake: FakeSys) -> None:
    fake.nvme(0)
    images = fake.mount("images", "259:1")
    for n, ending in enumerate(("", " (deleted)")):
        fake.device(f"devices/virtual/block/loop{n}", f"7:{n}", {"size": "16", "loop/backing_file": f"{images}/{n}.img{ending}"})
    one, other = fake.facts(fake.mount("a", "7:0")), fake.facts(fake.mount("b", "7:1"))
    assert [(d.name, d.kind, d.backing_file) for d in one.devices] == [("loop0", "loop", f"{images}/0.img")]
    assert [d.name for d in one.physical] == [d.name for d in other.physical] == ["nvme0n1"]
    assert one.physical_names == other.physical_names == {"nvme0n1"}


def test_a_loop_file_in_memory_is_memory(fake: FakeSys) -> None:
    images = fake.mount("images", "0:40", kind="tmpfs", source="tmpfs")
    fake.device("devices/virtual/block/loop0", "7:0", {"size": "16", "loop/backing_file": f"{images}/0.img"})
    facts = fake.facts(fake.mount("a", "7:0"))
    assert facts.physical_names == {"ram"} and facts.physical == () and not facts.is_ram_backed


def test_a_loop_file_that_cannot_be_seen_stands_for_itself(fake: FakeSys) -> None:
    fake.device("devices/virtual/block/loop0", "7:0", {"size": "16", "loop/backing_file": "/no/such/directory/0.img"})
    mounted = fake.mount("a", "7:0")
    fake.device("devices/virtual/block/loop1", "7:1", {"size": "16", "loop/backing_file": f"{fake.disks}/b/0.img"})
    inside_itself = fake.mount("b", "7:1")
    assert fake.facts(mounted).physical_names == {"loop0"}
    assert fake.facts(inside_itself).physical_names == {"loop1"}


def test_memory_file_systems_are_memory(fake: FakeSys) -> None:
    facts = fake.facts(fake.mount("a", "0:40", kind="tmpfs", source="tmpfs"))
    assert facts.is_ram_backed and facts.devices == () and facts.physical_names == {"ram"}


def test_a_btrfs_is_all_its_members(fake: FakeSys) -> None:
    for n in range(3):
        fake.nvme(n)
    for n in (1, 2):
        fake.link(f"fs/btrfs/b7e2/devices/nvme{n}n1", f"{PCI}/0000:0{n + 1}:00.0/nvme/nvme{n}/nvme{n}n1")
    assert _names(fake.facts(fake.mount("a", "0:50", kind="btrfs", source="/dev/nvme1n1"))) == ["nvme1n1", "nvme2n1"]


def test_a_file_system_with_a_number_of_its_own_is_found_by_its_source(fake: FakeSys) -> None:
    fake.nvme(0)
    assert _names(fake.facts(fake.mount("a", "0:50", kind="other", source="/dev/nvme0n1p1"))) == ["nvme0n1"]


def test_an_overlay_is_the_devices_of_its_layers(fake: FakeSys) -> None:
    fake.nvme(0)
    fake.nvme(1)
    upper, lower = fake.mount("upper dir", "259:1"), fake.mount("lower", "259:11")
    memory = fake.mount("memory", "0:40", kind="tmpfs", source="tmpfs")
    layers = f"lowerdir={lower}:/not/visible:l/RELATIVE,upperdir={upper},workdir={upper}".replace(" ", "\\040")
    assert _names(fake.facts(fake.mount("a", "0:60", "overlay", "overlay", f"rw,{layers}"))) == ["nvme1n1", "nvme0n1"]
    live = fake.facts(fake.mount("b", "0:61", "overlay", "overlay", f"rw,lowerdir={lower},upperdir={memory}"))
    assert live.physical_names == {"nvme1n1", "ram"}


def test_an_overlay_whose_layers_are_out_of_sight_is_named_by_its_source(fake: FakeSys) -> None:
    hidden = fake.mount("a", "0:60", "overlay", "overlay", "rw,lowerdir=/not/visible,upperdir=/neither")
    assert fake.facts(hidden).physical_names == {"overlay:overlay"}
    onto_itself = fake.mount("b", "0:61", "overlay", "overlay", f"rw,lowerdir={fake.disks}/b")
    assert fake.facts(onto_itself).physical_names == {"overlay:overlay"}


def test_an_overlay_and_a_loop_that_lead_to_each_other_end(fake: FakeSys) -> None:
    looped = fake.mount("looped", "7:0")
    overlay = fake.mount("overlay", "0:60", "overlay", "overlay", f"rw,lowerdir={looped}")
    fake.device("devices/virtual/block/loop0", "7:0", {"size": "16", "loop/backing_file": f"{overlay}/0.img"})
    assert fake.facts(looped).physical_names == fake.facts(overlay).physical_names == {"loop0"}


@pytest.mark.parametrize(
    ("kind", "one", "other", "name"),
    [("zfs", "tank/experts", "tank", "zfs:tank"), ("nfs4", "box:/a", "box:/b", "nfs4:box"), ("fuse.x", "thing", "thing", "fuse.x:thing")],
)
def test_what_has_no_devices_is_named_by_pool_or_server(fake: FakeSys, kind: str, one: str, other: str, name: str) -> None:
    a, b = fake.facts(fake.mount("a", "0:70", kind, one)), fake.facts(fake.mount("b", "0:71", kind, other))
    assert a.devices == b.devices == ()
    assert a.physical_names == b.physical_names == {name}


def test_the_deepest_and_last_mount_counts(fake: FakeSys) -> None:
    fake.nvme(0)
    fake.nvme(1)
    outer = fake.mount("a", "259:1")
    inner = fake.mount("a/b", "259:11")
    beside = fake.disks / "a/bc"
    beside.mkdir()
    expected = [["nvme0n1"], ["nvme1n1"], ["nvme0n1"]]
    assert [_names(fake.facts(directory)) for directory in (outer, inner, beside)] == expected
    fake.lines.reverse()
    assert [_names(fake.facts(directory)) for directory in (outer, inner, beside)] == expected
    fake.lines.append(next(line for line in fake.lines if "259:11" in line).replace("259:11", "259:1"))
    assert _names(fake.facts(inner)) == ["nvme0n1"]


def test_mount_points_with_spaces_are_found(fake: FakeSys) -> None:
    fake.nvme(0)
    facts = fake.facts(fake.mount("my fast\\drive", "259:1"))
    assert facts.mount_point == fake.disks / "my fast\\drive" and _names(facts) == ["nvme0n1"]


def test_a_link_to_a_directory_is_followed(fake: FakeSys) -> None:
    fake.nvme(0)
    directory = fake.mount("a", "259:1")
    (fake.disks / "link").symlink_to(directory)
    assert _names(fake.facts(fake.disks / "link")) == ["nvme0n1"]


def test_an_empty_source_and_a_root_that_is_no_mount_are_borne(fake: FakeSys, tmp_path: Path) -> None:
    assert fake.facts(fake.mount("a", "0:80", "odd", "")).physical_names == {"odd:"}
    assert describe_directory(tmp_path, sys_root=fake.root / "empty", mountinfo="").physical_names == {"unknown:unknown"}


@pytest.mark.parametrize(
    ("speed", "width", "bytes_per_s"),
    [("2.5 GT/s PCIe", "1", 250e6), ("5.0 GT/s PCIe", "4", 2e9), ("8.0 GT/s PCIe", "4", 3.938e9), ("16.0 GT/s PCIe", "4", 7.877e9),
     ("32.0 GT/s PCIe", "2", 7.877e9), ("64.0 GT/s PCIe", "4", 29.5e9), ("Unknown", "4", None), ("16.0 GT/s PCIe", "0", None),
     ("3.0 GT/s PCIe", "4", None)],
)  # fmt: skip
def test_link_limit_is_lanes_times_what_a_lane_carries(fake: FakeSys, speed: str, width: str, bytes_per_s: float | None) -> None:
    fake.nvme(0)
    fake.files(f"{PCI}/0000:01:00.0", {"current_link_speed": speed, "current_link_width": width})
    limit = link_limit_bytes_per_s(fake.facts(fake.mount("a", "259:0")).devices[0])
    assert limit == (bytes_per_s if bytes_per_s is None else pytest.approx(bytes_per_s, rel=1e-3))


def test_a_directory_that_does_not_exist_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for function in (describe_directory, physical_devices, free_bytes, default_reserve):
        with pytest.raises(BadInputError, match="missing: there is no such directory"):
            function(tmp_path / "missing")
        with pytest.raises(BadInputError, match="file: is not a directory"):
            function(tmp_path / "file")


def test_the_repository_lies_on_something_that_has_a_name() -> None:
    facts = describe_directory(Path(__file__).parent)
    assert facts.physical_names and facts.file_system and facts.mount_point in Path(__file__).resolve().parents
    assert shares_device(Path(__file__).parent, Path(__file__).parent.parent)
    for device in facts.devices:
        assert device.n_bytes > 0 and device.logical_block_bytes


def test_space_and_reserve_are_those_of_the_file_system(tmp_path: Path) -> None:
    total = shutil.disk_usage(tmp_path).total
    assert default_reserve(tmp_path) == (20 * 10**9 if total > 400 * 10**9 else total // 20)
    assert 0 <= free_bytes(tmp_path) <= total


def test_shared_memory_of_this_machine_is_memory() -> None:
    shared_memory = Path("/dev/shm")
    if not os.path.ismount(shared_memory):
        pytest.skip("this machine has no /dev/shm")
    assert describe_directory(shared_memory).is_ram_backed
    assert physical_devices(shared_memory) == {"ram"}
    assert shares_device(shared_memory, Path(__file__).parent) == (physical_devices(Path(__file__).parent) == {"ram"})


class LoopDevices:
    """Loop devices and their mounts on this machine, undone at the end."""

    def __init__(self) -> None:
        self.undo: list[list[str]] = []

    def attach(self, file: Path) -> Path:
        loop = _run_or_skip("losetup", "--find", "--show", "--direct-io=on", str(file))
        self.undo.append(["losetup", "--detach", loop])
        return Path(loop)

    def mount(self, loop: Path, directory: Path) -> Path:
        directory.mkdir()
        _run_or_skip("mount", str(loop), str(directory))
        self.undo.append(["umount", str(directory)])
        return directory


@pytest.fixture
def loops() -> Iterator[LoopDevices]:
    devices = LoopDevices()
    yield devices
    for command in reversed(devices.undo):
        subprocess.run(command, check=True)


def _run_or_skip(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        pytest.skip(f"no loop mounts here: {command[0]} is not installed")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop mounts here: {' '.join(command)}: {error.stderr.strip()}")


def _ext4_image(path: Path) -> Path:
    path.touch()
    os.truncate(path, 16 * 2**20)
    _run_or_skip("mkfs.ext4", "-q", "-F", str(path))
    return path


def test_loop_mounts_of_this_machine_are_the_device_below(loops: LoopDevices, tmp_path: Path) -> None:
    directories = [loops.mount(loops.attach(_ext4_image(tmp_path / f"{n}.img")), tmp_path / f"mounted {n}") for n in range(2)]
    one, other = (describe_directory(directory) for directory in directories)
    assert (one.file_system, one.mount_point) == ("ext4", directories[0])
    (loop,) = one.devices
    assert (loop.kind, loop.backing_file, loop.n_bytes) == ("loop", str(tmp_path / "0.img"), 16 * 2**20)
    assert [d.name for d in other.devices] != [loop.name]
    assert one.physical_names == other.physical_names == physical_devices(tmp_path)
    assert shares_device(*directories)
    assert default_reserve(directories[0]) < 2**20


def test_a_loop_device_on_a_device_of_this_machine_is_the_device_below(loops: LoopDevices, tmp_path: Path) -> None:
    lower = loops.attach(_ext4_image(tmp_path / "0.img"))
    facts = describe_directory(loops.mount(loops.attach(lower), tmp_path / "mounted"))
    assert [d.backing_file for d in facts.devices] == [str(lower)]
    assert facts.physical_names == physical_devices(tmp_path)
