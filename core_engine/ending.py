"""Why a sequence ends and what is told of it: rules without state, apart from the scheduler that applies them."""

from __future__ import annotations

from dataclasses import replace

from suimon.core_engine.batch import ScheduledSequence
from suimon.core_engine.executor import SequenceResult
from suimon.core_engine.outputs import EngineOutput
from suimon.core_engine.sequence import Sequence


def why_ended(sequence: Sequence, eos_token_ids: frozenset[int]) -> tuple[str, int | None] | None:
    """Finish reason and stop reason, if the last output ends the sequence.

    The sampler bans end tokens until ``min_tokens`` are out, so the first that can end a sequence comes after those.
    """
    token_id = sequence.output_token_ids[-1]
    if sequence.num_output_tokens > sequence.params.min_tokens:
        if token_id in eos_token_ids and not sequence.params.ignore_eos:
            return "stop", None
        if token_id in sequence.stop_token_ids:
            return "stop", token_id
    return ("length", None) if sequence.num_output_tokens >= sequence.max_tokens else None


def fault_of(scheduled: ScheduledSequence, outcome: SequenceResult, is_alone: bool) -> str | None:
    """What makes this outcome of a step an error of its sequence, if anything does."""
    if outcome.error is not None:
        return outcome.error
    if outcome.out_of_slots:
        return "the executor has no room for this sequence, even alone" if is_alone else None
    count = len(outcome.token_ids)
    if min(scheduled.num_logits, 1) <= count <= scheduled.num_logits:
        return None
    return f"the executor returned {count} tokens for {scheduled.num_logits} rows of logits"


def make_output(sequence: Sequence, count: int, outcome: SequenceResult) -> EngineOutput:
    """The sequence's last ``count`` tokens, its counts and, if it has one, its end."""
    is_first = 0 < count == sequence.num_output_tokens
    return EngineOutput(
        request_id=sequence.request_id,
        index=sequence.index,
        token_ids=tuple(sequence.output_token_ids[sequence.num_output_tokens - count :]),
        logprobs=None if outcome.logprobs is None else tuple(outcome.logprobs[:count]),
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        error=sequence.error,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_output_tokens=sequence.num_output_tokens,
        timing=replace(sequence.timing) if is_first or sequence.is_ended else None,
    )
