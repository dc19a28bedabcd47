"""Conversations with tools, many at once: the engine draws for some while the tools of others answer."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError
from megatron_infer.rl.conversation import Conversation, ConversationTooLong, Turn
from megatron_infer.rl.group_tracker import Call
from megatron_infer.rl.prompts import Ask, as_batch
from megatron_infer.rl.rollout import Rollout
from megatron_infer.rl.samples import RolloutGroup
from megatron_infer.sampling.rng import derive_seed

Said = str | Sequence[int] | Sequence[Mapping[str, Any]] | None
Tool = Callable[[Conversation, Turn], Said | Awaitable[Said]]
"""Called after every answer of the model -> what is put in before the next one: text as it stands, token ids, or chat
messages; None: the conversation is over. A coroutine function may wait without holding up others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """What ends a conversation, besides the tool. `info["ended"]` of its sample names it: "tool", one of those below,
    or "abort" when someone ended the engine's request."""

    turns: int | None = 8
    """"turns": answers of the model."""
    total_tokens: int | None = None
    """"length": prompt, answers and additions; None: the engine's limit, which holds in any case."""
    seconds: float | None = None
    """"deadline": an answer under way is cut where it is, a tool's is not waited for."""

    def __post_init__(self) -> None:
        for name in ("turns", "total_tokens", "seconds"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not value > 0):
                raise ConfigError(f"TurnLimits: {name} is a number above 0, or None for no limit; got {value!r}")


async def converse(
    roll: Rollout,
    prompts: Any,
    params: SamplingParams,
    tool: Tool,
    *,
    limits: TurnLimits | None = None,
    max_concurrent: int | None = None,
) -> AsyncIterator[RolloutGroup]:
    """Groups of params.n conversations for each prompt, as they finish; each sample is a whole conversation.

    The first answers of a group are one request, so its prompt is computed once; later turns find their history in the
    prefix cache. An error of the tool ends them all and is raised. With several ranks the leader alone calls, while
    the others are in `engine.follow()`.
    """
    roll.engine.relay.require_leader("converse()")
    limits = limits if limits is not None else TurnLimits()
    gate = nullcontext() if max_concurrent is None else asyncio.Semaphore(max_concurrent)
    batch = as_batch(prompts)
    talks = [
        [
            Conversation(roll.engine, prompt, seeded(params, index), max_total_tokens=limits.total_tokens)
            for index in range(params.n)
        ]
        for prompt in batch
    ]
    tasks = [
        asyncio.create_task(_group(roll, index, group, params, tool, limits, gate)) for index, group in enumerate(talks)
    ]
    try:
        for finished in asyncio.as_completed(tasks):
            yield await finished
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def seeded(params: SamplingParams, index: int) -> SamplingParams:
    """Of sample `index`: its later turns draw with the seed that its first one had, not with that of the group."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=derive_seed(params.seed, index))


def run_conversations(
    roll: Rollout,
    prompts: Any,
    params: SamplingParams,
    tool: Tool,
    *,
    limits: TurnLimits | None = None,
    max_concurrent: int | None = None,
) -> list[RolloutGroup]:
    """The same from code without an event loop -> groups in the order of their prompts."""

    async def collect() -> list[RolloutGroup]:
        options: dict[str, Any] = {"limits": limits, "max_concurrent": max_concurrent}
        return [group async for group in converse(roll, prompts, params, tool, **options)]

    return sorted(asyncio.run(collect()), key=lambda group: group.index)


async def say(roll: Rollout, conversation: Conversation, params: SamplingParams | None = None) -> Turn:
    """One answer of the model, appended to the conversation. On the leader."""
    roll.engine.relay.require_leader("say()")
    return conversation.take(await _drawn(roll, conversation.ask(params), None))


async def _group(
    roll: Rollout,
    index: int,
    talks: list[Conversation],
    params: SamplingParams,
    tool: Tool,
    limits: TurnLimits,
    gate: AbstractAsyncContextManager[Any],
) -> RolloutGroup:
    async with gate:
        deadline = None if limits.seconds is None else time.monotonic() + limits.seconds
        first = await _drawn(roll, talks[0].ask(n=len(talks)), deadline)
        reasons = await _all(_go_on(roll, talk, first, i, tool, limits, deadline) for i, talk in enumerate(talks))
    samples = [talk.sample() for talk in talks]
    for sample, reason in zip(samples, reasons, strict=True):
        sample.info["ended"] = reason
    return RolloutGroup(
        group_id=first.group_id,
        prompt_ids=list(talks[0].prompt_ids),
        samples=samples,
        info=talks[0].info,
        index=index,
        begun_version=first.begun_version,
        num_cached_tokens=first.num_cached_tokens,
    )


async def _all(work: Any) -> list[str]:
    """Results in order; the first error ends the others and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _go_on(
    roll: Rollout,
    talk: Conversation,
    first: RolloutGroup,
    index: int,
    tool: Tool,
    limits: TurnLimits,
    deadline: float | None,
) -> str:
    """Turn after turn -> what ended it."""
    turn = talk.take(first, index)
    while True:
        if turn.finish_reason == "abort":
            return "deadline" if deadline is not None and time.monotonic() >= deadline else "abort"
        if talk.room < 1:
            return "length"
        if limits.turns is not None and len(talk.turns) >= limits.turns:
            return "turns"
        try:
            said = tool(talk, turn)
            if inspect.isawaitable(said):
                said = await asyncio.wait_for(said, None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if deadline is None or time.monotonic() < deadline:
                raise
            return "deadline"
        if said is None:
            return "tool"
        try:
            _add(talk, said)
        except ConversationTooLong:
            return "length"
        if deadline is not None and time.monotonic() >= deadline:
            return "deadline"
        turn = talk.take(await _drawn(roll, talk.ask(), deadline))


def _add(talk: Conversation, said: Any) -> None:
    if isinstance(said, str):
        talk.add_text(said)
    elif said and isinstance(said[0], Mapping):
        talk.add_messages(said)
    else:
        talk.add_ids(said)


async def _drawn(roll: Rollout, ask: Ask, deadline: float | None) -> RolloutGroup:
    """One request of the engine to its end, or cut at the deadline."""
    flow, pump = roll.flow, roll.pump
    call = Call()
    try:
        await pump.run(lambda: flow.begin(call, [ask], carry=False))
        while not call.ready:
            if deadline is not None and time.monotonic() >= deadline:
                return await pump.run(lambda: _cut(roll, call))
            await pump.step()
        flow.release([call.ready[0].group_id])
        return call.ready.popleft()
    finally:
        await pump.run(lambda: flow.end(call))


def _cut(roll: Rollout, call: Call) -> RolloutGroup:
    """What a request has so far; it may have ended meanwhile."""
    for ticket in list(call.tickets.values()):
        return roll.flow.drop(call, ticket)
    return call.ready.popleft()
