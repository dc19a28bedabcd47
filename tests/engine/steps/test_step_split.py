"""tools/bench/step_split.py counts every part of a step once, also those within one native call for many layers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "tools" / "bench"))

import step_split

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.testing.tiny import tiny_gpt


def test_operations_within_a_call_of_many_layers_are_parts_of_their_own():
    model = tiny_gpt(vocab_size=128, max_sequence_length=64, num_layers=3)
    config = InferenceConfig(buffer_size_gb=0.01, block_size_tokens=16, max_sequence_length=64, max_requests=4)
    engine = DynamicInferenceEngine(model.to(torch.bfloat16), config)
    if engine.kernels.layers is None:
        pytest.skip("no native layers for this dtype here")
    engine.add_request(list(range(5, 37)), SamplingParams(max_tokens=8, ignore_eos=True))
    clock = step_split.clock_of(engine)
    seconds = clock.measure(engine.step)
    assert set(step_split.PART_OF_KIND) == set(engine.kernels.layers.take_seconds())
    assert {"linears", "attention", "norms", "experts", "python", "sampling", "rest"} == seconds.keys()
    assert min(seconds.values()) >= 0
