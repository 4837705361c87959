"""Text to token ids and back: the checkpoint's tiktoken ranks, its special tokens, and text that arrives token by token.

Reads `tiktoken.model` and `tokenizer_config.json` itself. Knows nothing of chat messages: a segment of them is one call to
`encode` or `encode_with_specials`.
"""

import base64
import binascii
import codecs
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tiktoken

from manifests.errors import BadInputError

RANKS_FILE_NAME = "tiktoken.model"
CONFIG_FILE_NAME = "tokenizer_config.json"
MAX_RANK_DIGITS = 9

# No letter class holds Han, so that a Han run is always a piece of its own. `&&` is set intersection.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_AFTER_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        _BEFORE_WORD + _UPPER + "*" + _LOWER + "+" + _AFTER_WORD,
        _BEFORE_WORD + _UPPER + "+" + _LOWER + "*" + _AFTER_WORD,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

MAX_ENCODE_CHARS = 400_000
MAX_RUN_CHARS = 25_000
_RUN = re.compile(r"\s+|\S+")


class Tokenizer:
    """The vocabulary of one checkpoint: the BPE ranks, then the special tokens, together ids 0..vocab_size-1.

    `special_names` are in order of id, beginning at the number of ranks.
    """

    def __init__(self, ranks: dict[bytes, int], special_names: list[str]) -> None:
        self.n_ranks = len(ranks)
        self.vocab_size = self.n_ranks + len(special_names)
        self._tokens = sorted(ranks, key=ranks.__getitem__) + [name.encode() for name in special_names]
        self._special_ids = {name: token for token, name in enumerate(special_names, start=self.n_ranks)}
        self._encoding = tiktoken.Encoding(
            "checkpoint",
            pat_str=SPLIT_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=self._special_ids,
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of ordinary text: a special token's name in it is spelled out, and no BOS is added.

        Raises BadInputError if the text holds a surrogate.
        """
        return [token for piece in _cut(checked_text(text)) for token in self._encoding.encode_ordinary(piece)]

    def encode_with_specials(self, text: str) -> list[int]:
        """Return the ids of text in which the names of special tokens stand for those tokens; no BOS is added.

        The text is cut first, so a name that lies across a cut is ordinary text.
        Raises BadInputError if the text holds a surrogate.
        """
        encode = self._encoding.encode
        return [token for piece in _cut(checked_text(text)) for token in encode(piece, allowed_special="all", disallowed_special=())]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids, special tokens by name; bytes that are not UTF-8 become U+FFFD.

        Raises BadInputError if an id is not in the vocabulary.
        """
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, for a special token its name. Raises BadInputError if it is not in the vocabulary."""
        if not 0 <= token < self.vocab_size:
            raise BadInputError(f"token id {token} is not in the vocabulary, expected 0..{self.vocab_size - 1}")
        return self._tokens[token]

    def special_id(self, name: str) -> int:
        """Return the id of the special token of this name. Raises BadInputError if there is none."""
        if name not in self._special_ids:
            raise BadInputError(f"the tokenizer has no special token {name!r}, expected it in added_tokens_decoder of {CONFIG_FILE_NAME}")
        return self._special_ids[name]


class TextStream:
    """Text of tokens that come one at a time. What `push` and `finish` return, joined, is `decode` of all the ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Return the text that is complete with this token; bytes of an unfinished character wait for the next one."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """Return what is still held back, as U+FFFD, and be ready for a new text."""
        return self._decoder.decode(b"", final=True)


def load_tokenizer(directory: Path, *, vocab_size: int) -> Tokenizer:
    """Read the tokenizer of the checkpoint in `directory`.

    Ids 0..n-1 are the n ranks of tiktoken.model, ids n..vocab_size-1 the special tokens, named by added_tokens_decoder of
    tokenizer_config.json and `<|reserved_token_{id}|>` where it is silent.

    Raises BadInputError if a file is missing or is not what it must be; the message names file and line.
    """
    ranks_path = directory / RANKS_FILE_NAME
    ranks = _parse_ranks(ranks_path, _read(ranks_path))
    if len(ranks) > vocab_size:
        raise BadInputError(f"{ranks_path}: holds {len(ranks)} ranks, expected at most the model's vocabulary size, {vocab_size}")
    config_path = directory / CONFIG_FILE_NAME
    added = _parse_added_tokens(config_path, _read(config_path))
    return Tokenizer(ranks, _special_names(config_path, added, special_ids=range(len(ranks), vocab_size)))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read ({error.strerror}), expected a file of the checkpoint's tokenizer") from error


def _parse_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    """Return the rank of each token. Ranks are 0..n-1, each once, and every single byte is a token, so any text can be encoded."""
    ranks: dict[bytes, int] = {}
    line_of_rank: dict[int, int] = {}
    for n_line, line in enumerate(content.splitlines(), start=1):
        if not line:
            continue
        where = f"{path}: line {n_line}"
        token, rank = _parse_rank_line(line, where)
        if rank in line_of_rank:
            raise BadInputError(f"{where}: rank {rank} is already on line {line_of_rank[rank]}, expected each rank once")
        if token in ranks:
            raise BadInputError(f"{where}: token {token!r} is already on line {line_of_rank[ranks[token]]}, expected each token once")
        ranks[token] = rank
        line_of_rank[rank] = n_line
    _check_no_gap(path, line_of_rank)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise BadInputError(f"{path}: {len(missing)} single bytes have no rank, the first is 0x{missing[0]:02x}; expected all 256")
    return ranks


def _parse_rank_line(line: bytes, where: str) -> tuple[bytes, int]:
    fields = line.split()
    if len(fields) != 2:
        raise BadInputError(f"{where}: found {_shown(line)}, expected a base64 token, a space and a rank")
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error as error:
        raise BadInputError(f"{where}: {_shown(fields[0])} is not base64 ({error}), expected a base64 token") from error
    if not fields[1].isdigit() or len(fields[1]) > MAX_RANK_DIGITS:
        raise BadInputError(f"{where}: rank {_shown(fields[1])} is not a number, expected at most {MAX_RANK_DIGITS} digits")
    return token, int(fields[1])


def _shown(line: bytes, *, most: int = 60) -> str:
    return ascii(line[:most].decode("latin-1")) + ("..." if len(line) > most else "")


def _check_no_gap(path: Path, line_of_rank: dict[int, int]) -> None:
    n_ranks = len(line_of_rank)
    beyond = [rank for rank in line_of_rank if rank >= n_ranks]
    if beyond:
        missing = next(rank for rank in range(n_ranks) if rank not in line_of_rank)
        raise BadInputError(
            f"{path}: line {line_of_rank[beyond[0]]}: rank {beyond[0]}, expected 0..{n_ranks - 1} in a file of {n_ranks} tokens; "
            f"rank {missing} is missing"
        )


def _parse_added_tokens(path: Path, content: bytes) -> dict[str, Any]:
    try:
        config = json.loads(content)
    except json.JSONDecodeError as error:
        raise BadInputError(f"{path}: line {error.lineno} column {error.colno}: {error.msg}; expected JSON") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: byte {error.start} is not UTF-8, expected JSON") from error
    added = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    if not isinstance(added, dict):
        raise BadInputError(f"{path}: has no added_tokens_decoder, expected an object that names the special tokens by id")
    return added


def _special_names(path: Path, added: dict[str, Any], *, special_ids: range) -> list[str]:
    """Return the name of each special token, in order of id."""
    names = {str(token): f"<|reserved_token_{token}|>" for token in special_ids}
    for key, entry in added.items():
        where = f'{path}: added_tokens_decoder["{key}"]'
        if key not in names:
            expected = f"{special_ids.start}..{special_ids.stop - 1}" if special_ids else "none, as the ranks fill the vocabulary"
            raise BadInputError(f"{where}: is not the id of a special token, expected {expected}")
        names[key] = _content_of(entry, where)
    id_of_name: dict[str, str] = {}
    for token, name in names.items():
        if name in id_of_name:
            raise BadInputError(f"{path}: ids {id_of_name[name]} and {token} are both called {name!r}, expected different names")
        id_of_name[name] = token
    return list(names.values())


def _content_of(entry: Any, where: str) -> str:
    name = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name:
        raise BadInputError(f"{where}: content is {name!r}, expected the token's name")
    return checked_text(name, where=where)


def checked_text(text: str, *, where: str = "text") -> str:
    """Return the text. Raises BadInputError if it holds a surrogate, which UTF-8 cannot say and tiktoken would silently replace."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInputError(
            f"{where}: character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}, expected text that UTF-8 can hold"
        ) from error
    return text


def _cut(text: str) -> Iterator[str]:
    """Yield the pieces of text that are encoded apart: a run of one kind, white space or not, is cut every MAX_RUN_CHARS.

    A run begins anew at each multiple of MAX_ENCODE_CHARS.
    """
    for start in range(0, len(text), MAX_ENCODE_CHARS):
        block = text[start : start + MAX_ENCODE_CHARS]
        cuts = [cut for run in _RUN.finditer(block) for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS)]
        for begin, end in zip([0, *cuts], [*cuts, len(block)], strict=True):
            yield block[begin:end]
