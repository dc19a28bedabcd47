"""Each rank of one engine has the outputs of its own prompts; ranks with equal prompts share them."""

from __future__ import annotations

import asyncio
import itertools
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import make_engine
from gloo_ranks import new_groups, run_on_ranks, stage_ends
from session_case import BASE, copied, make_session, prompts

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.distributed.lockstep import Lockstep
from megatron_infer.engine.given_prompts import digests_of, report_of, sources_of
from megatron_infer.errors import InferenceError, InvalidPrompt, LockstepError, NotLeader, RequestError
from megatron_infer.rl.conversation import Conversation
from megatron_infer.rl.frameworks.trl import EngineRollout
from megatron_infer.rl.group_tracker import Budget
from megatron_infer.rl.oversampling import RolloutShortage
from megatron_infer.rl.rollout import Rollout
from megatron_infer.rl.rollout_queue import RolloutQueue
from megatron_infer.rl.tool_rollouts import run_conversations, say
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt

LAYOUTS: dict[str, dict[str, int]] = {
    "TP2": {"tensor_model_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
    "EP2": {"expert_model_parallel_size": 2},
}
HOW = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
OTHER = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
OWN: dict[str, tuple[Any, Any]] = {
    "other prompts": ([[7, 8, 9], *prompts()[:2]], HOW),
    "other parameters": (prompts(), OTHER),
    "a prompt more": (prompts(4), HOW),
    "samples": ([prompts(5)[-1]] * 3, SamplingParams(n=2, temperature=0.0, max_tokens=3, ignore_eos=True)),
}
"""What rank 1 gives where rank 0 gives `prompts()` with HOW."""
Front = Callable[[Any, Any, Any], Any]


async def streamed(roll: Rollout, given: Any, how: Any) -> list[Any]:
    return [group async for group in roll.stream(given, how)]


FRONTS: dict[str, Front] = {
    "engine.generate": lambda roll, given, how: roll.engine.generate(given, how),
    "generate": lambda roll, given, how: roll.generate(given, how),
    "iterate": lambda roll, given, how: list(roll.iterate(given, how)),
    "stream": lambda roll, given, how: asyncio.run(streamed(roll, given, how)),
    "conversations": lambda roll, given, how: run_conversations(roll, given, how, lambda talk, turn: None),
    "collect": lambda roll, given, how: roll.collect(3, given and iter(given), how),
    "queue": lambda roll, given, how: RolloutQueue(roll, given and iter(given), how, groups_per_step=3).next_batch(),
}


def tokens(found: list[Any]) -> list[Any]:
    """(prompt, tokens of each sample), in any order."""
    return sorted(
        (list(one.prompt_token_ids), [list(sample.token_ids) for sample in one.outputs])
        if hasattr(one, "outputs")
        else (list(one.prompt_ids), [list(sample.token_ids) for sample in one.samples])
        for one in found
    )


def check_front(roll: Rollout, rank: int, name: str, kinds: list[str]) -> None:
    """References are the outputs of lists that are equal on both ranks."""
    front, count = FRONTS[name], 3 if name in ("collect", "queue") else None
    first = tokens(roll.engine.generate(prompts(), HOW))
    assert tokens(front(roll, prompts(), HOW)) == first, name
    assert tokens(front(roll, None if rank else prompts(), HOW)) == first, name
    for kind in kinds:
        if count and kind == "a prompt more":  # these read no further than they need
            continue
        given, how = OWN[kind]
        second = tokens(roll.engine.generate(given[:count], how))
        found = front(roll, given if rank else prompts(), how if rank else HOW)
        assert tokens(found) == (second if rank else first), (name, kind)
        names = [one.request_id if name == "engine.generate" else one.group_id for one in found]
        assert all(("1/" in one) == bool(rank) for one in names), (name, kind, names)
        if name == "generate":
            assert [group.prompt_ids for group in found] == (given if rank else prompts())
            assert roll.stats.num_groups == len(found) and roll.stats.num_tokens == sum(map(num_tokens, found))


def num_tokens(group: Any) -> int:
    return group.num_tokens


def check_no_prompts(roll: Rollout, rank: int, *, is_data_parallel: bool) -> None:
    """A rank with an empty list has nothing, or what the ranks have that a trainer gives the same data."""
    for name in ("engine.generate", "generate", "iterate", "stream", "conversations"):
        for empty in (0, 1):
            found = FRONTS[name](roll, [] if rank == empty else prompts(), HOW)
            assert len(found) == (0 if is_data_parallel and rank == empty else 3), (name, empty)
        assert FRONTS[name](roll, [], HOW) == []


def check_supply(roll: Rollout, rank: int) -> None:
    """Iterators are equal or not by the prompts that a call begins with; each is read as far as its call needs."""

    def data(start: int) -> Iterator[list[int]]:
        while True:
            yield [4 + start % 50, 5, 6]
            start += 1

    def ids_of(groups: list[Any]) -> list[int]:
        return sorted(group.prompt_ids[0] for group in groups)

    for apart in (0, 20):
        own, begin = data(apart * rank), 4 + apart * rank
        found = [group for _ in range(3) for group in roll.collect(2, own, HOW, oversample=2.0, carry=True)]
        queue = RolloutQueue(roll, own, HOW, groups_per_step=2, lag=1)
        found += [group for _ in range(3) for group in queue.next_batch()]
        queue.close()
        found += roll.collect(2, own, HOW)
        mine = [group.prompt_ids[0] - begin for group in found]
        assert len(set(mine)) == len(mine) and min(mine) >= 0 and max(mine) < 19, mine
        assert all((group.group_id.count("/") == 2) == (apart > 0 and rank == 1) for group in found)
    mixed = RolloutQueue(roll, iter([*prompts(), [9, 9, 9 + rank]]), HOW, groups_per_step=1)
    for _ in range(3):
        mixed.next_batch()
    with pytest.raises(InferenceError, match="rank 1 shares the prompts of rank 0, and was given others: prompt 3"):
        mixed.next_batch()
    mixed.close()
    with pytest.raises(RolloutShortage if rank == 0 else RequestError, match="of 9 groups accepted"):
        roll.collect(9, iter(prompts()), HOW)
    wanted = 3 if rank else 9
    if rank:
        assert len(roll.collect(wanted, iter(OWN["other prompts"][0]), HOW)) == 3
    else:
        with pytest.raises(RolloutShortage, match="of 9 groups accepted"):
            roll.collect(wanted, iter(prompts()), HOW)


def check_rounds(roll: Rollout, rank: int) -> None:
    """A call costs one round more than its steps and its end; the ranks' own prompts cost no further one."""
    with pytest.MonkeyPatch.context() as patch:
        rounds: list[str] = []
        own = Lockstep._round
        patch.setattr(
            Lockstep,
            "_round",
            lambda self, mine, *a, **k: (
                ("check" not in mine.call and rounds.append(mine.call)) or own(self, mine, *a, **k)
            ),
        )
        for name in ("generate", "engine.generate"):
            for given in (prompts(), [[4 + rank, *one] for one in prompts()]):
                rounds.clear()
                before = roll.engine.num_steps
                FRONTS[name](roll, given, HOW)
                steps = roll.engine.num_steps - before
                shared = 3 if name == "generate" and given == prompts() else 0  # each group is delivered at once
                assert len(rounds) <= steps + 5 + shared, (name, steps, rounds)


def check_refusals(roll: Rollout, rank: int, fronts: list[str]) -> None:
    """An error of a rank's prompts or loop is that rank's; the other has its outputs, and the engine goes on."""
    want = tokens(roll.engine.generate(prompts(), HOW))
    for name in fronts:
        for bad in (0, 1):
            broken = [[4, 5, 6 + bad], [4, 999], [4, 7]]
            if rank == bad:
                with pytest.raises(InvalidPrompt, match="token id 999 is outside the vocabulary"):
                    FRONTS[name](roll, broken, HOW)
            else:
                assert tokens(FRONTS[name](roll, prompts(), HOW)) == want, (name, bad)
    for bad in (0, 1):
        own = [[9 + rank, *one] for one in prompts()]
        found = []
        try:
            for group in roll.iterate(own, HOW):
                found.append(group)
                if rank == bad:
                    raise ZeroDivisionError("in the loop")
        except ZeroDivisionError:
            assert rank == bad
        assert len(found) == (1 if rank == bad else 3)
        assert roll.in_flight == []
    assert tokens(roll.engine.generate(prompts(), HOW)) == want


def check_partial(session: Any, rank: int, modes: tuple[str, ...]) -> None:
    """Each rank stops at a budget of its own; its groups go on in the next block, in each mode, and are its own."""
    long = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (2, 9, 16)]
    own = [[9 + rank, *one] for one in prompts()]
    with session.generating() as roll:
        want = tokens(roll.generate(own, long))
    for mode in modes:
        with session.generating() as roll:
            roll.pause_at(Budget(groups=1 + rank))
            found = roll.generate(own, long)
            assert len(found) == 1 + rank and len(roll.unfinished) == 2 - rank, mode
        session.engine.suspend(mode)
        with session.generating() as roll:
            found += roll.generate([], HOW)
            assert tokens(found) == want and roll.unfinished == [], mode
        with session.generating() as roll:
            roll.pause_at(Budget(groups=1))
            roll.generate(own, long)
            cut = roll.abort_all()
            assert [len(group.samples) for group in cut] == [1, 1]
            assert roll.generate([], HOW) == [] and not session.engine.has_unfinished()


