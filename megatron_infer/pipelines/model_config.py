"""The nested configs of `PipelineConfig`: model, KV cache, sampling, profiling, LoRA, speculation. Types only.

What each field does is in `pipelines.mapping`; the values are checked by what they are mapped to.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from megatron_infer.errors import ConfigError, unknown_name


class Section(BaseModel):
    """A part of the tree: types are strict, unknown names are refused, equality is that of the values."""

    model_config = ConfigDict(
        strict=True, extra="forbid", validate_assignment=True, protected_namespaces=(), use_attribute_docstrings=True
    )
    _is_frozen: bool = PrivateAttr(default=False)

    def freeze(self) -> None:
        """Refuse assignments from now on."""
        self._is_frozen = True

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and self._is_frozen:
            raise ConfigError(
                f"{name} cannot be set: the config is resolved, which froze it; make another {type(self).__name__}"
            )
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            if error.errors()[0]["type"] == "no_such_attribute":
                message = unknown_name(f"field of {type(self).__name__}", name, type(self).model_fields)
                hint = "" if "did you mean" in message else "; flat names are for the constructor"
                raise ConfigError(message + hint) from None
            raise ConfigError(validation_text(error)) from None


def validation_text(error: ValidationError) -> str:
    """Every wrong field: its name, what was given, and what it must be."""
    parts = []
    for one in error.errors():
        name = ".".join(str(part) for part in one["loc"])
        expected = one["msg"].replace("Input should be", "it must be").removeprefix("Value error, ")
        if one["type"] == "list_type" and isinstance(one["input"], str):
            expected = f"it must be a list: [{one['input']!r}]"
        parts.append(f"{name} is {one['input']!r} ({type(one['input']).__name__}), {expected}")
    return "; ".join(parts)


def by_name(kind: type[Enum]) -> BeforeValidator:
    """Takes a member by its name or value, in any case; True and False, which YAML reads on and off as, are these."""

    def find(value: object) -> object:
        if isinstance(value, bool):
            value = "on" if value else "off"
        if value is None or isinstance(value, kind):
            return value
        for member in kind if isinstance(value, str) else ():
            if value.lower() in (member.name.lower(), str(member.value).lower()):
                return member
        raise ValueError(f"it must be one of {', '.join(member.value for member in kind)}")

    return BeforeValidator(find)


def _as_text(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else value


Text = Annotated[str, BeforeValidator(_as_text)]
"""A text that YAML may read as a number or a truth value: pdl_level: 0, use_vendor_blas: true."""


class PipelineRole(str, Enum):
    """What a server does of a request."""

    PrefillAndDecode = "prefill_and_decode"
    """All of it."""
    PrefillOnly = "prefill_only"
    """Prompts only; their keys and values go to another server."""
    DecodeOnly = "decode_only"
    """Output only, from keys and values of another server."""


class CacheStrategy(str, Enum):
    """How keys and values are kept."""

    MODEL_DEFAULT = "model_default"
    """As the engine keeps them: paged."""
    PAGED = "paged"
    """In blocks."""


class GPUProfilingMode(str, Enum):
    """Which ranges a profiler sees."""

    OFF = "off"
    """None."""
    ON = "on"
    """Schedule, build, layers, sampling, commit."""
    DETAILED = "detailed"
    """Each layer, too."""


class QuantizationEncoding(str, Enum):
    """How weights are stored, and what they are computed in."""

    FLOAT32 = "float32"
    """Computed in float32."""
    BFLOAT16 = "bfloat16"
    """Computed in bfloat16."""
    Q4_0 = "q4_0"
    """A GGUF encoding: dequantised when loaded."""
    Q4_1 = "q4_1"
    """A GGUF encoding: dequantised when loaded."""
    Q4_K = "q4_k"
    """A GGUF encoding: dequantised when loaded."""
    Q6_K = "q6_k"
    """A GGUF encoding: dequantised when loaded."""
    FLOAT8_E4M3FN = "float8_e4m3fn"
    """For a model that trains in FP8."""
    FLOAT4_E2M1FNX2 = "float4_e2m1fnx2"
    """Refused."""
    GPTQ = "gptq"
    """Refused."""


class RopeType(str, Enum):
    """How positions are encoded by rotation."""

    NONE = "none"
    """Not at all."""
    NORMAL = "normal"
    """Pairs of neighbours are rotated (GGUF files of Llama)."""
    NEOX = "neox"
    """The two halves of a head are rotated."""
    LONGROPE = "longrope"
    """Refused: no model family here has it."""
    YARN = "yarn"
    """Refused: no model family here has it."""


class KVCacheConfig(Section):
    """The cache of keys and values."""

    cache_strategy: Annotated[CacheStrategy, by_name(CacheStrategy)] = CacheStrategy.MODEL_DEFAULT
    """How keys and values are kept: model_default or paged, which are the same here."""
    kv_cache_page_size: int = 128
    """Tokens of a block of the cache."""
    enable_prefix_caching: bool = True
    """Share the blocks of equal prompt beginnings; blocks that no request holds stay until their memory is needed."""
    enable_kvcache_swapping_to_host: bool = False
    """Copy keys and values of evicted requests to host memory. Cached prefixes are not copied."""
    device_memory_utilization: float = 0.9
    """Share of the free device memory for weights, activations and cache together, above 0 up to 1."""
    host_kvcache_swap_space_gb: float = 50.0
    """GiB of host memory for evicted requests. Acts only with enable_kvcache_swapping_to_host, or a preemption_mode
    that swaps."""


class MAXModelConfig(Section):
    """Where the model comes from, and what it is computed in and on."""

    model_path: str = ""
    """Alias (smollm2), directory, hub id, .gguf file or checkpoint."""
    served_model_name: str | None = None
    """The model's name in requests. None: model_path."""
    weight_path: list[str] = Field(default_factory=list)
    """One .gguf file with the weights, where model_path does not name it."""
    quantization_encoding: Annotated[QuantizationEncoding | None, by_name(QuantizationEncoding)] = None
    """What the weights are stored or computed in: float32 and bfloat16 are the dtype, q4_0, q4_1, q4_k and q6_k name
    the encoding of a .gguf file, which is dequantised. None: chosen for the device."""
    allow_safetensors_weights_fp32_bf6_bidirectional_cast: bool = False
    """Compute float32 weights of .safetensors files in bfloat16 and the other way round. Else a dtype asked for must be
    the files' own."""
    huggingface_model_revision: str = "main"
    """Branch, tag or commit of a hub model."""
    huggingface_weight_revision: str = "main"
    """The same for its weights; they come from the same revision as its description."""
    trust_remote_code: bool = False
    """Refused when True: no code of a model directory is ever run."""
    force_download: bool = False
    """Fetch a hub model again, even if it is cached."""
    device_specs: list[str] = Field(default_factory=list)
    """The device: cpu, cuda, gpu, cuda:N or gpu:N. Empty: a GPU if there is one, else the CPU."""
    data_parallel_degree: int = 1
    """Engines, each with a copy of the model."""
    use_subgraphs: bool = True
    """Layers that are alike share what is compiled."""
    rope_type: Annotated[RopeType | None, by_name(RopeType)] = None
    """How positions are rotated, which must be as the model's files say. None: as they say."""
    vision_config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Refused unless empty: there are no vision models here."""
    kv_cache: KVCacheConfig = Field(default_factory=KVCacheConfig)
    """The cache of keys and values."""


class SamplingConfig(Section):
    """What requests may ask for."""

    in_dtype: str = "float32"
    """dtype in which logits are read by the sampler; float32 only."""
    out_dtype: str = "float32"
    """dtype of the probabilities that tokens are drawn from; float32 only."""
    enable_structured_output: bool = False
    """Requests may ask for schemas, patterns and grammars."""
    enable_variable_logits: bool = False
    """By hand, `execute` returns logits of the last `return_n_logits` positions of a sequence (ReturnLogits.VARIABLE).
    `generate` and servers compute those that a request asks for."""
    enable_penalties: bool = False
    """Requests may ask for repetition, frequency and presence penalties."""
    enable_min_tokens: bool = False
    """Requests may ask for a least number of tokens."""


class ProfilingConfig(Section):
    """Ranges for profilers."""

    gpu_profiling: Annotated[GPUProfilingMode, by_name(GPUProfilingMode)] = GPUProfilingMode.OFF
    """off, on (schedule, build, layers, sampling, commit) or detailed (each layer, too)."""


class LoRAConfig(Section):
    """Adapters beside the model."""

    enable_lora: bool = False
    """Serve adapters."""
    lora_paths: list[str] = Field(default_factory=list)
    """Adapters to load: NAME=PATH, or PATH, whose last part is the name."""
    max_lora_rank: int = 16
    """The highest rank of an adapter."""
    max_num_loras: int = 1
    """Adapters on the device at once."""


class SpeculativeConfig(Section):
    """Tokens that are drafted and then verified."""

    speculative_method: str | None = None
    """ngram, or another method of SpeculativeConfig; standalone is its draft. None: nothing is drafted."""
    num_speculative_tokens: int = 5
    """The most tokens drafted for a request in a step."""
    rejection_sampling_strategy: str | None = None
    """How drafts are verified. None: a draft is kept where it equals the token that is drawn (same_tokens)."""
    synthetic_acceptance_rate: float | None = None
    """Refused: drafts are kept only where they equal what is drawn."""
