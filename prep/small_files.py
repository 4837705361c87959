"""Which files of a checkpoint go along with the model beside its weights."""

from pathlib import Path

from layout.checkpoint import INDEX_NAME
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
    wanted = (p for p in sorted(source.iterdir()) if p.suffix in CARRIED_SUFFIXES or p.name.startswith("LICENSE"))
    return [p for p in wanted if p.is_file() and p.name != INDEX_NAME and not p.name.startswith(".")]
