"""The order in which waiting work starts: one queue for the engine's scheduler and the gateway's admission.

Knows an item's arrival and priority; refuses to know what the item is, what it costs and when it may start. Standard
library only, because both sides of the process boundary import it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What every item has. ``arrival`` is in seconds; a lower ``priority`` starts first."""

    @property
    def arrival(self) -> float: ...

    @property
    def priority(self) -> int: ...


class Policy(Protocol):
    """An order over items. Another policy (fair share, earliest deadline) is another entry in POLICIES.

    A policy may keep state (a fair one keeps a virtual clock per tenant), but must give an item the same answers for
    as long as the item lives, because running items are compared with waiting ones.
    """

    def key(self, item: Waiting) -> tuple[float, ...]:
        """Smaller starts first, and is preempted last."""

    def urgency(self, item: Waiting) -> float:
        """A waiting item may take the place of a running one only if its urgency is strictly smaller."""


class FirstComeFirstServed:
    """By arrival alone; nobody is urgent."""

    def key(self, item: Waiting) -> tuple[float, ...]:
        return (item.arrival,)

    def urgency(self, item: Waiting) -> float:
        return 0.0


class Priority:
    """Lower numbers first, equal ones by arrival. A low priority waits for as long as higher ones keep coming."""

    def key(self, item: Waiting) -> tuple[float, ...]:
        return (item.priority, item.arrival)

    def urgency(self, item: Waiting) -> float:
        return item.priority


POLICIES: dict[str, type[Policy]] = {"fcfs": FirstComeFirstServed, "priority": Priority}


def make_policy(name: str) -> Policy:
    """The policy of that name. Raises ValueError naming the known ones."""
    if name not in POLICIES:
        raise ValueError(f"unknown scheduling policy {name!r}: use one of {', '.join(POLICIES)}")
    return POLICIES[name]()


Item = TypeVar("Item", bound=Waiting)


@dataclass(slots=True)
class _Entry(Generic[Item]):
    key: tuple[float, ...]
    tie: int
    item: Item | None

    def __lt__(self, other: _Entry[Item]) -> bool:
        return (self.key, self.tie) < (other.key, other.tie)


class RequestQueue(Generic[Item]):
    """A priority queue with removal. Every operation is O(log n), amortised; items are told apart by identity.

    A removed item's entry stays in the heap, emptied, until it surfaces or until the empty ones are the majority.
    """

    def __init__(self, policy: str | Policy = "fcfs") -> None:
        self.policy = make_policy(policy) if isinstance(policy, str) else policy
        self._heap: list[_Entry[Item]] = []
        self._entries: dict[int, _Entry[Item]] = {}
        self._last_tie = 0
        self._first_tie = 0

    def push(self, item: Item) -> None:
        """Put the item in its place, behind those with an equal key. Raises ValueError if it is waiting already."""
        self._last_tie += 1
        self._insert(item, self._last_tie)

    def requeue(self, item: Item) -> None:
        """Put back one that was popped: in its place, but before those with an equal key. Raises as ``push``."""
        self._first_tie -= 1
        self._insert(item, self._first_tie)

    def _insert(self, item: Item, tie: int) -> None:
        if id(item) in self._entries:
            raise ValueError(f"{item!r} is waiting already")
        entry = _Entry(self.policy.key(item), tie, item)
        self._entries[id(item)] = entry
        heapq.heappush(self._heap, entry)

    def peek(self) -> Item | None:
        """The next item, left where it is; None if nothing waits."""
        self._drop_removed()
        return self._heap[0].item if self._heap else None

    def pop(self) -> Item:
        """Take the next item. Raises IndexError if nothing waits."""
        item = self.peek()
        if item is None:
            raise IndexError("pop from an empty request queue")
        heapq.heappop(self._heap)
        del self._entries[id(item)]
        return item

    def remove(self, item: Item) -> bool:
        """Take that item out, wherever it stands; False if it was not waiting."""
        entry = self._entries.pop(id(item), None)
        if entry is None:
            return False
        entry.item = None
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = [entry for entry in self._heap if entry.item is not None]
            heapq.heapify(self._heap)
        return True

    def _drop_removed(self) -> None:
        while self._heap and self._heap[0].item is None:
            heapq.heappop(self._heap)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: object) -> bool:
        return id(item) in self._entries

    def __iter__(self) -> Iterator[Item]:
        """The waiting items in order; O(n log n)."""
        for entry in sorted(self._heap):
            if entry.item is not None:
                yield entry.item
