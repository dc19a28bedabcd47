"""verl's Megatron worker next to `verl_on_cpu`: `model.external_lib` is a list with this module first.

megatron-core asks for CUDA, which means the CPU on the thread that makes an engine. Transformer Engine is that of
tests/models/stand_ins. Megatron-Bridge imports packages that log and that load other data.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import typing
from typing import Any
from unittest.mock import MagicMock

import torch
import typing_extensions
from verl.workers.engine.base import BaseEngine

from megatron_infer.testing.cpu_shim import cpu_shim

if not hasattr(typing, "override"):
    typing.override = typing_extensions.override  # of Python 3.12, which Megatron-Bridge needs for nothing else
for name in ("megatron.energon", "torch.utils.tensorboard", "torch.utils.tensorboard.writer"):
    sys.modules[name] = MagicMock(__path__=[], __spec__=None, __name__=name)
torch.cuda.set_device = lambda *_: None

_shim = contextlib.ExitStack()
_make = BaseEngine.__init__


@functools.wraps(_make)
def _make_engine(self: BaseEngine, *args: Any, **how: Any) -> None:
    _shim.enter_context(cpu_shim(4))
    _make(self, *args, **how)


BaseEngine.__init__ = _make_engine
