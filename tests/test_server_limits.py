"""What krun serve refuses, bounds and survives: bad requests, strangers, slow and vanishing clients, lost drives, faults, and its end."""

import concurrent.futures
import contextlib
import json
import re
import select
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import DATA
from inside import krun
from placing import add_copies, place
from serving import CHAT, COMPLETION, HTTP, Client, Served, cut_off, eventually, outlast_storms, serving, serving_inside, text

from manifests.errors import UsageError
from runtime.cli.serve import serve_command
from runtime.engine import Options
from runtime.serving.http import bind, listen
from runtime.serving.metrics import Metrics
from runtime.serving.prefixes import ServingEngine
from runtime.serving.server import HEARTBEAT_S
from runtime.tokens import load_tokenizer

TINY = load_tokenizer(DATA / "tiny-k3.1", vocab_size=512)
NAME = "tiny-k3.1"
KEY = "a-key-of-this-test"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def served(extractions: dict[str, Path]) -> Iterator[Served]:
    with serving(extractions[NAME], "--queue", 25, "--read-timeout", 2) as served:
        yield served


def call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "max_tokens": 1} | fields


NESTED: Any = []
for _ in range(80):
    NESTED = [NESTED]
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}
ANSWERED = {"role": "assistant", "content": "", "tool_calls": [call("c"), call("c")]}

BAD = {
    "no messages": (CHAT, chat(messages=[]), "messages", "at least one"),
    "messages are no list": (CHAT, chat(messages="hi"), "messages", "expected an array"),
    "unknown role": (CHAT, chat(messages=[{"role": "wizard", "content": "x"}]), "messages[0].role", "wizard"),
    "orphan tool result": (CHAT, chat(messages=[USER, {"role": "tool", "tool_call_id": "x", "content": "1"}]), "messages[1].tool_call_id", "no call"),
    "duplicate call ids": (CHAT, chat(messages=[USER, ANSWERED]), "messages[1].tool_calls[1].id", "already"),
    "image": (CHAT, chat(messages=[IMAGE]), "messages[0].content[0]", "images are not supported"),
    "too many messages": (CHAT, chat(messages=[USER] * 5000), "messages", "at most 4096"),
    "effort that there is not": (CHAT, chat(reasoning_effort="minimal"), "reasoning_effort", "expected one of low, medium, high, max"),
    "huge max_tokens": (CHAT, chat(max_tokens=10**12), "max_tokens", "of the context's 2048 tokens, so that"),
    "max_tokens is no number": (COMPLETION, text(max_tokens="9"), "max_tokens", "whole number"),
    "max_tokens is true": (COMPLETION, text(max_tokens=True), "max_tokens", "whole number"),
    "no room": (COMPLETION, text(max_tokens=2048), "max_tokens", "2047 are left"),
    "prompt over the context": (COMPLETION, text(prompt=[1] * 2048), "prompt", "has 2048 tokens, but the context holds 2048"),
    "temperature": (COMPLETION, text(temperature=-1), "temperature", "expected a number from 0 to 2"),
    "top_p": (COMPLETION, text(top_p=0), "top_p", "above 0"),
    "seed": (COMPLETION, text(seed=-1), "seed", "whole number"),
    "two answers": (CHAT, chat(n=2), "n", "cannot be honoured"),
    "penalty": (CHAT, chat(frequency_penalty=0.5), "frequency_penalty", "cannot be honoured"),
    "unknown field": (CHAT, chat(mirostat=1), "mirostat", "not a field that is known"),
    "logprobs of a chat": (CHAT, chat(logprobs=5), "logprobs", "true or false"),
    "top_logprobs alone": (CHAT, chat(top_logprobs=5), "top_logprobs", "without logprobs"),
    "stop": (CHAT, chat(stop=[""]), "stop", "1 to 1000"),
    "usage is no boolean": (COMPLETION, text(stream=True, stream_options={"include_usage": 0}), "stream_options.include_usage", "true or false"),
    "field with a surrogate": (COMPLETION, text(**{"\ud800": 1}), "\\ud800", "not a field that is known"),
    "option with a surrogate": (CHAT, chat(stream=True, stream_options={"\ud800": 1}), "stream_options.\\ud800", "not a field that is known"),
    "stream options": (CHAT, chat(stream_options={"include_usage": True}), "stream_options", "without stream"),
    "no prompt": (COMPLETION, {"max_tokens": 1}, "prompt", "missing"),
    "empty prompt": (COMPLETION, text(prompt=""), "prompt", "empty"),
    "two prompts": (COMPLETION, text(prompt=["a", "b"]), "prompt", "one at a time"),
    "ids that are none": (COMPLETION, text(prompt=[512]), "prompt", "from 0 to 511"),
    "surrogate": (CHAT, chat(messages=[{"role": "user", "content": "\ud800"}]), "messages[0].content", "surrogate"),
    "surrogate in a prompt": (COMPLETION, text(prompt="\ud800"), "prompt", "surrogate"),
    "tool choice": (CHAT, chat(tool_choice={"type": "function", "function": {"name": "f"}}), "tool_choice", "expected"),
    "deep": (CHAT, chat(metadata={"a": NESTED}), None, "more than 64 deep"),
    "tokens": ("/detokenize", {"tokens": [1, "a"]}, "tokens", "token ids"),
    "tokens beyond": ("/detokenize", {"tokens": [512]}, "tokens", "0..511"),
    "tokenize nothing": ("/tokenize", {}, "messages", "missing"),
}


