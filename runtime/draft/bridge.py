"""A drafter of another vocabulary, in a process of its own: text goes there, text comes back, and a token boundary must lie where they meet.

The process may crash, hang or answer nonsense; here that becomes a DrafterFault. What it needs and whether it can be used at all is examined
before it is started, without loading anything.
"""

import importlib.util
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layout.sizes import format_size
from manifests.errors import BadInputError, DeviceError, UsageError
from runtime.draft.drafter import DrafterFault
from runtime.draft.gates import Gate
from runtime.tokens import Tokenizer

START_DEADLINE_S = 180.0
# The first proposal takes in the whole prompt.
DEADLINE_S = 10.0
_END_DEADLINE_S = 0.5
# A text's last tokens, in which the seam with a draft is looked for.
_TAIL_TOKENS = 16
_MOST_ANSWER_BYTES = 1 << 16
# Byte-level: any text goes in and comes out as it was.
_TOKENIZER_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_MODEL_TYPES = ("qwen2", "qwen3")
# Beside the weights, on a GPU: what CUDA itself takes in another process, and the attention cache. An allowance, not a measurement.
_GPU_ALLOWANCE_BYTES = 1_500_000_000


@dataclass(frozen=True, slots=True)
class BridgeModel:
    """A drafter's model on disk, examined; `n_bytes` is the size of its weights."""

    path: Path
    n_bytes: int

    def needed_bytes(self, *, is_gpu: bool) -> int:
        """Return the device memory it takes."""
        return self.n_bytes + _GPU_ALLOWANCE_BYTES if is_gpu else 2 * self.n_bytes


def examine_model(path: Path, *, flag: str = "--drafter") -> BridgeModel:
    """Look at a drafter's files. Raises BadInputError if they are no model that can be bridged, UsageError if the extra is not installed."""
    if not path.is_dir():
        raise BadInputError(f"{flag} {path}: no such directory; expected ngram, or a directory with config.json, tokenizer and *.safetensors")
    config = _read_json(path / "config.json", flag)
    if (kind := config.get("model_type")) not in _MODEL_TYPES:
        raise BadInputError(f"{flag} {path}: config.json's model_type is {kind!r}, expected one of {', '.join(_MODEL_TYPES)}")
    tokenizer = _read_json(path / "tokenizer_config.json", flag).get("tokenizer_class")
    if tokenizer not in _TOKENIZER_CLASSES:
        raise BadInputError(
            f"{flag} {path}: tokenizer_config.json's tokenizer_class is {tokenizer!r}, expected one of {', '.join(_TOKENIZER_CLASSES)}: "
            "another may change text on its way through, so that drafts would not fit"
        )
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise BadInputError(f"{flag} {path}: holds no *.safetensors file with weights")
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(f"{flag} {path}: needs transformers, which is not installed: pip install 'ktier[draft]', or use {flag} ngram")
    return BridgeModel(path, sum(file.stat().st_size for file in files))


def check_room(model: BridgeModel, *, available_bytes: int, is_gpu: bool, flag: str = "--drafter") -> None:
    """Raise DeviceError if a drafter needs more than the memory that is left for it."""
    needed = model.needed_bytes(is_gpu=is_gpu)
    if needed > available_bytes:
        raise DeviceError(
            f"{flag} {model.path}: needs about {format_size(needed)} of device memory, but {format_size(available_bytes)} are left; "
            f"leave {flag} out for plain decoding, or give --vram-cache less"
        )


