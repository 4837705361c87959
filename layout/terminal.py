"""What both commands share on a terminal: exit codes, messages and progress.

Beside the two cli folders this is the one place that knows typer and rich.
"""

import os
import signal
import sys
import time
from importlib.metadata import version
from types import FrameType, TracebackType
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from layout.early_exit import REQUESTS_TO_END
from layout.sizes import format_rate, format_size
from manifests.errors import Interrupted, KtierError

PLAIN_LINE_EVERY_S = 10.0
# Of what takes less time a rate says nothing.
LEAST_RATED_S = 0.1


def run_command(app: typer.Typer, *, name: str) -> int:
    """Run a command line and return its exit code; a user's mistake ends in one message, never in a stack trace."""
    _open_closed_streams(name)
    for number in REQUESTS_TO_END:
        signal.signal(number, _interrupt)
    try:
        app(prog_name=name)
    except KtierError as error:
        note(f"{name}: {error}")
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output has gone; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return KtierError.exit_code
    except OSError as error:
        note(f"{name}: {error.filename or 'input/output'}: {error.strerror or error}")
        return KtierError.exit_code
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        _ignore_requests_to_end()
    return 0


def add_version(app: typer.Typer, *, name: str) -> None:
    """Give a command line its --version, which prints name and version and ends."""

    def show(is_asked: bool) -> None:
        if is_asked:
            say(f"{name} {version('ktier')}")
            raise typer.Exit

    @app.callback()
    def options(_: Annotated[bool, typer.Option("--version", callback=show, is_eager=True, help="Print name and version.")] = False) -> None:
        pass


def _open_closed_streams(name: str) -> None:
    """Give what was closed by whoever began the process a place: Python has None there, and nothing that is written or read expects that."""
    is_lost = sys.stdout is None
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, mode))  # noqa: SIM115 (it stays open)
    if is_lost:
        note(f"{name}: standard output is closed: what would go there is lost")


def _interrupt(number: int, frame: FrameType | None) -> None:
    # A second Ctrl-C would break off the cleaning up that the first one began.
    _ignore_requests_to_end()
    raise Interrupted("interrupted; what was finished stays, and nothing half-written is left")


def _ignore_requests_to_end() -> None:
    for number in REQUESTS_TO_END:
        signal.signal(number, signal.SIG_IGN)


# Whether a line of text was begun and not ended.
_is_in_line = False


def say(text: str) -> None:
    """Print a result."""
    write_text(f"{text}\n")


def write_text(text: str) -> None:
    """Print a piece of a text that goes on."""
    global _is_in_line
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}; the result is lost", "standard output") from None
    _is_in_line = not text.endswith("\n") if text else _is_in_line


def note(text: str) -> None:
    """Print a remark or an error beside the results; on a terminal not behind a piece of a text."""
    is_behind = _is_in_line and sys.stdout.isatty() and sys.stderr.isatty()
    print(f"\n{text}" if is_behind else text, file=sys.stderr, flush=True)


class ProgressLine:
    """Shows bytes done per phase, with rate and time left: a moving bar on a terminal, else a plain line now and then.

    A phase begins where it is told that nothing is done yet, else with the report before its first one, or with the context.
    """

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=console) if console.is_terminal else None
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[str, float] = {}
        self._last_line = self._last_report = time.monotonic()

    def __enter__(self) -> "ProgressLine":
        self._last_line = self._last_report = time.monotonic()
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        if self._bars is not None:
            task = self._tasks.setdefault(phase, TaskID(-1))
            if task < 0:
                task = self._tasks[phase] = self._bars.add_task(phase, total=total)
            self._bars.update(task, completed=done, total=total)
            return
        now = time.monotonic()
        if not done or phase not in self._began:
            self._began[phase] = self._last_report if done else now
        seconds = now - self._began[phase]
        self._last_report = now
        if done >= total or (done and now - self._last_line >= PLAIN_LINE_EVERY_S):
            self._last_line = now
            rate = f", {format_rate(done / seconds)}" if seconds >= LEAST_RATED_S else ""
            note(f"{phase}: {format_size(done)} of {format_size(total)}{rate}")
