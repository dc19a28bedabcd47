"""`plan` shows the memory of recurrent state for models that have it, and only for those."""

from __future__ import annotations

import dataclasses
import json

import pytest
from shapes import model_shape

from megatron_infer.cli import plan
from megatron_infer.cli.main import main
from megatron_infer.config.graph_memory import GraphMemory
from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.layout import DP_ATTENTION_REQUESTS
from megatron_infer.config.model_shape import ExpertShape, ModelShape, StateShape

ATTENTION = model_shape(
    num_layers=8,
    num_attention_layers=2,
    num_query_heads=8,
    num_kv_heads=2,
    head_dim=64,
    hidden_size=512,
    vocab_size=1000,
    num_parameters=10_000_000,
)
STATE = StateShape(
    num_layers=6, conv_shape=(1280, 4), ssm_shape=(16, 64, 128), conv_dtype="bfloat16", ssm_dtype="float32"
)
HYBRID = dataclasses.replace(ATTENTION, state=STATE)
GRAPHS = {"num_cuda_graphs": -1, "use_cuda_graphs_for_non_decode_steps": True}
SLOT_BYTES = 6 * (1280 * 4 * 2 + 16 * 64 * 128 * 4)


def planned(shape: ModelShape, **options: object) -> tuple[InferenceConfig, ModelShape, object]:
    config = InferenceConfig(buffer_size_gb=2, max_requests=16, **options)
    return config, shape, config.resolve(shape)


def test_json_has_the_states_of_a_hybrid():
    report = plan.as_dict(*planned(HYBRID, enable_prefix_caching=True, prefix_caching_mamba_gb=0.5))
    report = json.loads(json.dumps(report))
    assert report["model"]["state"]["ssm_shape"] == [16, 64, 128]
    sizes = {name: row["value"] for name, row in report["sizes"].items()}
    assert sizes["state_slot_bytes"] == SLOT_BYTES
    assert sizes["num_cached_states"] == (1 << 29) // SLOT_BYTES == 167
    assert sizes["num_state_slots"] == 16 + 1 + 167
    assert sizes["num_blocks"] == ((2 << 30) - 16 * SLOT_BYTES) // sizes["block_bytes"]
    assert plan.as_dict(*planned(ATTENTION))["model"]["state"] is None