def check_stale(session: Any, roll: Rollout, rank: int) -> None:
    """A rank's limit of staleness drops its own groups."""
    long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    data = itertools.cycle([[9 + rank, 5, 6], [9 + rank, 7]])
    queue = RolloutQueue(roll, data, long, groups_per_step=1, lag=2, max_staleness=0 if rank else None)
    for _ in range(3):
        [group] = queue.next_batch()
        assert group.prompt_ids[0] == 9 + rank
        session.engine.set_weight_version(session.weight_version + 1)
    assert queue.num_dropped == 0 if rank == 0 else queue.num_dropped > 0
    queue.close()
    assert not session.engine.has_unfinished()


def check_tools(roll: Rollout, rank: int) -> None:
    """Each rank's tools answer its own conversations, one of them late; equal conversations share one rank's tools."""

    async def tool(talk: Conversation, turn: Any) -> list[int] | None:
        called.append(talk.prompt_ids[0])
        await asyncio.sleep(0.1 * rank)
        return [11, 12] if len(talk.turns) < 3 else None

    for is_shared in (False, True):
        called: list[int] = []
        begin = 9 if is_shared else 9 + rank
        groups = run_conversations(roll, [[begin, 5, 6], [begin, 7]], HOW, tool)
        assert [group.prompt_ids[0] for group in groups] == [begin] * 2
        assert all(len(group.samples[0].info["turns"]) == 3 for group in groups)
        assert called == ([] if is_shared and rank else [begin] * 6)
    for begin in (9, 9 + rank):
        talk = Conversation(roll.engine, [begin, 5, 6], HOW)
        for _ in range(2):
            assert len(asyncio.run(say(roll, talk)).token_ids) == 4
            talk.add_ids([11])


