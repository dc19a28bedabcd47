"""Functions of the native library as Python calls them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

_PLAIN = frozenset((int, float, bool, type(None)))


def bind(library: ctypes.CDLL, name: str, argtypes: list[type], restype: type | None = None) -> Callable[..., Any]:
    function = getattr(library, name)
    function.argtypes, function.restype = argtypes, restype
    return function


def bind_threaded(
    library: ctypes.CDLL, name: str, argtypes: list[type], restype: type | None = None
) -> Callable[..., Any]:
    """A function whose last argument, which is not among these, is the number of threads.

    It takes tensors where it reads addresses. That costs the host a microsecond: for what a step calls once, and for
    exact mode.
    """
    function = bind(library, name, [*argtypes, ctypes.c_int], restype)

    def call(*arguments: Any) -> Any:
        given = [one if type(one) in _PLAIN else one.data_ptr() for one in arguments]
        return function(*given, torch.get_num_threads())

    return call
