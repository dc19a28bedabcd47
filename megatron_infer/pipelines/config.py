"""`PipelineConfig`: one tree for everything a pipeline or a server can be told. It needs no torch.

    PipelineConfig(model_path="smollm2", max_length=2048).resolved.engine     # an InferenceConfig

A value comes from an argument, else from MEGATRON_INFER_NAME in the environment, else from the file, else it is the
field's default. What each field is mapped to: `pipelines.mapping`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PrivateAttr, ValidationError

from megatron_infer.config import lora, speculative
from megatron_infer.config.capacity import GIB
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.errors import ConfigError
from megatron_infer.pipelines import config_layers
from megatron_infer.pipelines.config_layers import FieldPath, Kind, Names
from megatron_infer.pipelines.model_config import (
    KVCacheConfig,
    LoRAConfig,
    MAXModelConfig,
    PipelineRole,
    ProfilingConfig,
    QuantizationEncoding,
    SamplingConfig,
    Section,
    SpeculativeConfig,
    Text,
    by_name,
    validation_text,
)
from megatron_infer.pipelines.settings import Resolved, Setting
from megatron_infer.server.server_config import ServerConfig

if TYPE_CHECKING:
    from megatron_infer.pipelines.session import InferenceSession

log = logging.getLogger("megatron_infer")


class PipelineConfig(Section):
    """Everything a pipeline or a server can be told; frozen once it is resolved, which it is after construction unless
    defer_resolve is set.

    Fields of nested configs and options of InferenceConfig, ServerConfig and LLM may be given flat, by their own names.
    Raises ConfigError for an unknown name, a wrong type, or a value that is refused.
    """

    config_file: str | None = None
    """YAML file with fields of this tree, flat or nested; arguments and the environment go before it."""
    section_name: str | None = None
    """The section of config_file to read. None: the whole file."""
    max_length: int | None = None
    """Most tokens of prompt and output together, per request. None: the model's limit, cut to what the cache holds."""
    pipeline_role: Annotated[PipelineRole, by_name(PipelineRole)] = PipelineRole.PrefillAndDecode
    """What a server does of a request; the default, prefill_and_decode, is the only role that is built."""
    max_batch_size: int | None = None
    """Most requests at once, per replica. None: from the memory and max_batch_input_tokens."""
    max_queue_size_tg: int | None = None
    """Most requests that decode, in phased batching."""
    min_batch_size_tg: int | None = None
    """Requests that decode below which prompts go first, in phased batching."""
    ep_size: int = 1
    """Expert-parallel ranks of an engine."""
    ce_delay_ms: float = 0.0
    """Milliseconds that prompts wait for others, in phased batching."""
    enable_prioritize_first_decode: bool = False
    """Requests decode right after the step that ended their prompt, in phased batching."""
    enable_chunked_prefill: bool = True
    """Split prompts into chunks over several steps; prompts may then be longer than max_batch_input_tokens."""
    enable_in_flight_batching: bool = False
    """Take prompts into steps that decode."""
    max_num_steps: int = -1
    """Decode steps that are launched before the first is read; -1: one."""
    max_batch_input_tokens: int = 8192
    """Most tokens of a step, prompts and decoding requests together."""
    enable_echo: bool = False
    """Serve log probabilities of prompts."""
    pool_embeddings: bool = True
    """Embeddings are one vector a prompt, not one a token."""
    chat_template: Annotated[Path | None, Field(strict=False)] = None
    """File with a chat template, or JSON with the key chat_template, that goes before the model's own."""
    use_experimental_kernels: Text = "false"
    """"true", or names out of fused_rope."""
    use_vendor_blas: Text = "false"
    """"true": linear layers run in the vendor's library."""
    pdl_level: Text = "0"
    """"0": a kernel is launched when the one before has ended. "1" and "2": its programs start while those of the one
    before end (MEGATRON_INFER_PDL=1), on GPUs of compute capability 9.0 on."""
    custom_architectures: list[str] = Field(default_factory=list)
    """Modules with architectures of one's own: PATH or FOLDER:MODULE, each with a list ARCHITECTURES."""
    zmq_endpoint_base: str = ""
    """What the addresses of a server's processes begin with: ipc://PATH. Empty: generated."""
    execute_empty_batches: bool = False
    """No effect, with a warning when True: expert-parallel ranks are one engine and take part in every step."""
    max_batch_total_tokens: int | None = None
    """Most tokens of context, over all requests of a step that prefills."""
    force: bool = False
    """Keep values that an architecture's required arguments would replace, and a quantization_encoding that is not the
    file's. Never skips a check of safety."""
    kvcache_ce_watermark: float = 0.95
    """Share of the cache beyond which no prompt is admitted beside running requests."""
    enable_overlap_scheduler: bool = False
    """Commit a step while the next one runs. False leaves it to the device: on a GPU it is on, unless `options` has
    overlap=False."""
    use_legacy_module: bool = True
    """Build the model of megatron-core's stock classes, and adopt these in place. False, and for hybrids: of the paged
    spec of this package. The logits are the same."""
    defer_resolve: bool = False
    """Check types only, until resolve() is called."""
    model: MAXModelConfig = Field(default_factory=MAXModelConfig)
    """Where the model comes from, and its cache."""
    draft_model: MAXModelConfig | None = None
    """The model that drafts tokens."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """What requests may ask for."""
    profiling: ProfilingConfig = Field(default_factory=ProfilingConfig)
    """Ranges for profilers."""
    lora: LoRAConfig | None = None
    """Adapters beside the model."""
    speculative: SpeculativeConfig | None = None
    """Tokens that are drafted and then verified."""
    options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Options of InferenceConfig, ServerConfig and LLM by their own names; they may also be given flat."""

    _layers: dict[FieldPath, tuple[str, Any]] = PrivateAttr(default_factory=dict)
    """Path -> (source, value) of what was given."""
    _resolved: Resolved | None = PrivateAttr(default=None)

    def __init__(self, *unnamed: Any, **values: Any) -> None:
        if unnamed:
            raise ConfigError(f"{type(self).__name__} takes values by name; write model_path={unnamed[0]!r:.80}")
        found = self._names().gathered(values, os.environ)
        try:
            super().__init__(**_sections(config_layers.nested({path: value for path, (_, value) in found.items()})))
        except ValidationError as error:
            raise ConfigError(validation_text(error)) from None
        self._layers = {path: (source, self._value(path)) for path, (source, _) in found.items()}
        if not self.defer_resolve:
            self.resolve()

    @classmethod
    def _names(cls) -> Names:
        """Every name that it takes."""
        return NAMES

    def resolve(self, *, free_bytes: int | None = None) -> None:
        """Check everything and derive what is in effect; from then on the config is frozen. A second call does nothing.

        free_bytes: free memory of the device to resolve for. None: as it is. Raises ConfigError, ModelError, or
        NotImplementedError.
        """
        if self._resolved is not None:
            return
        from megatron_infer.pipelines.resolve import resolve

        self._resolved = resolve(self, sources_of(self), free_bytes=free_bytes)
        for section in (self, self.model, self.model.kv_cache, self.sampling, self.profiling):
            section.freeze()

    @property
    def is_resolved(self) -> bool:
        return self._resolved is not None

    @property
    def resolved(self) -> Resolved:
        """What engines, servers and pipelines are built from. Raises ConfigError before `resolve`."""
        if self._resolved is None:
            raise ConfigError("the PipelineConfig is not resolved (defer_resolve): call its resolve() first")
        return self._resolved

    @property
    def effective(self) -> Mapping[str, Setting]:
        """Field -> Setting: what was asked for, what is in effect, from where, and why."""
        return self.resolved.settings

    @property
    def requested(self) -> Mapping[str, Any]:
        """What was given, by argument, environment or file; flat."""
        return {config_layers.flat_name(path): value for path, (_, value) in self._layers.items()}

    @property
    def graph_quantization_encoding(self) -> QuantizationEncoding | None:
        """The encoding of a GGUF file; None for float types. Raises ConfigError when none is set."""
        encoding = self.model.quantization_encoding
        if encoding is None:
            raise ConfigError("quantization_encoding is not set: set it to the encoding of the .gguf file, or a dtype")
        return encoding if encoding.value.startswith("q") else None

    def retrieve_chat_template(self) -> str | None:
        """The text of the chat template in use: that of chat_template, else the model's own; None: there is none."""
        resolved = self.resolved
        if resolved.chat_template is not None:
            return resolved.chat_template
        from megatron_infer.model_loader.sources import open_source

        return open_source(resolved.llm["model"]).tokenizer().chat_template

    def configure_session(self, session: InferenceSession) -> None:
        """Set the session's device and number of threads to those in effect; ranges and kernels are the engine's."""
        llm = self.resolved.llm
        session.set_up(device=llm["device"], num_threads=llm["threads"])

    def log_basic_config(self) -> None:
        """Log the model, its limits and the memory of its cache."""
        for line in _basic_lines(self):
            log.info(line)

    def log_pipeline_info(self) -> None:
        """Log every field: what was asked for, what is in effect, from where, and why."""
        lines = _basic_lines(self)
        for name, one in self.effective.items():
            asked = "" if one.value == one.requested else f" (asked: {_plain(one.requested)})"
            note = f": {one.note}" if one.note else ""
            lines.append(f"{name} = {_plain(one.value)}{asked}, {one.source}{note}")
        for line in lines:
            log.info(line)

    def _value(self, path: FieldPath) -> Any:
        """The present value of a field, or of an option; None where its section is left out."""
        owner: Any = self
        for name in path:
            owner = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
        return owner

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PipelineConfig):
            return NotImplemented
        return self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]

    def _values(self) -> dict[str, Any]:
        return self.model_dump(exclude={"config_file", "section_name", "defer_resolve"})


