"""Paged attention on a GPU: rotate and append, then decode rows by splits of keys and slices by tiles of queries.

Launches per layer: one for rotation and append; one or two for decode rows (the second merges splits, if a row may have
several); one for slices. Launches for rows that the step's shape does not have are left out. Nothing reads the host's
arrays, nothing waits, and grids are bounds that follow from the step's shape: a captured step may be replayed with
other content. A row's bits do not depend on the rest of the step, its padding, the capacity, or the device's number of
multiprocessors. Not yet run on a GPU. Legend: `kernels/base.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from megatron_infer.kernels.base import NO_INDEXER, AttendSpec, StepMetadata
from megatron_infer.kernels.kv_rounding import FP8, movable, only_own_dtype
from megatron_infer.kernels.triton import launch
from megatron_infer.kernels.triton.attention_decode import (
    DecodeKernels,
    attend_decode,
    decode_kernels,
    decode_tiles,
    row_parts,
)
from megatron_infer.kernels.triton.attention_prefill import PrefillTiles, attend_prefill, prefill_tiles
from megatron_infer.kernels.triton.attention_tiles import FP8_ARCH, Layer, partials
from megatron_infer.kernels.triton.launch import APART
from megatron_infer.kernels.triton.rotary_append import rotary_append
from megatron_infer.kernels.triton_scratch import DECODE_CHUNK, power_of_2

MAX_HEAD_DIM = 256
MAX_LEAD, MAX_LATENT = 64, 512
"""Dims of a latent attention's key: its rotary part, and the latent, which is its value."""
MAX_FP8_FP32_DIM = 128
"""With larger heads, tiles of keys widened from 8 to 32 bits do not fit the registers."""
LARGE_KIB, SMALL_KIB = 227, 99
"""Shared memory of a block: on Hopper and datacentre Blackwell, and the least from Ampere on."""
PROGRAMS_PER_CORE = 2
"""Decode programs per multiprocessor, which has room for two or more: all run at once, with even shares."""


unavailable = launch.kernels_unavailable


def make(device: torch.device, dtype: torch.dtype) -> TritonPagedAttention:
    """The backend for a device on which it is available."""
    if device.type != "cuda":
        return TritonPagedAttention(num_cores=2, shared_kib=LARGE_KIB)
    about = torch.cuda.get_device_properties(device)
    shared = getattr(about, "shared_memory_per_block_optin", None)
    major, minor = torch.cuda.get_device_capability(device)
    return TritonPagedAttention(
        num_cores=about.multi_processor_count,
        shared_kib=shared // 1024 if shared else _shared_kib((major, minor)),
        arch=10 * major + minor,
        overlap=launch.overlapping(device),
    )


def _shared_kib(capability: tuple[int, int]) -> int:
    """Shared memory of one block, where torch does not know it."""
    return {(8, 0): 163, (8, 7): 163, (9, 0): LARGE_KIB, (10, 0): LARGE_KIB, (10, 3): LARGE_KIB}.get(
        capability, SMALL_KIB
    )


