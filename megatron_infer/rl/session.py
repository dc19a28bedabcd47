"""One object for a training loop: the model that trains generates, and nobody finds anything moved afterwards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from megatron_infer.config.inference import InferenceConfig, KVCacheManagementMode
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.states import EngineState
from megatron_infer.engine.suspend import MemoryReport
from megatron_infer.errors import ConfigError, WrongState, unknown_name
from megatron_infer.models.trainer_state import wrapper_chain
from megatron_infer.requests.input_processor import TextCodec
from megatron_infer.rl.rollout import Rollout
from megatron_infer.rl.scoring import Scorer
from megatron_infer.rl.session_updates import Colocated, Written
from megatron_infer.rl.train_mode import GlobalDraws, OptimizerShelf, TrainModeSwitch, noted
from megatron_infer.rl.transition import TransitionReport, Update, WeightTransition
from megatron_infer.rl.update_report import UpdateReport

MICRO_BATCH_TOKENS = 8192


class Place(Enum):
    """Which block of the session the caller is in."""

    OUTSIDE = "no block"
    GENERATING = "generating()"
    TRAINING = "training()"


class RolloutSession:
    """Switches one live model between a trainer and an engine.

        with session.generating() as roll: ...      engine awake; eval mode, no autograd, flags set for inference
        with session.training(): ...                engine suspended; model, flags and memory as the trainer left them
        session.update_weights()                    the weights have a new version; nothing is copied

    Requests that are unfinished when generating() ends stand still and go on in the next one. With several ranks every
    rank makes the same calls. Blocks nest: the inner one's end brings the outer one's conditions back.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        config: InferenceConfig | None = None,
        tokenizer: TextCodec | None = None,
        *,
        optimizer: Any = None,
        offload_optimizer: bool = False,
        suspend_mode: KVCacheManagementMode | str | None = None,
        eos_ids: Sequence[int] | None = None,
        model_name: str = "model",
    ) -> None:
        """model: as the trainer has it, within DDP, Float16Module or a list of one pipeline chunk; adopted in place.

        suspend_mode: what training() does with the cache; None: the config's kv_cache_management_mode.
        offload_optimizer: while generating, the state of `optimizer` is on the host; the engine is suspended before it
        comes back. Without a device nothing has to go.
        """
        if offload_optimizer and optimizer is None:
            raise ConfigError("offload_optimizer=True without an optimizer; pass optimizer=")
        self._chain = wrapper_chain(model)
        self.model = self._chain[-1]
        """Without wrappers."""
        self.tokenizer = tokenizer
        self._mode = _mode(suspend_mode)
        self._shelf = OptimizerShelf(optimizer, self.model) if offload_optimizer else None
        self._switch = TrainModeSwitch(self._chain, self._shelf)
        self._draws = GlobalDraws(next(self.model.parameters()).device)
        self._switch.engage()
        try:
            self.engine = DynamicInferenceEngine(
                self.model, config, tokenizer=tokenizer, eos_ids=eos_ids, model_name=model_name
            )
        finally:
            self._switch.release()
        engine = self.engine
        self._scorer = Scorer(
            self.model, shape=engine.shape, groups=engine.rank_group.groups, exact=engine.config.batch_invariant
        )
        self._roll = Rollout(self.engine)
        self._place = Place.OUTSIDE
        self._report: MemoryReport | None = None

    @property
    def weight_version(self) -> int:
        """Of the weights that the engine knows; changes it has not been told of are noticed when it wakes."""
        return self.engine.weight_version

    @property
    def optimizer_bytes(self) -> int:
        """Of the optimizer's state, on the host now: see offload_optimizer."""
        return 0 if self._shelf is None else self._shelf.num_bytes

    @contextmanager
    def generating(self, *, restore_rng: bool = True) -> Iterator[Rollout]:
        """The engine may run; on the way out everything is as it was on the way in.

        Generation draws from generators of its own. restore_rng: what the body itself draws from torch's global ones
        (a reward model's dropout, say) does not change what training draws; the same prompts drawn so come every time.
        Within another generating() nothing happens.
        """
        outermost = self._place is not Place.GENERATING and restore_rng
        if outermost:
            self._draws.note()
        try:
            with self._within(Place.GENERATING):
                yield self._roll
        finally:
            if outermost:
                self._draws.take_back()

    @contextmanager
    def training(self) -> Iterator[MemoryReport]:
        """The engine is suspended, its memory given back as far as suspend_mode says; the next generating() wakes it.

        Within generating() the model and torch's generators are as the trainer left them, and as the body leaves them
        the trainer finds them later.
        """
        with self._within(Place.TRAINING), self._draws.interrupted():
            assert self._report is not None
            yield self._report

    def update_weights(
        self, source: Any = None, *, version: int | None = None, running: str = "keep", checksum: bool = False
    ) -> UpdateReport:
        """The model's weights are others from here on, with a version of their own (None: the next number).

        source None: the trainer has written them in place, nothing is copied. Otherwise they are read from it, see
        `megatron_infer.rl.weights`. running: see `set_weight_version` of the engine. checksum: digest of all weights in
        the report. In any block, and outside.
        """
        with self._switch.whole():
            return self._update(source, version=version, running=running, checksum=checksum, undo=False).run()

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

        mode: of the suspend; None: suspend_mode. undo: what a source overwrites is kept on the host meanwhile, which
        costs a copy; without it a failure half-way leaves an engine that refuses to run until the next whole update.
        Weights that the trainer has written into the model itself stay, whatever fails. Not within training(), where
        the engine is to stay suspended.
        """
        if self._place is Place.TRAINING:
            raise WrongState(
                "transition() within training() would wake the engine; take update_weights() here, or call it later",
                state=self.engine.state.value,
            )
        chosen = self._mode if mode is None else _mode(mode)
        with self._switch.whole():
            update = self._update(source, version=version, running=running, undo=undo)
            return WeightTransition(self.engine, update, mode=chosen).run()

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
        grad: bool = False,
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
        start: int | Sequence[int] = 1,
    ) -> list[Tensor]:
        """Log probabilities of each sequence's tokens from `start` on, given those before -> fp32 [len - start] each.

        start: of all sequences, or of each. Positions before it (a prompt's) cost no output layer and no softmax.
        By the forward that trains, in eval mode, of logits / temperature; with `grad` they can be differentiated (not
        over pipeline stages). micro_batch_tokens: padded tokens of a forward at most, above which a sequence is alone.
        With batch_invariant=True they have the bits of the engine's log probabilities (its raw ones at temperature 1).
        Every rank of the model has all scores. In any block, and outside.
        """
        sequences = [list(sequence) for sequence in sequences]
        starts = [start] * len(sequences) if isinstance(start, int) else list(start)
        rank_group = self.engine.rank_group
        if rank_group.size > 1:
            digest = hashlib.blake2b(
                json.dumps([sequences, temperature, grad, starts]).encode(), digest_size=8
            ).hexdigest()
            rank_group.lockstep.meet("score()", arguments=digest)
        self._scorer.check(sequences, temperature, micro_batch_tokens, starts)
        if grad and rank_group.groups.pp is not None:
            raise NotImplementedError(
                "score(grad=True) over pipeline stages: the backward pass belongs to megatron-core's schedule; "
                "take grad=False, or train with a forward step of your own"
            )
        # torch's DDP adds gradients up only after a forward of its own
        forward = self._chain[0] if grad else self.model
        with self._switch.scoring(grad=grad):
            return self._scorer.score(
                forward, sequences, temperature=temperature, micro_batch_tokens=micro_batch_tokens, starts=starts
            )

    @contextmanager
    def scoring(self) -> Iterator[torch.nn.Module]:
        """The model for forwards of one's own, in the conditions of `score`: stock, eval mode, no autograd."""
        with self._switch.scoring(grad=False):
            yield self.model

    def _update(self, source: Any, *, undo: bool, **how: Any) -> Update:
        if source is None:
            return Colocated(self.engine, **how)
        return Written(self.engine, source, undo=undo, **how)

    # ------------------------------------------------------------------ from block to block

    @contextmanager
    def _within(self, place: Place) -> Iterator[None]:
        outer = self._place
        self._go(place)
        try:
            yield
        except BaseException as error:
            with noted(error, f"the way from {place.value} back to {outer.value}"):
                self._leave(outer)
            raise
        self._leave(outer)

    def _leave(self, outer: Place) -> None:
        """Whatever becomes of it, the caller is in the outer block again."""
        try:
            self._go(outer)
        finally:
            self._place = outer

    def _go(self, place: Place) -> None:
        """Bring about the conditions of a block; raises with those of the present one."""
        if place is self._place:
            return
        if place is Place.GENERATING:
            self._wake()
        elif place is Place.TRAINING:
            self._put_to_sleep()
        elif self._place is Place.GENERATING:
            self._stand_still()
        self._place = place

    def _wake(self) -> None:
        rank_group, engine = self.engine.rank_group, self.engine
        try:
            with rank_group.together("switching the model to generation"):
                self._switch.engage()
            if engine.state is EngineState.SUSPENDED:
                engine.resume()
            if engine.state is EngineState.PAUSED:
                engine.unpause()
        except BaseException as error:
            with noted(error, "putting the model back as the trainer left it"):
                self._switch.release()
            if self._place is Place.TRAINING and engine.state is not EngineState.SUSPENDED:
                with noted(error, "suspending the engine again"):
                    engine.suspend(self._mode)
            raise

    def _put_to_sleep(self) -> None:
        self._report = self.engine.suspend(self._mode)
        try:
            with self.engine.rank_group.together("switching the model to training"):
                self._switch.release()
                self._switch.bring_back()
        except BaseException as error:
            if self._place is Place.GENERATING:
                with noted(error, "going on with generating()"):
                    self._wake()
            raise

    def _stand_still(self) -> None:
        """Unfinished requests wait where they are; nothing of the engine's is in flight."""
        try:
            if self._shelf is not None:
                self.engine.suspend(self._mode)
            elif self.engine.has_unfinished() and self.engine.state is EngineState.RUNNING:
                self.engine.pause()
        finally:
            self._switch.release()


def _mode(mode: KVCacheManagementMode | str | None) -> KVCacheManagementMode | None:
    """Raises ConfigError for a name that is none."""
    known = [member.value for member in KVCacheManagementMode]
    if mode is None:
        return None
    if mode not in known:
        raise ConfigError(f"suspend_mode: {unknown_name('mode', str(mode), known)}; one of {', '.join(known)}")
    return KVCacheManagementMode(mode)
