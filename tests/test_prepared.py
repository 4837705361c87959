"""A prepared model as it is found on disk: refused where it cannot be trusted, and used without the copies that are gone."""

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from layout.hash_lists import HASH_LIST_NAME, xxh3_128_hex
from layout.prepared import Prepared, find_copies, open_prepared
from layout.record import expert_file_name
from manifests.errors import BadInputError, DamagedDataError
from manifests.manifest import Drive, HashList, Manifest, Record
from manifests.store import manifest_text

N_RECORD = 9792
Change = Callable[[Manifest], Manifest]


def rewrite(directory: Path, change: Change) -> Path:
    """Change the manifest in its place, without a new generation."""
    path = directory / "manifest.yaml"
    path.write_text(manifest_text(change(open_prepared(path).manifest)))
    return path


def with_record(**values: object) -> Change:
    return lambda manifest: replace(manifest, record=Record(**{**_fields(manifest.record), **values}))  # type: ignore[arg-type]


def _fields(record: Record) -> dict[str, object]:
    return {"layout": record.layout, "nibbles": record.nibbles, "scale": record.scale, "n_bytes": record.n_bytes}


def with_drives(directory: Path, *tiers: str) -> Prepared:
    """Add a drive for each tier, a copy of all experts on it; they are named drive-1, drive-2, ..."""

    def change(manifest: Manifest) -> Manifest:
        (base,) = manifest.drives
        added = tuple(Drive(tier, f"drive-{n}", base.file_system, base.devices, None, base.holds) for n, tier in enumerate(tiers, start=1))
        return replace(manifest, drives=(base, *added))

    for n, _ in enumerate(tiers, start=1):
        shutil.copytree(directory / "experts", directory / f"drive-{n}")
    return open_prepared(rewrite(directory, change))


def with_hash_list(directory: Path, lines: list[str]) -> Path:
    """Replace the hash list, and its digest in the manifest."""
    data = "".join(lines).encode()
    path = rewrite(directory, lambda m: replace(m, experts=HashList(m.experts.path, xxh3_128_hex(data))))
    (directory / HASH_LIST_NAME).write_bytes(data)
    return path


def hash_lines(directory: Path) -> list[str]:
    return (directory / HASH_LIST_NAME).read_text().splitlines(keepends=True)


def test_a_prepared_model_knows_its_parts(extracted: Path) -> None:
    prepared = open_prepared(extracted / "manifest.yaml")
    assert prepared.drive_directories == (extracted / "experts",)
    assert prepared.spine_path == extracted / "spine.gguf" and prepared.tokenizer_directory == extracted / "tokenizer"
    assert prepared.drive_name(0) == f"{extracted / 'experts'} (tier A)" and prepared.drives_holding(1, 0) == [0]
    last = prepared.geometry.n_layers - 1
    for layer, expert in ((1, 0), (last, prepared.geometry.n_experts - 1)):
        extent = prepared.expert_extent(0, layer, expert)
        assert extent == (extracted / "experts" / f"L{layer}-E{expert}.bin", 0, prepared.record.n_bytes)
        assert extent.path.stat().st_size == prepared.record.n_bytes
        assert prepared.hashes.get(layer, expert) == xxh3_128_hex(extent.path.read_bytes())
    copies = find_copies(prepared)
    assert copies.faults == [] and (copies.holds[0] == prepared.manifest.drives[0].holds).all()


def test_the_directory_stands_for_the_manifest_in_it(extracted: Path) -> None:
    assert open_prepared(extracted).path == extracted / "manifest.yaml"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("layout", "w3.packed+w3.scale", "w1.packed+w1.scale+w2.packed+w2.scale+w3.packed+w3.scale"),
        ("nibbles", "high nibble is the even column", "low nibble is the even column"),
        ("scale", "E4M3, one per 16 columns", "E8M0, one per 32 columns"),
        ("n_bytes", 12288, N_RECORD),
    ],
)
def test_records_of_another_kind_are_refused(prepared_copy: Path, field: str, value: object, expected: object) -> None:
    path = rewrite(prepared_copy, with_record(**{field: value}))
    with pytest.raises(BadInputError) as caught:
        open_prepared(path)
    assert str(caught.value) == f"{path}: record.{field} is {value!r}; this program reads {expected!r} for this geometry"


