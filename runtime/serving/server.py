"""krun serve: OpenAI's API over one engine. The loop speaks HTTP, one other thread generates, one answer at a time.

Requests are checked before they wait, so that the queue holds nothing that can only fail.
"""

import asyncio
import contextlib
import itertools
import math
import secrets
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from layout.early_exit import REQUESTS_TO_END
from layout.sizes import counted
from manifests.errors import BadInputError, KtierError
from runtime.chat.format import EFFORTS, REQUEST_KEYS, Chat, encode_chat, parse_chat
from runtime.engine import check_ids
from runtime.serving.http import EventStream, Gone, Guard, Inbox, NoAnswer, comment, error_response, event, read_body, timed_protocol
from runtime.serving.metrics import GOOD, Metrics, prometheus_text
from runtime.serving.openapi import openapi
from runtime.serving.page import model_facts, page
from runtime.serving.prefixes import ServingEngine
from runtime.serving.queue import Cancelled, Failed, Job, JobQueue, QueueClosed, QueueFull
from runtime.serving.reply import Answer, ChatAnswer, CompletionAnswer
from runtime.serving.schema import (
    CHAT,
    COMPLETION,
    DEFAULT_COMPLETION_TOKENS,
    MAX_MESSAGES,
    TEXT,
    ApiError,
    Json,
    Sampling,
    field_of,
    parse_json,
    prompt_of,
    read_fields,
    refused,
    room_for,
    sampling,
    token_ids,
)
from runtime.serving.work import Done, Piece, Task, Worker
from runtime.tokens import Tokenizer

