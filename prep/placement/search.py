"""One layer's placement made better: what each single change would bring is estimated on drawn reads, and changes are made in pairs.

A pair leaves every drive with as many experts as before: one expert gives up a drive that another one gains, or two experts change places. Of all
pairs the most promising are made together, and kept if the drawn layers then take less time. Pure; times are in units of the ideal, which is all
servers busy all the time.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from layout.makespan import Servers

# What an expert's own draws say is little, so it counts mostly as its peers do, those with the same copies. Drawn this often, it counts as half.
_PEER_DRAWS = 1000.0
_FIRST_STEP = 48
_DRAWS_AT_A_TIME = 4096


class Draws(NamedTuple):
    """Experts read in drawn layers, one entry for each read; both int [n_reads]. `n_draws` layers of `n_experts` experts."""

    draw: np.ndarray
    expert: np.ndarray
    n_draws: int
    n_experts: int


def draw_reads(weights: np.ndarray, n_misses: float, n_draws: int, rng: np.random.Generator) -> Draws:
    """Draw the different experts that a layer reads, one after another by weight.

    weights   float [n_experts], above zero
    n_misses  reads in each draw; a fraction is how often there is one more
    """
    least, most = int(n_misses), min(len(weights), int(np.ceil(n_misses)))
    edges, scale = sorted({max(least, 1) - 1, most - 1}), (1 / weights).astype(np.float32)
    parts = list[np.ndarray]()
    for first in range(0, n_draws, _DRAWS_AT_A_TIME):
        # The first to ring of exponential clocks are drawn by weight without being put back.
        clocks = rng.standard_exponential((min(_DRAWS_AT_A_TIME, n_draws - first), len(weights)), np.float32)
        clocks *= scale
        parts.append(np.argpartition(clocks, edges, axis=1)[:, :most])
    chosen = np.concatenate(parts)
    is_read = np.ones(chosen.shape, np.bool_)
    if most > least:
        is_read[:, -1] = rng.random(n_draws) < n_misses - least
    draw = np.broadcast_to(np.arange(n_draws)[:, None], chosen.shape)
    return Draws(draw[is_read], chosen[is_read], n_draws, len(weights))


def inclusion(weights: np.ndarray, n_misses: float) -> np.ndarray:
    """Return how often each expert is among those drawn, nearly: float [n_experts], their sum is n_misses.

    Source: Rosén's approximation of successive sampling, 1 - exp(-weight * t) with one t for all.
    """
    shares = weights / weights.sum()
    low, high = -50.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if -np.expm1(-shares * np.exp(middle)).sum() < n_misses else (low, middle)
    return np.asarray(-np.expm1(-shares * np.exp(low)))


@dataclass(frozen=True)
class LayerProblem:
    """One layer to be placed. A code is the set of drives that hold an expert, bit i standing for drive i.

    is_base      for each drive, whether its copies count for the base
    pinned       code of each expert that must stay where it is, int [n_experts]
    present      code of each expert's files that are there, int [n_experts]: only other copies are moves
    weights      float [n_experts], above zero
    move_price   what one new copy must save to be worth making, as a share of the ideal
    """

    servers: Servers
    is_base: tuple[bool, ...]
    pinned: np.ndarray
    present: np.ndarray
    weights: np.ndarray
    n_misses: float
    move_price: float

    @property
    def n_drives(self) -> int:
        return len(self.is_base)

    @cached_property
    def base_code(self) -> int:
        return sum(1 << drive for drive, is_base in enumerate(self.is_base) if is_base)

    @cached_property
    def inclusion(self) -> np.ndarray:
        return inclusion(self.weights, self.n_misses)

    @cached_property
    def mask_of(self) -> np.ndarray:
        """The set of servers behind each code, int [2**n_drives]."""
        codes = np.arange(1 << self.n_drives)
        masks = np.zeros_like(codes)
        for drive, server in enumerate(self.servers.server_of):
            masks |= (codes >> drive & 1) << server
        return masks

    @cached_property
    def cost_of_sets(self) -> np.ndarray:
        """What one read that only the set holds adds to the set's time, in units of the ideal; float32 [2**n_servers]."""
        rates = self.servers.joint_rates.copy()
        # The empty set holds nothing and takes no time.
        rates[0] = np.inf
        return np.asarray(rates[-1] / rates / self.n_misses, np.float32)

    @property
    def changes(self) -> "Changes":
        return changes_of(self.servers.server_of, self.base_code)


