"""Models of Transformer Engine's and Apex's modules, generated from and compared with their own forward.

Run by test_foreign_models with the stand-ins on the path: megatron-core decides at import which packages there are.
Prints one JSON object: case -> what went wrong, null where nothing did.
"""

from __future__ import annotations

import json
import sys
import traceback

import fp8_models
import torch
from plain_forward import full_logits
from transformer_engine.pytorch.quantisers import Float8CurrentScalingQuantizer

from megatron_infer import DynamicInferenceEngine, InferenceConfig, SamplingParams
from megatron_infer.errors import AdoptionError
from megatron_infer.kernels.torch.cpu_torch import TorchOps
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.adopt import adopt
from megatron_infer.models.hybrid import hybrid_spec
from megatron_infer.models.layer_probes import module_probes, trace_forward
from megatron_infer.models.moe import DeviceAgnosticRouter
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import DELTA, EXPERTS, stock_spec, tiny_gpt, tiny_hybrid

PROMPT = [5, 17, 3, 99, 42, 8, 8, 61]


def te_spec(config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    if config.num_moe_experts:
        mcore.submodules_of(mcore.submodules_of(spec).mlp).router = DeviceAgnosticRouter
    return spec


def te_hybrid_spec(config):
    from megatron.core.extensions import transformer_engine as te

    spec = hybrid_spec(config)
    mamba, attention, mlp = (
        getattr(spec.submodules, f"{kind}_layer").submodules for kind in ("mamba", "attention", "mlp")
    )
    mamba.norm = attention.input_layernorm = mlp.pre_mlp_layernorm = mcore.IdentityOp
    inner = tuple(map(mcore.submodules_of, (mamba.mixer, attention.self_attention, mlp.mlp)))
    for submodules, first, last in zip(
        inner, ("in_proj", "linear_qkv", "linear_fc1"), ("out_proj", "linear_proj", "linear_fc2"), strict=True
    ):
        setattr(submodules, first, te.TELayerNormColumnParallelLinear)
        setattr(submodules, last, te.TERowParallelLinear)
    return spec


def classes(model):
    return {type(module).__qualname__ for module in model.modules()}


def generate(model, num_tokens=12):
    """Tokens of a greedy answer to PROMPT."""
    config = InferenceConfig(buffer_size_gb=0.01, block_size_tokens=16, max_sequence_length=64, max_requests=4)
    engine = DynamicInferenceEngine(model, config)
    asked = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    engine.add_request(PROMPT, asked)
    done = []
    while not done:
        done = [out for out in engine.step() if out.finished]
    return list(done[0].outputs[0].token_ids)


def same_tokens(model, *expected_classes):
    missing = set(expected_classes) - classes(model)
    assert not missing, f"the model has no {missing}"
    before = {name: value.clone() for name, value in model.state_dict().items() if torch.is_tensor(value)}
    got = generate(model)
    ids = list(PROMPT)
    for _ in got:
        ids.append(int(full_logits(model, ids)[-1, :128].argmax()))
    assert got == ids[len(PROMPT) :], f"{got} instead of {ids[len(PROMPT) :]}"
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items()), "parameters changed"
    adopted = adopt(model)
    found = trace_forward(model, module_probes(adopted), PROMPT, tp=None)
    assert len(found.layers) == model.config.num_layers


def refused(model, *words):
    try:
        adopt(model)
    except AdoptionError as error:
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError("adopted")


