"""krun bench: the same run several times, each in a process of its own; a table to stdout, one line per run to stderr.

With --synthetic it is one run without a model's weights, which bench_synthetic.py makes.
"""

import contextlib
import functools
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from layout.terminal import note, say
from layout.writer import write_bytes
from manifests.errors import BadInputError, DamagedDataError, KtierError, UsageError
from manifests.load import load_manifest
from runtime.bench.chart import bench_chart
from runtime.bench.document import Configuration, device_facts, manifest_facts, stats_document
from runtime.bench.runs import (
    Variant,
    check_same_length,
    check_same_prompt,
    first_difference,
    is_only_cut,
    outputs_of,
    parting,
    rate_series,
    read_bench,
    run_turns,
    running_order,
    summary_of,
    table_lines,
    time_bar,
)
from runtime.cli.arguments import HOST_OPTION, VRAM_OPTION, DeviceOption, check_outputs
from runtime.cli.bench_synthetic import DEFAULT_FILES, DEFAULT_ROUTING, DEFAULT_TOKENS, Asked, bench_synthetic, default_files
from runtime.cli.generate import generate_command
from runtime.tensor_files import parse_ids

DEFAULT_PROMPT = "A lighthouse keeper finds a letter in a bottle. Tell the story."
DEFAULT_RUN_TOKENS = 128
_THIS, _OTHER, _AGAINST = "A", "B", "other "
# By the parameters' names: what has a meaning in one of the two modes only.
_RUN_ONLY = ("manifest", "prompt", "ids", "prompt_file", "repeat", "cold", "pair", "against", "flags")
# Of krun generate: what says which text is made, and how much of it.
_OF_THE_TEXT = ("prompt", "ids", "prompt_file", "n_tokens", "context", "long_context", "temp", "top_p", "seed")
_SYNTHETIC_ONLY = ("directories", "expert_files", "routing", "warm", "rows", "seed", "keep_files")


class Earlier(NamedTuple):
    """What --against names: a file, and the repeats in it."""

    path: Path
    repeats: list[dict[str, Any]]


