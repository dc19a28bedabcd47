"""Pipelines in front of the engine: one configuration tree, models of one's own, and the overlap pipeline.

Public names are loaded on first use: the configuration tree needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_infer.pipelines.architectures import Architecture as Architecture
    from megatron_infer.pipelines.config import PipelineConfig as PipelineConfig
    from megatron_infer.pipelines.model_config import CacheStrategy as CacheStrategy
    from megatron_infer.pipelines.model_config import GPUProfilingMode as GPUProfilingMode
    from megatron_infer.pipelines.model_config import KVCacheConfig as KVCacheConfig
    from megatron_infer.pipelines.model_config import LoRAConfig as LoRAConfig
    from megatron_infer.pipelines.model_config import MAXModelConfig as MAXModelConfig
    from megatron_infer.pipelines.model_config import PipelineRole as PipelineRole
    from megatron_infer.pipelines.model_config import ProfilingConfig as ProfilingConfig
    from megatron_infer.pipelines.model_config import QuantizationEncoding as QuantizationEncoding
    from megatron_infer.pipelines.model_config import SamplingConfig as SamplingConfig
    from megatron_infer.pipelines.model_config import SpeculativeConfig as SpeculativeConfig
    from megatron_infer.pipelines.settings import Setting as Setting

_HOMES = {
    "Architecture": "architectures",
    "CacheStrategy": "model_config",
    "GPUProfilingMode": "model_config",
    "KVCacheConfig": "model_config",
    "LoRAConfig": "model_config",
    "MAXModelConfig": "model_config",
    "PipelineConfig": "config",
    "PipelineRole": "model_config",
    "ProfilingConfig": "model_config",
    "QuantizationEncoding": "model_config",
    "SamplingConfig": "model_config",
    "Setting": "settings",
    "SpeculativeConfig": "model_config",
}

__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megatron_infer.pipelines' has no attribute {name!r}")
    return getattr(importlib.import_module(f"megatron_infer.pipelines.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
