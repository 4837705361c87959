"""Which file system and which devices lie behind a directory, as /proc/self/mountinfo and /sys tell it.

Sees through partitions, md, dm and LVM, loop files, overlay layers, the members of a btrfs and NVMe multipath. Where the kernel does not
say what lies below (ZFS, network file systems), there are no devices and the source's name stands for them. Measures and writes nothing.
"""

import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from manifests.errors import BadInputError

RAM = "ram"
RAM_FILE_SYSTEMS = ("tmpfs", "ramfs", "rootfs")

_SECTOR_BYTES = 512
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVME_NAMESPACE = re.compile(r"nvme(\d+)n(\d+)")
_OVERLAY_LAYERS = re.compile(r"(?:^|,)(?:upperdir|lowerdir\+?|datadir\+)=([^,]*)")

# What a lane carries after its line code: 8b/10b up to 5 GT/s, 128b/130b up to 32 GT/s, 236 of 256 bytes of a flit at 64 GT/s.
_LANE_BYTES_PER_S = {
    2.5: 250e6,
    5.0: 500e6,
    8.0: 8e9 / 8 * 128 / 130,
    16.0: 16e9 / 8 * 128 / 130,
    32.0: 32e9 / 8 * 128 / 130,
    64.0: 64e9 / 8 * 236 / 256,
}


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A whole device as the kernel describes it; None is what it does not tell.

    kind           nvme, virtio, loop or other
    is_rotational  None for virtio, which says so whatever lies below
    n_paths        above 1 for NVMe multipath; the PCI address, link and NUMA node are then those of the first path
    pci_address    of the function that the device hangs on
    link_speed     as now negotiated, in the kernel's words: "16.0 GT/s PCIe"; link_width is a number of lanes
    backing_file   the file, or device node, of a loop device
    pci_path       the bridges on the way from the root to that function, and the function itself, last
    """

    name: str
    kind: str
    model: str | None
    serial: str | None
    n_bytes: int
    is_rotational: bool | None
    logical_block_bytes: int | None
    n_paths: int
    pci_address: str | None
    link_speed: str | None
    link_width: str | None
    max_link_speed: str | None
    max_link_width: str | None
    numa_node: int | None
    backing_file: str | None
    pci_path: tuple[str, ...] = ()


class Temperature(NamedTuple):
    """What a drive's own sensor says, in degrees Celsius; `most` is where it warns, None if it does not tell."""

    now: float
    most: float | None


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """What a directory lies on.

    options         of the mount, then of the file system
    is_ram_backed   the file system itself is one in memory
    devices         the whole devices that the file system uses; a loop device stands for itself
    physical        the same, with a loop device replaced by what its file lies on
    physical_names  names of `physical`, "ram", or a name such as "zfs:tank" or "nfs4:server"; never empty
    """

    path: Path
    mount_point: Path
    file_system: str
    source: str
    options: str
    is_ram_backed: bool
    devices: tuple[BlockDevice, ...]
    physical: tuple[BlockDevice, ...]
    physical_names: frozenset[str]


class _Mount(NamedTuple):
    major_minor: str
    mount_point: Path
    file_system: str
    source: str
    options: str


class _System(NamedTuple):
    sys_root: Path
    mounts: list[_Mount]


def describe_directory(path: Path, *, sys_root: Path = Path("/sys"), mountinfo: str | None = None) -> DirectoryFacts:
    """Return what lies behind a directory.

    sys_root   where sysfs is mounted
    mountinfo  text to read in place of /proc/self/mountinfo

    Raises BadInputError if the directory does not exist.
    """
    directory = _existing_directory(path)
    system = _System(sys_root, _parse_mountinfo(mountinfo if mountinfo is not None else Path("/proc/self/mountinfo").read_text()))
    mount = _mount_of(directory, system.mounts)
    devices = {device.name: device for below in _mounts_below(mount, system.mounts) for device in _devices_of_mount(below, sys_root)}
    physical = _physical(mount, system)
    return DirectoryFacts(
        path=directory,
        mount_point=mount.mount_point,
        file_system=mount.file_system,
        source=mount.source,
        options=mount.options,
        is_ram_backed=mount.file_system in RAM_FILE_SYSTEMS,
        devices=tuple(devices.values()),
        physical=tuple(device for device in physical.values() if device is not None),
        physical_names=frozenset(physical),
    )


