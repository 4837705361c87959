"""What may not change a logit's bits, and what a run counts: caches, placements, lost copies, pieces of the prompt."""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DATA, succeed
from placing import add_copies
from safetensors.numpy import load_file

from layout.record import expert_file_name
from manifests.errors import BadInputError, DamagedDataError, DeviceError, UsageError
from manifests.load import load_manifest
from runtime.decode import Decoder
from runtime.engine import Engine, Options, context_limit
from runtime.kernels.rows import Arithmetic
from runtime.memory import budget_of
from runtime.sampler import Sampler

GOLDEN = load_file(DATA / "tiny-k3.1" / "golden.safetensors")
PROMPT = GOLDEN["0.ids"].tolist()
LONG = GOLDEN["2.ids"].tolist()
N_RECORDS = 9 * 16


def quiet(_: str) -> None: ...


def run_logits(manifest: Path, device: str = "cpu", **options: object) -> torch.Tensor:
    """Return the logits of a prompt and 12 decoded tokens."""
    with Engine(manifest, Options(device=device, **options), on_remark=quiet) as engine:  # type: ignore[arg-type]
        steps = list(engine.generate(PROMPT, n_tokens=12, sampler=Sampler(0, 1, 0)))
    return torch.stack([step.logits for step in steps])


@pytest.fixture(scope="module")
def reference(extractions: dict[str, Path]) -> torch.Tensor:
    return run_logits(extractions["tiny-k3.1"])


@pytest.fixture(scope="module")
def device_reference(extractions: dict[str, Path], device: str) -> torch.Tensor:
    return run_logits(extractions["tiny-k3.1"], device)


