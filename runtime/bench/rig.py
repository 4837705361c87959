"""Runs of a model without its weights: what a configuration makes of bytes and time, beside what its parts reach alone in the same process.

The spine is made once and serves many configurations, so that their logits can be compared bit by bit.
"""

import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import xxhash

from layout.direct import PAGE, Extent, probe_directory, round_up
from layout.prepared import Copies
from layout.record import RecordLayout, record_layout
from manifests.geometry import Geometry
from runtime.bench.routing import make_guesses, make_routing
from runtime.bench.synthetic import EmulatedDrive, SyntheticModel, emulated_servers, make_records, random_spine, record_name, synthetic_model
from runtime.decode import Decoder, DeviceRecords, LayerFacts, n_guessed
from runtime.draft.drafter import MOST_DRAFTS
from runtime.engine import Sample, sample_of
from runtime.kernels.rows import forbid_tf32
from runtime.prompt import PromptPass
from runtime.sampler import Sampler
from runtime.speculate import Drafting, Limits, continue_text
from runtime.start import spare_threads
from runtime.state import FixedState
from runtime.stats import ExpertCounts, new_counts
from runtime.storage.arena import Arena, CudaRegistrar
from runtime.storage.device_slots import SLOT_STEP, open_device_slots
from runtime.storage.flat_out import DEPTHS, Source, best_flat_out
from runtime.storage.incoming import Phase
from runtime.storage.store import Store

# Of a run's host slots these are as many as no processor's cache holds.
_MOST_BUFFERS = 256


@dataclass(frozen=True)
class Setting:
    """One configuration. `n_warm` tokens run before the counted ones."""

    drives: tuple[EmulatedDrive, ...]
    n_device_slots: int
    n_host_slots: int
    routing: str = "uniform"
    n_tokens: int = 32
    n_warm: int = 2
    n_rows: int = 1
    n_prefetch: int = 0
    verify_every: int = 0
    seed: int = 0


@dataclass
class Run:
    """What a run did: seconds of each step, a digest of each step's logits, and of each layer what it lacked and how long that took.

    wait_device_s  in which the host did nothing but wait for the device
    samples        of what each drive has read: at the first counted step's begin and after each of them
    on_remark      is told each remark at once
    """

    setting: Setting
    step_s: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    layers: list[LayerFacts] = field(default_factory=list)
    counts: ExpertCounts = field(default_factory=lambda: new_counts(0))
    wait_device_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    on_remark: Callable[[str], None] | None = None

    def remark(self, text: str) -> None:
        self.remarks.append(text)
        if self.on_remark is not None:
            self.on_remark(text)

    @property
    def seconds(self) -> float:
        return sum(self.step_s)

    @property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest("".join(self.digests).encode())

    def facts(self) -> dict[str, Any]:
        """Return the run as plain values."""
        counts, n_steps = self.counts, len(self.step_s)
        n_asked = counts.n_device_hits + counts.n_host_hits + counts.n_records
        host_s = self.seconds - counts.idle_s - self.wait_device_s
        return {
            "routing": self.setting.routing,
            "device_slots": self.setting.n_device_slots,
            "host_slots": self.setting.n_host_slots,
            "drives": [str(d.directory) for d in self.setting.drives],
            "n_steps": n_steps,
            "rows_per_step": self.setting.n_rows,
            "step_s": self.step_s,
            "mean_step_s": self.seconds / n_steps,
            "tok_per_s": n_steps * self.setting.n_rows / self.seconds,
            "read_bytes": counts.read_bytes,
            "read_bytes_per_s": counts.read_bytes / self.seconds,
            "uploaded_bytes": counts.uploaded_bytes,
            "device_hit_share": counts.n_device_hits / n_asked,
            "host_hit_share": counts.n_host_hits / n_asked,
            "wait_drives_s": counts.wait_s,
            "wait_uploads_s": counts.upload_wait_s,
            "wait_device_s": self.wait_device_s,
            "store_host_s": counts.host_s,
            "ms_to_first_read": 1e3 * counts.to_first_read_s / max(1, counts.n_reading_layers),
            "ms_after_last_read": 1e3 * counts.after_last_read_s / max(1, counts.n_reading_layers),
            "prefetches": [counts.n_prefetch_issued, counts.n_prefetch_used, counts.n_prefetch_cancelled],
            "host_ms_per_layer": 1e3 * host_s / max(1, counts.n_layers),
            "digest": self.digest,
            "remarks": self.remarks,
        }


@dataclass
class PromptRun:
    """What a prompt pass did: seconds in all, and from each MoE layer's experts to the next one's.

    digest      of the logits after the last token
    peak_bytes  the device memory that it took at its worst, 0 on a CPU
    """

    seconds: float
    layer_s: list[float]
    digest: str
    peak_bytes: int
    counts: ExpertCounts = field(default_factory=lambda: new_counts(0))


@dataclass
class Written:
    """A text that was written from its first token on, greedily: its ids, a digest of all logits, and the seconds after the first step."""

    ids: list[int]
    digest: str
    seconds: float
    counts: ExpertCounts


