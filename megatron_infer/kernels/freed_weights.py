"""Weights whose memory is given up because their packed copies have the same values.

A freed weight is the same tensor object and has the same shape; all of its places are one NaN. It has memory of its own
again before it is read or written: for state dicts and forwards of its module, weight updates, digests.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_infer.kernels.packing import PackedLinears


@dataclass(slots=True)
class _Freed:
    """One weight, and what it was when it was freed."""

    weight: Tensor
    shown: Tensor
    """The NaN."""
    checksum: int
    state: tuple[int, int]


class FreedWeights:
    """Which weights are freed, by id."""

    def __init__(self) -> None:
        self._records: dict[int, _Freed] = {}

    def __contains__(self, weight: Tensor) -> bool:
        """Whether a weight is freed and shows the NaN, written or not."""
        record = self._records.get(id(weight))
        return record is not None and weight.data_ptr() == record.shown.data_ptr()

    def __iter__(self) -> Iterator[Tensor]:
        return (record.weight for record in list(self._records.values()) if record.weight in self)

    def __bool__(self) -> bool:
        """Whether some copy is all there is of a weight, of one that was cast, too."""
        return bool(self._records)

    def free(self, weight: Tensor, checksum: int) -> bool:
        """Give up the memory of a weight -> whether that was done: not where something else refers to it, as a state
        dict that was kept or a buffer of many weights does."""
        if not is_alone(weight):
            return False
        shown = torch.full((), torch.nan, dtype=weight.dtype)
        weight.data = shown.expand(weight.shape)
        self._records[id(weight)] = _Freed(weight, shown, checksum, state_of(weight))
        return True

    def checksum(self, weight: Tensor) -> int:
        return self._records[id(weight)].checksum

    def checksums(self) -> dict[int, int]:
        """id -> checksum, for the weights that are freed and were not written since."""
        return {id(one): self.checksum(one) for one in self if not self.was_written(one)}

    def was_written(self, weight: Tensor) -> bool:
        """Whether a weight was written since it was freed: in place, or computed or cast from what it showed."""
        record = self._records[id(weight)]
        if weight in self:
            return not bool(torch.isnan(record.shown)) or state_of(weight) != record.state
        return bool(torch.isnan(weight.detach()).any())

    def forget_others(self, ids: Iterable[int]) -> None:
        """Forget all but these."""
        self._records = {key: self._records[key] for key in ids}

    def restore(self, weight: Tensor, content: Tensor) -> None:
        """The weight has this content, and is freed no more."""
        weight.data = content.to(weight)
        del self._records[id(weight)]

    def written(self, weights: Iterable[Tensor]) -> list[Tensor]:
        """Those that are recorded and were written."""
        return [one for one in weights if id(one) in self._records and self.was_written(one)]


def is_alone(weight: Tensor) -> bool:
    """Whether nothing else refers to a weight's memory."""
    storage = weight.untyped_storage()
    return storage.nbytes() == weight.nbytes and _num_users(weight) == _num_users(torch.empty(1))


def _num_users(tensor: Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def state_of(weight: Tensor) -> tuple[int, int]:
    """Another one after each write in place that is not through `.data`, and at another address."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


# ---------------------------------------------------------------------- readers of a model


class UnpackHook:
    """Unpacks the freed weights of a model before a state dict or a forward of one of its modules. Keeps the copies
    alive as long as the module, whose weights nothing else has."""

    def __init__(self, packed: PackedLinears) -> None:
        self.packed = packed
        self.skipped_threads: list[int] = []
        """Those for which it does nothing."""

    def __call__(self, *_: Any) -> None:
        if threading.get_ident() not in self.skipped_threads:
            self.packed.unpack()


def add_unpack_hooks(packed: PackedLinears, modules: Iterable[torch.nn.Module]) -> None:
    """What `packed` frees of these modules' weights is unpacked for their state dicts and forwards."""
    hook = UnpackHook(packed)
    for module in modules:
        if all(found.packed is not packed for found in _hooks_of(module)):
            module.register_state_dict_pre_hook(hook)
            module.register_load_state_dict_pre_hook(hook)
            module.register_forward_pre_hook(hook)


def unpack_weights(model: torch.nn.Module) -> None:
    """Unpack what an engine has freed of its model's weights, for another reader, and free none from then on."""
    for hook in _hooks_of(model):
        hook.packed.keeps_weights = True
        hook.packed.unpack()


@contextlib.contextmanager
def unpacked(model: torch.nn.Module) -> Iterator[None]:
    """Inside, all weights of a model can be read; those that were freed before are freed again."""
    with contextlib.ExitStack() as stack:
        for hook in _hooks_of(model):
            stack.enter_context(hook.packed.unpacked())
        yield


@contextlib.contextmanager
def names_only(model: torch.nn.Module) -> Iterator[None]:
    """Inside, state dicts are for names: freed weights stay freed."""
    hooks = list({id(hook): hook for module in model.modules() for hook in _hooks_of(module)}.values())
    thread = threading.get_ident()
    for hook in hooks:
        hook.skipped_threads.append(thread)
    try:
        yield
    finally:
        for hook in hooks:
            hook.skipped_threads.remove(thread)


def _hooks_of(module: torch.nn.Module) -> list[UnpackHook]:
    return [hook for hook in module._state_dict_pre_hooks.values() if isinstance(hook, UnpackHook)]
