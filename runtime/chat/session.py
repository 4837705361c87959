"""A conversation with a model in this process: its messages, its turns, and its file. Knows nothing of terminals.

A turn goes on from the state that the former one left, so that only the new tokens are computed.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from layout.sizes import counted, format_size
from layout.writer import write_bytes
from manifests.errors import BadInputError
from runtime.chat.format import Chat, encode_chat, parse_chat
from runtime.sampler import Sampler
from runtime.serving.metrics import request_statistics
from runtime.serving.prefixes import ServingEngine
from runtime.serving.queue import Cancelled
from runtime.serving.reply import ChatAnswer, Usage
from runtime.serving.work import Generation, as_kept
from runtime.tokens import Tokenizer

Json = dict[str, Any]

FORMAT = "ktier chat 1"
MOST_FILE_BYTES = 64 * 2**20
# Why a turn ended whose answer was stopped; else stop or length.
STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """How answers are generated.

    n_tokens  the most tokens of one answer; None: what the context has left
    system    what stands before the conversation
    effort    low, medium, high or max; None says nothing of it
    """

    temperature: float
    top_p: float
    seed: int | None
    n_tokens: int | None = None
    system: str | None = None
    is_thinking: bool = True
    effort: str | None = None


class Turn(NamedTuple):
    """An answer that has ended.

    ended_by    stop, length or stopped
    is_full     whether the context has no room for more
    tools       names of tools that the model called, though there are none
    statistics  as the server tells them
    """

    ended_by: str
    is_full: bool
    tools: tuple[str, ...]
    usage: Usage
    statistics: Json


class ChatSession:
    """Messages in the API's form, and a model that answers them. last: the latest turn, None before the first."""

    def __init__(self, engine: ServingEngine, tokenizer: Tokenizer, settings: ChatSettings) -> None:
        """Raises UsageError or BadInputError if a setting cannot be honoured."""
        self.engine, self.settings, self._tokenizer = engine, settings, tokenizer
        self.sampler = Sampler(settings.temperature, settings.top_p, settings.seed)
        self._n_computed = self._n_kept = self._n_generated = 0
        self.reset()
        if self.messages:
            self._chat(self.messages)

    def reset(self) -> None:
        """Begin anew: nothing but the system's message, and the draws of the seed from their beginning."""
        self.messages: list[Json] = [] if self.settings.system is None else [{"role": "system", "content": self.settings.system}]
        self.sampler = Sampler(self.settings.temperature, self.settings.top_p, self.sampler.seed)
        self.last: Turn | None = None
        self._n_in_context = 0

    def turn(self, text: str, *, on_delta: Callable[[Json], None], check: Callable[[], None]) -> Turn:
        """Have a message answered; the conversation holds both afterwards.

        on_delta  takes what each token adds: reasoning_content, content, or nothing
        check     called with each layer of the prompt pass and before each step; Cancelled ends the answer, which stays as far as it is

        Raises BadInputError if the message does not fit, Cancelled if the answer had not begun, KtierError as the engine does; the conversation
        is then as before.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        chat = self._chat(messages)
        ids = encode_chat(chat, self._tokenizer)
        context = self.engine.context
        if len(ids) >= context:
            raise BadInputError(
                f"with this message the conversation has {counted(len(ids), 'token')}, but the context holds {context}, "
                "and the answer needs some of them; say less, begin anew with /reset, or start with a larger -c"
            )
        self.engine.begin_request(check)
        ids = as_kept(self.engine, ids, self._tokenizer, n_least=1)
        answer = ChatAnswer(self._tokenizer, start=chat.reply_start, stops=(), n_logprobs=None, wants_ids=False)
        generation = Generation(self.engine, answer, ids, n_tokens=self.settings.n_tokens or context, sampler=self.sampler)
        ended_by = self._answered(generation, answer, on_delta, check)
        said = answer.whole()["message"]
        self.messages = [*messages, _kept_message(said)]
        generation.keep()
        tools = tuple(call["function"]["name"] for call in said.get("tool_calls", ()))
        statistics = request_statistics(self.engine, n_generated=generation.n_generated, queue_s=0.0)
        self._n_in_context = len(generation.text)
        self.last = Turn(ended_by, self._n_in_context >= context, tools, generation.usage(), statistics)
        self._count(self.last.usage)
        return self.last

    def _answered(self, generation: Generation, answer: ChatAnswer, on_delta: Callable[[Json], None], check: Callable[[], None]) -> str:
        try:
            with closing(generation.choices(check)) as choices:
                for choice in choices:
                    on_delta(choice["delta"])
        except Cancelled:
            if not generation.n_generated:
                raise
            on_delta(answer.finish("stop")["delta"])
            return STOPPED
        assert generation.reason is not None
        return generation.reason

    def _count(self, usage: Usage) -> None:
        self._n_computed += usage.n_prompt - usage.n_cached
        self._n_kept += usage.n_cached
        self._n_generated += usage.n_generated

    def _chat(self, messages: list[Json]) -> Chat:
        request = {"messages": messages, "thinking": self.settings.is_thinking, "thinking_effort": self.settings.effort}
        return parse_chat(request)

    def save(self, path: Path) -> int:
        """Write the conversation, whole or not at all; return how many messages it has.

        Raises BadInputError rather than replace a file that is no conversation, KtierError if it cannot be written.
        """
        if os.path.exists(path) and _format_of(path) != FORMAT:
            raise BadInputError(f"{path}: is there already and no conversation; name another file")
        written = {"format": FORMAT, "model": self._model, "messages": self.messages}
        write_bytes(path, json.dumps(written, ensure_ascii=False, indent=1).encode() + b"\n")
        return len(self.messages)

    def load(self, path: Path) -> int:
        """Take over the conversation in a file; return how many messages it has. Raises BadInputError if it is none, or another model's."""
        found = _read(path)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise BadInputError(f"{path}: is no conversation that /save wrote: expected an object with format {FORMAT!r}")
        if found.keys() != {"format", "model", "messages"}:
            raise BadInputError(f"{path}: holds {', '.join(sorted(found))}, expected format, model and messages")
        if (digest := found["model"]) != self._model:
            other = digest[:64] if isinstance(digest, str) else "unknown"
            raise BadInputError(f"{path}: is a conversation with another model, of digest {other}; this one's is {self._model}")
        messages = found["messages"]
        try:
            if messages != []:
                self._chat(messages)
        except BadInputError as error:
            raise BadInputError(f"{path}: {error}") from None
        self.reset()
        self.messages = list(messages)
        return len(messages)

    @property
    def _model(self) -> str:
        return self.engine.prepared.manifest.source.digest

    def stats_lines(self) -> Iterator[str]:
        """Yield what the conversation and its last answer took, one line each."""
        in_context = f", {self._n_in_context} of {self.engine.context} tokens of context" if self.last else ""
        yield f"conversation: {counted(len(self.messages), 'message')}{in_context}"
        yield f"all turns: {self._n_computed} prompt tokens computed, {self._n_kept} kept from former turns, {self._n_generated} generated"
        if self.last is not None:
            yield from _turn_lines(self.last)


