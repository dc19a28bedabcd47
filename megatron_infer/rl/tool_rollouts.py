"""Many conversations with tools at once: the engine draws for some while the tools of others answer."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.outputs.request_output import OnError, check_on_error
from megatron_infer.rl.conversation import Conversation, ConversationTooLong, Turn
from megatron_infer.rl.group_tracker import GroupTracker, RolloutCall
from megatron_infer.rl.multi_rank import Shares
from megatron_infer.rl.prompts import GroupRequest, given_batch
from megatron_infer.rl.rollout import Params, Rollout
from megatron_infer.rl.samples import RolloutGroup, checked_groups, checked_stream
from megatron_infer.runner.sampling.rng import derive_seed

_T = TypeVar("_T")
IDLE_S = 0.002
"""Between two looks at whether other ranks want steps, while this one wants none."""
ToolReply = str | Sequence[int] | Sequence[Mapping[str, Any]] | None
Tool = Callable[[Conversation, Turn], ToolReply | Awaitable[ToolReply]]
"""Called after every answer of the model -> what is appended before the next one: text (without a template), token ids,
or chat messages; None ends the conversation. A coroutine function may wait without delaying other conversations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Limits that end a conversation, besides the tool. `info["ended"]` of its sample names the reason: "tool", one of
    those quoted below, "abort" when the engine's request was aborted, or "error" when it failed."""

    turns: int | None = 8
    """"turns": answers of the model."""
    total_tokens: int | None = None
    """"length": prompt, answers and additions; None: the engine's limit, which holds in any case."""
    seconds: float | None = None
    """"deadline": an answer in flight is aborted and kept as far as it is, a tool's answer is not awaited."""

    def __post_init__(self) -> None:
        for name in ("turns", "total_tokens", "seconds"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not value > 0):
                raise ConfigError(f"TurnLimits: {name} is a number above 0, or None for no limit; got {value!r}")


def converse(
    roll: Rollout,
    prompts: Any,
    params: SamplingParams,
    tool: Tool,
    *,
    limits: TurnLimits | None = None,
    max_concurrent: int | None = None,
    on_error: OnError = "raise",
) -> AsyncIterator[RolloutGroup]:
    """Groups of params.n conversations for each prompt, as they finish; each sample is a whole conversation.

    The first answers of a group are one request, so its prompt is computed once; later turns find their history in the
    prefix cache. An error of the tool ends all conversations and is raised. An answer that fails ends its conversation:
    as `Rollout`, RolloutError is raised once the others are done; on_error "return" gives its group with `error`.
    With several ranks each rank converses about its own prompts, with its own tools. Ranks with equal prompts share
    conversations, whose tools their source calls. While tools are awaited, this rank steps along with the others.
    Context-parallel engines divide equal prompts: a conversation stays on the engine that begins it, whose source calls
    the tools, and its group is on all ranks when all engines are done.
    """
    limits = limits if limits is not None else TurnLimits()

    def draw(own: Any, each: Params) -> AsyncGenerator[RolloutGroup]:
        return _conversations(roll, own, each, tool, limits, max_concurrent)

    return checked_stream(roll.divided(prompts, params, draw), on_error)


async def _conversations(
    roll: Rollout, prompts: Any, params: Params, tool: Tool, limits: TurnLimits, max_concurrent: int | None
) -> AsyncGenerator[RolloutGroup]:
    """Groups as they finish, those that failed too."""
    ranks, run, call = roll.ranks, roll.thread.run, RolloutCall()
    gate = nullcontext() if max_concurrent is None else asyncio.Semaphore(max_concurrent)
    tasks: list[asyncio.Task[Any]] = []
    failure: BaseException | None = None
    await run(lambda: ranks.start(call.shares))
    try:
        call.shares, batch = await run(lambda: ranks.exchange(lambda: given_batch(prompts), params))
        if not ranks.is_own(call.shares):
            while (shared := await roll.next_shared(call)) is not None:
                yield shared
            return
        batch = batch or []
        each = [params] * len(batch) if isinstance(params, SamplingParams) else params
        begun = [
            _conversations_of(roll, prompt, own, limits, call.shares) for prompt, own in zip(batch, each, strict=True)
        ]
        for index, conversations in enumerate(begun):
            tasks.append(asyncio.create_task(_run_group(roll, index, conversations, tool, limits, gate)))
        along = asyncio.create_task(_step_along(roll))
        tasks.append(along)
        for finished in asyncio.as_completed(tasks[:-1]):
            group = await finished
            await run(lambda group=group: roll.deliver(call, [group], whole=[group.group_id]))  # type: ignore[misc]
            yield group
    except BaseException as error:
        failure = error
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await run(lambda: ranks.end(call.shares, failure, roll.tracker))


def _conversations_of(
    roll: Rollout, prompt: Any, params: SamplingParams, limits: TurnLimits, shares: Shares
) -> list[Conversation]:
    """The n conversations of a group."""
    found = [
        Conversation(roll.engine, prompt, _with_sample_seed(params, index), max_total_tokens=limits.total_tokens)
        for index in range(params.n)
    ]
    roll.ranks.check(shares, found[0].info)
    return found


