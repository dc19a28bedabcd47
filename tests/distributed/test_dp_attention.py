"""Expert-parallel ranks with requests of their own: the answers of one process, in any mix of work over the ranks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import engines
import pytest
import torch
from engine_ranks import (
    BASE,
    account,
    assert_no_block_leaked,
    assert_same_account,
    make_engine,
    take_part,
    weights_of,
    workload,
)
from gloo_ranks import new_groups, run_on_ranks
from plain_forward import full_logits, worst_error
from session_case import prompts

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.layout import DP_ATTENTION_REQUESTS
from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator.served_engine import info_of
from megatron_infer.engine.async_llm import EngineThread
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError, OtherRankFailed, RequestError, SnapshotError
from megatron_infer.models import moe
from megatron_infer.rl.frameworks.engine_host import EngineHost
from megatron_infer.rl.rollout import Rollout
from megatron_infer.rl.rollout_queue import RolloutQueue
from megatron_infer.rl.samples import RolloutSample
from megatron_infer.rl.session import RolloutSession
from megatron_infer.rl.tool_rollouts import run_conversations
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt

MODELS = {
    "shared expert": partial(
        tiny_gpt, **EXPERTS, moe_shared_expert_intermediate_size=40, moe_shared_expert_gate=True, init_method_std=0.2
    ),
    "expert bias": partial(
        tiny_gpt,
        **EXPERTS,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        init_method_std=0.2,
    ),
    "MTP layer with experts": partial(tiny_gpt, **EXPERTS, mtp_num_layers=1, init_method_std=0.2),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefix cache, chunked": {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_tokens": 40},
    "overlap": {"overlap": True},
    "drafts": {"speculative": {"method": "ngram", "num_speculative_tokens": 3}},
    "evictions": {"buffer_size_gb": 0.004, "enable_chunked_prefill": True},
}
SHARES = {
    2: {"even": (5, 5), "rank 0 idle": (0, 7), "rank 1 idle": (7, 0)},
    4: {"uneven": (2, 5, 0, 4), "one busy": (0, 0, 0, 7)},
}
"""Requests of each rank, by the number of ranks."""


def build(kind: str, **sizes: int) -> torch.nn.Module:
    return MODELS[kind](randomize=False, max_sequence_length=512, **sizes)


def whole(folder: Path, kinds: Sequence[str] = tuple(MODELS)[:2]) -> None:
    for kind in kinds:
        torch.manual_seed(3)
        model = build(kind)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name.endswith("expert_bias"):
                    buffer.copy_(torch.randn_like(buffer) * 0.1)
        weights = weights_of(model) | {name: buffer.clone() for name, buffer in model.named_buffers()}
        outputs = engines.run(make_engine(model, buffer_size_gb=0.05), workload(14))
        assert worst_error(outputs, partial(full_logits, model)) < 1e-4, "megatron-core's own forward"
        answers = account(outputs)
        torch.save((weights, answers), folder / f"{kind}.pt")


def part(kind: str, folder: Path) -> tuple[torch.nn.Module, dict[str, Any]]:
    weights, answers = torch.load(folder / f"{kind}.pt")
    model = build(kind, expert_model_parallel_size=torch.distributed.get_world_size())
    take_part(model, weights)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])
    return model, answers


def exchanging_exactly(model: torch.nn.Module) -> Any:
    """Tokens go only to the ranks that need them, as with the alltoall dispatcher, whose constructor needs CUDA."""
    model.config.moe_token_dispatcher_type = "alltoall"
    return mock.patch.object(moe, "SPARED_BYTES", 0)


def own_share(rank: int, counts: tuple[int, ...]) -> slice:
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])


def on_rank(rank: int, size: int, folder: Path, extent: str) -> None:
    """extent: each of the settings with "each share" of the requests, or with "one share", whereby each model has all
    shares; "quick": with one model and one share, by turns."""
    new_groups(expert_model_parallel_size=size)
    for number, kind in enumerate(tuple(MODELS)[:2]):
        model, answers = part(kind, folder)
        own = [*SETTINGS][number::2] if extent == "quick" else [*SETTINGS]
        for name in own:
            settings = SETTINGS[name]
            number += 1
            with exchanging_exactly(model) if name == "plain" else nullcontext():
                engine = make_engine(model, dp_attention=True, **settings)
                shares = [*SHARES[size].items()]
                for share, counts in shares if extent == "each share" else [shares[number % len(shares)]]:
                    mine = own_share(rank, counts)
                    got = account(engines.run(engine, workload(14)[mine]))
                    assert_same_account(got, renamed(answers, mine), (kind, name, share))
            assert_no_block_leaked(engine)
            suspended_at_once(engine, rank, answers, (kind, name))


DRAFTING = ("the model", "a dense model", "MTP layer with experts")


def drafts_on_rank(rank: int, size: int, folder: Path) -> None:
    new_groups(expert_model_parallel_size=size)
    for name in DRAFTING:
        kind = name if name in MODELS else "shared expert"
        model, answers = part(kind, folder)
        draft = {"the model": model, "a dense model": None if kind == name else tiny_gpt(max_sequence_length=512)}
        how = BASE | {"overlap": name != "the model", "enable_prefix_caching": True, "buffer_size_gb": 0.006}
        engine = engines.make_engine(model, draft=draft.get(name, "mtp"), dp_attention=True, **how)
        mine = own_share(rank, (0, 7))
        assert_same_account(account(engines.run(engine, workload(14)[mine])), renamed(answers, mine), name)
        suspended_at_once(engine, rank, answers, name)
        found = engine.spec_decode_metrics()
        assert found is not None and found.num_drafted > 5, name
        assert name != "the model" or found.num_accepted > 0.9 * found.num_drafted, found
        assert_no_block_leaked(engine)


@pytest.mark.long
def test_models_that_draft_meet_at_their_experts_too(tmp_path: Path) -> None:
    """Ranks that draft for other numbers of requests, or have none."""
    whole(tmp_path, [kind for kind in MODELS if kind in ("shared expert", *DRAFTING)])
    run_on_ranks(drafts_on_rank, 2, tmp_path)


def renamed(answers: dict[str, Any], mine: slice) -> dict[str, Any]:
    """The account of these requests, numbered from 0."""
    return {f"{place - mine.start}#0": answers[f"{place}#0"] for place in range(mine.start, mine.stop)}


def suspended_at_once(engine: DynamicInferenceEngine, rank: int, answers: dict[str, Any], where: Any) -> None:
    """Rank 0 has requests in flight and rank 1 has ended its own, or the other way round."""
    mine = own_share(rank, (3, 1, 0, 2))
    modes = iter(("persist", "offload", "recompute") * 2)

    def before_step(engine: DynamicInferenceEngine) -> None:
        if engine.num_steps % 5 == 4:
            engine.suspend(next(modes, "persist"))
            engine.resume()

    got = account(engines.run(engine, workload(14)[mine], before_step))
    assert_same_account(got, renamed(answers, mine), where)


@pytest.mark.parametrize(
    ("size", "extent"),
    [
        (2, "quick"),
        pytest.param(2, "each share", marks=pytest.mark.long),
        pytest.param(4, "one share", marks=pytest.mark.long),
    ],
)
def test_ranks_with_own_requests_answer_as_one_process(size: int, extent: str, tmp_path: Path) -> None:
    whole(tmp_path)
    run_on_ranks(on_rank, size, tmp_path, extent)


async def streamed(roll: Rollout, given: Any, how: Any) -> list[Any]:
    return [group async for group in roll.stream(given, how)]


def begun(roll: Rollout, given: Any, how: Any) -> list[Any]:
    """The first group alone: the call is left early."""
    return list(itertools.islice(roll.iterate(given, how), 1))


FRONTS: dict[str, Callable[[Rollout, Any, Any], list[Any]]] = {
    "engine.generate": lambda roll, given, how: roll.engine.generate(given, how),
    "generate": lambda roll, given, how: roll.generate(given, how),
    "stream": lambda roll, given, how: asyncio.run(streamed(roll, given, how)),
    "left early": begun,
    "queue": lambda roll, given, how: RolloutQueue(roll, iter(given), how, groups_per_step=len(given)).next_batch(),
}


def rollouts_on_rank(rank: int, size: int, folder: Path) -> None:
    new_groups(expert_model_parallel_size=2)
    model, _ = part("shared expert", folder)
    settings = BASE | {"enable_prefix_caching": True, "dp_attention": True}
    session = RolloutSession(model, InferenceConfig(**settings), meter={"share": 1.0})
    mine = prompts(5)[1:] if rank else prompts(5)[:1]
    params = SamplingParams(temperature=0.0, max_tokens=6 + 5 * rank, ignore_eos=True, logprobs=0)
    for version in range(3):
        with cpu_shim(), session.generating() as roll:
            groups = roll.generate(mine, params)
            want = sorted(group.samples[0].token_ids for group in groups)
            for name, front in FRONTS.items():
                got = [
                    (one.outputs if hasattr(one, "outputs") else one.samples)[0] for one in front(roll, mine, params)
                ]
                assert name == "left early" or sorted(one.token_ids for one in got) == want, (rank, name)
                assert all(one.token_ids in want for one in got), (rank, name)
        samples = [group.samples[0] for group in groups]
        assert {span.policy_version for sample in samples for span in sample.spans} == {version}
        check_scores(session, samples)
        assert (session.meter is not None and session.meter.last is None) or not session.meter.last.is_alarm
        if rank == 1:  # an expert of rank 1: what rank 0 has cached is of other weights, too
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "local_experts.1." in name:
                        parameter.mul_(-1.5)
        if version == 1:
            session.update_weights()


def check_scores(session: RolloutSession, samples: list[RolloutSample]) -> None:
    """The samples of all ranks against megatron-core's own forward over them."""
    every: list[Any] = [None, None]
    torch.distributed.all_gather_object(every, [(one.ids, len(one.prompt_ids), one.raw_logprobs) for one in samples])
    union = [one for own in every for one in own]
    with cpu_shim():
        scores = session.score([ids for ids, _, _ in union], start=[start for _, start, _ in union])
    for score, (_, _, logprobs) in zip(scores, union, strict=True):
        torch.testing.assert_close(score, torch.tensor(logprobs), atol=1e-5, rtol=0)


