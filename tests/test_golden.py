"""The numbers that decide, met by the command lines: logits and greedy ids of the author's code on both tiny checkpoints, and on the small trained
model those of a float32 program that was written from the model's description alone. The first prompt's ids and one of the scores come from real processes.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA, succeed
from inside import prepared, ran
from safetensors.numpy import load_file

TOLERANCE = 2e-4
PROMPTS = ("0", "1", "2")
SMALL = DATA / "mini-k3.1"


@pytest.fixture(scope="module")
def golden(model: str) -> dict[str, np.ndarray]:
    return load_file(DATA / model / "golden.safetensors")


def logits_of(*arguments: object, out: Path) -> np.ndarray:
    ran("score", *arguments, "--out", out)
    return load_file(out)["logits"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_score_of_the_spine_meets_the_golden_logits(
    extracted: Path, model: str, golden: dict[str, np.ndarray], prompt: str, device: str, tmp_path: Path
) -> None:
    ids = ("--ids-file", DATA / model / "golden.safetensors", "--key", f"{prompt}.ids")
    found = logits_of("-m", extracted / "manifest.yaml", *ids, "--device", device, out=tmp_path / "l.safetensors")
    assert np.abs(found - golden[f"q8.{prompt}.logits"]).max() < TOLERANCE


@pytest.mark.parametrize("prompt", PROMPTS)
def test_score_of_the_checkpoint_meets_the_unquantised_golden_logits(
    model: str, golden: dict[str, np.ndarray], prompt: str, device: str, tmp_path: Path
) -> None:
    ids = ("--ids-file", DATA / model / "golden.safetensors", "--key", f"{prompt}.ids")
    found = logits_of("--checkpoint", DATA / model, *ids, "--device", device, out=tmp_path / "l.safetensors")
    assert np.abs(found - golden[f"exact.{prompt}.logits"]).max() < TOLERANCE


@pytest.mark.parametrize("prompt", PROMPTS)
def test_generate_gives_the_golden_ids(extracted: Path, golden: dict[str, np.ndarray], prompt: str, device: str) -> None:
    ids = ",".join(map(str, golden[f"{prompt}.ids"]))
    run = ("generate", "-m", extracted / "manifest.yaml", "--ids", ids, "--temp", "0", "-n", "24", "--json", "--device", device)
    outcome = succeed("krun", *run) if prompt == PROMPTS[0] else ran(*run)
    document = json.loads(outcome.out)
    assert document["ids"] == golden[f"q8.{prompt}.greedy"].tolist()
    assert document["prompt_ids"] == golden[f"{prompt}.ids"].tolist()
    assert document["finish"] == "length"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small trained model, extracted."""
    out = tmp_path_factory.mktemp("small") / "model"
    prepared("extract", SMALL, out)
    return out


@pytest.mark.parametrize("kind", ["q8", "exact"])
@pytest.mark.parametrize("text", PROMPTS)
def test_scores_of_the_trained_model_meet_the_golden_logits(small: Path, text: str, kind: str, device: str, tmp_path: Path) -> None:
    golden, out = load_file(SMALL / "golden.safetensors"), tmp_path / "l.safetensors"
    source = ("-m", small) if kind == "q8" else ("--checkpoint", SMALL)
    ran("score", *source, "--ids-file", SMALL / "golden.safetensors", "--key", f"{text}.text", "--device", device, "--out", out)
    found = load_file(out)["logits"]
    assert found.shape == (len(golden[f"{text}.text"]), 2048)
    # The file has every eighth token's.
    assert np.abs(found[:, ::8] - golden[f"{kind}.{text}.logits"]).max() < TOLERANCE


@pytest.mark.parametrize("text", PROMPTS)
def test_the_trained_model_says_the_golden_texts(small: Path, text: str, device: str) -> None:
    golden = load_file(SMALL / "golden.safetensors")
    ids, whole = golden[f"{text}.ids"].tolist(), golden[f"{text}.text"].tolist()
    run = ("generate", "-m", small, "--ids", ",".join(map(str, ids)), "--temp", "0", "-n", len(whole) - len(ids), "--json", "--device", device)
    assert json.loads(ran(*run).out)["ids"] == whole[len(ids) :]


def test_score_against_other_logits_prints_the_cost_of_the_spine(extractions: dict[str, Path], tmp_path: Path) -> None:
    ids = ("--ids-file", DATA / "tiny-k3.1" / "golden.safetensors", "--key", "2.ids", "--device", "cpu")
    ran("score", "--checkpoint", DATA / "tiny-k3.1", *ids, "--out", tmp_path / "exact.safetensors")
    outcome = succeed("krun", "score", "-m", extractions["tiny-k3.1"], *ids, "--against", tmp_path / "exact.safetensors", "--json")
    golden = load_file(DATA / "tiny-k3.1" / "golden.safetensors")
    exact, q8 = (golden[f"{kind}.2.logits"].astype(np.float64) for kind in ("exact", "q8"))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (exact, q8))
    found = json.loads(outcome.out)
    assert found["mean_kl"] == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-3)
    assert found["equal_argmax"] == pytest.approx((exact.argmax(-1) == q8.argmax(-1)).mean())


def test_a_text_prompt_is_encoded_without_a_start_token_and_streamed(extractions: dict[str, Path]) -> None:
    run = ("generate", "-m", extractions["tiny-k3.1"], "-p", "Hello, world", "-n", "8", "--device", "cpu")
    document = json.loads(ran(*run, "--json").out)
    assert bytes(i for i in document["prompt_ids"] if i < 256) and 480 not in document["prompt_ids"]
    streamed = succeed("krun", *run)
    assert streamed.out == document["text"] + "\n"
    assert "steady decode" in streamed.err and "--vram-cache auto" in streamed.err


def test_generation_stops_at_the_checkpoint_s_end_id(extractions: dict[str, Path], tmp_path: Path) -> None:
    golden = load_file(DATA / "tiny-k3.1" / "golden.safetensors")
    greedy = golden["q8.0.greedy"].tolist()
    stop = next(i for n, i in enumerate(greedy) if n >= 3 and i not in greedy[:n])
    where = tmp_path / "model"
    where.symlink_to(extractions["tiny-k3.1"])
    text = (where / "manifest.yaml").read_text().partition("# sha256 of all lines above")[0]
    manifest = extractions["tiny-k3.1"] / "other-end.yaml"
    manifest.write_text(text.replace("end_ids: [482]", f"end_ids: [482, {stop}]"))
    try:
        ids = ",".join(map(str, golden["0.ids"]))
        document = json.loads(ran("generate", "-m", manifest, "--ids", ids, "-n", "24", "--json", "--device", "cpu").out)
    finally:
        manifest.unlink()
    assert document["finish"] == "end"
    assert document["ids"] == greedy[: greedy.index(stop) + 1]
