"""Swaps: host slots add up, content is held once, each swap is all or nothing."""

from __future__ import annotations

import pytest

from megatron_infer.scheduler.context.build_context import build_context
from megatron_infer.scheduler.context.copies import Copy, CopyKind

ROOT = b"root"
SIZE = 4


def make(num_blocks=8, num_host_slots=8, num_rows=4, caching=False, keep_cached=False, num_host_states=0):
    return build_context(
        num_blocks=num_blocks,
        block_size=SIZE,
        num_rows=num_rows,
        max_blocks_per_row=num_blocks,
        prefix_caching=caching,
        keep_cached=keep_cached,
        num_host_slots=num_host_slots,
        recurrent=num_host_states > 0,
        num_host_states=num_host_states,
    )


def lease_of(context, tokens):
    """A lease on `tokens`, all of them computed and published."""
    lease = context.admit(tokens, root=ROOT)
    assert lease is not None and context.extend(lease, len(tokens))
    context.publish_computed(lease, tokens, len(tokens))
    return lease


def num_free(context):
    """(blocks, rows, host slots), all checked."""
    context.check()
    return context.num_free_blocks, context.num_free_rows, context.swap.num_free


def test_swapped_blocks_come_back_column_by_column():
    context = make()
    lease = lease_of(context, range(10))
    blocks = list(lease.blocks)
    swapped = context.swap_out(lease, 10)
    assert num_free(context) == (8, 4, 5)
    out = [Copy(CopyKind.BLOCK_OUT, block, slot) for block, slot in zip(blocks, swapped.slots, strict=True)]
    assert list(context.take_copies()) == out
    back = context.swap_in(swapped, capacity=13)
    assert (back.cached, back.capacity, back.root, len(back.blocks)) == (10, 16, ROOT, 4)
    assert list(context.take_copies()) == [Copy(CopyKind.BLOCK_IN, swapped.slots[i], back.blocks[i]) for i in range(3)]
    assert num_free(context) == (4, 3, 8)
    assert [write[2] for write in context.take_table_writes() if write[0] == back.row][-4:] == back.blocks


def test_swap_out_to_a_full_host_changes_nothing():
    context = make(num_host_slots=2)
    lease = lease_of(context, range(10))
    before = num_free(context)
    assert context.swap_out(lease, 10) is None
    assert num_free(context) == before and context.take_copies() == ()
    assert make(num_host_slots=0).swap_out(lease, 10) is None


@pytest.mark.parametrize("lacking", ["blocks", "row", "headroom"])
def test_swap_in_is_all_or_nothing(lacking):
    context = make(num_rows=2, caching=True, keep_cached=True)
    swapped = context.swap_out(lease_of(context, range(12)), 12)
    context.take_copies()
    lease_of(context, range(100, 124 if lacking == "blocks" else 104))
    if lacking == "row":
        lease_of(context, range(200, 204))
    before = num_free(context)
    assert context.swap_in(swapped, capacity=13, headroom=4 if lacking == "headroom" else 0) is None
    assert num_free(context) == before and context.take_copies() == ()


def test_content_that_is_on_the_host_already_is_held_once():
    context = make(caching=True, num_host_slots=4)
    first, second = lease_of(context, range(9)), lease_of(context, [*range(8), 77])
    shared = first.blocks[:2]
    assert second.blocks[:2] == shared
    one = context.swap_out(first, 9)
    assert context.swap.num_free == 1 and context.swap.has_room(second, 9)
    other = lease_of(context, [*range(4), 50, 51, 52, 53, 54])
    assert not context.swap.has_room(other, 9), "two blocks would be new"
    context.release(other)
    two = context.swap_out(second, 9)
    assert two.slots[:2] == one.slots[:2] and two.slots[2] != one.slots[2]
    assert len(context.take_copies()) == 4 and num_free(context) == (8, 4, 0)
    context.swap.drop(one)
    assert num_free(context)[2] == 1, "its own tail only: the other still needs the rest"
    back = context.swap_in(two, capacity=10)
    assert len(context.take_copies()) == 3 and len(back.blocks) == 3
    assert num_free(context)[2] == 4


def test_blocks_still_published_on_the_device_are_shared_and_not_copied():
    context = make(caching=True, keep_cached=True)
    lease = lease_of(context, range(10))
    blocks = list(lease.blocks)
    swapped = context.swap_out(lease, 10)
    context.take_copies()
    back = context.swap_in(swapped, capacity=11)
    assert back.blocks[:2] == blocks[:2] and len(back.digests) == 2
    assert [copy.kind for copy in context.take_copies()] == [CopyKind.BLOCK_IN], "the tail is not published"
    num_free(context)


def test_swapped_in_blocks_are_published_by_the_next_commit_and_not_before():
    context = make(caching=True)
    tokens = list(range(9))
    swapped = context.swap_out(lease_of(context, tokens), 9)
    back = context.swap_in(swapped, capacity=10)
    assert back.digests == []
    early = context.admit([*tokens, 1], root=ROOT)
    assert early.cached == 0, "content that has not arrived was found"
    context.release(early)
    context.publish_computed(back, tokens, 9)
    late = context.admit([*tokens, 1], root=ROOT)
    assert late.cached == 8
    context.check()


def test_without_a_place_for_its_state_nothing_is_swapped_out():
    """Whether the host has blocks to spare, or only because it holds their content already."""
    for num_host_slots in (8, 3):
        context = make(num_host_slots=num_host_slots, caching=True, num_host_states=1)
        first, second = lease_of(context, range(8)), lease_of(context, range(8))
        assert context.swap.has_room(first, 8)
        swapped = context.swap_out(first, 8)
        before = num_free(context)
        context.take_copies()
        assert not context.swap.has_room(second, 8) and context.swap_out(second, 8) is None
        assert num_free(context) == before and context.take_copies() == ()
        context.swap.drop(swapped)
        assert context.swap.has_room(second, 8) and context.swap_out(second, 8) is not None


def test_freed_places_of_states_are_reported_once_and_only_while_they_are_free():
    context = make(num_host_states=1)
    swapped = context.swap_out(lease_of(context, range(4)), 4)
    assert context.swap.take_freed() == (set(), set())
    back = context.swap_in(swapped, capacity=5)
    swapped = context.swap_out(back, 4)
    assert context.swap.take_freed()[1] == set(), "the place is taken again: its memory must stay"
    kinds = [copy.kind for copy in context.take_copies() if "STATE" in copy.kind.name]
    assert kinds == [CopyKind.STATE_OUT, CopyKind.STATE_IN, CopyKind.STATE_OUT]
    context.swap.drop(swapped)
    assert context.swap.take_freed()[1] == {0} and context.swap.take_freed()[1] == set()
    num_free(context)


def test_check_finds_a_lost_host_slot():
    context = make()
    swapped = context.swap_out(lease_of(context, range(8)), 8)
    swapped.slots.pop()
    with pytest.raises(AssertionError, match="8 tokens in slots"):
        context.check()