def check_refused(answer: httpx.Response, status: int, param: str | None, what: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and what in error["message"] and error["type"]
    assert "Traceback" not in answer.text and ".py" not in answer.text and "/tmp" not in answer.text


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_honoured_is_refused_by_name(served: Served, case: str) -> None:
    path, body, param, what = BAD[case]
    check_refused(served.post(path, content=json.dumps(body).encode()), 400, param, what)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
        (b"[1]", "expected a JSON object"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": 1e999}', "beyond"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "too long"),
        (b"[" * 100_000, "deep"),
        (b'{"prompt": "a", "max_tokens": 1, "prompt": "b"}', "'prompt' twice"),
        (b'{"prompt": "a", "stream_options": {"include_usage": true, "include_usage": false}}', "'include_usage' twice"),
    ],
)
def test_a_body_that_is_not_json_is_refused(served: Served, body: bytes, what: str) -> None:
    check_refused(served.post(COMPLETION, content=body), 400, None, what)


def test_wrong_paths_and_methods_are_told_in_the_same_form(served: Served) -> None:
    check_refused(HTTP.get(f"{served.url}/v1/nothing"), 404, None, "nothing here")
    check_refused(HTTP.get(f"{served.url}{CHAT}"), 405, None, "GET")


def connected(served: Client) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def everything(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    return b"".join(iter(lambda: client.recv(4096), b""))


def test_a_body_that_is_too_large_is_refused_before_it_is_read(served: Served) -> None:
    with connected(served) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 16777217\r\n\r\n")
        answer = everything(client)
    assert answer.startswith(b"HTTP/1.1 413") and b"16777216 bytes" in answer


def test_a_body_of_unknown_length_is_read_as_far_as_it_may_be(served: Served) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(16):
            yield b" " * 2**20
        yield b"{}"

    check_refused(served.post(COMPLETION, content=pieces()), 413, None, "16777216 bytes")


HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
BODY_BEGUN = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{"


def test_clients_that_drip_or_say_nothing_are_given_up(served: Served) -> None:
    begun = (b"", HEALTH[:13], HEALTH, BODY_BEGUN)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(served)) for _ in begun]
        for client, data in zip(clients, begun, strict=True):
            client.sendall(data)
        silent, half_head, idle, half_body = map(everything, clients)
    assert silent == half_head == b""
    assert idle.startswith(b"HTTP/1.1 200") and b'"ok"' in idle
    assert half_body.startswith(b"HTTP/1.1 408") and b"did not arrive" in half_body