def physical_devices(path: Path) -> frozenset[str]:
    """Return the names of what a directory's bytes really lie on: see `DirectoryFacts.physical_names`. Raises BadInputError.

    Two namespaces of one NVMe controller are two devices here: clouds show separate drives in that way.
    """
    return describe_directory(path).physical_names


def shares_device(a: Path, b: Path) -> bool:
    """Say whether two directories have a device in common, so that reads from both compete. Raises BadInputError."""
    return not physical_devices(a).isdisjoint(physical_devices(b))


def free_bytes(path: Path) -> int:
    """Return what an ordinary user may still write; 0 where the file system gives no size (ramfs). Raises BadInputError."""
    return shutil.disk_usage(_existing_directory(path)).free


def default_reserve(path: Path) -> int:
    """Return the bytes to leave free unless the user says otherwise: 20 GB or 5 % of the file system, whichever is less."""
    return min(20 * 10**9, shutil.disk_usage(_existing_directory(path)).total // 20)


def link_limit_bytes_per_s(device: BlockDevice) -> float | None:
    """Return what the device's PCIe link can carry as now negotiated, before packet headers, or None where the kernel does not tell.

    For multipath, that of all paths together, taking each to be like the first.
    """
    if device.link_speed is None or device.link_width is None:
        return None
    rate = pcie_bytes_per_s(device.link_speed, device.link_width)
    return None if rate is None else rate * device.n_paths


def pcie_bytes_per_s(link_speed: str, link_width: str) -> float | None:
    """Return what a PCIe link carries before packet headers, from the kernel's words ("16.0 GT/s PCIe", "4"); None if they are others."""
    speed, width = re.match(r"[0-9.]+", link_speed), re.fullmatch(r"[1-9][0-9]*", link_width)
    if speed is None or width is None or float(speed[0]) not in _LANE_BYTES_PER_S:
        return None
    return _LANE_BYTES_PER_S[float(speed[0])] * int(width[0])


def best_link_bytes_per_s(device: BlockDevice) -> float | None:
    """Return what the link could carry at the drive's own greatest speed and width, or None where the kernel does not tell."""
    return link_limit_bytes_per_s(replace(device, link_speed=device.max_link_speed, link_width=device.max_link_width))


def temperature_of(device: BlockDevice, *, sys_root: Path = Path("/sys")) -> Temperature | None:
    """Return a drive's temperature, None where it has no sensor that can be read."""
    controller = sys_root / "class/block" / device.name / "device"
    # Kernels differ in where the sensor hangs.
    sensors = [s for pattern in ("hwmon[0-9]*", "hwmon/hwmon[0-9]*", "device/hwmon/hwmon[0-9]*") for s in sorted(controller.glob(pattern))]
    now = _read_int(sensors[0] / "temp1_input") if sensors else None
    if now is None:
        return None
    most = _read_int(sensors[0] / "temp1_max")
    return Temperature(now / 1000, None if most is None else most / 1000)


def device_read_bytes(facts: DirectoryFacts, *, sys_root: Path = Path("/sys")) -> int | None:
    """Return what the devices under a directory have read since the machine started, for whomever, as the kernel counts it.

    None where it does not count: in memory, in part in memory, or on devices that cannot be seen.
    """
    counts = [_counted_bytes(device.name, sys_root) for device in facts.physical]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) and RAM not in facts.physical_names else None


def _counted_bytes(name: str, sys_root: Path) -> int | None:
    # Older kernels count NVMe multipath at the paths alone.
    counts = [_stat_bytes(directory) for directory in (sys_root / "class/block" / name, *_multipath_paths(name, sys_root))]
    whole, of_paths = counts[0], sum(count or 0 for count in counts[1:])
    return None if whole is None else max(whole, of_paths)


def _stat_bytes(directory: Path) -> int | None:
    """Return the bytes read of a device. Source: the kernel's Documentation/block/stat.rst, third field, sectors of 512 bytes."""
    words = (_read(directory / "stat") or "").split()
    return int(words[2]) * _SECTOR_BYTES if len(words) > 2 and words[2].isdecimal() else None


