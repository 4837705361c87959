"""krun generate: the text goes to stdout, settings and statistics to stderr."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from layout.sizes import counted, format_size
from layout.terminal import note, say, write_text
from layout.writer import write_bytes
from manifests.errors import BadInputError, KtierError, UsageError
from manifests.manifest import Manifest
from runtime.bench.document import Configuration, device_facts, manifest_facts, repeat_facts, stats_document
from runtime.bench.routing import write_trace
from runtime.cli.arguments import (
    HOST_OPTION,
    LONG_CONTEXT_OPTION,
    PREFETCH_OPTION,
    TIER_CAP_OPTION,
    VERIFY_EVERY,
    VERIFY_OPTION,
    VRAM_OPTION,
    ChunkOption,
    ContextOption,
    DeviceOption,
    ExactPrefillOption,
    ManifestOption,
    RequireDirectOption,
    check_outputs,
    is_long_context,
    new_sampler,
    parse_tier_caps,
)
from runtime.cli.live import LiveLine, can_show_live
from runtime.draft.choice import DrafterChoice, choose_drafter
from runtime.draft.gates import ADAPTIVE, Gate, parse_gate
from runtime.engine import DEFAULT_CHUNK, Engine, Options, check_ids, choose_device, context_limit, open_model
from runtime.heat import RoutingLog, write_heat
from runtime.live import live_line, prompt_line
from runtime.memory import AUTO
from runtime.report import statistics, statistics_lines
from runtime.sampler import Sampler
from runtime.saved_state import SavedState, new_ids, read_state, write_state
from runtime.speculate import Drafting
from runtime.storage.flat_out import PATIENCE_S
from runtime.tensor_files import parse_ids
from runtime.tokens import TextStream, Tokenizer, load_tokenizer


def generate_command(
    manifest: ManifestOption,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt.")] = None,
    ids: Annotated[str | None, typer.Option(metavar="1,2,3", help="The prompt as token numbers.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="F", help="A UTF-8 file with the prompt.")] = None,
    n_tokens: Annotated[int, typer.Option("-n", "--n-tokens", min=1, help="Most tokens to generate.")] = 128,
    context: ContextOption = None,
    temp: Annotated[float, typer.Option(help="Temperature; 0 always takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that reach this probability together.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes a drawn text repeatable.")] = None,
    device: DeviceOption = None,
    vram_cache: Annotated[str, VRAM_OPTION] = AUTO,
    host_pool: Annotated[str, HOST_OPTION] = AUTO,
    chunk: ChunkOption = DEFAULT_CHUNK,
    state_in: Annotated[
        Path | None,
        typer.Option(metavar="F", help="A state from --state-out. The prompt begins with the saved one; only what follows it is computed."),
    ] = None,
    state_out: Annotated[Path | None, typer.Option(metavar="F", help="Where the state after the prompt goes.")] = None,
    long_context: Annotated[str | None, LONG_CONTEXT_OPTION] = None,
    exact_prefill: ExactPrefillOption = False,
    cold: Annotated[bool, typer.Option("--cold", help="Drop cached file pages first, and both caches after the prompt pass.")] = False,
    verify_reads: Annotated[int, VERIFY_OPTION] = VERIFY_EVERY,
    prefetch: Annotated[int | None, PREFETCH_OPTION] = None,
    tier_cap: Annotated[list[str] | None, TIER_CAP_OPTION] = None,
    drafter: Annotated[
        str | None, typer.Option(metavar="ngram|DIR", help="Check several drafted tokens at a time: repeats of the text, or a small Qwen3's in DIR.")
    ] = None,
    draft_gate: Annotated[
        str | None, typer.Option(metavar="adaptive|0..1", help="How sure the drafter must be of a token; without it adaptive.")
    ] = None,
    require_direct: RequireDirectOption = False,
    stats_json: Annotated[Path | None, typer.Option(metavar="F.json", help="Where the whole document with statistics goes.")] = None,
    heat_out: Annotated[Path | None, typer.Option(metavar="F.json", help="Where goes how often each expert was used: kprep place --heat.")] = None,
    trace_out: Annotated[Path | None, typer.Option(metavar="F.safetensors", help="Where each token's experts go: bench --routing trace:F.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document with ids, text and statistics.")] = False,
) -> None:
    """Continue a prompt."""
    sampler = new_sampler(temp, top_p, seed)
    choice, gate = _drafter_of(drafter, draft_gate)
    options = Options(
        device,
        vram_cache,
        host_pool,
        context,
        chunk,
        exact_prefill,
        cold,
        verify_reads,
        prefetch,
        parse_tier_caps(tier_cap),
        require_direct,
        is_long_context=is_long_context(long_context),
    )
    read_prompt = _prompt_reader(prompt, ids, prompt_file)
    check_outputs({"--state-out": state_out, "--stats-json": stats_json, "--heat-out": heat_out, "--trace-out": trace_out})
    where = choose_device(device)
    prepared = open_model(manifest)
    if choice is not None:
        options = replace(options, drafter_bytes=choice.device_bytes(prepared.geometry, where))
    tokenizer = load_tokenizer(prepared.tokenizer_directory, vocab_size=prepared.geometry.vocab_size)
    prompt_ids = read_prompt(tokenizer)
    limit = context_limit(prepared.geometry, context, is_long_context=options.is_long_context)
    check_ids(prompt_ids, prepared.geometry, limit)
    saved = None
    if state_in is not None:
        saved = read_state(state_in, prepared.manifest, context=limit, arithmetic=options.arithmetic, is_long_context=options.is_long_context)
        n_new = len(new_ids(saved, prompt_ids, where=f"--state-in {state_in}"))
        tokens, new = counted(len(saved.ids), "token"), counted(n_new, "is", "are")
        note(f"{state_in}: {tokens} in {saved.arithmetic.value} arithmetic, made on {saved.made_on}; {new} new")
    keep = None if state_out is None else partial(_write_state, state_out, prepared.manifest)
    log = RoutingLog(prepared.geometry) if heat_out or trace_out else None
    live = LiveLine(is_shown=can_show_live(is_text_on_stdout=not as_json))
    with Engine(prepared, options, on_remark=live.note, routing_log=log) as engine:
        drawn = f"temperature {temp}, top-p {top_p}, seed {sampler.seed}" if temp > 0 else "the likeliest token each time"
        drafts = "no drafter" if choice is None else f"drafter {choice}, gate {draft_gate or ADAPTIVE}"
        n_most = min(n_tokens, limit - len(prompt_ids) + 1)
        most = f"at most {counted(n_most, 'token')}" + (", then the context is full" if n_most < n_tokens else "")
        effective = [*engine.effective(), f"{most}; {drawn}; {drafts}"]
        for line in effective:
            note(line)
        if saved is not None:
            engine.go_on_from(saved)
        drafting = None if choice is None else Drafting(choice.start(tokenizer, gate, engine.device), engine.geometry.vocab_size, live.note)
        try:
            document = _generate(engine, tokenizer, prompt_ids, n_tokens, sampler, live, keep=keep, is_quiet=as_json, drafting=drafting)
        finally:
            if drafting is not None:
                drafting.drafter.close()
        facts = device_facts(engine.device)
    command = ["krun", *sys.argv[1:]]
    whole = stats_document(
        command=command,
        configurations={"A": Configuration(command, effective)},
        manifest=manifest_facts(prepared.path, prepared.manifest),
        device=facts,
        repeats=[repeat_facts(document, configuration="A", repeat=1)],
    )
    results = [partial(_show, document, as_json=as_json)]
    if stats_json is not None:
        results.append(partial(write_bytes, stats_json, json.dumps(whole, ensure_ascii=False, indent=1).encode()))
    if log is not None and heat_out is not None:
        results.append(partial(_write_heat, heat_out, log))
    if log is not None and trace_out is not None:
        results.append(partial(_write_trace, trace_out, log, prepared.manifest.source.digest))
    _write_all(results)


def _write_all(results: Sequence[Callable[[], None]]) -> None:
    """Write each result; the first one that fails is raised when the others are written."""
    first: KtierError | OSError | None = None
    for write in results:
        try:
            write()
        except (KtierError, OSError) as error:
            first = first or error
    if first is not None:
        raise first


def _show(document: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        say(json.dumps(document, ensure_ascii=False))
        return
    write_text("\n")
    for line in [f"{counted(len(document['ids']), 'token')}, ended by {document['finish']}", *statistics_lines(document["stats"])]:
        note(line)


def _drafter_of(drafter: str | None, draft_gate: str | None) -> tuple[DrafterChoice | None, Gate]:
    """Return what was asked for. Raises UsageError for a flag that would do nothing."""
    gate = parse_gate(draft_gate or ADAPTIVE, flag="--draft-gate")
    if drafter is None:
        if draft_gate is not None:
            raise UsageError("--draft-gate: without effect without --drafter; leave it out")
        return None, gate
    return choose_drafter(drafter), gate


def _write_state(path: Path, manifest: Manifest, saved: SavedState) -> None:
    write_state(path, saved, manifest)
    note(f"{path}: the state after {counted(len(saved.ids), 'token')}, {format_size(path.stat().st_size)}")


def _write_heat(path: Path, log: RoutingLog) -> None:
    write_heat(path, log.heat())
    note(f"{path}: uses of {counted(int((log.heat() > 0).sum()), 'expert')}")


def _write_trace(path: Path, log: RoutingLog, model: str) -> None:
    trace = log.trace()
    write_trace(path, trace, {"model": model})
    note(f"{path}: the experts of {counted(len(trace), 'token')}")


def _prompt_reader(prompt: str | None, ids: str | None, prompt_file: Path | None) -> Callable[[Tokenizer], list[int]]:
    """Return how to get the prompt's ids from a tokenizer. Raises UsageError unless exactly one prompt is given."""
    if sum(given is not None for given in (prompt, ids, prompt_file)) != 1:
        raise UsageError("give exactly one of -p TEXT, --ids 1,2,3 and --prompt-file F")
    if ids is not None:
        numbers = parse_ids(ids, flag="--ids")
        return lambda tokenizer: numbers
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_bytes().decode()
        except OSError as error:
            raise BadInputError(f"--prompt-file {prompt_file}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise BadInputError(f"--prompt-file {prompt_file}: is not UTF-8 at byte {error.start}") from None
    assert prompt is not None
    text = prompt
    return lambda tokenizer: tokenizer.encode(text)


def _generate(
    engine: Engine, tokenizer: Tokenizer, prompt_ids: list[int], n_tokens: int, sampler: Sampler, live: LiveLine, *,
    keep: Callable[[SavedState], None] | None, is_quiet: bool, drafting: Drafting | None,
) -> dict[str, Any]:  # fmt: skip
    stream, new_ids, text, finish = TextStream(tokenizer), list[int](), "", None
    engine.on_progress = lambda progress: live.show(prompt_line(progress))
    try:
        for step in engine.generate(prompt_ids, n_tokens=n_tokens, sampler=sampler, on_prompt=keep, drafting=drafting):
            new_ids.append(step.token)
            finish = step.finish
            piece = stream.push(step.token) if finish != "end" else ""
            piece += stream.finish() if finish else ""
            text += piece
            if not is_quiet:
                write_text(piece)
            live.show(_live_text(engine, len(new_ids)))
    finally:
        live.end()
    flat_out = engine.flat_out_bytes_per_s() if engine.decode_counts.read_bytes else None
    if flat_out is None and engine.decode_counts.read_bytes:
        live.note(f"the storage efficiency is not known: a drive did not answer for {PATIENCE_S:.0f} s")
    stats = statistics(engine, n_generated=len(new_ids), process_wall_s=_process_wall_s(), flat_out=flat_out)
    stats["drafting"] = None if drafting is None else drafting.statistics()
    return {"ids": new_ids, "prompt_ids": prompt_ids, "text": text, "finish": finish, "seed": sampler.seed, "stats": stats}


def _live_text(engine: Engine, n_tokens: int) -> str:
    counts, timing = engine.decode_counts, engine.timing
    assert timing.token_times
    return live_line(
        n_tokens=n_tokens,
        seconds=timing.token_times[-1] - timing.prompt_ended,
        read_bytes=counts.read_bytes,
        n_device_hits=counts.n_device_hits,
        n_host_hits=counts.n_host_hits,
        n_reads=counts.n_records,
    )


def _process_wall_s() -> float:
    """Return the seconds since this process was started."""
    started_ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
