"""Rollouts on two tensor-parallel ranks: every rank has the groups the leader decides on, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import engine_ranks as ranks
import pytest

from megatron_infer.errors import InvalidPrompt, RequestError
from megatron_infer.rl.flow import Budget
from megatron_infer.rl.rollout import Rollout
from megatron_infer.schedule.params import SamplingParams

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


def check_followed(roll: Rollout, rank: int) -> None:
    """The leader alone rolls out; the other rank follows."""
    if rank:
        roll.engine.follow()
        return
    assert len(roll.generate(PROMPTS, PARAMS)) == 5
    roll.engine.dismiss()


def two_ranks(rank: int, size: int, folder: str) -> None:
    engine = ranks.make_engine(ranks.part_of_model("attention", folder, rank, size))
    roll = Rollout(engine)
    seen = check_calls(roll, rank)
    check_followed(roll, rank)
    assert not engine.has_unfinished() and not engine.loop.backlog
    engine.parts.context.check()
    assert engine.parts.context.num_free_blocks == engine.parts.sizes.num_usable_blocks
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
    names = [group[0] for name in ("generate", "early", "paused", "resumed", "stream") for group in first[name]]
    assert len(names) == len(set(names))
