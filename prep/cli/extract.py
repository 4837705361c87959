"""kprep extract."""

from pathlib import Path
from typing import Annotated

import typer

from layout.checkpoint import Checkpoint, open_checkpoint
from layout.drives import shares_device
from layout.prepared import open_prepared
from layout.sizes import counted, format_size
from layout.terminal import ProgressLine, note, say
from manifests.errors import UsageError
from manifests.manifest import Manifest
from prep.cli.arguments import LIMIT_HELP, RESERVE_HELP, drive_requests, reserve_of
from prep.extraction.extract import JOURNAL_EVERY, MANIFEST_NAME, Settings, extract, is_finished_and_gone
from prep.extraction.only import extract_only, parse_only
from prep.extraction.release import saved_headers
from prep.requests import DriveRequest, disk_bytes


def extract_command(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Directory with config.json, the index and the shards.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty directory, or an unfinished extraction to go on with.")],
    tier: Annotated[
        list[str] | None, typer.Option(metavar="A=DIR", help="Write the experts straight to these drives, tier A or B, each once; may be repeated.")
    ] = None,
    limit: Annotated[list[str] | None, typer.Option(metavar="A=SIZE", help=LIMIT_HELP)] = None,
    reserve: Annotated[str | None, typer.Option(metavar="SIZE", help=RESERVE_HELP)] = None,
    release_shards: Annotated[
        bool, typer.Option("--release-shards", help="REMOVE each shard once all that was taken from it is read back and proved.")
    ] = False,
    journal_every: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help=f"Experts between two syncs of the journal; a kill costs at most so many; default {JOURNAL_EVERY}."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="L:E,L:E-E",
            help="Of a finished OUT, write only these experts again, such as 17:413,17:420-430, or 'missing' for all that have no copy left; "
            "CHECKPOINT needs no more than the shards that hold them.",
        ),
    ] = None,
    trust_journal: Annotated[bool, typer.Option("--trust-journal", help="When going on, do not read again what the journal says is there.")] = False,
) -> None:
    """Write the spine, one file per expert, the tokenizer's files, hashes and the manifest. Interrupted, the same command goes on."""
    if only is not None:
        if release_shards or trust_journal or limit or journal_every is not None or len(tier or []) > 1:
            raise UsageError("--only goes with one --tier and --reserve alone")
        _extract_only(checkpoint, out, only, drive_requests(tier or [], [], record_bytes=None), reserve_of(reserve))
        return
    if is_finished_and_gone(checkpoint, out):
        say(f"{out / MANIFEST_NAME}: already extracted; the checkpoint's shards have been removed since. kprep verify-hashes proves what is there")
        return
    source = open_for_extraction(checkpoint, out)
    if limit and not tier:
        raise UsageError("--limit: name the drives with --tier")
    drives = drive_requests(tier or [], limit or [], record_bytes=disk_bytes(source.record.n_bytes))
    settings = Settings(
        drives=drives,
        reserve_bytes=reserve_of(reserve),
        is_releasing=release_shards,
        is_journal_trusted=trust_journal,
        journal_every=journal_every or JOURNAL_EVERY,
    )
    run_extraction(source, out, settings)


def _extract_only(checkpoint: Path, out: Path, only: str, requests: list[DriveRequest], reserve_bytes: int | None) -> None:
    prepared = open_prepared(out)
    experts = parse_only(only, prepared)
    if not experts.any():
        say(f"{prepared.path}: every expert has a copy; kprep verify-hashes proves them")
        return
    request = requests[0] if requests else None
    with ProgressLine() as progress:
        done = extract_only(checkpoint, prepared, experts, request, reserve_bytes=reserve_bytes, on_progress=progress)
    say(f"{prepared.path}: generation {done.manifest.generation}; {counted(done.n_written, 'expert file')} written, {done.n_intact} there and intact")


def open_for_extraction(checkpoint: Path, out: Path) -> Checkpoint:
    """Open a checkpoint, counting shards that an unfinished extraction has released, and say what it is."""
    source = open_checkpoint(checkpoint, saved_headers=saved_headers(out))
    for remark in source.facts.remarks:
        note(f"remark: {remark}")
    note(
        f"{checkpoint}: {source.facts.architecture}, {len(source.tensors)} tensors in {counted(len(source.shards), 'shard')}, read {source.read_mode}"
    )
    if source.vision_tensors:
        note(f"left out: {counted(len(source.vision_tensors), 'vision tensor')} (images are not supported)")
    home = next(p for p in (out.resolve(), *out.resolve().parents) if p.exists())
    if home.is_dir() and shares_device(checkpoint, home):
        note("source and output are on one device: it reads and writes in turn, and takes about the sum of both times")
    return source


def run_extraction(source: Checkpoint, out: Path, settings: Settings) -> None:
    """Extract and say what was made."""
    is_there = (out / MANIFEST_NAME).exists()
    with ProgressLine() as progress:
        manifest = extract(source, out, settings, on_progress=progress, on_remark=note)
    if is_there:
        say(f"{out / MANIFEST_NAME}: already extracted from this checkpoint; spine and tokenizer are proved, kprep verify-hashes proves the experts")
        return
    say(f"spine    {out / manifest.spine.path}: {format_size(manifest.spine.n_bytes)}, xxh3-128 {manifest.spine.xxh3_128}")
    for drive in manifest.drives:
        n_files = int(drive.holds.sum())
        directory = Manifest.drive_directory(drive, out / MANIFEST_NAME)
        n_bytes = manifest.record.n_bytes
        say(f"experts  {directory} (tier {drive.tier}): {counted(n_files, 'file')} of {n_bytes} bytes, {format_size(n_files * n_bytes)}")
    say(f"manifest {out / MANIFEST_NAME}: generation {manifest.generation}")
