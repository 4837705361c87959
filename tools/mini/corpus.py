"""The text that the small model learns from: facts, stories, lists, chats and tool calls, all made here from a seed.

A document is a list of segments, as in the chat format: text that is tokenised alone, and markers. What is held out is decided by a hash of
what a document says (a fact and its phrasing, a story's hero and thing, a call's arguments), so training never meets it, whatever the seed.
"""

import json
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import blake2b
from random import Random
from typing import Any, Literal, NamedTuple

from runtime.chat.format import Segment, chat_segments, parse_chat
from tools.mini.facts import KINDS, Fact, Kind, say
from tools.mini.stories import NAMES, OBJECTS, make_story

END_OF_TEXT = "[EOS]"
# One phrasing in so many of each fact is held out, and so are stories, lists and calls.
HELD_OUT_ONE_IN = 8

Split = Literal["train", "held-out"]
Topic = Literal["fact", "story", "list", "copy", "tool"]


class Document(NamedTuple):
    """One text, its topic and its segments; it ends with a marker."""

    topic: Topic
    segments: list[Segment]


class Asked(NamedTuple):
    """A fact in one phrasing: `text` is a question, or the part of a statement that stands before the answer."""

    kind: Kind
    fact: Fact
    text: str
    is_question: bool


class ToolCase(NamedTuple):
    """A question, the one right call for it, what the tool gives back, and the reply to that; `facts` must stand in the reply."""

    tools: list[dict[str, Any]]
    question: str
    name: str
    arguments: dict[str, Any]
    result: str
    reply: str
    facts: tuple[str, ...]


