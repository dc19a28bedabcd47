"""Adaptive depth asks idle requests less often for proposals; one whose drafts pay must not draft fewer for it."""

from __future__ import annotations

import pytest
from fake_device import continued, make_request
from pipelined_world import PipelinedWorld
from random_world import priced
from world import World

from megatron_infer.scheduler import draft_depth
from megatron_infer.scheduler.draft_depth import NO_PROPOSAL, Proposal
from megatron_infer.scheduler.step_costs import StepCosts

COSTS = StepCosts(plain=[(1, 1e-4)], verifying=[(2, 1.05e-4), (64, 1.2e-4)])
WORLDS = {
    "one step at a time": lambda **size: World(**size),
    "overlap": lambda **size: World(**size, overlap=True),
    "two stages": lambda **size: PipelinedWorld(**size, num_micro_batches=2),
    "four stages": lambda **size: PipelinedWorld(**size, num_micro_batches=4),
}


class RightForOne:
    """Three tokens of request "x" from its `first`th on, all right; nothing for others."""

    def __init__(self, first: int) -> None:
        self._first = first

    def propose(self, request, most: int) -> Proposal:
        length = len(request.tokens)
        if request.id != "x" or length - request.prompt_len < self._first:
            return NO_PROPOSAL
        return Proposal(continued(request.tokens, 3, 0)[length:], "copy", 12)


def play(kind: str, first: int) -> tuple[int, int]:
    """(drafts, steps) of three requests of which one copies."""
    world = WORLDS[kind](num_blocks=120, block_size=8, num_rows=4, max_tokens=64)
    world.proposer, world.depth = RightForOne(first), lambda: priced(COSTS)
    world.build()
    for name, start in (("y", 40), ("z", 60), ("x", 10)):
        world.add(make_request(name, [start + i for i in range(5)], 120, stop_ids=frozenset()))
    while any(request.finish_reason is None for request in world.requests if request.id == "x"):
        world.step()
    found = world.drafts.stats.num_drafted, world.steps
    world.drain()
    return found


@pytest.mark.parametrize("first", [0, 24], ids=["at once", "later"])
@pytest.mark.parametrize("kind", WORLDS)
def test_a_request_whose_drafts_pay_drafts_beside_others_that_rest(kind, first, monkeypatch):
    drafted, steps = play(kind, first)
    monkeypatch.setattr(draft_depth, "IDLE_STEPS", 10**9)
    drafted_without, steps_without = play(kind, first)
    assert drafted_without > 30
    assert drafted >= 0.8 * drafted_without and steps <= 1.3 * steps_without, (drafted, drafted_without, steps)
