"""krun chat: a conversation in the terminal, or one turn for each line of a pipe.

On a terminal reasoning is dim and Ctrl-C stops an answer. Elsewhere answers alone go to stdout; reasoning and remarks go to stderr.
"""

import contextlib
import os
import readline
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from layout.sizes import counted, format_size
from layout.terminal import note, write_text
from manifests.errors import BadInputError, DeviceError, Interrupted, KtierError, UsageError
from runtime.chat.format import EFFORTS
from runtime.chat.session import STOPPED, ChatSession, ChatSettings, Turn
from runtime.cli.arguments import (
    HOST_OPTION,
    LONG_CONTEXT_OPTION,
    PREFETCH_OPTION,
    TIER_CAP_OPTION,
    VERIFY_EVERY,
    VERIFY_OPTION,
    VRAM_OPTION,
    ChunkOption,
    ContextOption,
    DeviceOption,
    ExactPrefillOption,
    ManifestOption,
    RequireDirectOption,
    is_long_context,
    new_sampler,
    parse_tier_caps,
)
from runtime.cli.live import LiveLine
from runtime.engine import DEFAULT_CHUNK, Options
from runtime.memory import AUTO
from runtime.serving.prefixes import ServingEngine
from runtime.serving.queue import Cancelled
from runtime.tokens import load_tokenizer

# A turn leaves two: at its prompt's end and at its answer's.
N_KEPT = 2
PROMPT = "> "
HELP = """\
/reset      begin anew, with the system's message alone
/save FILE  write the conversation to a file
/load FILE  go on with the conversation in a file
/stats      what the conversation and its last answer took
/help       this list
/quit       end; so does Ctrl-D
Ctrl-C stops an answer; what it has said stays. A message that begins with a slash has a blank put before it."""
# What would steer a terminal is shown and not obeyed.
_SHOWN = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def chat_command(
    manifest: ManifestOption,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="What stands before the conversation.")] = None,
    n_tokens: Annotated[
        int | None, typer.Option("-n", "--n-tokens", min=1, help="Most tokens of an answer; without it what the context has left.")
    ] = None,
    context: ContextOption = None,
    temp: Annotated[float, typer.Option(help="Temperature; 0 always takes the likeliest token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that reach this probability together.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes a drawn conversation repeatable.")] = None,
    thinking: Annotated[bool, typer.Option(help="Whether the model reasons before it answers.")] = True,
    effort: Annotated[str | None, typer.Option(metavar="|".join(EFFORTS), help="How much it reasons; without it the model is told nothing.")] = None,
    device: DeviceOption = None,
    vram_cache: Annotated[str, VRAM_OPTION] = AUTO,
    host_pool: Annotated[str, HOST_OPTION] = AUTO,
    chunk: ChunkOption = DEFAULT_CHUNK,
    long_context: Annotated[str | None, LONG_CONTEXT_OPTION] = None,
    exact_prefill: ExactPrefillOption = False,
    verify_reads: Annotated[int, VERIFY_OPTION] = VERIFY_EVERY,
    prefetch: Annotated[int | None, PREFETCH_OPTION] = None,
    tier_cap: Annotated[list[str] | None, TIER_CAP_OPTION] = None,
    require_direct: RequireDirectOption = False,
) -> None:
    """Talk with the model."""
    new_sampler(temp, top_p, seed)
    if effort is not None and effort not in EFFORTS:
        raise UsageError(f"--effort {effort}: expected {', '.join(EFFORTS)}")
    if effort is not None and not thinking:
        raise UsageError(f"--effort {effort}: without effect with --no-thinking; leave one of them out")
    settings = ChatSettings(temperature=temp, top_p=top_p, seed=seed, n_tokens=n_tokens, system=system, is_thinking=thinking, effort=effort)
    options = Options(
        device=device, vram_cache=vram_cache, host_pool=host_pool, context=context, chunk=chunk, is_exact_prefill=exact_prefill,
        verify_reads=verify_reads, n_prefetch=prefetch, tier_caps=parse_tier_caps(tier_cap), is_direct_required=require_direct,
        is_long_context=is_long_context(long_context),
    )  # fmt: skip
    screen = Screen(Console(highlight=False))
    with ServingEngine(manifest, options, n_kept=N_KEPT, on_remark=screen.note) as engine:
        tokenizer = load_tokenizer(engine.prepared.tokenizer_directory, vocab_size=engine.geometry.vocab_size)
        session = ChatSession(engine, tokenizer, settings)
        for line in [*engine.effective(), *_settings_lines(session)]:
            note(line)
        if sys.stdin.isatty():
            Talk(session, screen).run()
        else:
            _run_lines(session, screen)


