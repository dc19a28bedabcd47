"""From a configuration tree to one InferenceConfig, one ServerConfig, arguments of LLM and a layout.

rows of the fields ──> what is asked for ──> description and shape of the model ──> memory by estimate
                                                              │
settings <── InferenceConfig, ServerConfig (their own checks) <──┘
"""

from __future__ import annotations

import dataclasses
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from megatron_infer.config.capacity import GIB
from megatron_infer.config.checks import acting_with, check_mtp
from megatron_infer.config.inference import ConfigWarning, InferenceConfig, WeightDtype
from megatron_infer.config.layout import Layout, RunOptions
from megatron_infer.config.machine_defaults import machine_config
from megatron_infer.config.model_shape import FP8_E4M3, KV_DTYPE_BYTES, ModelShape, mtp_shape
from megatron_infer.config.options import options_of
from megatron_infer.config.sizing import DEFAULT_MAX_TOKENS
from megatron_infer.config.speculative import speculative_of
from megatron_infer.errors import ConfigError
from megatron_infer.kernels.native import native_build
from megatron_infer.models.loading.description_shape import shape_of
from megatron_infer.models.loading.find import Kind, architecture_name, describe, find_model
from megatron_infer.pipelines.architectures import Architecture
from megatron_infer.pipelines.config_layers import OPTIONS, flat_name
from megatron_infer.pipelines.estimates import Estimator, MemoryEstimate, packed_bytes
from megatron_infer.pipelines.field_rows import (
    Engine,
    FieldPath,
    Model,
    RanksOf,
    Refused,
    Row,
    Rule,
    Server,
    fields_by_option,
    rows_of,
)
from megatron_infer.pipelines.field_types import PipelineRole, RopeType
from megatron_infer.pipelines.machine import Machine, find_machine
from megatron_infer.pipelines.resolved import Resolved, Setting
from megatron_infer.server.server_config import ServerConfig

if TYPE_CHECKING:
    from megatron_infer.models.loading.model_description import ModelDescription
    from megatron_infer.pipelines.config import PipelineConfig


@dataclass(slots=True, kw_only=True)
class Asked:
    """What the rows have put together so far."""

    config: PipelineConfig
    engine: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    llm: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, int] = field(default_factory=dict)
    architectures: dict[str, Architecture] = field(default_factory=dict)
    force: bool = False
    chat_template: str | None = None
    endpoint_base: str = ""
    role: str = PipelineRole.PrefillAndDecode.value
    utilization: float = 1.0
    description: ModelDescription | None = None

    @property
    def stored_dtype(self) -> str | None:
        """dtype of the model's .safetensors files; None for others."""
        return None if self.description is None or self.is_gguf(self.llm["model"]) else self.description.dtype

    @property
    def rope_type(self) -> RopeType | None:
        if self.description is None:
            return None
        if self.description.position_embedding != "rope":
            return RopeType.NONE
        is_normal = self.is_gguf(self.llm["model"]) and self.description.architecture == "LlamaForCausalLM"
        return RopeType.NORMAL if is_normal else RopeType.NEOX

    def is_gguf(self, model: str) -> bool:
        return bool(model) and find_model(model).kind is Kind.GGUF

    def gguf_encoding(self, model: str) -> str:
        """What most weights of a .gguf file are stored in: "q4_k"."""
        from megatron_infer.models.loading.gguf_file import GGUFFile

        return GGUFFile(find_model(model).path, with_vocabulary=False).main_encoding()

    def is_hub(self, model: str) -> bool:
        return bool(model) and find_model(model).kind is Kind.HUB

    @property
    def is_cuda(self) -> bool:
        """Whether the model runs on a GPU."""
        return find_machine(self.llm.get("device", "auto")).is_cuda


