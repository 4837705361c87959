"""kprep: one file per command; each parses, calls the library once, and prints. Results go to stdout, progress and errors to stderr."""

import sys

import typer

from layout.terminal import add_version, run_command
from prep.cli.adopt import adopt_command
from prep.cli.doctor import doctor_command
from prep.cli.extract import extract_command
from prep.cli.make_tiny import make_tiny_command
from prep.cli.place import place_command
from prep.cli.plan import plan_command
from prep.cli.verify import verify_command

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Turn a Kimi K3 or K3.1 checkpoint into files that krun runs."
)
add_version(app, name="kprep")
# In the order in which a user needs them.
app.command("doctor")(doctor_command)
app.command("plan")(plan_command)
app.command("extract")(extract_command)
app.command("adopt")(adopt_command)
app.command("place")(place_command)
app.command("verify-hashes")(verify_command)
app.command("make-tiny")(make_tiny_command)


def main() -> None:
    """Run kprep and exit with the code of its outcome."""
    sys.exit(run_command(app, name="kprep"))
