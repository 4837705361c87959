"""kprep plan."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from layout.checkpoint import open_checkpoint
from layout.terminal import say
from manifests.errors import NoSpaceError
from prep.cli.arguments import LIMIT_HELP, RESERVE_HELP, drive_requests, reserve_of
from prep.extraction.plan import make_plan
from prep.measuring.measure import DEFAULT_SECONDS
from prep.requests import disk_bytes


def plan_command(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Directory with config.json, the index and the shards.")],
    tier: Annotated[list[str] | None, typer.Option(metavar="A=DIR", help="A drive that extract shall write to; may be repeated.")] = None,
    limit: Annotated[list[str] | None, typer.Option(metavar="A=SIZE", help=LIMIT_HELP)] = None,
    reserve: Annotated[str | None, typer.Option(metavar="SIZE", help=RESERVE_HELP)] = None,
    measure_seconds: Annotated[
        float, typer.Option(min=0.05, max=3600, help="Seconds to read the checkpoint for, to tell how long it takes.")
    ] = DEFAULT_SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document in place of text.")] = False,
) -> None:
    """Say what an extraction would make, where, and whether it fits. Reads headers, writes nothing."""
    # A limit may be in slots, whose size the checkpoint's headers tell.
    record_bytes = disk_bytes(open_checkpoint(checkpoint, most_faults=sys.maxsize).record.n_bytes) if limit else None
    requests = drive_requests(tier or [], limit or [], record_bytes=record_bytes)
    plan = make_plan(checkpoint, requests, reserve_bytes=reserve_of(reserve), seconds=measure_seconds)
    if as_json:
        say(json.dumps(plan.to_dict()))
    else:
        for line in plan.lines():
            say(line)
    if not plan.fits:
        raise NoSpaceError(plan.reason)