def delta_nets(**settings):
    """megatron-core's own GatedDeltaNet, and ours with its weights, which trains without flash-linear-attention."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

    with cpu_shim(3):
        spec = variants.get_transformer_block_with_experimental_attention_variant_spec
        model = tiny_gpt(spec=lambda config: spec(config), **DELTA | settings)
        same_tokens(model, "GatedDeltaNet", "TELayerNormColumnParallelLinear")
        x = torch.randn(9, 2, 64)
        theirs, ours = (one.decoder.layers[0].self_attention for one in (model, tiny_gpt(**DELTA | settings)))
        norm = torch.nn.functional.rms_norm(x, (64,), theirs.in_proj.layer_norm_weight + 1, theirs.in_proj.eps)
        ours.load_state_dict({name: one for name, one in theirs.state_dict().items() if "layer_norm" not in name})
        torch.testing.assert_close(ours(norm, None)[0], theirs(x, None)[0], rtol=0, atol=1e-5)


def double_norm():
    model = tiny_gpt(spec=te_spec)
    model.decoder.layers[1].pre_mlp_layernorm = torch.nn.RMSNorm(64)
    refused(model, "decoder.layers.1.pre_mlp_layernorm", "norms its input too")


def eight_bits():
    model = tiny_gpt(spec=te_spec)
    linear = model.decoder.layers[0].self_attention.linear_proj
    quantiser = Float8CurrentScalingQuantizer("e4m3", torch.device("cpu"))
    eight = quantiser(linear.weight.detach())
    del linear.weight
    linear._parameters["weight"] = eight
    refused(model, "decoder.layers.0.self_attention.linear_proj", "Float8Tensor", "fp8_param")


def own_recipe():
    model = tiny_gpt(spec=te_spec)
    model.decoder.layers[1].mlp.linear_fc2.te_quant_params = object()
    refused(model, "decoder.layers.1.mlp.linear_fc2", "recipe of its own")


def subclass():
    model = tiny_gpt(spec=te_spec)
    linear = model.decoder.layers[0].mlp.linear_fc2
    linear.__class__ = type("MyRow", (type(linear),), {"__module__": "somewhere"})
    refused(model, "somewhere.MyRow", "not known")


def norm_inside_an_expert():
    model = tiny_gpt(spec=te_spec, num_moe_experts=2, moe_router_load_balancing_type="none", moe_ffn_hidden_size=48)
    dense = tiny_gpt(spec=te_spec)
    model.decoder.layers[0].mlp.experts.local_experts[1].linear_fc1 = dense.decoder.layers[0].mlp.linear_fc1
    refused(model, "local_experts.1.linear_fc1", "TELayerNormColumnParallelLinear", "not known here")


def apex_norms():
    model = tiny_gpt(spec=stock_spec, normalization="LayerNorm")  # its attention has no forward on a CPU
    layer = model.decoder.layers[0]
    assert type(layer.input_layernorm).__qualname__ == "FusedLayerNorm"
    x = torch.randn(3, 64)
    norm, _ = adopt(model) and layer.fused.blocks[0]
    torch.testing.assert_close(norm.norm(TorchOps(), x), layer.input_layernorm(x))


FUSED = ("TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention")
CASES = {
    "adopted: apex": apex_norms,  # first: megatron-core forgets Apex once it is asked for a local spec with RMS norms
    "adopted: rms": lambda: same_tokens(tiny_gpt(spec=te_spec), *FUSED, "RMSNorm"),
    "adopted: layer norm, biases": lambda: same_tokens(
        tiny_gpt(spec=te_spec, normalization="LayerNorm", add_bias_linear=True, add_qkv_bias=True), *FUSED, "LayerNorm"
    ),
    "adopted: zero-centred, head norms, window": lambda: same_tokens(
        tiny_gpt(spec=te_spec, layernorm_zero_centered_gamma=True, qk_layernorm=True, window_size=(5, 0)), *FUSED
    ),
    "adopted: experts": lambda: same_tokens(
        tiny_gpt(spec=te_spec, **EXPERTS), "SequentialMLP", "TEColumnParallelLinear"
    ),
    "adopted: grouped experts": lambda: same_tokens(
        tiny_gpt(spec=te_spec, moe_grouped_gemm=True, **EXPERTS), "TEGroupedMLP", "TEColumnParallelGroupedLinear"
    ),
    "adopted: grouped experts with biases": lambda: same_tokens(
        tiny_gpt(spec=te_spec, moe_grouped_gemm=True, add_bias_linear=True, **EXPERTS), "TEGroupedMLP"
    ),
    "adopted: hybrid": lambda: same_tokens(
        tiny_hybrid("M*-M", spec=te_hybrid_spec), "TELayerNormColumnParallelLinear", "TERowParallelLinear"
    ),
    "adopted: gated delta nets": delta_nets,
    "adopted: gated delta nets in every second layer": lambda: delta_nets(
        linear_attention_freq=2, linear_num_value_heads=2, linear_conv_kernel_dim=3
    ),
    "refused: a norm twice": double_norm,
    "refused: weights of eight bits": eight_bits,
    **fp8_models.cases(te_spec, te_hybrid_spec),
    "refused: a recipe of its own": own_recipe,
    "refused: a subclass": subclass,
    "refused: a norm that no operation runs": norm_inside_an_expert,
}


def main():
    torch.set_num_threads(1)
    found = {}
    for name, case in CASES.items():
        if len(sys.argv) > 1 and not any(part in name for part in sys.argv[1:]):
            continue
        try:
            case()
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
    sys.stdout.write("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
