"""Paged KV accounting: single rules, and a state machine against a model that knows only sets and tuples."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from suimon.core_engine.batch import CopyBlock
from suimon.core_engine.block_manager import BlockManager, hash_block, hash_root
from suimon.core_engine.sequence import Sequence


def compute(blocks: BlockManager, sequence: Sequence, num_tokens: int | None = None) -> None:
    """As if the sequence's first tokens (all by default) had been computed."""
    sequence.num_computed_tokens = sequence.num_tokens if num_tokens is None else num_tokens
    blocks.register(sequence)


def run(blocks: BlockManager, sequence: Sequence) -> Sequence:
    assert blocks.allocate(sequence, sequence.num_tokens, shared=blocks.find_prefix(sequence))
    compute(blocks, sequence)
    return sequence


def counts(blocks: BlockManager) -> tuple[int, int, int]:
    return blocks.num_free, blocks.num_used, blocks.num_cached


def test_blocks_are_free_then_used_then_cached(build: ModuleType) -> None:
    blocks = build.make_blocks(8, 4)
    assert counts(blocks) == (8, 0, 0)
    sequence = run(blocks, build.make_sequence(10))
    assert counts(blocks) == (5, 3, 0)
    blocks.free(sequence)
    assert counts(blocks) == (6, 0, 2)  # the third block is not full
    assert sequence.block_table == []
    blocks.check_integrity()


def test_allocation_is_all_or_nothing(build: ModuleType) -> None:
    blocks = build.make_blocks(3, 4)
    sequence = build.make_sequence(16)
    assert blocks.shortfall(sequence, 16) == 1
    assert not blocks.allocate(sequence, 16)
    assert sequence.block_table == [] and counts(blocks) == (3, 0, 0)
    assert blocks.allocate(sequence, 12)
    assert blocks.allocate(sequence, 12) and blocks.allocate(sequence, 1), "already covered"
    assert len(sequence.block_table) == 3


def test_keep_available_leaves_blocks_for_others(build: ModuleType) -> None:
    blocks = build.make_blocks(3, 4)
    assert not blocks.allocate(build.make_sequence(8), 8, keep_available=2)
    assert blocks.allocate(build.make_sequence(8), 8, keep_available=1)


def test_a_prefix_is_found_again_but_one_token_is_left(build: ModuleType) -> None:
    # B46: a prompt of exactly two blocks hits only the first; the same and more hits both.
    blocks = build.make_blocks(8, 16)
    first = run(blocks, build.make_sequence(32))
    table = list(first.block_table)
    assert blocks.find_prefix(build.make_sequence(32, 2)) == table[:1]
    longer = build.make_sequence(build.make_prompt(32) + [5] * 20, 3)
    assert blocks.find_prefix(longer) == table[:2]
    assert blocks.find_prefix(build.make_sequence(16, 4)) == []
    blocks.free(first)
    assert blocks.find_prefix(longer) == table[:2], "cached blocks are found too"


def test_a_found_prefix_is_shared_and_survives_its_first_owner(build: ModuleType) -> None:
    blocks = build.make_blocks(8, 4)
    first = run(blocks, build.make_sequence(9))
    second = run(blocks, build.make_sequence(9, 2))
    assert second.block_table[:2] == first.block_table[:2] and second.block_table[2] != first.block_table[2]
    assert counts(blocks) == (4, 4, 0)
    assert blocks.num_reclaimable([first]) == 1 and blocks.num_reclaimable([first, second]) == 4
    blocks.free(first)
    blocks.check_integrity()
    assert counts(blocks) == (5, 3, 0)


def test_only_full_blocks_of_accepted_and_computed_tokens_are_remembered(build: ModuleType) -> None:
    blocks = build.make_blocks(8, 4)
    sequence = build.make_sequence(12)
    blocks.allocate(sequence, 16)
    compute(blocks, sequence, 7)
    assert len(blocks.find_prefix(build.make_sequence(13, 2))) == 1
    compute(blocks, sequence, 16)  # positions 12 to 15 hold drafts that nobody accepted
    longer = build.make_sequence(build.make_prompt(20), 3)
    assert len(blocks.find_prefix(longer)) == 3


