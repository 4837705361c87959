"""kprep place --rollback: the very bytes of a former manifest, and only while its copies are there."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import command, succeed
from placing import N_RECORDS, check_drives, experts_in, place


@pytest.fixture
def placed(prepared_copy: Path, tmp_path: Path) -> tuple[Path, list[bytes]]:
    """A model that was placed on a, then on b; and the bytes of its three manifests."""
    texts = [(prepared_copy / "manifest.yaml").read_bytes()]
    for name in "ab":
        place(prepared_copy, f"A={tmp_path / name}")
        texts.append((prepared_copy / "manifest.yaml").read_bytes())
    return prepared_copy, texts


def rollback(home: Path, generation: object, *flags: str) -> str:
    return succeed("kprep", "place", home, "--rollback", generation, *flags).out


def history(home: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (home / "manifest.history").iterdir()}


def test_puts_the_very_bytes_back_and_keeps_every_generation(placed: tuple[Path, list[bytes]], extractions: dict[str, Path]) -> None:
    home, texts = placed
    assert "generation 2 of " in rollback(home, 2)
    assert (home / "manifest.yaml").read_bytes() == texts[1]
    assert history(home) == {f"00000{n + 1}.yaml": text for n, text in enumerate(texts)}
    # The drives' lists follow, so that all verifies.
    assert check_drives(home, extractions["tiny-k3.1"]) == [N_RECORDS]
    rollback(home, 3)
    assert (home / "manifest.yaml").read_bytes() == texts[2]
    check_drives(home, extractions["tiny-k3.1"])


def test_the_lists_of_drives_that_then_held_less_follow(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    place(prepared_copy, f"A={a}", f"B={b}", flags=("--limit", "A=90slots", "--limit", "B=90slots"))
    held = check_drives(prepared_copy, extractions["tiny-k3.1"])
    place(prepared_copy, f"A={a}")
    rollback(prepared_copy, 2)
    assert check_drives(prepared_copy, extractions["tiny-k3.1"]) == held and held[0] < N_RECORDS


def test_a_placement_after_a_rollback_has_a_new_number(placed: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    home, texts = placed
    rollback(home, 1)
    assert "generation 4" in place(home, f"A={tmp_path / 'a'}").out
    assert {name: history(home)[name] for name in ("000001.yaml", "000002.yaml", "000003.yaml")} == {
        f"00000{n + 1}.yaml": text for n, text in enumerate(texts)
    }


def test_lists_what_there_is(placed: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    home, _ = placed
    lines = rollback(home, "list").splitlines()
    assert len(lines) == 2 and lines[0].startswith("generation 1, ") and lines[1].endswith(f"A {tmp_path / 'a'}: 144 experts")
    assert [entry["generation"] for entry in json.loads(rollback(home, "list", "--json"))] == [1, 2]


def test_is_refused_if_copies_are_gone_with_their_names_and_number(placed: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    home, texts = placed
    lost = sorted(experts_in(tmp_path / "a"))[:7]
    for name in lost:
        (tmp_path / "a" / name).unlink()
    outcome = command("kprep", "place", home, "--rollback", "2")
    assert (
        outcome.code == 4
        and "7 of its copies are gone" in outcome.err
        and "... and 2 more" in outcome.err
        and f"{tmp_path / 'a'} (tier A)" in outcome.err
    )
    shutil.rmtree(tmp_path / "a")
    outcome = command("kprep", "place", home, "--rollback", "2")
    assert outcome.code == 4 and "144 of its copies are gone" in outcome.err and "is the drive mounted?" in outcome.err
    assert (home / "manifest.yaml").read_bytes() == texts[2]


@pytest.mark.parametrize(("text", "part"), [("9", "kept are: 1, 2"), ("3", "no such generation"), ("two", "expected the number")])
def test_what_is_no_former_generation_is_refused(placed: tuple[Path, list[bytes]], text: str, part: str) -> None:
    outcome = command("kprep", "place", placed[0], "--rollback", text)
    assert outcome.code == 2 and part in outcome.err


def test_returns_from_a_manifest_that_was_damaged(placed: tuple[Path, list[bytes]]) -> None:
    home, texts = placed
    (home / "manifest.yaml").write_text("schema: 1\n")
    rollback(home, 2)
    assert (home / "manifest.yaml").read_bytes() == texts[1]
    assert "schema: 1\n" in [data.decode() for name, data in history(home).items() if name.startswith("unreadable-")]