class Letters:
    """A trainer's tokenizer."""

    eos_token_id = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(one) % 60 + 4 for one in text]}


def check_others(session: Any, roll: Rollout, rank: int) -> None:
    """Calls that take prompts or sequences and do not serve them by the leader's list."""
    if rank:
        with pytest.raises(NotLeader, match="requests go to its rank 0"):
            roll.engine.add_request(prompts()[0], HOW)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(unwrap_model=lambda given: given),
        model=SimpleNamespace(state_dict=dict),
        state=SimpleNamespace(global_step=None),  # as before the first rollout: no weights to write
        args=SimpleNamespace(generation_kwargs=None),
        processing_class=Letters(),
        max_completion_length=4,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
    )
    rollout = EngineRollout(roll.engine)
    assert len(rollout(["a question", "a question"], trainer)["completion_ids"]) == 2
    assert [len(one) for one in rollout([f"a question of rank {rank}"], trainer)["completion_ids"]] == [4]


def check_a_rank_that_leaves(session: Any, rank: int) -> None:
    """An error between two calls: the other ranks' next call names the rank and the error."""
    with pytest.raises(LockstepError if rank == 0 else ZeroDivisionError) as caught, session.generating() as roll:
        if rank:
            raise ZeroDivisionError("the reward model is gone")
        roll.generate(prompts(), HOW)
    if rank == 0:
        assert "rank 1: " in str(caught.value) and "ZeroDivisionError: the reward model is gone" in str(caught.value)