SECTIONS: dict[FieldPath, type[Section]] = {
    ("model",): MAXModelConfig,
    ("model", "kv_cache"): KVCacheConfig,
    ("draft_model",): MAXModelConfig,
    ("draft_model", "kv_cache"): KVCacheConfig,
    ("sampling",): SamplingConfig,
    ("profiling",): ProfilingConfig,
    ("lora",): LoRAConfig,
    ("speculative",): SpeculativeConfig,
}


def _kind(annotation: str) -> Kind:
    """How a value of a dataclass's field is written as text."""
    if annotation.startswith("str"):
        return Kind.TEXT
    return Kind.LIST if annotation.startswith("tuple[str") else Kind.VALUE


_DECLARED = {item.name: str(item.type) for kind in (InferenceConfig, ServerConfig) for item in dataclasses.fields(kind)}
NAMES = Names.of(
    PipelineConfig,
    SECTIONS,
    options=frozenset([*_DECLARED, "dtype", "device", "threads", "dp", "tp", "pp", "ep"]),
    kinds={"dtype": Kind.TEXT, "device": Kind.TEXT, **{name: _kind(kind) for name, kind in _DECLARED.items()}},
    own_fields={
        name: frozenset(item.name for item in dataclasses.fields(kind))
        for name, kind in (("lora", lora.LoRAConfig), ("speculative", speculative.SpeculativeConfig))
    },
)