class Changes:
    """What a single expert can do: gain a drive, lose a drive, or go from one drive to another.

    Changes are numbered by kind: gain i is i, lose i is n + i, from i to j is 2n + n*i + j, for n drives. Code c may do the kinds in `kinds[c]`,
    and has the code `results[c]` then; both padded with -1, int [2**n_drives, most].
    """

    def __init__(self, server_of: tuple[int, ...], base_code: int) -> None:
        n = len(server_of)
        self.n_kinds = 2 * n + n * n
        by_code = [self._of(code, server_of, base_code) for code in range(1 << n)]
        most = max(1, *(len(changes) for changes in by_code))
        self.kinds = np.array([[kind for kind, _ in c] + [-1] * (most - len(c)) for c in by_code])
        self.results = np.array([[result for _, result in c] + [-1] * (most - len(c)) for c in by_code])

    @staticmethod
    def _of(code: int, server_of: tuple[int, ...], base_code: int) -> list[tuple[int, int]]:
        """Return the kinds that a code may do, with the code that it has then: the base stays, and no server gets what it has."""
        n = len(server_of)
        held = [i for i in range(n) if code >> i & 1]
        servers = {server_of[i] for i in held}
        free = [i for i in range(n) if not code >> i & 1]
        gains = [(i, code | 1 << i) for i in free if server_of[i] not in servers]
        losses = [(n + i, code & ~(1 << i)) for i in held]
        places = [(i, j) for i in held for j in free if server_of[j] not in {server_of[other] for other in held if other != i}]
        ways = [(2 * n + n * i + j, code & ~(1 << i) | 1 << j) for i, j in places]
        return [(kind, result) for kind, result in gains + losses + ways if result & base_code]

    @staticmethod
    def pairs(n: int) -> list[tuple[int, int]]:
        """Return the kinds that undo each other's effect on the drives' counts."""
        return [(i, n + i) for i in range(n)] + [(2 * n + n * i + j, 2 * n + n * j + i) for i in range(n) for j in range(i + 1, n)]


changes_of = lru_cache(maxsize=16)(Changes)


class Evaluation:
    """The drawn layers' times under one placement, and what single changes would add to the mean."""

    def __init__(self, problem: LayerProblem, codes: np.ndarray, draws: Draws) -> None:
        self._problem, self._codes, self._draws = problem, codes, draws
        self._used, self._index = np.unique(codes, return_inverse=True)
        n_used = len(self._used)
        self._code_of_read = self._index[draws.expert]
        counts = np.bincount(draws.draw * n_used + self._code_of_read, minlength=draws.n_draws * n_used)
        within = problem.servers.is_within[problem.mask_of[self._used]].astype(np.float32) * problem.cost_of_sets
        self._times_of_sets = counts.reshape(draws.n_draws, n_used).astype(np.float32) @ within
        self.times = self._times_of_sets.max(axis=1)

    @property
    def n_moves(self) -> int:
        return int(np.bitwise_count(self._codes & ~self._problem.present).sum())

    @property
    def objective(self) -> float:
        return float(self.times.mean(dtype=np.float64)) + self._problem.move_price * self.n_moves

    def deltas(self) -> np.ndarray:
        """Return what each kind of change would add to the objective if one expert alone did it; inf where it cannot. float [n_kinds, n_experts]."""
        problem, changes, draws = self._problem, self._problem.changes, self._draws
        kinds, results = changes.kinds[self._used], changes.results[self._used]
        is_possible = kinds >= 0
        number = np.full(kinds.shape, 0)
        number[is_possible] = np.arange(1, is_possible.sum() + 1)
        sources, _ = np.nonzero(is_possible)
        gains = self._gains(problem.mask_of[self._used[sources]], problem.mask_of[results[is_possible]])
        n_experts, n_used = draws.n_experts, len(self._used)
        n_reads = np.bincount(draws.expert, minlength=n_experts)
        n_code_reads = np.bincount(self._index, weights=n_reads, minlength=n_used)
        out = np.full((changes.n_kinds, n_experts), np.inf)
        flat, row = gains.ravel(), draws.draw * gains.shape[1]
        for slot in range(kinds.shape[1]):
            added = flat[row + number[self._code_of_read, slot]]
            by_expert = np.bincount(draws.expert, weights=added, minlength=n_experts)
            peers = np.bincount(self._index, weights=by_expert, minlength=n_used) / np.maximum(n_code_reads, 1)
            mean = (by_expert + _PEER_DRAWS * peers[self._index]) / (n_reads + _PEER_DRAWS)
            kind = kinds[self._index, slot]
            can = np.flatnonzero(kind >= 0)
            out[kind[can], can] = problem.inclusion[can] * mean[can] + self._price(can, results[self._index[can], slot])
        return out

    def _gains(self, sources: np.ndarray, results: np.ndarray) -> np.ndarray:
        """Return what a draw's time gains if one of its reads goes from one mask to another; float32 [n_draws, 1 + n], the first is 0."""
        problem = self._problem
        is_within, n_draws = problem.servers.is_within, self._draws.n_draws
        shift = (is_within[results].astype(np.float32) - is_within[sources].astype(np.float32)) * problem.cost_of_sets
        best = np.zeros((n_draws, len(sources) + 1), np.float32)
        cell = np.empty((n_draws, len(sources)), np.float32)
        # A set that is nowhere near the longest time in any draw cannot become the longest by one read.
        is_near = (self._times_of_sets + problem.cost_of_sets >= self.times[:, None]).any(axis=0)
        for number in np.flatnonzero(is_near):
            np.add(self._times_of_sets[:, number, None], shift[None, :, number], out=cell)
            np.maximum(best[:, 1:], cell, out=best[:, 1:])
        best[:, 1:] -= self.times[:, None]
        return best

    def _price(self, experts: np.ndarray, results: np.ndarray) -> np.ndarray:
        """Return what the new copies cost; inf where a pinned copy would go."""
        problem = self._problem
        pinned, present = problem.pinned[experts], problem.present[experts]
        more = np.bitwise_count(results & ~present).astype(np.int64) - np.bitwise_count(self._codes[experts] & ~present)
        return np.where(pinned & ~results, np.inf, problem.move_price * more)