def test_a_manifest_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=f"{tmp_path / 'manifest.yaml'}: no such file"):
        open_prepared(tmp_path)


def test_a_hash_list_with_another_digest_is_damage(prepared_copy: Path) -> None:
    path = prepared_copy / HASH_LIST_NAME
    recorded = yaml.safe_load((prepared_copy / "manifest.yaml").read_text())["experts"]["xxh3_128"]
    data = bytearray(path.read_bytes())
    data[0] = ord("0") if data[0] != ord("0") else ord("1")
    path.write_bytes(data)
    with pytest.raises(DamagedDataError) as caught:
        open_prepared(prepared_copy)
    assert str(caught.value) == f"{path}: xxh3-128 {xxh3_128_hex(data)} differs from the manifest's {recorded}; restore it from a copy"


def test_a_hash_list_that_is_gone_is_damage(prepared_copy: Path) -> None:
    (prepared_copy / HASH_LIST_NAME).unlink()
    with pytest.raises(DamagedDataError, match=rf"{HASH_LIST_NAME}: cannot be read: No such file or directory; without it no expert can be verified"):
        open_prepared(prepared_copy)


@pytest.mark.parametrize("tiers", [(), ("B",), ("A", "C"), ("B", "D")])
def test_a_hash_list_that_is_gone_comes_back_as_the_message_says(prepared_copy: Path, tiers: tuple[str, ...]) -> None:
    prepared = with_drives(prepared_copy, *tiers)
    lists = [prepared.drive_directories[n] / HASH_LIST_NAME for n, drive in enumerate(prepared.manifest.drives) if drive.tier in "AB"]
    lines = hash_lines(prepared_copy)
    for n, path in enumerate(lists):
        path.write_text("".join(lines[n :: len(lists)]))
    whole = (prepared_copy / HASH_LIST_NAME).read_bytes()
    (prepared_copy / HASH_LIST_NAME).unlink()
    with pytest.raises(DamagedDataError) as caught:
        open_prepared(prepared_copy)
    _, _, cure = str(caught.value).rpartition("each drive has its part of it: ")
    subprocess.run(cure, shell=True, check=True)
    assert (prepared_copy / HASH_LIST_NAME).read_bytes() == whole
    open_prepared(prepared_copy)


def test_an_expert_without_a_hash_is_named(prepared_copy: Path) -> None:
    lines = [line for line in hash_lines(prepared_copy) if "L2-" not in line]
    with pytest.raises(DamagedDataError, match=rf"{HASH_LIST_NAME}: no hash for 16 experts, the first is L2-E0\.bin"):
        open_prepared(with_hash_list(prepared_copy, lines))


@pytest.mark.parametrize(
    ("line", "fault"), [("x\n", "line 145: 'x"), (f"{'0' * 32}  L10-E0.bin\n", "line 145: L10-E0.bin, but the model has layers 0 to 9")]
)
def test_a_hash_list_of_something_else_is_refused(prepared_copy: Path, line: str, fault: str) -> None:
    with pytest.raises(BadInputError) as caught:
        open_prepared(with_hash_list(prepared_copy, [*hash_lines(prepared_copy), line]))
    assert fault in str(caught.value)


