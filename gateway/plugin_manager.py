"""Finding and loading plugins: the built-in ones, installed ones, and those the operator names.

All are loaded by the same code. Knows modules, distributions and entry points; refuses to know what hooks do. A plugin
that cannot be loaded stops the start: a server that quietly lacks a backend, or a key check, is worse than none.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from suimon.gateway import hookspecs

BUILT_IN = ("suimon.plugins.native", "suimon.plugins.tensorrt_llm", "suimon.plugins.openai_remote", "suimon.plugins.echo")
GROUP = "suimon"  # of entry points; the value is a module
ENVIRONMENT = "SUIMON_PLUGINS"  # comma-separated modules or entry-point names


class PluginError(Exception):
    """A plugin cannot be loaded; the message names it, its distribution and what went wrong."""


class PluginManager(pluggy.PluginManager):
    """The loaded plugins. ``named`` holds those that the operator asked for: only they may add routes."""

    def __init__(self) -> None:
        super().__init__(hookspecs.PROJECT)
        self.add_hookspecs(hookspecs.Hooks)
        self.named: list[Any] = []

    def load(self, name: str, *, named: bool = False, point: EntryPoint | None = None) -> None:
        """Import module ``name`` and register it, once. Raises PluginError."""
        plugin = self.get_plugin(name)
        if plugin is None:
            try:
                plugin = importlib.import_module(name) if point is None else point.load()
                self.register(plugin, name)
            except Exception as error:
                raise PluginError(f"plugin {_origin(name, point)} cannot be loaded: {describe(error)}") from error
        if named and plugin not in self.named:
            self.named.append(plugin)

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


def load_plugins(named: Iterable[str] = (), *, built_in: Iterable[str] = BUILT_IN) -> PluginManager:
    """Load the built-in plugins, every installed one, and those in ``named`` and in SUIMON_PLUGINS.

    A name is that of an entry point or of a module. Raises PluginError.
    """
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
    manager.check()
    return manager
