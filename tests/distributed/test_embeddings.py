"""Vectors of prompts are the same on tensor-parallel ranks and on pipeline stages as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gloo_ranks as ranks
import numpy as np
import torch
from test_carried import take_stage
from test_expert_engine import take_part

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.outputs.embeddings import params_for
from megatron_infer.testing.tiny import tiny_gpt

SIZES = {"vocab_size": 128, "max_sequence_length": 256, "init_method_std": 0.2, "num_layers": 2}
BASE = {"buffer_size_gb": 0.02, "block_size_tokens": 16, "max_sequence_length": 200, "max_requests": 4}
PROMPTS = [[(5 * i + place) % 128 for i in range(length)] for place, length in enumerate((3, 100, 41, 70))]


def vectors(model: torch.nn.Module, **settings: Any) -> list[list[float]]:
    engine = DynamicInferenceEngine(model, InferenceConfig(**BASE, collective_timeout_s=30, **settings))
    params = [params_for("mean" if place % 2 else "last") for place in range(len(PROMPTS))]
    outputs = engine.generate(PROMPTS, params)
    engine.rank_group.lockstep.close()
    return [output.pooled for output in outputs]


def on_rank(rank: int, size: int, folder: Path) -> None:
    weights, want = torch.load(folder / "whole.pt")
    chunked = {"enable_chunked_prefill": True, "max_tokens": 48}
    sizes = {"tensor_model_parallel_size": size}
    ranks.new_groups(**sizes)
    model = tiny_gpt(**SIZES, **sizes)
    take_part(model, weights, "parts", rank)
    np.testing.assert_allclose(vectors(model, **chunked), want, atol=1e-4)
    ranks.new_groups(pipeline_model_parallel_size=size)
    stage = {"pipeline_model_parallel_size": size, "pre_process": rank == 0, "post_process": rank == size - 1}
    model = tiny_gpt(**SIZES, **stage)
    take_stage(model, weights)
    np.testing.assert_allclose(vectors(model, **chunked), want, atol=1e-4)


def test_two_ranks_pool_what_one_process_does(tmp_path):
    model = tiny_gpt(**SIZES)
    weights = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    torch.save((weights, vectors(model)), tmp_path / "whole.pt")
    ranks.run_on_ranks(on_rank, 2, tmp_path)
