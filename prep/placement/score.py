"""How long a layer's reads take under a plan, on drawn reads, and what rate of tokens that makes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layout.makespan import MOST_SERVERS, Servers, assign, makespan
from manifests.errors import BadInputError, UsageError
from manifests.geometry import Geometry
from prep.placement.room import PlanDrive
from prep.placement.search import Draws, draw_reads

N_CHUNKS = 3
# Drawn layers for a score, over all layers and in each.
_N_DRAWS = 20_000
_LEAST_DRAWS = 300
# No plan is made with draws under this key.
_SCORING = 1
# An expert that was never read is as likely as this share of the mean.
_LEAST_WEIGHT = 1e-6


@dataclass(frozen=True, slots=True)
class PlanScore:
    """How long a layer's reads take under a plan. Drives are numbered as they were given.

    mean_s, p95_s  of the shortest time that the copies allow, over all layers and draws
    assigned_s     mean with the runtime's rule of assignment at exact rates, in whole chunks
    ideal_s        all drives busy all the time
    binding        the drives that are waited for most often, of those from which anything is read, and binding_share how often
    read_share     of all bytes, by drive
    last_share     of the layers in which the drive ends last
    """

    mean_s: float
    p95_s: float
    assigned_s: float
    ideal_s: float
    binding: tuple[int, ...]
    binding_share: float
    read_share: tuple[float, ...]
    last_share: tuple[float, ...]

    @property
    def mean_ratio(self) -> float:
        return self.mean_s / self.ideal_s

    @property
    def p95_ratio(self) -> float:
        return self.p95_s / self.ideal_s


class ReadModel:
    """What layers read, and from what: drives as servers, and each expert's weight, float [n layers with experts, n_experts].

    Raises UsageError with more than 8 drives, BadInputError at a rate of zero.
    """

    def __init__(
        self,
        geometry: Geometry,
        record_bytes: int,
        drives: Sequence[PlanDrive],
        *,
        links: Sequence[tuple[tuple[int, ...], float]] = (),
        heat: np.ndarray | None = None,
        n_misses: float | None = None,
        seed: int = 0,
    ) -> None:
        self.geometry, self.record_bytes, self.drives = geometry, record_bytes, tuple(drives)
        self.servers = _servers(drives, links)
        self.n_misses = min(float(geometry.n_experts), float(geometry.n_experts_per_token) if n_misses is None else n_misses)
        assert self.n_misses > 0
        self.is_uniform = heat is None
        self.weights = _weights(np.ones((geometry.n_layers, geometry.n_experts)) if heat is None else heat)[geometry.n_dense_layers :]
        self._seed = seed

    def rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, *key])

    def score(self, holds: Sequence[np.ndarray]) -> PlanScore:
        """Score what drives hold on draws that no plan was made with."""
        dense, n_layers = self.geometry.n_dense_layers, len(self.weights)
        masks = self.servers.masks(holds)[dense:].astype(np.int64)
        n_draws = max(_LEAST_DRAWS, -(-_N_DRAWS // n_layers))
        drawn, heat = list[np.ndarray](), np.zeros(len(self.drives))
        for layer in range(n_layers):
            draws = draw_reads(self.weights[layer], self.n_misses, n_draws, self.rng(_SCORING, layer))
            drawn.append(_as_table(draws, masks[layer]))
            heat += [held[dense + layer, draws.expert].sum() for held in holds]
        return self._scored(np.concatenate(drawn), heat)

    def _scored(self, masks: np.ndarray, heat: np.ndarray) -> PlanScore:
        """Score drawn masks; heat is how often what a drive holds was drawn, by which drives of one server share its reads."""
        times = makespan(self.servers, masks, record_bytes=self.record_bytes)
        assigned = assign(self.servers, masks, record_bytes=self.record_bytes, n_chunks=N_CHUNKS)
        server_of = np.array(self.servers.server_of)
        of_server = np.bincount(server_of, weights=heat, minlength=self.servers.n_servers)
        part = heat / np.maximum(of_server[server_of], 1)
        sets = np.bincount(times.bottleneck, minlength=1 << self.servers.n_servers)
        binding = int(sets.argmax())
        return PlanScore(
            mean_s=float(times.seconds.mean()),
            p95_s=float(np.quantile(times.seconds, 0.95)),
            assigned_s=float(assigned.seconds.mean()),
            ideal_s=self.n_misses * self.record_bytes / float(self.servers.joint_rates[-1]),
            binding=tuple(drive for drive, server in enumerate(server_of.tolist()) if binding >> server & 1 and heat[drive]),
            binding_share=float(sets[binding] / len(masks)),
            read_share=tuple((assigned.read_share[server_of] * part).tolist()),
            last_share=tuple((assigned.last_share[server_of] * part).tolist()),
        )


def _as_table(draws: Draws, masks: np.ndarray) -> np.ndarray:
    """Return the masks of the experts drawn, int [n_draws, most reads of a draw], filled up with 0."""
    order = np.argsort(draws.draw, kind="stable")
    n_reads = np.bincount(draws.draw, minlength=draws.n_draws)
    table = np.zeros((draws.n_draws, int(n_reads.max(initial=0))), np.int64)
    table[np.arange(table.shape[1]) < n_reads[:, None]] = masks[draws.expert[order]]
    return table


def _weights(heat: np.ndarray) -> np.ndarray:
    """Return heat as weights of which none is zero, in each layer with a mean of about 1."""
    assert heat.ndim == 2 and np.isfinite(heat).all() and (heat >= 0).all()
    mean = heat.mean(axis=1, keepdims=True)
    return np.where(mean > 0, heat / np.where(mean > 0, mean, 1), 1) + _LEAST_WEIGHT


def _servers(drives: Sequence[PlanDrive], links: Sequence[tuple[tuple[int, ...], float]]) -> Servers:
    """Return the model of the drives. A server that several drives lie on is as fast as the fastest of them."""
    if not 1 <= len(drives) <= MOST_SERVERS:
        raise UsageError(f"{len(drives)} drives; a plan is made for 1 to {MOST_SERVERS}")
    for number, drive in enumerate(drives):
        if not 0 < drive.read_bytes_per_s < float("inf"):
            raise BadInputError(f"drive {number} (tier {drive.tier}) has a rate of {drive.read_bytes_per_s} B/s; measure it again, or leave it out")
    numbers = {server: n for n, server in enumerate(sorted({drive.server for drive in drives}))}
    rates = [max(drive.read_bytes_per_s for drive in drives if drive.server == server) for server in numbers]
    here = [(tuple(sorted(numbers[s] for s in set(group) if s in numbers)), limit) for group, limit in links]
    try:
        return Servers(tuple(rates), tuple(numbers[drive.server] for drive in drives), tuple(sorted((g, limit) for g, limit in here if g)))
    except ValueError as error:
        raise BadInputError(f"links that drives share: {error}; measure them again") from None


def score_holds(
    geometry: Geometry,
    record_bytes: int,
    drives: Sequence[PlanDrive],
    holds: Sequence[np.ndarray],
    *,
    heat: np.ndarray | None = None,
    links: Sequence[tuple[tuple[int, ...], float]] = (),
    n_misses: float | None = None,
    seed: int = 0,
) -> PlanScore:
    """Score what drives hold, bool [n_layers, n_experts] each, with every expert on one of them. Other arguments as for `plan_copies`."""
    return ReadModel(geometry, record_bytes, drives, links=links, heat=heat, n_misses=n_misses, seed=seed).score(holds)


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What a prediction of tokens per second rests on beside the drives: an H200's figures.

    hit_rates          shares of experts found in the two caches, the least and the most
    device_share       of the hits, those in device memory; the others are uploaded
    link_bytes_per_s   from host to device
    dense_s, kernel_s  of a layer: everything that is not experts; the last expert's computation
    """

    hit_rates: tuple[float, float] = (0.0, 0.5)
    device_share: float = 1 / 3
    link_bytes_per_s: float = 55e9
    dense_s: float = 0.33e-3
    kernel_s: float = 0.05e-3


