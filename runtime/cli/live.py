"""A line on the terminal that is written again and again while something runs."""

import os
import sys
import time

from layout.terminal import note

_EVERY_S = 0.1
_ERASE = "\r\x1b[2K"


def can_show_live(*, is_text_on_stdout: bool) -> bool:
    """Return whether a live line on stderr meets a person and spoils no text: the text must not go to the same terminal."""
    return sys.stderr.isatty() and not (is_text_on_stdout and sys.stdout.isatty())


def _columns() -> int:
    """Return the terminal's width; one that does not tell its own counts as wide."""
    return os.get_terminal_size(sys.stderr.fileno()).columns or 1000


class LiveLine:
    """Shows one line at a time on stderr, or nothing; remarks go above it."""

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown, self._text, self._next = is_shown, "", 0.0

    def show(self, text: str) -> None:
        """Replace the line, if the last one has stood for a moment."""
        now = time.monotonic()
        if self._is_shown and now >= self._next:
            # A line that the terminal breaks would not be erased whole.
            self._next, self._text = now + _EVERY_S, text[: _columns() - 1]
            self._write(_ERASE + self._text)

    def note(self, text: str) -> None:
        """Print a remark without mixing it with the line."""
        if self._text:
            self._write(_ERASE)
        note(text)
        if self._text:
            self._write(self._text)

    def end(self) -> None:
        if self._text:
            self._write(_ERASE)
            self._text = ""

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
