"""Rows, blocks and the prefix cache, one promise at a time."""

from __future__ import annotations

import pytest
from fake_device import replace_digests

from megatron_infer.scheduler.context.block_digest import DIGEST_SIZE, adapted, digest_of, preimage_of, root_of, salted
from megatron_infer.scheduler.context.block_pool import BlockPool
from megatron_infer.scheduler.context.build_context import build_context
from megatron_infer.scheduler.context.copies import Copy, CopyKind
from megatron_infer.scheduler.context.row_pool import RowPool

ROOT = root_of(model="m")
OTHER = root_of(model="m", weight_version=1)


def make(num_blocks=8, block_size=4, num_rows=4, prefix_caching=True, keep_cached=True):
    return build_context(
        num_blocks=num_blocks,
        block_size=block_size,
        num_rows=num_rows,
        max_blocks_per_row=num_blocks,
        prefix_caching=prefix_caching,
        keep_cached=keep_cached,
    )


def compute(context, tokens, root=ROOT):
    """A lease whose tokens are all computed and published."""
    lease = context.admit(tokens, root=root)
    assert context.extend(lease, len(tokens))
    context.publish_computed(lease, tokens, len(tokens))
    context.check()
    return lease


def chain(prev, tokens):
    return digest_of(preimage_of(prev, tokens))


def test_root_differs_in_each_part_and_borders_count():
    roots = [
        root_of(model="a"),
        adapted(root_of(model="a"), "x", "1"),
        adapted(root_of(model="a"), "x", "2"),
        adapted(root_of(model="a"), "y", "1"),
        root_of(model="a", weight_version=1),
        root_of(model="ax"),
        salted(root_of(model="a"), ""),
        salted(root_of(model="a"), "x"),
        salted(root_of(model="a', 'x"), "x"),
        salted(root_of(model="a"), "x', 'x"),
    ]
    assert len(set(roots)) == len(roots)
    assert root_of(model="a") == root_of(model="a")
    assert min(map(len, roots)) > len(chain(ROOT, [1])), "a root could be taken for a digest"


def test_digest_depends_on_everything_before():
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
    context.publish_computed(lease, list(range(1, 10)), 9)
    context.release(lease)
    assert context.admit(list(range(1, 12)), root=ROOT).cached == 8


def test_admission_may_ignore_the_cache():
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
                preimage = preimage_of(digest, tokens[start : start + 4])
                digest = digest_of(preimage)
                if context.pool.lookup(digest, preimage) is None:
                    break
                hit += 1
            hits.append(hit)
        assert sum(hits) == context.pool.num_cached, "a cached block without its parent"
        cached.append(tuple(hits))
    assert cached == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]


def test_content_computed_twice_is_kept_once():
    context = make()
    tokens = list(range(9))
    first, second = context.admit(tokens, root=ROOT), context.admit(tokens, root=ROOT)
    context.extend(first, 9)
    context.extend(second, 9)
    own = list(second.blocks)
    context.take_table_writes()
    context.publish_computed(first, tokens, 9)
    context.publish_computed(second, tokens, 9)
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
    child, (copy,) = context.fork(lease, 10)
    assert child.blocks[:2] == lease.blocks[:2] and child.cached == 10
    assert copy == Copy(CopyKind.BLOCK, lease.blocks[2], child.blocks[2]) and copy.source != copy.destination
    assert [context.pool.refs(block) for block in child.blocks] == [2, 2, 1]
    assert context.take_table_writes() == [(child.row, column, block) for column, block in enumerate(child.blocks)]
    context.check()


def test_fork_at_a_block_border_copies_nothing():
    context = make()
    child, copies = context.fork(compute(context, range(8)), 8)
    assert copies == [] and child.capacity == 8


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


def test_fork_follows_its_parent_to_content_another_block_has():
    context = make(num_rows=5)
    tokens = list(range(10))
    lease = context.admit(tokens, root=ROOT)
    context.extend(lease, 10)
    first = compute(context, tokens)  # publishes what `lease` computes too
    child, _ = context.fork(lease, 10)
    assert child.digests == [] and child.blocks[:2] == lease.blocks[:2] != first.blocks[:2]
    for member in (lease, child):
        context.publish_computed(member, tokens, 10)
    context.check()
    assert child.blocks[:2] == lease.blocks[:2] == first.blocks[:2]
    assert child.digests == lease.digests and len(child.digests) == 2


def test_publishing_unknown_tokens_is_caught():
    context = make()
    lease = context.admit([1, 2], root=ROOT)
    context.extend(lease, 4)
    with pytest.raises(AssertionError, match="4 tokens computed, 2 known"):
        context.publish_computed(lease, [1, 2], 4)


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
    slots = RowPool(1)
    with pytest.raises(AssertionError, match="is free"):
        slots.release(0)


def test_check_finds_a_lost_reference():
    context = make()
    lease = compute(context, range(5))
    context.pool.share(lease.blocks[0])
    with pytest.raises(AssertionError, match="references held"):
        context.check()


# ------------------------------------------------------------------ content decides, digests only find


@pytest.fixture
def one_digest(monkeypatch):
    """Every block has the same digest."""
    replace_digests(monkeypatch, lambda preimage: bytes(DIGEST_SIZE))


