"""--state-out, --state-in and --long-context through the command line."""

import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import DATA
from inside import krun, prepared, ran, talked
from safetensors.numpy import load_file
from serving import COMPLETION, serving, text

GOLDEN = {name: load_file(DATA / name / "golden.safetensors") for name in ("tiny-k3", "tiny-k3.1")}
N_SAVED = 25


def run(manifest: Path, ids: list[int], *flags: object, n: int = 24) -> dict:
    arguments = ("-m", manifest, "--ids", ",".join(map(str, ids)), "-n", n, "--device", "cpu", "--json")
    return json.loads(ran("generate", *arguments, *flags).out)


def refused(manifest: Path, ids: list[int], *flags: object) -> str:
    outcome = krun("generate", "-m", manifest, "--ids", ",".join(map(str, ids)), "-n", "2", "--device", "cpu", *flags)
    assert outcome.code in (2, 3, 4) and "Traceback" not in outcome.err, outcome
    return f"{outcome.code} {outcome.err}"


@pytest.mark.parametrize("exact", [(), ("--exact-prefill",)])
def test_ids_after_a_saved_state_are_those_of_one_run(extracted: Path, model: str, exact: tuple[str, ...], tmp_path: Path) -> None:
    prompt, path = GOLDEN[model]["2.ids"].tolist(), tmp_path / "state"
    first = run(extracted, prompt[:N_SAVED], "--state-out", path, *exact, n=8)
    assert (first["stats"]["n_prompt_computed"], first["stats"]["n_prompt_reused"]) == (N_SAVED, 0)
    went_on = run(extracted, prompt, "--state-in", path, *exact)
    assert (went_on["stats"]["n_prompt_computed"], went_on["stats"]["n_prompt_reused"]) == (len(prompt) - N_SAVED, N_SAVED)
    assert went_on["ids"] == GOLDEN[model]["q8.2.greedy"].tolist()
    assert went_on["ids"][:8] == run(extracted, prompt, *exact, n=8)["ids"]
    again = run(extracted, prompt[:N_SAVED], "--state-in", path, "--state-out", path, *exact, n=8)
    assert again["ids"] == first["ids"] and again["stats"]["n_prompt_computed"] == 0
    assert run(extracted, prompt, "--state-in", path, *exact, n=8)["ids"] == went_on["ids"][:8]


def test_a_state_that_does_not_fit_is_refused(extractions: dict[str, Path], tmp_path: Path) -> None:
    prompt, path = GOLDEN["tiny-k3"]["2.ids"].tolist(), tmp_path / "state"
    run(extractions["tiny-k3"], prompt[:N_SAVED], "--state-out", path, n=1)
    assert refused(extractions["tiny-k3.1"], prompt, "--state-in", path).startswith("3 ")
    assert "another model" in refused(extractions["tiny-k3.1"], prompt, "--state-in", path)
    assert "with which the prompt must begin" in refused(extractions["tiny-k3"], prompt[1:], "--state-in", path)
    assert "computed in prompt arithmetic" in refused(extractions["tiny-k3"], prompt, "--state-in", path, "--exact-prefill")
    assert "the context is 20" in refused(extractions["tiny-k3"], prompt[:20], "--state-in", path, "-c", "20")
    path.write_bytes(path.read_bytes()[:-100])
    assert "cut short" in refused(extractions["tiny-k3"], prompt, "--state-in", path)
    assert refused(extractions["tiny-k3"], prompt, "--state-out", tmp_path / "nowhere" / "state").startswith("2 ")


def test_what_is_no_file_is_told_so_and_never_waited_for(extractions: dict[str, Path], tmp_path: Path) -> None:
    model, fifo = extractions["tiny-k3"], tmp_path / "fifo"
    os.mkfifo(fifo)
    assert refused(model, [1, 2], "--state-in", fifo) == f"3 krun: {fifo}: is a FIFO, expected a file\n"
    for command in (
        ("score", "-m", model, "--ids-file", fifo, "--out", tmp_path / "out"),
        ("bench", "--synthetic", "tiny", "--routing", f"trace:{fifo}", "--dir", tmp_path),
    ):
        outcome = krun(*command)
        assert outcome.code == 3 and "is a FIFO, expected a file" in outcome.err, outcome


