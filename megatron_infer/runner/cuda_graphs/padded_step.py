"""A graph's content, from a step's mirror to logits and drawn tokens at fixed addresses; which steps are replayed.

    mirror --derive--> ids, positions, cos/sin --layers--> hidden --output layer--> logits --draw--> tokens, token pool
                                                   |                      |                  |
                                              outputs, one buffer for all shapes: read before the next step is run

Legend: T tokens, S samples (as many as the shape has sequences), D hidden, V vocab.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.kernels.base import PagedModel
from megatron_infer.kernels.draw_columns import DrawRoom
from megatron_infer.runner.batch import EMPTY_PLAN, Batch, BatchBuilder
from megatron_infer.runner.cuda_graphs.captured_draw import CapturedDraw
from megatron_infer.runner.cuda_graphs.graph_pool import GraphPool
from megatron_infer.runner.routing import asks_index_choices, asks_routing
from megatron_infer.runner.sampling.sampler import SamplerInput, SamplerOutput
from megatron_infer.runner.step_padding import PaddedOutput, RankSizes
from megatron_infer.scheduler.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Outputs:
    """Buffers for the results of every shape's step, each of which fills the first part of them."""

    hidden_TD: Tensor | None = None
    """Final hidden states, of shapes that prefill; residual stream, of all, in a stage that is not the last."""
    logits_SV: Tensor | None = None
    drawn: DrawRoom | None = None

    @property
    def num_bytes(self) -> int:
        parts = (self.hidden_TD, self.logits_SV, self.drawn)
        return sum(part.nbytes for part in parts if part is not None)


class PaddedStep:
    """`graph_pool.Capturable` over a model, or over a pipeline stage's part of one."""

    def __init__(
        self,
        model: PagedModel,
        shapes: Sequence[GraphShape],
        *,
        builder: BatchBuilder,
        draw: CapturedDraw | None,
        max_drawn_rows: int | None,
        received_TD: Tensor | None,
        hidden_size: int,
        num_logits: int,
        dtype: torch.dtype,
        num_exchanging: int,
    ) -> None:
        """draw: None in a pipeline stage that is not the last. max_drawn_rows: shapes with more sequences end with
        their logits; None: all draw. received_TD: buffer for the residual stream of the stage before, of the largest
        shape; None in the first stage. num_logits: of one sample on this rank. dtype: of the model. num_exchanging:
        ranks with tokens of their own, which exchange them in its layers; 1: none does.
        """
        self._model, self._shapes, self._builder, self.draw = model, tuple(shapes), builder, draw
        self.received_TD, self._max_drawn_rows = received_TD, max_drawn_rows
        self._hidden_size, self._num_logits, self._dtype = hidden_size, num_logits, dtype
        self._num_exchanging = num_exchanging
        self.out: Outputs | None = None
        """None: not allocated."""

    def refresh(self) -> None:
        """Upload the parameters that the draw reads; before each run, never within a capture."""
        if self.draw is not None:
            self.draw.refresh()

    @torch.inference_mode()
    def make_outputs(self) -> None:
        if self.out is not None:
            return
        device, is_last = self._builder.device.torch, self.draw is not None
        num_tokens = max((shape.num_tokens for shape in self._shapes if shape.num_prefill or not is_last), default=0)
        if not is_last:
            self.out = Outputs(torch.zeros(num_tokens, self._hidden_size, device=device))
            return
        hidden_TD = torch.zeros(num_tokens, self._hidden_size, dtype=self._dtype, device=device)
        num_samples = max(shape.num_rows for shape in self._shapes)
        logits_SV = torch.zeros(num_samples, self._num_logits, device=device)
        drawn = DrawRoom.make(num_samples, device) if any(map(self.draws, self._shapes)) else None
        self.out = Outputs(hidden_TD if num_tokens else None, logits_SV, drawn)

    def prepare(self, shape: GraphShape) -> None:
        self.refresh()
        self._builder.build(EMPTY_PLAN, (), shape=shape)

    def run(self, shape: GraphShape) -> None:
        out = self.out
        assert out is not None, "run before make_outputs"
        batch = self._builder.static_view(shape)
        self._builder.derive(batch)
        if self._num_exchanging > 1:
            batch.tokens_of_ranks = [shape.num_tokens] * self._num_exchanging
        if self.received_TD is None:
            hidden_TD = self._model.hidden(batch)
        else:
            hidden_TD = self._model.hidden(batch, self.received_TD[: shape.num_tokens])
        if shape.num_prefill or self.draw is None:  # for the next stage, or for prompt logprobs and pooling
            _put(hidden_TD, out.hidden_TD)
        if self.draw is None:
            return
        hidden_SD = hidden_TD if shape.is_decode_only else hidden_TD.index_select(0, batch.sample_token_S)
        logits_SV = self._model.logits(hidden_SD, batch.ops)
        _put(logits_SV, out.logits_SV)
        if self.draws(shape):
            assert out.drawn is not None
            room = out.drawn.first(shape.num_rows)
            self.draw.draw(logits_SV, batch.sample_row_S, batch.sample_position_S, self._builder.token_pool, room)

    def draws(self, shape: GraphShape) -> bool:
        """Whether steps of this shape draw tokens."""
        return self.draw is not None and (self._max_drawn_rows is None or shape.num_rows <= self._max_drawn_rows)

    def addresses(self) -> Hashable:
        store = self._builder.store
        states = store.states
        return store.kv_cache.data_ptr(), None if states is None else states.conv_SLCW.data_ptr()

    def output_bytes(self) -> int:
        return 0 if self.out is None else self.out.num_bytes

    def drop_outputs(self) -> None:
        self.out = None