def on_layouts(rank: int, size: int, folder: Path, is_quick: bool) -> None:
    """Expert-parallel ranks by every front; the others by half of the fronts each.

    is_quick: pipeline stages are left out, and each front has one kind of prompts.
    """
    for number, (name, sizes) in enumerate(LAYOUTS.items()):
        if is_quick and name == "PP2":
            continue
        new_groups(**sizes)
        stages = stage_ends(rank, size) if name == "PP2" else {}
        model = tiny_gpt(num_layers=2, **sizes, **stages, **(EXPERTS if name == "EP2" else {}))
        session = make_session(model, settings={"collective_timeout_s": 60}, meter=None)
        with session.generating() as roll:
            for place, front in enumerate(FRONTS if name == "EP2" else [*FRONTS][number :: 6 if is_quick else 2]):
                kinds = [*OWN] if name == "EP2" else [*OWN][:1]
                check_front(roll, rank, front, [kinds[place % len(kinds)]] if is_quick else kinds)
            check_no_prompts(roll, rank, is_data_parallel=name == "EP2")
            if name == "EP2":
                check_supply(roll, rank)
                check_rounds(roll, rank)
                check_refusals(roll, rank, [*FRONTS][:: 3 if is_quick else 1])
                check_stale(session, roll, rank)
                check_tools(roll, rank)
                check_others(session, roll, rank)
        if name == "EP2":
            check_partial(session, rank, ("recompute",) if is_quick else ("persist", "offload", "recompute"))
        assert not session.engine.has_unfinished()
        inspect(session.engine).context.check()
        check_a_rank_that_leaves(session, rank)
        session.engine.rank_group.lockstep.close()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("is_quick", [True, pytest.param(False, marks=pytest.mark.long)], ids=["quick", "whole"])
def test_every_rank_has_the_outputs_of_its_own_prompts(tmp_path: Path, is_quick: bool) -> None:
    run_on_ranks(on_layouts, 2, tmp_path, is_quick)


FOUR = {
    "EP2 x PP2": {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "TP2 x EP2": {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2},
}


def on_four_ranks(rank: int, size: int, folder: Path) -> None:
    """Two data-parallel ranks for the trainer, each of two ranks that share prompts; one of these may have none."""
    from megatron_infer.models.mcore_compat import parallel_state

    for name, sizes in FOUR.items():
        new_groups(**sizes)
        stages = stage_ends(parallel_state.get_pipeline_model_parallel_rank(), 2) if "PP2" in name else {}
        model = tiny_gpt(num_layers=2, **sizes, **stages, **EXPERTS)
        session = make_session(model, settings={"collective_timeout_s": 60}, meter=None)
        data_rank = parallel_state.get_data_parallel_rank()
        with session.generating() as roll:
            lists = [prompts(), [[9, *one] for one in prompts()]]
            want = [tokens(roll.engine.generate(one, HOW)) for one in lists]
            for front in FRONTS:
                found = FRONTS[front](roll, lists[data_rank], HOW)
                assert tokens(found) == want[data_rank], (name, front)
            for without in range(size):
                for front in ("engine.generate", "generate", "stream", "conversations"):
                    found = FRONTS[front](roll, [] if rank == without else lists[data_rank], HOW)
                    assert tokens(found) == want[data_rank], (name, front, without)
            roll.pause_at(Budget(groups=1))
            long = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (2, 9, 16)]
            found = roll.generate(lists[data_rank], long)
            assert len(found) == 1, name
        for mode in ("offload", "recompute"):
            session.engine.suspend(mode)
            session.engine.resume()
        with session.generating() as roll:
            found += roll.generate(lists[1 - data_rank], HOW)
            assert len(found) == 6 and tokens(found[3:]) == want[1 - data_rank], name
            assert [group.prompt_ids for group in found[:3]] == lists[data_rank], name
            assert [len(group.samples[0].token_ids) for group in found[:3]] == [2, 9, 16], name
        assert not session.engine.has_unfinished()
        inspect(session.engine).context.check()
        session.engine.rank_group.lockstep.close()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_ranks_of_one_layout_share_or_have_their_own(tmp_path: Path) -> None:
    run_on_ranks(on_four_ranks, 4, tmp_path)


