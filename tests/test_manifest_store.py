"""How one manifest replaces another, and what is kept of the former ones."""

import os
from dataclasses import replace

import pytest
from test_manifest import SMALL_TEXT, small_manifest

from manifests.errors import BadInputError, KtierError, NoSpaceError
from manifests.load import load_manifest
from manifests.seal import sealed
from manifests.store import history, next_generation, write_manifest


def test_the_first_generation_is_1_and_leaves_no_history(tmp_path):
    path = tmp_path / "manifest.yaml"
    assert next_generation(path) == 1
    assert write_manifest(path, small_manifest()) == path
    assert path.read_text() == sealed(SMALL_TEXT)
    assert os.listdir(tmp_path) == ["manifest.yaml"]
    assert history(path) == []
    assert next_generation(path) == 2


def test_each_former_manifest_is_kept_byte_for_byte(tmp_path):
    path = write_manifest(tmp_path / "manifest.yaml", small_manifest())
    edited = path.read_bytes() + b"# a remark by hand\n"
    path.write_bytes(edited)
    for generation in (2, 3):
        write_manifest(path, replace(small_manifest(), generation=generation))
    folder = tmp_path / "manifest.history"
    assert history(path) == [(1, folder / "000001.yaml"), (2, folder / "000002.yaml")]
    assert (folder / "000001.yaml").read_bytes() == edited
    assert load_manifest(folder / "000002.yaml").generation == 2
    assert load_manifest(path).generation == 3
    assert sorted(os.listdir(folder)) == ["000001.yaml", "000002.yaml"]
    assert sorted(os.listdir(tmp_path)) == ["manifest.history", "manifest.yaml"]


@pytest.mark.parametrize("generation", [1, 3])
def test_a_generation_that_does_not_follow_is_refused(tmp_path, generation):
    path = write_manifest(tmp_path / "manifest.yaml", small_manifest())
    with pytest.raises(KtierError, match=f"is generation {generation}, expected 2: another command has written in between"):
        write_manifest(path, replace(small_manifest(), generation=generation))
    assert path.read_text() == sealed(SMALL_TEXT)
    assert os.listdir(tmp_path) == ["manifest.yaml"]


def test_a_generation_is_not_used_twice_after_a_return_by_hand(tmp_path):
    path = write_manifest(tmp_path / "manifest.yaml", small_manifest())
    for generation in (2, 3):
        write_manifest(path, replace(small_manifest(), generation=generation))
    folder = tmp_path / "manifest.history"
    path.write_bytes((folder / "000001.yaml").read_bytes())
    assert next_generation(path) == 3
    assert history(path) == [(2, folder / "000002.yaml")]
    path.unlink()
    assert next_generation(path) == 3


def test_other_files_in_the_history_are_no_generations(tmp_path):
    path = write_manifest(tmp_path / "manifest.yaml", small_manifest())
    (tmp_path / "manifest.history").mkdir()
    for name in ("7.yaml", "000008.yaml.partial", "notes.txt", "000009.yaml~"):
        (tmp_path / "manifest.history" / name).write_text("x")
    assert history(path) == [] and next_generation(path) == 2


def test_a_copy_with_the_same_number_and_other_bytes_is_not_overwritten(tmp_path):
    path = write_manifest(tmp_path / "manifest.yaml", small_manifest())
    copy = tmp_path / "manifest.history" / "000001.yaml"
    copy.parent.mkdir()
    copy.write_text("other")
    with pytest.raises(KtierError, match=r"000001\.yaml: differs from"):
        write_manifest(path, replace(small_manifest(), generation=2))
    assert copy.read_text() == "other" and path.read_text() == sealed(SMALL_TEXT)


def test_a_manifest_that_could_not_be_loaded_is_not_published(tmp_path):
    a, b = small_manifest().drives
    path = tmp_path / "manifest.yaml"
    with pytest.raises(BadInputError, match=r"the new manifest\.yaml: tiers A and B must together hold every expert"):
        write_manifest(path, replace(small_manifest(), drives=(a, replace(b, tier="C"))))
    assert os.listdir(tmp_path) == []


def test_a_present_file_that_is_no_manifest_is_not_replaced(tmp_path):
    path = tmp_path / "manifest.yaml"
    path.write_text("schema: 1\n")
    with pytest.raises(BadInputError, match="missing keys"):
        write_manifest(path, small_manifest())
    assert path.read_text() == "schema: 1\n"


def test_the_old_manifest_stays_when_the_partial_file_cannot_be_opened(tmp_path):
    path = write_manifest(tmp_path / "manifest.yaml", small_manifest())
    (tmp_path / "manifest.yaml.partial").mkdir()
    with pytest.raises(KtierError, match=r"manifest\.yaml: cannot be written: .*Is a directory.*the former file is unharmed"):
        write_manifest(path, replace(small_manifest(), generation=2))
    assert path.read_text() == sealed(SMALL_TEXT)
    # The history copy of this failed write is the present manifest itself, so there is nothing to return to.
    assert history(path) == []
    (tmp_path / "manifest.yaml.partial").rmdir()
    write_manifest(path, replace(small_manifest(), generation=2))
    assert [generation for generation, _ in history(path)] == [1]


def test_a_full_disk_is_named_and_leaves_the_old_manifest(tmp_path):
    path = write_manifest(tmp_path / "manifest.yaml", small_manifest())
    (tmp_path / "manifest.yaml.partial").symlink_to("/dev/full")
    with pytest.raises(NoSpaceError, match="No space left on device"):
        write_manifest(path, replace(small_manifest(), generation=2))
    assert path.read_text() == sealed(SMALL_TEXT)
    assert sorted(os.listdir(tmp_path)) == ["manifest.history", "manifest.yaml"]


def test_a_partial_file_of_a_killed_run_is_in_nobodys_way(tmp_path):
    path = tmp_path / "manifest.yaml"
    (tmp_path / "manifest.yaml.partial").write_text("x" * 100_000)
    write_manifest(path, small_manifest())
    assert path.read_text() == sealed(SMALL_TEXT)
    assert os.listdir(tmp_path) == ["manifest.yaml"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_interrupt_removes_the_partial_file_and_leaves_the_old_manifest(tmp_path, monkeypatch, step):
    path = write_manifest(tmp_path / "manifest.yaml", small_manifest())

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, step, interrupt)
        write_manifest(path, replace(small_manifest(), generation=2))
    assert path.read_text() == sealed(SMALL_TEXT)
    assert not list(tmp_path.rglob("*.partial"))


def test_the_bytes_are_on_the_disk_before_the_name(tmp_path, monkeypatch):
    steps = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, _real=real, _name=name: (steps.append(_name), _real(*args))[1])
    write_manifest(tmp_path / "manifest.yaml", small_manifest())
    assert steps == ["fsync", "replace", "fsync"]
    steps.clear()
    write_manifest(tmp_path / "manifest.yaml", replace(small_manifest(), generation=2))
    # The new folder's name, then the copy of the former manifest, then the new one.
    assert steps == ["fsync", "fsync", "replace", "fsync", "fsync", "replace", "fsync"]
