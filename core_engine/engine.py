"""The engine loop: schedule -> execute -> sample -> update.

Knows one executor and one scheduler; refuses to know text, processes and HTTP. Not thread-safe: one thread calls it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import replace
from typing import cast

from suimon.core_engine.batch import ScheduledBatch, ScheduledSequence
from suimon.core_engine.block_manager import BlockManager
from suimon.core_engine.config import EngineConfig
from suimon.core_engine.context_limit import resolve_max_tokens
from suimon.core_engine.drain_rate import DrainRate
from suimon.core_engine.errors import ContextLengthError, EngineDeadError, InvalidRequestError, QueueFullError
from suimon.core_engine.executor import (
    PER_SEQUENCE,
    EmbeddingExecutor,
    ExecutorCapabilities,
    ExecutorDeadError,
    Pending,
    StepExecutor,
)
from suimon.core_engine.kv_manager import KVManager
from suimon.core_engine.outputs import EngineOutput
from suimon.core_engine.sampler import SamplingRow
from suimon.core_engine.sampling_params import SamplingParams
from suimon.core_engine.scheduler import Scheduler, SchedulerConfig
from suimon.core_engine.sequence import Sequence, Timing
from suimon.core_engine.slot_manager import SlotManager
from suimon.core_engine.stats import EngineStats

DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
# Batches that fail one after the other: one may be a bad request's fault, this many are the executor's.
MAX_CONSECUTIVE_FAILURES = 3
# Set to 1: every time the engine falls idle, prove that no block has leaked.
CHECK_INVARIANTS = "SUIMON_CHECK_INVARIANTS"

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests on an executor, one batch after the other.

    ``eos_token_ids`` end a sequence unless it ignores them. ``model_version`` is the checkpoint's content hash.
    ``propose`` suggests draft tokens for a sequence that is about to decode; None suggests nothing.
    """

    def __init__(
        self,
        executor: StepExecutor,
        config: EngineConfig,
        eos_token_ids: Iterable[int] = (),
        *,
        model_version: str = "",
        propose: Callable[[Sequence], List[int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        capabilities = executor.capabilities
        self.executor = executor
        self.config = config
        self.scheduler = Scheduler(
            _scheduler_config(config, capabilities),
            _kv_manager(config, capabilities, model_version),
            eos_token_ids,
            clock=clock,
        )
        self._propose = propose
        self._clock = clock
        self._capabilities = capabilities
        self._vocab_size = capabilities.vocab_size
        self._random = random.Random(config.seed)
        self._in_flight: deque[tuple[ScheduledBatch, Pending]] = deque()
        self._num_failures = 0
        self._num_sequences = 0
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._drain_rate = DrainRate(clock)

    # --- the loop ---

    def step(self) -> list[EngineOutput]:
        """Compute one batch and return what it brought. The plain loop is ``while engine.has_work: engine.step()``.

        Raises EngineDeadError if the executor fails again and again, or says that it cannot go on; any other failure
        ends the batch's sequences.
        """
        return self.submit() or self.collect()

    def step_overlapped(self, depth: int = 2) -> list[EngineOutput]:
        """The same with up to ``depth`` batches in flight: while one computes, the next ones are put together."""
        outputs: list[EngineOutput] = []
        while len(self._in_flight) < depth and not outputs:
            num_in_flight = len(self._in_flight)
            outputs = self.submit()
            if len(self._in_flight) == num_in_flight:
                break
        return outputs or self.collect()

    def submit(self) -> list[EngineOutput]:
        """Schedule a batch and hand it to the executor. Returns outputs only if that failed."""
        self._draft()
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        try:
            pending = self.executor.submit(batch, self._sampling_rows(batch))
        except Exception as error:
            return self._fail(batch, error)
        self._in_flight.append((batch, pending))
        return []

    def collect(self) -> list[EngineOutput]:
        """Wait for the oldest batch in flight and return what it brought; nothing if none is."""
        if not self._in_flight:
            return []
        batch, pending = self._in_flight.popleft()
        try:
            result = pending.result()
        except Exception as error:
            return self._fail(batch, error)
        self._num_failures = 0
        return self._account(self.scheduler.update(batch, result))

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished

    def _draft(self) -> None:
        if self._propose is None:
            return
        for sequence in self.scheduler.running:
            if sequence.num_to_schedule == 1 and not sequence.draft_token_ids:
                sequence.draft_token_ids = list(self._propose(sequence))

    def _sampling_rows(self, batch: ScheduledBatch) -> list[SamplingRow]:
        return [row for scheduled in batch.sequences for row in self._rows_of(scheduled)]

    def _rows_of(self, scheduled: ScheduledSequence) -> Iterable[SamplingRow]:
        """One row per row of logits; row i comes after the first i drafts, the last of the scheduled tokens."""
        sequence = self.scheduler.sequences[scheduled.seq_id]
        drafts = scheduled.token_ids[len(scheduled.token_ids) - scheduled.num_logits + 1 :]
        for i in range(scheduled.num_logits):
            yield SamplingRow(
                seq_id=sequence.seq_id,
                params=sequence.params,
                prompt_token_ids=sequence.prompt_token_ids,
                output_token_ids=sequence.output_token_ids,
                draft_token_ids=drafts[:i],
                seed=sequence.seed,
                position=sequence.num_tokens + i,
                eos_token_ids=self.scheduler.eos_token_ids,
            )

    def _fail(self, batch: ScheduledBatch, error: Exception) -> list[EngineOutput]:
        self._num_failures += 1
        logger.error("step %d failed", batch.step_id, exc_info=error)
        reason = f"the executor failed in step {batch.step_id}: {type(error).__name__}: {error}"
        if isinstance(error, ExecutorDeadError):
            raise EngineDeadError(reason) from error
        if self._num_failures >= MAX_CONSECUTIVE_FAILURES:
            raise EngineDeadError(f"{reason} ({self._num_failures} steps in a row)") from error
        return self._account(self.scheduler.fail(batch, reason))

    def _account(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        self._num_steps += 1
        for output in outputs:
            self._num_generation_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self._drain_rate.count()
        self._check_idle()
        return outputs

    def _check_idle(self) -> None:
        if not self.has_work and os.environ.get(CHECK_INVARIANTS) == "1":
            self.check_integrity()

    # --- requests ---

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: List[int],
        params: SamplingParams,
        *,
        tenant: str = "",
        priority: int = 0,
        weight: float = 1.0,
        arrival: float | None = None,
        deadline: float | None = None,
        adapter: str | None = None,
        adapter_hash: str | None = None,
        cache_salt: str | None = None,
        trace_context: Mapping[str, str] | None = None,
    ) -> None:
        """Queue a request; its outputs come from ``step``. ``arrival`` and ``deadline`` are in ``clock`` seconds.

        Raises InvalidRequestError for a prompt or parameters that the model has no tokens for, ContextLengthError if
        the request can never fit, QueueFullError if too many wait.
        """
        prompt = self._check_request(prompt_token_ids, params, adapter, adapter_hash)
        max_tokens = resolve_max_tokens(len(prompt), params.max_tokens, self.context_limit, origin=self._limit_origin)
        self._check_queue()
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        leader = Sequence(
            seq_id=self._next_seq_id(),
            request_id=request_id,
            prompt_token_ids=prompt,
            params=params,
            max_tokens=max_tokens,
            seed=seed,
            tenant=tenant,
            priority=priority,
            weight=weight,
            deadline=deadline,
            adapter=adapter,
            adapter_hash=adapter_hash,
            cache_salt=cache_salt,
            trace_context=trace_context,
            timing=Timing(self._clock() if arrival is None else arrival),
        )
        self.scheduler.add(leader, [self._sibling(leader, index) for index in range(1, params.n)])
        self._num_prompt_tokens += len(prompt)

    def embed(self, token_ids: List[int]) -> list[float]:
        """The vector of one input, computed at once. Call it between steps.

        Raises InvalidRequestError where the model has no vectors or the input no tokens of the model's,
        ContextLengthError for more of them than it takes, EngineDeadError if the executor cannot go on.
        """
        if not self._capabilities.embeds:
            raise InvalidRequestError("this model computes no embeddings", param="model")
        self._check_token_ids(token_ids, "input")
        limit = self._capabilities.max_model_len
        if len(token_ids) > limit:
            message = f"an input has {len(token_ids)} tokens, and the model takes up to {limit}"
            raise ContextLengthError(message, param="input")
        try:
            return cast(EmbeddingExecutor, self.executor).embed(token_ids)
        except ExecutorDeadError as error:
            raise EngineDeadError(f"the executor failed on an input: {error}") from error

    def add_end_tokens(self, token_ids: Iterable[int]) -> None:
        """From now on these end a sequence too, unless it ignores them."""
        self.scheduler.eos_token_ids |= frozenset(token_ids)

    @property
    def context_limit(self) -> int:
        """The most tokens a sequence can have: the model's context, or the whole KV cache if that is less."""
        blocks = self.scheduler.blocks
        return min(self.scheduler.config.max_model_len, blocks.num_blocks * blocks.block_size)

    @property
    def _limit_origin(self) -> str:
        blocks, max_model_len = self.scheduler.blocks, self.scheduler.config.max_model_len
        if self.context_limit == max_model_len:
            return ""
        return (
            f" (the whole KV cache: {blocks.num_blocks} blocks of {blocks.block_size}; the model's is {max_model_len})"
        )

    def _check_request(
        self, prompt_token_ids: List[int], params: SamplingParams, adapter: str | None, adapter_hash: str | None
    ) -> list[int]:
        if not self._capabilities.generates:
            raise InvalidRequestError("this model computes embeddings and writes no text", param="model")
        prompt = list(prompt_token_ids)
        self._check_token_ids(prompt, "prompt")
        if adapter is not None and adapter_hash is None:
            raise InvalidRequestError(f"adapter {adapter!r} comes without the hash of its weights", param="adapter")
        params.check_vocabulary(self._vocab_size)
        return prompt

    def _check_token_ids(self, token_ids: List[int], param: str) -> None:
        if not token_ids:
            raise InvalidRequestError(f"the {param} is empty: it must have at least one token", param=param)
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise InvalidRequestError(f"{param} token ids must be from 0 to {self._vocab_size - 1}", param=param)

    def _check_queue(self) -> None:
        limit = self.config.max_num_queued_requests
        if len(self.scheduler.waiting) >= limit:
            wait = self._drain_rate.seconds_for(1)
            message = f"{limit} sequences are waiting already (max_num_queued_requests): try again in {wait:.0f} s"
            raise QueueFullError(message, retry_after=wait)

    def _sibling(self, leader: Sequence, index: int) -> Sequence:
        """Choice ``index`` of the leader's request: the same, but for its seed."""
        seed = _derive_seed(leader.seed, index)
        return replace(leader, seq_id=self._next_seq_id(), index=index, seed=seed, timing=replace(leader.timing))

    def _next_seq_id(self) -> int:
        self._num_sequences += 1
        return self._num_sequences

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """End a request, or its choice ``index`` because of a stop string in its text, without further outputs.

        False if it is not here (any more): aborting twice is harmless.
        """
        aborted = self.scheduler.abort(request_id, index)
        self._check_idle()
        return aborted

    # --- watching ---

    def stats(self) -> EngineStats:
        """Gauges and counters of this moment; cheap enough for every step."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        stray = blocks.num_blocks - blocks.num_free - blocks.num_used - blocks.num_cached
        return EngineStats(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            queued_tokens=scheduler.num_queued_tokens,
            num_blocks=blocks.num_blocks,
            free_blocks=blocks.num_free,
            used_blocks=blocks.num_used,
            cached_blocks=blocks.num_cached,
            leaked_blocks=abs(stray) + (0 if scheduler.running else blocks.num_used),
            preemptions=scheduler.num_preemptions,
            aborted=scheduler.num_aborted,
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            prompt_tokens=self._num_prompt_tokens,
            generation_tokens=self._num_generation_tokens,
            steps=self._num_steps,
            finished=dict(scheduler.num_finished),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError if the KV blocks do not add up; costs a pass over all of them."""
        self.scheduler.blocks.check_integrity()
        leaked = self.stats().leaked_blocks
        if leaked:
            raise AssertionError(f"{leaked} KV blocks have leaked")

    def close(self) -> None:
        """Release the executor. Call it once, after the last step."""
        self.executor.close()


def _scheduler_config(config: EngineConfig, capabilities: ExecutorCapabilities) -> SchedulerConfig:
    """What was asked for, within what the executor can do."""
    max_num_seqs = config.max_num_seqs or capabilities.max_num_seqs
    max_model_len = config.max_model_len or capabilities.max_model_len
    return SchedulerConfig(
        max_num_seqs=min(max_num_seqs, capabilities.max_num_seqs),
        max_num_batched_tokens=_batched_tokens(config, capabilities),
        max_model_len=min(max_model_len, capabilities.max_model_len),
        policy=config.scheduling_policy,
        partial_trim=capabilities.partial_trim,
        adapters_per_batch=capabilities.adapters_per_batch,
    )


def _batched_tokens(config: EngineConfig, capabilities: ExecutorCapabilities) -> int:
    return config.max_num_batched_tokens or capabilities.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS


def _kv_manager(config: EngineConfig, capabilities: ExecutorCapabilities, model_version: str) -> KVManager:
    if capabilities.kv_kind == PER_SEQUENCE:
        return SlotManager(
            capabilities.num_blocks,
            capabilities.max_residents,
            enable_prefix_caching=config.enable_prefix_caching,
            can_fork=capabilities.partial_trim,
            max_kept_tokens=capabilities.max_kept_tokens,
            min_shared=capabilities.min_shared_tokens,
        )
    return BlockManager(
        capabilities.num_blocks,
        capabilities.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        model_version=model_version,
    )


def _derive_seed(seed: int, index: int) -> int:
    """Another seed, unrelated to those of neighbouring seeds and indices, for choice ``index``."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
