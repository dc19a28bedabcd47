"""Command-line flags for the fields of `PipelineConfig`, generated from the tree, and the config they give."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from megatron_infer.cli.config_flags import SERVER_PREFIX, default_text, flag_of, given, given_flags
from megatron_infer.cli.loading import run_options
from megatron_infer.cli.parser import Parser
from megatron_infer.config.layout import Layout
from megatron_infer.errors import ConfigError
from megatron_infer.server.server_config import ServerConfig

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from megatron_infer.pipelines.config import PipelineConfig

DEST_PREFIX = "pipeline_"
NEEDED = "needs pydantic: pip install 'megatron-infer[pipelines]'"
NOT_FLAGS = ("options", "vision_config_overrides")
"""Mappings, for the configuration file only."""


def add_pipeline_options(parser: argparse.ArgumentParser) -> None:
    """--config-file, --section-name, and a flag for every field that no other option of the command has the name of."""
    group = parser.add_argument_group(
        "pipeline", "fields of PipelineConfig, also as MEGATRON_INFER_NAME in the environment and in --config-file"
    )
    try:
        from megatron_infer.pipelines.config import NAMES
        from megatron_infer.pipelines.config_layers import DRAFT
    except ModuleNotFoundError:
        _add_flag(parser, group, "config_file", NEEDED)
        _add_flag(parser, group, "section_name", NEEDED)
        return
    taken = set(parser._option_string_actions)
    for path, owner in NAMES.paths.items():
        name = path[-1]
        if path[0] == DRAFT or name in NOT_FLAGS or flag_of(name) in taken:
            continue
        info = owner.model_fields[name]
        is_bool = info.annotation is bool
        parsing: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if is_bool else {"metavar": "VALUE"}
        _add_flag(parser, group, name, _text_of(info), is_rare=name != "config_file", **parsing)


def add_audio_options(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of audio of `AudioGenerationConfig`; the values are texts."""
    group = parser.add_argument_group("audio", "fields of AudioGenerationConfig")
    try:
        from megatron_infer.pipelines.audio_config import AUDIO_FIELDS, AudioGenerationConfig
    except ModuleNotFoundError:
        _add_flag(parser, group, "audio_decoder", NEEDED)
        return
    for name in AUDIO_FIELDS:
        if name != "prometheus_metrics_mode":  # of processes that run on
            text = _text_of(AudioGenerationConfig.model_fields[name])
            _add_flag(parser, group, name, text, metavar="VALUE")


def _add_flag(
    parser: argparse.ArgumentParser, group: Any, name: str, text: str, *, is_rare: bool = False, **parsing: Any
) -> None:
    text = " ".join(text.split()).replace("%", "%%")
    action = group.add_argument(flag_of(name), dest=DEST_PREFIX + name, default=argparse.SUPPRESS, help=text, **parsing)
    if isinstance(parser, Parser):
        parser.shorten(action, is_rare=is_rare)


def _text_of(info: FieldInfo) -> str:
    """What a field does, and its default."""
    from megatron_infer.pipelines.field_rows import description_of

    default = "none" if info.default_factory is not None else default_text(info.default)
    return f"{description_of(info)} (default {default})"


def pipeline_values(args: argparse.Namespace) -> dict[str, Any]:
    """The fields that a command line gives by their flags."""
    given_names = (name for name in vars(args) if name.startswith(DEST_PREFIX))
    return {name.removeprefix(DEST_PREFIX): getattr(args, name) for name in given_names}


def pipeline_from(args: argparse.Namespace, *, free_bytes: int | None = None) -> PipelineConfig | None:
    """The resolved config of a command line; None if it has neither --config-file nor a field's flag.

    free_bytes: free memory to resolve for, instead of the machine's. Raises ConfigError, ModelError.
    """
    flags = pipeline_values(args)
    if not flags:
        return None
    if getattr(args, "config", None) is not None:
        raise ConfigError("--config beside --config-file or a pipeline's flag; put its options into --config-file")
    try:
        from megatron_infer.pipelines.config import NAMES, PipelineConfig
        from megatron_infer.pipelines.config_layers import OWN_FIELDS, parse_text
    except ModuleNotFoundError:
        raise ConfigError(f"{flag_of(next(iter(flags)))} {NEEDED}") from None
    flat = NAMES.flat()
    values: dict[str, Any] = {
        name: parse_text(value, NAMES.kind(flat[name]), flag_of(name)) if isinstance(value, str) else value
        for name, value in flags.items()
    }
    own = given(args)
    nested = {name: own.pop(name) for name in OWN_FIELDS if name in own}
    values |= own | ({"options": nested} if nested else {})
    values |= given_flags(args, ServerConfig, SERVER_PREFIX)
    if isinstance(values.get("served_model_name"), list | tuple):
        names = values.pop("served_model_name")
        if len(names) > 1:
            raise ConfigError(f"--served-model-name {' '.join(names)}: a pipeline has one name")
        values["served_model_name"] = names[0]
    if args.model:
        if "model_path" in values:
            raise ConfigError(f"MODEL {args.model} beside --model-path {values['model_path']}; give one of them")
        values["model_path"] = args.model
    values |= run_options(args) | given_flags(args, Layout, "")
    if free_bytes is None:
        return PipelineConfig(**values)
    config = PipelineConfig(**values | {"defer_resolve": True})
    config.resolve(free_bytes=free_bytes)
    return config
