"""kprep doctor."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from layout.findings import finding_line
from layout.sizes import counted
from layout.terminal import say
from manifests.errors import KtierError
from prep.doctor import examine


def doctor_command(
    paths: Annotated[list[Path] | None, typer.Argument(metavar="PATH", help="Directories to examine.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document in place of text.")] = False,
) -> None:
    """Examine this machine and directories on its drives; each finding has its cure."""
    findings = examine(paths or [])
    n_bad = sum(finding.level == "bad" for finding in findings)
    if as_json:
        say(json.dumps({"would_work": not n_bad, "findings": [dataclasses.asdict(finding) for finding in findings]}, ensure_ascii=False))
    else:
        for finding in findings:
            say(finding_line(finding))
    if n_bad:
        raise KtierError(f"{counted(n_bad, 'finding')} would keep a run from working")
