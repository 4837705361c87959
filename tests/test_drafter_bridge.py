"""The drafter in its own process: whatever becomes of it, the tokens stay, and what it needs is said before the run."""

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DATA

from manifests.errors import BadInputError, DeviceError, UsageError
from manifests.geometry import load_geometry
from runtime.draft.bridge import BridgeDrafter, BridgeModel, check_room, examine_model
from runtime.draft.choice import choose_drafter
from runtime.draft.drafter import DrafterFault
from runtime.draft.gates import AdaptiveGate, FixedGate
from runtime.draft.ngram import NgramDrafter
from runtime.engine import Engine, Options
from runtime.sampler import Sampler
from runtime.speculate import Drafting, Limits, Step, continue_text
from runtime.state import rewind_bytes
from runtime.tokens import Tokenizer, load_tokenizer

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed (pip install 'ktier[draft]')")
N_TOKENS = 12

# A process that answers as it is told: the lines after `ready` are what it does with each request.
PROCESS = """
import json, os, sys, time
say = lambda raw: os.write(1, raw)
say(b'{"ready": true}\\n')
for line in sys.stdin.buffer:
    request = json.loads(line)
    %s
"""
GOOD = """say(json.dumps({"draft": "ab"}).encode() + b"\\n")"""
BAD = {
    "which is no JSON": """say(b"\\xff\\xfe\\x00 no text\\n")""",
    "expected an object": """say(b"[1, 2]\\n")""",
    "expected a draft": """say(b'{"draft": [5, 999999]}\\n')""",
    "answered more than": """say(b"x" * 200000)""",
    "did not answer in time": """time.sleep(600)""",
    "ended with exit code 7": """sys.exit(7)""",
    "exit code 1: RuntimeError: out of memory": """raise RuntimeError("out of memory")""",
    "ended by signal 9": """os.kill(os.getpid(), 9)""",
    "closed its end": """os.close(0); os.close(1); time.sleep(600)""",
}


def quiet(_: str) -> None: ...


def process(what: str) -> list[str]:
    return [sys.executable, "-c", PROCESS % what]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DATA / "tiny-k3.1", vocab_size=512)


@pytest.fixture(scope="module")
def engine(extractions: dict[str, Path]) -> Iterator[Engine]:
    with Engine(extractions["tiny-k3.1"], Options(device="cpu", context=64), on_remark=quiet) as engine:
        yield engine


@torch.inference_mode()
def continued(engine: Engine, prompt: list[int], drafting: Drafting | None = None) -> list[int]:
    steps: Iterator[Step] = continue_text(
        engine.decoder, Sampler(0, 1, 0), engine.prompt(prompt), text=prompt, limits=Limits(N_TOKENS, 64, ()), drafting=drafting
    )
    return [step.token for step in steps]


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("It was the best of times")


@pytest.fixture(scope="module")
def plain(engine: Engine, prompt: list[int]) -> list[int]:
    return continued(engine, prompt)


class PlainEnd:
    """A drafter through a bridge whose text always ends in whole characters: the tiny model writes bytes at random."""

    def __init__(self, bridge: BridgeDrafter, prompt: list[int]) -> None:
        self._bridge, self._prompt = bridge, prompt
        self.settle, self.close = bridge.settle, bridge.close

    def propose(self, text: Any, n_most: int) -> list[int]:
        return self._bridge.propose(self._prompt, n_most)


@pytest.mark.parametrize("why", BAD)
def test_whatever_becomes_of_the_process_the_tokens_stay_and_it_is_said_once(
    engine: Engine, tokenizer: Tokenizer, prompt: list[int], plain: list[int], why: str
) -> None:
    remarks: list[str] = []
    bridge = BridgeDrafter(process(BAD[why]), tokenizer, FixedGate(0.5), deadline_s=0.3)
    drafting = Drafting(PlainEnd(bridge, prompt), 512, remarks.append, economy=None)
    assert continued(engine, prompt, drafting) == plain
    assert len(remarks) == 1 and why in remarks[0]
    assert drafting.counts.n_faults == drafting.counts.n_asked == 1


