"""Engines that own their weights and free them, and what the tests ask of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import engines
import torch
from torch import nn

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine

FC1 = "decoder.layers.1.mlp.linear_fc1"
SETTINGS: dict[str, Any] = {
    **engines.BASE,
    "buffer_size_gb": engines.BUFFER_GIB,
    "max_sequence_length": 96,
    "max_requests": 6,
    "max_tokens": 24,
    "enable_chunked_prefill": True,
}

PROMPTS = [[5, 9, 30, 7, 66, 12, 3], list(range(20, 60)), [7] * 3]
PARAMS = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=0)


def make_engine(model: nn.Module, *, owns: bool = True, **settings: Any) -> DynamicInferenceEngine:
    return engines.make_engine(model, owns_weights=owns, **SETTINGS | settings)


def answers(engine: DynamicInferenceEngine, **changes: Any) -> list[tuple[list[int], list[float]]]:
    outputs = engine.generate(PROMPTS, replace(PARAMS, **changes))
    return [(one.token_ids, engines.logprobs_of(one)) for output in outputs for one in output.outputs]


def freed(model: nn.Module) -> list[str]:
    """Names of the parameters whose memory is freed: they show one value in all their places."""
    return [name for name, one in model.named_parameters() if one.numel() > 1 and not any(one.stride())]


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    wrong = [name for name, one in wanted.items() if not torch.equal(found[name], one)]
    assert not wrong


def moved(model: nn.Module, factor: float = -1.3) -> dict[str, torch.Tensor]:
    """Other weights, by name."""
    return {name: one * factor if one.is_floating_point() else one for name, one in state(model).items()}
