"""Models that train in FP8 on the stand-in of Transformer Engine: what they generate, and what they train with after.

Cases of foreign_models, which runs them.
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from unittest import mock

import torch
import transformer_engine.pytorch as te
from plain_forward import full_logits
from replay_recorder import REPLAY
from static_kernels import STATIC
from transformer_engine.pytorch import cpp_extensions
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
from transformer_engine.pytorch.quantisers import QuantizedTensor, Quantizer

from megatron_infer import DynamicInferenceEngine, InferenceConfig, SamplingParams
from megatron_infer.errors import AdoptionError, ModelError
from megatron_infer.kernels.torch.cpu_torch import TorchOps
from megatron_infer.models import fp8 as products
from megatron_infer.models.adopt import adopt
from megatron_infer.models.exact_forward import exact_logprobs
from megatron_infer.models.fused_layers import LayerOps
from megatron_infer.rl.updates.inventory import Inventory
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

PROMPTS = [[5, 17, 3, 99, 42, 8, 8, 61], [7, 7, 1], [88] * 21]
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}
EXPERTS |= {"moe_router_load_balancing_type": "none", "moe_grouped_gemm": True}
NEAR_TIE = 0.1
"""Of the logits' spread."""
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
OF_THE_ROW = ("delayed", "blockwise", "mxfp8")
"""Recipes under which a row's product is its own."""


def make(spec, recipe, *, kept_in_fp8=False, build=tiny_gpt, **more):
    """A model as a trainer has it after its first step."""
    model = build(spec=spec, fp8="hybrid", fp8_recipe=recipe, fp8_param=kept_in_fp8, fp8_amax_history_len=4, **more)
    train(model)
    return model


def train(model, seed=1):
    """A forward in training mode, and weights changed as an optimizer changes them -> the logits."""
    tokens = torch.tensor([PROMPTS[0] * 4])
    model.train()
    model.set_is_first_microbatch()
    logits = model(tokens, torch.arange(tokens.shape[1])[None], None).detach().clone()
    model.eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            value = parameter.dequantize() if isinstance(parameter, QuantizedTensor) else parameter.detach()
            change = 0.02 * torch.randn(value.shape, generator=draw, dtype=value.dtype)
            parameter.copy_(value + change) if isinstance(parameter, QuantizedTensor) else parameter.data.add_(change)
    return logits


def make_engine(model, **settings):
    base = {"buffer_size_gb": 0.01, "block_size_tokens": 16, "max_sequence_length": 64, "max_requests": 4}
    return DynamicInferenceEngine(model, InferenceConfig(**base | {"check_invariants": True} | settings))


def answers(engine, prompts=PROMPTS, num_tokens=6):
    asked = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, asked, request_id=str(number))
    done = {}
    while len(done) < len(prompts):
        done |= {out.request_id: list(out.outputs[0].token_ids) for out in engine.step() if out.finished}
    return [done[str(number)] for number in range(len(prompts))]


def check_answer(model, prompt, answer):
    """Each token is the likeliest of the model's own full forward, or all but: norms' last bits may turn a code."""
    ids = prompt + answer
    model.set_is_first_microbatch()
    with torch.inference_mode():
        logits = full_logits(model, ids + [0] * (-len(ids) % 32))[len(prompt) - 1 : len(ids) - 1, :128]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])
    behind = (logits.amax(1, keepdim=True) - chosen) / logits.std()
    assert behind.max() < NEAR_TIE and (behind == 0).sum() >= len(answer) - 1, f"{answer}: {behind.flatten()}"


