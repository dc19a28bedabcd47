"""Log probabilities of given tokens from the forward that trains.

Over context-parallel ranks sequences are divided as in megatron-core's own loop, and every rank has all scores.

Legend: B sequences, S positions, P scored positions, Q those of this context-parallel rank, V this rank's part of the
vocabulary, D hidden.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_infer.config.model_shape import ModelShape
from megatron_infer.distributed.groups import ParallelGroups
from megatron_infer.errors import ConfigError, InvalidPrompt
from megatron_infer.models.context_parallel import gather_chosen, positions_of
from megatron_infer.models.exact_forward import exact_math
from megatron_infer.models.model_chunks import chunks_of
from megatron_infer.models.selected_logits import logits_at
from megatron_infer.models.trainer_step import DroppedTokens, cuda_error_explained, routes_around_padding

STAND_IN = (0, 0)
"""The tokens that a rank computes in a micro-batch without sequences, for the other ranks."""
ALL_LOGITS_FROM = 7 / 8
"""Share of a micro-batch's positions. Where at least so many are scored, the output layer computes all positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPositions:
    """What a context-parallel rank computes of a micro-batch."""

    positions_S: Tensor
    """Of each sequence, see `models.context_parallel`."""
    scored_Q: Tensor
    """Which of the tokens that are scored."""
    places_Q: Tensor
    """Where in `positions_S` the position before each of them is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Sequences that one forward runs together."""

    indices: list[int]
    """Which sequences, one for each of the first rows; -1 for none."""
    ids_BS: Tensor
    padding_BS: Tensor | None
    """True where a row is padding; None: nowhere."""
    rows_P: Tensor
    targets_P: Tensor
    """Row and place of each token that is scored, row by row."""
    lengths: list[int]
    """Scored tokens of each row."""
    own: OwnPositions | None
    """None: this rank has all positions."""

    @property
    def scored(self) -> tuple[Tensor, Tensor]:
        """Of the tokens that this rank scores: the row, and where the position before the token is on this rank."""
        if self.own is None:
            return self.rows_P, self.targets_P - 1
        return self.rows_P[self.own.scored_Q], self.own.places_Q


class ScoringForward:
    """A model's forward in two parts, between which a pipeline stage may hand on: output, then scores."""

    def __init__(
        self,
        model: Any,
        forwards: Sequence[Callable[..., Tensor]],
        logprobs_of: Callable[[Tensor, Tensor], Tensor],
        logits_at: Callable[[Tensor, Tensor], AbstractContextManager[None]],
        dropped: DroppedTokens,
        *,
        cp: dist.ProcessGroup | None,
        max_position: int,
        only_scored: bool = False,
    ) -> None:
        """forwards: one for each chunk of the model on this rank. logprobs_of(logits, targets) -> the targets' log
        probabilities. logits_at: as `models.selected_logits`. cp: ranks over which micro-batches are divided.
        max_position: positions that the model has; padding may be longer. only_scored: no logits of other positions."""
        self._model, self._forwards, self._logprobs_of, self._logits_at = model, forwards, logprobs_of, logits_at
        self._dropped = dropped
        self._cp = cp
        self._max_position = max_position
        self._only_scored = only_scored

    def __call__(self, batch: MicroBatch, chunk: int = 0) -> Tensor:
        """Logits [1, Q, V] of the positions before the targets, or of all (`_has_all_logits`); hidden states of a stage
        that is not the last."""
        ids_BS, padding_BS, own = batch.ids_BS, batch.padding_BS, batch.own
        rows_Q, places_Q = batch.scored
        positions_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        if own is not None:
            ids_BS, positions_S = ids_BS[:, own.positions_S], own.positions_S
            padding_BS = None if padding_BS is None else padding_BS[:, own.positions_S]
        padding: dict[str, Tensor] = {}
        if self._model.training and padding_BS is not None and routes_around_padding(self._model.config):
            padding = {"padding_mask": padding_BS}
        counted = self._dropped.counted(padding_BS)
        if self._has_all_logits(batch):
            size, length = ids_BS.shape  # of this rank
            rows_Q = torch.arange(size, device=ids_BS.device).repeat(length)
            places_Q = torch.arange(length, device=ids_BS.device).repeat_interleave(size)
        with self._logits_at(rows_Q, places_Q), counted, cuda_error_explained(ids_BS.device):
            positions_BS = positions_S.clamp(max=self._max_position - 1).expand(len(ids_BS), -1)
            return self._forwards[chunk](ids_BS, positions_BS, None, **padding)

    def scores(self, batch: MicroBatch, logits_1QV: Tensor) -> Tensor:
        """Log probabilities of the targets, fp32 [P]."""
        targets_P, own = batch.ids_BS[batch.rows_P, batch.targets_P], batch.own
        targets_Q = targets_P if own is None else targets_P[own.scored_Q]
        if self._has_all_logits(batch):
            rows_Q, places_Q = batch.scored
            chosen_Q = places_Q * len(batch.ids_BS) + rows_Q
            every_N = targets_P.new_zeros(logits_1QV.shape[1]).index_copy(0, chosen_Q, targets_Q)
            scores_Q = self._logprobs_of(logits_1QV, every_N.unsqueeze(0)).squeeze(0).index_select(0, chosen_Q)
        else:
            scores_Q = self._logprobs_of(logits_1QV, targets_Q.unsqueeze(0)).squeeze(0)
        if own is None:
            return scores_Q
        assert self._cp is not None
        return gather_chosen(scores_Q, own.scored_Q, len(targets_P), self._cp)

    def _has_all_logits(self, batch: MicroBatch) -> bool:
        """Whether the output layer computes all positions, in Megatron's order: gradients then have the bits of its own
        step, and few positions are computed in vain."""
        return not self._only_scored and len(batch.targets_P) >= ALL_LOGITS_FROM * batch.ids_BS.numel()


