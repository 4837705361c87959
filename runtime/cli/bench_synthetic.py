"""krun bench --synthetic: the engine at a model's full geometry without its weights, on directories that stand for drives."""

import json
import sys
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from layout.direct import probe_directory
from layout.record import record_layout
from layout.sizes import counted, format_rate, format_size
from layout.terminal import ProgressLine, note, say
from layout.writer import write_bytes
from manifests.errors import UsageError
from manifests.geometry import Geometry, load_geometry
from runtime.bench.chart import TimeBar, bench_chart
from runtime.bench.document import Configuration, device_facts, repeat_facts, stats_document
from runtime.bench.rig import Rig, Setting
from runtime.bench.routing import RIGHT_GUESSES, make_routing
from runtime.bench.runs import TIME_PARTS, rate_series
from runtime.bench.synthetic import (
    EmulatedDrive,
    SyntheticModel,
    parse_emulated_drive,
    records_removed_afterwards,
    spine_bytes,
    synthetic_model,
)
from runtime.engine import choose_device
from runtime.memory import AUTO
from runtime.report import synthetic_lines, synthetic_statistics
from runtime.start import Budgets, checked_kernels, planned_budgets, present_budgets

DEFAULT_TOKENS = 32
DEFAULT_FILES = 256
DEFAULT_ROUTING = "uniform"
# At each of several depths.
FLAT_OUT_S = 0.3


@dataclass(frozen=True)
class Asked:
    """The flags of krun bench --synthetic."""

    geometry: str
    directories: list[str]
    n_files: int
    routing: str
    n_tokens: int
    n_warm: int
    n_rows: int
    vram_cache: str | None
    host_pool: str | None
    n_prefetch: int
    device: str | None
    seed: int
    is_keeping_files: bool


def default_files(geometry: str) -> int:
    """Return how many record files a directory gets where nothing is said. Raises BadInputError for an unknown geometry."""
    return min(DEFAULT_FILES, load_geometry(geometry).n_routed_experts)


def bench_synthetic(asked: Asked, *, out: Path | None, chart: Path | None, as_json: bool) -> None:
    """Run once, set it beside the reader flat out in the same process, and print both."""
    geometry, device = load_geometry(asked.geometry), choose_device(asked.device)
    drives = _drives(asked.directories)
    _check(asked, geometry)
    # Whether the directories hold every expert is known before a file or a spine is made.
    model = synthetic_model(geometry, drives, asked.n_files, ["0" * 32] * asked.n_files, seed=asked.seed)
    budgets = asked.vram_cache or AUTO, asked.host_pool or AUTO, geometry, device
    planned_budgets(*budgets, spine_bytes=spine_bytes(geometry))
    kernels = checked_kernels(device, note, record_layout(geometry))
    with records_removed_afterwards([] if asked.is_keeping_files else [d.directory for d in drives], asked.n_files):
        n_there = sum((d.directory / name).exists() for d in drives for name in model.record_names)
        missing = [n for n, name in enumerate(model.record_names) if not all((d.directory / name).exists() for d in drives)]
        rig = _rig(asked, geometry, device, drives, missing)
        became = present_budgets(*budgets)
        effective = _effective(asked, drives, model, became, spine=rig.weights.n_bytes, n_there=n_there, device=device, kernels=kernels)
        for line in effective:
            note(line)
        run = rig.run(_setting(asked, drives, became), on_remark=note)
        flat_out, depth = rig.flat_out(drives, seconds=FLAT_OUT_S, n_slots=run.setting.n_host_slots)
    stats = synthetic_statistics(run, model, flat_out=flat_out, flat_out_depth=depth, device=str(device))
    for facts, drive in zip(stats["drives"], drives, strict=True):
        facts["emulated_bytes_per_s"] = drive.bytes_per_s
    document = _document(asked, effective, device, stats)
    if out is not None:
        write_bytes(out, document.encode())
    if chart is not None:
        write_bytes(chart, _chart(asked, stats).encode())
    if as_json:
        say(document)
    else:
        for line in synthetic_lines(stats):
            say(line)


def _drives(texts: list[str]) -> tuple[EmulatedDrive, ...]:
    """Return the directories. Raises UsageError if one is not there or there twice."""
    drives = tuple(map(parse_emulated_drive, texts))
    if not drives:
        raise UsageError("--dir is missing: name at least one directory for the record files, as --dir DIR[:GB_PER_S][@SHARE]")
    seen: set[Path] = set()
    for text, drive in zip(texts, drives, strict=True):
        if not drive.directory.is_dir():
            raise UsageError(f"--dir {text}: there is no directory {drive.directory}; make it, or mount the drive")
        if (place := drive.directory.resolve()) in seen:
            raise UsageError(f"--dir {text}: {drive.directory} is given twice; two directories below it may stand for two drives")
        seen.add(place)
    return drives


