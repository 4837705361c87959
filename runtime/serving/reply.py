"""Answers as they grow: tokens to text, cut at stop strings, with log-probabilities, in the JSON of OpenAI's two endpoints.

Runs on the generation's thread, one token at a time, so that a stop string ends the work at the very token that completes it.
"""

import secrets
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from runtime.chat.format import ReplyStart
from runtime.chat.reply import Delta, ReplyParser
from runtime.tokens import TextStream, Tokenizer

Json = dict[str, Any]

# What JSON has in the place of minus infinity.
LEAST_LOGPROB = -9999.0


class Usage(NamedTuple):
    """Tokens of a request: of the prompt, how many of them a kept state held, of the answer, and how many of those are reasoning."""

    n_prompt: int
    n_cached: int
    n_generated: int
    n_reasoning: int

    def body(self) -> Json:
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_generated,
            "total_tokens": self.n_prompt + self.n_generated,
            "prompt_tokens_details": {"cached_tokens": self.n_cached},
            "completion_tokens_details": {"reasoning_tokens": self.n_reasoning},
        }


class Answer(Protocol):
    """What an endpoint makes of tokens."""

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended of itself, so that no further token is wanted."""
        ...

    @property
    def n_reasoning(self) -> int: ...

    def push(self, token: int, logits: Tensor, *, is_end: bool) -> Json:
        """Return a choice of a chunk with what the token adds. is_end: whether it is one that ends a text."""
        ...

    def finish(self, reason: str) -> Json:
        """Return the last chunk's choice, with what was held back."""
        ...

    def whole(self) -> Json:
        """Return the choice of a plain answer, after `finish`."""
        ...


class StopText:
    """Text that comes in pieces, cut where the first of some strings begins. What could begin one is held back."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops, self._held, self.is_over = stops, "", False

    def push(self, piece: str) -> str:
        """Return the text that is certain now."""
        if self.is_over:
            return ""
        self._held += piece
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.is_over = True
            return self._take(min(found))
        return self._take(len(self._held) - max((_n_begun(self._held, stop) for stop in self._stops), default=0))

    def finish(self) -> str:
        """Return what was held back and turned out to be text."""
        return "" if self.is_over else self._take(len(self._held))

    def _take(self, n: int) -> str:
        text, self._held = self._held[:n], self._held[n:]
        return text


def _n_begun(text: str, stop: str) -> int:
    """Return how many characters at the end of the text begin the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class Logprob(NamedTuple):
    token: int
    logprob: float
    likeliest: list[tuple[int, float]]


def logprob_of(token: int, logits: Tensor, n_likeliest: int) -> Logprob:
    """Return the log-probability of a token and of the n likeliest ones, before temperature. logits: float32 [vocabulary]."""
    values = logits.double().log_softmax(-1)
    likeliest = values.topk(n_likeliest)
    pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return Logprob(token, _finite(values[token].item()), [(other, _finite(value)) for other, value in pairs])


def _finite(value: float) -> float:
    return max(value, LEAST_LOGPROB)


def _named(tokenizer: Tokenizer, token: int, logprob: float) -> Json:
    content = tokenizer.token_bytes(token)
    return {"token": content.decode(errors="replace"), "logprob": logprob, "bytes": list(content)}


