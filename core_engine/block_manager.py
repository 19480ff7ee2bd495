"""Paged KV memory: which block holds which tokens of which sequence.

Knows blocks, references to them and hashes of their content; refuses to know who runs next (it says "no" and the
scheduler decides), and never touches the memory itself.

The memory is ``num_blocks`` blocks of ``block_size`` slots; one slot holds one token's K and V in every layer.

      block_table of A: [4, 0, 6]                     block_table of B: [4, 0, 2]
      tokens of A:  | 0 .. 15 | 16 .. 31 | 32 .. 40  |
      lies in:      | block 4 | block 0  | block 6   |   slot = block * block_size + position % block_size

      block:       0       1       2       3       4       5       6       7
                +-------+-------+-------+-------+-------+-------+-------+-------+
      refs:     |   2   |   0   |   1   |   0   |   2   |   0   |   1   |   0   |
      hash:     |  h1   |   -   |   -   |  h9   |  h0   |  h7   |   -   |   -   |
                +-------+-------+-------+-------+-------+-------+-------+-------+
                  used    free    used   cached   used   cached   used    free

Every block is exactly one of free (no reference, no hash), cached (no reference, but a hash by which it may be found
again) and used (referenced). Free blocks are taken first, then cached ones, the least recently used first. Only full
blocks of accepted and computed tokens get a hash, and nobody writes to a block that has a hash or a second reference.
"""

from __future__ import annotations

import array
import hashlib
import sys
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as List

from suimon.core_engine.batch import CacheOp, CopyBlock
from suimon.core_engine.sequence import Sequence


