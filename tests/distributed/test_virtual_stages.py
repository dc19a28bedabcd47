"""Several model chunks on a pipeline rank give the tokens of one process, and train as Megatron's own schedule does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stage_case
import torch
import training_case
from engine_ranks import take_part, weights_of
from engines import logprobs_of, tokens_of
from gloo_ranks import new_groups, run_on_ranks
from lora_cases import random_adapter
from session_case import PARAMS, make_session, prompts
from test_pp import check_drafts, check_failures
from trainers import MegatronTrainer
from training_case import assert_equal, loss_over, megatron_backward, sequences_of

from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, OtherRankFailed
from megatron_infer.models.loading.checkpoint import CheckpointSource, save_checkpoint
from megatron_infer.models.lora.adapter import Adapter
from megatron_infer.models.mcore_compat import version
from megatron_infer.models.router_replay import replay_routing
from megatron_infer.models.specs import gpt_spec
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt, tiny_hybrid

LORA = LoRAConfig(max_loras=2, max_rank=8)
GPT: dict[str, Any] = stage_case.SETTINGS | {"num_layers": 8, "qk_layernorm": True}
MOE: dict[str, Any] = EXPERTS | {"moe_layer_freq": [1, 0, 1, 1, 0, 1, 1, 1]}
ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
OVERLAP = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
"""As Megatron wants it for virtual stages over two ranks."""
VPP2 = {"virtual_pipeline_model_parallel_size": 2} | OVERLAP
LAYOUTS: dict[str, tuple[dict[str, Any], int, list[list[int]]]] = {
    "GPT": (GPT | VPP2, 1, [[2, 2], [2, 2]]),
    "tied": (GPT | VPP2 | {"share_embeddings_and_output_weights": True}, 1, [[2, 2], [2, 2]]),
    "experts": (GPT | MOE | VPP2, 1, [[2, 2], [2, 2]]),
    "with embedding and loss": (GPT | VPP2 | ENDS | {"num_layers": 6}, 1, [[1, 2], [2, 1]]),
    "layout": (GPT | VPP2 | {"pipeline_model_parallel_layout": "Et|tt|ttt|ttL"}, 1, [[1, 3], [2, 2]]),
    "three chunks": (
        GPT | {"num_layers": 6, "virtual_pipeline_model_parallel_size": 3},
        1,
        [[1, 1, 1], [1, 1, 1]],
    ),
    "uneven, one chunk": (GPT | {"num_layers_in_first_pipeline_stage": 3, "num_layers": 7}, 1, [[3], [4]]),
    "layout, one chunk": (GPT | {"pipeline_model_parallel_layout": "Ett|ttttttL"}, 1, [[2], [6]]),
    "with embedding and loss, one chunk": (GPT | ENDS, 1, [[4], [4]]),
}
"""Name -> config, tensor-parallel ranks, layers of each chunk of each of two pipeline ranks."""
if version() >= (0, 19):  # before, megatron-core builds no chunks of hybrid models
    HYBRID = stage_case.SETTINGS | {"pattern": "MM|*-|M*|ME", "position_embedding_type": "rope"}
    LAYOUTS["hybrid"] = (HYBRID | VPP2, 1, [[2, 2], [2, 2]])


def chunks_of_rank(settings: dict[str, Any], tp: int, weights: dict[str, torch.Tensor]) -> list[Any]:
    """This rank's chunks with the weights of an undivided model, as Megatron's get_model makes them."""
    from megatron.core import parallel_state

    number = settings.get("virtual_pipeline_model_parallel_size")
    rank = parallel_state.get_pipeline_model_parallel_rank()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    chunks = []
    for stage in range(number or 1):
        vp_stage = None if number is None else stage
        if "pattern" in settings:
            make: Any = tiny_hybrid
        else:
            make = partial(tiny_gpt, spec=lambda config, at=vp_stage: gpt_spec(config, pp_rank=rank, vp_stage=at))
        with cpu_shim(2):
            chunk = make(
                **settings,
                pipeline_model_parallel_size=stages,
                tensor_model_parallel_size=tp,
                pre_process=rank == 0 and stage == 0,
                post_process=rank == stages - 1 and stage == (number or 1) - 1,
                **({} if vp_stage is None else {"vp_stage": vp_stage}),
            )
        take_part(chunk, weights)
        chunks.append(chunk)
    return chunks


def whole(settings: dict[str, Any]) -> Any:
    divided = ("pipeline", "account")
    kept = {key: value for key, value in settings.items() if not any(word in key for word in divided)}
    kept.pop("sequence_parallel", None)
    if "pattern" not in settings:
        return tiny_gpt(**kept)
    return tiny_hybrid(**kept | {"pattern": settings["pattern"].replace("|", "")})


def weights_for_stages(model: Any) -> dict[str, torch.Tensor]:
    """Those of an undivided model; the last stage has a copy of tied embeddings."""
    found = weights_of(model)
    return {"output_layer.weight": found["embedding.word_embeddings.weight"]} | found


def groups_of(settings: dict[str, Any], tp: int) -> None:
    new_groups(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=settings.get("virtual_pipeline_model_parallel_size"),
        expert_model_parallel_size=settings.get("expert_model_parallel_size", 1),
    )


def on_rollouts(rank: int, size: int, folder: Path, names: list[str]) -> None:
    for name in names:
        settings, tp, layers = LAYOUTS[name]
        new_groups()
        model = whole(settings)
        weights, expected = weights_for_stages(model), stage_case.generate(stage_case.make_engine(model))
        groups_of(settings, tp)
        chunks = chunks_of_rank(settings, tp, weights)
        assert [len(chunk.decoder.layers) for chunk in chunks] == layers[rank // tp], name
        for features in stage_case.FEATURES:
            engine = stage_case.make_engine(chunks, features, collective_timeout_s=60)
            stage_case.assert_same(stage_case.generate(engine), expected, f"{name}, {features}")
            stage_case.assert_same(stage_case.generate_over_suspends(engine), expected, f"{name}, suspended")
            engine.rank_group.lockstep.close()


def on_four(rank: int, size: int, folder: Path) -> None:
    """Tensor-parallel ranks of each chunk, and expert-parallel ones."""
    for tp, experts in ((2, {}), (1, {"expert_model_parallel_size": 2})):
        settings = GPT | MOE | VPP2
        new_groups()
        model = whole(settings)
        weights, expected = weights_for_stages(model), stage_case.generate(stage_case.make_engine(model))
        groups_of(settings | experts, tp)
        chunks = chunks_of_rank(settings | experts, tp, weights)
        engine = stage_case.make_engine(chunks, "chunks, prefix cache, overlap", collective_timeout_s=60)
        stage_case.assert_same(stage_case.generate(engine), expected, f"TP{tp}")
        stage_case.assert_same(stage_case.generate_over_suspends(engine), expected, f"TP{tp}, suspended")
        engine.rank_group.lockstep.close()


@pytest.mark.long
@pytest.mark.timeout(200)
def test_tensor_and_expert_parallel_ranks_of_virtual_stages_give_the_rollouts_of_one_process(tmp_path: Path) -> None:
    run_on_ranks(on_four, 4, tmp_path)


def with_adapter(engine: Any, adapter: Adapter) -> list[list[int]]:
    """The tokens of a prompt without and with an adapter, in one step."""
    engine.load_adapter(adapter.name, adapter)
    params = [replace(PARAMS, adapter=name, logprobs=None) for name in (None, adapter.name)]
    return tokens_of(engine.generate([prompts()[1]] * 2, params))


def on_other_calls(rank: int, size: int, folder: Path) -> None:
    """Routing, drafts, a forward that raises, checkpoints, weights from files; what is refused."""
    settings = GPT | MOE | VPP2
    new_groups()
    model = whole(settings)
    weights, session = weights_for_stages(model), make_session(model)
    routed = routing_of(session.engine)
    wanted_scores, wanted_gradients = replayed(session, range(6), model.decoder.layers)
    groups_of(settings, 1)
    chunks = chunks_of_rank(settings, 1, weights)
    engine = stage_case.make_engine(chunks, collective_timeout_s=60)
    assert routing_of(engine) == routed
    engine.rank_group.lockstep.close()
    session = make_session(chunks, settings={"collective_timeout_s": 60})
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    scores, gradients = replayed(session, [[0, 3], [1, 2, 4, 5]][rank], layers)
    torch.testing.assert_close(scores, wanted_scores, atol=1e-5, rtol=0)
    for number, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted_gradients[number], atol=1e-6, rtol=1e-4)
    session.engine.rank_group.lockstep.close()

    settings = GPT | VPP2 | {"num_layers": 4}
    new_groups()
    model, other = whole(settings), whole(settings | {"seed": 1})
    weights, expected = weights_for_stages(model), stage_case.generate(stage_case.make_engine(model))
    adapter = random_adapter(model, "a", rank=4, seed=1, scale=0.5)
    adapted = with_adapter(stage_case.make_engine(model, lora=LORA), adapter)
    assert adapted[0] != adapted[1], "the adapter changes no answer"
    save_checkpoint(other, folder / "other")
    others = stage_case.generate(stage_case.make_engine(other))
    groups_of(settings, 1)
    chunks = chunks_of_rank(settings, 1, weights)
    engine = stage_case.make_engine(chunks, collective_timeout_s=60)
    for features in stage_case.FEATURES:
        adapting = stage_case.make_engine(chunks, features, lora=LORA, collective_timeout_s=60)
        assert with_adapter(adapting, adapter) == adapted, features
        adapting.rank_group.lockstep.close()
    check_drafts(chunks, expected, overlaps=(True,))
    check_failures(chunks, expected, rank, victims=(1,))
    check_saved_requests(chunks, expected, rank, folder)
    save_checkpoint(chunks, folder / "chunks")
    CheckpointSource(folder / "other").load_into(chunks)
    engine.set_weight_version(1)
    stage_case.assert_same(stage_case.generate(engine), others, "loaded")
    session = make_session(chunks, settings={"collective_timeout_s": 60})
    session.update_weights(folder / "chunks")
    for name, parameter in chunks[1].named_parameters():
        assert torch.equal(parameter, dict(chunks_of_rank(settings, 1, weights)[1].named_parameters())[name])
    fail_in_scores(session, chunks, rank)
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    for number, layer in enumerate(layers, 1 + 2 * rank):  # as if each rank had layers in a row
        layer.layer_number = number
    with pytest.raises(ConfigError, match=r"not in their order .* \[\[1, 1\], \[3, 3\], \[2, 2\], \[4, 4\]\]"):
        stage_case.make_engine(chunks)
    new_groups()
    again = whole(settings | {"seed": 2})
    CheckpointSource(folder / "chunks").load_into(again)
    stage_case.assert_same(stage_case.generate(stage_case.make_engine(again)), expected, "saved by chunks")


def replayed(session: Any, own: Iterable[int], layers: Any) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Scores, and the routers' gradients by number of the layer, in micro-batches whose tokens go to experts drawn at
    random. own: which of the mixture-of-experts layers this rank has."""
    sequences, rng = sequences_of(LENGTHS), np.random.default_rng(3)
    drawn = [rng.random((len(ids), 6, 4)).argsort(-1)[..., :2] for ids in sequences]
    record = [one[:, list(own)] for one in drawn]
    with cpu_shim(4), session.training():
        plain = session.score(sequences)
        with replay_routing(session.model, record, sequences):
            scores = session.score(sequences, micro_batch_tokens=24)
            session.score_and_backward(sequences, loss_over(sequences), micro_batch_tokens=24)
    assert not torch.allclose(torch.cat(plain), torch.cat(scores), atol=1e-3)
    routers = {layer.layer_number: getattr(layer.mlp, "router", None) for layer in layers}
    return torch.cat(scores), {n: router.weight.grad.clone() for n, router in routers.items() if router is not None}


