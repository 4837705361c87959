"""What krun serve answers, asked by the openai package: texts, streams, stops, log-probabilities, usage, and the same ids everywhere."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from conftest import DATA
from inside import ran
from serving import HTTP, Client, serving_inside

from runtime.tokens import load_tokenizer

TINY = load_tokenizer(DATA / "tiny-k3.1", vocab_size=512)
HELLO = [{"role": "user", "content": "hello"}]
CASES = json.loads((DATA / "chat_segments.json").read_text())["cases"]
NAME = "tiny-k3.1"


@pytest.fixture(scope="module")
def served(extractions: dict[str, Path]) -> Iterator[Client]:
    with serving_inside(extractions[NAME]) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Client) -> openai.OpenAI:
    return served.openai()


def completed(served: Client, prompt: Any, n_tokens: int, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "return_token_ids": True} | more
    answer = served.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_chat_is_answered_with_usage_and_statistics(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=7, temperature=0)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert choice.message.model_extra["reasoning_content"]
    assert answer.usage.completion_tokens == 7 and answer.usage.total_tokens == answer.usage.prompt_tokens + 7
    stats = answer.model_extra["ktier"]
    assert stats["time_to_first_token_s"] > 0 and set(stats["expert_read_bytes"]) == {"prompt_pass", "decode"}
    assert 0 <= stats["device_hit_rate"]["decode"] <= 1


def test_a_stream_says_what_the_plain_answer_says(client: openai.OpenAI) -> None:
    asked = {"model": NAME, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    plain = client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}, extra_body={"return_token_ids": True})
    chunks = list(stream)
    *said, usage = chunks
    assert usage.choices == [] and usage.usage.completion_tokens == 12
    deltas = [chunk.choices[0].delta for chunk in said]
    assert deltas[0].role == "assistant"
    reasoning = "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas)
    assert reasoning == plain.choices[0].message.model_extra["reasoning_content"]
    ids = [token for chunk in said for token in chunk.choices[0].model_extra["token_ids"]]
    assert ids == plain.choices[0].model_extra["token_ids"]
    assert [chunk.choices[0].finish_reason for chunk in said] == [None] * 12 + ["length"]
    assert "ktier" in said[-1].model_extra and len({chunk.id for chunk in chunks}) == 1


def test_without_thinking_the_answer_is_content(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=HELLO, max_completion_tokens=5, temperature=0, extra_body={"thinking": False})
    assert answer.choices[0].message.content and "reasoning_content" not in answer.choices[0].message.model_extra


def test_generate_completions_and_chat_give_the_same_ids(served: Client, extractions: dict[str, Path]) -> None:
    prompt = served.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    words = ",".join(map(str, prompt))
    generated = json.loads(ran("generate", "-m", extractions[NAME], "--ids", words, "-n", 20, "--json").out)
    completion = completed(served, prompt, 20)["choices"][0]
    assert (completion["token_ids"], completion["text"]) == (generated["ids"], generated["text"])
    chat = served.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 20, "temperature": 0, "return_token_ids": True}).json()
    assert chat["prompt_token_ids"] == prompt and chat["choices"][0]["token_ids"] == generated["ids"]


def test_a_text_and_its_ids_are_the_same_prompt(served: Client) -> None:
    text = completed(served, "hello there", 10)
    ids = completed(served, [TINY.encode("hello there")], 10)
    assert text["choices"] == ids["choices"] and text["prompt_token_ids"] == TINY.encode("hello there")


def test_a_seed_makes_a_drawn_text_repeatable(served: Client) -> None:
    first, again, other = (completed(served, "once", 12, temperature=1.5, seed=seed)["choices"][0]["token_ids"] for seed in (7, 7, 8))
    assert first == again != other


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_cuts_the_text_and_ends_the_work(client: openai.OpenAI, is_stream: bool) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": "hello there", "temperature": 0}
    whole = client.completions.create(**asked, max_tokens=20)
    text = whole.choices[0].text
    # Not at a token's edge, and not only once in the text.
    stop = text[len(text) // 2 - 2 : len(text) // 2 + 2]
    if is_stream:
        stream = client.completions.create(**asked, max_tokens=20, stop=[stop, "never said"], stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        cut, usage = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), chunks[-1].usage
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
    else:
        answer = client.completions.create(**asked, max_tokens=20, stop=stop)
        cut, usage = answer.choices[0].text, answer.usage
        assert answer.choices[0].finish_reason == "stop"
    assert cut == text[: text.index(stop)]
    assert usage.completion_tokens < 20


def test_stop_strings_of_a_chat_are_looked_for_in_its_content(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": HELLO, "temperature": 0, "max_tokens": 12, "extra_body": {"thinking": False}}
    content = client.chat.completions.create(**asked).choices[0].message.content
    stop = content[5:8]
    choice = client.chat.completions.create(**asked, stop=stop).choices[0]
    assert choice.message.content == content[: content.index(stop)] and choice.finish_reason == "stop"


def test_log_probabilities_are_those_of_the_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 6
    for entry in entries:
        likeliest = [other.logprob for other in entry.top_logprobs]
        # At temperature 0 the token is the likeliest.
        assert entry.logprob == likeliest[0] and likeliest == sorted(likeliest, reverse=True) and len(likeliest) == 3
        assert sum(map(math.exp, likeliest)) < 1 and bytes(entry.bytes).decode(errors="replace") == entry.token


def test_log_probabilities_of_a_completion_come_in_its_own_form(served: Client) -> None:
    choice = completed(served, "hello there", 8, logprobs=2)["choices"][0]
    told = choice["logprobs"]
    assert [len(told[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [8] * 4
    assert all(max(top.values()) == own for top, own in zip(told["top_logprobs"], told["token_logprobs"], strict=True))
    stream = served.post("/v1/completions", {"prompt": "hello there", "max_tokens": 8, "temperature": 0, "logprobs": 2, "stream": True})
    chunks = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    assert [lp for chunk in chunks for lp in chunk["choices"][0]["logprobs"]["token_logprobs"]] == told["token_logprobs"]
    assert stream.text.endswith("data: [DONE]\n\n")


def computed(served: Client) -> float:
    return served.metrics()['ktier_prompt_tokens_total{source="computed"}']


def test_a_second_turn_computes_only_the_new_tokens(served: Client) -> None:
    prompt = TINY.encode("a first turn that is somewhat long")
    first = completed(served, prompt, 9)
    before, new = computed(served), TINY.encode(" and more")
    reply = first["choices"][0]["token_ids"]
    second = completed(served, prompt + reply + new, 5)
    # The reply's last token was chosen and never computed.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) + len(reply) - 1
    assert computed(served) - before == len(new) + 1
    again = completed(served, prompt + reply + new, 5)
    assert again["choices"] == second["choices"] and computed(served) - before == len(new) + 1


def test_a_second_turn_of_a_chat_does_not_compute_the_first_prompt_again(served: Client) -> None:
    body = {"messages": [{"role": "user", "content": "a question of its own"}], "max_tokens": 6, "temperature": 0}
    first = served.post("/v1/chat/completions", body).json()
    body["messages"] += [first["choices"][0]["message"], {"role": "user", "content": "and then?"}]
    second = served.post("/v1/chat/completions", body).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]


@pytest.mark.parametrize("case", CASES)
def test_tokenize_gives_the_ids_of_the_golden_segments(served: Client, case: str) -> None:
    expected: list[int] = []
    for text, may_hold_specials in CASES[case]["segments"]:
        expected += (TINY.encode_with_specials if may_hold_specials else TINY.encode)(text)
    assert served.post("/tokenize", CASES[case]["request"]).json() == {"tokens": expected, "count": len(expected)}


def test_detokenize_gives_the_text_back(served: Client) -> None:
    text = "naïve 😀 <|open|>"
    tokens = served.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert tokens == TINY.encode(text) and served.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}


def test_tools_and_their_results_go_into_the_prompt(client: openai.OpenAI, served: Client) -> None:
    request = CASES["tool_call_and_result"]["request"]
    answer = client.chat.completions.create(model=NAME, messages=request["messages"], tools=request["tools"], max_tokens=3, temperature=0)
    assert answer.usage.prompt_tokens == served.post("/tokenize", request).json()["count"]


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == NAME and model.model_extra["context_length"] == 2048
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.models.retrieve("other/model")


def test_errors_come_as_the_exceptions_of_the_openai_package(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as found:
        client.chat.completions.create(model="gpt", messages=HELLO)
    assert found.value.code == "model_not_found" and found.value.param == "model"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=NAME, messages=HELLO, n=2)
    assert refused.value.param == "n" and refused.value.type == "invalid_request_error"


def test_health_and_metrics_tell_of_queue_and_drives(served: Client) -> None:
    assert HTTP.get(f"{served.url}/health").json() == {
        "status": "ok",
        "running": 0,
        "waiting": 0,
        "drives": [{"drive": 0, "tier": "A", "state": "ok"}],
    }
    text = HTTP.get(f"{served.url}/metrics").text
    line = re.compile(r'# (HELP|TYPE) ktier_\w+ .+|ktier_\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? [-+0-9.e]+')
    assert all(line.fullmatch(each) for each in text.splitlines()) and text.endswith("\n")
    assert served.metrics()['ktier_drive_read_bytes_total{drive="0",tier="A"}'] > 0


def test_the_openapi_document_names_each_path_that_is_answered(served: Client) -> None:
    document = HTTP.get(f"{served.url}/openapi.json").json()
    for path, operations in document["paths"].items():
        (method,) = operations
        answer = HTTP.request(method, served.url + path.replace("{name}", NAME), content=b"{}")
        assert str(answer.status_code) in operations[method]["responses"], (path, answer.text)
        assert answer.status_code == (400 if method == "post" else 200)
