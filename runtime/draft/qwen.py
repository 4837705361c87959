"""The drafter's process: a small language model that continues text, greedily, as long as it is sure enough.

Reads lines of JSON {text, n_most, gate} and answers each with {draft}. The one place that uses transformers.
"""

import importlib
import inspect
import json
import os
import sys
from typing import Any

import torch

_SAMPLE = "Über 3,14 and\n\tfi — 漢字 🙂 <|x|>"


class Drafter:
    """A model and the attention cache of the text that it saw last."""

    def __init__(self, path: str, device: str) -> None:
        transformers: Any = importlib.import_module("transformers")
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=dtype).to(device).eval()
        self._device, self._cache, self._seen = device, transformers.DynamicCache(), list[int]()
        # Its name changed in the course of transformers 5.
        self._cache_name = "cache" if "cache" in inspect.signature(self._model.forward).parameters else "past_key_values"
        config = self._model.config
        # Ids beyond the tokenizer's are padding of the matrix.
        self._n_usable = min(len(self._tokenizer), config.vocab_size)
        self._specials = set(self._tokenizer.all_special_ids)
        self._most_context = config.max_position_embeddings
        if (found := self._text(self._ids(_SAMPLE))) != _SAMPLE:
            raise ValueError(f"the tokenizer turns {_SAMPLE!r} into {found!r}, expected it unchanged")

    def continuation(self, text: str, n_most: int, gate: float) -> str:
        """Return up to n_most tokens, as text, each the likeliest one with a probability of at least `gate`."""
        ids = self._window(self._ids(text), n_most)
        if not ids:
            return ""
        drafts: list[int] = []
        while len(drafts) < n_most:
            token, probability = self._next([*ids, *drafts])
            if probability < gate or token in self._specials:
                break
            drafts.append(token)
        # Half a character at the end is no text.
        return self._text(drafts).partition("\ufffd")[0]

    @torch.inference_mode()
    def _next(self, ids: list[int]) -> tuple[int, float]:
        """Return the likeliest token after ids, and its probability. What the cache shares with them is not computed again."""
        n_shared = next((n for n, (a, b) in enumerate(zip(self._seen, ids, strict=False)) if a != b), min(len(self._seen), len(ids)))
        n_shared = min(n_shared, len(ids) - 1)
        if n_shared < len(self._seen):
            # Negative: by how much it gets shorter.
            self._cache.crop(n_shared - len(self._seen))
        self._seen = ids
        fresh = torch.tensor([ids[n_shared:]], device=self._device)
        outputs = self._model(fresh, use_cache=True, logits_to_keep=1, **{self._cache_name: self._cache})
        logits = outputs.logits[0, -1, : self._n_usable]
        probability, token = torch.softmax(logits.float(), dim=-1).max(dim=-1)
        return int(token), float(probability)

    def _window(self, ids: list[int], n_most: int) -> list[int]:
        """Return the last ids that fit; it moves by half its size, so that the cache serves most of the time."""
        room = self._most_context - n_most
        half = max(1, room // 2)
        return ids[-(-max(0, len(ids) - room) // half) * half :]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def main() -> None:
    """Serve requests until the other end closes."""
    # Libraries that print would garble the answers.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    drafter = Drafter(*sys.argv[1:3])
    answers.write(b'{"ready": true}\n')
    for line in sys.stdin.buffer:
        request = json.loads(line)
        draft = drafter.continuation(request["text"], request["n_most"], request["gate"])
        answers.write(json.dumps({"draft": draft}).encode() + b"\n")
