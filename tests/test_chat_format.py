import json
from typing import Any

import pytest
from conftest import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.errors import BadInputError
from runtime.chat.format import Argument, Segment, chat_segments, encode_chat, encode_segments, parse_chat, read_arguments
from runtime.tokens import Tokenizer, load_tokenizer

CASES = json.loads((DATA / "chat_segments.json").read_text())["cases"]
MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

tiny = load_tokenizer(DATA / "tiny-k3.1", vocab_size=512)


def segments(request: Any) -> list[Segment]:
    return chat_segments(parse_chat(request))


def text_of(request: Any) -> str:
    return "".join(text for text, _ in segments(request))


def user(content: Any = "x", **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def call(call_id: str, name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def result(call_id: str, content: Any = "r", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content, **fields}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


@pytest.mark.parametrize("name", CASES)
def test_a_request_becomes_the_segments_of_the_authors_encoder(name: str) -> None:
    assert [list(segment) for segment in segments(CASES[name]["request"])] == CASES[name]["segments"]


@pytest.mark.parametrize("name", CASES)
def test_each_segment_is_tokenised_alone(name: str) -> None:
    encoded = [(tiny.encode_with_specials if is_marker else tiny.encode)(text) for text, is_marker in CASES[name]["segments"]]
    assert encode_chat(parse_chat(CASES[name]["request"]), tiny) == [token for ids in encoded for token in ids]


def test_neighbouring_segments_are_not_joined() -> None:
    one, other = Segment("Th", False), Segment("e", False)
    assert tiny.encode("The") == [269]
    assert encode_segments([one, other], tiny) == tiny.encode("Th") + tiny.encode("e") != [269]


SPECIALS = [tiny.token_bytes(token).decode() for token in range(tiny.n_ranks, tiny.vocab_size)]
forged = st.lists(st.one_of(st.sampled_from([*SPECIALS, '"', "&", "&quot;", '">', "message", "\n"]), st.text(max_size=6)), max_size=6).map("".join)
N_TEXTS = 17


def chat_of(texts: list[str]) -> dict[str, Any]:
    """A request of a fixed shape with the texts in every place that takes any text."""
    t = iter(texts)
    return {
        "messages": [
            {"role": "system", "content": next(t), "name": "n" + next(t)},
            {"role": "system", "tools": [tool("n" + next(t), description=next(t), parameters={next(t): next(t)})]},
            user([{"type": "text", "text": next(t)}, {"type": "text", "text": next(t)}], name="n" + next(t)),
            {
                "role": "assistant",
                "content": next(t),
                "reasoning_content": next(t),
                "tool_calls": [call("c1", "n" + next(t), json.dumps({next(t): next(t)})), call("c2", "f", "!" + next(t))],
            },
            result("c2", next(t)),
            result("c1", next(t)),
        ],
        "tools": [tool()],
        "response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": {"a": texts[0], texts[1]: 1}}},
    }


@settings(deadline=None, max_examples=200)
@given(st.lists(forged, min_size=N_TEXTS, max_size=N_TEXTS))
def test_no_text_yields_a_special_id(texts: list[str]) -> None:
    ids, harmless = (encode_chat(parse_chat(chat_of(given)), tiny) for given in (texts, ["x"] * N_TEXTS))
    assert [token for token in ids if token >= tiny.n_ranks] == [token for token in harmless if token >= tiny.n_ranks]


@settings(deadline=None, max_examples=200)
@given(forged)
def test_an_attribute_cannot_end_before_its_quote(name: str) -> None:
    header = text_of({"messages": [user(name="n" + name)]}).removeprefix('<|open|>message role="user" name="n')
    value = header[: header.index('"')]
    assert header[len(value) :].startswith('"<|sep|>x<|close|>')
    assert value.replace("&quot;", '"').replace("&amp;", "&") == name


def test_blocks_come_in_the_order_of_the_template() -> None:
    text = text_of(
        {
            "messages": [{"role": "system", "content": "first"}, user("second")],
            "tools": [tool()],
            "tool_choice": "required",
            "response_format": {"type": "json_object"},
            "thinking_effort": "high",
        }
    )
    parts = [
        '"tool-declare"',
        '"thinking-effort"',
        "first",
        "second",
        '"tool-choice"',
        '"response-format"',
        'role="assistant"<|sep|><|open|>think<|sep|>',
    ]
    assert sorted(parts, key=text.index) == parts
    assert text.endswith(parts[-1])


def test_without_thinking_nothing_speaks_of_it() -> None:
    messages = [user(), {"role": "assistant", "content": "y", "reasoning_content": "because"}, user()]
    text = text_of({"messages": messages, "thinking": False, "thinking_effort": "max"})
    assert "think" not in text and "because" not in text
    assert text.endswith("<|open|>response<|sep|>")


