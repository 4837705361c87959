"""--state-out, --state-in and --long-context through the command line."""

import json
from pathlib import Path

import pytest
from conftest import DATA, succeed
from inside import krun, ran
from safetensors.numpy import load_file

GOLDEN = {name: load_file(DATA / name / "golden.safetensors") for name in ("tiny-k3", "tiny-k3.1")}
N_SAVED = 25


def run(manifest: Path, ids: list[int], *flags: object) -> dict:
    arguments = ("-m", manifest, "--ids", ",".join(map(str, ids)), "-n", "24", "--device", "cpu", "--json")
    return json.loads(ran("generate", *arguments, *flags).out)


def refused(manifest: Path, ids: list[int], *flags: object) -> str:
    outcome = krun("generate", "-m", manifest, "--ids", ",".join(map(str, ids)), "-n", "2", "--device", "cpu", *flags)
    assert outcome.code in (2, 3, 4) and "Traceback" not in outcome.err, outcome
    return f"{outcome.code} {outcome.err}"


@pytest.mark.parametrize("exact", [(), ("--exact-prefill",)])
def test_ids_after_a_saved_state_are_those_of_one_run(extracted: Path, model: str, exact: tuple[str, ...], tmp_path: Path) -> None:
    prompt, path = GOLDEN[model]["2.ids"].tolist(), tmp_path / "state"
    first = run(extracted, prompt[:N_SAVED], "--state-out", path, *exact)
    assert (first["stats"]["n_prompt_computed"], first["stats"]["n_prompt_reused"]) == (N_SAVED, 0)
    went_on = run(extracted, prompt, "--state-in", path, *exact)
    assert (went_on["stats"]["n_prompt_computed"], went_on["stats"]["n_prompt_reused"]) == (len(prompt) - N_SAVED, N_SAVED)
    assert went_on["ids"] == run(extracted, prompt, *exact)["ids"] == GOLDEN[model]["q8.2.greedy"].tolist()
    again = run(extracted, prompt[:N_SAVED], "--state-in", path, "--state-out", path, *exact)
    assert again["ids"] == first["ids"] and again["stats"]["n_prompt_computed"] == 0
    assert run(extracted, prompt, "--state-in", path, *exact)["ids"] == went_on["ids"]


def test_a_state_that_does_not_fit_is_refused(extractions: dict[str, Path], tmp_path: Path) -> None:
    prompt, path = GOLDEN["tiny-k3"]["2.ids"].tolist(), tmp_path / "state"
    run(extractions["tiny-k3"], prompt[:N_SAVED], "--state-out", path)
    assert refused(extractions["tiny-k3.1"], prompt, "--state-in", path).startswith("3 ")
    assert "another model" in refused(extractions["tiny-k3.1"], prompt, "--state-in", path)
    assert "with which the prompt must begin" in refused(extractions["tiny-k3"], prompt[1:], "--state-in", path)
    assert "computed in prompt arithmetic" in refused(extractions["tiny-k3"], prompt, "--state-in", path, "--exact-prefill")
    assert "the context is 20" in refused(extractions["tiny-k3"], prompt[:20], "--state-in", path, "-c", "20")
    path.write_bytes(path.read_bytes()[:-100])
    assert "cut short" in refused(extractions["tiny-k3"], prompt, "--state-in", path)
    assert refused(extractions["tiny-k3"], prompt, "--state-out", tmp_path / "nowhere" / "state").startswith("2 ")


def test_a_long_context_needs_its_flag_and_goes_on_from_a_state(checkpoint_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    prompt, model, path = GOLDEN["tiny-k3.1"]["2.ids"].tolist(), tmp_path / "model", tmp_path / "state"
    config = json.loads((checkpoint_copy / "config.json").read_text())
    config["text_config"]["dsa_config"]["index_topk"] = 8
    (checkpoint_copy / "config.json").write_text(json.dumps(config))
    succeed("kprep", "extract", checkpoint_copy, model)
    assert "--long-context unverified" in refused(model, prompt, "-c", "100")
    assert "expected the word unverified" in refused(model, prompt, "-c", "100", "--long-context", "yes")
    assert "has no indexer" in refused(extractions["tiny-k3"], prompt, "--long-context", "unverified")
    flags = ("--long-context", "unverified", "-c", 100)
    whole = run(model, prompt, *flags)
    assert len(whole["ids"]) == 24 and whole["ids"] != GOLDEN["tiny-k3.1"]["q8.2.greedy"].tolist()
    assert run(model, prompt, *flags, "--exact-prefill")["ids"] == run(model, prompt, *flags, "--chunk", 7)["ids"] == whole["ids"]
    text = ("--ids-file", DATA / "tiny-k3.1" / "golden.safetensors", "--key", "2.ids", "--device", "cpu")
    ran("score", "-m", model, *text, *flags, "--out", tmp_path / "logits")
    assert load_file(tmp_path / "logits")["logits"][-1].argmax() == whole["ids"][0]
    run(model, prompt[:N_SAVED], *flags, "--state-out", path)
    assert run(model, prompt, *flags, "--state-in", path)["ids"] == whole["ids"]
    assert run(extractions["tiny-k3.1"], prompt, "--long-context", "unverified")["ids"] == GOLDEN["tiny-k3.1"]["q8.2.greedy"].tolist()
