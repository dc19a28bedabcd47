"""The layers of a pipeline stage and the layers with experts, by megatron-core's rules. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_infer.errors import ConfigError

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_OTHER_WAYS = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def stage_options(num_layers: int, num_stages: int, asked: Mapping[str, Any]) -> dict[str, int]:
    """TransformerConfig fields that divide layers where they do not divide evenly; none where the caller divides them.

    Stages in the middle are equal (megatron-core's rule), the first and the last share the rest. These hold the
    embedding and the output layer, so they get the smaller share where there is a choice.
    Example: 30 layers, 4 stages -> 7, 8, 8, 7; 5 layers, 2 stages -> 3, 2.
    """
    if num_stages > num_layers:
        raise ConfigError(
            f"pipeline_parallel={num_stages}, but the model has {num_layers} layers: one a stage at least"
        )
    if num_layers % num_stages == 0 or any(asked.get(field) for field in (FIRST, LAST, *_OTHER_WAYS)):
        return {}
    middle = -(-num_layers // num_stages) if num_stages > 2 else 0
    if num_layers - middle * (num_stages - 2) < 2:
        middle -= 1
    ends = num_layers - middle * (num_stages - 2)
    return {FIRST: -(-ends // 2), LAST: ends // 2}


def stage_span(num_layers: int, num_stages: int, stage: int, asked: Mapping[str, Any] | None = None) -> tuple[int, int]:
    """(first layer, one past the last) of a stage, counted from 0; `asked` as in `stage_options`."""
    asked = asked or {}
    options = {key: asked[key] for key in (FIRST, LAST) if asked.get(key) is not None}
    options = options or stage_options(num_layers, num_stages, asked)
    first, last = options.get(FIRST), options.get(LAST)
    num_middle = num_stages - (first is not None) - (last is not None)
    left = num_layers - (first or 0) - (last or 0)
    if left < 0 or (left % num_middle if num_middle else left):
        raise ConfigError(f"{num_layers} layers cannot be divided over {num_stages} pipeline stages with {options}")
    counts = [first] * (first is not None) + [left // num_middle if num_middle else 0] * num_middle
    counts += [last] * (last is not None)
    sizes = [count or 0 for count in counts]
    return sum(sizes[:stage]), sum(sizes[: stage + 1])


def window_layers(num_layers: int, frequency: int | Sequence[int] | None) -> list[bool]:
    """Which layers have the window: all, all but every n-th, or those with a 1 in a list (`window_attn_skip_freq`)."""
    return [True] * num_layers if frequency is None else delta_layers(num_layers, frequency)


def delta_layers(num_layers: int, frequency: int | Sequence[int] | None) -> list[bool]:
    """Which layers are gated delta nets: all but every n-th, or those with a 1 in a list (`linear_attention_freq`)."""
    if frequency is None:
        return [False] * num_layers
    if isinstance(frequency, int):
        return [(layer + 1) % frequency != 0 for layer in range(num_layers)]
    return [bool(flag) for flag in frequency]


def expert_layers(num_layers: int, frequency: int | Sequence[int]) -> list[bool]:
    """Which layers have experts: every n-th from the first, or those with a 1 in a list (`moe_layer_freq`)."""
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(num_layers)]
    return [bool(flag) for flag in frequency]
