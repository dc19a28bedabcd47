"""One object for a training loop: the model that trains also generates, and is left as the trainer had it.

generating()      TrainModeSwitch.to_inference -> engine.resume -> Rollout      ─▶ groups of samples
training()        engine.suspend -> TrainModeSwitch.to_training -> score_and_backward, step
score()           the trainer's forward on the samples                          ─▶ log probabilities
update_weights()  ColocatedUpdate (written in place) or SourceUpdate (copied)   ─▶ a new weight version
transition()      suspend, update and resume on all ranks, or undone on all
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from megatron_infer.config.inference import InferenceConfig, KVCacheManagementMode
from megatron_infer.config.speculative import refuse_synthetic
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.engine.chosen_config import ConfigOrOptions
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.requests.input_processor import TextCodec
from megatron_infer.engine.suspend import MemoryReport
from megatron_infer.errors import ConfigError, WrongState, check_known
from megatron_infer.models.sharded_weights import ShardedWeights
from megatron_infer.models.trainer_state import wrapper_chain
from megatron_infer.rl.context_rollout import ContextRollout
from megatron_infer.rl.generation_weights import GenerationWeights
from megatron_infer.rl.mismatch_meter import AUTO, meter_of
from megatron_infer.rl.mode_changes import ModeChanges
from megatron_infer.rl.rollout import Rollout
from megatron_infer.rl.session_updates import ColocatedUpdate, SourceUpdate
from megatron_infer.rl.shared_prefill import PROMPT
from megatron_infer.rl.train_mode import GlobalRngState, OptimizerOffload, TrainModeSwitch, failures_noted_on
from megatron_infer.rl.training_step import ATTACHED, BackwardReport, Loss, ScoreOptions, StepReport, TrainerStep
from megatron_infer.rl.transition import SessionUpdate, TransitionReport, WeightTransition
from megatron_infer.rl.update_report import UpdateReport
from megatron_infer.rl.updates import ReshardReport

MICRO_BATCH_TOKENS = 8192


class SessionMode(Enum):
    """Which `with` block of the session is innermost."""

    OUTSIDE = "no block"
    GENERATING = "generating()"
    TRAINING = "training()"


class RolloutSession:
    """Switches one live model between a trainer and an engine.

        with session.generating() as roll: ...      engine running; eval mode, no autograd, flags set for inference
        with session.training(): ...                engine suspended; model, flags and memory as the trainer left them
        session.update_weights()                    the weights have a new version; nothing is copied

    Requests that are unfinished when generating() ends are paused and continue in the next one. With several ranks
    every rank makes the same calls. Blocks nest: the end of the inner one restores the mode of the outer one.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        config: ConfigOrOptions = None,
        tokenizer: TextCodec | None = None,
        *,
        optimizer: Any = None,
        offload_optimizer: bool = False,
        suspend_mode: KVCacheManagementMode | str | None = None,
        eos_ids: Sequence[int] = (),
        model_name: str = "model",
        meter: Mapping[str, Any] | str | None = AUTO,
        generation_model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
        context_parallel: str | None = None,
    ) -> None:
        """model: as the trainer has it, within DDP and Float16Module, or the list of its chunks; adopted in place.
        config: an InferenceConfig, or a mapping of some of its options: the others (all, for None) are chosen for the
        machine and the model, see `config.machine_config`.

        suspend_mode: what training() does with the cache; None: the config's kv_cache_management_mode.
        offload_optimizer: while generating, the state of `optimizer` is on the host; the engine is suspended before it
        is reloaded. State that is on the host anyway is not moved.
        meter: compares a small share of the delivered samples with `score`, before the weights change: see
        `MismatchMeter`, of which it may have arguments ({"share": 0.1, "sinks": [...]}); None: no meter.
        generation_model: the same model in another layout (see `generation_groups`), or dtype, which generates in place
        of `model`; its weights have memory, and those of `model`, within generating() only. config.pg_collection is of
        its groups. Engines within one replica of the trainer divide the replica's prompts.
        """
        if offload_optimizer and optimizer is None:
            raise ConfigError("offload_optimizer=True without an optimizer; pass optimizer=")
        if context_parallel not in (None, PROMPT):
            raise ConfigError(f"context_parallel is {context_parallel!r}, it must be {PROMPT!r} or None")
        options = vars(config) if isinstance(config, InferenceConfig) else config or {}
        refuse_synthetic(options.get("speculative"), "a session")
        self._chain = wrapper_chain(model)
        self.model = self._chain[-1]
        """Without wrappers."""
        self.tokenizer = tokenizer
        self._suspend_mode = _suspend_mode(suspend_mode)
        self._optimizer = OptimizerOffload(optimizer, self.model) if offload_optimizer else None
        sharded = ShardedWeights.of(self._chain)
        generation = None
        if generation_model is not None:
            if options.get("batch_invariant") or getattr(self.model.config, "batch_invariant_mode", False):
                raise ConfigError(
                    "batch_invariant=True with generation_model: scores are of the trainer's layout, which may sum in "
                    "another order; leave one of them out"
                )
            generation = GenerationWeights(self.model, generation_model, options.get("pg_collection"), sharded)
            meter = _meter_option(meter, shares_scores=generation.ranks.shares_scores)
        self._generation = generation
        self._switch = TrainModeSwitch(self._chain, self._optimizer, sharded, generation)
        self._rng = GlobalRngState(self._switch.device)
        self._switch.to_inference()
        try:
            engine = self.engine = DynamicInferenceEngine(
                self.model if generation is None else generation.model,
                config,
                tokenizer=tokenizer,
                eos_ids=eos_ids,
                model_name=model_name,
            )
            if self._switch.gathered is not None:
                engine.suspend(self._suspend_mode)
                engine.weights.released()
        finally:
            self._switch.to_training()
        self._changes = ModeChanges(engine, self._switch, suspend_mode=self._suspend_mode)
        limit = {"timeout_s": engine.config.collective_timeout_s}
        if generation is None:
            trainer = self.ranks = engine.rank_group.with_context_ranks(**limit)
        else:
            trainer = RankGroup(generation.ranks.trainer, **limit).with_context_ranks(**limit)
            self.ranks = engine.rank_group.with_ranks(generation.ranks.replica, **limit)
        """Those that share the groups of a rollout: the engine's, and those of the engines that divide its prompts."""
        self._trainer_ranks = trainer
        trainer.join_job()
        self._trainer = TrainerStep(self._chain, self._switch, engine, trainer)
        self.meter = meter_of(self, meter)
        keep = None if self.meter is None else self.meter.keep
        drawing = engine.rank_group.context_parts(**limit) or self.ranks
        self._rank_groups = (engine.rank_group, self.ranks, trainer, drawing)
        for group in self._rank_groups:
            group.lockstep.share_failures(other.lockstep for other in self._rank_groups)
        if drawing is engine.rank_group and context_parallel is None:
            self._rollout = Rollout(engine, on_delivered=keep)
        else:
            shares = context_parallel == PROMPT
            self._rollout = ContextRollout(engine, ranks=drawing, on_delivered=keep, shares_prompts=shares)
        self._mode = SessionMode.OUTSIDE
        self._report: MemoryReport | None = None

    @property
    def weight_version(self) -> int:
        """Version of the weights that the engine knows; unannounced changes are detected when it resumes."""
        return self.engine.weight_version

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state that are offloaded to the host now; see offload_optimizer."""
        return 0 if self._optimizer is None else self._optimizer.num_bytes

    @property
    def reshard_report(self) -> ReshardReport | None:
        """Bytes and seconds of the last time that generation_model got its weights; None without generation_model."""
        return None if self._generation is None else self._generation.report

    @contextmanager
    def generating(self, *, restore_rng: bool = True) -> Iterator[Rollout]:
        """The engine may run; at the end everything is as it was at the start.

        Generation draws from generators of its own. restore_rng: torch's global generators go back to their state, so
        draws of the body (a reward model's dropout, for example) do not change what training draws; a body that draws
        its prompts from them gets the same ones every time. Within another generating() this does nothing.
        """
        outermost = self._mode is not SessionMode.GENERATING and restore_rng
        if outermost:
            self._rng.save()
        try:
            with self._in_mode(SessionMode.GENERATING):
                try:
                    yield self._rollout
                except BaseException as error:
                    self._left(error)
                    with failures_noted_on(error, "telling the other ranks"):
                        self._measure(skip=True)
                    raise
                self._measure()
        finally:
            if outermost:
                self._rng.restore()

    @contextmanager
    def training(self) -> Iterator[MemoryReport]:
        """The engine is suspended and releases memory as in suspend_mode; the next generating() resumes it.

        Within generating() the model and torch's generators are as the trainer left them, and the state in which the
        body leaves them is the one that the trainer finds later.
        """
        self._measure()
        with self._in_mode(SessionMode.TRAINING), self._rng.training_draws():
            assert self._report is not None
            yield self._report

    def update_weights(
        self, source: Any = None, *, version: int | None = None, running: str = "keep", checksum: bool = False
    ) -> UpdateReport:
        """The model has new weights from here on, under a new version (None: the next number).

        source None: the trainer has written them in place, nothing is copied. Otherwise they are read from it, see
        `megatron_infer.rl.updates`. running: see `set_weight_version` of the engine. checksum: digest of all weights in
        the report. Allowed in any block and outside.
        """
        if source is not None:
            self._measure()
        elif self.meter is not None:  # the weights have changed already
            self.meter.discard()
        self._check_shards(source, checksum=checksum)
        with self._switch.gathered_parameters():
            self._changes.gather_again()
            report = self._update(source, version=version, running=running, checksum=checksum, undo=False).run()
        if self._switch.gathered is not None:
            self._switch.gathered.announce()
        self._trainer.weights_written()
        return report

    def transition(
        self,
        source: Any = None,
        *,
        mode: KVCacheManagementMode | str | None = None,
        version: int | None = None,
        running: str = "keep",
        undo: bool = True,
    ) -> TransitionReport:
        """suspend, `update_weights(source)` and resume as one: done on all ranks, or undone on all with SwitchFailed.

        mode: of the suspend; None: suspend_mode. undo: keep on the host what a source overwrites, which costs a copy;
        without it a failure half-way leaves an engine that refuses to run until the next complete update. Weights that
        the trainer has written into the model itself stay, whatever fails. Refused within training(), where the engine
        has to stay suspended.
        """
        if self._mode is SessionMode.TRAINING:
            raise WrongState(
                "transition() within training() would resume the engine; take update_weights() here, or call it later",
                state=self.engine.state.value,
            )
        if self._switch.gathered is not None and not self._switch.gathered.is_gathered:
            raise WrongState(
                "transition() outside of generating() would resume the engine while it has no weights; take "
                "update_weights() here, or call it in generating()",
                state=self.engine.state.value,
            )
        chosen = self._suspend_mode if mode is None else _suspend_mode(mode)
        self._check_shards(source)
        if source is not None:
            self._measure()
        with self._switch.gathered_parameters():
            self._changes.gather_again()
            update = self._update(source, version=version, running=running, undo=undo)
            return WeightTransition(self.engine, update, mode=chosen, ranks=self.ranks).run()

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        grad: bool = False,
        dropout: bool = False,
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
        start: int | Sequence[int] = 1,
        adapter: str | None = ATTACHED,
    ) -> list[Tensor]:
        """Log probabilities of each sequence's tokens from `start` on, given those before -> fp32 [len - start] each.

        Computed by the forward that trains, from logits / temperature. start: one for all sequences, or one for each;
        positions before it (a prompt's) cost no output layer and no softmax. micro_batch_tokens: most padded tokens of
        a forward; a longer sequence runs alone. With batch_invariant=True the scores are bitwise equal to the engine's
        log probabilities (to its raw ones at temperature 1). Every rank of the model has all scores.
        grad False: in eval mode. grad True: in train mode, as the trainer's own step: activations are recomputed,
        routers add their auxiliary losses to the backward pass; the scores can be differentiated, and all graphs live
        until then (`score_and_backward` holds one). dropout: the rollouts' tokens were drawn without dropout, so it
        would be noise in every importance ratio; True keeps the model's own. Allowed in any block and outside.
        adapter: None: without the adapter that `attach_lora` has put on the model: the scores of the base model, bit
        for bit, which is the reference policy of a run that trains an adapter.
        Raises AdoptionError for modules that changed so that the engine cannot run them; hooks and patches run.
        """
        how = ScoreOptions(
            temperature=temperature,
            micro_batch_tokens=micro_batch_tokens,
            start=start,
            dropout=dropout,
            adapter=adapter,
        )
        is_generating = self._mode is SessionMode.GENERATING
        return self._trainer.score(sequences, how, grad=grad, is_generating=is_generating)

    def score_and_backward(
        self,
        sequences: Sequence[Sequence[int]],
        loss: Loss,
        *,
        temperature: float = 1.0,
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
        start: int | Sequence[int] = 1,
        dropout: bool = False,
        auxiliary_losses: bool = True,
    ) -> BackwardReport:
        """Gradients of a loss over scores, in micro-batches of which one graph lives at a time.

        loss(scores, indices) is called once for each micro-batch, with the scores of sequences[i] for i in indices
        (as `score(grad=True)` gives them), and returns its part of the loss, one number; the parts are added up, so a
        mean divides by the whole batch. Over pipeline stages megatron-core's 1F1B schedule runs the micro-batches, and
        `loss` is called on the last stage. Gradients are added to those there are, where the trainer's step puts them;
        `step` follows. auxiliary_losses: routers add their balancing and z losses, averaged over micro-batches, as in
        the trainer's step. Within training() only. If `loss` raises on any rank, all ranks raise, and `step` is refused
        until `zero_grad`.
        """
        self._require_training("score_and_backward()")
        how = ScoreOptions(temperature=temperature, micro_batch_tokens=micro_batch_tokens, start=start, dropout=dropout)
        return self._trainer.score_and_backward(sequences, loss, how, auxiliary_losses=auxiliary_losses)

    def step(self, optimizer: Any, *, version: int | None = None, running: str = "keep") -> StepReport:
        """What follows a backward pass: reduce gradients, optimizer.step(), zero gradients, `update_weights`.

        For plain models, torch's DDP, megatron-core's DDP, and torch's or megatron-core's optimizers. The backward pass
        may be `score_and_backward` or the caller's own, unless that has reduced gradients already (a schedule with
        config.finalize_model_grads_func: call the optimizer and `update_weights` after it). Learning-rate schedulers
        stay the caller's. version, running: as for `update_weights`. Within training() only.
        """
        self._require_training("step()")
        updated, norm = self._trainer.step(optimizer)
        if updated:
            self.update_weights(version=version, running=running)
        return StepReport(grad_norm=norm, update_successful=updated, weight_version=self.weight_version)

    def zero_grad(self, optimizer: Any) -> None:
        """Drop all gradients: `.grad` of all parameters, and the buffers of megatron-core's DDP."""
        self._trainer.zero_grad(optimizer)

    def _require_training(self, call: str) -> None:
        if self._mode is not SessionMode.TRAINING:
            raise WrongState(
                f"{call} in {self._mode.value}, but the model is the trainer's within training() only",
                state=self.engine.state.value,
            )

    @contextmanager
    def scoring(self) -> Iterator[torch.nn.Module]:
        """The model for forwards of the caller's own, set up as for `score`: stock modules, eval mode, no autograd."""
        with self._switch.scoring():
            yield self.model

    def _measure(self, *, skip: bool = False) -> None:
        """Before the weights of generating() may change: compare what was drawn by them. On every rank."""
        if self.meter is not None and self._mode is SessionMode.GENERATING:
            self.meter.measure(skip=skip)

    def _check_shards(self, source: Any, *, checksum: bool = False) -> None:
        """Raise ConfigError for an update that cannot be made of weights that are gathered for generation."""
        if self._generation is not None and (source is not None or checksum):
            what = "update_weights(source)" if source is not None else "checksum=True"
            raise ConfigError(
                f"{what} with generation_model, whose weights are the trainer's: take "
                "megatron_infer.rl.updates.apply(session.model, source) or verify_update(session.model, source), and "
                "update_weights() after a change"
            )
        if self._switch.sharded is None:
            return
        if source is not None:
            raise ConfigError(
                "update_weights(source) of a model whose weights FSDP holds in shards: what is written into gathered "
                "weights would be lost; load the source into the trainer (torch.distributed.checkpoint.state_dict."
                "set_model_state_dict), then call update_weights()"
            )
        if checksum:
            raise ConfigError("checksum=True of a model whose weights FSDP shards: its state dict has no whole tensors")

    def _update(self, source: Any, *, undo: bool, **how: Any) -> SessionUpdate:
        if source is None:
            return ColocatedUpdate(self.engine, **how)
        return SourceUpdate(self.engine, source, undo=undo, **how)

    # ------------------------------------------------------------------ changing the mode

    @contextmanager
    def _in_mode(self, mode: SessionMode) -> Iterator[None]:
        with self._trainer_ranks.naming(mode.value), self._changed_to(mode):
            yield

    @contextmanager
    def _changed_to(self, mode: SessionMode) -> Iterator[None]:
        outer = self._mode
        self._left(None)
        self._switch_to(mode)
        try:
            yield
        except BaseException as error:
            self._left(error)
            with failures_noted_on(error, f"going from {mode.value} back to {outer.value}"):
                self._return_to(outer)
            raise
        self._return_to(outer)

    def _left(self, error: BaseException | None) -> None:
        """The other ranks know why this one leaves the block, for as long as no block has begun again."""
        trouble = "" if error is None else f"left {self._mode.value} by {type(error).__name__}: {error}"
        for lockstep in {group.lockstep for group in self._rank_groups}:
            lockstep.left(trouble)

    def _return_to(self, outer: SessionMode) -> None:
        """The mode is the outer one afterwards, even if the switch raises."""
        try:
            self._switch_to(outer)
        finally:
            self._mode = outer

    def _switch_to(self, mode: SessionMode) -> None:
        """Raises with the conditions of the present mode."""
        if mode is self._mode:
            return
        if mode is SessionMode.GENERATING:
            self._changes.start_generating(from_training=self._mode is SessionMode.TRAINING)
        elif mode is SessionMode.TRAINING:
            self._report = self._changes.start_training(from_generating=self._mode is SessionMode.GENERATING)
        elif self._mode is SessionMode.GENERATING:
            self._changes.stop_generating()
        self._mode = mode


def _meter_option(option: Mapping[str, Any] | str | None, *, shares_scores: bool) -> Mapping[str, Any] | str | None:
    """None in place of "auto" where no meter can be: ranks that score together have different samples."""
    if shares_scores or option is None:
        return option
    if option == AUTO:
        return None
    raise ConfigError(
        "meter with generation_model, for a trainer whose experts, or whose weights by FSDP, are divided over ranks "
        "that no engine spans: each rank draws its own samples, and all score together; meter=None"
    )


def _suspend_mode(mode: KVCacheManagementMode | str | None) -> KVCacheManagementMode | None:
    """Raises ConfigError for an unknown name."""
    known = [member.value for member in KVCacheManagementMode]
    if mode is None:
        return None
    check_known("mode", [mode], known, where="suspend_mode: ", lists_known=True)
    return KVCacheManagementMode(mode)
