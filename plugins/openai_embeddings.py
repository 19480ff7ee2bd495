"""Vectors of servers that speak OpenAI's API: what is asked, and the answer as Embeddings.

Asked for in base64, which takes a quarter of the bytes and a fraction of the time to read; a server that does not know
it sends lists of numbers, and those are read too. Knows these shapes; refuses to know connections.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from suimon.gateway.hookspecs import Embeddings, EmbedRequest, Usage
from suimon.plugins.openai_wire import WireUsage

PATH = "/v1/embeddings"


class WireVector(msgspec.Struct, frozen=True):
    """One vector: base64 of float32s, or a list of numbers. Left undecoded, since there may be millions of them."""

    embedding: msgspec.Raw
    index: int = 0


class WireVectors(msgspec.Struct, frozen=True):
    """An answer."""

    data: list[WireVector]
    usage: WireUsage


_decode = msgspec.json.Decoder(str | list[float]).decode


def embeddings_body(request: EmbedRequest, model: str) -> dict[str, Any]:
    """The body of a request."""
    body: dict[str, Any] = {"model": model, "input": list(request.inputs), "encoding_format": "base64"}
    return body if request.dimensions is None else body | {"dimensions": request.dimensions}


async def embeddings_of(answer: WireVectors, count: int) -> Embeddings:
    """The vectors of ``count`` inputs, in their order. Raises ValueError for other vectors than one for each input."""
    found = sorted(answer.data, key=lambda vector: vector.index)
    if [vector.index for vector in found] != list(range(count)):
        raise ValueError("not one vector for each input")
    vectors = await asyncio.to_thread(_decode_all, found)
    if len({len(vector) for vector in vectors}) != 1:
        raise ValueError("vectors of several lengths")
    return Embeddings(vectors=vectors, usage=Usage(prompt_tokens=answer.usage.prompt_tokens))


def _decode_all(vectors: Sequence[WireVector]) -> tuple[array[float], ...]:
    """In a thread, one vector at a time: no other work waits for longer than one takes."""
    try:
        return tuple(_floats(_decode(vector.embedding)) for vector in vectors)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError("a vector that is none") from error


def _floats(vector: str | list[float]) -> array[float]:
    return array("f", base64.b64decode(vector, validate=True) if isinstance(vector, str) else vector)
