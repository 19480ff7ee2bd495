"""What the plugins refuse of a configuration: every model's mistakes at once, each with its line in the file.

Registering all backends stops at the first that is wrong, and its error knows no file. So where that fails, each model
is registered by itself, in a gateway that is thrown away. Nothing is started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from suimon.gateway.config import ConfigError
from suimon.gateway.config_file import Mistakes, SettingsFile
from suimon.gateway.hookspecs import BackendError
from suimon.gateway.router import NamesClash, Router

if TYPE_CHECKING:
    from suimon.gateway.config import ModelSettings, Settings
    from suimon.gateway.plugin_manager import PluginManager

REFUSALS = (ConfigError, BackendError)


def check_backends(settings: Settings, plugins: PluginManager, path: str | None) -> None:
    """Have every backend registered, none started. Raises ConfigError with all that the plugins refuse.

    ``path``: the file that the models are from, for the lines.
    """
    try:
        Router(plugins, max_queued=1).register_all(settings)
    except REFUSALS as error:
        raise explained(error, settings, plugins, path) from None


def explained(error: Exception, settings: Settings, plugins: PluginManager, path: str | None) -> Exception:
    """``error``, which registering raised, as a ConfigError with all those that it hid; itself where there are none."""
    mistakes = Mistakes()
    note_refusals(settings, plugins, path, mistakes)
    try:
        mistakes.raise_any()
    except ConfigError as all_of_them:
        return all_of_them
    return _placed(error, settings, path)


def _placed(error: Exception, settings: Settings, path: str | None) -> Exception:
    """A clash between models shows only where all are put together; it has a place in the file all the same."""
    if path is None or not isinstance(error, NamesClash):
        return error
    index = next((index for index, model in enumerate(settings.models) if model is error.model), None)
    if index is None:  # between plugins, neither of which was asked
        return error
    return ConfigError(f"{SettingsFile(path, Mistakes()).place('models', index, *error.key)}: {error}")


def note_refusals(settings: Settings, plugins: PluginManager, path: str | None, mistakes: Mistakes) -> None:
    """Note what the plugins refuse of each model, the others and its names left aside.

    Without a file there is one model, whose first error says all. A model whose backend, options or source are wrong
    already is left out: what a plugin would say of the rest is noise.
    """
    if path is None:
        return
    file = SettingsFile(path, Mistakes())
    for index, model in enumerate(settings.models):
        if any(key[:2] == ("models", index) and key[2:3] in _FOUNDATIONS for key in file.refused):
            continue
        refusal = _refusal(settings, model, plugins)
        if refusal is not None:
            param = getattr(refusal, "param", None)
            key = ("models", index, *(param.split(".") if param else ()))
            mistakes.add(f"{file.place(*key)}: {refusal}", line=file.line(*key))


_FOUNDATIONS = (("backend",), ("options",), ("model",))


def _refusal(settings: Settings, model: ModelSettings, plugins: PluginManager) -> Exception | None:
    alone = msgspec.structs.replace(model, fallback=(), aliases=(), replicas=1)
    try:
        Router(plugins, max_queued=1).register_all(msgspec.structs.replace(settings, models=(alone,)))
    except REFUSALS as error:
        return error
    return None
