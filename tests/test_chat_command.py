"""krun chat: lines of a pipe in this process, and a person at a pseudo-terminal."""

import fcntl
import io
import json
import os
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from inside import refused, talked
from rich.console import Console
from serving import KRUN

from runtime.cli.chat import Screen


@pytest.fixture
def model(extractions: dict[str, Path]) -> Path:
    return extractions["tiny-k3.1"]


def test_each_line_of_a_pipe_is_a_turn_and_answers_alone_are_the_result(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    lines = f"hello\n\n/stats\nand more\n/save {path}\n/quit\nnever said\n"
    plain = talked(model, lines, "--no-thinking", "-n", 5, "--temp", 0)
    assert plain.code == 0 and "\x1b" not in plain.out + plain.err, plain
    messages = json.loads(path.read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert plain.out == "".join(message["content"].rstrip("\n") + "\n" for message in messages[1::2])
    assert "last answer: 5 tokens" in plain.err and "at most 5 tokens" in plain.err and "no thinking" in plain.err
    # Reasoning is no result.
    thinking = talked(model, "hello\n/save " + str(path) + "\n", "-n", 5, "--seed", 3, "--effort", "low", "--system", "be brief")
    told = json.loads(path.read_text())["messages"]
    assert thinking.code == 0 and thinking.out == "" and told[-1]["reasoning_content"] in thinking.err
    assert told[0] == {"role": "system", "content": "be brief"} and "effort low" in thinking.err and "seed 3" in thinking.err


def test_what_cannot_be_done_is_told_and_the_conversation_goes_on(model: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("no conversation")
    long = "long " * 3000
    lines = f"/nothing\n/load {tmp_path / 'notes'}\n/load\n/reset now\n{long}\nbad \udcff byte\n"
    lines += f"/save {tmp_path / ('x' * 300)}\n/save {tmp_path}/a\0b\n/save ~nobody-at-all/x\n/help\nhello\n"
    outcome = talked(model, lines, "--no-thinking", "-n", 3, "--temp", 0)
    assert outcome.code == 1 and outcome.out.strip()
    told = [
        "line 1: /nothing: is no command",
        "line 2: ",
        "is not JSON",
        "line 3: /load: expected the name of a file",
        "line 4: /reset: takes nothing",
    ]
    told += ["line 5: with this message the conversation has", "line 6: is not UTF-8 at byte 4"]
    told += [
        "line 7: ",
        "File name too long",
        "line 8: /save: no file's name",
        "line 9: ~nobody",
        "/save FILE",
        "krun: 9 of 11 lines could not be done",
    ]
    assert all(part in outcome.err for part in told), outcome.err


def test_flags_that_would_do_nothing_are_refused(model: Path) -> None:
    refused(talked(model, "", "--effort", "huge"), 2, "--effort huge", "low, medium, high, max")
    refused(talked(model, "", "--effort", "low", "--no-thinking"), 2, "without effect with --no-thinking")
    refused(talked(model, "", "--top-p", 0), 2, "--top-p")
    refused(talked(model, "", "--temp", 0, "--seed", 3), 2, "--seed: without effect at temperature 0")


def test_a_terminal_shows_reasoning_dim_and_obeys_nothing_that_the_model_says() -> None:
    shown = io.StringIO()
    screen = Screen(Console(file=shown, force_terminal=True, highlight=False))
    for delta in ({"reasoning_content": "hm [bold]"}, {"content": "a\x1b]0;title\x07b\x9b31m"}, {"content": " [red]\tc\n"}, {}):
        screen.show(delta)
    screen.end()
    # A line of its own between reasoning and content; tabs become blanks.
    assert shown.getvalue() == "\x1b[2mhm [bold]\x1b[0m\na␛]0;title␇b\ufffd31m [red]  c\n"


def test_remarks_and_reasoning_that_a_terminal_shows_beside_redirected_answers_steer_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, kept = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(sys, "stdout", kept)
    monkeypatch.setattr(shown, "isatty", lambda: True)
    screen = Screen(Console(highlight=False))
    screen.show({"reasoning_content": "hm\x1b[2J"})
    screen.note("of digest \x1b[31m")
    screen.show({"content": "a\x1b"})
    assert shown.getvalue() == "hm␛[2J\nof digest ␛[31m\n" and kept.getvalue() == "a\x1b"


CTRL_C = "\x03"


class Terminal:
    """A person's side of a pseudo-terminal."""

    def __init__(self, fd: int, process: subprocess.Popen[bytes]) -> None:
        self.fd, self.process, self.seen = fd, process, ""

    def type(self, text: str) -> None:
        if text == CTRL_C:
            # Python looks at a signal while readline waits for keys, not while it takes one.
            time.sleep(0.3)
        os.write(self.fd, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Read until the pattern is there; return all up to its end, which is then forgotten."""
        until = time.monotonic() + 60
        while (found := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < until and self.process.poll() is None, self.seen
            if select.select([self.fd], [], [], 0.2)[0]:
                self.seen += os.read(self.fd, 65536).decode(errors="replace")
        told, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return told


@contextmanager
def terminal(*arguments: object) -> Iterator[Terminal]:
    mine, its = os.openpty()
    command = [KRUN, *map(str, arguments)]
    environment = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(
        command, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    ) as process:
        os.close(its)
        try:
            yield Terminal(mine, process)
        finally:
            process.kill()
            os.close(mine)


PROMPT = r"> (\x1b\[\?2004h)?$"


def test_ctrl_c_stops_the_answer_and_not_the_program(model: Path) -> None:
    with terminal("chat", "-m", model, "--seed", 1, "--temp", 1) as person:
        person.wait_for("/help lists the commands")
        person.type("tell me a long story\n")
        # Some of the answer, which is dim as it is reasoning.
        person.wait_for(r"(\x1b\[2m[^\x1b]+\x1b\[0m.*){10}")
        person.type(CTRL_C)
        person.wait_for("stopped; what was said stays in the conversation")
        person.type("/stats\n")
        assert "ended by stopped" in person.wait_for(r"last answer: .*\n") and person.process.poll() is None
        # What is being typed is cleared, and does not count.
        person.wait_for(PROMPT)
        person.type("half a thou")
        person.wait_for("thou")
        person.type(CTRL_C)
        person.wait_for(PROMPT)
        person.type(CTRL_C)
        person.wait_for("Ctrl-C again ends")
        person.wait_for(PROMPT)
        person.type(CTRL_C)
        assert person.process.wait(20) == 0