class ResidentRecords:
    """Records of which all are on the device already: experts share a few, and arrive `n_at_once` at a time."""

    def __init__(self, layout: RecordLayout, records: Sequence[bytes], n_experts: int, device: torch.device, *, n_at_once: int) -> None:
        stride = round_up(layout.n_bytes, SLOT_STEP)
        self._slots = torch.zeros(len(records), stride, dtype=torch.uint8, device=device)
        for slot, record in zip(self._slots, records, strict=True):
            slot[: layout.n_bytes] = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(device)
        self._n_at_once = n_at_once
        self._addresses = self._slots[0].data_ptr() + stride * (np.arange(n_experts) % len(records))

    def address(self, slot: int) -> int:
        return int(self._addresses[slot])

    def addresses(self, layer: int) -> np.ndarray:
        return self._addresses

    def fetch_groups(
        self, layer: int, experts: Sequence[int], *, passing: Collection[int] = (), meanwhile: Callable[[], None] | None = None
    ) -> Iterator[list[tuple[int, int]]]:
        for start in range(0, len(experts), self._n_at_once):
            yield [(expert, expert) for expert in experts[start : start + self._n_at_once]]

    def prefetch(self, layer: int, experts: Sequence[int]) -> None: ...


class Rig:
    """A geometry with a random spine on a device, and record files in directories."""

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        drives: Sequence[EmulatedDrive],
        n_files: int,
        *,
        seed: int = 0,
        period: int = 0,
        on_made: Callable[[int], None] | None = None,
    ) -> None:
        """Make the files that are not there, and the spine. `on_made` is told how many files of each directory there are.

        period  as for random_spine
        """
        forbid_tf32()
        spare_threads(geometry, device)
        self.geometry, self.device, self._n_files, self._seed = geometry, device, n_files, seed
        self.layout = record_layout(geometry)
        self._hashes = make_records(self.layout, [d.directory for d in drives], n_files, seed=seed, on_made=on_made)
        self.weights = random_spine(geometry, device, seed=seed, period=period)

    def model(self, drives: Sequence[EmulatedDrive]) -> SyntheticModel:
        return synthetic_model(self.geometry, drives, self._n_files, self._hashes, seed=self._seed)

    @torch.inference_mode()
    def run(self, setting: Setting, *, on_step: Callable[[int, "Run"], None] | None = None, on_remark: Callable[[str], None] | None = None) -> Run:
        """Run a configuration from an empty text. Raises DamagedDataError if an expert cannot be read."""
        model, run = self.model(setting.drives), Run(setting, on_remark=on_remark)
        n_steps = setting.n_warm + setting.n_tokens
        with closing(self.open_store(model, setting, run)) as store:
            decoder = self.open_decoder(store, setting, n_steps)
            decoder.capture(setting.n_rows, can_cut=setting.n_rows > 1)
            decoder.state.reset()
            store.phase = Phase.DECODE
            for step in range(n_steps):
                if step == setting.n_warm:
                    run.counts = store.counts = new_counts(len(setting.drives))
                    decoder.wait_device_s, decoder.on_layer = 0.0, run.layers.append
                    run.samples.append(sample_of(run.counts, 0.0))
                self._step(decoder, setting, run, step)
                if on_step is not None:
                    on_step(step, run)
            run.wait_device_s += decoder.wait_device_s
            return run

    @torch.inference_mode()
    def prompt(self, setting: Setting, *, on_remark: Callable[[str], None] | None = None) -> PromptRun:
        """Run setting.n_tokens as a prompt, from an empty text and empty caches. Raises DamagedDataError if an expert cannot be read."""
        run = Run(setting, on_remark=on_remark)
        with closing(self.open_store(self.model(setting.drives), setting, run)) as store:
            store.phase = Phase.PROMPT
            found = self._prompt(store, setting)
            found.counts = store.counts
            return found

    @torch.inference_mode()
    def write(self, setting: Setting, *, drafting: Drafting | None = None) -> Written:
        """Write setting.n_tokens after token 0, from empty caches. Raises DamagedDataError if an expert cannot be read."""
        n, run, digest = setting.n_tokens, Run(setting), xxhash.xxh3_128()
        with closing(self.open_store(self.model(setting.drives), setting, run)) as store:
            decoder = self.open_decoder(store, replace(setting, n_rows=1), n + MOST_DRAFTS + 2)
            for n_rows in range(1, 2 + MOST_DRAFTS if drafting is not None else 2):
                decoder.capture(n_rows, can_cut=drafting is not None)
            decoder.state.reset()
            store.phase, ids = Phase.DECODE, list[int]()
            logits = decoder.step([0])[0].clone()
            store.counts = new_counts(len(setting.drives))
            began = time.perf_counter()
            limits = Limits(n, n + MOST_DRAFTS + 1, ())
            for step in continue_text(decoder, Sampler(0, 1, 0), logits, text=[0], limits=limits, drafting=drafting):
                ids.append(step.token)
                digest.update(step.logits.cpu().numpy().tobytes())
            return Written(ids, digest.hexdigest(), time.perf_counter() - began, store.counts)

    @torch.inference_mode()
    def resident_prompt(self, setting: Setting, *, n_records: int, n_at_once: int) -> PromptRun:
        """Run the same prompt without reading: all experts share the first n_records record files' bytes, which are on the device."""
        records = [(setting.drives[0].directory / record_name(number)).read_bytes() for number in range(n_records)]
        return self._prompt(ResidentRecords(self.layout, records, self.geometry.n_experts, self.device, n_at_once=n_at_once), setting)

    def _prompt(self, records: DeviceRecords, setting: Setting) -> PromptRun:
        n = setting.n_tokens
        routing = torch.from_numpy(make_routing(setting.routing, self.geometry, n, seed=setting.seed)).to(self.device)
        state = FixedState.empty(self.geometry, n, self.device)
        runner = PromptPass(self.geometry, self.weights, self.layout, records, state, routing=routing)
        times = list[float]()
        runner.on_layer = lambda layer: times.append(time.perf_counter())
        is_cuda, before = self.device.type == "cuda", 0
        if is_cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        began = time.perf_counter()
        logits = runner.run([row * 7919 % self.geometry.vocab_size for row in range(n)]).cpu()
        seconds = time.perf_counter() - began
        peak_bytes = torch.cuda.max_memory_allocated(self.device) - before if is_cuda else 0
        return PromptRun(seconds, np.diff(times).tolist(), xxhash.xxh3_128_hexdigest(logits.numpy().tobytes()), peak_bytes)

    def open_store(self, model: SyntheticModel, setting: Setting, run: Run) -> Store:
        if self.device.type == "cuda":
            # What the run before has left in pieces is to be had whole.
            gc.collect()
            torch.cuda.empty_cache()
        return Store(
            model,
            Copies(tuple(drive.holds for drive in model.manifest.drives), []),
            device=self.device,
            n_device_slots=setting.n_device_slots,
            n_host_slots=setting.n_host_slots,
            verify_every=setting.verify_every,
            counts=new_counts(len(setting.drives)),
            on_remark=run.remark,
            servers=emulated_servers(setting.drives),
            limits=[drive.bytes_per_s for drive in setting.drives],
        )

    def open_decoder(self, store: Store, setting: Setting, n_steps: int) -> Decoder:
        n_positions = n_steps * setting.n_rows
        routing = torch.from_numpy(make_routing(setting.routing, self.geometry, n_positions, seed=setting.seed)).to(self.device)
        guesses = None
        if setting.n_prefetch:
            made = make_guesses(routing.cpu().numpy(), self.geometry, n_guessed(self.geometry, setting.n_prefetch), seed=setting.seed)
            guesses = torch.from_numpy(made).to(self.device)
        return Decoder(
            self.geometry, self.weights, self.layout, store, context=n_positions, n_prefetch=setting.n_prefetch, routing=routing, guesses=guesses
        )

    def _step(self, decoder: Decoder, setting: Setting, run: Run, step: int) -> None:
        start = time.perf_counter()
        ids = [(step * setting.n_rows + row) * 7919 % self.geometry.vocab_size for row in range(setting.n_rows)]
        logits = decoder.step(ids, can_cut=setting.n_rows > 1)
        launched = time.perf_counter()
        logits = logits.cpu()
        if step >= setting.n_warm:
            ended = time.perf_counter()
            # On a CPU the logits are there already: a copy of them, and no wait.
            run.wait_device_s += ended - launched if self.device.type == "cuda" else 0.0
            run.step_s.append(ended - start)
            run.samples.append(sample_of(run.counts, run.seconds))
        run.digests.append(xxhash.xxh3_128_hexdigest(logits.numpy().tobytes()))

    def flat_out(self, drives: Sequence[EmulatedDrive], *, seconds: float, n_slots: int = 0) -> tuple[float, int]:
        """Return bytes/s that the reader reaches on these directories' files at its best depth, uploading all that it reads, and that depth.

        n_slots  host slots of the run that this is set beside: as many are read into in turns, as far as it makes a difference

        Drives that are slowed down are slowed down here too.
        """
        model = self.model(drives)
        shape = (self.geometry.n_layers, self.geometry.n_experts)

        def chooser(drive: int) -> Callable[[np.random.Generator], Extent]:
            return lambda rng: model.expert_extent(drive, int(rng.integers(shape[0])), int(rng.integers(shape[1])))

        sources = [Source(probe_directory(drive.directory), 1, chooser(n), drive.bytes_per_s) for n, drive in enumerate(drives)]
        step = max(PAGE, *(source.mode.alignment for source in sources))
        registrar = CudaRegistrar(self.device) if self.device.type == "cuda" else None
        n_buffers = max(len(drives) * (DEPTHS[-1] + 1), min(n_slots, _MOST_BUFFERS))
        arena = Arena(n_buffers, round_up(self.layout.n_bytes, step), registrar=registrar, on_remark=lambda remark: None)
        slots = open_device_slots(1, self.layout.n_bytes, self.device)
        try:
            buffers = [arena.slot(n) for n in range(arena.n_slots)]
            return best_flat_out(sources, seconds=seconds, buffers=buffers, uploader=slots.uploader, target=slots.target(0, 0))
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            arena.close()
