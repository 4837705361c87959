"""The measurement as a command line of fio, so that anybody can check it with a program that is not ours."""

import shlex
from pathlib import Path

from layout.direct import PAGE, round_up

# fio takes lists of names up to 4096 characters: L92-E895.bin and a colon, 13 characters each.
MOST_FILES = 256
_HUGE_PAGE = 2 << 20


def fio_command(directory: Path, *, depth: int, record_bytes: int, n_files: int = MOST_FILES, is_direct: bool = True) -> str:
    """Return two shell lines that read n_files of a directory's experts with fio, each once, whole, in random order.

    The first line reserves the huge pages for fio's buffers; in pages of 4 KiB it measures up to 40 % less. Records that are no multiple of a
    page are read up to their last whole one, for fio reads blocks of one size.
    """
    assert depth >= 1 and 1 <= n_files <= MOST_FILES
    block_bytes = max(PAGE, record_bytes - record_bytes % PAGE)
    # fio's own bookkeeping takes up to two more than its blocks.
    n_pages = round_up(depth * block_bytes, _HUGE_PAGE) // _HUGE_PAGE + 2
    names = f"find . -maxdepth 1 -name 'L*-E*.bin' -size {record_bytes}c -printf '%f\\n' | shuf -n {n_files} | paste -sd:"
    return (
        f"sudo sysctl vm.nr_hugepages={n_pages}\n"
        f"cd {shlex.quote(str(directory))} && fio --name=experts --readonly --direct={int(is_direct)} --rw=randread --bs={block_bytes} "
        f'--iodepth={depth} --ioengine=io_uring --mem=mmaphuge --hugepage-size=2m --filename="$({names})"'
    )
