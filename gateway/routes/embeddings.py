"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Request, Response, post

from suimon.gateway import fallback
from suimon.gateway.auth import AUTH, KEY
from suimon.gateway.embedding import BREATH
from suimon.gateway.hookspecs import Embeddings
from suimon.gateway.openai.bodies import EmbeddingsRequest
from suimon.gateway.openai.requests import embed_request
from suimon.gateway.openai.responses import embedding_entry, embeddings_body
from suimon.gateway.routes.common import gateway_of, json_response, new_id, of_client, read_body
from suimon.gateway.streaming import unless_gone


@post("/v1/embeddings", status_code=200, opt={AUTH: KEY})
async def embeddings(request: Request[Any, Any, Any]) -> Response[bytes]:
    """The vectors of one input or several."""
    body = await read_body(request, EmbeddingsRequest)
    wanted = of_client(request, embed_request(body, new_id(request, "embd-")))
    gateway = gateway_of(request)
    work = fallback.ask(gateway.router, wanted, lambda served: gateway.embedder.embed(served, wanted))
    answer = await unless_gone(work, request.receive, gateway.drain)
    entries = await _entries(answer, body.encoding_format)
    return json_response(embeddings_body(entries, wanted.model, answer.usage))


async def _entries(answer: Embeddings, encoding_format: str) -> list[bytes]:
    """Millions of numbers take a second to write, in which the streams of others must go on."""
    entries = []
    for index, vector in enumerate(answer.vectors):
        entries.append(embedding_entry(vector, index, encoding_format))
        if index % BREATH == BREATH - 1:
            await asyncio.sleep(0)
    return entries
