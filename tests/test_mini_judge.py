"""What counts as a right answer of the small model."""

from collections import Counter
from itertools import islice

import pytest

from tools.mini.corpus import is_held_out, tool_cases
from tools.mini.facts import KINDS, say
from tools.mini.judge import chosen_facts, is_right_ending, is_right_reply, told_arguments, uses_result


def test_what_the_corpus_replies_is_right_and_what_it_replies_to_another_answer_is_not() -> None:
    for kind in KINDS:
        for text in kind.replies:
            for fact, other in zip(kind.facts, kind.facts[1:] + kind.facts[:1], strict=True):
                said = say(text, fact)
                assert is_right_reply(said, fact.answer), said
                assert fact.answer == other.answer or not is_right_reply(said, other.answer), (said, other.answer)


@pytest.mark.parametrize(
    ("said", "answer", "is_right"),
    [
        ("It is 12.", "12", True),
        ("It is 112.", "12", False),
        ("12 - 7 = -5.", "5", False),
        ("It is Paris", "Paris", False),
        ("Paris is in France.", "Paris", False),
        ("The plural of fish is fishes.", "fish", False),
        ("May has 31 days.", "31", True),
        ("", "12", False),
    ],
)
def test_a_reply_is_right_if_it_ends_with_the_answer(said: str, answer: str, is_right: bool) -> None:
    assert is_right_reply(said, answer) == is_right


@pytest.mark.parametrize(
    ("said", "is_right"), [(" 12.", True), (" 12.[EOS]", True), (" 120.", False), ("12.", False), (" 12", False), (" not 12.", False)]
)
def test_a_statement_is_right_if_answer_and_full_stop_come_first(said: str, is_right: bool) -> None:
    assert is_right_ending(said, "12") == is_right


def test_a_reply_must_tell_each_fact_of_a_result_as_a_word() -> None:
    for case in islice(tool_cases(1, "held-out"), 100):
        assert uses_result(case.reply, case.facts)
    assert not uses_result("It is sunny in Rome, with 118 degrees.", ["sunny", "18"])
    assert not uses_result("In Rome it is 11:30.", ["30"])
    assert not uses_result("It is sunny in Rome.", ["sunny", "18"])


def test_the_questions_are_held_out_and_of_all_kinds_alike() -> None:
    found = chosen_facts(50, seed=1)
    assert len(set(found)) == 50 and found == chosen_facts(50, seed=1)
    counts = Counter(asked.kind.name for asked in found)
    assert len(counts) == len(KINDS) and max(counts.values()) - min(counts.values()) <= 1
    for asked in found:
        texts = [*asked.kind.questions, *asked.kind.statements]
        (text,) = {text for text in texts if say(text.removesuffix(" {a}."), asked.fact) == asked.text}
        assert is_held_out(asked.kind.name, asked.fact.subject, text)


def test_a_reply_must_name_what_was_asked_about_where_a_proper_one_does() -> None:
    cases = {case.name: case for case in islice(tool_cases(1, "held-out"), 100)}
    for name, asked in {"get_weather": ["city"], "get_time": ["city"], "calculator": ["expression"], "find_expert": ["expert"]}.items():
        case = cases[name]
        assert set(told_arguments(case)) >= {str(case.arguments[each]) for each in asked}
        assert uses_result(case.reply, told_arguments(case))
        assert not uses_result(case.reply.replace(str(case.arguments[asked[0]]), "Nowhere"), told_arguments(case))
