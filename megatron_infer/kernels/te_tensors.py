"""Weights that Transformer Engine keeps in 8 bits: a tensor around others, which hold the codes and their scales.

Such a tensor's dtype is that of the dequantised values, it has no memory of its own, and its version does not always
count changes of the tensors inside. So the address and the content of a weight are read off its parts. The classes are
known by name and never imported.
"""

from __future__ import annotations

from torch import Tensor

TE_PACKAGE = "transformer_engine"
FORWARD = ("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv")
BACKWARD = ("_transpose", "_columnwise_data", "_columnwise_scale_inv")


def is_quantised(tensor: Tensor) -> bool:
    """True for Transformer Engine's Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor and similar classes."""
    return type(tensor).__module__.partition(".")[0] == TE_PACKAGE


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors of a weight that a forward reads: codes and scales of a quantised one, else the weight itself."""
    return _held(tensor, FORWARD) if is_quantised(tensor) else (tensor,)


def memory_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """`parts_of` and the tensors that only a backward reads."""
    return _held(tensor, FORWARD + BACKWARD) if is_quantised(tensor) else (tensor,)


def _held(tensor: Tensor, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    found = (getattr(tensor, name, None) for name in names)
    return tuple(part for part in found if part is not None)
