"""An adapter that PEFT wrote computes here what it computes in PEFT."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from hf_models import logits_of, random_model
from lora_cases import merged
from plain_forward import full_logits

from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.sources import open_source
from megatron_infer.models.lora.names import AdaptedLinears
from megatron_infer.models.lora.peft import read_adapter

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs the peft package")

IDS = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(1)).tolist()
DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "every_target": ("llama", DENSE, {}),
    "one_head_each": ("llama_mha", ["q_proj", "v_proj"], {"r": 1}),
    "wide": ("qwen3", DENSE, {"r": 64, "lora_alpha": 16}),
    "rslora": ("llama", ["k_proj", "o_proj", "up_proj"], {"use_rslora": True, "r": 9}),
    "patterns": (
        "llama",
        DENSE,
        {
            "rank_pattern": {"q_proj": 2, r"layers\.1\.self_attn\.v_proj": 7, "^model.layers.0.mlp.up_proj": 3},
            "alpha_pattern": {"v_proj": 5.0, "down_proj": 1},
        },
    ),
    "some_layers": ("llama", ["q_proj", "down_proj"], {"layers_to_transform": [1], "layers_pattern": "layers"}),
    "by_pattern": ("llama", r".*\.layers\.\d+\.(self_attn|mlp)\.(v|gate)_proj", {}),
    "all_linear": ("llama", "all-linear", {"exclude_modules": ["k_proj"]}),
    "phi3": ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], {}),
    "gpt2": ("gpt2", ["c_attn", "c_proj", "c_fc"], {"fan_in_fan_out": True}),
    "mamba2": ("mamba2", ["in_proj"], {}),
    "qwen3_5": ("qwen3_5", [*DENSE, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"], {}),
    "qwen3_next": ("qwen3_next", ["q_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"], {}),
    "nemotron_h": (
        "nemotron_h_experts",
        r".*\.mixer\.(in_proj|q_proj|k_proj|v_proj|o_proj)|.*shared_experts\.(up_proj|down_proj)",
        {},
    ),
    "bamba": ("bamba", [*DENSE, "in_proj", "out_proj"], {}),
    "granite": ("granite_factors", ["q_proj", "v_proj", "o_proj", "in_proj", "out_proj", "input_linear",
                                    "output_linear"], {}),
}  # fmt: skip


def saved(tmp_path, kind, targets, **options):
    """(the base model's directory, the adapter's directory, the model under PEFT); every factor is random."""
    import peft

    model = random_model(kind)
    model.save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=targets, **{"r": 4, "lora_alpha": 8} | options)
    wrapped = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    wrapped.save_pretrained(tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter", wrapped


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_computes_what_it_computes_in_peft(case, tmp_path):
    kind, targets, options = CASES[case]
    base, folder, wrapped = saved(tmp_path, kind, targets, **options)
    source = open_source(base)
    model = build_model(source)
    without = full_logits(model, IDS)
    adapter = read_adapter("one", folder, model, description=source.config())
    expected = logits_of(wrapped, IDS)
    assert (without - expected).abs().max() > 0.1, "the adapter changes nothing"
    scale = expected.abs().max()
    rounding = 3e-5 if kind == "qwen3_next" else 1e-5  # its norms divide by small states
    assert (full_logits(merged(model, adapter), IDS) - expected).abs().max() < rounding * max(scale, 1)


def test_kv_groups_that_a_model_is_padded_with_get_zeros(tmp_path):
    """As `build_model` adds them where groups do not divide over ranks: here a third one."""
    base, folder, _ = saved(tmp_path, "llama", DENSE)
    description = open_source(base).config()
    model = build_model(open_source(base))
    whole = read_adapter("one", folder, model, description=description).pairs
    model.config.num_query_groups = 3
    padded = read_adapter("one", folder, model, description=description).pairs
    linears = [AdaptedLinears(description, num_groups=count) for count in (None, 3)]
    for part, out, width in (("linear_qkv", 24, 0), ("linear_proj", 0, 24)):
        path = f"decoder.layers.1.self_attention.{part}"
        assert padded[path].shape == (whole[path].shape[0] + 5 * out // 3, whole[path].shape[1] + width), part
        pairs = (whole[path], padded[path])
        own, other = (one.by_path[path].parted(pair.b @ pair.a) for one, pair in zip(linears, pairs, strict=True))
        for source, rows in own.items():
            count = rows.shape[1]
            assert rows.any() and torch.equal(other[source][:, :count], rows) and not other[source][:, count:].any()
        assert (padded[path].b != 0).any(dim=1).sum() == len(whole[path].b)
