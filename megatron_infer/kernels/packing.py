"""Prepacked copies of linear weights in the layout of a GEMM (ours or oneDNN's), kept equal to the live weights.

A packed weight saves the reorder that a plain bf16 linear repeats in every call. It is a second copy: it must follow
every update of the live weight and must not appear in a state dict. So it is kept here, keyed by the weight object, and
the model has no reference to it.

Where only the engine uses the model, the packed copy can be the only one: the weight's memory is freed, and it is
unpacked, to the bit, for a reader.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.errors import FreedWeightsWritten, ModelError
from megatron_infer.kernels import huge_pages
from megatron_infer.kernels.freed_weights import FreedWeights, state_of
from megatron_infer.utils.process_memory import return_freed

PACKABLE_DTYPES = (torch.bfloat16, torch.float32)
TRIM_BYTES = 64 << 20
"""Memory of weights that is freed before the allocator must return it to the system."""


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
    unpack: Callable[[Tensor, Tensor], None] | None = None
    """(a copy, memory of its weight's shape and dtype): write the weight there, to the bit. None: not possible."""


ONEDNN = PackedLayout(
    name="oneDNN prepacked",
    takes=lambda weight: weight.dtype in PACKABLE_DTYPES,
    pack=lambda weight, copy: (pack_weight(weight), None),
)
ONEDNN_FP32 = replace(ONEDNN, pack=lambda weight, copy: (pack_weight(weight.float()), None))
"""An output layer's, whose products are not rounded to half precision: oneDNN's have the dtype of the weight."""


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

    After a change of the weights (see models/weights/change_guard.py) they are packed again. A parameter object that
    replaces another is unknown here and runs unpacked until then.
    """

    def __init__(
        self,
        *,
        layout: PackedLayout | None = None,
        output_layout: PackedLayout | None = None,
        reason: str | None = None,
    ) -> None:
        self.layout = layout or ONEDNN
        self.output_layout = output_layout or (ONEDNN_FP32 if self.layout is ONEDNN else self.layout)
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
        self.freed = FreedWeights()
        """Weights of which the packed copy is all there is."""
        self.keeps_weights = False
        """Others read the weights, too: none is freed any more."""
        self.read_again: Callable[[], Mapping[int, Tensor]] | None = None
        """-> by id, the weights as they were packed first, read from where they came: for layouts that cannot be
        unpacked. None: not possible."""
        self._first_sums: dict[int, int] = {}
        """id(weight) -> checksum of what was packed first."""
        self.on_new_address: Callable[[Sequence[Tensor]], None] = lambda weights: None
        """Called with weights that have the same content at another address: they were freed or unpacked."""
        self.lock = threading.RLock()
        """Held while weights are packed and unpacked: state dicts may be read by another thread than the engine's."""

    def pack(
        self, weights: Iterable[Tensor], *, output: Tensor | None = None, freeable: Collection[int] = ()
    ) -> dict[int, int]:
        """Replace the set of packed weights; those that cannot be packed (device, dtype, not 2-D) are left out.

        output: the one of the output layer; None: there is none among them. freeable: ids of weights that nothing reads
        beside their copies: each is freed once it is packed, if it can be unpacked. Overwrites the copies of before
        where weights of the same sizes are packed again, and leaves those of weights that are freed already.
        -> id(weight) -> checksum, for weights whose checksum packing computes. Raises FreedWeightsWritten if freed
        weights were written, which have the values of before then.
        """
        with self.lock:
            unique = {id(weight): weight for weight in weights}
            self._unpack([*self.freed.written(unique.values()), *(one for one in self.freed if id(one) not in unique)])
            self.output_id = None if output is None or self.output_layout is self.layout else id(output)
            self._weights = [weight for weight in unique.values() if self._takes(weight)]
            return self._pack_unfreed(freeable)

    @torch.no_grad()
    def _pack_unfreed(self, freeable: Collection[int]) -> dict[int, int]:
        sums, moved, held = self.freed.checksums(), [], 0
        self.freed.forget_others(sums)
        kept = {key: self._packed[key] for key in sums}
        self._packed.clear()  # freed first: the peak is one extra set
        self._packed.update(kept)
        self.num_packings += 1
        self._derived = {key: self._derived[key] for key in map(id, self._weights) if key in self._derived}
        try:
            for weight, memory in zip(self._weights, self._memory(), strict=True):
                key, layout = id(weight), self._layout_of(weight)
                if key in kept:
                    if memory is not None and memory.data_ptr() != kept[key].data_ptr():
                        self._packed[key] = memory.copy_(kept[key])
                    continue
                self._packed[key], checksum = layout.pack(weight.detach(), memory)
                if checksum is None:
                    continue
                sums[key] = checksum
                if self.num_packings == 1:
                    self._first_sums[key] = checksum
                can_read = self.read_again is not None and checksum == self._first_sums.get(key)
                if key in freeable and not self.keeps_weights and (layout.unpack is not None or can_read):
                    held += weight.nbytes if self.freed.free(weight, checksum) else 0
                    moved.append(weight)
                    if held >= TRIM_BYTES:
                        return_freed()
                        held = 0
        finally:
            self.on_new_address(moved)
        if held:
            return_freed()
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
            kept = self._packed.get(id(weight))
            sizes.append(num_elements(weight) if kept is None else len(kept))
        copies = [self._packed.get(id(weight)) for weight in self._weights]
        if sizes != [len(part) for part in self._arena] or any(
            copy is not None and copy.data_ptr() != part.data_ptr()
            for copy, part in zip(copies, self._arena, strict=True)
        ):
            self._arena = []
            dtype = self.layout.dtype or (self._weights[0].dtype if self._weights else torch.uint8)
            self._arena = list(huge_pages.empty(sum(sizes), dtype).split(sizes))
        return self._arena

    def forget_weights(self) -> None:
        """Keep the copies, but no weight alive that is not freed; no copy of these may be used until the next `pack`
        has overwritten it."""
        with self.lock:
            self._weights = [weight for weight in self._weights if weight in self.freed]

    def clear(self) -> None:
        """Free the copies; linears run plain until the next `pack`. All stay where some are all there is of weights."""
        with self.lock:
            if self.freed:
                return
            self._weights, self._arena = [], []
            self._packed.clear()
            self._derived.clear()

    def unpack(self) -> None:
        """Give all freed weights memory of their own; they have it until the next `pack`.

        After an error (no memory) the others are freed as before. Raises FreedWeightsWritten, once all are unpacked,
        if some were written while they were freed: they have the values of before.
        """
        with self.lock:
            self._unpack(list(self.freed))

    @contextlib.contextmanager
    def unpacked(self) -> Iterator[None]:
        """Inside, freed weights can be read; they are freed again at its end, but for those that were written."""
        with self.lock:
            sums = self.freed.checksums()
            weights = [weight for weight in self.freed if id(weight) in sums]
            self.unpack()
            before = list(map(state_of, weights))
            try:
                yield
            finally:
                same = [one for one, state in zip(weights, before, strict=True) if state_of(one) == state]
                same = [one for one in same if id(one) in self._packed]  # else the copies have been released
                self.on_new_address([one for one in same if self.freed.free(one, sums[id(one)])])
                return_freed()

    @torch.no_grad()
    def _unpack(self, weights: Sequence[Tensor]) -> None:
        written = self.freed.written(weights)
        for weight, content in zip(weights, self._contents(weights), strict=True):
            self.freed.restore(weight, content)
            self.on_new_address([weight])
        if written:
            raise FreedWeightsWritten(
                f"{len(written)} weights were written or cast while their memory was freed, as an engine that owns its "
                "model does on a CPU; they have the values of before: call engine.weights.unpack() first, or update "
                "them through the engine",
                state="",
            )

    def _contents(self, weights: Iterable[Tensor]) -> Iterator[Tensor]:
        """The content of freed weights. Raises ModelError for one that is not where it came from any more."""
        read: Mapping[int, Tensor] = {}
        for weight in weights:
            layout = self._layout_of(weight)
            if layout.unpack is not None:
                content = torch.empty(weight.shape, dtype=self._packed[id(weight)].dtype)
                layout.unpack(self._packed[id(weight)], content)
            else:
                assert self.read_again is not None, "a weight was freed that cannot be unpacked"
                read = read or self.read_again()
                content = read[id(weight)]
                if layout.pack(content, None)[1] != self.freed.checksum(weight):
                    raise ModelError("the model's files are not what they were when it was loaded; load it again")
            yield content

    def differs(self, weights: Iterable[Tensor]) -> str | None:
        """What distinguishes the copies from a fresh `pack(weights)`; None: nothing. Packs each weight once more."""
        wanted = {id(weight): weight for weight in weights if self._takes(weight)}
        if wanted.keys() != self._packed.keys():
            return f"{len(wanted.keys() ^ self._packed.keys())} weights are packed or missing that should not be"
        contents = self._contents(weight for weight in wanted.values() if weight in self.freed)
        with torch.no_grad():
            for place, (key, weight) in enumerate(wanted.items()):
                have, is_freed = self._packed[key], weight in self.freed
                want, checksum = self._layout_of(weight).pack(next(contents) if is_freed else weight.detach(), None)
                if is_freed and checksum != self.freed.checksum(weight):
                    return f"weight {place} of {len(wanted)}, {list(weight.shape)}, has this copy alone, which changed"
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
