"""A hybrid model over two tensor-parallel ranks (gloo) gives the logits of one process; checkpoints join its parts."""

from __future__ import annotations

from pathlib import Path

import paged_step
import pytest
import torch
from gloo_ranks import start_ranks
from test_adopt_tensor_parallel import logits_of_schedule

from megatron_infer.models.adopt import adopt
from megatron_infer.testing.tiny import tiny_hybrid

MODELS = {
    "groups": ("M*-M", {"position_embedding_type": "rope"}),
    "norm_over_two_groups_each": ("MM", {"mamba_num_groups": 4, "norm_groups": 2}),
}


def share(name: str, whole: torch.Tensor, model, rank: int, size: int) -> torch.Tensor:
    """This rank's part of a parameter of the unsharded model."""
    wide, state, heads = 128, model.config.mamba_num_groups * model.config.mamba_state_dim, 16
    parts, dim = [len(whole)], 0
    if name.endswith("mixer.in_proj.weight"):
        parts = [wide, wide, state, state, heads]
    elif "conv1d" in name:
        parts = [wide, state, state]
    elif name.endswith("linear_fc1.weight"):
        parts = [len(whole) // 2] * 2
    elif name.endswith(("out_proj.weight", "linear_proj.weight", "linear_fc2.weight")):
        parts, dim = [whole.shape[1]], 1
    elif name.endswith("norm.weight") and "mixer" not in name:
        return whole
    return torch.cat([piece.chunk(size, dim)[rank] for piece in whole.split(parts, dim)], dim)


def run_rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    for name, (pattern, settings) in MODELS.items():
        model = tiny_hybrid(pattern, **settings, tensor_model_parallel_size=size)
        weights, expected, whole_shapes = torch.load(f"{folder}/{name}.pt")
        adopted = adopt(model)
        assert adopted.shape.state.ssm_shape == (16 // size, 8, 16)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(share(key, weights[key], model, rank, size))
        adopted.refresh_scan_weights()
        for got, want in zip(logits_of_schedule(adopted), expected, strict=True):
            torch.testing.assert_close(got, want.chunk(size, dim=1)[rank], atol=1e-5, rtol=0)
        assert global_shapes(model) == whole_shapes
        check_equal_start(name, folder, rank, size)
    torch.distributed.destroy_process_group()


def check_equal_start(name: str, folder: str, rank: int, size: int) -> None:
    """Equal seeds give equal scans for any number of ranks."""
    pattern, settings = MODELS[name]
    model = tiny_hybrid(pattern, **settings, tensor_model_parallel_size=size, randomize=False)
    start = torch.load(f"{folder}/{name}.start.pt")
    for key, parameter in model.named_parameters():
        if "mixer" in key and "in_proj" not in key:
            assert torch.equal(parameter, share(key, start[key], model, rank, size)), key


def global_shapes(model) -> dict:
    """Checkpoint key -> shape over all ranks, of the mixers."""
    found = {}
    for key, value in model.sharded_state_dict().items():
        if "mixer" in key:
            for part in value.build() if hasattr(value, "build") else [value]:
                if hasattr(part, "global_shape"):
                    found[part.key] = part.global_shape
    return found


@pytest.mark.timeout(240)
def test_two_ranks_give_the_logits_of_one(tmp_path: Path):
    for name, (pattern, settings) in MODELS.items():
        torch.save(
            dict(tiny_hybrid(pattern, **settings, randomize=False).named_parameters()), tmp_path / f"{name}.start.pt"
        )
        model = tiny_hybrid(pattern, **settings)
        adopted = adopt(model)
        assert paged_step.worst_difference(model, adopted) < 1e-5
        weights = {key: parameter.detach() for key, parameter in model.named_parameters()}
        torch.save((weights, logits_of_schedule(adopted), global_shapes(model)), tmp_path / f"{name}.pt")
    start_ranks(run_rank, (2, str(tmp_path)), 2)
