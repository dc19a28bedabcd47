"""Paged attention by FlashInfer: its wrappers for decode rows and for ragged slices.

    step -> pages, last_page_len (once per step) -> plan of each kind of layer, decode and slices -> run, every layer

A layer's cache [num_blocks, B, K, H] has FlashInfer's NHD layout. Its planner reads lengths on the host and copies its
schedule from pinned memory. It compiles its kernels with nvcc when they are first planned, once per machine.

Steps that only decode can be captured: a wrapper in CUDA-graph mode for each number of rows and kind of layer reads
pages and schedule at fixed addresses, which `plan_on_host` fills before each replay. The number of programs follows
from the number of rows then (every row is split). Its prefill wrapper wants as many query tokens as it was planned for,
which a padded step has not. Not yet run on a GPU. Legend: kernels/base.py, and P pages of the step.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, GraphSupport, StepMetadata
from megatron_infer.kernels.host_uploads import upload
from megatron_infer.kernels.kv_rounding import only_own_dtype
from megatron_infer.kernels.optional_packages import missing, needs_half, not_on_gpu
from megatron_infer.kernels.torch.cpu_torch import rotate_and_append

PACKAGE, MIN_VERSION = "flashinfer-python", (0, 7, 2)
MODULES = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.rope")
HEAD_DIMS = (64, 128, 256)
BACKEND = "fa2"
"""FlashInfer's backend for every page size, window and GPU from Ampere on."""
WORKSPACE_BYTES = 384 << 20
"""For partial results of split rows; zeros before the first use. FlashInfer recommends 128 MiB, of which plans of its
0.6.18 have reserved more."""
SCHEDULE_BYTES = 1 << 20
"""For the schedule of a wrapper in CUDA-graph mode, on the device and page-locked: about 24 bytes for each program or
row, of which there are some thousands. By default it takes 8 MiB, and there are dozens of these wrappers."""
SCALAR_GROUPS = (1, 2)
"""Query heads per kv head with which decode is faster without tensor cores."""
NUM_TURNS = 2
"""Wrappers used in turn: a plan must not overwrite pinned memory that the step before still copies from."""


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot run here; None: it can."""
    return not_on_gpu(device) or needs_half(dtype) or missing(MODULES, PACKAGE, MIN_VERSION) or no_compiler()


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
    block_size: int
    q_indptr: Tensor
    kv_indptr: Tensor
    """int32 on the host, [rows + 1]: offsets of the rows' tokens and pages."""
    last_page_len: Tensor
    """int32 on the host; 1 .. B."""
    pages_P: Tensor
    """int32 on the device, row after row."""


class _Turns:
    """Wrappers of one kind of layer, used in turn: a plan waits until the copies of the one before in it are done."""

    def __init__(self, make_wrapper: Callable[[], Any], device: torch.device, *, turns: int) -> None:
        self._wrappers = [make_wrapper() for _ in range(turns)]
        self._planned = [torch.cuda.Event() for _ in self._wrappers] if device.type == "cuda" else None
        self._device, self._turn = device, 0

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        self._turn = (self._turn + 1) % len(self._wrappers)
        wrapper = self._wrappers[self._turn]
        if self._planned is not None:
            self._planned[self._turn].synchronize()  # of an earlier step: has long passed
        wrapper.plan(*args, **kwargs)
        if self._planned is not None:
            self._planned[self._turn].record(torch.cuda.current_stream(self._device))
        return wrapper


@dataclass(slots=True)
class _GraphBuffers:
    """Where the graphs' wrappers read the step's pages; the same memory for all, as one step runs at a time."""

    indptr: Tensor
    pages: Tensor
    last_page_len: Tensor

    @classmethod
    def make(cls, block_table: Tensor) -> _GraphBuffers:
        num_rows, num_blocks = block_table.shape
        indptr, pages, last = (block_table.new_zeros(size) for size in (num_rows + 1, num_rows * num_blocks, num_rows))
        return cls(indptr, pages, last)


@dataclass(slots=True)
class _Step:
    meta: StepMetadata
    parts: list[_Part]
    num_tokens: int
    """Those behind are padding."""
    planned: dict[tuple[AttendSpec, bool], Any] = field(default_factory=dict)


