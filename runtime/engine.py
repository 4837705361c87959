"""One prepared model, opened and ready: prompt in, tokens out, with a count of everything that was read on the way."""

import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from layout.checkpoint import Checkpoint
from layout.direct import Extent
from layout.hash_lists import xxh3_128_hex
from layout.prepared import Copies, Prepared, find_copies, open_prepared
from layout.record import record_layout
from layout.sizes import counted, format_size
from manifests.errors import BadInputError, DamagedDataError, DeviceError, UsageError
from manifests.geometry import Geometry
from runtime.decode import Decoder, empty_state
from runtime.experts import CheckpointRecords, StreamedExperts
from runtime.gpu_facts import numa_node
from runtime.heat import LoggedExperts, RoutingLog
from runtime.kernels.prompt_q8_0 import why_no_prompt_products
from runtime.kernels.rows import TILE_ROWS, Arithmetic, forbid_tf32
from runtime.memory import AUTO
from runtime.model import Experts, Model
from runtime.numa import numa_nodes, stay_near
from runtime.prompt import MOST_ROWS, PromptPass, prompt_bytes, rows_that_fit
from runtime.sampler import Sampler
from runtime.saved_state import SavedState, made_on, new_ids, on_device
from runtime.speculate import Drafting, Limits, continue_text
from runtime.speculate import Step as Step
from runtime.start import check_direct, check_tier_caps, checked_kernels, device_room, planned_budgets, present_budgets, spare_threads
from runtime.state import State
from runtime.stats import ExpertCounts, new_counts
from runtime.storage.flat_out import Source, flat_out_bytes_per_s
from runtime.storage.incoming import Phase
from runtime.storage.store import Store
from runtime.weights import CURE, CheckpointWeights, SpineWeights, load_spine

DEFAULT_CONTEXT = 4096
DEFAULT_CHUNK = MOST_ROWS
# Guesses of each layer: 9 % more tokens per second at 25 GB/s, where 95 of 100 are right (docs/numbers.md). On a CPU they cost more than they bring.
PREFETCH_ON_GPU = 2
# Of the device memory that is free, what the prompt pass plans with: the rest is lost between its tensors.
PROMPT_SHARE = 0.9
FLAT_OUT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Options:
    """What a run was asked for; sizes as text, as they were given.

    n_prefetch         experts of the next layer to guess; None: what measured best on the device
    chunk              the most tokens that the prompt pass takes at a time; fewer where device memory is short of it
    tier_caps          the most requests in flight on the drives of a tier together
    is_direct_required  whether drives that can only be read through the page cache are refused
    drafter_bytes       device memory that the caches leave to drafting
    is_long_context     evaluate K3.1's indexer, which is not verified, so that texts may be longer than what is exact without it
    """

    device: str | None = None
    vram_cache: str = AUTO
    host_pool: str = AUTO
    context: int | None = None
    chunk: int = DEFAULT_CHUNK
    is_exact_prefill: bool = False
    is_cold: bool = False
    verify_reads: int = 16
    n_prefetch: int | None = None
    tier_caps: Mapping[str, int] = field(default_factory=dict)
    is_direct_required: bool = False
    is_long_context: bool = False
    drafter_bytes: int = 0

    @property
    def arithmetic(self) -> Arithmetic:
        """Of the prompt pass."""
        return Arithmetic.DECODE if self.is_exact_prefill else Arithmetic.PROMPT

    def n_prefetch_on(self, device: torch.device) -> int:
        if self.n_prefetch is not None:
            return self.n_prefetch
        return PREFETCH_ON_GPU if device.type == "cuda" else 0


class PromptProgress(NamedTuple):
    """How far a prompt pass is: MoE layers that are done, of those of all its pieces; seconds and expert bytes so far."""

    n_done: int
    n_due: int
    seconds: float
    read_bytes: int

    @property
    def left_s(self) -> float | None:
        """Return the seconds left at the rate so far, None while there is none."""
        return self.seconds * (self.n_due - self.n_done) / self.n_done if self.n_done else None


class WatchedExperts:
    """Experts that have somebody told before each layer."""

    def __init__(self, experts: Experts, look: Callable[[int], None]) -> None:
        self._experts, self._look = experts, look

    def run(self, layer: int, z: Tensor, ids: Tensor, is_tiled: bool) -> Tensor:
        self._look(layer)
        return self._experts.run(layer, z, ids, is_tiled)