def test_outputs_extend_the_chain(build: ModuleType) -> None:
    blocks = build.make_blocks(8, 4)
    sequence = build.make_sequence(6)
    sequence.output_token_ids += [9, 8]
    run(blocks, sequence)
    follow_up = build.make_sequence([*build.make_prompt(6), 9, 8, 1], 2)
    assert blocks.find_prefix(follow_up) == sequence.block_table


def test_the_least_recently_used_goes_first_and_ends_before_beginnings(build: ModuleType) -> None:
    blocks = build.make_blocks(4, 4)
    old = run(blocks, build.make_sequence([1] * 8, 1))
    old_table = list(old.block_table)
    blocks.free(old)
    new = run(blocks, build.make_sequence([2] * 8, 2))
    blocks.free(new)
    assert counts(blocks) == (0, 0, 4)
    intruder = build.make_sequence([3] * 4, 3)
    assert blocks.allocate(intruder, 4)
    assert intruder.block_table == [old_table[1]]
    assert blocks.find_prefix(build.make_sequence([1] * 9, 4)) == [old_table[0]]
    assert len(blocks.find_prefix(build.make_sequence([2] * 9, 5))) == 2


def test_using_a_prefix_makes_it_recent(build: ModuleType) -> None:
    blocks = build.make_blocks(2, 4)
    for token_id in (1, 2):
        blocks.free(run(blocks, build.make_sequence([token_id] * 4, token_id)))
    again = build.make_sequence([1] * 5, 3)
    assert blocks.allocate(again, 4, shared=blocks.find_prefix(again))
    blocks.free(again)
    assert blocks.allocate(build.make_sequence([3] * 4, 4), 4)
    assert blocks.find_prefix(build.make_sequence([1] * 5, 5)) != []
    assert blocks.find_prefix(build.make_sequence([2] * 5, 6)) == []


def test_a_shared_cached_block_is_not_counted_as_available_too(build: ModuleType) -> None:
    blocks = build.make_blocks(3, 4)
    blocks.free(run(blocks, build.make_sequence(8)))
    sequence = build.make_sequence(16, 2)
    prefix = blocks.find_prefix(sequence)
    assert len(prefix) == 2
    assert blocks.shortfall(sequence, 16, prefix) == 1
    assert not blocks.allocate(sequence, 16, shared=prefix)
    assert counts(blocks) == (1, 0, 2), "the refused allocation changed nothing"


def test_twins_computed_at_the_same_time_keep_their_own_blocks(build: ModuleType) -> None:
    blocks = build.make_blocks(8, 4)
    twins = [build.make_sequence(8, seq_id) for seq_id in (1, 2)]
    for twin in twins:
        assert blocks.allocate(twin, 8)
    for twin in twins:
        compute(blocks, twin)
    blocks.check_integrity()
    for twin in twins:
        blocks.free(twin)
    assert counts(blocks) == (6, 0, 2)


def test_without_prefix_caching_nothing_is_kept(build: ModuleType) -> None:
    blocks = build.make_blocks(8, 4, enable_prefix_caching=False)
    blocks.free(run(blocks, build.make_sequence(8)))
    assert counts(blocks) == (8, 0, 0)
    assert blocks.find_prefix(build.make_sequence(9, 2)) == []


@pytest.mark.parametrize(("num_shared", "num_full", "copies"), [(5, 1, 1), (4, 1, 0), (3, 0, 1)])
def test_a_fork_shares_full_blocks_and_copies_the_last(
    build: ModuleType, num_shared: int, num_full: int, copies: int
) -> None:
    blocks = build.make_blocks(8, 4)
    parent, child = run(blocks, build.make_sequence(6)), build.make_sequence(6, 2)
    operations = blocks.fork(parent, child, num_shared, 6)
    child.num_computed_tokens = num_shared
    assert child.block_table[:num_full] == parent.block_table[:num_full]
    assert not set(child.block_table[num_full:]) & set(parent.block_table)
    assert len(child.block_table) == 2
    assert operations == [CopyBlock(parent.block_table[num_full], child.block_table[num_full])][:copies]
    blocks.check_integrity()


