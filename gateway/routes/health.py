"""The probes: answered without a key, while models load and while the server drains. They tell a state, no names."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Request, Response

from suimon.gateway.auth import AUTH, PUBLIC
from suimon.gateway.routes.common import gateway_of, json_response, read

# What a process that is not ready says of itself, the most important first.
_SERVING = ("ready", "degraded")
_STATES = ("failed", "draining", "restarting", "loading")


@read("/health/live", opt={AUTH: PUBLIC})
async def live(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Whether the process answers at all; restart it if not."""
    return _tell("alive", ok=True)


@read("/health/startup", opt={AUTH: PUBLIC})
async def startup(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Whether every model has been loaded once, or cannot be, and one at least has."""
    served = gateway_of(request).router.served.values()
    done = all(each.started or each.failure for each in served) and any(each.started for each in served)
    return _tell("started" if done else "loading", ok=done)


@read("/health/ready", opt={AUTH: PUBLIC})
async def ready(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Whether to send requests here: the server is not draining, all models have loaded or failed, and one is ready."""
    state = await _state(request)
    return _tell(state, ok=state in _SERVING)


@read("/health", opt={AUTH: PUBLIC})
async def health(request: Request[Any, Any, Any]) -> Response[bytes]:
    """The same as ready, under the name that other servers use."""
    state = await _state(request)
    return _tell(state, ok=state in _SERVING)


async def _state(request: Request[Any, Any, Any]) -> str:
    """``ready``, ``degraded`` when some models are not but others are, or what keeps the server from serving."""
    gateway = gateway_of(request)
    states = set(await asyncio.gather(*(model.state() for model in gateway.router.models.values())))
    if gateway.drain.draining:
        return "draining"
    troubles = sorted(states - {"ready"}, key=lambda state: _STATES.index(state) if state in _STATES else 0)
    if not troubles:
        return "ready"
    return "degraded" if "ready" in states and "loading" not in states else troubles[0]


def _tell(state: str, *, ok: bool) -> Response[bytes]:
    response = json_response({"status": state}, 200 if ok else 503)
    response.headers["cache-control"] = "no-store"
    if not ok:
        response.headers["retry-after"] = "1"
    return response
