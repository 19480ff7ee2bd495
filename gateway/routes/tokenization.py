"""POST /tokenize and /detokenize, shaped as vLLM's."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, post

from suimon.gateway import fallback
from suimon.gateway.auth import AUTH, KEY
from suimon.gateway.hookspecs import GenerateRequest
from suimon.gateway.openai.bodies import DetokenizeRequest, TokenizeRequest
from suimon.gateway.openai.fields import refused, token_ids
from suimon.gateway.openai.requests import tokenize_request
from suimon.gateway.routes.common import gateway_of, json_response, new_id, of_client, read_body
from suimon.gateway.served import Served
from suimon.gateway.streaming import unless_gone


@post("/tokenize", status_code=200, opt={AUTH: KEY})
async def tokenize(request: Request[Any, Any, Any]) -> Response[bytes]:
    """The token ids of a prompt, or of messages as the model would read them."""
    body = await read_body(request, TokenizeRequest)
    gateway = gateway_of(request)
    wanted = of_client(request, tokenize_request(body, new_id(request, "tokenize-")))
    options = {} if body.add_special_tokens is None else {"add_special_tokens": body.add_special_tokens}

    async def ask(served: Served) -> tuple[Served, list[int]]:
        return served, await served.answer(wanted, lambda backend: backend.tokenize(wanted, **options))

    served, tokens = await unless_gone(fallback.ask(gateway.router, wanted, ask), request.receive, gateway.drain)
    limit = served.backend.capabilities.max_model_len
    return json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None})


@post("/detokenize", status_code=200, opt={AUTH: KEY})
async def detokenize(request: Request[Any, Any, Any]) -> Response[bytes]:
    """The text of token ids."""
    body = await read_body(request, DetokenizeRequest)
    gateway = gateway_of(request)
    if body.tokens is None:
        raise refused("tokens", "must be given")
    tokens = token_ids("tokens", body.tokens)
    empty = GenerateRequest(request_id=new_id(request, "detokenize-"), model=body.model or "")
    wanted = of_client(request, empty)

    async def ask(served: Served) -> str:
        return await served.answer(wanted, lambda backend: backend.detokenize(tokens))

    text = await unless_gone(fallback.ask(gateway.router, wanted, ask), request.receive, gateway.drain)
    return json_response({"prompt": text})
