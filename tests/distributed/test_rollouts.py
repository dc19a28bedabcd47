"""Rollouts on two tensor-parallel ranks: every rank has the groups the leader decides on, and nothing stays behind."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import engine_ranks as ranks
import pytest

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import InvalidPrompt, RequestError
from megatron_infer.rl.group_tracker import Budget
from megatron_infer.rl.oversampling import RolloutShortage
from megatron_infer.rl.rollout import Rollout
from megatron_infer.rl.rollout_queue import RolloutQueue
from megatron_infer.rl.samples import RolloutError
from megatron_infer.rl.tool_rollouts import run_conversations
from megatron_infer.testing.inspect import inspect

PROMPTS = [list(range(5 + i, 25 + 3 * i)) for i in range(5)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
PARAMS = [SamplingParams(n=2, max_tokens=3 + (5 * i) % 7, logprobs=0, **GREEDY) for i in range(5)]


def told(groups: list[Any]) -> list[Any]:
    return [[g.group_id, g.index, g.info, g.begun_version, [s.token_ids for s in g.samples]] for g in groups]


def check_calls(roll: Rollout, rank: int) -> dict[str, Any]:
    leader = rank == 0
    named = [{"prompt_token_ids": ids, "answer": i} for i, ids in enumerate(PROMPTS)]
    seen: dict[str, Any] = {"generate": told(roll.generate(named if leader else [], PARAMS))}
    with pytest.raises(InvalidPrompt if leader else RequestError, match="outside the vocabulary"):
        roll.generate([[999]] if leader else [], PARAMS[0])
    seen["early"] = []
    for group in roll.iterate(PROMPTS if leader else [], PARAMS):
        seen["early"] += told([group])
        if len(seen["early"]) == 2:
            break
    if leader:
        roll.pause_at(Budget(groups=2))
    seen["paused"] = told(roll.generate(PROMPTS if leader else [], PARAMS))
    roll.engine.set_weight_version(7)
    seen["resumed"] = told(roll.generate([], PARAMS[0]))

    async def stream() -> list[Any]:
        return told([group async for group in roll.stream(PROMPTS if leader else [], PARAMS)])

    seen["stream"] = asyncio.run(stream())
    return seen


def check_choices(roll: Rollout, rank: int) -> dict[str, Any]:
    """What the leader's filter takes, what it carries over, and batches generated ahead."""
    leader = rank == 0
    endless = itertools.cycle(PROMPTS) if leader else iter(())
    how = SamplingParams(n=2, max_tokens=4, **GREEDY)

    def accept(group: Any) -> bool:
        assert leader, "the filter is the leader's"
        return bool(group.index % 2)

    seen = {f"collect {turn}": told(roll.collect(2, endless, how, accept=accept, carry=True)) for turn in range(3)}
    with pytest.raises(RolloutShortage if leader else RequestError, match="of 9 groups accepted"):
        roll.collect(9, PROMPTS if leader else [], how)
    queue = RolloutQueue(roll, endless, how, groups_per_step=2, lag=1)
    for step in range(3):
        seen[f"batch {step}"] = told(queue.next_batch())
        seen[f"beside {step}"] = told(roll.generate(PROMPTS[:1] if leader else [], how))
        roll.engine.set_weight_version(10 + step)
    queue.close()

    def cut(progress: Any) -> None:
        if progress.num_tokens >= 8 and progress.num_done == 0 and progress.num_groups == len(roll.in_flight):
            roll.abort(roll.in_flight[1].id)

    seen["cut"] = told(roll.generate(PROMPTS if leader else [], PARAMS, on_progress=cut))
    return seen


