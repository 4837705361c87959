"""What a request may say, field by field, and how an error is told: in the form of OpenAI's API.

A field is here once: its check and its place in the OpenAPI document come from the same line. The chat format's own fields are checked by
`chat_format`.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from layout.sizes import counted
from manifests.errors import BadInputError
from runtime.tokens import checked_text

MAX_BODY_BYTES = 16 * 2**20
MAX_DEPTH = 64
MAX_MESSAGES = 4096
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
DEFAULT_COMPLETION_TOKENS = 16
MAX_SHOWN_CHARS = 60

Json = dict[str, Any]


class ApiError(Exception):
    """An answer that is no result.

    status  of HTTP
    kind    OpenAI's `type`
    param   the field that is meant, if it is one
    """

    def __init__(self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, _sayable(message), kind, param and _sayable(param), code

    def body(self) -> Json:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def refused(param: str, what: str, *, code: str | None = None) -> ApiError:
    """Return the error for a field that cannot be honoured."""
    return ApiError(400, f"{param}: {what}", param=param, code=code)


class Field(NamedTuple):
    """A field of a request: what reads it, raising ApiError, and its JSON schema."""

    read: Callable[[Any, str], Any]
    schema: Json


def _sayable(text: str) -> str:
    """Return text that UTF-8 can hold: a key of a request may have lone surrogates."""
    return text.encode(errors="backslashreplace").decode()


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def number(least: float, most: float, *, is_open: bool = False) -> Field:
    """A number from least to most, without least itself if is_open."""

    def read(value: Any, name: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (least < value if is_open else least <= value) or value > most:
            raise refused(name, f"is {_shown(value)}, expected a number {'above' if is_open else 'from'} {least:g} {'and up ' * is_open}to {most:g}")
        return float(value)

    return Field(read, {"type": "number", "exclusiveMinimum" if is_open else "minimum": least, "maximum": most})


def whole(least: int, most: int) -> Field:
    """A whole number from least to most."""

    def read(value: Any, name: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise refused(name, f"is {_shown(value)}, expected a whole number from {least} to {most}")
        return value

    return Field(read, {"type": "integer", "minimum": least, "maximum": most})


def _read_boolean(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise refused(name, f"is {_shown(value)}, expected true or false")
    return value


def _read_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise refused(name, f"is {_shown(value)}, expected a string")
    try:
        return checked_text(value, where=name)
    except BadInputError as error:
        raise ApiError(400, str(error), param=name) from None


def _read_stop(value: Any, name: str) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise refused(name, f"is {_shown(value)}, expected a string or at most {MAX_STOPS} of them")
    for n, stop in enumerate(stops):
        at = f"{name}[{n}]"
        if not _read_text(stop, at) or len(stop) > MAX_STOP_CHARS:
            raise ApiError(400, f"{at}: has {counted(len(stop), 'character')}, expected 1 to {MAX_STOP_CHARS}", param=name)
    return tuple(stops)


def _read_stream_options(value: Any, name: str) -> bool:
    """Return whether usage is wanted."""
    if not isinstance(value, dict):
        raise refused(name, f"is {_shown(value)}, expected an object with include_usage")
    for key, item in value.items():
        if key != "include_usage" and item not in (None, False):
            raise refused(f"{name}.{key}"[:MAX_SHOWN_CHARS], "is not a field that is known here, expected include_usage")
    asked = value.get("include_usage")
    return asked is not None and _read_boolean(asked, f"{name}.include_usage")


def nothing_but(*values: Any, why: str) -> Field:
    """A field of OpenAI's that has no effect here: only values that ask for none are taken."""

    def read(value: Any, name: str) -> None:
        # 1 == True in Python, not in JSON.
        if not any((type(value) is type(known) and value == known) or _is_number(value, known) for known in values):
            raise refused(name, f"is {_shown(value)}, which cannot be honoured: {why}")

    return Field(read, {"enum": [*values, None], "description": why})


def _is_number(value: Any, known: Any) -> bool:
    return isinstance(value, float) and type(known) is int and value == known


def _read_anything(value: Any, name: str) -> None:
    return None


BOOLEAN = Field(_read_boolean, {"type": "boolean"})
TEXT = Field(_read_text, {"type": "string"})
STOP = Field(
    _read_stop,
    {
        "anyOf": [
            {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
            {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}, "maxItems": MAX_STOPS},
        ]
    },
)
STREAM_OPTIONS = Field(_read_stream_options, {"type": "object", "properties": {"include_usage": {"type": "boolean"}}})
IGNORED = Field(_read_anything, {"description": "Taken and without effect."})
MOST_WHOLE = 2**63 - 1

