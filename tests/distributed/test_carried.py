"""What samples carry is the same on tensor-, expert- and pipeline-parallel ranks as in one process, on all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gloo_ranks as ranks
import pytest
import torch
from carried_case import ALL, BASE, SIZES, told, workload
from test_expert_engine import LAYOUTS, take_part

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt, tiny_hybrid

TOLERANCE = 1e-5
BUSY = {"overlap": True, "enable_chunked_prefill": True, "max_tokens": 40, "max_requests": 4}
MODELS: dict[str, Any] = {
    "gpt": lambda **parallel: tiny_gpt(**SIZES, **EXPERTS, num_layers=3, moe_layer_freq=[1, 0, 1], **parallel),
    "experts first": lambda **parallel: tiny_gpt(
        **SIZES, **EXPERTS, num_layers=4, moe_layer_freq=[1, 1, 0, 0], **parallel
    ),
    "experts last": lambda **parallel: tiny_gpt(**SIZES, **EXPERTS, num_layers=2, moe_layer_freq=[0, 1], **parallel),
    "hybrid": lambda **parallel: tiny_hybrid("ME*-ME", position_embedding_type="rope", **SIZES, **parallel),
}


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


def take_stage(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """This stage's layers of the undivided model, by their numbers."""
    layers = model.decoder.layers
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
            if found:
                name = f"decoder.layers.{layers[int(found[1])].layer_number - 1}.{found[2]}"
            parameter.copy_(weights[name])


def on_rank(rank: int, size: int, folder: Path) -> None:
    for layout, sizes in LAYOUTS.items():
        ranks.new_groups(**sizes)
        for name in ("gpt", "hybrid"):
            weights, want = torch.load(folder / f"{name}.pt")
            model = MODELS[name](**sizes)
            take_part(model, weights, layout, rank)
            assert_same(play(model, **BUSY), want, f"{layout}, {name}")
    ranks.new_groups(pipeline_model_parallel_size=size)
    stage = {"pipeline_model_parallel_size": size, "pre_process": rank == 0, "post_process": rank == size - 1}
    for name in ("experts first", "experts last", "hybrid"):
        weights, want = torch.load(folder / f"{name}.pt")
        model = MODELS[name](**stage)
        take_stage(model, weights)
        assert_same(play(model, **BUSY if name != "hybrid" else {}), want, f"stages, {name}")


@pytest.mark.long
def test_two_ranks_carry_what_one_process_does(tmp_path):
    """Experts whole on two ranks, experts split over two, layers on two stages with experts on either or both."""
    for name, make in MODELS.items():
        model = make()
        weights = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
        torch.save((weights, play(model)), tmp_path / f"{name}.pt")
    ranks.run_on_ranks(on_rank, 2, tmp_path)
