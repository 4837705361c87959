"""The printed fio command: what it says, and that fio takes it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from test_measure_reads import make_files

from prep.measuring.fio import MOST_FILES, fio_command


def test_the_command_reads_whole_records_direct_at_the_depth_into_huge_pages() -> None:
    sysctl, fio = fio_command(Path("/mnt/a"), depth=4, record_bytes=17_547_264, n_files=100).splitlines()
    # Four records are 33.5 huge pages, and fio takes up to two more.
    assert sysctl == "sudo sysctl vm.nr_hugepages=36"
    assert fio.startswith("cd /mnt/a && fio ")
    for option in (
        "--direct=1",
        "--rw=randread",
        "--bs=17547264",
        "--iodepth=4",
        "--ioengine=io_uring",
        "--mem=mmaphuge",
        "--hugepage-size=2m",
        "--readonly",
    ):
        assert f" {option} " in fio
    assert "-size 17547264c" in fio and "shuf -n 100" in fio


def test_a_buffered_drive_and_a_tail_are_told_to_fio() -> None:
    fio = fio_command(Path("/mnt/a"), depth=1, record_bytes=9792, is_direct=False).splitlines()[1]
    assert " --direct=0 " in fio and " --bs=8192 " in fio and "-size 9792c" in fio


def test_the_longest_list_of_names_is_one_that_fio_takes() -> None:
    assert len("L92-E895.bin:") * MOST_FILES < 4096


@pytest.mark.parametrize("depth", [1, 3])
def test_fio_runs_the_command_and_reads_each_file_once(tmp_path: Path, depth: int) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    pages = Path("/proc/sys/vm/nr_hugepages")
    if not os.access(pages, os.W_OK):
        pytest.skip("huge pages may not be reserved here")
    drive, former = tmp_path / "a drive: 'mine'", pages.read_text()
    make_files(drive, 12, 1 << 20)
    (drive / "experts.xxh128").write_text("x")
    (drive / "L9-E9.bin").write_bytes(b"of another size")
    lines = fio_command(drive, depth=depth, record_bytes=1 << 20)
    try:
        done = subprocess.run(["bash", "-ec", lines.replace("sudo ", "")], capture_output=True, text=True)
    finally:
        pages.write_text(former)
    if "nr_hugepages" in done.stderr or "Cannot allocate memory" in done.stderr:
        pytest.skip(f"no huge pages to be had here: {done.stderr}")
    assert done.returncode == 0, done
    assert "issued rwts: total=12,0,0,0" in done.stdout and "io=12.0MiB" in done.stdout
