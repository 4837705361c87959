"""The simple rules by which one layer may be placed. Which of them is best depends on how unevenly experts are read, so all are tried.

A rule starts from the copies that are kept, completes the base, and fills each drive up to its quota. An expert comes to a server once.
"""

from collections.abc import Callable, Iterable

import numpy as np

from prep.placement.search import Draws, Evaluation, LayerProblem

_GREEDY_ROUNDS = 12
Rule = Callable[[LayerProblem, "Filling", Draws, np.random.Generator], None]


class Filling:
    """A layer being filled: what each drive holds, bool [n_drives, n_experts], and how many more it may take."""

    def __init__(self, problem: LayerProblem, kept: np.ndarray, quotas: np.ndarray) -> None:
        self._problem = problem
        self.holds: np.ndarray = np.equal(kept >> np.arange(problem.n_drives)[:, None] & 1, 1)
        self.left = quotas - self.holds.sum(axis=1)
        assert (self.left >= 0).all()

    @property
    def codes(self) -> np.ndarray:
        return np.asarray((self.holds << np.arange(self._problem.n_drives)[:, None]).sum(axis=0))

    @property
    def lacks_base(self) -> np.ndarray:
        """Whether no drive of the base holds the expert, bool [n_experts]."""
        return np.asarray(~self.holds[np.flatnonzero(self._problem.is_base)].any(axis=0))

    def complete_base(self, order: np.ndarray, shares: np.ndarray) -> None:
        """Give each expert that the base lacks, in this order, to the drive that it keeps busy for the shortest time.

        shares  of all reads, float [n_experts]: an expert's weight in the time that its server takes
        """
        base, server_of, rates = np.flatnonzero(self._problem.is_base), self._problem.servers.server_of, self._problem.servers.rates
        load, left = self._load(shares).tolist(), self.left.tolist()
        masks = self._problem.mask_of[self.codes].tolist()
        for expert in order[self.lacks_base[order]].tolist():
            share, mask = float(shares[expert]), masks[expert]
            # A server that has the expert on a drive that is not of the base reads it no sooner for a second copy.
            drive = min(
                (d for d in base.tolist() if left[d]),
                key=lambda d: (mask >> server_of[d] & 1, (load[server_of[d]] + share) / rates[server_of[d]], -left[d]),
            )
            self.holds[drive, expert] = True
            left[drive] -= 1
            load[server_of[drive]] += share
        self.left = np.array(left)

    def complete_base_from(self, drives: Iterable[int], order: np.ndarray) -> None:
        """Give the experts that the base lacks, in this order, to the first drive that may take one."""
        for drive in drives:
            if self._problem.is_base[drive]:
                lacking = order[self.lacks_base[order]][: int(self.left[drive])]
                self.holds[drive, lacking] = True
                self.left[drive] -= len(lacking)

    def _load(self, shares: np.ndarray) -> np.ndarray:
        """Return the reads of each server if what is there is read from its holders in proportion to their rates; float [n_servers]."""
        servers = self._problem.servers
        masks = self._problem.mask_of[self.codes]
        rates = (masks >> np.arange(servers.n_servers)[:, None] & 1) * np.array(servers.rates)[:, None]
        return np.asarray((rates / np.maximum(rates.sum(axis=0), 1e-300) * shares).sum(axis=1))

    def free_for(self, drive: int) -> np.ndarray:
        """Return which experts the drive may still get: those that its server does not have; bool [n_experts]."""
        server_of = self._problem.servers.server_of
        return np.asarray(~self.holds[[d for d, server in enumerate(server_of) if server == server_of[drive]]].any(axis=0))

    def add(self, drive: int, order: np.ndarray, most: int | None = None) -> None:
        """Give the drive further experts in this order, up to its quota."""
        n = int(self.left[drive]) if most is None else min(most, int(self.left[drive]))
        chosen = order[self.free_for(drive)[order]][:n]
        self.holds[drive, chosen] = True
        self.left[drive] -= len(chosen)

    def drives(self) -> Iterable[int]:
        """Return the drives in the order in which they are filled: those of the base first."""
        return sorted(range(self._problem.n_drives), key=lambda drive: not self._problem.is_base[drive])


