"""Cutting a text that arrives in pieces at the first of some strings.

TGI stops at a stop string but leaves it in the text, and sees it only where it ends with a token. Here it is looked for
in the text itself; as much is held back as could be the beginning of one.
"""

from __future__ import annotations


class StopStrings:
    """Feed it pieces. ``hit`` is the string that was found; ``keep``: it stays in the text."""

    def __init__(self, strings: tuple[str, ...], *, keep: bool = False) -> None:
        self._strings = strings
        self._keep = keep
        self._held = ""
        self.hit: str | None = None

    def feed(self, piece: str) -> str:
        """The text that is certain now; what comes after a hit is dropped."""
        if self.hit is not None:
            return ""
        text = self._held + piece
        found = [(text.find(string), string) for string in self._strings if string in text]
        if found:
            place, self.hit = min(found, key=lambda each: each[0] + len(each[1]))  # the first to be complete
            self._held = ""
            return text[: place + len(self.hit)] if self._keep else text[:place]
        certain = len(text) - max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[certain:]
        return text[:certain]

    def rest(self) -> str:
        """What was held back, once nothing more comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of ``text`` that ``string`` begins with."""
    lengths = range(min(len(text), len(string) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(string[:length])), 0)