class CompletionAnswer:
    """A text that goes on from the prompt. The token that ends it is no part of the text."""

    n_reasoning = 0

    def __init__(self, tokenizer: Tokenizer, *, stops: tuple[str, ...], n_logprobs: int | None, wants_ids: bool) -> None:
        self._tokenizer, self._n_logprobs, self._wants_ids = tokenizer, n_logprobs, wants_ids
        self._stream, self._stop = TextStream(tokenizer), StopText(stops)
        self._text, self._ids, self._finish = "", list[int](), ""
        self._logprobs: list[Logprob] = []
        self._offsets: list[int] = []
        self._n_chars = 0

    @property
    def is_over(self) -> bool:
        return self._stop.is_over

    def push(self, token: int, logits: Tensor, *, is_end: bool) -> Json:
        self._ids.append(token)
        n_before = len(self._logprobs)
        piece = "" if is_end else self._stream.push(token)
        if self._n_logprobs is not None and not is_end:
            self._logprobs.append(logprob_of(token, logits, self._n_logprobs))
            self._offsets.append(self._n_chars)
        self._n_chars += len(piece)
        return self._choice(self._grown(self._stop.push(piece)), [token], n_before)

    def finish(self, reason: str) -> Json:
        self._finish = reason
        text = self._grown(self._stop.push(self._stream.finish()) + self._stop.finish())
        return self._choice(text, [], len(self._logprobs))

    def whole(self) -> Json:
        return self._choice(self._text, self._ids, 0)

    def _grown(self, text: str) -> str:
        self._text += text
        return text

    def _choice(self, text: str, ids: list[int], n_before: int) -> Json:
        ids_too = {"token_ids": ids} if self._wants_ids else {}
        return {"index": 0, "text": text, "logprobs": self._told(n_before), "finish_reason": self._finish or None} | ids_too

    def _told(self, n_before: int) -> Json | None:
        """Return the log-probabilities from the n-th on."""
        if self._n_logprobs is None:
            return None
        entries = self._logprobs[n_before:]

        def text(token: int) -> str:
            return self._tokenizer.decode([token])

        return {
            "tokens": [text(entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{text(token): value for token, value in reversed(entry.likeliest)} for entry in entries],
            "text_offset": self._offsets[n_before:],
        }


class ChatAnswer:
    """A reply in a conversation. Stop strings are looked for in its content, not in reasoning and calls."""

    def __init__(self, tokenizer: Tokenizer, *, start: ReplyStart | None, stops: tuple[str, ...], n_logprobs: int | None, wants_ids: bool) -> None:
        self._tokenizer, self._n_logprobs, self._wants_ids = tokenizer, n_logprobs, wants_ids
        self._parser, self._stop = ReplyParser(tokenizer, start=start), StopText(stops)
        self._start = start
        self._content, self._ids, self._finish = "", list[int](), ""
        self._logprobs: list[Json] = []
        self._call_ids: list[str] = []
        self.n_reasoning = 0

    @property
    def is_over(self) -> bool:
        return self._stop.is_over or self._parser.has_ended

    def push(self, token: int, logits: Tensor, *, is_end: bool) -> Json:
        self._ids.append(token)
        n_before, is_first = len(self._logprobs), len(self._ids) == 1
        if self._n_logprobs is not None and not is_end:
            entry = logprob_of(token, logits, self._n_logprobs)
            likeliest = [_named(self._tokenizer, other, value) for other, value in entry.likeliest]
            self._logprobs.append(_named(self._tokenizer, token, entry.logprob) | {"top_logprobs": likeliest})
        deltas = self._parser.finish() if is_end else self._parser.push([token])
        self.n_reasoning += any(delta.field == "reasoning_content" for delta in deltas)
        delta = self._delta(deltas)
        return self._choice(delta | ({"role": "assistant"} if is_first else {}), [token], n_before)

    def finish(self, reason: str) -> Json:
        delta = self._delta(self._parser.finish())
        if rest := self._stop.finish():
            self._content += rest
            delta["content"] = delta.get("content", "") + rest
        self._finish = "tool_calls" if reason == "stop" and self._call_ids and not self._stop.is_over else reason
        return self._choice(delta, [], len(self._logprobs))

    def whole(self) -> Json:
        reply = self._parser.reply
        message: Json = {"role": "assistant", "content": self._content if self._content or not self._call_ids else None, "refusal": None}
        if self._start == "think" or reply.reasoning_content:
            message["reasoning_content"] = reply.reasoning_content
        if self._call_ids:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call_id, call in zip(self._call_ids, reply.tool_calls, strict=True)
            ]
        choice = {"index": 0, "message": message, "logprobs": self._told(0), "finish_reason": self._finish}
        return choice | ({"token_ids": self._ids} if self._wants_ids else {})

    def _delta(self, deltas: list[Delta]) -> Json:
        """Return what a chunk says of these deltas."""
        said: Json = {}
        for delta in deltas:
            if delta.field == "tool_calls":
                said.setdefault("tool_calls", []).append(self._call(delta))
                continue
            text = delta.text
            if delta.field == "content":
                text = self._stop.push(text)
                self._content += text
            if text:
                said[delta.field] = said.get(delta.field, "") + text
        return said

    def _call(self, delta: Delta) -> Json:
        if delta.name is None:
            return {"index": delta.call, "function": {"arguments": delta.text}}
        self._call_ids.append(f"call_{secrets.token_hex(12)}")
        return {"index": delta.call, "id": self._call_ids[-1], "type": "function", "function": {"name": delta.name, "arguments": delta.text}}

    def _choice(self, delta: Json, ids: list[int], n_before: int) -> Json:
        ids_too = {"token_ids": ids} if self._wants_ids else {}
        return {"index": 0, "delta": delta, "logprobs": self._told(n_before), "finish_reason": self._finish or None} | ids_too

    def _told(self, n_before: int) -> Json | None:
        return None if self._n_logprobs is None else {"content": self._logprobs[n_before:], "refusal": None}