def _settings_lines(session: ChatSession) -> Iterator[str]:
    settings, engine = session.settings, session.engine
    drawn = f"temperature {settings.temperature:g}, top-p {settings.top_p:g}, seed {session.sampler.seed}"
    thinking = f"thinking, effort {settings.effort or 'not said'}" if settings.is_thinking else "no thinking"
    most = f"at most {counted(settings.n_tokens, 'token')}" if settings.n_tokens else "as many tokens as the context has left"
    yield f"each answer {most}; {drawn if settings.temperature else 'the likeliest token each time'}; {thinking}"
    yield f"{N_KEPT} states kept between turns, up to {format_size(engine.kept_bytes(engine.context))} of host memory each"


class Screen:
    """Where answers and remarks go. On a terminal, whichever of both it is, what would steer it is shown instead."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.is_terminal, self._is_remark_seen = self._console.is_terminal, sys.stderr.isatty()
        self.live = LiveLine(is_shown=self.is_terminal and self._is_remark_seen)
        self._field, self._is_in_line = "", False

    def show(self, delta: dict[str, Any]) -> None:
        """Show what a token adds to an answer."""
        self.live.end()
        for field in ("reasoning_content", "content"):
            if text := delta.get(field, ""):
                if self._field == "reasoning_content" and field == "content":
                    self.end()
                self._field = field
                self._write(text, is_reasoning=field == "reasoning_content")

    def _write(self, text: str, *, is_reasoning: bool) -> None:
        if self.is_terminal:
            self._console.out(text.translate(_SHOWN), style="dim" if is_reasoning else None, end="")
        elif is_reasoning:
            sys.stderr.write(self._remark(text))
            sys.stderr.flush()
        else:
            write_text(text)
        self._is_in_line = not text.endswith("\n")

    def end(self) -> None:
        """Let what follows begin on a line of its own."""
        self.live.end()
        if self._is_in_line:
            self._write("\n", is_reasoning=self._field == "reasoning_content")
        self._field = ""

    def note(self, text: str) -> None:
        """Print a remark below what is shown."""
        self.end()
        note(self._remark(text))

    def _remark(self, text: str) -> str:
        return text.translate(_SHOWN) if self._is_remark_seen else text


def answer(session: ChatSession, screen: Screen, text: str, *, check: Callable[[], None]) -> None:
    """Have a message answered and shown."""

    def look() -> None:
        check()
        n_new, share = session.engine.timing.n_prompt, session.engine.prompt_share
        if n_new and share < 1:
            screen.live.show(f"prompt pass {share:.0%} of {counted(n_new, 'token')}")

    try:
        turn = session.turn(text, on_delta=screen.show, check=look)
    except Cancelled:
        screen.note("stopped before the answer began; the message was taken back")
        return
    finally:
        screen.end()
    for remark in _remarks(turn, session):
        screen.note(remark)


def _remarks(turn: Turn, session: ChatSession) -> Iterator[str]:
    if turn.ended_by == STOPPED:
        yield "stopped; what was said stays in the conversation"
    if turn.ended_by == "length":
        full = f"the context of {counted(session.engine.context, 'token')} is full; /reset begins anew"
        most = f"an answer has at most {counted(session.settings.n_tokens or 0, 'token')} (-n)"
        yield f"cut: {full if turn.is_full else most}"
    if turn.tools:
        yield f"the model called tools that there are not: {', '.join(map(repr, turn.tools))}"


def obey(session: ChatSession, screen: Screen, line: str) -> bool:
    """Do a command; return whether the conversation goes on. Raises UsageError if it is none, KtierError if it cannot be done."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if (name in ("/save", "/load")) != bool(rest) and name in ("/reset", "/save", "/load", "/stats", "/help", "/quit"):
        raise UsageError(f"{name}: {'takes nothing behind it' if rest else 'expected the name of a file behind it'}")
    if "\0" in rest:
        raise UsageError(f"{name}: no file's name has a zero byte in it")
    path = Path(os.path.expanduser(rest))
    match name:
        case "/quit":
            return False
        case "/reset":
            session.reset()
            screen.note("a new conversation")
        case "/save":
            screen.note(f"{path}: {counted(session.save(path), 'message')} written")
        case "/load":
            screen.note(f"{path}: {counted(session.load(path), 'message')}; the tokens are computed with the next turn")
        case "/stats":
            for each in session.stats_lines():
                screen.note(each)
        case "/help":
            screen.note(HELP)
        case _:
            raise UsageError(f"{name}: is no command; /help lists them, and a blank before the slash makes it a message")
    return True


