"""krun: one file per command: parse, one library call, print."""

import os
import sys

import typer

from layout.terminal import add_version, run_command
from manifests.errors import DeviceError
from runtime.cli.bench import bench_command
from runtime.cli.chat import chat_command
from runtime.cli.doctor import doctor_command
from runtime.cli.faults import with_faults_told
from runtime.cli.generate import generate_command
from runtime.cli.score import score_command
from runtime.cli.serve import serve_command
from runtime.cli.uploads import uploads_command

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Run a model that kprep prepared.")
add_version(app, name="krun")
app.command("doctor")(doctor_command)
app.command("generate")(with_faults_told(generate_command))
app.command("score")(with_faults_told(score_command))
app.command("chat")(with_faults_told(chat_command))
app.command("serve")(with_faults_told(serve_command))
app.command("bench")(with_faults_told(bench_command))
app.command("uploads", hidden=True)(uploads_command)


def main() -> None:
    """Run krun and exit with the code of its outcome."""
    code = run_command(app, name="krun")
    if code == DeviceError.exit_code:
        # A GPU that has failed fails again while Python puts away what lies on it: with its own text, and a signal instead of the code.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
