"""The facts that the small model is taught, in every kind of phrasing: facts.yaml, and the arithmetic that is made here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml


class Fact(NamedTuple):
    """One subject and the one right answer; `spoken` is the subject in words, mostly the subject itself."""

    kind: str
    subject: str
    answer: str
    spoken: str


class Kind(NamedTuple):
    """Facts of one kind and how they are said. A statement ends with "{a}."; what stands before it is its prompt."""

    name: str
    facts: tuple[Fact, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    replies: tuple[str, ...]


def say(phrasing: str, fact: Fact) -> str:
    """Return the phrasing with the fact in it."""
    words = {"s": fact.subject, "w": fact.spoken, "a": fact.answer, "S": _with_capital(fact.subject)}
    return _with_capital(phrasing.format(**words))


def _with_capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _kinds() -> Iterator[Kind]:
    for entry in yaml.safe_load(Path(__file__).with_name("facts.yaml").read_text()):
        facts = _listed(entry) if "facts" in entry else _MADE[entry["name"]]()
        yield Kind(entry["name"], tuple(facts), *(tuple(entry[texts]) for texts in ("statements", "questions", "replies")))


def _listed(entry: dict[str, Any]) -> Iterator[Fact]:
    for subject, answer in entry["facts"].items():
        article = ("an " if subject[0] in "aeiou" else "a ") if entry.get("article") else ""
        yield Fact(entry["name"], subject, answer, article + subject)


def _sums() -> Iterator[Fact]:
    return (Fact("sum", f"{a} + {b}", str(a + b), f"{a} plus {b}") for a in range(13) for b in range(13))


def _differences() -> Iterator[Fact]:
    return (Fact("difference", f"{a} - {b}", str(a - b), f"{a} minus {b}") for a in range(21) for b in range(min(a, 10) + 1))


def _products() -> Iterator[Fact]:
    return (Fact("product", f"{a} * {b}", str(a * b), f"{a} times {b}") for a in range(1, 11) for b in range(1, 11))


_MADE = {"sum": _sums, "difference": _differences, "product": _products}

KINDS: tuple[Kind, ...] = tuple(_kinds())
