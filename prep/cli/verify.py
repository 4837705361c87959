"""kprep verify-hashes."""

import json
from pathlib import Path
from typing import Annotated

import typer

from layout.checkpoint import open_checkpoint
from layout.prepared import open_prepared
from layout.sizes import counted, format_size
from layout.terminal import ProgressLine, note, say
from manifests.errors import DamagedDataError, KtierError, UsageError
from prep.cli.arguments import MANIFEST_HELP
from prep.proof.receipts import Receipts
from prep.proof.repair import describe_bad_records, describe_gone_drive, repair
from prep.proof.selection import select_records
from prep.proof.verify import verify


def verify_command(
    manifest_path: Annotated[Path, typer.Argument(metavar="MANIFEST", help=MANIFEST_HELP)],
    drive: Annotated[str | None, typer.Option(metavar="D", help="Only this drive's experts: a directory, or a tier letter.")] = None,
    layer: Annotated[list[int] | None, typer.Option(metavar="N", help="Only this layer's experts; may be repeated.")] = None,
    sample: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only N experts, spread evenly over drives and layers.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Chooses the sample; default 0.")] = None,
    trust_receipts: Annotated[
        bool, typer.Option("--trust-receipts", help="Keep receipts, and do not read a file again that looks as it did then.")
    ] = False,
    repair_them: Annotated[bool, typer.Option("--repair", help="Restore bad expert files from intact copies.")] = False,
    checkpoint: Annotated[Path | None, typer.Option(metavar="DIR", help="With --repair: restore from its shards what no copy is left of.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document in place of text.")] = False,
) -> None:
    """Read every file again, past the page cache, and name each one that is not what the manifest says."""
    if checkpoint is not None and not repair_them:
        raise UsageError("--checkpoint goes with --repair")
    if seed is not None and sample is None:
        raise UsageError("--seed goes with --sample")
    prepared = open_prepared(manifest_path)
    selection = select_records(prepared, drive=drive, layers=layer or [], n_sample=sample, seed=seed or 0)
    receipts = Receipts(prepared)
    if receipts.remark:
        note(receipts.remark)
    with ProgressLine() as progress:
        findings = verify(prepared, selection, receipts=receipts, is_trusting=trust_receipts, on_progress=progress)
    restored, lost = repair(prepared, findings, open_checkpoint(checkpoint) if checkpoint else None) if repair_them else ([], findings.bad_records)
    for record in restored:
        receipts.add(record.drive, record.layer, record.expert)
    if trust_receipts:
        _keep(receipts)
    if as_json:
        bad = [dict(b._asdict(), drive=str(prepared.drive_directories[b.drive]), is_restored=b in restored) for b in findings.bad_records]
        counts = {"n_records": findings.n_records, "n_trusted": findings.n_trusted, "n_bytes": findings.n_bytes}
        gone = [{"drive": str(prepared.drive_directories[n]), "n_copies": count} for n, count in findings.gone.items()]
        say(json.dumps({**counts, "bad_records": bad, "bad_files": findings.bad_files, "gone_drives": gone}))
    else:
        for record in restored:
            say(f"restored: layer {record.layer} expert {record.expert} on {prepared.drive_name(record.drive)}: {record.what}")
        for text in describe_bad_records(prepared, lost, findings):
            say(text)
        for drive_number in findings.gone:
            say(describe_gone_drive(prepared, drive_number, findings, is_repairing=repair_them))
        for fault in findings.bad_files:
            say(fault)
    if lost or findings.bad_files or findings.gone:
        summary = f"{counted(len(lost), 'bad expert file')} and {counted(len(findings.bad_files), 'other bad file')}"
        raise DamagedDataError(f"{summary}; {counted(len(findings.gone), 'drive')} not there" if findings.gone else summary)
    if not as_json:
        trusted = f", {findings.n_trusted} more by their receipts" if findings.n_trusted else ""
        n_all = sum(int(d.holds.sum()) for d in prepared.manifest.drives)
        n_intact = selection.n_records - findings.n_trusted - len(restored)
        files = counted(n_intact, "expert file")
        if selection.n_records != n_all:
            files = f"{n_intact} of {counted(n_all, 'expert file')}"
        say(
            f"{'restored; all else is' if restored else 'all'} intact: {files} "
            f"({format_size(n_intact * prepared.record.n_bytes)}{f' on {drive}' if drive else ''}{trusted}), spine, tokenizer, hash lists"
        )


def _keep(receipts: Receipts) -> None:
    try:
        receipts.save()
    except KtierError as error:
        note(f"no receipts were kept: {error}")
