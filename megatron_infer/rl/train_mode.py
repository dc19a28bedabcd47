"""Switches one model between training and inference, and puts back all that the switch changed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_infer.engine.states import HeldInterrupt
from megatron_infer.models.sharded_weights import ShardedWeights, local
from megatron_infer.models.trainer_state import (
    evaluation,
    inference_attributes,
    inference_flag,
    train_mode,
    whole_parameters,
)
from megatron_infer.models.weights.change_guard import OffloadedWeights
from megatron_infer.rl.generation_weights import GenerationWeights

log = logging.getLogger("megatron_infer")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block."""
    interrupt = HeldInterrupt()
    interrupt.hold()
    try:
        yield
    finally:
        interrupt.release()


class TrainModeSwitch:
    """Switches a model to inference and back.

        to_inference   gather parameters -> offload optimizer state -> gather the engine's weights
                       -> eval mode, flags, attributes, no autograd
        to_training    the same steps undone in reverse; each is undone even if another fails

    Gradients (.grad, main_grad) are not touched.
    """

    def __init__(
        self,
        chain: Sequence[Any],
        optimizer: OptimizerOffload | None,
        sharded: ShardedWeights | None,
        generation: GenerationWeights | None = None,
    ) -> None:
        """chain: `models.trainer_state.wrapper_chain`. optimizer: whose state is offloaded; None: no optimizer's.
        sharded: the chain's weights that FSDP has. generation: of the model that generates; None: the chain's."""
        self._chain, self._optimizer = chain, optimizer
        self._roots = [chain[0]] if generation is None else [chain[0], generation.model]
        self.sharded = sharded
        """Weights that FSDP holds in shards; None: they are whole."""
        self.gathered = self.sharded if generation is None else ShardedWeights(generation)
        """Weights that the engine has in `to_inference` only; None: it always has those of the trainer."""
        self.have_changed = False
        """Whether shards were written after their version was announced, as the last `to_inference` found."""
        self._memory, self._flags = ExitStack(), ExitStack()
        self._in_inference = False

    def to_inference(self) -> None:
        """Raises with everything as it was."""
        try:
            with uninterrupted():
                self._memory.enter_context(whole_parameters(self._chain))
                if self._optimizer is not None:
                    self._memory.callback(self._optimizer.reload)
                    self._optimizer.offload()
                if self.gathered is not None:
                    self._memory.callback(self.gathered.release)
                    self.have_changed = self.gathered.gather()
                self._set_flags()
                self._in_inference = True
        except BaseException as error:
            with failures_noted_on(error, "putting the model back as the trainer left it"):
                self.to_training()
            raise

    def to_training(self) -> None:
        """Restore what `to_inference` found; does nothing if it was not called."""
        with uninterrupted():
            self._in_inference = False
            try:
                self._flags.close()
            finally:
                self._memory.close()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """The trainer's forward in eval mode, without autograd, during training or inference."""
        sharded = nullcontext() if self.sharded is None else self.sharded.as_before()
        with sharded, self._stock(), evaluation(self._chain[0]), torch.set_grad_enabled(False):
            yield

    @contextmanager
    def scoring_with_gradients(self, *, dropout: bool, auxiliary_losses: bool = True) -> Iterator[None]:
        """The trainer's forward in train mode, during training or inference; see `models.trainer_state.train_mode`."""
        mode = train_mode(self._chain, dropout=dropout, auxiliary_losses=auxiliary_losses)
        with self._stock(), mode, torch.set_grad_enabled(True):
            yield

    @contextmanager
    def _stock(self) -> Iterator[None]:
        """Modules and flags as the trainer left them, with gathered parameters."""
        with ExitStack() as stack:
            if self._in_inference:
                self._flags.close()
                stack.callback(self._set_flags)
            else:
                stack.enter_context(whole_parameters(self._chain))
            stack.enter_context(inference_flag(False))
            yield

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        found: torch.device = next(self._chain[-1].parameters()).device
        return found if self.sharded is None else self.sharded.shards.device

    @property
    def moves_memory(self) -> bool:
        """Whether `to_training` takes memory that a running engine may need, or takes weights from it."""
        return self._optimizer is not None or self.gathered is not None

    @property
    def holds_shards(self) -> bool:
        """Whether this rank has a part of the trainer's weights now."""
        return self.sharded is not None and not self.sharded.is_gathered

    def gather_again(self) -> None:
        """While weights are gathered: the trainer has written its own."""
        assert self.gathered is not None
        self.gathered.release()
        self.gathered.gather()

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """Parameters that megatron-core's DDP gathers late are complete; FSDP's are as they are."""
        if self._in_inference:
            yield
            return
        with whole_parameters(self._chain):
            yield

    def reload_optimizer(self) -> None:
        """Try again after `to_training` found no memory for the optimizer's state."""
        if self._optimizer is not None:
            self._optimizer.reload()

    def _set_flags(self) -> None:
        for model in self._roots:
            self._flags.enter_context(inference_attributes(model))
            self._flags.enter_context(evaluation(model))
        self._flags.enter_context(inference_flag(True))
        self._flags.enter_context(torch.set_grad_enabled(False))


