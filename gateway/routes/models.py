"""GET /v1/models and /v1/models/{id}: the names that requests may use, and no others."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response

from suimon.gateway.auth import AUTH, KEY
from suimon.gateway.routes.common import gateway_of, json_response, read
from suimon.gateway.served import ServedModel


@read("/v1/models", opt={AUTH: KEY})
async def list_models(request: Request[Any, Any, Any]) -> Response[bytes]:
    """All served models."""
    gateway = gateway_of(request)
    data = [await _entry(model, gateway.created) for model in gateway.router.models.values()]
    return json_response({"object": "list", "data": data})


@read("/v1/models/{model_id:path}", opt={AUTH: KEY})
async def retrieve_model(request: Request[Any, Any, Any]) -> Response[bytes]:
    """One model, by its name or an alias; a name may hold slashes."""
    gateway = gateway_of(request)
    name = str(request.path_params["model_id"]).removeprefix("/")
    return json_response(await _entry(gateway.router.model(name), gateway.created))


async def _entry(model: ServedModel, created: int) -> dict[str, Any]:
    """OpenAI's fields, the one that vLLM adds, and ours in an object of their own."""
    started = [replica for replica in model.replicas if replica.started]
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "suimon",
        "max_model_len": model.replicas[0].backend.capabilities.max_model_len,
        "suimon": {
            "backend": model.backend,
            "state": await model.state(),
            "reason": model.reason,
            "aliases": list(model.aliases),
            "replicas": len(model.replicas),
            "ready": sum([(await replica.health()).ready for replica in model.replicas]),
            "fallback": list(model.fallback),
            "details": [line for replica in started[:1] for line in replica.describe()],
        },
    }
