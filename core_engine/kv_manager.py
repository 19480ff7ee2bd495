"""What the scheduler asks of whoever accounts for KV memory: the interface of BlockManager and SlotManager.

Both count in blocks of ``block_size`` tokens; where KV is kept per sequence a block is one token. Which of the two an
engine uses follows from ``ExecutorCapabilities.kv_kind``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as List
from typing import Protocol

from suimon.core_engine.batch import CacheOp
from suimon.core_engine.sequence import Sequence


class KVManager(Protocol):
    """Every block is exactly one of free, used (by a running sequence) and cached (kept for later, given up first)."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def enable_prefix_caching(self) -> bool: ...

    @property
    def can_fork(self) -> bool:
        """Whether a sequence may begin as a copy of a part of another."""

    @property
    def headroom(self) -> int:
        """Blocks to leave over for each running sequence when another one starts."""

    @property
    def num_free(self) -> int: ...

    @property
    def num_used(self) -> int: ...

    @property
    def num_cached(self) -> int: ...

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""

    def shortfall(self, sequence: Sequence, num_tokens: int, shared: Collection[int] = ()) -> int:
        """How many more blocks would have to be available for ``allocate`` to succeed; at most 0 if it would."""

    def num_reclaimable(self, sequences: Iterable[Sequence]) -> int:
        """How many blocks would become available if these sequences were freed together."""

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that already hold the sequence's first tokens. At least one token is always left to compute."""

    def shareable(self, parent: Sequence, num_tokens: int) -> list[int]:
        """The parent's blocks that a fork at ``num_tokens`` shares."""

    def allocate(self, sequence: Sequence, num_tokens: int, *, shared: List[int] = (), keep_available: int = 0) -> bool:
        """Make room for the sequence's first ``num_tokens`` tokens, or return False and change nothing."""

    def fork(
        self, parent: Sequence, child: Sequence, num_shared: int, num_tokens: int, *, keep_available: int = 0
    ) -> List[CacheOp] | None:
        """Give ``child`` the parent's first ``num_shared`` tokens and room for ``num_tokens``; None for no room.

        What is returned is to be executed before the child's next step.
        """

    def trim(self, sequence: Sequence, num_tokens: int) -> None:
        """Give back what lies beyond the first ``num_tokens`` tokens."""

    def free(self, sequence: Sequence) -> None:
        """Give back everything the sequence holds."""

    def finish(self, sequence: Sequence) -> bool:
        """The running sequence has ended. True if the executor is to keep its KV, until a FreeSequence says so."""

    def forget(self, seq_id: int) -> None:
        """The executor has lost what it was to keep of an ended sequence."""

    def release_kept(self) -> bool:
        """Have the executor drop the KV that it only keeps for later. False if it keeps none."""

    def register(self, sequence: Sequence) -> None:
        """More of the sequence's tokens are computed."""

    def take_cache_ops(self) -> list[CacheOp]:
        """What the executor has to do for the calls since the last time, in order."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless the accounts add up."""
