"""Dynamic inference that lives inside a Megatron training job.

Public names are loaded on first use: importing the package, or its pure parts, costs nothing and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_infer.async_llm import AsyncLLM as AsyncLLM
    from megatron_infer.config import AttentionChoice as AttentionChoice
    from megatron_infer.config import GraphSizing as GraphSizing
    from megatron_infer.config import InferenceConfig as InferenceConfig
    from megatron_infer.config import KVCacheDtype as KVCacheDtype
    from megatron_infer.config import KVCacheManagementMode as KVCacheManagementMode
    from megatron_infer.config import MambaInferenceStateConfig as MambaInferenceStateConfig
    from megatron_infer.config import PreemptionMode as PreemptionMode
    from megatron_infer.config import PrefixCachingCoordinatorPolicy as PrefixCachingCoordinatorPolicy
    from megatron_infer.config import PrefixCachingEvictionPolicy as PrefixCachingEvictionPolicy
    from megatron_infer.config import SamplingChoice as SamplingChoice
    from megatron_infer.durable.snapshot import LoadReport as LoadReport
    from megatron_infer.engine import DynamicInferenceEngine as DynamicInferenceEngine
    from megatron_infer.lifecycle import EngineState as EngineState
    from megatron_infer.llm import LLM as LLM
    from megatron_infer.models.specs import with_inference as with_inference
    from megatron_infer.outputs import CompletionOutput as CompletionOutput
    from megatron_infer.outputs import RequestOutput as RequestOutput
    from megatron_infer.rl.report import UpdateReport as UpdateReport
    from megatron_infer.rl.session import RolloutSession as RolloutSession
    from megatron_infer.schedule.params import SamplingParams as SamplingParams
    from megatron_infer.schedule.request import VersionSpan as VersionSpan
    from megatron_infer.schedule.structured import StructuredOutput as StructuredOutput
    from megatron_infer.suspension import MemoryReport as MemoryReport
    from megatron_infer.token_support import TokenSupport as TokenSupport

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "async_llm",
    "CompletionOutput": "outputs",
    "DynamicInferenceEngine": "engine",
    "EngineState": "lifecycle",
    "InferenceConfig": "config",
    "KVCacheDtype": "config",
    "KVCacheManagementMode": "config",
    "LLM": "llm",
    "LoadReport": "durable.snapshot",
    "MambaInferenceStateConfig": "config",
    "MemoryReport": "suspension",
    "PrefixCachingCoordinatorPolicy": "config",
    "AttentionChoice": "config",
    "SamplingChoice": "config",
    "GraphSizing": "config",
    "PreemptionMode": "config",
    "PrefixCachingEvictionPolicy": "config",
    "RequestOutput": "outputs",
    "RolloutSession": "rl.session",
    "SamplingParams": "schedule.params",
    "StructuredOutput": "schedule.structured",
    "TokenSupport": "token_support",
    "UpdateReport": "rl.report",
    "VersionSpan": "schedule.request",
    "with_inference": "models.specs",
}

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megatron_infer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"megatron_infer.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