def _read_json(path: Path, flag: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise BadInputError(f"{flag} {path.parent}: {path.name} cannot be read ({error.strerror}): not a model's directory") from None
    except ValueError:
        raise BadInputError(f"{flag} {path.parent}: {path.name} is not JSON: not a model's directory") from None
    if not isinstance(value, dict):
        raise BadInputError(f"{flag} {path.parent}: {path.name} is no JSON object: not a model's directory")
    return value


def drafter_command(model: BridgeModel, device: str) -> list[str]:
    """Return the command line of the drafter's process."""
    # -P: not a package that happens to lie in the current directory.
    return [sys.executable, "-P", "-c", "from runtime.draft.qwen import main; main()", str(model.path), device]


class BridgeDrafter:
    """Asks a process for text and turns it into tokens."""

    def __init__(
        self, command: Sequence[str], tokenizer: Tokenizer, gate: Gate, *, deadline_s: float = DEADLINE_S, start_deadline_s: float = START_DEADLINE_S
    ) -> None:
        """Start the process and wait until it is ready. Raises BadInputError, with what it said last, if it does not get there."""
        self.gate, self._tokenizer, self._deadline_s = gate, tokenizer, deadline_s
        self._child = _Child(command)
        try:
            ready = self._child.answer(time.monotonic() + start_deadline_s)
            if ready.get("ready") is not True:
                raise DrafterFault(f"began with {ready!r}")
        except DrafterFault as fault:
            self.close()
            raise BadInputError(f"--drafter: {fault}; it was: {' '.join(command[-2:])}") from None
        except BaseException:
            self.close()
            raise

    def propose(self, text: Sequence[int], n_most: int) -> list[int]:
        tail = self._tail(text)
        if tail is None:
            return []
        request = {"text": self._tokenizer.decode(text), "n_most": n_most, "gate": self.gate.value}
        answer = self._child.ask(request, time.monotonic() + self._deadline_s)
        draft = answer.get("draft")
        if not isinstance(draft, str):
            raise DrafterFault(f"its process answered {str(answer)[:80]!r}, expected a draft")
        return self._mapped(tail, draft)[:n_most]

    def settle(self, *, n_proposed: int, n_accepted: int) -> None:
        self.gate.settle(n_proposed=n_proposed, n_accepted=n_accepted)

    def close(self) -> None:
        self._child.close()

    def _tail(self, text: Sequence[int]) -> str | None:
        """Return the text of the last tokens, None if it does not end with a whole character: nothing can be said of what follows then."""
        raw = b"".join(map(self._tokenizer.token_bytes, text[-_TAIL_TOKENS:]))
        # It may begin inside a character.
        while raw and raw[0] & 0xC0 == 0x80:
            raw = raw[1:]
        try:
            return raw.decode() or None
        except UnicodeDecodeError:
            return None

    def _mapped(self, tail: str, draft: str) -> list[int]:
        """Return the tokens of a draft behind a text's tail; none if a token would lie across the seam, or if the draft is no valid text."""
        try:
            ids = self._tokenizer.encode(tail + draft)
        except BadInputError:
            return []
        at, seam = 0, len(tail.encode())
        for n, token in enumerate(ids):
            if at == seam:
                return ids[n:]
            at += len(self._tokenizer.token_bytes(token))
        return []


class _Child:
    """A process that answers each line of JSON with one."""

    def __init__(self, command: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._held = b""
        with theirs:
            # In a session of its own, a Ctrl-C does not reach it: it ends when our end of the socket closes, however we end.
            end = theirs.fileno()
            self._process = subprocess.Popen(command, stdin=end, stdout=end, stderr=self._said, start_new_session=True)

    def ask(self, request: dict[str, Any], until: float) -> dict[str, Any]:
        """Send a request and return its answer. Raises DrafterFault if none is there in time, at `until` of the monotonic clock."""
        if self._held:
            raise DrafterFault("its process said more than it was asked")
        try:
            self._socket.settimeout(max(1e-3, until - time.monotonic()))
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except TimeoutError:
            raise DrafterFault("its process took no request in time") from None
        except OSError:
            raise DrafterFault(self._end()) from None
        return self.answer(until)

    def answer(self, until: float) -> dict[str, Any]:
        while b"\n" not in self._held:
            if len(self._held) > _MOST_ANSWER_BYTES:
                raise DrafterFault(f"its process answered more than {format_size(_MOST_ANSWER_BYTES)}")
            self._held += self._receive(until)
        line, _, self._held = self._held.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            raise DrafterFault(f"its process answered {line[:40]!r}, which is no JSON") from None
        if not isinstance(answer, dict):
            raise DrafterFault(f"its process answered {line[:40]!r}, expected an object")
        return answer

    def _receive(self, until: float) -> bytes:
        left = until - time.monotonic()
        try:
            self._socket.settimeout(max(1e-3, left))
            received = self._socket.recv(1 << 16)
        except TimeoutError:
            raise DrafterFault("its process did not answer in time") from None
        except OSError:
            received = b""
        if not received:
            raise DrafterFault(self._end())
        return received

    def _end(self) -> str:
        """Say how the process ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_DEADLINE_S)
        code = self._process.returncode
        how = "closed its end" if code is None else f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"its process {how}" + (f": {last.strip()}" if last else "")

    def close(self) -> None:
        """End the process: it has nothing to put in order."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
        self._said.close()
