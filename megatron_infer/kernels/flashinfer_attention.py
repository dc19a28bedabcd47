"""Paged attention by FlashInfer: its wrappers for decode rows and for ragged slices, its append to the cache.

    step -> pages, last_page_len (once per step) -> plan of each kind of layer, decode and slices -> run, every layer

A layer's cache [num_blocks, B, K, H] has FlashInfer's NHD layout. Its planner reads lengths on the host and copies its
schedule from pinned memory, so that nothing here can be captured. It compiles its kernels with nvcc when they are first
planned, once per machine. Legend: kernels/base.py, and P pages of the step.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, StepMetadata
from megatron_infer.kernels.cpu_torch import apply_rotary
from megatron_infer.kernels.host_uploads import upload
from megatron_infer.kernels.kv_rounding import only_own_dtype
from megatron_infer.kernels.optional_packages import missing, not_on_gpu

PACKAGE, MIN_VERSION = "flashinfer-python", (0, 7, 2)
MODULES = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.page", "flashinfer.rope")
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
BACKEND = "fa2"
"""FlashInfer's backend for every page size, window and GPU from Ampere on."""
WORKSPACE_BYTES = 384 << 20
"""For partial results of split rows; zeros before the first use. FlashInfer recommends 128 MiB, of which plans of its
0.6.18 have reserved more."""
SCALAR_GROUPS = (1, 2)
"""Query heads per kv head with which decode is faster without tensor cores."""
NUM_TURNS = 2
"""Wrappers used in turn: a plan must not overwrite pinned memory that the step before still copies from."""


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot run here; None: it can."""
    reason = not_on_gpu(device)
    if reason is None and dtype not in DTYPES:
        reason = f"needs float16 or bfloat16, got {dtype}"
    return reason or missing(MODULES, PACKAGE, MIN_VERSION) or no_compiler()


def no_compiler() -> str | None:
    """Why FlashInfer cannot compile a kernel; None: it can, or need not."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if shutil.which("nvcc") or Path(home, "bin", "nvcc").exists() or importlib.util.find_spec("flashinfer_jit_cache"):
        return None
    return "compiles its kernels when they are first used, and there is neither nvcc nor flashinfer-jit-cache"


def make(device: torch.device, dtype: torch.dtype) -> FlashInferAttention:
    return FlashInferAttention(device, dtype)


@dataclass(slots=True)
class _Part:
    """The rows of one wrapper: all decode rows, or all slices."""

    decode: bool
    first_token: int
    num_tokens: int
    q_indptr: Tensor
    kv_indptr: Tensor
    """int32 on the host, [rows + 1]: offsets of the rows' tokens and pages."""
    last_page_len: Tensor
    """int32 on the host; 1 .. B."""
    pages_P: Tensor
    """int32 on the device, row after row."""


class _Wrappers:
    """FlashInfer's wrappers of one kind of layer, used in turn from step to step."""

    def __init__(self, make_wrapper: Any, device: torch.device) -> None:
        self._wrappers = [make_wrapper() for _ in range(NUM_TURNS)]
        self._planned = [torch.cuda.Event() for _ in self._wrappers] if device.type == "cuda" else None
        self._device, self._turn = device, 0

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        self._turn = (self._turn + 1) % NUM_TURNS
        wrapper = self._wrappers[self._turn]
        if self._planned is not None:
            self._planned[self._turn].synchronize()  # of two steps ago: has long passed
        wrapper.plan(*args, **kwargs)
        if self._planned is not None:
            self._planned[self._turn].record(torch.cuda.current_stream(self._device))
        return wrapper


@dataclass(slots=True)
class _Step:
    meta: StepMetadata
    block_size: int
    parts: list[_Part]
    batch_T: Tensor
    position_T: Tensor
    """int32: the row of `whole` of each token that is no padding, and its position in the sequence."""
    whole: _Part
    """All rows, for appending to the cache."""
    planned: dict[tuple[AttendSpec, bool], Any] = field(default_factory=dict)


