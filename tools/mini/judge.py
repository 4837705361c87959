"""Asks a prepared small model what it should know, and says how many answers are right; all of it greedy, on what was held out.

    python -m tools.mini.judge MANIFEST [--checkpoint DIR [--weights DIR]] [--json FILE] [--trace-out FILE]

Facts in phrasings that training never paired with them, tool calls whose results a reply must use, some stories to read. With the checkpoint,
and with the float32 weights of the training run, held-out loss and the distance of the outputs: what MXFP4 and Q8_0 cost. The trace has the
experts of every token of what was asked and answered, text after text, for `tools.mini.routing`.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from layout.checkpoint import open_checkpoint
from runtime.bench.comparison import compare_logits
from runtime.bench.routing import write_trace
from runtime.chat.format import encode_chat, parse_chat
from runtime.chat.reply import Reply, ReplyParser
from runtime.engine import Engine, Options, open_checkpoint_model, open_model, score_with
from runtime.heat import RoutingLog
from runtime.kernels.rows import Arithmetic
from runtime.sampler import Sampler
from runtime.speculate import Drafting
from runtime.tokens import Tokenizer, load_tokenizer
from tools.mini.batches import Form, held_out_rows
from tools.mini.corpus import Asked, ToolCase, Topic, asked_phrasings, tool_cases
from tools.mini.facts import KINDS
from tools.mini.routing import LENGTHS
from tools.mini.stories import NAMES
from tools.mini.weights import load_parameters, model_of

_N_FACT_TOKENS, _N_CALL_TOKENS, _N_STORY_TOKENS = 80, 120, 240
_N_TEXT_TOKENS = 384


class Answered(NamedTuple):
    """A question, what was expected, what the model said, and whether that is right."""

    question: str
    expected: str
    said: str
    is_right: bool


class Heard(NamedTuple):
    """A prompt, the most tokens that the model could add, and those that it added."""

    ids: list[int]
    n_tokens: int
    said: list[int]

    @property
    def n_run(self) -> int:
        """Tokens that the model has run: the last one was chosen and not run."""
        return len(self.ids) + len(self.said) - 1


class Listener:
    """A model and its tokenizer, asked one thing at a time, and all that was heard."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.heard: list[Heard] = []

    def continued(self, ids: list[int], n_tokens: int, *, drafting: Drafting | None = None) -> list[int]:
        """Return the tokens that the model adds."""
        sampler = Sampler(0.0, 1.0, None)
        with closing(self.engine.generate(ids, n_tokens=n_tokens, sampler=sampler, drafting=drafting)) as steps:
            said = [step.token for step in steps]
        self.heard.append(Heard(ids, n_tokens, said))
        return said

    def text(self, prompt: str, n_tokens: int) -> str:
        """Return the text that the model adds to a text."""
        return self.tokenizer.decode(self.continued(self.tokenizer.encode(prompt), n_tokens))

    def reply(self, request: dict[str, Any], n_tokens: int) -> Reply:
        """Return the model's reply in a chat."""
        chat = parse_chat(request)
        parser = ReplyParser(self.tokenizer, start=chat.reply_start)
        parser.push(self.continued(encode_chat(chat, self.tokenizer), n_tokens))
        parser.finish()
        return parser.reply


def chosen_facts(n: int, seed: int) -> list[Asked]:
    """Return held-out phrasings, one of each kind in turn."""
    rng, by_kind = Random(seed), {kind.name: list[Asked]() for kind in KINDS}
    for asked in asked_phrasings("held-out"):
        by_kind[asked.kind.name].append(asked)
    for each in by_kind.values():
        rng.shuffle(each)
    waiting = [each for each in by_kind.values() if each]
    found: list[Asked] = []
    while len(found) < n and waiting:
        found += [each.pop() for each in waiting]
        waiting = [each for each in waiting if each]
    return found[:n]


