"""kprep place."""

from pathlib import Path
from typing import Annotated

import typer

from layout.prepared import Prepared, open_prepared
from layout.sizes import format_rate, format_size
from layout.terminal import ProgressLine, note, say
from prep.cli.arguments import LIMIT_HELP, RESERVE_HELP, drive_requests, reserve_of
from prep.measure import DEFAULT_SECONDS
from prep.place import Placement, carry_out, decide
from prep.requests import disk_bytes


def place_command(
    manifest_path: Annotated[Path, typer.Argument(metavar="MANIFEST")],
    tier: Annotated[list[str], typer.Option(metavar="A=DIR", help="A drive's tier, A to D, and directory; the complete new set. May be repeated.")],
    measure_drives: Annotated[bool, typer.Option("--measure-drives", help="Measure each drive first; the base is split by the rates.")] = False,
    measure_seconds: Annotated[float, typer.Option(min=0.05, max=3600, help="Seconds at each queue depth, with --measure-drives.")] = DEFAULT_SECONDS,
    reserve: Annotated[str | None, typer.Option(metavar="SIZE", help=RESERVE_HELP)] = None,
    limit: Annotated[list[str] | None, typer.Option(metavar="C=SIZE", help=LIMIT_HELP)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be copied, and change nothing.")] = False,
) -> None:
    """Decide which drive holds which experts, copy them there, prove every copy, and publish a new manifest."""
    prepared = open_prepared(manifest_path)
    requests = drive_requests(tier, limit or [], record_bytes=disk_bytes(prepared.record.n_bytes))
    placement = decide(prepared, requests, reserve_bytes=reserve_of(reserve), measure_seconds=measure_seconds if measure_drives else None)
    for remark in placement.remarks:
        note(f"left out of the sources: {remark}")
    _say_placement(prepared, placement)
    if dry_run:
        say("dry run: nothing was changed")
        return
    with ProgressLine() as progress:
        manifest = carry_out(prepared, placement, on_progress=progress)
    say(f"{prepared.path}: generation {manifest.generation}; the former one is kept in manifest.history/")


def _say_placement(prepared: Prepared, placement: Placement) -> None:
    n_bytes = prepared.record.n_bytes
    for drive in placement.drives:
        n_held, n_new = int(drive.holds.sum()), int(drive.to_copy.sum())
        rate = "not measured"
        if (p := drive.profile) is not None:
            mode = "direct" if p.is_direct else "buffered"
            rate = f"{format_rate(p.read_bytes_per_s)} at depth {p.depth} ({mode}), p50 {p.p50_us:.0f} us, p99 {p.p99_us:.0f} us"
        say(
            f"tier {drive.request.tier} {drive.request.directory}: {rate}; holds {n_held} experts, {format_size(n_held * n_bytes)}; "
            f"{n_new} to copy, {format_size(n_new * n_bytes)}"
        )
