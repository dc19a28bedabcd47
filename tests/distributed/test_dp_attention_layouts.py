"""Expert-parallel ranks with requests of their own, each with its tensor-parallel ranks or pipeline stages: four ranks
give what one process gives."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import engine_ranks as ranks
import engines
import pytest
import torch
from gloo_ranks import new_groups, run_on_ranks, stage_ends
from model_kinds import LATENT
from plain_forward import full_logits, worst_error
from test_virtual_stages import GPT, MOE, VPP2, chunks_of_rank, groups_of, weights_for_stages
from test_virtual_stages import whole as undivided

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import RankFailure
from megatron_infer.models.specs import gpt_spec
from megatron_infer.rl.group_tracker import Budget
from megatron_infer.rl.rollout_queue import RolloutQueue
from megatron_infer.rl.session import RolloutSession
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt, tiny_hybrid

SETTINGS: dict[str, Any] = {"init_method_std": 0.2, "max_sequence_length": 512, "position_embedding_type": "rope"}
SHARED = {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True}
TP, PP, EP, ETP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
LAYOUTS: dict[str, dict[str, int]] = {
    "TP2 x EP2": {TP: 2, EP: 2},
    "TP2 x EP4, whole experts": {TP: 2, EP: 4, ETP: 1},
    "PP2 x EP2": {PP: 2, EP: 2},
}
DRAFTS: dict[str, Any] = {"speculative": {"method": "mtp", "adaptive": False}}
EVICTIONS: dict[str, Any] = {
    "enable_chunked_prefill": True,
    "max_tokens": 40,
    "pool_blocks": 14,
    "paused_blocks": 4,
}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "evictions": EVICTIONS | {"enable_prefix_caching": True},
    "drafts, overlap": {"speculative": {"method": "ngram", "num_speculative_tokens": 3}, "overlap": True},
}
SHARES = {"uneven": (3, 6), "the first idle": (0, 5), "the second idle": (5, 0)}
"""Requests of the two parts of an engine."""


def gpt(stage: int, settings: dict[str, Any]) -> torch.nn.Module:
    def spec(config: Any) -> Any:
        return gpt_spec(config, pp_rank=stage)

    return tiny_gpt(spec=spec, **{"num_layers": 2} | EXPERTS | SETTINGS | settings)


def moe(stage: int = 0, **sizes: Any) -> torch.nn.Module:
    return gpt(stage, SHARED | sizes)


def latent_experts(stage: int = 0, **sizes: Any) -> torch.nn.Module:
    return tiny_hybrid("M*EM*E", moe_latent_size=24, **SETTINGS, **sizes)


def latent_attention(stage: int = 0, **sizes: Any) -> torch.nn.Module:
    return gpt(stage, LATENT | sizes)


def mtp(stage: int = 0, **sizes: Any) -> torch.nn.Module:
    return gpt(stage, {"mtp_num_layers": 1} | sizes)


MODELS: dict[str, Any] = {
    "moe": moe,
    "latent experts": latent_experts,
    "latent attention": latent_attention,
    "mtp": mtp,
}
KINDS = {
    "TP2 x EP2": ("moe", "latent experts", "latent attention", "mtp"),
    "TP2 x EP4, whole experts": ("moe", "latent experts"),
    "PP2 x EP2": ("moe", "latent experts", "mtp"),
}


def whole(folder: Path, kinds: Any = tuple(MODELS)) -> None:
    for kind in kinds:
        model = MODELS[kind]()
        outputs = engines.run(ranks.make_engine(model), ranks.workload(9))
        assert worst_error(outputs, partial(full_logits, model)) < 1e-4, "megatron-core's own forward"
        torch.save((ranks.weights_of(model), ranks.account(outputs)), folder / f"{kind}.pt")


def part(kind: str, layout: str, folder: Path) -> tuple[torch.nn.Module, dict[str, Any]]:
    """This rank's model, in the groups of the layout, and the answers of one process."""
    from megatron.core import parallel_state

    sizes = LAYOUTS[layout]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    ends = stage_ends(stage, sizes[PP]) if PP in sizes else {}
    with cpu_shim(2):  # a copy of embeddings for an MTP layer is made on CUDA
        model = MODELS[kind](stage=stage, **sizes, **ends)
    weights, answers = torch.load(folder / f"{kind}.pt")
    ranks.take_part(model, weights)
    return model, answers


