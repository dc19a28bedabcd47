"""Context-parallel ranks divide the prompts of a rollout, and every rank has the groups that one engine gives."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import take_part, weights_of
from gloo_ranks import new_groups, run_on_ranks
from session_case import make_session, prompts

from megatron_infer.config.layout import DP_ATTENTION_REQUESTS
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import (
    ConfigError,
    InvalidPrompt,
    LockstepError,
    OtherRankFailed,
    PromptsDiffer,
    RankFailure,
    SnapshotError,
)
from megatron_infer.rl import sample_file
from megatron_infer.rl.conversation import Conversation
from megatron_infer.rl.group_tracker import Budget
from megatron_infer.rl.oversampling import RolloutShortage
from megatron_infer.rl.rollout_queue import RolloutQueue
from megatron_infer.rl.sample_file import SampleError
from megatron_infer.rl.samples import RolloutError
from megatron_infer.rl.tool_rollouts import run_conversations, say
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt

MODEL: dict[str, Any] = {"position_embedding_type": "rope", "init_method_std": 0.2}
PARAMS = SamplingParams(n=2, max_tokens=6, ignore_eos=True)
PROMPTS = [*prompts(5), prompts(1)[0]]
"""The last one is the first one again."""


class Requests:
    """Counts those that an engine takes."""

    def __init__(self, session: Any) -> None:
        self.ids: list[str] = []
        session.engine.loop.listeners.append(self)

    def on_add(self, request_id: str, *_: Any) -> None:
        self.ids.append(request_id)

    def on_abort(self, *_: Any) -> None: ...

    def on_step(self, *_: Any) -> None: ...


def account(groups: list[Any]) -> list[Any]:
    """What every rank has, whichever engine drew it."""
    return [
        [group.index, group.group_id, group.info, group.prompt_ids, [sample.token_ids for sample in group.samples]]
        for group in groups
    ]


def without_ids(groups: list[Any]) -> list[Any]:
    return [[index, *rest] for index, _, *rest in groups]


def tool(talk: Any, turn: Any) -> list[int] | None:
    """Three answers, and after each of the first two what depends on it."""
    return [4 + turn.token_ids[-1] % 50, 9] if len(talk.turns) < 3 else None


async def said(roll: Any) -> list[Any]:
    """A conversation by hand."""
    talk = Conversation(roll.engine, PROMPTS[1], PARAMS)
    for _ in range(2):
        await say(roll, talk)
        talk.add_ids([5, 6])
    return [talk.ids, talk.sample().loss_mask]


def calls(session: Any) -> dict[str, Any]:
    """Every call that a trainer makes with prompts."""
    seen: dict[str, Any] = {}
    named = [{"prompt_token_ids": ids, "answer": place} for place, ids in enumerate(PROMPTS)]
    each = [SamplingParams(n=1, max_tokens=3 + place, ignore_eos=True, seed=place) for place in range(len(PROMPTS))]
    with session.generating() as roll:
        seen["generate"] = account(roll.generate(named, PARAMS))
        seen["each"] = account(roll.generate(named, each))
        seen["none"] = account(roll.generate([], PARAMS))
        seen["one"] = account(roll.generate(PROMPTS[0], PARAMS))
        seen["iterate"] = sorted(account(list(roll.iterate(named, PARAMS))))
        assert list(itertools.islice(roll.iterate(PROMPTS, PARAMS), 2))

        async def stream() -> list[Any]:
            return account([group async for group in roll.stream(named, PARAMS)])

        seen["stream"] = sorted(asyncio.run(stream()))
        called: list[Any] = []
        seeded = replace(PARAMS, seed=3)
        talks = run_conversations(roll, named, seeded, lambda *given: called.append(given) or tool(*given))
        seen["converse"] = account(talks)
        assert {tuple(sample.info) for talk in talks for sample in talk.samples} == {("turns", "ended")}
        assert all(sum(sample.loss_mask) == 18 for talk in talks for sample in talk.samples)
        seen["tools"] = len(called)
        seen["say"] = asyncio.run(said(roll))
        for mode in ("persist", "offload", "recompute"):
            roll.pause_at(Budget(tokens=8))
            paused = roll.generate(PROMPTS, PARAMS)
            session.engine.suspend(mode)
            session.engine.resume()
            seen[f"resumed after {mode}"] = sorted(account(paused + roll.generate([], PARAMS)))
    with session.training():
        for parameter in session.model.parameters():
            parameter.data.mul_(1.25)
        session.update_weights()
    with session.generating() as roll:
        seen["new weights"] = account(roll.generate(named, PARAMS))
    return seen


def on_pair(rank: int, size: int, folder: Path) -> None:
    new_groups()
    alone = make_session(tiny_gpt(**MODEL), meter=None)
    alone_counted = Requests(alone)
    want = every(calls(alone))[0]  # those of rank 0: data-parallel ranks draw differently
    num_tools, talk = want.pop("tools"), want.pop("say")
    assert {len(samples) for *_, samples in want["generate"]} == {2}
    assert want["generate"][0][-1] != want["generate"][-1][-1], "equal prompts draw equal samples"
    new_groups(context_parallel_size=2)
    session = make_session(tiny_gpt(**MODEL, context_parallel_size=2), meter={"share": 1.0})
    counted = Requests(session)
    got = calls(session)
    assert got["say"] == talk
    assert every(got.pop("tools")) == [num_tools // 2] * 2
    for name, groups in want.items():
        assert without_ids(got[name]) == without_ids(groups), name
    taken = every(len(counted.ids))
    assert sum(taken) == len(alone_counted.ids) and abs(taken[0] - taken[1]) < 5, taken
    assert session.meter.last is not None and not session.meter.last.is_alarm
    check_choices(session, rank)
    check_own_prompts(session, rank)
    check_errors(session, rank)
    check_versions(session, rank)
    check_files(session, rank, folder)
    session.ranks.lockstep.close()


def check_choices(session: Any, rank: int) -> None:
    def accept(group: Any) -> bool:
        return group.prompt_ids != PROMPTS[1]

    feed = iter(PROMPTS)
    with session.generating() as roll:
        groups = roll.collect(3, feed, PARAMS, accept=accept, oversample=1.0)
        assert len(groups) == 3 and len({group.group_id for group in groups}) == 3
        gathered = every(account(groups))
        assert gathered[0] == gathered[1]
        assert sorted(group.prompt_ids for group in groups) == sorted([PROMPTS[0], PROMPTS[2], PROMPTS[3]])
        with pytest.raises(RolloutShortage, match="of 9 groups accepted") as shortage:
            roll.collect(9, PROMPTS, PARAMS)
        assert len(shortage.value.accepted) == 6
        with pytest.raises(ConfigError, match="groups_per_step is 3, and 2 engines of one replica"):
            RolloutQueue(roll, PROMPTS, PARAMS, groups_per_step=3)
        queue = RolloutQueue(roll, PROMPTS * 2, PARAMS, groups_per_step=4, lag=1)
    batches = []
    for _ in range(3):
        with session.generating():
            batches.append(queue.next_batch())
        session.update_weights()
    assert [len(batch) for batch in batches] == [4, 4, 4]
    drawn = [group.prompt_ids for batch in batches for group in batch]
    assert sorted(drawn) == sorted(PROMPTS * 2)
    samples = [sample.token_ids for batch in batches for group in batch for sample in group.samples]
    assert len({tuple(tokens) for tokens in samples}) == len(samples), "equal seeds"
    gathered = every([account(batch) for batch in batches])
    assert gathered[0] == gathered[1]
    with session.generating(), pytest.raises(RolloutShortage, match="of 4 groups"):
        queue.next_batch()
    queue.close()
    with session.generating() as roll, pytest.raises(PromptsDiffer, match="have read other prompts"):
        roll.collect(2, PROMPTS[rank:], PARAMS)


def check_own_prompts(session: Any, rank: int) -> None:
    own = PROMPTS[2 * rank : 2 * rank + 3]
    with session.generating() as roll:
        groups = roll.generate(own, PARAMS)
        talks = run_conversations(roll, own, PARAMS, tool)
    assert [talk.prompt_ids for talk in talks] == own
    assert [group.prompt_ids for group in groups] == own
    assert [group.index for group in groups] == [0, 1, 2]
    ids = every([group.group_id for group in groups])
    assert not set(ids[0]) & set(ids[1])


def check_errors(session: Any, rank: int) -> None:
    runner = inspect(session.engine).runner
    run_layers = runner.run_layers

    def broken(step: Any, received_TD: Any = None) -> Any:
        if any(chunk.request.tokens[0] == 66 for chunk in step.plan.prefill):
            raise ValueError("a kernel broke")
        return run_layers(step, received_TD)

    with session.generating() as roll:
        with pytest.raises(
            SampleError if rank == 1 else OtherRankFailed, match="info of a group or sample is not JSON"
        ):
            roll.generate([PROMPTS[0], {"prompt_token_ids": PROMPTS[1], "check": object()}], PARAMS)
        with pytest.raises(InvalidPrompt, match=r"prompt 1: .*outside the vocabulary"):
            roll.generate([[1, 2], [999], [3]], PARAMS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "run_layers", broken)
            with pytest.raises(RolloutError, match="a kernel broke") as failure:
                roll.generate([PROMPTS[0], [66, 5], PROMPTS[1]], PARAMS)
        assert [group.index for group in failure.value.failed] == [1]
        assert len(failure.value.groups) == 3

        def stops(progress: Any) -> None:
            if rank:
                raise KeyError("the progress bar")

        with pytest.raises(KeyError if rank else OtherRankFailed, match="the progress bar") as other:
            roll.generate(PROMPTS, PARAMS, on_progress=stops)
        assert rank or "rank 1: KeyError" in str(other.value)

        def fails(talk: Any, turn: Any) -> None:
            if talk.prompt_ids == PROMPTS[1]:  # of rank 1's part
                raise KeyError("the tool")

        with pytest.raises(KeyError if rank else OtherRankFailed, match="the tool"):
            run_conversations(roll, PROMPTS, PARAMS, fails)
        assert len(roll.generate(PROMPTS, PARAMS)) == 6
    assert not session.engine.has_unfinished()


def check_files(session: Any, rank: int, folder: Path) -> None:
    """All engines are given one path."""
    engine, path = session.engine, folder / "requests.snap"
    with session.generating() as roll:
        roll.pause_at(Budget(tokens=1))
        assert roll.generate(PROMPTS, PARAMS) == []
        want = sorted((one.id, one.request.ids) for one in roll.unfinished)
        engine.save_requests(path, kv=True)
        roll.abort_all()
        report = engine.load_requests(path)
        assert sorted(report.loaded) == [request_id for request_id, _ in want]
        assert sorted(report.with_kv) == sorted(report.loaded)
        outputs = {}
        while engine.has_unfinished():
            outputs |= {one.request_id: one.prompt_token_ids for one in engine.step() if one.finished}
        assert outputs == dict(want)
        wrong = folder / "other.snap"
        if rank == 0:
            wrong.write_bytes((folder / "requests.snap.context1").read_bytes())
            with pytest.raises(
                SnapshotError, match="saved by engine 1 of 2 context-parallel ones, and this is engine 0"
            ):
                engine.load_requests(wrong)
        engine.keep_snapshots(folder / "kept.snap")
        groups = roll.generate(PROMPTS, PARAMS)
        engine.acknowledge(None)
        engine.keep_snapshots(None)
    for _ in range(20):
        sample_file.save(folder / "samples", groups)  # by both at once
        assert account(sample_file.load(folder / "samples")) == account(groups)


def check_versions(session: Any, rank: int) -> None:
    session.update_weights(version=40 + rank)
    with session.generating() as roll:
        queue = RolloutQueue(roll, PROMPTS, PARAMS, groups_per_step=2)
        for call in (
            lambda: roll.generate(PROMPTS, PARAMS),
            lambda: roll.generate(PROMPTS[rank:], PARAMS),
            lambda: roll.collect(2, PROMPTS, PARAMS),
            queue.next_batch,
            lambda: run_conversations(roll, PROMPTS, PARAMS, tool),
        ):
            with pytest.raises(LockstepError, match="of other versions: rank 0 has 40, rank 1 has 41; give all"):
                call()
    session.update_weights(version=42)
    with session.generating():
        assert len(queue.next_batch()) == 2
    queue.close()


def every(value: Any) -> list[Any]:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


@pytest.mark.timeout(200)
def test_two_context_parallel_ranks_draw_what_one_engine_draws(tmp_path: Path) -> None:
    run_on_ranks(on_pair, 2, tmp_path)


def on_squares(rank: int, size: int, folder: Path) -> None:
    new_groups()
    want = calls(make_session(tiny_gpt(**MODEL), meter=None))
    new_groups(tensor_model_parallel_size=2, context_parallel_size=2)
    session = make_session(tiny_gpt(**MODEL, tensor_model_parallel_size=2, context_parallel_size=2))
    got = calls(session)
    assert [group[3] for group in got["generate"]] == [group[3] for group in want["generate"]]
    assert sum(every(got.pop("tools"))) == want["tools"], "each engine's leader calls the tools of its part"
    gathered = every(got)
    assert all(one == gathered[0] for one in gathered)
    session.ranks.lockstep.close()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_context_parallel_engines_of_two_ranks_each_give_all_groups_to_all(tmp_path: Path) -> None:
    run_on_ranks(on_squares, 4, tmp_path)


def on_expert_parts(rank: int, size: int, folder: Path) -> None:
    """Ranks with requests of their own: two context-parallel ones divide the prompts of their data-parallel rank."""
    new_groups()
    undivided = tiny_gpt(**MODEL, **EXPERTS)
    weights = weights_of(undivided)
    want = every(calls(make_session(undivided, meter=None)))[0]
    sizes = {"context_parallel_size": 2, "expert_model_parallel_size": size}
    new_groups(**sizes)
    model = tiny_gpt(**MODEL, **EXPERTS, **sizes)
    take_part(model, weights)
    by_rule = {"dp_attention": None, "max_requests": DP_ATTENTION_REQUESTS}
    assert not make_session(model, settings=by_rule, meter=None).engine.relay.own_requests, "measured without cp alone"
    session = make_session(model, settings={"dp_attention": True}, meter={"share": 1.0})
    assert session.engine.relay.own_requests and session.engine.relay.size == 1
    counted = Requests(session)
    with cpu_shim():
        got = calls(session)
    taken, seen = every(len(counted.ids)), every(got)
    assert max(taken) - min(taken) < 5, taken
    assert session.meter.last is not None and not session.meter.last.is_alarm
    num_tools = want.pop("tools")
    assert [one.pop("tools") for one in seen] == [num_tools // 2] * size
    for first in range(0, size, 2):
        assert seen[first] == seen[first + 1], "context-parallel ranks have all groups"
    for name, groups in want.items():  # data-parallel ranks draw differently
        ours, one = (seen[0][name], groups) if name == "say" else map(without_ids, (seen[0][name], groups))
        assert ours == one, name
    with cpu_shim():
        check_parts(session, rank)
    for ranks in {session.engine.rank_group, session.ranks}:
        ranks.lockstep.close()


def check_parts(session: Any, rank: int) -> None:
    """One part draws nothing, or the two of a data-parallel rank refuse: the other ranks' calls end."""
    is_wrong = rank // 2 == 0
    with session.generating() as roll:
        groups = roll.collect(1, PROMPTS, PARAMS, oversample=1.0)
        assert [group.prompt_ids for group in groups] == PROMPTS[:1]
        with pytest.raises(InvalidPrompt, match="outside the vocabulary") if is_wrong else nullcontext():
            roll.generate([PROMPTS[0], [999]] if is_wrong else PROMPTS, PARAMS)

        def stops(progress: Any) -> None:
            if rank == 1:
                raise KeyError("the progress bar")

        error = {0: OtherRankFailed, 1: KeyError}.get(rank)
        with nullcontext() if error is None else pytest.raises(error, match="the progress bar"):
            roll.generate(PROMPTS, PARAMS, on_progress=stops)
        own = PROMPTS[rank : rank + 2]
        assert [group.prompt_ids for group in roll.generate(own, PARAMS)] == own
        queue = RolloutQueue(roll, PROMPTS * 2, PARAMS, groups_per_step=4, lag=1)
    drawn = []
    for _ in range(3):
        with session.generating():
            drawn += [group.prompt_ids for group in queue.next_batch()]
        session.update_weights()
    assert sorted(drawn) == sorted(PROMPTS * 2)
    with session.generating():
        queue.close()


@pytest.mark.timeout(280)
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.slow)])
def test_context_parallel_ranks_with_own_requests_divide_prompts(tmp_path: Path, size: int) -> None:
    run_on_ranks(on_expert_parts, size, tmp_path)


def on_loss(rank: int, size: int, folder: Path) -> None:
    """A process that ends while the other draws its part."""
    import os

    new_groups(context_parallel_size=2)
    session = make_session(tiny_gpt(**MODEL, context_parallel_size=2), settings={"collective_timeout_s": 10})
    with pytest.raises(RankFailure, match="rank 1 of the engine failed in a rollout"), session.generating() as roll:
        if rank:
            (folder / "began").touch()
            os._exit(0)
        roll.generate(PROMPTS, PARAMS)
    os._exit(0)  # the group's other rank is gone


@pytest.mark.timeout(100)
def test_a_context_parallel_rank_that_ends_is_named(tmp_path: Path) -> None:
    run_on_ranks(on_loss, 2, tmp_path)
    assert (tmp_path / "began").exists()
