"""Requests that come back with their keys and values, from another process: a lease first, then the lists."""

from __future__ import annotations

from bisect import insort

from megatron_infer.context.dynamic_context import DynamicInferenceContext
from megatron_infer.scheduler import policy
from megatron_infer.scheduler.request import Request, Status
from megatron_infer.scheduler.running_set import RunningSet
from megatron_infer.scheduler.waiting_queue import WaitingQueue, sort_key_of


def lease_for(
    context: DynamicInferenceContext, request: Request, computed: int, *, like: Request | None, num_shared: int
) -> bool:
    """Give `request` a row and blocks for what is computed of it, and for the rest of its prompt; all or nothing.

    Its first `num_shared` tokens, a whole number of blocks, are those of `like`, whose blocks it then shares.
    The lease publishes nothing: nobody here has computed what is in it.
    """
    if like is None:
        lease = context.admit(request.tokens, root=b"", use_cache=False)
    else:
        assert like.lease is not None and num_shared % context.block_size == 0, f"{num_shared} tokens shared"
        forked = context.fork(like.lease, num_shared)
        lease = None if forked is None else forked[0]
    if lease is None:
        return False
    request.scheduled = computed
    prefills = policy.is_prefill(request, leads=bool(request.siblings))
    if not context.extend(lease, len(request.tokens) if prefills else computed):
        context.release(lease)
        request.scheduled = 0
        return False
    request.lease = lease
    return True


def rejoin(queue: WaitingQueue, running_set: RunningSet, request: Request) -> None:
    """Let a request that has its lease and arrival go on: siblings that were not forked yet wait behind it."""
    queue.wait_behind(request)
    request.status = Status.RUNNING
    request.history.goes_on_with(running_set.version, first_token=request.num_output, computed=request.scheduled)
    prefills = policy.is_prefill(request, leads=queue.leads(request))
    insort(running_set.prefilling if prefills else running_set.decoding, request, key=sort_key_of)
