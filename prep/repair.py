"""What to do about bad records: say where an intact copy is, and restore from it."""

from layout.direct import aligned_buffer, probe_directory, span_bytes
from layout.prepared import Prepared
from layout.writer import sync_directory
from manifests.errors import DamagedDataError
from manifests.ranges import parse_ranges
from prep.copying import Sources, copy_expert
from prep.verify import BadRecord, Findings


def describe_bad_record(prepared: Prepared, bad: BadRecord, findings: Findings) -> str:
    """Return the message for a bad record, with where an intact copy is."""
    spoilt = {(b.drive, b.layer, b.expert) for b in findings.bad_records}
    others = [n for n in prepared.drives_holding(bad.layer, bad.expert) if (n, bad.layer, bad.expert) not in spoilt]
    intact, unread = ([n for n in others if (n in findings.drives) is was_read] for was_read in (True, False))
    if not prepared.drive_directories[bad.drive].is_dir():
        cure = "the directory is gone: is the drive mounted?"
    elif intact:
        cure = f"another copy is intact on {', '.join(map(prepared.drive_name, intact))}; kprep verify-hashes --repair restores it"
    elif unread:
        cure = f"a copy that was not read now is on {', '.join(map(prepared.drive_name, unread))}; kprep verify-hashes --repair tries it"
    else:
        shards = " or ".join(_shards_of(prepared, bad.layer))
        cure = f"no other copy is intact; fetch {shards} again and extract anew"
    serials = ", ".join(device.serial for device in prepared.manifest.drives[bad.drive].devices if device.serial)
    device = f" (drive serial {serials})" if serials else ""
    return f"layer {bad.layer} expert {bad.expert} on {prepared.drive_name(bad.drive)}: {bad.what}{device}\n    {cure}"


def _shards_of(prepared: Prepared, layer: int) -> list[str]:
    """Return the checkpoint's files that hold experts of a layer."""
    n_layers = prepared.geometry.n_layers
    files = prepared.manifest.source.files
    return [f.name for f in files if f.expert_layers and parse_ranges(f.expert_layers, n_layers, where=f.name)[layer]]


def repair(prepared: Prepared, findings: Findings) -> tuple[list[BadRecord], list[BadRecord]]:
    """Restore bad records from intact copies; return those restored and those for which no copy is intact."""
    holds = [drive.holds.copy() for drive in prepared.manifest.drives]
    for bad in findings.bad_records:
        holds[bad.drive][bad.layer, bad.expert] = False
    sources = Sources(prepared, holds)
    restored, lost = [], []
    for bad in findings.bad_records:
        directory = prepared.drive_directories[bad.drive]
        if not directory.is_dir() or not any(h[bad.layer, bad.expert] for h in holds):
            lost.append(bad)
            continue
        mode = probe_directory(directory)
        buffer = aligned_buffer(span_bytes(prepared.record.n_bytes, max(mode.alignment, sources.alignment)))
        try:
            copy_expert(sources, bad.layer, bad.expert, directory=directory, mode=mode, buffer=buffer)
        except DamagedDataError:
            # The copies on drives that were not verified just now may be bad too.
            lost.append(bad)
            continue
        sync_directory(directory)
        restored.append(bad)
    return restored, lost
