"""What a graph holds, from a step's mirror to logits and drawn tokens at fixed addresses; and which steps have one.

    mirror --derive--> ids, positions, cos/sin --layers--> hidden --output layer--> logits --static draw--> tokens, pool
                                                   |                      |                     |
                                                outputs, one buffer for all shapes: read before the next step is run

Legend: T tokens, S drawn tokens (as many as the shape has rows), D hidden, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.cuda_graphs.graph_pool import GraphPool, Recorder
from megatron_infer.kernels.base import Ops, PagedModel
from megatron_infer.kernels.draw_columns import DrawRoom
from megatron_infer.memory.device import Device
from megatron_infer.memory.store import StateStore
from megatron_infer.parallel.tensor_parallel_sampler import TensorParallelSampler
from megatron_infer.runner.batch import Batch, BatchBuilder
from megatron_infer.sampling.sampler import Sampler
from megatron_infer.scheduler.step_plan import StepPlan

NOTHING = StepPlan(step=-1)
"""A step of padding alone."""


@dataclass(slots=True)
class Outputs:
    """Where every shape's step leaves its results, each a prefix of these."""

    hidden_TD: Tensor | None = None
    """Of shapes that prefill, since decode steps need none; of all in a pipeline stage that hands them on."""
    logits_SV: Tensor | None = None
    drawn: DrawRoom | None = None

    @property
    def num_bytes(self) -> int:
        parts = (self.hidden_TD, self.logits_SV, self.drawn)
        return sum(part.nbytes for part in parts if part is not None)


