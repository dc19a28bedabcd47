"""Paged attention by flash-attn: version 2 (Ampere and newer, blocks of 256) or version 3 (Hopper, any block).

The kernels get lengths, offsets and block tables as device tensors; the host reads only the shape of a step. So a step
can be captured, and a replay uses the tensors' content of that time. According to the sources (not yet run on a GPU):

* max_seqlen_q and max_seqlen_k are numbers that a graph repeats. They size grids, splits and scratch; a program behind
  the end of its row, which it reads from the device, returns. So they must be upper bounds for every replay, which a
  graph's max_q_len and max_kv_len are; the maxima of the captured step would cut off longer keys.
* Version 2 splits the keys of a ragged call only if max_seqlen_q is 1, which it never is here (FEWEST_QUERIES); with a
  block table it uses the kernel for splits anyway, with one split of max_seqlen_k keys. Decode is split by the width of
  the block table, a shape; a split behind a row's keys adds nothing.
* Version 3 makes its schedule (splits of each row, order of tiles) with a kernel in the call, from the same tensors.
  Its partial sums are sized for the most splits that the shape allows, for every query of the call (SPLIT_BYTES).

Neither waits for the device; their memory comes from torch, which in a graph is its pool. Legend: kernels/base.py.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, GraphSupport, StepMetadata
from megatron_infer.kernels.kv_rounding import only_own_dtype
from megatron_infer.kernels.optional_packages import missing, not_on_gpu
from megatron_infer.kernels.torch.cpu_torch import apply_rotary

PACKAGE, MIN_VERSION, MODULE = "flash-attn", (2, 7, 3), "flash_attn"
PACKAGE_3, MODULE_3 = "flash-attn-3", "flash_attn_interface"
"""The distribution and the module that flash-attn's `hopper` folder installs."""
CONFIG_3 = "flash_attn_config"
"""Notes with which parts version 3 is built."""
NEEDED_OF_BUILD = ("PAGEDKV", "VARLEN")
BLOCK = 256
"""Version 2 needs blocks of a multiple of this many keys."""
MAX_HEAD_DIM = 256
HEAD_DIMS_3 = (64, 96, 128, 192, 256)
"""Those that version 3 is built for; others are rounded up to the next."""
DTYPES = (torch.float16, torch.bfloat16)
HOPPER = 9
MOST_SPLITS = 128
"""Pieces into which version 3 cuts a row's keys at most, by its own choice."""
SPLIT_BYTES = 256 << 20
"""Partial sums of that many pieces, fp32 for each query head of a step's slices: where they would take more, version 3
may not cut. Such a step has tiles enough for a GPU."""
FEWEST_QUERIES = 2
"""Least max_seqlen_q of a ragged call: with 1, version 2 assumes exactly one query in every row."""


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why flash-attn cannot run here; None: one of its versions can."""
    reason = not_on_gpu(device)
    if reason is None and dtype not in DTYPES:
        reason = f"needs float16 or bfloat16, got {dtype}"
    if reason is not None or no_version_3(device) is None:
        return reason
    return missing((MODULE,), PACKAGE, MIN_VERSION)


def make(device: torch.device, dtype: torch.dtype) -> FlashAttention:
    if no_version_3(device) is None:
        return FlashAttention(Version3(importlib.import_module(MODULE_3)))
    return FlashAttention(Version2(importlib.import_module(MODULE)))


def no_version_3(device: torch.device) -> str | None:
    """Why version 3 cannot run here; None: it can."""
    if device.type != "cuda" or (major := torch.cuda.get_device_capability(device)[0]) != HOPPER:
        return f"runs on Hopper (compute capability {HOPPER}.0)" + (
            "" if device.type != "cuda" else f", {device} is of capability {major}.x"
        )
    if (reason := missing((MODULE_3,), PACKAGE_3)) is not None:
        return reason
    if "page_table" not in inspect.signature(importlib.import_module(MODULE_3).flash_attn_with_kvcache).parameters:
        return f"{PACKAGE_3} takes no page_table: it is of before flash-attn 2.7.3"
    if lacks := [flag for flag in NEEDED_OF_BUILD if _build_flags().get(f"FLASHATTENTION_DISABLE_{flag}")]:
        return f"{PACKAGE_3} is built without {', '.join(lacks)}"
    return None


def _build_flags() -> Mapping[str, bool]:
    """What version 3 is built without, as its build notes it; older ones note nothing."""
    try:
        return dict(importlib.import_module(CONFIG_3).CONFIG["build_flags"])
    except ImportError:
        return {}


class Kernels(Protocol):
    """What differs between the versions. A window is (keys before, keys after), -1 for no bound."""

    version: int
    block: int
    """Block sizes are multiples of it."""

    def refusal(self, spec: AttendSpec, dtype: torch.dtype) -> str | None:
        """Why this build of it cannot run the layer; None: it can."""
        ...

    def decode(
        self, q_RNH: Tensor, cache: tuple[Tensor, Tensor], table_RM: Tensor, kv_len_R: Tensor, spec: AttendSpec
    ) -> Tensor:
        """One query per row -> [R, N, H]."""
        ...

    def ragged(
        self,
        q_TNH: Tensor,
        cache: tuple[Tensor, Tensor],
        table_RM: Tensor,
        kv_len_R: Tensor,
        cu_q_R1: Tensor,
        cu_k_R1: Tensor,
        spec: AttendSpec,
        *,
        max_q_len: int,
        max_kv_len: int,
    ) -> Tensor:
        """Any number of queries per row, at its last positions -> [T, N, H]. cu_q, cu_k: offsets of rows, [R + 1]."""
        ...


def _window(spec: AttendSpec) -> tuple[int, int]:
    return (-1, -1) if spec.window is None else (spec.window - 1, 0)


class Version2:
    """flash_attn, from 2.7.3 on."""

    version, block = 2, BLOCK

    def __init__(self, package: Any) -> None:
        self._decode, self._varlen = package.flash_attn_with_kvcache, package.flash_attn_varlen_func

    def refusal(self, spec: AttendSpec, dtype: torch.dtype) -> str | None:
        return None

    def decode(
        self, q_RNH: Tensor, cache: tuple[Tensor, Tensor], table_RM: Tensor, kv_len_R: Tensor, spec: AttendSpec
    ) -> Tensor:
        return self._decode(
            q_RNH.unsqueeze(1),
            *cache,
            cache_seqlens=kv_len_R,
            block_table=table_RM,
            softmax_scale=spec.scale,
            causal=True,
            window_size=_window(spec),
        ).squeeze(1)

    def ragged(
        self,
        q_TNH: Tensor,
        cache: tuple[Tensor, Tensor],
        table_RM: Tensor,
        kv_len_R: Tensor,
        cu_q_R1: Tensor,
        cu_k_R1: Tensor,
        spec: AttendSpec,
        *,
        max_q_len: int,
        max_kv_len: int,
    ) -> Tensor:
        return self._varlen(
            q_TNH,
            *cache,
            cu_seqlens_q=cu_q_R1,
            cu_seqlens_k=cu_k_R1,
            max_seqlen_q=max(max_q_len, FEWEST_QUERIES),
            max_seqlen_k=max_kv_len,
            softmax_scale=spec.scale,
            causal=True,
            window_size=_window(spec),
            block_table=table_RM,
        )


class Version3:
    """flash_attn_interface, on Hopper only."""

    version, block = 3, 1

    def __init__(self, package: Any) -> None:
        self._attend = package.flash_attn_with_kvcache
        self._flags = _build_flags()

    def refusal(self, spec: AttendSpec, dtype: torch.dtype) -> str | None:
        def is_without(part: str) -> bool:
            return bool(self._flags.get(f"FLASHATTENTION_DISABLE_{part}"))

        if spec.window is not None and is_without("LOCAL"):
            return f"{PACKAGE_3} is built without windows"
        if dtype is torch.float16 and is_without("FP16"):
            return f"{PACKAGE_3} is built without float16"
        if all(is_without(f"HDIM{dim}") for dim in HEAD_DIMS_3 if dim >= spec.head_dim):
            return f"{PACKAGE_3} is built without head dims of {spec.head_dim} and more"
        return None

    def decode(
        self, q_RNH: Tensor, cache: tuple[Tensor, Tensor], table_RM: Tensor, kv_len_R: Tensor, spec: AttendSpec
    ) -> Tensor:
        return self._attend(
            q_RNH.unsqueeze(1),
            *cache,
            cache_seqlens=kv_len_R,
            page_table=table_RM,
            softmax_scale=spec.scale,
            causal=True,
            window_size=_window(spec),
        ).squeeze(1)

    def ragged(
        self,
        q_TNH: Tensor,
        cache: tuple[Tensor, Tensor],
        table_RM: Tensor,
        kv_len_R: Tensor,
        cu_q_R1: Tensor,
        cu_k_R1: Tensor,
        spec: AttendSpec,
        *,
        max_q_len: int,
        max_kv_len: int,
    ) -> Tensor:
        return self._attend(
            q_TNH,
            *cache,
            cache_seqlens=kv_len_R,
            page_table=table_RM,
            cu_seqlens_q=cu_q_R1,
            max_seqlen_q=max(max_q_len, FEWEST_QUERIES),
            softmax_scale=spec.scale,
            causal=True,
            window_size=_window(spec),
            num_splits=1 if 4 * MOST_SPLITS * q_TNH.numel() > SPLIT_BYTES else 0,
        )


class FlashAttention:
    """Decode rows in one call, slices in another. Last bits depend on the batch, whose size decides splits of rows."""

    name = "flash_attn"
    graphs = GraphSupport.ALL
    plan_on_host = None

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._step: StepMetadata | None = None
        self._table_RM: Tensor | None = None
        self._cu_q_R1: Tensor | None = None
        self._cu_k_R1: Tensor | None = None
        self._padding_T11: Tensor | None = None

    def supports(
        self, spec: AttendSpec, *, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        if dtype not in DTYPES:
            return f"needs float16 or bfloat16, got {dtype}"
        if (reason := only_own_dtype(dtype, kv_dtype)) is not None:
            return reason
        if block_size % self._kernels.block:
            return (
                f"version {self._kernels.version} needs blocks of a multiple of {self._kernels.block} tokens, "
                f"got block_size_tokens={block_size}"
            )
        if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 8:
            return f"needs a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}, got {spec.head_dim}"
        if spec.sinks_N is not None:
            return "has no attention sinks"
        return self._kernels.refusal(spec, dtype)

    def plan(self, step: StepMetadata) -> None:
        """The launches depend on shapes alone; nothing waits."""
        decode = step.num_decode
        self._step = step
        self._table_RM = step.block_table.index_select(0, step.table_row_R[: step.num_rows])
        self._cu_q_R1 = self._cu_k_R1 = self._padding_T11 = None
        if step.num_rows > decode:
            self._cu_q_R1 = step.cu_q_R1[decode : step.num_rows + 1] - decode
            self._cu_k_R1 = torch.zeros_like(self._cu_q_R1)
            torch.cumsum(step.kv_len_R[decode : step.num_rows], 0, out=self._cu_k_R1[1:])
            tokens = torch.arange(step.num_tokens - decode, device=self._cu_q_R1.device)
            self._padding_T11 = (tokens >= self._cu_q_R1[-1]).view(-1, 1, 1)

    def run(
        self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> Tensor:
        step, table_RM = self._step, self._table_RM
        assert step is not None and table_RM is not None, "run() before plan()"
        if spec.rotary_dim and step.cos_TR is not None and step.sin_TR is not None:
            dim, interleaved = spec.rotary_dim, spec.rotary_interleaved
            q_TKGH = apply_rotary(q_TKGH, step.cos_TR, step.sin_TR, dim=dim, interleaved=interleaved)
            k_TKH = apply_rotary(k_TKH, step.cos_TR, step.sin_TR, dim=dim, interleaved=interleaved)
        cache = kv_cache[layer, 0], kv_cache[layer, 1]
        for part, new_TKH in zip(cache, (k_TKH, v_TKH), strict=True):
            part.view(-1, *part.shape[2:]).index_copy_(0, step.kv_pos_T, new_TKH)
        decode, rows = step.num_decode, step.num_rows
        q_TNH = q_TKGH.reshape(q_TKGH.shape[0], -1, spec.head_dim)
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        if decode:
            kv_len_R = step.kv_len_R[:decode]
            out_TNH[:decode] = self._kernels.decode(q_TNH[:decode], cache, table_RM[:decode], kv_len_R, spec)
        if rows > decode:
            assert self._cu_q_R1 is not None and self._cu_k_R1 is not None and self._padding_T11 is not None
            mixed_TNH = self._kernels.ragged(
                q_TNH[decode:],
                cache,
                table_RM[decode:],
                step.kv_len_R[decode:rows],
                self._cu_q_R1,
                self._cu_k_R1,
                spec,
                max_q_len=step.max_q_len,
                max_kv_len=step.max_kv_len,
            )
            # The kernel does not write padding tokens: what their memory held must not reach the next layer.
            torch.where(self._padding_T11, mixed_TNH.new_zeros(()), mixed_TNH, out=out_TNH[decode:])
        elif decode < len(out_TNH):
            out_TNH[decode:] = 0
        return out_TNH.flatten(1)
