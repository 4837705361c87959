"""What the model answers: token ids as they come, told apart into reasoning, content and tool calls.

Markers are recognised by id, so text that spells one is text. A reply may end anywhere and may break the format: nothing
that has a place is lost, and tokens that have none are counted.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from runtime.chat.format import CLOSE, END_OF_MSG, OPEN, SEP, ReplyStart
from runtime.tokens import TextStream, Tokenizer

Field = Literal["reasoning_content", "content", "tool_calls"]

# What is done with an element's own text. "value" is held back until it is whole, as it may turn out not to be JSON.
_Use = Literal["reasoning_content", "content", "string", "value", "raw", "nothing"]

# An element that opens ends those open ones which it cannot stand in.
_LEVEL = {"message": 0, "think": 1, "response": 1, "tools": 1, "call": 2, "argument": 3, "json": 3}
_INNERMOST = 4
_USE: dict[str, _Use] = {"message": "content", "think": "reasoning_content", "response": "content"}

_ATTRIBUTE = re.compile(r'([^\s="]+)="([^"]*)"')
_ESCAPE = re.compile("&(amp|quot);")


class Delta(NamedTuple):
    """What is new in one field. For "tool_calls", `text` goes on with the arguments of call `call`, from 0, and `name` comes with its first delta."""

    field: Field
    text: str
    call: int | None = None
    name: str | None = None


class ReplyCall(NamedTuple):
    """A call of a tool; `arguments` is JSON text, and ends in the middle if not `is_complete`."""

    name: str
    arguments: str
    is_complete: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply, or as much of it as has come.

    is_complete   the model ended its message; otherwise it was cut
    n_ignored     tokens that have no place in the format, and tokens after the end
    """

    reasoning_content: str
    content: str
    tool_calls: tuple[ReplyCall, ...]
    is_complete: bool
    n_ignored: int


class _Element(NamedTuple):
    tag: str
    use: _Use


@dataclass(slots=True)
class _Call:
    name: str
    arguments: list[str] = field(default_factory=list)
    is_raw: bool = False
    is_complete: bool = False


