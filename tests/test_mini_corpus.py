"""The small model's corpus: the same from the same seed, nothing of the held-out side in training, ranks that any text can be said in."""

import json
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from runtime.chat.format import encode_segments
from runtime.tokens import RANKS_FILE_NAME, Tokenizer, load_tokenizer
from tools.mini.batches import Form, batches, held_out_rows, make_batch, packed_rows
from tools.mini.bpe import learn_ranks, ranks_file
from tools.mini.corpus import Document, Segment, asked_phrasings, documents, tool_cases
from tools.mini.facts import KINDS, Fact, say


def whole(document: Document) -> str:
    return "".join(segment.text for segment in document.segments)


def test_a_seed_makes_the_same_documents_again_and_another_seed_others() -> None:
    first, again, other = ([*islice(documents(seed, "train"), 50)] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_every_phrasing_of_a_fact_is_on_one_side_of_the_split_and_most_are_for_training() -> None:
    train, held_out = (set(asked_phrasings(split)) for split in ("train", "held-out"))
    assert not train & held_out
    assert len(train | held_out) == sum(len(kind.facts) * (len(kind.statements) + len(kind.questions)) for kind in KINDS)
    assert 6 < len(train) / len(held_out) < 8


def test_training_never_meets_a_held_out_phrasing_but_each_of_its_facts() -> None:
    texts = [whole(document) for document in islice(documents(3, "train"), 4000)]
    lines = {line.removesuffix("[EOS]") for text in texts for line in text.splitlines()}
    questions = {found for text in texts for found in re.findall(r'role="user"<\|sep\|>(.*?)<\|close\|>', text)}
    for asked in asked_phrasings("held-out"):
        assert asked.text not in questions
        assert f"{asked.text} {asked.fact.answer}." not in lines and f"Q: {asked.text}" not in lines
    trained = {(asked.kind.name, asked.fact.subject) for asked in asked_phrasings("train")}
    assert {(asked.kind.name, asked.fact.subject) for asked in asked_phrasings("held-out")} <= trained


def test_every_topic_is_met_on_both_sides_and_stories_of_one_side_are_not_on_the_other() -> None:
    sides = [[*islice(documents(4, split), 1500)] for split in ("train", "held-out")]
    assert all({document.topic for document in side} == {"fact", "story", "list", "copy", "tool"} for side in sides)
    train, held_out = ({whole(document) for document in side if document.topic == "story"} for side in sides)
    assert not train & held_out


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_kind_has_one_answer_for_each_subject_and_its_statements_end_with_it(kind: object) -> None:
    assert len({fact.subject for fact in kind.facts}) == len(kind.facts)
    assert all(text.endswith(" {a}.") for text in kind.statements)
    assert all("{a}" not in text and ("{s}" in text or "{w}" in text) for text in kind.questions)
    assert all("{a}" in text for text in kind.replies)


def test_a_phrasing_names_the_fact() -> None:
    fact = Fact("young", "owl", "owlet", "an owl")
    assert say("{S}: the young of {w}, of any {s}, is {a}.", fact) == "Owl: the young of an owl, of any owl, is owlet."


def test_a_tool_case_can_be_answered_from_what_is_offered() -> None:
    for case in islice(tool_cases(5, "held-out"), 100):
        offered = [tool["function"] for tool in case.tools]
        (called,) = [function for function in offered if function["name"] == case.name]
        assert called["parameters"]["properties"].keys() == case.arguments.keys()
        assert all(str(value) in case.question for value in case.arguments.values())
        values = json.loads(case.result).values() if case.result.startswith("{") else [case.result]
        assert sorted(map(str, values)) == sorted(case.facts) and all(fact in case.reply for fact in case.facts)


def test_a_calculation_is_right() -> None:
    cases = [case for case in islice(tool_cases(6, "train"), 200) if case.name == "calculator"]
    assert cases and all(int(case.result) == eval(case.arguments["expression"]) for case in cases)


def test_the_most_frequent_pair_becomes_the_first_rank_after_the_bytes() -> None:
    assert [*learn_ranks(["hug"] * 10 + ["pug"] * 5 + ["hugs"] * 5, 258)][256:] == [b"ug", b"hug"]


def test_ranks_are_refused_where_the_texts_have_too_few_pairs() -> None:
    with pytest.raises(ValueError, match="2 merges, expected 3"):
        learn_ranks(["abc"], 259)


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 480 ranks and 32 special tokens."""
    directory = tmp_path_factory.mktemp("tokenizer")
    texts = [segment.text for document in islice(documents(7, "train"), 500) for segment in document.segments if not segment.is_marker]
    names = {480: "[BOS]", 481: "[EOS]", 482: "<|end_of_msg|>", 483: "<|open|>", 484: "<|close|>", 485: "<|sep|>"}
    (directory / RANKS_FILE_NAME).write_bytes(ranks_file(learn_ranks(texts, 480)))
    added = {str(token): {"content": name} for token, name in names.items()}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return directory


@pytest.fixture
def tokenizer(tokenizer_directory: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_directory, vocab_size=512)


def test_any_text_comes_back_from_its_ids(tokenizer: Tokenizer) -> None:
    texts = ["The capital of France is Paris.", "naïve 漢字 \N{SNOWMAN}\r\n\t x", "3 + 4 = 7", ""]
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts)


def test_every_learned_token_is_what_its_own_text_becomes(tokenizer: Tokenizer) -> None:
    tokens = [tokenizer.token_bytes(number) for number in range(480)]
    assert [tokenizer.encode(token.decode()) for token in tokens[256:]] == [[number] for number in range(256, 480)]


def form(directory: Path, n_rows: int, n_tokens: int) -> Form:
    return Form(directory, 512, n_rows, n_tokens, "a")


def test_rows_hold_whole_documents_and_nothing_else(tokenizer_directory: Path, tokenizer: Tokenizer) -> None:
    found = [document for document in islice(documents("rows", "train"), 60)]
    rows = packed_rows(iter(found), form(tokenizer_directory, 3, 511))
    assert rows.shape == (3, 512)
    known = [tokenizer.decode(encode_segments(document.segments, tokenizer)) for document in found]
    for row in rows:
        text = tokenizer.decode(row[row >= 0].tolist())
        while text:
            (begins,) = {each for each in known if text.startswith(each)}
            text = text.removeprefix(begins)


def test_rows_are_nearly_full(tokenizer_directory: Path) -> None:
    assert (make_batch(form(tokenizer_directory, 8, 600), 0) >= 0).mean() > 0.95


def test_a_batch_follows_from_seed_and_number_whoever_makes_it(tokenizer_directory: Path) -> None:
    asked = form(tokenizer_directory, 2, 400)
    alone, beside = ([*islice(batches(asked, n), 2)] for n in (0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(alone, beside, strict=True))
    assert not np.array_equal(alone[0], alone[1])


def test_rows_that_no_document_fits_are_refused(tokenizer_directory: Path) -> None:
    with pytest.raises(ValueError, match="longer than 9 tokens"):
        held_out_rows(form(tokenizer_directory, 1, 8), "tool")


def test_a_row_without_room_for_another_document_ends_with_minus_one(tokenizer_directory: Path, tokenizer: Tokenizer) -> None:
    document = Document("copy", [Segment("x y z", False), Segment("[EOS]", True)])
    size = len(encode_segments(document.segments, tokenizer))
    (row,) = packed_rows(iter([document] * 100), form(tokenizer_directory, 1, 3 * size + 1))
    assert (row[: 3 * size] >= 0).all() and row[3 * size :].tolist() == [-1, -1]
