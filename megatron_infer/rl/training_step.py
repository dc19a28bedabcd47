"""The trainer's side of a session: scores of its forward, gradients in micro-batches, and the optimizer's step.

score_and_backward   micro-batch ─▶ forward ─▶ scores ─▶ loss(scores, indices) ─▶ backward      one graph at a time
                     pipeline stages: the same within megatron-core's 1F1B schedule
step                 reduce gradients ─▶ optimizer.step() ─▶ zero gradients
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_infer.distributed.collective_errors import is_of_collective
from megatron_infer.distributed.lockstep import digest_of
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.metrics.definitions import TRAINER
from megatron_infer.errors import ConfigError, LockstepError, OtherRankFailed, WrongState
from megatron_infer.models.attached_lora import adapters_off, attached
from megatron_infer.models.model_chunks import chunks_of
from megatron_infer.models.router_replay import check_not_replaying
from megatron_infer.models.trainer_state import auxiliary_losses_of, dropout_of, evaluation, train_mode
from megatron_infer.models.trainer_step import (
    AuxiliaryLosses,
    auxiliary_scale_kept,
    check_all_get_gradients,
    check_sums_over,
    cuda_error_explained,
    is_interleaved_count,
    reduce_gradients,
    reduces_while_backward,
    replays_graphs,
    run_1f1b,
    scale_auxiliary_losses,
    scaled_loss,
    starts_new_weights,
    uncovered_option,
    without_gradient_sync,
    zero_gradients,
)
from megatron_infer.rl.scoring import MicroBatch, Scorer, ScoringForward, micro_batches
from megatron_infer.rl.train_mode import TrainModeSwitch

Loss = Callable[[list[Tensor], list[int]], Tensor]
"""loss(scores, indices): the scores of a micro-batch's sequences, with gradients -> its part of the loss."""
ATTACHED = "attached"
"""Scores are those of the model with the adapter that trains on it, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """How sequences are scored; see `RolloutSession.score`."""

    temperature: float
    micro_batch_tokens: int
    start: int | Sequence[int]
    dropout: bool
    adapter: str | None = ATTACHED


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardReport:
    """What `score_and_backward` has computed; the gradients are in the model."""

    loss: float
    """Sum of what `loss` returned on this data-parallel rank, without auxiliary losses."""
    scores: list[Tensor]
    """fp32 [len - start] for each sequence, without gradients."""
    auxiliary_losses: dict[str, Tensor]
    """megatron-core's auxiliary losses by its names, fp32 [layers]: mean over micro-batches, without coefficients."""
    num_micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What `step` has done."""

    grad_norm: float | None
    """Before clipping; None where megatron-core's optimizer computes none, or another one has a part of the model."""
    update_successful: bool
    """False: the optimizer left the weights as they were (an overflow of fp16), and their version with them."""
    weight_version: int