class TritonPagedAttention:
    """kernels.base.AttentionBackend in Triton.

    num_cores: multiprocessors of the device; decides how many programs share the keys of decode rows, but no bit.
    shared_kib: shared memory of a block; decides the tiles of prefill.
    chunk: keys per split of a decode row, on which bits depend. arch: compute capability in tenths.
    """

    name = "triton"
    graph_safe = True

    def __init__(
        self,
        *,
        num_cores: int,
        shared_kib: int,
        chunk: int = DECODE_CHUNK,
        arch: int = FP8_ARCH,
        overlap: Mapping[str, bool] = APART,
    ) -> None:
        """overlap: see `launch.overlapping`."""
        self._programs = PROGRAMS_PER_CORE * num_cores
        self._shared_kib = shared_kib
        self._chunk = chunk
        self._arch = arch
        self._overlap = overlap
        self._step: StepMetadata | None = None
        self._planes: dict[int, _Planes] = {}
        """By id of the cache: an MTP layer has one of its own."""
        self._kinds: dict[int, _Kind] = {}

    def supports(
        self, spec: AttendSpec, *, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        """Blocks may have any size. The block table is read once per tile of keys where a tile lies in one block, else
        once per key."""
        if dtype not in launch.DTYPES:
            return f"needs float32, bfloat16 or float16, got {dtype}"
        if kv_dtype is not FP8 and (reason := only_own_dtype(dtype, kv_dtype)) is not None:
            return reason
        if kv_dtype is FP8 and self._arch < FP8_ARCH:
            return f"reads FP8 from compute capability {FP8_ARCH / 10} on, this is {self._arch / 10}"
        if kv_dtype is FP8 and dtype is torch.float32 and spec.head_dim > MAX_FP8_FP32_DIM:
            return f"needs head_dim up to {MAX_FP8_FP32_DIM} for FP8 with {dtype}, got {spec.head_dim}"
        if spec.index is not None:
            return NO_INDEXER
        if spec.value_start is not None:
            lead, latent = spec.value_start, spec.value_dim
            if not 8 <= lead <= MAX_LEAD or lead % 8 or not 8 <= latent <= MAX_LATENT or latent % 8:
                return (
                    f"needs latents in multiples of 8 up to {MAX_LATENT} and rotary parts up to {MAX_LEAD}, "
                    f"got {latent} and {lead}"
                )
        elif not 1 <= spec.head_dim <= MAX_HEAD_DIM or spec.head_dim % 8:
            return f"needs head_dim a multiple of 8 up to {MAX_HEAD_DIM}, got {spec.head_dim}"
        if spec.scale <= 0:
            return f"needs a positive scale, got {spec.scale}"
        if spec.softcap is not None and spec.softcap <= 0:
            return f"needs a positive softcap, got {spec.softcap}"
        if spec.rotary_dim % 2 or spec.rotary_dim > spec.head_dim:
            return f"needs an even rotary_dim up to head_dim, got {spec.rotary_dim}"
        if spec.window is not None and spec.window < 1:
            return f"needs a window of 1 or more, got {spec.window}"
        return None

    def plan(self, step: StepMetadata) -> None:
        """Keep the step; the rest happens on the device, in `run`."""
        self._step = step

    def run(
        self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> Tensor:
        """See AttentionBackend.run; rotates q in place. Padding tokens get zeros."""
        q_TKGH, keys, values = self.append(q_TKGH, k_TKH, v_TKH, kv_cache, layer=layer, spec=spec)
        step, num_tokens = self._step, q_TKGH.shape[0]
        assert step is not None
        kind = self._kind_of(layer, q_TKGH, kv_cache, spec)
        out_TX = q_TKGH.new_empty((num_tokens, kind.width))
        if step.num_decode:
            self._attend_rows(q_TKGH, keys, values, out_TX, step, spec, kind.decode)
        if num_tokens > step.num_decode:
            attend_prefill(q_TKGH, keys, values, out_TX, step, spec, kind.of, kind.prefill)
        return out_TX

    def append(
        self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(q rotated in place, the layer's keys and values [blocks, B, K, H], those of the step included)."""
        step = self._step
        assert step is not None, "run() before plan()"
        q_TKGH = q_TKGH if q_TKGH.stride(-1) == 1 else q_TKGH.contiguous()
        k_TKH = k_TKH if k_TKH.stride(-1) == 1 else k_TKH.contiguous()
        v_TKH = v_TKH if v_TKH.stride(-1) == 1 else v_TKH.contiguous()
        assert q_TKGH.shape[0] == step.num_tokens, (q_TKGH.shape[0], step.num_tokens)
        planes, rotation = self._planes_of(kv_cache), step.rotation(spec)
        first = spec.planes * layer
        last = first + spec.planes - 1
        rotary_append(
            q_TKGH,
            k_TKH,
            v_TKH,
            planes.bits[first],
            planes.bits[last] if spec.value_start is None else None,
            step.kv_pos_T,
            *((None, None) if rotation is None else rotation),
            rotary_dim=0 if rotation is None else spec.rotary_dim,
            interleaved=spec.rotary_interleaved,
        )
        return q_TKGH, planes.values[first], planes.values[last]

    def attend_chosen(
        self,
        q_TKGH: Tensor,
        keys: Tensor,
        out_TX: Tensor,
        step: StepMetadata,
        spec: AttendSpec,
        *,
        is_split: bool,
    ) -> None:
        """Latents of `keys` for queries that are rows: the step's block table has the place of each key of a row.

        is_split: several programs share the keys of a row, so that few rows occupy the device.
        """
        of = Layer.of(spec, block_size=1, element_bytes=q_TKGH.element_size(), fp8=keys.dtype is FP8)
        chunk = self._chunk if is_split else max(self._chunk, power_of_2(step.max_kv_len))
        kernels = decode_kernels(of, decode_tiles(of, chunk, shared_kib=self._shared_kib), self._overlap)
        self._attend_rows(q_TKGH, keys, keys, out_TX, step, spec, kernels)

    def _attend_rows(
        self,
        q_TKGH: Tensor,
        keys: Tensor,
        values: Tensor,
        out_TX: Tensor,
        step: StepMetadata,
        spec: AttendSpec,
        kernels: DecodeKernels,
    ) -> None:
        """Outputs of the step's decode rows."""
        splits = row_parts(step, spec, kernels.tiles)
        num_parts = step.num_decode * spec.num_kv_heads * spec.group_size * splits if splits > 1 else 1
        # fp32 memory also where nothing is split: one kernel for both cases
        parts = partials(out_TX, num_parts, spec.value_dim)
        attend_decode(
            q_TKGH, keys, values, out_TX, step, spec, kernels, parts, splits=splits, programs=self._programs
        )  # fmt: skip

    def _planes_of(self, kv_cache: Tensor) -> _Planes:
        planes = self._planes.get(id(kv_cache))
        if planes is None or planes.cache() is not kv_cache:
            planes = _Planes(kv_cache, partial(self._planes.pop, id(kv_cache)))
            self._planes[id(kv_cache)] = planes
        return planes

    def _kind_of(self, layer: int, q_TKGH: Tensor, kv_cache: Tensor, spec: AttendSpec) -> _Kind:
        """What `layer` is computed with; made once."""
        is_fp8, block_size = kv_cache.dtype is FP8, kv_cache.shape[3]
        given = spec, q_TKGH.dtype, is_fp8, block_size
        kind = self._kinds.get(layer)
        if kind is None or kind.given[0] is not spec or kind.given[1:] != given[1:]:
            assert kv_cache.dtype in (q_TKGH.dtype, FP8), (kv_cache.dtype, q_TKGH.dtype)
            of = Layer.of(spec, block_size=block_size, element_bytes=q_TKGH.element_size(), fp8=is_fp8)
            tiles = decode_tiles(of, self._chunk, shared_kib=self._shared_kib)
            kind = self._kinds[layer] = _Kind(
                given=given,
                of=of,
                width=spec.num_kv_heads * spec.group_size * of.head_dim,
                decode=decode_kernels(of, tiles, self._overlap),
                prefill=prefill_tiles(of, self._shared_kib),
            )
        return kind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What a layer is computed with."""

    given: tuple[AttendSpec, torch.dtype, bool, int]
    """Spec, dtype of queries, whether the cache is FP8, its block size."""
    of: Layer
    width: int
    """Of outputs."""
    decode: DecodeKernels
    prefill: PrefillTiles


class _Planes:
    """The keys and the values of each layer: views of a cache, which are dropped with it."""

    __slots__ = ("bits", "cache", "values")

    def __init__(self, kv_cache: Tensor, forget: Callable[[Any], Any]) -> None:
        """forget: called when the cache exists no more."""
        assert kv_cache.is_contiguous()
        self.cache = ref(kv_cache, forget)
        kv_cache = kv_cache.detach()  # views of the cache itself would keep it
        self.values = kv_cache.flatten(0, 1).unbind()
        """Keys of layer 0, its values where these are apart, keys of layer 1, ..."""
        self.bits = movable(kv_cache).flatten(0, 1).unbind() if kv_cache.dtype is FP8 else self.values
        """The same, `movable`."""
