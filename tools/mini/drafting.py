"""How often the n-gram drafter guesses right on the small model, and how many steps that saves; texts must stay those of plain decoding.

    python -m tools.mini.drafting MANIFEST

The same questions and stories as in `tools.mini.judge`, greedy, each with and without drafts. Drafting does not pause where it does not pay:
what a step costs says nothing on a CPU.
"""

import argparse
from collections.abc import Callable, Iterable
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from runtime.draft.ngram import NgramDrafter
from runtime.engine import Engine, Options
from runtime.speculate import DraftCounts, Drafting
from runtime.tokens import load_tokenizer
from tools.mini.corpus import tool_cases
from tools.mini.judge import Heard, Listener, chosen_facts, judge_fact, judge_tool, stories


class Drafted(NamedTuple):
    """Texts that were said again with drafts: steps without and with them, and whether all were the same."""

    n_texts: int
    n_plain_steps: int
    counts: DraftCounts
    is_equal: bool

    @property
    def n_steps(self) -> int:
        return self.counts.n_blocks + self.counts.n_plain_steps


def said_again(listener: Listener, heard: Iterable[Heard]) -> Drafted:
    """Say texts again with drafts."""
    texts = list(heard)
    drafting = Drafting(NgramDrafter(), listener.engine.geometry.vocab_size, print, economy=None)
    is_equal = all([listener.continued(each.ids, each.n_tokens, drafting=drafting) == each.said for each in texts])
    # A text's first token comes of its prompt.
    return Drafted(len(texts), sum(len(each.said) - 1 for each in texts), drafting.counts, is_equal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--stories", type=int, default=8)
    parser.add_argument("--facts", type=int, default=50)
    parser.add_argument("--tools", type=int, default=10)
    parser.add_argument("--device")
    arguments = parser.parse_args()
    with Engine(arguments.manifest, Options(arguments.device), on_remark=print) as engine:
        listener = Listener(engine, load_tokenizer(engine.prepared.tokenizer_directory, vocab_size=engine.geometry.vocab_size))
        ways = cycle((False, True))
        kinds: dict[str, Callable[[], object]] = {
            "stories": lambda: stories(listener, arguments.stories),
            "facts": lambda: [judge_fact(listener, asked, is_thinking=next(ways)) for asked in chosen_facts(arguments.facts, 1)],
            "tools": lambda: [judge_tool(listener, case, is_thinking=next(ways)) for case in islice(tool_cases(1, "held-out"), arguments.tools)],
        }
        for name, ask in kinds.items():
            n_before = len(listener.heard)
            ask()
            _print(name, said_again(listener, listener.heard[n_before:]))


def _print(name: str, drafted: Drafted) -> None:
    counts = drafted.counts
    print(
        f"{name}: {drafted.n_texts} texts, {'equal' if drafted.is_equal else 'NOT EQUAL'}; {counts.n_proposed} drafts in {counts.n_blocks} blocks, "
        f"{counts.n_accepted} accepted ({counts.n_accepted / max(1, counts.n_proposed):.1%}); {drafted.n_plain_steps} steps plain, "
        f"{drafted.n_steps} with drafts ({1 - drafted.n_steps / max(1, drafted.n_plain_steps):.1%} saved)"
    )


if __name__ == "__main__":
    main()
