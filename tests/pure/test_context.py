"""Blocks, rows and the prefix cache keep their promises one by one."""

from __future__ import annotations

import pytest

from megatron_infer.context.block_pool import BlockPool
from megatron_infer.context.context import DynamicInferenceContext
from megatron_infer.context.prefix import chain, root_digest
from megatron_infer.context.slots import SlotPool

ROOT = root_digest(model="m")
OTHER = root_digest(model="m", weight_version=1)


def make(num_blocks=8, block_size=4, num_rows=4, prefix_caching=True, keep_cached=True):
    return DynamicInferenceContext(
        num_blocks=num_blocks,
        block_size=block_size,
        num_rows=num_rows,
        max_blocks_per_row=num_blocks,
        prefix_caching=prefix_caching,
        keep_cached=keep_cached,
    )


def compute(context, tokens, root=ROOT):
    """A lease whose tokens are all computed and committed."""
    lease = context.admit(tokens, root=root)
    assert context.extend(lease, len(tokens))
    context.commit(lease, tokens, len(tokens))
    context.check()
    return lease


def test_root_differs_in_each_part_and_borders_count():
    roots = [
        root_digest(model="a"),
        root_digest(model="a", adapter="x"),
        root_digest(model="a", weight_version=1),
        root_digest(model="a", salt="x"),
        root_digest(model="ax"),
    ]
    assert len(set(roots)) == len(roots)
    assert root_digest(model="a") == root_digest(model="a")


def test_chain_depends_on_everything_before():
    assert chain(ROOT, [1, 2]) == chain(ROOT, (1, 2))
    assert chain(ROOT, [1, 2]) != chain(ROOT, [2, 1])
    assert chain(chain(ROOT, [1]), [2]) != chain(chain(ROOT, [3]), [2])
    assert chain(ROOT, [1]) != chain(OTHER, [1])


def test_last_token_is_never_served_from_the_cache():
    context = make()
    context.release(compute(context, range(8)))
    assert context.admit(range(8), root=ROOT).cached == 4
    assert context.admit(range(9), root=ROOT).cached == 8


def test_generated_blocks_are_found_as_part_of_a_later_prompt():
    context = make()
    lease = context.admit([1, 2], root=ROOT)
    context.extend(lease, 9)
    context.commit(lease, list(range(1, 10)), 9)
    context.release(lease)
    assert context.admit(list(range(1, 12)), root=ROOT).cached == 8


def test_partial_block_is_not_published():
    context = make()
    tokens = list(range(7))
    context.release(compute(context, tokens))
    assert context.pool.num_cached == 1


def test_other_root_never_hits():
    context = make()
    context.release(compute(context, range(9)))
    assert context.admit(range(9), root=OTHER).cached == 0


def test_admission_may_pass_the_cache_by():
    context = make()
    context.release(compute(context, range(9)))
    assert context.admit(range(9), root=ROOT, use_cache=False).cached == 0
    assert make(prefix_caching=False).admit(range(9), root=ROOT).cached == 0


def test_unreferenced_block_keeps_its_digest_with_lru_and_loses_it_with_ref_zero():
    for keep_cached in (True, False):
        context = make(keep_cached=keep_cached)
        lease = compute(context, range(9))
        assert context.admit(range(9), root=ROOT).cached == 8, "shared while referenced"
        context.release(lease)
        assert context.admit(range(9), root=ROOT).cached == 8, "the other lease still refers to it"
        context = make(keep_cached=keep_cached)
        context.release(compute(context, range(9)))
        assert context.admit(range(9), root=ROOT).cached == (8 if keep_cached else 0)
        assert context.num_free_blocks == (6 if keep_cached else 8)


def test_cached_blocks_are_reclaimed_oldest_first_and_children_before_parents():
    context = make(num_blocks=6)
    context.release(compute(context, range(100, 108)))
    context.release(compute(context, range(200, 212)))
    assert context.pool.num_cached == 5
    lease = context.admit([0], root=ROOT)
    cached = []
    for blocks in range(1, 7):
        context.extend(lease, blocks * 4)
        hits = []
        for tokens in (range(100, 109), range(200, 213)):
            digest, hit = ROOT, 0
            for start in range(0, len(tokens) - 4, 4):
                digest = chain(digest, tokens[start : start + 4])
                if context.pool.lookup(digest) is None:
                    break
                hit += 1
            hits.append(hit)
        assert sum(hits) == context.pool.num_cached, "a cached block without its parent"
        cached.append(tuple(hits))
    assert cached == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]


def test_hit_keeps_a_block_from_being_reclaimed():
    context = make(num_blocks=4)
    context.release(compute(context, range(8)))
    lease = context.admit(range(9), root=ROOT)
    assert context.num_free_blocks == 2
    other = context.admit([1], root=ROOT)
    assert not context.extend(other, 12)
    assert context.extend(other, 8)
    assert [context.pool.refs(block) for block in lease.blocks] == [1, 1]
    context.check()


