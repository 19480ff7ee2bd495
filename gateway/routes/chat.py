"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, post

from suimon.gateway.auth import AUTH, KEY
from suimon.gateway.openai.bodies import ChatCompletionRequest
from suimon.gateway.openai.requests import chat_request
from suimon.gateway.openai.responses import ChatAnswer
from suimon.gateway.routes.common import new_id, read_body, respond


@post("/v1/chat/completions", status_code=200, opt={AUTH: KEY})
async def chat_completions(request: Request[Any, Any, Any]) -> Response[Any]:
    """Answer a chat."""
    body = await read_body(request, ChatCompletionRequest)
    generation = chat_request(body, new_id(request, "chatcmpl-"))
    answer = ChatAnswer(
        generation.request_id, generation.model, include_usage=body.include_usage, logprobs=body.logprobs
    )
    return await respond(request, body, answer, [generation])
