"""Long prompts of a rollout, each computed by all context-parallel engines for the one engine that draws from it.

    lengths of all engines' prompts ─▶ which to share ─▶ their ids ─▶ for each chunk of each:

    chunk               | 0 | 1 | 2 | 3 |     2 * engines equal parts
    engine 0 computes     0           3       every layer of its own tokens; in each layer all engines' keys and values
    engine 1 computes         1   2           are gathered into the blocks that every engine has for the prompt

Afterwards the engine that draws publishes its blocks: its requests find them in the prefix cache. The other engines
give theirs back. Nothing else of a rollout changes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch.distributed import ProcessGroup

from megatron_infer.config.inference import PrefixCachingEvictionPolicy
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.requests.input_processor import may_share
from megatron_infer.engine.states import EngineState
from megatron_infer.errors import ConfigError
from megatron_infer.kernels.base import AttentionBackend
from megatron_infer.models.context_parallel import positions_of
from megatron_infer.rl.prompts import GroupRequest
from megatron_infer.runner.parallel.gathered_attention import GatheredAttention
from megatron_infer.scheduler.context.block_digest import salted
from megatron_infer.scheduler.context.leases import Lease, find_published
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.step_plan import PrefillChunk, StepPlan

PROMPT = "prompt"
"""The value of `context_parallel` that shares long prompts."""
LEAST_TOKENS = 1024
"""So many tokens of a prompt that is alone in its call are worth sharing (measured)."""


class SharedPrefill:
    """Computes prompts together with the engines that context parallelism has next to this one."""

    def __init__(self, engine: DynamicInferenceEngine, ranks: RankGroup, leaders: Sequence[int]) -> None:
        """ranks: of all these engines. leaders: the leader of each rank's engine. Raises ConfigError for a model or an
        engine that cannot."""
        self._engine = engine
        self._ranks = ranks
        self._leaders = leaders
        if (reason := _why_not(engine)) is not None:
            raise ConfigError(
                f"context_parallel={PROMPT!r} {reason}; leave it out: each engine computes its own prompts"
            )
        assert engine.rank_group.groups.cp is not None
        self._group: ProcessGroup = engine.rank_group.groups.cp
        self._runner = engine.replay.runner
        self._context = engine.replay.context
        self._unit = 2 * self._group.size()

    def compute(self, requests: Sequence[GroupRequest]) -> None:
        """Share those of the engines' prompts that are worth it. Every rank calls it.

        requests: what this engine draws next, on its leader; none on its other ranks.
        """
        given, context = {(tuple(one.ids), one.salt): one for one in requests}, self._context
        own = list(given.values())
        can_run = self._engine.state is EngineState.RUNNING and context.num_free_rows > 0
        room = context.num_free_blocks * context.block_size if can_run else 0
        fits = sum(len(one.ids) for one in own) <= room  # else an earlier request takes the blocks of a later one
        lengths = [self._lengths_of(one, may_be_shared=fits) for one in own]
        report = json.dumps([room, self._engine.sizes.max_tokens, lengths])
        reports = [json.loads(text) for text in self._ranks.lockstep.gather("the long prompts of a rollout", report)]
        engines = sorted(set(self._leaders))
        lengths_of = [reports[self._leaders.index(leader)][2] for leader in engines]
        chosen = choose(lengths_of, room=min(room for room, *_ in reports))
        if not chosen:
            return
        mine = self._leaders[self._ranks.lockstep.rank]
        is_leader = self._engine.relay.is_leader
        wanted = [place for engine, place in chosen if engines[engine] == mine and is_leader]
        text = json.dumps([[own[place].ids, own[place].salt] for place in wanted])
        texts = self._ranks.lockstep.gather("the ids of long prompts", text)
        prompts = {leader: iter(json.loads(texts[self._leaders.index(leader)])) for leader in engines}
        chunk = min(max_tokens for _, max_tokens, _ in reports) // self._unit * self._unit
        self._engine.drain()
        with self._ranks.computing("a shared prompt"), self._engine.replay.inference(self._engine.loop):
            for engine, _ in chosen:
                ids, salt = next(prompts[engines[engine]])
                self._run(ids, salt, chunk=chunk, is_own=engines[engine] == mine)
        self._ranks.lockstep.phase = "a rollout"

    def _lengths_of(self, request: GroupRequest, *, may_be_shared: bool) -> tuple[int, int]:
        """See `choose`; what is left of a shared prompt after its whole blocks is not counted."""
        context, ids = self._context, request.ids
        root = salted(self._engine.weights.root, request.salt)
        lease = Lease(row=-1, blocks=[], capacity=0, cached=0, digests=[], root=root)  # never issued: changes nothing
        num_cached = len(find_published(context.pool, lease, ids, context.block_size)) * context.block_size
        may_be_shared = may_be_shared and may_share(request.params) and request.params.adapter is None
        num_shared = self._whole(len(ids)) if may_be_shared else 0
        return max(0, (num_shared or len(ids)) - num_cached), num_shared

    def _whole(self, num_ids: int) -> int:
        """Tokens that are computed together: whole blocks without the last token, in equal parts."""
        size = self._context.block_size
        return (num_ids - 1) // size * size // self._unit * self._unit

    def _run(self, ids: list[int], salt: str, *, chunk: int, is_own: bool) -> None:
        """Compute a prompt, `chunk` positions at a time. is_own: this engine draws from it."""
        context, length = self._context, self._whole(len(ids))
        lease = context.admit(ids, root=salted(self._engine.weights.root, salt), use_cache=False)
        assert lease is not None, "no row is free"
        request = Request(
            id="a shared prompt",
            tokens=ids,
            prompt_len=len(ids),
            params=SamplingParams(),
            max_total=len(ids),
            seed=0,
            lease=lease,
        )
        try:
            fits = context.extend(lease, length)
            assert fits, f"{length} tokens, {context.num_free_blocks} free blocks"
            for start in range(0, length, chunk):
                self._compute(request, start, min(chunk, length - start))
            if is_own:
                context.publish_computed(lease, ids, length)
        except BaseException:
            context.repeat_table_writes()  # the step may have lost those that it took
            raise
        finally:
            context.release(lease)

    @torch.inference_mode()
    def _compute(self, request: Request, start: int, num_tokens: int) -> None:
        """This engine's part of a chunk of `num_tokens` positions."""
        rank, size, builder = self._group.rank(), self._group.size(), self._runner.builder
        parts = [
            start + positions_of((rank + step) % size, size, num_tokens).numpy().astype(np.int32)
            for step in range(size)
        ]
        part = num_tokens // self._unit
        first, second = (
            PrefillChunk(request=request, start=int(at), n=part, samples=False, first=not start and place == 0)
            for place, at in enumerate(parts[0][::part])
        )
        plan = StepPlan(step=-1, prefill=(first, second), num_tokens=2 * part, num_prompt_tokens=2 * part)
        batch = builder.build(plan, self._context.take_table_writes())
        gathered = GatheredAttention(batch.attention, self._group)
        builder.plan_gathered(batch, np.concatenate(parts), cast(AttentionBackend, gathered))
        self._runner.model.hidden(batch)


