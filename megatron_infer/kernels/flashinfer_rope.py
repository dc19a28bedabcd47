"""Queries and keys rotated by FlashInfer's fused kernel, in front of any attention backend.

One launch rotates both in place. cos and sin are the step's, as for every other backend, so that the content of the
cache differs from theirs by at most the rounding of one product. Legend: kernels/base.py, and R rotary dims.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec, AttentionBackend, StepMetadata
from megatron_infer.kernels.optional_packages import missing, needs_half, not_on_gpu

PACKAGE, MIN_VERSION = "flashinfer-python", (0, 7, 2)
MODULES = ("flashinfer", "flashinfer.rope")
HEAD_DIMS = (64, 128, 256)


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot run here; None: it can."""
    return not_on_gpu(device) or needs_half(dtype) or missing(MODULES, PACKAGE, MIN_VERSION) or no_compiler()


def no_compiler() -> str | None:
    """Why FlashInfer cannot compile a kernel; None: it can, or need not."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if shutil.which("nvcc") or Path(home, "bin", "nvcc").exists() or importlib.util.find_spec("flashinfer_jit_cache"):
        return None
    return "compiles its kernels when they are first used, and there is neither nvcc nor flashinfer-jit-cache"


def refusal(spec: AttendSpec, dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot rotate this layer's heads; None: it can, or there is nothing to rotate."""
    if (reason := needs_half(dtype)) is not None or not spec.rotary_dim:
        return reason
    if spec.rotary_dim % 16 or spec.head_dim not in HEAD_DIMS:
        return f"needs head_dim 64, 128 or 256 and rotary dims in sixteens, got {spec.head_dim} and {spec.rotary_dim}"
    return None


class FlashInferRope:
    """An attention backend behind FlashInfer's rotation: it gets rotated queries and keys."""

    def __init__(self, behind: AttentionBackend) -> None:
        self._behind = behind
        self.name = behind.name
        self.graph_safe = behind.graph_safe
        self._rotate = importlib.import_module("flashinfer.rope").apply_rope_with_cos_sin_cache_inplace
        self._step: StepMetadata | None = None
        self._angles: dict[tuple[int, int, bool], Tensor] = {}
        self._token_T: Tensor | None = None
        self._unrotated: dict[int, tuple[AttendSpec, AttendSpec]] = {}
        """By identity: equal specs may have different sinks."""

    def supports(
        self, spec: AttendSpec, *, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        return refusal(spec, dtype) or self._behind.supports(
            spec, dtype=dtype, block_size=block_size, kv_dtype=kv_dtype
        )

    def plan(self, step: StepMetadata) -> None:
        self._step = step
        self._angles.clear()
        self._token_T = None
        self._behind.plan(step)

    def run(
        self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> Tensor:
        step = self._step
        assert step is not None, "run() before plan()"
        if not spec.rotary_dim or step.cos_TR is None:
            return self._behind.run(q_TKGH, k_TKH, v_TKH, kv_cache, layer=layer, spec=spec)
        q_TNH = q_TKGH.reshape(q_TKGH.shape[0], -1, spec.head_dim)
        if self._token_T is None:
            self._token_T = torch.arange(len(q_TNH), dtype=torch.int32, device=q_TNH.device)
        self._rotate(
            self._token_T, q_TNH, k_TKH, spec.head_dim, self._angles_of(step, spec), is_neox=not spec.rotary_interleaved
        )
        pair = self._unrotated.get(id(spec))
        if pair is None:
            pair = self._unrotated[id(spec)] = (spec, dataclasses.replace(spec, rotary_dim=0))
        return self._behind.run(q_TNH.view(q_TKGH.shape), k_TKH, v_TKH, kv_cache, layer=layer, spec=pair[1])

    def _angles_of(self, step: StepMetadata, spec: AttendSpec) -> Tensor:
        """fp32 [T, R]: cos in the first half, sin in the second, one of each for a pair of dims; row t is token t's."""
        key = (spec.rotary_at, spec.rotary_dim, spec.rotary_interleaved)
        found = self._angles.get(key)
        if found is None:
            dim = spec.rotary_dim
            # Both halves of the step's table (interleaved: both entries of a pair) hold the same angle.
            pick = slice(0, dim, 2) if spec.rotary_interleaved else slice(0, dim // 2)
            rotation = step.rotation(spec)
            assert rotation is not None
            found = self._angles[key] = torch.cat([part[:, pick] for part in rotation], dim=-1).float()
        return found
