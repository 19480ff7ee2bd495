"""The TOML file of settings: every mistake in it at once, each with its line, its key and what to do about it.

Knows the file and what its keys must be; refuses to know flags, variables and what a plugin makes of ``options``.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, get_args, get_origin

import msgspec

from suimon.gateway.config import ApiKey, ConfigError
from suimon.gateway.config_options import GATEWAY, MODEL, Option, convert, convert_to, shown
from suimon.gateway.toml_lines import TomlLines

DEMO_MODEL = "SmolLM2-135M-Instruct"  # what a model without a name of its own is; the engine's own word is the same
_KEYS_OF_API_KEY = tuple(field.name for field in msgspec.structs.fields(ApiKey))
_ELSEWHERE = 1 << 30  # the line of what stands in no file: shown last


class Mistakes:
    """What is wrong, all of it: nobody should have to correct one thing to be told of the next."""

    def __init__(self) -> None:
        self._found: list[tuple[int, str]] = []
        self.settings: set[str] = set()  # the names of those that are wrong: what is built on them is not checked

    def add(self, message: str, *, setting: str = "", line: int = _ELSEWHERE) -> None:
        """One more. ``line`` is only its place among the others."""
        self._found.append((line, message))
        self.settings.add(setting)

    @contextmanager
    def noting(self, setting: str = "") -> Iterator[None]:
        """A ConfigError inside is one more mistake, and what follows is looked at all the same."""
        try:
            yield
        except ConfigError as error:
            self.add(str(error), setting=setting)

    def __bool__(self) -> bool:
        return bool(self._found)

    def raise_any(self) -> None:
        """Raise one ConfigError with a line for each mistake, in the order of the file."""
        if self._found:
            raise ConfigError("\n".join(message for _, message in sorted(self._found, key=lambda each: each[0])))


class SettingsFile:
    """A file's settings by field name; those of its ``[[models]]`` tables are ``models``. What is wrong is left out.

    Raises ConfigError for a file that cannot be read or is no TOML; what else is wrong goes to ``mistakes``.
    """

    def __init__(self, path: str, mistakes: Mistakes) -> None:
        self.path = path
        text = _read(path)
        self._lines = TomlLines(text)
        self._mistakes = mistakes
        self.refused: set[tuple[str | int, ...]] = set()  # keys
        content = tomllib.loads(text)
        models = content.pop("models", [{}])
        self.values = self._table(content, GATEWAY, ())
        self.models: tuple[dict[str, Any], ...] = tuple(self._models(models))

    def place(self, *key: str | int) -> str:
        """``FILE:LINE: models[1].dtype``."""
        return f"{self.path}:{self.line(*key)}: {_spelled(key)}"

    def line(self, *key: str | int) -> int:
        """The line of ``key``, or of the nearest thing around it."""
        return self._lines.of(key)

    def refuse(self, message: str, *key: str | int) -> None:
        """Note what is wrong with ``key``."""
        self.refused.add(key)
        setting = str(next(part for part in key[::-1] if isinstance(part, str)))
        self._mistakes.add(f"{self.place(*key)}: {message}", setting=setting, line=self.line(*key))

    def _models(self, models: Any) -> Iterator[dict[str, Any]]:
        if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
            self.refuse("expected one or more [[models]] tables; write one for each model", "models")
            models = [{}]
        for index, table in enumerate(models):
            yield self._table(table, MODEL, ("models", index))

    def _table(self, table: Mapping[str, Any], known: Mapping[str, Option], within: tuple[str | int, ...]) -> Any:
        values = {}
        for name, value in table.items():
            if name not in known:
                self.refuse(f"unknown key{_remedy(name, known)}", *within, name)
            elif isinstance(value, list) and _is_list(known[name]):
                values[name] = tuple(self._items(known[name], value, (*within, name)))
            else:
                values |= self._value(known[name], value, (*within, name))
        return values

    def _value(self, option: Option, value: Any, key: tuple[str | int, ...]) -> dict[str, Any]:
        try:
            return {option.name: convert(option, value)}
        except ValueError as error:
            default = f"; correct it or leave it out (default: {shown(option)})"
            self.refuse(_with_value(str(error), value, hidden=option.name == "api_keys") + default, *key)
            return {}

    def _items(self, option: Option, value: list[Any], key: tuple[str | int, ...]) -> Iterator[Any]:
        """The items of a list, each checked by itself."""
        kind = get_args(get_args(option.type)[0])[0]
        for index, item in enumerate(value):
            if kind is ApiKey and isinstance(item, dict) and not self._is_api_key(item, (*key, index)):
                continue
            try:
                yield convert_to(kind, item)
            except ValueError as error:
                said = _with_value(str(error), item, hidden=kind is ApiKey)
                self.refuse(f"{said}; correct it or take it out", *key, index)

    def _is_api_key(self, table: Mapping[str, Any], within: tuple[str | int, ...]) -> bool:
        """Whether every key is known and text; what stands in them is shown to nobody."""
        wrong = {name: "expected str; put it in quotes" for name in table if not isinstance(table[name], str)}
        for name in set(table) - set(_KEYS_OF_API_KEY):
            wrong[name] = f"unknown key{_remedy(name, _KEYS_OF_API_KEY)}"
        for name, message in wrong.items():
            self.refuse(message, *within, name)
        return not wrong


def _read(path: str) -> str:
    """The file's text, which is TOML. Raises ConfigError."""
    text = ""
    try:
        text = Path(path).read_text(encoding="utf-8")
        tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+)", str(error))
        line = found[1] if found else text.count("\n") + 1  # "at end of document"
        raise ConfigError(f"{path}:{line}: is not valid TOML: {error}") from None
    return text