class PaddedStep:
    """forward.graphs.Capturable over a model, or over this rank's part of one."""

    def __init__(
        self,
        model: PagedModel,
        shapes: Sequence[GraphShape],
        *,
        builder: BatchBuilder,
        store: StateStore,
        sampler: Sampler | TensorParallelSampler | None,
        ops: Ops,
        max_drawn_rows: int | None = None,
        received_TD: Tensor | None = None,
        is_last: bool = True,
    ) -> None:
        """sampler: None where no token is drawn. max_drawn_rows: shapes of more end with their logits; None: none do.
        received_TD: room for what the pipeline stage before hands on, of the largest shape; None in the first.
        is_last: it has the output layer.
        """
        self._model, self._builder, self._store, self._sampler, self._ops = model, builder, store, sampler, ops
        self.received_TD, self._is_last, self._max_drawn_rows = received_TD, is_last, max_drawn_rows
        self._max_tokens = max((shape.num_tokens for shape in shapes if shape.num_prefill or not is_last), default=0)
        self._max_rows = max((shape.num_rows for shape in shapes), default=0)
        self.out = Outputs()

    def refresh(self) -> None:
        """Bring to the device what the draw reads of its rows; before each run, never within a capture."""
        if self._sampler is not None:
            self._sampler.refresh_static()

    def prepare(self, shape: GraphShape) -> None:
        self.refresh()
        self._builder.build(NOTHING, (), shape=shape)

    def run(self, shape: GraphShape) -> None:
        batch = self._builder.static_view(shape)
        self._builder.derive(batch)
        if self.received_TD is None:
            hidden_TD = self._model.hidden(batch)
        else:
            hidden_TD = self._model.hidden(batch, self.received_TD[: shape.num_tokens])
        if self._gives_hidden(shape):
            self._put("hidden_TD", hidden_TD, self._max_tokens)
        if not self._is_last:
            return
        hidden_SD = hidden_TD if shape.is_decode_only else hidden_TD.index_select(0, batch.sample_token_S)
        logits_SV = self._model.logits(hidden_SD, self._ops)
        self._put("logits_SV", logits_SV, self._max_rows)
        if self._sampler is not None and self.draws(shape):
            if self.out.drawn is None:
                self.out.drawn = DrawRoom.make(self._max_rows, logits_SV.device)
            self._sampler.static_sample(
                logits_SV,
                batch.sample_row_S,
                batch.sample_position_S,
                self._builder.token_pool,
                self.out.drawn.first(shape.num_rows),
            )

    def draws(self, shape: GraphShape) -> bool:
        """Whether steps of this shape leave tokens."""
        return self._sampler is not None and (self._max_drawn_rows is None or shape.num_rows <= self._max_drawn_rows)

    def _gives_hidden(self, shape: GraphShape) -> bool:
        """Whether somebody reads the hidden states: the next stage, or what prompts ask for."""
        return shape.num_prefill > 0 or not self._is_last

    def addresses(self) -> Hashable:
        states = self._store.states
        return self._store.kv_cache.data_ptr(), None if states is None else states.conv_SLCW.data_ptr()

    def output_bytes(self) -> int:
        return self.out.num_bytes

    def drop_outputs(self) -> None:
        self.out = Outputs()

    def _put(self, name: str, result: Tensor, capacity: int) -> None:
        kept: Tensor | None = getattr(self.out, name)
        if kept is None:
            kept = result.new_zeros((capacity, *result.shape[1:]))
            setattr(self.out, name, kept)
        kept[: len(result)].copy_(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a padded step left: views of the outputs, of its real tokens alone. Good until the next step is launched."""

    hidden_TD: Tensor | None
    """As a step that was not padded would have it, from its first token that prefills on; None: it decodes only."""
    logits_SV: Tensor | None
    """None: nobody draws."""
    drawn: DrawRoom | None
    """What the static draw found; its tokens are in the token pool already. None: the logits are all there is."""


def asks_routing(plan: StepPlan) -> bool:
    """Whether a request of the step wants to hear of its tokens' experts; every rank says the same."""
    return any(request.params.return_routing for request in plan.decode) or any(
        chunk.request.params.return_routing for chunk in plan.prefill
    )


class StepGraphs:
    """Decides which steps are padded and replayed, and runs them."""

    def __init__(
        self,
        model: PagedModel,
        shapes: Sequence[GraphShape],
        recorder: Recorder,
        *,
        builder: BatchBuilder,
        store: StateStore,
        sampler: Sampler | TensorParallelSampler | None,
        device: Device,
        ops: Ops,
        expected_bytes: Callable[[GraphShape], int] = lambda shape: 0,
        expected_outputs: int = 0,
        all_ranks: Callable[[bool], bool] | None = None,
        max_drawn_rows: int | None = None,
        received_TD: Tensor | None = None,
        is_last: bool = True,
    ) -> None:
        self._step = PaddedStep(
            model,
            shapes,
            builder=builder,
            store=store,
            sampler=sampler,
            ops=ops,
            max_drawn_rows=max_drawn_rows,
            received_TD=received_TD,
            is_last=is_last,
        )
        self.sampler = sampler
        """Whose draw the graphs hold; None: they end with the logits."""
        self._has_routing = model.routing is not None and model.routing.num_layers > 0
        self.pool = GraphPool(
            shapes,
            recorder,
            self._step,
            device=device,
            expected_bytes=expected_bytes,
            expected_outputs=expected_outputs,
            all_ranks=all_ranks,
        )

    def shape_of(self, plan: StepPlan) -> GraphShape | None:
        """The shape that a step is padded to, the same on every rank; None: it runs as it is."""
        shape, _ = self._choose(plan)
        return shape

    def ready(self, plan: StepPlan) -> GraphShape | None:
        """As `shape_of`, of the step that is built next; captures its graph where it has none. Counted."""
        shape, reason = self._choose(plan)
        if shape is None:
            self.pool.counts.eager[reason] += 1
            return None
        self.pool.ready(shape)
        return shape

    def launch(
        self, shape: GraphShape, batch: Batch, *, num_decode: int, received_TD: Tensor | None = None
    ) -> Replayed:
        """Run the step that was built as `batch`, of which num_decode rows really decode.

        received_TD: what the pipeline stage before handed on, of the shape's tokens.
        """
        self._step.refresh()
        if received_TD is not None:
            assert self._step.received_TD is not None
            self._step.received_TD[: shape.num_tokens].copy_(received_TD)
        self.pool.launch(shape)
        out, count = self._step.out, batch.num_sampled
        draws = count and self._step.draws(shape)
        return Replayed(
            # so that slices are found where they are in the plan, behind its own decode rows
            hidden_TD=None
            if not shape.num_prefill or out.hidden_TD is None
            else out.hidden_TD[shape.num_decode - num_decode :],
            logits_SV=None if not count or out.logits_SV is None else out.logits_SV[:count],
            drawn=None if not draws or out.drawn is None else out.drawn.first(count),
        )

    def residual_TD(self, shape: GraphShape) -> Tensor:
        """What a pipeline stage that is not the last hands on of the step that was launched."""
        assert self._step.out.hidden_TD is not None
        return self._step.out.hidden_TD[: shape.num_tokens]

    def _choose(self, plan: StepPlan) -> tuple[GraphShape | None, str]:
        """From the plan alone."""
        if any(chunk.captures for chunk in plan.prefill):
            return None, "states kept within a slice"
        if self._has_routing and asks_routing(plan):
            return None, "routing asked for"
        shape = self.pool.index.find(plan.num_tokens, len(plan.prefill), len(plan.decode))
        if shape is None:
            return None, "no shape so large"
        if len(plan.sampled) > shape.num_rows:
            return None, "more samples than rows"
        return shape, ""
