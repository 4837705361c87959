"""The chat format: a request, checked, then as segments of text, then as token ids.

A segment is a marker, which is one special token and comes from the template alone, or text, which is tokenised by itself as
ordinary text. So nothing that a user, a tool or a name says can become a marker. Knows nothing of HTTP or of the model;
`chat_reply` reads what the model answers.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

from manifests.errors import BadInputError
from runtime.tokens import Tokenizer, checked_text

OPEN, CLOSE, SEP, END_OF_MSG = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"

REQUEST_KEYS = ("messages", "tools", "tool_choice", "response_format", "thinking", "thinking_effort", "add_generation_prompt")
MESSAGE_KEYS = {
    "system": ("role", "content", "name", "tools"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "reasoning_content", "tool_calls"),
    "tool": ("role", "content", "name", "tool_call_id"),
}
EFFORTS = ("low", "medium", "high", "max")
TOOL_CHOICES = ("auto", "none", "required")
RESPONSE_FORMATS = ("text", "json_object", "json_schema")
MAX_SHOWN_CHARS = 60
MAX_LISTED = 10

TOOLS_TEXT = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
NEW_TOOLS_TEXT = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n```json\n{}\n```"
)
EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)
TOOL_CHOICE_TEXT = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
RESPONSE_FORMAT_TEXT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
SCHEMA_TEXT = "\nThe JSON data must match the following schema:\n```json\n{}\n```"

# The element in which the model goes on writing after the prompt.
ReplyStart = Literal["think", "response"]


class Segment(NamedTuple):
    """A piece of a prompt that is tokenised alone; `is_marker` if the text is the name of a special token and stands for it."""

    text: str
    is_marker: bool


class Argument(NamedTuple):
    """One argument of a call: a string's `text` is the string itself, any other type's is JSON."""

    key: str
    type: str
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made; `index` counts from 1 in its message, `arguments` is JSON text as the client gave it."""

    id: str
    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Said:
    """A message of system or user; each part of `content` is tokenised alone."""

    role: str
    name: str
    content: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NewTools:
    """A system message that adds tools; `tools` is compact JSON."""

    tools: str


@dataclass(frozen=True, slots=True)
class Answered:
    """A former message of the assistant."""

    name: str
    reasoning: str
    content: tuple[str, ...]
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool gave back; `index` is that of its call, from 1."""

    tool: str
    index: int
    content: tuple[str, ...]


Message = Said | NewTools | Answered | ToolResult


@dataclass(frozen=True, slots=True)
class Chat:
    """A request that has been checked; tool results stand in the order of their calls."""

    messages: tuple[Message, ...]
    tools: str | None  # compact JSON
    tool_choice: str
    response_format: str
    schema: str | None  # compact JSON
    thinking: bool
    thinking_effort: str | None
    add_generation_prompt: bool

    @property
    def reply_start(self) -> ReplyStart | None:
        """The element that the prompt leaves open for the model, None if it ends between messages."""
        if not self.add_generation_prompt:
            return None
        return "think" if self.thinking else "response"


def encode_chat(chat: Chat, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the prompt. Raises BadInputError if the tokenizer lacks a marker."""
    return encode_segments(chat_segments(chat), tokenizer)


