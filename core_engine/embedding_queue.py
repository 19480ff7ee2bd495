"""Inputs waiting for their vectors, in the engine's process: one is computed between two steps.

Knows messages and the engine's ``embed``; refuses to know how a vector is made.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable

from suimon.core_engine.errors import EngineDeadError, EngineError
from suimon.core_engine.messages import Embedding, EmbedRequest
from suimon.core_engine.public_text import public_text

logger = logging.getLogger(__name__)


class EmbeddingQueue:
    """Requests take turns, one input at a time, so that a small one never waits for all of a large one.

    Text being written never waits for more than one input.
    """

    def __init__(self, embed: Callable[[list[int]], list[float]]) -> None:
        self._embed = embed
        self._waiting: OrderedDict[str, deque[tuple[int, list[int]]]] = OrderedDict()  # whose turn is next comes first

    def __len__(self) -> int:
        """How many requests are not done."""
        return len(self._waiting)

    def add(self, message: EmbedRequest) -> None:
        """Queue every input of a request."""
        if message.inputs:
            self._waiting[message.request_id] = deque(enumerate(message.inputs))

    def abort(self, request_id: str) -> None:
        """Forget the inputs of a request."""
        self._waiting.pop(request_id, None)

    def step(self) -> Embedding:
        """Compute an input of the next request. What goes wrong is its failure; its other inputs are dropped.

        Raises EngineDeadError if no further input can be computed either.
        """
        request_id, inputs = self._waiting.popitem(last=False)
        index, token_ids = inputs.popleft()
        try:
            vector = self._embed(token_ids)
        except EngineDeadError:
            raise
        except Exception as error:
            if not isinstance(error, EngineError):
                logger.exception("could not embed input %d of request %s", index, request_id)
            return Embedding(request_id, index, error=public_text(error), error_kind=type(error).__name__)
        if inputs:
            self._waiting[request_id] = inputs
        return Embedding(request_id, index, vector)
