"""The page at `/`: one file that asks /status and the API, and the headers that let it ask nobody else."""

import base64
import functools
import hashlib
import re
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse

from runtime.serving.prefixes import ServingEngine

_INLINE = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


async def page(request: Request) -> HTMLResponse:
    text, headers = _page()
    return HTMLResponse(text, headers=headers)


@functools.cache
def _page() -> tuple[str, dict[str, str]]:
    """Return the page and its headers. Its own style and script are allowed by their hashes, and nothing else is."""
    text = resources.files("runtime.serving").joinpath("pages/status.html").read_text(encoding="utf-8")
    hashes = {kind: f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'" for kind, content in _INLINE.findall(text)}
    policy = {
        "default-src": "'none'",
        "style-src": hashes["style"],
        "script-src": hashes["script"],
        "connect-src": "'self'",
        # An empty icon, so that browsers do not ask for one.
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return text, {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def model_facts(engine: ServingEngine) -> dict[str, Any]:
    """Return what is true of the model and its places for as long as the server runs."""
    g = engine.geometry
    return {
        "architecture": engine.prepared.manifest.source.architecture,
        "device": str(engine.device),
        "n_layers": g.n_layers,
        "n_experts": g.n_experts,
        "n_experts_per_token": g.n_experts_per_token,
        "device_slots": engine.vram.n_slots,
        "host_slots": engine.host.n_slots,
        "record_bytes": engine.prepared.record.n_bytes,
    }
