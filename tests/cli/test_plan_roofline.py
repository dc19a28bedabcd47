"""`plan --roofline`: what the parts of a step move, compute and launch, and the time at a device's limits."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from megatron_infer.cli.main import main
from megatron_infer.config.step_work import PUBLISHED, Ceiling, Part, StepWork, least_work
from megatron_infer.models.loading.description_shape import num_parameters, step_counter
from megatron_infer.models.loading.model_description import HybridDescription, ModelDescription

LLAMA_8B = ModelDescription(
    architecture="LlamaForCausalLM",
    transformer={
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 128,
        "ffn_hidden_size": 14336,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
    },
    vocab_size=128256,
    max_sequence_length=8192,
)
HYBRID = dataclasses.replace(
    LLAMA_8B,
    transformer={
        **LLAMA_8B.transformer,
        "num_layers": 4,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_state_dim": 128,
        "mamba_num_groups": 8,
        "num_moe_experts": 16,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 768,
    },
    hybrid=HybridDescription(pattern="M*-E", norm_groups=8),
)


def parts(work: StepWork) -> dict[str, Part]:
    return {part.name: part for part in work.parts}


def test_a_decode_step_of_llama_3_8b_reads_its_weights_keys_and_values_once():
    counter = step_counter(LLAMA_8B, dtype="bfloat16")
    work = counter.decode(64, 4096)
    found = parts(work)
    weights = 2 * (num_parameters(LLAMA_8B) - 128256 * 4096)  # all but the embedding, of which 64 rows are read
    cached, logits = 64 * 4096 * 2 * 32 * 8 * 128 * 2, 64 * 128256 * 4
    assert num_parameters(LLAMA_8B) == 8_030_261_248
    assert found["attention"].num_bytes == cached == 32 << 30
    assert work.num_bytes == weights + cached + 2 * logits + 64 * 4096 * 2
    assert found["attention"].flops == 64 * 4096 * 4 * 32 * 32 * 128
    assert found["norm and MLP"].flops == pytest.approx(2 * 64 * 32 * 3 * 4096 * 14336, rel=1e-4)
    halved = step_counter(LLAMA_8B, dtype="bfloat16", kv_element_bytes=1).decode(64, 4096)
    assert work.num_bytes - halved.num_bytes == cached // 2


def test_a_step_does_the_work_that_a_benchmark_is_held_against():
    """Both count a prompt's tokens, keys and states alike; a benchmark knows the model's size alone."""
    for description in (LLAMA_8B, dataclasses.replace(HYBRID, hybrid=HybridDescription(pattern="M*-M", norm_groups=8))):
        counter = step_counter(description, dtype="bfloat16")
        whole = least_work(counter.shape, [100], [1], concurrency=1)
        embedding = 2 * 100 * 128256 * 4096  # the benchmark counts two operations for each parameter
        assert counter.prefill(100).flops == pytest.approx(whole.prefill_flops - embedding, rel=2e-4)
        decode = least_work(counter.shape, [100], [2], concurrency=1)
        beside = 2 * 128256 * 4 + 4096 * 2  # logits out and in, a row of the embedding
        assert counter.decode(1, 101).num_bytes - beside == decode.decode_bytes - 2 * 128256 * 4096


def test_states_are_read_and_written_and_chosen_experts_alone_are_read():
    counter = step_counter(HYBRID, dtype="bfloat16")
    one, many, prompt = (parts(work) for work in (counter.decode(1, 8), counter.decode(512, 8), counter.prefill(512)))
    scan, experts = "Mamba: conv and scan", "norm, router, experts"
    assert counter.shape.state is not None
    assert one[scan].num_bytes == 2 * counter.shape.state.slot_bytes
    assert prompt[scan].num_bytes == counter.shape.state.slot_bytes, "a prompt begins without one"
    assert prompt[scan].flops == 512 * 5 * math.prod(counter.shape.state.ssm_shape)
    expert = 2 * counter.parameters.expert
    assert many[experts].num_bytes - one[experts].num_bytes == (16 - 2) * expert
    assert many[experts].flops == 512 * one[experts].flops


def test_time_is_that_of_the_scarcer_resource_part_by_part_and_a_gap_for_each_launch():
    work = StepWork((Part("a", 2_000_000_000, 1_000_000_000, 3), Part("b", 1_000_000_000, 5_000_000_000, 4)))
    ceiling = Ceiling(read_gb_s=2, gemm_gflop_s=1)
    assert work.seconds(ceiling) == pytest.approx(1 + 5)
    assert work.seconds(ceiling, gap_us=10) == pytest.approx(6 + 7e-5)
    assert (work.num_bytes, work.flops, work.num_launches) == (3_000_000_000, 6_000_000_000, 7)
    assert PUBLISHED["h100"].seconds(3_350_000_000, 0) == pytest.approx(1e-3)


def test_the_command_prints_both_steps_and_json_has_the_same_figures(capsys, llama):
    asked = ["plan", llama, "--device", "h200", "--roofline", "--batch", "4", "--context", "40"]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "decode, 4 x 1 token, 40 keys each" in shown and "prefill, 1 x 40 tokens" in shown
    assert "4.8 TB/s" in shown and "1 us for each launch, an assumption" in shown
    assert main([*asked, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["bandwidth_gb_s"], report["bf16_gflop_s"]) == (4800, 989_400)
    for name in ("decode", "prefill"):
        step = report[name]
        for key in ("bytes", "flops", "launches", "seconds"):
            assert step[key] == pytest.approx(sum(part[key] for part in step["parts"]))
        assert step["seconds_with_gaps"] == pytest.approx(step["seconds"] + step["launches"] * 1e-6)
        assert f"{step['launches']:,} " in shown
    assert main([*asked, "--json", "--kv-cache-dtype", "fp8_e4m3"]) == 0
    halved = json.loads(capsys.readouterr().out)["decode"]
    cached = [
        next(part["bytes"] for part in one["parts"] if part["part"] == "attention")
        for one in (report["decode"], halved)
    ]
    assert cached[0] == 2 * cached[1] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--roofline", "--device is auto, with --roofline it must be h100, h200 or b200"),
        ("--roofline --device a100", "--device is a100, with --roofline it must be h100, h200 or b200"),
        ("--device b200", "--device b200 is known to --roofline only"),
        ("--batch 4", "--batch is an option of --roofline"),
        ("--roofline --device h100 --batch 0", "--batch is 0, it must be at least 1"),
        ("--roofline --device h100 --context -3", "--context is -3, it must be at least 1"),
        ("--roofline --device h100 --context 1000000", "--context is 1,000,000, the model has"),
        ("--roofline --device h100 --dtype float32", "--dtype is float32, the published limits are those of bfloat16"),
        ("--roofline --device h100 --tp 2 --memory-gb 9", "no use for --memory-gb, --tensor-parallel-size"),
        ("--roofline --device h100 --max-requests 3 --speculative ngram", "no use for --max-requests, --speculative;"),
        ("--roofline --device h100 --max-lora-rank 8", "no use for --max-lora-rank;"),
        ("--roofline --device h100 --weight-dtype int8", "no use for --weight-dtype;"),
        ("--device cuda --memory-gb 80 --weight-dtype int8", "weight_dtype='int8' needs the native kernels"),
        ("--device cuda --memory-gb 80 --weight-dtype int4", "weight_dtype='int4' needs the native kernels"),
    ],
)
def test_what_changes_no_figure_or_has_none_is_refused(capsys, llama, flags, said):
    assert main(["plan", llama, *flags.split()]) == 2
    assert said in capsys.readouterr().err