def group_by_device(facts: Sequence[DirectoryFacts]) -> tuple[int, ...]:
    """Return a number for each directory, counting from 0; those that have a device in common, if through others, have the same."""
    group = list(range(len(facts)))
    for n, one in enumerate(facts):
        for other in range(n):
            if not one.physical_names.isdisjoint(facts[other].physical_names):
                group = [group[other] if number == group[n] else number for number in group]
    numbers = {number: n for n, number in enumerate(dict.fromkeys(group))}
    return tuple(numbers[number] for number in group)


def _existing_directory(path: Path) -> Path:
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        raise BadInputError(f"{path}: there is no such directory; create it, or mount its drive, first") from None
    except OSError as error:
        raise BadInputError(f"{path}: cannot be looked at ({error.strerror}); expected a directory") from None
    if not is_directory:
        raise BadInputError(f"{path}: is not a directory, expected one")
    return path.resolve()


def _parse_mountinfo(text: str) -> list[_Mount]:
    """Read the lines of /proc/self/mountinfo. Source: proc_pid_mountinfo(5)."""
    mounts = []
    for line in text.splitlines():
        of_mount, _, of_file_system = line.partition(" - ")
        major_minor, _, mount_point, options = of_mount.split(" ")[2:6]
        # Not split(): a source may be empty.
        file_system, source, super_options = of_file_system.split(" ")[:3]
        all_options = ",".join(dict.fromkeys(f"{options},{_unescape(super_options)}".split(",")))
        mounts.append(_Mount(major_minor, Path(_unescape(mount_point)), file_system, _unescape(source), all_options))
    return mounts


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _mount_of(path: Path, mounts: list[_Mount]) -> _Mount:
    """Return the mount that shows at a resolved path: the deepest, and of several at one place the last."""
    around = [mount for mount in mounts if path.is_relative_to(mount.mount_point)]
    if around:
        return max(reversed(around), key=lambda mount: len(mount.mount_point.parts))
    # In a chroot the root need not be a mount point.
    device = path.stat().st_dev
    return _Mount(f"{os.major(device)}:{os.minor(device)}", Path("/"), "unknown", "unknown", "")


def _mounts_below(mount: _Mount, mounts: list[_Mount], seen: frozenset[Path] = frozenset()) -> list[_Mount]:
    """Return the mount, or for an overlay those that hold its layers, as far as they are visible from here."""
    if mount.file_system != "overlay":
        return [mount]
    # In a container a layer's path is another namespace's, and may by chance lead back to the overlay itself.
    seen = seen | {mount.mount_point}
    layers = [Path(layer) for match in _OVERLAY_LAYERS.finditer(mount.options) for layer in match[1].split(":")]
    at_layers = [_mount_of(layer.resolve(), mounts) for layer in layers if layer.is_absolute() and os.path.isdir(layer)]
    below = [m for at_layer in at_layers if at_layer.mount_point not in seen for m in _mounts_below(at_layer, mounts, seen)]
    return list(dict.fromkeys(below)) or [mount]


def _devices_of_mount(mount: _Mount, sys_root: Path) -> list[BlockDevice]:
    return [_block_device(leaf, sys_root) for directory in _sys_directories(mount, sys_root) for leaf in _leaves(directory)]


def _sys_directories(mount: _Mount, sys_root: Path) -> list[Path]:
    """Return the sysfs directories of the block devices that a file system was made on; none if it has none that can be seen."""
    by_number = sys_root / "dev/block" / mount.major_minor
    if by_number.exists():
        return [by_number]
    # btrfs and others have a number of their own making: only the source tells.
    by_source = _sys_directory_of_node(Path(mount.source), sys_root) if mount.source.startswith("/dev/") else None
    if by_source is None:
        return []
    return _btrfs_members(by_source.name, sys_root) or [by_source]


def _sys_directory_of_node(node: Path, sys_root: Path) -> Path | None:
    by_name = sys_root / "class/block" / node.resolve().name
    if by_name.exists():
        return by_name.resolve()
    try:
        number = node.stat().st_rdev
    except OSError:
        return None
    by_number = sys_root / f"dev/block/{os.major(number)}:{os.minor(number)}"
    return by_number.resolve() if by_number.exists() else None


def _btrfs_members(name: str, sys_root: Path) -> list[Path]:
    for members in sys_root.glob("fs/btrfs/*/devices"):
        if (members / name).exists():
            return sorted(members.iterdir())
    return []


