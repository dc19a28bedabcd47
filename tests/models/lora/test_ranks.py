"""Adapters over tensor-parallel ranks and pipeline stages: the answers of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import stage_case
import torch
from engine_ranks import make_engine, part_of_model, run_ranks, whole_model
from engines import logprobs_of
from gloo_ranks import run_on_ranks
from lora_cases import random_adapter

from megatron_infer import LoRAConfig, SamplingParams
from megatron_infer.errors import AdapterInUse, ConfigError, ModelError, OtherRankFailed
from megatron_infer.models.loading.checkpoint import save_checkpoint
from megatron_infer.models.lora.adapter import Adapter, LoRAPair

NAME = "untied, uneven"
NAMES = (None, "a", "b", "c")
PROMPT = [5 * i % 113 + 4 for i in range(40)]
LORA = LoRAConfig(max_loras=2, max_rank=8)


def adapters_of(model):
    return [
        random_adapter(model, name, rank=rank, seed=rank, scale=0.5)
        for name, rank in zip("abc", (1, 4, 8), strict=True)
    ]


def answers(engine):
    params = [
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, adapter=name, logprobs=0) for name in NAMES
    ]
    outputs = engine.generate([PROMPT] * len(NAMES), params)
    ones = [output.outputs[0] for output in outputs]
    return [(one.token_ids, logprobs_of(one)) for one in ones]


def save_expected(path: Path, model, engine) -> None:
    """Adapters of a whole model, as tensors, and the answers of its engine with them."""
    adapters = adapters_of(model)
    for adapter in adapters:
        engine.load_adapter(adapter.name, adapter)
    pairs = {adapter.name: {path: (p.a, p.b, p.scale) for path, p in adapter.pairs.items()} for adapter in adapters}
    torch.save({"pairs": pairs, "want": answers(engine)}, path)


def adapter_of(name: str, pairs) -> Adapter:
    return Adapter(name, {path: LoRAPair.of(*pair) for path, pair in pairs.items()})


def check_rank(rank: int, size: int, folder: str) -> None:
    for kind in ("attention", "hybrid"):
        saved = torch.load(f"{folder}/{kind}.want.pt")
        engine = make_engine(part_of_model(kind, folder, rank, size), lora=LORA)
        for name, pairs in saved["pairs"].items():
            given = adapter_of(name, pairs)
            engine.load_adapter(name, given)
        for (tokens, logprobs), (want, want_logprobs) in zip(answers(engine), saved["want"], strict=True):
            assert tokens == want, kind
            assert torch.allclose(torch.tensor(logprobs), torch.tensor(want_logprobs), atol=2e-5), kind
        # what one rank refuses is loaded on none
        misfit = {"decoder.layers.0.self_attention.linear_proj": LoRAPair.of(torch.ones(1, 5), torch.ones(5, 1), 1.0)}
        bad = given if rank == 0 else Adapter("x", misfit)
        with pytest.raises((ConfigError, ModelError, OtherRankFailed)):
            engine.load_adapter("x", bad)
        with pytest.raises(AdapterInUse):
            other = {path: LoRAPair.of(pair.a, pair.b, 2.0) for path, pair in given.pairs.items()}
            engine.load_adapter("c", Adapter("c", other))
        assert [info.name for info in engine.adapters()] == ["a", "b", "c"]
        assert [tokens for tokens, _ in answers(engine)] == [want for want, _ in saved["want"]]
        engine.unload_adapter("b")
        assert [info.name for info in engine.adapters()] == ["a", "c"]
        # read on a thread of each rank while steps go on, and undone
        manager = engine.controls.adapters
        readings = [manager.read("b", adapter_of("b", saved["pairs"]["b"])), manager.read("x", bad)]
        engine.load_adapter("b", readings[0])
        with pytest.raises((ConfigError, ModelError, OtherRankFailed)):
            engine.load_adapter("x", readings[1])
        manager.forget(manager.read("x", bad))
        manager.settle("0")
        manager.unload("b", change="1")
        assert manager.undo("1") and not manager.undo("1")
        assert [tokens for tokens, _ in answers(engine)] == [want for want, _ in saved["want"]]


def check_stage(rank: int, size: int, folder: Path) -> None:
    saved = torch.load(folder / "stages.want.pt")
    model = stage_case.load_model(folder, NAME, pipeline_parallel=size)
    for features in stage_case.FEATURES:
        engine = stage_case.make_engine(model, features, lora=LORA)
        for name, pairs in saved["pairs"].items():
            engine.load_adapter(name, adapter_of(name, pairs))
        assert [tokens for tokens, _ in answers(engine)] == [want for want, _ in saved["want"]], features


@pytest.mark.long
def test_two_pipeline_stages_answer_as_one(tmp_path):
    save_checkpoint(stage_case.MODELS[NAME](), tmp_path / NAME)
    model = stage_case.load_model(tmp_path, NAME)
    save_expected(tmp_path / "stages.want.pt", model, stage_case.make_engine(model, lora=LORA))
    run_on_ranks(check_stage, 2, tmp_path)


@pytest.mark.long
def test_two_tensor_parallel_ranks_answer_as_one(tmp_path):
    for kind in ("attention", "hybrid"):
        model = whole_model(kind)
        weights = {key: value.clone() for key, value in model.state_dict().items() if value is not None}
        torch.save(weights, tmp_path / f"{kind}.weights.pt")
        save_expected(tmp_path / f"{kind}.want.pt", model, make_engine(model, lora=LORA))
    run_ranks(check_rank, tmp_path)
