"""The command lines inside the test process, which has torch already; one that takes a signal or ends by it needs a process of its own."""

import io
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import typer
from conftest import Outcome

from layout.terminal import run_command
from prep.cli import app as kprep_app
from runtime.cli import app as krun_app

# What a run measures of the drives at its end takes half a second and more otherwise; no test looks at how good the measure is.
FLAT_OUT_S = 0.02


def krun(*arguments: object) -> Outcome:
    """Run krun; what it does not turn into a message fails the test."""
    return _run(krun_app, "krun", *arguments)


def kprep(*arguments: object) -> Outcome:
    """Run kprep; what it does not turn into a message fails the test."""
    return _run(kprep_app, "kprep", *arguments)


def _run(app: typer.Typer, name: str, *arguments: object) -> Outcome:
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with (
            redirect_stdout(out),
            redirect_stderr(err),
            mock.patch.object(sys, "argv", [name, *map(str, arguments)]),
            mock.patch("runtime.engine.FLAT_OUT_SECONDS", FLAT_OUT_S),
            mock.patch("runtime.cli.bench_synthetic.FLAT_OUT_S", FLAT_OUT_S),
        ):
            code = run_command(app, name=name)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Outcome(code, out.getvalue(), err.getvalue())


def talked(model: Path, lines: str, *flags: object) -> Outcome:
    """Run krun chat with lines from a pipe."""
    with mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode("utf-8", "surrogateescape")))):
        return krun("chat", "-m", model, *flags)


def ran(*arguments: object) -> Outcome:
    outcome = krun(*arguments)
    assert outcome.code == 0, outcome
    return outcome


def prepared(*arguments: object) -> Outcome:
    """Run a kprep that must succeed."""
    outcome = kprep(*arguments)
    assert outcome.code == 0, outcome
    return outcome


def refused(outcome: Outcome, code: int, *parts: str) -> None:
    """It ended with a code and a message that has these parts, and no result."""
    assert outcome.code == code and outcome.out == "", outcome
    assert all(part in outcome.err for part in parts), outcome.err
