"""krun uploads: what kprep runs beside its measurements."""

import json
from typing import Annotated

import typer

from layout.terminal import say
from runtime.upload_load import upload_until_closed


def uploads_command(
    seconds: Annotated[float, typer.Option(help="Longest time.")],
    record_bytes: Annotated[int, typer.Option(min=1, help="Bytes of each piece.")],
) -> None:
    """Upload pinned memory to the GPU until the input is closed; kprep place --with-uploads runs it."""
    # The descriptor and not sys.stdin, whose lock the waiting thread would hold at exit.
    say(json.dumps(upload_until_closed(0, seconds=seconds, record_bytes=record_bytes, on_ready=lambda: say("ready"))))
