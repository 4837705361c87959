"""kprep adopt."""

from pathlib import Path
from typing import Annotated

import typer

from layout.prepared import open_prepared
from layout.sizes import counted
from layout.terminal import ProgressLine, note, say
from manifests.errors import UsageError
from manifests.manifest import TIERS
from prep.cli.arguments import RESERVE_HELP, reserve_of
from prep.cli.extract import open_for_extraction, run_extraction
from prep.extraction.extract import Settings
from prep.proof.adopt import adopt_into_manifest
from prep.requests import DriveRequest


def adopt_command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory with L*-E*.bin files; with --checkpoint, missing experts are extracted into it.")
    ],
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="Where spine and manifest go, with --checkpoint.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(metavar="CK", help="Compare with this checkpoint's bytes, and make a new output.")] = None,
    manifest: Annotated[Path | None, typer.Option(metavar="M", help="Compare with this manifest's hashes, and add them as a drive.")] = None,
    tier: Annotated[str | None, typer.Option(metavar="LETTER", help="The drive's tier: default A with --checkpoint, C with --manifest.")] = None,
    reserve: Annotated[str | None, typer.Option(metavar="SIZE", help=RESERVE_HELP)] = None,
) -> None:
    """Take over expert files that are there already: prove every one, and register them without copying."""
    if (checkpoint is None) == (manifest is None):
        raise UsageError("give exactly one of --checkpoint CK and --manifest M")
    if tier is not None and (len(tier) != 1 or tier not in TIERS):
        raise UsageError(f"--tier {tier}: expected one of {', '.join(TIERS)}")
    if checkpoint is not None:
        if out is None:
            raise UsageError("OUT is missing: name the directory where spine and manifest shall go")
        source = open_for_extraction(checkpoint, out)
        settings = Settings(drives=[DriveRequest(tier or "A", directory)], reserve_bytes=reserve_of(reserve), is_adopting=True)
        run_extraction(source, out, settings)
        return
    assert manifest is not None
    if out is not None:
        raise UsageError("OUT goes with --checkpoint; --manifest adds the drive to that manifest")
    if reserve is not None:
        raise UsageError("--reserve goes with --checkpoint; --manifest writes no data")
    prepared = open_prepared(manifest)
    with ProgressLine() as progress:
        new = adopt_into_manifest(prepared, directory, tier=tier or "C", on_progress=progress)
    note(f"{directory}: nothing was copied or changed but its experts.xxh128")
    drive = new.drives[-1]
    say(f"{prepared.path}: generation {new.generation}; {counted(int(drive.holds.sum()), 'expert')} on {directory} (tier {drive.tier})")
