"""The ``suimon`` command. Reads the command line, hands over, and turns errors into one clear line.

It must start fast: every command imports what it needs when it runs, and plugins are loaded only where a command of
theirs may be meant. It never imports an engine.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from suimon.gateway import chat, config_sources, models_command
from suimon.gateway.config import ConfigError

if TYPE_CHECKING:
    from suimon.gateway.config import Settings
    from suimon.gateway.plugin_manager import PluginManager

Run = Callable[[argparse.Namespace], int]
Commands = Any  # argparse's _SubParsersAction, which has no public name


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 for what went wrong, 2 for a wrong command line, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _prepare_streams()
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if not _is_expected(error):
            raise  # ours, not the user's: the traceback is wanted
        for line in str(error).splitlines() if isinstance(error, ConfigError) else [error]:
            print(f"suimon: error: {line}", file=sys.stderr)
        return 1


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="suimon", description="An OpenAI-compatible LLM gateway with its own paged-attention engine."
    )
    parser.add_argument("--version", action="store_const", const=_version, dest="run", help="print the version")
    named = next((word for word in arguments if not word.startswith("-")), None)
    commands = parser.add_subparsers(metavar="COMMAND", required="--version" not in arguments)
    for name, (add, run, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == named:
            add(command)
            command.set_defaults(run=run)
    if named not in _COMMANDS and "--version" not in arguments:
        _add_plugin_commands(commands)
    parsed = parser.parse_args(arguments)
    return int(parsed.run(parsed) or 0)


def _prepare_streams() -> None:
    """No character that a terminal lacks ends a command, nor one that it sends wrongly.

    A standard stream that was closed becomes a null device: its number would go to the next file opened, and be written
    to as if it still were what it was.
    """
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _is_expected(error: Exception) -> bool:
    """Whether the message is written for the user; other errors are ours and keep their traceback."""
    from suimon.gateway.hookspecs import BackendError
    from suimon.gateway.plugin_manager import PluginError

    return isinstance(error, (ConfigError, chat.ChatError, BackendError, PluginError))


def _add_plugin_commands(commands: Commands) -> None:
    """A broken plugin costs its commands, not ``suimon --help``."""
    from suimon.gateway.plugin_manager import PluginError, load_plugins

    try:
        asked = load_plugins().each_of("register_commands")
    except PluginError as error:
        print(f"suimon: warning: {error}", file=sys.stderr)
        return
    for each in asked:
        try:
            each.ask(commands=commands)
        except PluginError as error:
            print(f"suimon: warning: {error}", file=sys.stderr)


# --- Commands ---------------------------------------------------------------------------------------------------------


def _serve(arguments: argparse.Namespace) -> int:
    from suimon.gateway.serve import serve

    environ = dict(os.environ)  # as it was given: serving adds to it
    settings, path = _settings(arguments, environ), config_sources.config_path(arguments, environ)

    def read_again(plugins: PluginManager) -> Settings:
        from suimon.gateway.config_check import check_backends

        changed = _settings(arguments, environ)
        check_backends(changed, plugins, path)
        return changed

    def explain(error: Exception, plugins: PluginManager) -> Exception:
        from suimon.gateway.config_check import explained

        return explained(error, settings, plugins, path)

    return serve(settings, read_again, explain)


def _settings(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """The settings of this call. Raises ConfigError with every mistake in them, what plugins refuse included."""
    from suimon.gateway.config_file import Mistakes

    mistakes = Mistakes()
    settings = config_sources.read_settings(arguments, environ, mistakes, _authenticates)
    if mistakes:
        from suimon.gateway.config_check import note_refusals
        from suimon.gateway.plugin_manager import PluginError

        try:
            note_refusals(settings, _plugins_of(settings), config_sources.config_path(arguments, environ), mistakes)
        except PluginError as error:
            mistakes.add(str(error))
    mistakes.raise_any()
    return settings


def _authenticates(settings: Settings) -> bool:
    """Whether a plugin does; where one cannot be loaded, that is what is to be said, and not that a key is missing."""
    from suimon.gateway.plugin_manager import PluginError

    try:
        return bool(_plugins_of(settings).hook.authenticate.get_hookimpls())
    except PluginError:
        return True


def _plugins_of(settings: Settings) -> PluginManager:
    from suimon.gateway.plugin_manager import load_plugins

    return load_plugins(settings.plugins, folder=settings.plugins_dir)


def _check_config(arguments: argparse.Namespace) -> int:
    import msgspec

    from suimon.gateway.config_check import check_backends

    settings = _settings(arguments, os.environ)
    check_backends(settings, _plugins_of(settings), config_sources.config_path(arguments, os.environ))
    shown = msgspec.to_builtins(settings) | {"api_keys": [key.name for key in settings.api_keys]}
    print(msgspec.json.format(msgspec.json.encode(shown)).decode())
    return 0


def _plugins(arguments: argparse.Namespace) -> int:
    import msgspec

    from suimon.gateway.plugin_manager import BUILT_IN, load_plugins

    manager = load_plugins(arguments.plugins or (), folder=arguments.plugins_dir)
    shown = [info for info in manager.infos() if arguments.all or info.name not in BUILT_IN]
    if arguments.hook:
        known = ", ".join(sorted(vars(manager.hook)))
        if not hasattr(manager.hook, arguments.hook):
            raise ConfigError(f"there is no hook {arguments.hook!r}; the hooks are {known}")
        shown = [info for info in shown if arguments.hook in info.hooks]
    print(msgspec.json.format(msgspec.json.encode(shown)).decode())
    return 0


def _version(arguments: argparse.Namespace) -> int:
    from suimon.gateway.version import VERSION

    print(f"suimon {VERSION}")
    return 0


def _add_plugins(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="also the built-in ones")
    parser.add_argument("--hook", metavar="NAME", help="only those that implement this hook")
    parser.add_argument("--plugins", metavar="NAME", action="append", help="a module to load as well")
    folder = os.environ.get("SUIMON_PLUGINS_DIR") or None
    parser.add_argument("--plugins-dir", metavar="DIR", default=folder, help="a folder whose *.py are loaded as well")


def _add_nothing(parser: argparse.ArgumentParser) -> None:
    pass


_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Run, str]] = {
    "serve": (config_sources.add_flags, _serve, "Serve a model over HTTP."),
    "chat": (chat.add_flags, chat.run, "Talk to a server in the terminal."),
    "models": (models_command.add_flags, models_command.run, "Show what a server serves, where and why."),
    "plugins": (_add_plugins, _plugins, "List the loaded plugins as JSON."),
    "check-config": (config_sources.add_flags, _check_config, "Check the configuration and print the result as JSON."),
    "version": (_add_nothing, _version, "Print the version."),
}

if __name__ == "__main__":
    sys.exit(main())
