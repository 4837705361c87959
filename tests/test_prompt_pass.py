"""The prompt pass for many rows on fixed state: the golden logits, every expert read once, the same bits in any order of arrival."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DATA
from safetensors.numpy import load_file
from torch import Tensor

from manifests.geometry import load_geometry
from runtime.bench.rig import Rig, Setting
from runtime.bench.synthetic import EmulatedDrive
from runtime.engine import DEFAULT_CHUNK, Engine, Options, PromptProgress
from runtime.kernels.rows import TILE_ROWS, Arithmetic
from runtime.live import prompt_line
from runtime.memory import GPU_RESERVE_BYTES
from runtime.prompt import ExpertTables, PromptPass, neighbours, prompt_bytes, rows_that_fit, sort_uses
from runtime.sampler import Sampler
from runtime.state import MlaState
from runtime.storage.incoming import Phase

TOLERANCE = 2e-4


def quiet(_: str) -> None: ...


def random_ids(engine: Engine, n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, engine.geometry.vocab_size, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompt_pass(engine: Engine, records: object = None) -> PromptPass:
    """Return a pass from an empty text on the decoder's state; of the engine's store unless other records are given."""
    engine.decoder.state.reset()
    engine.store.phase, engine.store.counts = Phase.PROMPT, engine.prompt_counts
    return PromptPass(engine.geometry, engine.weights, engine.prepared.record, records or engine.store, engine.decoder.state)


@pytest.mark.parametrize("prompt", ["0", "1", "2"])
def test_any_split_into_pieces_meets_the_golden_logits(extracted: Path, model: str, device: str, prompt: str) -> None:
    golden = load_file(DATA / model / "golden.safetensors")
    ids, expected = golden[f"{prompt}.ids"].tolist(), torch.from_numpy(golden[f"q8.{prompt}.logits"])
    with Engine(extracted / "manifest.yaml", Options(device=device), on_remark=quiet) as engine, torch.inference_mode():
        for split in ([len(ids)], [1, len(ids) - 1], [len(ids) // 2, len(ids) - len(ids) // 2]):
            runner, pieces = prompt_pass(engine), torch.tensor(ids).split(split)
            last = [runner.run(piece.tolist()).cpu() for piece in pieces]
            for end, logits in zip(np.cumsum(split).tolist(), last, strict=True):
                assert (logits - expected[end - 1]).abs().max() < TOLERANCE
        assert (prompt_pass(engine).score(ids) - expected).abs().max() < TOLERANCE


def test_it_leaves_the_state_that_the_plain_model_leaves(extractions: dict[str, Path], device: str) -> None:
    with Engine(extractions["tiny-k3"], Options(device=device), on_remark=quiet) as engine, torch.inference_mode():
        ids = random_ids(engine, 45)
        tokens = torch.tensor([ids], device=engine.device)
        _, plain = engine.model.forward(tokens, engine.model.initial_state(1), arithmetic=Arithmetic.PROMPT)
        runner = prompt_pass(engine)
        runner.run(ids[:20])
        runner.run(ids[20:])
        found = engine.decoder.state.copied()
    assert found.n_tokens == len(ids)
    for mine, other in zip(found.layers, plain.layers, strict=True):
        pairs = (
            [(mine.latent, other.latent), (mine.k_rot, other.k_rot)]
            if isinstance(mine, MlaState)
            else [(mine.memory, other.memory), (mine.conv, other.conv)]
        )
        for a, b in pairs:
            assert a.shape == b.shape and (a - b).abs().max() < 1e-4


class Scrambled:
    """All records of a tiny model in memory, handed out in an order and in groups drawn from a seed."""

    def __init__(self, engine: Engine, seed: int, most_at_once: int) -> None:
        experts = list(range(engine.geometry.n_experts))
        self._records = {layer: dict(self._copied(engine, layer, experts)) for layer in engine.geometry.moe_layers}
        self._layer, self._most = 0, most_at_once
        self._rng, self.asked = np.random.default_rng(seed), list[list[int]]()

    @staticmethod
    def _copied(engine: Engine, layer: int, experts: list[int]) -> Iterator[tuple[int, Tensor]]:
        for expert, record in engine.store.fetch(layer, experts):
            yield expert, record.clone()

    def address(self, slot: int) -> int:
        return self._records[self._layer][slot].data_ptr()

    def addresses(self, layer: int) -> np.ndarray:
        return np.array([record.data_ptr() for record in self._records[layer].values()])

    def fetch_groups(
        self, layer: int, experts: Sequence[int], *, passing: Collection[int] = (), meanwhile: Callable[[], None] | None = None
    ) -> Iterator[list[tuple[int, int]]]:
        self._layer, left = layer, self._rng.permutation(experts).tolist()
        self.asked.append(list(experts))
        while left:
            n = int(self._rng.integers(1, self._most + 1))
            yield [(expert, expert) for expert in left[:n]]
            left = left[n:]

    def prefetch(self, layer: int, experts: Sequence[int]) -> None: ...


def test_the_order_of_arrival_changes_no_bit(extractions: dict[str, Path], device: str) -> None:
    with Engine(extractions["tiny-k3.1"], Options(device=device), on_remark=quiet) as engine, torch.inference_mode():
        ids = random_ids(engine, 50)
        found = []
        for seed, most_at_once in enumerate((1, 3, 16)):
            runner = prompt_pass(engine, Scrambled(engine, seed, most_at_once))
            found.append((runner.run(ids).cpu(), engine.decoder.state.copied()))
    for logits, state in found[1:]:
        assert torch.equal(logits, found[0][0])
        for a, b in zip(state.layers, found[0][1].layers, strict=True):
            assert torch.equal(a.latent, b.latent) if isinstance(a, MlaState) else torch.equal(a.memory, b.memory)


def test_experts_are_asked_for_once_those_of_most_rows_first(extractions: dict[str, Path]) -> None:
    with Engine(extractions["tiny-k3.1"], Options(device="cpu"), on_remark=quiet) as engine, torch.inference_mode():
        records, chosen = Scrambled(engine, 0, 4), list[np.ndarray]()
        runner = prompt_pass(engine, records)
        runner.on_chosen = lambda layer, ids: chosen.append(ids.copy())
        runner.run(random_ids(engine, 50))
    for asked, ids in zip(records.asked, chosen, strict=True):
        n_rows = np.bincount(ids.ravel(), minlength=engine.geometry.n_experts)
        assert sorted(asked) == np.flatnonzero(n_rows).tolist()
        assert (np.diff(n_rows[asked]) <= 0).all()


@pytest.mark.parametrize("slots", ["1slots", "3slots"])
def test_every_expert_is_read_once_however_small_the_caches(extractions: dict[str, Path], device: str, slots: str) -> None:
    with (
        Engine(extractions["tiny-k3.1"], Options(device=device, vram_cache=slots, host_pool=slots), on_remark=quiet) as engine,
        torch.inference_mode(),
    ):
        ids = random_ids(engine, 60)
        logits, counts = prompt_pass(engine).run(ids).cpu(), engine.prompt_counts
        assert counts.read_bytes == len(counts.needed) * engine.prepared.record.n_bytes
        assert len(counts.needed) > 0.9 * engine.geometry.n_routed_experts
        assert torch.equal(prompt_pass(engine, Scrambled(engine, 1, 5)).run(ids).cpu(), logits)


def test_uses_name_every_pair_once() -> None:
    rng = np.random.default_rng(3)
    chosen = np.stack([rng.permutation(40)[:6] for _ in range(83)])
    chosen[:, 0] = 41
    uses = sort_uses(chosen)
    found = uses.pairs[uses.pairs >= 0]
    assert np.array_equal(np.sort(found), np.arange(chosen.size)) and uses.experts[0] == 41
    assert sorted(uses.experts) == np.unique(chosen).tolist() and uses.ends[0] == 0 and uses.ends[-1] == len(uses.pairs)
    for expert, first, end in zip(uses.experts, uses.ends, uses.ends[1:], strict=False):
        pairs = uses.pairs[first:end][uses.pairs[first:end] >= 0]
        assert np.array_equal(pairs, np.flatnonzero(chosen.ravel() == expert)) and end - first == -(-len(pairs) // TILE_ROWS)


@pytest.mark.parametrize(("places", "runs"), [([5], [[5]]), ([0, 1, 2], [[0, 1, 2]]), ([3, 4, 7, 9, 10], [[3, 4], [7], [9, 10]])])
def test_neighbours_are_taken_together(places: list[int], runs: list[list[int]]) -> None:
    assert [places[run] for run in neighbours(places)] == runs


def test_tables_hold_what_was_sent(device: str) -> None:
    geometry = load_geometry("tiny")
    k, chosen = geometry.n_experts_per_token, np.stack([np.random.default_rng(n).permutation(16)[:4] for n in range(70)])
    tables = ExpertTables(70, geometry, torch.device(device))
    for n_rows in (70, 9):
        uses = sort_uses(chosen[:n_rows])
        tables.begin(uses.pairs)
        spans = list(zip(uses.ends, uses.ends[1:], strict=False))
        for first, end in spans:
            tables.set_address(first, end, (first << 40) + 1)
        for first, end in spans:
            addresses, rows, places = tables.entries(first, end)
            assert (addresses == (first << 40) + 1).all() and np.array_equal(places.cpu(), uses.pairs[first:end])
            assert np.array_equal(rows.cpu(), np.where(uses.pairs[first:end] < 0, -1, uses.pairs[first:end] // k))
            assert rows.data_ptr() % 16 == places.data_ptr() % 16 == 0


def test_decode_goes_on_from_it(extractions: dict[str, Path], device: str) -> None:
    with Engine(extractions["tiny-k3"], Options(device=device), on_remark=quiet) as engine, torch.inference_mode():
        ids = random_ids(engine, 30)
        expected, _ = engine.model.forward(torch.tensor([ids], device=engine.device), engine.model.initial_state(1), arithmetic=Arithmetic.PROMPT)
        prompt_pass(engine).run(ids[:25])
        logits = engine.decoder.step(ids[25:])
    assert (logits - expected[0, 25:]).abs().max() < TOLERANCE


def test_what_is_raised_before_a_layer_ends_the_pass(extractions: dict[str, Path]) -> None:
    def stop(layer: int) -> None:
        if layer == 4:
            raise KeyboardInterrupt

    with Engine(extractions["tiny-k3"], Options(device="cpu"), on_remark=quiet) as engine, torch.inference_mode():
        runner, ids = prompt_pass(engine), random_ids(engine, 12)
        whole = runner.run(ids)
        runner.on_layer, engine.prompt_counts.n_layers = stop, 0
        engine.decoder.state.reset()
        with pytest.raises(KeyboardInterrupt):
            runner.run(ids)
        assert engine.prompt_counts.n_layers == 3
        assert torch.equal(prompt_pass(engine).run(ids), whole)


def test_progress_counts_the_layers_of_all_pieces(extractions: dict[str, Path], device: str) -> None:
    with Engine(extractions["tiny-k3"], Options(device=device, chunk=16), on_remark=quiet) as engine:
        told = list[PromptProgress]()
        engine.on_progress = told.append
        engine.prompt(random_ids(engine, 40))
        n_due = 3 * len(engine.geometry.moe_layers)
        assert [p.n_done for p in told] == list(range(n_due + 1)) and {p.n_due for p in told} == {n_due}
        assert told[0].left_s is None and told[-1].left_s == 0.0 and told[-1].read_bytes == engine.prompt_counts.read_bytes
        assert PromptProgress(1, 4, 2.0, 0).left_s == 6.0
        list(engine.generate(random_ids(engine, 5), n_tokens=2, sampler=Sampler(0.0, 1.0, 0)))
        assert len(told) == n_due + 1 + len(engine.geometry.moe_layers) + 1


def test_a_line_says_how_far_a_prompt_pass_is() -> None:
    assert prompt_line(PromptProgress(0, 92, 0.1, 0)) == "prompt 0 of 92 layers  0%"
    assert prompt_line(PromptProgress(23, 92, 10.0, 42_000_000_000)) == "prompt 23 of 92 layers  25%  4.2GB/s  30 s left"


def test_progress_of_an_exact_pass_goes_by_blocks(extractions: dict[str, Path]) -> None:
    with Engine(extractions["tiny-k3"], Options(device="cpu", is_exact_prefill=True), on_remark=quiet) as engine:
        told, n_layers = list[PromptProgress](), len(engine.geometry.moe_layers)
        engine.on_progress = told.append
        engine.prompt(random_ids(engine, 40))
    assert [p.n_done for p in told] == [0, n_layers, 2 * n_layers, 3 * n_layers]


def test_layers_of_decode_are_no_progress(extractions: dict[str, Path]) -> None:
    with Engine(extractions["tiny-k3.1"], Options(device="cpu", is_long_context=True), on_remark=quiet) as engine:
        told = list[PromptProgress]()
        engine.on_progress = told.append
        list(engine.generate(random_ids(engine, 5), n_tokens=3, sampler=Sampler(0.0, 1.0, 0)))
    assert len(told) == len(engine.geometry.moe_layers) + 1


def test_which_arithmetic_runs_is_said(extractions: dict[str, Path], device: str) -> None:
    for options, text in (
        (Options(device=device), f"prompt arithmetic, .*up to {DEFAULT_CHUNK} tokens at a time"),
        (Options(device=device, chunk=7), "prompt arithmetic, .*up to 7 tokens at a time"),
        (Options(device=device, is_exact_prefill=True), "prompt pass in decode arithmetic; context"),
    ):
        with Engine(extractions["tiny-k3"], options, on_remark=quiet) as engine:
            assert re.search(text, engine.effective()[0]), engine.effective()[0]
            assert engine.prompt_arithmetic in engine.effective()[0]


def test_a_prompt_of_2048_tokens_fits_what_is_left_free_on_a_gpu() -> None:
    for name in ("k3", "k3.1"):
        geometry = load_geometry(name)
        # A quarter of the reserve is for decode's buffers, its caches and the graphs.
        assert prompt_bytes(geometry, 2048, 4096) < 0.75 * 0.9 * GPU_RESERVE_BYTES
        assert rows_that_fit(geometry, 4096, GPU_RESERVE_BYTES) == 2048


@pytest.mark.parametrize("free_bytes", [0, 450_000_000, 700_000_000, 1_500_000_000])
def test_rows_are_as_many_as_memory_has_room_for(free_bytes: int) -> None:
    geometry = load_geometry("k3.1")
    n = rows_that_fit(geometry, 4096, free_bytes)
    assert n % TILE_ROWS == 0 and (n == 0 or prompt_bytes(geometry, n, 4096) <= free_bytes < prompt_bytes(geometry, n + TILE_ROWS, 4096))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_pass_stays_within_the_memory_that_it_states(tmp_path: Path) -> None:
    setting = Setting((EmulatedDrive(tmp_path, None, 1.0),), 16, 16, n_tokens=2048)
    run = Rig(load_geometry("tiny"), torch.device("cuda"), setting.drives, 8).prompt(setting)
    assert run.peak_bytes <= prompt_bytes(load_geometry("tiny"), 2048, 2048)


def test_a_synthetic_prompt_reads_what_it_needs_and_its_bits_do_not_depend_on_the_slots(tmp_path: Path, device: str) -> None:
    drives = (EmulatedDrive(tmp_path, None, 1.0),)
    rig = Rig(load_geometry("tiny"), torch.device(device), drives, 8)
    runs = [rig.prompt(Setting(drives, n, n, n_tokens=35)) for n in (1, 16)]
    # Eight files stand for all experts in turn, and a layer has sixteen: the resident records are the same.
    runs += [rig.resident_prompt(Setting(drives, 1, 1, n_tokens=35), n_records=8, n_at_once=n) for n in (1, 5)]
    assert len({run.digest for run in runs}) == 1
    for run in runs[:2]:
        assert run.counts.read_bytes == len(run.counts.needed) * rig.layout.n_bytes > 0
        assert len(run.layer_s) == len(rig.geometry.moe_layers) - 1