def _check(asked: Asked, geometry: Geometry) -> None:
    n_positions, n_experts = (asked.n_warm + asked.n_tokens) * asked.n_rows, geometry.n_routed_experts
    if n_positions > geometry.max_context:
        raise UsageError(
            f"--warm, -n and --rows make a text of {counted(n_positions, 'token')}; this model takes at most {geometry.max_context} here"
        )
    if asked.n_files > n_experts:
        raise UsageError(f"--expert-files {asked.n_files}: there are no more than {counted(n_experts, 'expert')} to read from them")
    # What is wrong with a routing shows before anything is made.
    make_routing(asked.routing, geometry, 1, seed=asked.seed)


def _rig(asked: Asked, geometry: Geometry, device: torch.device, drives: tuple[EmulatedDrive, ...], missing: list[int]) -> Rig:
    """Make what is missing; `missing` are the numbers, rising, of the record files that not every directory has: the progress counts no others."""
    n_bytes = record_layout(geometry).n_bytes

    def tell(n_made: int) -> None:
        if n_made - 1 in missing:
            progress("record files", bisect_right(missing, n_made - 1) * n_bytes, len(missing) * n_bytes)

    with ProgressLine() as progress:
        return Rig(
            geometry,
            device,
            drives,
            asked.n_files,
            seed=asked.seed,
            on_made=tell,
        )


def _setting(asked: Asked, drives: tuple[EmulatedDrive, ...], budgets: Budgets) -> Setting:
    return Setting(
        drives,
        budgets.vram.n_slots,
        budgets.host.n_slots,
        routing=asked.routing,
        n_tokens=asked.n_tokens,
        n_warm=asked.n_warm,
        n_rows=asked.n_rows,
        n_prefetch=asked.n_prefetch,
        seed=asked.seed,
    )


def _effective(
    asked: Asked,
    drives: tuple[EmulatedDrive, ...],
    model: SyntheticModel,
    budgets: Budgets,
    *,
    spine: int,
    n_there: int,
    device: torch.device,
    kernels: str,
) -> list[str]:
    """Return what is emulated and what the settings became, one line each."""
    g, size = model.geometry, format_size(model.record.n_bytes)
    files = f"{counted(asked.n_files, 'record file')} of {size} in each directory"
    n_all = asked.n_files * len(drives)
    if n_there:
        files += f", {'all' if n_there == n_all else n_there} of {n_all} were there: records as they are there, whatever their seed"
    if n_there == n_all:
        files += "; nothing was written"
    else:
        files += ", kept" if asked.is_keeping_files else ", those made are removed afterwards"
    guesses = f", {RIGHT_GUESSES:.0%} of the guesses right (emulated)" if asked.n_prefetch else ""
    return [
        f"emulated: geometry {asked.geometry} over a random spine of {format_size(spine)}, seed {asked.seed}; the text means nothing",
        f"emulated: {g.n_routed_experts} experts, {counted(len(g.moe_layers), 'layer')} of {g.n_experts}, on {files}",
        *(_drive_line(drive, model, n) for n, drive in enumerate(drives)),
        f"device {device}, torch {torch.__version__}, float32",
        f"kernels: {kernels}",
        f"routing {asked.routing}; {counted(asked.n_tokens, 'step')} counted after {asked.n_warm} to warm up, rows in each {asked.n_rows}",
        f"prefetch {counted(asked.n_prefetch, 'expert')} of each layer{guesses}; reads not hashed",
        str(budgets.vram),
        str(budgets.host),
    ]


def _drive_line(drive: EmulatedDrive, model: SyntheticModel, number: int) -> str:
    listed = model.manifest.drives[number]
    rate = f"slowed down to {format_rate(drive.bytes_per_s)} (emulated)" if drive.bytes_per_s else "as fast as it is"
    share = listed.holds.sum() / model.geometry.n_routed_experts
    return f"{drive.directory} (tier {listed.tier}): {rate}, holds {share:.1%} of the experts; read {probe_directory(drive.directory)}"


def _document(asked: Asked, effective: list[str], device: torch.device, stats: dict[str, Any]) -> str:
    command = ["krun", *sys.argv[1:]]
    document = stats_document(
        command=command,
        configurations={"A": Configuration(command, effective)},
        manifest=None,
        device=device_facts(device),
        repeats=[repeat_facts({"ids": [], "prompt_ids": [], "stats": stats}, configuration="A", repeat=1)],
    )
    return json.dumps(document, ensure_ascii=False, indent=1)


def _chart(asked: Asked, stats: dict[str, Any]) -> str:
    times = stats["token_time"]
    bar = TimeBar("A 1", tuple((name, times[key]) for name, key in TIME_PARTS.items()))
    return bench_chart(f"krun bench --synthetic {asked.geometry}", rates=rate_series({"stats": stats}), bars=[bar])
