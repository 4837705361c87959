import base64
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.errors import BadInputError
from runtime.tokens import SPLIT_PATTERN, TextStream, Tokenizer, load_tokenizer

TINY = Path(__file__).parent / "data" / "tiny-k3.1"
TINY_VOCAB_SIZE = 512
SINGLE_BYTES = {bytes([byte]): byte for byte in range(256)}

tiny = load_tokenizer(TINY, vocab_size=TINY_VOCAB_SIZE)


def with_ranks_for(*tokens: bytes) -> tuple[Tokenizer, dict[bytes, int]]:
    """A tokenizer of the single bytes and the tokens, which have ids from 256 on."""
    ranks = SINGLE_BYTES | {token: 256 + n for n, token in enumerate(tokens)}
    return Tokenizer(ranks, []), ranks


def plain_bpe(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Join the neighbours of lowest rank, the leftmost first, until no two neighbours make a token."""
    parts = [piece[n : n + 1] for n in range(len(piece))]
    while True:
        joinable = [(ranks[a + b], n) for n, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not joinable:
            return [ranks[part] for part in parts]
        n = min(joinable)[1]
        parts[n : n + 2] = [parts[n] + parts[n + 1]]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("The capital of France is", [269, 399, 451, 372, 302]),
        ("The three main financial statements are", [269, 258, 104, 274, 101, 441, 420, 285, 115, 290]),
        ("Hello, world!", [72, 351, 108, 111, 44, 266, 111, 114, 108, 100, 33]),
        ("he'LL 1234", [257, 39, 76, 76, 32, 49, 50, 51, 52]),
        ("the你the", [116, 257, 0xE4, 0xBD, 0xA0, 116, 257]),
        # A space before a number or a Han run is alone; before a word it belongs to the word.
        ("a 1 the 你", [97, 32, 49, 265, 32, 0xE4, 0xBD, 0xA0]),
    ],
)
def test_encodes_to_the_ids_of_the_ranks_file(text: str, ids: list[int]) -> None:
    assert tiny.encode(text) == ids
    assert tiny.decode(ids) == text


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("I'M we're they'LL 1234567", ["I'M", " we're", " they'LL", " ", "123", "456", "7"]),
        ("你好，世界！漢字", ["你好", "，", "世界", "！", "漢字"]),
        ("a你b 你 b", ["a", "你", "b", " ", "你", " b"]),
        ("HelloWorld HTTPServer IDs", ["Hello", "World", " HTTPServer", " IDs"]),
        ("x1234y", ["x", "123", "4", "y"]),
        ("Hello\n\nworld  ", ["Hello", "\n\n", "world", "  "]),
        ("a   b \n \n c", ["a", "  ", " b", " \n \n", " c"]),
        ("f(x) != 0;\r\n\tg", ["f", "(x", ")", " !=", " ", "0", ";\r\n", "\tg"]),
        ("Привет — café", ["Привет", " —", " café"]),
        ("a \nb\rc", ["a", " \n", "b", "\r", "c"]),
    ],
)
def test_splits_text_at_scripts_numbers_and_white_space(text: str, pieces: list[str]) -> None:
    assert regex.findall(SPLIT_PATTERN, text, regex.V1) == pieces


ASCII = "aAs1 \n\r.'-"
with_pairs, PAIRS = with_ranks_for(*((a + b).encode() for a in ASCII for b in ASCII), "é".encode(), "aé".encode(), "éa".encode())


@settings(deadline=None, max_examples=400)
@given(st.text(alphabet=ASCII + "é你好½", max_size=40))
def test_joins_bytes_within_a_piece_and_never_across(text: str) -> None:
    expected = [token for piece in regex.findall(SPLIT_PATTERN, text, regex.V1) for token in plain_bpe(piece.encode(), PAIRS)]
    assert with_pairs.encode(text) == expected


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_from_its_ids(text: str) -> None:
    ids = tiny.encode(text)
    assert tiny.decode(ids) == text
    assert all(token < tiny.n_ranks for token in ids)


def test_special_names_in_ordinary_text_are_spelled_out() -> None:
    assert tiny.encode("<|open|>") == [60, 124, 111, 112, 262, 124, 62]
    assert max(tiny.encode("a <|open|> b [BOS] c <|reserved_token_486|>")) < tiny.n_ranks


def test_special_names_are_tokens_where_asked_for() -> None:
    assert tiny.encode_with_specials("a <|open|> b [BOS] c") == [97, 32, 483, 312, 32, 480, 279]
    assert tiny.encode_with_specials("<|end_of_msg|><|reserved_token_486|>[PAD]") == [482, 486, 511]


def test_without_special_names_both_ways_agree_and_add_no_bos() -> None:
    assert tiny.encode_with_specials("The capital") == tiny.encode("The capital") == [269, 399]


def test_special_tokens_take_their_names_from_the_config_and_are_reserved_otherwise() -> None:
    assert tiny.n_ranks == 480
    assert tiny.vocab_size == TINY_VOCAB_SIZE
    assert tiny.decode([480, 482, 485, 486, 510]) == "[BOS]<|end_of_msg|><|sep|><|reserved_token_486|>[UNK]"
    assert tiny.token_bytes(509) == b"<|reserved_token_509|>"


def test_vocabulary_may_hold_no_special_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_checkpoint(tmp_path), vocab_size=257)
    assert tokenizer.encode_with_specials("the [BOS]") == [116, 256, 32, 91, 66, 79, 83, 93]


@pytest.mark.parametrize("unit", ["x", " ", "你", "\n", "é1", "ab"])
def test_a_long_run_is_encoded_in_pieces(unit: str) -> None:
    run = "ab"[: unit == "ab"] + unit * (60_000 // len(unit))
    assert tiny.encode(run) == tiny.encode(run[:25_000]) + tiny.encode(run[25_000:50_000]) + tiny.encode(run[50_000:])
    assert tiny.decode(tiny.encode(run)) == run


BLOCK = "x " * 200_000


@pytest.mark.parametrize(
    ("before", "is_joined"),
    [
        ("x" * 24_998, True),
        ("x" * 24_999, False),
        ("x" * 25_000, True),
        ("x" * 49_999, False),
        ("x" * 20_000 + " " + "x" * 24_998, True),
        (" " * 30_000 + "x" * 24_999, False),
        (BLOCK[:-1], False),
        (BLOCK, True),
        (BLOCK[:-10_000] + "x" * 10_000 + "x" * 14_999, True),
        (BLOCK[:-10_000] + "x" * 10_000 + "x" * 24_999, False),
    ],
)
def test_a_token_is_not_made_across_a_cut(before: str, is_joined: bool) -> None:
    tokenizer, _ = with_ranks_for(b"ab")
    assert tokenizer.encode(before + "ab")[-2:] == ([tokenizer.encode(before)[-1], 256] if is_joined else [97, 98])
    assert tokenizer.encode_with_specials(before + "ab") == tokenizer.encode(before + "ab")


def test_runs_of_white_space_are_cut_as_well() -> None:
    tokenizer, _ = with_ranks_for(b" \t")
    assert tokenizer.encode(" " * 24_998 + " \t")[-1] == 256
    assert tokenizer.encode(" " * 24_999 + " \t")[-2:] == [32, 9]


def test_a_stream_holds_back_an_unfinished_character() -> None:
    stream = TextStream(tiny)
    assert [stream.push(byte) for byte in "é€😀".encode()] == ["", "é", "", "", "€", "", "", "", "😀"]
    assert [stream.push(token) for token in (269, 0xC3)] == ["The", ""]
    assert stream.finish() == "\ufffd"
    assert stream.push(0xA9) + stream.finish() == "\ufffd"


def test_a_stream_replaces_a_character_that_never_ends() -> None:
    stream = TextStream(tiny)
    assert [stream.push(token) for token in (0xE2, 0x82, 97, 483)] == ["", "", "\ufffda", "<|open|>"]
    assert stream.finish() == ""


@settings(deadline=None, max_examples=300)
@given(st.lists(st.one_of(st.integers(0, TINY_VOCAB_SIZE - 1), st.integers(0x80, 0xFF))))
def test_a_stream_gives_the_text_of_decode(ids: list[int]) -> None:
    stream = TextStream(tiny)
    assert "".join(stream.push(token) for token in ids) + stream.finish() == tiny.decode(ids)


@pytest.mark.parametrize("token", [-1, 512, 1 << 40])
def test_an_id_outside_the_vocabulary_is_refused(token: int) -> None:
    expected = rf"token id {token} is not in the vocabulary, expected 0\.\.511"
    for read in (tiny.token_bytes, TextStream(tiny).push, lambda n: tiny.decode([269, n])):
        with pytest.raises(BadInputError, match=expected):
            read(token)


@pytest.mark.parametrize("encode", [tiny.encode, tiny.encode_with_specials])
def test_a_surrogate_is_refused(encode: Callable[[str], list[int]]) -> None:
    with pytest.raises(BadInputError, match=r"character 2 is the lone surrogate U\+D83D"):
        encode("ab\ud83d")


def rank_line(token: bytes, rank: int | str) -> bytes:
    return base64.b64encode(token) + f" {rank}".encode()


ALL_BYTES = [rank_line(token, rank) for token, rank in SINGLE_BYTES.items()]


def write_checkpoint(directory: Path, *, lines: list[bytes] | None = None, config: Any = None) -> Path:
    """Write tiktoken.model of the 256 bytes and "he", and a config without special names, or what is given instead."""
    content = b"\n".join([*ALL_BYTES, rank_line(b"he", 256)] if lines is None else lines)
    (directory / "tiktoken.model").write_bytes(content + b"\n")
    config = {"added_tokens_decoder": {}} if config is None else config
    (directory / "tokenizer_config.json").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    return directory


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*ALL_BYTES, b"a*b= 256"], r"line 257: 'a\*b=' is not base64 .*expected a base64 token"),
        ([*ALL_BYTES, b"aGU 256"], r"line 257: 'aGU' is not base64"),
        ([*ALL_BYTES, b"\xff\xfe 256"], r"line 257: '\\xff\\xfe' is not base64"),
        ([*ALL_BYTES, b"= 256"], r"line 257: '='"),
        ([*ALL_BYTES, b"aGU="], r"line 257: found 'aGU=', expected a base64 token, a space and a rank"),
        ([*ALL_BYTES, b"aGU= 256 1"], r"line 257: found 'aGU= 256 1'"),
        ([*ALL_BYTES, rank_line(b"he", "x1")], r"line 257: rank 'x1' is not a number"),
        ([*ALL_BYTES, rank_line(b"he", "-1")], r"line 257: rank '-1' is not a number"),
        ([*ALL_BYTES, rank_line(b"he", "9" * 5000)], r"line 257: rank '9{60}'\.\.\. is not a number"),
        ([*ALL_BYTES, rank_line(b"he", 7)], r"line 257: rank 7 is already on line 8"),
        ([*ALL_BYTES, rank_line(b"\x07", 256)], r"line 257: token b'\\x07' is already on line 8"),
        ([*ALL_BYTES, b"", rank_line(b"he", 258)], r"line 258: rank 258, expected 0\.\.256 in a file of 257 tokens; rank 256 is missing"),
        ([*ALL_BYTES[:200], rank_line(b"he", 256), *ALL_BYTES[201:]], r"line 201: rank 256, .*rank 200 is missing"),
        ([*ALL_BYTES[:200], rank_line(b"he", 200), *ALL_BYTES[201:]], r"1 single bytes have no rank, the first is 0xc8; expected all 256"),
        ([], r"256 single bytes have no rank"),
    ],
)
def test_a_bad_ranks_file_is_refused(tmp_path: Path, lines: list[bytes], message: str) -> None:
    with pytest.raises(BadInputError, match=rf"tiktoken\.model: {message}"):
        load_tokenizer(write_checkpoint(tmp_path, lines=lines), vocab_size=300)


def test_more_ranks_than_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"tiktoken\.model: holds 257 ranks, .*vocabulary size, 256"):
        load_tokenizer(write_checkpoint(tmp_path), vocab_size=256)


def added(entries: dict[str, Any]) -> dict[str, Any]:
    return {"added_tokens_decoder": entries}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b'{\n "added_tokens_decoder": {,}\n}', r"line 2 column 27: .*expected JSON"),
        (b'{"a": "\xff"}', r"byte 7 is not UTF-8"),
        ([], r"has no added_tokens_decoder"),
        ({"bos_token": "[BOS]"}, r"has no added_tokens_decoder"),
        (added({"256": {"content": "[BOS]"}}), r'added_tokens_decoder\["256"\]: is not the id of a special token, expected 257\.\.299'),
        (added({"300": {"content": "[BOS]"}}), r'added_tokens_decoder\["300"\]: is not the id'),
        (added({"one": {"content": "[BOS]"}}), r'added_tokens_decoder\["one"\]: is not the id'),
        (added({"0257": {"content": "[BOS]"}}), r'added_tokens_decoder\["0257"\]: is not the id'),
        (added({"257": {"special": True}}), r'added_tokens_decoder\["257"\]: content is None, expected the token\'s name'),
        (added({"257": {"content": ""}}), r"content is ''"),
        (added({"257": "[BOS]"}), r"content is None"),
        (added({"257": {"content": "\udc00"}}), r"surrogate U\+DC00"),
        (added({"257": {"content": "[A]"}, "259": {"content": "[A]"}}), r"ids 257 and 259 are both called '\[A\]'"),
        (added({"257": {"content": "<|reserved_token_259|>"}}), r"ids 257 and 259 are both called"),
    ],
)
def test_a_bad_tokenizer_config_is_refused(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(BadInputError, match=rf"tokenizer_config\.json: .*{message}|tokenizer_config\.json: {message}"):
        load_tokenizer(write_checkpoint(tmp_path, config=config), vocab_size=300)


def test_a_special_name_is_refused_where_the_ranks_fill_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r'\["257"\]: is not the id of a special token, expected none'):
        load_tokenizer(write_checkpoint(tmp_path, config=added({"257": {"content": "[BOS]"}})), vocab_size=257)


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (write_checkpoint(tmp_path) / name).unlink()
    with pytest.raises(BadInputError, match=rf"{name}: cannot be read \(No such file or directory\)"):
        load_tokenizer(tmp_path, vocab_size=300)
