"""What a server has done since it began, for Prometheus, /health and /status, and what one request took."""

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from runtime.serving.prefixes import ServingEngine
from runtime.stats import ExpertCounts

PHASES = ("prompt_pass", "decode")
SOURCES = ("device_hits", "host_hits", "records")
# States of a drive that need nobody.
GOOD = ("ok", "unused")
# Runs that are remembered.
N_RUNS = 10


class DriveTotals(NamedTuple):
    """One drive since the server began. n_bad: reads that failed or took far too long."""

    n_good: int = 0
    n_bad: int = 0
    read_bytes: int = 0


class Family(NamedTuple):
    """One metric: its name without prefix, what it says, and a value for each set of labels."""

    name: str
    kind: str
    says: str
    values: Mapping[str, float]


class Metrics:
    """Adds up requests. The generation's thread adds, any thread reads; a request that runs counts as far as it is."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine, self._lock = engine, threading.Lock()
        drives = engine.prepared.manifest.drives
        self.tiers = [drive.tier for drive in drives]
        self._still = [None if n in engine.store.drives else "absent" if drive.holds.any() else "unused" for n, drive in enumerate(drives)]
        self._totals: Counter[str] = Counter()
        self._drives = [DriveTotals() for _ in drives]
        self._live: tuple[ExpertCounts, ...] = ()
        self._seen = list(self._drives)
        self._is_failing = [False for _ in drives]
        self._began = time.time()
        self._runs: deque[dict[str, Any]] = deque(maxlen=N_RUNS)

    def begin(self) -> None:
        """A request begins; the engine counts anew."""
        with self._lock:
            self._live = (self._engine.prompt_counts, self._engine.decode_counts)

    def step(self) -> None:
        """A token was generated."""
        with self._lock:
            self._totals["generated"] += 1
            self._look_at_drives()

    def end(self, run: dict[str, Any]) -> None:
        """The request is over, whichever way; `run` says how it went."""
        timing = self._engine.timing
        with self._lock:
            self._runs.appendleft(run | {"ended_at": time.time()})
            times = timing.token_times or []
            self._totals["prompt_computed"] += timing.n_prompt if times else 0
            self._totals["prompt_kept"] += self._engine.n_cached if times else 0
            self._drives = self._drive_totals()
            self._totals = self._with_live()
            self._live = ()
            self._look_at_drives()

    def drive_states(self) -> list[str]:
        """Return for each drive: ok; failing, if its last read was bad; absent, if none of its files was usable when the server began; unused."""
        with self._lock:
            self._look_at_drives()
            return [still or ("failing" if is_failing else "ok") for still, is_failing in zip(self._still, self._is_failing, strict=True)]

    def _look_at_drives(self) -> None:
        now = self._drive_totals()
        for n, (before, after) in enumerate(zip(self._seen, now, strict=True)):
            if after.n_bad > before.n_bad:
                self._is_failing[n] = True
            elif after.n_good > before.n_good:
                self._is_failing[n] = False
        self._seen = now

    def _drive_totals(self) -> list[DriveTotals]:
        totals = []
        for n, (n_good, n_bad, n_bytes) in enumerate(self._drives):
            live = [counts.drives[n] for counts in self._live]
            n_good += sum(drive.n_reads - drive.n_failed for drive in live)
            n_bad += sum(drive.n_failed + drive.n_slow for drive in live)
            totals.append(DriveTotals(n_good, n_bad, n_bytes + sum(drive.read_bytes for drive in live)))
        return totals

    def _with_live(self) -> Counter[str]:
        totals = Counter(self._totals)
        for phase, counts in zip(PHASES, self._live, strict=False):
            totals[f"device_hits/{phase}"] += counts.n_device_hits
            totals[f"host_hits/{phase}"] += counts.n_host_hits
            totals[f"records/{phase}"] += counts.n_records
            totals[f"read_bytes/{phase}"] += counts.read_bytes
        return totals

    def snapshot(self) -> dict[str, Any]:
        """Return what a page shows that is drawn again and again; rates are differences between two of these, over `clock_s`."""
        states = self.drive_states()
        with self._lock:
            totals, drives, runs = self._with_live(), self._drive_totals(), list(self._runs)
        return {
            "clock_s": time.monotonic(),
            "generated_tokens": totals["generated"],
            "experts": {phase: {source: totals[f"{source}/{phase}"] for source in SOURCES} for phase in PHASES},
            "drives": [
                {"drive": n, "tier": tier, "state": state, "read_bytes": drive.read_bytes, "bad_reads": drive.n_bad}
                for n, (tier, state, drive) in enumerate(zip(self.tiers, states, drives, strict=True))
            ],
            "runs": runs,
        }

    def families(self, *, queue: dict[str, float], outcomes: dict[str, float], is_up: bool) -> list[Family]:
        """Return all metrics; the queue's own numbers come from the queue."""
        with self._lock:
            totals = self._with_live()
        experts = {f'source="{source}",phase="{phase}"': totals[f"{source}/{phase}"] for phase in PHASES for source in SOURCES}
        tokens = {f'source="{source}"': totals[f"prompt_{source}"] for source in ("computed", "kept")}
        read_bytes = {f'phase="{phase}"': totals[f"read_bytes/{phase}"] for phase in PHASES}
        return [
            Family("up", "gauge", "1 while answers can be generated.", {"": float(is_up)}),
            Family("start_time_seconds", "gauge", "When the server began, in seconds since 1970.", {"": self._began}),
            Family("requests_total", "counter", "Requests for a generation by their outcome.", {f'outcome="{k}"': v for k, v in outcomes.items()}),
            Family("queue", "gauge", "Requests that wait, and that run.", {f'state="{k}"': v for k, v in queue.items()}),
            Family("kept_states", "gauge", "States of former texts in host memory.", {"": len(self._engine.kept)}),
            Family("prompt_tokens_total", "counter", "Prompt tokens, computed or found in a kept state.", tokens),
            Family("generated_tokens_total", "counter", "Tokens generated.", {"": totals["generated"]}),
            Family("experts_total", "counter", "Experts needed, by where they were.", experts),
            Family("expert_read_bytes_total", "counter", "Bytes of experts read.", read_bytes),
            *self._drive_families(),
        ]

    def _drive_families(self) -> list[Family]:
        states = self.drive_states()
        with self._lock:
            drives = self._drive_totals()
        labels = [f'drive="{n}",tier="{tier}"' for n, tier in enumerate(self.tiers)]

        def by_drive(values: list[float]) -> dict[str, float]:
            return dict(zip(labels, values, strict=True))

        return [
            Family("drive_read_bytes_total", "counter", "Bytes read.", by_drive([drive.read_bytes for drive in drives])),
            Family("drive_bad_reads_total", "counter", "Reads failed or far too slow.", by_drive([drive.n_bad for drive in drives])),
            Family("drive_ok", "gauge", "1 unless the drive is absent or its last read was bad.", by_drive([float(s in GOOD) for s in states])),
        ]