def _put(result: Tensor, kept: Tensor | None) -> None:
    assert kept is not None and kept.dtype == result.dtype, f"{result.dtype} results, the buffer is {kept}"
    kept[: len(result)].copy_(result)


class StepGraphs:
    """`runner.step_padding.PaddedSteps` by captured graphs."""

    def __init__(self, step: PaddedStep, pool: GraphPool, *, has_routing: bool) -> None:
        """pool: of graphs of `step`. has_routing: requests may ask which experts their tokens went to."""
        self._step, self.pool, self._has_routing = step, pool, has_routing
        self._has_adapters = any(shape.has_adapters for shape in pool.index.shapes)

    @property
    def drawn_outside(self) -> Counter[str]:
        """Reason -> steps whose draw the graphs could have held, but whose rows it does not serve."""
        return Counter() if self._step.draw is None else self._step.draw.drawn_outside

    def shape_of(self, plan: StepPlan) -> GraphShape | None:
        shape, _ = self._choose(plan)
        return shape

    def common(self, shapes: Sequence[GraphShape | None]) -> GraphShape | None:
        """Of ranks that all decode, or have no tokens."""
        known = [shape for shape in shapes if shape is not None and shape.is_decode_only]
        rows = max((shape.num_decode for shape in known), default=0)
        if len(known) < len(shapes) or not rows:
            return None
        return self.pool.index.find(rows, 0, rows, has_adapters=any(shape.has_adapters for shape in known))

    def ready(self, plan: StepPlan, ranks: RankSizes | None = None) -> GraphShape | None:
        """Captures the shape's graph where it has none."""
        shape, reason = self._choose(plan)
        if ranks is not None:
            shape, reason = ranks.shape, reason or "another rank's step"
        if shape is None:
            self.pool.counts.eager[reason] += 1
            return None
        self.pool.ready(shape)
        return shape

    def launch(
        self, shape: GraphShape, batch: Batch, *, num_decode: int, received_TD: Tensor | None = None
    ) -> PaddedOutput:
        step, num_sampled = self._step, batch.num_sampled
        step.refresh()
        step.make_outputs()  # there were none to be had, where no shape could be captured
        if received_TD is not None:
            assert step.received_TD is not None
            step.received_TD[: shape.num_tokens].copy_(received_TD)
        self.pool.launch(shape)
        assert step.out is not None
        hidden_TD, logits_SV, drawn = step.out.hidden_TD, step.out.logits_SV, step.out.drawn
        if hidden_TD is not None and step.draw is None:
            hidden_TD = hidden_TD[: shape.num_tokens]
        elif hidden_TD is not None:  # chunks lie behind the plan's own decode tokens, not behind the shape's
            hidden_TD = hidden_TD[shape.num_decode - num_decode :] if shape.num_prefill else None
        return PaddedOutput(
            hidden_TD=hidden_TD,
            logits_SV=logits_SV[:num_sampled] if num_sampled and logits_SV is not None else None,
            drawn=drawn.first(num_sampled) if num_sampled and drawn is not None and step.draws(shape) else None,
        )

    def serve(self, shape: GraphShape) -> None:
        self.pool.ready(shape)
        self._step.prepare(shape)
        self._step.make_outputs()
        self.pool.launch(shape)

    def sampled(self, output: PaddedOutput, inputs: SamplerInput) -> SamplerOutput | None:
        draw = self._step.draw
        if draw is None or not draw.can_draw(inputs) or output.drawn is None:
            return None
        assert output.logits_SV is not None
        return draw.output(output.logits_SV, inputs, output.drawn)

    def _choose(self, plan: StepPlan) -> tuple[GraphShape | None, str]:
        """(shape, "") or (None, reason); depends on the plan alone, so that all ranks choose alike."""
        if any(chunk.captures for chunk in plan.prefill):
            return None, "states kept within a chunk"
        if any(chunk.drafts for chunk in plan.prefill):
            return None, "drafts to verify"
        if self._has_routing and asks_routing(plan):
            return None, "routing asked for"
        if asks_index_choices(plan):
            return None, "index choices asked for"
        adapted = has_adapters(plan)
        if adapted and not self._has_adapters:
            return None, "adapters"
        shape = self.pool.index.find(plan.num_tokens, len(plan.prefill), len(plan.decode), has_adapters=adapted)
        if shape is None:
            return None, "no shape so large"
        if len(plan.sampled) > shape.num_rows:
            return None, "more samples than rows"
        return shape, ""


def has_adapters(plan: StepPlan) -> bool:
    requests = (*plan.decode, *(chunk.request for chunk in plan.prefill))
    return any(request.params.adapter is not None for request in requests)
