"""Runs megatron-core's training on a CPU, for tests: patches torch so that CUDA means the CPU.

Inference never needs it. megatron-core assumes CUDA in its DDP, optimizers, schedules and checkpoint writer. Each level
adds patches for further parts; megatron-core itself is not patched.

    1  torch.cuda.current_device / synchronize           sequence and expert parallel, checkpoints, building DDP
    2  + device="cuda" and .cuda() mean the CPU          FP32 optimizer without clipping, pipeline schedules
    3  + generator state and streams                     recompute, schedules and DDP of megatron-core 0.19
    4  + Tensor.type() says torch.cuda.*                 DistributedOptimizer, bf16 optimizer, gradient clipping
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class _CudaMeansCpu(TorchFunctionMode):
    """Replaces cuda devices by the CPU in every torch call."""

    def __init__(self, *, fake_type: bool) -> None:
        super().__init__()
        self._fake_type = fake_type

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if self._fake_type and func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if (
            func is torch.Tensor.to
            and len(args) > 1
            and isinstance(args[1], str | torch.device)
            and "cuda" in str(args[1])
        ):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


class _NullStream:
    """A stream and event without pending work."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _NullStream:
        return self

    def synchronize(self) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NullStream)

    def __hash__(self) -> int:
        return 0


@contextlib.contextmanager
def cpu_shim(level: int = 4) -> Iterator[None]:
    """Within the block megatron-core trains on the CPU, to `level`. Raises RuntimeError where CUDA is available."""
    if torch.cuda.is_available():
        raise RuntimeError("cpu_shim would hide the CUDA device of this machine; it is for machines without one")
    if level not in range(1, 5):
        raise ValueError(f"cpu_shim level {level}; levels are 1 to 4")
    patches: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda *_, **__: None,
    }
    if level >= 3:
        stream = _NullStream()
        patches |= {
            "Stream": _NullStream,
            "current_stream": lambda *_: stream,
            "default_stream": lambda *_: stream,
            "stream": lambda _: contextlib.nullcontext(),
            "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        }
    with contextlib.ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        if level >= 3:
            stack.enter_context(
                mock.patch.object(torch.cuda.random, "get_rng_state", lambda *_, **__: torch.get_rng_state())
            )
        if level >= 2:
            stack.enter_context(_CudaMeansCpu(fake_type=level >= 4))
        yield
