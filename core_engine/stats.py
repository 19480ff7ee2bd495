"""What an engine says about itself: gauges and counters as plain numbers. Knows no tensors and no metric names."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges and counters at one moment; counters run from the engine's start.

    ``queued_tokens`` counts the tokens of waiting sequences. Every block is free, cached or used; ``leaked_blocks`` is
    how far that sum is off, plus what is used while nothing runs: anything but 0 is a defect. ``finished`` counts
    sequences by finish reason; ``aborted`` counts requests.
    """

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    num_blocks: int = 0
    free_blocks: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    leaked_blocks: int = 0
    preemptions: int = 0
    aborted: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    finished: dict[str, int] = field(default_factory=dict)

    def counting_from(self, base: EngineStats) -> EngineStats:
        """This snapshot with ``base``'s counters added: totals that do not fall when an engine is replaced."""
        counts: dict[str, int] = {name: getattr(self, name) + getattr(base, name) for name in COUNTERS}
        return replace(self, finished=dict(Counter(self.finished) + Counter(base.finished)), **counts)

    def when_gone(self) -> EngineStats:
        """What remains of this snapshot when its engine is gone: the counters."""
        counts: dict[str, int] = {name: getattr(self, name) for name in COUNTERS}
        return EngineStats(finished=self.finished, **counts)


COUNTERS = (
    "preemptions",
    "aborted",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prompt_tokens",
    "generation_tokens",
    "steps",
)
