"""How long a sequence may get and why it ends: rules without state, apart from the scheduler that applies them."""

from __future__ import annotations

from dataclasses import replace

from suimon.core_engine.batch import ScheduledSequence
from suimon.core_engine.block_manager import BlockManager
from suimon.core_engine.errors import ContextLengthError
from suimon.core_engine.executor import SequenceResult
from suimon.core_engine.outputs import EngineOutput
from suimon.core_engine.sequence import Sequence


def resolve_max_tokens(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, blocks: BlockManager) -> int:
    """How many tokens the request may generate; None asks for as many as fit.

    The limit is the model's context or the whole KV cache, whichever is less. Raises ContextLengthError, with the three
    numbers, if the request can never fit.
    """
    limit = min(max_model_len, blocks.num_blocks * blocks.block_size)
    wanted = 1 if max_tokens is None else max_tokens
    if num_prompt_tokens + wanted <= limit:
        return limit - num_prompt_tokens if max_tokens is None else max_tokens
    asked = f"{num_prompt_tokens} prompt tokens plus max_tokens {wanted} make {num_prompt_tokens + wanted}"
    if limit == max_model_len:
        raise ContextLengthError(
            f"the maximum context length is {limit} tokens, but {asked}: shorten the prompt or lower max_tokens"
        )
    raise ContextLengthError(
        f"the KV cache holds {limit} tokens ({blocks.num_blocks} blocks of {blocks.block_size}; the maximum context "
        f"length is {max_model_len}), but {asked}: shorten the prompt, lower max_tokens or give the engine more KV "
        "cache memory"
    )


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
