"""A model that trains with sequence parallelism generates in between, and trains on with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_ranks as ranks
import pytest
import torch
from gloo_ranks import new_groups, run_on_ranks
from test_expert_engine import take_part

from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt, tiny_hybrid

MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "attention": lambda **how: tiny_gpt(**ranks.GPT, **how),
    "experts": lambda **how: tiny_gpt(**ranks.GPT, **EXPERTS, **how),
    "hybrid": lambda **how: tiny_hybrid("M*-M", **ranks.HYBRID, **how),
}
STEPS = 2
LEARNING_RATE = 0.1


def rounds(model: torch.nn.Module, train: Callable[..., float] | None = None) -> dict[str, Any]:
    """Generate and train by turns -> answers and losses. train: what a step is, in place of `train_whole`."""
    train = train or train_whole
    split = model.config.sequence_parallel
    flags = flags_of(model)
    settings = {"enable_chunked_prefill": True, "max_tokens": 40, "enable_prefix_caching": True}
    if hasattr(model, "hybrid_override_pattern"):
        settings["prefix_caching_mamba_gb"] = 0.01
    engine = ranks.make_engine(model, **settings)
    leads = engine.rank_group.groups.is_leader
    found: dict[str, Any] = {"answers": [], "losses": []}
    for step in range(STEPS + 1):
        prompts, params = zip(*ranks.workload(5), strict=True)
        outputs = engine.generate(list(prompts), list(params)) if leads else engine.generate([])
        account = [
            (s.token_ids, [e[t].logprob for e, t in zip(s.logprobs, s.token_ids, strict=True)])
            for output in outputs
            for s in output.outputs
        ]
        found["answers"].append(account)
        assert flags_of(model) == flags and model.config.sequence_parallel == split
        if step < STEPS:
            found["losses"].append(train(model, step, split=split))
    engine.rank_group.lockstep.close()
    return found


def flags_of(model: torch.nn.Module) -> dict[str, bool]:
    named = [*model.named_modules(), *model.named_parameters()]
    return {name: thing.sequence_parallel for name, thing in named if hasattr(thing, "sequence_parallel")}


def train_whole(model: torch.nn.Module, step: int, *, split: bool) -> float:
    """A step of gradient descent, as the trainer takes it -> its loss."""
    ids, positions = training_batch(step)
    widths: list[int] = []
    hook = model.decoder.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(len(kwargs.get("hidden_states", args[0] if args else None))),
        with_kwargs=True,
    )
    model.train()
    with cpu_shim(1) if split else contextlib.nullcontext():
        loss = model(ids, positions, None, labels=ids.roll(-1, 1)).mean()
        loss.backward()
    hook.remove()
    assert widths == [6 if split else 12], "the tokens were not spread over the ranks"
    descend(model, split=split)
    return loss.item()


def training_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, positions)"""
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(step))
    return ids, torch.arange(12)[None].expand(2, -1)


def descend(model: torch.nn.Module, *, split: bool) -> None:
    """Take a step down the gradients, and leave the model as inference wants it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if split and getattr(parameter, "sequence_parallel", False):
                torch.distributed.all_reduce(parameter.grad, group=model.pg_collection.tp)
            parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
            parameter.grad = None
    model.eval()


def on_rank(rank: int, size: int, folder: Path) -> None:
    sizes = {"tensor_model_parallel_size": size}
    new_groups(**sizes)
    for kind, make in MODELS.items():
        model = make(**sizes, sequence_parallel=True)
        weights, want = torch.load(folder / f"{kind}.pt")
        take_part(model, weights, "parts of experts", rank)
        got = rounds(model)
        for mine, its in zip(got["losses"], want["losses"], strict=True):
            assert abs(mine - its) < 1e-5, (kind, got["losses"], want["losses"])
        if rank == 0:
            check_rounds(got, want, kind)


def check_rounds(got: dict[str, Any], want: dict[str, Any], kind: str) -> None:
    """Equal answers after every step."""
    for mine, its in zip(got["answers"], want["answers"], strict=True):
        assert [tokens for tokens, _ in mine] == [tokens for tokens, _ in its], kind
        for (_, a), (_, b) in zip(mine, its, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=2e-5, rtol=0, msg=kind)


@pytest.mark.long
@pytest.mark.timeout(280)
def test_generation_between_steps_of_sequence_parallel_training(tmp_path: Path) -> None:
    """Two ranks give the answers, losses and, after each step, the answers of one process without the flag."""
    torch.set_num_threads(1)
    for kind, make in MODELS.items():
        model = make()
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        want = rounds(model)
        first, *later = want["answers"]
        assert all(answer != first for answer in later), "the steps change nothing"
        torch.save((weights, want), tmp_path / f"{kind}.pt")
    run_on_ranks(on_rank, 2, tmp_path)