def choose(prompts: Sequence[Sequence[tuple[int, int]]], *, room: int) -> list[tuple[int, int]]:
    """Which prompts to share: (engine, place), in the order in which they are computed.

    prompts: of each engine (tokens that it computes alone, tokens that are computed where it is shared). room: tokens
    that every engine has blocks for. Prompts are taken from the engine with the most tokens, for as long as that lowers
    the tokens of the busiest engine: by as many for each prompt as sharing a prompt of LEAST_TOKENS does.
    """
    size = len(prompts)
    left = [sorted((*one, place) for place, one in enumerate(each)) for each in prompts]
    loads = [sum(alone for alone, _ in each) for each in prompts]
    taken: list[tuple[int, int]] = []
    cost, num_chosen, lowest = 0.0, 0, float(max(loads))
    while left[engine := loads.index(max(loads))]:
        alone, shared, place = left[engine].pop()
        if not 0 < shared <= room:
            continue
        taken.append((engine, place))
        loads[engine] -= alone
        room -= shared
        cost += shared / size + LEAST_TOKENS * (1 - 1 / size)
        if max(loads) + cost <= lowest:
            num_chosen, lowest = len(taken), max(loads) + cost
    return taken[:num_chosen]


def _why_not(engine: DynamicInferenceEngine) -> str | None:
    """Why the engines cannot compute a prompt together; None: they can."""
    groups, config = engine.rank_group.groups, engine.config
    if groups.cp is None or groups.context_place[1] != groups.cp_size:
        return "needs several context-parallel engines, and this model has one"
    if groups.pp is not None or groups.ep is not None:
        return "with pipeline stages or expert-parallel ranks is not supported"
    if engine.replay.model.ssm_specs:
        return "with recurrent layers is not supported"
    if not (config.enable_prefix_caching and config.prefix_caching_eviction_policy is PrefixCachingEvictionPolicy.LRU):
        return "needs a prefix cache: enable_prefix_caching=True, prefix_caching_eviction_policy='lru'"
    if engine.sizes.max_requests < 2 or engine.sizes.max_tokens < 2 * groups.cp_size:
        return f"needs steps of 2 requests and {2 * groups.cp_size} tokens (max_requests, max_tokens)"
    if config.speculative is not None and config.speculative.drafts_on_device:
        return "with a model that drafts, whose cache it does not fill, is not supported"
    return None
