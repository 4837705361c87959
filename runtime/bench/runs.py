"""Repeats of a run in fresh processes, all of them kept, and whether they may be compared: equal ids first, rates second.

It knows command lines and the documents that they print, and nothing of models.
"""

import json
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from layout.early_exit import REQUESTS_TO_END
from layout.sizes import counted, format_rate, format_size
from manifests.errors import BadInputError, KtierError
from runtime.bench.chart import RateSeries, TimeBar
from runtime.bench.document import repeat_facts

# A process of its own, whichever way this one was started; -P: not a package that happens to lie in the current directory.
_KRUN = (sys.executable, "-P", "-c", "from runtime.entry import main; main()")
_MESSAGE_BEGIN = "krun: "
# Above what any run measures, in seconds, bytes or rates, and small enough to be added and divided.
_NO_FIGURE = 1e18


class ChildError(KtierError):
    """A repeat ended badly: with the child's own message and exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Variant(NamedTuple):
    """A configuration by its name, and its command line behind `krun`."""

    name: str
    arguments: tuple[str, ...]


class Turn(NamedTuple):
    """One repeat that is to run; `repeat` counts from 1 for each variant."""

    variant: Variant
    repeat: int


def running_order(variants: Sequence[Variant], n_repeats: int) -> list[Turn]:
    """Return every variant's repeats in turn, forwards and backwards by rounds (A B B A A B ...): a steady drift then favours neither."""
    rounds = range(1, n_repeats + 1)
    return [Turn(variant, number) for number in rounds for variant in (variants if number % 2 else variants[::-1])]


def run_turns(turns: Sequence[Turn]) -> Iterator[dict[str, Any]]:
    """Run one after another and yield each repeat as it ends. Raises ChildError at the first that fails."""
    for turn in turns:
        generated = run_krun([*turn.variant.arguments, "--json"], label=f"{turn.variant.name} {turn.repeat}")
        yield repeat_facts(generated, configuration=turn.variant.name, repeat=turn.repeat)


def run_krun(arguments: Sequence[str], *, label: str) -> dict[str, Any]:
    """Run krun in a process of its own and return the document that it prints, with what it said beside it and its time from start to exit.

    Raises ChildError if it fails.
    """
    began, process = time.perf_counter(), None
    try:
        with _interrupts_held_back():
            process = subprocess.Popen([*_KRUN, *arguments], text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, said = process.communicate()
    except BaseException:
        # Asked to end ourselves: let the child put its files in order first.
        if process is not None:
            process.terminate()
            process.wait()
        raise
    if process.returncode:
        raise ChildError(_failure(arguments, label, process.returncode, said), max(process.returncode, KtierError.exit_code))
    document: dict[str, Any] = json.loads(out)
    return {**document, "printed": said.splitlines(), "wall_s": time.perf_counter() - began}


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let an interrupt come only after the block: a process is not begun and then forgotten."""
    arrived: list[int] = []
    former = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in REQUESTS_TO_END}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    if arrived:
        signal.raise_signal(arrived[0])


def _failure(arguments: Sequence[str], label: str, code: int, said: str) -> str:
    end = f"exit code {code}" if code > 0 else f"signal {-code}" + (", as the kernel sends when memory runs out" if code == -9 else "")
    # Its message is the last thing that it says; one that is no message of ours is shown with what came before.
    message = said[said.rfind(_MESSAGE_BEGIN) + len(_MESSAGE_BEGIN) :] if _MESSAGE_BEGIN in said else "\n".join(said.splitlines()[-10:])
    return f"{label}: {message.strip() or 'it said nothing'}\n  it was: {shlex.join(['krun', *arguments])}\n  and ended with {end}"


class Output(NamedTuple):
    """The ids that a run chose, under the name of that run; a text that is cut ended by -n or -c and not by itself."""

    name: str
    ids: list[int]
    is_cut: bool = False


def outputs_of(repeats: Sequence[Mapping[str, Any]], *, prefix: str = "") -> list[Output]:
    return [Output(f"{prefix}{r['configuration']} {r['repeat']}", r["ids"], r.get("finish") in ("length", "context")) for r in repeats]


def first_difference(outputs: Sequence[Output]) -> tuple[Output, Output] | None:
    """Return the first output and the first one that is not like it; None if all are equal."""
    return next(((outputs[0], other) for other in outputs[1:] if other.ids != outputs[0].ids), None)


def is_only_cut(a: Output, b: Output) -> bool:
    """Return whether one text is the other's beginning, cut there."""
    shorter, longer = sorted((a, b), key=lambda output: len(output.ids))
    return shorter.is_cut and longer.ids[: len(shorter.ids)] == shorter.ids


def parting(a: Output, b: Output) -> str:
    """Say where two texts part."""
    both = zip(a.ids, b.ids, strict=False)
    at = next((n for n, (x, y) in enumerate(both) if x != y), min(len(a.ids), len(b.ids)))
    chose = [
        f"{output.name} chose {output.ids[at]}" if at < len(output.ids) else f"{output.name} ended after {counted(at, 'token')}" for output in (a, b)
    ]
    return f"{a.name} and {b.name} part at new token {at + 1}: {', '.join(chose)}"


def read_bench(path: Path) -> dict[str, Any]:
    """Return a document that `krun bench --out` or `krun generate --stats-json` wrote. Raises BadInputError if it is none."""
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path}: is not JSON: {error}") from None
    repeats = document.get("repeats") if isinstance(document, dict) else None
    if not isinstance(repeats, list) or not repeats or not all(_is_repeat(repeat) for repeat in repeats):
        raise BadInputError(
            f"{path}: no repeats with ids and stats in it, or figures that are no numbers: expected a file that krun bench --out wrote"
        )
    return document


