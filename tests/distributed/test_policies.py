"""Batching policies and request metadata on pipeline stages and tensor-parallel ranks, over suspends and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import stage_case
import torch
from engines import finish
from gloo_ranks import new_groups, run_on_ranks

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine

POLICIES = {
    "prefill_first": {"batching": "prefill_first", "max_batch_total_tokens": 520, "admission_watermark": 0.7},
    "phased": {
        "batching": "phased",
        "min_batch_size_tg": 2,
        "max_queue_size_tg": 3,
        "ce_delay_ms": 3,
        "enable_prioritize_first_decode": True,
    },
}
NAMES = ("tied", "last stage without Mamba")
LAYOUTS = ("pipeline", "tensor")
TYPES = [("target", torch.int64, True), ("scale", torch.float32, False)]


def check(model: torch.nn.Module, expected: list, folder: Path, where: str) -> None:
    """Answers under each policy are those of one process with none, and drawn tokens those that a hook chose."""
    features = "chunks, prefix cache, overlap"
    for name, policy in POLICIES.items():
        engine = stage_case.make_engine(model, features, **policy)
        stage_case.assert_same(stage_case.generate(engine), expected, f"{where}, {name}")
        stage_case.assert_same(stage_case.generate_over_suspends(engine), expected, f"{where}, {name}, suspended")
    check_files(model, expected, folder / where, features)
    check_metadata(model, folder / where)


def check_files(model: torch.nn.Module, expected: list, path: Path, features: str) -> None:
    """Requests that are saved under one policy go on under another."""
    source = stage_case.make_engine(model, features, **POLICIES["phased"])
    if source.rank_group.groups.is_leader:
        for index, (ids, params) in enumerate(stage_case.requests()):
            source.add_request({"prompt_token_ids": ids}, params, request_id=str(index), stream="final")
    done = {}
    for _ in range(12):
        done |= {output.request_id: output for output in source.step() if output.finished}
    source.save_requests(path.with_suffix(".saved"), kv=True)
    target = stage_case.make_engine(model, features, **POLICIES["prefill_first"])
    target.load_requests(path.with_suffix(".saved"))
    done |= finish(target)
    found = stage_case.answers([done[str(index)] for index in range(len(expected))])
    stage_case.assert_same(found, expected, f"{path.name}, saved")


def check_metadata(model: torch.nn.Module, path: Path) -> None:
    """Every request draws its own target, and its values come back, whatever happens to it."""

    def make(**how) -> DynamicInferenceEngine:
        engine = stage_case.make_engine(model, "chunks, prefix cache, overlap", request_metadata_types=TYPES, **how)
        engine.on_logits(push)
        return engine

    engine, params = make(), SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.0, logprobs=0)
    given = {f"r{number}": {"target": 40 + number, "scale": 1e5} for number in range(4)}
    if engine.rank_group.groups.is_leader:
        for name, values in given.items():
            engine.add_request(list(range(5, 30)), params, request_id=name, metadata=values)
    done = {}
    for mode in ("recompute", "offload", "persist"):
        for _ in range(3):
            done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.suspend(mode)
        engine.resume()
    engine.save_requests(path.with_suffix(".metadata"), kv=True)
    other = make(batching="prefill_first")
    other.load_requests(path.with_suffix(".metadata"))
    moved = finish(other)
    done |= finish(engine)
    assert done.keys() == given.keys() and moved.keys() == given.keys()
    for outputs in (done, moved):
        for name, output in outputs.items():
            target = given[name]["target"]
            assert output.outputs[0].token_ids == [target] * 14 and output.metadata == given[name]
            assert output.outputs[0].logprobs[0][target].logprob > -1e-3, "of what the hook left"


def push(logits: torch.Tensor, metadata: dict[str, torch.Tensor]) -> None:
    logits[torch.arange(len(logits)), metadata["target"]] += metadata["scale"].to(logits.dtype)


def on_rank(rank: int, size: int, folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    for layout in LAYOUTS:
        new_groups(**{f"{layout}_model_parallel_size": size})
        for name in NAMES:
            model = stage_case.load_model(folder, name, **{f"{layout}_parallel": size})
            check(model, expected[name], folder, f"{name}, {layout}")


@pytest.mark.long
@pytest.mark.timeout(280)
def test_two_ranks_answer_under_each_policy_as_one_process_without(tmp_path: Path) -> None:
    expected = {}
    for name in NAMES:
        stage_case.save_model(tmp_path, name)
        expected[name] = stage_case.generate(stage_case.make_engine(stage_case.load_model(tmp_path, name)))
    stage_case.write_json(tmp_path / "expected.json", expected)
    run_on_ranks(on_rank, 2, tmp_path)
