"""Uploads to the GPU beside a measurement, by a `krun uploads` process: kprep itself knows no GPU.

The process says `ready` on a line once it uploads, goes on until its input is closed, and then prints one JSON line. Whatever it does
instead ends here in one message; nothing waits without end.
"""

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from manifests.errors import DeviceError, KtierError, UsageError

# Loading torch and waking a GPU may take long on a slow disk.
READY_WITHIN_S = 120.0
END_WITHIN_S = 30.0
# A measurement closes the input long before.
MOST_SECONDS = 24 * 3600


class UploadRate(NamedTuple):
    """What was uploaded while the drives were measured."""

    device: str
    bytes_per_s: float


def uploads_command(record_bytes: int) -> list[str]:
    """Return the command line of this installation's krun. Raises UsageError where there is none."""
    beside = Path(sys.executable).with_name("krun")
    program = str(beside) if beside.exists() else shutil.which("krun")
    if program is None:
        raise UsageError("--with-uploads: krun is not installed here, and kprep cannot upload by itself; measure on the machine with the GPU")
    return [program, "uploads", "--seconds", str(MOST_SECONDS), "--record-bytes", str(record_bytes)]


class UploadProcess:
    """A running upload, ready once the object is made. Leaving its context ends the process, whatever happened.

    Raises DeviceError if the process says that there is no device (by its exit code), KtierError for any other failure.
    """

    def __init__(self, command: Sequence[str], *, ready_within_s: float = READY_WITHIN_S, end_within_s: float = END_WITHIN_S) -> None:
        self._end_within_s = end_within_s
        self._text = b""
        # A file and not a pipe: whatever is said there, nobody has to read it in time.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 it is closed in close()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0, start_new_session=True
            )
        except OSError as error:
            self._errors.close()
            raise KtierError(f"{command[0]}: cannot be started for the uploads: {error.strerror}") from None
        try:
            line = self._line(ready_within_s, "ready")
            if line != "ready":
                raise KtierError(f"{command[0]}: the uploads began with {line!r:.80}, expected the line ready")
        except BaseException:
            self.close()
            raise

    def finish(self) -> UploadRate:
        """End the uploads and return their rate. Raises KtierError if they had ended before, for then they did not run beside everything."""
        if self._process.poll() is not None:
            raise self._failure("the uploads ended before the drives were measured")
        assert self._process.stdin is not None
        self._process.stdin.close()
        line = self._line(self._end_within_s, "a last line")
        try:
            facts = json.loads(line)
            return UploadRate(str(facts["device"]), float(facts["bytes_per_s"]))
        except (ValueError, KeyError, TypeError):
            raise KtierError(f"the uploads ended with {line!r:.80}, expected JSON with device and bytes_per_s") from None

    def close(self) -> None:
        """End the process if it still runs: first by closing its input, then by force."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        self._errors.close()

    def __enter__(self) -> "UploadProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _line(self, within_s: float, expected: str) -> str:
        """Return the next line of the process's output."""
        assert self._process.stdout is not None
        fd, until = self._process.stdout.fileno(), time.monotonic() + within_s
        while b"\n" not in self._text:
            left = until - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise self._failure(f"the uploads did not say {expected} within {within_s:g} s")
            piece = os.read(fd, 65536)
            if not piece:
                raise self._failure(f"the uploads ended without {expected}")
            self._text += piece
        line, _, self._text = self._text.partition(b"\n")
        return line.decode(errors="replace").strip()

    def _failure(self, what: str) -> KtierError:
        # At the end of its output a process may need another moment to end.
        try:
            code: int | None = self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            code = None
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        ended = "" if code is None else f", exit code {code}"
        message = f"{what}{ended}: {said[-1] if said else 'it gave no reason'}"
        return DeviceError(message) if code == DeviceError.exit_code else KtierError(message)
