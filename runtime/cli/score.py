"""krun score."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from layout.checkpoint import open_checkpoint
from layout.config import K31
from layout.sizes import counted
from layout.terminal import note, say
from manifests.errors import UsageError
from runtime.bench.comparison import compare_logits
from runtime.cli.arguments import (
    HOST_OPTION,
    LONG_CONTEXT_OPTION,
    VERIFY_EVERY,
    VERIFY_OPTION,
    VRAM_OPTION,
    ContextOption,
    DeviceOption,
    check_outputs,
    is_long_context,
)
from runtime.engine import Engine, Options, check_ids, choose_device, context_limit, open_checkpoint_model, open_model, score_with
from runtime.kernels.rows import Arithmetic
from runtime.memory import AUTO
from runtime.start import checked_kernels
from runtime.tensor_files import read_ids, read_logits, same_shape, write_logits


def score_command(
    manifest: Annotated[Path | None, typer.Option("-m", "--manifest", metavar="MANIFEST", help="Score the prepared model.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(metavar="DIR", help="Score a checkpoint's unquantised weights instead.")] = None,
    ids_file: Annotated[Path | None, typer.Option(metavar="F.safetensors", help="A file with token numbers.")] = None,
    key: Annotated[str, typer.Option(metavar="NAME", help="The token numbers' name in that file.")] = "ids",
    out: Annotated[Path | None, typer.Option(metavar="L.safetensors", help="Where the logits go, under the name `logits`.")] = None,
    against: Annotated[Path | None, typer.Option(metavar="OTHER.safetensors", help="Logits of the same text to compare with.")] = None,
    arithmetic: Annotated[str, typer.Option(help="decode (the same for any split of the text) or prompt.")] = Arithmetic.DECODE.value,
    chunk: Annotated[int | None, typer.Option(min=1, help="Tokens per piece; without it the text in one piece.")] = None,
    context: ContextOption = None,
    long_context: Annotated[str | None, LONG_CONTEXT_OPTION] = None,
    device: DeviceOption = None,
    vram_cache: Annotated[str | None, VRAM_OPTION] = None,
    host_pool: Annotated[str | None, HOST_OPTION] = None,
    verify_reads: Annotated[int | None, VERIFY_OPTION] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write the logits of every position of a text, and compare them with others."""
    if (manifest is None) == (checkpoint is None):
        raise UsageError("give exactly one of -m MANIFEST and --checkpoint DIR")
    if ids_file is None:
        raise UsageError("--ids-file is missing: name a safetensors file with the text's token numbers")
    if out is None and against is None:
        raise UsageError("give --out, --against, or both: else the logits would go nowhere")
    if arithmetic not in [a.value for a in Arithmetic]:
        raise UsageError(f"--arithmetic {arithmetic}: expected {' or '.join(a.value for a in Arithmetic)}")
    check_outputs({"--out": out})
    text = read_ids(ids_file, key)
    other = None if against is None else read_logits(against)
    kind = Arithmetic(arithmetic)
    if manifest is not None:
        options = Options(
            device, vram_cache or AUTO, host_pool or AUTO, context,
            verify_reads=VERIFY_EVERY if verify_reads is None else verify_reads, is_long_context=is_long_context(long_context),
        )  # fmt: skip
        choose_device(device)
        prepared = open_model(manifest)
        check_ids(text, prepared.geometry, context_limit(prepared.geometry, context, is_long_context=options.is_long_context))
        with Engine(prepared, options, on_remark=note) as engine:
            pieces = "in one piece" if chunk is None else f"in pieces of {chunk}"
            for line in engine.effective(f"{arithmetic} arithmetic, the text {pieces}"):
                note(line)
            logits = engine.score(text, arithmetic=kind, chunk=chunk)
            facts = {"model": engine.prepared.manifest.source.digest, "weights": "spine Q8_0, experts MXFP4"}
    else:
        assert checkpoint is not None
        given = {"--vram-cache": vram_cache, "--host-pool": host_pool, "--verify-reads": verify_reads, "--long-context": long_context}
        if idle := [flag for flag, value in given.items() if value is not None]:
            raise UsageError(f"{', '.join(idle)}: without effect with --checkpoint, which holds one expert at a time; leave it out")
        logits, facts = _score_checkpoint(checkpoint, text, kind, chunk, context, device)
    facts |= {"arithmetic": arithmetic, "ids_file": ids_file.name, "key": key}
    if out is not None:
        write_logits(out, logits, facts)
        note(f"{out}: logits of {counted(len(text), 'position')}, {facts['weights']}, {arithmetic} arithmetic")
    if against is not None and other is not None:
        result = compare_logits(logits, same_shape(other, logits, against))
        if as_json:
            say(json.dumps(result._asdict()))
        else:
            say(
                f"mean KL({against.name} || this) {result.mean_kl:.3e} nats, equal argmax {result.equal_argmax:.4f}, "
                f"largest difference {result.max_difference:.3e}, {counted(len(text), 'position')}"
            )
    elif as_json:
        say(json.dumps({"out": str(out), "n_positions": len(text), **facts}))


def _score_checkpoint(
    directory: Path, text: list[int], kind: Arithmetic, chunk: int | None, context: int | None, device: str | None
) -> tuple[Any, dict[str, str]]:
    source = open_checkpoint(directory)
    check_ids(text, source.geometry, context_limit(source.geometry, context))
    where = choose_device(device)
    note(f"device {where}, unquantised weights of {directory}, read {source.read_mode}")
    note(f"kernels: {checked_kernels(where, note)}")
    if source.facts.architecture == K31:
        note("the indexer is not evaluated: attention is dense, which is exact within this context")
    logits = score_with(open_checkpoint_model(source, where), text, arithmetic=kind, chunk=chunk)
    return logits, {"model": source.digest, "weights": "spine as shipped, experts MXFP4"}