def _leaves(sys_directory: Path) -> Iterator[Path]:
    """Yield the sysfs directories of the whole devices below a block device."""
    directory = sys_directory.resolve()
    if (directory / "partition").exists():
        yield from _leaves(directory.parent)
        return
    parts = sorted((directory / "slaves").glob("*"))
    if not parts:
        yield directory
    for part in parts:
        yield from _leaves(part)


def _block_device(directory: Path, sys_root: Path) -> BlockDevice:
    name, kind = directory.name, _kind(directory)
    # A multipath device's own directory hangs on no PCI function.
    paths = _multipath_paths(name, sys_root) or [directory]
    path = paths[0]
    functions = [p for p in (path, *path.parents) if _PCI_ADDRESS.fullmatch(p.name)]
    function = functions[0] if functions else None
    node = next((node for p in (path, *path.parents) if (node := _read_int(p / "numa_node")) is not None), None)
    rotational = _read_int(directory / "queue/rotational")
    return BlockDevice(
        name=name,
        kind=kind,
        model=_read(directory / "device/model"),
        serial=_read(directory / "device/serial") or _read(directory / "serial"),
        n_bytes=(_read_int(directory / "size") or 0) * _SECTOR_BYTES,
        is_rotational=None if rotational is None or kind == "virtio" else bool(rotational),
        logical_block_bytes=_read_int(directory / "queue/logical_block_size"),
        n_paths=len(paths),
        pci_address=function.name if function else None,
        link_speed=_read(function / "current_link_speed") if function else None,
        link_width=_read(function / "current_link_width") if function else None,
        max_link_speed=_read(function / "max_link_speed") if function else None,
        max_link_width=_read(function / "max_link_width") if function else None,
        numa_node=node if node is not None and node >= 0 else None,
        backing_file=_read(directory / "loop/backing_file"),
        pci_path=tuple(p.name for p in reversed(functions)),
    )


def _kind(directory: Path) -> str:
    if directory.name.startswith("nvme"):
        return "nvme"
    if any(part.startswith("virtio") for part in directory.parts):
        return "virtio"
    return "loop" if (directory / "loop").exists() else "other"


def _multipath_paths(name: str, sys_root: Path) -> list[Path]:
    """Return the sysfs directories of an NVMe multipath device's paths: nvme0c0n1 and nvme0c1n1 for nvme0n1. None for other devices."""
    namespace = _NVME_NAMESPACE.fullmatch(name)
    paths = (sys_root / "class/block").glob(f"nvme{namespace[1]}c*n{namespace[2]}") if namespace else []
    return sorted(path.resolve() for path in paths)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and re.fullmatch(r"-?[0-9]+", text) else None


def _physical(mount: _Mount, system: _System, seen: frozenset[Path] = frozenset()) -> dict[str, BlockDevice | None]:
    """Return the names of what a mount's bytes lie on, with the device where there is one."""
    found: dict[str, BlockDevice | None] = {}
    for below in _mounts_below(mount, system.mounts):
        if below.file_system in RAM_FILE_SYSTEMS:
            found[RAM] = None
            continue
        devices = _devices_of_mount(below, system.sys_root)
        for device in devices:
            found |= _physical_of_device(device, system, seen | {mount.mount_point, below.mount_point})
        if not devices:
            found[_name_of_source(below)] = None
    return found


def _physical_of_device(device: BlockDevice, system: _System, seen: frozenset[Path]) -> dict[str, BlockDevice | None]:
    if device.backing_file is None:
        return {device.name: device}
    # The file may be deleted, or another namespace's: its directory is enough, and without that the loop device stands for itself.
    backing = Path(device.backing_file)
    if backing.is_block_device():
        node = _sys_directory_of_node(backing, system.sys_root)
        leaves = [_block_device(leaf, system.sys_root) for leaf in _leaves(node)] if node else []
        return {name: d for leaf in leaves for name, d in _physical_of_device(leaf, system, seen).items()} or {device.name: device}
    below = _mount_of(backing.parent, system.mounts) if backing.parent.is_dir() else None
    if below is None or below.mount_point in seen:
        return {device.name: device}
    return _physical(below, system, seen)


def _name_of_source(mount: _Mount) -> str:
    """Return a name for devices that cannot be seen; it is the same for all data sets of a pool and all exports of a server."""
    source = mount.source.partition("/")[0] if mount.file_system == "zfs" else mount.source.partition(":/")[0]
    return f"{mount.file_system}:{source}"
