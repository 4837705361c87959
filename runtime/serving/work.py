"""One generation, from token ids to the answer's pieces, on the generation's thread."""

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from layout.sizes import counted
from runtime.sampler import Sampler
from runtime.serving.metrics import Metrics, request_statistics
from runtime.serving.prefixes import ServingEngine
from runtime.serving.queue import Job
from runtime.serving.reply import Answer, Usage
from runtime.serving.schema import Sampling
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


class Generation:
    """One answer as it comes.

    text    ids of the prompt and of the answer so far
    reason  why the answer ended; None until it has
    """

    def __init__(self, engine: ServingEngine, answer: Answer, ids: list[int], *, n_tokens: int, sampler: Sampler) -> None:
        self.text = list(ids)
        self.reason: str | None = None
        self._engine, self._answer, self._sampler = engine, answer, sampler
        # Without a limit of its own an answer may have been given room before its prompt was retold.
        self._n_prompt, self._n_most = len(ids), min(n_tokens, engine.context - len(ids))
        self._logits: Tensor | None = None

    @property
    def n_generated(self) -> int:
        return len(self.text) - self._n_prompt

    def choices(self, check: Callable[[], None]) -> Generator[Json, None, None]:
        """Yield a chunk's choice for each token, and the last one. `check` is called before each further step; what it raises ends the work."""
        steps = self._engine.generate(list(self.text), n_tokens=self._n_most, sampler=self._sampler)
        with closing(steps):
            for step in steps:
                self.text.append(step.token)
                self._logits = step.logits
                yield self._answer.push(step.token, step.logits, is_end=step.finish == "end")
                self.reason = REASONS[step.finish] if step.finish else "stop" if self._answer.is_over else None
                if self.reason is not None:
                    break
                check()
        assert self.reason is not None
        yield self._answer.finish(self.reason)

    def usage(self) -> Usage:
        return Usage(self._n_prompt, self._engine.n_cached, self.n_generated, self._answer.n_reasoning)

    def keep(self) -> None:
        """Keep the state for a text that goes on from here."""
        if self._logits is not None:
            self._engine.keep_reply(self.text, self._logits)


def as_kept(engine: ServingEngine, ids: list[int], tokenizer: Tokenizer, *, n_least: int) -> list[int]:
    """Return a conversation's ids as a kept state has them, if one says the same in other tokens and leaves room for n_least more."""
    retold = engine.kept.retold(ids, tokenizer)
    return retold if len(retold) + n_least <= engine.context else ids


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


@dataclass(slots=True)
class Worker:
    """What generations are done with. running: the task that is under way, for any thread to read."""

    engine: ServingEngine
    tokenizer: Tokenizer
    metrics: Metrics
    on_remark: Callable[[str], None]
    running: Task | None = None

    def run(self, task: Task, job: Job) -> None:
        """Generate, posting Pieces and then Done. Raises Cancelled if the job is given up, KtierError as the engine does."""
        queue_s = time.perf_counter() - task.queued_at
        self.engine.begin_request(job.check)
        self.metrics.begin()
        if task.is_chat:
            task.ids = as_kept(self.engine, task.ids, self.tokenizer, n_least=task.sampling.n_tokens or 1)
        sampler = Sampler(task.sampling.temperature, task.sampling.top_p, task.sampling.seed)
        generation = Generation(self.engine, task.answer, task.ids, n_tokens=task.n_tokens, sampler=sampler)
        task.is_begun, self.running = True, task
        try:
            self._post_pieces(generation, task, job)
            statistics = request_statistics(self.engine, n_generated=task.n_generated, queue_s=queue_s)
        finally:
            self.running = None
            self._tell(task, how=generation.reason or "failed or given up", queue_s=queue_s)
        job.post(Done(task.answer.whole(), generation.usage(), statistics, task.ids))
        generation.keep()

    def progress(self) -> Json | None:
        """Return how far the task under way is; None if there is none. May be called by any thread."""
        task = self.running
        if task is None:
            return None
        facts = {"number": task.number, "kind": task.name, "n_prompt": len(task.ids), "n_cached": self.engine.n_cached}
        return facts | {"prompt_share": self.engine.prompt_share, "n_generated": task.n_generated}

    def _post_pieces(self, generation: Generation, task: Task, job: Job) -> None:
        with closing(generation.choices(job.check)) as choices:
            for choice in choices:
                if choice["finish_reason"] is None:
                    task.n_generated += 1
                    self.metrics.step()
                job.post(Piece(choice))

    def _tell(self, task: Task, *, how: str, queue_s: float) -> None:
        """Write the task down, whichever way it ended."""
        seconds = time.perf_counter() - task.queued_at
        facts = {"number": task.number, "kind": task.name, "n_prompt": len(task.ids), "n_cached": self.engine.n_cached}
        facts |= {"n_generated": task.n_generated, "ended_by": how, "seconds": seconds}
        told = request_statistics(self.engine, n_generated=task.n_generated, queue_s=queue_s) if task.n_generated else {}
        self.metrics.end(facts | {name: told.get(name) for name in ("time_to_first_token_s", "steady_decode_tok_per_s")})
        self.on_remark(
            f"request {task.number}: {task.name}, {counted(len(task.ids), 'prompt token')}, {self.engine.n_cached} of them kept, "
            f"{task.n_generated} generated, {seconds:.1f} s; {how}"
        )
