"""Finding and loading plugins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from suimon.gateway.plugin_manager import BUILT_IN, PluginError, load_plugins
from suimon.gateway.version import VERSION

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


INSTALLED = {point.value for point in entry_points(group="suimon")}  # of contrib/, where the suite's machine has it


def names(manager: Any) -> list[str]:
    """The plugins' names, without those that this machine happens to have."""
    return [name for name, _ in manager.list_name_plugin() if name not in INSTALLED]


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


def test_a_folder_of_plugins(package: Any, tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "found_one.py").write_text(GOOD + "import _helper_of_found_one")
    (folder / "_helper_of_found_one.py").write_text("")
    monkeypatch.setattr(sys, "path", list(sys.path))
    manager = load_plugins(folder=str(folder), built_in=())
    assert "found_one" in names(manager) and "_helper_of_found_one" not in names(manager)
    assert [p.__name__ for p in manager.named] == ["found_one"]
    for name in ("found_one", "_helper_of_found_one"):
        sys.modules.pop(name, None)


def test_a_file_in_the_folder_does_not_replace_a_module_that_others_import(tmp_path: Path, monkeypatch: Any) -> None:
    import tabnanny

    (tmp_path / "tabnanny.py").write_text(GOOD)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(PluginError, match=r"tabnanny\.py has the name of another module"):
        load_plugins(folder=str(tmp_path), built_in=())
    assert sys.modules["tabnanny"] is tabnanny


def test_tests_in_the_folder_are_no_plugins(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("test_it.py", "it_test.py", "conftest.py", "setup.py"):
        (tmp_path / name).write_text("1 / 0")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_plugins(folder=str(tmp_path), built_in=()).named == []


def test_a_file_in_the_folder_with_the_name_of_an_installed_plugin(
    package: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    package("twice_one", GOOD, entry_point="twice")
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "twice_one.py").write_text(GOOD)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(PluginError, match=r"plugins/twice_one\.py has the name .* loaded from .*/twice_one\.py"):
        load_plugins(folder=str(folder), built_in=())
    assert load_plugins(folder=str(tmp_path), built_in=()).get_plugin("twice_one")  # the same file


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"plugins_dir .*nowhere: is not a folder"):
        load_plugins(folder=str(tmp_path / "nowhere"), built_in=())


def test_what_is_told_of_a_plugin(package: Any) -> None:
    package("told_one", GOOD, entry_point="told")
    package("told_two", GOOD)
    infos = {info.name: info for info in load_plugins(["told_two"]).infos()}
    one, two, echo = infos["told_one"], infos["told_two"], infos["suimon.plugins.echo"]
    assert (one.version, one.distribution, one.hooks) == ("1.2", "told_one", ("request_started",))
    assert (two.version, two.distribution, two.hooks) == (None, None, ("request_started",))
    assert (echo.version, echo.distribution, echo.hooks) == (VERSION, "suimon", ("register_backends",))


def test_the_plugins_command(tmp_path: Path) -> None:
    (tmp_path / "listed_one.py").write_text(GOOD)

    def listed(*flags: str) -> list[str]:
        command = [sys.executable, "-m", "suimon.gateway.cli", "plugins", "--plugins-dir", str(tmp_path), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [entry["name"] for entry in json.loads(done.stdout)]

    plain = listed()
    assert "listed_one" in plain and not set(plain) & set(BUILT_IN)
    assert set(BUILT_IN) | {"listed_one"} <= set(listed("--all"))
    assert listed("--hook", "request_started") == ["listed_one"]
    command = [sys.executable, "-m", "suimon.gateway.cli", "plugins", "--hook", "no_such_hook"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "register_backends" in done.stderr


def test_calls_are_traced_when_asked(tmp_path: Path) -> None:
    """SUIMON_TRACE_PLUGINS names the hook, its arguments and who implements it, and no value."""
    (tmp_path / "traced_one.py").write_text("1 / 0")
    environment = os.environ | {"SUIMON_TRACE_PLUGINS": "1", "SUIMON_PLUGINS_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "suimon.gateway.cli", "serve", "--port", "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "'traced_one'" in done.stderr and "ZeroDivisionError" in done.stderr
    refuse = "from suimon.gateway.hookspecs import hookimpl\n@hookimpl\ndef register_backends(register, settings):\n"
    (tmp_path / "traced_one.py").write_text(refuse + "    register(1 / 0)\n")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "hook register_backends(register, settings) calls" in done.stderr and "traced_one" in done.stderr
