"""extract: from a checkpoint's shards to a spine, one file per expert, the tokenizer's files, hashes and a manifest.

The experts' bytes pass through unchanged. Everything appears under a partial name first, and the manifest last: without it nothing counts.
"""

import datetime
from collections.abc import Callable
from pathlib import Path

from layout.checkpoint import INDEX_NAME, Checkpoint, read_json
from layout.config import end_ids_of
from layout.direct import aligned_buffer, probe_directory, round_up, span_bytes
from layout.drives import default_reserve, describe_directory, free_bytes
from layout.gather import gather_record
from layout.hash_lists import HASH_LIST_NAME, ExpertHashes, xxh3_128_hex
from layout.parallel import run_parallel
from layout.record import LAYOUT_NAME, NIBBLE_ORDER, SCALE_KIND, expert_file_name
from layout.sizes import format_size
from layout.writer import PARTIAL_SUFFIX, sync_directory, write_bytes, write_record
from manifests.errors import BadInputError, NoSpaceError
from manifests.load import load_manifest
from manifests.manifest import CarriedFile, Drive, HashList, Manifest, Record, Source, SourceFile, Spine, Tokenizer
from manifests.ranges import format_ranges
from manifests.store import write_manifest
from prep.drive_facts import manifest_devices
from prep.spine import write_spine

MANIFEST_NAME = "manifest.yaml"
SPINE_NAME = "spine.gguf"
EXPERTS_DIRECTORY = "experts"
TOKENIZER_DIRECTORY = "tokenizer"
JOURNAL_NAME = "extract.journal"
N_WORKERS = 4
# What belongs to the model and is neither weights nor program: configuration, vocabulary, templates, licence.
CARRIED_SUFFIXES = (".json", ".model", ".jinja", ".txt", ".md")
Progress = Callable[[str, int, int], None]


def extract(checkpoint: Checkpoint, out: Path, *, on_progress: Progress) -> Manifest:
    """Write everything that a checkpoint becomes into `out` and return the manifest, which is written last.

    A directory that holds another checkpoint's output, or anything foreign, is refused with BadInputError. A finished output of the same
    checkpoint is returned as it is; an unfinished one is made anew.
    """
    if (finished := _finished_manifest(checkpoint, out)) is not None:
        return finished
    end_ids = end_ids_of(checkpoint.config, read_json(checkpoint.directory / "generation_config.json", default={}))
    small_files = _small_files(checkpoint.directory)
    _check_space(checkpoint, out)
    out.mkdir(parents=True, exist_ok=True)
    # The journal comes first: by it the directory is known for ours when the rest is cut short.
    write_bytes(out / JOURNAL_NAME, _journal_head(checkpoint))
    experts = out / EXPERTS_DIRECTORY
    experts.mkdir(exist_ok=True)
    carried = _carry_files(small_files, out / TOKENIZER_DIRECTORY)
    spine = write_spine(checkpoint, out / SPINE_NAME, expert_directories=[EXPERTS_DIRECTORY], on_progress=on_progress)
    hashes = _extract_experts(checkpoint, experts, on_progress)
    hash_list = hashes.to_text().encode()
    for directory in (out, experts):
        write_bytes(directory / HASH_LIST_NAME, hash_list)
    facts = describe_directory(experts)
    manifest = Manifest(
        schema=1,
        generation=1,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        geometry=checkpoint.geometry,
        end_ids=end_ids,
        source=_source(checkpoint),
        record=Record(LAYOUT_NAME, NIBBLE_ORDER, SCALE_KIND, checkpoint.record.n_bytes),
        spine=Spine(SPINE_NAME, spine.n_bytes, spine.xxh3_128),
        tokenizer=Tokenizer(TOKENIZER_DIRECTORY, carried),
        experts=HashList(HASH_LIST_NAME, xxh3_128_hex(hash_list)),
        drives=(Drive("A", EXPERTS_DIRECTORY, facts.file_system, manifest_devices(facts), None, hashes.is_known.copy()),),
    )
    write_manifest(out / MANIFEST_NAME, manifest)
    (out / JOURNAL_NAME).unlink()
    return manifest


