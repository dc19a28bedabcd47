"""What each field of the tree is mapped to: one row a field. Flags, the page of the docs and the checks come from it.

A field that has a counterpart is checked, and gets its default, where the counterpart is declared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_infer.pipelines import meanings

if TYPE_CHECKING:
    from megatron_infer.pipelines.config import PipelineConfig
    from megatron_infer.pipelines.resolve import Asked


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Engine:
    """An option of InferenceConfig. None: the engine's default."""

    option: str
    convert: Callable[[Any], Any] = _same
    """The field's value -> the option's."""
    note: Callable[[PipelineConfig], str] | None = None
    """Why the value is what it is. None: the option's name says it."""


@dataclass(frozen=True, slots=True)
class Server:
    """An option of ServerConfig. None: the server's default."""

    option: str
    convert: Callable[[Any], Any] = _same


@dataclass(frozen=True, slots=True)
class Model:
    """An argument of LLM."""

    argument: str
    convert: Callable[[Any], Any] = _same


@dataclass(frozen=True, slots=True)
class Layout:
    """A number of ranks: dp or ep."""

    axis: str


@dataclass(frozen=True, slots=True)
class Handled:
    """A function of `pipelines.meanings` acts on it: (value, what is asked for so far) -> (value in effect, note)."""

    act: Callable[[Any, Asked], tuple[Any, str]]
    needs_model: bool = False
    """It runs once the model's description is read."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Any value but the default, and those in `taken`, is refused for this reason."""

    reason: str
    taken: tuple[Any, ...] = ()


Row = Engine | Server | Model | Layout | Handled | Refused

ROWS: Mapping[str, Row] = {
    "config_file": Handled(meanings.read_before),
    "section_name": Handled(meanings.read_before),
    "defer_resolve": Handled(meanings.read_before),
    "force": Handled(meanings.force),
    "custom_architectures": Handled(meanings.architectures),
    "use_legacy_module": Handled(meanings.legacy_module, needs_model=True),
    "chat_template": Handled(meanings.chat_template),
    "max_length": Engine("max_sequence_length"),
    "max_batch_size": Engine("max_requests"),
    "max_batch_input_tokens": Engine("max_tokens"),
    "max_batch_total_tokens": Engine("max_batch_total_tokens"),
    "max_num_steps": Engine("max_steps_in_flight", meanings.steps_in_flight, meanings.why_steps_in_flight),
    "max_queue_size_tg": Engine("max_queue_size_tg"),
    "min_batch_size_tg": Engine("min_batch_size_tg"),
    "ce_delay_ms": Engine("ce_delay_ms"),
    "enable_prioritize_first_decode": Engine("enable_prioritize_first_decode"),
    "enable_chunked_prefill": Engine("enable_chunked_prefill"),
    "enable_in_flight_batching": Engine("batching", meanings.batching_policy),
    "kvcache_ce_watermark": Engine("admission_watermark"),
    "execute_empty_batches": Handled(meanings.empty_batches),
    "enable_overlap_scheduler": Engine("overlap", meanings.overlap),
    "pipeline_role": Refused("a server here both prefills and decodes; take prefill_and_decode"),
    "ep_size": Layout("ep"),
    "enable_echo": Server("enable_echo"),
    "pool_embeddings": Server("pool_embeddings"),
    "use_experimental_kernels": Handled(meanings.experimental_kernels, needs_model=True),
    "use_vendor_blas": Engine("linear_backend", meanings.linear_backend),
    "pdl_level": Handled(meanings.pdl_level, needs_model=True),
    "zmq_endpoint_base": Handled(meanings.endpoint_base),
    "lora": Engine("lora", meanings.lora),
    "speculative": Engine("speculative", meanings.speculative),
    "draft_model": Handled(meanings.draft_model),
    "options": Handled(meanings.read_before),
    "model.model_path": Model("model"),
    "model.served_model_name": Server("served_model_name", lambda name: (name,)),
    "model.weight_path": Handled(meanings.weight_path),
    "model.quantization_encoding": Handled(meanings.encoding),
    "model.allow_safetensors_weights_fp32_bf6_bidirectional_cast": Handled(meanings.cast, needs_model=True),
    "model.huggingface_model_revision": Handled(meanings.revision),
    "model.huggingface_weight_revision": Handled(meanings.weight_revision),
    "model.trust_remote_code": Refused("no code of a model directory is ever run; leave it False"),
    "model.force_download": Handled(meanings.force_download),
    "model.device_specs": Handled(meanings.devices),
    "model.data_parallel_degree": Layout("dp"),
    "model.use_subgraphs": Refused("layers that are alike always share what is compiled; leave it True"),
    "model.rope_type": Handled(meanings.rope_type, needs_model=True),
    "model.vision_config_overrides": Refused("there are no vision models here; leave it empty"),
    "model.kv_cache.cache_strategy": Handled(meanings.cache_strategy),
    "model.kv_cache.kv_cache_page_size": Engine("block_size_tokens"),
    "model.kv_cache.enable_prefix_caching": Handled(meanings.prefix_caching),
    "model.kv_cache.enable_kvcache_swapping_to_host": Handled(meanings.swapping),
    "model.kv_cache.device_memory_utilization": Handled(meanings.utilization),
    "model.kv_cache.host_kvcache_swap_space_gb": Handled(meanings.swap_space),
    "sampling.in_dtype": Refused("logits are sampled in float32; leave it at float32"),
    "sampling.out_dtype": Refused("probabilities are computed in float32; leave it at float32"),
    "sampling.enable_structured_output": Server("enable_structured_output"),
    "sampling.enable_variable_logits": Handled(meanings.variable_logits),
    "sampling.enable_penalties": Server("enable_penalties"),
    "sampling.enable_min_tokens": Server("enable_min_tokens"),
    "profiling.gpu_profiling": Engine("step_ranges", meanings.step_ranges),
}
"""Dotted path of a field -> what it is mapped to. Of the draft model, model_path acts."""

OWN_NAMES: Mapping[str, str] = {
    "buffer_size_gb": "device_memory_utilization",
    "preemption_mode": "enable_kvcache_swapping_to_host",
    "swap_buffer_size_gb": "host_kvcache_swap_space_gb",
    "use_flashinfer_fused_rope": "use_experimental_kernels",
    "dp": "data_parallel_degree",
    "ep": "ep_size",
    "dtype": "quantization_encoding",
    "device": "device_specs",
    **{row.option: path.rpartition(".")[2] for path, row in ROWS.items() if isinstance(row, Engine | Server)},
}
"""Option by its own name -> the field of the tree that sets it; only one of them may be given."""

SAME_VALUES: Mapping[str, str] = {
    row.option: path.rpartition(".")[2]
    for path, row in ROWS.items()
    if isinstance(row, Engine | Server) and row.convert in (_same, meanings.steps_in_flight)
}
"""Those whose values are the same by both names: errors of the one are told by the other."""