class Scorer:
    """Runs the stock forward of a model, or of this rank's part of it, as in training.

    Every rank of the model calls it with the same sequences and has all scores.
    """

    def __init__(
        self,
        model: Any,
        *,
        shape: ModelShape,
        groups: ParallelGroups,
        device: Callable[[], torch.device],
        timeout_s: float,
        exact: bool = False,
    ) -> None:
        """device: where the model computes. timeout_s: how long a pipeline stage waits for the one before.

        exact: use `models.exact_forward.exact_math`: bitwise equal to an engine with batch_invariant=True. Every
        context-parallel rank then computes whole sequences.
        """
        self._model, self._shape, self._groups, self._exact = model, shape, groups, exact
        self.dropped = DroppedTokens(model)
        self._device = device
        self._limit = timedelta(seconds=timeout_s)
        self.cp = None if exact else groups.cp
        """Ranks over which sequences are divided; None: over none."""
        config = model.config
        self.stage_dtype: torch.dtype = torch.float32 if exact else config.pipeline_dtype or config.params_dtype
        """The dtype of the activations that pipeline stages send each other."""

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

    def micro_batches(
        self,
        sequences: Sequence[Sequence[int]],
        starts: Sequence[int],
        limit: int,
        *,
        beside: Sequence[Sequence[int]] = (),
        is_count: Callable[[int], bool] | None = None,
    ) -> Iterator[MicroBatch]:
        """The sequences in padded batches of at most `limit` tokens, or of one sequence; longest first.

        With the model set up for the forward: sequence parallelism pads. beside: the lengths of the sequences of each
        expert-parallel rank, where they differ. Then all ranks have as many batches, of which the last of a rank may
        be a stand-in that scores no sequence, and batches of equal shapes where tokens are gathered. is_count: how many
        batches there may be; some are divided until there are. Raises ConfigError where that needs more sequences.
        """
        device = self._device()
        each = beside or [[len(sequence) for sequence in sequences]]
        every = [list(micro_batches(one, limit)) for one in each]
        count, fewest = max(map(len, every)), min(map(len, each))
        while is_count is not None and not is_count(count):
            if count >= fewest:
                raise ConfigError(
                    f"{fewest} sequences: megatron-core's schedule over virtual pipeline stages runs a "
                    f"multiple of {self._model.config.microbatch_group_size_per_vp_stage} micro-batches "
                    "(config.microbatch_group_size_per_vp_stage); give more sequences"
                )
            count += 1
        shapes = None
        if beside and self._model.config.moe_token_dispatcher_type == "allgather":
            shapes = [_shape_of(turn, beside) for turn in zip(*(divided(one, count) for one in every), strict=True)]
        own = list(micro_batches([len(sequence) for sequence in sequences], limit))
        for turn, indices in enumerate(divided(own, count)):
            rows = [sequences[index] for index in indices] or [STAND_IN]
            ids_BS, padding_BS = self._padded(rows, device, None if shapes is None else shapes[turn])
            spans = [(starts[index], len(sequences[index])) for index in indices] or [(1, len(STAND_IN))]
            targets_P = torch.tensor([at for span in spans for at in range(*span)], device=device)
            yield MicroBatch(
                indices=indices or [-1],
                ids_BS=ids_BS,
                padding_BS=padding_BS,
                rows_P=torch.tensor([row for row, span in enumerate(spans) for _ in range(*span)], device=device),
                targets_P=targets_P,
                lengths=[end - start for start, end in spans],
                own=None if self.cp is None else _own_positions(self.cp, ids_BS.shape[1], targets_P),
            )

    @contextmanager
    def forward(self, forward: Any, *, temperature: float, single_backward: bool = False) -> Iterator[ScoringForward]:
        """forward(ids_BS, positions_BS, None): the model's or a wrapper's, which scores within the block; of several
        chunks a ModuleList.

        single_backward: gradients are taken once at most, so that logits are overwritten by their gradient.
        """
        self.dropped.take()  # of a call that failed
        how: dict[str, Any] = {"cp": self.cp, "max_position": self._shape.max_position}
        forwards = list(forward) if isinstance(forward, torch.nn.ModuleList) else chunks_of(forward)
        with ExitStack() as stack:
            if self._exact:
                math = stack.enter_context(exact_math(self._model))
                logprobs_of = functools.partial(math.token_logprobs, temperature=temperature)
                how["only_scored"] = True
                yield ScoringForward(self._model, forwards, logprobs_of, math.logits_at, self.dropped, **how)
                return
            logprobs_of = functools.partial(
                self._token_logprobs, temperature=temperature, single_backward=single_backward
            )
            at = functools.partial(logits_at, chunks_of(self._model)[-1])
            yield ScoringForward(self._model, forwards, logprobs_of, at, self.dropped, **how)

    def score(self, forward: Any, batches: Sequence[MicroBatch], *, temperature: float) -> list[Tensor]:
        """forward: see `forward` -> fp32 [len - start] for each sequence of all batches, in order.

        Over pipeline stages: where a forward of a stage raises, all stages end with that batch; the others return the
        scores of those before.
        """
        scores: dict[int, Tensor] = {}
        with self.forward(forward, temperature=temperature) as run:
            for batch in batches:
                if (found_P := self._through_stages(run, batch)) is None:
                    break
                scores |= zip(batch.indices, found_P.split(batch.lengths), strict=True)
        return [scores[index] for index in sorted(scores) if index >= 0]

    def _padded(
        self, sequences: Sequence[Sequence[int]], device: torch.device, shape: tuple[int, int] | None
    ) -> tuple[Tensor, Tensor | None]:
        """Padded with zeros at the end, which no position before it attends to; and where, None: nowhere.

        shape: (rows, length) at least; None: those of the sequences.
        """
        num_rows, length = (len(sequences), max(map(len, sequences))) if shape is None else shape
        num_parts = 1 if self.cp is None else 2 * self.cp.size()
        if self._model.config.sequence_parallel:
            num_parts *= self._groups.tp_size
        length += -length % num_parts  # positions are split over the ranks in equal parts
        ids_BS = torch.zeros(num_rows, length, dtype=torch.int64)
        padding_BS = torch.zeros(num_rows, length, dtype=torch.bool)
        padding_BS[len(sequences) :] = True
        for row, sequence in enumerate(sequences):
            ids_BS[row, : len(sequence)] = torch.tensor(sequence)
            padding_BS[row, len(sequence) :] = True
        return ids_BS.to(device), padding_BS.to(device) if bool(padding_BS.any()) else None

    def hidden_shape(self, batch: MicroBatch) -> tuple[int, int, int]:
        """The shape that a pipeline stage sends to the next one: (positions of this rank, sequences, hidden size)."""
        (size, length), config = batch.ids_BS.shape, self._model.config
        length = length if batch.own is None else len(batch.own.positions_S)
        is_divided = config.sequence_parallel and not self._exact
        return length // (self._groups.tp_size if is_divided else 1), size, config.hidden_size

    def stand_in(self, batch: MicroBatch, chunk: int = 0) -> Tensor:
        """Zeros in place of a stage's output, from which a backward pass reaches the stage's input with zeros."""
        model = chunks_of(self._model)[chunk]
        if not model.pre_process:
            received: Tensor = model.decoder.input_tensor
            return received * 0.0
        zeros = torch.zeros(self.hidden_shape(batch), dtype=self.stage_dtype, device=batch.ids_BS.device)
        return zeros.requires_grad_() * 1.0

    def _through_stages(self, run: ScoringForward, batch: MicroBatch) -> Tensor | None:
        """One forward without a backward -> the targets' log probabilities, fp32 [P], on every pipeline stage; None:
        another stage has raised."""
        groups = self._groups
        if groups.pp is None:
            return run.scores(batch, run(batch))
        stages, shape = dist.get_process_group_ranks(groups.pp), self.hidden_shape(batch)
        how = {"device": batch.ids_BS.device, "dtype": self.stage_dtype}
        # the last number of each message: how many stages have raised. The stages after them compute with zeros: ranks
        # of a stage do the same collectives, whichever of the stages before has raised
        failure = None
        shared = torch.zeros(len(batch.targets_P) + 1, dtype=torch.float32, device=how["device"])
        for number, chunk in enumerate(chunks_of(self._model)):
            received = torch.zeros(math.prod(shape) + 1, **how)
            if not chunk.pre_process:
                # a group's own timeout holds for messages, and cannot be lowered
                dist.irecv(received, src=stages[groups.pp_rank - 1], group=groups.pp).wait(self._limit)
                chunk.set_input_tensor(received[:-1].view(shape))
            passed_on = torch.zeros_like(received)
            try:
                out = run(batch, number)
                if chunk.post_process:
                    shared[:-1] = run.scores(batch, out)
                else:
                    passed_on[:-1] = out.reshape(-1)
            except Exception as error:  # the other stages wait for this one
                failure = failure or error
            num_failed = received[-1] + (failure is not None)
            passed_on[-1], shared[-1] = num_failed, num_failed
            if not chunk.post_process:
                dist.send(passed_on, dst=stages[(groups.pp_rank + 1) % len(stages)], group=groups.pp)
        try:
            dist.broadcast(shared, src=stages[-1], group=groups.pp)
        except RuntimeError as error:  # where this stage has raised, other ranks of it may have waited for this one
            failure = failure or error
        if failure is not None:
            raise failure
        return shared[:-1] if float(shared[-1]) == 0.0 else None

    def _token_logprobs(
        self, logits_BSV: Tensor, targets_BS: Tensor, temperature: float, single_backward: bool
    ) -> Tensor:
        size = self._shape.vocab_size
        whole = logits_BSV.shape[-1] == self._shape.padded_vocab_size
        first = 0 if whole else self._groups.tp_rank * logits_BSV.shape[-1]
        num_columns = min(max(size - first, 0), logits_BSV.shape[-1])
        group = None if whole else self._groups.tp
        out: Tensor = VocabParallelLogprob.apply(
            logits_BSV, targets_BS - first, num_columns, group, temperature, single_backward
        )
        return out


