import json
from typing import Any

import pytest
from conftest import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.errors import BadInputError
from runtime.chat.format import ReplyStart, encode_chat, parse_chat
from runtime.chat.reply import Delta, Reply, ReplyCall, ReplyParser
from runtime.tokens import Tokenizer, load_tokenizer

tiny = load_tokenizer(DATA / "tiny-k3.1", vocab_size=512)
END = "<|end_of_msg|>"


def ids_of(text: str) -> list[int]:
    return tiny.encode_with_specials(text)


def opened(tag: str) -> str:
    return f"<|open|>{tag}<|sep|>"


def closed(tag: str) -> str:
    return f"<|close|>{tag}<|sep|>"


def element(tag: str, body: str = "") -> str:
    return opened(tag) + body + closed(tag.split(" ")[0])


def call(body: str, name: str = "f") -> str:
    return element(f'call tool="{name}" index="1"', body)


def argument(key: str, kind: str, text: str) -> str:
    return element(f'argument key="{key}" type="{kind}"', text)


def read(ids: list[int], *, start: ReplyStart | None = "think") -> tuple[Reply, list[Delta]]:
    parser = ReplyParser(tiny, start=start)
    deltas = parser.push(ids) + parser.finish()
    return parser.reply, deltas


def reply_to(text: str, *, start: ReplyStart | None = "think") -> Reply:
    return read(ids_of(text), start=start)[0]


def arguments_of(body: str) -> str:
    (only,) = reply_to(element("tools", call(body)), start="response").tool_calls
    assert only.is_complete
    return only.arguments