def own_draws(rank: int, size: int, folder: Path) -> None:
    """What a rank draws is a function of its own calls, and not of how many prompts other ranks have."""
    new_groups(**LAYOUTS["EP2"])
    model = tiny_gpt(num_layers=2, **LAYOUTS["EP2"], **EXPERTS)
    how, found = SamplingParams(n=2, max_tokens=12, ignore_eos=True), []
    for count in (1, 3, 3):
        engine = make_engine(copied(model), **BASE)
        roll = Rollout(engine)
        mine = [[9 + rank, *one] for one in (prompts(2) if rank else prompts(count))]
        found.append(tokens(roll.generate(mine, how) + roll.generate(mine, how)))
        engine.rank_group.lockstep.close()
    assert found[1] == found[2]
    assert rank == 0 or found[0] == found[1]


@pytest.mark.long
def test_draws_do_not_depend_on_other_ranks(tmp_path: Path) -> None:
    run_on_ranks(own_draws, 2, tmp_path)


SOURCES = {
    "tensor-parallel ranks": ([(0, "a"), (0, "a")], [0, 0]),
    "of which one is given none": ([(0, "a"), (0, [])], [0, 0]),
    "of which the leader is given none": ([(0, []), (0, "a")], [1, 1]),
    "with prompts of their own": ([(0, "a"), (0, "b")], [0, 1]),
    "expert-parallel ranks": ([(0, "a"), (1, "b")], [0, 1]),
    "with equal prompts": ([(0, "a"), (1, "a")], [0, 0]),
    "of which one has none": ([(0, "a"), (1, [])], [0, 1]),
    "of which one asks for the leader's": ([(0, "a"), (1, None)], [0, 0]),
    "of which no other has any": ([(0, None), (1, "b")], [0, 1]),
    "both": ([(0, "a"), (0, "a"), (1, "b"), (1, None)], [0, 0, 2, 2]),
    "a rank that follows": ([(0, "a"), None, (1, "b"), None], [0, None, 2, None]),
}
"""(data rank, prompts) of each rank -> the source of each."""


@pytest.mark.parametrize("name", SOURCES)
def test_the_source_of_a_ranks_prompts(name: str) -> None:
    given, sources = SOURCES[name]
    reports = ["" if one is None else report_of(one[0], one[1] and [one[1]], HOW) for one in given]
    assert sources_of(reports) == sources


def test_a_digest_is_that_of_equal_prompts_and_parameters_alone() -> None:
    asked = {"prompt_token_ids": [1, 2], "answer": 3}
    same = [([1, 2], HOW), ((1, 2), HOW), (torch.tensor([1, 2]), SamplingParams(**vars_of(HOW)))]
    assert len({next(digests_of([prompt], how)) for prompt, how in same}) == 1
    mappings = [asked, dict(reversed(asked.items())), UserDict(asked)]  # orders differ between processes, as of a set
    assert len(asked) > 1 and len({next(digests_of(one, HOW)) for one in mappings}) == 1
    assert [*digests_of(UserDict(asked), HOW)] != [*digests_of(UserDict(asked | {"answer": 4}), HOW)]
    objects = [{"prompt_token_ids": [1, 2], "environment": object()} for _ in range(2)]  # texts with addresses
    assert [*digests_of(objects[:1], HOW)] == [*digests_of(objects[1:], HOW)]
    long = [torch.arange(5000), torch.arange(5000).index_fill(0, torch.tensor([2500]), 7)]  # printed with an ellipsis
    others = [[1, 2], [1, 3], "1, 2", asked, asked | {"answer": 4}, [{"role": "user", "content": "1"}], *long]
    assert len({*digests_of(others, HOW), *digests_of(others, OTHER)}) == 2 * len(others)
    assert [*digests_of(others, None)] == [*digests_of(others, SamplingParams())]


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {"temperature": params.temperature, "max_tokens": params.max_tokens, "ignore_eos": params.ignore_eos}
