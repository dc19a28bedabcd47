"""A world whose device is a pipeline: several steps in flight, and tokens on their way are known to nobody."""

from __future__ import annotations

import random
from dataclasses import dataclass

from fake_device import World

from megatron_infer.scheduler.request import FinishReason, Status


@dataclass
class PipelinedWorld(World):
    """A drawn token leaves the device's row until its step is committed: who counts on it before meets a hole."""

    groups: int = 2

    @property
    def scheduling(self):
        return {"num_micro_batches": self.groups}

    @property
    def ahead(self):
        return self.groups - 1

    def launch(self, plan):
        self.check_shares(plan)
        super().launch(plan)
        for place, token in self._places(plan, self.flights[-1][1]):
            row, at = place
            assert self.device.rows[row][at] == token
            self.device.rows[row][at] = None

    def commit_oldest(self):
        plan, tokens, *_ = self.flights[0]
        for (row, at), token in self._places(plan, tokens):
            self.device.rows[row][at] = token
        super().commit_oldest()

    def _places(self, plan, tokens):
        """((row, position), token) of what a step drew."""
        ends = [start + 1 for start in plan.decode_starts]
        for piece in plan.prefill:
            ends += [piece.start + piece.n] * (piece.samples * (1 + len(piece.forks)))
        rows = [request.lease.row for request in plan.sampled]
        return list(zip(zip(rows, ends, strict=True), tokens, strict=True))

    def check_shares(self, plan):
        """Nobody decodes whose token is in flight, and no micro-batch decodes more than its share."""
        assert len(self.flights) < self.groups, f"{len(self.flights)} steps in flight before this one"
        drawing = {request for flying, *_ in self.flights for request in flying.sampled}
        assert drawing.isdisjoint(plan.sampled), "a request whose token is in flight was planned again"
        assert drawing.isdisjoint(piece.request for piece in plan.prefill)
        known = {r for r in self.scheduler.running_set.decoding if r not in plan.sampled} | set(plan.decode)
        assert len(plan.decode) <= -(-len(known) // self.groups)

    def fail_flights(self):
        """The oldest step in flight failed on some stage: its requests end, later steps are undone."""
        plans, self.flights = [flight[0] for flight in self.flights], []
        before = self._scheduled()
        self.scheduler.cancel(*plans)
        self.books.restart(before)
        for request in {*plans[0].sampled, *(piece.request for piece in plans[0].prefill)}:
            if request.status is not Status.FINISHED:
                self.scheduler.finish(request, FinishReason.ERROR)
        self.check()


def pipelined(world: World, rng: random.Random) -> PipelinedWorld:
    """The same world with several steps in flight."""
    names = (
        "num_blocks", "block_size", "num_rows", "max_tokens", "chunked", "paused_limit", "caching", "keep_cached",
        "swap", "num_cached_states",
    )  # fmt: skip
    return PipelinedWorld(**{name: getattr(world, name) for name in names}, groups=rng.randint(2, 5))
