"""Builders with a default for everything, and executors whose "model" reads the KV that was really written.

The model is a hash: a slot holds a hash of (token, position, everything before it as read through the block table), and
the next token is a hash of all slots that the sequence's block table leads to. A wrong block table, a missed copy, a
stale cached block, a chunk at a wrong place: each gives another token than ``next_token``, which knows no blocks.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence as List
from dataclasses import dataclass

import torch

from suimon.core_engine.batch import (
    CacheOp,
    CopyBlock,
    CopySequence,
    FreeSequence,
    MoveSequence,
    ScheduledBatch,
    ScheduledSequence,
    TrimSequence,
)
from suimon.core_engine.block_manager import BlockManager
from suimon.core_engine.config import EngineConfig
from suimon.core_engine.engine import Engine
from suimon.core_engine.executor import (
    PAGED,
    Completed,
    ExecutorCapabilities,
    ForwardExecutor,
    SequenceResult,
    StepResult,
)
from suimon.core_engine.logprobs import TokenLogprobs
from suimon.core_engine.sampler import SamplingRow
from suimon.core_engine.sampling_params import SamplingParams
from suimon.core_engine.scheduler import Scheduler, SchedulerConfig
from suimon.core_engine.sequence import Sequence, Timing

EOS = 0
VOCAB_SIZE = 29


# --- the model ---


def slot_content(token_id: int, position: int, before: List[int], adapter: str | None) -> int:
    return hash((token_id, position, tuple(before), zlib.crc32((adapter or "").encode())))


def choose(contents: List[int], params: SamplingParams, seed: int, num_outputs: int) -> int:
    """The token sampled after these slots: greedy, or a function of seed and position as well."""
    chance = () if params.is_greedy else (seed, len(contents))
    token_id = hash((tuple(contents), chance)) % VOCAB_SIZE
    banned = {EOS, *params.stop_token_ids} if num_outputs < params.min_tokens else set()
    while token_id in banned:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def logprob_of(contents: List[int]) -> float:
    return -(hash(tuple(contents)) % 1000) / 100 - 0.01


def contents_of(token_ids: List[int], adapter: str | None = None) -> list[int]:
    contents: list[int] = []
    for position, token_id in enumerate(token_ids):
        contents.append(slot_content(token_id, position, contents, adapter))
    return contents


@dataclass
class Solo:
    """What a sequence gives when it is alone in the world: the oracle."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_reason: int | None


def run_solo(
    prompt: List[int], params: SamplingParams, limit: int, *, seed: int = 0, adapter: str | None = None
) -> Solo:
    contents = contents_of(prompt, adapter)
    solo = Solo([], [], "", None)
    max_tokens = limit - len(prompt) if params.max_tokens is None else params.max_tokens
    while not solo.finish_reason:
        token_id = choose(contents, params, seed, len(solo.token_ids))
        may_stop = len(solo.token_ids) >= params.min_tokens
        solo.token_ids.append(token_id)
        solo.logprobs.append(logprob_of(contents))
        contents.append(slot_content(token_id, len(contents), contents, adapter))
        if may_stop and token_id == EOS and not params.ignore_eos:
            solo.finish_reason = "stop"
        elif may_stop and token_id in params.stop_token_ids:
            solo.finish_reason, solo.stop_reason = "stop", token_id
        elif len(solo.token_ids) == max_tokens:
            solo.finish_reason = "length"
    return solo


# --- executors ---


