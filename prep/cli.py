"""kprep: parse, one library call, print. Results go to stdout, progress and errors to stderr."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from layout.checkpoint import open_checkpoint
from layout.config import K3, K31
from layout.prepared import Prepared, open_prepared
from layout.sizes import format_rate, format_size, parse_size
from layout.terminal import ProgressLine, note, run_command, say
from manifests.errors import DamagedDataError, UsageError
from manifests.geometry import known_geometries, load_geometry
from manifests.manifest import TIERS
from prep.extract import MANIFEST_NAME, extract
from prep.measure import DEFAULT_SECONDS
from prep.place import DriveRequest, Placement, carry_out, decide, disk_bytes
from prep.tiny import limit_layers, make_checkpoint
from prep.verify import describe_bad_record, drives_named, repair, verify

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Turn a Kimi K3 or K3.1 checkpoint into files that krun runs."
)
_ARCHITECTURES = {"k3": K3, "k3.1": K31}


def main() -> None:
    """Run kprep and exit with the code of its outcome."""
    sys.exit(run_command(app, name="kprep"))


@app.command("make-tiny")
def make_tiny_command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty directory.")],
    geometry: Annotated[str, typer.Option(help=f"One of {', '.join(known_geometries())}, or a YAML file.")] = "tiny",
    architecture: Annotated[str | None, typer.Option(help="k3 or k3.1; without it the geometry decides: k3.1 if it has an indexer.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Keep only the first N layers.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
) -> None:
    """Make a checkpoint with random weights in the published format."""
    shape = load_geometry(geometry)
    name = architecture or ("k3.1" if shape.indexer else "k3")
    if name not in _ARCHITECTURES:
        raise UsageError(f"--architecture {name}: expected one of {', '.join(_ARCHITECTURES)}")
    if name == "k3" and shape.indexer is not None:
        shape = dataclasses.replace(shape, indexer=None)
    if layers is not None:
        shape = limit_layers(shape, layers)
    with ProgressLine() as progress:

        def on_progress(_: str, done: int, total: int) -> None:
            progress("checkpoint", done, total)

        make_checkpoint(out, shape, architecture=_ARCHITECTURES[name], seed=seed, on_progress=on_progress)
    say(f"made {out}: {_ARCHITECTURES[name]}, {shape.n_layers} layers, {shape.n_experts} experts a layer, seed {seed}")


@app.command("extract")
def extract_command(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Directory with config.json, the index and the shards.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty directory.")],
) -> None:
    """Write the spine, one file per expert, the tokenizer's files, hashes and the manifest."""
    source = open_checkpoint(checkpoint)
    for remark in source.facts.remarks:
        note(f"remark: {remark}")
    note(f"{checkpoint}: {source.facts.architecture}, {len(source.tensors)} tensors in {len(source.shards)} shards, read {source.read_mode}")
    if source.vision_tensors:
        note(f"left out: {len(source.vision_tensors)} vision tensors (images are not supported)")
    is_there = (out / MANIFEST_NAME).exists()
    with ProgressLine() as progress:
        manifest = extract(source, out, on_progress=progress)
    if is_there:
        say(f"{out / MANIFEST_NAME}: already extracted from this checkpoint; kprep verify-hashes proves its bytes")
        return
    g = manifest.geometry
    say(f"spine    {out / manifest.spine.path}: {format_size(manifest.spine.n_bytes)}, xxh3-128 {manifest.spine.xxh3_128}")
    say(
        f"experts  {out / manifest.drives[0].directory}: {g.n_routed_experts} files of {manifest.record.n_bytes} bytes, "
        f"{format_size(g.n_routed_experts * manifest.record.n_bytes)}"
    )
    say(f"manifest {out / MANIFEST_NAME}: generation {manifest.generation}")


