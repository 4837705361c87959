"""Which drive shall hold which experts: decided from rates, room, heat and what is there already. Pure; the same input gives the same plan.

A layer waits for its slowest read, so a plan is scored by the expected time of a layer's reads with the model of layout/makespan.py, on drawn reads.
Each layer is placed for itself: simple rules make candidates, the best of them is improved by exchanges.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from manifests.errors import NoSpaceError
from manifests.geometry import Geometry
from prep.placement.room import PlanDrive, keep_within_limits, quotas, share_evenly
from prep.placement.rules import RULES, Filling, keep_within_quotas
from prep.placement.score import Assumptions, PlanScore, ReadModel, TokenRate, predict_tok_per_s, score_holds
from prep.placement.search import Evaluation, LayerProblem, draw_reads, improve

__all__ = [
    "Assumptions", "CopyPlan", "Freest", "PlanDrive", "PlanScore", "TokenRate", "plan_copies", "predict_tok_per_s", "score_holds",
    "with_one_more_copy_set", "with_one_more_drive",
]  # fmt: skip

# Writing a copy of every expert must make reading faster by this share of the ideal, or it is left alone.
_GAIN_PER_COPY_SET = 0.02
# And this much at least, or the layer is left as it is.
_LEAST_GAIN = 0.003
_N_ROUNDS = 60
# Drawn layers in the search: fewer where there are many sets of servers, so many times more where no more layers than that have to be placed.
_N_DRAWS = 4000
_LEAST_DRAWS = 200
_EFFORT_FOR_FEW = 4
_PLANNING = 0
# The name of the start where there is nothing to fill.
_KEPT = "what is there"


@dataclass(frozen=True, slots=True)
class Freest:
    """The plan that regards nothing of what is there, as if all of it could be removed: what it would bring, and how many copies it would make."""

    score: PlanScore
    n_moves: int


# Plans are compared by identity: `==` of an array is no truth value.
@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """What each drive shall hold, bool [n_layers, n_experts], and why.

    rule          that the most layers start from, "what is there" where there is no room for more
    alternatives  each rule and its mean ratio to the ideal, before any exchange
    n_moves       copies to be made
    freest        None where nothing is there, so that it is this plan, or where it was not asked for
    """

    holds: tuple[np.ndarray, ...]
    rule: str
    score: PlanScore
    alternatives: tuple[tuple[str, float], ...]
    n_moves: int
    freest: Freest | None


def plan_copies(
    geometry: Geometry,
    record_bytes: int,
    drives: Sequence[PlanDrive],
    *,
    pool_free: Sequence[int],
    is_removing: bool,
    heat: np.ndarray | None = None,
    links: Sequence[tuple[tuple[int, ...], float]] = (),
    n_misses: float | None = None,
    seed: int = 0,
    is_moving_little: bool = True,
    is_comparing: bool = True,
) -> CopyPlan:
    """Return the plan whose layers are read in the shortest time, on average.

    pool_free         experts that still fit on each pool beside what is there
    is_removing       files that the plan does not name will be removed, so that their room counts; else all files stay, within the drive's limit
    heat              how often each expert is read, float [n_layers, n_experts], by layer in any unit; None for all alike
    links             groups of servers, and the bytes/s that they reach together
    n_misses          experts that a layer reads from drives; None for as many as a token needs
    is_moving_little  a copy is only moved if that saves enough
    is_comparing      the freest plan is made, too; False saves its time

    Raises NoSpaceError if tiers A and B cannot hold every expert, UsageError with more than 8 drives, BadInputError at a rate of zero.
    """
    task = _Task(ReadModel(geometry, record_bytes, drives, links=links, heat=heat, n_misses=n_misses, seed=seed))
    price = _GAIN_PER_COPY_SET / geometry.n_experts if is_moving_little else 0.0
    is_anything_there = bool(task.present.any())
    plan = _plan_free(task, pool_free, is_keeping=is_moving_little, price=price) if is_removing else _plan_pinned(task, pool_free, price)
    if not (is_anything_there and is_comparing):
        return plan
    free = plan if is_removing and not is_moving_little else _plan_free(task, pool_free, is_keeping=False, price=0.0)
    if is_removing and task.total(free, price) < task.total(plan, price):
        plan = free
    return replace(plan, freest=Freest(free.score, free.n_moves))


def _plan_pinned(task: "_Task", pool_free: Sequence[int], price: float) -> CopyPlan:
    """Plan further copies beside the files that are there."""
    kept = keep_within_limits(task.drives, task.present)
    try:
        wanted = task.quotas(kept, pool_free)
    except NoSpaceError as error:
        # Said only where it helps: if there is too little room even so, this raises in its own words.
        _room_if_free(task, pool_free)
        raise NoSpaceError(f"{error}; it fits if files that the plan does not name are removed: --remove-unplanned") from None
    return task.solve(kept, wanted, is_pinned=True, price=price)


def _plan_free(task: "_Task", pool_free: Sequence[int], *, is_keeping: bool, price: float) -> CopyPlan:
    """Plan as if every file that is there could be removed."""
    kept = task.present if is_keeping else np.zeros_like(task.present)
    return task.solve(kept, _room_if_free(task, pool_free), is_pinned=False, price=price)


def _room_if_free(task: "_Task", pool_free: Sequence[int]) -> np.ndarray:
    room = [free + sum(int(drive.present.sum()) for drive in task.drives if drive.pool == pool) for pool, free in enumerate(pool_free)]
    return task.quotas(np.zeros_like(task.present), room)


class _Task:
    """What stays the same whichever way it is planned. `present` has the layers with experts only, bool [n_drives, n_layers, n_experts]."""

    def __init__(self, model: ReadModel) -> None:
        self.model, self.drives = model, model.drives
        self.present = np.array([drive.present[model.geometry.n_dense_layers :] for drive in model.drives])

    def quotas(self, kept: np.ndarray, pool_room: Sequence[int]) -> np.ndarray:
        return quotas(self.drives, kept, pool_room, self.model.record_bytes)

    def total(self, plan: CopyPlan, price: float) -> float:
        return plan.score.mean_ratio + price * plan.n_moves / self.present.shape[1]

    def solve(self, kept: np.ndarray, wanted: np.ndarray, *, is_pinned: bool, price: float) -> CopyPlan:
        """Place every layer. With all experts alike, layers that differ only in their experts' numbers are placed once."""
        present, kept = _codes(self.present), _codes(kept)
        orders = [self._order(layer, present[layer], kept[layer]) for layer in range(len(present))]
        keys = [self._key(layer, present[layer, order], kept[layer, order], wanted[:, layer]) for layer, order in enumerate(orders)]
        effort = _EFFORT_FOR_FEW if len(set(keys)) <= _EFFORT_FOR_FEW else 1
        solved: dict[bytes, _Layer] = {}
        codes = np.zeros_like(present)
        for layer, (order, key) in enumerate(zip(orders, keys, strict=True)):
            if key not in solved:
                problem = self._problem(layer, present[layer, order], kept[layer, order], is_pinned=is_pinned, price=price)
                solved[key] = _solve(problem, kept[layer, order], wanted[:, layer], self.model.rng(_PLANNING, layer, 1), effort=effort)
            codes[layer, order] = solved[key].codes
        return self._plan([solved[key] for key in keys], codes)

    def _order(self, layer: int, present: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """Return a layer's experts as they are; all alike, by what is there and then by lot, so that layers with the same there look the same."""
        if not self.model.is_uniform:
            return np.arange(len(present))
        order = self.model.rng(_PLANNING, layer).permutation(len(present))
        return order[np.lexsort((kept[order], present[order]))]

    def _key(self, layer: int, *parts: np.ndarray) -> bytes:
        """Return what tells layers apart that need a plan of their own."""
        return b"".join(part.tobytes() for part in parts) if self.model.is_uniform else layer.to_bytes(4, "little")

    def _problem(self, layer: int, present: np.ndarray, kept: np.ndarray, *, is_pinned: bool, price: float) -> LayerProblem:
        return LayerProblem(
            servers=self.model.servers,
            is_base=tuple(drive.is_base for drive in self.drives),
            pinned=kept if is_pinned else np.zeros_like(kept),
            present=present,
            weights=self.model.weights[layer],
            n_misses=self.model.n_misses,
            move_price=price,
        )

    def _plan(self, layers: "list[_Layer]", codes: np.ndarray) -> CopyPlan:
        holds = [np.zeros((self.model.geometry.n_layers, self.model.geometry.n_experts), np.bool_) for _ in self.drives]
        for number, held in enumerate(holds):
            held[self.model.geometry.n_dense_layers :] = codes >> number & 1
        n_moves = int(np.bitwise_count(codes & ~_codes(self.present)).sum())
        rule = Counter(layer.rule for layer in layers).most_common(1)[0][0]
        alternatives = tuple((name, float(np.mean([layer.ratios[name] for layer in layers]))) for name in RULES)
        return CopyPlan(tuple(holds), rule, self.model.score(holds), alternatives, n_moves, None)


@dataclass(frozen=True, slots=True)
class _Layer:
    codes: np.ndarray
    rule: str
    ratios: dict[str, float]


def _solve(problem: LayerProblem, kept: np.ndarray, wanted: np.ndarray, rng: np.random.Generator, *, effort: int) -> _Layer:
    """Place one layer: try the rules, improve the best. effort multiplies the draws."""
    # A draw takes the more work the more sets of servers there are.
    n_draws = effort * max(_LEAST_DRAWS, _N_DRAWS * 8 // max(8, 1 << problem.servers.n_servers))
    # Those to make plans with, those to choose among them, and those to prove the choice: each would flatter what it was used for.
    draws, others, more = (draw_reads(problem.weights, problem.n_misses, n, rng) for n in (n_draws, n_draws // 2, n_draws // 2))
    if not problem.pinned.any():
        kept = keep_within_quotas(problem, kept, wanted)
    made, judged = dict[str, np.ndarray](), dict[str, Evaluation]()
    for name, rule in RULES.items():
        filling = Filling(problem, kept, wanted)
        rule(problem, filling, draws, rng)
        made[name], judged[name] = filling.codes, Evaluation(problem, filling.codes, others)
    best = min(made, key=lambda name: judged[name].objective)
    better = improve(problem, made[best], draws, n_rounds=_N_ROUNDS)
    before, after = (Evaluation(problem, codes, more) for codes in (made[best], better))
    # A gain that costs moves must be more than chance.
    least_gain = _LEAST_GAIN if problem.move_price and after.n_moves > before.n_moves else 0.0
    is_better = after.objective < before.objective - least_gain
    start = _KEPT if np.array_equal(made[best], kept) else best
    return _Layer(better if is_better else made[best], start, {name: float(e.times.mean()) for name, e in judged.items()})


def _codes(holds: np.ndarray) -> np.ndarray:
    """Return for each expert the drives that hold it as bits; [n_drives, n_layers, n_experts] to int [n_layers, n_experts]."""
    return np.asarray((holds.astype(np.int64) << np.arange(len(holds))[:, None, None]).sum(axis=0))


def with_one_more_drive(
    geometry: Geometry, drives: Sequence[PlanDrive], pool_free: Sequence[int], *, read_bytes_per_s: float, capacity: int
) -> tuple[list[PlanDrive], list[int]]:
    """Return drives and room with one more drive for further copies, empty, alone on its device, with room for `capacity` experts; it is the last."""
    nothing = np.zeros((geometry.n_layers, geometry.n_experts), np.bool_)
    one_more = PlanDrive("C", read_bytes_per_s, max((d.server for d in drives), default=-1) + 1, len(pool_free), None, nothing)
    return [*drives, one_more], [*pool_free, capacity]


def with_one_more_copy_set(geometry: Geometry, drives: Sequence[PlanDrive], pool_free: Sequence[int]) -> tuple[list[PlanDrive], list[int]]:
    """Return the same drives with room for one more copy of every expert, shared evenly among the file systems that can still use it."""
    holdable = [free + sum(int(d.present.sum()) for d in drives if d.pool == pool) for pool, free in enumerate(pool_free)]
    more = share_evenly(np.maximum(0, geometry.n_routed_experts - np.array(holdable)), geometry.n_routed_experts).tolist()
    larger = [replace(drive, limit=None if drive.limit is None else drive.limit + more[drive.pool]) for drive in drives]
    return larger, [free + n for free, n in zip(pool_free, more, strict=True)]