def is_closed(client: socket.socket) -> bool:
    """Whether the server has closed a connection, of which nothing is read to find out."""
    poll = select.poll()
    poll.register(client, select.POLLRDHUP)
    return bool(poll.poll(0))


def test_a_client_that_takes_nothing_of_its_answer_is_given_up(extractions: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.serving.http.WRITE_TIMEOUT_S", 0.2)
    body = json.dumps({"tokens": [500] * 400_000}).encode()
    with serving_inside(extractions[NAME]) as served, connected(served) as client:
        client.sendall(b"POST /detokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: is_closed(client))
        assert len(served.post("/detokenize", content=body).json()["prompt"]) == 400_000 * len("<|reserved_token_500|>")


def test_connections_above_a_number_are_closed(extractions: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.serving.server.MOST_CONNECTIONS", 4)
    with serving_inside(extractions[NAME]) as served:
        eventually(lambda: HTTP.get(f"{served.url}/health").status_code == 200)
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(connected(served)) for _ in range(20)]
            eventually(lambda: sum(map(is_closed, clients)) == 12)
        eventually(lambda: HTTP.get(f"{served.url}/health").status_code == 200)


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}])
def test_web_pages_of_others_are_not_answered(served: Served, headers: dict[str, str]) -> None:
    check_refused(served.post(COMPLETION, text(), headers=headers), 403, None, "without --api-key-file")


def test_a_page_of_our_own_is_answered(served: Served) -> None:
    assert served.post(COMPLETION, text(), headers={"Host": "LOCALHOST"}).status_code == 200
    assert served.post(COMPLETION, text(), headers={"Origin": served.url}).status_code == 200


def test_a_client_that_goes_stops_the_work(served: Served) -> None:
    before = served.metrics()
    cancelled = 'ktier_requests_total{outcome="cancelled"}'
    cut_off(served, 10, prompt="a story without an end")
    eventually(lambda: served.metrics()[cancelled] == before[cancelled] + 1)
    after = served.metrics()
    assert 0 < after["ktier_generated_tokens_total"] - before["ktier_generated_tokens_total"] < 200
    time.sleep(0.3)
    later = served.metrics()
    still = ["ktier_generated_tokens_total", *(name for name in later if "read_bytes" in name)]
    assert {name: later[name] for name in still} == {name: after[name] for name in still}


def test_a_waiting_stream_says_its_place_and_a_waiting_client_that_goes_leaves_the_queue(served: Served) -> None:
    with HTTP.stream("POST", served.url + COMPLETION, json=text(max_tokens=1500, stream=True)) as first:
        # An iterator that is dropped would close its stream.
        lines = first.iter_lines()
        next(lines)
        with HTTP.stream("POST", served.url + COMPLETION, json=text(stream=True)) as second:
            its_lines = second.iter_lines()
            assert next(its_lines) == ": queue position 1"
            eventually(lambda: HTTP.get(f"{served.url}/health").json()["waiting"] == 1)
        eventually(lambda: HTTP.get(f"{served.url}/health").json()["waiting"] == 0)
    eventually(lambda: HTTP.get(f"{served.url}/health").json()["running"] == 0)


def test_200_requests_of_which_some_are_cut_off_leave_nothing_behind(served: Served) -> None:
    outlast_storms(served, n_before=50, n=150)


