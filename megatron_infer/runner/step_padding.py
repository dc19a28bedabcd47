"""What the runner needs of steps that are padded to a few shapes, so that graphs can be captured of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.kernels.draw_columns import DrawRoom
from megatron_infer.runner.batch import Batch
from megatron_infer.runner.sampling.sampler import SamplerInput, SamplerOutput
from megatron_infer.scheduler.step_plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedOutput:
    """Results of a padded step: views of buffers that the next launch overwrites."""

    hidden_TD: Tensor | None
    """Indexed like the plan's tokens; entries of decode tokens are undefined. None: the step only decodes.
    Of a pipeline stage that is not the last: the residual stream of all the shape's tokens."""
    logits_SV: Tensor | None
    """Logits of the plan's sampled rows; None where there are none."""
    drawn: DrawRoom | None
    """Their tokens and log probabilities, where the step draws too; the tokens are in the token pool already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSizes:
    """What ranks with requests of their own have agreed on for a step."""

    forwards: list[list[int]]
    """The tokens of each rank in each forward: those that draft, then the model's."""
    shape: GraphShape | None
    """What all of them pad the model's forward to; None: none does."""


class PaddedSteps(Protocol):
    """Decides which steps are padded, and runs those."""

    def shape_of(self, plan: StepPlan) -> GraphShape | None:
        """The shape that the step is padded to, the same on every rank; None: it runs as it is."""
        ...

    def common(self, shapes: Sequence[GraphShape | None]) -> GraphShape | None:
        """The shape of a step of ranks that would pad it to these (of no tokens: which have none); None: it runs as it
        is on each."""
        ...

    def ready(self, plan: StepPlan, ranks: RankSizes | None = None) -> GraphShape | None:
        """`shape_of`, or what the ranks agreed on, for the step that is built next: prepares and counts it."""
        ...

    def serve(self, shape: GraphShape) -> None:
        """Run a step of padding alone, next to other ranks' steps of this shape."""
        ...

    def launch(
        self, shape: GraphShape, batch: Batch, *, num_decode: int, received_TD: Tensor | None = None
    ) -> PaddedOutput:
        """Run the step that was built as `batch`, of whose decode rows num_decode are not padding.

        received_TD: the residual stream of the pipeline stage before, of the shape's tokens.
        """
        ...

    def sampled(self, output: PaddedOutput, inputs: SamplerInput) -> SamplerOutput | None:
        """The sampler's output of the step that was launched last, if its own draw serves these rows; else None."""
        ...