def _turn_lines(turn: Turn) -> Iterator[str]:
    usage, stats = turn.usage, turn.statistics
    pass_rate, rate = stats["prompt_pass_tok_per_s"], stats["steady_decode_tok_per_s"]
    computed = f"{usage.n_prompt - usage.n_cached} computed in {stats['prompt_pass_s']:.2f} s" + (f", {pass_rate:.1f} tok/s" if pass_rate else "")
    yield f"last prompt: {counted(usage.n_prompt, 'token')}, {usage.n_cached} kept and {computed}"
    yield (
        f"last answer: {counted(usage.n_generated, 'token')}, {usage.n_reasoning} of them reasoning, ended by {turn.ended_by}; "
        f"first after {stats['time_to_first_token_s']:.2f} s" + (f", then {rate:.2f} tok/s" if rate else "")
    )
    for phase, name in (("prompt_pass", "prompt pass"), ("decode", "decode")):
        shares = [(where, stats[f"{where}_hit_rate"][phase]) for where in ("device", "host")]
        hits = ", ".join(f"{where} {share:.0%}" for where, share in shares if share is not None)
        yield f"experts in {name}: {format_size(stats['expert_read_bytes'][phase])} read; {hits or 'none needed'}"


def _kept_message(said: Json) -> Json:
    """Return an answer as the next turn tells it. Calls of tools are left out: nobody would answer them."""
    reasoning = said.get("reasoning_content")
    return {"role": "assistant", "content": said["content"] or ""} | ({"reasoning_content": reasoning} if reasoning else {})


def _read(path: Path) -> Any:
    """Return the JSON in a file. Raises BadInputError."""
    try:
        if path.exists() and not path.is_file():
            raise BadInputError(f"{path}: is no file; name one that /save wrote")
        if (n_bytes := path.stat().st_size) > MOST_FILE_BYTES:
            raise BadInputError(f"{path}: has {format_size(n_bytes)}, a conversation at most {format_size(MOST_FILE_BYTES)}")
        return json.loads(path.read_bytes().decode())
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path}: is not JSON: {error}") from None


def _format_of(path: Path) -> object:
    try:
        found = _read(path)
    except BadInputError:
        return None
    return found.get("format") if isinstance(found, dict) else None
