"""The page at `/`, in a real browser: it shows what the server does, chats, keeps text text, and asks nobody else."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import HTTP, Client, eventually, serving_inside

try:
    from playwright.sync_api import expect, sync_playwright
except ImportError:
    expect = sync_playwright = None

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FOUND = next(filter(None, map(shutil.which, BROWSERS)), None) if sync_playwright else None
MISSING = f"no Chromium: none of {', '.join(BROWSERS)} is installed" if sync_playwright else "playwright is not installed"
needs_browser = pytest.mark.skipif(FOUND is None, reason=MISSING)
KEY = "a-key-of-this-test"


@pytest.fixture(scope="module")
def served(extractions: dict[str, Path]) -> Iterator[Client]:
    with serving_inside(extractions["tiny-k3.1"], keys=frozenset({KEY.encode()})) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as driver:
        # No sandbox: in containers, and as root, Chromium has none; it sees our own page alone.
        browser = driver.chromium.launch(executable_path=FOUND, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, served: Client) -> Iterator[Any]:
    """The page of a narrow screen, with its key. Errors of the page, and whatever it asks of others, fail the test."""
    context = browser.new_context(viewport={"width": 400, "height": 800}, color_scheme="dark")
    page, faults = context.new_page(), list[str]()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda line: faults.append(line.text) if "Content Security Policy" in line.text else None)
    page.on("request", lambda request: None if request.url.startswith((served.url, "data:")) else faults.append(request.url))
    page.goto(served.url)
    page.get_by_label("API key").fill(KEY)
    page.get_by_text("Use it").click()
    expect(page.locator("#state")).to_have_text("ok")
    yield page
    context.close()
    assert not faults


def say(page: Any, text: str, *, most: int = 4) -> None:
    page.get_by_label("Most tokens").fill(str(most))
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def answer_with(page: Any, *, status: int = 200, body: str) -> None:
    """Have the page's next questions answered so, without the server."""
    kind = "text/event-stream" if status == 200 else "application/json"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=status, content_type=kind, body=body))


def stream(*deltas: dict[str, Any]) -> str:
    chunks = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    return "".join(f"data: {each}\n\n" for each in (*map(json.dumps, chunks), "[DONE]"))


@needs_browser
def test_a_key_is_asked_for_and_kept_in_the_session_alone(browser: Any, served: Client) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(served.url)
    expect(page.locator("#state")).to_have_text("key needed")
    page.get_by_label("API key").fill("not-the-key-at-all")
    page.get_by_text("Use it").click()
    expect(page.locator("#key-note")).to_contain_text("not one of the server's")
    page.get_by_label("API key").fill(KEY)
    page.get_by_text("Use it").click()
    expect(page.locator("#state")).to_have_text("ok")
    assert page.evaluate("Object.values(sessionStorage)") == [KEY]
    assert page.evaluate("localStorage.length") == 0 and page.evaluate("document.cookie") == "" and KEY not in page.url
    context.close()


@needs_browser
def test_it_chats_and_shows_model_tiers_and_runs_on_a_narrow_screen(page: Any) -> None:
    say(page, "hello")
    expect(page.locator(".note").last).to_contain_text("first token after")
    first = page.locator(".assistant").last.inner_text()
    assert page.locator(".reasoning").first.inner_text() and "Reasoning" in first
    say(page, "and again")
    expect(page.locator(".note")).to_have_count(2)
    expect(page.locator(".note").last).to_contain_text("first token after")
    expect(page.locator("#name")).to_have_text("tiny-k3.1")
    expect(page.locator("#places")).to_contain_text("tier A")
    expect(page.locator("#places")).to_contain_text(re.compile(r"device cache holds [\d.]+ .B\d+ %"))
    expect(page.locator("#rate")).to_have_text(re.compile(r"\d"))
    # The second turn went on from what the first one left.
    expect(page.locator("#last tr").first).to_contain_text("kept")
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.evaluate("[...document.querySelectorAll('.wide')].every(each => each.scrollWidth <= each.clientWidth)")


@needs_browser
def test_a_reply_that_is_html_is_shown_as_text(page: Any) -> None:
    bad = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
    answer_with(page, body=stream({"reasoning_content": bad}, {"content": bad}, {"tool_calls": [{"function": {"name": bad, "arguments": bad}}]}))
    say(page, bad)
    expect(page.locator(".content")).to_contain_text(bad)
    expect(page.locator(".reasoning")).to_have_text(bad)
    expect(page.locator(".user")).to_have_text(bad)
    assert page.locator("#log script, #log img").count() == 0 and "taken" not in page.title()


@needs_browser
def test_a_refused_message_says_why_and_comes_back(page: Any) -> None:
    answer_with(page, status=429, body=json.dumps({"error": {"message": "16 requests wait <b>already</b>"}}))
    say(page, "my words")
    expect(page.locator(".fault")).to_have_text("16 requests wait <b>already</b>")
    expect(page.get_by_label("Message")).to_have_value("my words")
    expect(page.locator(".user")).to_have_count(0)


@needs_browser
def test_stop_ends_the_answer_and_keeps_what_was_said(page: Any, served: Client) -> None:
    say(page, "a long story", most=1000)
    expect(page.locator(".reasoning")).to_contain_text(re.compile("."))
    page.get_by_text("Stop").click()
    expect(page.locator(".note")).to_have_text("stopped")
    said = page.locator(".reasoning").inner_text()
    expect(page.locator("#running-note")).to_have_text("nothing runs")
    assert said and page.locator(".reasoning").inner_text() == said


def test_its_headers_forbid_what_is_not_its_own(served: Client) -> None:
    answer = HTTP.get(served.url)
    policy = dict(each.split(" ", 1) for each in answer.headers["content-security-policy"].split("; "))
    assert answer.status_code == 200 and policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'" and all(re.fullmatch(r"'sha256-[\w+/=]+'", policy[name]) for name in ("script-src", "style-src"))
    assert KEY not in answer.text and not re.search(r"(src|href)=\"(?!data:,)|url\(|@import|innerHTML|style=", answer.text)


def test_what_it_shows_is_told_to_those_with_a_key(served: Client, extractions: dict[str, Path]) -> None:
    assert HTTP.get(f"{served.url}/status").status_code == 401
    headers = {"Authorization": f"Bearer {KEY}"}
    served.post("/v1/completions", {"prompt": "a", "max_tokens": 3}, headers=headers)
    # The answer is there a moment before the next one may begin.
    eventually(lambda: HTTP.get(f"{served.url}/status", headers=headers).json()["queue"]["running"] == 0)
    told = HTTP.get(f"{served.url}/status", headers=headers).json()
    assert told["status"] == "ok" and told["running"] is None and told["queue"] == {"running": 0, "waiting": 0, "most_waiting": 16}
    assert told["model"]["id"] == "tiny-k3.1" and told["drives"][0]["read_bytes"] > 0
    run = told["runs"][0]
    assert (run["kind"], run["n_prompt"], run["n_generated"], run["ended_by"]) == ("text_completion", 1, 3, "length")
    assert run["time_to_first_token_s"] > 0 and str(extractions["tiny-k3.1"].parent) not in json.dumps(told)
