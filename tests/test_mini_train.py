"""Training the small model: values in the loop are those of the exported bytes, batched experts are the runtime's, and the whole way to an answer."""

import json
import tarfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import succeed
from inside import ran
from torch import Tensor

from layout.checkpoint import open_checkpoint
from layout.config import K31
from layout.mxfp4 import decode_mxfp4
from layout.record import record_layout
from manifests.geometry import Geometry, load_geometry
from prep.tiny import make_checkpoint
from runtime.engine import open_checkpoint_model
from runtime.kernels.expert import expert_forward
from runtime.kernels.rows import Arithmetic
from tools.mini.experts import BatchedExperts, Matrices, sorted_into_blocks
from tools.mini.export import GEOMETRY, export
from tools.mini.rounding import as_bfloat16, as_mxfp4, packed, quantise_mxfp4
from tools.mini.train import Trainer, learning_rate, mean_loss, train
from tools.mini.weights import Parameters, initial_parameters, load_parameters, model_of, on_device, save_parameters


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Rounding


def test_mxfp4_takes_the_nearest_value_at_the_better_of_two_scales() -> None:
    x = torch.zeros(2, 32)
    x[0, :8] = torch.tensor([6, -3.6, 0.2, 0.3, -0.8, 2.4, 2.6, 5.1])
    x[1, :3] = torch.tensor([7.9, 0.5, -0.5])
    expected = torch.zeros(2, 32)
    expected[0, :8] = torch.tensor([6, -4, 0, 0.5, -1, 2, 3, 6])
    # At the scale of the first row 7.9 would have to become 6.
    expected[1, :3] = torch.tensor([8, 0, 0])
    assert torch.equal(as_mxfp4(x), expected)


@pytest.mark.parametrize("size", [1e-30, 0.1, 1e20])
def test_what_training_sees_is_what_the_bytes_say(size: float) -> None:
    x = normal(3, 5, 96) * size
    x[0, 0] = 0
    codes, scales = packed(*quantise_mxfp4(x))
    assert codes.dtype == scales.dtype == torch.uint8 and codes.shape == (3, 5, 48) and scales.shape == (3, 5, 3)
    for values, code, scale in zip(as_mxfp4(x), codes, scales, strict=True):
        assert np.array_equal(values.numpy(), decode_mxfp4(code.numpy(), scale.numpy()))


def test_no_other_code_is_nearer() -> None:
    x = normal(64, 32)
    codes, exponents = quantise_mxfp4(x)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * 2.0 ** exponents.unsqueeze(-1)
    nearest = (x.abs().unsqueeze(-1) - grid).abs().amin(-1)
    assert torch.equal((as_mxfp4(x).abs() - x.abs()).abs(), nearest)


def test_rounding_again_changes_nothing() -> None:
    x = as_mxfp4(normal(8, 64))
    assert torch.equal(as_mxfp4(x), x)


@pytest.mark.parametrize("round_", [as_mxfp4, as_bfloat16])
def test_the_gradient_passes_straight_through(round_: object) -> None:
    x = normal(4, 32).requires_grad_()
    weights = normal(4, 32, seed=1)
    (round_(x) * weights).sum().backward()
    assert torch.equal(x.grad, weights)


# Experts


def random_matrices(g: Geometry) -> Matrices:
    shape = (g.n_experts, g.expert_intermediate_size, g.latent_size)
    return Matrices(*(as_mxfp4(x) for x in (normal(*shape, seed=1), normal(shape[0], shape[2], shape[1], seed=2), normal(*shape, seed=3))))


def record_of(matrices: Matrices, expert: int) -> Tensor:
    return torch.cat([part.flatten() for each in matrices for part in packed(*quantise_mxfp4(each[expert]))])


