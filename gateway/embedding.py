"""One request for embeddings through its backend: admitted, announced, observed, and held to the contract.

What ``generation`` is to answers. Knows EmbedRequests and Embeddings; refuses to know HTTP.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from suimon.gateway.announcing import Announcer, explaining
from suimon.gateway.deadlines import until
from suimon.gateway.generation import ContractBroken
from suimon.gateway.hookspecs import Embeddings, EmbedRequest

if TYPE_CHECKING:
    from suimon.gateway.plugin_manager import PluginManager
    from suimon.gateway.served import Served
    from suimon.gateway.telemetry import Telemetry

BREATH = 16  # vectors that are looked at, or written, before others get a turn


class Embedder:
    """Makes embeddings. One per gateway."""

    def __init__(self, plugins: PluginManager, telemetry: Telemetry) -> None:
        self._announcer = Announcer(plugins)
        self._telemetry = telemetry

    async def embed(self, served: Served, request: EmbedRequest) -> Embeddings:
        """The backend's answer to a request that was routed to it. Raises BackendErrors only."""
        backend = served.backend
        with served.occupied(), self._telemetry.embedding(request, served_as=backend.model_id) as observation:
            request = observation.request
            if served.admission.is_queue:
                observation.queued()
            async with served.admission.admit(request):
                observation.admitted()
                with explaining(backend, request), self._announcer.announced(request) as outcome:
                    answer = await until(request.deadline, backend.embed(request))
                    await _check(answer, request)
                    outcome.usage = answer.usage
            observation.answered(answer)
            return answer


async def _check(answer: Embeddings, request: EmbedRequest) -> None:
    """Raise ContractBroken unless there is one finite vector for each input, each as long as was asked for.

    Others get their turn meanwhile: there may be millions of numbers.
    """
    vectors = answer.vectors
    if len(vectors) != len(request.inputs):
        raise ContractBroken(f"{len(vectors)} vectors for {len(request.inputs)} inputs")
    wanted = request.dimensions or len(vectors[0])
    for index, vector in enumerate(vectors):
        if len(vector) != wanted or not wanted:
            raise ContractBroken(f"vector {index} has {len(vector)} numbers where {wanted} were due")
        if not _is_finite(vector):
            raise ContractBroken(f"vector {index} holds what is no finite number")
        if index % BREATH == BREATH - 1:
            await asyncio.sleep(0)


def _is_finite(vector: Sequence[float]) -> bool:
    """The sum says it at a fraction of the price, unless finite numbers add up to infinity."""
    return math.isfinite(sum(vector)) or all(map(math.isfinite, vector))