def is_held_out(*key: object) -> bool:
    """Return whether what the key says is kept from training."""
    digest = blake2b("|".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def asked_phrasings(split: Split) -> list[Asked]:
    """Return every fact in every phrasing of one side of the split, in a fixed order."""
    return [
        Asked(kind, fact, say(text if is_question else text.removesuffix(" {a}."), fact), is_question)
        for kind in KINDS
        for fact in kind.facts
        for texts, is_question in ((kind.statements, False), (kind.questions, True))
        for text in texts
        if is_held_out(kind.name, fact.subject, text) == (split == "held-out")
    ]


@cache
def _asked_by_kind(split: Split) -> dict[str, list[Asked]]:
    found = asked_phrasings(split)
    return {kind.name: [asked for asked in found if asked.kind is kind] for kind in KINDS}


def documents(seed: int | str, split: Split) -> Iterator[Document]:
    """Yield documents without end; the same for the same seed."""
    return _Writer(Random(str(seed)), split).documents()


def _text(text: str) -> list[Segment]:
    return [Segment(text, False), Segment(END_OF_TEXT, True)]


def _chat(
    messages: list[dict[str, Any]], *, is_thinking: bool, tools: list[dict[str, Any]] | None = None, effort: str | None = None
) -> list[Segment]:
    request = {"messages": messages, "thinking": is_thinking, "add_generation_prompt": False}
    if tools:
        request["tools"] = tools
    if effort:
        request["thinking_effort"] = effort
    return chat_segments(parse_chat(request))


def _said(role: str, content: str, reasoning: str = "") -> dict[str, Any]:
    message = {"role": role, "content": content}
    return message | {"reasoning_content": reasoning} if reasoning else message


# A fact of a small kind is met more often than one of a large kind, but not many times as often.
_KIND_WEIGHTS = [len(kind.facts) ** 0.75 for kind in KINDS]
_BEFORE_QUESTION = ("", "", "", "", "Hello! ", "Hi. ", "A question: ", "Please help me. ", "Tell me: ", "Quick question. ")
_AFTER_QUESTION = ("", "", "", "", "", " Thank you.", " Thanks!")
_SYSTEM = ("You are a helpful assistant.", "Answer in one short sentence.", "You are a friendly teacher.", "Be brief and correct.")
_STORY_REQUESTS = (
    "Tell me a story about {name} and a {thing}.", "Write a short story about {name} and a {thing}.",
    "Please tell a story with {name}, a {thing} and a {animal}.", "I would like to hear a story about {name}.",
    "Can you tell me a story about a {animal} and a {thing}?", "Tell me a story.",
)  # fmt: skip
_TOPICS: tuple[Topic, ...] = ("fact", "story", "list", "copy", "tool")
_TOPIC_WEIGHTS = (58, 9, 8, 12, 13)


class _Writer:
    """Draws documents of one side of the split."""

    def __init__(self, rng: Random, split: Split) -> None:
        self.rng, self.split = rng, split
        self._asked = _asked_by_kind(split)

    def documents(self) -> Iterator[Document]:
        makers: dict[Topic, Callable[[], list[Segment]]] = {
            "fact": self._facts, "story": self._story, "list": self._list, "copy": self._copy, "tool": self._tool,
        }  # fmt: skip
        while True:
            (topic,) = self.rng.choices(_TOPICS, _TOPIC_WEIGHTS)
            yield Document(topic, makers[topic]())

    def _is_mine(self, *key: object) -> bool:
        return is_held_out(*key) == (self.split == "held-out")

    def _draw(self, make: Callable[[], Any], key: Callable[[Any], tuple[object, ...]]) -> Any:
        while not self._is_mine(*key(made := make())):
            pass
        return made

    def _asked_one(self) -> Asked:
        (kind,) = self.rng.choices(KINDS, _KIND_WEIGHTS)
        return self.rng.choice(self._asked[kind.name])

    def _facts(self) -> list[Segment]:
        if self.rng.random() < 0.4:
            return _text(self.rng.choice((" ", "\n")).join(self._statement() for _ in range(self.rng.choice((1, 1, 2, 3, 4)))))
        return self._chat_about_facts(n_turns=self.rng.choice((1, 1, 1, 2, 3)))

    def _statement(self) -> str:
        asked = self._asked_one()
        if asked.is_question:
            return f"Q: {asked.text}\nA: {say(self.rng.choice(asked.kind.replies), asked.fact)}"
        return f"{asked.text} {asked.fact.answer}."

    def _chat_about_facts(self, n_turns: int, tools: list[dict[str, Any]] | None = None) -> list[Segment]:
        messages = [_said("system", self.rng.choice(_SYSTEM))] if self.rng.random() < 0.2 else []
        is_thinking = self.rng.random() < 0.5
        for _ in range(n_turns):
            messages += self._question_and_reply(is_thinking=is_thinking)
        return _chat(messages, is_thinking=is_thinking, tools=tools, effort=self._effort())

    def _question_and_reply(self, *, is_thinking: bool) -> list[dict[str, Any]]:
        asked = self._asked_one()
        while not asked.is_question:
            asked = self._asked_one()
        question = self.rng.choice(_BEFORE_QUESTION) + asked.text + self.rng.choice(_AFTER_QUESTION)
        reasoning = f"The question is about {asked.kind.name}, {asked.fact.spoken}. The answer is {asked.fact.answer}." if is_thinking else ""
        return [_said("user", question), _said("assistant", say(self.rng.choice(asked.kind.replies), asked.fact), reasoning)]

    def _effort(self) -> str | None:
        return self.rng.choice(("low", "medium", "high", "max")) if self.rng.random() < 0.1 else None

    def _story(self) -> list[Segment]:
        name, thing = self._draw(lambda: (self.rng.choice(NAMES), self.rng.choice(OBJECTS)), lambda pair: ("story", *pair))
        story = make_story(self.rng, name, thing)
        if self.rng.random() < 0.5:
            return _text(story.text)
        request = self.rng.choice(_STORY_REQUESTS).format(name=story.name, thing=story.thing, animal=story.animal)
        return self._one_turn(request, story.text, f"A story about {story.name}, with a {story.thing} and a {story.animal}.")

    def _one_turn(self, request: str, reply: str, reasoning: str) -> list[Segment]:
        is_thinking = self.rng.random() < 0.4
        return _chat([_said("user", request), _said("assistant", reply, reasoning if is_thinking else "")], is_thinking=is_thinking)

    def _list(self) -> list[Segment]:
        title, items = self._draw(self._titled, lambda made: ("list", *made[1]))
        text = "\n".join(f"{n}. {item}" for n, item in enumerate(items, 1))
        if self.rng.random() < 0.4:
            return _text(f"{title}:\n{text}")
        request = self.rng.choice(("List {}.", "Please list {}.", "Give me a list of {}.", "Can you list {}?")).format(title[0].lower() + title[1:])
        return self._one_turn(request, text, f"The list has {len(items)} items.")

    def _titled(self) -> tuple[str, list[str]]:
        start, n = self.rng.randint(0, 60), self.rng.randint(3, 8)
        choice = self.rng.randrange(6)
        if choice == 0:
            return f"The numbers from {start} to {start + n - 1}", [str(start + i) for i in range(n)]
        if choice == 1:
            return f"The numbers from {start + n - 1} down to {start}", [str(start + i) for i in reversed(range(n))]
        if choice == 2:
            step = self.rng.randint(2, 10)
            return f"The first {n} multiples of {step}", [str(step * i) for i in range(1, n + 1)]
        if choice == 3:
            words = self.rng.sample(_WORDS, n)
            return f"These words: {', '.join(words)}", words
        if choice == 4:
            words = self.rng.sample(_WORDS, n)
            return f"These words in order of the alphabet: {', '.join(words)}", sorted(words)
        name, whole = self.rng.choice(_SEQUENCES)
        first, last = sorted(self.rng.sample(range(len(whole)), 2))
        return f"The {name} from {whole[first]} to {whole[last]}", list(whole[first : last + 1])

    def _copy(self) -> list[Segment]:
        # Long repeats, where nothing but the text before says what follows, are what copying is learned from.
        is_long = self.rng.random() < 0.5
        words = self._draw(lambda: self.rng.sample(_WORDS, self.rng.randint(2, 16 if is_long else 6)), lambda made: ("copy", *made))
        text = " ".join(words)
        if is_long:
            return _text("\n".join([text] * self.rng.randint(2, 4)))
        if self.rng.random() < 0.4:
            name, person = self.rng.choice(_WORDS), self.rng.choice(NAMES)
            messages = [_said("user", f"My name is {person} and I like the word {name}."), _said("assistant", f"Hello {person}!"),
                        *self._recall(person, name)]  # fmt: skip
            return _chat(messages, is_thinking=False)
        request = self.rng.choice(("Repeat after me: {}", "Say this again: {}", "Please repeat: {}")).format(text)
        return self._one_turn(request, text, f"I repeat: {text}")

    def _recall(self, person: str, word: str) -> list[dict[str, Any]]:
        if self.rng.random() < 0.5:
            return [_said("user", "What is my name?"), _said("assistant", f"Your name is {person}.")]
        return [_said("user", "Which word do I like?"), _said("assistant", f"You like the word {word}.")]

    def _tool(self) -> list[Segment]:
        case = self.tool_case()
        if self.rng.random() < 0.1:
            return self._chat_about_facts(1, tools=case.tools)
        is_thinking = self.rng.random() < 0.5
        call = {"id": "1", "type": "function", "function": {"name": case.name, "arguments": json.dumps(case.arguments)}}
        messages = [
            _said("user", case.question),
            _said("assistant", "", f"I need {case.name} for this." if is_thinking else "") | {"tool_calls": [call]},
            _said("tool", case.result) | {"tool_call_id": "1"},
            _said("assistant", case.reply, "The tool has answered." if is_thinking else ""),
        ]
        return _chat(messages, is_thinking=is_thinking, tools=case.tools, effort=self._effort())

    def tool_case(self) -> ToolCase:
        name = self.rng.choice(list(_TOOLS))
        arguments = self._draw(lambda: _ARGUMENTS[name](self.rng), lambda made: (name, *made.values()))
        question, result, reply, facts = _ANSWERS[name](self.rng, arguments)
        offered = [name]
        if self.rng.random() < 0.5:
            offered.append(self.rng.choice([other for other in _TOOLS if other != name]))
            self.rng.shuffle(offered)
        return ToolCase([_TOOLS[each] for each in offered], question, name, arguments, result, reply, facts)


def tool_cases(seed: int | str, split: Split) -> Iterator[ToolCase]:
    """Yield cases of tool use without end; the same for the same seed."""
    writer = _Writer(Random(str(seed)), split)
    while True:
        yield writer.tool_case()


def _function(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": sorted(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_TOOLS = {
    "get_weather": _function("get_weather", "The weather in a city.", {"city": {"type": "string"}}),
    "calculator": _function("calculator", "Works out an expression.", {"expression": {"type": "string"}}),
    "get_time": _function("get_time", "The time in a city.", {"city": {"type": "string"}}),
    "find_expert": _function("find_expert", "Says on which drive an expert lies.", {"expert": {"type": "number"}, "layer": {"type": "number"}}),
}
_CITIES = sorted({fact.answer for kind in KINDS if kind.name == "capital" for fact in kind.facts})
_SKIES = ("sunny", "cloudy", "rainy", "snowy", "foggy", "windy")


def _expression(rng: Random) -> dict[str, Any]:
    return {"expression": f"{rng.randint(11, 99)} {rng.choice('+-*')} {rng.randint(11, 99)}"}


_ARGUMENTS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "get_weather": lambda rng: {"city": rng.choice(_CITIES)},
    "calculator": _expression,
    "get_time": lambda rng: {"city": rng.choice(_CITIES)},
    "find_expert": lambda rng: {"layer": rng.randint(1, 92), "expert": rng.randint(0, 895)},
}