def resolve(config: PipelineConfig, sources: Mapping[FieldPath, str], *, free_bytes: int | None) -> Resolved:
    """Raises ConfigError, ModelError or NotImplementedError; the config is not changed.

    free_bytes: see `PipelineConfig.resolve`.
    """
    asked, settings = Asked(config=config), {}
    rows = list(_rows(config))
    for path, value, default, row in rows:
        if not (isinstance(row, Rule) and row.needs_model):
            settings[path] = _applied(path, value, default, row, asked, sources)
    del settings[OPTIONS,]
    _add_options(config, asked, settings, sources)
    _imply_phases(config, asked, settings)
    if asked.server.get("lora_root") is not None and asked.engine.get("lora") is None:
        asked.engine["lora"] = {}  # as `serve --lora-root` without the tree
    if not asked.llm.get("model"):
        raise ConfigError("model_path is empty: give an alias (smollm2), a directory, a hub id or a .gguf file")
    _check_world(config, Layout(**asked.layout))
    told = _ToldByBothNames(config)
    with told:
        ServerConfig(**asked.server)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConfigWarning)  # told once, when all options are known
            InferenceConfig(**asked.engine)
    architecture = _find_model(asked)
    for path, value, default, row in rows:
        if isinstance(row, Rule) and row.needs_model:
            settings[path] = _applied(path, value, default, row, asked, sources)
    _require(architecture, config, settings, asked)
    layout = Layout(**asked.layout)
    _check_world(config, layout)
    with told:
        server = ServerConfig(**asked.server)
    machine = find_machine(asked.llm.get("device", "auto"))
    if free_bytes is not None:
        machine = dataclasses.replace(machine, free_bytes=free_bytes)
    dtype = machine.dtype(asked.llm.get("dtype", "auto"), linear_backend=asked.engine.get("linear_backend", "auto"))
    with told:
        shape, draft, estimator = None, None, None
        if asked.description is not None:
            shape = shape_of(
                asked.description, dtype=dtype, tensor_parallel_size=layout.tp, pipeline_parallel_size=layout.pp
            )
            drafting = _draft_of(asked)
            draft = None if drafting is None else shape_of(drafting, dtype=dtype, tensor_parallel_size=layout.tp)
            estimator = _estimator(asked, shape, machine, layout, drafting, draft)
            _fit(asked, estimator, tensor_parallel_size=layout.tp)
        engine = machine_config(
            asked.engine,
            shape,
            is_cuda=machine.is_cuda,
            available_bytes=machine.free_bytes,
            tensor_parallel_size=layout.tp,
        )
        decided = engine.on_device(is_cuda=machine.is_cuda)
        sizes, estimate = None, None
        if shape is not None and estimator is not None:
            left = max(0, estimator.free - estimator.weights)
            sizes = decided.resolve(shape, tensor_parallel_size=layout.tp, available_bytes=left, draft=draft)
            estimate = MemoryEstimate(
                free=estimator.free,
                weights=estimator.weights,
                activations=estimator.activations(sizes.max_sequence_length),
                cache=sizes.kv_bytes + sizes.state_bytes,
            )
    by_path = {path: row for path, _, _, row in rows}
    effective = {
        flat_name(path): _in_effect(by_path.get(path), one, decided, server, layout) for path, one in settings.items()
    }
    return Resolved(
        engine=engine,
        server=server,
        llm={"threads": None, **asked.llm, "dtype": dtype, "device": machine.device},
        layout=layout,
        settings=effective,
        chat_template=asked.chat_template,
        endpoint_base=asked.endpoint_base,
        role=asked.role,
        architecture=architecture,
        description=asked.description,
        shape=shape,
        sizes=sizes,
        estimate=estimate,
    )


def _rows(config: PipelineConfig) -> Iterable[tuple[FieldPath, Any, Any, Row]]:
    """(path, value, default, row) of every field of the tree, in order."""
    for path, info, row in rows_of(type(config)):
        value: Any = config
        for name in path:
            value = getattr(value, name)
        yield path, value, info.get_default(call_default_factory=True), row


