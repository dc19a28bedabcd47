"""Flags of a trainer's config that the engine serves as they are: the model is adopted, and trains as before."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from plain_forward import full_logits, worst_error
from session_case import PARAMS, make_session, prompts

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, WrongState
from megatron_infer.kernels.native import native_build
from megatron_infer.models.mcore_compat import config_fields, version
from megatron_infer.models.router_replay import replay_routing
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt

AUX = EXPERTS | {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0}
PADDED = {"moe_expert_capacity_factor": 4.0, "moe_pad_expert_input_to_capacity": True}
OVERLAPPED = {
    "moe_shared_expert_intermediate_size": 40,
    "moe_shared_expert_overlap": True,
    "moe_token_dispatcher_type": "alltoall",
}
SERVED = {
    "fp32 residual": {"fp32_residual_connection": True},
    "fp32 residual, experts": {"fp32_residual_connection": True, **EXPERTS},
    "external graphs": {"external_cuda_graph": True},
    "graphs": {"cuda_graph_impl": "transformer_engine"},
    "replay": {"moe_enable_routing_replay": True, **EXPERTS},
    "capacity": {"moe_expert_capacity_factor": 4.0, **AUX},
    "capacity, padded": PADDED | AUX,
    "shared experts in overlap": OVERLAPPED | EXPERTS,
}
FEW = {"moe_expert_capacity_factor": 0.5, **AUX}
COUNTER = "megatron_infer_trainer_dropped_expert_pairs_total"


@pytest.mark.parametrize("name", SERVED)
def test_rollouts_are_those_of_the_trainers_forward_and_gradients_those_of_its_twin(name):
    on_streams = SERVED[name].get("moe_shared_expert_overlap")
    with cpu_shim() if on_streams else nullcontext():
        check_flags(SERVED[name])


def check_flags(flags):
    model, twin = tiny_gpt(**flags), tiny_gpt(**flags)
    session = make_session(model)
    with session.generating():
        outputs = session.engine.generate(prompts(), PARAMS)
    assert worst_error(outputs, lambda ids: full_logits(twin, ids)) < 1e-5
    sequences = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    with session.training():
        session.score_and_backward(sequences, lambda scores, _: sum(score.sum() for score in scores))
    for ids in sequences:
        logits = twin(torch.tensor([ids]), torch.arange(len(ids))[None], None)[0, :-1]
        logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).sum().backward()
    expected = dict(twin.named_parameters())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key].grad, rtol=1e-4, atol=1e-5, msg=key)


def test_a_half_precision_residual_stream_in_fp32_is_the_trainers():
    """From 0.18 on megatron-core keeps it in fp32 in all layers."""
    if version() < (0, 18):
        pytest.skip("before 0.18 megatron-core rounds the stream in each layer whatever the flag says")
    ids, errors = list(range(4, 100)), {}
    for flag in (True, False):
        model = tiny_gpt(fp32_residual_connection=flag, params_dtype=torch.bfloat16, num_layers=24)
        session = make_session(model)
        with session.generating():
            (output,) = session.engine.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
        ours = torch.tensor(
            [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        )
        seen = []  # a half-precision output layer would round more than the stream does
        hook = model.output_layer.register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0][:-1, 0].float())
        )
        full_logits(model, ids)
        hook.remove()
        logits = seen[0] @ model.output_layer.weight.detach().float().T
        theirs = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        errors[flag] = float((ours - theirs).abs().mean())
    assert errors[True] < 0.7 * errors[False], errors


@pytest.mark.parametrize("changes", [FEW, FEW | {"moe_pad_expert_input_to_capacity": True}], ids=["plain", "padded"])
def test_scores_of_dropped_tokens_are_refused_and_counted(changes):
    session = make_session(tiny_gpt(**changes))
    free = make_session(tiny_gpt(**AUX))
    with session.generating(), free.generating():
        outputs = session.engine.generate(prompts(), PARAMS)
        expected = free.engine.generate(prompts(), PARAMS)
    assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in expected]
    sequences = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    counter = session.engine.output_processor.meter.registry.counter(COUNTER, "")
    expected = sum(over_capacity(session.model, ids, changes["moe_expert_capacity_factor"]) for ids in sequences)
    dropped = rf"routers dropped {expected} pairs .*capacity_factor=0.5; generation drops none"
    with pytest.raises(ConfigError, match=rf"^score\(\): {dropped}"):
        session.score(sequences, micro_batch_tokens=1)
    assert counter.value == expected > 0
    with session.training():
        with pytest.raises(ConfigError, match=rf"^score_and_backward\(\): {dropped}"):
            session.score_and_backward(
                sequences, lambda scores, _: sum(score.sum() for score in scores), micro_batch_tokens=1
            )
        with pytest.raises(WrongState, match="incomplete gradients"):
            session.step(torch.optim.SGD(session.model.parameters()))
        session.zero_grad(torch.optim.SGD(session.model.parameters()))
    assert counter.value == 2 * expected


def over_capacity(model, ids, factor: float) -> int:
    """Pairs beyond ceil(tokens * k / experts * factor) of each expert, by the routers' logits of one sequence."""
    logits, hooks = [], []
    for layer in model.decoder.layers:
        hooks.append(
            layer.mlp.router.register_forward_hook(lambda module, args, _: logits.append(module.gating(args[0])))
        )
    full_logits(model, ids)
    for hook in hooks:
        hook.remove()
    capacity = math.ceil(len(ids) * 2 / 4 * factor)
    chosen = [torch.zeros(len(ids), 4).scatter(1, one.flatten(0, 1).topk(2).indices, 1).sum(0) for one in logits]
    return int(sum((one - capacity).clamp(min=0).sum() for one in chosen))