class HashExecutor:
    """A paged StepExecutor running the hash model. ``violations`` lists every broken rule of the contract.

    A step runs when its result is asked for, as on a device that works behind the loop's back. ``fail_next``,
    ``error_next`` and ``full_next`` make the next submission raise, its first sequence fail, its last one lack slots.
    """

    def __init__(self, capabilities: ExecutorCapabilities, max_num_batched_tokens: int = 10**9) -> None:
        self.capabilities = capabilities
        self.max_num_batched_tokens = max_num_batched_tokens
        self.slots: list[int | None] = [None] * (capabilities.num_blocks * capabilities.block_size)
        self.violations: list[str] = []
        self.batches: list[ScheduledBatch] = []
        self.freed: list[int] = []
        self.fail_next = self.error_next = self.full_next = False
        self.fail_result_next = False
        self.always_full = False
        self.is_closed = False
        self.lost: set[int] = set()  # sequences whose KV an operation of this step has cost them
        self._lost: set[int] = set()  # sequences whose next chunk, in flight already, misses the one before it

    def submit(self, batch: ScheduledBatch, sampling: List[SamplingRow]) -> HashPending:
        self.batches.append(batch)
        self._check_batch(batch, sampling)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("out of luck")
        return HashPending(self, batch, sampling)

    def close(self) -> None:
        self.is_closed = True

    def run(self, batch: ScheduledBatch, sampling: List[SamplingRow]) -> StepResult:
        if self.fail_result_next:
            self.fail_result_next = False
            self._lost.update(scheduled.seq_id for scheduled in batch.sequences)
            raise RuntimeError("lost on the way")
        for operation in batch.cache_ops:
            self.apply(operation)
        rows = iter(sampling)
        results = {}
        for scheduled in batch.sequences:
            own = [next(rows) for _ in range(scheduled.num_logits)]
            is_lost = scheduled.seq_id in self.lost
            results[scheduled.seq_id] = SequenceResult() if is_lost else self._run_sequence(scheduled, own)
        self._inject(batch, results)
        lost, self.lost = frozenset(self.lost), set()
        return StepResult(batch.step_id, results, lost)

    def apply(self, operation: CacheOp) -> None:
        size = self.capabilities.block_size
        match operation:
            case CopyBlock(source, target):
                self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
            case FreeSequence(seq_id):
                self.freed.append(seq_id)

    def _run_sequence(self, scheduled: ScheduledSequence, rows: list[SamplingRow]) -> SequenceResult:
        contents = self.compute(scheduled)
        sampled: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for i, row in enumerate(rows):
            seen = contents[: len(contents) - len(rows) + i + 1]
            self._check_row(row, scheduled, len(seen))
            num_outputs = len(row.output_token_ids) + len(row.draft_token_ids)
            sampled.append(choose(seen, row.params, row.seed, num_outputs))
            logprobs.append(TokenLogprobs(sampled[-1], logprob_of(seen), 1, ()))
        accepted = accept(scheduled, sampled)
        wants_logprobs = bool(rows) and rows[0].params.logprobs is not None
        return SequenceResult(accepted, logprobs[: len(accepted)] if wants_logprobs else None)

    def compute(self, scheduled: ScheduledSequence) -> list[int]:
        """Write the step's tokens; everything that the last of them sees."""
        contents = [self._read(scheduled, position) for position in range(scheduled.start)]
        for position, token_id in enumerate(scheduled.token_ids, start=scheduled.start):
            contents.append(slot_content(token_id, position, contents, scheduled.adapter))
            self._write(scheduled, position, contents[-1])
        return contents

    def _slot(self, scheduled: ScheduledSequence, position: int) -> int:
        size = self.capabilities.block_size
        return scheduled.block_table[position // size] * size + position % size

    def _read(self, scheduled: ScheduledSequence, position: int) -> int:
        content = self.slots[self._slot(scheduled, position)]
        if content is None and scheduled.seq_id not in self._lost:
            self.violations.append(f"sequence {scheduled.seq_id} reads position {position}, which nobody wrote")
        return content or 0

    def _write(self, scheduled: ScheduledSequence, position: int, content: int) -> None:
        self.slots[self._slot(scheduled, position)] = content

    def _inject(self, batch: ScheduledBatch, results: dict[int, SequenceResult]) -> None:
        if self.error_next:
            self.error_next = False
            results[batch.sequences[0].seq_id] = SequenceResult(error="not this one")
        if self.full_next or self.always_full:
            self.full_next = False
            results[batch.sequences[-1].seq_id] = SequenceResult(out_of_slots=True)

    def _check_batch(self, batch: ScheduledBatch, sampling: List[SamplingRow]) -> None:
        self._expect(0 < batch.num_tokens <= self.max_num_batched_tokens, f"{batch.num_tokens} tokens in one step")
        self._expect(len(batch.sequences) <= self.capabilities.max_num_seqs, "too many sequences in one step")
        self._expect(len(sampling) == batch.num_logits, f"{len(sampling)} rows for {batch.num_logits} logits")
        adapters = {scheduled.adapter for scheduled in batch.sequences}
        self._expect(len(adapters) <= self.capabilities.adapters_per_batch, f"adapters {adapters} in one step")
        for scheduled in batch.sequences:
            self._expect(bool(scheduled.token_ids), f"sequence {scheduled.seq_id} has no tokens")
        self._check_tables(batch)

    def _check_tables(self, batch: ScheduledBatch) -> None:
        size = self.capabilities.block_size
        written = {
            scheduled.block_table[position // size]: scheduled.seq_id
            for scheduled in batch.sequences
            for position in range(scheduled.start, scheduled.start + len(scheduled.token_ids))
        }
        for scheduled in batch.sequences:
            for block in scheduled.block_table:
                other = written.get(block, scheduled.seq_id)
                self._expect(other == scheduled.seq_id, f"{other} writes to block {block} of {scheduled.seq_id}")

    def _check_row(self, row: SamplingRow, scheduled: ScheduledSequence, position: int) -> None:
        self._expect(row.seq_id == scheduled.seq_id, "a row of another sequence")
        self._expect(row.position == position, f"row for position {row.position} at {position}")
        known = [*row.prompt_token_ids, *row.output_token_ids, *row.draft_token_ids]
        self._expect(len(known) == position, f"{len(known)} known tokens at position {position}")
        end = position - scheduled.start
        self._expect(known[scheduled.start :] == scheduled.token_ids[:end], "the row knows other tokens than the batch")

    def _expect(self, ok: bool, violation: str) -> None:
        if not ok:
            self.violations.append(violation)


class HashPending:
    """Results must be fetched once each, in submission order."""

    def __init__(self, executor: HashExecutor, batch: ScheduledBatch, sampling: List[SamplingRow]) -> None:
        self._executor, self._batch, self._sampling = executor, batch, sampling

    def result(self) -> StepResult:
        return Completed(self._executor.run(self._batch, self._sampling)).result()


class ContiguousExecutor(HashExecutor):
    """Keeps KV per sequence and appends to it: positions that are not trimmed away cannot be written again.

    ``num_cells`` bounds the tokens of all sequences together, a copied one counting once; who does not fit is told so.
    Where it ``loses_ends``, a sequence of which an end is to be cut off loses all it has.
    """

    def __init__(self, capabilities: ExecutorCapabilities, num_cells: int = 10**9) -> None:
        super().__init__(capabilities)
        self.num_cells = num_cells
        self.loses_ends = False
        self.cells: dict[int, list[int]] = {}

    def apply(self, operation: CacheOp) -> None:
        match operation:
            case CopySequence(source, target) | MoveSequence(source, target) if source in self.lost:
                self.lost.add(target)
            case CopySequence(source, target, length):
                self._expect(not self.cells.get(target), f"{target} holds something already")
                self._expect(len(self.cells.get(source, [])) >= length, f"{source} holds less than {length}")
                self.cells[target] = self.cells[source][:length]
            case MoveSequence(source, target, length):
                self._expect(not self.cells.get(target), f"{target} holds something already")
                self._expect(len(self.cells.get(source, [])) >= length, f"{source} holds less than {length}")
                self.cells[target] = self.cells.pop(source)
                self._cut(target, length)
            case TrimSequence(seq_id, length):
                self._cut(seq_id, length)
            case FreeSequence(seq_id):
                self.cells.pop(seq_id, None)
            case CopyBlock():
                self.violations.append("a copy of a block, but there are no blocks")

    def _cut(self, seq_id: int, length: int) -> None:
        cells = self.cells.get(seq_id, [])
        if self.loses_ends and 0 < length < len(cells):
            del self.cells[seq_id]
            self.lost.add(seq_id)
        del cells[length:]

    def _check_tables(self, batch: ScheduledBatch) -> None:
        if self.capabilities.kv_kind == PAGED:
            super()._check_tables(batch)

    def _run_sequence(self, scheduled: ScheduledSequence, rows: list[SamplingRow]) -> SequenceResult:
        cells = self.cells.setdefault(scheduled.seq_id, [])
        self._expect(len(cells) == scheduled.start, f"{len(cells)} cells, but the step starts at {scheduled.start}")
        # A cell's content is a hash of all before it, so that copies are equal and nothing else is.
        held = {(i, cell) for cells in self.cells.values() for i, cell in enumerate(cells)}
        if len(held) + len(scheduled.token_ids) > self.num_cells:
            return SequenceResult(out_of_slots=True)
        return super()._run_sequence(scheduled, rows)

    def _read(self, scheduled: ScheduledSequence, position: int) -> int:
        return self.cells[scheduled.seq_id][position]

    def _write(self, scheduled: ScheduledSequence, position: int, content: int) -> None:
        self.cells[scheduled.seq_id].append(content)


class LogitsExecutor(ForwardExecutor):
    """The hash model behind the base class that samples: its token has a logit of 9, all others 0 or less."""

    def __init__(self, capabilities: ExecutorCapabilities) -> None:
        super().__init__()
        self._memory = HashExecutor(capabilities)
        self.violations = self._memory.violations

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return self._memory.capabilities

    def forward(self, batch: ScheduledBatch) -> torch.Tensor:
        for operation in batch.cache_ops:
            self._memory.apply(operation)
        rows = [row for scheduled in batch.sequences for row in self._rows(scheduled)]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)

    def _rows(self, scheduled: ScheduledSequence) -> list[torch.Tensor]:
        contents = self._memory.compute(scheduled)
        first = len(contents) - scheduled.num_logits
        return [self._logits(contents[: end + 1]) for end in range(first, len(contents))]

    def _logits(self, contents: list[int]) -> torch.Tensor:
        logits = torch.tensor([-0.01 * i for i in range(VOCAB_SIZE)])
        logits[hash((tuple(contents), ())) % VOCAB_SIZE] = 9.0
        return logits


def accept(scheduled: ScheduledSequence, sampled: list[int]) -> list[int]:
    """Sampled tokens for as long as the drafts before them were right."""
    if not sampled:
        return []
    drafts = scheduled.token_ids[len(scheduled.token_ids) - len(sampled) + 1 :]
    good = [i for i in range(len(sampled)) if drafts[:i] == sampled[:i]]
    return sampled[: good[-1] + 1]


def guess_drafts(sequence: Sequence, count: int = 3) -> list[int]:
    """A proposer that knows the model: right for a while, wrong at every fifth position."""
    token_ids = sequence.tokens(0, sequence.num_tokens)
    contents = contents_of(token_ids, sequence.adapter)
    drafts: list[int] = []
    for _ in range(count):
        token_id = choose(contents, sequence.params, sequence.seed, sequence.num_output_tokens + len(drafts))
        if len(contents) % 5 == 0:
            token_id = (token_id + 1) % VOCAB_SIZE
        drafts.append(token_id)
        contents.append(slot_content(token_id, len(contents), contents, sequence.adapter))
    return drafts


# --- builders ---


def make_params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0, **changes})