def judge_fact(listener: Listener, asked: Asked, *, is_thinking: bool) -> Answered:
    """Ask for one fact: a statement's end as plain text, a question as a chat."""
    answer = asked.fact.answer
    if not asked.is_question:
        said = listener.text(asked.text, _N_FACT_TOKENS // 2)
        return Answered(asked.text, answer, said, is_right_ending(said, answer))
    request = {"messages": [{"role": "user", "content": asked.text}], "thinking": is_thinking}
    said = listener.reply(request, _N_FACT_TOKENS).content
    return Answered(asked.text, answer, said, is_right_reply(said, answer))


def is_right_ending(said: str, answer: str) -> bool:
    """Return whether a statement that stops before the answer is gone on with rightly."""
    return said.startswith(f" {answer}.")


def is_right_reply(said: str, answer: str) -> bool:
    """Return whether a reply gives the answer: at its end, as the subject may hold the same word ("The plural of fish is fish")."""
    return re.search(rf"(?<![\w-]){re.escape(answer)}( days)?( in \w+)?\.$", said) is not None


def uses_result(said: str, facts: Sequence[str]) -> bool:
    """Return whether a reply has all that it should tell, each as a word of its own."""
    return all(re.search(rf"(?<![\w:]){re.escape(fact)}(?![\w:])", said) for fact in facts)


def judge_tool(listener: Listener, case: ToolCase, *, is_thinking: bool) -> Answered:
    """Ask what needs a tool; the call must be the right one, and the reply to its result must use it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": case.question}]
    request = {"messages": messages, "tools": case.tools, "thinking": is_thinking}
    first = listener.reply(request, _N_CALL_TOKENS)
    calls = [(call.name, _arguments(call.arguments)) for call in first.tool_calls]
    expected = f"{case.name} {json.dumps(case.arguments)}, then {case.reply}"
    if calls != [(case.name, case.arguments)]:
        return Answered(case.question, expected, f"calls {calls}, content {first.content!r}", False)
    function = {"name": case.name, "arguments": json.dumps(case.arguments)}
    called = {"role": "assistant", "content": first.content, "reasoning_content": first.reasoning_content}
    messages += [called | {"tool_calls": [{"id": "1", "type": "function", "function": function}]}]
    messages += [{"role": "tool", "tool_call_id": "1", "content": case.result}]
    said = listener.reply(request, _N_CALL_TOKENS).content
    return Answered(case.question, expected, said, uses_result(said, [*case.facts, *told_arguments(case)]))


def told_arguments(case: ToolCase) -> list[str]:
    """Return the call's arguments that a proper reply names, as words of its own."""
    return [str(value) for value in case.arguments.values() if uses_result(case.reply, [str(value)])]


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def stories(listener: Listener, n: int) -> list[Answered]:
    """Return stories to be read by a person."""
    openings = [f"Once upon a time there was a kind girl called {name}." for name in NAMES[:n]]
    return [Answered(opening, "", listener.text(opening, _N_STORY_TOKENS), True) for opening in openings]


def losses(listener: Listener, tokenizer: Path, checkpoint: Path | None, weights: Path | None, *, n_rows: int) -> dict[str, Any]:
    """Return by topic the mean held-out loss of what is there over n_rows rows, and the distance of each from the one before it."""
    source = None if checkpoint is None else open_checkpoint_model(open_checkpoint(checkpoint), listener.engine.device)
    scorers: dict[str, Callable[[list[int]], Tensor]] = {}
    if weights is not None:
        plain, _ = model_of(load_parameters(listener.engine.geometry, weights), is_rounded=False)
        scorers["float32"] = lambda ids: score_with(plain, ids, arithmetic=Arithmetic.PROMPT, chunk=None)
    if source is not None:
        scorers["checkpoint"] = lambda ids: score_with(source, ids, arithmetic=Arithmetic.PROMPT, chunk=None)
    scorers["prepared"] = lambda ids: listener.engine.score(ids, arithmetic=Arithmetic.PROMPT, chunk=None)
    form = Form(tokenizer, listener.tokenizer.vocab_size, n_rows, _N_TEXT_TOKENS, "judge")
    return {topic: _losses_of_rows(held_out_rows(form, topic).tolist(), scorers) for topic in get_args(Topic)}


@torch.inference_mode()
def _losses_of_rows(rows: list[list[int]], scorers: dict[str, Callable[[list[int]], Tensor]]) -> dict[str, Any]:
    texts = [[token for token in row if token >= 0] for row in rows]
    logits = {name: torch.cat([score(text[:-1]).cpu() for text in texts]) for name, score in scorers.items()}
    targets = torch.tensor([token for text in texts for token in text[1:]])
    found: dict[str, Any] = {f"loss {name}": float(F.cross_entropy(each, targets)) for name, each in logits.items()}
    names = list(logits)
    for this, other in zip(names[1:], names, strict=False):
        found[f"{this} against {other}"] = compare_logits(logits[this], logits[other])._asdict()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="compare with the unquantised spine")
    parser.add_argument("--weights", type=Path, help="compare with the float32 weights of the run")
    parser.add_argument("--facts", type=int, default=50)
    parser.add_argument("--tools", type=int, default=10)
    parser.add_argument("--stories", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8, help=f"of {_N_TEXT_TOKENS} tokens, per topic, for the losses")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device")
    parser.add_argument("--vram-cache", default="auto")
    parser.add_argument("--host-pool", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace-out", type=Path)
    arguments = parser.parse_args()
    options = Options(arguments.device, arguments.vram_cache, arguments.host_pool)
    prepared = open_model(arguments.manifest)
    log = None if arguments.trace_out is None else RoutingLog(prepared.geometry)
    with Engine(prepared, options, on_remark=print, routing_log=log) as engine:
        directory = engine.prepared.tokenizer_directory
        listener = Listener(engine, load_tokenizer(directory, vocab_size=engine.geometry.vocab_size))
        ways = cycle((False, True))
        found = {
            "facts": [judge_fact(listener, asked, is_thinking=next(ways)) for asked in chosen_facts(arguments.facts, arguments.seed)],
            "tools": [judge_tool(listener, case, is_thinking=next(ways)) for case in islice(tool_cases(arguments.seed, "held-out"), arguments.tools)],
            "stories": stories(listener, arguments.stories),
        }
        if log is not None:
            facts = {"model": prepared.manifest.source.digest, LENGTHS: json.dumps([each.n_run for each in listener.heard])}
            write_trace(arguments.trace_out, log.trace(), facts)
        result: dict[str, Any] = {"losses": losses(listener, directory, arguments.checkpoint, arguments.weights, n_rows=arguments.rows)}
    for name, answers in found.items():
        result[name] = {"n_right": sum(each.is_right for each in answers), "n": len(answers), "answers": [each._asdict() for each in answers]}
    _print(found, result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n")


def _print(found: dict[str, list[Answered]], result: dict[str, Any]) -> None:
    for story in found["stories"]:
        print(f"\n{story.question}{story.said}")
    print()
    for name in ("facts", "tools"):
        for each in found[name]:
            if not each.is_right:
                print(f"wrong  {each.question}  expected {each.expected!r}, said {each.said!r}")
        print(f"{name}: {result[name]['n_right']} of {result[name]['n']} right")
    for topic, values in result["losses"].items():
        print(topic, json.dumps(values))


if __name__ == "__main__":
    main()