def test_a_fork_without_room_changes_nothing(build: ModuleType) -> None:
    blocks = build.make_blocks(2, 4)
    parent, child = run(blocks, build.make_sequence(6)), build.make_sequence(6, 2)
    assert blocks.fork(parent, child, 5, 6) is None
    assert child.block_table == [] and counts(blocks) == (0, 2, 0)


def test_trimming_gives_back_whole_blocks(build: ModuleType) -> None:
    blocks = build.make_blocks(8, 4)
    sequence = build.make_sequence(6)
    blocks.allocate(sequence, 14)
    blocks.trim(sequence, 6)
    assert len(sequence.block_table) == 2 and counts(blocks) == (6, 2, 0)
    blocks.trim(sequence, 7)
    assert len(sequence.block_table) == 2


def test_freeing_twice_is_harmless(build: ModuleType) -> None:
    blocks = build.make_blocks(8, 4)
    sequence = run(blocks, build.make_sequence(6))
    blocks.free(sequence)
    blocks.free(sequence)
    blocks.check_integrity()


# --- hashes ---


@pytest.mark.parametrize(
    "change", [{"adapter_hash": "A"}, {"adapter_hash": "B"}, {"cache_salt": "A"}, {"cache_salt": ""}]
)
def test_adapter_and_salt_separate_prefixes(build: ModuleType, change: dict[str, str]) -> None:
    # B48: the salt may spell an adapter's name or hash, and an empty salt is not none.
    blocks = build.make_blocks(8, 4)
    run(blocks, build.make_sequence(8))
    run(blocks, build.make_sequence(8, 2, adapter_hash="C"))
    assert blocks.find_prefix(build.make_sequence(9, 3, **change)) == []
    assert blocks.find_prefix(build.make_sequence(9, 4)) != []


def test_a_reloaded_adapter_of_the_same_name_is_another(build: ModuleType) -> None:
    blocks = build.make_blocks(8, 4)
    run(blocks, build.make_sequence(8, adapter="style", adapter_hash="v1"))
    assert blocks.find_prefix(build.make_sequence(9, 2, adapter="style", adapter_hash="v2")) == []
    assert blocks.find_prefix(build.make_sequence(9, 3, adapter="other name", adapter_hash="v1")) != []


field_values = st.none() | st.text(max_size=6)


@given(
    st.tuples(st.text(max_size=6), field_values, field_values),
    st.tuples(st.text(max_size=6), field_values, field_values),
)
def test_roots_are_equal_only_for_equal_fields(left: tuple[Any, ...], right: tuple[Any, ...]) -> None:
    assert (hash_root(*left) == hash_root(*right)) == (left == right)


def test_roots_do_not_confuse_neighbouring_fields() -> None:
    spellings = [
        ("ab", None, None),
        ("a", "b", None),
        ("a", None, "b"),
        ("", "ab", None),
        ("", None, "ab"),
        ("", "a", "b"),
    ]
    spellings += [("a", "", "b"), ("", "S1", None), ("", None, "A1"), ("\udc80", None, None)]
    assert len({hash_root(*spelling) for spelling in spellings}) == len(spellings)


def test_block_hashes_depend_on_order_parent_and_large_ids() -> None:
    parent = hash_root("m", None, None)
    chains = [hash_block(parent, ids) for ids in ([1, 2], [2, 1], [1, 2, 0], [258, 0], [2**40, 0])]
    chains.append(hash_block(chains[0], [1, 2]))
    assert len(set(chains)) == len(chains)


