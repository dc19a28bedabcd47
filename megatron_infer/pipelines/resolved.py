"""What a resolved configuration is: each field's setting, and the values that engines and servers are built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_infer.config.inference import InferenceConfig
    from megatron_infer.config.layout import Layout
    from megatron_infer.config.model_shape import ModelShape
    from megatron_infer.config.resolved_sizes import ResolvedSizes
    from megatron_infer.models.loading.model_description import ModelDescription
    from megatron_infer.pipelines.architectures import Architecture
    from megatron_infer.pipelines.estimates import MemoryEstimate
    from megatron_infer.server.server_config import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field: what was asked for, what is in effect, where that comes from, and why."""

    requested: Any
    """The field's value: as given, else its default."""
    value: Any
    """What is in effect."""
    source: str
    """argument, environment, file, default, or derived where the value in effect is not the one asked for."""
    note: str = ""
    """Why the value in effect differs from the one asked for, or what it does here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What a configuration comes to: everything that engines, servers and pipelines are built from."""

    engine: InferenceConfig
    server: ServerConfig
    llm: Mapping[str, Any]
    """Arguments of `LLM`, but for `config` and the tokenizer: model, dtype, device, threads,
    use_legacy_module."""
    layout: Layout
    settings: Mapping[str, Setting]
    """Field -> setting. A field of a nested config has its own name; of the draft model, with draft_ in front."""
    chat_template: str | None
    """Text of the template given; None: the model's own."""
    endpoint_base: str
    """What the addresses of the coordinator begin with; the coordinator's own of an engine with a role."""
    role: str
    """Of `PipelineRole`."""
    architecture: Architecture
    description: ModelDescription | None
    """None for an architecture of one's own."""
    shape: ModelShape | None
    """One rank's share of the model; None for an architecture of one's own."""
    sizes: ResolvedSizes | None
    """Sizes of an engine on this machine; None for an architecture of one's own."""
    estimate: MemoryEstimate | None
    """Memory of a rank; None for an architecture of one's own."""
