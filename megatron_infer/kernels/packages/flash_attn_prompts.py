"""flash-attn 3 for prompts: the cases in which it is known to be faster than Triton's kernels.

Known are its authors' figures for contiguous keys (arXiv:2407.08608): 650 to 700 TFLOP/s of bf16 on an H100, where
kernels of flash-attn 2's kind, as Triton's are, reach 350 to 420. Pages of whole tiles are loaded as contiguous keys
are, by TMA; smaller pages are gathered, at a speed that is not known. Not yet run on a GPU.
"""

from __future__ import annotations

import importlib

import torch

from megatron_infer.kernels.base import AttendSpec
from megatron_infer.kernels.packages.flash_attn_attention import MODULE, FlashAttention, unavailable

__all__ = ["RANK", "PromptAttention", "keys_per_tile", "make", "unavailable"]
RANK = "ranks behind flash_attn_3 for prompts: about half its published rate on Hopper"


def make(device: torch.device, dtype: torch.dtype) -> PromptAttention:
    return PromptAttention(importlib.import_module(MODULE))


class PromptAttention(FlashAttention):
    """Refuses layers whose pages it would gather."""

    name = "flash_attn_3"

    def supports(
        self, spec: AttendSpec, *, dtype: torch.dtype, block_size: int, kv_dtype: torch.dtype | None = None
    ) -> str | None:
        tile = keys_per_tile(spec)
        if block_size % tile:
            return (
                f"loads blocks of a multiple of {tile} tokens at its full speed, got block_size_tokens={block_size} "
                f"with head_dim {spec.head_dim}"
            )
        return super().supports(spec, dtype=dtype, block_size=block_size, kv_dtype=kv_dtype)


def keys_per_tile(spec: AttendSpec) -> int:
    """Keys that a causal tile holds on Hopper in 16 bits: `tile_size_fwd_sm90` in hopper/tile_size.h.

    Example: head_dim 128 -> 128, so that blocks of 128 or 256 tokens are loaded whole, and those of 64 are not.
    """
    local = spec.window is not None
    for most, tile, local_tile in ((64, 128, 128), (96, 144, 128), (128, 128, 128), (192, 112, 96)):
        if spec.head_dim <= most:
            return local_tile if local else tile
    return 64 if local else 80