def check_saved_requests(chunks: list[Any], expected: list[Any], rank: int, folder: Path) -> None:
    """Keys and values of all chunks are saved and restored: nothing is computed again."""
    engine, again = (stage_case.make_engine(chunks, collective_timeout_s=60) for _ in range(2))
    if rank == 0:
        for index, (ids, params) in enumerate(stage_case.requests()):
            engine.add_request({"prompt_token_ids": ids}, params, request_id=str(index), stream="final")
    done = [output for _ in range(6) for output in engine.step() if output.finished]
    engine.save_requests(folder / "saved.requests", kv=True)
    report = again.load_requests(folder / "saved.requests")
    assert not report.recomputed, report
    while again.has_unfinished():
        done += [output for output in again.step() if output.finished]
    by_id = {output.request_id: output for output in done}
    if rank == 0:
        stage_case.assert_same(stage_case.answers([by_id[str(i)] for i in range(len(expected))]), expected, "restored")


def routing_of(engine: Any) -> list[Any]:
    asked = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, return_routing=True)
    outputs = engine.generate([[5, 6, 7, 8, 9], [11, 12]], [asked] * 2)
    return [output.outputs[0].routing.tolist() for output in outputs]


def fail_in_scores(session: Any, chunks: list[Any], rank: int) -> None:
    """An error within any chunk is one of all ranks, which name the rank; the next call goes on."""
    sequences = sequences_of(LENGTHS)
    for victim, number in ((0, 1), (1, 0)):
        with cpu_shim(4):
            chunks[number].forward = raising if rank == victim else type(chunks[number]).forward.__get__(chunks[number])
            with pytest.raises(KeyError if rank == victim else OtherRankFailed, match="broken"):
                session.score(sequences)
            with session.training():
                with pytest.raises(KeyError if rank == victim else OtherRankFailed, match="broken"):
                    session.score_and_backward(sequences, loss_over(sequences), micro_batch_tokens=24)
                del chunks[number].forward
                session.zero_grad(torch.optim.SGD(session.model.parameters()))
                session.score_and_backward(sequences, loss_over(sequences), micro_batch_tokens=24)
                with pytest.raises(ConfigError, match="1 sequences: megatron-core's schedule over virtual pipeline"):
                    session.score_and_backward(sequences[:1], loss_over(sequences[:1]))
                chunks[0].config.overlap_p2p_comm = False
                with pytest.raises(ConfigError, match="takes one message between the two ranks for another"):
                    session.score_and_backward(sequences, loss_over(sequences))
                chunks[0].config.overlap_p2p_comm = True
                session.zero_grad(torch.optim.SGD(session.model.parameters()))