@pytest.mark.long
def test_rollouts_of_own_prompts_follow_weights_of_every_rank(tmp_path: Path) -> None:
    whole(tmp_path, ["shared expert"])
    run_on_ranks(rollouts_on_rank, 2, tmp_path)


def conversations_on_rank(rank: int, size: int, folder: Path) -> None:
    """Rank 1 has one of a single turn, and serves the experts of rank 0's; or its tool waits while rank 0 draws."""
    new_groups(expert_model_parallel_size=2)
    model, _ = part("shared expert", folder)
    roll = Rollout(make_engine(model, dp_attention=True, enable_prefix_caching=True))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    mine = prompts(4)[:3] if rank == 0 else prompts(4)[3:]

    async def tool(conversation: Any, turn: Any) -> Any:
        if turn.start == 0 and rank:
            await asyncio.sleep(0.3)
        return [9, 8, 7] if len(conversation.turns) <= 2 - rank else None

    for _ in range(2):
        groups = run_conversations(roll, mine, params, tool)
        known = [list(group.prompt_ids) for group in groups]
        for _ in range(3):  # as many calls on both ranks
            answers = roll.generate(known, params)
            known = [ids + one.samples[0].token_ids + [9, 8, 7] for ids, one in zip(known, answers, strict=True)]
        for ids, group in zip(known, groups, strict=True):
            sample = group.samples[0]
            assert len(sample.info["turns"]) == 3 - rank and sample.info["ended"] == "tool"
            assert sample.ids == ids[: len(sample.ids)], rank

    async def fails(conversation: Any, turn: Any) -> Any:
        raise KeyError("a tool")

    if rank:
        with pytest.raises(KeyError, match="a tool"):
            run_conversations(roll, mine, params, fails)
    else:  # the other rank's error is its own
        assert len(run_conversations(roll, mine, params, tool)) == 3


