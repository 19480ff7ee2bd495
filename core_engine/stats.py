"""What an engine says about itself: gauges and counters as plain numbers. Knows no tensors and no metric names."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """One snapshot. Every block is free, used or cached: ``blocks_total == free + used + cached``.

    The fields named in COUNTERS only grow while an engine lives; the others are gauges.
    """

    running: int = 0  # sequences with KV blocks
    waiting: int = 0  # sequences in the queue
    queued_tokens: int = 0  # their tokens still to compute
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0  # hold a reusable prefix and belong to nobody
    preemptions: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    steps: int = 0

    def counting_from(self, base: EngineStats) -> EngineStats:
        """This snapshot with ``base``'s counters added: totals that do not fall when an engine is replaced."""
        return replace(self, **{name: getattr(self, name) + getattr(base, name) for name in COUNTERS})

    @classmethod
    def read(cls, source: object) -> EngineStats:
        """The same numbers from any object that has some of these attributes."""
        return cls(**{f.name: getattr(source, f.name) for f in fields(cls) if hasattr(source, f.name)})


COUNTERS = ("preemptions", "prefix_cache_queries", "prefix_cache_hits", "steps")
