"""Sizes and rates as people write them: `27.5GB`, `512MiB`, `16slots`, `2.31GB/s`. KB, MB, GB and TB are powers of 1000."""

import re
from fractions import Fraction

from manifests.errors import UsageError

DECIMAL_UNITS = ("B", "KB", "MB", "GB", "TB")

_BYTES_OF_UNIT = {unit: 1000**power for power, unit in enumerate(DECIMAL_UNITS)}
_BYTES_OF_UNIT |= {unit: 1024**power for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1)}
# More digits than any size needs are refused here: int() has a limit of its own, with an error that no user would understand.
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([KMGT]?B|[KMGT]iB)")
_SLOTS = re.compile(r"([0-9]{1,18})slots?")


def parse_size(text: str, *, flag: str, record_bytes: int | None = None) -> int:
    """Return the whole bytes that a size means, rounded down.

    flag          the option that the size was given to, for the message
    record_bytes  what one slot holds; None where a size in slots makes no sense

    Raises UsageError for anything but a positive number with a unit.
    """
    n_bytes = _n_bytes(text, record_bytes)
    if n_bytes is None or n_bytes < 1:
        raise UsageError(f"{flag}: {text!r} is not a size; {_accepted_forms(record_bytes)}")
    return n_bytes


def _n_bytes(text: str, record_bytes: int | None) -> int | None:
    if match := _SIZE.fullmatch(text):
        # Not float: 1.1TB has to be 1,100,000,000,000 bytes.
        return int(Fraction(match[1]) * _BYTES_OF_UNIT[match[2]])
    if record_bytes is not None and (match := _SLOTS.fullmatch(text)):
        return int(match[1]) * record_bytes
    return None


def _accepted_forms(record_bytes: int | None) -> str:
    if record_bytes is None:
        return "give a number above zero with its unit: 27.5GB, 512MB, 40KB, 64GiB (slots mean nothing here)"
    return f"give a number above zero with its unit: 27.5GB, 512MB, 40KB, 64GiB, or 16slots ({format_size(record_bytes)} each)"


def format_size(n_bytes: float) -> str:
    """Return a size in decimal units with three digits: `27.5GB`, `9.8KB`, `0B`."""
    value = n_bytes
    for unit in DECIMAL_UNITS:
        # Rounded before the unit is chosen: 999,960 bytes are 1MB, not 1000KB.
        rounded = float(f"{value:.3g}")
        if rounded < 1000:
            return f"{rounded:g}{unit}"
        value /= 1000
    return f"{value * 1000:.0f}{DECIMAL_UNITS[-1]}"


def counted(n: int, word: str, words: str = "") -> str:
    """Return a number with its word: `1 copy`, `2 copies`; the plural is the word with an s unless it is given."""
    return f"{n} {word_for(n, word, words)}"


def word_for(n: int, word: str, words: str = "") -> str:
    """Return the word that goes with a number, as in `counted`."""
    return word if n == 1 else words or word + "s"


def format_rate(bytes_per_s: float) -> str:
    """Return a rate in decimal units with three digits: `2.31GB/s`."""
    return format_size(bytes_per_s) + "/s"