_PENALTIES = "repetition is not penalised here"
SAMPLING: dict[str, Field] = {
    "model": TEXT,
    "temperature": number(0, 2),
    "top_p": number(0, 1, is_open=True),
    "seed": whole(0, MOST_WHOLE),
    "max_tokens": whole(1, MOST_WHOLE),
    "stop": STOP,
    "stream": BOOLEAN,
    "stream_options": STREAM_OPTIONS,
    "return_token_ids": BOOLEAN,
    "n": nothing_but(1, why="one answer at a time is generated"),
    "frequency_penalty": nothing_but(0, why=_PENALTIES),
    "presence_penalty": nothing_but(0, why=_PENALTIES),
    "logit_bias": nothing_but({}, why="logits are not changed here"),
    "user": IGNORED,
}
COMPLETION: dict[str, Field] = SAMPLING | {
    "logprobs": whole(0, MAX_COMPLETION_LOGPROBS),
    "echo": nothing_but(False, why="the prompt is not repeated"),
    "suffix": nothing_but("", why="the model continues a text, it does not fill gaps"),
    "best_of": nothing_but(1, why="one answer at a time is generated"),
}
CHAT: dict[str, Field] = SAMPLING | {
    "max_completion_tokens": whole(1, MOST_WHOLE),
    "logprobs": BOOLEAN,
    "top_logprobs": whole(0, MAX_TOP_LOGPROBS),
    "parallel_tool_calls": nothing_but(True, why="the model itself decides how many calls it makes"),
    "reasoning_effort": Field(_read_text, {"enum": ["low", "medium", "high", "max", None]}),
    "modalities": nothing_but(["text"], why="text is all that is generated"),
    "store": nothing_but(False, why="no answer is stored"),
    "metadata": IGNORED,
    "service_tier": nothing_but("auto", "default", why="there is one tier of service"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an answer is to be generated and told.

    n_tokens      None: what the endpoint has as its default
    n_logprobs    likeliest tokens to tell beside each; None: no log-probabilities at all
    """

    temperature: float
    top_p: float
    seed: int | None
    n_tokens: int | None
    stops: tuple[str, ...]
    is_stream: bool
    wants_usage: bool
    wants_ids: bool
    n_logprobs: int | None


# How what is wrong with a body's values begins.
_HOLDS = "holds "


def parse_json(body: bytes) -> Json:
    """Return the object that a body holds. Raises ApiError."""
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 at byte {error.start}; expected JSON in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        # What is not ours is Python's: a number with more digits than it reads, of which it says how to set that.
        what = str(error) if str(error).startswith(_HOLDS) else "holds a number that is too long"
        raise ApiError(400, f"the body {what}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {_shown(value)}, expected a JSON object")
    _check_depth(value)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{_HOLDS}{name}, which is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
        raise ValueError(f"{_HOLDS}{name[:100]!r} twice in one object of the JSON; which of them is meant cannot be told")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{_HOLDS}a number that is beyond what a float of JSON can say")
    return value


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested more than {MAX_DEPTH} deep; send it flatter")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for outer in level if isinstance(outer, dict | list) for item in (outer.values() if isinstance(outer, dict) else outer)]
        if not level:
            return
    raise _too_deep()


def read_fields(request: Json, fields: Mapping[str, Field], *, others: tuple[str, ...]) -> Json:
    """Return what the known fields say; null counts as absent. `others` are read elsewhere. Raises ApiError naming a field that is neither."""
    found: Json = {}
    for name, value in request.items():
        if name in others or value is None:
            continue
        if name not in fields:
            raise ApiError(400, f"{name[:MAX_SHOWN_CHARS]!r} is not a field that is known here; leave it out", param=name[:MAX_SHOWN_CHARS])
        found[name] = fields[name].read(value, name)
    return found


def sampling(found: Json, *, is_chat: bool) -> Sampling:
    """Return the settings out of the fields read. Raises ApiError if they contradict each other."""
    is_stream, n_tokens = found.get("stream", False), found.get("max_tokens")
    if "max_completion_tokens" in found:
        if n_tokens not in (None, found["max_completion_tokens"]):
            raise refused("max_completion_tokens", f"is {found['max_completion_tokens']}, but max_tokens is {n_tokens}; give one of them")
        n_tokens = found["max_completion_tokens"]
    if "stream_options" in found and not is_stream:
        raise refused("stream_options", "come without stream: true; leave them out")
    n_logprobs = found.get("logprobs")
    if is_chat:
        if "top_logprobs" in found and not n_logprobs:
            raise refused("top_logprobs", "comes without logprobs: true; set that too")
        n_logprobs = found.get("top_logprobs", 0) if n_logprobs else None
    return Sampling(
        temperature=found.get("temperature", 1.0),
        top_p=found.get("top_p", 1.0),
        seed=found.get("seed"),
        n_tokens=n_tokens,
        stops=found.get("stop", ()),
        is_stream=is_stream,
        wants_usage=found.get("stream_options", False),
        wants_ids=found.get("return_token_ids", False),
        n_logprobs=n_logprobs,
    )


def room_for(n_prompt: int, asked: int | None, *, context: int, default: int | None) -> int:
    """Return how many tokens to generate. Raises ApiError if prompt and answer do not fit; the message says what would."""
    left = context - n_prompt
    if left < 1:
        what = f"the prompt has {counted(n_prompt, 'token')}, but the context holds {context}, and the answer needs some of them; shorten the prompt"
        raise ApiError(400, what, param="messages" if default is None else "prompt", code="context_length_exceeded")
    if asked is not None and asked > left:
        what = f"is {asked}, but the prompt has {n_prompt} of the context's {counted(context, 'token')}, so that {counted(left, 'is', 'are')} left"
        raise refused("max_tokens", what, code="context_length_exceeded")
    return asked if asked is not None else min(left, default or left)


def prompt_of(value: Any) -> str | list[int]:
    """Return the one prompt of a completion: a text, or token ids; either may come in a list of one. Raises ApiError."""
    if value is None:
        raise refused("prompt", "is missing, expected a string or token ids")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise refused("prompt", f"holds {len(value)} prompts; send one at a time")
        value = value[0]
    if isinstance(value, str):
        return _read_text(value, "prompt")
    return token_ids(value, "prompt")


def token_ids(value: Any, name: str) -> list[int]:
    """Return a list of whole numbers. Raises ApiError; whether they are tokens is seen later."""
    if not isinstance(value, list) or any(not isinstance(item, int) or isinstance(item, bool) for item in value):
        raise refused(name, f"is {_shown(value)[:MAX_SHOWN_CHARS]}, expected a list of token ids" + (" or a string" if name == "prompt" else ""))
    return value


def field_of(message: str) -> str | None:
    """Return the field that a message of the chat format begins with."""
    name, colon, _ = message.partition(": ")
    return name if colon and " " not in name else None
