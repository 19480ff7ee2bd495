"""Which of several replicas gets a request, as the model's ``routing`` says.

least_loaded: the replica with the fewest requests. prefix: requests that begin alike go to one replica, whose prefix
cache then has their beginning, unless it has much more to do than the least loaded one: rendezvous hashing (Thaler and
Ravishankar 1998), so that a replica that comes or goes moves only its own share, with a bound on loads as in Mirrokni,
Thorup and Zadimoghaddam 2018.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from suimon.gateway.hookspecs import Backend, EmbedRequest, GenerateRequest, Load, Replica, hookimpl

# A replica is left out while it has this many times, and this many more, of the least loaded one's requests.
BOUND, SLACK = 2.0, 4


@hookimpl(trylast=True)
def route_request(request: GenerateRequest | EmbedRequest, replicas: Sequence[Replica], routing: str) -> Backend | None:
    """A replica by the model's own rule; None where the request names no model."""
    return _RULES.get(routing, least_loaded)(request, replicas).backend if replicas else None


def least_loaded(request: GenerateRequest | EmbedRequest, replicas: Sequence[Replica]) -> Replica:
    """The first of those with the fewest requests, and of them the fewest tokens waiting."""
    return min(replicas, key=lambda replica: (_requests(replica.load), replica.load.queued_tokens))


def by_prefix(request: GenerateRequest | EmbedRequest, replicas: Sequence[Replica]) -> Replica:
    """The replica that the request's beginning belongs to, among those that are not far busier than the others."""
    first = least_loaded(request, replicas)
    key = first.backend.prefix_key(request) if isinstance(request, GenerateRequest) else None
    if key is None:
        return first
    limit = BOUND * _requests(first.load) + SLACK
    ranked = sorted(replicas, key=lambda replica: _rank(key, replica.number), reverse=True)
    return next(replica for replica in ranked if _requests(replica.load) <= limit)


_RULES: Mapping[str, Callable[[GenerateRequest | EmbedRequest, Sequence[Replica]], Replica]] = {
    "least_loaded": least_loaded,
    "prefix": by_prefix,
}


def _requests(load: Load) -> int:
    return load.running + load.waiting


def _rank(key: str, number: int) -> bytes:
    return hashlib.sha256(f"{number}:{key}".encode("utf-8", "surrogatepass")).digest()
