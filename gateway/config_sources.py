"""Where settings come from: defaults < TOML file < environment < flags; and the page that lists them all.

Everything here is generated from the fields in ``config``: the flags, the variables, the accepted keys and
``docs/configuration.md`` (written by ``python -m suimon.gateway.config_sources``). An error names the source, the key
and what was expected.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from suimon.gateway.config import ApiKey, ConfigError, ModelSettings, Settings, check_exposure, is_exposed
from suimon.gateway.config_file import Mistakes, SettingsFile, check_names
from suimon.gateway.config_options import GATEWAY, LISTS, MODEL, Option, from_text, shown, type_word


def from_environment(environ: Mapping[str, str], known: Mapping[str, Option]) -> dict[str, Any]:
    """The settings in SUIMON_* variables, by field name. An empty variable counts as not set."""
    values = {}
    for option in known.values():
        for variable in (option.alias, option.env):
            if variable and environ.get(variable):
                values[option.name] = from_text(option, [environ[variable]], variable)
    return values


def read_key_file(path: str) -> tuple[ApiKey, ...]:
    """The keys in a file of ``KEY`` or ``NAME KEY`` lines. Raises ConfigError, never with a key in it."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {path}: cannot be read: {type(error).__name__}") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        words = re.split(r"(?:^|\s)#", line)[0].split()  # a key may hold one
        if len(words) > 2:
            raise ConfigError(f"api_key_file {path}: line {number}: expected KEY or NAME KEY, got {len(words)} words")
        if words:
            keys.append(ApiKey(key=words[-1], name=words[0] if len(words) == 2 else ""))
    return tuple(keys)


# --- Flags ---------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """``[MODEL]``, ``--config`` and one flag per option. Flags that are not given leave nothing behind."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL["model"].doc, default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these settings.")
    for title, known in (("gateway", GATEWAY), ("model", MODEL)):
        group = parser.add_argument_group(title)
        for option in known.values():
            if option.flag and option.name != "model":
                _add_flag(group, option)


def _add_flag(group: argparse._ArgumentGroup, option: Option) -> None:
    assert option.flag is not None
    text = f"{option.doc} (default: {shown(option)})".replace("%", "%%")
    common: dict[str, Any] = {"dest": option.name, "help": text, "default": argparse.SUPPRESS}
    if isinstance(option.default, bool):
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **common)
    else:
        group.add_argument(option.flag, action="append", metavar=_metavar(option), **common)


def _metavar(option: Option) -> str:
    if option.name in ("host", "port", "backend", "dtype", "device"):
        return option.name.upper()
    return {"integer": "N", "number": "X", "bytes": "BYTES"}.get(type_word(option), "TEXT")


def from_flags(arguments: argparse.Namespace, known: Mapping[str, Option]) -> dict[str, Any]:
    """The settings given by flags, by field name."""
    values = {}
    for name, option in known.items():
        given = getattr(arguments, name, None)
        if given is None:
            continue
        given = given if isinstance(given, list) else [given]
        if option.name not in LISTS | {"api_keys"}:
            given = given[-1:]  # said twice, the last word counts
        place = "MODEL" if name == "model" else option.flag or name
        values[name] = given[0] if isinstance(given[0], bool) else from_text(option, given, place)
    return values


# --- Putting them together -----------------------------------------------------------------------------------


def read_settings(
    arguments: argparse.Namespace,
    environ: Mapping[str, str],
    mistakes: Mistakes,
    authenticates: Callable[[Settings], bool] = lambda settings: False,
) -> Settings:
    """The settings of this call: file, environment and flags. What is wrong is left out, and noted: all of the file's
    mistakes, and the first of the flags and variables.

    ``authenticates``: whether a plugin proves who asks, so that no key is needed; asked only where one would be. Raises
    ConfigError for a file that cannot be read at all.
    """
    settings = _merged(arguments, environ, mistakes)
    with mistakes.noting("api_key_file"):
        settings = _with_key_file(settings)
    if not mistakes.settings & {"flags", "host", "api_keys", "api_key_file", "name", "key", "sha256"}:
        with mistakes.noting():
            if not (is_exposed(settings) and authenticates(settings)):
                check_exposure(settings)
    return settings


