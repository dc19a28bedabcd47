"""Two tensor-parallel ranks (gloo) give the logits of one process; checkpoints join their parts."""

from __future__ import annotations

import functools
from pathlib import Path

import paged_step
import pytest
import torch
import torch.nn.functional as F
from gloo_ranks import start_ranks
from model_kinds import PARALLEL, SOFTCAPPED

from megatron_infer.models.adopt import adopt
from megatron_infer.models.extensions import Extensions, extensions_of
from megatron_infer.testing.tiny import tiny_delta, tiny_gpt, tiny_hybrid

MODELS = {
    "swiglu": functools.partial(tiny_gpt, qk_layernorm=True, share_embeddings_and_output_weights=True),
    "biases": functools.partial(
        tiny_gpt,
        add_bias_linear=True,
        normalization="LayerNorm",
        gated_linear_unit=False,
        activation_func=functools.partial(F.gelu, approximate="tanh"),
        position_embedding_type="learned_absolute",
    ),
    "softcapped": functools.partial(tiny_gpt, **SOFTCAPPED),
    "norms_after": functools.partial(
        tiny_gpt, extensions=Extensions(norms="after", whole_head_norms=True), qk_layernorm=True, add_bias_linear=True
    ),
    "groups": functools.partial(tiny_hybrid, "M*-M", position_embedding_type="rope"),
    "delta": tiny_delta,
    "parallel": functools.partial(tiny_hybrid, "P-P-", **PARALLEL),
    "gated": functools.partial(tiny_gpt, attention_output_gate=True),
    "norm_over_two_groups_each": functools.partial(tiny_hybrid, "MM", mamba_num_groups=4, norm_groups=2),
}


_WHOLE = ("linear_proj.bias", "linear_fc2.bias", "position_embeddings.weight")


def share(name: str, whole: torch.Tensor, model, rank: int, size: int) -> torch.Tensor:
    """This rank's part of a parameter of the unsharded model."""
    config = model.config
    wide, state, heads = 128, (config.mamba_num_groups or 0) * (config.mamba_state_dim or 0), 16
    parts, dim = [len(whole)], 0
    if name.endswith("mixer.in_proj.weight"):
        parts = [wide, wide, state, state, heads]
    elif name.endswith("self_attention.in_proj.weight"):
        parts = [32, 32, 32, 32, 4, 4]
    elif "self_attention.conv1d" in name:
        parts = [32, 32, 32]
    elif "conv1d" in name:
        parts = [wide, state, state]
    elif "linear_fc1." in name and config.gated_linear_unit:
        parts = [len(whole) // 2] * 2
    elif name.endswith(("out_proj.weight", "linear_proj.weight", "linear_fc2.weight")):
        parts, dim = [whole.shape[1]], 1
    elif name.endswith(("q_layernorm.weight", "k_layernorm.weight")) and extensions_of(config).whole_head_norms:
        pass
    elif name.endswith(_WHOLE) or ("norm" in name and "mixer" not in name):
        return whole
    return torch.cat([piece.chunk(size, dim)[rank] for piece in whole.split(parts, dim)], dim)


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
    for name, build in MODELS.items():
        model = build(tensor_model_parallel_size=size)
        weights, expected, whole_shapes = torch.load(f"{folder}/{name}.pt")
        adopted = adopt(model)
        shape = adopted.shape
        assert shape.num_kv_heads == (2 // size if shape.num_attention_layers else 1)
        heads = 4 if name == "delta" else 16
        assert shape.state is None or shape.state.ssm_shape == (heads // size, 8, 16)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(share(key, weights[key], model, rank, size))
        adopted.refresh_scan_weights()
        for got, want in zip(logits_of_schedule(adopted), expected, strict=True):
            torch.testing.assert_close(got, want.chunk(size, dim=1)[rank], atol=1e-5, rtol=0)
        assert mixer_shapes(model) == whole_shapes
        check_equal_start(name, folder, rank, size)
    torch.distributed.destroy_process_group()


def check_equal_start(name: str, folder: str, rank: int, size: int) -> None:
    """Equal seeds give equal scans for any number of ranks."""
    model = MODELS[name](tensor_model_parallel_size=size, randomize=False)
    start = torch.load(f"{folder}/{name}.start.pt")
    for key, parameter in model.named_parameters():
        if ("mixer" in key or is_delta(key)) and "in_proj" not in key:
            assert torch.equal(parameter, share(key, start[key], model, rank, size)), key


def is_delta(key: str) -> bool:
    """Whether it is of a gated delta net."""
    return any(f"self_attention.{part}" in key for part in ("in_proj", "conv1d", "A_log", "dt_bias", "out_"))


def mixer_shapes(model) -> dict:
    """Checkpoint key -> shape over all ranks, of the mixers."""
    found = {}
    for key, value in model.sharded_state_dict().items():
        if "mixer" in key or is_delta(key):
            for part in value.build() if hasattr(value, "build") else [value]:
                if hasattr(part, "global_shape"):
                    found[part.key] = part.global_shape
    return found


@pytest.mark.timeout(240)
def test_two_ranks_give_the_logits_of_one(tmp_path: Path):
    for name, build in MODELS.items():
        torch.save(dict(build(randomize=False).named_parameters()), tmp_path / f"{name}.start.pt")
        model = build()
        adopted = adopt(model)
        assert paged_step.worst_difference(model, adopted) < 1e-5
        weights = {key: parameter.detach() for key, parameter in model.named_parameters()}
        torch.save((weights, logits_of_schedule(adopted), mixer_shapes(model)), tmp_path / f"{name}.pt")
    start_ranks(run_rank, (2, str(tmp_path)), 2)
