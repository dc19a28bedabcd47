"""Prepacked copies of linear weights in the layout of a GEMM (ours or oneDNN's), kept equal to the live weights.

A packed weight saves the reorder that a plain bf16 linear repeats in every call. It is a second copy: it must follow
every update of the live weight and must not appear in a state dict. So it is kept here, keyed by the weight object, and
the model has no reference to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels import huge_pages

PACKABLE_DTYPES = (torch.bfloat16, torch.float32)


def packed_linear(x_TX: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias with a weight packed by `pack_weight`."""
    return torch.ops.mkldnn._linear_pointwise.default(x_TX, packed, bias, "none", [], "")


def pack_weight(weight: Tensor) -> Tensor:
    """An opaque oneDNN tensor with the content of `weight` [out, in]."""
    return torch.ops.mkldnn._reorder_linear_weight.default(weight.contiguous(), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """The layout of one kernel's weights."""

    name: str
    takes: Callable[[Tensor], bool]
    """Whether a CPU matrix can be packed."""
    pack: Callable[[Tensor, Tensor | None], tuple[Tensor, int | None]]
    """(weight, memory for its copy or None) -> (its copy, in that memory where it has the size; the weight's native
    checksum, None where packing does not compute it)."""
    num_elements: Callable[[Tensor], int] | None = None
    """Elements of a weight's copy, a multiple of 64 bytes; None: `pack` finds the memory."""
    dtype: torch.dtype | None = None
    """dtype of the copies' memory; None: the weights'."""


ONEDNN = PackedLayout(
    name="oneDNN prepacked",
    takes=lambda weight: weight.dtype in PACKABLE_DTYPES,
    pack=lambda weight, copy: (pack_weight(weight), None),
)


def unavailable(dtype: torch.dtype) -> str | None:
    """Why weights of `dtype` cannot be prepacked here; None when they can.

    The operators are private to torch, so this not only looks for them but runs them once against `F.linear`.
    """
    if dtype not in PACKABLE_DTYPES:
        return f"no prepacked linear for {dtype}"
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    try:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(32, 48, generator=generator).to(dtype)
        x = torch.randn(3, 48, generator=generator).to(dtype)
        with torch.no_grad():
            got = packed_linear(x, pack_weight(weight), None).float()
            want = F.linear(x, weight).float()
    except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
        return f"oneDNN prepacking fails in this torch: {str(error).splitlines()[0]}"
    if not torch.allclose(got, want, rtol=2e-2, atol=2e-2):
        return "oneDNN prepacked linear differs from the plain one"
    return None


class PackedLinears:
    """Packed copies of a set of weights: `pack` makes them, `get` finds one on the hot path.

    After a change of the weights (see weights/change_guard.py) they are packed again. A parameter object that replaces
    another is unknown here and runs unpacked until then.
    """

    def __init__(
        self,
        *,
        layout: PackedLayout | None = None,
        output_layout: PackedLayout | None = None,
        reason: str | None = None,
    ) -> None:
        self.layout = layout or ONEDNN
        self.output_layout = output_layout or self.layout
        """That of the output layer's weight."""
        self.output_id: int | None = None
        """The id of the output layer's weight where it has a layout of its own."""
        self.reason = reason
        """Why nothing is packed here (`pack` keeps no weight and linears run plain); None: packing works."""
        self._weights: list[Tensor] = []
        """Those packed: no other tensor may have the id of one."""
        self.num_packings = 0
        self._arena: list[Tensor] = []
        """The memory of the copies, in the order of the weights; empty where the layout finds it."""
        self._packed: dict[int, Tensor] = {}
        self.get: Callable[[int], Tensor | None] = self._packed.get
        """get(id(weight)) -> the packed copy, or None for a weight that is not packed."""
        self._derived: dict[int, tuple[int, Tensor]] = {}
        """id(weight) -> `num_packings` when it was derived, and what was."""

    def pack(self, weights: Iterable[Tensor], *, output: Tensor | None = None) -> dict[int, int]:
        """Replace the set of packed weights; those that cannot be packed (device, dtype, not 2-D) are left out.

        output: the one of the output layer; None: there is none among them. Overwrites the copies of before where
        weights of the same sizes are packed again. -> id(weight) -> checksum, for weights whose checksum packing
        computes.
        """
        unique = {id(weight): weight for weight in weights}
        self.output_id = None if output is None or self.output_layout is self.layout else id(output)
        self._weights = [weight for weight in unique.values() if self._takes(weight)]
        self._packed.clear()  # freed first: the peak is one extra set
        self.num_packings += 1
        self._derived = {key: self._derived[key] for key in map(id, self._weights) if key in self._derived}
        sums = {}
        with torch.no_grad():
            for weight, memory in zip(self._weights, self._memory(), strict=True):
                self._packed[id(weight)], checksum = self._layout_of(weight).pack(weight.detach(), memory)
                if checksum is not None:
                    sums[id(weight)] = checksum
        return sums

    def derived(self, weight: Tensor, derive: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
        """What follows from the packed copy of `weight`, kept until weights are packed again.

        derive: (the copy, what was derived from the one before, to be overwritten, or None) -> it.
        """
        packing, found = self._derived.get(id(weight), (0, None))
        if found is None or packing != self.num_packings:
            found = derive(self._packed[id(weight)], found)
            self._derived[id(weight)] = self.num_packings, found
        return found

    def _memory(self) -> list[Tensor] | list[None]:
        """Where to pack each weight: side by side, as most copies alone would be smaller than a huge page."""
        if self.layout.num_elements is None:
            return [None] * len(self._weights)
        sizes = []
        for weight in self._weights:
            num_elements = self._layout_of(weight).num_elements
            assert num_elements is not None, "one of two layouts that finds its memory"
            sizes.append(num_elements(weight))
        if sizes != [len(part) for part in self._arena]:
            self._arena = []
            dtype = self.layout.dtype or (self._weights[0].dtype if self._weights else torch.uint8)
            self._arena = list(huge_pages.empty(sum(sizes), dtype).split(sizes))
        return self._arena

    def forget_weights(self) -> None:
        """Keep the copies, but no weight alive; no copy may be used until the next `pack` has overwritten it."""
        self._weights = []

    def clear(self) -> None:
        """Free the copies; linears run plain until the next `pack`."""
        self._weights, self._arena = [], []
        self._packed.clear()
        self._derived.clear()

    def differs(self, weights: Iterable[Tensor]) -> str | None:
        """What distinguishes the copies from a fresh `pack(weights)`; None: nothing. Packs each weight once more."""
        wanted = {id(weight): weight for weight in weights if self._takes(weight)}
        if wanted.keys() != self._packed.keys():
            return f"{len(wanted.keys() ^ self._packed.keys())} weights are packed or missing that should not be"
        with torch.no_grad():
            for place, (key, weight) in enumerate(wanted.items()):
                have, want = self._packed[key], self._layout_of(weight).pack(weight.detach(), None)[0]
                if have.is_mkldnn:
                    have, want = have.to_dense(), want.to_dense()
                if not torch.equal(have.view(torch.uint8), want.view(torch.uint8)):
                    return f"weight {place} of {len(wanted)}, {list(weight.shape)}"
        return None

    def _layout_of(self, weight: Tensor) -> PackedLayout:
        return self.output_layout if id(weight) == self.output_id else self.layout

    def _takes(self, weight: Tensor) -> bool:
        return self.reason is None and weight.device.type == "cpu" and weight.ndim == 2 and self.layout.takes(weight)

    @property
    def num_weights(self) -> int:
        return len(self._packed)

    @property
    def num_bytes(self) -> int:
        """Memory of the packed copies and of what was derived from them, beside the live weights."""
        held = [*self._packed.values(), *(derived for _, derived in self._derived.values())]
        return sum(packed.numel() * packed.element_size() for packed in held)