def fill_at_random(problem: LayerProblem, filling: Filling, draws: Draws, rng: np.random.Generator) -> None:
    n = len(problem.weights)
    filling.complete_base(rng.permutation(n), np.full(n, 1 / n))
    for drive in filling.drives():
        filling.add(drive, rng.permutation(n))


def fill_hottest_to_fastest(problem: LayerProblem, filling: Filling, draws: Draws, rng: np.random.Generator) -> None:
    order = hottest_first(problem, rng)
    drives = sorted(filling.drives(), key=lambda drive: -problem.servers.rates[problem.servers.server_of[drive]])
    filling.complete_base_from(drives, order)
    for drive in drives:
        filling.add(drive, order)


def fill_by_load(problem: LayerProblem, filling: Filling, draws: Draws, rng: np.random.Generator) -> None:
    """The base so that load is as the rates; further copies first of what only slow drives hold, hottest first."""
    order = hottest_first(problem, rng)
    filling.complete_base(order, problem.inclusion / problem.n_misses)
    for drive in filling.drives():
        if not problem.is_base[drive]:
            rates = problem.servers.joint_rates[problem.mask_of[filling.codes]]
            order = order[np.argsort(rates[order], kind="stable")]
        filling.add(drive, order)


def fill_where_it_binds(problem: LayerProblem, filling: Filling, draws: Draws, rng: np.random.Generator) -> None:
    """The base so that load is as the rates; further copies, a part at a time, where they relieve the drives that are waited for."""
    order = hottest_first(problem, rng)
    filling.complete_base(order, problem.inclusion / problem.n_misses)
    for n_left in range(_GREEDY_ROUNDS, 0, -1):
        if not filling.left.any():
            break
        deltas = Evaluation(problem, filling.codes, draws).deltas()
        for drive in filling.drives():
            filling.add(drive, order[np.argsort(deltas[drive, order], kind="stable")], -(-int(filling.left[drive]) // n_left))


RULES: dict[str, Rule] = {
    "random": fill_at_random,
    "hottest to fastest": fill_hottest_to_fastest,
    "water-fill": fill_by_load,
    "bottleneck greedy": fill_where_it_binds,
}


def hottest_first(problem: LayerProblem, rng: np.random.Generator) -> np.ndarray:
    """Return the experts by falling weight, equals by lot."""
    return np.lexsort((rng.random(len(problem.weights)), -problem.weights))


def keep_within_quotas(problem: LayerProblem, present: np.ndarray, quotas: np.ndarray) -> np.ndarray:
    """Return the code of what stays of the present files: no drive above its quota, and room left for all that the base lacks.

    What has other copies goes first, the coldest of them first.
    """
    bits = np.arange(problem.n_drives)[:, None]
    holds = np.asarray(present >> bits & 1 == 1)
    base = np.flatnonzero(problem.is_base)
    coldest_first = np.argsort(problem.weights, kind="stable")
    for drive in range(problem.n_drives):
        n_copies = holds[base].sum(axis=0)[coldest_first] if problem.is_base[drive] else np.zeros(len(coldest_first))
        here = coldest_first[np.argsort(n_copies <= 1, kind="stable")]
        here = here[holds[drive, here]]
        holds[drive, here[: max(0, len(here) - int(quotas[drive]))]] = False
    n_short = int((~holds[base].any(axis=0)).sum() - (quotas[base] - holds[base].sum(axis=1)).sum())
    for drive in base.tolist():
        twice = coldest_first[(holds[drive] & (holds[base].sum(axis=0) > 1))[coldest_first]][: max(0, n_short)]
        holds[drive, twice] = False
        n_short -= len(twice)
    return np.asarray((holds << bits).sum(axis=0))