def test_a_process_that_is_killed_between_two_proposals_is_a_fault(tokenizer: Tokenizer) -> None:
    bridge = BridgeDrafter(process("""say(json.dumps({"draft": str(os.getpid())}).encode() + b"\\n")"""), tokenizer, FixedGate(0.5))
    number = int(tokenizer.decode(bridge.propose(tokenizer.encode("pid "), 15)))
    os.kill(number, signal.SIGKILL)
    with pytest.raises(DrafterFault, match="ended by signal 9"):
        bridge.propose(tokenizer.encode("pid "), 15)
    bridge.close()


def test_answers_that_nobody_asked_for_are_a_fault_and_not_taken_for_the_next(tokenizer: Tokenizer) -> None:
    bridge = BridgeDrafter(process(f"{GOOD}; {GOOD}"), tokenizer, FixedGate(0.5))
    text = tokenizer.encode("x ")
    bridge.propose(text, 5)
    with pytest.raises(DrafterFault, match="more than it was asked"):
        for _ in range(3):
            time.sleep(0.1)
            bridge.propose(text, 5)
    bridge.close()


@pytest.mark.parametrize(
    ("what", "why"),
    [("import sys; sys.exit('no such model')", "no such model"), ("print('hello', flush=True)", "no JSON"), ("print('{}')", "began with")],
)
def test_a_process_that_does_not_start_is_bad_input(tokenizer: Tokenizer, what: str, why: str) -> None:
    with pytest.raises(BadInputError, match=why):
        BridgeDrafter([sys.executable, "-c", what], tokenizer, FixedGate(0.5))


def test_a_closed_drafter_leaves_no_process(tokenizer: Tokenizer) -> None:
    for what in (GOOD, "time.sleep(600)"):
        bridge = BridgeDrafter(process(what), tokenizer, FixedGate(0.5), deadline_s=0.2)
        child = bridge._child._process
        if what != GOOD:
            with pytest.raises(DrafterFault):
                bridge.propose(tokenizer.encode("a "), 3)
        bridge.close()
        bridge.close()
        assert child.poll() is not None


# The seam between two vocabularies.


@pytest.fixture(scope="module")
def bridge(tokenizer: Tokenizer) -> Iterator[BridgeDrafter]:
    bridge = BridgeDrafter(process("""say(json.dumps({"draft": request["text"].rpartition("|")[0]}).encode() + b"\\n")"""), tokenizer, FixedGate(0.5))
    yield bridge
    bridge.close()


@pytest.mark.parametrize("draft", [" and the", "漢字", "é", "\n\n", "a b c"])
def test_a_draft_comes_back_as_the_tokens_of_its_text(bridge: BridgeDrafter, tokenizer: Tokenizer, draft: str) -> None:
    ids = bridge.propose(tokenizer.encode(f"{draft}|"), 15)
    assert ids and draft.startswith(tokenizer.decode(ids)) and max(ids) < tokenizer.n_ranks


def test_no_more_tokens_come_back_than_were_asked_for(bridge: BridgeDrafter, tokenizer: Tokenizer) -> None:
    assert len(bridge.propose(tokenizer.encode("one two three four five six seven|"), 4)) == 4


def test_a_draft_that_grows_together_with_the_text_is_dropped(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("he")) == 1, "a merge that the tiny vocabulary has"
    bridge = BridgeDrafter(process("""say(b'{"draft": "e1"}\\n')"""), tokenizer, FixedGate(0.5))
    assert bridge.propose(tokenizer.encode("h"), 15) == []
    assert bridge.propose(tokenizer.encode("1"), 15) == tokenizer.encode("e1")
    bridge.close()


def test_a_text_that_ends_inside_a_character_is_not_drafted(tokenizer: Tokenizer) -> None:
    bridge = BridgeDrafter(process(GOOD), tokenizer, FixedGate(0.5))
    first_byte = next(token for token in range(256) if tokenizer.token_bytes(token) == b"\xe6")
    assert bridge.propose([*tokenizer.encode("x"), first_byte], 15) == []
    assert bridge.propose(tokenizer.encode("x"), 15) != []
    bridge.close()


