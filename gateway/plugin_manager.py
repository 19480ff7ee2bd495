"""Finding and loading plugins: the built-in ones, installed ones, and those the operator names.

All are loaded by the same code. Knows modules, distributions and entry points; refuses to know what hooks do. A plugin
that cannot be loaded stops the start: a server that quietly lacks a backend, or a key check, is worse than none.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pluggy

from suimon.gateway import hookspecs
from suimon.gateway.config import ConfigError
from suimon.gateway.hookspecs import BackendError
from suimon.gateway.version import VERSION

BUILT_IN = (
    "suimon.plugins.native",
    "suimon.plugins.llama_cpp",
    "suimon.plugins.tensorrt_llm",
    "suimon.plugins.openai_remote",
    "suimon.plugins.echo",
    "suimon.plugins.routing",
)
GROUP = "suimon"  # of entry points; the value is a module
NO_PLUGINS = ("_*", "test_*.py", "*_test.py", "conftest.py", "setup.py")  # what may lie beside them in a folder
ENVIRONMENT = "SUIMON_PLUGINS"  # comma-separated modules or entry-point names


class PluginError(Exception):
    """A plugin cannot be loaded; the message names it, its distribution and what went wrong."""


class PluginInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to know of a loaded plugin. ``version`` is its distribution's; a loose module has neither."""

    name: str
    version: str | None
    distribution: str | None
    hooks: tuple[str, ...]


class PluginHook(msgspec.Struct, frozen=True):
    """One plugin's own implementation of hook ``name``. ``plugin`` is the plugin's name."""

    name: str
    plugin: str
    owner: Any
    call: Callable[..., Any]

    def ask(self, **arguments: Any) -> list[Any]:
        """What it answers. Raises PluginError for what it raises by accident, with the place."""
        try:
            return list(self.call(**arguments))
        except (BackendError, ConfigError, PluginError):
            raise
        except (Exception, SystemExit) as error:
            *_, place = traceback.extract_tb(error.__traceback__)
            raise PluginError(
                f"plugin {self.plugin!r} failed in {self.name}: {describe(error)} ({place.filename}:{place.lineno})"
            ) from error


class PluginManager(pluggy.PluginManager):
    """The loaded plugins. ``named`` holds those that the operator asked for: only they may add routes."""

    def __init__(self) -> None:
        super().__init__(hookspecs.PROJECT)
        self.add_hookspecs(hookspecs.Hooks)
        self.named: list[Any] = []
        self._points: dict[str, EntryPoint] = {}

    def load(
        self,
        name: str,
        *,
        named: bool = False,
        point: EntryPoint | None = None,
        find: Callable[[str], Any] = importlib.import_module,
    ) -> None:
        """Import module ``name`` and register it, once. Raises PluginError."""
        plugin = self.get_plugin(name)
        if plugin is None:
            try:
                plugin = find(name) if point is None else point.load()
                self.register(plugin, name)
            except Exception as error:
                raise PluginError(f"plugin {_origin(name, point)} cannot be loaded: {describe(error)}") from error
        if point is not None:
            self._points[name] = point
        if named and plugin not in self.named:
            self.named.append(plugin)

    def load_folder(self, folder: Path) -> None:
        """Load every ``*.py`` of ``folder``, as named plugins, but those of NO_PLUGINS. Raises PluginError."""
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # last: what a plugin has beside it must not replace what others import
        importlib.invalidate_caches()
        for file in sorted(folder.glob("*.py")):
            if any(fnmatch(file.name, pattern) for pattern in NO_PLUGINS):
                continue
            loaded = getattr(self.get_plugin(file.stem), "__file__", None)
            if loaded is not None and not file.samefile(loaded):
                raise PluginError(
                    f"{file} has the name of the plugin that is loaded from {loaded}: rename it or uninstall that"
                )
            self.load(file.stem, named=True, find=partial(_import_file, file))

    def infos(self) -> list[PluginInfo]:
        """What is loaded, in the order in which hooks are asked for their plugins' names."""
        return [self._info(name, plugin) for name, plugin in self.list_name_plugin()]

    def _info(self, name: str, plugin: Any) -> PluginInfo:
        distribution = None if name not in self._points else self._points[name].dist
        own = VERSION if name in BUILT_IN else None
        return PluginInfo(
            name=name,
            version=own if distribution is None else distribution.version,
            distribution=("suimon" if own else None) if distribution is None else distribution.name,
            hooks=tuple(sorted(caller.name for caller in self.get_hookcallers(plugin) or ())),
        )

    def each_of(self, hook: str) -> list[PluginHook]:
        """Each plugin's own ``hook``, in the order of a common call, which ends at the first that raises."""
        plugins = [found.plugin for found in getattr(self.hook, hook).get_hookimpls()][::-1]
        return [
            PluginHook(
                hook,
                self.get_name(plugin) or repr(plugin),
                plugin,
                self.subset_hook_caller(hook, [other for other in plugins if other is not plugin]),
            )
            for plugin in plugins
        ]

    def ask(self, hook: str, **arguments: Any) -> list[Any]:
        """What the plugins answer to ``hook``. Raises as ``PluginHook.ask``."""
        return [answer for each in self.each_of(hook) for answer in each.ask(**arguments)]

    def check(self) -> None:
        """Raise PluginError if a plugin implements a hook that does not exist, or with other arguments."""
        try:
            self.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginError(str(error)) from error


def describe(error: BaseException) -> str:
    """The error as its own last traceback line has it."""
    return f"{type(error).__name__}: {error}"


def _origin(name: str, point: EntryPoint | None) -> str:
    if point is None or point.dist is None:
        return repr(name)
    return f"{point.name!r} (module {point.value!r} of {point.dist.name} {point.dist.version})"


def _import_file(file: Path, name: str) -> ModuleType:
    """The module in ``file``, under its own short name. Raises PluginError where another module has that name."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not Path(spec.origin).samefile(file):
        raise PluginError(f"{file} has the name of another module: rename the file")
    return importlib.import_module(name)


def load_plugins(
    named: Iterable[str] = (), *, folder: str | None = None, built_in: Iterable[str] = BUILT_IN
) -> PluginManager:
    """Load the built-in plugins, every installed one, those in ``named`` and SUIMON_PLUGINS, and all of ``folder``.

    A name is that of an entry point or of a module. Raises PluginError.
    """
    if folder is not None and not Path(folder).is_dir():
        raise PluginError(f"plugins_dir {folder}: is not a folder")
    manager = PluginManager()
    wanted = [*named, *(name.strip() for name in os.environ.get(ENVIRONMENT, "").split(",") if name.strip())]
    installed = list(entry_points(group=GROUP))
    for name in built_in:
        manager.load(name)
    for point in installed:
        manager.load(point.value, named=point.name in wanted, point=point)
    for name in wanted:
        if name not in {point.name for point in installed}:
            manager.load(name, named=True)
    if folder is not None:
        manager.load_folder(Path(folder).resolve())
    manager.check()
    return manager
