"""The OpenAPI document of the server, out of the same table of fields that requests are checked with."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from runtime.chat.format import EFFORTS, TOOL_CHOICES
from runtime.serving.schema import CHAT, COMPLETION, MAX_MESSAGES, TEXT, Field

Json = dict[str, Any]

_ANY_OBJECT: Json = {"type": "object"}
_IDS: Json = {"type": "array", "items": {"type": "integer"}}
_TEXT_PARTS: Json = {
    "type": "array",
    "items": {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}, "required": ["type", "text"]},
}
_MESSAGE: Json = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, _TEXT_PARTS, {"type": "null"}]},
        "name": {"type": "string"},
        "reasoning_content": {"type": "string"},
        "tool_calls": {"type": "array", "items": _ANY_OBJECT},
        "tool_call_id": {"type": "string"},
        "tools": {"type": "array", "items": _ANY_OBJECT},
    },
    "required": ["role"],
}
_CONVERSATION: Json = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES},
    "tools": {"type": "array", "items": _ANY_OBJECT},
    "tool_choice": {"enum": list(TOOL_CHOICES)},
    "response_format": {"type": "object", "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": _ANY_OBJECT}},
    "thinking": {"type": "boolean"},
    "thinking_effort": {"enum": list(EFFORTS)},
    "add_generation_prompt": {"type": "boolean"},
}
_PROMPT: Json = {"anyOf": [{"type": "string"}, _IDS, {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}, "minItems": 1, "maxItems": 1}]}
_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_COUNT: Json = {"type": "integer", "minimum": 0}
_SHARE: Json = {"type": "number", "minimum": 0, "maximum": 1}
_SECONDS: Json = {"type": "number", "minimum": 0}


def _facts(**properties: Json) -> Json:
    """Return the schema of an object that has all of these and nothing else."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_REQUEST = {"number": _COUNT, "kind": {"enum": ["chat.completion", "text_completion"]}, "n_prompt": _COUNT, "n_cached": _COUNT, "n_generated": _COUNT}
_MODEL_FACTS = {
    **{name: {"type": "string"} for name in ("id", "object", "owned_by", "architecture", "device")},
    **{name: _COUNT for name in ("created", "context_length", "n_layers", "n_experts", "n_experts_per_token")},
    **{name: _COUNT for name in ("device_slots", "host_slots", "record_bytes")},
}
_EXPERTS = _facts(device_hits=_COUNT, host_hits=_COUNT, records=_COUNT)
_STATE = {"enum": ["ok", "failing", "absent", "unused"]}
_MAYBE_SECONDS = {"type": ["number", "null"], "minimum": 0}
_RUN = _REQUEST | {
    "ended_by": {"enum": ["stop", "length", "failed or given up"]},
    "ended_at": _SECONDS,
    "seconds": _SECONDS,
    "time_to_first_token_s": _MAYBE_SECONDS,
    "steady_decode_tok_per_s": _MAYBE_SECONDS,
}
_STATUS = _facts(
    status={"enum": ["ok", "degraded", "failed", "ending"]},
    model=_facts(**_MODEL_FACTS),
    queue=_facts(running=_COUNT, waiting=_COUNT, most_waiting=_COUNT),
    running={"anyOf": [_facts(**_REQUEST, prompt_share=_SHARE), {"type": "null"}]},
    clock_s=_SECONDS,
    generated_tokens=_COUNT,
    experts=_facts(prompt_pass=_EXPERTS, decode=_EXPERTS),
    drives={"type": "array", "items": _facts(drive=_COUNT, tier={"type": "string"}, state=_STATE, read_bytes=_COUNT, bad_reads=_COUNT)},
    runs={"type": "array", "items": _facts(**_RUN)},
)
_REFUSALS = {
    "400": "A field is not what it must be or cannot be honoured, or prompt and answer do not fit into the context.",
    "401": "The API key is missing or unknown.",
    "403": "Without API keys: the request comes from another machine's name or a web page.",
    "404": "There is no such model.",
    "408": "The body took too long.",
    "413": "The body is too large.",
    "429": "As many requests wait as may wait.",
    "500": "The generation failed.",
    "503": "The server ends.",
}


def openapi(*, model_name: str, has_keys: bool) -> Json:
    """Return the document of a server with this model."""
    document: Json = {
        "openapi": "3.1.0",
        "info": {"title": "ktier", "version": version("ktier"), "description": "One model, one answer at a time, in the form of OpenAI's API."},
        "paths": _paths(model_name),
        "components": {"schemas": {"Error": _ERROR}},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _paths(model_name: str) -> Json:
    model = {"model": TEXT._replace(schema={"enum": [model_name, None]})}
    chat = _body(CHAT | model, _CONVERSATION, required=["messages"])
    tokens = _body(model, {"tokens": _IDS}, required=["tokens"])
    text_or_chat = {"anyOf": [_body(model, {"prompt": {"type": "string"}}, ["prompt"]), _body(model, _CONVERSATION, ["messages"])]}
    return {
        "/v1/chat/completions": _post("Answer in a conversation.", chat, is_stream=True),
        "/v1/completions": _post("Go on with a text.", _body(COMPLETION | model, {"prompt": _PROMPT}, required=["prompt"]), is_stream=True),
        "/tokenize": _post("Turn a text or a conversation into token ids.", text_or_chat),
        "/detokenize": _post("Turn token ids into text.", tokens),
        "/v1/models": _get("The model, as a list of one."),
        "/v1/models/{name}": _get("The model.", name=model_name),
        "/": _get("A page for people: the state of the server, and a chat.", content="text/html", is_open=True),
        "/status": _get(
            "What the page shows: model, queue, what runs, experts, drives, and the last runs. Counts since the server began.", schema=_STATUS
        ),
        "/health": _get("Whether answers can be generated, and how the drives are.", also={"503": "The server has failed or ends."}, is_open=True),
        "/metrics": _get("Counts since the server began, for Prometheus.", content="text/plain"),
        "/openapi.json": _get("This document."),
    }


def _body(fields: Mapping[str, Field], others: Json, required: list[str]) -> Json:
    properties = {name: field.schema for name, field in fields.items()} | others
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _post(says: str, body: Json, *, is_stream: bool = False) -> Json:
    content: Json = {"application/json": {"schema": _ANY_OBJECT}}
    if is_stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "post": {
            "summary": says,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {"200": {"description": "The answer.", "content": content}} | _refusals(_REFUSALS),
        }
    }


def _get(
    says: str,
    *,
    name: str | None = None,
    also: Mapping[str, str] | None = None,
    content: str = "application/json",
    schema: Json | None = None,
    is_open: bool = False,
) -> Json:
    """Return a path that is read. name: the one value of its parameter; is_open: whether strangers may read it too."""
    schema = schema or ({"type": "string"} if content.startswith("text/") else _ANY_OBJECT)
    answer = {"200": {"description": "The answer.", "content": {content: {"schema": schema}}}}
    if is_open:
        return {"get": {"summary": says, "security": [], "responses": answer | {code: {"description": text} for code, text in (also or {}).items()}}}
    codes = ["401", "403", *(["404"] if name else [])]
    operation: Json = {"summary": says, "responses": answer | _refusals({code: _REFUSALS[code] for code in codes})}
    if name:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"const": name}}]
    return {"get": operation}


def _refusals(statuses: Mapping[str, str]) -> Json:
    schema = {"$ref": "#/components/schemas/Error"}
    return {code: {"description": text, "content": {"application/json": {"schema": schema}}} for code, text in statuses.items()}
