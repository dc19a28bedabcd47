"""A step's layers in one native call have the bits of their operations one by one, and follow the live weights."""

from __future__ import annotations

import gc
import os
import weakref
from functools import partial
from typing import Any

import engines
import pytest
import torch
from lora_cases import random_adapter
from model_kinds import SOFTCAPPED, make_model

from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.kernels.activations import squared_relu
from megatron_infer.kernels.native import native_build
from megatron_infer.kernels.native.cpu_native import PANELS
from megatron_infer.kernels.native.native_layers import NativeLayers
from megatron_infer.testing.tiny import EXPERTS

SIZES = {"max_sequence_length": 64, "max_requests": 6, "max_tokens": 24, "enable_chunked_prefill": True}
engine_of = partial(engines.make_engine, **SIZES)


MANY = EXPERTS | {"num_moe_experts": 8, "moe_router_topk": 3, "moe_router_dtype": "fp32"}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"add_bias_linear": True},
    "layer norm": {"normalization": "LayerNorm"},
    "norms on both sides": SOFTCAPPED | {"qk_layernorm": False},
    "experts": MANY | {"moe_shared_expert_intermediate_size": 32, "moe_router_pre_softmax": True},
    "experts, gate": MANY | {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True},
    "experts, groups": MANY
    | {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk": 4,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "experts, latent": MANY | {"moe_shared_expert_intermediate_size": 32, "moe_latent_size": 16},
    "experts, bias": MANY
    | {
        "add_bias_linear": True,
        "gated_linear_unit": False,
        "activation_func": squared_relu,
        "moe_layer_freq": [1, 0, 1],
    },
}


def model_of(kind: str, dtype: torch.dtype) -> torch.nn.Module:
    if kind == "hybrid":
        return make_model("hybrid", moe_router_dtype="fp32").to(dtype)
    model = make_model("attention", num_layers=3, **KINDS[kind]).to(dtype)
    for module in model.modules():
        if getattr(module, "expert_bias", None) is not None:  # which stays in fp32, whatever the model's dtype
            module.expert_bias.data = torch.linspace(-0.1, 0.1, 8)
    return model


def answers(engine: DynamicInferenceEngine, *adapters: str | None, **more: Any) -> list[tuple[list[int], Any]]:
    """Chunked prompts and decode rows in one step, batches of every size; requests have the adapters in turn."""
    names = adapters or (None,)
    prompts = [[5 + i, *range(6, 6 + 8 * i)] for i in range(6)]
    greedy = {"temperature": 0.0, "ignore_eos": True, "logprobs": 2, **more}
    params = [SamplingParams(max_tokens=3 + 2 * i, adapter=names[i % len(names)], **greedy) for i in range(6)]
    found = engine.generate(prompts, params)
    outputs = [output.outputs[0] for output in found]
    return [
        (one.token_ids, repr((one.logprobs, None if one.routing is None else one.routing.tolist()))) for one in outputs
    ]


def test_native_kernels_are_there_wherever_a_compiler_is():
    """Tests of native kernels are skipped without them: where they can be built, none may be."""
    try:
        native_build.find_compiler()
    except native_build.NativeUnavailable:
        if "CI" in os.environ:
            raise
        pytest.skip("no C++ compiler")
    native_build.load()
    for dtype in (torch.float32, torch.bfloat16):
        kernels = engine_of(model_of("plain", dtype)).kernels
        linear = next(row for row in kernels.rows if row.operation == "linear")
        assert kernels.layers is not None, f"{dtype}: a call for each operation"
        assert linear.chosen == PANELS, linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", [*KINDS, "hybrid"])
def test_one_call_has_the_bits_of_many(monkeypatch, kind, dtype):
    model = model_of(kind, dtype)
    engine = engine_of(model)
    if engine.kernels.layers is None:
        pytest.skip("no native layers for this dtype here")
    got = answers(engine)
    seconds = engine.kernels.layers.take_seconds()
    has_experts = engine.shape.experts is not None
    assert seconds["linears"] > 0 and (seconds["experts"] > 0) == has_experts
    if has_experts:  # with the choices, which narrow steps do not have
        routed = answers(engine, return_routing=True)
        assert [one[0] for one in routed] == [one[0] for one in got]
    monkeypatch.setattr(NativeLayers, "run", lambda *arguments, **_: None)
    assert answers(engine_of(model)) == got
    if has_experts:
        assert answers(engine_of(model), return_routing=True) == routed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["plain", "hybrid"])