class Sample(NamedTuple):
    """What each drive, in the manifest's order, has read since decode began, t_s seconds ago."""

    t_s: float
    read_bytes: list[int]


def sample_of(counts: ExpertCounts, t_s: float) -> Sample:
    return Sample(t_s, [drive.read_bytes for drive in counts.drives])


@dataclass(slots=True)
class Timing:
    """When things happened, in seconds of the performance counter.

    n_prompt      tokens of the prompt that were computed, and n_reused those that a saved state had
    decode_gpu_s  seconds of decode in which the host did nothing but wait for the GPU
    samples       one when decode begins, and one after each of its steps
    """

    prompt_began: float = 0.0
    prompt_ended: float = 0.0
    n_prompt: int = 0
    n_reused: int = 0
    token_times: "list[float] | None" = None
    decode_gpu_s: float = 0.0
    samples: list[Sample] = field(default_factory=list)


def choose_device(asked: str | None) -> torch.device:
    """Return the device asked for; without a wish, CUDA where there is one. Raises DeviceError if it cannot be had."""
    if asked not in (None, "cpu", "cuda"):
        raise UsageError(f"--device {asked}: expected cpu or cuda")
    if asked == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"--device cuda: torch {torch.__version__} finds no CUDA device; check the driver with nvidia-smi, or use --device cpu")
    return torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))


def context_limit(geometry: Geometry, asked: int | None, *, is_long_context: bool = False) -> int:
    """Return the context length of a run. Raises UsageError beyond what is exact for this model, or with its indexer beyond what it was made for."""
    if is_long_context and geometry.indexer is None:
        raise UsageError("--long-context: this model has no indexer; its attention is exact at every length; leave the flag out")
    most = geometry.max_position_embeddings if is_long_context else geometry.max_context
    if asked is None:
        return min(most, DEFAULT_CONTEXT)
    if asked < 1 or asked > most:
        why = ""
        if asked > most and geometry.indexer is not None and most == geometry.indexer.top_k and not is_long_context:
            why = f": beyond {most} tokens the model attends to selected positions only, as --long-context unverified does; dense attention is wrong"
        raise UsageError(f"-c {asked}: the context of this model here is 1 to {most} tokens{why}")
    return asked