@pytest.mark.parametrize("shape, shown", [(HYBRID, True), (ATTENTION, False)], ids=["hybrid", "attention"])
def test_table_has_the_states_of_models_that_keep_some(shape, shown, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    plan._print_table("toy", *planned(shape))
    text = capsys.readouterr().out
    assert all((name in text) is shown for name in plan.STATE_SIZES)
    assert (f"{SLOT_BYTES:,}" in text) is shown


def test_graphs_are_counted_and_their_memory_is_estimated():
    sizes = plan.as_dict(*planned(ATTENTION, **GRAPHS, max_tokens=64))["sizes"]
    shapes, taken = sizes["graph_shapes"], sizes["graph_bytes"]
    assert shapes["value"] == "5 decode, 4 mixed"
    assert "(1, 0, 1) .. (16, 0, 16), (16, 16, 0) .. (64, 16, 0)" in shapes["how"]
    assert "captured when first needed" in shapes["how"]
    assert taken["value"] > 0 and taken["how"].startswith("estimate: ") and "measured" in taken["how"]
    config, shape, _ = planned(ATTENTION, max_tokens=64)
    on_gpu = config.on_device(is_cuda=True).resolve(shape).table()
    how = next(row.how for row in on_gpu if row.name == "graph_shapes")
    assert how.startswith("num_cuda_graphs=-1, ") and how.endswith("captured at start and at a resume")
    none = plan.as_dict(*planned(ATTENTION))["sizes"]
    assert none["graph_shapes"]["value"] == "none" and none["graph_bytes"]["value"] == 0


def test_every_graph_has_its_estimate_and_the_table_is_a_few_of_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    config, shape, sizes = planned(ATTENTION, **GRAPHS, max_tokens=64)
    graphs = json.loads(json.dumps(plan.as_dict(config, shape, sizes)))["graphs"]
    assert len(graphs["shapes"]) == len(sizes.graph_shapes) == 9
    lone, largest = graphs["shapes"][0], max(graphs["shapes"], key=lambda one: one["live_bytes"])
    assert (lone["num_tokens"], lone["num_prefill"], lone["num_decode"]) == (1, 0, 1)
    assert all(
        one["live_bytes"] == one["activations_bytes"] + max(one["scratch_bytes"], one["draw_bytes"])
        for one in graphs["shapes"]
    )
    assert graphs["pool_bytes"] == largest["live_bytes"]
    assert sizes.graph_bytes == graphs["pool_bytes"] + graphs["output_bytes"]
    assert graphs["output_bytes"] == 64 * 512 * 2 + 16 * (1000 * 4 + 41), "hidden of prefill, fp32 logits and draws"
    plan._print_graphs(shape, sizes, 1)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert len(rows) == plan.SHOWN_SHAPES and rows[0][:3] == ["1", "0", "1"]
    assert rows[-1][0] == str(largest["num_tokens"]) and rows[-1][-1] == f"{graphs['pool_bytes'] / 2**20:,.1f}"
    assert any("1 more shape" in line for line in lines)
    assert any(f"one pool: {graphs['pool_bytes'] / 2**20:,.1f} MiB" in line for line in lines)
    assert plan.as_dict(*planned(ATTENTION))["graphs"] == {"pool_bytes": 0, "output_bytes": 0, "shapes": []}


def test_sizes_of_splits_states_and_experts_are_in_their_own_shapes_only():
    experts = ExpertShape(top_k=4, fc1_width=4096, fc2_width=2048)
    decode, prefill = GraphShape(16, 0, 16), GraphShape(512, 4, 0)
    plain = GraphMemory(model=ATTENTION, max_keys=512)
    assert plain.of(prefill).scratch == 0 < plain.of(decode).scratch
    hybrid = GraphMemory(model=HYBRID, max_keys=512)
    assert hybrid.of(prefill).scratch > 4 * 2 * 16 * 64 * 128, "a state for each of two segments"
    assert hybrid.of(decode).scratch == plain.of(decode).scratch
    mixture = GraphMemory(model=dataclasses.replace(ATTENTION, experts=experts), max_keys=512)
    assert mixture.of(prefill).scratch == 512 * 4 * (2 * (4096 + 2048) + 24)
    ranks = GraphMemory(model=ATTENTION, max_keys=512, tensor_parallel_size=2)
    assert ranks.of(decode).draw - plain.of(decode).draw == 16 * (2 * 4000 - 2000), "all ranks' twice, half its own"


def test_the_dtype_is_that_of_the_linears(tmp_path, capsys, monkeypatch):
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4).save_pretrained(tmp_path)
    monkeypatch.setattr("megatron_infer.memory.device.cpu_has_bf16", lambda: False)
    monkeypatch.setattr("megatron_infer.kernels.native.native_build.find_compiler", lambda: "/usr/bin/c++")
    for backend, dtype in (("auto", "bfloat16"), ("native", "bfloat16"), ("vendor", "float32")):
        assert main(["plan", str(tmp_path), "--device", "cpu", "--linear-backend", backend, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["model"]["dtype"] == dtype


@pytest.mark.parametrize(
    "asked, max_requests, own",
    [
        (None, DP_ATTENTION_REQUESTS, True),
        (None, DP_ATTENTION_REQUESTS - 1, False),
        (True, 1, True),
        (False, 99, False),
    ],
)
def test_models_with_experts_say_whose_requests_expert_parallel_ranks_have(asked, max_requests, own, capsys):
    shape = dataclasses.replace(ATTENTION, experts=ExpertShape(top_k=2, fc1_width=512, fc2_width=256))
    config = InferenceConfig(buffer_size_gb=2, max_requests=max_requests, dp_attention=asked)
    text = plan.as_dict(config, shape, config.resolve(shape))["dp_attention"]
    assert ("requests of each rank" if own else "requests shared by all") in text
    assert f"it pays from {DP_ATTENTION_REQUESTS} on" in text
    plan._print_table("toy", config, shape, config.resolve(shape))
    assert "dp_attention" in capsys.readouterr().out
    assert plan.as_dict(config, ATTENTION, config.resolve(ATTENTION))["dp_attention"] is None
