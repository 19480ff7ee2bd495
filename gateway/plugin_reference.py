"""docs/plugins.md, made from ``hookspecs`` itself: ``python -m suimon.gateway.plugin_reference > docs/plugins.md``.

Knows how Python describes itself; refuses to know what any of it means.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from suimon.gateway import hookspecs
from suimon.gateway.hookspecs import Backend, BackendError, Hooks

HEAD = """# Plugin reference

<!-- Made by `python -m suimon.gateway.plugin_reference > docs/plugins.md`; do not edit. -->

Every hook, every method of `Backend` and every type of the plugin contract, with their exact signatures; all of it is
in [gateway/hookspecs.py](../gateway/hookspecs.py). For a way in, read [the tutorial](../plugins/README.md) first.
"""


def reference() -> str:
    """The whole page."""
    sections = [
        HEAD,
        "## Hooks\n\nWrite a module-level function of the same name, marked `@hookimpl`; leave out arguments that you "
        "do not need. Hooks are\nsynchronous. Arguments may be added in later versions, never removed.\n",
        *(_function(name, hook, note=_note(hook)) for name, hook in public(Hooks)),
        f"## Backend\n\n{_doc(Backend)}\n",
        *(_function(name, method) for name, method in public(Backend)),
        "## Functions\n",
        *(_function(name, value) for name, value in public(hookspecs) if inspect.isfunction(value)),
        "## Types\n\nFrozen msgspec structs.\n",
        *(_struct(kind) for kind in kinds(msgspec.Struct)),
        "## Errors\n\nRaise one of these; its message is shown to the client. Every one takes `param` (the field that "
        "is at fault) and\n`retry_after` (seconds).\n",
        _errors(),
    ]
    return "\n".join(sections)


def public(owner: Any) -> Iterator[tuple[str, Any]]:
    """(name, function or class) of what ``owner`` defines itself and does not hide, in its order."""
    module = owner.__name__ if inspect.ismodule(owner) else owner.__module__
    for name, value in vars(owner).items():
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module:
            yield name, value


def kinds(base: type) -> list[type]:
    """The public classes of the contract that derive from ``base``, in its order."""
    return [value for _, value in public(hookspecs) if isinstance(value, type) and issubclass(value, base)]


def signature(name: str, function: Callable[..., Any]) -> str:
    """``name(arguments) -> result`` without ``self``, annotations as they are written."""
    found = inspect.signature(function)
    arguments = [each for each in found.parameters.values() if each.name != "self"]
    text = str(found.replace(parameters=arguments)).replace("'", "")
    return f"{'async ' if inspect.iscoroutinefunction(function) else ''}def {name}{text}: ..."


def _function(name: str, function: Callable[..., Any], note: str = "") -> str:
    return f"### `{name}`\n\n```python\n{signature(name, function)}\n```\n\n{note}{_doc(function)}\n"


def _note(hook: Callable[..., Any]) -> str:
    options = getattr(hook, f"{hookspecs.PROJECT}_spec")
    return "The first plugin that answers other than None decides. " if options["firstresult"] else ""


def _doc(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__).replace("``", "`")


def _struct(kind: type) -> str:
    """The docstring, then the fields as they stand in the source, comments included."""
    source = textwrap.dedent(inspect.getsource(kind)).splitlines()
    (definition,) = ast.parse("\n".join(source)).body
    assert isinstance(definition, ast.ClassDef)
    fields = [node for node in definition.body if isinstance(node, ast.AnnAssign)]
    lines = [source[line] for node in fields for line in range(node.lineno - 1, node.end_lineno or node.lineno)]
    block = textwrap.dedent("\n".join(lines))
    return f"### `{kind.__name__}`\n\n{_doc(kind)}\n\n```python\n{block}\n```\n"


def _errors() -> str:
    rows = ["| error | status | code | |", "|---|---|---|---|"]
    for kind in kinds(BackendError):
        if issubclass(kind, BackendError):
            rows.append(f"| `{kind.__name__}` | {kind.status} | {kind.code or ''} | {' '.join(_doc(kind).split())} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(reference())