class Engine:
    """A model over a manifest, or one that `open_model` has opened. Use as a context manager: it owns reader threads and memory.

    chunk        tokens that the prompt pass takes at a time
    on_progress  told how far a prompt pass is, before each of its MoE layers and at its end
    """

    def __init__(
        self, manifest: Path | Prepared, options: Options, *, on_remark: Callable[[str], None], routing_log: RoutingLog | None = None
    ) -> None:
        """Make all ready. What cannot be had is refused before the spine is read. `routing_log` takes in which experts tokens use."""
        forbid_tf32()
        self.options, self.device = options, choose_device(options.device)
        # Before anything large is read and any thread starts.
        self._where = stay_near(numa_node(self.device), numa_nodes()) if self.device.type == "cuda" else None
        self.prepared: Prepared = manifest if isinstance(manifest, Prepared) else open_model(manifest)
        self.context = context_limit(self.geometry, options.context, is_long_context=options.is_long_context)
        spare_threads(self.geometry, self.device)
        check_tier_caps(self.prepared, options.tier_caps)
        budgets = options.vram_cache, options.host_pool, self.geometry, self.device
        spine_bytes, reserved_bytes = self.prepared.manifest.spine.n_bytes, options.drafter_bytes
        if options.is_long_context:
            reserved_bytes += room_for_text(self.geometry, self.context, self.device, spine_bytes=spine_bytes)
        planned_budgets(*budgets, spine_bytes=spine_bytes + reserved_bytes)
        self._copies = _usable_copies(self.prepared, on_remark)
        if options.is_direct_required:
            check_direct(self.prepared, self._copies)
        self.kernels = checked_kernels(self.device, on_remark, self.prepared.record)
        self.weights: SpineWeights = load_spine(self.prepared, self.device)
        self.vram, self.host = present_budgets(*budgets, reserved_bytes=reserved_bytes)
        if options.is_cold:
            drop_page_cache(self.prepared, self._copies)
        self.prompt_counts, self.decode_counts = (new_counts(len(self.prepared.manifest.drives)) for _ in range(2))
        self.timing = Timing()
        self._saved: SavedState | None = None
        self.store = Store(
            self.prepared,
            self._copies,
            device=self.device,
            n_device_slots=self.vram.n_slots,
            n_host_slots=self.host.n_slots,
            verify_every=options.verify_reads,
            counts=self.prompt_counts,
            on_remark=on_remark,
            tier_caps=options.tier_caps,
        )
        self.on_progress: Callable[[PromptProgress], None] | None = None
        self._n_layers_done = self._n_layers_due = 0
        try:
            self._make_runners(routing_log, on_remark)
        except BaseException:
            # Its threads end, and the device lets go of the host's memory.
            self.store.close()
            raise

    def _make_runners(self, routing_log: RoutingLog | None, on_remark: Callable[[str], None]) -> None:
        """Make what runs over the weights and the store: the plain model, decode, and the prompt pass of a GPU."""
        experts = StreamedExperts(self.geometry, self.prepared.record, self.store)
        logged = experts if routing_log is None else LoggedExperts(experts, routing_log)
        self.model = Model(self.geometry, self.weights, WatchedExperts(logged, self._before_layer), is_long_context=self.options.is_long_context)
        self.decoder = self._new_decoder(routing_log)
        with torch.inference_mode():
            self.decoder.capture(1)
        self.prompt_pass = self._new_prompt_pass(routing_log, on_remark)
        self.chunk = self.options.chunk if self.prompt_pass is None else self._fitting_chunk()

    def _new_decoder(self, routing_log: RoutingLog | None) -> Decoder:
        options, record = self.options, self.prepared.record
        decoder = Decoder(
            self.geometry, self.weights, record, self.store,
            context=self.context, n_prefetch=options.n_prefetch_on(self.device), is_long_context=options.is_long_context,
        )  # fmt: skip
        if routing_log is not None:
            decoder.on_layer, decoder.on_cut = routing_log.add_layer, routing_log.drop
        return decoder

    def _new_prompt_pass(self, routing_log: RoutingLog | None, on_remark: Callable[[str], None]) -> PromptPass | None:
        """Return what runs prompts on a GPU; elsewhere the plain model does."""
        if self.device.type != "cuda":
            return None
        if (reason := why_no_prompt_products(self.device)) is not None:
            on_remark(f"prompts run in plain torch, slowly: {reason}")
            return None
        runner = PromptPass(self.geometry, self.weights, self.prepared.record, self.store, self.decoder.state)
        runner.on_layer = self._before_layer
        if routing_log is not None:
            runner.on_chosen = routing_log.add
        return runner

    def _fitting_chunk(self) -> int:
        """Return how many tokens the prompt pass takes at a time in the memory that is left. Raises DeviceError if it is not even a tile."""
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        # A drafter may not have taken its share yet.
        free_bytes = max(0, free_bytes - self.options.drafter_bytes)
        is_long = self.options.is_long_context
        n_rows = rows_that_fit(self.geometry, self.context, int(PROMPT_SHARE * free_bytes), is_long_context=is_long)
        if not n_rows:
            needed = format_size(prompt_bytes(self.geometry, TILE_ROWS, self.context, is_long_context=is_long))
            cure = "ask for a smaller --vram-cache or context (-c)"
            raise DeviceError(f"the prompt pass takes {needed} of {self.device} at least, but {format_size(free_bytes)} are left; {cure}")
        return min(self.options.chunk, n_rows)

    @property
    def prompt_arithmetic(self) -> str:
        """Which products the prompt pass runs."""
        if self.options.is_exact_prefill:
            return "decode arithmetic"
        if self.prompt_pass is None:
            return "prompt arithmetic, plain float32 products"
        return "prompt arithmetic, Q8_0 products of float16 pairs on tensor cores, experts as in decode"

    @property
    def geometry(self) -> Geometry:
        return self.prepared.geometry

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def effective(self, how: str | None = None) -> list[str]:
        """Return what the run's settings became, one line each; `how` says what is computed if it is no prompt pass."""
        options = self.options
        modes = ", ".join(sorted({str(mode) for mode in self.store.modes}))
        prompt = f"prompt pass in {self.prompt_arithmetic}"
        if not options.is_exact_prefill:
            prompt += f", up to {counted(self.chunk, 'token')} at a time"
            prompt += f" ({options.chunk} asked for; the device memory left and {MOST_ROWS} are the limits)" if self.chunk < options.chunk else ""
        drives = ", ".join(self.prepared.drive_name(n) for n in range(len(self.prepared.manifest.drives)))
        verified = f"1 record in {options.verify_reads} hashed" if options.verify_reads else "records not hashed"
        caps = "".join(f"; at most {counted(cap, 'request')} in flight on tier {tier}" for tier, cap in sorted(options.tier_caps.items()))
        return [
            f"device {self.device}, torch {torch.__version__}, float32{_threads(self.device)}; {how or prompt}; context {self.context}"
            + ("; long context, unverified: the indexer selects positions" if options.is_long_context else ""),
            f"kernels: {self.kernels}",
            f"drives {drives}; read {modes}{' (required)' if options.is_direct_required else ''}; {verified}{caps}",
            f"prefetch {counted(options.n_prefetch_on(self.device), 'expert')} of each layer"
            + ("; cold: file pages were dropped, and both caches are emptied after the prompt pass" if options.is_cold else ""),
            str(self.vram),
            str(self.host),
            *([self._where] if self._where is not None else []),
        ]

    @torch.inference_mode()
    def prompt(self, ids: list[int]) -> Tensor:
        """Run the prompt pass: return the logits [vocabulary] after the last token; the decoder goes on from there."""
        self._check_ids(ids)
        saved = self._saved
        new = ids if saved is None else new_ids(saved, ids, where="the saved state")
        self.timing.n_prompt, self.timing.n_reused, self.timing.prompt_began = len(new), len(ids) - len(new), time.perf_counter()
        self.store.phase, self.store.counts = Phase.PROMPT, self.prompt_counts
        if self.options.is_exact_prefill or not new:
            self._begin(saved)
            logits = torch.empty(0) if saved is None else saved.logits[None].to(self.device)
            if new:
                logits = self._exact_pass(new)
        else:
            logits = self._prompt_pass(new, saved)
        self._wait_for_device()
        self.timing.prompt_ended = time.perf_counter()
        return logits[-1].clone()

    def go_on_from(self, saved: SavedState) -> None:
        """Compute of each prompt only what follows the saved tokens, with which it must begin."""
        self._saved = saved

    def saved_state(self, ids: list[int], logits: Tensor) -> SavedState:
        """Return what another run needs to go on from here: ids are all tokens that were run, logits those after the last."""
        return SavedState(tuple(ids), self.decoder.state.copied(), logits, self.options.arithmetic, made_on(self.device))

    def _begin(self, saved: SavedState | None) -> None:
        """Let the decoder go on from a saved state, or from no text."""
        self.decoder.begin(self._first_state(saved))

    def _first_state(self, saved: SavedState | None) -> State:
        return self.model.initial_state(1) if saved is None else on_device(saved.state, self.device)

    def _prompt_pass(self, ids: list[int], saved: SavedState | None) -> Tensor:
        """Run new tokens in prompt arithmetic; return the logits after the last, [1, vocabulary]. The decoder goes on from there."""
        pieces = [ids[start : start + self.chunk] for start in range(0, len(ids), self.chunk)]
        self._expect_pieces(len(pieces))
        if self.prompt_pass is not None:
            self._begin(saved)
            for piece in pieces:
                logits = self.prompt_pass.run(piece)[None]
        else:
            state = self._first_state(saved)
            for piece in pieces:
                h, state = self.model.trunk(torch.tensor([piece], device=self.device), state, arithmetic=Arithmetic.PROMPT)
            self.decoder.begin(state)
            logits = self.model.logits(h[:, -1:], arithmetic=Arithmetic.PROMPT)[0]
        self._end_progress()
        return logits

    def _exact_pass(self, ids: list[int]) -> Tensor:
        """Run new tokens in decode arithmetic; return the logits after the last ones, [rows, vocabulary]."""
        starts = range(0, len(ids), TILE_ROWS)
        self._expect_pieces(len(starts))
        for n, start in enumerate(starts):
            self._n_layers_done = n * len(self.geometry.moe_layers)
            self._tell_progress()
            logits = self.decoder.step(ids[start : start + TILE_ROWS])
        self._end_progress()
        return logits

    def _expect_pieces(self, n: int) -> None:
        self._n_layers_done, self._n_layers_due = 0, n * len(self.geometry.moe_layers)

    def _before_layer(self, layer: int) -> None:
        """Count an MoE layer of a prompt pass that is about to fetch its experts. What this raises ends the pass."""
        self._tell_progress()
        self._n_layers_done += 1

    def _end_progress(self) -> None:
        self._n_layers_done = self._n_layers_due
        self._tell_progress()
        # Layers of decode are not counted.
        self._n_layers_due = 0

    def _tell_progress(self) -> None:
        if self.on_progress is not None and self._n_layers_due:
            seconds = time.perf_counter() - self.timing.prompt_began
            self.on_progress(PromptProgress(self._n_layers_done, self._n_layers_due, seconds, self.store.counts.read_bytes))

    @torch.inference_mode()
    def generate(
        self,
        ids: list[int],
        *,
        n_tokens: int,
        sampler: Sampler,
        on_prompt: Callable[[SavedState], None] | None = None,
        drafting: Drafting | None = None,
    ) -> Generator[Step, None, None]:
        """Yield up to n_tokens tokens after a prompt; the last one says why it is the last.

        on_prompt  takes the state after the prompt
        drafting   proposes tokens that are checked several at a time; the text stays the same
        """
        logits = self.prompt(ids)
        if on_prompt is not None:
            on_prompt(self.saved_state(ids, logits))
        self.store.phase, self.store.counts = Phase.DECODE, self.decode_counts
        if self.options.is_cold:
            self.store.forget()
        timing, waited_s, results_s = self.timing, self.decoder.wait_device_s, 0.0
        timing.token_times, timing.samples = [], []

        def count_results() -> None:
            # The sampler would wait for them anyway: here it is counted.
            nonlocal results_s
            results_s += self._wait_for_results()
            timing.decode_gpu_s = self.decoder.wait_device_s - waited_s + results_s

        limits = Limits(n_tokens, self.context, self.prepared.manifest.end_ids)
        steps = continue_text(self.decoder, sampler, logits, text=ids, limits=limits, drafting=drafting, on_step=count_results)
        with closing(steps):
            for step in steps:
                timing.token_times.append(time.perf_counter())
                timing.samples.append(sample_of(self.decode_counts, timing.token_times[-1] - timing.token_times[0]))
                yield step

    @torch.inference_mode()
    def score(self, ids: list[int], *, arithmetic: Arithmetic, chunk: int | None) -> Tensor:
        """Return the logits of every position, float32 [tokens, vocabulary], on the CPU."""
        self._check_ids(ids)
        if arithmetic is Arithmetic.PROMPT and self.prompt_pass is None:
            return score_with(self.model, ids, arithmetic=arithmetic, chunk=chunk)
        self._begin(None)
        if arithmetic is Arithmetic.PROMPT and self.prompt_pass is not None:
            n_rows = min(chunk or self.chunk, self.chunk)
            return torch.cat([self.prompt_pass.score(ids[start : start + n_rows]) for start in range(0, len(ids), n_rows)])
        n_rows = min(chunk or TILE_ROWS, TILE_ROWS)
        return torch.cat([self.decoder.step(ids[start : start + n_rows]).to("cpu", copy=True) for start in range(0, len(ids), n_rows)])

    def _check_ids(self, ids: list[int]) -> None:
        check_ids(ids, self.geometry, self.context)

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _wait_for_results(self) -> float:
        """Wait until all work that was launched is done; return the seconds that took, on a CPU 0."""
        start = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter() - start

    def flat_out_bytes_per_s(self) -> float | None:
        """Measure what the same reader delivers flat out from the same files, now; None if a drive does not answer."""
        return flat_out_bytes_per_s(_sources(self.prepared, self._copies, self.store), seconds=FLAT_OUT_SECONDS)


