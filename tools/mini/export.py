"""Writes trained parameters as a checkpoint in the published format, which `kprep extract` takes like any other.

    python -m tools.mini.export WEIGHTS OUT [--geometry FILE]

WEIGHTS  the directory of a training run
OUT      a new directory
"""

import argparse
import json
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from layout.checkpoint import Checkpoint, open_checkpoint
from layout.config import K31
from layout.tensors import spine_tensors
from layout.writer import write_bytes
from manifests.geometry import Geometry, load_geometry
from prep.tiny import make_checkpoint
from runtime.chat.format import END_OF_MSG
from runtime.tokens import RANKS_FILE_NAME, load_tokenizer
from tools.mini.bpe import learn_ranks, ranks_file
from tools.mini.corpus import END_OF_TEXT, documents
from tools.mini.rounding import packed, quantise_mxfp4
from tools.mini.weights import Parameters, expert_sources, load_parameters

GEOMETRY = Path(__file__).with_name("geometry.yaml")
# What the ranks are learned from: the same for every run, so that weights and ranks always fit each other.
_RANKS_SEED, _N_RANK_DOCUMENTS = "ranks", 6000


def make_frame(out: Path, geometry: Geometry) -> None:
    """Make a K3.1 checkpoint that is complete but for the tensors' values, with ranks learned from the corpus."""
    make_checkpoint(out, geometry, architecture=K31, seed=0, is_sparse=True)
    tokenizer = load_tokenizer(out, vocab_size=geometry.vocab_size)
    write_bytes(out / RANKS_FILE_NAME, _ranks(tokenizer.n_ranks))
    ends = [tokenizer.special_id(END_OF_MSG), tokenizer.special_id(END_OF_TEXT)]
    write_bytes(out / "generation_config.json", json.dumps({"eos_token_id": ends, "do_sample": True, "temperature": 1.0}, indent=1).encode() + b"\n")


@cache
def _ranks(n_ranks: int) -> bytes:
    texts = (s.text for d in islice(documents(_RANKS_SEED, "train"), _N_RANK_DOCUMENTS) for s in d.segments if not s.is_marker)
    return ranks_file(learn_ranks(texts, n_ranks))


def export(parameters: Parameters, out: Path) -> None:
    """Write a checkpoint to a new directory."""
    make_frame(out, parameters.geometry)
    fill_frame(parameters, out)


def fill_frame(parameters: Parameters, out: Path) -> None:
    """Write the values of all tensors into a frame; of the token vision tower, which nothing reads, zeros."""
    checkpoint = open_checkpoint(out)
    contents = {shard.name: bytearray((out / shard.name).read_bytes()) for shard in checkpoint.shards}
    for name, data in _contents(parameters, checkpoint):
        place = checkpoint.tensors[name]
        # A_log is padded with zeros to the size of a head.
        assert len(data) == place.n_bytes or name.endswith("A_log")
        contents[checkpoint.shards[place.shard].name][place.offset : place.offset + len(data)] = data
    for shard, content in contents.items():
        write_bytes(out / shard, bytes(content))


def _contents(parameters: Parameters, checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    for tensor in spine_tensors(parameters.geometry):
        for source in tensor.sources:
            yield source.name, _bytes_of(parameters.spine[source.name], checkpoint.tensors[source.name].dtype)
    whole = {name: packed(*quantise_mxfp4(tensor)) for name, tensor in parameters.experts.items()}
    for name, (parameter, expert) in expert_sources(parameters).items():
        for tensor_name, part in zip((name, name.replace("weight_packed", "weight_scale")), whole[parameter], strict=True):
            yield tensor_name, part[expert].cpu().numpy().tobytes()


def _bytes_of(tensor: Tensor, dtype: str) -> bytes:
    values = tensor.detach().cpu().contiguous()
    if dtype == "F32":
        return values.numpy().tobytes()
    assert dtype == "BF16"
    return values.bfloat16().view(torch.int16).numpy().astype(np.int16).tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--geometry", default=str(GEOMETRY))
    arguments = parser.parse_args()
    export(load_parameters(load_geometry(arguments.geometry), arguments.weights), arguments.out)


if __name__ == "__main__":
    main()
