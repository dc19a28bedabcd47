"""The decode part of a step: one token for each request, or for each of a micro-batch's share."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from megatron_infer.context.dynamic_context import DynamicInferenceContext, Lease
from megatron_infer.scheduler import policy
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.running_set import RunningSet


class DecodePlanner:
    """Plans the next token of decoding requests; `Pressure` has seen to it that there is room for it."""

    def __init__(
        self, context: DynamicInferenceContext, running_set: RunningSet, *, num_micro_batches: int = 1
    ) -> None:
        self._context, self._running_set, self._num_groups = context, running_set, num_micro_batches

    def plan(self, most: int, *, num_in_flight: int) -> tuple[list[Request], list[int]]:
        """(requests, position of each one's query token), oldest first, at most so many.

        Of several micro-batches one takes its share, of those with nothing in flight: the token that the others count
        on is on its way through the pipeline. Nobody is left out for long: who is passed over is idle, everyone older
        is planned once in as many steps as there are groups, and their shares together are all.
        """
        decoding = self._running_set.decoding
        if self._num_groups == 1:
            return self._take(islice(decoding, most))
        idle = [request for request in decoding if not request.in_flight]
        share = policy.decode_share(
            len(decoding), len(idle), num_micro_batches=self._num_groups, num_in_flight=num_in_flight
        )
        return self._take(idle[: min(share, most)])

    def _take(self, requests: Iterable[Request]) -> tuple[list[Request], list[int]]:
        decode: list[Request] = []
        starts: list[int] = []
        take, take_start = decode.append, starts.append
        for request in requests:
            start = request.scheduled
            if start >= request.max_total - 1:
                continue  # its last token is in flight
            lease: Lease = request.lease  # type: ignore[assignment]
            if start >= lease.capacity:
                grown = self._context.extend(lease, start + 1)
                assert grown, f"{request.id!r} decodes without a block for its next token"
                self._context.keep_drawn_state(lease, start)
            request.scheduled = start + 1
            request.in_flight += 1
            take(request)
            take_start(start)
        return decode, starts
