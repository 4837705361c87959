"""The small model that ships: it knows its facts, calls tools, and drafts leave what it says as it is."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from conftest import DATA, succeed

from manifests.geometry import load_geometry
from runtime.engine import Engine, Options
from runtime.tokens import RANKS_FILE_NAME, load_tokenizer
from tools.mini.corpus import tool_cases
from tools.mini.drafting import said_again
from tools.mini.export import GEOMETRY, make_frame
from tools.mini.judge import Answered, Heard, Listener, chosen_facts, judge_fact, judge_tool

CHECKPOINT = DATA / "mini-k3.1"


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    out = tmp_path_factory.mktemp("mini") / "model"
    succeed("kprep", "extract", CHECKPOINT, out)
    with Engine(out / "manifest.yaml", Options(device="cpu"), on_remark=print) as engine:
        yield Listener(engine, load_tokenizer(engine.prepared.tokenizer_directory, vocab_size=engine.geometry.vocab_size))


def test_it_answers_in_phrasings_that_it_was_not_taught(listener: Listener) -> None:
    answers = [judge_fact(listener, asked, is_thinking=n == 1) for n, asked in enumerate(chosen_facts(4, seed=1))]
    assert all(each.is_right for each in answers), answers


@pytest.fixture(scope="module")
def called(listener: Listener) -> tuple[Answered, list[Heard]]:
    """A question that needs a tool, and what was heard: the call, and the reply to its result."""
    (case,) = islice(tool_cases(1, "held-out"), 1)
    n_before = len(listener.heard)
    return judge_tool(listener, case, is_thinking=False), listener.heard[n_before:]


def test_it_calls_a_tool_and_uses_the_result(called: tuple[Answered, list[Heard]]) -> None:
    assert called[0].is_right, called[0]


def test_drafts_are_accepted_and_the_texts_stay_the_same(listener: Listener, called: tuple[Answered, list[Heard]]) -> None:
    drafted = said_again(listener, called[1])
    assert drafted.n_texts == 2 and drafted.is_equal
    assert drafted.counts.n_accepted > 0 and drafted.n_steps < drafted.n_plain_steps


def test_the_corpus_still_gives_the_ranks_that_ship(tmp_path: Path) -> None:
    make_frame(tmp_path / "frame", load_geometry(str(GEOMETRY)))
    assert (tmp_path / "frame" / RANKS_FILE_NAME).read_bytes() == (CHECKPOINT / RANKS_FILE_NAME).read_bytes()
    assert (tmp_path / "frame" / "config.json").read_bytes() == (CHECKPOINT / "config.json").read_bytes()


def test_nine_of_ten_guesses_of_the_next_layer_s_experts_are_right(listener: Listener) -> None:
    path = listener.engine.prepared.path
    with Engine(path, Options(device="cpu", vram_cache="40slots", host_pool="60slots", n_prefetch=2), on_remark=print) as engine:
        Listener(engine, listener.tokenizer).text("Once upon a time", 30)
        counts = engine.decode_counts
    # Without looking at the state, 6 of 64 would be.
    assert counts.n_prefetch_issued > 100
    assert counts.n_prefetch_used > 0.9 * counts.n_prefetch_issued


def test_the_checkpoint_is_at_most_ten_megabytes() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 10_000_000
