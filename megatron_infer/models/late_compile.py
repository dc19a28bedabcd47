"""torch.compile of a function when it is first called, not where it is decorated."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch

from megatron_infer.utils.attributes import replaced


def compiling_late() -> AbstractContextManager[None]:
    """Modules that are imported within it and take `torch.compile` as a plain decorator get one that waits.

    The first decoration imports torch's compiler, a third of the time and memory of megatron-core's import; most
    processes never call a compiled function. What is called computes as before. torch itself is left as it was.
    With torch's own switch, TORCH_COMPILE_DISABLE=1, functions stay as they are written.
    """
    compile_now = torch.compile
    is_disabled = os.environ.get("TORCH_COMPILE_DISABLE") == "1"

    def late(function: Any = None, **options: Any) -> Any:
        if options or not isinstance(function, FunctionType):
            return compile_now(function, **options)
        if is_disabled:
            return function
        return _compiled_when_called(function, compile_now)

    return replaced(torch, compile=late)


def _compiled_when_called(function: FunctionType, compile_now: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if torch.compiler.is_compiling():  # another compiled function calls this one: it becomes a part of that
            return function(*args, **kwargs)
        if compiled is None:
            compiled = compile_now(function)
        return compiled(*args, **kwargs)

    return call
