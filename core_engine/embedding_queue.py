"""Inputs waiting for their vectors, in the engine's process: one is computed between two steps.

Knows messages and the engine's ``embed``; refuses to know how a vector is made.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from suimon.core_engine.errors import EngineError
from suimon.core_engine.messages import Embedding, EmbedRequest
from suimon.core_engine.public_text import public_text

logger = logging.getLogger(__name__)


class EmbeddingQueue:
    """First come, first served, input by input, so that text being written never waits for more than one of them."""

    def __init__(self, embed: Callable[[list[int]], list[float]]) -> None:
        self._embed = embed
        self._waiting: deque[tuple[str, int, list[int]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, message: EmbedRequest) -> None:
        """Queue every input of a request."""
        self._waiting.extend((message.request_id, i, token_ids) for i, token_ids in enumerate(message.inputs))

    def abort(self, request_id: str) -> None:
        """Forget the inputs of a request."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != request_id)

    def step(self) -> Embedding:
        """Compute the first input. What goes wrong is its request's failure, whose other inputs are dropped."""
        request_id, index, token_ids = self._waiting.popleft()
        try:
            return Embedding(request_id, index, self._embed(token_ids))
        except Exception as error:
            if not isinstance(error, EngineError):
                logger.exception("could not embed input %d of request %s", index, request_id)
            self.abort(request_id)
            return Embedding(request_id, index, error=public_text(error), error_kind=type(error).__name__)
