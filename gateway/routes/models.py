"""GET /v1/models and /v1/models/{id}: the names that requests may use, and no others."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response

from suimon.gateway.auth import AUTH, KEY
from suimon.gateway.router import Served
from suimon.gateway.routes.common import gateway_of, json_response, read


@read("/v1/models", opt={AUTH: KEY})
async def list_models(request: Request[Any, Any, Any]) -> Response[bytes]:
    """All served models."""
    gateway = gateway_of(request)
    data = [_model(served, gateway.created) for served in gateway.router.served.values()]
    return json_response({"object": "list", "data": data})


@read("/v1/models/{model_id:path}", opt={AUTH: KEY})
async def retrieve_model(request: Request[Any, Any, Any]) -> Response[bytes]:
    """One model; its name may hold slashes."""
    gateway = gateway_of(request)
    name = str(request.path_params["model_id"]).removeprefix("/")
    return json_response(_model(gateway.router.find(name), gateway.created))


def _model(served: Served, created: int) -> dict[str, Any]:
    return {
        "id": served.backend.model_id,
        "object": "model",
        "created": created,
        "owned_by": "suimon",
        "max_model_len": served.backend.capabilities.max_model_len,
    }
