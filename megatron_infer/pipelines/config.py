"""`PipelineConfig`: one tree for everything a pipeline or a server can be told. It needs no torch.

    PipelineConfig(model_path="smollm2", max_length=2048).resolved.engine     # an InferenceConfig

A value comes from an argument, else from MEGATRON_INFER_NAME in the environment, else from the file, else it is the
field's default. What each field acts as is the row in its annotation: `pipelines.field_rows`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PrivateAttr, ValidationError

from megatron_infer.config.capacity import GIB
from megatron_infer.errors import ConfigError
from megatron_infer.pipelines import config_layers
from megatron_infer.pipelines import field_rules as rules
from megatron_infer.pipelines.config_layers import Names
from megatron_infer.pipelines.field_rows import Engine, FieldPath, RanksOf, Rule, Server
from megatron_infer.pipelines.field_types import (
    PipelineRole,
    QuantizationEncoding,
    Section,
    Text,
    by_name,
    validation_text,
)
from megatron_infer.pipelines.model_config import (
    LoRAConfig,
    MAXModelConfig,
    ProfilingConfig,
    SamplingConfig,
    SpeculativeConfig,
)
from megatron_infer.pipelines.resolved import Resolved, Setting

if TYPE_CHECKING:
    from megatron_infer.pipelines.inference_session import InferenceSession

log = logging.getLogger("megatron_infer")


class PipelineConfig(Section):
    """Everything a pipeline or a server can be told; frozen once it is resolved, which it is after construction unless
    defer_resolve is set.

    Fields of nested configs and options of InferenceConfig, ServerConfig and LLM may be given flat, by their own names.
    Raises ConfigError for an unknown name, a wrong type, or a value that is refused.
    """

    config_file: Annotated[str | None, Rule()] = None
    """YAML file with fields of this tree, flat or nested; arguments and the environment go before it."""
    section_name: Annotated[str | None, Rule()] = None
    """The section of config_file to read. None: the whole file."""
    defer_resolve: Annotated[bool, Rule()] = False
    """Check types only, until resolve() is called."""
    force: Annotated[bool, Rule(rules.force)] = False
    """Keep values that an architecture's required arguments would replace, and a quantization_encoding that is not the
    file's. Never skips a check of safety."""
    custom_architectures: Annotated[list[str], Rule(rules.architectures)] = Field(default_factory=list)
    """Python modules with custom architectures: PATH or FOLDER:MODULE, each with a list ARCHITECTURES."""
    use_legacy_module: Annotated[bool, Rule(rules.legacy_module, needs_model=True)] = True
    """Build the model of megatron-core's stock classes, and adopt these in place. False, and for hybrids: of the paged
    spec of this package. The logits are the same."""
    chat_template: Annotated[Path | None, Field(strict=False), Rule(rules.chat_template)] = None
    """File with a chat template, or JSON with the key chat_template, that goes before the model's own."""
    max_length: Annotated[int | None, Engine("max_sequence_length")] = None
    """Most tokens of prompt and output together, per request. None: the model's limit, cut to what the cache holds."""
    max_batch_size: Annotated[int | None, Engine("max_requests")] = None
    """Most requests at once, per replica. None: from the memory and max_batch_input_tokens."""
    max_batch_input_tokens: Annotated[int, Engine("max_tokens")] = 8192
    """Most tokens of a step, prompts and decoding requests together."""
    max_batch_total_tokens: Annotated[int | None, Engine("max_batch_total_tokens")] = None
    max_num_steps: Annotated[int, Engine("max_steps_in_flight", rules.steps_in_flight, rules.why_steps_in_flight)] = -1
    """Decode steps that are launched before the first is read; -1: one."""
    max_queue_size_tg: Annotated[int | None, Engine("max_queue_size_tg")] = None
    min_batch_size_tg: Annotated[int | None, Engine("min_batch_size_tg")] = None
    ce_delay_ms: Annotated[float, Engine("ce_delay_ms")] = 0.0
    enable_prioritize_first_decode: Annotated[bool, Engine("enable_prioritize_first_decode")] = False
    enable_chunked_prefill: Annotated[bool, Engine("enable_chunked_prefill")] = True
    """Split prompts into chunks over several steps; prompts may then be longer than max_batch_input_tokens."""
    enable_in_flight_batching: Annotated[bool, Engine("batching", rules.batching_policy, has_own_words=True)] = False
    """Take prompts into steps that decode."""
    kvcache_ce_watermark: Annotated[float, Engine("admission_watermark")] = 0.95
    """Share of the cache beyond which no prompt is admitted beside running requests."""
    execute_empty_batches: Annotated[bool, Rule(rules.empty_batches)] = False
    """No effect, with a warning when True: expert-parallel ranks are one engine and take part in every step."""
    enable_overlap_scheduler: Annotated[bool, Engine("overlap", rules.overlap, has_own_words=True)] = False
    """Commit a step while the next one runs. False leaves it to the device: on a GPU it is on, unless `options` has
    overlap=False."""
    pipeline_role: Annotated[PipelineRole, by_name(PipelineRole), Rule(rules.pipeline_role)] = (
        PipelineRole.PrefillAndDecode
    )
    """What `megatron-infer serve` does of a request. prefill_only and decode_only: no HTTP, the engine is a replica of
    the coordinator at zmq_endpoint_base."""
    ep_size: Annotated[int, RanksOf("ep")] = 1
    """Expert-parallel ranks of an engine."""
    enable_echo: Annotated[bool, Server("enable_echo")] = False
    pool_embeddings: Annotated[bool, Server("pool_embeddings")] = True
    use_experimental_kernels: Annotated[
        Text, Rule(rules.experimental_kernels, instead_of="use_flashinfer_fused_rope", needs_model=True)
    ] = "false"
    """"true", or names out of fused_rope."""
    use_vendor_blas: Annotated[Text, Engine("linear_backend", rules.linear_backend, has_own_words=True)] = "false"
    """"true": linear layers run in the vendor's library."""
    pdl_level: Annotated[Text, Rule(rules.pdl_level, needs_model=True)] = "0"
    """"0": a kernel is launched when the one before has ended. "1" and "2": its programs start while those of the one
    before end (MEGATRON_INFER_PDL=1), on GPUs of compute capability 9.0 on."""
    zmq_endpoint_base: Annotated[str, Rule(rules.endpoint_base)] = ""
    """What the addresses of a server's processes begin with: ipc://PATH. Empty: generated. With a pipeline_role the
    address of the coordinator: tcp://HOST:PORT or ipc://PATH."""
    lora: Annotated[LoRAConfig | None, Engine("lora", rules.lora, has_own_words=True)] = None
    """Adapters beside the model."""
    speculative: Annotated[SpeculativeConfig | None, Engine("speculative", rules.speculative, has_own_words=True)] = (
        None
    )
    """Tokens that are drafted and then verified."""
    draft_model: Annotated[MAXModelConfig | None, Rule(rules.draft_model)] = None
    """The model that drafts tokens."""
    options: Annotated[dict[str, Any], Rule()] = Field(default_factory=dict, repr=False)
    """Options of InferenceConfig, ServerConfig and LLM by their own names; they may also be given flat."""
    model: MAXModelConfig = Field(default_factory=MAXModelConfig)
    """Where the model comes from, and its cache."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    """What requests may ask for."""
    profiling: ProfilingConfig = Field(default_factory=ProfilingConfig)
    """Ranges for profilers."""

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
        from megatron_infer.models.loading.sources import open_source

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


NAMES = Names.of(PipelineConfig)


def _sections(tree: dict[str, Any], prefix: FieldPath = ()) -> dict[str, Any]:
    """Nested mappings -> the configs of the sections; plain values stay."""
    built = {}
    for name, value in tree.items():
        kind = NAMES.sections.get((*prefix, name))
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