def encode_segments(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the segments, each tokenised alone. Raises BadInputError if the tokenizer lacks a marker."""
    ids: list[int] = []
    for text, is_marker in segments:
        ids += [tokenizer.special_id(text)] if is_marker else tokenizer.encode(text)
    return ids


def chat_segments(chat: Chat) -> list[Segment]:
    """Return the segments of the prompt; empty text makes none."""
    return [segment for segment in _prompt(chat) if segment.text]


def _prompt(chat: Chat) -> Iterator[Segment]:
    if chat.tools is not None:
        yield from _internal("tool-declare", TOOLS_TEXT.format(chat.tools))
    if chat.thinking and chat.thinking_effort is not None:
        yield from _internal("thinking-effort", EFFORT_TEXT.format(chat.thinking_effort))
    for message in chat.messages:
        yield from _message(message, thinking=chat.thinking)
    if chat.tool_choice in TOOL_CHOICE_TEXT:
        yield from _internal("tool-choice", TOOL_CHOICE_TEXT[chat.tool_choice])
    if chat.response_format != "text":
        schema = "" if chat.schema is None else SCHEMA_TEXT.format(chat.schema)
        yield from _internal("response-format", RESPONSE_FORMAT_TEXT.format(chat.response_format) + schema)
    if chat.reply_start is not None:
        yield from _open("message", role="assistant")
        yield from _open(chat.reply_start)


def _message(message: Message, *, thinking: bool) -> Iterator[Segment]:
    match message:
        case Said(role, name, content):
            return _named_message(role, name, _texts(content))
        case NewTools(tools):
            return _internal("tool-declare", NEW_TOOLS_TEXT.format(tools))
        case Answered(name):
            return _named_message("assistant", name, _answer(message, thinking=thinking))
        case ToolResult(tool, index, content):
            return _whole_message(_texts(content), role="tool", tool=tool, index=str(index))


def _named_message(role: str, name: str, body: Iterable[Segment]) -> Iterator[Segment]:
    return _whole_message(body, role=role, name=name) if name else _whole_message(body, role=role)


def _internal(message_type: str, text: str) -> Iterator[Segment]:
    return _whole_message(_texts([text]), role="system", type=message_type)


def _whole_message(body: Iterable[Segment], **attributes: str) -> Iterator[Segment]:
    yield from _element("message", body, **attributes)
    yield Segment(END_OF_MSG, True)


def _answer(message: Answered, *, thinking: bool) -> Iterator[Segment]:
    if thinking:
        yield from _element("think", _texts([message.reasoning]))
    yield from _element("response", _texts(message.content))
    if message.calls:
        yield from _element("tools", (segment for call in message.calls for segment in _call(call)))


def _call(call: ToolCall) -> Iterator[Segment]:
    yield from _open("call", tool=call.name, index=str(call.index))
    arguments = read_arguments(call.arguments)
    if arguments is None:
        yield from _element("json", _texts([call.arguments]), type="object")
    else:
        for key, kind, text in arguments:
            yield from _element("argument", _texts([text]), key=key, type=kind)
    yield from _close("call")


def _element(tag: str, body: Iterable[Segment], **attributes: str) -> Iterator[Segment]:
    yield from _open(tag, **attributes)
    yield from body
    yield from _close(tag)


def _open(tag: str, **attributes: str) -> Iterator[Segment]:
    yield Segment(OPEN, True)
    yield Segment(tag, False)
    for key, value in attributes.items():
        yield from _texts([f" {key}", '="', value.replace("&", "&amp;").replace('"', "&quot;"), '"'])
    yield Segment(SEP, True)


def _close(tag: str) -> Iterator[Segment]:
    yield Segment(CLOSE, True)
    yield Segment(tag, False)
    yield Segment(SEP, True)


def _texts(texts: Iterable[str]) -> Iterator[Segment]:
    return (Segment(text, False) for text in texts)


def read_arguments(arguments: str) -> list[Argument] | None:
    """Return the arguments that the JSON text holds; blank text holds none.

    None if the text is not one JSON object whose keys differ and whose values JSON and UTF-8 can say again.
    """
    if not arguments.strip():
        return []
    try:
        value = json.loads(arguments, object_pairs_hook=_unique_keys)
        return [_argument(key, item) for key, item in value.items()] if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def _argument(key: str, value: Any) -> Argument:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
    (key + text).encode()
    return Argument(key, _json_type(value), text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _json_type(value: Any) -> str:
    """Return the type's name in JSON. A value of Python that JSON has not goes by its Python name."""
    names = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null", dict: "object", list: "array"}
    return names.get(type(value), type(value).__name__)


def parse_chat(request: Any) -> Chat:
    """Check a request, as it comes out of JSON: an object with `messages` and, where wanted, the other REQUEST_KEYS.

    A field that is null counts as absent. Raises BadInputError, whose message begins with the path of the field.
    """
    fields = _object(request, "request", REQUEST_KEYS, prefix="")
    messages = _messages(fields.get("messages"))
    tools = _tools(fields["tools"], "tools") if _array(fields.get("tools", []), "tools") else None
    choice = _one_of(fields, "tool_choice", TOOL_CHOICES, absent="auto")
    if choice == "required" and tools is None and not any(isinstance(message, NewTools) for message in messages):
        raise BadInputError("tool_choice: is 'required' in a request without tools, expected tools that can be called")
    response_format, schema = _response_format(fields.get("response_format"))
    return Chat(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        response_format=response_format,
        schema=schema,
        thinking=_boolean(fields, "thinking", absent=True),
        thinking_effort=_one_of(fields, "thinking_effort", EFFORTS, absent="") or None,
        add_generation_prompt=_boolean(fields, "add_generation_prompt", absent=True),
    )


def _messages(value: Any) -> tuple[Message, ...]:
    items = _array(value, "messages")
    if not items:
        raise BadInputError("messages: is empty, expected at least one message")
    messages: list[Message] = []
    calls: dict[str, ToolCall] = {}
    result_of_call: dict[int, str] = {}
    for n, item in enumerate(items):
        where = f"messages[{n}]"
        message = _parse_message(item, where, calls)
        if isinstance(message, Answered):
            calls, result_of_call = {call.id: call for call in message.calls}, {}
        if isinstance(message, ToolResult) and result_of_call.setdefault(message.index, where) != where:
            first = result_of_call[message.index]
            raise BadInputError(f"{where}.tool_call_id: answers the same call as {first}, expected one result for each call")
        messages.append(message)
    return tuple(_in_call_order(messages))


def _in_call_order(messages: list[Message]) -> Iterator[Message]:
    """Yield the messages, each run of tool results in the order of the calls."""
    run: list[ToolResult] = []
    for message in messages:
        if isinstance(message, ToolResult):
            run.append(message)
            continue
        yield from sorted(run, key=lambda result: result.index)
        run = []
        yield message
    yield from sorted(run, key=lambda result: result.index)


def _parse_message(item: Any, where: str, calls: dict[str, ToolCall]) -> Message:
    """Return one message; `calls` are those of the assistant's latest message, by id and in order."""
    role = _object(item, where, None).get("role")
    if not isinstance(role, str) or role not in MESSAGE_KEYS:
        raise BadInputError(f"{where}.role: is {_shown(role)}, expected {_listed(MESSAGE_KEYS)}")
    fields = _object(item, where, MESSAGE_KEYS[role])
    name = _text(fields.get("name", ""), f"{where}.name")
    if role == "tool":
        return _tool_result(fields, where, name, calls)
    if role == "assistant":
        return _answered(fields, where, name)
    if _array(fields.get("tools", []), f"{where}.tools"):
        if name or fields.get("content"):
            raise BadInputError(f"{where}.tools: come with content or a name, expected a system message of tools alone; say the rest in another one")
        return NewTools(_tools(fields["tools"], f"{where}.tools"))
    return Said(role, name, _content(fields, where))


def _answered(fields: dict[str, Any], where: str, name: str) -> Answered:
    calls = _tool_calls(fields.get("tool_calls", []), f"{where}.tool_calls")
    reasoning = _text(fields.get("reasoning_content", ""), f"{where}.reasoning_content")
    # A message that only called tools, or was cut off while it thought, has no content.
    content = () if "content" not in fields and (calls or reasoning) else _content(fields, where)
    return Answered(name, reasoning, content, calls)


def _tool_result(fields: dict[str, Any], where: str, name: str, calls: dict[str, ToolCall]) -> ToolResult:
    call_id = _required_text(fields, where, "tool_call_id")
    call = calls.get(call_id)
    if call is None:
        there = _listed(calls) if calls else "a message of the assistant with tool_calls before it"
        raise BadInputError(f"{where}.tool_call_id: {_shown(call_id)} is no call of the assistant's latest message, expected {there}")
    if name and name != call.name:
        raise BadInputError(f"{where}.name: is {_shown(name)}, but the call {_shown(call_id)} is of {_shown(call.name)}; leave the name out")
    return ToolResult(call.name, call.index, _content(fields, where))


def _tool_calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    calls = tuple(_tool_call(item, f"{where}[{n}]", n + 1) for n, item in enumerate(_array(value, where)))
    first_of_id: dict[str, int] = {}
    for n, call in enumerate(calls):
        first = first_of_id.setdefault(call.id, n)
        if first != n:
            raise BadInputError(f"{where}[{n}].id: {_shown(call.id)} is the id of {where}[{first}] already, expected a different id for each call")
    return calls


def _tool_call(item: Any, where: str, index: int) -> ToolCall:
    # Clients that put a streamed call together may leave its index in it.
    fields = _object(item, where, ("id", "type", "function", "index"))
    _one_of(fields, "type", ("function",), absent="function", prefix=f"{where}.")
    if not _is_count(fields.get("index", 0)):
        raise BadInputError(f"{where}.index: is {_json_type(fields['index'])}, expected a whole number of at least 0")
    function = _object(fields.get("function"), f"{where}.function", ("name", "arguments"))
    arguments = _text(function.get("arguments"), f"{where}.function.arguments")
    return ToolCall(_required_text(fields, where, "id"), index, _required_text(function, f"{where}.function", "name"), arguments)


def _content(fields: dict[str, Any], where: str) -> tuple[str, ...]:
    """Return the texts of the content: a string, or an array of text parts."""
    where = f"{where}.content"
    content = fields.get("content")
    if isinstance(content, str):
        return (checked_text(content, where=where),)
    if not isinstance(content, list):
        raise BadInputError(f"{where}: is {_json_type(content)}, expected a string or an array of text parts")
    return tuple(_part(part, f"{where}[{n}]") for n, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = _object(part, where, None).get("type")
    if isinstance(kind, str) and "image" in kind:
        raise BadInputError(f"{where}: is an image ({_shown(kind)}), and images are not supported; send parts of type 'text' only")
    if kind != "text":
        raise BadInputError(f"{where}.type: is {_shown(kind)}, expected 'text'; nothing else is supported")
    return _text(_object(part, where, ("type", "text")).get("text"), f"{where}.text")


def _tools(value: Any, where: str) -> str:
    """Return the tools as compact JSON."""
    for n, item in enumerate(_array(value, where)):
        at = f"{where}[{n}]"
        fields = _object(item, at, None)
        _one_of(fields, "type", ("function",), absent="", prefix=f"{at}.")
        if "type" not in fields:
            raise BadInputError(f"{at}.type: is missing, expected 'function'")
        _required_text(_object(fields.get("function"), f"{at}.function", None), f"{at}.function", "name")
    return _compact_json(value, where)


def _response_format(value: Any) -> tuple[str, str | None]:
    """Return the format's name and, as compact JSON, its schema."""
    if value is None:
        return "text", None
    fields = _object(value, "response_format", ("type", "json_schema"))
    kind = _one_of(fields, "type", RESPONSE_FORMATS, absent="", prefix="response_format.")
    if not kind:
        raise BadInputError(f"response_format.type: is missing, expected {_listed(RESPONSE_FORMATS)}")
    if kind != "json_schema":
        if "json_schema" in fields:
            raise BadInputError(f"response_format.json_schema: comes with type {kind!r}, expected type 'json_schema'")
        return kind, None
    where = "response_format.json_schema"
    named = _object(fields.get("json_schema"), where, ("name", "description", "schema", "strict"))
    for key in ("name", "description"):
        _text(named.get(key, ""), f"{where}.{key}")
    _boolean(named, "strict", absent=False, prefix=f"{where}.")
    schema = _object(named.get("schema"), f"{where}.schema", None, keeps_null=True)
    return kind, _compact_json(schema, f"{where}.schema")


def _compact_json(value: Any, where: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
    except RecursionError:
        raise BadInputError(f"{where}: is nested too deeply, expected what fits into a prompt") from None
    except ValueError:
        raise BadInputError(f"{where}: holds a number that is infinite or none at all, which JSON cannot say") from None
    return checked_text(text, where=where)


def _object(value: Any, where: str, keys: Iterable[str] | None, *, prefix: str | None = None, keeps_null: bool = False) -> dict[str, Any]:
    """Return the object without the fields that are null.

    Other keys than `keys`, if these are given, are refused unless their value says nothing: some clients send every field that they know.
    """
    if not isinstance(value, dict):
        raise BadInputError(f"{where}: is {'missing' if value is None else _json_type(value)}, expected an object")
    if keys is not None:
        for key, item in value.items():
            if key not in keys and item not in (None, [], {}, ""):
                at = f"{where}." if prefix is None else prefix
                raise BadInputError(f"{at}{_shown(str(key))[1:-1]}: is not a field that is known here, expected {_listed(keys)}")
    return value if keeps_null else {key: item for key, item in value.items() if item is not None}


def _array(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadInputError(f"{where}: is {'missing' if value is None else _json_type(value)}, expected an array")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadInputError(f"{where}: is {'missing' if value is None else _json_type(value)}, expected a string")
    return checked_text(value, where=where)


def _required_text(fields: dict[str, Any], where: str, key: str) -> str:
    text = _text(fields.get(key), f"{where}.{key}")
    if not text:
        raise BadInputError(f"{where}.{key}: is empty, expected a name")
    return text


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _boolean(fields: dict[str, Any], key: str, *, absent: bool, prefix: str = "") -> bool:
    value = fields.get(key, absent)
    if not isinstance(value, bool):
        raise BadInputError(f"{prefix}{key}: is {_shown(value)}, expected true or false")
    return value


def _one_of(fields: dict[str, Any], key: str, choices: Iterable[str], *, absent: str, prefix: str = "") -> str:
    if key not in fields:
        return absent
    value = fields[key]
    if not isinstance(value, str) or value not in choices:
        raise BadInputError(f"{prefix}{key}: is {_shown(value)}, expected {_listed(choices)}")
    return value


def _shown(value: Any) -> str:
    """Return a string quoted and short, of another value its type."""
    if not isinstance(value, str):
        return "missing" if value is None else _json_type(value)
    return ascii(value[:MAX_SHOWN_CHARS]) + ("..." if len(value) > MAX_SHOWN_CHARS else "")


def _listed(names: Iterable[str]) -> str:
    *before, last = [_shown(name) for name in islice(names, MAX_LISTED + 1)]
    if len(before) == MAX_LISTED:
        last = "another one"
    return f"{', '.join(before)} or {last}" if before else last
