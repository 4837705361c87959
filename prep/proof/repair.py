"""What to do about bad records: say where an intact copy is, and restore from it."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from layout.checkpoint import Checkpoint
from layout.direct import aligned_buffer, probe_directory, read_extent, round_up, span_bytes
from layout.gather import gather_record
from layout.hash_lists import xxh3_128_hex
from layout.prepared import Prepared
from layout.reader import check_hash
from layout.sizes import counted
from layout.writer import sync_directory, write_record
from manifests.errors import BadInputError, DamagedDataError, UsageError
from prep.copying import Sources, copy_expert
from prep.placement.sites import drive_sites, is_mounted, shards_of
from prep.proof.verify import BadRecord, Findings


def _cure(prepared: Prepared, bad: BadRecord, findings: Findings, spoilt: set[tuple[int, int, int]]) -> str:
    """Return what to do about a bad record, with where a copy is that is not among the spoilt ones, (drive, layer, expert)."""
    others = [
        n
        for n in prepared.drives_holding(bad.layer, bad.expert)
        if prepared.drive_directories[n].is_dir() and (n, bad.layer, bad.expert) not in spoilt
    ]
    intact, unread = ([n for n in others if (n in findings.drives) is was_read] for was_read in (True, False))
    if not prepared.drive_directories[bad.drive].is_dir():
        return "the directory is gone: is the drive mounted?"
    if intact:
        return f"another copy is intact on {', '.join(map(prepared.drive_name, intact))}; kprep verify-hashes --repair restores it"
    if unread:
        return f"a copy that was not read now is on {', '.join(map(prepared.drive_name, unread))}; kprep verify-hashes --repair tries it"
    shards = " or ".join(shards_of(prepared, bad.layer))
    return f"no other copy is intact; fetch {shards} again, then kprep verify-hashes --repair --checkpoint DIR restores it"


def _what(prepared: Prepared, bad: BadRecord) -> str:
    serials = ", ".join(device.serial for device in prepared.manifest.drives[bad.drive].devices if device.serial)
    device = f" (drive serial {serials})" if serials else ""
    return f"layer {bad.layer} expert {bad.expert} on {prepared.drive_name(bad.drive)}: {bad.what}{device}"


def describe_bad_records(prepared: Prepared, records: Sequence[BadRecord], findings: Findings) -> Iterator[str]:
    """Yield the message for each bad record, in the order of drives, or one for all of a drive that holds no expert file at all.

    What to do is said once for those that follow one another and need the same.
    """
    spoilt = {(bad.drive, bad.layer, bad.expert) for bad in findings.bad_records}
    for drive, of_drive in groupby(records, key=lambda bad: bad.drive):
        bad_ones = list(of_drive)
        if len(bad_ones) > 1 and not any(prepared.drive_directories[drive].glob("L*-E*.bin")):
            cure = "mount it, or kprep verify-hashes --repair restores them from other copies, with --checkpoint DIR from its shards"
            yield f"{prepared.drive_name(drive)}: not one expert file is there, {counted(len(bad_ones), 'copy', 'copies')} missing\n    {cure}"
        else:
            for cure, alike in groupby(bad_ones, key=lambda bad: _cure(prepared, bad, findings, spoilt)):
                yield "\n".join([*(_what(prepared, bad) for bad in alike), f"    {cure}"])


def describe_gone_drive(prepared: Prepared, drive: int, findings: Findings, *, is_repairing: bool) -> str:
    """Return the message for a drive whose directory is not there."""
    unchecked = f"{counted(findings.gone[drive], 'copy', 'copies')} {'left out of the repair' if is_repairing else 'not checked'}"
    return (
        f"tier {prepared.manifest.drives[drive].tier} {prepared.drive_directories[drive]}: the directory is gone, {unchecked}; "
        "mount it, or place again with the drives that are left"
    )


def repair(prepared: Prepared, findings: Findings, checkpoint: Checkpoint | None) -> tuple[list[BadRecord], list[BadRecord]]:
    """Restore bad records from intact copies, or else from the checkpoint; return those restored and those for which there is neither.

    Raises BadInputError if the checkpoint is another than the one that was extracted, UsageError for a drive that is not mounted.
    """
    if checkpoint is not None and checkpoint.digest != prepared.manifest.source.digest:
        raise BadInputError(f"{checkpoint.directory}: is not the checkpoint that {prepared.path} was extracted from")
    _check_mounted(prepared, findings)
    holds = [site.vouched for site in drive_sites(prepared)]
    for bad in findings.bad_records:
        holds[bad.drive][bad.layer, bad.expert] = False
    sources = Sources(prepared, holds)
    restored: list[BadRecord] = []
    lost: list[BadRecord] = []
    for bad in findings.bad_records:
        directory = prepared.drive_directories[bad.drive]
        is_done = directory.is_dir() and (_from_copy(sources, bad, directory) or (checkpoint is not None and _from_shard(prepared, checkpoint, bad)))
        (restored if is_done else lost).append(bad)
    return restored, lost


def _check_mounted(prepared: Prepared, findings: Findings) -> None:
    """Refuse to fill the root file system in place of a drive that is not mounted."""
    bad = {record.drive for record in findings.bad_records}
    for n, site in enumerate(drive_sites(prepared)):
        if n in bad and site.device is not None and not is_mounted(prepared, site):
            held = counted(int(prepared.manifest.drives[n].holds.sum()), "expert")
            raise UsageError(
                f"{site.name}: none of its {held} is there, and the directory is part of the root file system: mount the drive, or "
                "leave it out with kprep place; nothing was restored"
            )


def _from_copy(sources: Sources, bad: BadRecord, directory: Path) -> bool:
    mode = probe_directory(directory)
    buffer = aligned_buffer(span_bytes(sources.prepared.record.n_bytes, max(mode.alignment, sources.alignment)))
    try:
        copy_expert(sources, bad.layer, bad.expert, directory=directory, mode=mode, buffer=buffer)
    except DamagedDataError:
        # There is no other copy, or those on drives that were not verified just now are bad too.
        return False
    sync_directory(directory)
    return True


def _from_shard(prepared: Prepared, checkpoint: Checkpoint, bad: BadRecord) -> bool:
    n_bytes, extent = prepared.record.n_bytes, prepared.expert_extent(bad.drive, bad.layer, bad.expert)
    mode = probe_directory(extent.path.parent)
    incoming = aligned_buffer(span_bytes(n_bytes, max(mode.alignment, checkpoint.read_mode.alignment)))
    outgoing = aligned_buffer(round_up(n_bytes, mode.alignment))
    gather_record(checkpoint, bad.layer, bad.expert, incoming=incoming, outgoing=outgoing)
    expected = prepared.hashes.get(bad.layer, bad.expert)
    if xxh3_128_hex(outgoing[:n_bytes]) != expected:
        return False

    def prove(partial: Path) -> None:
        check_hash(extent, read_extent(extent._replace(path=partial), incoming, mode), expected)

    write_record(extent.path, outgoing, n_bytes, mode, check=prove)
    sync_directory(extent.path.parent)
    return True
