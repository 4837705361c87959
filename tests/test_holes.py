"""Holes are found, whatever lies behind them, and a file that was written has none."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from layout.checkpoint import open_checkpoint
from layout.config import K3
from layout.holes import Hole, file_fault, find_holes, first_hole, size_fault
from manifests.errors import BadInputError
from manifests.geometry import load_geometry
from prep.tiny import limit_layers, make_checkpoint

DATA = Path(__file__).parent / "data"
# A multiple of every usual block of a file system.
STEP = 1 << 16


def make_file(path: Path, *pieces: int, size: int | None = None) -> Path:
    """Write a step of data at each of these steps, and set the size, in steps."""
    with path.open("wb") as file:
        for piece in pieces:
            file.seek(piece * STEP)
            file.write(b"x" * STEP)
        file.truncate(size * STEP if size is not None else file.tell())
    return path


@pytest.mark.parametrize("pieces", [(), (0,), (0, 1, 2)])
def test_a_file_that_was_written_throughout_has_no_hole(tmp_path: Path, pieces: tuple[int, ...]) -> None:
    assert first_hole(make_file(tmp_path / "file", *pieces)) is None


def test_written_zeros_are_no_hole(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(STEP))
    assert first_hole(tmp_path / "file") is None


@pytest.mark.parametrize(
    ("pieces", "size", "hole"),
    [((0, 3), None, (1, 2)), ((1,), None, (0, 1)), ((0,), 5, (1, 4)), ((), 2, (0, 2)), ((0, 2, 4), None, (1, 1))],
)
def test_the_first_hole_is_found_with_its_length(tmp_path: Path, pieces: tuple[int, ...], size: int | None, hole: tuple[int, int]) -> None:
    found = first_hole(make_file(tmp_path / "file", *pieces, size=size))
    assert found == Hole(hole[0] * STEP, hole[1] * STEP)


def test_room_that_was_reserved_and_not_written_is_a_hole(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x" * STEP)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, 3 * STEP)
        os.fsync(file.fileno())
    assert first_hole(tmp_path / "file") == Hole(STEP, 2 * STEP)


def test_what_keeps_a_file_from_being_one_is_told_before_it_is_opened(tmp_path: Path) -> None:
    file, fifo = make_file(tmp_path / "file", 0, 2), tmp_path / "fifo"
    os.mkfifo(fifo)
    assert size_fault(file, 3 * STEP) is None and file_fault(file, 3 * STEP) == "has a hole: a part of it was never written"
    assert file_fault(file, STEP) == size_fault(file, STEP) == f"has {3 * STEP} bytes, expected {STEP}"
    # An open of it would wait for a writer; a size says nothing about it.
    assert file_fault(fifo, 0) == "is a FIFO, expected a file"
    assert file_fault(tmp_path, tmp_path.stat().st_size) == "is a directory, expected a file: move it away"
    assert file_fault(tmp_path / "none", 0) == "is missing or cannot be opened: No such file or directory; expected a file of 0 bytes"
    assert file_fault(make_file(tmp_path / "whole", 0), STEP) is None


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-k3.1"])
def test_a_whole_checkpoint_has_no_holes(name: str) -> None:
    assert find_holes(open_checkpoint(DATA / name)) == []


def test_every_shard_of_a_sparse_checkpoint_is_named(tmp_path: Path) -> None:
    small = limit_layers(replace(load_geometry("tiny"), indexer=None), 2)
    make_checkpoint(tmp_path, small, architecture=K3, seed=1, is_sparse=True)
    checkpoint = open_checkpoint(tmp_path)
    assert [message.partition(":")[0] for message in find_holes(checkpoint)] == [shard.name for shard in checkpoint.shards]


def test_a_hole_is_told_with_its_shard_tensor_and_place(checkpoint_copy: Path) -> None:
    path = checkpoint_copy / "model-00003-of-000013.safetensors"
    raw = path.read_bytes()
    # The first whole step of the data, and the tensor that holds its first byte.
    hole, end = 2 * STEP, 3 * STEP
    names = [n for n, t in open_checkpoint(checkpoint_copy).tensors.items() if t.shard == 2 and t.offset <= hole < t.offset + t.n_bytes]
    with path.open("wb") as file:
        file.write(raw[:hole])
        file.seek(end)
        file.write(raw[end:])
    (message,) = find_holes(open_checkpoint(checkpoint_copy))
    assert message.startswith(f"{path.name}: {STEP} bytes from byte {hole} on (tensor {names[0]}) are a hole, never written; ")
    assert message.endswith("fetch the file again")


def test_a_shard_that_has_gone_is_told(checkpoint_copy: Path) -> None:
    checkpoint = open_checkpoint(checkpoint_copy)
    (checkpoint_copy / checkpoint.shards[4].name).unlink()
    with pytest.raises(BadInputError, match=rf"{checkpoint.shards[4].name}: cannot be read: No such file"):
        find_holes(checkpoint)