def open_model(manifest: Path) -> Prepared:
    """Open a prepared model whose small files are those of its checkpoint. Raises BadInputError or DamagedDataError."""
    prepared = open_prepared(manifest)
    _check_tokenizer(prepared)
    return prepared


def _threads(device: torch.device) -> str:
    n = torch.get_num_threads()
    return "" if device.type == "cuda" else f", {n} thread{'s' if n > 1 else ''}"


def open_checkpoint_model(checkpoint: Checkpoint, device: torch.device) -> Model:
    """Return a model over a checkpoint's unquantised weights, read from the shards as they are needed."""
    forbid_tf32()
    spare_threads(checkpoint.geometry, device)
    experts = StreamedExperts(checkpoint.geometry, record_layout(checkpoint.geometry), CheckpointRecords(checkpoint, device))
    return Model(checkpoint.geometry, CheckpointWeights(checkpoint, device), experts)


@torch.inference_mode()
def score_with(model: Model, ids: list[int], *, arithmetic: Arithmetic, chunk: int | None) -> Tensor:
    """Return the logits of every position, float32 [tokens, vocabulary], on the CPU; the text in one piece unless chunk says otherwise."""
    tokens = torch.tensor([ids], device=model.weights.device)
    state, parts = model.initial_state(1), []
    for start in range(0, len(ids), chunk or len(ids)):
        logits, state = model.forward(tokens[:, start : start + (chunk or len(ids))], state, arithmetic=arithmetic)
        parts.append(logits[0].cpu())
    return torch.cat(parts)


