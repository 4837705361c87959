"""The tables by which the grouped expert product finds its work, made on the device and on the host."""

import numpy as np
import pytest
import torch
from conftest import CUDA
from interpreted import accept_numpy_2_4, run_interpreted

from runtime.kernels.groups import Groups, group_resident, groups_of
from runtime.kernels.launch import IS_INTERPRETED
from runtime.kernels.rows import TILE_ROWS

N_EXPERTS, K = 23, 5
N_ROWS = (1, 2, 3, 5, 8, 13, 16)

if IS_INTERPRETED:
    accept_numpy_2_4()


def problem(n_rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return experts of each row, rising, and the address of each expert, 0 for two in five of them."""
    rng = np.random.default_rng((seed, n_rows))
    ids = np.array([np.sort(rng.permutation(N_EXPERTS)[:K]) for _ in range(n_rows)])
    return ids, rng.integers(1, 1 << 48, N_EXPERTS) * (rng.random(N_EXPERTS) < 0.6)


def filled(n: int, device: str) -> Groups:
    """Return tables that hold nonsense."""
    groups = Groups.empty(n, torch.device(device))
    for table in groups:
        table.fill_(12345)
    return groups


def expected_group(ids: np.ndarray, expert: int) -> tuple[list[int], list[int]]:
    rows, places = [-1] * TILE_ROWS, [-1] * TILE_ROWS
    for row, chosen in enumerate(ids.tolist()):
        if expert in chosen:
            rows[row], places[row] = row, row * K + chosen.index(expert)
    return rows, places


@pytest.mark.parametrize("n_rows", N_ROWS)
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_each_expert_on_the_device_has_one_group_with_all_its_rows(n_rows: int, device: str) -> None:
    ids, known = problem(n_rows)
    groups = filled(n_rows * K, device)
    group_resident(torch.from_numpy(ids).to(device), torch.from_numpy(known).to(device), groups)
    led = {}
    for pair, expert in enumerate(ids.ravel().tolist()):
        rows, places = groups.rows[pair].tolist(), groups.places[pair].tolist()
        if groups.addresses[pair] == 0:
            assert rows == places == [-1] * TILE_ROWS
            continue
        assert expert not in led and int(groups.addresses[pair]) == known[expert]
        assert (rows, places) == expected_group(ids, expert)
        led[expert] = pair
    assert set(led) == {expert for expert in ids.ravel().tolist() if known[expert]}


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.skipif(not IS_INTERPRETED, reason="no interpreter")), CUDA])
def test_where_kernels_run_one_makes_the_groups(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A dozen small launches give the same tables, eighty microseconds later: nothing else would tell.
    monkeypatch.setattr("runtime.kernels.groups._group_kernel", {})
    ids, known = problem(2)
    with pytest.raises(KeyError):
        group_resident(torch.from_numpy(ids).to(device), torch.from_numpy(known).to(device), filled(2 * K, device))


@pytest.mark.parametrize("n_rows", N_ROWS)
def test_groups_made_on_the_host_are_those_of_the_device(n_rows: int) -> None:
    ids, _ = problem(n_rows, seed=1)
    experts = np.unique(ids).tolist()[::-1]
    groups = filled(len(experts), "cpu")
    groups_of(ids, experts, [100 + expert for expert in experts], out=groups.arrays())
    for n, expert in enumerate(experts):
        assert int(groups.addresses[n]) == 100 + expert
        assert (groups.rows[n].tolist(), groups.places[n].tolist()) == expected_group(ids, expert)


@pytest.mark.skipif(IS_INTERPRETED, reason="is what runs this file under the interpreter")
def test_the_kernel_under_the_interpreter() -> None:
    run_interpreted(__file__)
