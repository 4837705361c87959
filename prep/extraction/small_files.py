"""Which files of a checkpoint go along with the model beside its weights."""

import base64
import binascii
from pathlib import Path

from layout.checkpoint import INDEX_NAME, read_json
from manifests.errors import BadInputError

# What belongs to the model and is neither weights nor program: configuration, vocabulary, templates, licence.
CARRIED_SUFFIXES = (".json", ".model", ".jinja", ".txt", ".md")


def small_files(source: Path) -> list[Path]:
    """Return the checkpoint's configuration, vocabulary, templates and licence.

    Raises BadInputError if no text could be encoded with them.
    """
    for name in ("tiktoken.model", "tokenizer_config.json"):
        if not (source / name).is_file():
            raise BadInputError(f"{source / name}: missing; without it no text can be encoded")
    read_json(source / "tokenizer_config.json")
    _check_vocabulary(source / "tiktoken.model")
    wanted = (p for p in sorted(source.iterdir()) if p.suffix in CARRIED_SUFFIXES or p.name.startswith("LICENSE"))
    return [p for p in wanted if p.is_file() and p.name != INDEX_NAME and not p.name.startswith(".")]


def _check_vocabulary(path: Path) -> None:
    """Raise BadInputError unless every line is a token in base64, a blank and its rank: an error page has the right name, too."""
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        token, _, rank = line.partition(b" ")
        try:
            base64.b64decode(token, validate=True)
            is_good = not line or rank.isdigit()
        except binascii.Error:
            is_good = False
        if not is_good:
            raise BadInputError(f"{path}: line {number} is {line[:40]!r}, expected a token in base64, a blank and its rank; fetch the file again")
