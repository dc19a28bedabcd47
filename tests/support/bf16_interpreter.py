"""bfloat16 in Triton's interpreter, which by itself computes with the bits as integers and cuts them where it rounds.

Each operation is computed in fp32 from the exact values of its operands and rounded to the nearest bfloat16, ties to
even, as the compiled kernel does it. Operations that are not named here and would compute with bits raise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

UNARY = ("cos", "exp", "exp2", "floor", "ceil", "log", "log2", "precise_sqrt", "sqrt", "sin", "erf", "rsqrt")
TO_FLOATS = ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc")


def is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def widened(handle: TensorHandle) -> TensorHandle:
    """The same values in fp32; another dtype stays as it is."""
    if not is_bf16(handle):
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """fp32 or fp64 -> the bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    nearest = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest).reshape(np.shape(values))


def narrowed(handle: TensorHandle) -> TensorHandle:
    """A result of `widened` operands as a bfloat16; comparisons stay as they are."""
    if handle.data.dtype == np.bool_:
        return handle
    return TensorHandle(rounded(handle.data), tl.bfloat16)


def _cast(plain: Any) -> Any:
    def cast(self: Any, src: TensorHandle, dst_type: Any, *more: Any) -> TensorHandle:
        to_bf16 = dst_type.scalar == tl.bfloat16
        if is_bf16(src) and to_bf16:
            return src
        if not to_bf16:
            return plain(self, widened(src), dst_type, *more)
        wide = src if src.dtype.scalar == tl.float32 else plain(self, src, tl.float32, *more)
        return narrowed(wide)

    return cast


def _computed(plain: Any) -> Any:
    def compute(self: Any, *arguments: Any) -> TensorHandle:
        operands = [one for one in arguments if isinstance(one, TensorHandle)]
        if not any(map(is_bf16, operands)):
            return plain(self, *arguments)
        with np.errstate(all="ignore"):
            result = plain(self, *(widened(one) if isinstance(one, TensorHandle) else one for one in arguments))
        return narrowed(result)

    return compute


def _dot(plain: Any) -> Any:
    def dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *precision: Any) -> TensorHandle:
        return plain(self, widened(a), widened(b), d, *precision)

    return dot


def _refused(plain: Any) -> Any:
    def apply(self: Any, arguments: Any) -> Any:
        inputs = arguments if isinstance(arguments, tuple) else (arguments,)
        assert not any(one.dtype.scalar == tl.bfloat16 for one in inputs), "reduces or scans bfloat16"
        return plain(self, arguments)

    return apply


def get_bf16(self: Any, value: float) -> TensorHandle:
    return TensorHandle(rounded(np.array([value], dtype=np.float32)), tl.bfloat16)


@contextlib.contextmanager
def exact_bf16() -> Iterator[None]:
    """Within it the interpreter computes bfloat16 as a GPU does."""
    computed = {f"create_{name}" for name in UNARY} | {"binary_op", "create_fma", "create_clampf", "create_idiv"}
    with pytest.MonkeyPatch.context() as patch:
        for names, wrap in (
            (computed, _computed),
            ([f"create_{name}" for name in (*TO_FLOATS, "fp_to_fp", "int_cast")], _cast),
            (["create_dot"], _dot),
        ):
            for name in names:
                patch.setattr(InterpreterBuilder, name, wrap(getattr(InterpreterBuilder, name)))
        patch.setattr(InterpreterBuilder, "get_bf16", get_bf16, raising=False)
        base = interpreter.ReduceScanOpInterface
        patch.setattr(base, "apply", _refused(base.apply))
        yield
