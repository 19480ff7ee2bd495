"""A setting as the outside sees it: made from the fields in ``config``, and how a value that came from there is read.

Knows names, types and words; refuses to know where a value came from and which one wins.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Meta

from suimon.gateway.config import ApiKey, ConfigError, ModelSettings, Settings

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
    choices: tuple[str, ...]  # the only values it takes; empty: any of its type


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
    is_bytes, choices = extra.get("unit") == "bytes", extra.get("choices", ())
    return Option(name, hint, default, meta.description or "", flag, env, extra.get("env"), is_bytes, choices)


GATEWAY = options(Settings)
MODEL = options(ModelSettings)


def parse_size(text: str) -> int:
    """Bytes from ``4GiB``, ``512M`` or ``1000``. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"expected bytes such as 4GiB, 512MiB or 1000000, got {text!r}")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def from_text(option: Option, given: list[str], place: str) -> Any:
    """The value of a flag or a variable, said once or several times. Raises ConfigError, never with a key in it."""
    if any("\udc80" <= character <= "\udcff" for text in given for character in text):
        raise ConfigError(f"{place}: is not text in this system's encoding (UTF-8, unless the locale says otherwise)")
    if option.name == "api_keys":
        if not all(given):
            raise ConfigError(f"{place}: the key is empty")
        return tuple(ApiKey(key=key) for key in given)
    value: Any = given[0] if len(given) == 1 else ",".join(given)
    if option.name in LISTS:
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return convert(option, value, strict=False)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}".replace("got str", f"got {value!r}")) from None


def convert(option: Option, value: Any, *, strict: bool = True) -> Any:
    """``value`` as the field's type; unless ``strict``, text may stand for a number. Raises ValueError."""
    if option.is_bytes and isinstance(value, str):
        value = parse_size(value)
    if option.choices and isinstance(value, str) and value not in option.choices:
        raise ValueError(f"expected one of {', '.join(option.choices)}, got {value!r}")
    return convert_to(option.type, value, strict=strict)


def convert_to(kind: Any, value: Any, *, strict: bool = True) -> Any:
    """``msgspec.convert`` with words for people. Raises ValueError."""
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        said = str(error).split(" - at `")[0].replace("`", "")
        raise ValueError(said.replace("Expected", "expected", 1)) from None


# --- Showing options -----------------------------------------------------------------------------------------

# The first of these names found in an annotation is its kind; bool before int, as the words do not overlap.
_KINDS = {"bool": "yes/no", "int": "integer", "float": "number", "tuple": "list", "dict": "table", "str": "text"}


def type_word(option: Option) -> str:
    if option.is_bytes:
        return "bytes"
    spelled = str(get_args(option.type)[0])
    return next(word for kind, word in _KINDS.items() if kind in spelled)


def shown(option: Option) -> str:
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
