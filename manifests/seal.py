"""The last line of a manifest: a hash of all the lines before it, so that a byte that changed by itself is noticed.

A manifest without the line is one that was written or edited by hand; it is read, and only verification asks for the line.
"""

import hashlib

from manifests.errors import BadInputError

SEAL = "# sha256 of all lines above: "


def sealed(text: str) -> str:
    """Return the text with its seal."""
    return f"{text}{SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n"


def has_seal(text: str) -> bool:
    return text.rstrip("\n").rpartition("\n")[2].startswith(SEAL)


def check_seal(text: str) -> None:
    """Raise BadInputError if the text has a seal that is not its own."""
    if has_seal(text) and sealed(text[: text.rindex(SEAL)]) != text:
        raise BadInputError(
            "the hash in its last line is not that of the lines above: a byte has changed. If you edited the file on purpose, "
            "remove that line, and let kprep place with the same drives write it anew; else return to a copy in manifest.history"
        )
