"""One sampled continuation of one request: its tokens, how far they are computed, and how it ended.

Knows integers and stamps; refuses to know when it runs (the scheduler decides and alone changes it) and where its KV
lies (``block_table`` and ``block_hashes`` belong to the block manager).

    token_ids:    | prompt ............ | accepted outputs ...... |  drafts (kept apart)
    positions:    0                     num_prompt_tokens         num_tokens
    computed:     [0 .......... num_computed_tokens)
    submitted:                          [num_computed_tokens .. + num_in_flight)

A step hands out tokens so that num_computed_tokens catches up with num_tokens; a decode is the case where one is left.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from suimon.core_engine.sampling_params import SamplingParams


class Status(enum.Enum):
    """HELD: a sibling whose leader's prompt is not computed yet. FINISHED: nothing in the engine refers to it."""

    HELD = "held"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Timing:
    """When things happened, in seconds of ``time.monotonic()``; None if they have not."""

    arrival: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Sequence:
    """See the module's drawing. ``max_tokens`` is resolved: what the request asked for, within the context.

    ``adapter`` is a name and ``adapter_hash`` the hash of its weights; only the latter enters prefix cache keys. Of a
    request with n > 1, choice 0 leads: it computes the prompt, and the siblings then share its blocks.
    ``num_cached_tokens`` counts prompt tokens that were not computed because their KV was there already.
    """

    seq_id: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    index: int = 0
    seed: int = 0
    tenant: str = ""
    priority: int = 0
    weight: float = 1.0
    deadline: float | None = None
    adapter: str | None = None
    adapter_hash: str | None = None
    cache_salt: str | None = None
    trace_context: Mapping[str, str] | None = None
    timing: Timing = field(default_factory=Timing)

    # What becomes of it. A copy for another choice begins anew here.
    output_token_ids: list[int] = field(default_factory=list, init=False)
    draft_token_ids: list[int] = field(default_factory=list, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_in_flight: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    num_overtaken: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    status: Status = field(default=Status.WAITING, init=False)
    finish_reason: str | None = field(default=None, init=False)
    stop_reason: int | None = field(default=None, init=False)
    error: str | None = field(default=None, init=False)
    out_of_slots: bool = field(default=False, init=False)
    has_lost_kv: bool = field(default=False, init=False)
    leader: Sequence | None = field(default=None, init=False)
    siblings: list[Sequence] = field(default_factory=list, init=False)
    block_table: list[int] = field(default_factory=list, init=False)
    block_hashes: list[bytes] = field(default_factory=list, init=False)
    stop_token_ids: frozenset[int] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        self.stop_token_ids = frozenset(self.params.stop_token_ids)

    def __repr__(self) -> str:
        """Without the tokens: what people wrote does not belong in logs."""
        counts = f"{self.num_computed_tokens} of {self.num_prompt_tokens}+{self.num_output_tokens} tokens"
        return f"<sequence {self.seq_id}: {self.request_id}/{self.index}, {counts} computed, {self.status.value}>"

    @property
    def arrival(self) -> float:
        return self.timing.arrival

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Accepted tokens; drafts do not count."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_scheduled_tokens(self) -> int:
        """Where the next step begins."""
        return self.num_computed_tokens + self.num_in_flight

    @property
    def num_to_schedule(self) -> int:
        """Tokens that are known but not submitted. 0 or less while a sampled token is being waited for."""
        return self.num_tokens - self.num_scheduled_tokens

    @property
    def wants_tokens(self) -> bool:
        """Whether a step would bring it on. Not while it only waits for its batches in flight, to end or to restart."""
        return self.num_to_schedule > 0 and not self.is_ended and not self.must_restart

    @property
    def must_restart(self) -> bool:
        """Whether it is to be preempted once nothing of it is in flight: results until then mean nothing."""
        return self.out_of_slots or self.has_lost_kv

    @property
    def is_prompt_computed(self) -> bool:
        return self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def is_ended(self) -> bool:
        """Whether no more tokens are wanted; a sequence in flight is ended before it is finished."""
        return self.finish_reason is not None

    def tokens(self, start: int, end: int) -> list[int]:
        """Accepted tokens at positions ``start .. end - 1``."""
        split = self.num_prompt_tokens
        if start >= split:
            return self.output_token_ids[start - split : end - split]
        return self.prompt_token_ids[start:end] + self.output_token_ids[: max(end - split, 0)]