# What an answer is called in the API.
_CHAT, _TEXT = "chat.completion", "text_completion"
# /health says for so long what has happened before the process ends.
FAULT_SHOWN_S = 3.0
# Threads that turn texts into ids, so that a long one does not hold up the others.
N_TOKENISING = 2
# Connections at once. Requests of more are answered with 503, up to as many again; others are closed. Each takes a descriptor.
MOST_CONNECTIONS = 256
# Connections that are taken before one is looked at.
N_ACCEPTED = 64
# How long a connection may stay open between requests.
KEEP_ALIVE_S = 5.0
# How long nothing may come from us while a client waits: proxies cut a stream that is silent.
HEARTBEAT_S = 2.0
# How long after --drain a client may go on reading.
LAST_WORDS_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How to serve.

    keys         the API keys, none for no check
    heartbeat_s  how long a stream may be silent while its client waits
    """

    model_name: str
    keys: frozenset[bytes]
    n_queue: int
    drain_s: float
    read_timeout_s: float
    heartbeat_s: float = HEARTBEAT_S


class Server:
    """The API over an engine. `run` serves until a signal, a fault or `end`; afterwards `fault` says whether it was one."""

    def __init__(self, engine: ServingEngine, tokenizer: Tokenizer, options: ServerOptions, *, on_remark: Callable[[str], None]) -> None:
        self.engine, self.tokenizer, self.options, self._on_remark = engine, tokenizer, options, on_remark
        self.metrics = Metrics(engine)
        self.fault: Exception | None = None
        self._queue = JobQueue(options.n_queue, on_fault=self._take_fault)
        self._worker = Worker(engine, tokenizer, self.metrics, on_remark)
        self._numbers, self._created = itertools.count(1), int(time.time())
        self._http = _HttpServer(self._app(), options, on_signal=self._end)
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, listener: socket.socket) -> None:
        """Serve on a bound socket; what was begun is over afterwards."""
        try:
            asyncio.run(self._serve(listener))
        finally:
            self._queue.stop()

    async def _serve(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(N_TOKENISING, thread_name_prefix="tokens"))
        await self._http.serve(sockets=[listener])

    def end(self) -> None:
        """Let `run` end as a signal does; may be called from any thread once it serves."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        """Take nothing new; give up after --drain what is not over then, at a second call at once."""
        assert self._loop is not None
        if self._http.should_exit:
            self._on_remark("asked again to end: giving up what runs")
            self._queue.cancel_all()
            return
        self._on_remark(f"asked to end: no new requests; what runs and waits has {self.options.drain_s:g} s")
        self._queue.close()
        self._http.should_exit = True
        self._loop.call_later(self.options.drain_s, self._queue.cancel_all)

    def _take_fault(self, fault: Exception) -> None:
        """Called on the generation's thread."""
        self.fault = fault
        self._on_remark(f"generation has failed for good, the server ends: {type(fault).__name__}")
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.call_later, FAULT_SHOWN_S, setattr, self._http, "should_exit", True)

    def _app(self) -> ASGIApp:
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completion, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/", page),
            Route("/status", self._status),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/openapi.json", self._openapi),
        ]
        handlers = {ApiError: _tell, HTTPException: _tell_http, Gone: _tell_nobody, Exception: _tell_nothing}
        return _Guarded(Starlette(routes=routes, exception_handlers=handlers), Guard(self.options.keys))  # type: ignore[arg-type]

    # Generating.

    async def _completion(self, request: Request) -> Any:
        body = await self._body(request)
        found = read_fields(body, COMPLETION, others=("prompt",))
        settings = self._sampling(found, is_chat=False)
        prompt = prompt_of(body.get("prompt"))
        ids = await self._ids(prompt) if isinstance(prompt, str) else prompt
        answer = CompletionAnswer(self.tokenizer, stops=settings.stops, n_logprobs=settings.n_logprobs, wants_ids=settings.wants_ids)
        return await self._generate(request, _TEXT, ids, settings, answer, default=DEFAULT_COMPLETION_TOKENS)

    async def _chat(self, request: Request) -> Any:
        body = await self._body(request)
        found = read_fields(body, CHAT, others=REQUEST_KEYS)
        settings = self._sampling(found, is_chat=True)
        chat = _chat_of(body, found.get("reasoning_effort"))
        ids = await asyncio.to_thread(encode_chat, chat, self.tokenizer)
        answer = ChatAnswer(
            self.tokenizer, start=chat.reply_start, stops=settings.stops, n_logprobs=settings.n_logprobs, wants_ids=settings.wants_ids
        )
        return await self._generate(request, _CHAT, ids, settings, answer, default=None)

    async def _generate(self, request: Request, kind: str, ids: list[int], settings: Sampling, answer: Answer, *, default: int | None) -> Any:
        context = self.engine.context
        n_tokens = room_for(len(ids), settings.n_tokens, context=context, default=default)
        try:
            check_ids(ids, self.engine.geometry, context)
        except BadInputError as error:
            raise ApiError(400, str(error), param="prompt") from None
        task = Task(number=next(self._numbers), name=kind, ids=ids, is_chat=kind == _CHAT, n_tokens=n_tokens, sampling=settings, answer=answer)
        inbox = Inbox(request.receive, heartbeat_s=self.options.heartbeat_s)
        job = Job(partial(self._worker.run, task), inbox.post)
        try:
            self._put(job)
        except ApiError:
            inbox.close()
            raise
        head = _Head(kind, self.options.model_name, wants_ids=settings.wants_ids)

        def end() -> None:
            inbox.close()
            self._queue.cancel(job)

        if settings.is_stream:
            return EventStream(self._events(task, job, inbox, head), end)
        try:
            return await self._plain(inbox, head)
        finally:
            end()

    def _put(self, job: Job) -> None:
        try:
            self._queue.put(job)
        except QueueFull:
            waiting = counted(self._queue.n_waiting, "request waits", "requests wait")
            what = f"{waiting} already, and no more than {self.options.n_queue} may (--queue); try again later"
            raise ApiError(429, what, kind="rate_limit_error", code="queue_full") from None
        except QueueClosed:
            raise self._closed() from None

    def _closed(self) -> ApiError:
        what = "the server has failed and ends" if self.fault else "the server ends"
        return ApiError(503, f"{what}; try again when it has been started again", kind="server_error", code="ending")

    async def _plain(self, inbox: Inbox, head: "_Head") -> JSONResponse:
        while True:
            match await inbox.next():
                case Failed(error):
                    raise self._failure(error)
                case Done() as done:
                    return JSONResponse(head.whole(done))

    async def _events(self, task: Task, job: Job, inbox: Inbox, head: "_Head") -> AsyncGenerator[bytes]:
        yield comment(self._progress(task, job))
        while True:
            match await inbox.next():
                case None:
                    yield comment(self._progress(task, job))
                case Piece(choice) if choice["finish_reason"] is None:
                    yield event(head.chunk([choice]))
                case Piece(choice):
                    last = choice
                case Failed(error):
                    yield event(self._failure(error).body())
                    return
                case Done() as done:
                    yield event(head.last_chunk(last, done))
                    if task.sampling.wants_usage:
                        yield event(head.chunk([]) | {"usage": done.usage.body()})
                    yield event("[DONE]")
                    return

    def _progress(self, task: Task, job: Job) -> str:
        if not task.is_begun:
            return f"queue position {self._queue.position(job)}"
        if not task.n_generated:
            return f"prompt pass {100 * self.engine.prompt_share:.0f} % of {counted(len(task.ids) - self.engine.n_cached, 'token')}"
        return f"{counted(task.n_generated, 'token')} generated"

    def _failure(self, error: Exception) -> ApiError:
        """Return what the client is told; what names files is for the log alone."""
        if isinstance(error, Cancelled):
            return self._closed()
        self._on_remark(f"{type(error).__name__}: {error}")
        what = "the model's data could not be read" if isinstance(error, KtierError) else "the server has failed and ends"
        return ApiError(500, f"{what}; the server's log says more", kind="server_error", code="failed")

    # Reading requests.

    async def _body(self, request: Request) -> Json:
        return parse_json(await read_body(request, timeout_s=self.options.read_timeout_s))

    async def _ids(self, text: str) -> list[int]:
        return await asyncio.to_thread(self.tokenizer.encode, text)

    def _sampling(self, found: Json, *, is_chat: bool) -> Sampling:
        self._check_model(found.get("model", self.options.model_name))
        return sampling(found, is_chat=is_chat)

    def _check_model(self, name: str) -> None:
        if name != self.options.model_name:
            what = f"model: {name[:60]!r} is not served here; the model is {self.options.model_name!r}"
            raise ApiError(404, what, param="model", code="model_not_found")

    # What is told of model and server.

    async def _models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [self._model_facts()]})

    async def _model(self, request: Request) -> JSONResponse:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model_facts())

    def _model_facts(self) -> Json:
        name = self.options.model_name
        return {"id": name, "object": "model", "created": self._created, "owned_by": "ktier", "context_length": self.engine.context}

    async def _tokenize(self, request: Request) -> JSONResponse:
        body = await self._body(request)
        if "prompt" in body:
            found = read_fields(body, {"model": TEXT, "prompt": TEXT}, others=())
            ids = await self._ids(found.get("prompt") or "")
        else:
            read_fields(body, {"model": TEXT}, others=REQUEST_KEYS)
            ids = await asyncio.to_thread(encode_chat, _chat_of(body, None), self.tokenizer)
        return JSONResponse({"tokens": ids, "count": len(ids)})

    async def _detokenize(self, request: Request) -> JSONResponse:
        body = await self._body(request)
        read_fields(body, {"model": TEXT}, others=("tokens",))
        ids = token_ids(body.get("tokens"), "tokens")
        try:
            return JSONResponse({"prompt": await asyncio.to_thread(self.tokenizer.decode, ids)})
        except BadInputError as error:
            raise refused("tokens", str(error)) from None

    def _state(self, drive_states: list[str]) -> str:
        """Return how the server is, in a word."""
        if self.fault:
            return "failed"
        return "ending" if self._http.should_exit else "ok" if all(s in GOOD for s in drive_states) else "degraded"

    async def _status(self, request: Request) -> JSONResponse:
        found = self.metrics.snapshot()
        head = {"status": self._state([drive["state"] for drive in found["drives"]]), "model": self._model_facts() | model_facts(self.engine)}
        queue = {"running": int(self._queue.is_busy), "waiting": self._queue.n_waiting, "most_waiting": self._queue.n_most}
        return JSONResponse(head | {"queue": queue, "running": self._worker.progress()} | found)

    async def _health(self, request: Request) -> JSONResponse:
        states = self.metrics.drive_states()
        status = self._state(states)
        drives = [{"drive": n, "tier": tier, "state": s} for n, (tier, s) in enumerate(zip(self.metrics.tiers, states, strict=True))]
        body = {"status": status, "running": int(self._queue.is_busy), "waiting": self._queue.n_waiting, "drives": drives}
        return JSONResponse(body, 503 if status in ("failed", "ending") else 200)

    async def _metrics(self, request: Request) -> PlainTextResponse:
        queue = self._queue
        families = self.metrics.families(
            queue={"waiting": queue.n_waiting, "running": int(queue.is_busy)},
            outcomes={"done": queue.n_done, "failed": queue.n_failed, "cancelled": queue.n_cancelled, "refused": queue.n_refused},
            is_up=self.fault is None,
        )
        return PlainTextResponse(prometheus_text(families), media_type="text/plain; version=0.0.4")

    async def _openapi(self, request: Request) -> JSONResponse:
        return JSONResponse(openapi(model_name=self.options.model_name, has_keys=bool(self.options.keys)))


