"""Log probabilities of given tokens from the forward that trains.

Legend: B sequences, S positions, P scored positions, V this rank's part of the vocabulary, D hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_infer.comm.groups import ParallelGroups
from megatron_infer.config.model_shape import ModelShape
from megatron_infer.errors import ConfigError, InvalidPrompt
from megatron_infer.models.exact_forward import exact_math
from megatron_infer.models.selected_logits import logits_at


class Scorer:
    """Runs the stock forward of a model, or of this rank's part of it, as in training.

    Every rank of the model calls it with the same sequences and has all scores.
    """

    def __init__(self, model: Any, *, shape: ModelShape, groups: ParallelGroups, exact: bool = False) -> None:
        """exact: use `models.exact_forward.exact_math`: bitwise equal to an engine with batch_invariant=True."""
        self._model, self._shape, self._groups, self._exact = model, shape, groups, exact

    def check(
        self, sequences: Sequence[Sequence[int]], temperature: float, micro_batch_tokens: int, starts: Sequence[int]
    ) -> None:
        """Raise ConfigError or InvalidPrompt for arguments that cannot be scored."""
        if not temperature > 0:
            raise ConfigError(f"temperature is {temperature}, it must be above 0; 1.0 scores the model's own logits")
        if micro_batch_tokens < 1:
            raise ConfigError(f"micro_batch_tokens is {micro_batch_tokens}, it must be at least 1")
        if len(starts) != len(sequences):
            raise ConfigError(f"start has {len(starts)} entries for {len(sequences)} sequences; one each, or a number")
        for index, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
            if not 2 <= len(sequence) <= self._shape.max_position:
                raise InvalidPrompt(
                    f"sequence {index} has {len(sequence)} tokens, a score takes 2 to {self._shape.max_position} "
                    "(the model's max_sequence_length)"
                )
            if min(sequence) < 0 or max(sequence) >= self._shape.vocab_size:
                raise InvalidPrompt(
                    f"sequence {index} has token ids {min(sequence)} to {max(sequence)}, the vocabulary is 0 to "
                    f"{self._shape.vocab_size - 1}"
                )
            if not 1 <= start < len(sequence):
                raise ConfigError(
                    f"start of sequence {index} is {start}, of {len(sequence)} tokens; it must be 1 to "
                    f"{len(sequence) - 1}: it is the first token scored, and a sequence's first token has no score"
                )

    def score(
        self,
        forward: Callable[..., Tensor],
        sequences: Sequence[Sequence[int]],
        *,
        temperature: float,
        micro_batch_tokens: int,
        starts: Sequence[int],
    ) -> list[Tensor]:
        """forward(ids_BS, positions_BS, None): the model's or a wrapper's -> fp32 [len - start] for each sequence."""
        if self._exact:
            with exact_math(self._model) as math:
                logprobs_of = functools.partial(math.token_logprobs, temperature=temperature)
                return self._score(forward, sequences, starts, logprobs_of, math.logits_at, micro_batch_tokens)
        logprobs_of = functools.partial(self._token_logprobs, temperature=temperature)
        positions_only = functools.partial(logits_at, self._model)
        return self._score(forward, sequences, starts, logprobs_of, positions_only, micro_batch_tokens)

    def _score(
        self,
        forward: Callable[..., Tensor],
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        logprobs_of: Callable[[Tensor, Tensor], Tensor],
        positions_only: Callable[[Tensor, Tensor], AbstractContextManager[None]],
        micro_batch_tokens: int,
    ) -> list[Tensor]:
        """logprobs_of(logits, targets) -> the targets' log probabilities. positions_only: as `logits_at`."""
        device = next(self._model.parameters()).device
        scores: dict[int, Tensor] = {}
        for indices in micro_batches([len(sequence) for sequence in sequences], micro_batch_tokens):
            ids_BS = self._padded([sequences[index] for index in indices], device)
            spans = [(starts[index], len(sequences[index])) for index in indices]
            rows_P = torch.tensor([row for row, span in enumerate(spans) for _ in range(*span)], device=device)
            targets_P = torch.tensor([at for span in spans for at in range(*span)], device=device)
            with positions_only(rows_P, targets_P - 1):
                scores_P = self._micro_batch(forward, ids_BS, ids_BS[rows_P, targets_P], logprobs_of)
            scores |= zip(indices, scores_P.split([end - start for start, end in spans]), strict=True)
        return [scores[index] for index in range(len(sequences))]

    def _padded(self, sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        """Padded with zeros at the end, which no position before it attends to."""
        length = max(map(len, sequences))
        if self._model.config.sequence_parallel:  # positions are split over the ranks in equal parts
            length += -length % self._groups.tp_size
        ids_BS = torch.zeros(len(sequences), length, dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            ids_BS[row, : len(sequence)] = torch.tensor(sequence)
        return ids_BS.to(device)

    def _micro_batch(
        self,
        forward: Callable[..., Tensor],
        ids_BS: Tensor,
        targets_P: Tensor,
        logprobs_of: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """One forward, which gives logits [1, P, V] -> the targets' log probabilities, fp32 [P]."""
        groups, model = self._groups, self._model
        batch, length = ids_BS.shape
        positions_BS = torch.arange(length, device=ids_BS.device).expand(batch, -1)
        stages = [] if groups.pp is None else dist.get_process_group_ranks(groups.pp)
        if not groups.is_first_stage:
            split = groups.tp_size if model.config.sequence_parallel else 1
            dtype = model.config.pipeline_dtype or model.config.params_dtype
            received = torch.empty(length // split, batch, model.config.hidden_size, dtype=dtype, device=ids_BS.device)
            dist.recv(received, src=stages[groups.pp_rank - 1], group=groups.pp)
            model.set_input_tensor(received)
        out = forward(ids_BS, positions_BS, None)
        if groups.is_last_stage:
            scores_P = logprobs_of(out, targets_P.unsqueeze(0)).squeeze(0)
        else:
            dtype = model.config.pipeline_dtype or model.config.params_dtype
            dist.send(out.to(dtype).contiguous(), dst=stages[groups.pp_rank + 1], group=groups.pp)
            scores_P = torch.empty(len(targets_P), dtype=torch.float32, device=ids_BS.device)
        if groups.pp is not None:
            dist.broadcast(scores_P, src=stages[-1], group=groups.pp)
        return scores_P

    def _token_logprobs(self, logits_BSV: Tensor, targets_BS: Tensor, temperature: float) -> Tensor:
        logits_BSV = logits_BSV.float()
        if temperature != 1.0:
            logits_BSV = logits_BSV / temperature
        size = self._shape.vocab_size
        if logits_BSV.shape[-1] == self._shape.padded_vocab_size:
            logprobs_BSV = torch.log_softmax(logits_BSV[..., :size], -1)
            return logprobs_BSV.gather(-1, targets_BS.unsqueeze(-1)).squeeze(-1)
        first = self._groups.tp_rank * logits_BSV.shape[-1]
        num_columns = min(max(size - first, 0), logits_BSV.shape[-1])
        out: Tensor = VocabParallelLogprob.apply(logits_BSV, targets_BS - first, num_columns, self._groups.tp)
        return out


def micro_batches(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Indices of sequences to run together, longest first: at most `limit` padded tokens, or one sequence."""
    indices: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if indices and lengths[indices[0]] * (len(indices) + 1) > limit:
            yield indices
            indices = []
        indices.append(index)
    if indices:
        yield indices


class VocabParallelLogprob(torch.autograd.Function):
    """log softmax at one token, of logits whose columns are split over ranks and never gathered.

    Three numbers per position are reduced: the largest logit, the sum of exponentials, the token's own logit.
    """

    @staticmethod
    def forward(ctx: Any, logits_BSV: Tensor, local_BS: Tensor, num_columns: int, group: Any) -> Tensor:
        """local_BS: tokens counted from this rank's first column. num_columns: columns that are not padding."""
        padded = logits_BSV.shape[-1] - num_columns
        x_BSV = logits_BSV if not padded else logits_BSV.clone()
        if padded:
            x_BSV[..., num_columns:] = -torch.inf
        max_BS = x_BSV.amax(-1)
        dist.all_reduce(max_BS, dist.ReduceOp.MAX, group=group)
        shifted_BSV = x_BSV - max_BS.unsqueeze(-1)
        is_local_BS = (local_BS >= 0) & (local_BS < num_columns)
        column_BS1 = local_BS.clamp(0, logits_BSV.shape[-1] - 1).unsqueeze(-1)
        token_BS = shifted_BSV.gather(-1, column_BS1).squeeze(-1).masked_fill_(~is_local_BS, 0.0)
        exp_BSV = shifted_BSV.exp_()
        both = torch.stack([exp_BSV.sum(-1), token_BS])
        dist.all_reduce(both, group=group)
        total_BS, token_BS = both
        ctx.save_for_backward(exp_BSV.div_(total_BS.unsqueeze(-1)), column_BS1, is_local_BS)
        return token_BS - total_BS.log()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_BSV, column_BS1, is_local_BS = ctx.saved_tensors
        grad_BS1 = grads[0].unsqueeze(-1)
        out_BSV = softmax_BSV * -grad_BS1
        out_BSV.scatter_add_(-1, column_BS1, grad_BS1 * is_local_BS.unsqueeze(-1))
        return out_BSV, None, None, None