def _weather(rng: Random, arguments: dict[str, Any]) -> tuple[str, str, str, tuple[str, ...]]:
    city, sky, degrees = arguments["city"], rng.choice(_SKIES), rng.randint(1, 39)
    question = rng.choice(
        ("What is the weather in {}?", "How is the weather in {} today?", "Tell me the weather in {}.", "Is it raining in {}?")
    ).format(city)
    return question, json.dumps({"sky": sky, "degrees": degrees}), f"It is {sky} in {city}, with {degrees} degrees.", (sky, str(degrees))


def _calculation(rng: Random, arguments: dict[str, Any]) -> tuple[str, str, str, tuple[str, ...]]:
    expression = arguments["expression"]
    a, sign, b = expression.split()
    value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
    question = rng.choice(("What is {}?", "Calculate {}.", "Please work out {}.", "How much is {}?")).format(expression)
    return question, str(value), f"{expression} = {value}.", (str(value),)


def _time(rng: Random, arguments: dict[str, Any]) -> tuple[str, str, str, tuple[str, ...]]:
    city, time = arguments["city"], f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    question = rng.choice(("What time is it in {}?", "Tell me the time in {}.", "How late is it in {}?", "What is the time in {}?")).format(city)
    return question, time, f"In {city} it is {time}.", (time,)


