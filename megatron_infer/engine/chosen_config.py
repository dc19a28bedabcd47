"""The options of an engine: the caller's, and for the rest what suits machine, model and device; equal on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_infer.config.checks import graph_options_without_effect
from megatron_infer.config.inference import ConfigWarning, InferenceConfig
from megatron_infer.config.machine_defaults import machine_config
from megatron_infer.config.model_shape import ModelShape
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.errors import ConfigError
from megatron_infer.memory.device import Device

ConfigOrOptions = InferenceConfig | Mapping[str, Any] | None
"""A config, or some of its options: the others (all, for None) are those of `machine_config`."""
_BEFORE_THE_SHAPE = ("vocab_size", "mamba_inference_state_config", "pg_collection", "collective_timeout_s")


def options_before_the_shape(config: ConfigOrOptions) -> InferenceConfig:
    """A config that is right in what is needed before the model's shape is known."""
    if isinstance(config, InferenceConfig):
        return config
    given = config or {}
    return InferenceConfig.from_dict({name: given[name] for name in _BEFORE_THE_SHAPE if name in given})


def choose_config(
    config: ConfigOrOptions,
    shape: ModelShape,
    device: Device,
    rank_group: RankGroup,
    *,
    is_trained_exact: bool = False,
) -> InferenceConfig:
    """The options that the engine has. Every rank calls it. is_trained_exact: in megatron-core's batch_invariant_mode.

    The memory that options are derived from is a rank's part: on a CPU the ranks of the engine share it.
    """
    if not isinstance(config, InferenceConfig):
        share = device.available_bytes() // (1 if device.is_cuda else rank_group.size)
        config = machine_config(
            config or {},
            shape,
            is_cuda=device.is_cuda,
            available_bytes=min(rank_group.lockstep.least("comparison of free memory", [share])),
            tensor_parallel_size=rank_group.groups.tp_size,
        )
    if config.num_cuda_graphs is None and not device.is_cuda:
        for message in graph_options_without_effect(config, "is left at None, 0 on a CPU"):
            warnings.warn(message, ConfigWarning, stacklevel=5)
    if is_trained_exact and not config.batch_invariant:
        config = _exact(config, device)
    return config.on_device(is_cuda=device.is_cuda)


def _exact(config: InferenceConfig, device: Device) -> InferenceConfig:
    """With batch_invariant; raises ConfigError where the engine cannot give the trainer's bits."""
    if device.is_cuda:
        raise ConfigError(
            "the model's config.batch_invariant_mode=True on cuda: attention differs, as megatron-core's is "
            "FlashAttention with one split, whose sums no kernel here adds up in the same order; set it to False"
        )
    try:
        return replace(config, batch_invariant=True)
    except ConfigError as error:
        error.add_note("batch_invariant is True because the model's config.batch_invariant_mode is")
        raise
