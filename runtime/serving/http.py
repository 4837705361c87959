"""HTTP around the answers: who may ask, bodies of bounded size and time, events until the client is gone, and connections that say nothing."""

import asyncio
import fcntl
import hmac
import ipaddress
import json
import socket
import struct
import termios
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from manifests.errors import UsageError
from runtime.serving.schema import MAX_BODY_BYTES, ApiError

Json = dict[str, Any]

# How long a client may take nothing of an answer.
WRITE_TIMEOUT_S = 60.0
# A C struct linger: on, for 0 seconds.
_NO_LINGERING = struct.pack("ii", 1, 0)
# The page holds nothing but itself: what it shows it asks for, with a key where one is needed.
OPEN_PATHS = ("/", "/health")
EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Asks nginx to pass events on as they come.
    (b"x-accel-buffering", b"no"),
]


class Gone(Exception):
    """The client has closed its connection, or does not read."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that has the address for itself and does not listen yet, see `listen`. Raises UsageError if it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UsageError(f"--host {host} --port {port}: {error.strerror}; see what listens there with ss -ltnp, or give another port") from None
    # Linux lets sockets that do not listen share an address if all of them have this: another server could load its weights in vain.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return listener


def listen(listener: socket.socket) -> None:
    """Let clients connect to a socket of `bind`, though connections of a former server may still be closing."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.listen()


class Guard:
    """Decides who may ask. With keys: who knows one. Without: programs of this machine, but no web page that a browser here shows."""

    def __init__(self, keys: frozenset[bytes]) -> None:
        self._keys = keys

    def check(self, path: str, headers: Mapping[str, str]) -> None:
        """Raise ApiError unless a request may be answered."""
        if path in OPEN_PATHS:
            return
        if self._keys:
            self._check_key(headers.get("authorization", ""))
            return
        host = headers.get("host", "")
        # A name of another's that was made to point here: the browser would take our answers for that site's.
        if not is_loopback(_host_name(host).lower()):
            raise ApiError(403, f"Host: {host[:60]!r} is not this machine; without --api-key-file only this machine is served", code="wrong_host")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise ApiError(403, f"Origin: {origin[:60]!r} is another site; without --api-key-file web pages may not ask", code="wrong_origin")

    def _check_key(self, authorization: str) -> None:
        scheme, _, key = authorization.partition(" ")
        given = key.strip().encode("latin-1", "replace")
        # All are compared, so that time tells nothing.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            what = "the API key is not one of this server's" if authorization else "the request has no API key"
            raise ApiError(401, f"{what}; send the header Authorization: Bearer KEY", code="invalid_api_key")


def _host_name(host: str) -> str:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return name.removeprefix("[").removesuffix("]")


async def read_body(request: Request, *, timeout_s: float) -> bytes:
    """Return a request's body. Raises ApiError if it is too large or takes too long, Gone if the client closes."""
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s", code="timeout") from None
    except ClientDisconnect:
        raise Gone from None
    return bytes(body)


def _too_large() -> ApiError:
    return ApiError(413, f"the body has more than the {MAX_BODY_BYTES} bytes that are taken", code="too_large")


def error_response(error: ApiError) -> JSONResponse:
    """Return an error as an answer; what may be asked again soon says so."""
    headers = {"retry-after": "2"} if error.status == 429 else {}
    if error.status in (408, 413):
        # The rest of the body is not wanted.
        headers["connection"] = "close"
    return JSONResponse(error.body(), error.status, headers=headers)


class Inbox:
    """What other threads post for a request, until its client is gone. heartbeat_s: how long `next` waits at most."""

    def __init__(self, receive: Receive, *, heartbeat_s: float) -> None:
        self._loop, self._heartbeat_s = asyncio.get_running_loop(), heartbeat_s
        self._events: asyncio.Queue[object] = asyncio.Queue()
        self._watch = self._loop.create_task(self._until_gone(receive))

    def post(self, event: object) -> None:
        """Add an event; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def next(self) -> object | None:
        """Return the next event, None if there was none for heartbeat_s. Raises Gone."""
        try:
            async with asyncio.timeout(self._heartbeat_s):
                event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, Gone):
            raise event
        return event

    def close(self) -> None:
        self._watch.cancel()

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait(Gone())


class EventStream:
    """An answer of server-sent events. `events` yields complete ones, see `event` and `comment`; on_close is called at the end, whichever it is."""

    def __init__(self, events: AsyncGenerator[bytes], on_close: Callable[[], None]) -> None:
        self._events, self._on_close = events, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
            async for piece in self._events:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Gone:
            # An answer that is not complete has its connection closed.
            return
        finally:
            self._on_close()
            await self._events.aclose()


class NoAnswer:
    """What is said to a client that is gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


def event(data: Json | str) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def comment(text: str) -> bytes:
    """Return what clients of event streams leave out, and proxies see."""
    return f": {text}\n\n".encode()


def _n_untaken(transport: asyncio.Transport) -> int:
    """Return how many bytes for a client wait in the process and in the kernel."""
    (in_kernel,) = struct.unpack("i", fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4)))
    return transport.get_write_buffer_size() + int(in_kernel)


def timed_protocol(timeout_s: float, *, n_most: int) -> type[H11Protocol]:
    """Return the HTTP protocol, closing connections that only hold what others need.

    They are those above n_most, those whose request's head is not there after timeout_s, and those whose client takes nothing for WRITE_TIMEOUT_S.
    """

    class TimedProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # Anything that a client does not take is told, see pause_writing.
            transport.set_write_buffer_limits(high=0)
            self._look()
            # Each takes a descriptor, and reading experts needs some.
            if len(self.connections) > n_most:
                transport.abort()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._await_taking()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_awaiting()

        def _await_taking(self) -> None:
            # Nothing is added while writing is paused: the rest is smaller if something was taken.
            self._stop_awaiting()
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self._look_at_rest, _n_untaken(self.transport))

        def _look_at_rest(self, before: int) -> None:
            if _n_untaken(self.transport) < before:
                self._await_taking()
            else:
                # To close would wait until the rest is taken, here and in the kernel.
                self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
                self.transport.abort()

        def _stop_awaiting(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            self._stop_awaiting()
            super().connection_lost(exc)

        def _look(self) -> None:
            is_in_request = self.cycle is not None and not self.cycle.response_complete
            if is_in_request or self.transport.is_closing():
                self._stop()
            elif self._timer is None:
                self._timer = self.loop.call_later(timeout_s, self._give_up)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            self._timer = None
            if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
                self.transport.close()

    return TimedProtocol
