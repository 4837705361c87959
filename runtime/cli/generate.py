"""krun generate: the text goes to stdout, settings and statistics to stderr."""

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from layout.terminal import note, say, write_text
from manifests.errors import BadInputError, UsageError
from runtime.cli.arguments import HOST_OPTION, VERIFY_EVERY, VERIFY_OPTION, VRAM_OPTION, DeviceOption, ManifestOption
from runtime.engine import DEFAULT_CHUNK, Engine, Options
from runtime.memory import AUTO
from runtime.report import statistics, statistics_lines
from runtime.sampler import Sampler
from runtime.tensor_files import parse_ids
from runtime.tokens import TextStream, Tokenizer, load_tokenizer


def generate_command(
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
