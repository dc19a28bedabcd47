"""Dynamic inference that lives inside a Megatron training job.

Public names are loaded on first use: importing the package, or its pure parts, costs nothing and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_infer.utils import former_paths
from megatron_infer.utils.gc_pause import no_collection

if TYPE_CHECKING:
    from megatron_infer.config.inference import AttentionChoice as AttentionChoice
    from megatron_infer.config.inference import BatchingPolicy as BatchingPolicy
    from megatron_infer.config.inference import GraphCapture as GraphCapture
    from megatron_infer.config.inference import GraphSizing as GraphSizing
    from megatron_infer.config.inference import InferenceConfig as InferenceConfig
    from megatron_infer.config.inference import KVCacheDtype as KVCacheDtype
    from megatron_infer.config.inference import KVCacheManagementMode as KVCacheManagementMode
    from megatron_infer.config.inference import LinearChoice as LinearChoice
    from megatron_infer.config.inference import PreemptionMode as PreemptionMode
    from megatron_infer.config.inference import PrefixCachingCoordinatorPolicy as PrefixCachingCoordinatorPolicy
    from megatron_infer.config.inference import PrefixCachingEvictionPolicy as PrefixCachingEvictionPolicy
    from megatron_infer.config.inference import SamplingChoice as SamplingChoice
    from megatron_infer.config.inference import StepRanges as StepRanges
    from megatron_infer.config.inference import WeightDtype as WeightDtype
    from megatron_infer.config.lora import LoRAConfig as LoRAConfig
    from megatron_infer.config.mamba_state import MambaInferenceStateConfig as MambaInferenceStateConfig
    from megatron_infer.config.sampling_params import SamplingParams as SamplingParams
    from megatron_infer.config.speculative import SpeculativeConfig as SpeculativeConfig
    from megatron_infer.config.structured_output import StructuredOutput as StructuredOutput
    from megatron_infer.engine.async_llm import AsyncLLM as AsyncLLM
    from megatron_infer.engine.durable.snapshot import LoadReport as LoadReport
    from megatron_infer.engine.engine import DynamicInferenceEngine as DynamicInferenceEngine
    from megatron_infer.engine.llm import LLM as LLM
    from megatron_infer.engine.states import EngineState as EngineState
    from megatron_infer.engine.suspend import MemoryReport as MemoryReport
    from megatron_infer.models.loading.build_model import build_model as build_model
    from megatron_infer.models.loading.sources import open_source as open_source
    from megatron_infer.models.lora.attach import attach_lora as attach_lora
    from megatron_infer.models.specs import with_inference as with_inference
    from megatron_infer.outputs.request_output import CompletionOutput as CompletionOutput
    from megatron_infer.outputs.request_output import GenerationError as GenerationError
    from megatron_infer.outputs.request_output import RequestOutput as RequestOutput
    from megatron_infer.outputs.token_support import TokenSupport as TokenSupport
    from megatron_infer.rl.samples import RolloutError as RolloutError
    from megatron_infer.rl.session import RolloutSession as RolloutSession
    from megatron_infer.rl.update_report import UpdateReport as UpdateReport
    from megatron_infer.scheduler.request import VersionSpan as VersionSpan

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "engine.async_llm",
    "CompletionOutput": "outputs.request_output",
    "DynamicInferenceEngine": "engine.engine",
    "EngineState": "engine.states",
    "GenerationError": "outputs.request_output",
    "GraphCapture": "config.inference",
    "InferenceConfig": "config.inference",
    "KVCacheDtype": "config.inference",
    "KVCacheManagementMode": "config.inference",
    "LLM": "engine.llm",
    "LoRAConfig": "config.lora",
    "LoadReport": "engine.durable.snapshot",
    "MambaInferenceStateConfig": "config.mamba_state",
    "MemoryReport": "engine.suspend",
    "PrefixCachingCoordinatorPolicy": "config.inference",
    "AttentionChoice": "config.inference",
    "SamplingChoice": "config.inference",
    "GraphSizing": "config.inference",
    "LinearChoice": "config.inference",
    "StepRanges": "config.inference",
    "BatchingPolicy": "config.inference",
    "PreemptionMode": "config.inference",
    "PrefixCachingEvictionPolicy": "config.inference",
    "RequestOutput": "outputs.request_output",
    "RolloutError": "rl.samples",
    "RolloutSession": "rl.session",
    "SamplingParams": "config.sampling_params",
    "SpeculativeConfig": "config.speculative",
    "StructuredOutput": "config.structured_output",
    "TokenSupport": "outputs.token_support",
    "UpdateReport": "rl.update_report",
    "VersionSpan": "scheduler.request",
    "WeightDtype": "config.inference",
    "attach_lora": "models.lora.attach",
    "build_model": "models.loading.build_model",
    "open_source": "models.loading.sources",
    "with_inference": "models.specs",
}

former_paths.install()

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megatron_infer' has no attribute {name!r}")
    with no_collection():  # a quarter of the import time of torch
        home = importlib.import_module(f"megatron_infer.{_HOMES[name]}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return __all__
