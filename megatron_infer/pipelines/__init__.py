"""Pipelines in front of the engine: one configuration tree, models of one's own, and the overlap pipeline.

Public names are loaded on first use: the configuration tree needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_infer.engine.metrics.modes import PrometheusMetricsMode as PrometheusMetricsMode
    from megatron_infer.pipelines.architectures import Architecture as Architecture
    from megatron_infer.pipelines.audio_config import AudioGenerationConfig as AudioGenerationConfig
    from megatron_infer.pipelines.audio_generation import AudioGenerationOutput as AudioGenerationOutput
    from megatron_infer.pipelines.audio_generation import AudioGenerationRequest as AudioGenerationRequest
    from megatron_infer.pipelines.audio_pipeline import AudioGeneratorPipeline as AudioGeneratorPipeline
    from megatron_infer.pipelines.config import PipelineConfig as PipelineConfig
    from megatron_infer.pipelines.field_types import CacheStrategy as CacheStrategy
    from megatron_infer.pipelines.field_types import GPUProfilingMode as GPUProfilingMode
    from megatron_infer.pipelines.field_types import PipelineRole as PipelineRole
    from megatron_infer.pipelines.field_types import QuantizationEncoding as QuantizationEncoding
    from megatron_infer.pipelines.inference_session import InferenceSession as InferenceSession
    from megatron_infer.pipelines.interfaces import AlwaysSignalBuffersMixin as AlwaysSignalBuffersMixin
    from megatron_infer.pipelines.interfaces import GenerateMixin as GenerateMixin
    from megatron_infer.pipelines.interfaces import KVCacheInputs as KVCacheInputs
    from megatron_infer.pipelines.interfaces import KVCacheMixin as KVCacheMixin
    from megatron_infer.pipelines.interfaces import KVCacheParams as KVCacheParams
    from megatron_infer.pipelines.interfaces import ModelInputs as ModelInputs
    from megatron_infer.pipelines.interfaces import ModelOutputs as ModelOutputs
    from megatron_infer.pipelines.interfaces import PipelineModel as PipelineModel
    from megatron_infer.pipelines.interfaces import ReturnLogits as ReturnLogits
    from megatron_infer.pipelines.interfaces import get_paged_manager as get_paged_manager
    from megatron_infer.pipelines.interfaces import upper_bounded_default as upper_bounded_default
    from megatron_infer.pipelines.lora_manager import LoRAManager as LoRAManager
    from megatron_infer.pipelines.mcore_model import McorePipelineModel as McorePipelineModel
    from megatron_infer.pipelines.model_config import KVCacheConfig as KVCacheConfig
    from megatron_infer.pipelines.model_config import LoRAConfig as LoRAConfig
    from megatron_infer.pipelines.model_config import MAXModelConfig as MAXModelConfig
    from megatron_infer.pipelines.model_config import ProfilingConfig as ProfilingConfig
    from megatron_infer.pipelines.model_config import SamplingConfig as SamplingConfig
    from megatron_infer.pipelines.model_config import SpeculativeConfig as SpeculativeConfig
    from megatron_infer.pipelines.overlap import OverlapTextGenerationPipeline as OverlapTextGenerationPipeline
    from megatron_infer.pipelines.paged_manager import InsufficientBlocksError as InsufficientBlocksError
    from megatron_infer.pipelines.paged_manager import PagedKVCacheManager as PagedKVCacheManager
    from megatron_infer.pipelines.resolved import Setting as Setting
    from megatron_infer.pipelines.text_generation import GenerationStatus as GenerationStatus
    from megatron_infer.pipelines.text_generation import LogProbabilities as LogProbabilities
    from megatron_infer.pipelines.text_generation import TextContext as TextContext
    from megatron_infer.pipelines.text_generation import TextGenerationInputs as TextGenerationInputs
    from megatron_infer.pipelines.text_generation import TextGenerationOutput as TextGenerationOutput
    from megatron_infer.pipelines.text_generation import TextGenerationRequest as TextGenerationRequest
    from megatron_infer.pipelines.text_generation import TextTokenizer as TextTokenizer
    from megatron_infer.server.audio.blocks import PrependPromptSpeechTokens as PrependPromptSpeechTokens

_NAMES = {
    "architectures": "Architecture",
    "audio_config": "AudioGenerationConfig PrependPromptSpeechTokens PrometheusMetricsMode",
    "audio_generation": "AudioGenerationOutput AudioGenerationRequest",
    "audio_pipeline": "AudioGeneratorPipeline",
    "config": "PipelineConfig",
    "field_types": "CacheStrategy GPUProfilingMode PipelineRole QuantizationEncoding",
    "inference_session": "InferenceSession",
    "interfaces": "AlwaysSignalBuffersMixin GenerateMixin KVCacheInputs KVCacheMixin KVCacheParams ModelInputs "
    "ModelOutputs PipelineModel ReturnLogits get_paged_manager upper_bounded_default",
    "lora_manager": "LoRAManager",
    "mcore_model": "McorePipelineModel",
    "model_config": "KVCacheConfig LoRAConfig MAXModelConfig ProfilingConfig SamplingConfig SpeculativeConfig",
    "overlap": "OverlapTextGenerationPipeline",
    "paged_manager": "InsufficientBlocksError PagedKVCacheManager",
    "resolved": "Setting",
    "text_generation": "GenerationStatus LogProbabilities TextContext TextGenerationInputs TextGenerationOutput "
    "TextGenerationRequest TextTokenizer",
}
"""Module -> public names that it has."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megatron_infer.pipelines' has no attribute {name!r}")
    return getattr(importlib.import_module(f"megatron_infer.pipelines.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