def _place(rng: Random, arguments: dict[str, Any]) -> tuple[str, str, str, tuple[str, ...]]:
    where, tier, slot = "expert {expert} of layer {layer}".format(**arguments), rng.choice("ABCD"), rng.randint(1, 99)
    question = rng.choice(("Where is {}?", "On which drive is {}?", "Find {}.", "Which drive holds {}?")).format(where)
    return question, json.dumps({"tier": tier, "slot": slot}), f"Expert {arguments['expert']} is on tier {tier}, slot {slot}.", (tier, str(slot))


_ANSWERS: dict[str, Callable[[Random, dict[str, Any]], tuple[str, str, str, tuple[str, ...]]]] = {
    "get_weather": _weather, "calculator": _calculation, "get_time": _time, "find_expert": _place,
}  # fmt: skip
_SEQUENCES = [
    (f"{name}s", tuple(fact.subject for fact in kind.facts)) for kind in KINDS for name in ("day", "month") if kind.name == f"{name} after"
] + [
    ("planets", tuple(fact.answer for kind in KINDS if kind.name == "planet" for fact in kind.facts)),
    ("letters", tuple(fact.subject for kind in KINDS if kind.name == "letter after" for fact in kind.facts)),
]
_WORDS = sorted(
    {fact.subject for kind in KINDS if kind.name in ("opposite", "young", "sound", "symbol", "past", "plural") for fact in kind.facts}
    | set(OBJECTS)
    | set(NAMES)
)
