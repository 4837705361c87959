"""Triton kernels on a CPU: Triton's interpreter runs them, element by element, in a process of its own.

Triton decides when a kernel is defined, that is at import, so the variable that it reads must be set before.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest


def run_interpreted(test_file: str, *arguments: str) -> None:
    """Run one file's tests under the interpreter; fail with their output if one fails, or if none ran."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", test_file, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-8000:] + done.stderr[-4000:]


def accept_numpy_2_4() -> None:
    """Let the interpreter of Triton 3.6 loop up to a number known at run time: it holds that as an array of one element.

    From numpy 2.4 on such an array is no whole number any more.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_lang_tensor"):
        return
    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: Sequence[object]) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patched
