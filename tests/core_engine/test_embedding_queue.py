"""Whose input is computed next, and what becomes of the others when one fails."""

from __future__ import annotations

from suimon.core_engine.embedding_queue import EmbeddingQueue
from suimon.core_engine.errors import ContextLengthError
from suimon.core_engine.messages import Embedding, EmbedRequest


def embed(token_ids: list[int]) -> list[float]:
    if token_ids == [0]:
        raise ContextLengthError("too long", param="input")
    return [float(token_ids[0])]


def make_queue(**requests: list[int]) -> EmbeddingQueue:
    """One request for each name, an input of one token for each number."""
    queue = EmbeddingQueue(embed)
    for name, numbers in requests.items():
        queue.add(EmbedRequest(name, [[number] for number in numbers]))
    return queue


def drain(queue: EmbeddingQueue) -> list[Embedding]:
    done = []
    while queue:
        done.append(queue.step())
    return done


def test_requests_take_turns() -> None:
    queue = make_queue(large=[1, 2, 3, 4, 5], small=[6], other=[7, 8])
    done = drain(queue)
    assert [(e.request_id, e.index) for e in done] == [
        ("large", 0),
        ("small", 0),
        ("other", 0),
        ("large", 1),
        ("other", 1),
        ("large", 2),
        ("large", 3),
        ("large", 4),
    ]
    assert [e.vector for e in done] == [[1.0], [6.0], [7.0], [2.0], [8.0], [3.0], [4.0], [5.0]]


def test_one_that_fails_takes_its_request_with_it_and_no_other() -> None:
    done = drain(make_queue(bad=[1, 0, 2], good=[3, 4]))
    assert [(e.request_id, e.error_kind) for e in done] == [
        ("bad", ""),
        ("good", ""),
        ("bad", "ContextLengthError"),
        ("good", ""),
    ]


def test_what_is_aborted_or_has_no_inputs_is_no_work() -> None:
    queue = make_queue(gone=[1, 2], none=[], here=[3])
    queue.step()
    queue.abort("gone")
    queue.abort("unknown")
    assert [e.request_id for e in drain(queue)] == ["here"]
