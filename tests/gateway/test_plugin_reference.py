"""docs/plugins.md is what the contract says of itself, and every hook is used somewhere in the tests."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from suimon.gateway import hookspecs
from suimon.gateway.hookspecs import Backend, Hooks
from suimon.gateway.plugin_reference import public, reference, signature

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "plugins.md").read_text()
HOOKS = dict(public(Hooks))


def test_the_page_is_up_to_date() -> None:
    assert reference() + "\n" == PAGE, "run: python -m suimon.gateway.plugin_reference > docs/plugins.md"


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_documented_with_its_exact_signature(name: str) -> None:
    section = re.search(rf"^### `{name}`\n\n```python\n(.*?)\n```\n\n(.+)$", PAGE, re.M)
    assert section is not None
    assert section[1] == signature(name, HOOKS[name])
    arguments = [argument for argument in inspect.signature(HOOKS[name]).parameters if argument != "self"]
    assert re.findall(r"[(,] ?(\w+):", section[1]) == arguments
    assert (HOOKS[name].__doc__ or "").strip()


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_has_a_test_that_implements_it(name: str) -> None:
    implemented = re.compile(rf"@hookimpl\b[^\n]*\n\s*def {name}\(")
    assert any(implemented.search(path.read_text()) for path in (ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize("name", [name for name, _ in public(Backend)])
def test_every_method_of_a_backend_is_documented(name: str) -> None:
    assert f"### `{name}`" in PAGE
    assert (getattr(Backend, name).__doc__ or "").strip()


def test_nothing_public_is_left_out() -> None:
    names = {name for name, value in public(hookspecs) if name != "Hooks"}
    assert {name for name in names if f"`{name}`" not in PAGE} == set()
    assert len(names) > 20