def test_the_model_version_separates_caches(build: ModuleType) -> None:
    sequences = [build.make_sequence(8), build.make_sequence(8)]
    for sequence, version in zip(sequences, ("one", "two"), strict=True):
        run(build.make_blocks(8, 4, model_version=version), sequence)
    assert not set(sequences[0].block_hashes) & set(sequences[1].block_hashes)


# --- the checker itself: each kind of damage is seen ---


def lose_a_free_block(blocks: BlockManager, sequence: Sequence) -> None:
    blocks._free.pop()


def free_twice(blocks: BlockManager, sequence: Sequence) -> None:
    blocks._free.append(sequence.block_table[0])


def forget_a_reference(blocks: BlockManager, sequence: Sequence) -> None:
    blocks._references[sequence.block_table[0]] -= 1


def miscount(blocks: BlockManager, sequence: Sequence) -> None:
    blocks._num_used += 1


def invent_a_block(blocks: BlockManager, sequence: Sequence) -> None:
    blocks._free.append(99)


def cache_without_hash(blocks: BlockManager, sequence: Sequence) -> None:
    blocks._cached[blocks._free.pop()] = None


def leave_a_hash_on_a_free_block(blocks: BlockManager, sequence: Sequence) -> None:
    blocks._hash_of[blocks._free[0]] = b"stale"


def lose_half_of_the_map(blocks: BlockManager, sequence: Sequence) -> None:
    blocks._block_of.clear()


def write_behind_a_hash(blocks: BlockManager, sequence: Sequence) -> None:
    sequence.num_computed_tokens = 3