class TrainerStep:
    """Runs the model of a session as its trainer does. Every rank of the model makes the same calls."""

    def __init__(
        self, chain: Sequence[Any], switch: TrainModeSwitch, engine: DynamicInferenceEngine, ranks: RankGroup
    ) -> None:
        """chain: `models.trainer_state.wrapper_chain`. engine: may run another model. ranks: of the chain's model,
        context-parallel ones too."""
        self._chain = chain
        self._switch = switch
        self._weights = engine.weights if engine.model is chain[-1] else None
        self._rank_group = ranks
        self._groups = ranks.groups
        self._exact = engine.config.batch_invariant
        shape = replace(engine.shape, padded_vocab_size=chain[-1].vocab_size)
        self._scorer = Scorer(
            chain[-1],
            shape=shape,
            groups=self._groups,
            device=lambda: switch.device,
            timeout_s=engine.config.collective_timeout_s,
            exact=self._exact,
        )
        self._num_chunks = len(chunks_of(chain[-1]))
        self._is_count = is_interleaved_count(chain[-1].config, self._groups.pp_size) if self._num_chunks > 1 else None
        self._registry = engine.output_processor.meter.registry
        self._incomplete = ""
        """Why the gradients are not those of whole calls; "": they are."""
        self._is_reduced = False
        """megatron-core's DDP reduces the gradients: it takes no more until the step."""
        self._is_torn = False
        """The optimizer of a rank raised, and others may have taken the step."""

    # ------------------------------------------------------------------ scores

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        options: ScoreOptions,
        *,
        grad: bool,
        is_generating: bool,
    ) -> list[Tensor]:
        """See `RolloutSession.score`. is_generating: the model is not in the trainer's state when backward runs."""
        given, starts, beside = self._arguments("score()", sequences, options, grad)
        dropout = options.dropout

        def check() -> None:
            if options.adapter != ATTACHED:
                _check_base(self._chain[-1], options.adapter, grad=grad)
            if not grad and dropout:
                raise ConfigError("dropout=True without grad=True; scores without gradients are those of the eval mode")
            self._check_shards()
            if grad:
                self._check_late_backward(dropout=dropout, is_generating=is_generating)

        # torch's DDP reduces gradients only after a forward of its own; Megatron-FSDP gathers only in its own
        forward = self._chain[0] if grad or self._switch.holds_shards else self._chain[-1]
        how = self._switch.scoring_with_gradients(dropout=dropout) if grad else self._switch.scoring()
        policy = nullcontext() if options.adapter == ATTACHED else adapters_off(self._chain[-1])
        computing = self._rank_group.computing("score")
        with computing, self._checked_modules("score()", check), how, policy:
            batches = list(self._scorer.micro_batches(given, starts, options.micro_batch_tokens, beside=beside))
            if grad:
                scale_auxiliary_losses(self._chain[-1].config, max(len(batches), 1), self._device)
            late = "the backward pass after score(grad=True) is the caller's; take score_and_backward()" if grad else ""
            missing = self._missing_batches(len(batches), not_unequal=late)
            starts_new_weights(self._chain[-1])
            in_stages = self._groups.pp is not None
            with self._rank_group.together("score()", has_collectives=True) if in_stages else nullcontext():
                scores = self._scorer.score(forward, batches, temperature=options.temperature)
            if missing:
                with self._scorer.forward(forward, temperature=options.temperature) as run:
                    self._take_part(run, missing, grad=False)
            self._check_dropped("score()")
            return scores

    def _arguments(
        self, call: str, sequences: Sequence[Sequence[int]], options: ScoreOptions, *others: bool
    ) -> tuple[list[list[int]], list[int], list[list[int]]]:
        """Sequences and starts, valid and equal on ranks with the same data -> (sequences, starts, `beside` of
        `Scorer.micro_batches`)."""
        given_ids, starts, error = [], [], None
        try:
            given_ids = [list(sequence) for sequence in sequences]
            start, limit = options.start, options.micro_batch_tokens
            starts = [int(start)] * len(given_ids) if isinstance(start, Integral) else [int(one) for one in start]
            self._scorer.check(given_ids, options.temperature, limit, starts)
        except Exception as failure:  # the other ranks wait for this one
            error = failure
        beside: list[list[int]] = []
        if self._rank_group.size > 1:
            self._rank_group.lockstep.phase = call.removesuffix("()")
            how = [options.temperature, options.micro_batch_tokens, options.dropout, options.adapter, *others]
            failed = "" if error is None else f"{type(error).__name__}: {error}"
            own = [self._groups.data_rank, digest_of([given_ids, starts]), list(map(len, given_ids)), failed]
            texts = self._rank_group.lockstep.meet(call, arguments=how, text=json.dumps(own)).texts
            try:
                beside = _beside(call, [SequencesOfRank(*json.loads(text)) for text in texts])
            except OtherRankFailed:
                if error is None:
                    raise
        if error is not None:
            raise error
        return given_ids, starts, beside

    def _check_late_backward(self, *, dropout: bool, is_generating: bool) -> None:
        """Raise for what a backward pass after the return of `score` would compute wrongly or cannot run."""
        if self._groups.pp is not None:
            raise NotImplementedError(
                "score(grad=True) over pipeline stages: megatron-core's schedule has to run the backward pass; take "
                "score_and_backward(sequences, loss), which runs it, or grad=False"
            )
        if self._switch.sharded is not None and is_generating:
            raise ConfigError(
                "score(grad=True) within generating() of a model whose weights FSDP holds in shards: they may be "
                "released before the backward pass; take training()"
            )
        self._check_exact(dropout=dropout)
        self._check_no_graphs("score(grad=True)")
        check_all_get_gradients(self._chain, "score(grad=True)")
        model = self._chain[-1]
        if self._exact or model.config.recompute_granularity is None:
            return
        reason = None
        if is_generating:
            reason = "within generating() the model is in eval mode by then"
        elif not model.training:
            reason = "the model is in eval mode by then; call model.train()"
        elif not dropout and dropout_of(self._chain[0]):
            reason = f"dropout of {dropout_of(self._chain[0]):g} is on again by then"
        if reason is not None:
            raise ConfigError(
                f"score(grad=True) with config.recompute_granularity={model.config.recompute_granularity!r}: backward "
                f"runs a second forward, and {reason}; take score_and_backward(sequences, loss) in training()"
            )

    def _check_no_graphs(self, call: str) -> None:
        if replays_graphs(self._chain[-1]):
            raise ConfigError(
                f"{call} with CUDA graphs of the layers (config.cuda_graph_impl="
                f"{self._chain[-1].config.cuda_graph_impl!r}): they replay micro-batches of the shape that the trainer "
                "captured, and these have others; use cuda_graph_impl='local', or clear layer.cuda_graphs for the call"
            )

    def _check_shards(self) -> None:
        if self._exact and self._switch.holds_shards:
            raise ConfigError(
                "scores with batch_invariant=True while FSDP holds the weights in shards: the exact forward calls no "
                "module, so that FSDP gathers nothing; take score() in generating()"
            )

    def _check_exact(self, *, dropout: bool, auxiliary_losses: bool = True) -> None:
        if not self._exact:
            return
        if dropout and (probability := dropout_of(self._chain[0])):
            raise ConfigError(
                f"dropout=True with batch_invariant=True: the model drops with probability {probability:g}, and no log "
                "probability of the engine does; take dropout=False"
            )
        if auxiliary_losses and (names := auxiliary_losses_of(self._chain[-1].config)):
            raise ConfigError(
                f"gradients with batch_invariant=True and config.{names[0]}="
                f"{getattr(self._chain[-1].config, names[0])}: the exact forward has no auxiliary losses of routers; "
                "take score_and_backward(auxiliary_losses=False)"
            )

    def _check_dropped(self, call: str) -> None:
        """Raise ConfigError on all ranks where a router of any of them has dropped tokens of this call."""
        dropped = self._scorer.dropped
        if dropped.factor is None:
            return
        num_dropped, spec = dropped.take(), TRAINER["trainer_dropped_expert_pairs_total"]
        self._registry.counter(spec.full_name, spec.help).inc(num_dropped)
        with self._rank_group.together("counting dropped tokens"):
            if num_dropped:
                raise dropped.error(call, num_dropped)

    @contextmanager
    def _checked_modules(self, call: str, check: Callable[[], None]) -> Iterator[None]:
        """check: raises what the caller refuses, which one rank alone may see."""
        with self._switch.gathered_parameters():
            with self._rank_group.together("comparing the model's modules"):
                check()
                check_not_replaying(self._chain[-1], call)
                if self._weights is not None and not self._switch.holds_shards:  # else generating() compares them
                    self._weights.check_modules(calls=False)
            yield

    @property
    def _device(self) -> torch.device:
        return self._switch.device

    def _missing_batches(self, num_batches: int, *, not_unequal: str = "") -> int:
        """By how many micro-batches another data-parallel rank has more: FSDP gathers weights in each on all ranks.

        not_unequal: why the ranks' numbers have to be equal, and the remedy. Then, and over pipeline stages,
        ConfigError is raised on all ranks where they are not.
        """
        if not self._switch.holds_shards:
            return 0
        assert self._switch.sharded is not None
        missing = self._switch.sharded.largest("micro-batches", num_batches) - num_batches
        if self._groups.pp is not None:
            not_unequal = "a schedule over pipeline stages runs them; give each rank the same lengths of sequences"
        if not_unequal and self._switch.sharded.largest("missing micro-batches", missing):
            raise ConfigError(
                "data-parallel ranks have different numbers of micro-batches, of a model whose weights FSDP holds in "
                f"shards: {not_unequal}"
            )
        return missing

    def _all_ranks_compute_losses(self) -> AbstractContextManager[None]:
        """Where FSDP's backward passes wait for each other: an error of the block is one on all data-parallel ranks."""
        if not self._switch.holds_shards:
            return nullcontext()
        assert self._switch.sharded is not None
        return self._switch.sharded.together("computing the loss of score_and_backward()")

    def _take_part(self, run: ScoringForward, count: int, *, grad: bool) -> None:
        """Forwards, and backwards that add zeros, of padding alone: routers in eval mode count no load."""
        with evaluation(self._chain[0]):
            for batch in list(self._scorer.micro_batches([[0, 0]] * count, [1] * count, 1)):
                logits_1PV = run(replace(batch, padding_BS=torch.ones_like(batch.ids_BS, dtype=torch.bool)))
                if grad:
                    with self._all_ranks_compute_losses():
                        pass
                    scaled_loss(self._chain[-1].config, (run.scores(batch, logits_1PV) * 0.0).sum()).backward()

    # ------------------------------------------------------------------ gradients

    def score_and_backward(
        self,
        sequences: Sequence[Sequence[int]],
        loss: Loss,
        options: ScoreOptions,
        *,
        auxiliary_losses: bool,
    ) -> BackwardReport:
        """See `RolloutSession.score_and_backward`."""
        call = "score_and_backward()"
        given, starts, beside = self._arguments(call, sequences, options, auxiliary_losses)
        most = max((len(list(micro_batches(one, options.micro_batch_tokens))) for one in beside), default=0)
        dropout = options.dropout

        def check() -> None:
            self._check_backward(given, loss, most)
            self._check_shards()
            self._check_exact(dropout=dropout, auxiliary_losses=auxiliary_losses)

        with (
            self._rank_group.computing("score_and_backward"),
            self._checked_modules(call, check),
            self._switch.scoring_with_gradients(dropout=dropout, auxiliary_losses=auxiliary_losses),
            self._scorer.forward(self._chain[0], temperature=options.temperature, single_backward=True) as run,
            auxiliary_scale_kept(),
        ):
            how: dict[str, Any] = {"beside": beside, "is_count": self._is_count}
            batches = list(self._scorer.micro_batches(given, starts, options.micro_batch_tokens, **how))
            missing = self._missing_batches(len(batches))
            starts_new_weights(self._chain[-1])
            recorded = AuxiliaryLosses()
            losses = LossCalls(loss, run, batches, is_last_stage=self._groups.is_last_stage)
            try:
                if self._groups.pp is None:
                    self._backward_by_turns(run, losses)
                else:
                    self._backward_in_stages(run, losses)
                self._take_part(run, missing, grad=True)
                self._check_dropped(call)
            except BaseException as error:
                if self._switch.sharded is not None:
                    self._switch.sharded.shards.reset()
                where = f" in micro-batch {losses.num_done + 1} of {len(batches)}" if losses.is_counted else ""
                self._incomplete = f"{call} failed{where}"
                error.add_note(
                    f"{self._incomplete}: the gradients may hold a part; session.zero_grad(optimizer) drops them"
                )
                raise
            self._incomplete, self._is_reduced = "", reduces_while_backward(self._chain)
            return BackwardReport(
                loss=float(losses.total),
                scores=[losses.scores[index] for index in range(len(given))],
                auxiliary_losses=self._over_ranks(recorded.since(len(batches))),
                num_micro_batches=len(batches),
            )

    def _check_backward(self, sequences: Sequence[Sequence[int]], loss: Any, num_micro_batches: int) -> None:
        """num_micro_batches: of each expert-parallel rank, where they have sequences of their own."""
        if not callable(loss):
            raise ConfigError(
                f"score_and_backward(sequences, loss): loss is a {type(loss).__name__}; it has to be a function of "
                "(scores, indices), called once for each micro-batch"
            )
        if not sequences:
            raise ConfigError(
                "score_and_backward() without sequences; every data-parallel rank needs one, and one whose loss is "
                "0 * scores[0].sum() adds no gradient"
            )
        config = self._chain[-1].config
        if self._num_chunks > 1 and self._groups.pp_size == 2 and not config.overlap_p2p_comm:
            raise ConfigError(
                "score_and_backward() over two pipeline stages with several chunks and config.overlap_p2p_comm=False: "
                "megatron-core's schedule then takes one message between the two ranks for another; set "
                "overlap_p2p_comm=True and batch_p2p_comm=False"
            )
        if len(sequences) < num_micro_batches:
            raise ConfigError(
                f"score_and_backward() with {len(sequences)} sequences, where another expert-parallel rank has "
                f"{num_micro_batches} micro-batches, in which all take part; give each rank as many sequences, or "
                "raise micro_batch_tokens"
            )
        if (reason := uncovered_option(config)) is not None:
            raise ConfigError(f"score_and_backward() with {reason}; set it to False")
        self._check_no_graphs("score_and_backward()")
        check_all_get_gradients(self._chain, "score_and_backward()")
        if self._is_reduced:
            raise WrongState(
                "score_and_backward() twice before step(), with overlap_grad_reduce=True: DDP has begun to reduce the "
                "first call's gradients; pass all sequences in one call",
                state="gradients reduced",
            )
        if self._scorer.cp is not None:
            shards = [] if self._switch.sharded is None else self._switch.sharded.shards.groups
            check_sums_over(self._chain, shards, self._scorer.cp, "score_and_backward()")
        self._check_complete("score_and_backward()")

    def _check_complete(self, call: str) -> None:
        if self._is_torn:
            raise WrongState(
                f"{call} after an optimizer's step that raised on some ranks and may have been taken on others: their "
                "weights may differ; load a checkpoint of model and optimizer, then call session.update_weights()",
                state="torn weights",
            )
        if self._incomplete:
            raise WrongState(
                f"{call} with incomplete gradients: {self._incomplete}; call session.zero_grad(optimizer) first",
                state="incomplete gradients",
            )

    def _backward_by_turns(self, run: ScoringForward, losses: LossCalls) -> None:
        """Forward and backward of each micro-batch in turn; only the last one's backward reduces gradients."""
        config, last = self._chain[-1].config, losses.batches[-1]
        for batch in losses.batches:
            with nullcontext() if batch is last else without_gradient_sync(self._chain):
                logits_1PV = run(batch)
                with self._all_ranks_compute_losses(), self._rank_group.together("the loss of score_and_backward()"):
                    value = losses.of(batch, logits_1PV)
                del logits_1PV
                scale_auxiliary_losses(config, len(losses.batches), self._device)
                scaled_loss(config, value).backward()
                del value
            losses.num_done += 1

    def _backward_in_stages(self, run: ScoringForward, losses: LossCalls) -> None:
        """The last stage calls `loss`. Where that or a stage's forward raises, all stages raise after the schedule."""
        roots = list(self._chain[0]) if self._num_chunks > 1 else [self._chain[0]]
        # the schedule divides by the number of micro-batches, and multiplies by that of context-parallel ranks
        scale = len(losses.batches) / self._groups.cp_size
        goes_on = self._rank_group.whole_stage_raises
        calls = StageCalls(run, losses, self._scorer.stand_in, roots, scale=scale, goes_on=goes_on)
        # the schedule divides positions by the number of context-parallel ranks, which have all of them in exact mode
        divided = self._groups.cp_size if self._scorer.cp is None else 1
        shapes = [(len(batch.ids_BS), batch.ids_BS.shape[1] * divided) for batch in losses.batches]
        with self._rank_group.together("the schedule of score_and_backward()", has_collectives=True):
            try:
                run_1f1b(self._chain, calls.forward_step, losses.batches, shapes=shapes, dtype=self._scorer.stage_dtype)
            except Exception as error:  # where this stage has raised, other ranks of it may have waited for this one
                calls.failure = calls.failure or error
            if calls.failure is not None:
                raise calls.failure
        self._share_scores(losses)

    def _share_scores(self, losses: LossCalls) -> None:
        """Every stage has the last one's scores and loss."""
        sizes = [batch.lengths for batch in losses.batches]
        if self._groups.is_last_stage:
            scores = [losses.scores[index] for batch in losses.batches for index in batch.indices]
            shared = torch.cat([*scores, losses.total.view(1)])
        else:
            shared = torch.empty(sum(map(sum, sizes)) + 1, dtype=torch.float32, device=self._device)
        dist.broadcast(shared, src=dist.get_process_group_ranks(self._groups.pp)[-1], group=self._groups.pp)
        found = shared[:-1].split([length for lengths in sizes for length in lengths])
        losses.scores = dict(zip((i for batch in losses.batches for i in batch.indices), found, strict=True))
        losses.total = shared[-1]

    def _over_ranks(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums over pipeline stages of the means over a stage's ranks."""
        if self._rank_group.size == 1:
            return found
        own = json.dumps({name: values.tolist() for name, values in found.items()})
        parts = [json.loads(text) for text in self._rank_group.lockstep.gather("the auxiliary losses", own)]
        ranks_of_stage = self._rank_group.size // self._groups.pp_size
        names = sorted({name for part in parts for name in part})
        return {
            name: sum(torch.tensor(part[name]) for part in parts if name in part) / ranks_of_stage for name in names
        }

    # ------------------------------------------------------------------ the optimizer

    def step(self, optimizer: Any) -> tuple[bool, float | None]:
        """Reduce, step and zero gradients -> whether the weights were updated, and the gradients' norm.

        If it raises, the gradients may be reduced already, and a second step would reduce them twice: it is refused.
        """
        with self._rank_group.computing("step"):
            return self._step(optimizer)

    def _step(self, optimizer: Any) -> tuple[bool, float | None]:
        self._check_complete("step()")
        if self._switch.sharded is not None:
            self._switch.sharded.shards.reshard()
        num_ranks = self._rank_group.size
        self._incomplete = "step() failed and may have reduced them"
        reducing = self._rank_group.together("the reduction of gradients", has_collectives=True)
        with reducing, cuda_error_explained(self._device):
            with train_mode(self._chain, dropout=True):  # megatron-core 0.19 updates biases of routers that train
                reduce_gradients(self._chain, num_ranks=num_ranks)
            if not any(map(_has_gradient, self._chain[-1].parameters())):
                self._incomplete = ""
                raise WrongState("step() without gradients: call score_and_backward() first", state="no gradients")
        self._is_torn = num_ranks > 1
        stepping = self._rank_group.together("the optimizer's step", has_collectives=True)
        with stepping, cuda_error_explained(self._device):
            # megatron-core's optimizers return theirs; ranks of Megatron-FSDP have gradients of different parameters
            has_norm = num_ranks == 1 and isinstance(optimizer, torch.optim.Optimizer)
            norm = _norm(self._chain[-1]) if has_norm else None
            result = optimizer.step()
        updated, self._is_torn = True, False
        if isinstance(result, tuple):  # megatron-core's optimizers
            updated, norm, _ = result
        zero_gradients(self._chain, optimizer)
        self._incomplete, self._is_reduced = "", False
        return bool(updated), None if norm is None else float(norm)

    def weights_written(self) -> None:
        """The caller says that the weights are right on all ranks."""
        self._is_torn = False

    def zero_grad(self, optimizer: Any) -> None:
        zero_gradients(self._chain, optimizer)
        self._chain[-1].zero_grad()  # of parameters that this optimizer does not have, too
        self._incomplete, self._is_reduced = "", False


class LossCalls:
    """The micro-batches of one `score_and_backward`, the caller's loss, and what came of them."""

    def __init__(self, loss: Loss, run: ScoringForward, batches: list[MicroBatch], *, is_last_stage: bool) -> None:
        self._loss, self._run, self.batches, self._is_last_stage = loss, run, batches, is_last_stage
        self.num_done = 0
        """Micro-batches that this rank is done with."""
        self.scores: dict[int, Tensor] = {}
        self.total = torch.zeros(())

    @property
    def is_counted(self) -> bool:
        """Whether this rank knows how far the call came: only the last pipeline stage computes losses."""
        return self._is_last_stage and self.num_done < len(self.batches)

    def of(self, batch: MicroBatch, logits_1PV: Tensor) -> Tensor:
        """The micro-batch's loss, with gradients. Raises what the caller's function raises, and ConfigError."""
        scores = list(self._run.scores(batch, logits_1PV).split(batch.lengths))
        self.scores |= {index: score.detach() for index, score in zip(batch.indices, scores, strict=True)}
        value = self._loss(scores, list(batch.indices))
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ConfigError(f"loss() returned {what} for sequences {batch.indices}; it has to return one number")
        if not value.requires_grad:
            raise ConfigError(
                f"loss() returned a number that does not depend on the scores of sequences {batch.indices}; where "
                "nothing counts, return 0 * scores[0].sum()"
            )
        value = value.reshape(()).float()
        self.total = self.total.to(value.device) + value.detach()
        return value


class StageCalls:
    """One stage's calls in megatron-core's schedule. After an error of all its ranks it goes on with zeros: the other
    stages wait."""

    def __init__(
        self,
        run: ScoringForward,
        losses: LossCalls,
        stand_in: Callable[[MicroBatch, int], Tensor],
        roots: Sequence[torch.nn.Module],
        *,
        scale: float,
        goes_on: Callable[[], bool],
    ) -> None:
        """stand_in: see `Scorer.stand_in`. roots: the chunks in their wrappers, as the schedule gives them. scale: of
        losses that the schedule gets. goes_on: whether it does after an error of this rank, or ends with the error."""
        self._goes_on = goes_on
        self._run, self._losses, self._stand_in, self._roots, self._scale = run, losses, stand_in, roots, scale
        self.failure: BaseException | None = None
        """What this stage's forward or the loss has raised first."""

    def forward_step(self, batches: Iterator[MicroBatch], model: Any, *_: Any) -> tuple[Tensor, Any]:
        """As the schedule takes it."""
        batch = next(batches)
        chunk = next(number for number, root in enumerate(self._roots) if root is model)
        out: Tensor | None = None
        if self.failure is None:
            try:
                out = self._run(batch, chunk)
            except Exception as error:
                self._note(error)
        return self._stand_in(batch, chunk) if out is None else out, partial(self._loss_of, batch)

    def _loss_of(self, batch: MicroBatch, out: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if self.failure is None:
            try:
                value = self._losses.of(batch, out)
                self._losses.num_done += 1
                return value * self._scale, {}
            except BaseException as error:
                self._note(error)
        return out.sum() * 0.0, {}

    def _note(self, error: BaseException) -> None:
        self.failure = error
        if not is_of_collective(error) and not self._goes_on():
            raise error


class SequencesOfRank(NamedTuple):
    """What a rank reports of the sequences that it scores."""

    data_rank: int
    """Of the ranks to which a trainer gives other sequences: expert-parallel ones."""
    digest: str
    lengths: list[int]
    error: str
    """Why they cannot be scored; "": they can."""


def _beside(call: str, ranks: Sequence[SequencesOfRank]) -> list[list[int]]:
    """The lengths of each data rank's sequences; empty where all ranks have the same sequences."""
    first = {one.data_rank: rank for rank, one in reversed([*enumerate(ranks)])}
    others = [rank for rank, one in enumerate(ranks) if one.digest != ranks[first[one.data_rank]].digest]
    if others:
        raise LockstepError(
            f"{call} with other arguments on rank {others[0]} than on rank {first[ranks[others[0]].data_rank]}; give "
            "all tensor-, pipeline- and context-parallel ranks the same"
        )
    if failed := [(rank, one.error) for rank, one in enumerate(ranks) if one.error]:
        raise OtherRankFailed("; ".join(f"rank {rank}: {text}" for rank, text in failed), ranks=[r for r, _ in failed])
    if len({one.digest for one in ranks}) == 1:
        return []
    return [ranks[rank].lengths for _, rank in sorted(first.items())]


def _has_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None or getattr(parameter, "main_grad", None) is not None


def _norm(model: torch.nn.Module) -> float | None:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients) if gradients else None
    return None if norm is None else float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def _check_base(model: torch.nn.Module, adapter: str | None, *, grad: bool) -> None:
    """Raise for scores of the base model that cannot be had."""
    if adapter is not None:
        known = f"{ATTACHED!r} is the adapter that trains, None the base model"
        raise ConfigError(f"score(adapter={adapter!r}): {known}")
    pairs = list(attached(model))
    if grad and pairs:
        raise ConfigError("score(adapter=None, grad=True): the base model is frozen, no score has a gradient")
    if any(pair.is_merged for pair in pairs):
        raise WrongState(
            "score(adapter=None) while the adapter is merged into the base model: call unmerge() first", state="merged"
        )
