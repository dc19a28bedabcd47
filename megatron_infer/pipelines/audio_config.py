"""`AudioGenerationConfig`: a `PipelineConfig` for a model that draws speech tokens, and its audio decoder.

AudioGenerationConfig(model_path="voice/", audio_decoder="codec", audio_decoder_weights="voice/codec.safetensors")
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, PrivateAttr

from megatron_infer.config.inference import ConfigWarning
from megatron_infer.engine.metrics.modes import PrometheusMetricsMode
from megatron_infer.errors import ConfigError, unknown_name
from megatron_infer.pipelines.architectures import custom_architectures
from megatron_infer.pipelines.config import PipelineConfig, sources_of
from megatron_infer.pipelines.config_layers import Names, parse_text
from megatron_infer.pipelines.field_rows import FieldPath
from megatron_infer.pipelines.field_types import by_name
from megatron_infer.pipelines.resolved import Resolved, Setting
from megatron_infer.server.audio.blocks import BlockSchedule, PrependPromptSpeechTokens
from megatron_infer.server.audio.registry import Opener, check_decoder

POSITIONAL = (
    "audio_decoder",
    "audio_decoder_weights",
    "chunk_size",
    "buffer",
    "block_causal",
    "prepend_prompt_speech_tokens",
    "prepend_prompt_speech_tokens_causal",
    "run_model_test_mode",
    "prometheus_metrics_mode",
)
"""Arguments of AudioGenerationConfig that may be given without their names, in order."""


class AudioGenerationConfig(PipelineConfig):
    """Everything a pipeline that speaks can be told. Of the engine, batching is "phased" unless another is asked for.

    Arguments without a name are those of `POSITIONAL`, in this order.

    run_model_test_mode, an argument: no decoder weights are needed, as `tones` stands in.
    """

    audio_decoder: str = ""
    """The audio decoder, by name; required, and with `speak` that of the model's speech.json unless given."""
    audio_decoder_weights: str = ""
    """Its weights: a safetensors file, or a directory. Empty for a decoder without weights."""
    audio_decoder_config: dict[str, Any] = Field(default_factory=dict)
    """Given to the decoder's own constructor."""
    chunk_size: list[int] | None = None
    """New speech tokens of each block, 15,30,60 for example: the last entry repeats. None: one block at the end."""
    buffer: int = 0
    """Tokens decoded before that are decoded again as left context of a block; their sound is dropped."""
    block_causal: bool = False
    """Whether the tokens of `buffer` look at the block behind them."""
    prepend_prompt_speech_tokens: Annotated[PrependPromptSpeechTokens, by_name(PrependPromptSpeechTokens)] = (
        PrependPromptSpeechTokens.NEVER
    )
    """Whether the decoder sees the voice's tokens: never, once or rolling. once: before the first block. rolling: also
    before later ones, as many of the last as fill `buffer`."""
    prepend_prompt_speech_tokens_causal: bool = False
    """Whether the voice's tokens look at the block behind them."""
    prometheus_metrics_mode: Annotated[PrometheusMetricsMode, by_name(PrometheusMetricsMode)] = (
        PrometheusMetricsMode.INSTRUMENT_ONLY
    )
    """Who serves the metrics: instrument_only, launch_server or launch_multiproc_server."""

    _run_model_test_mode: bool = PrivateAttr(default=False)

    def __init__(self, *unnamed: Any, **values: Any) -> None:
        given = dict(zip(POSITIONAL, unnamed, strict=False))
        if twice := sorted(given.keys() & values.keys()):
            raise ConfigError(
                f"{twice[0]} is given by its place ({given[twice[0]]!r:.80}) and by its name; the places are those of "
                f"{', '.join(POSITIONAL)}: give it once"
            )
        values |= given
        run_model_test_mode = values.pop("run_model_test_mode", False)
        if not isinstance(run_model_test_mode, bool):
            raise ConfigError(f"run_model_test_mode is {run_model_test_mode!r}, it must be True or False")
        if run_model_test_mode and not values.get("audio_decoder_weights"):
            values |= {"audio_decoder": "tones", "audio_decoder_weights": ""}
        super().__init__(*unnamed[len(POSITIONAL) :], **values)
        self._run_model_test_mode = run_model_test_mode

    @classmethod
    def from_flags(cls, audio_flags: Mapping[str, str], **config_flags: Any) -> Self:
        """audio_flags: fields of audio by name, as texts: lists with commas, values of enums, others as in YAML.
        config_flags: fields of `PipelineConfig`, as values.

        Raises ConfigError that names the flag.
        """
        values = {}
        for given, text in audio_flags.items():
            name = given.replace("-", "_")
            if name not in FLAGS:
                raise ConfigError(unknown_name("audio flag", given, FLAGS))
            if not isinstance(text, str) or not text.strip():
                raise ConfigError(f"{name} has no value; give {name}=VALUE")
            values[name] = parse_text(text.strip(), AUDIO_NAMES.kind((name,)), name)
        if not values.get("audio_decoder"):
            raise ConfigError("audio_decoder is missing among the audio flags; give its name")
        for name in values.keys() & config_flags.keys():
            raise ConfigError(f"{name} is given as an audio flag and as a value; give one of them")
        return cls(**values, **config_flags)

    @classmethod
    def _names(cls) -> Names:
        return AUDIO_NAMES

    def resolve(self, *, free_bytes: int | None = None) -> None:
        """See `PipelineConfig.resolve`. Warns of a value that does nothing."""
        if not self.is_resolved:
            is_phased = _prepare(self)
            super().resolve(free_bytes=free_bytes)
            self._resolved = _with_audio_settings(self, sources_of(self), is_phased=is_phased)

    @property
    def run_model_test_mode(self) -> bool:
        return self._run_model_test_mode


