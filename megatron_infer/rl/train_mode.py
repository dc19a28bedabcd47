"""Between training and generating on one model: what is changed for generation, and that it is all put back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_infer.engine.states import HeldInterrupt
from megatron_infer.models.trainer_state import evaluation, inference_attributes, inference_flag, whole_parameters
from megatron_infer.weights.change_guard import OffloadedWeights

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
    """One model's way from a trainer to an engine and back.

        engage   parameters whole -> optimizer state to the host -> eval, flags, attributes, no autograd
        release  the same backwards; every step is taken whatever becomes of the others

    Gradients (.grad, main_grad) are nobody's business here.
    """

    def __init__(self, chain: Sequence[Any], optimizer: OptimizerShelf | None) -> None:
        """chain: `models.trainer_state.wrapper_chain`. optimizer: whose state goes to the host; None: none."""
        self._chain, self._optimizer = chain, optimizer
        self._heavy, self._light = ExitStack(), ExitStack()
        self._is_engaged = False

    def engage(self) -> None:
        """Raises with everything as it was."""
        try:
            with uninterrupted():
                self._heavy.enter_context(whole_parameters(self._chain))
                if self._optimizer is not None:
                    self._heavy.callback(self._optimizer.bring_back)
                    self._optimizer.put_away()
                self._to_inference()
                self._is_engaged = True
        except BaseException as error:
            with noted(error, "putting the model back as the trainer left it"):
                self.release()
            raise

    def release(self) -> None:
        """Everything as `engage` found it; nothing to do where it has not been called."""
        with uninterrupted():
            self._is_engaged = False
            try:
                self._light.close()
            finally:
                self._heavy.close()

    @contextmanager
    def scoring(self, *, grad: bool) -> Iterator[None]:
        """The trainer's forward, in eval mode, from wherever we are; parameters are whole."""
        with ExitStack() as stack:
            if self._is_engaged:
                self._light.close()
                stack.callback(self._to_inference)
            else:
                stack.enter_context(whole_parameters(self._chain))
            stack.enter_context(evaluation(self._chain[0]))
            stack.enter_context(inference_flag(False))
            stack.enter_context(torch.set_grad_enabled(grad))
            yield

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Parameters are gathered, for whoever reads them."""
        if self._is_engaged:
            yield
            return
        with whole_parameters(self._chain):
            yield

    def bring_back(self) -> None:
        """Try once more where the optimizer's state found no room."""
        if self._optimizer is not None:
            self._optimizer.bring_back()

    def _to_inference(self) -> None:
        model = self._chain[0]
        self._light.enter_context(inference_attributes(model))
        self._light.enter_context(evaluation(model))
        self._light.enter_context(inference_flag(True))
        self._light.enter_context(torch.set_grad_enabled(False))


class GlobalDraws:
    """torch's global generators, on the CPU and on the model's device: what dropout draws from.

    Taken back to where they stood at `note`. Python's and NumPy's are left to whoever draws from them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device
        self._noted: list[Tensor] = []
        self._has_warned = False

    def note(self) -> None:
        self._noted = self._states()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """What is drawn within stays drawn, from where they stood at `note`."""
        is_noted = bool(self._noted)
        if is_noted:
            self.take_back()
        try:
            yield
        finally:
            if is_noted:
                self.note()

    def take_back(self) -> None:
        """Says once, in the log, that somebody has drawn."""
        noted, self._noted = self._noted, []
        if not noted or all(map(torch.equal, noted, self._states())):
            return
        torch.set_rng_state(noted[0])
        if self._device is not None:
            torch.get_device_module(self._device).set_rng_state(noted[1], self._device)
        if not self._has_warned:
            log.warning(
                "generating(): the block drew from torch's global generator, which now stands where it stood before: "
                "the next block may draw the same. Draw from a generator of your own, or take restore_rng=False"
            )
            self._has_warned = True

    def _states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device is not None:
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states


class OptimizerShelf:
    """What an optimizer keeps on a device beside the model: moments, and master weights that are not the model's own.

    Moved to the host and back in the same tensors, so that nobody's reference goes stale. Takes torch's optimizers and
    megatron-core's, chained ones too; what is on the host already stays there.
    """

    def __init__(self, optimizer: Any, model: torch.nn.Module) -> None:
        """model: without wrappers (buffers of megatron-core's DDP are something else)."""
        self._optimizer, self._model = optimizer, model
        self._shelf: OffloadedWeights | None = None

    @staticmethod
    def is_on_device(tensor: Tensor) -> bool:
        """Whether a tensor has to go."""
        return tensor.device.type != "cpu"

    @property
    def num_bytes(self) -> int:
        """Bytes on the host now."""
        return 0 if self._shelf is None else self._shelf.num_bytes

    def put_away(self) -> None:
        """Raises with everything in place."""
        if self._shelf is None:
            tensors = list(self.tensors())
            shelf = OffloadedWeights(lambda: tensors, pinned=any(tensor.is_cuda for tensor in tensors))
            shelf.offload(_no_tick)
            self._shelf = shelf

    def bring_back(self) -> None:
        """Raises, where there is no room, with everything still on the host: call it again."""
        if self._shelf is not None:
            self._shelf.reload(_no_tick)
            self._shelf = None

    def tensors(self) -> Iterator[Tensor]:
        """What has to go."""
        kept = {_storage(tensor) for tensor in _of_model(self._model)}
        for optimizer in torch_optimizers(self._optimizer):
            groups = (parameter for group in optimizer.param_groups for parameter in group["params"])
            states = (value for state in optimizer.state.values() for value in state.values())
            for tensor in (*groups, *states):
                if torch.is_tensor(tensor) and self.is_on_device(tensor) and _storage(tensor) not in kept:
                    yield tensor


def torch_optimizers(optimizer: Any) -> Iterator[Any]:
    """torch's own optimizers inside megatron-core's."""
    if hasattr(optimizer, "chained_optimizers"):
        for part in optimizer.chained_optimizers:
            yield from torch_optimizers(part)
    elif isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer
    elif getattr(optimizer, "optimizer", None) is not None:
        yield from torch_optimizers(optimizer.optimizer)


def _of_model(model: torch.nn.Module) -> Iterable[Tensor]:
    """Parameters, buffers and gradients: on a device they stay."""
    for parameter in model.parameters():
        yield parameter
        yield from (g for g in (parameter.grad, getattr(parameter, "main_grad", None)) if g is not None)
    yield from model.buffers()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _no_tick(what: str) -> None:
    """For work that is not to be stopped."""


@contextmanager
def noted(error: BaseException, what: str) -> Iterator[None]:
    """On the way out with `error`: what goes wrong now is told beside it, and stops nothing."""
    try:
        yield
    except BaseException as second:  # the first error is what the caller has to hear of
        error.add_note(f"{what} failed as well: {type(second).__name__}: {second}")
