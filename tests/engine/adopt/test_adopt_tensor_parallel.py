"""An adopted model over two tensor-parallel ranks (gloo) gives the logits of one process."""

from __future__ import annotations

import functools
from pathlib import Path

import paged_step
import pytest
import torch
import torch.nn.functional as F
from gloo_ranks import start_ranks

from megatron_infer.models.adopt import adopt
from megatron_infer.testing.tiny import tiny_gpt

MODELS = {
    "swiglu": {"qk_layernorm": True, "share_embeddings_and_output_weights": True},
    "biases": {
        "add_bias_linear": True,
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
        "activation_func": functools.partial(F.gelu, approximate="tanh"),
        "position_embedding_type": "learned_absolute",
    },
}


def fill_vectors(model, rank: int, size: int) -> None:
    """Equal biases and norm weights for any number of ranks: each takes its part of the same full vector."""
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            if parameter.ndim == 1:
                parts = size if getattr(parameter, "tensor_model_parallel", False) else 1
                full = torch.randn(parameter.numel() * parts, generator=torch.Generator().manual_seed(i)) * 0.3
                parameter.copy_(full.chunk(parts)[rank % parts])


def logits_of_schedule(adopted) -> list[torch.Tensor]:
    cache, tokens, out = paged_step.Cache(adopted), paged_step.prompts(), []
    with torch.inference_mode():
        for plan in paged_step.SCHEDULE:
            starts = {i: cache.lengths.get(i, 0) for i, _ in plan}
            step = cache.step([(i, tokens[i][starts[i] : starts[i] + n]) for i, n in plan])
            out.append(adopted.logits(adopted.hidden(step), step.ops))
    return out


def run_rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    for name, settings in MODELS.items():
        model = tiny_gpt(**settings, tensor_model_parallel_size=size, randomize=False)
        fill_vectors(model, rank, size)
        adopted = adopt(model)
        assert adopted.shape.num_kv_heads == 2 // size
        expected = torch.load(f"{folder}/{name}.pt")
        for got, want in zip(logits_of_schedule(adopted), expected, strict=True):
            torch.testing.assert_close(got, want.chunk(size, dim=1)[rank], atol=1e-5, rtol=0)
    torch.distributed.destroy_process_group()


@pytest.mark.timeout(240)
def test_two_ranks_give_the_logits_of_one(tmp_path: Path):
    for name, settings in MODELS.items():
        model = tiny_gpt(**settings, randomize=False)
        fill_vectors(model, 0, 1)
        adopted = adopt(model)
        assert paged_step.worst_difference(model, adopted) < 1e-5
        torch.save(logits_of_schedule(adopted), tmp_path / f"{name}.pt")
    start_ranks(run_rank, (2, str(tmp_path)), 2)