class GlobalRngState:
    """State of torch's global generators, on the CPU and on the model's device: dropout draws from them.

    Python's and NumPy's generators are not saved.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device
        self._saved: list[Tensor] = []
        self._has_warned = False

    def save(self) -> None:
        self._saved = self._states()

    @contextmanager
    def training_draws(self) -> Iterator[None]:
        """The block draws on from the saved state, and its draws are kept: the state is saved again at its end."""
        is_saved = bool(self._saved)
        if is_saved:
            self.restore()
        try:
            yield
        finally:
            if is_saved:
                self.save()

    def restore(self) -> None:
        """Go back to the saved state; the first time that anything was drawn since, warn."""
        saved, self._saved = self._saved, []
        if not saved or all(map(torch.equal, saved, self._states())):
            return
        torch.set_rng_state(saved[0])
        if self._device is not None:
            torch.get_device_module(self._device).set_rng_state(saved[1], self._device)
        if not self._has_warned:
            log.warning(
                "generating(): the block drew from torch's global generator, which is reset to its state before the "
                "block: the next block may draw the same. Draw from a generator of your own, or pass restore_rng=False"
            )
            self._has_warned = True

    def _states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device is not None:
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states


class OptimizerOffload:
    """Moves an optimizer's state (moments, and master weights that are not the model's own) to the host and back.

    The tensors stay the same objects, so references to them stay valid. Takes torch's optimizers and megatron-core's,
    chained ones too; state that is on the host already stays there.
    """

    def __init__(self, optimizer: Any, model: torch.nn.Module) -> None:
        """model: without wrappers; the buffers of megatron-core's DDP are not moved."""
        self._optimizer, self._model = optimizer, model
        self._offloaded: OffloadedWeights | None = None

    @staticmethod
    def is_on_device(tensor: Tensor) -> bool:
        return tensor.device.type != "cpu"

    @property
    def num_bytes(self) -> int:
        """Bytes on the host now."""
        return 0 if self._offloaded is None else self._offloaded.num_bytes

    def offload(self) -> None:
        """Raises with everything in place."""
        if self._offloaded is None:
            tensors = list(self.tensors())
            offloaded = OffloadedWeights(lambda: tensors, pinned=any(tensor.is_cuda for tensor in tensors))
            offloaded.offload(_no_checkpoint)
            self._offloaded = offloaded

    def reload(self) -> None:
        """Raises, where there is no memory, with everything still on the host: call it again."""
        if self._offloaded is not None:
            self._offloaded.reload(_no_checkpoint)
            self._offloaded = None

    def tensors(self) -> Iterator[Tensor]:
        kept = {_storage(tensor) for tensor in _tensors_of(self._model)}
        for optimizer in torch_optimizers(self._optimizer):
            groups = (parameter for group in optimizer.param_groups for parameter in group["params"])
            states = (value for state in optimizer.state.values() for value in state.values())
            for tensor in (*groups, *states):
                if torch.is_tensor(tensor) and self.is_on_device(tensor) and _storage(tensor) not in kept:
                    yield local(tensor)


def torch_optimizers(optimizer: Any) -> Iterator[Any]:
    """torch's own optimizers inside megatron-core's."""
    if hasattr(optimizer, "chained_optimizers"):
        for inner in optimizer.chained_optimizers:
            yield from torch_optimizers(inner)
    elif isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer
    elif getattr(optimizer, "optimizer", None) is not None:
        yield from torch_optimizers(optimizer.optimizer)


def _tensors_of(model: torch.nn.Module) -> Iterable[Tensor]:
    """Parameters, buffers and gradients, which stay on the device."""
    for parameter in model.parameters():
        yield parameter
        yield from (g for g in (parameter.grad, getattr(parameter, "main_grad", None)) if g is not None)
    yield from model.buffers()


def _storage(tensor: Tensor) -> int:
    return int(local(tensor).untyped_storage()._cdata)


def _no_checkpoint(what: str) -> None:
    """`OffloadedWeights` calls this between tensors; the move is not to be stopped there."""


@contextmanager
def failures_noted_on(error: BaseException, what: str) -> Iterator[None]:
    """While `error` is handled: an error of the block becomes a note on it and goes no further."""
    try:
        yield
    except BaseException as second:  # the caller has to see the first error
        error.add_note(f"{what} failed as well: {type(second).__name__}: {second}")
