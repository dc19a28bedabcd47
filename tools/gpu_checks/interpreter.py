"""Triton's interpreter without what it does again at every call: rehearsals and tests of kernels take half as long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def quicken() -> None:
    """In this process `triton.language` is patched once for each module of kernels, and dtypes are looked up once.

    By itself the interpreter patches the language at each launch and at each call of a function, which takes longer
    than most functions, and makes its table of dtypes for each look-up. Without Triton there is nothing to do.
    """
    try:
        from triton.runtime import interpreter
    except ModuleNotFoundError:
        return
    patch, look_up = interpreter._patch_lang, interpreter._get_np_dtype
    patched: dict[int, Any] = {}
    dtypes: dict[str, Any] = {}

    def patched_once(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in patched:
            patch(function)
            patched[id(names)] = names
        return SimpleNamespace(restore=lambda: None)

    def numpy_dtype(given: Any) -> Any:
        scalar = given.scalar
        if scalar.name not in dtypes:
            dtypes[scalar.name] = look_up(scalar)
        return dtypes[scalar.name]

    interpreter._patch_lang = patched_once
    interpreter._get_np_dtype = numpy_dtype
