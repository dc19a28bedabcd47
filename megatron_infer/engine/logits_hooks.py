"""Callables that see the logits of each step before tokens are drawn, with the metadata of the requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_infer.config.request_metadata import dtype_name, value_of
from megatron_infer.memory.device import Device
from megatron_infer.runner.parallel.tensor_parallel_sampler import gather_rows
from megatron_infer.scheduler.request import Request

LogitsHook = Callable[[Tensor, Mapping[str, Tensor]], Tensor | None]
"""(logits [rows, padded vocabulary], label -> one value a row) -> logits to use instead, of the same shape and dtype;
None: those that it got, which it may have changed."""


class LogitsHooks:
    """The hooks of an engine, in the order they were added. With tensor parallelism each rank sees whole rows."""

    def __init__(self, types: Sequence[tuple[str, Any, bool]] | None, device: Device, group: Any) -> None:
        """types: InferenceConfig.request_metadata_types. group: ranks that each have a part of the vocabulary, or
        None."""
        self._types = [(label, getattr(torch, dtype_name(dtype)), on_device) for label, dtype, on_device in types or ()]
        self._device = device
        self._group = None if group is None or group.size() == 1 else group
        self.hooks: list[LogitsHook] = []

    def apply(self, logits_SV: Tensor, sampled: Sequence[Request]) -> Tensor | None:
        """The logits to draw from, this rank's part of them; logits_SV is left as it was. None: there are no hooks."""
        if not self.hooks:
            return None
        width = logits_SV.shape[1]
        whole = logits_SV.clone() if self._group is None else gather_rows(logits_SV, self._group)
        values = self._values(sampled)
        for hook in self.hooks:
            given = hook(whole, values)
            if given is None:
                continue
            if not isinstance(given, Tensor) or given.shape != whole.shape or given.dtype != whole.dtype:
                got = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
                raise ValueError(
                    f"the hook {getattr(hook, '__qualname__', hook)!r} of on_logits returned {got}, it must return "
                    f"{whole.dtype} {list(whole.shape)} or None"
                )
            whole = given
        if self._group is None:
            return whole
        first = self._group.rank() * width
        return whole[:, first : first + width].contiguous()

    def _values(self, sampled: Sequence[Request]) -> dict[str, Tensor]:
        values = {}
        for label, dtype, on_device in self._types:
            given = [value_of(label, request.params, request.stop_ids) for request in sampled]
            exact = np.array(given, dtype=np.float64 if dtype.is_floating_point else np.int64)
            values[label] = (self._device.to_device(exact) if on_device else torch.from_numpy(exact)).to(dtype)
        return values
