"""A family's row names the tensors of transformers' own model, in both directions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hybrid_models import CASES as HYBRID
from hybrid_models import random_hybrid
from plain_forward import full_logits
from safetensors.torch import load_file
from test_hf_parity import CASES as DENSE
from test_hf_parity import SIZES, random_hf_model

from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.families import FAMILIES, Key
from megatron_infer.models.loading.hf_export import tensors_of
from megatron_infer.models.loading.hf_weights import source_shapes
from megatron_infer.models.loading.sources import open_source

pytest.importorskip("transformers")

CASES = [*DENSE, *HYBRID]
ONE_WAY = ("granite_factors", "granite_factors_tied", "granite_tied", "granite_biases", "granite_experts")
"""Loading multiplies factors into their weights, or all experts are in one tensor."""


def opened(case, folder):
    """(source, its tensors) of a model that transformers has written."""
    model = random_hf_model(*DENSE[case]) if case in DENSE else random_hybrid(case)
    model.save_pretrained(folder)
    return open_source(folder), load_file(folder / "model.safetensors")


def test_every_family_has_a_case():
    import transformers

    kinds = {kind for kind, _ in (*DENSE.values(), *HYBRID.values())}
    assert {getattr(transformers, kind).model_type for kind in kinds} == {one.model_type for one in FAMILIES.values()}


@pytest.mark.parametrize("case", CASES)
def test_tensors_are_read_and_written_under_transformers_names(case, tmp_path):
    source, theirs = opened(case, tmp_path)
    model = build_model(source)
    assert source_shapes(model, source.config()) == {name: tuple(one.shape) for name, one in theirs.items()}
    if case in ONE_WAY:
        return
    ours = dict(tensors_of(model, source.config()))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], one) for name, one in theirs.items())


def test_a_family_with_experts_is_a_row(monkeypatch, tmp_path):
    """Nothing but its row says what is particular to it: an example of a family that is to come."""
    import transformers

    qwen3 = FAMILIES["Qwen3ForCausalLM"]
    row = replace(
        qwen3,
        model_type="qwen3_moe",
        gguf="",
        is_written=False,
        fields={
            **qwen3.fields,
            "num_moe_experts": Key("num_experts", 128),
            "moe_router_topk": Key("num_experts_per_tok", 8),
            "moe_ffn_hidden_size": Key("moe_intermediate_size", 768),
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": False,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
        },
        tensors={
            **{name: named for name, named in qwen3.tensors.items() if not name.startswith("mlp.")},
            "mlp.router": "mlp.gate",
            "mlp.experts.linear_fc1": ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
            "mlp.experts.linear_fc2": "mlp.experts.{expert}.down_proj",
        },
        ignored_keys=("output_router_logits", "router_aux_loss_coef"),
        renamed_keys={"num_local_experts": "num_experts"},
        required={
            "norm_topk_prob": ((True,), "megatron-core normalises the weights of several experts"),
            "decoder_sparse_step": ((1,), "every layer has experts"),
        },
    )
    monkeypatch.setitem(FAMILIES, "Qwen3MoeForCausalLM", row)
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    config = transformers.Qwen3MoeConfig(**SIZES, head_dim=16, **experts)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15)
    theirs.save_pretrained(tmp_path)
    source, tensors = open_source(tmp_path), load_file(tmp_path / "model.safetensors")
    model = build_model(source)
    ours = dict(tensors_of(model, source.config()))
    assert ours.keys() == tensors.keys() and all(torch.equal(ours[name], one) for name, one in tensors.items())
    ids = list(range(40))
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert expected.abs().max() > 0.1
    assert (full_logits(model, ids) - expected).abs().max() < 1e-4
