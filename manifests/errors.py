"""The ways in which a command can end badly, each with its exit code.

A message says where, what was found, what was expected and what to do.
"""


class KtierError(Exception):
    """A failure that is explained to the user without a stack trace."""

    exit_code = 1


class UsageError(KtierError):
    """A flag or argument cannot be honoured."""

    exit_code = 2


class BadInputError(KtierError):
    """A checkpoint, manifest, prompt or file given to us is not what it must be."""

    exit_code = 3


class DamagedDataError(KtierError):
    """Bytes that we once wrote and hashed are missing, short or different."""

    exit_code = 4


class NoSpaceError(KtierError):
    """A file system has too little room."""

    exit_code = 5


class DeviceError(KtierError):
    """A GPU, or memory that was asked for, cannot be had."""

    exit_code = 6


class Interrupted(KtierError):
    """Ctrl-C, or a request to end."""

    exit_code = 130


def listed(faults: list[str], heading: str, *, most: int = 20) -> str:
    """Return the heading with one fault per line, saying how many were left out after the first `most`."""
    lines = [heading, *(f"  {fault}" for fault in faults[:most])]
    if len(faults) > most:
        lines.append(f"  ... and {len(faults) - most} more")
    return "\n".join(lines)