def test_collision_is_a_miss_and_the_later_lease_publishes_no_more(one_digest):
    context = make()
    first = compute(context, [1, 2, 3, 4, 5])
    assert context.admit([6, 7, 8, 9, 5], root=ROOT).cached == 0, "same digest, other tokens"
    second = context.admit([6, 7, 8, 9, 5], root=ROOT)
    context.extend(second, 5)
    context.publish_computed(second, [6, 7, 8, 9, 5], 5)
    assert not second.publishes and second.digests == [] and second.blocks[0] != first.blocks[0]
    assert context.admit([1, 2, 3, 4, 5], root=ROOT).cached == 4, "the first content is still found"
    context.check()


def test_collision_with_the_own_predecessor_publishes_no_more(one_digest):
    context = make()
    lease = compute(context, [1, 2, 3, 4, 1, 2, 3, 4, 5])
    assert len(lease.digests) == 1 and not lease.publishes
    assert context.admit([1, 2, 3, 4, 1, 2, 3, 4, 5], root=ROOT).cached == 4
    context.check()


def test_collision_ends_the_chain_of_a_planned_chunk_too(one_digest):
    context = make()
    compute(context, [1, 2, 3, 4, 5])
    lease = context.admit([6, 7, 8, 9, 5], root=ROOT)
    context.extend(lease, 5)
    context.publish_planned(lease, [6, 7, 8, 9, 5], 5)
    assert not lease.publishes and context.admit([6, 7, 8, 9, 5], root=ROOT).cached == 0


def test_after_a_reset_a_lease_publishes_nothing_that_hangs_on_forgotten_digests():
    context = make()
    tokens = list(range(9))
    lease = compute(context, tokens[:5])
    context.extend(lease, 9)
    context.forget_all()
    context.publish_computed(lease, tokens, 9)
    context.publish_planned(lease, tokens, 9)
    assert context.pool.contents() == {} and not lease.publishes
    context.check()


def test_root_that_could_be_a_digest_is_refused():
    with pytest.raises(AssertionError, match="taken for a digest"):
        make().admit([1], root=bytes(DIGEST_SIZE))


# ------------------------------------------------------------------ planned blocks, late hits


def test_planned_blocks_are_found_before_they_are_computed():
    context = make()
    lease = context.admit(range(12), root=ROOT)
    context.extend(lease, 12)
    context.publish_planned(lease, range(12), 7)
    assert context.admit(range(12), root=ROOT).cached == 4
    context.publish_planned(lease, range(12), 12)
    other = context.admit(range(13), root=ROOT)
    assert other.blocks == lease.blocks and other.cached == 12
    context.check()


def test_planned_content_that_another_block_has_is_moved_at_the_commit_only():
    context = make()
    tokens = list(range(12))
    first = compute(context, tokens[:8])
    second = context.admit(tokens, root=ROOT, use_cache=False)
    context.extend(second, 12)
    own = list(second.blocks)
    context.publish_planned(second, tokens, 12)
    assert second.blocks == own and second.digests == [], "its step writes to its own blocks"
    context.publish_computed(second, tokens, 12)
    assert second.blocks == [*first.blocks, own[2]] and len(second.digests) == 3
    context.check()


@pytest.mark.parametrize("planned", [4, 6])
def test_catching_up_takes_published_blocks_and_leaves_the_last_token(planned):
    context = make()
    tokens = list(range(12))
    late = context.admit(tokens, root=ROOT)
    context.extend(late, 12)
    context.publish_planned(late, tokens, planned)
    own = list(late.blocks)
    first = compute(context, tokens)
    context.take_table_writes()
    free = context.num_free_blocks
    assert context.catch_up(late, tokens, planned) == 8
    assert late.blocks == [own[0], first.blocks[1], own[2]] and first.blocks[0] == own[0]
    assert context.take_table_writes() == [(late.row, 1, first.blocks[1])]
    assert context.num_free_blocks == free + 1
    assert context.catch_up(late, tokens, 8) == 8, "the third block holds the last token"
    context.check()


def test_catching_up_moves_to_a_block_that_was_planned_twice():
    context = make()
    tokens = list(range(16))
    first = compute(context, tokens[:5])
    late = context.admit(tokens, root=ROOT, use_cache=False)
    context.extend(late, 16)
    context.publish_planned(late, tokens, 10)
    assert context.catch_up(late, tokens, 10) == 10
    assert late.blocks[0] == first.blocks[0] and len(late.digests) == 1
    context.publish_planned(late, tokens, 16)
    assert len(late.digests) == 4, "its chain continues"
    context.check()


def test_nothing_to_catch_up_changes_nothing():
    context = make()
    lease = context.admit(range(12), root=ROOT)
    context.extend(lease, 12)
    context.take_table_writes()
    assert context.catch_up(lease, range(12), 0) == 0 and context.take_table_writes() == []
    compute(context, range(12))
    lease.publishes = False
    assert context.catch_up(lease, range(12), 0) == 0


def test_check_finds_an_orphan_and_a_lease_without_what_it_published():
    context = make()
    lease = compute(context, range(12))
    context.pool._forget(lease.blocks[0])
    with pytest.raises(AssertionError, match="the blocks they follow are not"):
        context.check()
    context = make()
    lease = compute(context, range(12))
    other = context.admit([50], root=ROOT)
    context.extend(other, 4)
    lease.blocks[0], other.blocks[0] = other.blocks[0], lease.blocks[0]
    with pytest.raises(AssertionError, match="its digests name other blocks"):
        context.check()
