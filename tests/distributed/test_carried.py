"""What samples carry, and vectors of prompts, are the same on ranks of every kind of parallelism as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from carried_case import ALL, BASE, SIZES, told, workload
from engine_ranks import take_part, weights_of
from gloo_ranks import new_groups, run_on_ranks, stage_ends

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.outputs.embeddings import params_for
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt, tiny_hybrid

TOLERANCE = 1e-5
TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
BUSY = {"overlap": True, "enable_chunked_prefill": True, "max_tokens": 40, "max_requests": 4}
MODELS: dict[str, Any] = {
    "gpt": lambda **parallel: tiny_gpt(**SIZES, **EXPERTS, num_layers=3, moe_layer_freq=[1, 0, 1], **parallel),
    "experts first": lambda **parallel: tiny_gpt(
        **SIZES, **EXPERTS, num_layers=4, moe_layer_freq=[1, 1, 0, 0], **parallel
    ),
    "experts last": lambda **parallel: tiny_gpt(**SIZES, **EXPERTS, num_layers=2, moe_layer_freq=[0, 1], **parallel),
    "hybrid": lambda **parallel: tiny_hybrid("ME*-ME", position_embedding_type="rope", **SIZES, **parallel),
    "dense": lambda **parallel: tiny_gpt(**SIZES, num_layers=2, **parallel),
}
LAYOUTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (EP, ("gpt", "hybrid")),
    (TP, ("gpt", "hybrid", "dense")),
    (PP, ("experts first", "experts last", "hybrid", "dense")),
)
PROMPTS = [[(5 * i + place) % 128 for i in range(length)] for place, length in enumerate((3, 100, 41, 70))]


def play(model: torch.nn.Module, **settings: Any) -> list[list[dict[str, Any]]]:
    engine = DynamicInferenceEngine(model, InferenceConfig(**{**BASE, "collective_timeout_s": 30, **settings}))
    work = [*workload(ALL)[:6], *workload(ALL, n=2)[4:6]]
    outputs = engine.generate([prompt for prompt, _ in work], [params for _, params in work])
    engine.rank_group.lockstep.close()
    return [[told(one) for one in output.outputs] for output in outputs]


def assert_same(got: list, want: list, where: str) -> None:
    for request, (mine, whole) in enumerate(zip(got, want, strict=True)):
        for one, other in zip(mine, whole, strict=True):
            for name in ("tokens", "support", "routing"):
                assert one[name] == other[name], (where, request, name)
            for name in ("raw", "processed", "logprobs"):
                assert (one[name] is None) == (other[name] is None), (where, request, name)
                far = [abs(a - b) for a, b in zip(one[name] or [], other[name] or [], strict=True)]
                assert max(far, default=0.0) < TOLERANCE, (where, request, name, max(far))


def vectors(model: torch.nn.Module, **settings: Any) -> list[list[float]]:
    """Of prompts, of the last token and of all tokens by turns."""
    engine = DynamicInferenceEngine(model, InferenceConfig(**{**BASE, "collective_timeout_s": 30, **settings}))
    params = [params_for("mean" if place % 2 else "last") for place in range(len(PROMPTS))]
    outputs = engine.generate(PROMPTS, params)
    engine.rank_group.lockstep.close()
    return [output.pooled for output in outputs]


def on_rank(rank: int, size: int, folder: Path, chosen: list[str]) -> None:
    for layout, names in LAYOUTS:
        new_groups(**{layout: size})
        for name in [one for one in names if one in chosen]:
            model = MODELS[name](**{layout: size}, **(stage_ends(rank, size) if layout == PP else {}))
            weights, want = torch.load(folder / f"{name}.pt")
            take_part(model, weights)
            if name == "dense":
                np.testing.assert_allclose(vectors(model, enable_chunked_prefill=True, max_tokens=48), want, atol=1e-4)
            else:
                settings = {} if layout == PP and name == "hybrid" else BUSY
                assert_same(play(model, **settings), want, f"{layout}, {name}")


@pytest.mark.parametrize(
    "chosen", [["dense"], pytest.param([one for one in MODELS if one != "dense"], marks=pytest.mark.long)], ids=len
)
def test_two_ranks_carry_what_one_process_does(tmp_path: Path, chosen: list[str]) -> None:
    """Experts whole on two ranks, experts split over two, layers on two stages with experts on either or both."""
    for name in chosen:
        model = MODELS[name]()
        want = vectors(model) if name == "dense" else play(model)
        torch.save((weights_of(model), want), tmp_path / f"{name}.pt")
    run_on_ranks(on_rank, 2, tmp_path, chosen)