@dataclass(frozen=True, slots=True)
class TokenRate:
    """Tokens per second at the least and the most hits assumed."""

    low: float
    high: float
    assumptions: Assumptions


def predict_tok_per_s(
    geometry: Geometry,
    record_bytes: int,
    drives: Sequence[PlanDrive],
    holds: Sequence[np.ndarray],
    *,
    heat: np.ndarray | None = None,
    links: Sequence[tuple[tuple[int, ...], float]] = (),
    seed: int = 0,
    assumptions: Assumptions | None = None,
) -> TokenRate:
    """Predict the decode rate for one row without a drafter and without reading ahead; other arguments as for `score_holds`.

    A layer takes its dense part, then the longer of reading and uploading, then the last chunk's upload and computation.
    """
    a = assumptions or Assumptions()

    def rate(hits: float) -> float:
        n = geometry.n_experts_per_token
        reading = 0.0
        if hits < 1:
            score = score_holds(geometry, record_bytes, drives, holds, heat=heat, links=links, n_misses=n * (1 - hits), seed=seed)
            reading = score.assigned_s
        uploading = n * (1 - hits * a.device_share) * record_bytes / a.link_bytes_per_s
        tail = record_bytes / N_CHUNKS / a.link_bytes_per_s + a.kernel_s
        return 1 / (len(geometry.moe_layers) * (a.dense_s + max(reading, uploading) + tail))

    return TokenRate(rate(a.hit_rates[0]), rate(a.hit_rates[1]), a)
