"""What the planner reaches and what it costs: mean makespan over the ideal for each rule and for the plan, then the whole model's time and memory.

usage: python benchmarks/planner.py

Three drives of 26, 13 and 6 GB/s, 896 experts a layer. The rules are judged on draws of the planner, the plan on 20,000 others, the same in every
run. All of it takes a minute.
"""

import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from layout.makespan import Servers, makespan
from manifests.geometry import Geometry, load_geometry
from prep.placement.plan import CopyPlan, PlanDrive, plan_copies

RATES = (26e9, 13e9, 6e9)
RECORD_BYTES = 17_547_264
CAPACITIES = ((0.6, 0.6, 0.3), (0.4, 0.8, 0.3), (0.8, 0.5, 0.3))
ZIPF = {"uniform": 0.0, "zipf 0.5": 0.5, "zipf 1.0": 1.0}
N_CACHED = 50
FULL = load_geometry("k3.1")
ONE_LAYER = replace(FULL, n_layers=2, full_attention_layers=())


def plan_for(
    geometry: Geometry, capacities: tuple[float, ...], heat: np.ndarray | None, n_misses: float | None, present: list[np.ndarray] | None = None
) -> CopyPlan:
    there = present or [np.zeros((geometry.n_layers, geometry.n_experts), np.bool_)] * 3
    drives = [PlanDrive(tier, rate, n, n, None, there[n]) for n, (tier, rate) in enumerate(zip("ABC", RATES, strict=True))]
    room = [round(share * geometry.n_experts) * len(geometry.moe_layers) - int(held.sum()) for share, held in zip(capacities, there, strict=True)]
    return plan_copies(geometry, RECORD_BYTES, drives, pool_free=room, is_removing=False, heat=heat, n_misses=n_misses)


def draw(weights: np.ndarray, n: int) -> np.ndarray:
    """Return 20,000 draws of n different experts by weight, int [n_draws, n]."""
    rng = np.random.default_rng(77)
    parts = []
    for _ in range(10):
        keys = np.log(weights).astype(np.float32) - np.log(rng.standard_exponential((2000, len(weights)), np.float32))
        parts.append(np.argpartition(-keys, n, axis=1)[:, :n])
    return np.concatenate(parts)


def ratio(plan: CopyPlan, drawn: np.ndarray, is_read: np.ndarray) -> float:
    """Return the plan's mean makespan over all drives busy for the reads of these draws."""
    servers = Servers(RATES, (0, 1, 2))
    seconds = makespan(servers, np.where(is_read, servers.masks(plan.holds)[1][drawn], 0), record_bytes=RECORD_BYTES).seconds
    return float(seconds.mean() / (is_read.sum(axis=1).mean() * RECORD_BYTES / sum(RATES)))


def cases() -> Iterator[str]:
    for n_misses in (16, 9):
        for name, power in ZIPF.items():
            weights = np.random.default_rng(20).permutation(1 / np.arange(1, FULL.n_experts + 1) ** power)
            drawn = draw(weights, n_misses)
            for capacities in CAPACITIES:
                plan = plan_for(ONE_LAYER, capacities, None if power == 0 else np.stack([weights, weights]), n_misses)
                yield f"{n_misses:2d} misses, {name:8s}, {capacities}: {rules(plan)}, plan {ratio(plan, drawn, np.ones_like(drawn, bool)):.3f}"


def cached_cases() -> Iterator[str]:
    weights = np.exp(1.9 * np.random.default_rng(11).standard_normal(FULL.n_experts))
    is_cached = np.zeros(len(weights), np.bool_)
    is_cached[np.argsort(-weights)[:N_CACHED]] = True
    drawn = draw(weights, 16)
    n_misses = float((~is_cached[drawn]).sum(axis=1).mean())
    for capacities in CAPACITIES:
        plan = plan_for(ONE_LAYER, capacities, np.stack([weights, np.where(is_cached, 0, weights)]), n_misses)
        reached = ratio(plan, drawn, ~is_cached[drawn])
        yield f"log-normal 1.9 behind {N_CACHED} cached, {n_misses:.1f} misses, {capacities}: {rules(plan)}, plan {reached:.3f}"


def rules(plan: CopyPlan) -> str:
    return ", ".join(f"{name} {mean:.3f}" for name, mean in plan.alternatives)


def whole_model() -> Iterator[str]:
    rng = np.random.default_rng(0)
    heat = np.array([rng.permutation(1 / np.arange(1, FULL.n_experts + 1) ** 0.5) for _ in range(FULL.n_layers)])
    for name, by_layer in (("all alike", None), ("zipf 0.5, other experts hot in each layer", heat)):
        yield timed(f"whole model, {name}", lambda by_layer=by_layer: plan_for(FULL, CAPACITIES[0], by_layer, None))
    there = [np.zeros((FULL.n_layers, FULL.n_experts), np.bool_) for _ in range(3)]
    there[0][FULL.n_dense_layers :, ::2] = there[1][FULL.n_dense_layers :, 1::2] = True
    yield timed("the same with a base in place, and the freest plan beside it", lambda: plan_for(FULL, CAPACITIES[0], heat, None, there))


def timed(name: str, work: Callable[[], CopyPlan]) -> str:
    wall, cpu = time.perf_counter(), time.process_time()
    plan = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    load = os.getloadavg()[0]
    return f"{name}: {wall:.1f} s, {cpu:.1f} s of processor (load {load:.1f}), peak so far {peak:.0f} MiB, mean {plan.score.mean_ratio:.3f}"


for line in (line for part in (whole_model(), cases(), cached_cases()) for line in part):
    print(line, flush=True)