class FlashInferAttention:
    """Plans once per step and kind of layer, runs every layer. fp16 and bf16. The last bits of results depend on the
    batch, by whose size FlashInfer splits long rows."""

    name = "flashinfer"
    graphs = GraphSupport.DECODE

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._decode, self._prefill = (importlib.import_module(f"flashinfer.{name}") for name in ("decode", "prefill"))
        self._dtype, self._device = dtype, device
        self._workspace: Tensor | None = None
        self._turns: dict[tuple[AttendSpec, bool], _Turns] = {}
        self._of_graphs: dict[tuple[int, AttendSpec], tuple[_Turns, Any]] = {}
        """(rows, kind of layer) -> a wrapper in CUDA-graph mode, planned for the padded step that was built last."""
        self._buffers: _GraphBuffers | None = None
        self._padded: StepMetadata | None = None
        """The step that was built last, if it is padded."""
        self._meta: StepMetadata | None = None
        self._step: _Step | None = None
        self._block_size = 0

    def supports(
        self, spec: AttendSpec, *, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        if (reason := needs_half(dtype) or only_own_dtype(dtype, kv_dtype)) is not None:
            return reason
        if spec.head_dim not in HEAD_DIMS:
            return f"needs head_dim {', '.join(map(str, HEAD_DIMS))}, got {spec.head_dim}"
        if spec.softcap is not None:
            return "is not asked for capped attention logits"
        if spec.value_start is not None:
            return "has no latent attention: it reads a plane of keys and a plane of values"
        if spec.sinks_N is not None:
            return "has no attention sinks in its fa2 kernels"
        return None

    def plan(self, step: StepMetadata) -> None:
        self._meta, self._step = step, None  # pages need the block size, which the first layer's cache has

    def plan_on_host(self, step: StepMetadata, is_padded: bool) -> None:
        """Fill what the graphs of this many rows read."""
        self._padded = step if is_padded else None
        if not is_padded:
            return
        assert step.num_rows == step.num_decode, "a step with slices has no graph"
        wrappers = [one for one in self._of_graphs.items() if one[0][0] == step.num_rows]
        if wrappers:
            part = self._padded_part(step)
            for (_, spec), (turns, _) in wrappers:
                self._plan_wrapper(turns, part, spec)

    def run(
        self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> Tensor:
        meta = self._meta
        assert meta is not None, "run() before plan()"
        q_TKGH, _, _ = rotate_and_append(q_TKGH, k_TKH, v_TKH, kv_cache[layer], meta, spec)
        cache = kv_cache[layer, 0], kv_cache[layer, 1]
        self._block_size = kv_cache.shape[3]
        q_TNH = q_TKGH.reshape(q_TKGH.shape[0], -1, spec.head_dim)
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        if self._padded is not None:
            self._wrapper_of_graph(self._padded, spec).run(q_TNH, cache, out=out_TNH)
            return out_TNH.flatten(1)
        if self._step is None:
            self._step = _lay_out(meta, self._block_size)
        step = self._step
        for rows in step.parts:
            tokens = slice(rows.first_token, rows.first_token + rows.num_tokens)
            self._planned(step, rows, spec).run(q_TNH[tokens], cache, out=out_TNH[tokens])
        if step.num_tokens < len(out_TNH):
            out_TNH[step.num_tokens :] = 0  # padding tokens must not carry garbage (NaN) onwards
        return out_TNH.flatten(1)

    def _planned(self, step: _Step, part: _Part, spec: AttendSpec) -> Any:
        """The part's wrapper, planned for this kind of layer once per step."""
        key = (spec, part.decode)
        if key not in step.planned:
            if key not in self._turns:
                make = partial(self._new_wrapper, spec, part.decode)
                self._turns[key] = _Turns(make, self._device, turns=NUM_TURNS)
            step.planned[key] = self._plan_wrapper(self._turns[key], part, spec)
        return step.planned[key]

    def _wrapper_of_graph(self, step: StepMetadata, spec: AttendSpec) -> Any:
        """Its wrapper; made where there is none, in the run before a capture."""
        key = (step.num_rows, spec)
        if key not in self._of_graphs:
            if self._buffers is None:
                self._buffers = _GraphBuffers.make(step.block_table)
            make = partial(self._new_wrapper, spec, True, self._buffers, step.num_rows)
            turns = _Turns(make, self._device, turns=1)
            self._of_graphs[key] = turns, self._plan_wrapper(turns, self._padded_part(step), spec)
        return self._of_graphs[key][1]

    def _padded_part(self, step: StepMetadata) -> _Part:
        return _part(step, np.arange(step.num_rows), self._block_size, decode=True)

    def _plan_wrapper(self, turns: _Turns, part: _Part, spec: AttendSpec) -> Any:
        common = {
            "num_qo_heads": spec.num_kv_heads * spec.group_size,
            "num_kv_heads": spec.num_kv_heads,
            "page_size": part.block_size,
            "window_left": -1 if spec.window is None else spec.window - 1,
            "sm_scale": spec.scale,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }
        pages = (part.kv_indptr, part.pages_P, part.last_page_len)
        if part.decode:
            return turns.plan(*pages, head_dim=spec.head_dim, **common)
        return turns.plan(part.q_indptr, *pages, head_dim_qk=spec.head_dim, causal=True, **common)

    def _new_wrapper(
        self, spec: AttendSpec, decode: bool, buffers: _GraphBuffers | None = None, num_rows: int = 0
    ) -> Any:
        """buffers, num_rows: of a wrapper in CUDA-graph mode."""
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        if not decode:
            return self._prefill.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=BACKEND)
        kind = {"use_tensor_cores": spec.group_size not in SCALAR_GROUPS, "backend": BACKEND}
        make = self._decode.BatchDecodeWithPagedKVCacheWrapper
        if buffers is None:
            return make(self._workspace, "NHD", **kind)
        wrapper = make(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            paged_kv_indptr_buffer=buffers.indptr[: num_rows + 1],
            paged_kv_indices_buffer=buffers.pages,
            paged_kv_last_page_len_buffer=buffers.last_page_len[:num_rows],
            **kind,
        )
        schedule = torch.empty(SCHEDULE_BYTES, dtype=torch.uint8, device=self._device)
        wrapper.reset_workspace_buffer(self._workspace, schedule)
        return wrapper


def _lay_out(meta: StepMetadata, block_size: int) -> _Step:
    """The places of the rows' pages and tokens, without the rows that have no tokens (padding)."""
    rows = np.flatnonzero(meta.q_len[: meta.num_rows] > 0)
    decode, slices = rows[rows < meta.num_decode], rows[rows >= meta.num_decode]
    parts = [_part(meta, some, block_size, decode=some is decode) for some in (decode, slices) if len(some)]
    return _Step(meta, parts, int(meta.q_len[rows].sum()))


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
        block_size=block_size,
        q_indptr=torch.from_numpy(q_indptr),
        kv_indptr=torch.from_numpy(kv_indptr),
        last_page_len=torch.from_numpy((kv_len - (counts - 1) * block_size).astype(np.int32)),
        pages_P=pages_P,
    )


def _indptr(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
