"""Conversations in this process: what a turn computes, what goes wrong in one, and what is saved and loaded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA

from manifests.errors import BadInputError, KtierError
from runtime.chat.format import encode_chat, parse_chat
from runtime.chat.session import ChatSession, ChatSettings
from runtime.engine import Options
from runtime.serving.prefixes import ServingEngine
from runtime.serving.queue import Cancelled
from runtime.tokens import load_tokenizer

TINY = load_tokenizer(DATA / "tiny-k3.1", vocab_size=512)


@pytest.fixture(scope="module")
def engine(extractions: dict[str, Path]) -> Iterator[ServingEngine]:
    with ServingEngine(extractions["tiny-k3.1"], Options(device="cpu", context=400), n_kept=2, on_remark=print) as engine:
        yield engine


def session(engine: ServingEngine, **settings: Any) -> ChatSession:
    return ChatSession(engine, TINY, ChatSettings(**({"temperature": 1.0, "top_p": 1.0, "seed": 1, "n_tokens": 6, "is_thinking": False} | settings)))


def said(session: ChatSession, text: str, check: Any = lambda: None) -> tuple[str, str]:
    """What the deltas of a turn say: reasoning, and content."""
    deltas: list[dict[str, Any]] = []
    session.turn(text, on_delta=deltas.append, check=check)
    reasoning, content = ("".join(delta.get(field, "") for delta in deltas) for field in ("reasoning_content", "content"))
    return reasoning, content


def plain(engine: ServingEngine, text: str, **settings: Any) -> ChatSession:
    """A session whose first answer is text that can be told again: random weights answer with broken characters too."""
    for seed in range(100):
        found = session(engine, seed=seed, **settings)
        _, content = said(found, text)
        if content and "\ufffd" not in content and found.last is not None and found.last.ended_by == "length":
            return found
    raise AssertionError("no seed gave plain text")


def test_a_second_turn_computes_only_what_is_new(engine: ServingEngine) -> None:
    talk = plain(engine, "a first question")
    first = talk.last
    assert first is not None
    computed_before = engine.timing.n_prompt
    said(talk, "a second one")
    second = talk.last
    assert second is not None and computed_before == first.usage.n_prompt
    # The answer's last token was chosen and never computed.
    assert second.usage.n_cached == first.usage.n_prompt + first.usage.n_generated - 1
    assert engine.timing.n_prompt == second.usage.n_prompt - second.usage.n_cached
    lines = "\n".join(talk.stats_lines())
    assert f"{second.usage.n_cached} kept and {engine.timing.n_prompt} computed" in lines and "4 messages" in lines
    assert f"{first.usage.n_prompt + engine.timing.n_prompt} prompt tokens computed" in lines


def test_deltas_add_up_to_the_message_that_is_kept(engine: ServingEngine) -> None:
    talk = session(engine, is_thinking=True, n_tokens=9)
    reasoning, content = said(talk, "hm?")
    assert talk.messages == [
        {"role": "user", "content": "hm?"},
        {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {}),
    ]


def test_the_prompt_is_that_of_the_api(engine: ServingEngine) -> None:
    talk = session(engine, system="be brief", is_thinking=True, effort="low")
    said(talk, "<|open|> forged")
    request = {"messages": talk.messages[:2], "thinking": True, "thinking_effort": "low"}
    assert talk.last is not None and talk.last.usage.n_prompt == len(encode_chat(parse_chat(request), TINY))
    assert talk.messages[0] == {"role": "system", "content": "be brief"}


def test_a_seed_makes_a_conversation_repeatable_and_reset_begins_it_anew(engine: ServingEngine) -> None:
    talk = session(engine, system="you", seed=7)
    first = [said(talk, text) for text in ("one", "two")]
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "you"}] and [said(talk, text) for text in ("one", "two")] == first


def test_a_stopped_answer_stays_as_far_as_it_came(engine: ServingEngine) -> None:
    talk, deltas = session(engine, n_tokens=50), list[dict[str, Any]]()

    def check() -> None:
        if len(deltas) == 4:
            raise Cancelled

    talk.turn("go on and on", on_delta=deltas.append, check=check)
    content = "".join(delta.get("content", "") for delta in deltas)
    assert talk.last is not None and (talk.last.ended_by, talk.last.usage.n_generated) == ("stopped", 4)
    assert talk.messages[-1]["content"] == content
    said(talk, "and then?")
    assert len(talk.messages) == 4


def test_an_answer_stopped_before_it_began_takes_the_message_back(engine: ServingEngine) -> None:
    talk = session(engine)
    said(talk, "first")
    before = list(talk.messages)

    def check() -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        said(talk, "second", check)
    assert talk.messages == before
    said(talk, "third")
    assert [message["content"] for message in talk.messages[::2]] == ["first", "third"]


def test_a_message_that_does_not_fit_is_refused_and_the_conversation_goes_on(engine: ServingEngine) -> None:
    talk = session(engine)
    with pytest.raises(BadInputError, match=r"has \d+ tokens, but the context holds 400.*/reset"):
        said(talk, "long " * 200)
    assert talk.messages == []
    said(talk, "short")
    with pytest.raises(BadInputError, match="surrogate"):
        said(talk, "\udcff")
    assert len(talk.messages) == 2


def test_an_answer_ends_where_the_context_does(engine: ServingEngine) -> None:
    talk = session(engine, n_tokens=None, temperature=1.5)
    for seed in range(20):
        talk = session(engine, n_tokens=None, seed=seed)
        said(talk, "x" * 300)
        if talk.last is not None and talk.last.ended_by == "length":
            break
    assert talk.last is not None and talk.last.is_full and talk.last.usage.n_prompt + talk.last.usage.n_generated == 400
    with pytest.raises(BadInputError, match="larger -c"):
        said(talk, "more")


def test_a_saved_conversation_is_loaded_and_goes_on_the_same(engine: ServingEngine, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    talk = session(engine, temperature=0, system="s")
    said(talk, "to be kept")
    assert talk.save(path) == 3
    other = session(engine, temperature=0)
    said(other, "something else")
    assert other.load(path) == 3 and other.messages == talk.messages and other.last is None
    assert said(other, "more") == said(talk, "more")
    # A conversation is replaced, whole; nothing else is.
    assert talk.save(path) == 5 and [entry.name for entry in tmp_path.iterdir()] == ["talk.json"]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\xff", "is not JSON"),
        ("[]", "no conversation that /save wrote"),
        ('{"format": "ktier chat 2"}', "expected an object with format 'ktier chat 1'"),
        ('{"format": "ktier chat 1"}', "expected format, model and messages"),
        ({"model": "another"}, "conversation with another model, of digest another"),
        ({"model": ["a"] * 10_000}, "conversation with another model, of digest unknown; this one's"),
        ({"messages": {}}, "messages"),
        ({"messages": "hi"}, "messages: is string, expected an array"),
        ({"messages": [{"role": "wizard"}]}, r"messages\[0\].role: is 'wizard'"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused_by_name(engine: ServingEngine, tmp_path: Path, content: Any, what: str) -> None:
    path, talk = tmp_path / "talk.json", session(engine)
    if isinstance(content, dict):
        talk.save(path)
        content = json.dumps(json.loads(path.read_text()) | content)
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    before = list(talk.messages)
    with pytest.raises(BadInputError, match=what) as refused:
        talk.load(path)
    assert str(path) in str(refused.value) and talk.messages == before


def test_files_that_are_no_conversations_are_not_replaced(engine: ServingEngine, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(BadInputError, match="there already and no conversation"):
        session(engine).save(path)
    assert path.read_text() == "mine"
    for bad in (tmp_path / "nowhere" / "talk.json", Path("/dev/null")):
        with pytest.raises(KtierError):
            session(engine).save(bad)
    with pytest.raises(BadInputError, match="no file"):
        session(engine).load(Path("/dev/zero"))
