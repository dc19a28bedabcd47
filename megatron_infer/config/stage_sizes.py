"""How the stages of a pipeline agree on sizes: every rank schedules with the same ids, so the sizes must be equal.

each stage: its own sizes --stage_limits--> ints --minimum over the stages--> agree --> the sizes of the engine
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_infer.config.model_shape import ModelShape
from megatron_infer.config.resolved_sizes import ResolvedSizes, dependent_sizes

UNLIMITED = 1 << 62
"""The limit of a pipeline stage for a resource that it does not use."""


def stage_limits(shape: ModelShape, sizes: ResolvedSizes, host: tuple[int, int]) -> list[int]:
    """What one pipeline stage can hold; `agree` takes the minimum of each entry over the stages.

    host: the stage's `host_places`.
    """
    attends, recurrent = sizes.block_bytes > 0, shape.state is not None
    return [
        sizes.max_sequence_length,
        sizes.max_requests,
        sizes.num_blocks if attends else UNLIMITED,
        sizes.paused_block_limit if attends else UNLIMITED,
        host[0] if attends else UNLIMITED,
        sizes.num_cached_states if recurrent else UNLIMITED,
        host[1] if recurrent else UNLIMITED,
        0 if recurrent else 1,
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSizes:
    """The sizes of one stage after `agree`: ids of blocks and slots are the same on all stages, bytes are its own."""

    sizes: ResolvedSizes
    host: tuple[int, int]
    """(blocks, recurrent states) of evicted requests that host memory holds."""
    recurrent: bool
    """Some stage keeps recurrent states, so that all stages assign state slots."""


def agree(sizes: ResolvedSizes, limits: Sequence[int]) -> StageSizes:
    """One stage's sizes under the limits of all stages (see `stage_limits`).

    Example: 100 and 80 blocks -> 80 on both; a stage without attention layers also has 80, which take no memory there.
    """
    length, max_requests, num_blocks, paused, host_blocks, cached_states, host_states, stateless = limits
    recurrent, attends = not stateless, num_blocks != UNLIMITED
    figures = dependent_sizes(
        block_size=sizes.block_size,
        block_bytes=sizes.block_bytes,
        num_blocks=num_blocks if attends else None,
        max_sequence_length=length,
        max_requests=max_requests,
        num_cached_states=cached_states if recurrent else 0,
        num_draft_states=sizes.num_draft_states,
        state_slot_bytes=sizes.state_slot_bytes,
        max_prompt_tokens=sizes.max_prompt_tokens,
    ) | {"paused_block_limit": paused if attends else 0}
    how = dict(sizes.how)
    for name, value in figures.items():
        if value != getattr(sizes, name):
            how[name] += f"; {value:,} as the pipeline stages agreed"
    return StageSizes(
        sizes=replace(sizes, how=how, **figures),  # type: ignore[arg-type]
        host=(host_blocks if attends else 0, host_states if recurrent else 0),
        recurrent=recurrent,
    )