def _is_repeat(value: Any) -> bool:
    kinds = {"configuration": str, "repeat": int, "ids": list, "prompt_ids": list, "stats": dict}
    if not isinstance(value, dict) or not all(isinstance(value.get(key), kind) for key, kind in kinds.items()):
        return False
    phases, read_bytes = value["stats"].get("phases", {}), value["stats"].get("expert_read_bytes", {})
    decode = phases.get("decode", {}) if isinstance(phases, dict) else None
    if not isinstance(decode, dict) or not isinstance(read_bytes, dict):
        return False
    # Before the figures that divide them.
    counts = (decode.get(name) for name in ("n_experts_used", "n_device_hits", "n_host_hits"))
    return all(map(_is_figure, counts)) and all(_is_figure(figure.take(value)) for figure in FIGURES)


def _is_figure(value: Any) -> bool:
    """Return whether a value is what a figure may be: a number that is not negative, NaN or without end, or None."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _NO_FIGURE)


def check_same_prompt(prompt_ids: Sequence[int], others: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Raise BadInputError if any of a document's repeats had another prompt: there is nothing to compare then."""
    if (other := next((r["prompt_ids"] for r in others if r["prompt_ids"] != list(prompt_ids)), None)) is not None:
        raise BadInputError(
            f"--against {path}: made with another prompt, {_ids_text(other)}, here {_ids_text(prompt_ids)}: use the same one, or leave --against out"
        )


def _ids_text(ids: Sequence[int]) -> str:
    return f"{counted(len(ids), 'token')} ({','.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''})"


def check_same_length(n_tokens: int, others: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Raise BadInputError if no text of at most `n_tokens` can be equal to a document's, because another -n cut that one or cuts this one."""
    for repeat in others:
        n_other, is_cut = len(repeat["ids"]), repeat.get("finish") == "length"
        if n_other > n_tokens or (is_cut and n_other < n_tokens):
            made = f"made with -n {n_other}" if is_cut else f"its text has {counted(n_other, 'token')}"
            same = f"give -n {n_other}{'' if is_cut else ' or more'}, or leave --against out"
            raise BadInputError(f"--against {path}: {made}, here it is -n {n_tokens}: texts of unequal length are not compared; {same}")


class Figure(NamedTuple):
    """One number of a run: how it is called in documents and in the table, and how it is taken from a repeat; None where it was not measured."""

    name: str
    label: str
    take: Callable[[Mapping[str, Any]], float | None]
    form: Callable[[float], str]


def _stat(name: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda repeat: repeat["stats"].get(name)


def _hit_rate(kind: str) -> Callable[[Mapping[str, Any]], float | None]:
    def take(repeat: Mapping[str, Any]) -> float | None:
        decode = repeat["stats"].get("phases", {}).get("decode", {})
        n_hits, n_used = decode.get(kind), decode.get("n_experts_used")
        return n_hits / n_used if n_hits is not None and n_used else None

    return take


def _decode_read_bytes(repeat: Mapping[str, Any]) -> float | None:
    return repeat["stats"].get("expert_read_bytes", {}).get("decode")


FIGURES = (
    Figure("steady_decode_tok_per_s", "steady decode, tok/s", _stat("steady_decode_tok_per_s"), "{:.3f}".format),
    Figure("generation_tok_per_s", "generation rate, tok/s", _stat("generation_tok_per_s"), "{:.3f}".format),
    Figure("prompt_pass_s", "prompt pass, s", _stat("prompt_pass_s"), "{:.3f}".format),
    Figure("prompt_pass_tok_per_s", "prompt pass, tok/s", _stat("prompt_pass_tok_per_s"), "{:.2f}".format),
    Figure("storage_efficiency", "storage efficiency", _stat("storage_efficiency"), "{:.3f}".format),
    Figure("read_amplification", "read amplification", _stat("read_amplification"), "{:.3f}".format),
    Figure("decode_read_bytes", "expert bytes read in decode", _decode_read_bytes, format_size),
    Figure("decode_device_hit_share", "device hits in decode", _hit_rate("n_device_hits"), "{:.1%}".format),
    Figure("decode_host_hit_share", "host hits in decode", _hit_rate("n_host_hits"), "{:.1%}".format),
    Figure("process_wall_s", "process wall, s", lambda repeat: repeat.get("wall_s", repeat["stats"].get("process_wall_s")), "{:.2f}".format),
)


class Spread(NamedTuple):
    """The middle and the ends of what was measured `n` times."""

    median: float
    least: float
    most: float
    n: int


def spread_of(values: Sequence[float | None]) -> Spread | None:
    """Return the spread of the values that are there; None if there are none."""
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known), len(known)) if known else None