def _do(session: ChatSession, screen: Screen, line: str, *, check: Callable[[], None]) -> bool:
    """Do what a line says; return whether the conversation goes on."""
    if line.startswith("/"):
        return obey(session, screen, line)
    if line.strip():
        answer(session, screen, line, check=check)
    return True


def is_fatal(error: KtierError) -> bool:
    """Return whether a failure ends the conversation: others leave it as it was."""
    return isinstance(error, DeviceError | Interrupted)


def _run_lines(session: ChatSession, screen: Screen) -> None:
    """Take each line of stdin as a turn or a command. Raises KtierError at the end if some could not be done."""
    n_lines = n_failed = 0
    for line in sys.stdin.buffer:
        n_lines += 1
        try:
            if not _do(session, screen, _text_of(line), check=lambda: None):
                break
        except KtierError as error:
            if is_fatal(error):
                raise
            n_failed += 1
            screen.note(f"line {n_lines}: {error}")
    if n_failed:
        raise KtierError(f"{n_failed} of {counted(n_lines, 'line')} could not be done; see above")


def _text_of(line: bytes) -> str:
    try:
        return line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise BadInputError(f"is not UTF-8 at byte {error.start}") from None


class Talk:
    """A conversation with a person at a terminal."""

    def __init__(self, session: ChatSession, screen: Screen) -> None:
        self._session, self._screen = session, screen
        self._is_answering = self._is_stopped = self._was_typing = False

    def run(self) -> None:
        """Take turns until Ctrl-D, /quit or a second Ctrl-C at an empty prompt."""
        note("/help lists the commands")
        was_asked_to_end = False
        with self._interrupts():
            while True:
                try:
                    if not self._turn(self._asked()):
                        return
                    was_asked_to_end = False
                except UnicodeDecodeError:
                    self._screen.note("what was typed is not UTF-8; it was left out")
                except EOFError:
                    self._screen.note("")
                    return
                except KeyboardInterrupt:
                    note("")
                    if self._was_typing:
                        continue
                    if was_asked_to_end:
                        return
                    was_asked_to_end = True
                    note("Ctrl-C again ends, and so does Ctrl-D")

    def _asked(self) -> str:
        """Return a line that the person has typed. Raises EOFError at Ctrl-D."""
        if self._screen.is_terminal:
            return input(PROMPT)
        # What is asked is no result.
        sys.stderr.write(PROMPT)
        sys.stderr.flush()
        return input()

    def _turn(self, line: str) -> bool:
        self._is_answering, self._is_stopped = not line.startswith("/"), False
        try:
            return _do(self._session, self._screen, line, check=self._check)
        except KtierError as error:
            if is_fatal(error):
                raise
            self._screen.note(str(error))
            return True
        finally:
            self._is_answering = False

    def _check(self) -> None:
        if self._is_stopped:
            raise Cancelled

    @contextlib.contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Let Ctrl-C stop an answer, or clear what is being typed."""
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_answering:
            self._is_stopped = True
            return
        self._was_typing = bool(readline.get_line_buffer())
        raise KeyboardInterrupt