def test_the_tail_may_begin_inside_a_character(tokenizer: Tokenizer) -> None:
    text = tokenizer.encode("漢字" * 20)
    assert len(text) > 16 and tokenizer.token_bytes(text[-16])[0] & 0xC0 == 0x80
    bridge = BridgeDrafter(process(GOOD), tokenizer, FixedGate(0.5))
    assert tokenizer.decode(bridge.propose(text, 15)) == "ab"
    bridge.close()


def test_half_a_surrogate_is_no_draft(tokenizer: Tokenizer) -> None:
    bridge = BridgeDrafter(process("""say(b'{"draft": "\\\\ud800"}\\n')"""), tokenizer, FixedGate(0.5))
    assert bridge.propose(tokenizer.encode("x"), 15) == []
    bridge.close()


def test_the_gate_goes_to_the_process_and_learns_from_what_became_of_its_drafts(tokenizer: Tokenizer) -> None:
    bridge = BridgeDrafter(process("""say(json.dumps({"draft": str(request["gate"])}).encode() + b"\\n")"""), tokenizer, AdaptiveGate())
    text = tokenizer.encode("gate ")
    assert tokenizer.decode(bridge.propose(text, 15)) == "0.9"
    bridge.settle(n_proposed=3, n_accepted=3)
    assert float(tokenizer.decode(bridge.propose(text, 15))) < 0.9
    bridge.close()


# What can be a drafter.


def write_model(path: Path, *, model_type: str = "qwen3", tokenizer_class: str = "Qwen2Tokenizer", n_bytes: int = 1000) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    (path / "model.safetensors").write_bytes(bytes(n_bytes))
    return path


@needs_transformers
def test_the_size_of_a_drafter_is_known_beforehand(tmp_path: Path) -> None:
    model = examine_model(write_model(tmp_path / "m", n_bytes=1234))
    assert model.n_bytes == 1234 and model.needed_bytes(is_gpu=True) > 1234


def test_a_path_that_is_no_drafter_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    write_model(tmp_path / "llama", model_type="llama")
    write_model(tmp_path / "other", tokenizer_class="LlamaTokenizer")
    (write_model(tmp_path / "bare") / "model.safetensors").unlink()
    (write_model(tmp_path / "broken") / "config.json").write_text("{")
    (write_model(tmp_path / "list") / "config.json").write_text("[]")
    for name, why in {
        "nothing": "no such directory", "file": "no such directory", "empty": "config.json cannot be read", "llama": "model_type is 'llama'",
        "other": "tokenizer_class is 'LlamaTokenizer'", "bare": "no .*safetensors", "broken": "is not JSON", "list": "no JSON object",
    }.items():  # fmt: skip
        with pytest.raises(BadInputError, match=why) as caught:
            examine_model(tmp_path / name)
        assert f"--drafter {tmp_path / name}" in str(caught.value)


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "m")
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"ktier\[draft\]"):
        examine_model(tmp_path / "m")


def test_a_drafter_that_does_not_fit_is_refused_before_the_run_with_the_way_out() -> None:
    model = BridgeModel(Path("m"), 1_200_000_000)
    check_room(model, available_bytes=3_000_000_000, is_gpu=True)
    with pytest.raises(DeviceError, match=r"1\.5GB are left; leave --drafter out for plain decoding"):
        check_room(model, available_bytes=1_500_000_000, is_gpu=True)


def test_what_is_asked_for_is_ngram_or_a_directory(tmp_path: Path, tokenizer: Tokenizer) -> None:
    geometry, cpu = load_geometry("tiny"), torch.device("cpu")
    ngram = choose_drafter("ngram")
    assert str(ngram) == "ngram" and isinstance(ngram.start(tokenizer, FixedGate(0.5), cpu), NgramDrafter)
    assert ngram.device_bytes(geometry, cpu) == rewind_bytes(geometry, 16)
    with pytest.raises(BadInputError, match="expected ngram, or a directory"):
        choose_drafter(str(tmp_path / "ngrams"))


