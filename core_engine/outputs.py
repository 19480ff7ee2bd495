"""What the engine hands back: EngineOutput per sequence and step (tokens), RequestOutput with text as well."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from suimon.core_engine.logprobs import TokenLogprobs
from suimon.core_engine.sequence import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """New text and tokens of choice ``index`` since its last output; the final one has ``finish_reason`` set.

    It is "stop" or "length". ``text`` may lag behind ``token_ids``: incomplete UTF-8 and possible stop strings are held
    back. ``logprobs`` runs parallel to ``token_ids``. ``stop_reason`` is the stop string or stop token id that ended it
    (None for EOS). ``num_output_tokens`` counts this choice so far.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of one input, as 32-bit floats, and how many tokens that had."""

    vector: array[float]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """What one step brought one sequence: choice ``index`` of the request. The last one has ``finish_reason`` set.

    It is "stop", "length" or "error"; who aborts a sequence hears no more of it.
    ``token_ids`` are new; an end token is among them. ``logprobs`` runs parallel to them when asked for.
    ``stop_reason`` is the stop token id that ended it (None for EOS); ``error`` the message if that is the reason.
    ``num_output_tokens`` counts this choice so far. ``timing`` comes with the first and the last output.
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    timing: Timing | None = None
