"""krun: one file per command: parse, one library call, print."""

import sys

import typer

from layout.terminal import run_command
from runtime.cli.bench import bench_command
from runtime.cli.doctor import doctor_command
from runtime.cli.generate import generate_command
from runtime.cli.score import score_command
from runtime.cli.uploads import uploads_command

# The main thread waits for reader threads; with the default 5 ms it would learn of a finished read 5 ms late whenever it is at work itself.
SWITCH_INTERVAL_S = 2e-4

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Run a model that kprep prepared.")
app.command("doctor")(doctor_command)
app.command("generate")(generate_command)
app.command("score")(score_command)
app.command("bench")(bench_command)
app.command("uploads", hidden=True)(uploads_command)


def main() -> None:
    """Run krun and exit with the code of its outcome."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sys.exit(run_command(app, name="krun"))