@pytest.mark.long
def test_conversations_with_tools_wait_for_no_other_rank(tmp_path: Path) -> None:
    whole(tmp_path, ["shared expert"])
    run_on_ranks(conversations_on_rank, 2, tmp_path)


def saved_on_rank(rank: int, size: int, folder: Path) -> None:
    new_groups(expert_model_parallel_size=2)
    model, answers = part("shared expert", folder)
    mine = own_share(rank, (3, 1))
    want = renamed(answers, mine)

    def begun() -> DynamicInferenceEngine:
        engine = make_engine(model, dp_attention=True)
        engines.submit(engine, workload(14)[mine])
        for _ in range(6):
            engine.step()
        return engine

    for how in ("with kv", "without", "kept"):
        engine, path = begun(), folder / how
        if how == "kept":
            engine.keep_snapshots(path, every_steps=2)
            for _ in range(3):
                engine.step()
        else:
            engine.save_requests(path, kv=how == "with kv")
        torch.distributed.barrier()
        other = make_engine(model, dp_attention=True)
        report = other.load_requests(path)
        assert set(report.with_kv if how == "with kv" else report.recomputed) == {*report.loaded} != set(), how
        finished = [*report.finished, *engines.finish(other).values()]
        assert_same_account(account(finished), want, how)
    with pytest.raises(SnapshotError, match="saved by part 0 of 2, and this is one engine"):
        make_engine(model).load_requests(folder / "with kv")
    if rank == 1:  # the experts of one rank: what any rank has computed is void
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "local_experts.1." in name:
                    parameter.mul_(1.5)
    other = make_engine(model, dp_attention=True)
    report = other.load_requests(folder / "with kv")
    assert report.recomputed and other.weight_version == 1
    torch.distributed.barrier()
    if rank:
        (folder / "with kv.expert1").unlink()
    torch.distributed.barrier()
    with pytest.raises(FileNotFoundError if rank else OtherRankFailed):
        make_engine(model, dp_attention=True).load_requests(folder / "with kv")


