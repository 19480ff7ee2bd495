"""Where settings come from: defaults < TOML file < environment < flags; and the page that lists them all.

Everything here is generated from the fields in ``config``: the flags, the variables, the accepted keys and
``docs/configuration.md`` (written by ``python -m suimon.gateway.config_sources``). An error names the source, the key
and what was expected.
"""

from __future__ import annotations

import argparse
import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Meta

from suimon.gateway.config import ApiKey, ConfigError, ModelSettings, Settings, check_exposure

FILE_ONLY = frozenset({"models", "options", "aliases", "fallback"})
LISTS = frozenset({"allowed_origins", "plugins"})
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", re.IGNORECASE)


class Option(NamedTuple):
    """One field as the outside sees it."""

    name: str
    type: Any  # the annotation, limits included
    default: Any
    doc: str
    flag: str | None
    env: str | None
    alias: str | None  # a second variable, that a standard gives
    is_bytes: bool


def options(struct: type[msgspec.Struct]) -> dict[str, Option]:
    """The options of Settings or ModelSettings, in the order of the fields."""
    hints = get_type_hints(struct, include_extras=True)
    fields = msgspec.structs.fields(struct)
    return {field.name: _option(field.name, hints[field.name], field) for field in fields}


def _option(name: str, hint: Any, field: msgspec.structs.FieldInfo) -> Option:
    meta = next(item for item in get_args(hint) if isinstance(item, Meta) and item.description)
    extra = meta.extra or {}
    outside = name not in FILE_ONLY
    flag = extra.get("flag", "--" + name.replace("_", "-")) if outside else None
    env = f"SUIMON_{'API_KEY' if name == 'api_keys' else name.upper()}" if outside else None
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return Option(
        name, hint, default, meta.description or "", flag, env, extra.get("env"), extra.get("unit") == "bytes"
    )


GATEWAY = options(Settings)
MODEL = options(ModelSettings)


# --- Reading values ------------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """Bytes from ``4GiB``, ``512M`` or ``1000``. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected bytes such as 4GiB, 512MiB or 1000000, got {text!r}")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def _convert(option: Option, value: Any, place: str, *, text: bool) -> Any:
    """``value`` as the field's type; ``text``: it came as a string, from a flag or a variable."""
    try:
        if option.is_bytes and isinstance(value, str):
            value = parse_size(value)
        elif text and option.name in LISTS:
            value = [part.strip() for part in value.split(",") if part.strip()]
        return msgspec.convert(value, option.type, strict=not text)
    except (msgspec.ValidationError, ValueError) as error:
        said = _plain(str(error)).replace("got str", f"got {value!r}") if text else _plain(str(error))
        raise ConfigError(f"{place}: {said}") from None


def _plain(message: str) -> str:
    """msgspec's words without its path, which the place already gives."""
    return message.split(" - at `")[0].replace("Expected", "expected", 1).replace("`", "")


def from_file(path: str) -> dict[str, Any]:
    """The settings in a TOML file, by field name; ``models`` is a tuple of dictionaries. Raises ConfigError."""
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None
    models = content.pop("models", None)
    values = _from_table(content, GATEWAY, path, "")
    if models is not None:
        values["models"] = tuple(_from_models(models, path))
    return values


def _from_models(models: Any, path: str) -> Iterable[dict[str, Any]]:
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        raise ConfigError(f"{path}: models: expected one or more [[models]] tables")
    for index, table in enumerate(models):
        yield _from_table(table, MODEL, path, f"models[{index}].")


def _from_table(table: Mapping[str, Any], known: Mapping[str, Option], path: str, prefix: str) -> dict[str, Any]:
    values = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{path}: unknown key {prefix + key!r}{_nearest(key, known)}")
        values[key] = _convert(known[key], value, f"{path}: {prefix}{key}", text=False)
    return values


