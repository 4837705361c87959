"""kprep place."""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from layout.prepared import Prepared, open_prepared
from layout.sizes import counted, format_rate, format_size, parse_size
from layout.terminal import ProgressLine, note, say
from manifests.errors import UsageError
from prep.cli.arguments import LIMIT_HELP, MANIFEST_HELP, RESERVE_HELP, drive_requests, reserve_of
from prep.measuring.measure import DEFAULT_SECONDS, Soak, soak
from prep.measuring.upload_process import uploads_command
from prep.placement.heat import read_heat
from prep.placement.history import Former, former_manifests, roll_back
from prep.placement.place import Options, Placement, place
from prep.placement.report import fio_lines, place_lines, to_dict, tokens, what_if_lines, what_if_plans
from prep.requests import check_requests, disk_bytes

_WHAT_IF = re.compile(r"rate=([0-9]+(?:\.[0-9]+)?)(GB/s|MB/s)?,capacity=(\S+)")
LIST = "list"


def place_command(
    manifest_path: Annotated[Path, typer.Argument(metavar="MANIFEST", help=MANIFEST_HELP)],
    tier: Annotated[
        list[str] | None, typer.Option(metavar="A=DIR", help="A drive's tier, A to D, and directory; the complete new set. May be repeated.")
    ] = None,
    measure_drives: Annotated[bool, typer.Option("--measure-drives", help="Measure the drives first; else profiles of the manifest stay.")] = False,
    measure_seconds: Annotated[
        float | None, typer.Option(min=0.05, max=3600, help=f"Seconds at each step of measuring; default {DEFAULT_SECONDS:g}.")
    ] = None,
    with_uploads: Annotated[bool, typer.Option("--with-uploads", help="Measure beside uploads to the GPU, too.")] = False,
    fio: Annotated[
        bool | None, typer.Option("--fio/--no-fio", help="Whether measuring prints the command by which fio measures the same; it does without this.")
    ] = None,
    soak_seconds: Annotated[
        float | None, typer.Option("--soak", metavar="SECONDS", min=1, max=86400, help="Read each drive for long first; say if it slows down.")
    ] = None,
    heat: Annotated[Path | None, typer.Option(metavar="F", help="How often each expert is read: krun's counters, or JSON.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides by lot what is equally good.")] = 0,
    reserve: Annotated[str | None, typer.Option(metavar="SIZE", help=RESERVE_HELP)] = None,
    limit: Annotated[list[str] | None, typer.Option(metavar="C=SIZE", help=LIMIT_HELP)] = None,
    remove_unplanned: Annotated[
        bool,
        typer.Option("--remove-unplanned", help="REMOVE experts' files that the plan does not name, each once another copy is read and proved."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")] = False,
    rollback: Annotated[
        str | None, typer.Option(metavar="GENERATION", help="Put a former manifest back, in place of all else; 'list' shows which there are.")
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(
            "--what-if", metavar="rate=7,capacity=2TB", help="What one more drive of so many GB/s, or one more copy set, brings; changes nothing."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document in place of text.")] = False,
) -> None:
    """Decide which drive holds which experts, copy them there, prove every copy, and publish a new manifest."""
    path = manifest_path / "manifest.yaml" if manifest_path.is_dir() else manifest_path
    if rollback is not None:
        measuring = (measure_drives, measure_seconds, with_uploads, fio is not None, soak_seconds)
        if any((tier, *measuring, heat, seed, reserve, limit, remove_unplanned, dry_run, what_if)):
            raise UsageError("--rollback stands alone")
        _roll_back(path, rollback, as_json=as_json)
        return
    if not tier:
        raise UsageError("--tier: name the complete set of drives, like --tier A=/mnt/nvme0; or --rollback list")
    idle = {"--with-uploads": with_uploads, "--fio or --no-fio": fio is not None, "--measure-seconds": measure_seconds is not None}
    if not measure_drives and any(idle.values()):
        raise UsageError(f"{next(flag for flag, is_given in idle.items() if is_given)} goes with --measure-drives")
    one_more = _what_if(what_if)
    is_dry_run = dry_run or one_more is not None
    prepared = open_prepared(path)
    n_bytes = prepared.record.n_bytes
    requests = drive_requests(tier, limit or [], record_bytes=disk_bytes(n_bytes))
    options = Options(
        requests=requests,
        reserve_bytes=reserve_of(reserve),
        measure_seconds=(measure_seconds or DEFAULT_SECONDS) if measure_drives else None,
        uploads_command=uploads_command(n_bytes) if with_uploads else None,
        heat=None if heat is None else read_heat(heat, prepared.geometry),
        seed=seed,
        is_removing=remove_unplanned,
    )
    soaks = _soak(prepared, options, soak_seconds, as_json=as_json)
    document: dict[str, Any] = {}

    def show(placement: Placement) -> None:
        for remark in placement.remarks:
            note(remark)
        rate, plans = tokens(placement), {}
        if one_more is not None:
            plans = what_if_plans(placement, rate_bytes_per_s=one_more[0], capacity_bytes=one_more[1])
        document.update(to_dict(placement, rate, plans) | {"soak": soaks})
        if as_json:
            return
        for line in (
            *place_lines(placement, rate),
            *what_if_lines(placement, plans),
            *(fio_lines(placement) if measure_drives and fio is not False else ()),
        ):
            say(line)

    with ProgressLine() as progress:
        manifest = place(path, options, is_dry_run=is_dry_run, on_decided=show, on_progress=progress, on_remark=note)
    if as_json:
        say(json.dumps(document | {"is_dry_run": is_dry_run, "generation": None if manifest is None else manifest.generation}))
    elif manifest is None:
        again = "; what was measured is not kept: to place measures again, and may plan a little otherwise" if measure_drives else ""
        say(f"{'dry run' if dry_run else '--what-if'}: nothing was changed{again}")
    else:
        say(f"{path}: generation {manifest.generation}; the former one is kept in {path.with_suffix('.history').name}/")


def _what_if(text: str | None) -> tuple[float, int] | None:
    """Return the bytes/s and the bytes of `--what-if`."""
    if text is None:
        return None
    match = _WHAT_IF.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise UsageError(f"--what-if: {text!r} is not understood; give a rate in GB/s and a capacity: rate=7,capacity=2TB")
    return float(match[1]) * (1e6 if match[2] == "MB/s" else 1e9), parse_size(match[3], flag="--what-if capacity")


def _soak(prepared: Prepared, options: Options, seconds: float | None, *, as_json: bool) -> list[dict[str, Any]]:
    if seconds is None:
        return []
    check_requests(options.requests, home=prepared.directory)
    found = []
    for request in options.requests:
        note(f"soak: reading {request.directory} for {seconds:g} s")
        result = soak(request.directory, seconds, record_bytes=prepared.record.n_bytes, seed=options.seed, reserve_bytes=options.reserve_bytes)
        for remark in result.remarks:
            note(remark)
        if not as_json:
            say(_soak_line(request.directory, result))
        found.append({"directory": str(request.directory), **{name: getattr(result, name) for name in Soak.__slots__}})
    return found


def _soak_line(directory: Path, s: Soak) -> str:
    warmth = "; ".join(f"{name} {s.celsius_before[name]:.0f} to {degrees:.0f} C" for name, degrees in s.celsius_after.items())
    rates = f"first {s.window_s:g} s {format_rate(s.first_bytes_per_s)}, last {s.window_s:g} s {format_rate(s.last_bytes_per_s)}"
    read = f"{format_size(s.n_bytes)} in {s.seconds:.0f} s at depth {s.depth}"
    return f"soak     {directory}: {read}; {rates}; {warmth or 'no temperature to be read'}"


def _roll_back(path: Path, text: str, *, as_json: bool) -> None:
    if text != LIST:
        if not text.isdecimal():
            raise UsageError(f"--rollback {text}: expected the number of a generation, or '{LIST}'")
        manifest = roll_back(path, int(text))
        word = f"{path}: generation {manifest.generation} of {manifest.created} is the current one again; kprep verify-hashes proves its copies"
        say(json.dumps({"generation": manifest.generation, "created": manifest.created}) if as_json else word)
        return
    kept = former_manifests(path)
    if as_json:
        say(json.dumps([{"generation": f.generation, "created": f.manifest.created, "drives": _drives_of(f)} for f in kept]))
        return
    for former in kept:
        drives = "; ".join(f"{d['tier']} {d['directory']}: {counted(d['n_files'], 'expert')}" for d in _drives_of(former))
        say(f"generation {former.generation}, {former.manifest.created}: {drives}")
    if not kept:
        say(f"{path}: no former manifest is kept")


def _drives_of(former: Former) -> list[dict[str, Any]]:
    return [{"tier": d.tier, "directory": d.directory, "n_files": int(d.holds.sum())} for d in former.manifest.drives]
