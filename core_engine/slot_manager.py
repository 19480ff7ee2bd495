"""KV memory of engines that keep it per sequence: who holds how much of one pool, and whose beginning can be copied.

Knows tokens, the cells of the pool that stand for them and which sequences are resident; refuses to know who runs next,
and never touches the memory itself: what is to be done there it says in cache operations. A cell holds one token's KV
and may belong to several sequences, for a sequence that begins like a resident one gets that beginning by a copy, which
costs a note in each cell and no memory (or a real copy in an engine whose sequences have memory of their own: there the
pool is as large as all seats together, and never short). Sequences that have ended stay resident until their cells or
their seats are needed, the least recently used going first; one that is gone on with hands over its seat.

    A runs; B has ended and is kept; C runs and began as a copy of B's first three tokens.

      A: [0, 1, 2, 3]       B: [4, 5, 6, 7]       C: [4, 5, 6, 8]

      cell:         0     1     2     3     4     5     6     7     8     9    10    11
                 +-----+-----+-----+-----+-----+-----+-----+-----+-----+-----+-----+-----+
      running:   |  1  |  1  |  1  |  1  |  1  |  1  |  1  |  0  |  1  |  0  |  0  |  0  |
      kept:      |  0  |  0  |  0  |  0  |  1  |  1  |  1  |  1  |  0  |  0  |  0  |  0  |
                 +-----+-----+-----+-----+-----+-----+-----+-----+-----+-----+-----+-----+
                   used ....................................  cached  used  free ........

Cells are numbers of ours: the engine's own may be others, but they are as many. Cells are shared only as beginnings: if
two sequences have a cell in common, they have all cells before it in common.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass

from suimon.core_engine.batch import CacheOp, CopySequence, FreeSequence, MoveSequence, TrimSequence
from suimon.core_engine.sequence import Sequence

# Cells left over for each running sequence when another starts: else the next few decodes would preempt it again.
HEADROOM = 16


@dataclass(slots=True, eq=False)
class _Resident:
    """A sequence that holds cells; cell i stands for its token i."""

    sequence: Sequence
    cells: list[int]

    @property
    def num_computed(self) -> int:
        """How many of its first tokens are known to be computed."""
        return min(self.sequence.num_computed_tokens, self.sequence.num_tokens, len(self.cells))


class SlotManager:
    """Gives out the ``num_tokens`` cells of a pool to at most ``max_residents`` sequences, running and kept together.

    ``can_fork`` says whether the engine can copy a part of a sequence; without that every sequence computes all of its
    tokens and none is kept. ``max_kept_tokens`` bounds the cells that are only kept (None: the pool does), but the
    sequence that ended last may be longer: it is the likeliest to be gone on with. With 0 none is kept. Beginnings
    shorter than ``min_shared`` tokens are not worth a copy.
    """

    block_size = 1
    headroom = HEADROOM

    def __init__(
        self,
        num_tokens: int,
        max_residents: int,
        *,
        enable_prefix_caching: bool = True,
        can_fork: bool = True,
        max_kept_tokens: int | None = None,
        min_shared: int = 1,
    ) -> None:
        self.num_blocks = num_tokens
        self.max_residents = max_residents
        self.can_fork = can_fork
        self.enable_prefix_caching = enable_prefix_caching and can_fork
        self.max_kept_tokens = num_tokens if max_kept_tokens is None else max_kept_tokens
        self.min_shared = min_shared
        self._free = list(range(num_tokens - 1, -1, -1))
        self._running_holders = [0] * num_tokens  # by cell
        self._kept_holders = [0] * num_tokens
        self._num_used = 0
        self._running: dict[int, _Resident] = {}  # by seq_id
        self._kept: OrderedDict[int, _Resident] = OrderedDict()  # least recently used first
        self._cache_ops: list[CacheOp] = []

    # --- counts and predicates: these change nothing ---

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self._num_used

    @property
    def num_cached(self) -> int:
        return self.num_blocks - len(self._free) - self._num_used

    @property
    def num_residents(self) -> int:
        return len(self._running) + len(self._kept)

    def blocks_for(self, num_tokens: int) -> int:
        """A token takes a cell."""
        return num_tokens

    def shortfall(self, sequence: Sequence, num_tokens: int, shared: Collection[int] = ()) -> int:
        """How many more cells would have to be available for ``allocate`` to succeed; at most 0 if it would."""
        revived = sum(1 for cell in shared if not self._running_holders[cell])
        held = len(self._cells(sequence)) + len(shared)
        return num_tokens - held - (self.num_free + self.num_cached - revived)

    def num_reclaimable(self, sequences: Iterable[Sequence]) -> int:
        """How many cells would become available if these sequences were freed together."""
        dropped = Counter(cell for sequence in sequences for cell in self._cells(sequence))
        return sum(1 for cell, count in dropped.items() if count == self._running_holders[cell])

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """The longest beginning of the sequence that a resident one of its adapter and salt has computed, as cells.

        At least one token is always left to compute; nothing that is shorter than ``min_shared`` is found.
        """
        best: list[int] = []
        if not self.enable_prefix_caching:
            return best
        wanted = sequence.tokens(0, sequence.num_tokens - 1)
        for resident in self._residents():
            length = min(resident.num_computed, len(wanted))
            if length > len(best) and _shares_cache(resident.sequence, sequence):
                length = common_prefix(resident.sequence.tokens(0, length), wanted)
                best = resident.cells[:length] if length > len(best) else best
        return best if len(best) >= self.min_shared else []

    def shareable(self, parent: Sequence, num_tokens: int) -> list[int]:
        """The parent's cells that a fork at ``num_tokens`` shares: all of them."""
        return self._cells(parent)[:num_tokens]

    # --- allocation: all or nothing ---

    def allocate(self, sequence: Sequence, num_tokens: int, *, shared: List[int] = (), keep_available: int = 0) -> bool:
        """Make room for the sequence's first ``num_tokens`` tokens, or return False and change nothing.

        ``shared`` are cells with the sequence's first tokens, from ``find_prefix`` or ``shareable``, for a sequence
        that has none yet; they are copied to it. ``keep_available`` cells must be left over for others.
        """
        count = num_tokens - len(self._cells(sequence)) - len(shared)
        if count <= 0 and not shared:
            return True
        if self.shortfall(sequence, num_tokens, shared) + keep_available > 0:
            return False
        resident = self._running.get(sequence.seq_id) or self._admit(sequence, shared)
        resident.cells.extend(self._take() for _ in range(count))
        return True

    def fork(
        self, parent: Sequence, child: Sequence, num_shared: int, num_tokens: int, *, keep_available: int = 0
    ) -> list[CacheOp] | None:
        """Give ``child`` the parent's first ``num_shared`` tokens and room for ``num_tokens``; None for no room."""
        shared = self.shareable(parent, num_shared)
        is_done = self.allocate(child, num_tokens, shared=shared, keep_available=keep_available)
        return [] if is_done else None  # the copy is among those of ``take_cache_ops``

    def trim(self, sequence: Sequence, num_tokens: int) -> None:
        """Give back the cells beyond the first ``num_tokens`` tokens."""
        resident = self._running.get(sequence.seq_id)
        if resident is not None:
            self._drop(resident.cells[num_tokens:], self._running_holders)
            del resident.cells[num_tokens:]

    def free(self, sequence: Sequence) -> None:
        """Give back everything the sequence holds."""
        self.trim(sequence, 0)
        self._running.pop(sequence.seq_id, None)
        self._limit_kept()

    def finish(self, sequence: Sequence) -> bool:
        """The running sequence has ended; whether it stays resident. Not after an error: what it holds is unknown."""
        resident = self._running.get(sequence.seq_id)
        is_sound = sequence.error is None and not sequence.has_lost_kv
        if resident is None or not self._keeps_any or not is_sound:
            self.free(sequence)
            return False
        self._forget_beyond(resident, resident.num_computed)
        for cell in resident.cells:
            self._kept_holders[cell] += 1
        self._drop(resident.cells, self._running_holders)
        self._kept[sequence.seq_id] = self._running.pop(sequence.seq_id)
        self._limit_kept()
        return True

    def forget(self, seq_id: int) -> None:
        """The engine has lost what it kept of an ended sequence, which may have left since."""
        if seq_id in self._kept:
            self._kept.move_to_end(seq_id, last=False)
            self._evict()

    def release_kept(self) -> bool:
        """Give up all that is only kept. False if that is nothing."""
        had_any = bool(self._kept)
        while self._kept:
            self._evict()
        return had_any

    @property
    def _keeps_any(self) -> bool:
        return self.enable_prefix_caching and self.max_kept_tokens > 0

    def register(self, sequence: Sequence) -> None:
        """Nothing to do: what is computed is read off the sequences when it is looked for."""

    def take_cache_ops(self) -> list[CacheOp]:
        """Copies, trims and frees since the last time, in order."""
        operations, self._cache_ops = self._cache_ops, []
        return operations

    # --- residents ---

    def _residents(self) -> Iterable[_Resident]:
        yield from self._running.values()
        yield from self._kept.values()

    def _cells(self, sequence: Sequence) -> list[int]:
        resident = self._running.get(sequence.seq_id)
        return [] if resident is None else resident.cells

    def _admit(self, sequence: Sequence, shared: List[int]) -> _Resident:
        for cell in shared:
            self._num_used += not self._running_holders[cell]
            self._running_holders[cell] += 1
        if shared:
            self._take_over(self._holder_of(shared).sequence, sequence, len(shared))
        else:
            self._vacate_seat()
        resident = self._running[sequence.seq_id] = _Resident(sequence, list(shared))
        return resident

    def _holder_of(self, cells: List[int]) -> _Resident:
        """Someone who has all of them, which having the last at its place shows; a kept one without others first."""
        last = len(cells) - 1
        holders = [r for r in self._residents() if len(r.cells) > last and r.cells[last] == cells[last]]
        whole = (r for r in holders if r.sequence.seq_id in self._kept and len(r.cells) == len(cells))
        return next(whole, holders[0])

    def _take_over(self, source: Sequence, target: Sequence, length: int) -> None:
        """Give ``target`` the beginning of ``source``: all of one that is only kept, or if no other seat is to be had,
        by its seat; else by a copy.
        """
        kept = self._kept.get(source.seq_id)
        is_last_seat = len(self._kept) == 1 and self.num_residents >= self.max_residents
        if kept is not None and (is_last_seat or len(kept.cells) == length):
            self._drop(self._kept.pop(source.seq_id).cells, self._kept_holders)
            self._cache_ops.append(MoveSequence(source.seq_id, target.seq_id, length))
            return
        if kept is not None:
            self._kept.move_to_end(source.seq_id)
        self._vacate_seat()
        self._cache_ops.append(CopySequence(source.seq_id, target.seq_id, length))

    def _vacate_seat(self) -> None:
        while self.num_residents >= self.max_residents:
            self._evict()

    def _forget_beyond(self, resident: _Resident, length: int) -> None:
        if len(resident.cells) > length:
            self.trim(resident.sequence, length)
            self._cache_ops.append(TrimSequence(resident.sequence.seq_id, length))

    def _limit_kept(self) -> None:
        while self.num_cached > self.max_kept_tokens and len(self._kept) > 1:
            self._evict()

    def _evict(self) -> None:
        seq_id, resident = self._kept.popitem(last=False)
        self._drop(resident.cells, self._kept_holders)
        self._cache_ops.append(FreeSequence(seq_id))

    # --- cells ---

    def _take(self) -> int:
        while not self._free:
            self._evict()
        cell = self._free.pop()
        self._running_holders[cell] = 1
        self._num_used += 1
        return cell

    def _drop(self, cells: Iterable[int], holders: list[int]) -> None:
        """One holder fewer, of the kind that ``holders`` counts, for each of the cells."""
        counts_running = holders is self._running_holders
        for cell in cells:
            holders[cell] -= 1
            self._num_used -= counts_running and not holders[cell]
            if not self._running_holders[cell] and not self._kept_holders[cell]:
                self._free.append(cell)

    # --- the invariants, checked ---

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the cells, unless every invariant in the module's docstring holds."""
        for residents, holders in ((self._running, self._running_holders), (self._kept, self._kept_holders)):
            counted = Counter(cell for resident in residents.values() for cell in resident.cells)
            wrong = [cell for cell in range(self.num_blocks) if counted[cell] != holders[cell]]
            _require(not wrong, f"holders differ from the residents' cells: {wrong}")
        used = sum(1 for count in self._running_holders if count)
        _require(used == self._num_used, f"{used} cells are used, but {self._num_used} are counted")
        held = {cell for resident in self._residents() for cell in resident.cells}
        states = Counter([*self._free, *held])
        wrong = [cell for cell in range(self.num_blocks) if states[cell] != 1]
        _require(not wrong, f"not exactly one of free and held: {wrong}")
        _require(self.num_residents <= self.max_residents, f"{self.num_residents} residents")
        is_within = self.num_cached <= self.max_kept_tokens or len(self._kept) == 1
        _require(is_within, f"{self.num_cached} cells are kept")
        self._check_sharing()

    def _check_sharing(self) -> None:
        before: dict[int, tuple[int, ...]] = {}
        for resident in self._residents():
            for index, cell in enumerate(resident.cells):
                beginning = (index, resident.cells[index - 1] if index else -1)
                known = before.setdefault(cell, beginning)
                _require(known == beginning, f"cell {cell} stands at two places or behind two cells")


def common_prefix(left: list[int], right: list[int]) -> int:
    """How many first entries are equal. Compares slices, in C: halves of what is left, like a binary search."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _shares_cache(one: Sequence, other: Sequence) -> bool:
    return one.cache_salt == other.cache_salt and one.adapter_hash == other.adapter_hash


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise AssertionError(f"KV cell accounting is wrong: {message}")