def test_copies_that_are_missing_or_of_the_wrong_size_or_no_files_are_left_out_and_named(prepared_copy: Path) -> None:
    prepared = with_drives(prepared_copy, "B", "C")
    first, second = (prepared_copy / f"drive-{n}" for n in (1, 2))
    for expert in range(3):
        (first / f"L1-E{expert}.bin").unlink()
    os.mkfifo(first / "L1-E1.bin")
    (first / "L1-E2.bin").mkdir()
    (first / "L9-E15.bin").write_bytes(bytes(N_RECORD - 1))
    (second / "L1-E0.bin").write_bytes(bytes(N_RECORD + 4096))
    (second / "L2-E3.bin").write_bytes(b"")
    copies = find_copies(prepared)
    gone = [
        [(layer, expert) for layer, expert in np.argwhere(d.holds & ~h).tolist()] for d, h in zip(prepared.manifest.drives, copies.holds, strict=True)
    ]
    assert gone == [[], [(1, 0), (1, 1), (1, 2), (9, 15)], [(1, 0), (2, 3)]]
    assert copies.faults == [
        f"layer 1 expert 0 on {first} (tier B): L1-E0.bin is missing or cannot be opened: No such file or directory; expected a file of 9792 bytes",
        f"layer 1 expert 1 on {first} (tier B): L1-E1.bin is a FIFO, expected a file",
        f"layer 1 expert 2 on {first} (tier B): L1-E2.bin is a directory, expected a file: move it away",
        f"layer 9 expert 15 on {first} (tier B): L9-E15.bin has 9791 bytes, expected 9792",
        f"layer 1 expert 0 on {second} (tier C): L1-E0.bin has 13888 bytes, expected 9792",
        f"layer 2 expert 3 on {second} (tier C): L2-E3.bin has 0 bytes, expected 9792",
    ]


def test_finding_copies_changes_nothing_in_the_manifest(prepared_copy: Path) -> None:
    prepared = with_drives(prepared_copy, "B")
    (prepared_copy / "drive-1" / "L1-E0.bin").unlink()
    find_copies(prepared)
    assert prepared.manifest.drives[1].holds[1, 0] and prepared.drives_holding(1, 0) == [0, 1]


def test_a_drive_that_is_not_mounted_is_told_once(prepared_copy: Path) -> None:
    prepared = with_drives(prepared_copy, "B")
    shutil.rmtree(prepared_copy / "drive-1")
    copies = find_copies(prepared)
    assert copies.faults == [f"{prepared_copy / 'drive-1'} (tier B): no such directory; is the drive mounted?"]
    assert not copies.holds[1].any() and (copies.holds[0] == prepared.manifest.drives[0].holds).all()


def test_a_base_copy_saves_an_expert_whichever_of_a_and_b_has_it(prepared_copy: Path) -> None:
    prepared = with_drives(prepared_copy, "B")
    (prepared_copy / "experts" / "L1-E0.bin").unlink()
    (prepared_copy / "drive-1" / "L1-E1.bin").unlink()
    copies = find_copies(prepared)
    assert [holds[1, :2].tolist() for holds in copies.holds] == [[False, True], [True, False]]


@pytest.mark.parametrize("tiers", [[], ["B"], ["C"], ["C", "D"]])
def test_an_expert_without_a_base_copy_is_damage_and_named_with_its_drives(prepared_copy: Path, tiers: list[str]) -> None:
    prepared = with_drives(prepared_copy, *tiers)
    bases = [prepared_copy / "experts", *(prepared_copy / f"drive-{n}" for n, tier in enumerate(tiers, start=1) if tier == "B")]
    for directory in bases:
        (directory / "L3-E7.bin").write_bytes(bytes(100))
    with pytest.raises(DamagedDataError) as caught:
        find_copies(prepared)
    message = str(caught.value)
    assert f"{prepared.path}: tiers A and B must hold every expert; 1 is gone; mount the drive" in message
    lacking, others = ([prepared.drive_name(n) for n, tier in enumerate(["A", *tiers]) if (tier in "AB") is is_base] for is_base in (True, False))
    others_text = f"; another copy is on {', '.join(others)}" if others else ""
    assert f"\n  layer 3 expert 7: no usable copy on {', '.join(lacking)}{others_text}\n" in message
    for directory in bases:
        tier = "A" if directory.name == "experts" else "B"
        assert f"layer 3 expert 7 on {directory} (tier {tier}): {expert_file_name(3, 7)} has 100 bytes, expected 9792" in message
