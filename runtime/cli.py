"""krun: parse, one library call, print. The text goes to stdout, settings and statistics to stderr."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from layout.checkpoint import open_checkpoint
from layout.config import K31
from layout.terminal import note, run_command, say, write_text
from manifests.errors import BadInputError, UsageError
from runtime.comparison import compare_logits
from runtime.engine import (
    DEFAULT_CHUNK,
    Engine,
    Options,
    check_ids,
    choose_device,
    context_limit,
    open_checkpoint_model,
    score_with,
)
from runtime.kernels.rows import Arithmetic
from runtime.memory import AUTO
from runtime.report import statistics, statistics_lines
from runtime.sampler import Sampler
from runtime.tensor_files import check_writable, parse_ids, read_ids, read_logits, same_shape, write_logits
from runtime.tokens import TextStream, Tokenizer, load_tokenizer

# The main thread waits for reader threads; with the default 5 ms it would learn of a finished read 5 ms late whenever it is at work itself.
SWITCH_INTERVAL_S = 2e-4

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Run a model that kprep prepared.")

ManifestOption = Annotated[Path, typer.Option("-m", "--manifest", metavar="MANIFEST", help="manifest.yaml, or the directory that holds it.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda; without it cuda where there is one.")]
VERIFY_EVERY = 16
VRAM_OPTION = typer.Option(metavar="SIZE", help="Records kept on the device: 27.5GB, 512MB, 16slots, or auto.")
HOST_OPTION = typer.Option(metavar="SIZE", help="Records kept in host memory, on their way and after: a size, or auto.")
VERIFY_OPTION = typer.Option(metavar="N", min=0, help="Check the hash of every Nth record that is read; 0 for none.")


def main() -> None:
    """Run krun and exit with the code of its outcome."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sys.exit(run_command(app, name="krun"))


@app.callback()
def _commands() -> None:
    """Keep `generate` and `score` commands of their own."""