def own_decoders(config: PipelineConfig) -> dict[str, Opener]:
    """Audio decoders that `custom_architectures` brings, by name."""
    if not config.custom_architectures:
        return {}
    found = custom_architectures(config.custom_architectures, built_in=())
    return {name: one.open_audio_decoder for name, one in found.items() if one.open_audio_decoder is not None}


def schedule_of(config: AudioGenerationConfig, *, right_context: int = 0) -> BlockSchedule:
    """Blocks of every request. right_context: the decoder's."""
    return BlockSchedule(
        chunk_size=None if config.chunk_size is None else tuple(config.chunk_size),
        buffer=config.buffer,
        prepend=config.prepend_prompt_speech_tokens,
        block_causal=config.block_causal,
        prompt_causal=config.prepend_prompt_speech_tokens_causal,
        right_context=right_context,
    )


def _prepare(config: AudioGenerationConfig) -> bool:
    """Check what is of audio and set the options that follow from it -> whether batching is left to this."""
    check_decoder(config.audio_decoder, config.audio_decoder_weights, own_decoders(config))
    _check_blocks(config)
    options = config.options
    is_phased = "batching" not in options
    if config.enable_in_flight_batching and options.get("batching", "phased") == "phased":
        raise ConfigError(
            "enable_in_flight_batching=True takes prompts into steps that decode, which phased batching does not; "
            'leave it False, or ask for batching="mixed" instead'
        )
    if not config.enable_in_flight_batching:
        config.model_fields_set.discard("enable_in_flight_batching")  # as not given: `batching` decides
    options.setdefault("batching", "phased")
    return is_phased


def _with_audio_settings(
    config: AudioGenerationConfig, sources: Mapping[FieldPath, str], *, is_phased: bool
) -> Resolved:
    resolved = config.resolved
    settings = dict(resolved.settings)
    if is_phased:
        note = "speech is drawn in phases unless another policy is asked for"
        settings["batching"] = dataclasses.replace(settings["batching"], source="derived", note=note)
    for name in AUDIO_FIELDS:
        value = getattr(config, name)
        settings[name] = Setting(requested=value, value=value, source=sources.get((name,), "default"))
    server = dataclasses.replace(resolved.server, prometheus_metrics_mode=config.prometheus_metrics_mode.value)
    return dataclasses.replace(resolved, settings=settings, server=server)


AUDIO_FIELDS = tuple(name for name in AudioGenerationConfig.model_fields if name not in PipelineConfig.model_fields)
AUDIO_NAMES = Names.of(AudioGenerationConfig)
FLAGS = (*AUDIO_FIELDS, "run_model_test_mode")
"""Names that `AudioGenerationConfig.from_flags` takes as texts."""


def _check_blocks(config: AudioGenerationConfig) -> None:
    """What is wrong whatever the decoder. Raises ConfigError; warns of what does nothing."""
    chunks = config.chunk_size
    if chunks is not None and (not chunks or min(chunks) < 1):
        raise ConfigError(f"chunk_size is {chunks}, it must hold numbers of at least 1; leave it out for one block")
    if config.buffer < 0:
        raise ConfigError(f"buffer is {config.buffer}, it must be at least 0")
    never = config.prepend_prompt_speech_tokens is PrependPromptSpeechTokens.NEVER
    idle = []
    if config.block_causal and not config.buffer:
        idle.append("block_causal=True does nothing without buffer")
    if config.prepend_prompt_speech_tokens_causal and never:
        idle.append("prepend_prompt_speech_tokens_causal=True does nothing with prepend_prompt_speech_tokens=never")
    if chunks is None and config.buffer:
        idle.append("buffer does nothing without chunk_size: there is one block")
    for one in idle:
        warnings.warn(one, ConfigWarning, stacklevel=4)
