"""Finding and loading plugins."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from suimon.gateway.plugin_manager import PluginError, load_plugins

GOOD = """
from suimon.gateway.hookspecs import hookimpl

@hookimpl
def request_started(request):
    pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: Any) -> Any:
    """``package(name, source, entry_point=...)`` writes a module, and a distribution if it has an entry point."""
    monkeypatch.syspath_prepend(str(tmp_path))
    written = []

    def write(name: str, source: str, *, entry_point: str | None = None) -> None:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        written.append(name)
        if entry_point is not None:
            info = tmp_path / f"{name}-1.2.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
            (info / "entry_points.txt").write_text(f"[suimon]\n{entry_point} = {name}\n")

    yield write
    for name in written:
        sys.modules.pop(name, None)


def names(manager: Any) -> list[str]:
    return [name for name, _ in manager.list_name_plugin()]


def test_built_in_plugins_are_loaded_like_any_other(package: Any) -> None:
    package("builtin_one", GOOD)
    manager = load_plugins(built_in=["builtin_one"])
    assert names(manager) == ["builtin_one"]
    assert manager.named == []


def test_installed_plugins_are_found_by_their_entry_point(package: Any) -> None:
    package("installed_one", GOOD, entry_point="one")
    manager = load_plugins(built_in=())
    assert "installed_one" in names(manager)
    assert manager.named == []
    assert [p.__name__ for p in load_plugins(["one"], built_in=()).named] == ["installed_one"]


def test_modules_are_loaded_when_named(package: Any, monkeypatch: Any) -> None:
    package("named_one", GOOD)
    package("named_two", GOOD)
    monkeypatch.setenv("SUIMON_PLUGINS", " named_two, ,named_one")
    manager = load_plugins(["named_one"], built_in=())
    assert sorted(names(manager)) == ["named_one", "named_two"]
    assert sorted(p.__name__ for p in manager.named) == ["named_one", "named_two"]


def test_a_plugin_that_cannot_be_imported_names_its_distribution_and_the_error(package: Any) -> None:
    package("broken_one", "import no_such_module_at_all", entry_point="broken")
    expected = r"'broken' \(module 'broken_one' of broken_one 1\.2\).*ModuleNotFoundError.*no_such_module_at_all"
    with pytest.raises(PluginError, match=expected):
        load_plugins(built_in=())


@pytest.mark.parametrize("source", ["1 / 0", "def broken(:\n  pass"])
def test_any_error_while_importing_stops_the_start(package: Any, source: str) -> None:
    package("broken_two", source)
    with pytest.raises(PluginError, match=r"'broken_two'.*(ZeroDivisionError|SyntaxError)"):
        load_plugins(["broken_two"], built_in=())


def test_a_named_plugin_that_does_not_exist(package: Any) -> None:
    with pytest.raises(PluginError, match="'nowhere_to_be_found'"):
        load_plugins(["nowhere_to_be_found"], built_in=())


def test_a_hook_of_an_unknown_name_stops_the_start(package: Any) -> None:
    package("misspelt", GOOD.replace("request_started(request)", "request_startd(request)"))
    with pytest.raises(PluginError, match=r"(?s)request_startd.*misspelt|misspelt.*request_startd"):
        load_plugins(["misspelt"], built_in=())


def test_a_hook_with_an_unknown_argument_stops_the_start(package: Any) -> None:
    package("overasking", GOOD.replace("request_started(request)", "request_started(request, mood)"))
    with pytest.raises(PluginError, match=r"(?s)overasking.*mood"):
        load_plugins(["overasking"], built_in=())