def _own_positions(cp: dist.ProcessGroup, length: int, targets_P: Tensor) -> OwnPositions:
    positions_S = positions_of(cp.rank(), cp.size(), length).to(targets_P.device)
    places = torch.full((length,), -1, device=targets_P.device)
    places[positions_S] = torch.arange(len(positions_S), device=targets_P.device)
    places_P = places[targets_P - 1]
    scored_Q = (places_P >= 0).nonzero().flatten()
    return OwnPositions(positions_S=positions_S, scored_Q=scored_Q, places_Q=places_P[scored_Q])


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


def divided(batches: Sequence[list[int]], count: int) -> list[list[int]]:
    """`count` batches: the fullest are divided, and empty ones added once each has one sequence."""
    found = [list(batch) for batch in batches]
    while len(found) < count:
        place = max(range(len(found)), key=lambda index: len(found[index]), default=0)
        size = len(found[place]) if found else 0
        if size < 2:
            return [*found, *([] for _ in range(count - len(found)))]
        found[place : place + 1] = [found[place][: (size + 1) // 2], found[place][(size + 1) // 2 :]]
    return found


def _shape_of(batches: Sequence[Sequence[int]], beside: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Rows and length of the batches that several ranks run together."""
    lengths = [
        [one[index] for index in indices] or [len(STAND_IN)] for indices, one in zip(batches, beside, strict=True)
    ]
    return max(map(len, lengths)), max(map(max, lengths))


class VocabParallelLogprob(torch.autograd.Function):
    """log softmax(logits / temperature) at one token, of logits whose columns may be split over ranks: never gathered.

    Three numbers per position are reduced: the largest logit, the sum of exponentials, the token's own logit.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_BSV: Tensor,
        local_BS: Tensor,
        num_columns: int,
        group: Any,
        temperature: float = 1.0,
        single_backward: bool = False,
    ) -> Tensor:
        """local_BS: tokens counted from this rank's first column. num_columns: columns that are not padding.

        group: None: all columns are here. single_backward: backward runs once. Then, and without a backward, the logits
        are overwritten, as megatron-core's cross entropy does.
        """
        x_BSV = logits_BSV.float()
        if x_BSV is logits_BSV and ctx.needs_input_grad[0] and not single_backward:
            x_BSV = x_BSV.clone()
        if temperature != 1.0:
            x_BSV.div_(temperature)
        x_BSV[..., num_columns:] = -torch.inf
        max_BS = x_BSV.amax(-1)
        _reduce(max_BS, dist.ReduceOp.MAX, group)
        shifted_BSV = x_BSV.sub_(max_BS.unsqueeze(-1))
        is_local_BS = (local_BS >= 0) & (local_BS < num_columns)
        column_BS1 = local_BS.clamp(0, logits_BSV.shape[-1] - 1).unsqueeze(-1)
        token_BS = shifted_BSV.gather(-1, column_BS1).squeeze(-1).masked_fill_(~is_local_BS, 0.0)
        exp_BSV = shifted_BSV.exp_()
        both = torch.stack([exp_BSV.sum(-1), token_BS])
        _reduce(both, dist.ReduceOp.SUM, group)
        total_BS, token_BS = both
        ctx.save_for_backward(exp_BSV.div_(total_BS.unsqueeze(-1)), column_BS1, is_local_BS)
        ctx.temperature, ctx.single_backward, ctx.dtype = temperature, single_backward, logits_BSV.dtype
        return token_BS - total_BS.log()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # softmax would count as constant
            raise ConfigError("create_graph=True: scores have no second derivative; take a backward pass without it")
        softmax_BSV, column_BS1, is_local_BS = ctx.saved_tensors
        grad_BS1 = grads[0].unsqueeze(-1) / ctx.temperature
        out_BSV = softmax_BSV if ctx.single_backward else softmax_BSV.clone()
        out_BSV.scatter_add_(-1, column_BS1, -is_local_BS.unsqueeze(-1).to(out_BSV.dtype))
        out_BSV.mul_(-grad_BS1)
        return out_BSV.to(ctx.dtype), None, None, None, None, None


def _reduce(tensor: Tensor, op: Any, group: Any) -> None:
    if group is not None:
        dist.all_reduce(tensor, op, group=group)