def answers_to(engine: DynamicInferenceEngine, counts: tuple[int, int], *, suspends: bool) -> dict[str, Any]:
    """Of the requests of this part, numbered as in the whole workload."""
    number = engine.rank_group.groups.dp_rank
    first = counts[0] * number
    modes = iter(("persist", "offload", "recompute") * 2)

    def before_step(engine: DynamicInferenceEngine) -> None:
        if suspends and engine.num_steps % 5 == 4:
            engine.suspend(next(modes, "persist"))
            engine.resume()

    if engine.relay.is_leader:
        for place in range(first, first + counts[number]):
            engine.add_request(*ranks.workload(9)[place], request_id=str(place), stream="final")
    return ranks.account(list(engines.finish(engine, before_step).values()))


def on_layouts(rank: int, size: int, folder: Path, kinds: tuple[str, ...]) -> None:
    for layout, sizes in LAYOUTS.items():
        new_groups(**sizes)
        for kind in (kind for kind in KINDS[layout] if kind in kinds):
            model, want = part(kind, layout, folder)
            for name, settings in (
                RUNS.items()
                if kind == "moe" and len(kinds) > 1
                else [("drafts", DRAFTS) if kind == "mtp" else ("evictions", EVICTIONS)]
            ):
                engine = ranks.make_engine(model, dp_attention=True, **settings)
                groups = engine.rank_group.groups
                assert groups.own_requests and (groups.engine_size, groups.dp_size, engine.relay.size) == (4, 2, 2)
                for share, counts in SHARES.items() if len(kinds) > 1 else [*SHARES.items()][:2]:
                    got = answers_to(engine, counts, suspends=share == "uneven")
                    number = groups.dp_rank
                    places = range(counts[0] * number, counts[0] * number + counts[number])
                    expected = {f"{place}#0": want[f"{place}#0"] for place in places}
                    ranks.assert_same_account(got, expected, (layout, kind, name, share))
                assert kind != "mtp" or engine.spec_decode_metrics().num_drafted > 50
                ranks.assert_no_block_leaked(engine)
                engine.rank_group.sharing.close()
                engine.rank_group.lockstep.close()


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "kinds", [pytest.param(("moe",), marks=pytest.mark.long), pytest.param(tuple(MODELS), marks=pytest.mark.slow)]
)
def test_parts_of_an_engine_with_own_requests_answer_as_one_process(kinds: tuple[str, ...], tmp_path: Path) -> None:
    whole(tmp_path, kinds)
    run_on_ranks(on_layouts, 4, tmp_path, kinds)


def on_chunks(rank: int, size: int, folder: Path, runs: list[str]) -> None:
    """Virtual stages: ranks meet in the layers of each chunk, in the order of the ring."""
    settings = GPT | MOE | VPP2 | {"num_layers": 4, "moe_layer_freq": [1, 0, 1, 1]}
    new_groups()
    model = undivided(settings)
    want = ranks.account(engines.run(ranks.make_engine(model), ranks.workload(9)))
    groups_of(settings | {EP: 2}, 1)
    chunks = chunks_of_rank(settings | {EP: 2}, 1, weights_for_stages(model))
    for name in runs:
        engine = ranks.make_engine(chunks, dp_attention=True, **RUNS[name])
        groups = engine.rank_group.groups
        assert groups.own_requests and (groups.engine_size, groups.dp_size, engine.relay.size) == (4, 2, 2)
        for share, counts in SHARES.items():
            got = answers_to(engine, counts, suspends=share == "uneven")
            first = counts[0] * groups.dp_rank
            places = range(first, first + counts[groups.dp_rank])
            ranks.assert_same_account(got, {f"{at}#0": want[f"{at}#0"] for at in places}, (name, share))
        ranks.assert_no_block_leaked(engine)
        engine.rank_group.sharing.close()
        engine.rank_group.lockstep.close()


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "runs", [pytest.param(["evictions"], marks=pytest.mark.long), pytest.param(list(RUNS), marks=pytest.mark.slow)]
)
def test_parts_of_virtual_stages_answer_as_one_process(tmp_path: Path, runs: list[str]) -> None:
    run_on_ranks(on_chunks, 4, tmp_path, runs)


