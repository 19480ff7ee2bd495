"""What stands for a library: it knows nothing of Suimon, blocks while it works, and yields word after word."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator


class WordReverser:
    """Recites a text from its last word to its first."""

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause  # seconds a word takes

    def words(self, text: str) -> list[str]:
        """The text's words."""
        return re.findall(r"\S+", text)

    def recite(self, text: str) -> Iterator[str]:
        """Each word with the space after it; blocks before each."""
        for word in reversed(self.words(text)):
            time.sleep(self.pause)
            yield word + " "