@pytest.mark.parametrize("skew", ["even", "one expert", "one each"])
def test_batched_experts_are_the_runtimes(skew: str) -> None:
    g = load_geometry("tiny")
    matrices, z = random_matrices(g), normal(50, g.latent_size)
    if skew == "even":
        ids = torch.stack([torch.randperm(g.n_experts, generator=torch.Generator().manual_seed(n))[:4].sort().values for n in range(50)])
    else:
        ids = torch.full((50, 1), 7) if skew == "one expert" else (torch.arange(50) % g.n_experts).unsqueeze(1)
    experts = BatchedExperts(g, {3: matrices})
    found = experts.run(3, z, ids, False)
    assert torch.equal(experts.loads[3], torch.bincount(ids.flatten(), minlength=g.n_experts))
    for expert in ids.unique().tolist():
        rows, ranks = (ids == expert).nonzero(as_tuple=True)
        sizes = {"situ_beta": g.situ_beta, "situ_linear_beta": g.situ_linear_beta}
        wanted = expert_forward(record_of(matrices, expert), record_layout(g), z[rows], **sizes, is_tiled=False)
        torch.testing.assert_close(found[rows, ranks], wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_a_block_belongs_to_one_expert_and_no_place_is_used_twice() -> None:
    ids = torch.tensor([2, 0, 2, 2, 3, 2, 2, 0])
    loads, places, owners = sorted_into_blocks(ids, n_experts=5, n_block_rows=4)
    assert loads.tolist() == [2, 0, 5, 1, 0]
    assert len(set(places.tolist())) == 8 and owners.shape == (7,)
    assert torch.equal(owners[places // 4], ids)


# Training


def few_layers() -> Geometry:
    return replace(load_geometry("tiny"), n_layers=4, full_attention_layers=(3,), n_experts=8, n_experts_per_token=3, residual_block_size=2)


@pytest.fixture
def geometry_file(tmp_path: Path) -> Path:
    path = tmp_path / "geometry.yaml"
    path.write_text(yaml.safe_dump(few_layers().to_dict()))
    return path


@pytest.fixture
def parameters() -> Iterator[Parameters]:
    yield on_device(initial_parameters(few_layers(), seed=1), torch.device("cpu"))


def rows(n_rows: int, n_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 480, (n_rows, n_tokens + 1))


def test_a_step_reaches_every_trained_parameter_with_a_finite_gradient(parameters: Parameters) -> None:
    before = {name: tensor.detach().clone() for name, tensor in parameters.all.items()}
    Trainer(parameters, weight_decay=0.0, bias_rate=0.5).step(rows(2, 40), 1e-3)
    for name, tensor in parameters.trained.items():
        assert tensor.grad is not None and tensor.grad.isfinite().all() and tensor.grad.any(), name
        assert not torch.equal(tensor, before[name]), name
    still = {name for name in before if name not in parameters.trained}
    assert {name for name in still if torch.equal(parameters.all[name], before[name])} == {name for name in still if "correction_bias" not in name}


def test_steps_on_one_batch_lower_its_loss(parameters: Parameters) -> None:
    trainer, batch = Trainer(parameters, weight_decay=0.0, bias_rate=0.5), rows(2, 40)
    before = mean_loss(parameters, batch, is_rounded=True)
    for _ in range(8):
        trainer.step(batch, 3e-3)
    assert mean_loss(parameters, batch, is_rounded=True) < before - 0.5


def test_a_bias_moves_against_its_experts_load(parameters: Parameters) -> None:
    trainer, batch = Trainer(parameters, weight_decay=0.0, bias_rate=0.5), rows(2, 40)
    model, experts = model_of(parameters, is_rounded=True)
    model.forward(torch.from_numpy(batch[:, :-1]), model.initial_state(2), arithmetic=Arithmetic.PROMPT)
    trainer.step(batch, 1e-2)
    for layer, load in experts.loads.items():
        assert torch.equal(parameters.biases[layer], torch.sign(load.float().mean() - load) * 5e-3)


def test_padding_has_no_part_in_the_loss(parameters: Parameters) -> None:
    batch = rows(1, 20)
    longer = np.concatenate([batch, np.full((1, 5), -1)], axis=1)
    assert abs(mean_loss(parameters, longer, is_rounded=True) - mean_loss(parameters, batch, is_rounded=True)) < 1e-5


def test_the_rate_rises_then_falls_to_zero() -> None:
    rates = [learning_rate(1.0, step=step, share=step / 1000, n_warm_up=100) for step in range(1001)]
    assert max(rates) == rates[99] and rates[0] < 0.02 and rates[1000] == 0
    assert all(a > b for a, b in pairwise(rates[99:]))


def test_the_checkpoint_says_what_training_saw(parameters: Parameters, tmp_path: Path) -> None:
    Trainer(parameters, weight_decay=0.1, bias_rate=0.5).step(rows(2, 40), 1e-2)
    export(parameters, tmp_path / "checkpoint")
    ids = torch.from_numpy(rows(1, 30, seed=1)[:, :-1])
    exported = open_checkpoint_model(open_checkpoint(tmp_path / "checkpoint"), torch.device("cpu"))
    with torch.no_grad():
        found, _ = exported.forward(ids, exported.initial_state(1), arithmetic=Arithmetic.PROMPT)
        trained, _ = model_of(parameters, is_rounded=True)[0].forward(ids, exported.initial_state(1), arithmetic=Arithmetic.PROMPT)
        plain, _ = model_of(parameters, is_rounded=False)[0].forward(ids, exported.initial_state(1), arithmetic=Arithmetic.PROMPT)
    assert (found - trained).abs().max() < 2e-5
    assert (found - plain).abs().max() > 1e-3


def arguments(out: Path, geometry: Path, **others: object) -> Namespace:
    return Namespace(
        **{
            "out": out, "geometry": str(geometry), "resume": None, "seed": 1, "device": "cpu", "graph": False, "rows": 1, "tokens": 700, "lr": 1e-2, "warm_up": 1,
            "weight_decay": 0.05, "bias_rate": 0.5, "processes": 0, "steps": 2, "minutes": 0.0, "report_every": 1, "held_out_rows": 1, "test_every_s": 1e9,
        } | others
    )  # fmt: skip


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    assert lines[-1]["held_out_rounded"].keys() == lines[-1]["held_out_float32"].keys() == {"fact", "story", "list", "copy", "tool"}
    return [line["loss"] for line in lines if "loss" in line]


def test_a_run_is_extracted_and_generates_and_another_one_repeats_it_or_goes_on(tmp_path: Path, geometry_file: Path) -> None:
    for name in ("first", "again"):
        train(arguments(tmp_path / name, geometry_file))
    first = losses(tmp_path / "first")
    assert len(first) == 2 and losses(tmp_path / "again") == first
    train(arguments(tmp_path / "on", geometry_file, resume=tmp_path / "first", steps=1))
    assert losses(tmp_path / "on")[0] < first[0]
    with tarfile.open(tmp_path / "first" / "checkpoint.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    succeed("kprep", "extract", tmp_path / "checkpoint", tmp_path / "model")
    said = json.loads(ran("generate", "-m", tmp_path / "model", "-p", "The capital of France is", "-n", "3", "--json").out)
    assert len(said["ids"]) in (1, 2, 3)


def test_saved_parameters_come_back_and_other_shapes_are_refused(parameters: Parameters, tmp_path: Path) -> None:
    save_parameters(parameters, tmp_path)
    found = load_parameters(few_layers(), tmp_path)
    assert all(torch.equal(found.all[name], tensor) for name, tensor in parameters.all.items())
    with pytest.raises(ValueError, match="do not fit the geometry"):
        load_parameters(load_geometry("tiny"), tmp_path)


def test_the_geometry_that_ships_is_the_real_ones_kind_and_its_checkpoint_stays_below_ten_megabytes(tmp_path: Path) -> None:
    g = load_geometry(str(GEOMETRY))
    assert g.full_attention_layers == (3, 7, g.n_layers - 1) and g.n_layers >= 10 and g.n_experts >= 64 and g.indexer is not None
    make_checkpoint(tmp_path / "checkpoint", g, architecture=K31, seed=0, is_sparse=True)
    assert sum(path.stat().st_size for path in (tmp_path / "checkpoint").iterdir()) < 10_000_000
