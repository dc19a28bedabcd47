"""Tensor parallelism: each rank reads its own part, and the parts together are the model."""

from __future__ import annotations

import pytest
import torch
from gloo_ranks import start_ranks
from hf_models import logits_of, random_model
from plain_forward import full_logits

from megatron_infer.errors import ConfigError
from megatron_infer.models.loading.build_model import build_model, init_process_groups
from megatron_infer.models.loading.sources import open_source
from megatron_infer.testing.cpu_shim import cpu_shim


def compute(rank: int, folder: str, checkpoint: str, cases: list[str]) -> None:
    """This rank's part of every model's logits, saved."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(folder + "/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for case in cases:
        model = build_model(open_source(f"{folder}/{case}"), tensor_parallel=2)
        with cpu_shim(1):  # ranks that share a kv head gather on the current CUDA device
            torch.save(full_logits(model, list(range(30))), f"{folder}/{case}.{rank}.pt")
    again = build_model(open_source(checkpoint), tensor_parallel=2)
    torch.save(full_logits(again, list(range(30))), f"{folder}/ckpt.{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_on_two_ranks(models, saved, tmp_path):
    """Save `models` (by name), and one of them as a checkpoint written by one rank; compare what two ranks compute."""
    from megatron_infer.models.loading.checkpoint import save_checkpoint

    ids, expected = list(range(30)), {}
    for case, model in models.items():
        model.save_pretrained(tmp_path / case)
        expected[case] = logits_of(model, ids)
    source = open_source(tmp_path / saved)
    save_checkpoint(build_model(source), tmp_path / "saved", description=source.config())
    start_ranks(compute, (str(tmp_path), str(tmp_path / "saved"), list(models)), 2)
    for case in [*models, "ckpt"]:
        got = torch.cat([torch.load(tmp_path / f"{case}.{rank}.pt") for rank in range(2)], dim=-1)
        assert got.shape[-1] == 132, "131 entries padded to a multiple of two"
        want = expected[saved if case == "ckpt" else case]
        assert (got[:, :131] - want).abs().max() < 1e-4, case


def test_two_ranks_compute_what_one_does(tmp_path):
    """Hugging Face directories of every tensor naming, and a checkpoint saved by one rank, on two gloo processes."""
    cases = ["llama_all_biases", "llama_mqa", "qwen3", "phi3", "gpt2", "gpt_oss_limit", "mimo_v2_flash"]
    models = {case: random_model(case) for case in cases}
    models["phi3_mqa"] = random_model("phi3", num_key_value_heads=1)
    run_on_two_ranks(models, "qwen3", tmp_path)


@pytest.mark.long
def test_two_ranks_share_mamba_heads_and_groups(tmp_path):
    cases = ["mamba2_biases", "nemotron_h", "bamba_biases", "granite_factors_tied"]
    run_on_two_ranks({case: random_model(case) for case in cases}, "mamba2_biases", tmp_path)


def ask_for_two_ranks(_: int) -> None:
    with pytest.raises(ConfigError, match=r"^tensor_parallel=2 needs torch\.distributed; start with torchrun"):
        init_process_groups(2)


def test_tensor_parallel_without_torch_distributed_says_what_to_do():
    start_ranks(ask_for_two_ranks, (), 1)  # a process in which torch.distributed is not initialized