def rollouts_on_layouts(rank: int, size: int, folder: Path, layouts: tuple[str, ...]) -> None:
    for layout in layouts:
        new_groups(**LAYOUTS[layout])
        model, _ = part("moe", layout, folder)
        settings = engines.BASE | {"enable_prefix_caching": True, "dp_attention": True, "collective_timeout_s": 30}
        settings["buffer_size_gb"] = engines.BUFFER_GIB
        session = RolloutSession(model, InferenceConfig(**settings), meter={"share": 1.0})
        check_rollouts(session, layout)
        if layout == layouts[-1]:
            check_loss(session, rank)
        session.ranks.lockstep.close()


def check_loss(session: RolloutSession, rank: int) -> None:
    """A rank of the second part ends in a step: all others name its number in the engine."""
    with pytest.raises(RankFailure, match="rank 3 of the engine failed"), cpu_shim(), session.generating() as roll:
        if rank == 3:
            os._exit(0)
        roll.generate([[7, 9, 11]] * (1 + rank % 2), SamplingParams(max_tokens=30, ignore_eos=True))
    os._exit(0)  # the groups' other rank is gone


def check_rollouts(session: RolloutSession, layout: str) -> None:
    """Each part draws its own prompts, in calls of other lengths; both have new weights when one rank changes one."""
    number = session.engine.rank_group.groups.dp_rank
    prompts = [[7 + place, 9, 11, 13] for place in range(3)][: 1 + 2 * number]
    params = SamplingParams(temperature=0.0, max_tokens=6 + 5 * number, ignore_eos=True, logprobs=0)
    for version in range(2):
        with cpu_shim(), session.generating() as roll:
            groups = roll.generate(prompts, params)
            want = [(group.prompt_ids, group.samples[0].token_ids) for group in groups]
            assert [ids for ids, _ in want] == prompts
            outputs = session.engine.generate(prompts, params)
            assert [output.outputs[0].token_ids for output in outputs] == [tokens for _, tokens in want]
            batch = RolloutQueue(roll, iter(prompts), params, groups_per_step=len(prompts)).next_batch()
            assert sorted((group.prompt_ids, group.samples[0].token_ids) for group in batch) == sorted(want)
            roll.pause_at(Budget(tokens=3))
            groups = roll.generate(prompts, params)
            groups += roll.generate([], params)
            assert sorted((group.prompt_ids, group.samples[0].token_ids) for group in groups) == sorted(want)

            def fails(progress: Any) -> None:
                if number and session.engine.relay.is_leader:
                    raise KeyError("the progress bar")

            if number:
                with pytest.raises(KeyError if session.engine.relay.is_leader else Exception, match="progress bar"):
                    roll.generate(prompts, params, on_progress=fails)
            else:  # the other part's error is its own
                assert len(roll.generate(prompts, params, on_progress=fails)) == len(prompts)
        samples = [group.samples[0] for group in groups]
        assert {span.policy_version for sample in samples for span in sample.spans} == {version}, layout
        every: list[Any] = [None] * 4
        torch.distributed.all_gather_object(
            every, [(one.ids, len(one.prompt_ids), one.raw_logprobs) for one in samples]
        )
        union = sorted({str(one): one for own in every for one in own}.values(), key=str)
        with cpu_shim():
            scores = session.score([ids for ids, _, _ in union], start=[start for _, start, _ in union])
        for score, (_, _, logprobs) in zip(scores, union, strict=True):
            torch.testing.assert_close(score, torch.tensor(logprobs), atol=2e-5, rtol=0)
        assert session.meter is not None and session.meter.last is not None and not session.meter.last.is_alarm
        if torch.distributed.get_rank() == 3:
            with torch.no_grad():
                for name, parameter in session.model.named_parameters():
                    if "local_experts.0." in name:
                        parameter.mul_(-1.5)


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "layouts",
    [pytest.param(("PP2 x EP2",), marks=pytest.mark.long), pytest.param(tuple(LAYOUTS)[:2], marks=pytest.mark.slow)],
)
def test_rollouts_of_parts_of_an_engine_have_the_scores_of_the_trainer(
    layouts: tuple[str, ...], tmp_path: Path
) -> None:
    whole(tmp_path, ["moe"])
    run_on_ranks(rollouts_on_layouts, 4, tmp_path, layouts)