def test_content_computed_twice_is_kept_once():
    context = make()
    tokens = list(range(9))
    first, second = context.admit(tokens, root=ROOT), context.admit(tokens, root=ROOT)
    context.extend(first, 9)
    context.extend(second, 9)
    own = list(second.blocks)
    context.take_table_writes()
    context.commit(first, tokens, 9)
    context.commit(second, tokens, 9)
    context.check()
    assert second.blocks == [*first.blocks[:2], own[2]]
    assert context.take_table_writes() == [(second.row, 0, first.blocks[0]), (second.row, 1, first.blocks[1])]
    assert context.num_free_blocks == 8 - 4


def test_extend_takes_all_or_nothing_and_reports_every_block():
    context = make(num_blocks=3)
    lease = context.admit([1], root=ROOT)
    assert not context.extend(lease, 13)
    assert (lease.blocks, lease.capacity, context.num_free_blocks) == ([], 0, 3)
    assert context.extend(lease, 5) and context.extend(lease, 8) and lease.capacity == 8
    assert context.take_table_writes() == [(lease.row, 0, lease.blocks[0]), (lease.row, 1, lease.blocks[1])]
    assert context.take_table_writes() == []


def test_fork_shares_full_blocks_and_copies_the_tail():
    context = make()
    lease = compute(context, range(10))
    context.take_table_writes()
    child, copy = context.fork(lease, 10)
    assert child.blocks[:2] == lease.blocks[:2] and child.cached == 10
    assert copy == (lease.blocks[2], child.blocks[2]) and copy[0] != copy[1]
    assert [context.pool.refs(block) for block in child.blocks] == [2, 2, 1]
    assert context.take_table_writes() == [(child.row, column, block) for column, block in enumerate(child.blocks)]
    context.check()


def test_fork_at_a_block_border_copies_nothing():
    context = make()
    child, copy = context.fork(compute(context, range(8)), 8)
    assert copy is None and child.capacity == 8


@pytest.mark.parametrize("lacking", ["row", "block"])
def test_fork_without_room_changes_nothing(lacking):
    context = make(num_rows=1 if lacking == "row" else 4, num_blocks=3 if lacking == "block" else 8)
    lease = compute(context, range(10))
    free = context.num_free_blocks, context.num_free_rows
    context.take_table_writes()
    assert context.fork(lease, 10) is None
    assert (context.num_free_blocks, context.num_free_rows) == free
    assert context.take_table_writes() == []
    context.check()


def test_fork_learns_digests_from_its_parent():
    context = make()
    tokens = list(range(10))
    lease = context.admit(tokens, root=ROOT)
    context.extend(lease, 10)
    child, _ = context.fork(lease, 10)
    assert child.digests == []
    context.commit(lease, tokens, 10)
    context.commit_fork(child, lease)
    assert child.digests == lease.digests and len(child.digests) == 2


def test_no_row_no_lease():
    context = make(num_rows=1)
    lease = context.admit([1], root=ROOT)
    assert context.admit([1], root=ROOT) is None
    context.release(lease)
    assert context.admit([1], root=ROOT) is not None


def test_forget_all_drops_what_was_cached():
    context = make()
    held = compute(context, range(9))
    context.release(compute(context, range(50, 59)))
    context.forget_all()
    assert context.admit(range(9), root=ROOT).cached == 0
    assert context.admit(range(50, 59), root=ROOT).cached == 0
    context.release(held)
    context.check()


def test_commit_of_unknown_tokens_is_caught():
    context = make()
    lease = context.admit([1, 2], root=ROOT)
    context.extend(lease, 4)
    with pytest.raises(AssertionError, match="4 tokens computed, 2 known"):
        context.commit(lease, [1, 2], 4)


def test_repeated_table_writes_describe_every_lease():
    context = make()
    leases = [compute(context, range(i, i + 9)) for i in (0, 50)]
    context.take_table_writes()
    context.repeat_table_writes()
    expected = [(lease.row, column, block) for lease in leases for column, block in enumerate(lease.blocks)]
    assert context.take_table_writes() == expected


def test_release_and_unref_once_too_often_are_caught():
    context = make()
    lease = compute(context, range(5))
    context.release(lease)
    with pytest.raises(AssertionError, match="not held"):
        context.release(lease)
    pool = BlockPool(2, keep_cached=False)
    (block,) = pool.alloc(1)
    pool.unref(block)
    with pytest.raises(AssertionError, match="once too often"):
        pool.unref(block)
    with pytest.raises(AssertionError, match="3 blocks, 2 are free"):
        pool.alloc(3)
    slots = SlotPool(1)
    with pytest.raises(AssertionError, match="is free"):
        slots.give_back(0)


def test_check_finds_a_lost_reference():
    context = make()
    lease = compute(context, range(5))
    context.pool.share(lease.blocks[0])
    with pytest.raises(AssertionError, match="references held"):
        context.check()