def test_one_call_has_the_bits_of_many_with_adapters(monkeypatch, kind, dtype):
    """Base rows and three adapters, one of few linears, in two slots; one is replaced between two runs."""
    model = model_of(kind, dtype)
    few = random_adapter(model, "c", rank=2, targets=("linear_proj", "linear_fc1"), seed=3)
    adapters = [random_adapter(model, "a", rank=5, seed=1), random_adapter(model, "b", rank=16, seed=2), few]

    def runs() -> tuple[list[Any], DynamicInferenceEngine]:
        engine = engine_of(model, lora=LoRAConfig(max_loras=2, max_rank=16))
        for adapter in adapters:
            engine.load_adapter(adapter.name, adapter)
        found = answers(engine, None, "a", "b", "c")
        engine.load_adapter("a", random_adapter(model, "a", rank=3, seed=4), replace=True)
        return [found, answers(engine, "a", None), answers(engine)], engine

    got, engine = runs()
    if engine.kernels.layers is None:
        pytest.skip("no native layers for this dtype here")
    seconds = engine.kernels.layers.take_seconds()
    assert seconds["adapters"] > 0
    answers(engine)
    assert engine.kernels.layers.take_seconds()["adapters"] == 0
    assert got[2] == answers(engine_of(model)) != got[0]
    monkeypatch.setattr(NativeLayers, "run", lambda *arguments, **_: None)
    assert runs()[0] == got


@pytest.mark.parametrize("change", ["in place", "data", "pointer", "object"])
@pytest.mark.parametrize("kind", ["plain", "experts, groups"])
def test_a_weight_or_a_norm_that_changes_is_followed(kind, change):
    model = model_of(kind, torch.float32)
    engine = engine_of(model)
    if engine.kernels.layers is None:
        pytest.skip("no native kernels here")
    before = answers(engine)
    layer = model.decoder.layers[1]
    with torch.no_grad():
        modules = [layer.input_layernorm]
        if kind == "plain":
            modules += [layer.mlp.linear_fc1]
        else:
            modules += [layer.mlp.router, layer.mlp.experts.local_experts[1].linear_fc1]
        for module in modules:
            weight = module.weight
            if change == "in place":
                weight.mul_(1.5)
            elif change == "data":
                weight.data.mul_(1.5)
            elif change == "pointer":
                weight.data = weight.data * 1.5
            else:
                module.weight = torch.nn.Parameter(weight * 1.5)
    after = answers(engine)
    assert after != before and after == answers(engine_of(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_behind_the_last_attention_only_tokens_that_draw_are_computed(monkeypatch, dtype):
    """Prompts of one token with n > 1, chunks that draw nothing, and decode rows beside them: the same bits."""
    model = model_of("plain", dtype)
    greedy = {"temperature": 0.0, "ignore_eos": True, "logprobs": 2, "max_tokens": 4}
    prompts = [list(range(3, 50)), [9], [5, 6], list(range(40, 60))]
    params = [SamplingParams(n=3 if number == 1 else 1, **greedy) for number in range(4)]
    wide = [*params[:3], SamplingParams(**greedy, prompt_logprobs=1)]
    run, counts = NativeLayers.run, []

    def counted(self, program, kv_cache, x_TD, residual_TD, *, kept_S=None, **more):
        counts.append((len(x_TD), None if kept_S is None else len(kept_S)))
        return run(self, program, kv_cache, x_TD, residual_TD, kept_S=kept_S, **more)

    def said(params: list[SamplingParams]) -> list[str]:
        outputs = engine_of(model).generate(prompts, params)
        return [repr([(one.token_ids, one.logprobs) for one in output.outputs]) for output in outputs]

    if engine_of(model).kernels.layers is None:
        pytest.skip("no native layers for this dtype here")
    monkeypatch.setattr(NativeLayers, "run", counted)
    narrow = said(params)
    kept = [pair for pair in counts if pair[1] is not None]
    assert any(num_kept == 0 for _, num_kept in kept) and any(0 < num_kept < num for num, num_kept in kept)
    assert all(num_kept < num for num, num_kept in kept)
    counts.clear()
    assert said(wide) == narrow
    assert sum(num_kept is not None for _, num_kept in counts) < len(kept), "prompt log probabilities need all tokens"
    monkeypatch.setattr(NativeLayers, "run", lambda *arguments, **_: None)
    assert said(params) == narrow


def test_released_copies_are_freed_though_steps_have_used_them():
    model = model_of("plain", torch.float32)
    engine = engine_of(model)
    if engine.kernels.layers is None:
        pytest.skip("no native kernels here")
    before = answers(engine)
    copy = weakref.ref(engine.kernels.packed.get(id(model.decoder.layers[1].mlp.linear_fc1.weight)))
    assert copy() is not None
    engine.suspend("offload")
    gc.collect()
    assert copy() is None
    engine.resume()
    assert answers(engine) == before
