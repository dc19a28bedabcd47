"""Ranks of one engine that are given prompts of their own are refused by name; equal prompts, or none, are served."""

from __future__ import annotations

import asyncio
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gloo_ranks import new_groups, run_on_ranks, stage_ends
from session_case import make_session, prompts

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.distributed.lockstep import Lockstep
from megatron_infer.engine.given_prompts import digests_of
from megatron_infer.errors import InferenceError, LockstepError, NotLeader, PromptsDiffer, RequestError
from megatron_infer.rl.frameworks.trl import EngineRollout
from megatron_infer.rl.oversampling import RolloutShortage
from megatron_infer.rl.rollout import Rollout
from megatron_infer.rl.rollout_queue import RolloutQueue
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt

LAYOUTS: dict[str, dict[str, int]] = {
    "TP2": {"tensor_model_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
    "EP2": {"expert_model_parallel_size": 2},
}
HOW = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
OTHER = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
GIVEN: dict[str, tuple[Any, Any, str]] = {
    "another prompt": ([*prompts()[:2], [7, 8, 9]], HOW, "prompt 2, or its sampling parameters, are others"),
    "other parameters": (prompts(), OTHER, "prompt 0, or its sampling parameters, are others"),
    "a prompt more": (prompts(4), HOW, "prompt 3 is one that rank 0 does not have"),
    "a prompt less": (prompts(2), HOW, "prompt 2 is missing"),
}
"""What rank 1 gives where rank 0 gives `prompts()` with HOW, and what differs."""
Front = Callable[[Any, Any, Any], Any]


async def streamed(roll: Rollout, given: Any, how: Any) -> list[Any]:
    return [group async for group in roll.stream(given, how)]


FRONTS: dict[str, Front] = {
    "engine.generate": lambda roll, given, how: roll.engine.generate(given, how),
    "generate": lambda roll, given, how: roll.generate(given, how),
    "iterate": lambda roll, given, how: list(roll.iterate(given, how)),
    "stream": lambda roll, given, how: asyncio.run(streamed(roll, given, how)),
    "collect": lambda roll, given, how: roll.collect(3, given and iter(given), how),
    "queue": lambda roll, given, how: RolloutQueue(roll, given and iter(given), how, groups_per_step=3).next_batch(),
}


def tokens(found: list[Any]) -> list[list[int]]:
    return [list((one.outputs if hasattr(one, "outputs") else one.samples)[0].token_ids) for one in found]


def check_front(roll: Rollout, rank: int, name: str, kinds: list[str]) -> None:
    front = FRONTS[name]
    want = sorted(tokens(front(roll, prompts(), HOW)))
    for none in ([], None):
        assert sorted(tokens(front(roll, none if rank else prompts(), HOW))) == want, name
    for kind in kinds:
        given, how, text = GIVEN[kind]
        with pytest.raises(InferenceError, match="rank 1 was given other prompts") as caught:
            front(roll, given if rank else prompts(), how if rank else HOW)
        assert text in str(caught.value) and "all_gather_object" in str(caught.value), (name, kind)
        assert isinstance(caught.value, PromptsDiffer | RequestError), (name, kind)
        assert sorted(tokens(front(roll, prompts(), HOW))) == want, (name, kind)


def check_leader_without_prompts(roll: Rollout, rank: int) -> None:
    """Rank 1's prompts would be dropped: the error is its own, and no rank waits."""
    for name in ("engine.generate", "generate"):
        if rank:
            with pytest.raises(PromptsDiffer, match="prompt 0 is one that rank 0 does not have"):
                FRONTS[name](roll, prompts(), HOW)
        else:
            assert FRONTS[name](roll, [], HOW) == []
    assert len(roll.generate(prompts(), HOW)) == 3


def check_supply(roll: Rollout, rank: int) -> None:
    """An iterator is read as far as the leader reads, over calls; then a rank's own part of the data shows."""

    def data(start: int) -> Iterator[list[int]]:
        while True:
            yield [4 + start % 50, 5, 6]
            start += 1

    same = data(0)
    for _ in range(3):
        roll.collect(2, same, HOW, oversample=2.0, carry=True)
    queue = RolloutQueue(roll, same, HOW, groups_per_step=2, lag=1)
    for _ in range(3):
        assert len(queue.next_batch()) == 2
    queue.close()
    assert len(roll.collect(2, same, HOW)) >= 2
    with pytest.raises(InferenceError, match="rank 1 was given other prompts than rank 0: prompt 0"):
        roll.collect(2, data(10 * rank), HOW)
    mixed = RolloutQueue(roll, iter([*prompts(), [9, 9, 9 + rank]]), HOW, groups_per_step=1)
    for _ in range(3):
        mixed.next_batch()
    with pytest.raises(InferenceError, match="rank 1 was given other prompts than rank 0: prompt 3"):
        mixed.next_batch()
    mixed.close()
    with pytest.raises(RolloutShortage if rank == 0 else RequestError, match="of 9 groups accepted"):
        roll.collect(9, iter(prompts()), HOW)


def check_no_more_rounds(roll: Rollout) -> None:
    """Comparing costs no round between the ranks: with prompts on each there are as many as with the leader's alone."""
    rank, counted = roll.engine.rank_group.lockstep.rank, {}
    with pytest.MonkeyPatch.context() as patch:
        rounds: list[str] = []
        own = Lockstep._round
        patch.setattr(
            Lockstep, "_round", lambda self, mine, *a, **k: rounds.append(mine.call) or own(self, mine, *a, **k)
        )
        for on_all in (True, False):
            for name, front in FRONTS.items():
                rounds.clear()
                front(roll, prompts() if on_all or rank == 0 else [], HOW)
                counted.setdefault(name, []).append(len(rounds))
    assert all(with_all == alone > 0 for with_all, alone in counted.values()), counted


def check_union(roll: Rollout, rank: int) -> None:
    """What docs/parallel.md says to do with prompts of several ranks."""
    mine = [[4 + rank, 5, 6]] * (rank + 1) + [[8, 9 + rank]]
    every: list[Any] = [None, None]
    torch.distributed.all_gather_object(every, mine)
    first = sum(map(len, every[:rank]))
    outputs = roll.engine.generate([prompt for own in every for prompt in own], HOW)[first : first + len(mine)]
    assert [output.prompt_token_ids for output in outputs] == mine


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
    with pytest.raises(LockstepError, match=r"score\(\) with other arguments on rank 1 than on rank 0"):
        session.score([[4, 5, 6 + rank]])
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
    with pytest.raises(PromptsDiffer, match="rank 1 was given other prompts"):
        rollout([f"a question of rank {rank}"], trainer)


def on_layouts(rank: int, size: int, folder: Path) -> None:
    for name, sizes in LAYOUTS.items():
        new_groups(**sizes)
        stages = stage_ends(rank, size) if name == "PP2" else {}
        model = tiny_gpt(num_layers=2, **sizes, **stages, **(EXPERTS if name == "EP2" else {}))
        session = make_session(model, settings={"collective_timeout_s": 60}, meter=None)
        with session.generating() as roll:
            if name == "TP2":
                for front in FRONTS:
                    check_front(
                        roll, rank, front, [*GIVEN] if front in ("engine.generate", "generate") else [*GIVEN][:2]
                    )
                check_leader_without_prompts(roll, rank)
                check_supply(roll, rank)
                check_no_more_rounds(roll)
                check_union(roll, rank)
                check_others(session, roll, rank)
            else:
                check_front(roll, rank, "engine.generate", ["another prompt"])
                check_front(roll, rank, "generate", ["other parameters"])
        assert not session.engine.has_unfinished()
        inspect(session.engine).context.check()
        session.engine.rank_group.lockstep.close()


@pytest.mark.timeout(200)
def test_prompts_of_a_rank_are_never_replaced_without_a_word(tmp_path: Path) -> None:
    run_on_ranks(on_layouts, 2, tmp_path)


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
