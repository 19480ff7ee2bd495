"""What the plugins refuse of a configuration: every model's mistakes at once, each with its line in the file.

Registering all backends stops at the first that is wrong, and its error knows no file. So where that fails, each model
is registered by itself, in a gateway that is thrown away. Nothing is started.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from suimon.gateway.config import ConfigError
from suimon.gateway.config_file import Mistakes, SettingsFile
from suimon.gateway.hookspecs import BackendError
from suimon.gateway.router import Router

if TYPE_CHECKING:
    from suimon.gateway.config import Settings
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
    if path is None:
        return error
    file = SettingsFile(path, Mistakes())
    lines = [f"{file.place('models', *key)}: {said}" for key, said in _refused(settings, plugins)]
    return ConfigError("\n".join(lines)) if lines else error


def _refused(settings: Settings, plugins: PluginManager) -> Iterator[tuple[tuple[Any, ...], str]]:
    """(key of the model, what is said) for each model that cannot be registered by itself."""
    for index, model in enumerate(settings.models):
        alone = msgspec.structs.replace(model, fallback=(), aliases=(), replicas=1)
        try:
            Router(plugins, max_queued=1).register_all(msgspec.structs.replace(settings, models=(alone,)))
        except REFUSALS as error:
            param = getattr(error, "param", None)
            yield (index, *(param.split(".") if param else ())), str(error)