def _nearest(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else "; see docs/configuration.md for the known ones"


def from_environment(environ: Mapping[str, str], known: Mapping[str, Option]) -> dict[str, Any]:
    """The settings in SUIMON_* variables, by field name. An empty variable counts as not set."""
    values = {}
    for option in known.values():
        for variable in (option.alias, option.env):
            if variable and environ.get(variable):
                values[option.name] = _from_text(option, [environ[variable]], variable)
    return values


def _from_text(option: Option, given: list[str], place: str) -> Any:
    if any("\udc80" <= character <= "\udcff" for text in given for character in text):
        raise ConfigError(f"{place}: is not text in this system's encoding (UTF-8, unless the locale says otherwise)")
    if option.name == "api_keys":
        if not all(given):
            raise ConfigError(f"{place}: the key is empty")
        return tuple(ApiKey(key=key) for key in given)
    return _convert(option, given[0] if len(given) == 1 else ",".join(given), place, text=True)


def read_key_file(path: str) -> tuple[ApiKey, ...]:
    """The keys in a file of ``KEY`` or ``NAME KEY`` lines. Raises ConfigError, never with a key in it."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {path}: cannot be read: {type(error).__name__}") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        words = line.split("#")[0].split()
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
    text = f"{option.doc} (default: {_shown(option)})".replace("%", "%%")
    common: dict[str, Any] = {"dest": option.name, "help": text, "default": argparse.SUPPRESS}
    if isinstance(option.default, bool):
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **common)
    else:
        group.add_argument(option.flag, action="append", metavar=_metavar(option), **common)


def _metavar(option: Option) -> str:
    if option.name in ("host", "port", "backend", "dtype", "device"):
        return option.name.upper()
    return {"integer": "N", "number": "X", "bytes": "BYTES"}.get(_type_word(option), "TEXT")


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
        values[name] = given[0] if isinstance(given[0], bool) else _from_text(option, given, place)
    return values


# --- Putting them together -----------------------------------------------------------------------------------


def load_settings(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """The settings of this call: file, environment and flags, checked. Raises ConfigError."""
    path = getattr(arguments, "config", None) or environ.get("SUIMON_CONFIG")
    values: dict[str, Any] = from_file(path) if path else {}
    models = [dict(model) for model in values.pop("models", ({},))]
    for source in (_environment(environ), lambda known: from_flags(arguments, known)):
        values.update(source(GATEWAY))
        _override_model(models, source(MODEL))
    settings: Settings = _build(Settings, values | {"models": tuple(_build(ModelSettings, model) for model in models)})
    if settings.api_key_file:
        keys = settings.api_keys + read_key_file(settings.api_key_file)
        settings = msgspec.structs.replace(settings, api_keys=keys)
    check_exposure(settings)
    return settings


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
        models[0].update(values)


def _build(struct: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    try:
        return struct(**values)
    except ValueError as error:
        raise ConfigError(str(error)) from None


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
        kind = _type_word(option)
        rows.append(f"| `{option.name}` | {kind} | {_shown(option)} | {flag} | {variables} | {option.doc} |")
    return "\n".join(rows)


# The first of these names found in an annotation is its kind; bool before int, as the words do not overlap.
_KINDS = {"bool": "yes/no", "int": "integer", "float": "number", "tuple": "list", "dict": "table", "str": "text"}


def _type_word(option: Option) -> str:
    if option.is_bytes:
        return "bytes"
    spelled = str(get_args(option.type)[0])
    return next(word for kind, word in _KINDS.items() if kind in spelled)


def _shown(option: Option) -> str:
    """The default, as a person would write it."""
    default = option.default
    if default is None:
        return "none" if option.name in ("api_key_file", "plugins_dir") else "auto"
    if isinstance(default, bool):
        return "yes" if default else "no"
    if option.is_bytes:
        return f"{default // 1024**2} MiB" if default % 1024**2 == 0 else f"{default // 1024} KiB"
    if option.name == "models":
        return "the demo model"
    return f"{default:g}" if isinstance(default, float) else str(default or "none") if default != 0 else "0"


if __name__ == "__main__":
    print(render_page(), end="")
