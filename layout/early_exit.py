"""Ctrl-C before a command is loaded: there is nothing to clean up yet, so it ends at once, with the same code and no stack trace."""

import os
import signal
from types import FrameType

from manifests.errors import Interrupted

# A closed terminal is one too, unless whoever began the process has it live on (nohup).
REQUESTS_TO_END = (signal.SIGINT, signal.SIGTERM, *([] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]))


def leave_on_interrupt(name: str) -> None:
    """Until other handlers are set, let Ctrl-C and a request to end print one line and end the process."""

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, f"{name}: interrupted\n".encode())
        os._exit(Interrupted.exit_code)

    for number in REQUESTS_TO_END:
        signal.signal(number, leave)
