"""Answers out of tokens: stop strings, chunks that add up to the whole, tool calls, and work that ends when nobody waits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DATA
from hypothesis import given
from hypothesis import strategies as st

from runtime.chat.format import parse_chat
from runtime.engine import Options
from runtime.serving.metrics import Metrics
from runtime.serving.prefixes import ServingEngine
from runtime.serving.queue import Cancelled, Job
from runtime.serving.reply import ChatAnswer, CompletionAnswer, StopText, logprob_of
from runtime.serving.schema import Sampling
from runtime.serving.work import Done, Piece, Task, Worker, as_kept
from runtime.tokens import load_tokenizer

TINY = load_tokenizer(DATA / "tiny-k3.1", vocab_size=512)
LOGITS = torch.zeros(512)


@given(st.text("ab"), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_text_in_any_pieces_is_cut_where_the_first_stop_begins(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    stop, told = StopText(tuple(stops)), ""
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        told += stop.push(text[begin:end])
        # What is told cannot be taken back: no stop string has begun in it.
        assert all(s not in told for s in stops)
        if stop.is_over:
            break
    told += stop.finish()
    # The stop that is whole first ends the text; of those that are whole at that character, the one that began first.
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stops)]
    if not ends:
        assert told == text and not stop.is_over
    else:
        assert stop.is_over and text.startswith(told) and any(text[len(told) :].startswith(s) for s in stops)
        assert len(told) <= ends[0]


def test_what_may_begin_a_stop_is_held_back_and_no_more() -> None:
    stop = StopText(("<end>", "\n\n"))
    assert [stop.push(piece) for piece in ("a<e", "x", "b\n", "c<", "en", "d>")] == ["a", "<ex", "b", "\nc", "", ""]
    assert stop.is_over and stop.finish() == "" and stop.push("more") == ""


def test_log_probabilities_are_of_the_logits_and_finite() -> None:
    logits = torch.full((512,), float("-inf"))
    logits[3], logits[5] = 1.0, 1.0
    found = logprob_of(3, logits, 3)
    assert found.logprob == pytest.approx(-0.6931471805599453) and {token for token, _ in found.likeliest[:2]} == {3, 5}
    assert found.likeliest[2][1] == -9999.0 and logprob_of(7, logits, 0).logprob == -9999.0


REPLY = (
    "I wonder<|close|>think<|sep|><|open|>response<|sep|>Let me look.<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Oslo "x"<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="clock" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>'
)


def chat_answer(**more: Any) -> ChatAnswer:
    return ChatAnswer(TINY, **({"start": "think", "stops": (), "n_logprobs": None, "wants_ids": True} | more))


def chunks_of(answer: Any, ids: list[int], reason: str) -> list[dict[str, Any]]:
    return [answer.push(token, LOGITS, is_end=False) for token in ids] + [answer.finish(reason)]


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for name, value in chunk["delta"].items():
            if name == "tool_calls":
                for part in value:
                    if part["index"] == len(message["tool_calls"]):
                        message["tool_calls"].append({key: part[key] for key in ("id", "type", "function")})
                    else:
                        message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
            elif name != "role":
                message[name] += value
    return message


def test_tool_calls_of_a_stream_are_those_of_the_plain_answer() -> None:
    answer = chat_answer()
    chunks = chunks_of(answer, TINY.encode_with_specials(REPLY), "stop")
    whole = answer.whole()
    message = whole["message"]
    assert joined(chunks) == {name: message[name] for name in ("content", "reasoning_content", "tool_calls")}
    assert chunks[-1]["finish_reason"] == whole["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("I wonder", "Let me look.")
    first, second = message["tool_calls"]
    assert json.loads(first["function"]["arguments"]) == {"city": 'Oslo "x"', "days": 3} and second["function"] == {
        "name": "clock",
        "arguments": "{}",
    }
    assert first["id"] != second["id"]


def test_a_message_with_calls_comes_back_as_it_went_out() -> None:
    answer = chat_answer()
    chunks_of(answer, TINY.encode_with_specials(REPLY), "stop")
    said = answer.whole()["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "fine"} for call in said["tool_calls"]]
    chat = parse_chat({"messages": [{"role": "user", "content": "?"}, said, *results]})
    assert len(chat.messages) == 4


def test_a_reply_cut_in_its_calls_was_cut_and_a_stop_is_a_stop() -> None:
    ids = TINY.encode_with_specials(REPLY)
    cut = chat_answer()
    assert chunks_of(cut, ids[: len(ids) // 2], "length")[-1]["finish_reason"] == "length"
    stopped = chat_answer(stops=("me",))
    for token in ids:
        stopped.push(token, LOGITS, is_end=False)
        if stopped.is_over:
            break
    assert stopped.finish("stop")["finish_reason"] == "stop" and stopped.whole()["message"]["content"] == "Let "


@given(st.lists(st.integers(0, 511), max_size=40), st.lists(st.text(min_size=1, max_size=3), max_size=2))
def test_chunks_of_any_tokens_add_up_to_the_whole(ids: list[int], stops: list[str]) -> None:
    chat = chat_answer(stops=tuple(stops))
    chunks, message = chunks_of(chat, ids, "length"), chat.whole()["message"]
    assert joined(chunks) == {"tool_calls": [], "content": ""} | {k: message[k] or "" for k in ("content", "reasoning_content")} | (
        {"tool_calls": message["tool_calls"]} if "tool_calls" in message else {}
    )
    text = CompletionAnswer(TINY, stops=tuple(stops), n_logprobs=None, wants_ids=True)
    pieces = chunks_of(text, ids, "length")
    assert "".join(piece["text"] for piece in pieces) == text.whole()["text"]
    assert [token for piece in pieces for token in piece["token_ids"]] == ids
    if not stops:
        assert text.whole()["text"] == TINY.decode(ids)


def test_the_token_that_ends_a_text_is_no_part_of_it() -> None:
    text = CompletionAnswer(TINY, stops=(), n_logprobs=1, wants_ids=True)
    end = TINY.special_id("<|end_of_msg|>")
    text.push(TINY.encode("a")[0], LOGITS, is_end=False)
    text.push(end, LOGITS, is_end=True)
    text.finish("stop")
    whole = text.whole()
    assert whole["text"] == "a" and whole["token_ids"][-1] == end and whole["logprobs"]["tokens"] == ["a"]


def test_generation_ends_with_the_step_after_which_nobody_waits(extractions: dict[str, Path]) -> None:
    with ServingEngine(extractions["tiny-k3.1"], Options(device="cpu"), n_kept=0, on_remark=print) as engine:
        metrics, pieces = Metrics(engine), list[object]()

        def post(event: object) -> None:
            pieces.append(event)
            if len(pieces) == 3:
                job.give_up()

        settings = Sampling(
            temperature=0, top_p=1, seed=None, n_tokens=50, stops=(), is_stream=True, wants_usage=False, wants_ids=True, n_logprobs=None
        )
        answer = CompletionAnswer(TINY, stops=(), n_logprobs=None, wants_ids=True)
        task = Task(number=1, name="test", ids=TINY.encode("abc"), is_chat=False, n_tokens=50, sampling=settings, answer=answer)
        job = Job(lambda job: Worker(engine, TINY, metrics, print).run(task, job), post)
        with pytest.raises(Cancelled):
            job.run(job)
        assert task.n_generated == 3 and all(isinstance(piece, Piece) for piece in pieces)
        # The third token was not computed: the decoder has the prompt and two.
        assert engine.decoder.state.n_tokens == len(task.ids) + 2 and engine.decode_counts.n_layers == 2 * len(engine.geometry.moe_layers)
        assert not any(isinstance(piece, Done) for piece in pieces)


def test_a_conversation_that_was_chosen_in_more_tokens_goes_on_from_them_if_the_answer_still_fits(extractions: dict[str, Path]) -> None:
    with ServingEngine(extractions["tiny-k3.1"], Options(device="cpu", context=64), n_kept=1, on_remark=print) as engine:
        marker = TINY.special_id("<|sep|>")
        spelled = [TINY.encode(character)[0] for character in "a text of single letters"] + [marker]
        engine.prompt(spelled)
        told = [*TINY.encode("a text of single letters"), marker, *TINY.encode("more")]
        longer = [*spelled, *TINY.encode("more")]
        n_left = 64 - len(longer)
        assert len(longer) > len(told)
        assert as_kept(engine, told, TINY, n_least=n_left) == longer and as_kept(engine, told, TINY, n_least=n_left + 1) == told