def _sections(tree: dict[str, Any], prefix: FieldPath = ()) -> dict[str, Any]:
    """Nested mappings -> the configs of the sections; plain values stay."""
    built = {}
    for name, value in tree.items():
        kind = SECTIONS.get((*prefix, name))
        if kind is None:
            built[name] = value
            continue
        try:
            built[name] = kind(**_sections(value, (*prefix, name)))
        except ValidationError as error:
            raise ConfigError(validation_text(error)) from None
    return built


def sources_of(config: PipelineConfig) -> dict[FieldPath, str]:
    """Where the present value of each field that was given or assigned comes from."""
    sources = {}
    given = config._layers
    for path in (*config._names().paths, *(path for path in given if path[0] == config_layers.OPTIONS)):
        section = config._value(path[:-1])
        if section is None or (path[0] != config_layers.OPTIONS and path[-1] not in section.model_fields_set):
            continue
        source, value = given.get(path, ("argument", None))
        sources[path] = source if path in given and config._value(path) == value else "argument"
    return sources


def _basic_lines(config: PipelineConfig) -> list[str]:
    resolved = config.resolved
    sizes, estimate, most = resolved.sizes, resolved.estimate, resolved.engine.max_requests
    lines = [
        f"model {resolved.llm['model']}: {resolved.architecture.name}",
        f"at most {'as many as fit' if most is None else format(most, ',')} requests of "
        f"{resolved.engine.max_sequence_length:,} tokens",
    ]
    if sizes is not None and estimate is not None:
        lines.append(
            f"cache {sizes.kv_bytes / GIB:.2f} GiB in {sizes.num_blocks:,} blocks of {sizes.block_size} tokens; "
            f"weights {estimate.weights / GIB:.2f} GiB, activations {estimate.activations / GIB:.2f} GiB"
        )
    return lines


def _plain(value: Any) -> str:
    return str(getattr(value, "value", value))