@pytest.mark.parametrize(
    ("request_fields", "start"),
    [
        ({}, "think"),
        ({"thinking": False}, "response"),
        ({"add_generation_prompt": False}, None),
        ({"thinking": False, "add_generation_prompt": False}, None),
    ],
)
def test_says_in_which_element_the_reply_starts(request_fields: dict[str, Any], start: str | None) -> None:
    assert parse_chat({"messages": [user()], **request_fields}).reply_start == start


def test_null_and_empty_fields_are_as_absent() -> None:
    request = {"messages": [user(name=None, refusal=None, annotations=[]), calling(call("c"), content="", function_call=None)]}
    plain = {"messages": [user(), calling(call("c"))]}
    optional = ("tools", "tool_choice", "response_format", "thinking", "thinking_effort", "add_generation_prompt")
    assert segments({**request, **dict.fromkeys(optional)}) == segments(plain)
    assert segments({**plain, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}}) == segments(plain)


def test_a_system_message_may_add_tools() -> None:
    text = text_of({"messages": [user(), {"role": "system", "content": "", "tools": [tool("gé", strict=None)]}], "tool_choice": "required"})
    assert (
        '<|open|>message role="system" type="tool-declare"<|sep|>## New Tools Available\n'
        "The system dynamically extends the toolset via lazy-loading.\nYou have access to all existing and extended tools.\n"
        'Here are the specs for the extended tools.\n\n```json\n[{"function":{"name":"gé","strict":null},"type":"function"}]\n```<|close|>message<|sep|><|end_of_msg|>'
    ) in text


def test_tool_results_are_put_into_the_order_of_their_calls_in_each_turn() -> None:
    messages = [calling(*(call(i, i) for i in "abc")), result("c"), result("a"), user(), result("b"), calling(call("a", "z")), result("a")]
    text = text_of({"messages": messages})
    found = [text.index(f'role="tool" tool="{name}" index="{n}"') for name, n in [("a", 1), ("c", 3), ("b", 2), ("z", 1)]]
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", []),
        (" \n", []),
        ("{}", []),
        ('{"a": "b"}', [Argument("a", "string", "b")]),
        ('{"": "", "n": -1.50}', [Argument("", "string", ""), Argument("n", "number", "-1.5")]),
        ('{"o":{"k":[true,null,"é"]}}', [Argument("o", "object", '{"k": [true, null, "é"]}')]),
        ("[1]", None),
        ('"x"', None),
        ("{not json", None),
        ('{"a": NaN}', None),
        ('{"a": 1e999}', None),
        ('{"a": 1, "a": 2}', None),
        ('{"a": {"b": 1, "b": 2}}', None),
        ('{"a": "\\ud83d"}', None),
        ('{"a": {"\\ud83d": 1}}', None),
        ('{"a": ' + "9" * 5000 + "}", None),
        ('{"a": ' + "[" * 100_000, None),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", None),
    ],
)
def test_arguments_that_cannot_be_told_apart_are_left_whole(arguments: str, expected: list[Argument] | None) -> None:
    assert read_arguments(arguments) == expected
    json_element = f'<|open|>json type="object"<|sep|>{arguments}<|close|>json<|sep|>'
    assert (json_element in text_of({"messages": [calling(call("c", arguments=arguments))]})) == (expected is None)


def test_a_tokenizer_without_markers_is_refused() -> None:
    bytes_only = Tokenizer({bytes([byte]): byte for byte in range(256)}, [])
    with pytest.raises(BadInputError, match=r"no special token '<\|open\|>', expected it in added_tokens_decoder of tokenizer_config\.json"):
        encode_chat(parse_chat({"messages": [user()]}), bytes_only)


def deep() -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"a": nested}
    return nested