def prometheus_text(families: list[Family]) -> str:
    """Return metrics in Prometheus' text format."""
    lines = []
    for name, kind, says, values in families:
        lines += [f"# HELP ktier_{name} {says}", f"# TYPE ktier_{name} {kind}"]
        lines += [f"ktier_{name}{f'{{{labels}}}' if labels else ''} {value:.17g}" for labels, value in values.items()]
    return "\n".join(lines) + "\n"


def request_statistics(engine: ServingEngine, *, n_generated: int, queue_s: float) -> dict[str, Any]:
    """Return what one request took, under the names that krun generate uses; null where there is nothing to divide."""
    timing, prompt, decode = engine.timing, engine.prompt_counts, engine.decode_counts
    times = timing.token_times or [timing.prompt_ended]
    prompt_s, steady_s = timing.prompt_ended - timing.prompt_began, times[-1] - times[0]
    return {
        "queue_s": queue_s,
        "time_to_first_token_s": queue_s + times[0] - timing.prompt_began,
        "prompt_pass_s": prompt_s,
        "prompt_pass_tokens": timing.n_prompt,
        "prompt_pass_tok_per_s": timing.n_prompt / prompt_s if timing.n_prompt and prompt_s else None,
        "steady_decode_tok_per_s": (n_generated - 1) / steady_s if n_generated > 1 and steady_s else None,
        "expert_read_bytes": dict(zip(PHASES, (prompt.read_bytes, decode.read_bytes), strict=True)),
        "device_hit_rate": dict(zip(PHASES, (_share(prompt, prompt.n_device_hits), _share(decode, decode.n_device_hits)), strict=True)),
        "host_hit_rate": dict(zip(PHASES, (_share(prompt, prompt.n_host_hits), _share(decode, decode.n_host_hits)), strict=True)),
    }


def _share(counts: ExpertCounts, n: int) -> float | None:
    n_used = counts.n_device_hits + counts.n_host_hits + counts.n_records
    return n / n_used if n_used else None