class _Head:
    """What every part of an answer begins with."""

    def __init__(self, kind: str, model: str, *, wants_ids: bool) -> None:
        prefix = "chatcmpl" if kind == _CHAT else "cmpl"
        self._facts: Json = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._kind, self._wants_ids = kind, wants_ids

    def chunk(self, choices: list[Json]) -> Json:
        kind = "chat.completion.chunk" if self._kind == _CHAT else self._kind
        return {**self._facts, "object": kind, "choices": choices}

    def last_chunk(self, choice: Json, done: Done) -> Json:
        return self.chunk([choice]) | self._beside(done)

    def whole(self, done: Done) -> Json:
        return {**self._facts, "object": self._kind, "choices": [done.choice], "usage": done.usage.body()} | self._beside(done)

    def _beside(self, done: Done) -> Json:
        """Return what OpenAI's form does not have."""
        return {"ktier": done.statistics} | ({"prompt_token_ids": done.ids} if self._wants_ids else {})


def _chat_of(body: Json, reasoning_effort: str | None) -> Chat:
    """Return the conversation in a request. Raises ApiError naming the field."""
    request = {key: body[key] for key in REQUEST_KEYS if key in body}
    if reasoning_effort is not None:
        if reasoning_effort not in EFFORTS:
            raise refused("reasoning_effort", f"is {reasoning_effort!r}, expected one of {', '.join(EFFORTS)}; thinking: false turns reasoning off")
        if request.get("thinking_effort") not in (None, reasoning_effort):
            raise refused("reasoning_effort", f"is {reasoning_effort!r}, but thinking_effort says otherwise; give one of them")
        request["thinking_effort"] = reasoning_effort
    messages = request.get("messages")
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise refused("messages", f"holds {len(messages)} messages, expected at most {MAX_MESSAGES}")
    try:
        return parse_chat(request)
    except BadInputError as error:
        raise ApiError(400, str(error), param=field_of(str(error))) from None