class ReplyParser:
    """Reads one reply. The texts of all deltas, joined for each field and call, are those of `reply`."""

    def __init__(self, tokenizer: Tokenizer, *, start: ReplyStart | None) -> None:
        """Begin in the element that the prompt left open, None if it ended between messages (see `Chat.reply_start`).

        Raises BadInputError if the tokenizer lacks a marker.
        """
        self._tokenizer = tokenizer
        self._open_id, self._close_id, self._sep_id, self._end_id = (tokenizer.special_id(name) for name in (OPEN, CLOSE, SEP, END_OF_MSG))
        self._stream = TextStream(tokenizer)
        self._elements = [] if start is None else [_Element(tag, _USE[tag]) for tag in ("message", start)]
        self._header: list[int] | None = None  # a marker, then the tokens up to <|sep|>
        self._value: list[str] = []
        self._texts: dict[Field, list[str]] = {"reasoning_content": [], "content": []}
        self._calls: list[_Call] = []
        self._deltas: list[Delta] = []
        self._has_ended = self._is_complete = False
        self._n_ignored = 0

    @property
    def has_ended(self) -> bool:
        """Whether the model ended its message, or `finish` was called: tokens that follow are ignored."""
        return self._has_ended

    @property
    def reply(self) -> Reply:
        """The reply so far."""
        calls = tuple(ReplyCall(call.name, "".join(call.arguments), call.is_complete) for call in self._calls)
        reasoning, content = "".join(self._texts["reasoning_content"]), "".join(self._texts["content"])
        return Reply(reasoning, content, calls, self._is_complete, self._n_ignored)

    def push(self, tokens: Iterable[int]) -> list[Delta]:
        """Return what these tokens add. Raises BadInputError if an id is not in the vocabulary."""
        for token in tokens:
            self._push(token)
        return self._taken()

    def finish(self) -> list[Delta]:
        """Say that no token follows; return what was held back: an unfinished character as U+FFFD, an unfinished value as it is."""
        if not self._has_ended:
            self._end(is_complete=False)
        return self._taken()

    def _taken(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _push(self, token: int) -> None:
        if self._has_ended:
            self._n_ignored += 1
        elif token in (self._open_id, self._close_id):
            self._end_text()
            self._header = [token]
        elif token == self._sep_id and self._header is not None:
            self._end_header(self._header)
        elif token == self._end_id:
            self._end(is_complete=True)
        elif self._tokenizer.n_ranks <= token < self._tokenizer.vocab_size:
            self._n_ignored += 1
        elif self._header is not None:
            # Asked for here so that an id outside the vocabulary is refused at once.
            self._tokenizer.token_bytes(token)
            self._header.append(token)
        else:
            self._write(self._stream.push(token), n_tokens=1)

    def _end_text(self) -> None:
        """Let no text or header be under way."""
        self._write(self._stream.finish(), n_tokens=0)
        self._n_ignored += len(self._header or [])
        self._header = None

    def _end(self, *, is_complete: bool) -> None:
        self._end_text()
        if self._use == "value":
            self._add_arguments("".join(self._value))
        self._has_ended, self._is_complete = True, is_complete

    def _end_header(self, header: list[int]) -> None:
        self._header = None
        text = self._tokenizer.decode(header[1:])
        tag, _, attributes = text.partition(" ")
        if header[0] == self._open_id:
            use = self._enter(tag, {key: _unescaped(value) for key, value in _ATTRIBUTE.findall(attributes)})
            is_known = use != "nothing" or tag in ("tools", "call")
            self._n_ignored += 0 if is_known else len(header) + 1
        elif any(element.tag == tag for element in self._elements):
            while self._leave() != tag:
                pass
        else:
            self._n_ignored += len(header) + 1

    def _enter(self, tag: str, attributes: dict[str, str]) -> _Use:
        level = _LEVEL.get(tag, _INNERMOST)
        while self._elements and _LEVEL.get(self._elements[-1].tag, _INNERMOST) >= level:
            self._leave()
        use = _USE.get(tag, "nothing")
        if tag == "call":
            self._calls.append(_Call(attributes.get("tool", "")))
            self._deltas.append(Delta("tool_calls", "", len(self._calls) - 1, self._calls[-1].name))
        elif tag == "argument":
            use = self._begin_argument(attributes)
        elif tag == "json":
            use = self._begin_raw()
        self._elements.append(_Element(tag, use))
        return use

    def _begin_argument(self, attributes: dict[str, str]) -> _Use:
        if not self._is_in_call() or self._calls[-1].is_raw:
            return "nothing"
        is_string = attributes.get("type", "string") == "string"
        before = ", " if self._calls[-1].arguments else "{"
        self._add_arguments(f"{before}{_json_string(attributes.get('key', ''))}: " + '"' * is_string)
        self._value = []
        return "string" if is_string else "value"

    def _begin_raw(self) -> _Use:
        if not self._is_in_call() or self._calls[-1].is_raw or self._calls[-1].arguments:
            return "nothing"
        self._calls[-1].is_raw = True
        return "raw"

    def _is_in_call(self) -> bool:
        return bool(self._elements) and self._elements[-1].tag == "call"

    def _leave(self) -> str:
        """End the innermost element and return its tag."""
        tag, use = self._elements.pop()
        if use == "string":
            self._add_arguments('"')
        elif use == "value":
            self._add_arguments(_as_json("".join(self._value)))
        elif tag == "call":
            call = self._calls[-1]
            if not call.is_raw:
                self._add_arguments("}" if call.arguments else "{}")
            call.is_complete = True
        return tag

    @property
    def _use(self) -> _Use:
        """What is done with text here. Outside of all elements it is content: better shown than lost."""
        return self._elements[-1].use if self._elements else "content"

    def _write(self, text: str, *, n_tokens: int) -> None:
        match self._use:
            case "nothing":
                self._n_ignored += n_tokens
            case "value":
                self._value.append(text)
            case "string":
                self._add_arguments(_json_string(text)[1:-1])
            case "raw":
                self._add_arguments(text)
            case "reasoning_content" | "content" as name:
                if text:
                    self._texts[name].append(text)
                    self._deltas.append(Delta(name, text))

    def _add_arguments(self, text: str) -> None:
        if text:
            self._calls[-1].arguments.append(text)
            self._deltas.append(Delta("tool_calls", text, len(self._calls) - 1))


def _unescaped(value: str) -> str:
    return _ESCAPE.sub(lambda found: {"amp": "&", "quot": '"'}[found[1]], value)


def _json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_json(text: str) -> str:
    """Return the text if it is JSON, else the JSON string of it."""
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _json_string(text)
    return text


def _refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python reads and JSON has not."""
    raise ValueError(f"{name} is not JSON")