# A Qwen3 of random weights, end to end.


def _make_qwen(path: Path) -> Path:
    """Save a tiny Qwen3 over a vocabulary of bytes that writes ASCII only, from a config alone."""
    from tokenizers import Tokenizer as Builder
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: n for n, symbol in enumerate(alphabet)}
    builder = Builder(models.BPE(vocab=vocabulary, merges=[]))
    builder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    builder.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=builder, eos_token="<|endoftext|>").save_pretrained(path)
    config_path = path / "tokenizer_config.json"
    config_path.write_text(json.dumps({**json.loads(config_path.read_text()), "tokenizer_class": "Qwen2Tokenizer"}))
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    # Rows of the matrix beyond the vocabulary, as the real one has.
    config = Qwen3Config(vocab_size=320, max_position_embeddings=64, tie_word_embeddings=False, **sizes)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight *= 20
        model.lm_head.weight[len(vocabulary) :] = 0
        for symbol, n in vocabulary.items():
            if not (symbol.isascii() and symbol.isalpha()):
                model.lm_head.weight[n] = 0
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not HAS_TRANSFORMERS:
        pytest.skip("transformers is not installed (pip install 'ktier[draft]')")
    return _make_qwen(tmp_path_factory.mktemp("qwen") / "model")


@pytest.fixture(scope="module")
def qwen_bridge(qwen: Path, tokenizer: Tokenizer) -> Iterator[BridgeDrafter]:
    bridge = choose_drafter(str(qwen)).start(tokenizer, FixedGate(0.0), torch.device("cpu"))
    assert isinstance(bridge, BridgeDrafter)
    yield bridge
    bridge.close()


@needs_transformers
def test_a_qwen_drafts_text_and_the_tokens_of_the_model_stay(engine: Engine, prompt: list[int], plain: list[int], qwen_bridge: BridgeDrafter) -> None:
    remarks: list[str] = []
    drafting = Drafting(PlainEnd(qwen_bridge, prompt), 512, remarks.append, economy=None)
    assert continued(engine, prompt, drafting) == plain
    assert remarks == [] and drafting.counts.n_proposed > 0


@needs_transformers
def test_a_qwen_is_asked_for_what_the_engine_writes(engine: Engine, prompt: list[int], plain: list[int], qwen_bridge: BridgeDrafter) -> None:
    remarks: list[str] = []
    drafting = Drafting(qwen_bridge, 512, remarks.append, economy=None)
    assert continued(engine, prompt, drafting) == plain
    assert remarks == [] and drafting.counts.n_asked > 0


@needs_transformers
def test_a_qwen_says_the_same_with_and_without_what_it_remembers(qwen: Path, tokenizer: Tokenizer, qwen_bridge: BridgeDrafter) -> None:
    from runtime.draft.qwen import Drafter

    texts = ["It was", "It was the best", "It was the worst", "It was", "It was", "Quite another text", "a" * 200, "a" * 201]
    for text in texts:
        fresh = Drafter(str(qwen), "cpu").continuation(text, 8, 0.0)
        remembered = qwen_bridge._child.ask({"text": text, "n_most": 8, "gate": 0.0}, time.monotonic() + 60)["draft"]
        assert remembered == fresh and len(fresh) == 8


@needs_transformers
def test_a_qwen_stops_at_the_first_token_below_the_gate(qwen: Path) -> None:
    from runtime.draft.qwen import Drafter

    drafter = Drafter(str(qwen), "cpu")
    free, ids, probabilities = drafter.continuation("It was the", 8, 0.0), drafter._ids("It was the"), []
    for symbol in free:
        probabilities.append(drafter._next(ids)[1])
        ids = [*ids, *drafter._ids(symbol)]
    for gate in (min(probabilities) * 1.01, max(probabilities) * 1.01):
        expected = next(n for n, p in enumerate(probabilities) if p < gate)
        assert drafter.continuation("It was the", 8, gate) == free[:expected]