def bench_command(
    context: typer.Context,
    manifest: Annotated[Path | None, typer.Option("-m", "--manifest", metavar="MANIFEST", help="Time runs of a prepared model.")] = None,
    synthetic: Annotated[str | None, typer.Option(metavar="GEOMETRY", help="Time a geometry without weights: k3.1, k3, tiny, or a file.")] = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt; without one, a short one of our own.")] = None,
    ids: Annotated[str | None, typer.Option(metavar="1,2,3", help="The prompt as token numbers.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="F", help="A UTF-8 file with the prompt.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each configuration.")] = 3,
    n_tokens: Annotated[
        int | None, typer.Option("-n", "--n-tokens", min=1, help=f"Most tokens: {DEFAULT_RUN_TOKENS}; steps with --synthetic: {DEFAULT_TOKENS}.")
    ] = None,
    device: DeviceOption = None,
    vram_cache: Annotated[str | None, VRAM_OPTION] = None,
    host_pool: Annotated[str | None, HOST_OPTION] = None,
    prefetch: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=2, help="As for generate; with --synthetic the guesses are emulated, and none without it.")
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="As krun generate has it.")] = False,
    pair: Annotated[str | None, typer.Option(metavar="FLAGS", help="A second configuration: these flags on top; runs alternate A B B A.")] = None,
    against: Annotated[Path | None, typer.Option(metavar="OTHER.json", help="A document of before, whose ids must be equal too.")] = None,
    directories: Annotated[
        list[str] | None, typer.Option("--dir", metavar="DIR[:GB_PER_S][@SHARE]", help="With --synthetic: stands for a drive, slowed to a rate.")
    ] = None,
    expert_files: Annotated[
        int | None, typer.Option(min=1, help=f"With --synthetic: record files in each directory; default {DEFAULT_FILES}, or one for each expert.")
    ] = None,
    routing: Annotated[
        str, typer.Option(metavar="KIND", help="With --synthetic: uniform, zipf, zipf:EXPONENT, among:N or trace:FILE.")
    ] = DEFAULT_ROUTING,
    warm: Annotated[int, typer.Option(min=0, help="With --synthetic: steps before those that are counted.")] = 2,
    rows: Annotated[int, typer.Option(min=1, max=16, help="With --synthetic: tokens of one step.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="With --synthetic: of spine, records and routing.")] = 0,
    keep_files: Annotated[bool, typer.Option("--keep-files", help="With --synthetic: leave the record files for the next run.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="F.json", help="Where the whole document goes.")] = None,
    chart: Annotated[Path | None, typer.Option(metavar="F.svg", help="Where a picture goes: drives over time, and a token's time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document instead of the table.")] = False,
    flags: Annotated[list[str] | None, typer.Argument(metavar="-- FLAGS", help="Further flags of krun generate, for every run.")] = None,
) -> None:
    """Time a run: fresh processes, every repeat kept, medians with ranges, and no comparison of unequal texts.

    With --synthetic: time the engine at a geometry without its weights, on directories that stand for drives.
    """
    if (manifest is None) == (synthetic is None):
        raise UsageError("give exactly one of -m MANIFEST and --synthetic GEOMETRY")
    _refuse_idle(context, _SYNTHETIC_ONLY if synthetic is None else _RUN_ONLY, mode="-m" if synthetic is None else "--synthetic")
    check_outputs({"--out": out, "--chart": chart})
    if synthetic is not None:
        n_steps = DEFAULT_TOKENS if n_tokens is None else n_tokens
        n_files = default_files(synthetic) if expert_files is None else expert_files
        asked = Asked(
            synthetic, directories or [], n_files, routing, n_steps, warm, rows, vram_cache, host_pool, prefetch or 0, device, seed, keep_files
        )
        bench_synthetic(asked, out=out, chart=chart, as_json=as_json)
        return
    assert manifest is not None
    named = {"--prompt": prompt, "--ids": ids, "--prompt-file": prompt_file, "-n": n_tokens or DEFAULT_RUN_TOKENS, "--device": device}
    named |= {"--vram-cache": vram_cache, "--host-pool": host_pool, "--prefetch": prefetch}
    arguments = ["-m", str(manifest), *(part for flag, value in named.items() if value is not None for part in (flag, str(value)))]
    variants = _variants([*arguments, *(["--cold"] if cold else []), *(flags or [])], pair)
    _bench_runs(manifest, variants, repeat, against=against, out=out, chart=chart, as_json=as_json)


def _refuse_idle(context: typer.Context, names: tuple[str, ...], *, mode: str) -> None:
    """Raise UsageError if a flag was given that would do nothing."""
    given = [p for p in context.command.params if p.name in names and _is_given(context, p.name)]
    if given:
        called = ", ".join("-- FLAGS" if p.name == "flags" else max(p.opts, key=len) for p in given)
        raise UsageError(f"{called}: without effect with {mode}; leave it out")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE" and context.params[name] not in (None, [], ())


def _bench_runs(
    manifest: Path, variants: list[Variant], n_repeats: int, *, against: Path | None, out: Path | None, chart: Path | None, as_json: bool
) -> None:
    earlier = None if against is None else Earlier(against, read_bench(against)["repeats"])
    if earlier is not None:
        _check_against(earlier, _parsed(list(variants[0].arguments[1:])))
    path = manifest / "manifest.yaml" if manifest.is_dir() else manifest
    facts = manifest_facts(path, load_manifest(path))

    repeats, fault = _run(variants, n_repeats, earlier)
    unequal = _unequal(repeats, earlier)
    fault = fault or unequal
    document = _document(variants, repeats, facts, fault)
    if out is not None:
        write_bytes(out, _json_text(document).encode())
    if chart is not None and repeats:
        write_bytes(chart, _chart(path, repeats).encode())
    if as_json:
        say(_json_text(document))
    elif repeats:
        for line in _table(repeats, earlier, is_equal=unequal is None):
            say(line)
    if fault is not None:
        raise fault


def _variants(arguments: list[str], pair: str | None) -> list[Variant]:
    """Return the one or two configurations to run. Raises UsageError for what krun generate would refuse."""
    variants = [_variant(_THIS, arguments)]
    if pair is not None:
        try:
            extra = shlex.split(pair)
        except ValueError as error:
            raise UsageError(f"--pair {pair!r}: {error}") from None
        if not extra:
            raise UsageError("--pair: no flags in it, so that both configurations would be the same; give what the second one has more")
        # Later flags win.
        _refuse_other_text(_parsed(arguments), _parsed([*arguments, *extra]))
        variants.append(_variant(_OTHER, [*arguments, *extra]))
    return variants


def _refuse_other_text(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Raise UsageError if a second configuration would make another text, so that there is nothing to compare."""
    if other := [f"--{key.replace('_', '-')}" for key in _OF_THE_TEXT if a[key] != b[key]]:
        cure = "give it beside --pair, for both, or time the two in runs of their own"
        raise UsageError(f"--pair: {', '.join(other)}: B would make another text than A, and rates of unequal texts are not compared; {cure}")


def _variant(name: str, arguments: list[str]) -> Variant:
    values = _parsed(arguments)
    n_prompts = sum(values[key] is not None for key in ("prompt", "ids", "prompt_file"))
    if n_prompts > 1:
        raise UsageError("give one of --prompt TEXT, --ids 1,2,3 and --prompt-file F, or none")
    if written := [flag for flag in ("stats_json", "heat_out", "trace_out", "state_out") if values[flag] is not None]:
        flag = f"--{written[0].replace('_', '-')}"
        raise UsageError(f"{flag}: each run would write over the file of the one before; use --out, or {flag} with krun generate")
    if not n_prompts:
        arguments = [*arguments, "--prompt", DEFAULT_PROMPT]
    if values["temp"] > 0 and values["seed"] is None:
        raise UsageError(f"--temp {values['temp']:g} without --seed: every run would draw another text; give a seed, or leave the temperature at 0")
    return Variant(name, ("generate", *arguments))


def _parsed(arguments: list[str]) -> dict[str, Any]:
    """Return the values that krun generate would see. Raises UsageError if it would not take them: before any run, not after the first."""
    values: dict[str, Any] = {}

    @functools.wraps(generate_command)
    def keep(**seen: Any) -> None:
        values.update(seen)

    app = typer.Typer(add_completion=False)
    app.command("generate")(keep)
    # It says itself, on stderr, what it does not like.
    with contextlib.suppress(SystemExit):
        typer.main.get_command(app).main(list(arguments), prog_name="krun generate")
    if not values:
        raise UsageError(f"krun generate would not run with {shlex.join(arguments)}; nothing was measured")
    return values


def _check_against(earlier: Earlier, values: dict[str, Any]) -> None:
    """Raise BadInputError for what the flags alone say: that no text of theirs can be equal to the earlier one."""
    if values["ids"] is not None:
        check_same_prompt(parse_ids(values["ids"], flag="--ids"), earlier.repeats, earlier.path)
    check_same_length(values["n_tokens"], earlier.repeats, earlier.path)


def _run(variants: list[Variant], n_repeats: int, earlier: Earlier | None) -> tuple[list[dict[str, Any]], KtierError | None]:
    """Return what ran, and why it ended early, if it did: what was measured until then is kept."""
    repeats: list[dict[str, Any]] = []
    remarks: set[str] = set()
    try:
        for done in run_turns(running_order(variants, n_repeats)):
            repeats.append(done)
            rate = done["stats"]["steady_decode_tok_per_s"]
            speed = "one token" if rate is None else f"steady decode {rate:.3f} tok/s"
            note(f"{done['configuration']} {done['repeat']} of {n_repeats}: {speed}, {done['wall_s']:.1f} s, ids {done['ids_xxh3_128'][:8]}")
            for remark in [r for r in _remarks(repeats) if r not in remarks]:
                remarks.add(remark)
                note(remark)
            if earlier is not None:
                check_same_prompt(done["prompt_ids"], earlier.repeats, earlier.path)
    except KtierError as error:
        return repeats, error
    return repeats, None


def _remarks(repeats: list[dict[str, Any]]) -> list[str]:
    """Return what makes the numbers say less than they seem to."""
    last, remarks = repeats[-1], []
    if len(last["ids"]) == 1 and last["finish"] == "end":
        remarks.append("the text ended after 1 token: nothing to time; give -p, or another one")
    if any(r["configuration"] != last["configuration"] and r["printed"] == last["printed"] for r in repeats):
        remarks.append(f"{_OTHER} is what {_THIS} is: the flags of --pair left every setting as it was, so {_OTHER} / {_THIS} shows chance alone")
    return remarks


def _unequal(repeats: list[dict[str, Any]], earlier: Earlier | None) -> KtierError | None:
    """Return why the rates may not be compared, None if they may."""
    outputs = outputs_of(repeats)
    if repeats and earlier is not None:
        try:
            check_same_prompt(repeats[0]["prompt_ids"], earlier.repeats, earlier.path)
        except BadInputError as error:
            return error
        outputs += outputs_of(earlier.repeats, prefix=_AGAINST)
    if (pair := first_difference(outputs)) is None:
        return None
    where = f"unequal texts, so the rates may not be compared: {parting(*pair)}"
    if is_only_cut(*pair):
        return BadInputError(f"{where}; the shorter one was cut there: give both the same -n and -c")
    cure = "the same model on the same device must give the same ids: check it with kprep verify-hashes, and compare logits with krun score"
    return DamagedDataError(f"{where}; {cure}")


def _document(variants: list[Variant], repeats: list[dict[str, Any]], manifest: dict[str, Any], fault: KtierError | None) -> dict[str, Any]:
    printed = {r["configuration"]: r["printed"] for r in reversed(repeats)}
    # Looked at after the runs: asking takes memory of the GPU.
    device = device_facts(torch.device(repeats[0]["stats"]["device"])) if repeats else None
    document = stats_document(
        command=["krun", *sys.argv[1:]],
        configurations={v.name: Configuration(["krun", *v.arguments], printed.get(v.name, [])) for v in variants},
        manifest=manifest,
        device=device,
        repeats=repeats,
        failure=None if fault is None else str(fault),
    )
    summary = {name: {figure: spread and spread._asdict() for figure, spread in figures.items()} for name, figures in summary_of(repeats).items()}
    return {**document, "summary": summary}


def _json_text(document: dict[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, indent=1)


def _table(repeats: list[dict[str, Any]], earlier: Earlier | None, *, is_equal: bool) -> list[str]:
    """Return the figures of each configuration, and ratios only of equal texts."""
    summary = dict(summary_of(repeats))
    ratios = {f"{_OTHER} / {_THIS}": (_OTHER, _THIS)} if _OTHER in summary else {}
    if earlier is not None:
        for name, figures in summary_of(earlier.repeats).items():
            summary[f"{_AGAINST}{name}"] = figures
        ratios |= {f"{_THIS} / {_AGAINST}{_THIS}": (_THIS, f"{_AGAINST}{_THIS}")} if f"{_AGAINST}{_THIS}" in summary else {}
    n_runs = {name: sum(r["configuration"] == name for r in repeats) for name in (_THIS, _OTHER)}
    runs = ", ".join(f"{n} of {name}" for name, n in n_runs.items() if n)
    texts = f"ids {repeats[0]['ids_xxh3_128']}{f', equal to those of {earlier.path}' if earlier is not None else ''}"
    return [
        *table_lines(summary, ratios if is_equal else {}),
        f"median (least to most); runs: {runs}; {texts if is_equal else 'unequal texts, no ratios'}",
    ]


def _chart(path: Path, repeats: list[dict[str, Any]]) -> str:
    # The first run's drives: lines of several runs over one another would show none.
    return bench_chart(f"krun bench, {path}", rates=rate_series(repeats[0]), bars=[time_bar(repeat) for repeat in repeats])
