"""Layers whose torch code is compiled answer as they do without. The compiler itself runs in one slow test alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from model_kinds import make_model

from megatron_infer.config.inference import ConfigWarning, InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.compile_layers import OPERATION
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError
from megatron_infer.kernels.cpu_torch import TorchOps
from megatron_infer.models.adopt import adopt
from megatron_infer.models.compiled_layers import CompiledLayer
from megatron_infer.models.fused_layers import FusedActivation, FusedLinear, FusedNorm, SplitHeads
from megatron_infer.models.fused_mixer import GatedNorm, SplitColumns
from megatron_infer.models.moe import FusedExperts
from megatron_infer.models.piece_compiler import PURE, CompiledPiece, PieceCompiler, pure_form_of
from megatron_infer.testing.eager_recorder import EAGER
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.replay_recorder import REPLAY
from megatron_infer.testing.static_kernels import STATIC
from megatron_infer.testing.tiny import tiny_gpt

BASE: dict[str, Any] = {
    "buffer_size_gb": 0.01,
    "block_size_tokens": 16,
    "max_sequence_length": 64,
    "max_requests": 6,
    "max_tokens": 48,
    "enable_chunked_prefill": True,
}
OTHER_KINDS: dict[str, Any] = {
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation_func": torch.nn.functional.gelu,
    "add_bias_linear": True,
    "qk_layernorm": True,
}


@pytest.fixture
def graphs_as_they_are(monkeypatch):
    """torch.compile without its compiler: what dynamo found is run as it is."""
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs: graph)


def make_engine(model: torch.nn.Module, **settings: Any) -> DynamicInferenceEngine:
    return DynamicInferenceEngine(model, InferenceConfig(**{**BASE, **settings}))


def answers(engine: DynamicInferenceEngine, num_requests: int = 6) -> list[list[int]]:
    """Prompts of many lengths that end one after the other: batches of every size down to one token."""
    prompts = [[5 + i, *range(6, 6 + 4 * i)] for i in range(num_requests)]
    params = [SamplingParams(temperature=0.0, max_tokens=3 + 2 * i, ignore_eos=True) for i in range(num_requests)]
    return [output.outputs[0].token_ids for output in engine.generate(prompts, params)]


def compiler_of(engine: DynamicInferenceEngine) -> PieceCompiler:
    assert inspect(engine).adopted.compiler is not None
    return inspect(engine).adopted.compiler


def row_of(engine: DynamicInferenceEngine) -> Any:
    return next(row for row in engine.kernels.rows if row.operation == OPERATION)


def test_tokens_are_the_same_and_no_batch_size_compiles_anything(graphs_as_they_are):
    model = tiny_gpt(vocab_size=128, max_sequence_length=64, init_method_std=0.2, num_layers=3)
    expected = answers(make_engine(model))
    engine = make_engine(model, compile_layers=True)
    compiler = compiler_of(engine)
    at_start = compiler.num_compiles
    assert compiler.num_functions == 2, "a layer has two pieces, and all layers share them"
    assert at_start == 6, "for many tokens and one, and the first layer's has no residual"
    assert answers(engine) == expected
    assert compiler.num_compiles == at_start
    assert f"{at_start} times" in row_of(engine).chosen


def test_a_hybrids_mixers_attention_and_mlps_are_compiled_and_experts_are_not(graphs_as_they_are):
    model = make_model("hybrid", vocab_size=128, max_sequence_length=64)
    expected = answers(make_engine(model))
    engine = make_engine(model, compile_layers=True)
    at_start = compiler_of(engine).num_compiles
    assert answers(engine) == expected
    assert compiler_of(engine).num_compiles == at_start
    layers = inspect(engine).adopted.layers
    assert all(isinstance(layer, CompiledLayer) for layer in layers)
    has_pieces = [any(type(operation) is CompiledPiece for operation in layer.operations) for layer in layers]
    assert has_pieces == [symbol != "E" for symbol in "M*-ME*M"]


def test_norms_biases_and_activations_of_other_kinds_answer_the_same(graphs_as_they_are):
    model = tiny_gpt(vocab_size=128, max_sequence_length=64, init_method_std=0.2, **OTHER_KINDS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    expected = answers(make_engine(model))
    assert answers(make_engine(model, compile_layers=True)) == expected


def test_weights_changed_in_place_and_replaced_ones_are_seen_without_another_compile(graphs_as_they_are):
    model = tiny_gpt(vocab_size=128, max_sequence_length=64, init_method_std=0.2, num_layers=2)
    engine = make_engine(model, compile_layers=True)
    compiler, before = compiler_of(engine), answers(engine)
    at_start = compiler.num_compiles
    layer = model.decoder.layers[0]
    with torch.no_grad():
        layer.mlp.linear_fc1.weight.mul_(-1.5)
        fresh = torch.randn_like(layer.self_attention.linear_qkv.weight) * 0.3
    layer.self_attention.linear_qkv.weight = torch.nn.Parameter(fresh)
    changed = answers(engine)
    assert changed == answers(make_engine(model)) != before
    assert compiler.num_compiles == at_start


def test_padded_steps_are_compiled_and_the_stand_in_of_a_graph_is_refused_with_a_reason(
    graphs_as_they_are, monkeypatch
):
    monkeypatch.setenv("MEGATRON_INFER_BACKEND", STATIC)
    monkeypatch.setenv("MEGATRON_INFER_GRAPHS", EAGER)
    model = tiny_gpt(vocab_size=128, max_sequence_length=64, init_method_std=0.2, num_layers=2)
    expected = answers(make_engine(model))
    engine = make_engine(model, compile_layers=True, num_cuda_graphs=-1)
    assert answers(engine) == expected
    assert inspect(engine).runner.graphs is not None and inspect(engine).runner.graphs.pool.counts.replays
    monkeypatch.setenv("MEGATRON_INFER_GRAPHS", REPLAY)
    with pytest.warns(ConfigWarning, match="does not see what compiled layers launch"):
        engine = make_engine(model, compile_layers=True, num_cuda_graphs=-1)
    assert inspect(engine).runner.graphs is None


class _Attentive:
    """A step whose attention and scan mix what they are given, with plain torch operations."""

    ops = TorchOps()

    @staticmethod
    def attend(layer, q, k, v, spec):
        return (q + (k * v)[:, :, None]).flatten(1)

    @staticmethod
    def ssm(layer, xBC, dt, weights, spec):
        return xBC[:, : spec.inner_width] * dt.mean(-1, keepdim=True)


@pytest.mark.parametrize("kind", ["plain", "other", "hybrid"])
@torch.inference_mode()
def test_the_pure_form_of_every_operation_computes_what_its_run_computes(kind):
    settings = {"vocab_size": 128, "max_sequence_length": 64, "init_method_std": 0.2}
    if kind == "hybrid":
        model = make_model("hybrid", **settings)
    else:
        model = tiny_gpt(**settings, **(OTHER_KINDS if kind == "other" else {}))
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    step, seen = _Attentive(), set()
    x, residual = torch.randn(5, model.config.hidden_size), None
    for layer in adopt(model).layers:
        for operation in layer.operations:
            if type(operation) is FusedExperts:
                continue
            if (form := pure_form_of(operation)) is not None:
                live = tuple(parameters[name] for parameters, name in form.sources)
                found = form.apply(x, residual, live)
                seen.add(type(operation))
            x, residual = operation.run(step, x, residual)
            if form is not None:
                torch.testing.assert_close(found, (x, residual), rtol=1e-4, atol=1e-5)
    wanted = {FusedNorm, FusedLinear, FusedActivation, SplitHeads}
    mixers = {GatedNorm, SplitColumns}
    assert seen == {"plain": wanted - {SplitHeads}, "other": wanted, "hybrid": wanted - {SplitHeads} | mixers}[kind]
    assert wanted | mixers == set(PURE)


def test_without_a_compiler_layers_run_as_they_are_and_the_table_says_why(monkeypatch):
    def missing(graph, inputs):
        raise RuntimeError("no C++ compiler was found")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", missing)
    model = tiny_gpt(vocab_size=128, max_sequence_length=64, init_method_std=0.2)
    with pytest.warns(ConfigWarning, match="compile_layers=True: .*no C\\+\\+ compiler"):
        engine = make_engine(model, compile_layers=True)
    assert row_of(engine).chosen == "as they are" and "no C++ compiler" in row_of(engine).reasons["torch.compile"]
    assert inspect(engine).adopted.compiler is None
    assert answers(engine) == answers(make_engine(model))


def test_exact_mode_is_refused_with_compiled_layers():
    with pytest.raises(ConfigError, match="compile_layers=True excludes batch_invariant=True"):
        InferenceConfig(compile_layers=True, batch_invariant=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_tokens_are_the_same_with_what_the_compiler_makes(kind):
    model = make_model(kind, vocab_size=128, max_sequence_length=64)
    expected = answers(make_engine(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConfigWarning)
        engine = make_engine(model, compile_layers=True)
    at_start = compiler_of(engine).num_compiles
    assert answers(engine) == expected
    assert compiler_of(engine).num_compiles == at_start
