"""The nested configs of `PipelineConfig`: model, KV cache, sampling, profiling, LoRA, speculation.

The values are checked by what the rows in the annotations act as.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from megatron_infer.pipelines import field_rules as rules
from megatron_infer.pipelines.field_rows import Adapters, Drafts, Engine, Model, RanksOf, Refused, Rule, Server
from megatron_infer.pipelines.field_types import (
    CacheStrategy,
    GPUProfilingMode,
    QuantizationEncoding,
    RopeType,
    Section,
    by_name,
)


class KVCacheConfig(Section):
    """The cache of keys and values."""

    cache_strategy: Annotated[CacheStrategy, by_name(CacheStrategy), Rule(rules.cache_strategy)] = (
        CacheStrategy.MODEL_DEFAULT
    )
    """How keys and values are kept: model_default or paged, which are the same here."""
    kv_cache_page_size: Annotated[int, Engine("block_size_tokens")] = 128
    """Tokens of a block of the cache."""
    enable_prefix_caching: Annotated[bool, Rule(rules.prefix_caching)] = True
    """Share the blocks of equal prompt beginnings; blocks that no request holds stay until their memory is needed."""
    enable_kvcache_swapping_to_host: Annotated[bool, Rule(rules.swapping, instead_of="preemption_mode")] = False
    """Copy keys and values of evicted requests to host memory. Cached prefixes are not copied."""
    device_memory_utilization: Annotated[float, Rule(rules.utilization, instead_of="buffer_size_gb")] = 0.9
    """Share of the free device memory for weights, activations and cache together, above 0 up to 1."""
    host_kvcache_swap_space_gb: Annotated[float, Rule(rules.swap_space, instead_of="swap_buffer_size_gb")] = 50.0
    """GiB of host memory for evicted requests. Acts only with enable_kvcache_swapping_to_host, or a preemption_mode
    that swaps."""


class MAXModelConfig(Section):
    """Where the model comes from, and what it is computed in and on."""

    model_path: Annotated[str, Model("model")] = ""
    """Alias (smollm2), directory, hub id, .gguf file or checkpoint."""
    served_model_name: Annotated[str | None, Server("served_model_name", lambda name: (name,), has_own_words=True)] = (
        None
    )
    """The model's name in requests. None: model_path."""
    weight_path: Annotated[list[str], Rule(rules.weight_path)] = Field(default_factory=list)
    """One .gguf file with the weights, where model_path does not name it."""
    quantization_encoding: Annotated[
        QuantizationEncoding | None, by_name(QuantizationEncoding), Rule(rules.encoding, instead_of="dtype")
    ] = None
    """What the weights are stored or computed in: float32 and bfloat16 are the dtype, q4_0, q4_1, q4_k and q6_k name
    the encoding of a .gguf file, which is dequantised. None: chosen for the device."""
    allow_safetensors_weights_fp32_bf6_bidirectional_cast: Annotated[bool, Rule(rules.cast, needs_model=True)] = False
    """Compute float32 weights of .safetensors files in bfloat16 and the other way round. Else a dtype asked for must be
    the files' own."""
    huggingface_model_revision: Annotated[str, Rule(rules.revision)] = "main"
    """Branch, tag or commit of a hub model."""
    huggingface_weight_revision: Annotated[str, Rule(rules.weight_revision)] = "main"
    """The same for its weights; they come from the same revision as its description."""
    trust_remote_code: Annotated[bool, Refused("no code of a model directory is ever run; leave it False")] = False
    """Refused when True: no code of a model directory is ever run."""
    force_download: Annotated[bool, Rule(rules.force_download)] = False
    """Fetch a hub model again, even if it is cached."""
    device_specs: Annotated[list[str], Rule(rules.devices, instead_of="device")] = Field(default_factory=list)
    """The device: cpu, cuda, gpu, cuda:N or gpu:N. Empty: a GPU if there is one, else the CPU."""
    data_parallel_degree: Annotated[int, RanksOf("dp")] = 1
    """Engines, each with a copy of the model."""
    use_subgraphs: Annotated[bool, Refused("layers that are alike always share what is compiled; leave it True")] = True
    """Layers that are alike share what is compiled."""
    rope_type: Annotated[RopeType | None, by_name(RopeType), Rule(rules.rope_type, needs_model=True)] = None
    """How positions are rotated, which must be as the model's files say. None: as they say."""
    vision_config_overrides: Annotated[dict[str, Any], Refused("there are no vision models here; leave it empty")] = (
        Field(default_factory=dict)
    )
    """Refused unless empty: there are no vision models here."""
    kv_cache: KVCacheConfig = Field(default_factory=KVCacheConfig)
    """The cache of keys and values."""


class SamplingConfig(Section):
    """What requests may ask for."""

    in_dtype: Annotated[str, Refused("logits are sampled in float32; leave it at float32")] = "float32"
    """dtype in which logits are read by the sampler; float32 only."""
    out_dtype: Annotated[str, Refused("probabilities are computed in float32; leave it at float32")] = "float32"
    """dtype of the probabilities that tokens are drawn from; float32 only."""
    enable_structured_output: Annotated[bool, Server("enable_structured_output")] = False
    enable_variable_logits: Annotated[bool, Rule(rules.variable_logits)] = False
    """By hand, `execute` returns logits of the last `return_n_logits` positions of a sequence (ReturnLogits.VARIABLE).
    `generate` and servers compute those that a request asks for."""
    enable_penalties: Annotated[bool, Server("enable_penalties")] = False
    enable_min_tokens: Annotated[bool, Server("enable_min_tokens")] = False


class ProfilingConfig(Section):
    """Ranges for profilers."""

    gpu_profiling: Annotated[GPUProfilingMode, by_name(GPUProfilingMode), Engine("step_ranges")] = GPUProfilingMode.OFF


class LoRAConfig(Section):
    """Adapters beside the model."""

    enable_lora: bool = False
    """Serve adapters."""
    lora_paths: Annotated[list[str], Adapters("adapters", rules.adapters)] = Field(default_factory=list)
    """Adapters to load: NAME=PATH, or PATH, whose last part is the name."""
    max_lora_rank: Annotated[int, Adapters("max_rank")] = 16
    max_num_loras: Annotated[int, Adapters("max_loras")] = 1


class SpeculativeConfig(Section):
    """Tokens that are drafted and then verified."""

    speculative_method: Annotated[str | None, Drafts("method", rules.drafting_method)] = None
    """ngram, or another method of SpeculativeConfig; standalone is its draft. None: nothing is drafted."""
    num_speculative_tokens: Annotated[int, Drafts("num_speculative_tokens")] = 5
    rejection_sampling_strategy: Annotated[str | None, Drafts("verification")] = None
    """How drafts are verified. None: a draft is kept where it equals the token that is drawn (same_tokens)."""
    synthetic_acceptance_rate: float | None = None
    """Refused: drafts are kept only where they equal what is drawn."""