@pytest.fixture(scope="module")
def guarded(extractions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With keys, no room to wait, and reachable by others; ends within a second when asked to."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"another-one-{KEY}\n\n{KEY}\n")
    with serving(extractions[NAME], "--api-key-file", keys, "--host", "0.0.0.0", "--queue", 0, "--drain", 0.5) as served:
        yield replace(served, url=served.url.replace("0.0.0.0", "127.0.0.1"))


def test_only_who_knows_a_key_is_answered(guarded: Served) -> None:
    for key in ("wrong-key-altogether", KEY[:-1], KEY + "x"):
        with pytest.raises(openai.AuthenticationError, match="not one of this server's"):
            guarded.openai(key).models.list()
    check_refused(HTTP.get(f"{guarded.url}/metrics"), 401, None, "no API key")
    check_refused(guarded.post(COMPLETION, text()), 401, None, "Bearer")
    assert HTTP.get(f"{guarded.url}/health").status_code == 200
    # With a key it may be any machine's name.
    assert HTTP.get(f"{guarded.url}/v1/models", headers={"Authorization": f"Bearer {KEY}", "Host": "other.example"}).status_code == 200
    assert guarded.openai(KEY).completions.create(model=NAME, prompt="a", max_tokens=1).usage.completion_tokens == 1


def test_a_request_past_the_queue_is_told_to_come_again_and_at_the_end_all_are_told(guarded: Served) -> None:
    client = guarded.openai(KEY)
    stream = client.completions.create(model=NAME, prompt="long", max_tokens=2000, temperature=0, stream=True)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model=NAME, prompt="a", max_tokens=1)
    assert refused.value.code == "queue_full" and refused.value.response.headers["retry-after"] == "2"
    guarded.process.terminate()
    with pytest.raises(openai.APIError, match="the server ends"):
        list(stream)
    assert guarded.ended() == 0
    log = guarded.log.read_text()
    assert "asked to end" in log and "ended as asked" in log and "Traceback" not in log and KEY not in log


def test_what_runs_and_waits_is_finished_before_the_end(extractions: dict[str, Path]) -> None:
    with serving(extractions[NAME], "--drain", 60) as served, concurrent.futures.ThreadPoolExecutor(2) as pool:
        with HTTP.stream("POST", served.url + COMPLETION, json=text(max_tokens=40, stream=True)) as first:
            lines = first.iter_lines()
            next(lines)
            second = pool.submit(served.post, COMPLETION, text(max_tokens=3))
            eventually(lambda: HTTP.get(f"{served.url}/health").json()["waiting"] == 1)
            served.process.terminate()
            assert "data: [DONE]" in list(lines)
        assert second.result().json()["usage"]["completion_tokens"] == 3
        assert served.ended() == 0
        with pytest.raises(httpx.ConnectError):
            HTTP.get(f"{served.url}/health")


# A drive of 2 MB/s, and a word from us every 20 ms.
SLOW = """
from functools import partial
import runtime.cli.serve, runtime.engine
runtime.engine.Store = partial(runtime.engine.Store, limits=[2e6])
runtime.cli.serve.ServerOptions = partial(runtime.cli.serve.ServerOptions, heartbeat_s=0.02)
runtime.cli.main()
"""