@app.command("place")
def place_command(
    manifest_path: Annotated[Path, typer.Argument(metavar="MANIFEST")],
    tier: Annotated[list[str], typer.Option(metavar="A=DIR", help="A drive's tier, A to D, and directory; the complete new set. May be repeated.")],
    measure_drives: Annotated[bool, typer.Option("--measure-drives", help="Measure each drive first; the base is split by the rates.")] = False,
    measure_seconds: Annotated[float, typer.Option(min=0.05, help="Seconds at each queue depth, with --measure-drives.")] = DEFAULT_SECONDS,
    reserve: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Room to leave free on each file system; default: the smaller of 20GB and 5 %.")
    ] = None,
    limit: Annotated[list[str] | None, typer.Option(metavar="C=SIZE", help="The most that experts may take on each drive of a tier.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be copied, and change nothing.")] = False,
) -> None:
    """Decide which drive holds which experts, copy them there, prove every copy, and publish a new manifest."""
    prepared = open_prepared(manifest_path)
    requests = _drive_requests(tier, limit or [], record_bytes=disk_bytes(prepared.record.n_bytes))
    reserve_bytes = None if reserve is None else (0 if reserve == "0" else parse_size(reserve, flag="--reserve"))
    placement = decide(prepared, requests, reserve_bytes=reserve_bytes, measure_seconds=measure_seconds if measure_drives else None)
    for remark in placement.remarks:
        note(f"left out of the sources: {remark}")
    _say_placement(prepared, placement)
    if dry_run:
        say("dry run: nothing was changed")
        return
    with ProgressLine() as progress:
        manifest = carry_out(prepared, placement, on_progress=progress)
    say(f"{prepared.path}: generation {manifest.generation}; the former one is kept in manifest.history/")


def _drive_requests(tiers: list[str], limits: list[str], *, record_bytes: int) -> list[DriveRequest]:
    limit_of = {}
    for text in limits:
        letter, size = _split_tier(text, flag="--limit", form="C=500GB")
        limit_of[letter] = parse_size(size, flag=f"--limit {letter}", record_bytes=record_bytes)
    named = [_split_tier(text, flag="--tier", form="A=/mnt/nvme0") for text in tiers]
    strays = sorted(set(limit_of) - {letter for letter, _ in named})
    if strays:
        raise UsageError(f"--limit: no drive of tier {', '.join(strays)} is named by --tier")
    return [DriveRequest(letter, Path(directory), limit_of.get(letter)) for letter, directory in named]


def _split_tier(text: str, *, flag: str, form: str) -> tuple[str, str]:
    letter, equals, value = text.partition("=")
    if not equals or not value or len(letter) != 1 or letter not in TIERS:
        raise UsageError(f"{flag} {text}: expected a tier letter {', '.join(TIERS)}, an equals sign and a value, like {form}")
    return letter, value


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


@app.command("verify-hashes")
def verify_command(
    manifest_path: Annotated[Path, typer.Argument(metavar="MANIFEST")],
    drive: Annotated[str | None, typer.Option(metavar="D", help="Only this drive's experts: a directory, or a tier letter.")] = None,
    repair_them: Annotated[bool, typer.Option("--repair", help="Restore bad expert files from intact copies.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document in place of text.")] = False,
) -> None:
    """Read every file again, past the page cache, and name each one that is not what the manifest says."""
    prepared = open_prepared(manifest_path)
    with ProgressLine() as progress:
        findings = verify(prepared, drives=drives_named(prepared, drive), on_progress=progress)
    restored, lost = repair(prepared, findings) if repair_them else ([], findings.bad_records)
    if as_json:
        bad = [dict(b._asdict(), drive=str(prepared.drive_directories[b.drive]), is_restored=b in restored) for b in findings.bad_records]
        say(json.dumps({"n_records": findings.n_records, "n_bytes": findings.n_bytes, "bad_records": bad, "bad_files": findings.bad_files}))
    else:
        for record in restored:
            say(f"restored from an intact copy: layer {record.layer} expert {record.expert} on {prepared.drive_name(record.drive)}: {record.what}")
        for record in lost:
            say(describe_bad_record(prepared, record, findings))
        for fault in findings.bad_files:
            say(fault)
    if lost or findings.bad_files:
        raise DamagedDataError(f"{len(lost)} bad expert files and {len(findings.bad_files)} other bad files")
    if not as_json:
        is_all = drive is None
        say(
            f"{'restored; all else is' if restored else 'all'} intact: {findings.n_records} expert files "
            f"({format_size(findings.n_bytes)}{'' if is_all else f' on {drive}'}), spine, tokenizer, hash lists"
        )
