"""Paged attention by flash-attn 3, on Hopper, with blocks of any size.

The kernels get lengths, offsets and block tables as device tensors; the host reads only the shape of a step. So a step
can be captured, and a replay uses the tensors' content of that time. According to the source (not yet run on a GPU):

* max_seqlen_q is a number that a graph repeats. It sizes grids, splits and scratch; a program after the end of its row,
  which it reads from the device, returns. So it must be an upper bound for every replay, which a graph's max_q_len is.
* The schedule (splits of each row, order of tiles) is made by a kernel in the call, from the same tensors. Partial sums
  are sized for the most splits that the shape allows, for every query of the call (SPLIT_BYTES).

No call waits for the device; its memory comes from torch, which in a graph is its pool. Legend: kernels/base.py.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, GraphSupport, StepMetadata
from megatron_infer.kernels.kv_rounding import only_own_dtype
from megatron_infer.kernels.optional_packages import dotted, missing, needs_half, not_on_gpu
from megatron_infer.kernels.torch.cpu_torch import rotate_and_append

PACKAGE, MODULE = "flash-attn-3", "flash_attn_interface"
"""The distribution and the module that flash-attn's `hopper` folder installs."""
OLDEST_SOURCE = (2, 7, 3)
"""The flash-attn release from whose `hopper` folder on it takes a block table."""
CONFIG = "flash_attn_config"
"""Notes with which parts it is built."""
NEEDED_OF_BUILD = ("PAGEDKV", "VARLEN")
HEAD_DIMS = (64, 96, 128, 192, 256)
"""Those that it is built for; others are rounded up to the next."""
HOPPER = 9
MOST_SPLITS = 128
"""Pieces into which it cuts a row's keys at most, by its own choice."""
SPLIT_BYTES = 256 << 20
"""Partial sums of that many pieces, fp32 for each query head of a step's slices: where they would take more, it may not
cut. Such a step has tiles enough for a GPU."""
FEWEST_QUERIES = 2
"""Least max_seqlen_q of a ragged call: 1 would promise exactly one query in every row."""
MAX_HEAD_DIM = 256
"""head_dim is a multiple of 8 up to it."""


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why flash-attn 3 cannot run here; None: it can."""
    return not_on_gpu(device) or needs_half(dtype) or _not_on_hopper(device) or missing((MODULE,), PACKAGE) or _unfit()


def make(device: torch.device, dtype: torch.dtype) -> FlashAttention:
    return FlashAttention(importlib.import_module(MODULE))


def _not_on_hopper(device: torch.device) -> str | None:
    if (major := torch.cuda.get_device_capability(device)[0]) == HOPPER:
        return None
    return f"runs on Hopper (compute capability {HOPPER}.0), {device} is of capability {major}.x"


def _unfit() -> str | None:
    """Why the installed build cannot be used; None: it can."""
    if "page_table" not in inspect.signature(importlib.import_module(MODULE).flash_attn_with_kvcache).parameters:
        return f"{PACKAGE} takes no page_table: it is of before flash-attn {dotted(OLDEST_SOURCE)}"
    if lacks := [part for part in NEEDED_OF_BUILD if part in _left_out()]:
        return f"{PACKAGE} is built without {', '.join(lacks)}"
    return None


def _left_out() -> frozenset[str]:
    """Parts that it is built without, as its build notes them; older builds note nothing."""
    try:
        flags: Mapping[str, bool] = importlib.import_module(CONFIG).CONFIG["build_flags"]
    except ImportError:
        return frozenset()
    return frozenset(name.removeprefix("FLASHATTENTION_DISABLE_") for name, is_set in flags.items() if is_set)


class FlashAttention:
    """Decode rows in one call, slices in another. Last bits depend on the batch, whose size decides splits of rows."""

    name = "flash_attn"
    graphs = GraphSupport.ALL
    plan_on_host = None

    def __init__(self, package: Any) -> None:
        self._attend = package.flash_attn_with_kvcache
        self._lacks = _left_out()
        self._step: StepMetadata | None = None
        self._table_RM: Tensor | None = None
        self._cu_q_R1: Tensor | None = None
        """Token offsets of the slices; None: the step only decodes."""
        self._padding_T11: Tensor | None = None

    def supports(
        self, spec: AttendSpec, *, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        if (reason := needs_half(dtype) or only_own_dtype(dtype, kv_dtype)) is not None:
            return reason
        if spec.head_dim > MAX_HEAD_DIM or spec.head_dim % 8:
            return f"needs a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}, got {spec.head_dim}"
        if spec.softcap is not None:
            return "is not asked for capped attention logits"
        if spec.value_start is not None:
            return "has no latent attention: it reads a plane of keys and a plane of values"
        if spec.sinks_N is not None:
            return "has no attention sinks"
        if spec.window is not None and "LOCAL" in self._lacks:
            return f"{PACKAGE} is built without windows"
        if dtype is torch.float16 and "FP16" in self._lacks:
            return f"{PACKAGE} is built without float16"
        if all(f"HDIM{dim}" in self._lacks for dim in HEAD_DIMS if dim >= spec.head_dim):
            return f"{PACKAGE} is built without head dims of {spec.head_dim} and more"
        return None

    def plan(self, step: StepMetadata) -> None:
        """The launches depend on shapes alone; nothing waits."""
        decode = step.num_decode
        self._step = step
        self._table_RM = step.block_table.index_select(0, step.table_row_R[: step.num_rows])
        self._cu_q_R1 = self._padding_T11 = None
        if step.num_rows > decode:
            self._cu_q_R1 = step.cu_q_R1[decode : step.num_rows + 1] - decode
            tokens = torch.arange(step.num_tokens - decode, device=self._cu_q_R1.device)
            self._padding_T11 = (tokens >= self._cu_q_R1[-1]).view(-1, 1, 1)

    def run(
        self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> Tensor:
        step, table_RM = self._step, self._table_RM
        assert step is not None and table_RM is not None, "run() before plan()"
        q_TKGH, _, _ = rotate_and_append(q_TKGH, k_TKH, v_TKH, kv_cache[layer], step, spec)
        decode, rows = step.num_decode, step.num_rows
        q_TNH = q_TKGH.reshape(q_TKGH.shape[0], -1, spec.head_dim)
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        common = {
            "softmax_scale": spec.scale,
            "causal": True,
            "window_size": (-1, -1) if spec.window is None else (spec.window - 1, 0),  # keys before, keys after
        }
        cache = kv_cache[layer, 0], kv_cache[layer, 1]
        if decode:
            out_TNH[:decode] = self._attend(
                q_TNH[:decode].unsqueeze(1),
                *cache,
                cache_seqlens=step.kv_len_R[:decode],
                page_table=table_RM[:decode],
                **common,
            ).squeeze(1)
        if self._cu_q_R1 is not None:
            assert self._padding_T11 is not None
            slices_TNH = q_TNH[decode:]
            mixed_TNH = self._attend(
                slices_TNH,
                *cache,
                cache_seqlens=step.kv_len_R[decode:rows],
                page_table=table_RM[decode:],
                cu_seqlens_q=self._cu_q_R1,
                max_seqlen_q=max(step.max_q_len, FEWEST_QUERIES),
                num_splits=1 if 4 * MOST_SPLITS * slices_TNH.numel() > SPLIT_BYTES else 0,
                **common,
            )
            # The kernel does not write padding tokens: what their memory held must not reach the next layer.
            torch.where(self._padding_T11, mixed_TNH.new_zeros(()), mixed_TNH, out=out_TNH[decode:])
        elif decode < len(out_TNH):
            out_TNH[decode:] = 0
        return out_TNH.flatten(1)