def test_a_stream_tells_of_its_prompt_pass_while_a_slow_drive_is_read(extractions: dict[str, Path]) -> None:
    # Proxies and clients give up on what is silent for long.
    assert HEARTBEAT_S <= 5
    with serving(extractions[NAME], program=(sys.executable, "-c", SLOW)) as served:
        lines = served.post(COMPLETION, text(prompt="a prompt that needs many experts", stream=True)).text.splitlines()
    told = lines[: next(n for n, line in enumerate(lines) if line.startswith("data: "))]
    shares = [int(found[1]) for line in told if (found := re.fullmatch(r": prompt pass (\d+) % of \d+ tokens", line))]
    assert len(shares) > 5 and shares == sorted(shares) and 0 < shares[len(shares) // 2] < 100


FAULTY = """
import sys, torch
from runtime.decode import Decoder
step, n = Decoder.step, 0
def fail(self, ids):
    global n
    n += 1
    if n > 3:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    return step(self, ids)
Decoder.step = fail
from runtime.cli import main
main()
"""


def test_a_fault_of_the_device_is_told_and_ends_the_process(extractions: dict[str, Path]) -> None:
    with serving(extractions[NAME], program=(sys.executable, "-c", FAULTY)) as served:
        answer = served.post(COMPLETION, text(max_tokens=9))
        check_refused(answer, 500, None, "log says more")
        health = HTTP.get(f"{served.url}/health")
        assert health.status_code == 503 and health.json()["status"] == "failed"
        check_refused(served.post(COMPLETION, text()), 503, None, "has failed")
        assert served.ended() == 6
        log = served.log.read_text()
        assert "illegal memory access" in log and "Traceback" not in log


def test_a_lost_drive_is_told_while_answers_go_on_from_copies(prepared_copy: Path, tmp_path: Path) -> None:
    add_copies(prepared_copy, tmp_path / "copies")
    with serving_inside(prepared_copy, vram_cache="1slots", host_pool="4slots") as served:
        asked = text(max_tokens=12, temperature=0, return_token_ids=True)
        before = served.post(COMPLETION, asked).json()["choices"]
        assert HTTP.get(f"{served.url}/health").json()["status"] == "ok"
        for path in (prepared_copy / "experts").glob("L*.bin"):
            path.write_bytes(b"")
        assert served.post(COMPLETION, asked).json()["choices"] == before
        health = HTTP.get(f"{served.url}/health")
        drives = [(drive["tier"], drive["state"]) for drive in health.json()["drives"]]
        assert health.status_code == 200 and health.json()["status"] == "degraded" and drives == [("A", "failing"), ("C", "ok")]
        metrics = served.metrics()
        assert metrics['ktier_drive_ok{drive="0",tier="A"}'] == 0 and metrics['ktier_drive_bad_reads_total{drive="0",tier="A"}'] > 0
        # Without any copy a request fails, and says no more than it may.
        shutil.rmtree(tmp_path / "copies")
        check_refused(served.post(COMPLETION, asked), 500, None, "could not be read")
        assert HTTP.get(f"{served.url}/health").status_code == 200


def test_a_port_that_is_taken_is_told_at_once(extractions: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        outcome = krun("serve", "-m", extractions[NAME], "--port", taken.getsockname()[1])
    assert outcome.code == 2 and "give another port" in outcome.err, outcome


def test_a_port_belongs_to_one_server_while_it_does_not_listen_yet() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(UsageError, match="give another port"):
            bind("127.0.0.1", port)
        listen(first)
        client = socket.create_connection(("127.0.0.1", port))
        # The side that closes first keeps the port for a while.
        first.accept()[0].close()
        client.close()
    with bind("127.0.0.1", port) as second:
        listen(second)


def test_others_are_served_with_keys_alone(extractions: dict[str, Path], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    for content, what in (
        (None, "cannot be read"),
        ("\n \n", "holds no key"),
        ("# mine\nshort\n", "line 1 is too short"),
        ("with a blank in it\n", "not plain"),
    ):
        if content is not None:
            keys.write_text(content)
        with pytest.raises(UsageError, match=what):
            serve_command(extractions[NAME], host="0.0.0.0", api_key_file=keys)
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.org"):
        with pytest.raises(UsageError, match="give --api-key-file"):
            serve_command(extractions[NAME], host=host)


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("host", ["nonsense..", "a" * 300])
def test_a_host_that_is_none_is_told_so(tmp_path: Path, host: str, has_keys: bool) -> None:
    keys = tmp_path / "keys"
    keys.write_text("abcdefghijkl\n")
    with pytest.raises(UsageError, match=f"--host {host}: .*expected an address or a name of this machine"):
        serve_command(tmp_path, host=host, api_key_file=keys if has_keys else None)


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_model_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"--model-name '{name}': holds no name"):
        serve_command(tmp_path, model_name=name)


def test_a_drive_without_a_part_in_the_plan_is_no_lost_one(prepared_copy: Path, tmp_path: Path) -> None:
    tiers = f"A={tmp_path / 'a'}", f"C={tmp_path / 'c'}"
    # On one device a second copy brings nothing, so that C is left empty.
    place(prepared_copy, *tiers)
    with ServingEngine(prepared_copy, Options(device="cpu"), n_kept=0, on_remark=print) as engine:
        assert Metrics(engine).drive_states() == ["ok", "unused"]