TWO_CALLS = calling(call("c1"), call("c2", "g"))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, r"messages: is missing, expected an array"),
        ("hi", r"messages: is string, expected an array"),
        ([], r"messages: is empty, expected at least one message"),
        ([user(), 7], r"messages\[1\]: is number, expected an object"),
        ([None], r"messages\[0\]: is missing, expected an object"),
        ([{"content": "x"}], r"messages\[0\]\.role: is missing, expected 'system', 'user', 'assistant' or 'tool'"),
        ([user(), {"role": "wizard", "content": "x"}], r"messages\[1\]\.role: is 'wizard', expected 'system'"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\]\.role: is array, expected"),
        ([{"role": "r" * 100, "content": "x"}], r"messages\[0\]\.role: is 'r{60}'\.\.\., expected"),
        ([{"role": "user"}], r"messages\[0\]\.content: is null, expected a string or an array of text parts"),
        ([user(), user(3.5)], r"messages\[1\]\.content: is number, expected"),
        ([user({"type": "text"})], r"messages\[0\]\.content: is object"),
        ([{"role": "assistant", "content": None}], r"messages\[0\]\.content: is null"),
        ([user(name=5)], r"messages\[0\]\.name: is number, expected a string"),
        ([user(nmae="x")], r"messages\[0\]\.nmae: is not a field that is known here, expected 'role', 'content' or 'name'"),
        ([user(tool_calls=[call("c")])], r"messages\[0\]\.tool_calls: is not a field"),
        ([user(**{"\ud83d": 1})], r"messages\[0\]\.\\ud83d: is not a field"),
        ([user("ab\ud83d")], r"messages\[0\]\.content: character 2 is the lone surrogate U\+D83D"),
        ([user([{"type": "text", "text": "\udc00"}])], r"messages\[0\]\.content\[0\]\.text: character 0 is the lone surrogate"),
        ([user(name="\udc00")], r"messages\[0\]\.name: character 0 is the lone surrogate"),
        ([user(["x"])], r"messages\[0\]\.content\[0\]: is string, expected an object"),
        ([user([{"text": "x"}])], r"messages\[0\]\.content\[0\]\.type: is missing, expected 'text'"),
        ([user([{"type": "text", "text": None}])], r"messages\[0\]\.content\[0\]\.text: is missing, expected a string"),
        (
            [user(), user([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:"}}])],
            r"messages\[1\]\.content\[1\]: is an image \('image_url'\), and images are not supported; send parts of type 'text' only",
        ),
        ([user([{"type": "image"}])], r"messages\[0\]\.content\[0\]: is an image \('image'\)"),
        ([user([{"type": "input_audio"}])], r"messages\[0\]\.content\[0\]\.type: is 'input_audio', expected 'text'"),
        ([{"role": "assistant", "content": "x", "reasoning_content": 1}], r"messages\[0\]\.reasoning_content: is number, expected a string"),
        ([{"role": "assistant", "content": "x", "tool_calls": {}}], r"messages\[0\]\.tool_calls: is object, expected an array"),
        ([calling(5)], r"messages\[0\]\.tool_calls\[0\]: is number, expected an object"),
        ([calling({"id": "c"})], r"messages\[0\]\.tool_calls\[0\]\.function: is missing, expected an object"),
        ([calling({**call("c"), "id": None})], r"messages\[0\]\.tool_calls\[0\]\.id: is missing, expected a string"),
        ([calling(call(""))], r"messages\[0\]\.tool_calls\[0\]\.id: is empty"),
        ([calling(call("c", ""))], r"messages\[0\]\.tool_calls\[0\]\.function\.name: is empty"),
        ([calling({**call("c"), "type": "custom"})], r"messages\[0\]\.tool_calls\[0\]\.type: is 'custom', expected 'function'"),
        ([calling({**call("c"), "index": -1})], r"messages\[0\]\.tool_calls\[0\]\.index: is number, expected a whole number of at least 0"),
        (
            [calling({"id": "c", "function": {"name": "f", "arguments": {}}})],
            r"messages\[0\]\.tool_calls\[0\]\.function\.arguments: is object, expected a string",
        ),
        (
            [user(), calling(call("c1"), call("c2"), call("c1"))],
            r"messages\[1\]\.tool_calls\[2\]\.id: 'c1' is the id of messages\[1\]\.tool_calls\[0\] already",
        ),
        ([result("c1")], r"messages\[0\]\.tool_call_id: 'c1' is no call of the assistant's latest message, expected a message of the assistant with"),
        ([TWO_CALLS, result("c3")], r"messages\[1\]\.tool_call_id: 'c3' is no call .*expected 'c1' or 'c2'"),
        ([calling(*(call(f"c{n}") for n in range(11))), result("x")], r".* expected 'c0', .*, 'c8', 'c9' or another one$"),
        ([TWO_CALLS, result("c1"), calling(call("d")), result("c2")], r"messages\[3\]\.tool_call_id: 'c2' is no call .*expected 'd'"),
        ([TWO_CALLS, {"role": "assistant", "content": "x"}, result("c1")], r"messages\[2\]\.tool_call_id: 'c1' is no call"),
        ([TWO_CALLS, result("c2"), result("c1"), result("c2")], r"messages\[3\]\.tool_call_id: answers the same call as messages\[1\]"),
        ([TWO_CALLS, {"role": "tool", "content": "x"}], r"messages\[1\]\.tool_call_id: is missing, expected a string"),
        ([TWO_CALLS, result("c2", name="f")], r"messages\[1\]\.name: is 'f', but the call 'c2' is of 'g'"),
        ([TWO_CALLS, result("c1", None)], r"messages\[1\]\.content: is null"),
        ([{"role": "system", "content": "x", "tools": [tool()]}], r"messages\[0\]\.tools: come with content or a name"),
        ([{"role": "system", "tools": ""}], r"messages\[0\]\.tools: is string, expected an array"),
        ([{"role": "system", "tools": [{"type": "function"}]}], r"messages\[0\]\.tools\[0\]\.function: is missing"),
    ],
)
def test_bad_messages_are_refused_by_index_and_field(messages: Any, message: str) -> None:
    with pytest.raises(BadInputError, match=f"^{message}"):
        parse_chat({"messages": messages})


def schema_format(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": {}} | fields}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 1}, r"temperature: is not a field that is known here, expected 'messages', 'tools',"),
        ({"thinking": "yes"}, r"thinking: is 'yes', expected true or false"),
        ({"thinking": 1}, r"thinking: is number, expected true or false"),
        ({"add_generation_prompt": 0}, r"add_generation_prompt: is number, expected true or false"),
        ({"thinking_effort": "huge"}, r"thinking_effort: is 'huge', expected 'low', 'medium', 'high' or 'max'"),
        ({"thinking_effort": ""}, r"thinking_effort: is '', expected"),
        ({"tool_choice": "any"}, r"tool_choice: is 'any', expected 'auto', 'none' or 'required'"),
        ({"tool_choice": tool()}, r"tool_choice: is object, expected"),
        ({"tool_choice": "required"}, r"tool_choice: is 'required' in a request without tools"),
        ({"tools": {"a": 1}}, r"tools: is object, expected an array"),
        ({"tools": False}, r"tools: is boolean, expected an array"),
        ({"tools": [tool(), "f"]}, r"tools\[1\]: is string, expected an object"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]\.type: is 'web_search', expected 'function'"),
        ({"tools": [{"function": {"name": "f"}}]}, r"tools\[0\]\.type: is missing, expected 'function'"),
        ({"tools": [{"type": "function", "function": {}}]}, r"tools\[0\]\.function\.name: is missing, expected a string"),
        ({"tools": [tool(parameters=deep())]}, r"tools: is nested too deeply"),
        ({"tools": [tool(parameters={"a": float("nan")})]}, r"tools: holds a number that is infinite"),
        ({"tools": [tool(description="\ud800")]}, r"tools: character \d+ is the lone surrogate U\+D800"),
        ({"response_format": "json_object"}, r"response_format: is string, expected an object"),
        ({"response_format": {}}, r"response_format\.type: is missing, expected 'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "xml"}}, r"response_format\.type: is 'xml', expected"),
        ({"response_format": {"type": "json_schema"}}, r"response_format\.json_schema: is missing, expected an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "r"}}}, r"response_format\.json_schema\.schema: is missing"),
        ({"response_format": schema_format(name=["r"])}, r"response_format\.json_schema\.name: is array, expected a string"),
        ({"response_format": schema_format(description=5)}, r"response_format\.json_schema\.description: is number, expected a string"),
        ({"response_format": schema_format(strict="yes")}, r"response_format\.json_schema\.strict: is 'yes', expected true or false"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "r"}}}, r"response_format\.json_schema: comes with type 'json_object'"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=f"^{message}"):
        parse_chat({"messages": [user()], **fields})


@pytest.mark.parametrize("request_", [None, [], "x", 5])
def test_a_request_that_is_no_object_is_refused(request_: Any) -> None:
    with pytest.raises(BadInputError, match=r"^request: is .*expected an object"):
        parse_chat(request_)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGE_FIELDS = ["content", "tool_calls", "tool_call_id", "reasoning_content", "name", "tools"]
KEYS = ["messages", "role", "function", "id", "arguments", "type", "text", "json_schema", "schema", *MESSAGE_FIELDS]
WORDS = ["user", "assistant", "tool", "system", "function", "text", "json_schema", "required", "c", ""]
near_fields = st.recursive(
    st.sampled_from(WORDS) | json_values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=12,
)
near_messages = st.lists(st.fixed_dictionaries({"role": st.sampled_from(WORDS)}, optional=dict.fromkeys(MESSAGE_FIELDS, near_fields)), max_size=4)
near_requests = st.fixed_dictionaries(
    {"messages": near_messages | near_fields}, optional=dict.fromkeys(["tools", "tool_choice", "response_format"], near_fields)
)


@settings(deadline=None, max_examples=200)
@given(near_requests)
def test_anything_that_json_can_say_is_rendered_or_refused(request_: Any) -> None:
    try:
        chat = parse_chat(request_)
    except BadInputError:
        return
    assert encode_chat(chat, tiny)


def test_markers_are_the_only_marker_segments() -> None:
    found = {text for case in CASES.values() for text, is_marker in segments(case["request"]) if is_marker}
    assert found == set(MARKERS)
