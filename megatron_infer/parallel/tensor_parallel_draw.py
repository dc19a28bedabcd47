"""Draws at the end of a captured step whose vocabulary is split over ranks.

Which rows ask for what is data in a captured step, so that every rank gathers all columns of all rows and draws all of
them: S * V logits arrive at each rank, 16 MiB for 64 rows of 128k in bf16, and no host waits for them.
Legend: V padded vocabulary, W a rank's part of it, S sampled positions.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_infer.cuda_graphs.captured_draw import CapturedDraw, DrawKernel, StepDraw
from megatron_infer.kernels.draw_columns import DrawRoom
from megatron_infer.parallel.tensor_parallel_sampler import returned_support
from megatron_infer.sampling.row_params import RowFlags
from megatron_infer.sampling.sampler import Sampler, SamplerInput, SamplerOutput


def draw_for_group(sampler: Sampler, kernel: DrawKernel | None, group: Any) -> StepDraw:
    """The draw for logits that are split over `group`; None or one rank: over whole rows. kernel: see CapturedDraw."""
    draw = CapturedDraw(sampler, kernel)
    return draw if group is None or group.size() == 1 else TensorParallelDraw(draw, sampler, group)


class TensorParallelDraw:
    """`cuda_graphs.captured_draw.StepDraw` for vocabulary shards: every rank draws the same tokens."""

    def __init__(self, draw: CapturedDraw, sampler: Sampler, group: Any) -> None:
        """draw: over `sampler`, on whole rows."""
        self._draw, self._sampler, self._group = draw, sampler, group
        self.drawn_outside: Counter[str] = draw.drawn_outside

    def can_draw(self, inputs: SamplerInput) -> bool:
        """From the rows' parameters alone, the same on every rank.

        Alternatives and supports need whole rows of logits after the step, when a rank has its part alone.
        """
        if not self._draw.can_draw(inputs):
            return False
        params, rows = self._sampler.params, inputs.rows
        flags = params.flags[rows]
        has_alternatives = params.num_logprobs[rows[(flags & RowFlags.LOGPROBS) != 0]] > 0
        _, support = returned_support(params, rows, flags)
        if has_alternatives.any() or (support >= 0).any():
            self.drawn_outside["alternatives or supports, of a vocabulary in parts"] += 1
            return False
        return True

    def refresh(self) -> None:
        self._draw.refresh()

    def draw(self, logits_SW: Tensor, row_S: Tensor, position_S: Tensor, token_pool: Tensor, out: DrawRoom) -> None:
        """logits_SW: this rank's part."""
        size, (num_rows, width) = self._group.size(), logits_SW.shape
        parts = logits_SW.new_empty(size * num_rows, width)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(parts, logits_SW.contiguous(), group=self._group)
        whole_SV = parts.view(size, num_rows, width).transpose(0, 1).reshape(num_rows, size * width)
        self._draw.draw(whole_SV, row_S, position_S, token_pool, out)

    def output(self, logits_SW: Tensor, inputs: SamplerInput, room: DrawRoom) -> SamplerOutput:
        """Only the shape of the logits is used: `can_draw` has refused rows that need their values."""
        return self._draw.output(logits_SW[:, :1].expand(-1, self._sampler.padded_vocab_size), inputs, room)
