"""How much of a prompt a step computes, when a request is admitted, what an eviction costs: plain functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_infer.scheduler.request import Request

MAX_OVERTAKEN = 32
"""Younger requests that may be admitted past a request that does not fit yet; after that all of them wait for it."""

LOOKAHEAD = 8
"""Waiting requests that do not fit which one step looks past: bounds the host work of a step with a long queue."""

PATIENCE_STEPS = 32
"""This many steps of being paused raise the price of evicting a request as much as one earlier eviction does."""


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens. Example: 45 tokens in blocks of 16 -> 3."""
    return -(-num_tokens // block_size)


def stored_tokens(max_total: int) -> int:
    """Tokens whose keys and values are ever kept: all but the last drawn one, which is never a query."""
    return max_total - 1


def chunk_size(remaining: int, left: int, *, max_tokens: int, chunked: bool) -> int:
    """Tokens of a prompt to compute in this step, `remaining` of it being left; 0: it waits for a later step.

    left: what the step has left of its budget of `max_tokens`. Without chunking a prompt is computed whole;
    one that is larger than any step (recomputed with its output after an eviction) is chunked all the same.
    """
    if remaining <= left:
        return remaining
    return left if chunked or remaining > max_tokens else 0


MIN_SHARE_TOKENS = 64
"""Prompt tokens that one of several micro-batches takes at least: a forward of fewer takes as long."""

SHARES_PER_MICRO_BATCH = 2
"""Shares per micro-batch that waiting prompts are cut into. Some pipeline stages have nothing to do while the first and
the last share are computed: more shares waste less time and take more forwards."""


def decode_share(num_decoding: int, num_idle: int, *, num_micro_batches: int, num_in_flight: int) -> int:
    """Requests that the next of `num_micro_batches` decodes, `num_in_flight` others being in flight.

    Idle requests are divided over the micro-batches not in flight, within an even share of all requests, so that
    uneven micro-batches even out. Example: 7 in 3 of them, none in flight -> 3; then 4 idle, 1 in flight -> 2; then 2.
    """
    fewest, most = num_decoding // num_micro_batches, -(-num_decoding // num_micro_batches)
    return min(most, max(fewest, -(-num_idle // max(1, num_micro_batches - num_in_flight))))


def prompt_share(num_tokens: int, num_micro_batches: int) -> int:
    """Prompt tokens that one micro-batch takes of `num_tokens` that wait. Example: 1,000 tokens, 2 of them -> 250."""
    return max(MIN_SHARE_TOKENS, -(-num_tokens // (num_micro_batches * SHARES_PER_MICRO_BATCH)))


def admission_headroom(num_live: int, num_blocks: int) -> int:
    """Free blocks an admission must leave to `num_live` admitted requests, so that it does not evict at once.

    A running request takes a block every block_size steps; one block for every eighth of them, at most 1/16 of the
    pool, lets them continue for about two steps in block_size of 16 before one pauses. None live: 0, so that every
    request that fits the pool is admitted in the end.
    """
    return min(-(-num_live // 8), num_blocks // 16)


def is_prefill(request: Request, *, is_leader: bool) -> bool:
    """Whether it continues with a chunk: a prompt to its last token, a leader, or several known tokens to compute."""
    return is_leader or request.scheduled < request.prompt_len or len(request.tokens) - request.scheduled > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What it costs to get a sequence's memory back, as last measured; the defaults: an 8B model on one accelerator."""

    prefill_s_per_token: float = 5e-5
    """Seconds to compute one more prompt token (20,000 tokens a second)."""
    copy_s_per_block: float = 8e-5
    """Seconds to copy a block between device and host, one way (2 MiB at 25 GB/s)."""
    copy_s_per_state: float = 0.0
    """The same for a request's recurrent state; 0 for a model without."""

    def recompute_s(self, num_tokens: int) -> float:
        return num_tokens * self.prefill_s_per_token

    def swap_s(self, num_blocks: int) -> float:
        """Blocks and the one recurrent state, out and back in. Example: 3 blocks of 2 s, state of 1 s -> 14."""
        return 2 * (num_blocks * self.copy_s_per_block + self.copy_s_per_state)


def eviction_price(seconds: float, *, num_gained: int, num_evictions: int, steps_paused: int) -> float:
    """Price of one block: evicting a request that takes `seconds` to come back leaves `num_gained` blocks of use.

    It rises with every earlier eviction and with the time the request has been paused, so that the load spreads.
    Example: 0.8 s for 4 blocks is 0.2 s a block, and 0.4 s for the same request after one eviction.
    """
    return seconds / num_gained * (1 + num_evictions) * (1 + steps_paused / PATIENCE_STEPS)