DAMAGES = {
    lose_a_free_block: "exactly one of free",
    free_twice: "exactly one of free",
    invent_a_block: "exactly one of free",
    forget_a_reference: "references differ",
    miscount: "are counted",
    cache_without_hash: "cached without a hash",
    leave_a_hash_on_a_free_block: "free with a hash",
    lose_half_of_the_map: "inverse",
    write_behind_a_hash: "which others read",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_check_integrity_sees(build: ModuleType, damage: Any) -> None:
    blocks = build.make_blocks(8, 4)
    sequence = run(blocks, build.make_sequence(9))
    blocks.check_integrity()
    damage(blocks, sequence)
    with pytest.raises(AssertionError, match=DAMAGES[damage]):
        blocks.check_integrity()


# --- a state machine against a naive model ---


@dataclass
class Content:
    """What the model says a block holds: the key of everything up to and including it, tokens that were computed."""

    key: tuple[Any, ...] | None = None


@dataclass
class Model:
    """Sets and tuples only: which sequence holds which blocks, and what was last computed into each block."""

    tables: dict[int, list[int]] = field(default_factory=dict)
    contents: dict[int, Content] = field(default_factory=dict)


class BlockMachine(RuleBasedStateMachine):
    """Random lives of sequences over a tiny pool."""

    def __init__(self, build: ModuleType) -> None:
        super().__init__()
        self.build = build
        self.size = 4
        self.blocks: BlockManager = build.make_blocks(7, self.size)
        self.live: list[Sequence] = []
        self.model = Model()
        self.last_id = 0

    def key(self, sequence: Sequence, num_blocks: int) -> tuple[Any, ...]:
        return (sequence.adapter_hash, sequence.cache_salt, *sequence.tokens(0, num_blocks * self.size))

    def available(self) -> int:
        return 7 - len({block for table in self.model.tables.values() for block in table})

    def note(self, sequence: Sequence, revived: list[int]) -> None:
        """New blocks lose what they held, those ``revived`` from the cache do not; the table is remembered."""
        before = self.model.tables.get(sequence.seq_id, [])
        taken = set(sequence.block_table) - {b for table in self.model.tables.values() for b in table}
        for block in taken - set(revived):
            self.model.contents[block] = Content()
        assert sequence.block_table[: len(before)] == before
        self.model.tables[sequence.seq_id] = list(sequence.block_table)

    @rule(
        start=st.sampled_from([1, 2]),
        length=st.integers(1, 30),
        salt=st.sampled_from([None, "s"]),
        adapter=st.sampled_from([None, "s"]),
    )
    def start(self, start: int, length: int, salt: str | None, adapter: str | None) -> None:
        self.last_id += 1
        sequence = self.build.make_sequence([start] * length, self.last_id, cache_salt=salt, adapter_hash=adapter)
        prefix = self.blocks.find_prefix(sequence)
        assert len(prefix) * self.size < length
        for index, block in enumerate(prefix):
            assert self.model.contents[block].key == self.key(sequence, index + 1), "a stale or wrong block"
        held = {block for table in self.model.tables.values() for block in table}
        missing = -(-length // self.size) - len(prefix)
        fits = missing <= self.available() - len(set(prefix) - held)
        assert self.blocks.allocate(sequence, length, shared=prefix) == fits
        if fits:
            self.note(sequence, prefix)
            sequence.num_computed_tokens = len(prefix) * self.size
            self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 12))
    def compute(self, data: st.DataObject, count: int) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        end = min(sequence.num_computed_tokens + count, sequence.num_tokens)
        sequence.num_computed_tokens = end
        for index in range(end // self.size):
            self.model.contents[sequence.block_table[index]] = Content(self.key(sequence, index + 1))
        self.blocks.register(sequence)
        twin = self.build.make_sequence(
            [*sequence.tokens(0, end), 3],
            0,
            cache_salt=sequence.cache_salt,
            adapter_hash=sequence.adapter_hash,
        )
        assert len(self.blocks.find_prefix(twin)) == end // self.size, "what was computed is found"

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token_ids=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=6))
    def grow(self, data: st.DataObject, token_ids: list[int]) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        target = sequence.num_tokens + len(token_ids)
        fits = -(-target // self.size) - len(sequence.block_table) <= self.available()
        assert self.blocks.allocate(sequence, target) == fits
        if fits:
            sequence.output_token_ids += token_ids
            self.note(sequence, [])

    @precondition(lambda self: any(s.num_computed_tokens for s in self.live))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from([s for s in self.live if s.num_computed_tokens]))
        num_shared = data.draw(st.integers(1, parent.num_computed_tokens))
        self.last_id += 1
        salts = {"cache_salt": parent.cache_salt, "adapter_hash": parent.adapter_hash}
        child = self.build.make_sequence([*parent.tokens(0, num_shared), 3], self.last_id, **salts)
        fits = self.blocks.blocks_for(num_shared + 1) - num_shared // self.size <= self.available()
        copies = self.blocks.fork(parent, child, num_shared, num_shared + 1)
        assert (copies is not None) == fits
        if fits:
            assert len(copies) == (num_shared % self.size > 0)
            self.note(child, [])
            child.num_computed_tokens = num_shared
            self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.blocks.trim(sequence, sequence.num_tokens)
        self.model.tables[sequence.seq_id] = self.model.tables[sequence.seq_id][: -(-sequence.num_tokens // self.size)]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        held = [b for s in self.live if s is not sequence for b in self.model.tables[s.seq_id]]
        gone = set(self.model.tables[sequence.seq_id]) - set(held)
        assert self.blocks.num_reclaimable([sequence]) == len(gone)
        self.blocks.free(sequence)
        del self.model.tables[sequence.seq_id]
        self.live.remove(sequence)

    @invariant()
    def accounts_agree(self) -> None:
        self.blocks.check_integrity()
        assert self.blocks.num_used == 7 - self.available()
        assert {s.seq_id: s.block_table for s in self.live} == self.model.tables

    def teardown(self) -> None:
        for sequence in self.live:
            self.blocks.free(sequence)
        self.blocks.check_integrity()
        assert self.blocks.num_free + self.blocks.num_cached == 7


def test_random_lives_against_the_model(build: ModuleType) -> None:
    options = settings(max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(lambda: BlockMachine(build), settings=options)