def _merged(arguments: argparse.Namespace, environ: Mapping[str, str], mistakes: Mistakes) -> Settings:
    path = config_path(arguments, environ)
    file = SettingsFile(path, mistakes) if path else None
    values, models = (dict(file.values), list(file.models)) if file else ({}, [{}])
    for source in (_environment(environ), lambda known: from_flags(arguments, known)):
        with mistakes.noting("flags"):
            values.update(source(GATEWAY))
        with mistakes.noting():
            _override_model(models, source(MODEL))
    if file is not None and not mistakes.settings & {"served_model_name", "aliases", "models"}:
        check_names(models, file)
    return Settings(**values, models=tuple(ModelSettings(**model) for model in models))


def config_path(arguments: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """The file of settings that this call names, if any."""
    return getattr(arguments, "config", None) or environ.get("SUIMON_CONFIG") or None


def _with_key_file(settings: Settings) -> Settings:
    if not settings.api_key_file:
        return settings
    keys = settings.api_keys + read_key_file(settings.api_key_file)
    return msgspec.structs.replace(settings, api_keys=keys)


def _environment(environ: Mapping[str, str]) -> Callable[[Mapping[str, Option]], dict[str, Any]]:
    return lambda known: from_environment(environ, known)


def _override_model(models: list[dict[str, Any]], values: Mapping[str, Any]) -> None:
    """Model options outside the file speak of the one model; with several nobody could say which."""
    if values and len(models) > 1:
        named = MODEL[next(iter(values))]
        raise ConfigError(
            f"{named.flag if named.name != 'model' else 'MODEL'} (or {named.env}) is about one model, and the "
            f"configuration file serves {len(models)}: set {named.name} in its [[models]] table"
        )
    if values:
        models[0] = {**models[0], **values}


# --- The page ------------------------------------------------------------------------------------------------

_PAGE = """\
# Configuration

<!-- Generated by `python -m suimon.gateway.config_sources > docs/configuration.md`; do not edit. -->

A setting is looked for in four places, and the last one that has it wins: its default, the TOML file given by
`--config FILE` (or `SUIMON_CONFIG`), the environment, the flags of `suimon serve`. Sizes are bytes and may be written
`4GiB` or `512M`; lists are separated by commas outside the file. An empty variable counts as not set. `suimon
check-config` shows the result. Traces and metrics are sent by OTLP when the standard variables
(`OTEL_EXPORTER_OTLP_ENDPOINT`, ...) say where.

## The HTTP server

HTTP/1.1 by uvicorn with httptools, and limits of our own around it: request line and headers within
`max_header_size`, `max_header_count` and `header_timeout`, bodies within `max_body_size` and `body_timeout` (and no
slower than 16 KiB a second after it), connections within `max_connections`. What is beyond is answered 431, 408, 413 or
503 with an OpenAI error body, and the connection is closed. A client that leaves its answer unread for
`stream_stall_timeout` is dropped; at most 32 KiB wait for it in this process. TLS is for a proxy in front.

The first SIGTERM or Ctrl-C makes `/health/ready` and every new request answer 503 (`Retry-After`, `Connection: close`)
while running requests finish; after `drain_timeout` the streams still open end with an error event, and the process
leaves with status 0. A second signal skips the waiting.

## Gateway

At the top level of the file.

{gateway}

## Models

One `[[models]]` table in the file for each model. Flags and variables are about the one model, and refused when the
file has several.

{models}
"""


def render_page() -> str:
    """The text of ``docs/configuration.md``."""
    return _PAGE.format(gateway=_table(GATEWAY.values()), models=_table(MODEL.values()))


def _table(known: Iterable[Option]) -> str:
    rows = ["| key | type | default | flag | environment | meaning |", "|---|---|---|---|---|---|"]
    for option in known:
        flag = f"`{option.flag}`" if option.flag and option.name != "model" else "`MODEL`" if option.flag else ""
        variables = ", ".join(f"`{variable}`" for variable in (option.env, option.alias) if variable)
        kind = type_word(option)
        rows.append(f"| `{option.name}` | {kind} | {shown(option)} | {flag} | {variables} | {option.doc} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(render_page(), end="")
