"""Decode on fixed buffers against the plain model: the same logits, and the same bits for any split into blocks and any cache."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MODELS

from runtime.decode import Decoder, LayerFacts
from runtime.engine import Engine, Options
from runtime.kernels.rows import Arithmetic
from runtime.state import initial_state
from runtime.storage.incoming import Phase

N_TOKENS = 40
SPLITS = ([1] * N_TOKENS, [16, 16, 8], [5, 3, 13, 2, 1, 16])


def quiet(_: str) -> None: ...


def random_text(engine: Engine, seed: int = 0) -> list[int]:
    return torch.randint(0, engine.geometry.vocab_size, (N_TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()


def decoded(engine: Engine, text: list[int], split: list[int]) -> torch.Tensor:
    """Return the logits of a text given in blocks."""
    decoder = engine.decoder
    decoder.state.reset()
    engine.store.phase, parts, at = Phase.DECODE, [], 0
    with torch.inference_mode():
        for n in split:
            parts.append(decoder.step(text[at : at + n]).to("cpu", copy=True))
            at += n
    return torch.cat(parts)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_plain_model_and_any_split_gives_the_same_bits(extractions: dict[str, Path], name: str, device: str) -> None:
    with Engine(extractions[name], Options(device=device), on_remark=quiet) as engine:
        text = random_text(engine)
        start = initial_state(engine.geometry, 1, engine.device)
        with torch.inference_mode():
            expected, _ = engine.model.forward(torch.tensor([text], device=device), start, arithmetic=Arithmetic.PROMPT)
        whole, *others = (decoded(engine, text, split) for split in SPLITS)
    assert (whole - expected[0].cpu()).abs().max() < 1e-4
    assert all(torch.equal(other, whole) for other in others)


IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
import test_decode
from runtime.engine import Engine, Options
with Engine(Path(sys.argv[1]), Options(device=sys.argv[2]), on_remark=test_decode.quiet) as engine:
    sys.stdout.buffer.write(test_decode.decoded(engine, test_decode.random_text(engine), test_decode.SPLITS[2]).numpy().tobytes())
"""


def test_another_process_gives_the_same_bits_for_another_split(extractions: dict[str, Path], device: str) -> None:
    with Engine(extractions["tiny-k3.1"], Options(device=device), on_remark=quiet) as engine:
        expected = decoded(engine, random_text(engine), SPLITS[0])
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(extractions["tiny-k3.1"]), device]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])}
    found = subprocess.run(command, capture_output=True, check=True, env=environment).stdout
    assert found == expected.numpy().tobytes()


@pytest.mark.parametrize("budgets", [("4slots", "4slots"), ("20slots", "8slots"), ("auto", "auto")])
def test_what_the_device_holds_already_changes_no_bit(extractions: dict[str, Path], device: str, budgets: tuple[str, str]) -> None:
    options = Options(device=device, vram_cache=budgets[0], host_pool=budgets[1])
    with Engine(extractions["tiny-k3.1"], options, on_remark=quiet) as engine:
        text = random_text(engine)
        first = decoded(engine, text, SPLITS[2])
        again = decoded(engine, text, SPLITS[2])
    with Engine(extractions["tiny-k3.1"], Options(device=device), on_remark=quiet) as engine:
        fresh = decoded(engine, text, SPLITS[0])
    assert torch.equal(first, again) and torch.equal(first, fresh)


def test_later_rows_of_a_block_change_no_bit_of_earlier_ones(extractions: dict[str, Path], device: str) -> None:
    with Engine(extractions["tiny-k3.1"], Options(device=device), on_remark=quiet) as engine:
        text = random_text(engine)
        expected = decoded(engine, text, [8, 8])[:8]
        for row in (0, 3, 6):
            other = [*text[: row + 1], *random_text(engine, seed=row + 1)[row + 1 : 8]]
            found = decoded(engine, other, [8])
            assert torch.equal(found[: row + 1], expected[: row + 1])


def test_a_text_goes_on_after_a_prompt_pass_as_if_it_had_been_decoded(extractions: dict[str, Path], device: str) -> None:
    with Engine(extractions["tiny-k3.1"], Options(device=device), on_remark=quiet) as engine:
        text = random_text(engine)
        expected = decoded(engine, text, SPLITS[0])
        engine.prompt(text[:30])
        with torch.inference_mode():
            found = engine.decoder.step(text[30:40]).cpu()
    assert (found - expected[30:]).abs().max() < 1e-4


def test_a_given_routing_is_followed_and_told(extractions: dict[str, Path], device: str) -> None:
    with Engine(extractions["tiny-k3.1"], Options(device=device), on_remark=quiet) as engine:
        g = engine.geometry
        rng = np.random.default_rng(0)
        routing = np.sort(rng.permuted(np.tile(np.arange(g.n_experts), (6, len(g.moe_layers), 1)), axis=-1)[..., : g.n_experts_per_token])
        facts: list[LayerFacts] = []
        with torch.inference_mode():
            given = torch.from_numpy(routing).to(device)
            decoder = Decoder(g, engine.weights, engine.prepared.record, engine.store, context=6, routing=given)
            decoder.on_layer = facts.append
            for n in (1, 3, 2):
                decoder.step([7] * n)
    seen = np.concatenate([np.stack([f.chosen for f in facts[i : i + len(g.moe_layers)]], axis=1) for i in range(0, len(facts), len(g.moe_layers))])
    assert np.array_equal(seen, routing)