def test_graphs_that_were_captured_for_other_micro_batches_do_not_score_with_gradients():
    session = make_session(tiny_gpt(cuda_graph_impl="transformer_engine"))
    session.model.decoder.layers[0].cuda_graphs = ["a graph"]
    with session.training(), pytest.raises(ConfigError, match="replay micro-batches of the shape that the trainer"):
        session.score_and_backward(prompts(), lambda scores, _: sum(score.sum() for score in scores))


def test_batch_invariant_mode_of_the_model_is_exact_mode(monkeypatch):
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):  # megatron-core wants and sets its own
        monkeypatch.delenv(name, raising=False)
    try:
        native_build.load()
    except native_build.NativeUnavailable as error:
        pytest.skip(f"native kernels: {error}")
    from megatron.core.transformer.enums import AttnBackend

    how = {"batch_invariant_mode": True, "attention_backend": AttnBackend.flash}
    if "flash_attention_version" in config_fields():
        how["flash_attention_version"] = 3
    session = make_session(tiny_gpt(params_dtype=torch.bfloat16, init_method_std=0.2, **how))
    assert session.engine.config.batch_invariant
    with session.generating() as roll:
        groups = roll.generate(prompts(), SamplingParams(n=2, max_tokens=9, ignore_eos=True, seed=3))
    samples = [sample for group in groups for sample in group.samples]
    starts = [len(sample.prompt_ids) for sample in samples]
    scores = session.score([sample.ids for sample in samples], start=starts)
    for sample, score in zip(samples, scores, strict=True):
        assert torch.equal(score, torch.tensor(sample.raw_logprobs))
    with pytest.raises(ConfigError, match="weight_dtype='int8' excludes batch_invariant=True") as refused:
        make_session(tiny_gpt(**how), settings={"weight_dtype": "int8"})
    assert any("config.batch_invariant_mode" in note for note in refused.value.__notes__)


def test_an_action_to_replay_that_a_trainer_left_refuses_scores():
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    RouterReplay.clear_global_router_replay_instances()
    session = make_session(tiny_gpt(**SERVED["replay"]))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    with pytest.raises(ConfigError, match=r"layers.0.mlp.router replays the experts of other tokens"):
        session.score(prompts())
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    scores = session.score(prompts())
    recorded = RouterReplay.get_recorded_data()
    assert all(one is not None for one in recorded)
    with session.generating() as roll:
        groups = roll.generate(prompts(), SamplingParams(max_tokens=5, ignore_eos=True, return_routing=True))
    assert all(now is then for now, then in zip(RouterReplay.get_recorded_data(), recorded, strict=True))
    samples = [group.samples[0] for group in groups]
    with replay_routing(session.model, [one.routing for one in samples], [one.ids for one in samples]):
        session.score([one.ids for one in samples])
    assert len(scores) == 3
