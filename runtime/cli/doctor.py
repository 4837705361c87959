"""krun doctor."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from layout.findings import finding_line
from layout.terminal import say
from manifests.errors import UsageError
from runtime.doctor import Examination, examine


def doctor_command(
    manifest: Annotated[Path | None, typer.Option("-m", "--manifest", metavar="MANIFEST", help="Would this prepared model fit?")] = None,
    device: Annotated[str, typer.Option(help="The device that a run is to use: cuda or cpu.")] = "cuda",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Examine the GPU and the way to it; each finding has its cure. Drives are examined by kprep doctor."""
    if device not in ("cuda", "cpu"):
        raise UsageError(f"--device {device}: expected cpu or cuda")
    result = examine(manifest, device)
    if as_json:
        say(json.dumps(_document(result, device), ensure_ascii=False))
    else:
        for finding in result.findings:
            say(finding_line(finding))
    if result.error is not None:
        raise result.error


def _document(result: Examination, device: str) -> dict[str, Any]:
    return {
        "device": device,
        "would_work": result.error is None,
        "findings": [dataclasses.asdict(finding) for finding in result.findings],
        "registration": result.registration and result.registration._asdict(),
        "uploads": [upload._asdict() for upload in result.uploads],
        "kernels": [kernel._asdict() for kernel in result.kernels],
    }