def _is_list(option: Option) -> bool:
    """Whether it holds several: ``str | None`` and ``dict[str, Any]`` have arguments too, and no items."""
    return get_origin(get_args(option.type)[0]) is tuple


def _spelled(key: Sequence[str | int]) -> str:
    """``models[1].dtype`` of ("models", 1, "dtype")."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).lstrip(".")


def _with_value(said: str, value: Any, *, hidden: bool) -> str:
    """``said`` with the value in place of its type; a key is never shown, nor what would fill the screen."""
    said = said.replace("expected object", "expected table")
    if hidden or not said.startswith("expected") or ", got '" in said or not isinstance(value, (bool, int, float, str)):
        return said
    written = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"{said.split(', got ')[0]}, got {written:.100}"


def _remedy(name: str, known: Iterable[str]) -> str:
    if name in MODEL and known is GATEWAY:
        return "; it belongs in a [[models]] table"
    if name in GATEWAY and known is MODEL:
        return "; it belongs at the top of the file, before the first table"
    return nearest(name, known) or "; docs/configuration.md lists those that there are"


def nearest(name: str, known: Iterable[str]) -> str:
    """The words that propose the known name most like ``name``; nothing where none is like it."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


# --- Names of models --------------------------------------------------------------------------------------------------


def check_names(models: Sequence[Mapping[str, Any]], file: SettingsFile) -> None:
    """Refuse a name that two models have, a fallback to a model that is not there, and fallbacks in a circle."""
    _check_unique(models, file)
    known = {name: index for index, model in reversed(list(enumerate(models))) for name in _possible_names(model)}
    edges: dict[int, list[int]] = {index: [] for index in range(len(models))}
    for index, model in enumerate(models):
        for place, name in enumerate(model.get("fallback", ())):
            if name in known:
                edges[index].append(known[name])
                continue
            remedy = nearest(name, known) or f"; named here: {', '.join(sorted(known))}"
            file.refuse(f"expected the name of another model, got {name!r}{remedy}", "models", index, "fallback", place)
    _check_circles(models, edges, file)


def _check_unique(models: Sequence[Mapping[str, Any]], file: SettingsFile) -> None:
    owner: dict[str, str] = {}
    for index, model in enumerate(models):
        own = "served_model_name" if model.get("served_model_name") else "model"
        aliases = [(("aliases", place), alias) for place, alias in enumerate(model.get("aliases", ()))]
        for key, name in [((own,), model.get(own, "")), *aliases]:
            if name in owner:
                file.refuse(
                    f"expected a name of its own, but {owner[name]} is {name!r} too; give this model another "
                    f"{'alias' if key in dict(aliases) else 'served_model_name'}",
                    *("models", index, *key),
                )
            elif name:
                owner[name] = f"models[{index}].{key[0]}"


def _possible_names(model: Mapping[str, Any]) -> set[str]:
    """What the model may be called: its backend makes the name, where the operator gives none."""
    aliases = set(model.get("aliases", ()))
    if model.get("served_model_name"):
        return {model["served_model_name"], *aliases}
    location = (model.get("model") or DEMO_MODEL).partition("#")[0]
    name = PurePath(location).name
    stem = re.sub(r"\.(gguf|safetensors)$", "", name)
    return {location, location.partition("@")[0], name, stem, *aliases} | {model.get("backend", "")} - {""}


def _check_circles(models: Sequence[Mapping[str, Any]], edges: Mapping[int, list[int]], file: SettingsFile) -> None:
    """Depth-first: an edge back to a model on the way here closes a circle."""
    done: set[int] = set()

    def visit(index: int, way: tuple[int, ...]) -> None:
        if index in done:
            return
        for other in edges[index]:
            if other in way:
                circle = " -> ".join(_name(models, each) for each in (*way[way.index(other) :], other))
                file.refuse(f"goes in a circle, {circle}; take one of them out", "models", index, "fallback")
            else:
                visit(other, (*way, other))
        done.add(index)

    for index in edges:
        visit(index, (index,))


def _name(models: Sequence[Mapping[str, Any]], index: int) -> str:
    return str(models[index].get("served_model_name") or models[index].get("model") or f"models[{index}]")
