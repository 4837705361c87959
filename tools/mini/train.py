"""Trains the small K3.1 through the runtime's own forward pass, with MXFP4 experts and bfloat16 in the loop, and exports it.

    python -m tools.mini.train OUT (--minutes M | --steps N) [--resume DIR] [--device cuda] [--graph] ...

OUT gets train.jsonl (one line per report), weights-*.safetensors (float32) and checkpoint.tar (the published format). The learning rate falls to
zero with the share of the time, or of the steps, that has passed, so a run always ends annealed. With --resume the weights of another run are
where this one begins; the optimiser begins anew.
"""

import argparse
import json
import math
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from manifests.geometry import load_geometry
from runtime.kernels.rows import Arithmetic
from tools.mini.batches import Form, batches, held_out_rows
from tools.mini.corpus import Topic
from tools.mini.export import GEOMETRY, fill_frame, make_frame
from tools.mini.weights import Parameters, initial_parameters, load_parameters, model_of, on_device, save_parameters

IGNORED = -1
_EAGER_STEPS = 3


class Trainer:
    """Steps over batches of one shape.

    loss       of the last step, on the device
    imbalance  the busiest expert's share over the mean of its layer, the worst layer of the last step, on the device
    """

    def __init__(self, parameters: Parameters, *, weight_decay: float, bias_rate: float) -> None:
        self.parameters, self._bias_rate = parameters, bias_rate
        trained = list(parameters.trained.values())
        self._device = trained[0].device
        self._lr = torch.zeros((), device=self._device)
        groups = [
            {"params": [x for x in trained if x.dim() > 1], "weight_decay": weight_decay},
            {"params": [x for x in trained if x.dim() == 1], "weight_decay": 0.0},
        ]
        is_cuda = self._device.type == "cuda"
        self._optimiser = torch.optim.AdamW(groups, lr=self._lr, betas=(0.9, 0.95), eps=1e-10, fused=True, capturable=is_cuda)
        self._trained = trained
        self._graph: torch.cuda.CUDAGraph | None = None
        self._rows: Tensor | None = None
        self.loss = self.imbalance = torch.zeros((), device=self._device)

    def step(self, rows: np.ndarray, lr: float) -> None:
        """Learn from one batch, int64 [rows, tokens + 1]."""
        self._lr.fill_(lr)
        batch = torch.from_numpy(rows)
        if self._graph is None:
            self._compute(batch.to(self._device))
            return
        assert self._rows is not None
        self._rows.copy_(batch)
        self._graph.replay()

    def capture(self, batch: Iterator[np.ndarray], lr: float) -> int:
        """Take a few steps and record one as a CUDA graph, which later steps replay; return the number of steps taken."""
        first = next(batch)
        self._rows = torch.from_numpy(first).to(self._device)
        self._lr.fill_(lr)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_EAGER_STEPS):
                self._compute(self._rows)
                self._rows.copy_(torch.from_numpy(next(batch)))
        torch.cuda.current_stream().wait_stream(stream)
        self._optimiser.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._compute(self._rows, clears_first=False)
        self._graph = graph
        return _EAGER_STEPS

    def _compute(self, rows: Tensor, *, clears_first: bool = True) -> None:
        if clears_first:
            self._optimiser.zero_grad(set_to_none=True)
        model, experts = model_of(self.parameters, is_rounded=True)
        state = model.initial_state(rows.shape[0])
        logits, _ = model.forward(input_ids(rows, self.parameters), state, arithmetic=Arithmetic.PROMPT)
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimiser.step()
        self.loss, self.imbalance = loss.detach(), self._balance(experts.loads)

    @torch.no_grad()
    def _balance(self, loads: dict[int, Tensor]) -> Tensor:
        """Move each selection bias towards equal loads; return the worst layer's imbalance."""
        worst = []
        for layer, load in loads.items():
            mean = load.float().mean()
            self.parameters.biases[layer].add_(torch.sign(mean - load) * (self._bias_rate * self._lr))
            worst.append(load.max() / mean)
        return torch.stack(worst).max()


def input_ids(rows: Tensor, parameters: Parameters) -> Tensor:
    """Return what the model reads of rows [rows, tokens + 1]; the end of a row that has no more documents is padding."""
    ids = rows[:, :-1]
    return torch.where(ids == IGNORED, parameters.geometry.vocab_size - 1, ids)


@torch.no_grad()
def mean_loss(parameters: Parameters, rows: np.ndarray, *, is_rounded: bool) -> float:
    """Return the mean loss per token in nats of rows, int64 [rows, tokens + 1]."""
    batch = torch.from_numpy(rows).to(parameters.device)
    model, _ = model_of(parameters, is_rounded=is_rounded)
    logits, _ = model.forward(input_ids(batch, parameters), model.initial_state(batch.shape[0]), arithmetic=Arithmetic.PROMPT)
    return float(F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=IGNORED))


def learning_rate(peak: float, *, step: int, share: float, n_warm_up: int) -> float:
    """Return the rate of a step: rising over the first n_warm_up, falling in a straight line to zero at share 1."""
    return peak * min(1.0, (step + 1) / n_warm_up) * max(0.0, 1.0 - share)


