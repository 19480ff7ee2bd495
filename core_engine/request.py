"""What is asked of the engine library: a prompt in one of three forms, sampling parameters, and who asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from suimon.core_engine.sampling_params import SamplingParams

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request. Exactly one of ``prompt`` (text or token ids, taken as they are) and ``messages`` (a chat) is set.

    ``arrival`` and ``deadline`` are ``time.monotonic()`` seconds; an arrival of 0 means now. ``add_special_tokens``
    concerns text prompts; a chat template writes its own. ``trace_context`` is W3C ``traceparent`` and ``tracestate``.
    """

    request_id: str
    prompt: str | Sequence[int] | None = None
    messages: Sequence[Message] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tenant: str = ""
    priority: int = 0
    weight: float = 1.0
    arrival: float = 0.0
    deadline: float | None = None
    adapter: str | None = None
    cache_salt: str | None = None
    trace_context: Mapping[str, str] = field(default_factory=dict)
