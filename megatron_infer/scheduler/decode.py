"""The decode part of a step: one token for each request, or for each of a micro-batch's share."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from megatron_infer.scheduler import policy
from megatron_infer.scheduler.admitted_requests import AdmittedRequests
from megatron_infer.scheduler.context.dynamic_context import DynamicInferenceContext
from megatron_infer.scheduler.context.leases import Lease
from megatron_infer.scheduler.request import Request


class DecodePlanner:
    """Plans the next token of decoding requests; `PreemptionPolicy` has ensured that there is room for it."""

    def __init__(
        self, context: DynamicInferenceContext, admitted_requests: AdmittedRequests, *, num_micro_batches: int
    ) -> None:
        self._context = context
        self._admitted_requests = admitted_requests
        self._num_micro_batches = num_micro_batches

    def plan(
        self, most: int, *, num_in_flight: int, among: Collection[Request] | None = None
    ) -> tuple[list[Request], list[int]]:
        """(requests, position of each one's query token), oldest first, at most `most`. among: None: of all.

        One of several micro-batches takes its share of the requests with nothing in flight: the token that the others
        need is still in the pipeline. No request is left out for long: one that is passed over is idle, each older one
        is planned once in as many steps as there are micro-batches, and their shares together are all requests.
        """
        decoding = chosen = self._admitted_requests.decoding
        if among is not None:
            decoding = chosen = [request for request in decoding if request in among]
        if self._num_micro_batches > 1:
            chosen = [request for request in decoding if not request.in_flight]
            share = policy.decode_share(
                len(decoding), len(chosen), num_micro_batches=self._num_micro_batches, num_in_flight=num_in_flight
            )
            most = min(share, most)
        decode: list[Request] = []
        starts: list[int] = []
        take, take_start, states = decode.append, starts.append, self._context.states
        for request in islice(chosen, most):
            start = request.scheduled
            if start >= request.max_total - 1:
                continue  # its last token is in flight
            lease: Lease = request.lease  # type: ignore[assignment]
            if start >= lease.capacity:
                grown = self._context.extend(lease, start + 1)
                assert grown, f"{request.id!r} decodes without a block for its next token"
                if states is not None:
                    states.keep_decoded(lease, start)
            request.scheduled = start + 1
            request.in_flight += 1
            take(request)
            take_start(start)
        return decode, starts