def frozen(value):
    """A value that later writes do not reach, and that `==` compares to the bit."""
    if isinstance(value, QuantizedTensor):
        return type(value).__name__, *map(frozen, value.held())
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().clone().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {str(key): frozen(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(one) for one in value]
    if isinstance(value, Quantizer) or type(value).__name__ in ("RecipeState", "FP8GlobalState", "Storage"):
        return {key: frozen(one) for key, one in vars(value).items()}
    return repr(value)


def state_of(model):
    """All that Transformer Engine keeps between a forward and the next, weights and generators."""
    names = ("fp8", "fp8_initialized", "fp8_meta", "quantizers", "_fp8_workspaces", "is_first_microbatch")
    modules = {name: module for name, module in model.named_modules() if hasattr(module, "fp8_meta")}
    assert modules
    return {
        "modules": {
            name: [sorted(vars(module)), *(frozen(getattr(module, key, None)) for key in names)]
            for name, module in modules.items()
        },
        "global": frozen(FP8GlobalStateManager.state),
        "weights": {name: frozen(parameter) for name, parameter in model.named_parameters()},
        "generator": frozen(torch.get_rng_state()),
    }


def same_answers(spec, recipe, **more):
    model = make(spec, recipe, **more)
    num_tokens = 6 if recipe in OF_THE_ROW else 1  # with one scale for all rows an answer depends on the other rows
    for prompt in PROMPTS[:2] if recipe in OF_THE_ROW else [list(range(32))]:
        check_answer(model, prompt, answers(make_engine(model), [prompt], num_tokens)[0])
    fp8 = adopt(model).fp8
    linears = sum(isinstance(module, (te.Linear, te.LayerNormLinear)) for module in model.modules())
    assert fp8.num_products >= linears


def make_alone(spec, recipe, **more):
    """A model after two steps, with a global state in which there is no other."""
    FP8GlobalStateManager.reset()
    model = make(spec, recipe, **more)
    train(model, seed=2)
    return model


def training_goes_on(spec, recipe, **more):
    """Answers, an abort and a step that fails between two training steps: the second is as without them."""
    model = make_alone(spec, recipe, **more)
    before, outer = state_of(model), FP8GlobalStateManager.state
    engine = make_engine(model)
    answers(engine)
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=9, ignore_eos=True, seed=1), request_id="aborted")
    engine.step()
    engine.abort("aborted")
    calls = iter(range(10**9))

    @functools.wraps(cpp_extensions.general_gemm)
    def breaks(*args, **options):
        if next(calls) == 3:
            raise RuntimeError("cuBLAS")
        return cpp_extensions.general_gemm(*args, **options)

    with mock.patch.object(products, "_general_gemm", lambda: breaks):
        engine = make_engine(model)
    engine.add_request(PROMPTS[1], SamplingParams(max_tokens=9, ignore_eos=True))
    (failed,) = engine.step()
    assert failed.finished and "cuBLAS" in str(failed.error)
    after = state_of(model)
    for part, value in before.items():
        assert after[part] == value, f"{part} changed"
    goes_on = train(model, seed=3)
    assert FP8GlobalStateManager.state is outer
    twin = make_alone(spec, recipe, **more)
    assert torch.equal(goes_on, train(twin, seed=3)), "training went on otherwise"
    assert state_of(model)["modules"] == state_of(twin)["modules"]


def updates_are_seen(spec, *, kept_in_fp8):
    model = make(spec, "delayed", kept_in_fp8=kept_in_fp8)
    engine = make_engine(model, num_cuda_graphs=None)
    first = answers(engine)
    fp8 = inspect(engine).adopted.fp8
    addresses = fp8.addresses, engine.weights.guard.addresses
    assert bool(fp8.num_bytes) is not kept_in_fp8
    train(model, seed=5)
    engine.refresh_weights()
    second = answers(engine)
    assert second == answers(make_engine(model)) != first
    assert addresses == (fp8.addresses, engine.weights.guard.addresses)
    scale = next(fp8.live_scales())
    scale.mul_(0.5)  # as a forward of the trainer does
    assert engine.weights.guard.moved()
    engine.refresh_weights()
    assert fp8.differs() is None
    with engine.suspended(tags=["weights"]):
        assert fp8.num_bytes == 0
    assert answers(engine) == answers(make_engine(model))


def rows_are_their_own(spec):
    """Whether rows come with others or with the zeros that fill them up to a multiple."""
    for recipe in RECIPES:
        adopted = adopt(make(spec, recipe))
        adopted.fp8.refresh()
        linear = next(adopted.layers[0].linears())
        with torch.inference_mode():
            x = torch.randn(40, 64)
            few, many = linear.product(x[:3], None), linear.product(x, None)[:3]
            loud = torch.cat((x[:3], 1e4 * x[3:]))
            if recipe in OF_THE_ROW:
                assert torch.equal(few, many)
                continue
            assert not torch.equal(few, linear.product(loud, None)[:3])
            adopted.fp8.padding_T1 = torch.arange(40)[:, None] >= 3
            assert torch.equal(few, linear.product(loud, None)[:3])


class Doubles:
    """The sum over two ranks that have the same part."""

    @staticmethod
    def all_reduce(x):
        return 2 * x


def ranks_add_up(spec):
    """What ranks add up are products in FP8 without a bias, which comes after."""
    adopted = adopt(make(spec, "delayed", add_bias_linear=True))
    adopted.fp8.refresh()
    linear = list(adopted.layers[0].linears())[1]
    with torch.inference_mode():
        x, bias = torch.randn(5, 64), linear.parameters["bias"]
        alone = linear.product(x, None)
        linear.reduce = Doubles()
        summed, _ = LayerOps(*linear.flat()).run(SimpleNamespace(ops=TorchOps(), lora=None), x)
        assert torch.equal(summed, 2 * alone + bias)