@app.command()
def generate(
    manifest: ManifestOption,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt.")] = None,
    ids: Annotated[str | None, typer.Option(metavar="1,2,3", help="The prompt as token numbers.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="F", help="A UTF-8 file with the prompt.")] = None,
    n_tokens: Annotated[int, typer.Option("-n", "--n-tokens", min=1, help="Most tokens to generate.")] = 128,
    context: Annotated[int | None, typer.Option("-c", "--context", help="Most tokens of prompt and reply together.")] = None,
    temp: Annotated[float, typer.Option(help="Temperature; 0 always takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that reach this probability together.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes a drawn text repeatable.")] = None,
    device: DeviceOption = None,
    vram_cache: Annotated[str, VRAM_OPTION] = AUTO,
    host_pool: Annotated[str, HOST_OPTION] = AUTO,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens per piece of the prompt pass.")] = DEFAULT_CHUNK,
    exact_prefill: Annotated[bool, typer.Option("--exact-prefill", help="Use the decode arithmetic in the prompt pass too.")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="Drop cached file pages first, and both caches after the prompt pass.")] = False,
    verify_reads: Annotated[int, VERIFY_OPTION] = VERIFY_EVERY,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document with ids, text and statistics.")] = False,
) -> None:
    """Continue a prompt."""
    sampler = Sampler(temp, top_p, seed)
    options = Options(device, vram_cache, host_pool, context, chunk, exact_prefill, cold, verify_reads)
    read_prompt = _prompt_reader(prompt, ids, prompt_file)
    with Engine(manifest, options, on_remark=note) as engine:
        tokenizer = load_tokenizer(engine.prepared.tokenizer_directory, vocab_size=engine.geometry.vocab_size)
        prompt_ids = read_prompt(tokenizer)
        for line in engine.effective():
            note(line)
        if temp > 0:
            note(f"temperature {temp}, top-p {top_p}, seed {sampler.seed}")
        document = _generate(engine, tokenizer, prompt_ids, n_tokens, sampler, is_quiet=as_json)
    if as_json:
        say(json.dumps(document, ensure_ascii=False))
        return
    write_text("\n")
    for line in [f"{len(document['ids'])} tokens, ended by {document['finish']}", *statistics_lines(document["stats"])]:
        note(line)


def _prompt_reader(prompt: str | None, ids: str | None, prompt_file: Path | None) -> Any:
    """Return how to get the prompt's ids from a tokenizer. Raises UsageError unless exactly one prompt is given."""
    if sum(given is not None for given in (prompt, ids, prompt_file)) != 1:
        raise UsageError("give exactly one of -p TEXT, --ids 1,2,3 and --prompt-file F")
    if ids is not None:
        numbers = parse_ids(ids, flag="--ids")
        return lambda tokenizer: numbers
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_bytes().decode()
        except OSError as error:
            raise BadInputError(f"--prompt-file {prompt_file}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise BadInputError(f"--prompt-file {prompt_file}: is not UTF-8 at byte {error.start}") from None
    return lambda tokenizer: tokenizer.encode(prompt)


def _generate(engine: Engine, tokenizer: Tokenizer, prompt_ids: list[int], n_tokens: int, sampler: Sampler, *, is_quiet: bool) -> dict[str, Any]:
    stream, new_ids, text, finish = TextStream(tokenizer), [], "", None
    for step in engine.generate(prompt_ids, n_tokens=n_tokens, sampler=sampler):
        new_ids.append(step.token)
        finish = step.finish
        piece = stream.push(step.token) if finish != "end" else ""
        piece += stream.finish() if finish else ""
        text += piece
        if not is_quiet:
            write_text(piece)
    flat_out = engine.flat_out_bytes_per_s() if engine.decode_counts.read_bytes else None
    stats = statistics(engine, n_generated=len(new_ids), process_wall_s=_process_wall_s(), flat_out=flat_out)
    return {"ids": new_ids, "prompt_ids": prompt_ids, "text": text, "finish": finish, "seed": sampler.seed, "stats": stats}


def _process_wall_s() -> float:
    """Return the seconds since this process was started."""
    started_ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


@app.command()
def score(
    manifest: Annotated[Path | None, typer.Option("-m", "--manifest", metavar="MANIFEST", help="Score the prepared model.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(metavar="DIR", help="Score a checkpoint's unquantised weights instead.")] = None,
    ids_file: Annotated[Path | None, typer.Option(metavar="F.safetensors", help="A file with token numbers.")] = None,
    key: Annotated[str, typer.Option(metavar="NAME", help="The token numbers' name in that file.")] = "ids",
    out: Annotated[Path | None, typer.Option(metavar="L.safetensors", help="Where the logits go, under the name `logits`.")] = None,
    against: Annotated[Path | None, typer.Option(metavar="OTHER.safetensors", help="Logits of the same text to compare with.")] = None,
    arithmetic: Annotated[str, typer.Option(help="decode (the same for any split of the text) or prompt.")] = Arithmetic.DECODE.value,
    chunk: Annotated[int | None, typer.Option(min=1, help="Tokens per piece; without it the text in one piece.")] = None,
    context: Annotated[int | None, typer.Option("-c", "--context", help="Most tokens of the text.")] = None,
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
    if out is not None:
        check_writable(out)
    text = read_ids(ids_file, key)
    other = None if against is None else read_logits(against)
    kind = Arithmetic(arithmetic)
    if manifest is not None:
        options = Options(device, vram_cache or AUTO, host_pool or AUTO, context, verify_reads=VERIFY_EVERY if verify_reads is None else verify_reads)
        with Engine(manifest, options, on_remark=note) as engine:
            pieces = "in one piece" if chunk is None else f"in pieces of {chunk}"
            for line in engine.effective(f"{arithmetic} arithmetic, the text {pieces}"):
                note(line)
            logits = engine.score(text, arithmetic=kind, chunk=chunk)
            facts = {"model": engine.prepared.manifest.source.digest, "weights": "spine Q8_0, experts MXFP4"}
    else:
        assert checkpoint is not None
        given = {"--vram-cache": vram_cache, "--host-pool": host_pool, "--verify-reads": verify_reads}
        if idle := [flag for flag, value in given.items() if value is not None]:
            raise UsageError(f"{', '.join(idle)}: without effect with --checkpoint, which holds one expert at a time; leave it out")
        logits, facts = _score_checkpoint(checkpoint, text, kind, chunk, context, device)
    facts |= {"arithmetic": arithmetic, "ids_file": ids_file.name, "key": key}
    if out is not None:
        write_logits(out, logits, facts)
        note(f"{out}: logits of {len(text)} positions, {facts['weights']}, {arithmetic} arithmetic")
    if against is not None and other is not None:
        result = compare_logits(logits, same_shape(other, logits, against))
        if as_json:
            say(json.dumps(result._asdict()))
        else:
            say(
                f"mean KL({against.name} || this) {result.mean_kl:.3e} nats, equal argmax {result.equal_argmax:.4f}, "
                f"largest difference {result.max_difference:.3e}, {len(text)} positions"
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
    if source.facts.architecture == K31:
        note("the indexer is not evaluated: attention is dense, which is exact within this context")
    logits = score_with(open_checkpoint_model(source, where), text, arithmetic=kind, chunk=chunk)
    return logits, {"model": source.digest, "weights": "spine as shipped, experts MXFP4"}
