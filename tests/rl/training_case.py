"""Megatron's own training step with the loss of a test, to compare a session's with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from session_case import VOCAB, own_positions

from megatron_infer.testing.cpu_shim import cpu_shim

Batch = list[list[int]]
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.3,
    "moe_z_loss_coeff": 0.1,
}


def sequences_of(lengths: Sequence[int], seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def weights_of(sequences: Batch) -> list[torch.Tensor]:
    """An advantage for each token that is scored."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(len(sequence) - 1, generator=generator) for sequence in sequences]


def loss_over(sequences: Batch) -> Any:
    """loss(scores, indices): the mean over all sequences of their weighted log probabilities."""
    weights = weights_of(sequences)

    def loss(scores: list[torch.Tensor], indices: list[int]) -> torch.Tensor:
        return -sum((weights[i] * s).sum() for i, s in zip(indices, scores, strict=True)) / len(sequences)

    return loss


def megatron_backward(
    chain: Any,
    sequences: Batch,
    groups: Sequence[Sequence[int]],
    *,
    loss: Any = None,
    finalize: Any = None,
    temperature: float = 1.0,
) -> float:
    """megatron-core's schedule over micro-batches (groups of indices) -> sum of the losses.

    chain: the model in its wrappers, in train mode, or the list of its chunks. loss: of scores and indices, from whole
    logits; None: `loss_over` at temperature 1, by the model's own loss of labels (`labelled_step`).
    finalize: as config.finalize_model_grads_func.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    every, found = weights_of(sequences), []
    is_labelled = loss is None and temperature == 1.0
    loss = loss_over(sequences) if loss is None else loss
    roots = chain if isinstance(chain, list) else [chain]
    config = roots[0].config if hasattr(roots[0], "config") else roots[0].module.config

    def forward_step(batches: Iterator[Sequence[int]], model: Any) -> Any:
        indices = list(next(batches))
        length = padded_to(max(len(sequences[i]) for i in indices), config)
        ids = torch.zeros(len(indices), length, dtype=torch.int64)
        padding = torch.zeros(len(indices), length, dtype=torch.bool)
        for row, index in enumerate(indices):
            ids[row, : len(sequences[index])] = torch.tensor(sequences[index])
            padding[row, len(sequences[index]) :] = True
        if is_labelled:
            weights = torch.zeros(ids.shape)
            for row, index in enumerate(indices):
                weights[row, : len(sequences[index]) - 1] = every[index]
            how = {"num_sequences": len(sequences), "num_micro_batches": len(groups)}
            return labelled_step(model, config, ids, padding, weights, found, **how)
        mask = {"padding_mask": padding} if padding.any() and config.num_moe_experts else {}
        out = model(ids, torch.arange(length)[None].expand(len(indices), -1), None, **mask)

        def loss_of(logits: torch.Tensor) -> Any:
            if config.tensor_model_parallel_size > 1:
                from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

                logits = gather_from_tensor_model_parallel_region(logits)
            logprobs = torch.log_softmax(logits.float() / temperature, -1)
            scores = [
                logprobs[row, : len(sequences[i]) - 1].gather(-1, ids[row, 1 : len(sequences[i]), None]).squeeze(-1)
                for row, i in enumerate(indices)
            ]
            value = loss(scores, indices)
            found.append(value.item())
            return value * len(groups), {}

        return out, loss_of

    config.finalize_model_grads_func = finalize
    no_syncs = [root.no_sync for root in roots if hasattr(root, "no_sync")]
    config.no_sync_func = no_syncs if len(roots) > 1 and no_syncs else next(iter(no_syncs), None)
    lengths = {(len(group), padded_to(max(len(sequences[i]) for i in group), config)) for group in groups}
    config.variable_seq_lengths = len(lengths) > 1
    try:
        with cpu_shim(4):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(groups) for _ in roots] if len(roots) > 1 else iter(groups),
                model=roots,
                num_microbatches=len(groups),
                seq_length=max(length for _, length in lengths),
                micro_batch_size=max(rows for rows, _ in lengths),
                forward_only=False,
            )
    finally:
        config.finalize_model_grads_func = config.no_sync_func = None
        config.variable_seq_lengths = False
    return sum(found)


def padded_to(length: int, config: Any) -> int:
    """Positions of a sequence that context-parallel ranks divide in 2 * size parts."""
    num_ranks = config.context_parallel_size
    return length if num_ranks == 1 else length + -length % (2 * num_ranks * config.tensor_model_parallel_size)


def labelled_step(
    model: Any,
    config: Any,
    ids: torch.Tensor,
    padding: torch.Tensor,
    weights: torch.Tensor,
    found: list[float],
    *,
    num_sequences: int,
    num_micro_batches: int,
) -> Any:
    """A forward step as in Megatron-LM's pretrain_gpt.py: the losses of labels times a mask, which is `weights` here.
    Of context-parallel ranks each sums over its part, by get_batch_on_this_cp_rank."""
    from megatron.core import parallel_state

    positions = torch.arange(ids.shape[1])[None].expand(len(ids), -1)
    batch = {"tokens": ids, "labels": ids.roll(-1, 1), "loss_mask": weights, "position_ids": positions}
    is_divided, batch = config.context_parallel_size > 1, batch | {"padding": padding}
    batch = own_positions(batch) if is_divided else batch
    mask = {"padding_mask": batch["padding"]} if padding.any() and config.num_moe_experts else {}
    out = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], **mask)

    def loss_of(losses: torch.Tensor) -> Any:
        value = (losses * batch["loss_mask"]).sum() / num_sequences
        whole = value.detach().clone()
        if is_divided:
            torch.distributed.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        found.append(whole.item())
        return value * num_micro_batches, {}

    return out, loss_of


def megatron_step(trainer: Any, sequences: Batch, groups: Sequence[Sequence[int]], **how: Any) -> tuple[float, float]:
    """A step of a trainer of `trainers` -> (loss, norm of the gradients). how: see `megatron_backward`."""
    from megatron.core.distributed import finalize_model_grads

    roots = trainer.model if isinstance(trainer.model, list) else [trainer.model]
    finalize = finalize_model_grads if hasattr(roots[0], "zero_grad_buffer") else None
    for root in roots:
        root.train()
    with cpu_shim(4):
        loss = megatron_backward(trainer.model, sequences, groups, finalize=finalize, **how)
        norm = torch.cat([grad.flatten() for root in roots for grad in gradients(root).values()]).norm()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        for root in roots if finalize is not None else ():
            root.zero_grad_buffer()
    return loss, float(norm)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of .grad or main_grad; zero where there is none."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
        found[name] = torch.zeros_like(parameter) if grad is None else grad.detach().clone()
    return found


def error_of(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Norm of the difference, relative to that of `want`."""
    assert list(got) == list(want)
    squares = [((got[name].double() - want[name]).square().sum(), want[name].double().square().sum()) for name in want]
    difference, whole = (float(sum(parts)) for parts in zip(*squares, strict=True))
    return (difference / whole) ** 0.5


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], *, tolerance: float = 0.0) -> None:
    """tolerance: of each tensor's largest entry, which counts as 1 at least; 0: the same bits."""
    assert list(got) == list(want)
    for name in got:
        atol = tolerance * max(1.0, float(want[name].abs().max()))
        torch.testing.assert_close(got[name], want[name], atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
