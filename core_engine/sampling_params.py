"""How a request wants its tokens chosen. Knows the legal ranges; refuses to know HTTP field names or vocabularies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from suimon.core_engine.errors import InvalidRequestError

# Fan-out caps: one request may not cost more than this many sequences, strings or entries.
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request; every default means "off".

    ``max_tokens=None`` generates up to the model's context. ``temperature=0`` is greedy. ``top_k`` of 0 or -1 is no
    limit. ``logprobs`` is the number of alternatives to report beside the chosen token (0: the chosen one only, None:
    none); they are the model's own, before temperature, penalties and filters. ``min_tokens`` counts generated tokens:
    until then no end token is sampled and no stop string is applied. ``seed`` makes a sequence's tokens a function of
    its own prompt and parameters, whatever else is in its batch.

    Raises InvalidRequestError, naming the field, for a value outside its range.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check("n", self.n, 1 <= self.n <= MAX_N, f"between 1 and {MAX_N}")
        _check("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        _check("min_tokens", self.min_tokens, self.min_tokens >= 0, "at least 0")
        if self.max_tokens is not None:
            _check("min_tokens", self.min_tokens, self.min_tokens <= self.max_tokens, "at most max_tokens")
        _check("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "between 0 and 100")
        _check("top_k", self.top_k, self.top_k >= -1, "-1, 0 or a positive count")
        _check("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        _check("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "between 0 and 1")
        _check("repetition_penalty", self.repetition_penalty, 0.0 < self.repetition_penalty <= 100.0, "in (0, 100]")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, getattr(self, name), -2.0 <= getattr(self, name) <= 2.0, "between -2 and 2")
        _check("seed", self.seed, self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer")
        limit = f"between 0 and {MAX_LOGPROBS}"
        _check("logprobs", self.logprobs, self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, limit)
        self._check_stop()
        self._check_logit_bias()

    def _check_stop(self) -> None:
        _check("stop", len(self.stop), len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} strings")
        for stop in self.stop:
            shown = stop if len(stop) <= MAX_STOP_STRING_LENGTH else f"a string of {len(stop)} characters"
            ok = 0 < len(stop) <= MAX_STOP_STRING_LENGTH
            _check("stop", shown, ok, f"non-empty strings of at most {MAX_STOP_STRING_LENGTH} characters")
        count = len(self.stop_token_ids)
        _check("stop_token_ids", count, count <= MAX_STOP_TOKEN_IDS, f"at most {MAX_STOP_TOKEN_IDS} ids")

    def _check_logit_bias(self) -> None:
        count = len(self.logit_bias)
        _check("logit_bias", count, count <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} entries")
        for token_id, bias in self.logit_bias.items():
            _check("logit_bias", f"{token_id}: {bias}", -100.0 <= bias <= 100.0, "values between -100 and 100")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken.

        Below 1e-3 a logit that is behind by 0.01 has odds of e^-10, and what is left to chance are the ties that
        half-precision logits are full of: a client that sends 1e-6 means greedy.
        """
        return self.temperature < 1e-3

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequestError if a token id named by a field is not one of the model's ``vocab_size`` ids."""
        expected = f"token ids from 0 to {vocab_size - 1}"
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", tuple(self.logit_bias))):
            for token_id in ids:
                _check(name, token_id, 0 <= token_id < vocab_size, expected)


def _check(name: str, value: object, ok: bool, expected: str) -> None:
    if not ok or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidRequestError(f"{name} must be {expected}, got {value}", param=name)
