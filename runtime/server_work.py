"""One generation, from token ids to the answer's pieces, on the generation's thread."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from runtime.prefixes import ServingEngine
from runtime.sampler import Sampler
from runtime.server_metrics import Metrics, request_statistics
from runtime.server_queue import Job
from runtime.server_reply import Answer, Usage
from runtime.server_schema import Sampling
from runtime.tokens import Tokenizer

Json = dict[str, Any]

REASONS = {"end": "stop", "length": "length", "context": "length"}


class Piece(NamedTuple):
    """Posted for each token, and once more at the end: a choice of a chunk."""

    choice: Json


class Done(NamedTuple):
    """Posted last by a generation that went well. ids: the prompt's, as they were computed."""

    choice: Json
    usage: Usage
    statistics: Json
    ids: list[int]


@dataclass(slots=True, kw_only=True)
class Task:
    """What is to be generated, and how far it is; the last three may be read by any thread."""

    number: int
    name: str
    ids: list[int]
    is_chat: bool
    n_tokens: int
    sampling: Sampling
    answer: Answer
    queued_at: float = field(default_factory=time.perf_counter)
    is_begun: bool = False
    n_generated: int = 0


@dataclass(frozen=True, slots=True)
class Worker:
    """What generations are done with."""

    engine: ServingEngine
    tokenizer: Tokenizer
    metrics: Metrics
    on_remark: Callable[[str], None]

    def run(self, task: Task, job: Job) -> None:
        """Generate, posting Pieces and then Done. Raises Cancelled if the job is given up, KtierError as the engine does."""
        queue_s = time.perf_counter() - task.queued_at
        self.engine.begin_request(job.check)
        self.metrics.begin()
        how = "failed or given up"
        if task.is_chat:
            ids = self.engine.kept.retold(task.ids, self.tokenizer)
            if len(ids) + task.n_tokens <= self.engine.context:
                task.ids = ids
        try:
            how, ids, logits = self._generate(task, job)
            statistics = request_statistics(self.engine, n_generated=task.n_generated, queue_s=queue_s)
        finally:
            self.metrics.end()
            self.on_remark(
                f"request {task.number}: {task.name}, {len(task.ids)} prompt tokens, {self.engine.n_cached} of them kept, "
                f"{task.n_generated} generated, {time.perf_counter() - task.queued_at:.1f} s; {how}"
            )
        job.post(Done(task.answer.whole(), self._usage(task), statistics, task.ids))
        self.engine.keep_reply(ids, logits)

    def _generate(self, task: Task, job: Job) -> tuple[str, list[int], Tensor]:
        """Return why the answer ended, all ids, and the logits that the last one was chosen from."""
        sampler = Sampler(task.sampling.temperature, task.sampling.top_p, task.sampling.seed)
        ids, reason = list(task.ids), None
        task.is_begun = True
        steps = self.engine.generate(task.ids, n_tokens=task.n_tokens, sampler=sampler)
        with closing(steps):
            for step in steps:
                ids.append(step.token)
                task.n_generated += 1
                self.metrics.step()
                job.post(Piece(task.answer.push(step.token, step.logits, is_end=step.finish == "end")))
                reason = REASONS[step.finish] if step.finish else "stop" if task.answer.is_over else None
                if reason is not None:
                    break
                job.check()
        assert reason is not None
        job.post(Piece(task.answer.finish(reason)))
        return reason, ids, step.logits

    def _usage(self, task: Task) -> Usage:
        return Usage(len(task.ids), self.engine.n_cached, task.n_generated, task.answer.n_reasoning)
