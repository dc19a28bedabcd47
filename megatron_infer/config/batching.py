"""What the batching options bound, as integers: `BatchingLimits`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_infer.errors import ConfigError

if TYPE_CHECKING:
    from megatron_infer.config.inference import InferenceConfig
    from megatron_infer.config.resolved_sizes import ResolvedSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingLimits:
    """What bounds prompts beside rows, free blocks and the tokens of a step; None: it does not."""

    max_live: int | None = None
    """Requests that hold memory at once, where that is fewer than the rows (max_queue_size_tg)."""
    min_decoding: int | None = None
    """Requests that decode before prompts wait (min_batch_size_tg); with batching="phased" only."""
    max_total_tokens: int | None = None
    """Sum of the contexts of a step that prefills (max_batch_total_tokens); at least the longest sequence, so that each
    prompt runs alone."""
    max_used_blocks: int | None = None
    """Blocks of the pool that are in use after an admission, unless nothing else lives (admission_watermark); None: a
    few blocks stay free for the requests that run."""

    @classmethod
    def of(cls, config: InferenceConfig, sizes: ResolvedSizes) -> BatchingLimits:
        """Raises ConfigError for options that contradict the sizes."""
        total, longest = config.max_batch_total_tokens, sizes.max_sequence_length
        if total is not None and total < longest:
            raise ConfigError(
                f"max_batch_total_tokens is {total:,}, it must be at least max_sequence_length = {longest:,}, or the "
                "longest sequence could never run; raise the one or lower the other"
            )
        most, least = config.max_queue_size_tg, config.min_batch_size_tg
        if most is not None and most > sizes.max_requests:
            raise ConfigError(
                f"max_queue_size_tg is {most:,}, the limit is max_requests = {sizes.max_requests:,}; lower the one or "
                "raise the other"
            )
        if least is not None and least > (most or sizes.max_requests):
            raise ConfigError(
                f"min_batch_size_tg is {least:,}, at most {most or sizes.max_requests:,} requests ever decode "
                f"({'max_requests' if most is None else 'max_queue_size_tg'}); lower it"
            )
        watermark = config.admission_watermark
        return cls(
            max_live=most,
            min_decoding=(least or most or sizes.max_requests) if config.batching == "phased" else None,
            max_total_tokens=total,
            max_used_blocks=None if watermark is None else int(watermark * sizes.num_usable_blocks),
        )