async def _step_along(roll: Rollout) -> None:
    """Steps for the other ranks' requests, while this rank's conversations wait for their tools."""
    relay, loop = roll.engine.relay, roll.engine.loop
    while relay.own_requests:  # the others' steps wait for this rank, with or without requests
        await roll.thread.step()
        if loop.was_idle:
            await asyncio.sleep(IDLE_S)
    while roll.ranks.size > 1:
        if not relay.is_leader or relay.others_want_steps:
            await roll.thread.step()
        if loop.is_idle or relay.is_leader:
            await asyncio.sleep(IDLE_S)


def _with_sample_seed(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters for the later turns of sample `index`: they use the seed of its first turn, not the group's."""
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
    on_error: OnError = "raise",
) -> list[RolloutGroup]:
    """`converse` for code without an event loop -> groups in the order of their prompts."""
    check_on_error(on_error)

    async def collect() -> list[RolloutGroup]:
        options: dict[str, Any] = {"limits": limits, "max_concurrent": max_concurrent, "on_error": "return"}
        return [group async for group in converse(roll, prompts, params, tool, **options)]

    return checked_groups(sorted(asyncio.run(collect()), key=lambda group: group.index), on_error)


async def say(roll: Rollout, conversation: Conversation, params: SamplingParams | None = None) -> Turn:
    """One answer of the model, appended to the conversation. Ranks with equal conversations share it."""
    request = conversation.next_request(params)
    [group] = [group async for group in roll.stream_alone(request)]
    return conversation.add_answer(group)


async def _run_group(
    roll: Rollout,
    index: int,
    conversations: list[Conversation],
    tool: Tool,
    limits: TurnLimits,
    gate: AbstractAsyncContextManager[Any],
) -> RolloutGroup:
    async with gate:
        deadline = None if limits.seconds is None else time.monotonic() + limits.seconds
        first = await _draw(roll, conversations[0].next_request(n=len(conversations)), deadline)
        reasons = await _gather_or_cancel(
            _run_turns(roll, conversation, first, sample, tool, limits, deadline)
            for sample, conversation in enumerate(conversations)
        )
    samples = [conversation.sample() for conversation in conversations]
    for sample, reason in zip(samples, reasons, strict=True):
        failed = isinstance(reason, InferenceError)
        sample.info["ended"] = "error" if failed else reason
        sample.finish_reason = "error" if failed else sample.finish_reason
    return RolloutGroup(
        group_id=first.group_id,
        prompt_ids=list(conversations[0].prompt_ids),
        samples=samples,
        info=conversations[0].info,
        index=index,
        begun_version=first.begun_version,
        num_cached_tokens=first.num_cached_tokens,
        error=next((reason for reason in reasons if isinstance(reason, InferenceError)), None),
    )


async def _gather_or_cancel(coroutines: Iterable[Awaitable[_T]]) -> list[_T]:
    """Results in order; the first error cancels the others and is raised."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_turns(
    roll: Rollout,
    conversation: Conversation,
    first: RolloutGroup,
    sample: int,
    tool: Tool,
    limits: TurnLimits,
    deadline: float | None,
) -> str | InferenceError:
    """Draw and append turns until the conversation ends -> the reason, or the error of an answer that failed.

    first: the group of its first answer.
    """
    answer = first
    while answer.error is None:
        turn = conversation.add_answer(answer, sample)
        sample = 0
        if turn.finish_reason == "abort":
            return "deadline" if _has_passed(deadline) else "abort"
        if conversation.room < 1:
            return "length"
        if limits.turns is not None and len(conversation.turns) >= limits.turns:
            return "turns"
        try:
            reply = tool(conversation, turn)
            if inspect.isawaitable(reply):
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                reply = await asyncio.wait_for(reply, left)
        except TimeoutError:
            if not _has_passed(deadline):
                raise
            return "deadline"
        if reply is None:
            return "tool"
        try:
            _add(conversation, reply)
        except ConversationTooLong:
            return "length"
        if _has_passed(deadline):
            return "deadline"
        answer = await _draw(roll, conversation.next_request(), deadline)
    return answer.error


def _has_passed(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _add(conversation: Conversation, reply: Any) -> None:
    if isinstance(reply, str):
        conversation.add_text(reply)
    elif reply and isinstance(reply[0], Mapping):
        conversation.add_messages(reply)
    else:
        conversation.add_ids(reply)


async def _draw(roll: Rollout, request: GroupRequest, deadline: float | None) -> RolloutGroup:
    """Run one request to its end, or abort it at the deadline."""
    tracker, thread = roll.tracker, roll.thread
    call = RolloutCall()
    try:
        await thread.run(lambda: tracker.begin(call, [request], carry=False))
        while not call.ready:
            if _has_passed(deadline):
                return await thread.run(lambda: _abort(tracker, call))
            await thread.step()
        tracker.release([call.ready[0].group_id])
        return call.ready.popleft()
    finally:
        await thread.run(lambda: tracker.end(call))


def _abort(tracker: GroupTracker, call: RolloutCall) -> RolloutGroup:
    """What the call's only group has so far; it may have finished meanwhile."""
    for pending in list(call.pending.values()):
        return tracker.drop(call, pending)
    return call.ready.popleft()