def improve(problem: LayerProblem, codes: np.ndarray, draws: Draws, *, n_rounds: int) -> np.ndarray:
    """Return codes that are no worse on these draws, after at most n_rounds rounds of pairs."""
    now = Evaluation(problem, codes, draws)
    pairs, step = None, _FIRST_STEP
    for _ in range(n_rounds):
        if pairs is None:
            pairs = _promising_pairs(problem, now.deltas(), _FIRST_STEP * 4)
        if not pairs:
            break
        changed = _changed(problem, codes, pairs[:step])
        then = Evaluation(problem, changed, draws)
        if then.objective < now.objective - 1e-9:
            codes, now, pairs = changed, then, None
            step = min(step * 2, _FIRST_STEP * 4)
        elif step == 1:
            break
        else:
            step = min(step, len(pairs)) // 3 or 1
    return codes


def _promising_pairs(problem: LayerProblem, deltas: np.ndarray, most: int) -> list[tuple[int, int, int, int]]:
    """Return up to `most` pairs (expert, kind, expert, kind) that lower the objective by estimate, the best first, no expert twice."""
    found = []
    for one, other in Changes.pairs(problem.n_drives):
        first, second = _best(deltas[one], most), _best(deltas[other], most)
        n = min(len(first), len(second))
        sums = deltas[one, first[:n]] + deltas[other, second[:n]]
        found += [(s, a, one, b, other) for s, a, b in zip(sums.tolist(), first.tolist(), second.tolist(), strict=False) if s < -1e-9]
    taken, pairs = set[int](), list[tuple[int, int, int, int]]()
    for _, a, one, b, other in sorted(found):
        if a != b and a not in taken and b not in taken:
            taken |= {a, b}
            pairs.append((a, one, b, other))
    return pairs[:most]


def _best(values: np.ndarray, most: int) -> np.ndarray:
    """Return the indices of the smallest finite values, rising."""
    order = np.argsort(values, kind="stable")[:most]
    return order[np.isfinite(values[order])]


def _changed(problem: LayerProblem, codes: np.ndarray, pairs: list[tuple[int, int, int, int]]) -> np.ndarray:
    changes, codes = problem.changes, codes.copy()
    for a, one, b, other in pairs:
        for expert, kind in ((a, one), (b, other)):
            code = codes[expert]
            codes[expert] = changes.results[code, np.flatnonzero(changes.kinds[code] == kind)[0]]
    return codes