def padded_steps(spec, recipe):
    """Steps that are padded and captured give the answers of the same steps as they are."""
    model = make(spec, recipe, num_layers=2)
    asked = {"MEGATRON_INFER_BACKEND": STATIC, "MEGATRON_INFER_GRAPHS": REPLAY}
    with mock.patch.dict(os.environ, asked):
        wanted = answers(make_engine(model))
        engine = make_engine(
            model, num_cuda_graphs=-1, cuda_graph_max_tokens=24, use_cuda_graphs_for_non_decode_steps=True
        )
        assert answers(engine) == wanted
        assert inspect(engine).runner.graphs.pool.counts.replays > 0
        with engine.suspended(tags=["weights"]):  # copies come back where they have not been
            pass
        assert answers(engine) == wanted
        train(model, seed=7)
        engine.refresh_weights()
        assert answers(engine) == answers(make_engine(model)) != wanted


def says(kind, words, call):
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError("it went well")


def refusals(spec):
    def of(words, recipe="delayed", **more):
        model = tiny_gpt(spec=spec, fp8="hybrid", fp8_recipe=recipe, **more)
        says(AdoptionError, words, lambda: adopt(model))

    of(("fp8_dot_product_attention=True", "set it to False"), fp8_dot_product_attention=True)
    with mock.patch.object(FP8GlobalStateManager, "reason", "Device compute capability 8.9 or higher required"):
        of(("fp8_recipe", "8.9 or higher", "generate on a GPU that has it"))
    model = make(spec, "tensorwise")
    says(NotImplementedError, ("batch_invariant", "FP8"), lambda: make_engine(model, batch_invariant=True))
    says(Exception, ("FP8",), lambda: exact_logprobs(model, [PROMPTS[0]]))
    model = make(spec, "mxfp8", kept_in_fp8=True)
    says(ModelError, ("MXFP8Tensor", "trainer's own model", "fp8_param"), lambda: Inventory.of(model))
    model.config.fp8 = None
    says(AdoptionError, ("linear_qkv", "MXFP8Tensor", "config.fp8"), lambda: adopt(model))


def first_and_last_in_bf16(spec):
    model = make(spec, "blockwise", num_layers=3, first_last_layers_bf16=True, kept_in_fp8=True)
    assert adopt(model).fp8.num_products == 4
    engine = make_engine(model)
    check_answer(model, PROMPTS[0], answers(engine, PROMPTS[:1])[0])
    rows = {row.operation: row.chosen for row in engine.kernels.rows}
    assert rows["products in FP8"] == "transformer_engine (4 linears)"


def cases(spec, hybrid_spec):
    """Name -> case."""
    found = {}
    for recipe in RECIPES:
        found[f"fp8: {recipe}"] = lambda recipe=recipe: same_answers(
            spec, recipe, add_bias_linear=True, normalization="LayerNorm", num_layers=2
        )
        found[f"fp8: {recipe}, weights in FP8"] = lambda recipe=recipe: same_answers(
            spec, recipe, kept_in_fp8=True, num_layers=2
        )
        found[f"fp8: training after {recipe}"] = lambda recipe=recipe: training_goes_on(
            spec, recipe, num_layers=2, kept_in_fp8=recipe in ("delayed", "mxfp8")
        )
    found |= {
        "fp8: training after delayed, weights in bfloat16": lambda: training_goes_on(spec, "delayed", num_layers=2),
        "fp8: grouped experts": lambda: same_answers(spec, "delayed", **EXPERTS, num_layers=2),
        "fp8: grouped experts, weights in FP8": lambda: same_answers(
            spec, "blockwise", kept_in_fp8=True, num_layers=2, **EXPERTS
        ),
        "fp8: hybrid": lambda: same_answers(hybrid_spec, "delayed", build=lambda **more: tiny_hybrid("M*-", **more)),
        "fp8: first and last layer in bfloat16": lambda: first_and_last_in_bf16(spec),
        "fp8: updates": lambda: updates_are_seen(spec, kept_in_fp8=False),
        "fp8: updates of weights in FP8": lambda: updates_are_seen(spec, kept_in_fp8=True),
        "fp8: rows": lambda: rows_are_their_own(spec),
        "fp8: ranks": lambda: ranks_add_up(spec),
        "fp8: padded steps": lambda: padded_steps(spec, "delayed"),
        "fp8: padded steps, tensorwise": lambda: padded_steps(spec, "tensorwise"),
        "fp8: refusals": lambda: refusals(spec),
    }
    return found
