"""From the engine's tokens to a request's text: one detokenizer per choice, stop strings, counts.

Knows one request; serves the client of an engine process and the offline LLM alike. A stop string ends a choice here,
while the engine, which knows no text, is still writing it: to tell the engine is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from suimon.core_engine.detokenizer import IncrementalDetokenizer
from suimon.core_engine.logprobs import TokenLogprobs
from suimon.core_engine.outputs import RequestOutput
from suimon.core_engine.sampling_params import SamplingParams
from suimon.core_engine.tokenizer import Tokenizer


class TokenOutput(Protocol):
    """New tokens of one choice, as the engine gives them (EngineOutput, SequenceOutput)."""

    @property
    def index(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[TokenLogprobs] | None: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> int | str | None: ...
    @property
    def num_cached_tokens(self) -> int: ...


class RequestText:
    """The text of a request's choices. ``unfinished`` holds the indices of those that go on."""

    def __init__(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams, tokenizer: Tokenizer
    ) -> None:
        self.unfinished = set(range(sampling.n))
        self._request_id = request_id
        self._num_prompt_tokens = len(prompt_token_ids)
        self._detokenizers = [IncrementalDetokenizer(tokenizer, sampling, prompt_token_ids) for _ in range(sampling.n)]
        self._num_output_tokens = [0] * sampling.n

    def advance(self, output: TokenOutput) -> RequestOutput | None:
        """What ``output`` adds to its choice; None if that had ended already, by a stop string."""
        index = output.index
        if index not in self.unfinished:
            return None
        delta = self._detokenizers[index].append(output.token_ids, output.finish_reason is not None)
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        if delta.stop is not None:
            finish_reason, stop_reason = "stop", delta.stop
        if finish_reason is not None:
            self.unfinished.discard(index)
        self._num_output_tokens[index] += delta.token_count
        return RequestOutput(
            request_id=self._request_id,
            index=index,
            text=delta.text,
            token_ids=tuple(output.token_ids[: delta.token_count]),
            logprobs=None if output.logprobs is None else tuple(output.logprobs[: delta.token_count]),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
            num_output_tokens=self._num_output_tokens[index],
        )