@pytest.mark.long
def test_each_rank_saves_its_own_requests_and_goes_on_with_them(tmp_path: Path) -> None:
    whole(tmp_path, ["shared expert"])
    run_on_ranks(saved_on_rank, 2, tmp_path)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one rank": ({}, "one expert-parallel rank"),
    "tp": ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2}, "tp"),
}


def refusals_on_rank(rank: int, size: int, folder: Path) -> None:
    for name, (sizes, text) in REFUSED.items():
        new_groups(**sizes)
        model = build("shared expert", **sizes)
        with pytest.raises(ConfigError, match=f"dp_attention=True: .*{text}"):
            make_engine(model, dp_attention=True)
        assert not make_engine(model, dp_attention=None).relay.own_requests, name
    new_groups(expert_model_parallel_size=2)
    model = build("shared expert", expert_model_parallel_size=2)
    assert make_engine(model, dp_attention=None, max_requests=DP_ATTENTION_REQUESTS).relay.own_requests
    assert not make_engine(model, dp_attention=None, max_requests=DP_ATTENTION_REQUESTS - 1).relay.own_requests
    engine = make_engine(model, dp_attention=True)
    adapting = make_engine(model, dp_attention=True, lora=LoRAConfig(max_loras=1, max_rank=4))
    groups = engine.rank_group.groups
    assert (groups.dp_rank, groups.dp_size) == (rank, size), "seeds, and shares of prompts"
    calls: dict[str, Callable[[], object]] = {
        "AsyncLLM": lambda: EngineThread(engine),
        "frameworks": lambda: EngineHost(SimpleNamespace(engine=engine)),
        "replica or server with adapters": lambda: info_of(adapting),
    }
    for name, call in calls.items():
        with pytest.raises(ConfigError, match=f"{name}.* with dp_attention=True is not supported"):
            call()
    if rank:
        with pytest.raises(RequestError):  # its own, and it serves rank 0 meanwhile
            engine.generate([[]])
    else:
        assert len(engine.generate(prompts(2), SamplingParams(max_tokens=4, ignore_eos=True))) == 2


def test_what_ranks_with_own_requests_do_not_do_is_refused_by_name(tmp_path: Path) -> None:
    run_on_ranks(refusals_on_rank, 2, tmp_path)
