"""Token ids to text as they come, stop strings included.

Knows one continuation's tokens and stop strings; refuses to know requests, processes and how a token was chosen. Two
stages: TextStream turns tokens into text that no later token can change, StopScanner holds back what may yet become a
stop string. Both do a bounded amount of work per token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from suimon.core_engine.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"
# Tokens of the prompt that decide whether the first output token keeps its leading space.
_PROMPT_CONTEXT = 8
# Tokens that may be held back. A character has at most four bytes; the rest is for runs of byte pieces.
_MAX_HELD = 32
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


class TokenDecoder(Protocol):
    """What is needed of a tokenizer. With ``token_text(id) -> str`` too, its byte pieces (``<0x0A>``) are known."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class DetokenizedDelta:
    """What one append gave: new text, how many of the appended tokens count, and the stop string that was hit.

    Tokens from ``token_count`` on came after the stop string and are to be dropped, with their logprobs.
    """

    text: str
    token_count: int
    stop: str | None = None


class IncrementalDetokenizer:
    """The text of one continuation, piece by piece; the pieces joined are the decoded whole, up to a stop string.

    Text appears once it is final. Incomplete UTF-8 is held back, and becomes U+FFFD only if it ends that way. A stop
    string cuts at the character, wherever the tokens end; of several, the one completed first wins, then the one that
    began first. It does not apply to the first ``min_tokens`` tokens, nor across their end. With
    ``include_stop_str_in_output`` it stays in the text. A token of ``stop_token_ids`` that ends the continuation counts
    but is not shown, unless that option is set.

    ``prompt_token_ids`` are what the text continues: with them, the first token of a SentencePiece model keeps its
    leading space ("Hello" + " world"); without, the text begins as decoding the output alone does.
    """

    def __init__(self, tokenizer: TokenDecoder, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        self._params = params
        self._stream = TextStream(tokenizer, params.skip_special_tokens, prompt_token_ids)
        self._scanner = StopScanner(params.stop)
        self._num_tokens = 0
        self._stop: str | None = None

    def append(self, token_ids: Sequence[int], finished: bool) -> DetokenizedDelta:
        """Take the next tokens; ``finished`` says that no more will come, so that nothing is held back any longer.

        After a stop string was hit, further tokens give nothing and count nothing.
        """
        if self._stopped():
            return DetokenizedDelta("", 0, self._stop)
        hidden = finished and bool(token_ids) and self._is_hidden_end(token_ids[-1])
        released = []
        for count, token_id in enumerate(token_ids[:-1] if hidden else token_ids, start=1):
            self._num_tokens += 1
            released.append(self._take(token_id))
            if self._stopped():
                return DetokenizedDelta("".join(released), count, self._stop)
        if finished:
            released.append(self._finish())
        return DetokenizedDelta("".join(released), len(token_ids), self._stop)

    def _stopped(self) -> bool:
        return self._stop is not None

    def _is_hidden_end(self, token_id: int) -> bool:
        return token_id in self._params.stop_token_ids and not self._params.include_stop_str_in_output

    def _take(self, token_id: int) -> str:
        final, tentative = self._stream.push(token_id)
        if self._num_tokens <= self._params.min_tokens:
            return final
        return self._scan(final, tentative)

    def _finish(self) -> str:
        rest = self._stream.flush()
        if self._num_tokens <= self._params.min_tokens:
            return self._scanner.flush() + rest
        return self._scan(rest, "") + ("" if self._stopped() else self._scanner.flush())

    def _scan(self, final: str, tentative: str) -> str:
        """The text to release; sets the stop. A stop that ends in ``tentative`` counts: it ends the text there."""
        hit = self._scanner.find(final + tentative)
        if hit is None:
            return self._scanner.push(final)
        self._stop = hit.stop
        return hit.before + (hit.stop if self._params.include_stop_str_in_output else "")


@dataclass(frozen=True, slots=True)
class StopHit:
    """``before`` is all unreleased text in front of the stop string."""

    stop: str
    before: str


class StopScanner:
    """Holds back the shortest tail that may yet turn out to be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def find(self, text: str) -> StopHit | None:
        """The stop string that is completed first in the held text and ``text`` together, if any. Changes nothing."""
        whole = self._held + text
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := whole.find(stop)) >= 0]
        if not ends:
            return None
        _, start, stop = min(ends)
        return StopHit(stop, whole[:start])

    def push(self, text: str) -> str:
        """Add ``text``, in which no stop string ends, and return what can be released."""
        whole = self._held + text
        for start in range(max(0, len(whole) - self._longest + 1), len(whole)):
            if any(stop.startswith(whole[start:]) for stop in self._stops):
                self._held = whole[start:]
                return whole[:start]
        self._held = ""
        return whole

    def flush(self) -> str:
        """What is held, when no more text will come."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """Decodes a growing list of tokens by looking at its last few only.

    What a token adds depends on its neighbours (leading spaces, characters cut into bytes), so a short window is
    decoded: ``context``, tokens whose text is out already, then the held tokens. The held text is final when it ends in
    a complete character and not in a byte piece. Byte pieces wait because decoders that fall back to bytes read a run
    of them as one: a wrong byte turns every byte of its run into U+FFFD. Beyond 32 tokens nothing waits: a longer run
    is let go as it stands, and keeps that text whatever follows.
    """

    def __init__(self, tokenizer: TokenDecoder, skip_special_tokens: bool, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_text = getattr(tokenizer, "token_text", None)
        self._context = list(prompt_token_ids[-_PROMPT_CONTEXT:])
        self._context_text = self._decode(self._context)
        self._held: list[int] = []
        if self._context_text.endswith(_REPLACEMENT):
            self._set_context([])

    def push(self, token_id: int) -> tuple[str, str]:
        """Add a token. Returns (final text, tentative text): the latter is right if no further token comes."""
        self._held.append(token_id)
        text = self._held_text(self._held)
        complete = not text.endswith(_REPLACEMENT)
        if complete and not self._ends_in_byte_piece():
            self._release(text)
            return text, ""
        if len(self._held) > _MAX_HELD:
            return self._release_part(text), ""
        return "", text if complete else ""

    def flush(self) -> str:
        """The text of the held tokens as it stands."""
        held, self._held = self._held, []
        return self._held_text(held)

    def _decode(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _held_text(self, held: Sequence[int]) -> str:
        return self._decode([*self._context, *held])[len(self._context_text) :] if held else ""

    def _set_context(self, token_ids: list[int]) -> None:
        self._context, self._context_text = token_ids, self._decode(token_ids)

    def _release(self, text: str) -> None:
        """The held tokens become the context, unless they give no text anywhere, as skipped special tokens do.

        (The leading space that SentencePiece drops at the very beginning is no text there, but a context.)
        """
        if text:
            self._set_context(self._held)
        elif not self._context_text and not self._is_silent(self._held):
            self._set_context(self._context + self._held)
        self._held = []

    def _is_silent(self, token_ids: Sequence[int]) -> bool:
        return not self._decode([*token_ids, *token_ids])

    def _ends_in_byte_piece(self) -> bool:
        """Whether the last held token is a byte piece, skipped special tokens aside."""
        if self._token_text is None:
            return False
        for token_id in reversed(self._held):
            if _BYTE_PIECE.fullmatch(self._token_text(token_id)):
                return True
            if len(self._held) == 1 or not self._is_silent([token_id]):
                return False
        return False

    def _release_part(self, text: str) -> str:
        """Let go of the longest beginning of the held tokens that the last three, a character's worth, cannot change.

        Where there is none, of all of them. What stays is decoded without a context from then on.
        """
        for cut in range(len(self._held) - 3, 0, -1):
            first = self._held_text(self._held[:cut])
            if first + self._decode(self._held[cut:]) == text:
                break
        else:
            first, cut = text, len(self._held)
        self._held = self._held[cut:]
        self._set_context([])
        return first