def make_prompt(length: int, first: int = 1) -> list[int]:
    """Tokens 1 .. VOCAB_SIZE - 1 in turn, without EOS."""
    return [1 + (first + 7 * i) % (VOCAB_SIZE - 1) for i in range(length)]


def make_sequence(prompt: int | list[int] = 20, seq_id: int = 1, **changes: object) -> Sequence:
    prompt_token_ids = make_prompt(prompt) if isinstance(prompt, int) else prompt
    arrival = float(changes.pop("arrival", seq_id))
    params = changes.pop("params", None) or make_params()
    values = {"request_id": f"r{seq_id}", "max_tokens": params.max_tokens or 8, "timing": Timing(arrival)}
    return Sequence(seq_id=seq_id, prompt_token_ids=prompt_token_ids, params=params, **{**values, **changes})


def make_capabilities(**changes: object) -> ExecutorCapabilities:
    values = {"vocab_size": VOCAB_SIZE, "max_model_len": 512, "num_blocks": 64, "block_size": 16, "max_num_seqs": 8}
    return ExecutorCapabilities(**{**values, **changes})


def make_blocks(num_blocks: int = 8, block_size: int = 4, **changes: object) -> BlockManager:
    return BlockManager(num_blocks, block_size, **changes)


def make_scheduler(
    num_blocks: int = 64, block_size: int = 4, eos: List[int] = (), caching: bool = False, **changes: object
) -> Scheduler:
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512}
    blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=caching)
    return Scheduler(SchedulerConfig(**{**values, **changes}), blocks, eos, clock=lambda: 0.0)