def raising(*_: Any, **__: Any) -> None:
    raise KeyError("broken")


@pytest.mark.long
@pytest.mark.timeout(200)
def test_what_else_a_session_over_virtual_stages_does_and_refuses(tmp_path: Path) -> None:
    run_on_ranks(on_other_calls, 2, tmp_path)


QUICK = ("experts",)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("part", ["quick", pytest.param("rest", marks=pytest.mark.long)])
def test_rollouts_are_those_of_one_process(tmp_path: Path, part: str) -> None:
    names = [name for name in LAYOUTS if (name in QUICK) == (part == "quick") and LAYOUTS[name][1] == 1]
    run_on_ranks(on_rollouts, 2, tmp_path, names)


TRAINED = {
    "GPT": GPT | VPP2,
    "tied": GPT | VPP2 | {"share_embeddings_and_output_weights": True},
    "experts": GPT | VPP2 | training_case.EXPERTS,
    "reducing in overlap": GPT | VPP2,
    "TP2, sequence parallel": GPT | VPP2 | {"sequence_parallel": True},
}


LENGTHS, GROUPS = [12, 12, 8, 8, 8, 8], [[0, 1], [2, 3], [4], [5]]
"""Of 24 tokens three micro-batches would do; the schedule over two ranks with two chunks runs a multiple of two."""


