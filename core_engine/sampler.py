"""Logits to token ids, for every step-driven backend.

Knows one row of logits and the tokens before it; refuses to know the model, the scheduler, text and time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from suimon.core_engine.logprobs import TokenLogprobs
from suimon.core_engine.sampling_params import SamplingParams


class GrammarMask(Protocol):
    """A future of the tokens that a grammar allows next; awaited just before sampling.

    ``result()`` is int32 (ceil(vocab / 32),) on the CPU: bit ``i % 32`` of word ``i // 32`` is set if token i is
    allowed; None allows every token. Whatever it raises fails its own row.
    """

    def result(self) -> torch.Tensor | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """What one row of logits needs to be sampled.

    ``output_token_ids`` are the accepted tokens; ``draft_token_ids`` the drafts between them and this row. ``position``
    is the index, in the whole sequence, of the token to sample.
    """

    seq_id: int
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    draft_token_ids: Sequence[int] = ()
    seed: int
    position: int
    eos_token_ids: frozenset[int] = frozenset()
    mask: GrammarMask | None = None


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One entry per row. ``errors`` maps a row that could not be sampled to the reason; its token id means nothing."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Samples one token per row of logits."""

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """One token for each row of ``logits`` (R, V), any float dtype."""
        token_ids = [self._sample_row(line, row) for line, row in zip(logits.float(), rows, strict=True)]
        raw = logits.float().log_softmax(-1)
        logprobs = [_logprobs(raw[i], token_ids[i], row.params.logprobs) for i, row in enumerate(rows)]
        return SamplerOutput(token_ids, logprobs)

    def forget(self, seq_id: int) -> None:
        """Drop what is kept for a sequence that has ended."""

    def _sample_row(self, line: torch.Tensor, row: SamplingRow) -> int:
        if row.params.is_greedy:
            return int(line.argmax())
        generator = torch.Generator().manual_seed((row.seed + row.position) & (2**63 - 1))
        probabilities = (line / row.params.temperature).softmax(-1).cpu()
        return int(torch.multinomial(probabilities, 1, generator=generator))


def _logprobs(raw: torch.Tensor, token_id: int, count: int | None) -> TokenLogprobs | None:
    if count is None:
        return None
    values, ids = raw.topk(count)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(raw[token_id]), int((raw > raw[token_id]).sum()) + 1, top)
