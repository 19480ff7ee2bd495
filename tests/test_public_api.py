"""No public signature that plugins stand on changes in silence: tests/contracts/public_api.txt holds them all.

One line each, after a word: ``stable`` names change only with a new major version, after a release that warns;
``beta`` ones may change in any release, and the changelog says so. After a change that is meant:
``python tests/test_public_api.py > tests/contracts/public_api.txt``, and an entry in CHANGELOG.md.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

SNAPSHOT = Path(__file__).resolve().parent / "contracts" / "public_api.txt"
STABILITY = {
    "suimon.gateway.hookspecs": "stable",
    "suimon.gateway.testing": "beta",
    "suimon.gateway.loopback": "beta",
    "suimon.plugins.stepped": "beta",
    "suimon.core_engine.executor": "beta",
    "suimon.core_engine.batch": "beta",
}
BETA_NAMES = {"EmbedRequest", "Embeddings", "Replica", "Backend.embed", "Backend.prefix_key", "conversation_key"}
BETA_NAMES |= {"Offer", "Hooks.offer_model", "Hooks.route_request"}


def snapshot() -> str:
    """Every public name of the modules, in their order."""
    lines = []
    for name, word in STABILITY.items():
        for path, text in entries(importlib.import_module(name)):
            is_beta = any(path == beta or path.startswith(f"{beta}.") for beta in BETA_NAMES)
            lines.append(f"{'beta' if is_beta else word:6} {name}.{path}{text}")
    return "\n".join(lines) + "\n"


def entries(module: ModuleType) -> Iterator[tuple[str, str]]:
    """(dotted name, rest of the line) of what the module defines."""
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", module.__name__) != module.__name__:
            continue
        if isinstance(value, type):
            yield name, f"({', '.join(base.__name__ for base in value.__bases__)})"
            yield from ((f"{name}.{member}", text) for member, text in members(value))
        elif inspect.isfunction(value):
            yield name, signature(value)
        elif name.isupper() and isinstance(value, str | int | float | tuple | frozenset):
            yield name, f" = {sorted(value) if isinstance(value, frozenset) else value!r}"


def members(kind: type) -> Iterator[tuple[str, str]]:
    """Fields with their defaults, class attributes, methods and properties that the class itself defines."""
    own = fields(kind)
    yield from own.items()
    for name, value in vars(kind).items():
        if (name.startswith("_") and name != "__init__") or name in own:
            continue
        function = getattr(value, "__func__", value)
        if isinstance(value, property):
            yield name, " (property)"
        elif inspect.isfunction(function):
            yield name, signature(function)
        elif name == "__init__" or isinstance(value, str | int | float | tuple | type(None)):
            yield name, f" = {value!r}"


def fields(kind: type) -> dict[str, str]:
    """``name: type = default`` of a struct's or data class's fields."""
    annotations = inspect.get_annotations(kind)
    if issubclass(kind, msgspec.Struct):
        found = {each.name: each.default for each in msgspec.structs.fields(kind)}
        return {name: f": {annotations[name]}{default(found[name])}" for name in annotations if name in found}
    if dataclasses.is_dataclass(kind):
        given = {each.name: each.default for each in dataclasses.fields(kind)}
        return {name: f": {annotations[name]}{default(given[name])}" for name in annotations}
    return {name: f": {annotations[name]}" for name in annotations if name not in vars(kind)}


def default(value: Any) -> str:
    is_absent = value is msgspec.NODEFAULT or value is dataclasses.MISSING
    return (
        "" if is_absent else f" = {value!r}" if isinstance(value, str | int | float | tuple | type(None)) else " = ..."
    )


def signature(function: Any) -> str:
    kind = " (async)" if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) else ""
    return str(inspect.signature(function)).replace("'", "") + kind


def test_no_public_signature_changed_in_silence() -> None:
    known, found = SNAPSHOT.read_text().splitlines(), snapshot().splitlines()
    gone, new = [line for line in known if line not in found], [line for line in found if line not in known]
    remedy = "say so in CHANGELOG.md and run: python tests/test_public_api.py > tests/contracts/public_api.txt"
    assert (gone, new) == ([], []), f"a public signature changed; {remedy}"


def test_every_line_has_its_word_and_stands_once() -> None:
    lines = SNAPSHOT.read_text().splitlines()
    assert len(lines) > 150
    assert {line.split()[0] for line in lines} == {"stable", "beta"}
    assert len(lines) == len(set(lines))


def test_the_snapshot_sees_what_matters() -> None:
    text = snapshot()
    for line in (
        "stable suimon.gateway.hookspecs.Backend.generate(self, request: GenerateRequest) -> AsyncIterator[Delta]",
        "stable suimon.gateway.hookspecs.Delta.finish_reason: str | None = None",
        "stable suimon.gateway.hookspecs.Overloaded.status = 429",
        "beta   suimon.gateway.testing.BackendContract.max_tokens = 8",
        "beta   suimon.core_engine.executor.ForwardExecutor.forward(self, batch: ScheduledBatch) -> torch.Tensor",
    ):
        assert line + "\n" in text


if __name__ == "__main__":
    print(snapshot(), end="")
