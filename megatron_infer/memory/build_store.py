"""Makes the cache of an engine's keys, values and recurrent states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_infer.config.capacity import GIB
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.model_shape import ModelShape
from megatron_infer.config.stage_sizes import StageSizes
from megatron_infer.memory.device import Device
from megatron_infer.memory.regions.choose import make_region
from megatron_infer.memory.store import CacheStore
from megatron_infer.memory.store_layout import StoreLayout


def build_store(
    config: InferenceConfig,
    shape: ModelShape,
    agreed: StageSizes,
    device: Device,
    *,
    layer_order: Sequence[str],
    draft: ModelShape | None,
) -> CacheStore:
    """layer_order: see `StoreLayout`. draft: a draft model or MTP layer, with its own keys and values."""

    def kv_dtype_of(one: ModelShape) -> torch.dtype:
        found: torch.dtype = getattr(torch, config.kv_dtype_of(one))
        return found

    drafting = {} if draft is None else {"draft": draft, "draft_dtype": kv_dtype_of(draft)}
    layout = StoreLayout.of(shape, agreed.sizes, dtype=kv_dtype_of(shape), layer_order=layer_order, **drafting)
    region = make_region(
        (layout.num_bytes,),
        torch.uint8,
        device.torch,
        static_pointers=config.static_kv_memory_pointers,
        unified_memory=config.unified_memory_level > 0,
        spill_bytes=int((config.paused_buffer_size_gb or 0) * GIB) if config.unified_memory_level else 0,
    )
    return CacheStore(layout, region, agreed.host)