class BlockManager:
    """Allocates blocks to sequences and finds computed prefixes again.

    It alone changes a sequence's ``block_table`` and ``block_hashes``. ``model_version`` is the content version of the
    model: part of every hash, so that no cached block outlives the weights that made it.
    """

    can_fork = True
    headroom = 1

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, model_version: str = ""
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._model_version = model_version
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._references = [0] * num_blocks
        self._num_used = 0
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._holders: dict[int, Sequence] = {}
        self._num_registered: dict[int, int] = {}  # by seq_id: leading blocks that need no look again

    # --- counts and predicates: these change nothing ---

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self._num_used

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def shortfall(self, sequence: Sequence, num_tokens: int, shared: Collection[int] = ()) -> int:
        """How many more blocks would have to be available for ``allocate`` to succeed; at most 0 if it would."""
        held = len(sequence.block_table) + len(shared)
        revived = sum(1 for block in shared if self._references[block] == 0)
        return self.blocks_for(num_tokens) - held - (len(self._free) + len(self._cached) - revived)

    def num_reclaimable(self, sequences: Iterable[Sequence]) -> int:
        """How many blocks would become available if these sequences were freed together."""
        dropped = Counter(block for sequence in sequences for block in sequence.block_table)
        return sum(1 for block, count in dropped.items() if count == self._references[block])

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that already hold the sequence's first tokens. At least one token is always left to compute."""
        if not self.enable_prefix_caching:
            return []
        blocks: list[int] = []
        for index in range((sequence.num_tokens - 1) // self.block_size):
            block = self._block_of.get(self._hash(sequence, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def shareable(self, parent: Sequence, num_tokens: int) -> list[int]:
        """The parent's blocks that a fork at ``num_tokens`` shares: the full ones."""
        return parent.block_table[: num_tokens // self.block_size]

    # --- allocation: all or nothing ---

    def allocate(self, sequence: Sequence, num_tokens: int, *, shared: List[int] = (), keep_available: int = 0) -> bool:
        """Extend the block table to cover ``num_tokens`` tokens, or return False and change nothing.

        ``shared`` are blocks with the sequence's first tokens, from ``find_prefix`` or ``shareable``, for a sequence
        that has none yet. ``keep_available`` blocks must be left over for others.
        """
        count = self.blocks_for(num_tokens) - len(sequence.block_table) - len(shared)
        if count > 0 or shared:
            if self.shortfall(sequence, num_tokens, shared) + keep_available > 0:
                return False
            self._holders[sequence.seq_id] = sequence
            for block in shared:
                self._reference(block)
            sequence.block_table.extend(shared)
            sequence.block_table.extend(self._take() for _ in range(count))
        return True

    def fork(
        self, parent: Sequence, child: Sequence, num_shared: int, num_tokens: int, *, keep_available: int = 0
    ) -> list[CopyBlock] | None:
        """Give ``child`` the parent's first ``num_shared`` tokens and room for ``num_tokens``, or None for no room.

        Full blocks are shared. A partly filled last block is copied (copy-on-write: both sequences are about to write
        to it); the copies returned must be executed before the child's next step.
        """
        shared = self.shareable(parent, num_shared)
        if not self.allocate(child, num_tokens, shared=shared, keep_available=keep_available):
            return None
        if num_shared % self.block_size == 0:
            return []
        return [CopyBlock(parent.block_table[len(shared)], child.block_table[len(shared)])]

    def trim(self, sequence: Sequence, num_tokens: int) -> None:
        """Give back the blocks beyond the first ``num_tokens`` tokens."""
        keep = self.blocks_for(num_tokens)
        dropped = sequence.block_table[keep:]
        del sequence.block_table[keep:]
        # The end of a chain is of use only together with its beginning, so it is the first to be evicted.
        for block in reversed(dropped):
            self._dereference(block)

    def free(self, sequence: Sequence) -> None:
        """Give back everything the sequence holds. Its hashed blocks stay in the cache until evicted."""
        self.trim(sequence, 0)
        self._holders.pop(sequence.seq_id, None)
        self._num_registered.pop(sequence.seq_id, None)

    def finish(self, sequence: Sequence) -> bool:
        """The same for a sequence that has ended. What is cached is cached by its content: nobody need keep it."""
        self.free(sequence)
        return False

    def take_cache_ops(self) -> list[CacheOp]:
        """Nothing: blocks are written before they are read, and ``fork`` hands out its copies itself."""
        return []

    def forget(self, seq_id: int) -> None:
        """Nothing to do: blocks are not the executor's to lose."""

    def release_kept(self) -> bool:
        """Nothing to do: cached blocks are in nobody's way."""
        return False

    def register(self, sequence: Sequence) -> None:
        """Enter the sequence's full blocks of accepted and computed tokens into the prefix cache."""
        if not self.enable_prefix_caching:
            return
        full = min(sequence.num_computed_tokens, sequence.num_tokens) // self.block_size
        for index in range(self._num_registered.get(sequence.seq_id, 0), full):
            self._remember(sequence.block_table[index], self._hash(sequence, index))
            self._num_registered[sequence.seq_id] = index + 1

    def _remember(self, block: int, key: bytes) -> None:
        # A twin computed at the same time keeps its own copy, without a hash: one hash leads to one block.
        if block not in self._hash_of and key not in self._block_of:
            self._hash_of[block] = key
            self._block_of[key] = block

    def _take(self) -> int:
        block = self._free.pop() if self._free else self._evict()
        self._references[block] = 1
        self._num_used += 1
        return block

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block

    def _reference(self, block: int) -> None:
        if self._references[block] == 0:
            del self._cached[block]
            self._num_used += 1
        self._references[block] += 1

    def _dereference(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] > 0:
            return
        self._num_used -= 1
        if block in self._hash_of:
            self._cached[block] = None
        else:
            self._free.append(block)

    # --- hashing ---

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        """The chained sha256 of the sequence's full block ``index``; computed once and kept on the sequence."""
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            parent = hashes[-1] if hashes else self._root(sequence)
            hashes.append(hash_block(parent, sequence.tokens(start, start + self.block_size)))
        return hashes[index]

    def _root(self, sequence: Sequence) -> bytes:
        return hash_root(self._model_version, sequence.adapter_hash, sequence.cache_salt)

    # --- the invariants, checked ---

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the blocks, unless every invariant in the module's docstring holds."""
        counted = Counter(block for sequence in self._holders.values() for block in sequence.block_table)
        wrong = [b for b in range(self.num_blocks) if counted[b] != self._references[b]]
        _require(not wrong, f"references differ from the block tables: {wrong}")
        _require(self._num_used == len(counted), f"{len(counted)} blocks are used, but {self._num_used} are counted")
        states = Counter([*self._free, *self._cached, *counted])
        wrong = [b for b in range(self.num_blocks) if states[b] != 1]
        _require(not wrong and len(states) == self.num_blocks, f"not exactly one of free, used and cached: {wrong}")
        self._check_hashes()
        self._check_writable()

    def _check_hashes(self) -> None:
        unhashed = [block for block in self._cached if block not in self._hash_of]
        _require(not unhashed, f"cached without a hash: {unhashed}")
        hashed = [block for block in self._free if block in self._hash_of]
        _require(not hashed, f"free with a hash: {hashed}")
        inverse = {block: key for key, block in self._block_of.items()}
        _require(inverse == self._hash_of, "hashes and blocks are not each other's inverse")

    def _check_writable(self) -> None:
        for sequence in self._holders.values():
            for block in sequence.block_table[sequence.num_computed_tokens // self.block_size :]:
                shared = self._references[block] > 1 or block in self._hash_of
                _require(not shared, f"sequence {sequence.seq_id} may write to block {block}, which others read")


def hash_root(model_version: str, adapter_hash: str | None, cache_salt: str | None) -> bytes:
    """What every chain of blocks starts from: sha256 over tagged, length-prefixed fields.

    No two different triples encode to the same bytes, so a salt that spells an adapter's hash is still another chain.
    """
    digest = hashlib.sha256(b"prefix-cache 1")
    for tag, value in ((b"M", model_version), (b"A", adapter_hash), (b"S", cache_salt)):
        encoded = b"" if value is None else value.encode("utf-8", "surrogatepass")
        digest.update(tag + (b"0" if value is None else b"1") + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def hash_block(parent: bytes, token_ids: List[int]) -> bytes:
    """sha256 over the parent's hash (32 bytes) and the block's tokens (8 bytes each, little-endian)."""
    tokens = array.array("q", token_ids)
    if sys.byteorder == "big":  # pragma: no cover
        tokens.byteswap()
    return hashlib.sha256(parent + tokens.tobytes()).digest()


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise AssertionError(f"KV block accounting is wrong: {message}")