class FlashInferAttention:
    """Plans once per step and kind of layer, runs every layer. fp16 and bf16. The last bits of results depend on the
    batch, by whose size FlashInfer splits long rows."""

    name = "flashinfer"
    graph_safe = False

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._decode, self._prefill, self._page = (
            importlib.import_module(f"flashinfer.{name}") for name in ("decode", "prefill", "page")
        )
        self._dtype, self._device = dtype, device
        self._workspace: Tensor | None = None
        self._wrappers: dict[tuple[AttendSpec, bool], _Wrappers] = {}
        self._meta: StepMetadata | None = None
        self._step: _Step | None = None

    def supports(
        self, spec: AttendSpec, *, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        if dtype not in DTYPES:
            return f"needs float16 or bfloat16, got {dtype}"
        if (reason := only_own_dtype(dtype, kv_dtype)) is not None:
            return reason
        if spec.head_dim not in HEAD_DIMS:
            return f"needs head_dim {', '.join(map(str, HEAD_DIMS))}, got {spec.head_dim}"
        if spec.sinks_N is not None:
            return "has no attention sinks in its fa2 kernels"
        return None

    def plan(self, step: StepMetadata) -> None:
        self._meta, self._step = step, None  # pages need the block size, which the first layer's cache has

    def run(
        self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> Tensor:
        meta = self._meta
        assert meta is not None, "run() before plan()"
        if self._step is None:
            self._step = _lay_out(meta, kv_cache.shape[3])
        step = self._step
        if spec.rotary_dim and meta.cos_TR is not None and meta.sin_TR is not None:
            dim, interleaved = spec.rotary_dim, spec.rotary_interleaved
            q_TKGH = apply_rotary(q_TKGH, meta.cos_TR, meta.sin_TR, dim=dim, interleaved=interleaved)
            k_TKH = apply_rotary(k_TKH, meta.cos_TR, meta.sin_TR, dim=dim, interleaved=interleaved)
        cache = kv_cache[layer, 0], kv_cache[layer, 1]
        used = len(step.batch_T)
        if not used:
            return torch.zeros_like(q_TKGH, memory_format=torch.contiguous_format).flatten(1)
        self._page.append_paged_kv_cache(
            k_TKH[:used],
            v_TKH[:used],
            step.batch_T,
            step.position_T,
            cache,
            step.whole.pages_P,
            step.whole.kv_indptr,
            step.whole.last_page_len,
            kv_layout="NHD",
        )
        q_TNH = q_TKGH.reshape(q_TKGH.shape[0], -1, spec.head_dim)
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        for part in step.parts:
            tokens = slice(part.first_token, part.first_token + part.num_tokens)
            self._planned(step, part, spec).run(q_TNH[tokens], cache, out=out_TNH[tokens])
        if used < len(out_TNH):
            out_TNH[used:] = 0  # padding tokens must not carry garbage (NaN) onwards
        return out_TNH.flatten(1)

    def _planned(self, step: _Step, part: _Part, spec: AttendSpec) -> Any:
        """The part's wrapper, planned for this kind of layer once per step."""
        key = (spec, part.decode)
        found = step.planned.get(key)
        if found is not None:
            return found
        if key not in self._wrappers:
            self._wrappers[key] = _Wrappers(lambda: self._new_wrapper(spec, part.decode), self._device)
        heads = {"num_qo_heads": spec.num_kv_heads * spec.group_size, "num_kv_heads": spec.num_kv_heads}
        common = {
            "window_left": -1 if spec.window is None else spec.window - 1,
            "sm_scale": spec.scale,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }
        pages = (part.kv_indptr, part.pages_P, part.last_page_len)
        if part.decode:
            found = self._wrappers[key].plan(
                *pages, **heads, head_dim=spec.head_dim, page_size=step.block_size, **common
            )
        else:
            found = self._wrappers[key].plan(
                part.q_indptr,
                *pages,
                **heads,
                head_dim_qk=spec.head_dim,
                page_size=step.block_size,
                causal=True,
                **common,
            )
        step.planned[key] = found
        return found

    def _new_wrapper(self, spec: AttendSpec, decode: bool) -> Any:
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        if decode:
            return self._decode.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "NHD", use_tensor_cores=spec.group_size not in SCALAR_GROUPS, backend=BACKEND
            )
        return self._prefill.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=BACKEND)


def _lay_out(meta: StepMetadata, block_size: int) -> _Step:
    """The places of the rows' pages and tokens, without the rows that have no tokens (padding)."""
    rows = np.flatnonzero(meta.q_len[: meta.num_rows] > 0)
    decode, slices = rows[rows < meta.num_decode], rows[rows >= meta.num_decode]
    whole = _part(meta, rows, block_size, decode=False)
    parts = [_part(meta, some, block_size, decode=some is decode) for some in (decode, slices) if len(some)]
    device = meta.block_table.device
    batch_T = upload(np.repeat(np.arange(len(rows), dtype=np.int32), meta.q_len[rows]), device)
    position_T = meta.positions_T[: len(batch_T)].int()
    whole.kv_indptr, whole.last_page_len = (
        upload(host.numpy(), device) for host in (whole.kv_indptr, whole.last_page_len)
    )
    return _Step(meta, block_size, parts, batch_T, position_T, whole)


def _part(meta: StepMetadata, rows: np.ndarray, block_size: int, *, decode: bool) -> _Part:
    """Example: B=16, kv_len=45 -> 3 pages, 13 keys in the last."""
    kv_len, q_len = meta.kv_len[rows], meta.q_len[rows]
    counts = -(-kv_len // block_size)
    kv_indptr, q_indptr = _indptr(counts), _indptr(q_len)
    # Entry i of the flat table is page i - kv_indptr[r] of its row r.
    entries = np.arange(kv_indptr[-1], dtype=np.int64)
    entries += np.repeat(meta.table_row[rows].astype(np.int64) * meta.block_table.shape[1] - kv_indptr[:-1], counts)
    device = meta.block_table.device
    pages_P = meta.block_table.flatten().index_select(0, upload(entries, device))
    return _Part(
        decode=decode,
        first_token=int(meta.cu_q[rows[0]]) if len(rows) else 0,
        num_tokens=int(q_indptr[-1]),
        q_indptr=torch.from_numpy(q_indptr),
        kv_indptr=torch.from_numpy(kv_indptr),
        last_page_len=torch.from_numpy((kv_len - (counts - 1) * block_size).astype(np.int32)),
        pages_P=pages_P,
    )


def _indptr(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