def _applied(
    path: FieldPath, value: Any, default: Any, row: Row, asked: Asked, sources: Mapping[FieldPath, str]
) -> Setting:
    source = _source(path, sources)
    effective, note = value, ""
    match row:
        case Refused(reason):
            if value != default:
                raise ConfigError(f"{path[-1]}={_shown(value)}: {reason}")
        case Rule(act):
            if act is not None:
                effective, note = act(value, asked)
        case RanksOf(axis):
            asked.layout[axis] = value
        case Model(argument):
            if value:
                asked.llm[argument] = value
        case Engine(option):
            note = "" if row.note is None else row.note(asked.config)
            if value is not None:
                asked.engine[option] = row.converted(value)
        case Server(option):
            if value is not None:
                asked.server[option] = row.converted(value)
    source = "derived" if source == "default" and effective != value else source
    return Setting(requested=value, value=effective, source=source, note=note)


def _source(path: FieldPath, sources: Mapping[FieldPath, str]) -> str:
    """Where a field, or one of a section's, was given."""
    return next((source for at, source in sources.items() if at[: len(path)] == path), "default")


def _shown(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    return repr(getattr(value, "value", value))


def _add_options(
    config: PipelineConfig, asked: Asked, settings: dict[FieldPath, Setting], sources: Mapping[FieldPath, str]
) -> None:
    """Options by their own names, beside those of the rows. Raises ConfigError for one that a given field sets, too."""
    engine_names, by_option = options_of(InferenceConfig), fields_by_option(type(config))
    fields = {path: (requested, row) for path, requested, _, row in _rows(config)}
    for name, value in config.options.items():
        path = by_option.get(name)
        has_one_name = path is not None and path[-1] == name
        if path is not None and has_one_name and _source(path, sources) != "default":
            raise ConfigError(f"{name} is given by fields of its section and by its own; give one of them")
        if path is not None and not has_one_name:
            requested, row = fields[path]
            if sources.get(path, "default") != "default":
                raise ConfigError(
                    f"{path[-1]}={_shown(requested)} and {name}={_shown(value)} set the same thing; give one of them"
                )
            if isinstance(row, Rule) and path in settings:
                note = f"{name} is given"
                settings[path] = dataclasses.replace(settings[path], value=value, source="derived", note=note)
        into: dict[str, Any] = asked.engine if name in engine_names else asked.server
        into = asked.llm if name in options_of(RunOptions) else asked.layout if name in options_of(Layout) else into
        into[name] = value
        declared = options_of(ServerConfig).get(name)
        shown = "(given)" if declared is not None and declared.is_secret else value
        source = sources.get((OPTIONS, name), "argument")
        at = path if path is not None and has_one_name else (OPTIONS, name)
        settings[at] = Setting(requested=shown, value=shown, source=source)


def _imply_phases(config: PipelineConfig, asked: Asked, settings: dict[FieldPath, Setting]) -> None:
    """Batching is phased where options that act only there are set, unless another policy is asked for."""
    phased = acting_with("phased", InferenceConfig)
    names = [name for name, default in phased if asked.engine.get(name) not in (None, default)]
    if names and config.enable_in_flight_batching:
        raise ConfigError(
            f"{names[0]} acts in phased batching, which takes no prompts into steps that decode "
            "(enable_in_flight_batching=True); leave one of them out"
        )
    if names and "batching" not in config.options:
        asked.engine["batching"] = "phased"
        note = f"batching is phased for {', '.join(names)}"
        at = ("enable_in_flight_batching",)
        settings[at] = dataclasses.replace(settings[at], note=note)


def _find_model(asked: Asked) -> Architecture:
    """The model's architecture; its description is kept in `asked` unless the architecture is one's own."""
    place = find_model(asked.llm["model"])
    own = asked.architectures.get(architecture_name(place) or "")
    if own is not None and own.pipeline_model is not None:
        return own
    asked.description = _description_of(asked.llm["model"])
    return own or Architecture(name=asked.description.architecture)


def _description_of(model: str) -> ModelDescription:
    description = describe(find_model(model))
    if description is None:
        from megatron_infer.models.loading.sources import open_source  # imports torch

        description = open_source(model).config()
    return description


def _draft_of(asked: Asked) -> ModelDescription | None:
    """The description of the model that drafts tokens; None without one, and for a live model."""
    drafts = speculative_of(asked.engine.get("speculative"))
    return _description_of(drafts.draft_model) if drafts is not None and isinstance(drafts.draft_model, str) else None


def _require(
    architecture: Architecture, config: PipelineConfig, settings: dict[FieldPath, Setting], asked: Asked
) -> None:
    """What the architecture needs instead of what was asked for, unless force is set."""
    fields, rows = {path[-1]: path for path in settings}, {path: row for path, _, row in rows_of(type(config))}
    for name, value in architecture.required_arguments.items():
        if name not in fields:
            raise ConfigError(f"architecture {architecture.name} requires {name}, which is no field")
        path = fields[name]
        if path not in rows:
            raise ConfigError(f"architecture {architecture.name} requires {name}, which is no field but an option")
        value = _checked(config, path, value)
        one, row = settings[path], rows[path]
        if one.value == value:
            continue
        why = f"architecture {architecture.name} requires {name}={_shown(value)}"
        if asked.force:
            warnings.warn(f"{why}; force: {_shown(one.value)} is kept", ConfigWarning, stacklevel=4)
            continue
        warnings.warn(f"{why}: it goes before {_shown(one.value)}", ConfigWarning, stacklevel=4)
        applied = _applied(path, value, None, row, asked, {path: "derived"})
        settings[path] = dataclasses.replace(applied, requested=one.requested, note=why)


def _checked(config: PipelineConfig, path: FieldPath, value: Any) -> Any:
    """`value` as the field at `path` holds it. Raises ConfigError for one of another type."""
    owner: Any = config
    for name in path[:-1]:
        owner = getattr(owner, name)
    probe = type(owner).model_construct()
    try:
        setattr(probe, path[-1], value)
    except ValueError as error:  # pydantic's is one
        raise ConfigError(f"an architecture requires {path[-1]}={value!r}, which cannot be: {error}") from None
    return getattr(probe, path[-1])


def _check_world(config: PipelineConfig, layout: Layout) -> None:
    names = {name: path[-1] for name, path in fields_by_option(type(config)).items()}
    layout.check(names)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    several = {names.get(name, name): getattr(layout, name) for name in ("tp", "pp", "ep")}
    for name, size in several.items():
        if size > 1 and world == 1:
            raise ConfigError(
                f"{name} is {size}, but there is 1 process; start {layout.world_size}: "
                f"torchrun --nproc-per-node {layout.world_size} -m megatron_infer serve ..."
            )
    if world > 1 and layout.world_size != world:
        raise ConfigError(
            f"dp x tp x pp x ep = {layout.dp} x {layout.tp} x {layout.pp} x {layout.ep} = {layout.world_size} "
            f"(data_parallel_degree, tp, pp, ep_size), but torchrun started {world} processes; start as many"
        )


def _estimator(
    asked: Asked,
    shape: ModelShape,
    machine: Machine,
    layout: Layout,
    drafting: ModelDescription | None,
    draft: ModelShape | None,
) -> Estimator:
    """drafting, draft: the model that drafts tokens, and one rank's share of it."""
    engine = asked.engine
    assert asked.description is not None
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if "WORLD_SIZE" in os.environ else layout.dp
    weight_dtype = WeightDtype(engine.get("weight_dtype", WeightDtype.AUTO)).value
    is_native = native_build.runs_linears(asked.engine.get("linear_backend", "auto"))
    of: dict[str, Any] = {
        "weight_dtype": weight_dtype,
        "replaces": is_native and not engine.get("batch_invariant", False),
    }
    packed = packed_bytes(shape, has_own_embedding=not asked.description.tied_embeddings, **of)
    if drafting is not None and draft is not None:
        packed += packed_bytes(draft, has_own_embedding=not drafting.tied_embeddings, **of)
    is_fp8 = engine.get("kv_cache_dtype") == "fp8_e4m3"
    kv_element_bytes = KV_DTYPE_BYTES[FP8_E4M3] if is_fp8 else shape.kv_dtype_bytes
    drafts = speculative_of(engine.get("speculative"))
    if drafts is not None and "mtp" in drafts.methods:
        check_mtp(shape)
        draft = mtp_shape(shape, kv_element_bytes=kv_element_bytes)
    return Estimator(
        shape=shape,
        free=machine.free_bytes // (1 if machine.is_cuda else on_host),
        utilization=asked.utilization,
        page_size=engine["block_size_tokens"],
        kv_element_bytes=kv_element_bytes,
        max_tokens=engine.get("max_tokens") or DEFAULT_MAX_TOKENS,
        draft=draft,
        packed=0 if machine.is_cuda else packed,
        weight_dtype=weight_dtype,
        keeps_snapshots=shape.state is not None and bool(engine.get("enable_prefix_caching")),
        buffer=int(engine["buffer_size_gb"] * GIB) if "buffer_size_gb" in engine else None,
    )


def _fit(asked: Asked, estimator: Estimator, *, tensor_parallel_size: int) -> None:
    """Choose length, batch and buffer where they are left open. Raises CapacityError with values that would fit."""
    engine, positions = asked.engine, estimator.shape.max_position
    asked_length: int | None = engine.get("max_sequence_length")
    length = asked_length or positions or InferenceConfig.max_sequence_length
    if positions is not None and asked_length is not None and asked_length > positions:
        _check_length(asked_length, asked.description)
        length = positions
    room = estimator.room(length)
    longest = estimator.longest(room)
    if longest < (length if asked_length is not None else min(length, estimator.page_size)):
        raise estimator.too_little(length)
    if longest < length:
        warnings.warn(
            f"max_length: the model has {length:,} positions, the cache holds {longest:,} tokens: the latter is used",
            ConfigWarning,
            stacklevel=5,
        )
        length = longest
    if asked_length is None:
        engine["max_sequence_length"] = length
    requests: int | None = engine.get("max_requests")
    if requests is None:
        requests = max(estimator.batch_size(room) // tensor_parallel_size, 1) * tensor_parallel_size
        engine["max_requests"] = requests
    buffer = estimator.buffer_bytes(room, max_length=length, max_batch=requests)
    engine.setdefault("buffer_size_gb", buffer / GIB)


def _check_length(length: int, description: ModelDescription | None) -> None:
    if description is None or description.position_embedding != "learned_absolute":
        return
    if length > description.max_sequence_length:
        raise ConfigError(
            f"max_length is {length:,}, the model has {description.max_sequence_length:,} learned positions; lower it"
        )


def _in_effect(row: Row | None, one: Setting, engine: InferenceConfig, server: ServerConfig, layout: Layout) -> Setting:
    """The setting with the value that the option has in the end. row: the field's; None for an option."""
    note = one.note
    match row:
        case Engine(option):
            value = getattr(engine, option)
            note = one.note or f"{option} of InferenceConfig"
            is_other = one.requested is not None and type(value) is not type(one.requested)
            if is_other and isinstance(one.requested, Mapping):  # by the option's own names
                return dataclasses.replace(one, value=value, note=note)
            if is_other and row.converted(one.requested) == value:
                value = one.requested  # the same in the field's own words
        case RanksOf(axis):
            value = getattr(layout, axis)
        case Server(option):
            value, note = getattr(server, option), one.note or f"{option} of ServerConfig"
        case _:
            return one
    source = "derived" if value != one.requested and one.source == "default" else one.source
    return dataclasses.replace(one, value=value, source=source, note=note)


class _ToldByBothNames:
    """Errors of options have the field's name in front, unless the option was given by its own name."""

    def __init__(self, config: PipelineConfig) -> None:
        self._names = {
            row.option: path[-1]
            for path, _, row in rows_of(type(config))
            if isinstance(row, Engine | Server) and not row.has_own_words
            if path[-1] != row.option and row.option not in config.options
        }

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if not isinstance(error, ConfigError | NotImplementedError):
            return
        message = str(error)
        for option, name in self._names.items():
            message = re.sub(rf"^{option} is\b", f"{name} ({option}): is", message)
            message = re.sub(rf"(?<![\w(]){option}\b(?!\))", f"{name} ({option})", message)
        if message != str(error):
            raise type(error)(message) from error
