"""A world whose device is a pipeline: several steps are in flight, and their tokens are unknown until the commit."""

from __future__ import annotations

import random
from dataclasses import dataclass

from fake_device import sampled_ends
from world import World

from megatron_infer.scheduler.request import FinishReason, Status


@dataclass
class PipelinedWorld(World):
    """A drawn token is missing from the device's row until its step is committed: a step that reads it before fails."""

    num_micro_batches: int = 2

    @property
    def scheduling(self):
        return {"num_micro_batches": self.num_micro_batches}

    @property
    def ahead(self):
        return self.num_micro_batches - 1

    def launch(self, plan):
        self.check_shares(plan)
        super().launch(plan)
        for place, token in self._places(plan, self.in_flight_steps[-1][1]):
            row, at = place
            assert self.device.rows[row][at] == token
            self.device.rows[row][at] = None

    def commit_oldest(self):
        plan, tokens, *_ = self.in_flight_steps[0]
        for (row, at), token in self._places(plan, tokens):
            self.device.rows[row][at] = token
        super().commit_oldest()

    def _places(self, plan, tokens):
        """((row, position), token) of what a step drew."""
        rows = [request.lease.row for request in plan.sampled]
        return list(zip(zip(rows, sampled_ends(plan), strict=True), tokens, strict=True))

    def check_shares(self, plan):
        """No request decodes while its token is in flight, and no micro-batch decodes more than its share."""
        assert len(self.in_flight_steps) < self.num_micro_batches, "too many steps in flight"
        drawing = {request for launched, *_ in self.in_flight_steps for request in launched.sampled}
        assert drawing.isdisjoint(plan.sampled), "a request whose token is in flight was planned again"
        assert drawing.isdisjoint(chunk.request for chunk in plan.prefill)
        known = {r for r in self.scheduler.admitted_requests.decoding if r not in plan.sampled} | set(plan.decode)
        assert len(plan.decode) <= -(-len(known) // self.num_micro_batches)

    def fail_flights(self):
        """The oldest step in flight failed on a stage: its requests end, later steps are undone."""
        plans, self.in_flight_steps = [flight[0] for flight in self.in_flight_steps], []
        before = self._scheduled()
        self.scheduler.cancel(*plans)
        self.account.restart(before)
        for request in {*plans[0].sampled, *(chunk.request for chunk in plans[0].prefill)}:
            if request.status is not Status.FINISHED:
                self.scheduler.finish(request, FinishReason.ERROR)
        self.check()


def pipelined(world: World, rng: random.Random) -> PipelinedWorld:
    """The same world with several steps in flight."""
    names = (
        "num_blocks", "block_size", "num_rows", "max_tokens", "chunked", "paused_limit", "caching", "keep_cached",
        "swap", "num_cached_states",
    )  # fmt: skip
    return PipelinedWorld(**{name: getattr(world, name) for name in names}, num_micro_batches=rng.randint(2, 5))
