"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, post

from suimon.gateway.auth import AUTH, KEY
from suimon.gateway.openai.bodies import CompletionRequest
from suimon.gateway.openai.requests import completion_requests
from suimon.gateway.openai.responses import CompletionAnswer
from suimon.gateway.routes.common import new_id, read_body, respond


@post("/v1/completions", status_code=200, opt={AUTH: KEY})
async def completions(request: Request[Any, Any, Any]) -> Response[Any]:
    """Continue one prompt or several."""
    body = await read_body(request, CompletionRequest)
    request_id = new_id(request, "cmpl-")
    generations = completion_requests(body, request_id)
    answer = CompletionAnswer(
        request_id, generations[0].model, include_usage=body.include_usage, logprobs=body.logprobs is not None
    )
    return await respond(request, body, answer, generations)