@pytest.fixture(scope="module")
def placed(extractions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Place a copy of tiny-k3.1 on some tiers and return its manifest."""

    def place(first: str, *others: str) -> Path:
        root = tmp_path_factory.mktemp("placed")
        home = root / "model"
        home.mkdir()
        for name in ("manifest.yaml", "spine.gguf", "experts.xxh128", "tokenizer", "experts"):
            os.symlink(extractions["tiny-k3.1"] / name, home / name)
        (home / "manifest.yaml").unlink()
        (home / "manifest.yaml").write_bytes((extractions["tiny-k3.1"] / "manifest.yaml").read_bytes())
        (root / "d0").mkdir()
        succeed("kprep", "place", home / "manifest.yaml", "--tier", f"{first}={root / 'd0'}")
        for n, tier in enumerate(others, start=1):
            add_copies(home, root / f"d{n}", tier=tier)
        return home / "manifest.yaml"

    return place


@pytest.mark.parametrize("vram_cache", ["1slots", "4slots", "20slots", "40KB", "1GB"])
@pytest.mark.parametrize("host_pool", ["1slots", "10slots", "1GB"])
def test_logits_do_not_depend_on_the_caches(
    extractions: dict[str, Path], device: str, device_reference: torch.Tensor, vram_cache: str, host_pool: str
) -> None:
    assert torch.equal(run_logits(extractions["tiny-k3.1"], device, vram_cache=vram_cache, host_pool=host_pool), device_reference)


@pytest.mark.parametrize("tiers", [("A",), ("A", "B"), ("A", "B", "C"), ("A", "A", "B", "D")])
def test_logits_do_not_depend_on_the_number_of_directories(
    placed: Callable[..., Path], device: str, device_reference: torch.Tensor, tiers: tuple[str, ...]
) -> None:
    assert torch.equal(run_logits(placed(*tiers), device, vram_cache="4slots", host_pool="4slots"), device_reference)


def test_logits_do_not_depend_on_cold_or_verified_reads(extractions: dict[str, Path], reference: torch.Tensor) -> None:
    assert torch.equal(run_logits(extractions["tiny-k3.1"], is_cold=True, verify_reads=1), reference)


def test_any_copy_that_the_base_does_not_need_may_vanish(placed: Callable[..., Path]) -> None:
    """Each of many copies is removed in turn; the score of a text that uses every expert of a layer stays the same, bit for bit."""
    manifest = placed("A", "B", "C")
    drives = load_manifest(manifest).drives

    def score() -> torch.Tensor:
        with Engine(manifest, Options(device="cpu", vram_cache="4slots", host_pool="4slots"), on_remark=quiet) as engine:
            return engine.score(PROMPT, arithmetic=Arithmetic.DECODE, chunk=None)

    whole = score()
    base = np.sum([d.holds for d in drives if d.tier in "AB"], axis=0)
    n_removed = 0
    for drive in drives:
        spare = drive.holds & ((base > 1) if drive.tier in "AB" else drive.holds)
        for layer, expert in np.argwhere(spare)[::12].tolist():
            path = Path(drive.directory) / expert_file_name(layer, expert)
            aside = path.with_suffix(".aside")
            path.rename(aside)
            assert torch.equal(score(), whole)
            aside.rename(path)
            n_removed += 1
    assert n_removed >= 20


def test_a_whole_drive_of_copies_may_vanish_and_is_named(placed: Callable[..., Path], reference: torch.Tensor) -> None:
    manifest = placed("A", "B", "C")
    lost = Path(load_manifest(manifest).drives[2].directory)
    lost.rename(lost.with_name("unplugged"))
    remarks: list[str] = []
    with Engine(manifest, Options(device="cpu"), on_remark=remarks.append) as engine:
        steps = list(engine.generate(PROMPT, n_tokens=12, sampler=Sampler(0, 1, 0)))
    assert torch.equal(torch.stack([s.logits for s in steps]), reference)
    assert any(str(lost) in remark for remark in remarks)


def test_a_record_that_goes_bad_while_running_comes_from_its_other_copy(placed: Callable[..., Path], reference: torch.Tensor) -> None:
    manifest = placed("A", "B")
    for path in Path(load_manifest(manifest).drives[0].directory).glob("L*.bin"):
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
    remarks: list[str] = []
    with Engine(manifest, Options(device="cpu", verify_reads=1), on_remark=remarks.append) as engine:
        steps = list(engine.generate(PROMPT, n_tokens=12, sampler=Sampler(0, 1, 0)))
        failed = engine.prompt_counts.n_failed + engine.decode_counts.n_failed
    assert torch.equal(torch.stack([s.logits for s in steps]), reference)
    assert failed == len(remarks) > 0


def test_the_last_copy_going_bad_ends_the_run_with_the_expert_s_name(placed: Callable[..., Path]) -> None:
    manifest = placed("A")
    for path in Path(load_manifest(manifest).drives[0].directory).glob("L1-*.bin"):
        path.write_bytes(bytes(path.stat().st_size))
    with (
        Engine(manifest, Options(device="cpu", verify_reads=1), on_remark=quiet) as engine,
        pytest.raises(DamagedDataError, match=r"layer 1 expert \d+: no readable copy is left"),
    ):
        engine.prompt(PROMPT)


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_a_prompt_may_be_given_in_any_pieces(extractions: dict[str, Path], device: str, arithmetic: Arithmetic) -> None:
    with Engine(extractions["tiny-k3.1"], Options(device=device), on_remark=quiet) as engine:
        whole, *pieces = (engine.score(LONG, arithmetic=arithmetic, chunk=chunk) for chunk in (None, 1, 7))
    for piece in pieces:
        assert (piece - whole).abs().max() < 2e-4
        assert arithmetic is Arithmetic.PROMPT or torch.equal(piece, whole)


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("is_exact", [False, True])
def test_the_prompt_pass_meets_the_golden_logits(extractions: dict[str, Path], chunk: int, is_exact: bool) -> None:
    with Engine(extractions["tiny-k3.1"], Options(device="cpu", chunk=chunk, is_exact_prefill=is_exact), on_remark=quiet) as engine:
        logits = engine.prompt(LONG)
        assert engine.decoder.state.n_tokens == len(LONG)
    assert np.abs(logits.numpy() - GOLDEN["q8.2.logits"][-1]).max() < 2e-4


def test_counts_add_up(extractions: dict[str, Path]) -> None:
    with Engine(extractions["tiny-k3.1"], Options(device="cpu", vram_cache="40slots", host_pool="80slots"), on_remark=quiet) as engine:
        list(engine.generate(PROMPT, n_tokens=5, sampler=Sampler(0, 1, 0)))
        counts = engine.decode_counts
    assert counts.n_device_hits + counts.n_host_hits + counts.n_records == 4 * 9 * 4
    assert counts.n_records > 0 and counts.n_host_hits > 0 and counts.n_device_hits > 0
    assert counts.read_bytes == counts.n_records * 9792
    assert counts.uploaded_bytes == (counts.n_records + counts.n_host_hits) * 9792


def test_with_room_for_all_each_expert_is_read_once(extractions: dict[str, Path]) -> None:
    with Engine(extractions["tiny-k3.1"], Options(device="cpu"), on_remark=quiet) as engine:
        list(engine.generate(LONG, n_tokens=10, sampler=Sampler(0, 1, 0)))
        needed = engine.prompt_counts.needed | engine.decode_counts.needed
        n_read = engine.prompt_counts.n_records + engine.decode_counts.n_records
    assert n_read == len(needed) <= N_RECORDS


def test_a_cold_run_reads_again_what_the_prompt_pass_had_read(extractions: dict[str, Path]) -> None:
    with Engine(extractions["tiny-k3.1"], Options(device="cpu", is_cold=True), on_remark=quiet) as engine:
        list(engine.generate(LONG, n_tokens=4, sampler=Sampler(0, 1, 0)))
        assert engine.decode_counts.n_records == len(engine.decode_counts.needed)


def test_generation_ends_where_the_context_ends(extractions: dict[str, Path]) -> None:
    with Engine(extractions["tiny-k3.1"], Options(device="cpu", context=len(PROMPT) + 3), on_remark=quiet) as engine:
        steps = list(engine.generate(PROMPT, n_tokens=50, sampler=Sampler(0, 1, 0)))
        assert [s.finish for s in steps] == [None] * 3 + ["context"]
        with pytest.raises(BadInputError, match="the prompt has 70 tokens, but the context is 13"):
            engine.prompt(LONG)


def test_the_context_limit_of_k31_is_its_indexer_s(extractions: dict[str, Path]) -> None:
    k31, k3 = (load_manifest(extractions[name] / "manifest.yaml").geometry for name in ("tiny-k3.1", "tiny-k3"))
    assert context_limit(k31, 2048) == 2048
    with pytest.raises(UsageError, match="2048"):
        context_limit(k31, 2049)
    assert context_limit(k3, 1_048_576) == 1_048_576
    with pytest.raises(UsageError):
        context_limit(k3, 1_048_577)
    assert context_limit(dataclasses.replace(k31, max_position_embeddings=100), None) == 100


def test_budgets_become_whole_slots_and_never_more_than_there_are_experts() -> None:
    def slots(asked: str) -> int:
        facts = {"record_bytes": 9792, "n_all": 144, "available_bytes": 10**9, "auto_bytes": 5 * 9792}
        return budget_of(asked, flag="--vram-cache", **facts).n_slots

    assert [slots(a) for a in ("40KB", "4slots", "20slots", "900TB", "auto")] == [4, 4, 20, 144, 5]
    with pytest.raises(UsageError, match="holds no expert"):
        slots("9KB")
    with pytest.raises(DeviceError, match="are to be had"):
        budget_of("1GB", flag="--vram-cache", record_bytes=9792, n_all=10**6, available_bytes=5 * 10**8, auto_bytes=0)


def test_two_guesses_are_the_default_on_a_gpu_and_none_on_a_cpu() -> None:
    assert [Options().n_prefetch_on(torch.device(kind)) for kind in ("cuda", "cpu")] == [2, 0]
    assert [Options(n_prefetch=1).n_prefetch_on(torch.device(kind)) for kind in ("cuda", "cpu")] == [1, 1]


def test_an_engine_that_cannot_be_made_ready_leaves_no_reading_threads(extractions: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> list[str]:
        found = [thread.name for thread in threading.enumerate()]
        for task in Path("/proc/self/task").iterdir():
            # One may end in between.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found.append((task / "comm").read_text().strip())
        return sorted(name for name in found if name.startswith("reader-"))

    def fail(*_: object) -> None:
        assert names(), "the store is there already"
        raise DeviceError("no room for a graph")

    before = names()
    monkeypatch.setattr(Decoder, "capture", fail)
    with pytest.raises(DeviceError, match="no room for a graph"):
        Engine(extractions["tiny-k3.1"], Options(device="cpu", vram_cache="8slots", host_pool="8slots"), on_remark=quiet)
    until = time.monotonic() + 5
    while names() != before:
        assert time.monotonic() < until, names()
        time.sleep(0.01)
