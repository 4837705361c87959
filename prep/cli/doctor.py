"""kprep doctor."""

from pathlib import Path
from typing import Annotated

import typer

from layout.findings import finding_line
from layout.sizes import counted
from layout.terminal import say
from manifests.errors import KtierError
from prep.doctor import examine


def doctor_command(paths: Annotated[list[Path] | None, typer.Argument(metavar="[PATH...]", help="Directories to examine.")] = None) -> None:
    """Examine this machine and directories on its drives; each finding has its cure."""
    findings = examine(paths or [])
    for finding in findings:
        say(finding_line(finding))
    n_bad = sum(finding.level == "bad" for finding in findings)
    if n_bad:
        raise KtierError(f"{counted(n_bad, 'finding')} would keep a run from working")