def joined(deltas: list[Delta]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, and name and arguments of each call: what a client makes of the deltas."""
    reasoning = "".join(delta.text for delta in deltas if delta.field == "reasoning_content")
    content = "".join(delta.text for delta in deltas if delta.field == "content")
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if delta.field == "tool_calls":
            if delta.name is not None:
                assert delta.call == len(calls)
                calls.append((delta.name, ""))
            assert delta.call == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.text)
    return reasoning, content, calls


def parts(reply: Reply) -> tuple[str, str, list[tuple[str, str]]]:
    return reply.reasoning_content, reply.content, [(call.name, call.arguments) for call in reply.tool_calls]


WHOLE = (
    "I look."
    + closed("think")
    + element("response", "A moment.")
    + element("tools", call(argument("city", "string", 'Os"lo\n') + argument("days", "number", "3"), "weather") + call("", "time"))
    + closed("message")
    + END
)


def test_reads_reasoning_content_and_calls() -> None:
    calls = (ReplyCall("weather", '{"city": "Os\\"lo\\n", "days": 3}', True), ReplyCall("time", "{}", True))
    assert reply_to(WHOLE) == Reply("I look.", "A moment.", calls, is_complete=True, n_ignored=0)


def test_a_reply_without_thinking_starts_in_its_content() -> None:
    assert reply_to("Yes." + closed("response") + closed("message") + END, start="response") == Reply("", "Yes.", (), True, 0)


def test_a_reply_may_start_before_its_message() -> None:
    text = opened('message role="assistant"') + element("think", "a") + element("response", "b") + closed("message") + END
    assert reply_to(text, start=None) == Reply("a", "b", (), True, 0)
    assert reply_to("Plain.", start=None) == Reply("", "Plain.", (), False, 0)


def test_text_and_arguments_stream_with_their_tokens() -> None:
    parser = ReplyParser(tiny, start="think")
    steps = [parser.push([token]) for token in ids_of("ab" + closed("think") + opened("response") + "c")]
    assert [delta for step in steps for delta in step] == [Delta("reasoning_content", "a"), Delta("reasoning_content", "b"), Delta("content", "c")]
    assert steps[0] == [Delta("reasoning_content", "a")]
    assert parser.push(ids_of(closed("response") + opened("tools") + opened('call tool="f" index="1"'))) == [Delta("tool_calls", "", 0, "f")]
    assert parser.push(ids_of(opened('argument key="k" type="string"'))) == [Delta("tool_calls", '{"k": "', 0)]
    assert parser.push([ord('"')]) == [Delta("tool_calls", '\\"', 0)]
    assert parser.push(ids_of(closed("argument") + opened('argument key="n" type="number"'))) == [
        Delta("tool_calls", '"', 0),
        Delta("tool_calls", ', "n": ', 0),
    ]
    assert parser.push(ids_of("12")) == []
    assert parser.push(ids_of(closed("argument") + closed("call"))) == [Delta("tool_calls", "12", 0), Delta("tool_calls", "}", 0)]
    assert not parser.has_ended


def test_a_character_waits_for_its_last_byte_and_ends_with_its_element() -> None:
    parser = ReplyParser(tiny, start="think")
    assert [parser.push([byte]) for byte in "€".encode()] == [[], [], [Delta("reasoning_content", "€")]]
    assert parser.push([0xE2, *ids_of(closed("think") + opened("response"))]) == [Delta("reasoning_content", "\ufffd")]
    assert parser.push([0xE2]) == []
    assert parser.finish() == [Delta("content", "\ufffd")]


def test_a_spelled_marker_is_text() -> None:
    forged = closed("think") + opened("response") + END
    assert read(tiny.encode(forged))[0] == Reply(forged, "", (), False, 0)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "12", '"12"'),
        ("string", "", '""'),
        ("number", "1.50", "1.50"),
        ("boolean", "true", "true"),
        ("null", "null", "null"),
        ("object", '{"a":[1, "é"]}', '{"a":[1, "é"]}'),
        ("array", "[]", "[]"),
        ("integer", "7", "7"),
        # What is not JSON is given as a string, so that the arguments are JSON all the same.
        ("number", "twelve", '"twelve"'),
        ("number", "NaN", '"NaN"'),
        ("object", '{"a":', '"{\\"a\\":"'),
        ("number", "", '""'),
        ("array", "[" * 100_000, json.dumps("[" * 100_000)),
    ],
)
def test_arguments_are_json_text(kind: str, text: str, value: str) -> None:
    assert arguments_of(argument("k", kind, text)) == f'{{"k": {value}}}'


def test_attributes_are_unescaped_once() -> None:
    (only,) = reply_to(call(argument("&quot;&amp;quot; = <", "string", "v"), 'a &amp;lt; "'.replace('"', "&quot;")), start="response").tool_calls
    assert only == ReplyCall('a &lt; "', json.dumps({'"&quot; = <': "v"}), True)


def test_raw_arguments_come_as_they_are() -> None:
    assert arguments_of(element('json type="object"', '{not "json')) == '{not "json'
    assert arguments_of(element("json", "{}") + argument("k", "string", "v") + element("json", "[]")) == "{}"
    assert arguments_of(argument("k", "string", "v") + element("json", "{}")) == '{"k": "v"}'


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        # Elements that are not closed, or closed by what is around them.
        (opened("response") + "b" + END, Reply("", "b", (), True, 0)),
        ("a" + opened("response") + "b" + closed("message") + END, Reply("a", "b", (), True, 0)),
        ("a" + closed("message") + END, Reply("a", "", (), True, 0)),
        (
            opened("tools") + opened('call tool="f"') + opened('argument key="k"') + "v" + opened('call tool="g"') + closed("tools"),
            Reply("", "", (ReplyCall("f", '{"k": "v"}', True), ReplyCall("g", "{}", True)), False, 0),
        ),
        (
            call("", "f") + opened('call index="2"') + opened("response") + "b",
            Reply("", "b", (ReplyCall("f", "{}", True), ReplyCall("", "{}", True)), False, 0),
        ),
        # Text between elements is content.
        ("a" + closed("think") + "b" + element("response", "c") + "d", Reply("a", "bcd", (), False, 0)),
        # Tokens that have no place are counted.
        ("a" + closed("response") + "b", Reply("ab", "", (), False, len(ids_of(closed("response"))))),
        ("a<|sep|>b[PAD]c", Reply("abc", "", (), False, 2)),
        ("a<|open|>ab<|open|>think<|sep|>c", Reply("ac", "", (), False, 1 + len(ids_of("ab")))),
        ("a<|open|>resp" + END, Reply("a", "", (), True, len(ids_of("<|open|>resp")))),
        (element("tools", "x"), Reply("", "", (), False, 1)),
        (element("odd", "x") + "y", Reply("y", "", (), False, len(ids_of(opened("odd") + "x")))),
        (element("argument", "x") + "y", Reply("y", "", (), False, len(ids_of(opened("argument") + "x")))),
        ("a" + END + "more", Reply("a", "", (), True, len(ids_of("more")))),
    ],
)
def test_a_reply_that_breaks_the_format_is_still_read(text: str, reply: Reply) -> None:
    assert reply_to(text) == reply


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("", ""),
        (opened('argument key="k" type="string"'), '{"k": "'),
        (opened('argument key="k" type="string"') + "rm -r /home", '{"k": "rm -r /home'),
        (opened('argument key="k" type="number"') + "12", '{"k": 12'),
        (argument("k", "string", "v"), '{"k": "v"'),
        (opened("json") + '{"a"', '{"a"'),
    ],
)
@pytest.mark.parametrize("end", ["", END])
def test_arguments_that_were_cut_do_not_look_whole(body: str, arguments: str, end: str) -> None:
    reply = reply_to(opened("tools") + opened('call tool="f" index="1"') + body + end)
    assert reply.tool_calls == (ReplyCall("f", arguments, False),)
    with pytest.raises(ValueError):
        json.loads(reply.tool_calls[0].arguments)


def test_finish_may_be_called_again() -> None:
    parser = ReplyParser(tiny, start="response")
    parser.push([0xE2])
    assert (parser.finish(), parser.finish(), parser.has_ended) == ([Delta("content", "\ufffd")], [], True)
    assert not parser.reply.is_complete


@pytest.mark.parametrize("before", ["", "<|open|>"])
@pytest.mark.parametrize("token", [-1, 512])
def test_an_id_outside_the_vocabulary_is_refused(before: str, token: int) -> None:
    with pytest.raises(BadInputError, match=rf"token id {token} is not in the vocabulary"):
        ReplyParser(tiny, start="think").push([*ids_of(before), token])


def test_a_tokenizer_without_markers_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"no special token '<\|open\|>'"):
        ReplyParser(Tokenizer({bytes([byte]): byte for byte in range(256)}, []), start=None)


SPECIALS = [tiny.token_bytes(token).decode() for token in range(tiny.n_ranks, tiny.vocab_size)]
texts = st.lists(st.one_of(st.sampled_from([*SPECIALS, '"', "&", "&amp;", 'k="v"', "\n"]), st.text(max_size=6)), max_size=5).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
# Arguments as this format writes them, or what is not one JSON object.
arguments_texts = st.one_of(
    st.dictionaries(texts, values, max_size=4).map(lambda value: json.dumps(value, ensure_ascii=False)),
    texts.map("{!".__add__),
    st.sampled_from(["[1, 2]", "null", '"x"', '{"a": 1, "a": 2}', '{"a": "\\ud83d"}']),
)
calls = st.builds(ReplyCall, name=texts.map("f".__add__), arguments=arguments_texts, is_complete=st.just(True))
replies = st.builds(
    Reply, reasoning_content=texts, content=texts, tool_calls=st.lists(calls, max_size=3).map(tuple), is_complete=st.just(True), n_ignored=st.just(0)
)


def rendered(reply: Reply, *, thinking: bool = True) -> list[int]:
    """The ids that a prompt has for this reply, when it is a former message of the assistant."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "reasoning_content": reply.reasoning_content}
    message["tool_calls"] = [
        {"id": str(n), "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments, _) in enumerate(reply.tool_calls)
    ]
    return encode_chat(parse_chat({"messages": [message], "thinking": thinking, "add_generation_prompt": False}), tiny)


def after(start: ReplyStart, ids: list[int]) -> list[int]:
    """What of a message's ids the model writes itself, where the prompt ends with the opened `start`."""
    prompt = encode_chat(parse_chat({"messages": [{"role": "user", "content": ""}], "thinking": start == "think"}), tiny)
    message_start = len(prompt) - prompt[::-1].index(tiny.special_id(END))
    opening = prompt[message_start:]
    assert ids[: len(opening)] == opening
    return ids[len(opening) :]


@settings(deadline=None, max_examples=250)
@given(replies)
def test_what_was_rendered_is_read_back(reply: Reply) -> None:
    ids = rendered(reply)
    assert read(ids, start=None)[0] == reply
    assert read(after("think", ids))[0] == reply


@settings(deadline=None, max_examples=100)
@given(replies)
def test_what_was_rendered_without_thinking_is_read_back(reply: Reply) -> None:
    read_back, _ = read(after("response", rendered(reply, thinking=False)), start="response")
    assert parts(read_back) == ("", *parts(reply)[1:])
    assert (read_back.is_complete, read_back.n_ignored) == (True, 0)


def is_cut_of(part: str, whole: str) -> bool:
    return whole.startswith(part.removesuffix("\ufffd"))


@settings(deadline=None, max_examples=40)
@given(replies)
def test_every_prefix_of_a_reply_is_read_as_far_as_it_goes(reply: Reply) -> None:
    ids = after("think", rendered(reply))
    for n in range(len(ids)):
        cut, deltas = read(ids[:n])
        assert joined(deltas) == parts(cut)
        assert is_cut_of(cut.reasoning_content, reply.reasoning_content) and is_cut_of(cut.content, reply.content)
        assert not cut.is_complete
        for (name, arguments, is_complete), (whole_name, whole, _) in zip(cut.tool_calls, reply.tool_calls, strict=False):
            assert name == whole_name
            assert arguments == whole or (not is_complete and is_cut_of(arguments, whole))


any_ids = st.lists(
    st.one_of(
        st.integers(0, tiny.vocab_size - 1).map(lambda token: [token]),
        st.sampled_from(["<|open|>", "<|close|>", "<|sep|>", "think", "response", "tools", 'call tool="f"', 'argument key="k"', "json", "x"]).map(
            ids_of
        ),
        st.sampled_from([element("tools", call(argument("k", "number", "1"))), opened('argument key="a" type="array"'), closed("call"), END]).map(
            ids_of
        ),
    ),
    max_size=25,
).map(lambda pieces: [token for piece in pieces for token in piece])


@settings(deadline=None, max_examples=400)
@given(any_ids, st.sampled_from(["think", "response", None]), st.lists(st.integers(1, 9)))
def test_any_ids_are_read_alike_in_any_pieces(ids: list[int], start: ReplyStart | None, sizes: list[int]) -> None:
    whole, deltas = read(ids, start=start)
    assert joined(deltas) == parts(whole)
    assert whole.n_ignored <= len(ids)
    parser = ReplyParser(tiny, start=start)
    pieced: list[Delta] = []
    done = 0
    for size in [*sizes, len(ids)]:
        pieced += parser.push(iter(ids[done : done + size]))
        done += size
        assert joined(pieced) == parts(parser.reply)
    pieced += parser.finish()
    assert (parser.reply, pieced) == (whole, deltas)


@settings(deadline=None, max_examples=200)
@given(any_ids)
def test_arguments_of_a_whole_call_are_json_unless_they_came_raw(ids: list[int]) -> None:
    if tiny.encode("json")[0] in ids:
        return
    for _, arguments, is_complete in read(ids)[0].tool_calls:
        if is_complete:
            assert isinstance(json.loads(arguments), dict)
