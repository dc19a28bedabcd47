"""Paged attention on a GPU: rotate and append, then decode rows by splits of keys and slices by tiles of queries.

Launches per layer: one for rotation and append; one or two for decode rows (the second merges splits, if a row may have
several); one for slices, and two more for slices whose keys are split (few queries over many keys), if there may be
any. Launches for rows that the step's shape does not have are left out. Nothing reads the host's arrays, nothing waits,
and grids are bounds that follow from the step's shape: a captured step may be replayed with other content. A row's bits
do not depend on the rest of the step, its padding, the capacity, or the device's number of multiprocessors. Not yet run
on a GPU. Legend: `kernels/base.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, GraphSupport, StepMetadata
from megatron_infer.kernels.kv_rounding import FP8, only_own_dtype
from megatron_infer.kernels.triton import attention_decode, attention_prefill, attention_slices, launch
from megatron_infer.kernels.triton.attention_decode import attend_decode, decode_tiles
from megatron_infer.kernels.triton.attention_prefill import attend_prefill, prefill_tiles
from megatron_infer.kernels.triton.attention_slices import attend_slices
from megatron_infer.kernels.triton.attention_tiles import FP8_ARCH, Layer, padded
from megatron_infer.kernels.triton.launch import AotVariant
from megatron_infer.kernels.triton.rotary_append import rotary_append
from megatron_infer.kernels.triton_scratch import DECODE_CHUNK, SLICE_CHUNK, SLICE_PROGRAMS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
MAX_FP8_FP32_DIM = 128
"""With larger heads, tiles of keys widened from 8 to 32 bits do not fit the registers."""
LARGE_KIB, SMALL_KIB = 227, 99
"""Shared memory of a block: on Hopper and datacentre Blackwell, and the least from Ampere on."""
FP8_VARIANTS = {"h128_g4": ("bf16", "fp16", "fp32")} | dict.fromkeys(
    ("h64_g8_window_sinks", "h256_g8", "h80_g1"), ("bf16",)
)
"""Layers and dtypes of queries that are also compiled ahead of time for a cache of 8 bits; merges do not read it."""
PROGRAMS_PER_CORE = 2
"""Decode programs per multiprocessor, which has room for two or more: all run at once, with even shares."""


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton attention cannot run here; None: it can."""
    if (reason := launch.unavailable(device)) is not None:
        return reason
    if dtype not in DTYPES:
        return f"needs bfloat16, float16 or float32, got {dtype}"
    if device.type == "cpu" and dtype is torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly; use float32 or float16 with it"
    return None


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
    chunk: keys per split of a decode row. slice_chunk, slice_programs: least keys per split of a slice, and most
    programs for it. Bits depend on these three. arch: compute capability in tenths.
    """

    name = "triton"
    graphs = GraphSupport.ALL
    plan_on_host = None

    def __init__(
        self,
        *,
        num_cores: int,
        shared_kib: int,
        chunk: int = DECODE_CHUNK,
        slice_chunk: int = SLICE_CHUNK,
        slice_programs: int = SLICE_PROGRAMS,
        arch: int = FP8_ARCH,
    ) -> None:
        self._programs = PROGRAMS_PER_CORE * num_cores
        self._shared_kib = shared_kib
        self._chunk = chunk
        self._slice_cut = {"chunk": slice_chunk, "max_programs": slice_programs}
        self._arch = arch
        self._step: StepMetadata | None = None

    def supports(
        self, spec: AttendSpec, *, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        """Blocks may have any size. The block table is read once per tile of keys where a tile lies in one block, else
        once per key."""
        if dtype not in DTYPES:
            return f"needs bfloat16, float16 or float32, got {dtype}"
        if kv_dtype is not FP8 and (reason := only_own_dtype(dtype, kv_dtype)) is not None:
            return reason
        if kv_dtype is FP8 and self._arch < FP8_ARCH:
            return f"reads FP8 from compute capability {FP8_ARCH / 10} on, this is {self._arch / 10}"
        if kv_dtype is FP8 and dtype is torch.float32 and spec.head_dim > MAX_FP8_FP32_DIM:
            return f"needs head_dim up to {MAX_FP8_FP32_DIM} for FP8 with {dtype}, got {spec.head_dim}"
        if not 1 <= spec.head_dim <= MAX_HEAD_DIM or spec.head_dim % 8:
            return f"needs head_dim a multiple of 8 up to {MAX_HEAD_DIM}, got {spec.head_dim}"
        if spec.scale <= 0:
            return f"needs a positive scale, got {spec.scale}"
        if spec.rotary_dim % 2 or spec.rotary_dim > spec.head_dim:
            return f"needs an even rotary_dim up to head_dim, got {spec.rotary_dim}"
        if spec.window is not None and spec.window < 1:
            return f"needs a window of 1 or more, got {spec.window}"
        return None

    def plan(self, step: StepMetadata) -> None:
        """Keep the step; the rest happens on the device, in `run`."""
        self._step = step

    def run(
        self,
        q_TKGH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        kv_cache: Tensor,
        *,
        layer: int,
        spec: AttendSpec,
        lse_TN: Tensor | None = None,
    ) -> Tensor:
        """See AttentionBackend.run; rotates q in place. Padding tokens get zeros.

        lse_TN: fp32 [T, N], contiguous, to be filled with the natural log of each query head's softmax denominator, the
        sink's term included; -inf for padding tokens and rows without keys. Two results over disjoint keys can be
        combined by it (then only one of them may have the sinks).
        """
        step = self._step
        assert step is not None, "run() before plan()"
        assert kv_cache.dtype in (q_TKGH.dtype, FP8) and kv_cache.is_contiguous(), (kv_cache.dtype, q_TKGH.dtype)
        num_tokens, num_kv, group, head_dim = q_TKGH.shape
        assert num_tokens == step.num_tokens, (num_tokens, step.num_tokens)
        q_TKGH, k_TKH, v_TKH = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_TKGH, k_TKH, v_TKH))
        keys, values = kv_cache[layer].unbind()
        rotary_dim = spec.rotary_dim if step.cos_TR is not None else 0
        rotary_append(
            q_TKGH,
            k_TKH,
            v_TKH,
            keys,
            values,
            step.kv_pos_T,
            step.cos_TR,
            step.sin_TR,
            rotary_dim=rotary_dim,
            interleaved=spec.rotary_interleaved,
        )
        out_TX = q_TKGH.new_empty(num_tokens, num_kv * group * head_dim)
        size, has_lse = q_TKGH.element_size(), lse_TN is not None
        of = Layer.of(spec, block_size=keys.shape[1], element_bytes=size, has_lse=has_lse, fp8=keys.dtype is FP8)
        if step.num_decode:
            tiles = decode_tiles(num_kv, head_dim, size, self._chunk, fp8=of.fp8)
            attend_decode(q_TKGH, keys, values, out_TX, step, spec, of, tiles, lse_TN, programs=self._programs)
        if num_tokens > step.num_decode:
            cut = prefill_tiles(padded(head_dim), size, self._shared_kib, **self._slice_cut)
            attend_prefill(q_TKGH, keys, values, out_TX, step, spec, of, cut, lse_TN)
            attend_slices(q_TKGH, keys, values, out_TX, step, spec, of, cut, lse_TN, programs=self._programs)
        return out_TX


def aot_variants() -> list[AotVariant]:
    """Head dims, groups, block sizes, windows, sinks and lse, in each dtype; tiles for large and small memory; FP8."""
    layers = {
        "h128_g4": Layer(8, 4, 128, 16, 2),
        "h128_g4_block256": Layer(8, 4, 128, 256, 2),
        "h64_g8_window_sinks": Layer(8, 8, 64, 16, 2, window=128, has_sinks=True, has_lse=True),
        "h256_g8": Layer(1, 8, 256, 64, 2),
        "h80_g1": Layer(32, 1, 80, 32, 2, has_lse=True),
        "h112_g3_window": Layer(4, 3, 112, 16, 2, window=1024),
        "h64_g3": Layer(3, 3, 64, 16, 2),
        "h128_g128": Layer(1, 128, 128, 128, 2),
        "h16_g2": Layer(2, 2, 16, 16, 2),
    }
    variants = []
    for name, layer in layers.items():
        for dtype in ("bf16", "fp16", "fp32"):
            kind = replace(layer, element_bytes=4) if dtype == "fp32" else layer
            variants += attention_decode.layer_variants(kind, name, dtype)
            variants += attention_prefill.layer_variants(kind, name, dtype, LARGE_KIB)
            variants += attention_slices.layer_variants(kind, name, dtype, LARGE_KIB)
        for dtype in FP8_VARIANTS.get(name, ()):
            kind = replace(layer, element_bytes=4 if dtype == "fp32" else 2, fp8=True)
            decode = attention_decode.layer_variants(kind, f"{name}_fp8", dtype)
            variants += [one for one in decode if one.kernel is attention_decode.decode_kernel]
            variants += attention_prefill.layer_variants(kind, f"{name}_fp8", dtype, LARGE_KIB)
            variants += attention_slices.layer_variants(kind, f"{name}_fp8", dtype, LARGE_KIB)[:1]
        if layer.head_dim >= 128:
            variants += attention_prefill.layer_variants(layer, f"{name}_small", "bf16", SMALL_KIB)
    return variants
