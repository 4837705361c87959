"""krun's command line inside the test process, which has torch already."""

import io
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from conftest import Outcome

from layout.terminal import run_command
from runtime.cli import app


def krun(*arguments: object) -> Outcome:
    """Run krun; what it does not turn into a message fails the test."""
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "argv", ["krun", *map(str, arguments)]):
            code = run_command(app, name="krun")
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


def refused(outcome: Outcome, code: int, *parts: str) -> None:
    """It ended with a code and a message that has these parts, and no result."""
    assert outcome.code == code and outcome.out == "", outcome
    assert all(part in outcome.err for part in parts), outcome.err
