"""The waiting order, against a sorted list."""

from __future__ import annotations

import ast
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suimon.core_engine import request_queue
from suimon.core_engine.request_queue import RequestQueue, make_policy


@dataclass(eq=False)
class Item:
    arrival: float = 0.0
    priority: int = 0
    name: str = ""


def drain(queue: RequestQueue[Item]) -> list[str]:
    return [queue.pop().name for _ in range(len(queue))]


def fill(queue: RequestQueue[Item], *items: Item) -> RequestQueue[Item]:
    for item in items:
        queue.push(item)
    return queue


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'lifo': use one of fcfs, priority"):
        make_policy("lifo")


def test_the_module_imports_the_standard_library_only() -> None:
    tree = ast.parse(Path(request_queue.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


def test_fcfs_ignores_priority() -> None:
    queue = fill(RequestQueue("fcfs"), Item(2, -9, "late"), Item(1, 9, "early"))
    assert drain(queue) == ["early", "late"]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_lower_priority_number_starts_first_ties_by_arrival(order: tuple[int, ...]) -> None:
    items = [Item(0, 0, "a"), Item(1, 0, "b"), Item(2, -1, "first"), Item(3, 5, "last")]
    queue = fill(RequestQueue("priority"), *(items[i] for i in order))
    assert drain(queue) == ["first", "a", "b", "last"]


def test_equal_keys_keep_the_order_of_pushes() -> None:
    queue = fill(RequestQueue("fcfs"), *(Item(name=str(i)) for i in range(20)))
    assert drain(queue) == [str(i) for i in range(20)]


def test_requeued_items_come_before_their_equals_but_after_smaller_keys() -> None:
    queue = fill(RequestQueue("priority"), Item(5, 1, "equal"), Item(9, 0, "urgent"))
    queue.requeue(Item(5, 1, "again"))
    assert drain(queue) == ["urgent", "again", "equal"]


def test_items_are_told_apart_by_identity() -> None:
    twin, other = Item(), Item()
    queue = fill(RequestQueue("fcfs"), twin, other)
    assert queue.remove(other)
    assert twin in queue and other not in queue
    with pytest.raises(ValueError, match="is waiting already"):
        queue.push(twin)


def test_an_empty_queue() -> None:
    queue: RequestQueue[Item] = RequestQueue()
    assert queue.peek() is None and not queue and not queue.remove(Item())
    with pytest.raises(IndexError, match="empty request queue"):
        queue.pop()


def test_removed_entries_do_not_pile_up() -> None:
    queue: RequestQueue[Item] = RequestQueue()
    keeper = Item(arrival=-1.0)
    queue.push(keeper)
    for i in range(10_000):
        item = Item(float(i))
        queue.push(item)
        queue.remove(item)
    assert len(queue) == 1 and len(queue._heap) < 50


def test_a_policy_of_ones_own() -> None:
    class ShortestName:
        def key(self, item: Item) -> tuple[float, ...]:
            return (len(item.name),)

        def urgency(self, item: Item) -> float:
            return 0.0

    assert drain(fill(RequestQueue(ShortestName()), Item(0, 0, "long"), Item(1, 0, "s"))) == ["s", "long"]


@given(st.sampled_from(["fcfs", "priority"]), st.randoms(use_true_random=False), st.integers(0, 120))
def test_against_a_sorted_list(policy: str, rng: random.Random, num_operations: int) -> None:
    """The model sorts (key, tie) anew on every look; requeued items get ties below all others."""
    queue: RequestQueue[Item] = RequestQueue(policy)
    model: list[tuple[tuple[float, ...], int, Item]] = []
    tie = 0

    def key(item: Item) -> tuple[float, ...]:
        return (item.arrival,) if policy == "fcfs" else (item.priority, item.arrival)

    for step in range(num_operations):
        model.sort(key=lambda entry: entry[:2])
        assert len(queue) == len(model)
        assert queue.peek() is (model[0][2] if model else None)
        assert [id(item) for item in queue] == [id(entry[2]) for entry in model]
        action = rng.choice(["push", "push", "pop", "remove", "requeue"])
        if action == "push":
            item = Item(float(rng.randrange(4)), rng.randrange(-1, 3), str(step))
            tie += 1
            queue.push(item)
            model.append((key(item), tie, item))
        elif model and action == "remove":
            _, _, item = model.pop(rng.randrange(len(model)))
            assert queue.remove(item)
        elif model:
            item = queue.pop()
            assert item is model.pop(0)[2]
            if action == "requeue":
                queue.requeue(item)
                model.append((key(item), -step, item))