def check_errors(roll: Rollout, rank: int) -> dict[str, Any]:
    """A failed request raises the same on every rank, and the next call goes on."""
    leader, runner = rank == 0, inspect(roll.engine).runner
    run_layers = runner.run_layers

    def broken(step: Any, received_TD: Any = None) -> Any:
        if any(chunk.request.tokens[0] == 66 for chunk in step.plan.prefill):
            raise ValueError("a kernel broke")
        return run_layers(step, received_TD)

    bad, how = [66, 5, 6], SamplingParams(n=2, max_tokens=4, **GREEDY)
    prompts = [PROMPTS[0], bad, PROMPTS[1]] if leader else []
    queue = RolloutQueue(roll, iter(prompts), how, groups_per_step=1)
    calls = {
        "generate": lambda: roll.generate([bad] if leader else [], how),
        "iterate": lambda: list(roll.iterate([bad] if leader else [], how)),
        "collect": lambda: roll.collect(3, iter(prompts), how, max_in_flight=1),
        "queue 0": queue.next_batch,
        "queue 1": queue.next_batch,
        "queue 2": queue.next_batch,
    }
    seen: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run_layers", broken)
        for name, call in calls.items():
            try:
                seen[f"error {name}"] = told(call())
            except RolloutError as error:
                assert "ValueError: a kernel broke" in str(error)
                seen[f"error {name}"] = [str(error), [group.index for group in error.failed], told(error.groups)]
        queue.close()
    assert [seen[f"error {name}"][1] for name in ("generate", "collect", "queue 1")] == [[0], [1], [1]]
    assert len(seen["error collect"][2]) == 2 and len(seen["error queue 2"][0]) == 5
    return seen


def check_followed(roll: Rollout, rank: int) -> None:
    """The leader alone rolls out; the other rank follows."""
    if rank:
        roll.engine.follow()
        return
    assert len(roll.generate(PROMPTS, PARAMS)) == 5
    assert len(run_conversations(roll, PROMPTS, PARAMS[0], lambda talk, turn: None)) == 5
    roll.engine.dismiss()


def two_ranks(rank: int, size: int, folder: str) -> None:
    engine = ranks.make_engine(ranks.part_of_model("attention", folder, rank, size))
    roll = Rollout(engine)
    seen = check_calls(roll, rank) | check_choices(roll, rank) | check_errors(roll, rank)
    check_followed(roll, rank)
    assert not engine.has_unfinished() and not engine.loop.backlog
    inspect(engine).context.check()
    assert inspect(engine).context.num_free_blocks == engine.sizes.num_usable_blocks
    Path(folder, f"seen.{rank}").write_text(json.dumps(seen))


def test_every_rank_has_the_groups_and_they_are_those_of_one_process(tmp_path):
    ranks.run_ranks(two_ranks, tmp_path)
    first, second = (json.loads((tmp_path / f"seen.{rank}").read_text()) for rank in range(2))
    assert first == second
    alone = Rollout(ranks.make_engine(ranks.whole_model("attention")))
    expected = [[s.token_ids for s in group.samples] for group in alone.generate(PROMPTS, PARAMS)]
    assert [group[-1] for group in first["generate"]] == expected
    assert [group[2] for group in first["generate"]] == [{"answer": i} for i in range(5)]
    assert len(first["early"]) == 2
    assert len(first["paused"]) >= 2 and len(first["paused"]) + len(first["resumed"]) == 5
    assert {tuple(map(tuple, g[-1])) for g in first["stream"]} == {tuple(map(tuple, tokens)) for tokens in expected}
    assert [len(first[f"collect {turn}"]) for turn in range(3)] == [2, 2, 2]
    assert all(group[1] % 2 for turn in range(3) for group in first[f"collect {turn}"])
    assert [len(first[f"batch {step}"]) for step in range(3)] == [2, 2, 2]
    assert any(group[3] == 10 for group in first["batch 2"]), "nothing was generated ahead"
    assert len(first["cut"][1][-1][0]) < PARAMS[1].max_tokens
    names = [group[0] for call, groups in first.items() if not call.startswith("error") for group in groups]
    assert len(names) == len(set(names))
