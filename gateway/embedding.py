"""One request for embeddings through its backend: admitted, announced, observed, and held to the contract.

What ``generation`` is to answers. Knows EmbedRequests and Embeddings; refuses to know HTTP.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from suimon.gateway.generation import ContractBroken, explained
from suimon.gateway.hookspecs import Backend, DeadlineExceeded, Embeddings, EmbedRequest

if TYPE_CHECKING:
    from suimon.gateway.plugin_manager import PluginManager
    from suimon.gateway.served import Served
    from suimon.gateway.telemetry import Telemetry


class Embedder:
    """Makes embeddings. One per gateway."""

    def __init__(self, plugins: PluginManager, telemetry: Telemetry) -> None:
        self._hook = plugins.hook
        self._telemetry = telemetry

    async def embed(self, served: Served, request: EmbedRequest) -> Embeddings:
        """The backend's answer to a request that was routed to it. Raises BackendErrors only."""
        observed = self._telemetry.embedding(request, served_as=served.backend.model_id)
        with served.occupied(), observed as observation:
            if served.admission.is_queue:
                observation.queued()
            async with served.admission.admit(observation.request):
                observation.admitted()
                answer = await self._answer(served.backend, observation.request)
            observation.answered(answer)
            return answer

    async def _answer(self, backend: Backend, request: EmbedRequest) -> Embeddings:
        """Between the hooks, within the deadline."""
        answer: Embeddings | None = None
        failure: BaseException | None = None
        self._hook.request_started(request=request)
        try:
            answer = await _until(request.deadline, backend, request)
            _check(answer, request)
            return answer
        except BaseException as error:
            failure = error
            raise explained(error, backend, request) from error
        finally:
            usage = None if answer is None or failure is not None else answer.usage
            self._hook.request_finished(request=request, usage=usage, error=failure)


async def _until(deadline: float | None, backend: Backend, request: EmbedRequest) -> Embeddings:
    limit = asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic()))
    try:
        async with limit:
            return await backend.embed(request)
    except TimeoutError:
        if not limit.expired():
            raise  # the backend's own
        raise DeadlineExceeded("The deadline passed before the embeddings were complete.") from None


def _check(answer: Embeddings, request: EmbedRequest) -> None:
    """Raise ContractBroken unless there is one finite vector for each input, each as long as was asked for."""
    vectors = answer.vectors
    if len(vectors) != len(request.inputs):
        raise ContractBroken(f"{len(vectors)} vectors for {len(request.inputs)} inputs")
    wanted = request.dimensions or len(vectors[0])
    for index, vector in enumerate(vectors):
        if len(vector) != wanted or not wanted:
            raise ContractBroken(f"vector {index} has {len(vector)} numbers where {wanted} were due")
        if not all(map(math.isfinite, vector)):
            raise ContractBroken(f"vector {index} holds what is no finite number")
