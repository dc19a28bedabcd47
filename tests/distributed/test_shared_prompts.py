"""`context_parallel="prompt"`: context-parallel ranks compute a long prompt together, and its answers do not change."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import new_groups, run_on_ranks
from model_kinds import LATENT, SOFTCAPPED, buffers
from session_case import VOCAB, make_session

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, RankFailure
from megatron_infer.rl.group_tracker import Budget
from megatron_infer.rl.shared_prefill import LEAST_TOKENS, choose
from megatron_infer.rl.tool_rollouts import run_conversations
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

MODEL: dict[str, Any] = {"position_embedding_type": "rope", "init_method_std": 0.2, "max_sequence_length": 4096}
SETTINGS: dict[str, Any] = {
    "max_sequence_length": 4096,
    "max_tokens": 320,
    "buffer_size_gb": 0.05,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "prefix_caching_eviction_policy": "lru",
}
LONG = LEAST_TOKENS + 301
PARAMS = SamplingParams(n=2, max_tokens=8, ignore_eos=True, logprobs=0, seed=3)


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def answers(groups: list[Any]) -> list[Any]:
    return [(group.index, group.prompt_ids, [one.token_ids for one in group.samples]) for group in groups]


def logprobs(groups: list[Any]) -> torch.Tensor:
    return torch.tensor([value for group in groups for sample in group.samples for value in sample.logprobs])


def check_equal(got: list[Any], want: list[Any]) -> None:
    assert answers(got) == answers(want)
    assert (logprobs(got) - logprobs(want)).abs().max() <= 1e-5


def cached(groups: list[Any]) -> list[int]:
    return [group.num_cached_tokens for group in groups]


def every(value: Any) -> list[Any]:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def sessions(num_ranks: int, model: dict[str, Any] | None = None, **settings: Any) -> tuple[Any, Any]:
    """Without the option and with it, of models with equal weights."""
    sizes = {"context_parallel_size": num_ranks, **(model or {})}
    new_groups(**{name: size for name, size in sizes.items() if name.endswith("parallel_size")})
    shared = {"settings": SETTINGS | settings, "meter": None}
    return tuple(
        make_session(tiny_gpt(**MODEL | sizes), **shared, context_parallel=option) for option in (None, "prompt")
    )


def check_same(alone: Any, shared: Any, given: Any, params: SamplingParams = PARAMS) -> list[int]:
    """Cached tokens of the groups that the session with the option gives."""
    with alone.generating() as roll:
        want = roll.generate(given, params)
    with shared.generating() as roll:
        got = roll.generate(given, params)
    check_equal(got, want)
    assert not any(cached(want))
    for session in (alone, shared):
        context = session.engine.replay.context
        context.check()
        assert context.num_free_blocks == context.num_blocks and context.num_free_rows == context.num_rows
        session.engine.reset_prefix_cache()
    return cached(got)


def on_pair(rank: int, size: int, folder: Path) -> None:
    alone, shared = sessions(size)
    long, longer, short = prompt(LONG), prompt(LONG + 90, seed=2), prompt(20, seed=3)
    whole = LONG // 16 * 16
    assert check_same(alone, shared, [long]) == [whole]
    assert check_same(alone, shared, [short, {"prompt_token_ids": long, "cache_salt": "a"}]) == [0, whole]
    assert check_same(alone, shared, [long, longer]) == [0, 0], "each rank has one"
    found = check_same(alone, shared, [long, longer, prompt(LONG, seed=4)])
    assert sorted(found) == [0, 0, whole], "two of three are on rank 0"
    assert check_same(alone, shared, [long], replace(PARAMS, prompt_logprobs=0)) == [0], "every position is wanted"
    own = [long, short] if rank == 0 else [longer[:30]]
    assert check_same(alone, shared, own) == ([whole, 0] if rank == 0 else [0])
    check_streams(alone, shared, long)
    check_between(alone, shared, long, longer)
    check_error_of_all(alone, shared, long)
    small = buffers(shared.model, blocks=120, block_size=16, max_requests=8)
    alone, shared = sessions(size, max_sequence_length=1600, **small)
    assert check_same(alone, shared, [long, short]) == [whole, 0]
    assert check_same(alone, shared, [long, short, longer, prompt(20, seed=5)]) == [0] * 4, "rank 0 has no room for two"


def check_streams(alone: Any, shared: Any, long: list[int]) -> None:
    async def drawn(roll: Any) -> list[Any]:
        talks = await asyncio.to_thread(run_conversations, roll, [long], PARAMS, lambda talk, turn: None)
        return [*[group async for group in roll.stream([long[1:]], PARAMS)], *talks]

    found = []
    for session in (alone, shared):
        with session.generating() as roll:
            found.append(asyncio.run(drawn(roll)))
    check_equal(found[1], found[0])
    assert all(cached(found[1])) and not any(cached(found[0]))


def check_between(alone: Any, shared: Any, long: list[int], longer: list[int]) -> None:
    """Suspends and new weights between two prompts, of which the first is unfinished."""
    for mode in ("persist", "offload", "recompute"):
        found = []
        for session in (alone, shared):
            with session.generating() as roll:
                roll.pause_at(Budget(tokens=4))
                paused = roll.generate([long], PARAMS)
                session.engine.suspend(mode)
                session.engine.resume()
                groups = paused + roll.generate([longer], PARAMS)
            found.append(groups)
            session.engine.reset_prefix_cache()
        check_equal(found[1], found[0])
        assert max(cached(found[1])) >= len(longer) // 16 * 16, mode
    before = answers(found[1])
    for session in (alone, shared):
        with session.generating() as roll:
            roll.generate([longer], PARAMS)  # its blocks are in the cache, of old weights
        with session.training():
            for parameter in session.model.parameters():
                parameter.data.mul_(1.25)
            session.update_weights()
    with alone.generating() as roll:
        want = roll.generate([longer], PARAMS)
    with shared.generating() as roll:
        got = roll.generate([longer], PARAMS)
    check_equal(got, want)
    assert cached(got) == [len(longer) // 16 * 16] and cached(want) == [0]
    assert answers(got)[0][2] not in [samples for _, _, samples in before]


def check_error_of_all(alone: Any, shared: Any, long: list[int]) -> None:
    model = shared.engine.replay.runner.model

    def broken(step: Any) -> Any:
        raise ValueError("a kernel broke")

    with pytest.MonkeyPatch.context() as patch, shared.generating() as roll:
        patch.setattr(model, "hidden", broken)
        with pytest.raises(ValueError, match="a kernel broke"):
            roll.generate([long], PARAMS)
    assert check_same(alone, shared, [long]) == [LONG // 16 * 16]


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_prompt_that_two_ranks_compute_has_the_same_answers(tmp_path: Path) -> None:
    run_on_ranks(on_pair, 2, tmp_path)


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "CP4": ({"context_parallel_size": 4}, {}),
    "CP4, experts": ({"context_parallel_size": 4}, {"num_moe_experts": 4, "moe_router_topk": 2}),
    "TP2 x CP2": ({"context_parallel_size": 2, "tensor_model_parallel_size": 2}, {}),
    "TP2 x CP2, latent": ({"context_parallel_size": 2, "tensor_model_parallel_size": 2}, LATENT),
    "CP4, windows": ({"context_parallel_size": 4}, SOFTCAPPED),
}


def on_four(rank: int, size: int, folder: Path, layout: str) -> None:
    ranks, model = LAYOUTS[layout]
    alone, shared = sessions(ranks["context_parallel_size"], ranks | model)
    long, longer = prompt(LONG), prompt(2 * LONG + 75, seed=2)
    whole = LONG // 16 * 16
    assert check_same(alone, shared, [long]) == [whole]
    found = check_same(alone, shared, [long, prompt(9), longer, prompt(12)])
    assert found == [whole, 0, len(longer) // 16 * 16, 0]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_share_a_prompt(layout: str, tmp_path: Path) -> None:
    run_on_ranks(on_four, 4, tmp_path, layout)


def on_error(rank: int, size: int, folder: Path) -> None:
    """A rank whose forward raises: the other one waits for its keys and values."""
    _, shared = sessions(size, collective_timeout_s=6)
    model = shared.engine.replay.runner.model
    if rank == 1:
        model.hidden = lambda step: (_ for _ in ()).throw(ValueError("a kernel broke"))
    with (
        pytest.raises(RankFailure, match=r"rank 1 of the engine failed in a shared prompt: ValueError: a kernel broke"),
        shared.generating() as roll,
    ):
        roll.generate([prompt(LONG)], PARAMS)
    (folder / f"ended {rank}").touch()
    os._exit(0)  # collectives of the group have failed


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_rank_that_raises_in_a_shared_prompt_is_named(tmp_path: Path) -> None:
    run_on_ranks(on_error, 2, tmp_path)
    assert {path.name for path in tmp_path.glob("ended*")} == {"ended 0", "ended 1"}


def on_refusals(rank: int, size: int, folder: Path) -> None:
    new_groups(context_parallel_size=2)
    gpt = partial(tiny_gpt, context_parallel_size=2, **MODEL)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (gpt, {"prefix_caching_eviction_policy": "ref_zero"}, "needs a prefix cache: .*'lru'"),
        (gpt, {"max_requests": 1}, "needs steps of 2 requests"),
        (partial(tiny_hybrid, context_parallel_size=2), {"prefix_caching_mamba_gb": 0.001}, "with recurrent layers"),
        (partial(gpt, mtp_num_layers=1), {"speculative": {"method": "mtp"}}, "with a model that drafts"),
    ]
    for make, settings, reason in cases:
        with pytest.raises(ConfigError, match=f"context_parallel='prompt' {reason}"):
            make_session(make(), settings=SETTINGS | settings, meter=None, context_parallel="prompt")
    new_groups(context_parallel_size=2, expert_model_parallel_size=2)
    experts = gpt(expert_model_parallel_size=2, num_moe_experts=4)
    with pytest.raises(ConfigError, match="needs several context-parallel engines, and this model has one"):
        make_session(experts, settings=SETTINGS, meter=None, context_parallel="prompt")


@pytest.mark.long
def test_what_cannot_share_a_prompt_is_refused(tmp_path: Path) -> None:
    run_on_ranks(on_refusals, 2, tmp_path)


def test_another_value_and_a_model_without_context_parallelism_are_refused() -> None:
    model = tiny_gpt(**MODEL)
    with pytest.raises(ConfigError, match="context_parallel is 'prompts', it must be 'prompt' or None"):
        make_session(model, context_parallel="prompts")
    with pytest.raises(ConfigError, match="needs several context-parallel engines, and this model has one"):
        make_session(model, settings=SETTINGS, context_parallel="prompt")


@pytest.mark.parametrize(
    ("prompts", "room", "chosen"),
    [
        ([[(4000, 3900)], []], 9999, [(0, 0)]),
        ([[(4000, 3900)], [(3900, 3800)]], 9999, []),
        ([[(4000, 3900), (4000, 3900)], [(4000, 3900)]], 9999, [(0, 1)]),
        ([[(LEAST_TOKENS - 16, LEAST_TOKENS - 16)], []], 9999, []),
        ([[(LEAST_TOKENS, LEAST_TOKENS)], []], 9999, [(0, 0)]),
        ([[(4000, 3900)], []], 3899, []),
        ([[(4000, 3900), (3000, 2900)], []], 4000, [(0, 0)]),
        ([[(2000, 3900)], []], 9999, []),
        ([[(4000, 0)], []], 9999, []),
        ([[], [], [(9000, 8900), (20, 16)]], 9999, [(2, 0)]),
        ([[(2700, 2700)], [(1300, 1300)], [], []], 9999, [(0, 0), (1, 0)]),
        ([[], []], 9999, []),
    ],
    ids=[
        "alone",
        "even",
        "odd",
        "short",
        "long enough",
        "no room",
        "room for one",
        "cached",
        "not allowed",
        "of three",
        "of four",
        "none",
    ],
)
def test_prompts_are_shared_where_that_takes_work_off_the_busiest_engine(
    prompts: Any, room: int, chosen: list[tuple[int, int]]
) -> None:
    assert choose(prompts, room=room) == chosen
