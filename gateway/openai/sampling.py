"""Sampling fields of a body to SamplingParams, each checked against its range.

Knows ranges and which fields exclude each other; every refusal is an InvalidRequest that names its field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from suimon.gateway import limits
from suimon.gateway.hookspecs import SamplingParams
from suimon.gateway.openai.bodies import ChatCompletionRequest, GenerationBody
from suimon.gateway.openai.fields import refused, token_ids

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda v: 1 <= v <= limits.MAX_N, f"must be between 1 and {limits.MAX_N}"),
    "max_tokens": (lambda v: 1 <= v <= limits.MAX_TOKEN_ID, "must be at least 1"),
    "max_completion_tokens": (lambda v: 1 <= v <= limits.MAX_TOKEN_ID, "must be at least 1"),
    "min_tokens": (lambda v: 0 <= v <= limits.MAX_TOKEN_ID, "must not be negative"),
    "temperature": (lambda v: 0 <= v <= 100, "must be between 0 and 100"),
    "top_p": (lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
    "top_k": (lambda v: -1 <= v <= limits.MAX_TOKEN_ID, "must be -1 or 0 (no limit) or a positive count"),
    "min_p": (lambda v: 0 <= v <= 1, "must be between 0 and 1"),
    "repetition_penalty": (lambda v: 0 < v <= 100, "must be above 0 and at most 100"),
    "presence_penalty": (lambda v: -2 <= v <= 2, "must be between -2 and 2"),
    "frequency_penalty": (lambda v: -2 <= v <= 2, "must be between -2 and 2"),
    "seed": (lambda v: -(2**63) <= v < 2**63, "must be a 64-bit integer"),
    "priority": (lambda v: -(2**31) <= v < 2**31, "must be a 32-bit integer"),
    "cache_salt": (
        lambda v: 1 <= len(v) <= limits.MAX_CACHE_SALT_LENGTH,
        f"must hold between 1 and {limits.MAX_CACHE_SALT_LENGTH} characters",
    ),
    "top_logprobs": (lambda v: 0 <= v <= limits.MAX_LOGPROBS, f"must be between 0 and {limits.MAX_LOGPROBS}"),
    "dimensions": (lambda v: 1 <= v <= limits.MAX_DIMENSIONS, f"must be between 1 and {limits.MAX_DIMENSIONS}"),
    "logprobs": (lambda v: 0 <= v <= limits.MAX_LOGPROBS, f"must be between 0 and {limits.MAX_LOGPROBS}"),
}


def sampling_params(body: GenerationBody, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """The sampling fields of a body, each in its range."""
    check_ranges(body)
    if max_tokens is not None and body.min_tokens > max_tokens:
        raise refused("min_tokens", f"must be at most max_tokens ({max_tokens}), got {body.min_tokens}")
    if body.best_of not in (None, body.n):
        raise refused("best_of", f"other than n ({body.n}) is not supported by this server")
    _check_stream_options(body)
    return SamplingParams(
        n=body.n,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=max(0, body.top_k),  # -1 is another word for no limit
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body.logit_bias),
        seed=body.seed,
        stop=_stop(body.stop),
        stop_token_ids=_stop_token_ids(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        logprobs=logprobs,
    )


def check_ranges(body: msgspec.Struct) -> None:
    """Raise InvalidRequest for the first field of ``body`` whose value is out of its range."""
    for name, (fits, words) in _RANGES.items():
        value = getattr(body, name, None)
        if value is not None and not fits(value):
            raise refused(name, words if name == "cache_salt" else f"{words}, got {value}")


def _check_stream_options(body: GenerationBody) -> None:
    options = body.stream_options
    if options is None:
        return
    if not body.stream:
        raise refused("stream_options", "is only allowed with stream: true")
    for name in ("continuous_usage_stats", "include_obfuscation"):
        if getattr(options, name):
            raise refused(f"stream_options.{name}", "is not supported by this server: leave it out, or send false")


def chat_max_tokens(body: ChatCompletionRequest) -> int | None:
    """The longest answer in tokens, under whichever of its two names; None: no limit of the client's."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise refused("max_tokens", f"({old}) contradicts max_completion_tokens ({new}): send only the latter")
    return new if old is None else old


def chat_logprobs(body: ChatCompletionRequest) -> int | None:
    """How many alternatives to report beside each token, None for no log-probabilities at all."""
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", "is only allowed with logprobs: true")
    return (body.top_logprobs or 0) if body.logprobs else None


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    found = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(found) > limits.MAX_STOP_STRINGS:
        raise refused("stop", f"must hold at most {limits.MAX_STOP_STRINGS} strings, got {len(found)}")
    if not all(1 <= len(text) <= limits.MAX_STOP_STRING_LENGTH for text in found):
        raise refused("stop", f"must hold strings of 1 to {limits.MAX_STOP_STRING_LENGTH} characters")
    return found


def _stop_token_ids(ids: list[int]) -> tuple[int, ...]:
    if len(ids) > limits.MAX_STOP_TOKEN_IDS:
        raise refused("stop_token_ids", f"must hold at most {limits.MAX_STOP_TOKEN_IDS} ids, got {len(ids)}")
    return token_ids("stop_token_ids", ids)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    if len(bias) > limits.MAX_LOGIT_BIAS:
        raise refused("logit_bias", f"must hold at most {limits.MAX_LOGIT_BIAS} entries, got {len(bias)}")
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= limits.MAX_TOKEN_ID):
            raise refused("logit_bias", f"must have token ids as keys, got {key[:64]!r}")
        if not -100 <= value <= 100:
            raise refused("logit_bias", f"must have values between -100 and 100, got {value} for {key}")
    return {int(key): value for key, value in bias.items()}
