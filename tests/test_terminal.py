"""Progress where there is no terminal: the rate is that of the work, from its begin."""

from types import SimpleNamespace

import pytest

from layout.terminal import ProgressLine


class Clock:
    """A monotonic clock that stands still until it is told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("layout.terminal.time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_clock_of_a_phase_starts_with_the_work_and_not_with_its_first_report(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressLine()
    clock.now += 50
    with progress:
        clock.now += 2
        progress("read", 500, 1000)
        clock.now += 2
        progress("read", 1000, 1000)
        clock.now += 1
        progress("prove", 1000, 1000)
    assert capsys.readouterr().err == "read: 1KB of 1KB, 250B/s\nprove: 1KB of 1KB, 1KB/s\n"


def test_short_work_gets_no_rate(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine() as progress:
        progress("read", 0, 3_410_000)
        clock.now += 0.099
        progress("read", 3_410_000, 3_410_000)
    assert capsys.readouterr().err == "read: 3.41MB of 3.41MB\n"


def test_a_plain_line_comes_every_ten_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine() as progress:
        for done in range(1, 26):
            clock.now += 1
            progress("read", done, 100)
    assert capsys.readouterr().err == "read: 10B of 100B, 1B/s\nread: 20B of 100B, 1B/s\n"


def test_phases_at_one_time_begin_where_each_says_that_nothing_is_done(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine() as progress:
        clock.now += 30
        for phase in ("copies, a", "copies, b"):
            progress(phase, 0, 1000)
        clock.now += 2
        progress("copies, a", 1000, 1000)
        clock.now += 2
        progress("copies, b", 1000, 1000)
    assert capsys.readouterr().err == "copies, a: 1KB of 1KB, 500B/s\ncopies, b: 1KB of 1KB, 250B/s\n"
