"""On which line of a TOML file a key stands: what tomllib reads but does not tell.

Knows where statements begin and end and which table they belong to; what they mean is left to tomllib, which is given
each of them alone. The text must be valid TOML.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]  # ("models", 1, "dtype"): of the second [[models]] table

# Strings and comments may hold whatever else ends a statement, so they are taken whole; then brackets and line ends.
_TOKEN = re.compile(
    r'"""(?:\\[\s\S]|[^\\])*?"""(?:""?(?!"))?'
    r"|'''[\s\S]*?'''(?:''?(?!'))?"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*"
    r"|[\[{]|[\]}]|\n"
)


class TomlLines:
    """The lines of one file's keys, counted from 1."""

    def __init__(self, text: str) -> None:
        self._lines: dict[Path, int] = {(): 1}
        self._last: dict[Path, int] = {}  # an array of tables -> the index of its latest one
        table: Path = ()
        for line, statement in _statements(text):
            content = tomllib.loads(statement)
            if statement.startswith("["):
                table = self._enter(content)
                self._lines.setdefault(table, line)
            else:
                self._note(table, content, line)

    def of(self, path: Path) -> int:
        """The line of ``path``, or of the nearest thing around it that has one."""
        while path not in self._lines:
            path = path[:-1]
        return self._lines[path]

    def _enter(self, header: Any) -> Path:
        """The table that a header opens; ``header`` is what tomllib makes of it, one key within the other."""
        path: Path = ()
        while isinstance(header, dict) and header:
            if path in self._last:
                path = (*path, self._last[path])
            name, header = next(iter(header.items()))
            path = (*path, name)
        if isinstance(header, list):
            self._last[path] = self._last.get(path, -1) + 1
            path = (*path, self._last[path])
        return path

    def _note(self, path: Path, value: Any, line: int) -> None:
        self._lines.setdefault(path, line)
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, inner in items:
            self._note((*path, name), inner, line)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """(first line, text) of each header and each key with its value, however many lines it takes."""
    begin, depth, line, first = 0, 0, 1, 1
    for token in _TOKEN.finditer(text + "\n"):
        word = token.group()
        depth += (word in "[{") - (word in "]}")
        if word == "\n" and depth == 0:
            if statement := text[begin : token.start()].strip():
                yield first, statement
            begin, first = token.end(), line + 1
        line += word.count("\n")