def check_ids(ids: list[int], geometry: Geometry, context: int) -> None:
    """Raise BadInputError if a prompt is empty, too long, or holds numbers that are no tokens."""
    if not ids:
        raise BadInputError("the prompt is empty: give at least one token")
    strays = [i for i in ids if not 0 <= i < geometry.vocab_size]
    if strays:
        raise BadInputError(f"the prompt holds {str(strays[0])[:24]}, but token numbers go from 0 to {geometry.vocab_size - 1}")
    if len(ids) > context:
        beyond = "shorten the prompt" if geometry.indexer is None else "shorten the prompt, or see --long-context"
        longer = f"-c may be at most {geometry.max_context} here" if context < geometry.max_context else beyond
        raise BadInputError(f"the prompt has {counted(len(ids), 'token')}, but the context is {context}; {longer}")


def room_for_text(geometry: Geometry, context: int, device: torch.device, *, spine_bytes: int) -> int:
    """Return what the state of a long context takes of the device. Raises DeviceError if that is not there beside the spine."""
    n_bytes = empty_state(geometry, context, torch.device("meta"), is_long_context=True).n_bytes
    room = device_room(device).less(spine_bytes)
    if n_bytes > room.available_bytes - room.reserve_bytes:
        needed, left = format_size(n_bytes), format_size(max(0, room.available_bytes - room.reserve_bytes))
        raise DeviceError(
            f"-c {context}: a text of so many tokens takes {needed} of {device}, but beside the spine {left} are free; give a smaller -c"
        )
    return n_bytes