class _Guarded:
    """An app that only those reach who may."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._guard.check(scope["path"], Request(scope).headers)
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _tell(request: Request, error: ApiError) -> JSONResponse:
    return error_response(error)


async def _tell_http(request: Request, error: HTTPException) -> JSONResponse:
    what = {404: f"{request.url.path[:60]}: there is nothing here; see /openapi.json", 405: f"{request.method} is not answered here"}
    answer = error_response(ApiError(error.status_code, what.get(error.status_code, error.detail)))
    # With 405 the methods that are.
    answer.headers.update(error.headers or {})
    return answer


async def _tell_nobody(request: Request, error: Gone) -> Any:
    return NoAnswer()


async def _tell_nothing(request: Request, error: Exception) -> JSONResponse:
    """Answer where the program has a fault; uvicorn writes it to the log."""
    return error_response(ApiError(500, "the server has a fault; its log says more", kind="server_error"))


class _HttpServer(uvicorn.Server):
    """uvicorn with our own way to end: signals are told, and none is raised again afterwards."""

    def __init__(self, app: ASGIApp, options: ServerOptions, *, on_signal: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=timed_protocol(options.read_timeout_s, n_most=2 * MOST_CONNECTIONS),
                backlog=N_ACCEPTED,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=MOST_CONNECTIONS,
                timeout_keep_alive=math.ceil(min(KEEP_ALIVE_S, options.read_timeout_s)),
                timeout_graceful_shutdown=int(options.drain_s + LAST_WORDS_S) + 1,
            )
        )
        self._on_signal = on_signal

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            # Signals are for the main thread alone to hear.
            yield
            return
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in REQUESTS_TO_END}
        for number in before:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)