def step_of_megatron(trainer: MegatronTrainer, sequences: list[list[int]]) -> float:
    from megatron.core.distributed import finalize_model_grads

    for chunk in trainer.model:
        chunk.train()
    loss = megatron_backward(trainer.model, sequences, GROUPS, finalize=finalize_model_grads)
    with cpu_shim(4):
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        for chunk in trainer.model:
            chunk.zero_grad_buffer()
    return loss


def parameters_of(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    return {
        f"{number}.{name}": parameter
        for number, chunk in enumerate(trainer.model)
        for name, parameter in chunk.named_parameters()
    }


def check_rollouts(session: Any) -> None:
    """Their log probabilities are those of the trainer's forward with the present weights."""
    with session.generating():
        outputs = session.engine.generate(prompts(), PARAMS)
    sequences = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    with cpu_shim(4):  # ranks with parts of the positions
        scores = session.score(sequences, start=[len(output.prompt_token_ids) for output in outputs])
    for output, score in zip(outputs, scores, strict=True):
        torch.testing.assert_close(torch.tensor(logprobs_of(output.outputs[0])), score, atol=1e-5, rtol=0)


def on_training(rank: int, size: int, folder: Path, names: list[str]) -> None:
    """A session with Megatron's list of wrapped chunks; the twin never met the engine."""
    for name in names:
        settings = TRAINED[name]
        new_groups()
        weights = weights_for_stages(whole(settings))
        tp = 2 if "TP2" in name else 1
        groups_of(settings, tp)
        ours, plain = (
            MegatronTrainer(
                chunks_of_rank(settings, tp, weights), distributed=True, overlap="overlap" in name, smooth=True
            )
            for _ in range(2)
        )
        session = make_session(ours.model, settings={"collective_timeout_s": 60})
        check_rollouts(session)
        sequences = sequences_of(LENGTHS, seed=5)
        with session.training():  # Megatron's own step, on a model that has generated
            assert step_of_megatron(ours, sequences) == step_of_megatron(plain, sequences)
        for chunk in plain.model if "overlap" in name else ():
            chunk.disable_forward_pre_hook()
            chunk.enable_forward_pre_hook()
        for (key, one), other in zip(parameters_of(ours).items(), parameters_of(plain).values(), strict=True):
            assert torch.equal(one, other), (name, key)
        session.update_weights()
        check_rollouts(session)
        for step in range(2):
            sequences = sequences_of(LENGTHS, seed=step)
            with cpu_shim(4), session.training():
                report = session.score_and_backward(sequences, loss_over(sequences), micro_batch_tokens=24)
                assert report.num_micro_batches == len(GROUPS)
                for got, score in zip(report.scores, session.score(sequences), strict=True):
                    torch.testing.assert_close(got, score, atol=1e-5, rtol=0)
                session.step(ours.optimizer)
            want = step_of_megatron(plain, sequences)
            if rank == size - 1:
                assert report.loss == pytest.approx(want, rel=2e-6), (name, report.loss, want)
            check_rollouts(session)
        for chunk in plain.model if "overlap" in name else ():
            chunk.disable_forward_pre_hook()  # gathers what its next forward would gather
        assert_equal(parameters_of(ours), parameters_of(plain))
        session.engine.rank_group.lockstep.close()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("part", ["quick", pytest.param("rest", marks=pytest.mark.long)])
def test_two_ranks_train_as_megatrons_interleaved_schedule_does(tmp_path: Path, part: str) -> None:
    names = [name for name in TRAINED if (name == "tied") == (part == "quick") and "TP2" not in name]
    run_on_ranks(on_training, 2, tmp_path, names)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_tensor_parallel_ranks_train_as_megatrons_interleaved_schedule_does(tmp_path: Path) -> None:
    run_on_ranks(on_training, 4, tmp_path, ["TP2, sequence parallel"])