CAPABILITIES = ("num_blocks", "block_size", "partial_trim", "adapters_per_batch", "kv_kind")


def make_engine(executor: HashExecutor | None = None, propose: object = None, **config: object) -> Engine:
    """An engine over the hash model; names of CAPABILITIES go to the executor, all others to EngineConfig."""
    given = {name: config.pop(name) for name in CAPABILITIES if name in config}
    budget = config.get("max_num_batched_tokens") or 10**9
    executor = executor or HashExecutor(make_capabilities(**given), budget)
    ticks = iter(range(10**9))
    config = EngineConfig(model="hash", **config)
    return Engine(executor, config, [EOS], propose=propose, clock=lambda: float(next(ticks)))


@dataclass
class Collected:
    """All outputs of one choice, joined."""

    token_ids: list[int]
    logprobs: list[float]
    outputs: list[object]

    @property
    def last(self) -> object:
        return self.outputs[-1]

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[-1].finish_reason


def collect(into: dict[tuple[str, int], Collected], outputs: List[object]) -> None:
    for output in outputs:
        entry = into.setdefault((output.request_id, output.index), Collected([], [], []))
        assert not entry.outputs or entry.outputs[-1].finish_reason is None, "an output after the last"
        entry.token_ids += output.token_ids
        entry.logprobs += [logprob.logprob for logprob in output.logprobs or ()]
        entry.outputs.append(output)
        assert output.num_output_tokens == len(entry.token_ids)


def run_to_end(
    engine: Engine, results: dict[tuple[str, int], Collected] | None = None, *, max_steps: int = 5000, depth: int = 1
) -> dict[tuple[str, int], Collected]:
    """Step until nothing is left, adding to ``results``, and prove that nothing is left over."""
    results = {} if results is None else results
    for _ in range(max_steps):
        if not engine.has_work:
            break
        collect(results, engine.step() if depth == 1 else engine.step_overlapped(depth))
    assert not engine.has_work, f"{engine.stats()} after {max_steps} steps"
    assert_idle(engine)
    return results


def assert_idle(engine: Engine) -> None:
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.queued_tokens, stats.used_blocks) == (0, 0, 0, 0)
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
    assert engine.executor.violations == []


def run_together(
    engine: Engine, prompts: List[List[int]], params: SamplingParams, **options: object
) -> list[list[int]]:
    """Token ids of choice 0 of every prompt, all added at once."""
    for i, prompt in enumerate(prompts):
        engine.add_request(f"r{i}", prompt, params, **options)
    results = run_to_end(engine)
    return [results[f"r{i}", 0].token_ids for i in range(len(prompts))]
