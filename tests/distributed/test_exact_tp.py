"""Exact mode over tensor-parallel ranks: the trainer's forward has the bits of the engine of as many ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import VOCAB, make_engine, part_of_model, whole_model, workload
from gloo_ranks import new_groups, run_on_ranks
from model_kinds import LATENT
from test_adopt_tensor_parallel import fill_vectors

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ModelError
from megatron_infer.models.exact_forward import exact_logprobs, exact_math
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import tiny_gpt

SHARED = {"num_query_groups": 1, "init_method_std": 0.2, "share_embeddings_and_output_weights": True}
"""One kv head for two ranks, tied embeddings."""
EXPERTS = {
    "init_method_std": 0.2,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "none",
    "moe_shared_expert_intermediate_size": 32,
    "moe_shared_expert_gate": True,
}
"""Each expert is split over the ranks."""
BF16 = {"params_dtype": torch.bfloat16}
MODELS: dict[str, dict[str, Any]] = {"shared": SHARED, "shared bf16": SHARED | BF16, "experts": EXPERTS}
MODELS |= {"latent": LATENT | {"init_method_std": 0.2}}
KINDS = ("attention", "hybrid", *MODELS)
WHOLE = ("experts", "latent")
"""Compared with the gradients of one process. Stock experts train with sequence parallelism alone, and stock latent
attention of column-parallel linears leaves the other ranks' heads out of the gradient of the keys' rotary part."""


def model_of(kind: str, folder: str = "", rank: int = 0, size: int = 1) -> torch.nn.Module:
    if kind not in MODELS:
        return whole_model(kind) if size == 1 else part_of_model(kind, folder, rank, size)
    model = tiny_gpt(**MODELS[kind], tensor_model_parallel_size=size, randomize=False)
    fill_vectors(model, rank, size)
    return model


def gradients(model: torch.nn.Module, *, exact: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(4, VOCAB, (2, 23), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(23)[None].expand(2, -1)
    model.zero_grad()
    if exact:
        with exact_math(model):
            loss = model(ids, positions, None, labels=ids.roll(-1, 1))
    else:
        loss = model(ids, positions, None, labels=ids.roll(-1, 1))
    (loss * torch.linspace(-1, 2, loss.numel()).view(loss.shape)).mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def scored_as_drawn(engine: Any, model: torch.nn.Module) -> None:
    """Each rank compares: rank 0 has the answers and sends them round."""
    rank = torch.distributed.get_rank()
    if rank == 0:
        work = [(p, _params(i)) for i, (p, _) in enumerate(workload(6))]
        outputs = engine.generate([p for p, _ in work], [params for _, params in work])
        answers = [
            (
                output.prompt_token_ids,
                sample.token_ids,
                [entry[t].logprob for entry, t in zip(sample.logprobs, sample.token_ids, strict=True)],
            )
            for output in outputs
            for sample in output.outputs
        ]
        engine.dismiss()
    else:
        answers = None
        engine.follow()
    box = [answers]
    torch.distributed.broadcast_object_list(box, src=0)
    for (prompt, tokens, values), whole in zip(
        box[0], exact_logprobs(model, [p + t for p, t, _ in box[0]]), strict=True
    ):
        assert whole[len(prompt) - 1 :].tolist() == values, "other bits"
        assert len(tokens) == len(values)


def _params(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=12 + i, temperature=0.9 * (i % 2), seed=i, ignore_eos=True, logprobs=0)


def run_rank(rank: int, size: int, folder: Path) -> None:
    new_groups(tensor_model_parallel_size=size)
    for kind in KINDS:
        model = model_of(kind, str(folder), rank, size)
        settings = {"batch_invariant": True, "enable_chunked_prefill": True, "max_tokens": 24}
        scored_as_drawn(make_engine(model, **settings), model)
        if "bf16" in kind:
            continue
        model.train()
        exact = gradients(model, exact=True)
        if kind in WHOLE:
            wanted = torch.load(folder / f"{kind}.gradients.pt")
            for name, got in exact.items():
                whole, by_columns = wanted[name], name.endswith(("fc2.weight", "linear_proj.weight"))
                if (got.shape != whole.shape and "fc1" in name) or "linear_qkv" in name:
                    continue  # gate and up apart, groups by themselves
                want = whole if got.shape == whole.shape else whole.chunk(size, dim=int(by_columns))[rank]
                assert (got - want).norm() <= 2e-5 * want.norm() + 1e-9, name
            continue
        with cpu_shim(1):
            stock = gradients(model, exact=False)
        for name, want in stock.items():
            assert (exact[name] - want).norm() <= 1e-5 * want.norm() + 1e-9, f"{kind}: {name}"
    new_groups(expert_model_parallel_size=size)
    spread = tiny_gpt(**EXPERTS, expert_model_parallel_size=size)
    with pytest.raises(NotImplementedError, match="experts on ranks beyond the tensor-parallel ones"):
        make_engine(spread, batch_invariant=True)
    with pytest.raises(ModelError, match="experts on ranks beyond"), exact_math(spread):
        pass


@pytest.mark.long
@pytest.mark.timeout(240)
def test_two_ranks_are_exact_and_train(tmp_path: Path):
    torch.save(whole_model("hybrid").state_dict(), tmp_path / "hybrid.weights.pt")
    for kind in WHOLE:
        torch.save(gradients(model_of(kind).train(), exact=True), tmp_path / f"{kind}.gradients.pt")
    run_on_ranks(run_rank, 2, tmp_path)