def _check_tokenizer(prepared: Prepared) -> None:
    """Raise DamagedDataError unless the small files are those that were taken from the checkpoint: another vocabulary gives wrong text in silence."""
    for file in prepared.manifest.tokenizer.files:
        path = prepared.tokenizer_directory / file.name
        found = xxh3_128_hex(path.read_bytes()) if path.is_file() else "nothing"
        if found != file.xxh3_128:
            raise DamagedDataError(f"{path}: xxh3-128 {found} differs from the manifest's {file.xxh3_128}; {CURE}")


def _usable_copies(prepared: Prepared, on_remark: Callable[[str], None]) -> Copies:
    copies = find_copies(prepared)
    for fault in copies.faults[:5]:
        on_remark(f"copy left out: {fault}")
    if len(copies.faults) > 5:
        on_remark(f"copy left out: {len(copies.faults) - 5} more like these; kprep verify-hashes --repair restores them")
    return copies


def drop_page_cache(prepared: Prepared, copies: Copies) -> None:
    """Ask the kernel to forget the expert files' pages, so that buffered reads go to the drives too."""
    for drive, holds in enumerate(copies.holds):
        for layer, expert in np.argwhere(holds).tolist():
            fd = os.open(prepared.expert_extent(drive, layer, expert).path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _sources(prepared: Prepared, copies: Copies, store: Store) -> list[Source]:
    """Return what the store reads from, for the reader alone."""

    def chooser(drive: int) -> Callable[[np.random.Generator], Extent]:
        places = np.argwhere(copies.holds[drive])
        return lambda rng: prepared.expert_extent(drive, *places[rng.integers(len(places))].tolist())

    return [Source(mode, depth, chooser(drive)) for drive, mode, depth in zip(store.drives, store.modes, store.depths, strict=True)]