@pytest.fixture(scope="module")
def selecting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-k3.1 with an indexer that selects 8 positions; not to be changed."""
    root = tmp_path_factory.mktemp("selecting")
    checkpoint = Path(shutil.copytree(DATA / "tiny-k3.1", root / "checkpoint"))
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["dsa_config"]["index_topk"] = 8
    (checkpoint / "config.json").write_text(json.dumps(config))
    prepared("extract", checkpoint, root / "model")
    return root / "model"


LONG = ("--long-context", "unverified", "-c", 200)


def test_a_long_context_needs_its_flag_and_goes_on_from_a_state(selecting: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    prompt, model, path = GOLDEN["tiny-k3.1"]["2.ids"].tolist(), selecting, tmp_path / "state"
    assert "--long-context unverified" in refused(model, prompt, "-c", "100")
    assert "expected the word unverified" in refused(model, prompt, "-c", "100", "--long-context", "yes")
    assert "has no indexer" in refused(extractions["tiny-k3"], prompt, "--long-context", "unverified")
    whole = run(model, prompt, *LONG)
    assert len(whole["ids"]) == 24 and whole["ids"] != GOLDEN["tiny-k3.1"]["q8.2.greedy"].tolist()
    for flags in (("--exact-prefill",), ("--chunk", 7)):
        assert run(model, prompt, *LONG, *flags, n=12)["ids"] == whole["ids"][:12]
    scored = ("--ids-file", DATA / "tiny-k3.1" / "golden.safetensors", "--key", "2.ids", "--device", "cpu")
    ran("score", "-m", model, *scored, *LONG, "--out", tmp_path / "logits")
    assert load_file(tmp_path / "logits")["logits"][-1].argmax() == whole["ids"][0]
    run(model, prompt[:N_SAVED], *LONG, "--state-out", path, n=1)
    assert run(model, prompt, *LONG, "--state-in", path, n=12)["ids"] == whole["ids"][:12]
    assert run(extractions["tiny-k3.1"], prompt, "--long-context", "unverified")["ids"] == GOLDEN["tiny-k3.1"]["q8.2.greedy"].tolist()


def test_a_server_of_a_long_context_goes_on_from_a_kept_state_with_its_index_keys(selecting: Path) -> None:
    prompt = GOLDEN["tiny-k3.1"]["2.ids"].tolist()
    with serving(selecting, *LONG, "--exact-prefill", "--device", "cpu") as served:

        def answered(ids: list[int]) -> tuple[list[int], int]:
            body = text(prompt=ids, max_tokens=24, temperature=0, return_token_ids=True)
            found = served.post(COMPLETION, body).json()
            return found["choices"][0]["token_ids"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

        first, _ = answered(prompt)
        longer = [*prompt, *first, 7, 8, 9]
        second, n_cached = answered(longer)
        log = served.log.read_text()
    assert n_cached == len(prompt) + len(first) - 1
    assert first == run(selecting, prompt, *LONG, "--exact-prefill")["ids"]
    assert second == run(selecting, longer, *LONG, "--exact-prefill")["ids"]
    assert "long context, unverified: the indexer selects positions" in log


def test_a_talk_beyond_the_indexer_s_top_k_needs_the_flag_too(selecting: Path) -> None:
    assert "--long-context unverified" in talked(selecting, "hello\n", "-c", 300).err
    long = talked(selecting, "hello\nand more\n", "--long-context", "unverified", "-c", 300, "-n", 5, "--temp", 0)
    assert long.code == 0 and "long context, unverified" in long.err, long
    assert talked(selecting, "", "--long-context", "yes").code == 2