def train(arguments: argparse.Namespace) -> None:
    """Run one training as the command line says."""
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=False)
    geometry = load_geometry(arguments.geometry)
    start = load_parameters(geometry, arguments.resume) if arguments.resume else initial_parameters(geometry, arguments.seed)
    with tempfile.TemporaryDirectory() as scratch:
        frame = Path(scratch) / "checkpoint"
        make_frame(frame, geometry)
        # A run that goes on must not meet the same batches again.
        seed = f"{arguments.seed}/resumed" if arguments.resume else str(arguments.seed)
        form = Form(frame, geometry.vocab_size, arguments.rows, arguments.tokens, seed)
        parameters = on_device(start, torch.device(arguments.device))
        with closing(batches(form, arguments.processes)) as source, (out / "train.jsonl").open("w") as log:
            _train(parameters, source, form, arguments, _reporter(log))
        save_parameters(parameters, out)
        fill_frame(parameters, frame)
        with tarfile.open(out / "checkpoint.tar", "w") as tar:
            tar.add(frame, "checkpoint")


def _train(
    parameters: Parameters, source: Iterator[np.ndarray], form: Form, arguments: argparse.Namespace, report: Callable[[dict[str, Any]], None]
) -> None:
    report({"arguments": {key: str(value) for key, value in vars(arguments).items()}, "device": _device_name(parameters.device),
            "torch": torch.__version__, "n_parameters": sum(x.numel() for x in parameters.all.values())})  # fmt: skip
    held_out = {topic: held_out_rows(form._replace(n_rows=arguments.held_out_rows, seed="held-out"), topic) for topic in get_args(Topic)}
    trainer = Trainer(parameters, weight_decay=arguments.weight_decay, bias_rate=arguments.bias_rate)
    # Products with TF32 factors where the GPU has them: what is rounded to MXFP4 or bfloat16 keeps its value.
    torch.set_float32_matmul_precision("high")
    _loop(trainer, source, held_out, arguments, report)
    torch.set_float32_matmul_precision("highest")
    report({
        "end": True,
        "held_out_rounded": _by_topic(parameters, held_out, is_rounded=True),
        "held_out_float32": _by_topic(parameters, held_out, is_rounded=False),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if parameters.device.type == "cuda" else None,
    })  # fmt: skip


def _loop(
    trainer: Trainer,
    source: Iterator[np.ndarray],
    held_out: dict[Topic, np.ndarray],
    arguments: argparse.Namespace,
    report: Callable[[dict[str, Any]], None],
) -> None:
    # The clock begins with the first batch: processes that make them have to start.
    source = _chained(next(source), source)
    began = reported = time.monotonic()
    step = n_before = 0

    def share() -> float:
        return step / arguments.steps if arguments.steps else (time.monotonic() - began) / (60 * arguments.minutes)

    if arguments.graph:
        step = trainer.capture(source, learning_rate(arguments.lr, step=0, share=0, n_warm_up=arguments.warm_up))
    tested = began
    while (done := share()) < 1:
        lr = learning_rate(arguments.lr, step=step, share=done, n_warm_up=arguments.warm_up)
        trainer.step(next(source), lr)
        step += 1
        if step % arguments.report_every == 0:
            loss, imbalance = float(trainer.loss), float(trainer.imbalance)
            now = time.monotonic()
            facts = {"step": step, "time_s": round(now - began, 2), "loss": loss, "imbalance": imbalance, "lr": lr,
                     "tokens_per_s": round((step - n_before) * arguments.rows * arguments.tokens / (now - reported))}  # fmt: skip
            if now - tested > arguments.test_every_s:
                facts["held_out"] = _by_topic(trainer.parameters, held_out, is_rounded=True)
                # A run that is stopped from outside can be gone on with from here.
                save_parameters(trainer.parameters, arguments.out)
                tested = now
            report(facts)
            if not math.isfinite(loss):
                raise SystemExit(f"step {step}: the loss is {loss}; try a smaller --lr")
            reported, n_before = time.monotonic(), step


def _chained(first: np.ndarray, rest: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    yield first
    yield from rest


def _by_topic(parameters: Parameters, held_out: dict[Topic, np.ndarray], *, is_rounded: bool) -> dict[str, float]:
    return {topic: mean_loss(parameters, rows, is_rounded=is_rounded) for topic, rows in held_out.items()}


def _reporter(log: Any) -> Callable[[dict[str, Any]], None]:
    def report(facts: dict[str, Any]) -> None:
        line = json.dumps(facts)
        print(line, file=log, flush=True)
        print(line, flush=True)

    return report


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--minutes", type=float, default=0.0)
    length.add_argument("--steps", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="a directory with weights-*.safetensors")
    parser.add_argument("--geometry", default=str(GEOMETRY))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--graph", action="store_true", help="replay each step as one CUDA graph")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=384, help="per row")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warm-up", type=int, default=100, metavar="STEPS")
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--bias-rate", type=float, default=0.5, help="step of the selection biases, over the learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=0, help="that make batches ahead")
    parser.add_argument("--report-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--held-out-rows", type=int, default=8, help="per topic")
    parser.add_argument("--test-every-s", type=float, default=30.0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