def summary_of(repeats: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Spread | None]]:
    """Return each configuration's spread of each figure."""
    names = list(dict.fromkeys(r["configuration"] for r in repeats))
    return {name: {f.name: spread_of([f.take(r) for r in repeats if r["configuration"] == name]) for f in FIGURES} for name in names}


def ratio_of(over: Spread | None, under: Spread | None) -> float | None:
    """Return the ratio of two medians, None where there is nothing to divide."""
    return over.median / under.median if over and under and under.median else None


class Column(NamedTuple):
    """A column of the table: a heading and a text for each figure."""

    heading: str
    cells: list[str]


def table_lines(summary: Mapping[str, Mapping[str, Spread | None]], ratios: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return medians with ranges, a column per configuration, then ratios of medians.

    ratios  heading -> the two names in the summary whose medians are divided
    """
    columns = [Column("", [f.label for f in FIGURES])]
    columns += [Column(name, [_spread_text(figures[f.name], f) for f in FIGURES]) for name, figures in summary.items()]
    for heading, (over, under) in ratios.items():
        values = [ratio_of(summary[over][f.name], summary[under][f.name]) for f in FIGURES]
        columns.append(Column(heading, ["" if value is None else f"{value:.3f}" for value in values]))
    widths = [max(map(len, [c.heading, *c.cells])) for c in columns]
    rows = zip(*([c.heading, *c.cells] for c in columns), strict=True)
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _spread_text(spread: Spread | None, figure: Figure) -> str:
    if spread is None:
        return "none"
    if spread.least == spread.most:
        return figure.form(spread.median)
    return f"{figure.form(spread.median)} ({figure.form(spread.least)} to {figure.form(spread.most)})"


# Under which name the statistics of decode hold each part of a token's time.
TIME_PARTS = {"waiting for drives": "wait_s", "uploads": "upload_wait_s", "GPU": "gpu_s", "host": "host_s"}


def time_bar(repeat: Mapping[str, Any]) -> TimeBar:
    """Return where the mean decode step of a repeat went; what no part accounts for is the rest. Without a step there are no parts."""
    rate, n_steps = repeat["stats"].get("generation_tok_per_s"), len(repeat["ids"]) - 1
    name = f"{repeat['configuration']} {repeat['repeat']}"
    if not rate or n_steps < 1:
        return TimeBar(name, ())
    decode = repeat["stats"].get("phases", {}).get("decode", {})
    parts = [(kind, decode[key] / n_steps) for kind, key in TIME_PARTS.items() if decode.get(key) is not None]
    rest = len(repeat["ids"]) / rate / n_steps - sum(seconds for _, seconds in parts)
    return TimeBar(name, (*parts, ("rest", max(0.0, rest))))


def drive_title(drive: Mapping[str, Any]) -> str:
    """Return how a drive of a run's statistics is called, with the rate that a directory was slowed down to."""
    emulated = drive.get("emulated_bytes_per_s")
    return f"{drive['directory']} (tier {drive['tier']}{f', emulated {format_rate(emulated)}' if emulated else ''})"


def rate_series(repeat: Mapping[str, Any]) -> list[RateSeries]:
    """Return what each drive read over time, from the samples {t_s, read_bytes: [so far, per drive]} of a repeat's statistics; none without them."""
    samples = repeat["stats"].get("samples") or []
    pairs = [(a, b) for a, b in pairwise(samples) if b["t_s"] > a["t_s"]]
    return [
        RateSeries(
            drive_title(drive),
            tuple((a["t_s"], b["t_s"], (b["read_bytes"][n] - a["read_bytes"][n]) / (b["t_s"] - a["t_s"])) for a, b in pairs),
        )
        for n, drive in enumerate(repeat["stats"].get("drives", []))
    ]
