"""What the fields do that set no option by themselves.

A rule takes (value, what is asked for so far), puts there what follows from the value, and gives the value in effect
and a note.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_infer.config.inference import ConfigWarning
from megatron_infer.errors import ConfigError, ModelError, unknown_name
from megatron_infer.pipelines.architectures import custom_architectures
from megatron_infer.pipelines.field_rows import parts_of
from megatron_infer.pipelines.field_types import CacheStrategy, PipelineRole, QuantizationEncoding, RopeType
from megatron_infer.server.socket_base import checked_base

if TYPE_CHECKING:
    from megatron_infer.pipelines.config import PipelineConfig
    from megatron_infer.pipelines.resolve import Asked

Effect = tuple[Any, str]
OFF = ("false", "off", "no", "0")
ON = ("true", "on", "yes", "1")
KERNEL = "fused_rope"
"""The one experimental kernel: it sets use_flashinfer_fused_rope."""
NO_KERNELS = {
    "compiled_layers": "a CPU runs its layers in one native call, a GPU captures them; nothing else is compiled",
    "flashinfer_sampling": "a draw is a function of seed and position, which FlashInfer's sampling is not",
}
"""Kernel that is known elsewhere -> why it is refused."""
PDL_VARIABLE = "MEGATRON_INFER_PDL"
"""What kernels.triton.launch reads when an engine is made."""
GGUF_ENCODINGS = (
    QuantizationEncoding.Q4_0,
    QuantizationEncoding.Q4_1,
    QuantizationEncoding.Q4_K,
    QuantizationEncoding.Q6_K,
)


def _without_effect(name: str, given: Any, why: str) -> str:
    """Warn of a field that was given and does nothing -> its note; "" where it was not given."""
    if not given:
        return ""
    warnings.warn(f"{name}={given!r} has no effect: {why}; leave it out", ConfigWarning, stacklevel=5)
    return f"no effect: {why}"


def force(value: bool, asked: Asked) -> Effect:
    asked.force = value
    return value, ""


def lora(value: Any) -> dict[str, Any] | None:
    """The option `lora` of an engine. Raises ConfigError for settings of adapters without enable_lora."""
    if not value.enable_lora:
        if given := sorted(value.model_fields_set - {"enable_lora"}):
            raise ConfigError(f"{given[0]} needs enable_lora=True; set it, or leave {given[0]} out")
        return None
    return parts_of(value)


def adapters(paths: list[str]) -> list[str]:
    """The value of `adapters` of an option `lora`."""
    return [path if "=" in path else f"{Path(path).name}={path}" for path in paths]


def speculative(value: Any) -> dict[str, Any] | None:
    """The option `speculative` of an engine. Raises ConfigError for settings of drafts without a method."""
    if value.speculative_method is None:
        if given := sorted(value.model_fields_set - {"speculative_method"}):
            raise ConfigError(
                f"{given[0]} needs speculative_method; set it (ngram drafts from prompt and answer), or leave "
                f"{given[0]} out"
            )
        return None
    if value.synthetic_acceptance_rate is not None:
        raise ConfigError(
            "synthetic_acceptance_rate is for benchmarks, as tokens mean nothing with it; leave it out, and give "
            "megatron-infer bench --synthetic-acceptance-rate"
        )
    return parts_of(value)


def drafting_method(name: str) -> str:
    """The value of `method` of an option `speculative`."""
    return "draft" if name == "standalone" else name


def draft_model(value: Any, asked: Asked) -> Effect:
    if value is None:
        return None, ""
    if others := sorted(value.model_fields_set - {"model_path"}):
        raise ConfigError(
            f"draft_{others[0]}: a draft model has the dtype, device and cache of the model it drafts for; leave it out"
        )
    drafts = asked.engine.get("speculative")
    if drafts is None or drafts["method"] != "draft":
        raise ConfigError(
            f"draft_model_path is {value.model_path!r}, and nothing drafts with it; set speculative_method to "
            "standalone"
        )
    drafts["draft_model"] = value.model_path
    return value, "drafts tokens for the model"


def architectures(value: list[str], asked: Asked) -> Effect:
    from megatron_infer.models.loading.families import FAMILIES

    asked.architectures = custom_architectures(value, built_in=tuple(FAMILIES))
    return value, ", ".join(sorted(asked.architectures))


def chat_template(value: Path | None, asked: Asked) -> Effect:
    if value is None:
        return None, "the model's own"
    from megatron_infer.text.chat_template import check  # imports jinja2

    path = value.expanduser()
    if not path.is_file():
        raise ConfigError(f"chat_template: {str(path)!r} is no file; give the path of a template, or leave it out")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: {str(path)!r} cannot be read: {error}") from None
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if isinstance(content, dict):
        held = content.get("chat_template")
        if not isinstance(held, str):
            raise ConfigError(f"chat_template: {str(path)!r} is JSON without the key chat_template (a string)")
        text = held
    try:
        check(text)
    except ModelError as error:
        raise ConfigError(f"chat_template: {str(path)!r}: {error}") from None
    asked.chat_template = text
    return path, "goes before the model's own"


def legacy_module(value: bool, asked: Asked) -> Effect:
    asked.llm["use_legacy_module"] = False
    if not value:
        return False, "built of the paged spec"
    if asked.description is None:
        return False, "the model runs by a class of its own"
    if (why := asked.description.needs_paged_spec) is not None:
        return False, why
    asked.llm["use_legacy_module"] = True
    return True, "megatron-core's stock classes, adopted in place"


def steps_in_flight(num_steps: int) -> int:
    """The value of `max_steps_in_flight`."""
    return 1 if num_steps == -1 else num_steps


def why_steps_in_flight(config: PipelineConfig) -> str:
    """The note of `max_num_steps`."""
    if config.max_num_steps != -1:
        return "steps launched before the first is read"
    return "one step is in flight" + (": enable_overlap_scheduler" if config.enable_overlap_scheduler else "")


def overlap(asked: bool) -> bool | None:
    """The value of `overlap`; None: as the device is, True on a GPU."""
    return True if asked else None


def batching_policy(in_flight: bool) -> str:
    """The value of `batching`."""
    return "mixed" if in_flight else "prefill_first"


def empty_batches(value: bool, asked: Asked) -> Effect:
    return value, _without_effect(
        "execute_empty_batches", value, "expert-parallel ranks are one engine and take part in every step"
    )


def experimental_kernels(value: str, asked: Asked) -> Effect:
    text = value.strip().lower()
    if text in OFF:
        return "false", ""
    names = [KERNEL] if text in ON else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name in NO_KERNELS:
            raise ConfigError(f"use_experimental_kernels: {name} is not built: {NO_KERNELS[name]}; leave it out")
        if name != KERNEL:
            message = unknown_name("experimental kernel", name, (KERNEL,))
            raise ConfigError(f'use_experimental_kernels: {message}; "true", or names out of {KERNEL}')
    if text in ON and not asked.is_cuda:
        return "false", f"{KERNEL}: for GPUs"
    if not names:
        return "false", ""
    asked.engine["use_flashinfer_fused_rope"] = True
    return ",".join(names), ""


def linear_backend(use_vendor_blas: str) -> str:
    """The value of `linear_backend`. Raises ConfigError."""
    if use_vendor_blas.strip().lower() in OFF:
        return "auto"
    if use_vendor_blas.strip().lower() not in ON:
        raise ConfigError(f'use_vendor_blas is {use_vendor_blas!r}, it must be "true" or "false"')
    return "vendor"


def pdl_level(value: str, asked: Asked) -> Effect:
    if value not in ("0", "1", "2"):
        raise ConfigError(f'pdl_level is {value!r}, it must be "0", "1" or "2"')
    if value == "0":
        return value, ""
    if not asked.is_cuda:
        return "0", _without_effect("pdl_level", value, "for GPUs, of compute capability 9.0 on")
    os.environ[PDL_VARIABLE] = "1"  # for this process and those that it starts: engines are made there
    return value, f"{PDL_VARIABLE}=1: 1 and 2 are the same; acts from compute capability 9.0 on"


def pipeline_role(value: PipelineRole, asked: Asked) -> Effect:
    if value is PipelineRole.PrefillAndDecode:
        return value, ""
    if not asked.config.zmq_endpoint_base:
        raise ConfigError(
            f"pipeline_role is {value.value!r} and zmq_endpoint_base is empty: requests come from a coordinator; give "
            "its address (tcp://HOST:PORT), or serve both roles: megatron-infer serve MODEL --prefill 1 --decode 1"
        )
    asked.role = value.value
    return value, "a replica of the coordinator at zmq_endpoint_base"


def endpoint_base(value: str, asked: Asked) -> Effect:
    if not value:
        return value, "a folder of its own, made when the server starts"
    if asked.config.pipeline_role is PipelineRole.PrefillAndDecode:
        checked_base(value)
    else:
        from megatron_infer.coordinator.protocol import checked_address

        checked_address(value)
    asked.endpoint_base = value
    return value, ""


def weight_path(value: list[str], asked: Asked) -> Effect:
    if not value:
        return value, ""
    if len(value) > 1 or not value[0].endswith(".gguf"):
        raise ConfigError(
            f"weight_path is {value!r}, it must be one .gguf file; the .safetensors files of a directory are found by "
            "model_path"
        )
    if asked.llm.get("model"):
        raise ConfigError(
            f"weight_path is {value!r} beside model_path={asked.llm['model']!r}: a .gguf file holds the model's "
            "description, too; give one of them"
        )
    asked.llm["model"] = value[0]
    return value, "the model, too: a .gguf file holds its description"


def encoding(value: QuantizationEncoding | None, asked: Asked) -> Effect:
    if value is None:
        return None, ""
    if value in (QuantizationEncoding.FLOAT32, QuantizationEncoding.BFLOAT16):
        asked.llm["dtype"] = value.value
        return value, ""
    if value in GGUF_ENCODINGS:
        model = str(asked.llm.get("model", ""))
        if not asked.is_gguf(model):
            raise ConfigError(
                f"quantization_encoding={value.value}: {model!r} is no .gguf file; take float32 or bfloat16"
            )
        stored = asked.gguf_encoding(model)
        if stored != value.value:
            known = f"take {stored}, or " if stored in GGUF_ENCODINGS else ""
            why = f"quantization_encoding={value.value}, but most weights of {model!r} are {stored}"
            if not asked.force:
                raise ConfigError(f"{why}; {known}leave it out")
            warnings.warn(f"{why}; force: they are read as they are", ConfigWarning, stacklevel=4)
        return value, "dequantised when loaded"
    if value is QuantizationEncoding.FLOAT8_E4M3FN:
        raise ConfigError(
            "quantization_encoding=float8_e4m3fn needs a model that trains in FP8, given to the engine as it is "
            "(docs/fp8_models.md); take bfloat16"
        )
    raise ConfigError(f"quantization_encoding={value.value} is not supported; take bfloat16")


def cast(value: bool, asked: Asked) -> Effect:
    stored, dtype = asked.stored_dtype, asked.llm.get("dtype", "auto")
    if stored is None or dtype in ("auto", stored) or value:
        return value, ""
    raise ConfigError(
        f"quantization_encoding={dtype}, but the .safetensors files have {stored}; take {stored}, or set "
        "allow_safetensors_weights_fp32_bf6_bidirectional_cast"
    )


def revision(value: str, asked: Asked) -> Effect:
    if value == "main":
        return value, ""
    model = str(asked.llm.get("model", ""))
    if not asked.is_hub(model):
        raise ConfigError(f"huggingface_model_revision is {value!r}, but {model!r} is no hub id; leave it out")
    if "@" in model:
        raise ConfigError(f"huggingface_model_revision is {value!r} beside model_path={model!r}; give one revision")
    asked.llm["model"] = f"{model}@{value}"
    return value, ""


def weight_revision(value: str, asked: Asked) -> Effect:
    _, _, own = str(asked.llm.get("model", "")).partition("@")
    if value not in ("main", own):
        raise ConfigError(
            f"huggingface_weight_revision is {value!r}, huggingface_model_revision {own or 'main'!r}: weights and "
            "description come from one revision; give the same to both"
        )
    return own or "main", "as huggingface_model_revision" if own else ""


def force_download(value: bool, asked: Asked) -> Effect:
    if not value:
        return value, ""
    model = str(asked.llm.get("model", ""))
    if not asked.is_hub(model):
        raise ConfigError(f"force_download: {model!r} is no hub id, nothing is downloaded; leave it False")
    from megatron_infer.models.loading.sources import fetch

    fetch(model, force=True)
    return value, "fetched when the configuration was resolved"


def devices(value: list[str], asked: Asked) -> Effect:
    if not value:
        return value, ""
    if len(value) > 1:
        raise ConfigError(
            f"device_specs is {value!r}: an engine's process has one device; take data_parallel_degree, or torchrun "
            "with --tp, for several"
        )
    asked.llm["device"] = value[0].replace("gpu", "cuda")
    return value, ""


def rope_type(value: RopeType | None, asked: Asked) -> Effect:
    own = asked.rope_type
    if value is None or own is None or value is own:
        return own, ""
    raise ConfigError(f"rope_type={value.value}, but the model's files say {own.value}; leave it out")


def cache_strategy(value: CacheStrategy, asked: Asked) -> Effect:
    return CacheStrategy.PAGED, ""


def prefix_caching(value: bool, asked: Asked) -> Effect:
    asked.engine["enable_prefix_caching"] = value
    asked.engine.pop("prefix_caching_eviction_policy", None)
    if value:
        asked.engine["prefix_caching_eviction_policy"] = "lru"
    return value, "lru: a block stays until its memory is needed" if value else ""


def swapping(value: bool, asked: Asked) -> Effect:
    if value:
        asked.engine["preemption_mode"] = "swap"
    return value, "evicted requests are swapped, cached prefixes are not" if value else ""


def swap_space(value: float, asked: Asked) -> Effect:
    config = asked.config
    mode = config.options.get("preemption_mode", asked.engine.get("preemption_mode"))
    is_given = "host_kvcache_swap_space_gb" in config.model.kv_cache.model_fields_set
    if mode not in ("swap", "auto") or not (is_given or asked.engine.get("preemption_mode")):
        why = "acts only with enable_kvcache_swapping_to_host"
        _without_effect("host_kvcache_swap_space_gb", is_given and value, why)
        return 0.0, why
    asked.engine["swap_buffer_size_gb"] = value
    return value, ""


def utilization(value: float, asked: Asked) -> Effect:
    if not 0.0 < value <= 1.0:
        raise ConfigError(f"device_memory_utilization is {value}, it must be above 0 and at most 1")
    asked.utilization = value
    return value, ""


def variable_logits(value: bool, asked: Asked) -> Effect:
    return value, "execute by hand returns logits of the last return_n_logits positions" if value else ""