def _finished_manifest(checkpoint: Checkpoint, out: Path) -> Manifest | None:
    """Return the manifest of an output that is complete, None if there is work to do. Raises BadInputError on a foreign directory."""
    if not out.exists():
        return None
    if not out.is_dir():
        raise BadInputError(f"{out}: is no directory; name a new or empty one")
    if (out / MANIFEST_NAME).exists():
        manifest = load_manifest(out / MANIFEST_NAME)
        if manifest.source.digest != checkpoint.digest:
            raise BadInputError(f"{out}: holds the output of another checkpoint ({manifest.source.digest}); name a new or empty directory")
        return manifest
    journal = out / JOURNAL_NAME
    cut_short = journal.with_name(journal.name + PARTIAL_SUFFIX)
    if set(out.iterdir()) - {cut_short} and not (journal.exists() and journal.read_bytes() == _journal_head(checkpoint)):
        raise BadInputError(f"{out}: is not empty and holds no output of this checkpoint; name a new or empty directory")
    return None


def _journal_head(checkpoint: Checkpoint) -> bytes:
    return f"extract of checkpoint {checkpoint.digest}\n".encode()


def _check_space(checkpoint: Checkpoint, out: Path) -> None:
    parent = next(p for p in (out, *out.resolve().parents) if p.exists())
    spine = sum(checkpoint.tensors[s.name].n_bytes for t in checkpoint.spine_tensors() for s in t.sources)
    needed = spine + checkpoint.geometry.n_routed_experts * round_up(checkpoint.record.n_bytes, 4096)
    # An unfinished output's expert files are replaced one by one.
    lying = sum(path.stat().st_blocks * 512 for path in (out / EXPERTS_DIRECTORY).glob("L*.bin"))
    reserve, free = default_reserve(parent), free_bytes(parent) + lying
    if needed + reserve > free:
        raise NoSpaceError(
            f"{out}: {format_size(needed)} needed and {format_size(reserve)} kept in reserve, but {format_size(free)} are free; nothing was written"
        )


def _small_files(source: Path) -> list[Path]:
    """Return the checkpoint's configuration, vocabulary, templates and licence. Raises BadInputError if no text could be encoded with them."""
    for name in ("tiktoken.model", "tokenizer_config.json"):
        if not (source / name).is_file():
            raise BadInputError(f"{source / name}: missing; without it no text can be encoded")
    wanted = (p for p in sorted(source.iterdir()) if p.suffix in CARRIED_SUFFIXES or p.name.startswith("LICENSE"))
    return [p for p in wanted if p.is_file() and p.name != INDEX_NAME and not p.name.startswith(".")]


def _carry_files(paths: list[Path], target: Path) -> tuple[CarriedFile, ...]:
    target.mkdir(exist_ok=True)
    carried = []
    for path in paths:
        data = path.read_bytes()
        write_bytes(target / path.name, data)
        carried.append(CarriedFile(path.name, len(data), xxh3_128_hex(data)))
    return tuple(carried)


def _extract_experts(checkpoint: Checkpoint, directory: Path, on_progress: Progress) -> ExpertHashes:
    g, record = checkpoint.geometry, checkpoint.record
    hashes = ExpertHashes(g.n_layers, g.n_experts)
    mode = probe_directory(directory)
    places = ((layer, expert) for layer in g.moe_layers for expert in range(g.n_experts))

    def make_worker() -> Callable[[tuple[int, int]], tuple[int, int, str]]:
        incoming = aligned_buffer(span_bytes(record.n_bytes, checkpoint.read_mode.alignment))
        outgoing = aligned_buffer(round_up(record.n_bytes, mode.alignment))

        def work(place: tuple[int, int]) -> tuple[int, int, str]:
            gather_record(checkpoint, *place, incoming=incoming, outgoing=outgoing)
            write_record(directory / expert_file_name(*place), outgoing, record.n_bytes, mode)
            return *place, xxh3_128_hex(outgoing[: record.n_bytes])

        return work

    done, total = 0, g.n_routed_experts * record.n_bytes
    for layer, expert, digest in run_parallel(places, make_worker, n_workers=N_WORKERS):
        hashes.set(layer, expert, digest)
        done += record.n_bytes
        on_progress("experts", done, total)
    sync_directory(directory)
    return hashes


def _source(checkpoint: Checkpoint) -> Source:
    layers = checkpoint.expert_layers_of_shards()
    files = tuple(
        SourceFile(s.name, s.n_bytes, s.header_xxh3_128, format_ranges(held) or None) for s, held in zip(checkpoint.shards, layers, strict=True)
    )
    return Source(checkpoint.facts.architecture, checkpoint.facts.model_type, checkpoint.digest, files)
