"""The real commands and the doctor on real file systems: loop mounts, memory, an overlay, and one that refuses direct reads.

Only root can mount; elsewhere, and where a tool or the kernel lacks a file system, these tests are skipped and say why.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from conftest import DATA, command, succeed

from layout.direct import Extent, ReadMode, aligned_buffer, probe_directory, read_extent, span_bytes
from layout.findings import Finding, finding_line
from manifests.errors import listed
from prep.doctor import examine

# mkfs.xfs makes nothing smaller than 300 MiB; the images are sparse.
N_IMAGE = 320 << 20
LOOP_MOUNTED = ("ext4", "xfs", "btrfs")
RECORD = 17_547_264


class Mounts(ExitStack):
    """Mounts in a directory, undone at the end, whatever happened."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def run(self, *words: object) -> str:
        program = str(words[0])
        if os.geteuid() != 0:
            pytest.skip(f"only root may mount, and {program} is for that")
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
        done = subprocess.run([*map(str, words)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot be mounted here: {' '.join(map(str, words))}: {done.stderr.strip()}")
        return done.stdout.strip()

    def mount(self, *words: object) -> Path:
        directory = self.root / "mounted"
        directory.mkdir()
        self.run("mount", *words, directory)
        self.callback(_unmount, directory)
        return directory

    def loop_mount(self, image: Path, kind: str, *, direct_io: str = "on") -> Path:
        loop = self.run("losetup", "--find", "--show", f"--direct-io={direct_io}", image)
        try:
            return self.mount("-t", kind, loop)
        finally:
            # A mounted loop device goes away with its mount, even if this process is killed before.
            subprocess.run(["losetup", "--detach", loop], check=True)


def _unmount(directory: Path) -> None:
    if subprocess.run(["umount", directory]).returncode:
        subprocess.run(["umount", "--lazy", directory], check=True)


@pytest.fixture(scope="module")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounts]:
    with Mounts(tmp_path_factory.mktemp("file-system")) as mounts:
        yield mounts


class Prepared(NamedTuple):
    """A model that was extracted on a file system by the real command."""

    kind: str
    out: Path

    @property
    def experts(self) -> Path:
        return self.out / "experts"


@pytest.fixture(scope="module", params=[*LOOP_MOUNTED, "tmpfs", "overlay"])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    kind = request.param
    with Mounts(tmp_path_factory.mktemp(kind)) as mounts:
        mounted = _mounted(mounts, kind)
        succeed("kprep", "extract", DATA / "tiny-k3", mounted / "out")
        yield Prepared(kind, mounted / "out")


def _mounted(mounts: Mounts, kind: str) -> Path:
    if kind == "tmpfs":
        return mounts.mount("-t", "tmpfs", "-o", "size=128m", "tmpfs")
    if kind == "overlay":
        layers = [mounts.root / name for name in ("lower", "upper", "work")]
        for layer in layers:
            layer.mkdir()
        return mounts.mount("-t", "overlay", "-o", "lowerdir={},upperdir={},workdir={}".format(*layers), "overlay")
    image = mounts.root / "image"
    image.touch()
    os.truncate(image, N_IMAGE)
    mounts.run(f"mkfs.{kind}", "-q", image)
    return mounts.loop_mount(image, kind)


def test_a_model_extracted_there_is_intact(prepared: Prepared) -> None:
    assert "all intact: " in succeed("kprep", "verify-hashes", prepared.out / "manifest.yaml").out


def test_every_expert_reads_direct_as_it_does_buffered(prepared: Prepared) -> None:
    mode = probe_directory(prepared.experts)
    if prepared.kind == "tmpfs" and not mode.is_direct:
        pytest.skip(f"a kernel whose tmpfs is read {mode}")
    assert mode.is_direct, mode
    paths = sorted(prepared.experts.glob("L*-E*.bin"))
    assert len(paths) == 40
    buffer = aligned_buffer(span_bytes(paths[0].stat().st_size, mode.alignment))
    for path in paths:
        assert _read(path, mode, buffer) == path.read_bytes(), path


def _read(path: Path, mode: ReadMode, buffer: memoryview) -> bytes:
    # What the former read left here must not count as this one's.
    np.frombuffer(buffer, np.uint8)[:] = 0xEE
    return bytes(read_extent(Extent(path, 0, path.stat().st_size), buffer, mode))


REMARKS = {
    "ext4": "ext4 on /dev/loop",
    "xfs": "xfs on /dev/loop",
    "btrfs": "may buffer direct writes to files with checksums",
    "tmpfs": "it lies in memory",
    "overlay": "a container's layers",
}


def test_the_doctor_proves_the_transfers_there_and_finds_nothing_bad(prepared: Prepared) -> None:
    before = sorted(os.listdir(prepared.experts))
    found = _findings_of(prepared.experts)
    assert not [f for f in found.values() if f.level == "bad"], listed([finding_line(f) for f in found.values()], "found:")
    assert found["transfers"].text.startswith(f"{RECORD} random bytes written, read ")
    assert REMARKS[prepared.kind] in found["file system"].text
    assert found["file system"].level == ("good" if prepared.kind in ("ext4", "xfs") else "note")
    assert sorted(os.listdir(prepared.experts)) == before


def test_the_doctor_knows_which_reads_pass_the_page_cache_there(prepared: Prepared) -> None:
    found = _findings_of(prepared.experts)
    if prepared.kind == "tmpfs":
        assert "page cache" not in found
    elif prepared.kind == "overlay":
        # As on the file system that its layers lie on.
        below = {f.what: f for f in examine([prepared.out.parent.parent / "upper"])}
        assert found["page cache"].level == below["page cache"].level
    else:
        assert found["page cache"].level == "good", found["page cache"]
    if prepared.kind == "btrfs":
        assert found["alignment"].text == "4096 B; smaller steps are taken, but through the page cache"


def _findings_of(directory: Path) -> dict[str, Finding]:
    return {f.what: f for f in examine([directory], record_bytes=RECORD) if f.where == str(directory)}


def test_a_read_only_file_system_without_direct_reads_serves_a_model(mounts: Mounts, extractions: dict[str, Path]) -> None:
    image = mounts.root / "squashfs"
    mounts.run("mksquashfs", extractions["tiny-k3.1"], image, "-quiet", "-no-progress")
    mounted = mounts.loop_mount(image, "squashfs", direct_io="off")
    found = _findings_of(mounted / "experts")
    assert "O_DIRECT" in probe_directory(mounted / "experts").reason
    assert found["transfers"].level == "note" and "read buffered (the file system refuses O_DIRECT" in found["transfers"].text
    assert found["directory"].level == "note" and "enough for krun" in found["directory"].text
    assert found["free space"].level == "note"
    assert "bad" not in {f.level for f in found.values()}
    assert "all intact: " in succeed("kprep", "verify-hashes", mounted / "manifest.yaml").out


def test_a_file_system_without_room_for_a_record_is_bad_and_left_empty(tmp_path: Path) -> None:
    with Mounts(tmp_path) as mounts:
        mounted = mounts.mount("-t", "tmpfs", "-o", "size=8m", "tmpfs")
        found = _findings_of(mounted)
        assert found["free space"].level == "bad" and "room for 0 records of 17.5MB" in found["free space"].text
        assert found["transfers"].level == "bad" and "no room left on the file system" in found["transfers"].text
        assert os.listdir(mounted) == []


def test_room_that_the_reserve_takes_is_no_room(tmp_path: Path) -> None:
    with Mounts(tmp_path) as mounts:
        mounted = mounts.mount("-t", "tmpfs", "-o", "size=17600k", "tmpfs")
        found = _findings_of(mounted)
        assert found["free space"].level == "bad" and found["free space"].text.startswith("18MB free; less a reserve of 901KB, room for 0 ")
        assert found["transfers"].level != "bad" and os.listdir(mounted) == []


def test_a_full_file_system_with_experts_is_read_not_written(tmp_path: Path) -> None:
    with Mounts(tmp_path) as mounts:
        mounted = mounts.mount("-t", "tmpfs", "-o", "size=8m", "tmpfs")
        (mounted / "L1-E0.bin").write_bytes(os.urandom(9792))
        found = _findings_of(mounted)
        assert "bad" not in {f.level for f in found.values()}
        assert found["free space"].level == "note" and found["transfers"].text.startswith("9792 bytes of L1-E0.bin")
        assert os.listdir(mounted) == ["L1-E0.bin"]


def test_an_extraction_onto_a_small_file_system_ends_for_want_of_room(tmp_path: Path) -> None:
    with Mounts(tmp_path) as mounts:
        mounted = mounts.mount("-t", "tmpfs", "-o", "size=1m", "tmpfs")
        outcome = command("kprep", "extract", DATA / "tiny-k3", mounted / "out")
        assert outcome.code == 5 and str(mounted / "out") in outcome.err
        assert not list(mounted.rglob("*.partial"))
