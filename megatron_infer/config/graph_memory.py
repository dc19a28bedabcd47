"""What captured steps take of a device's memory, shape by shape: an estimate made before any is. Pure: needs no torch.

    a shape needs alive:  activations + the larger of (a layer's scratch, logits and what draws from them)
    pool of all graphs:   the most that a shape needs, since one runs at a time and all share the memory
    outputs beside it:    hidden states, logits, drawn tokens; of the largest shape, made when the first is captured

Scratch is that of `kernels.triton`, of whose backends graphs are captured by default, at upper bounds: any row may be
as long as the context allows, no layer has a window. What the allocator loses between pieces is not in it, nor is what
a graph itself takes (kernels' arguments); both are in what is measured when a shape is captured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.kernels.triton_scratch import decode_bytes, draw_bytes, expert_bytes, scan_bytes, slices_bytes

if TYPE_CHECKING:
    from megatron_infer.config.model_shape import ModelShape
    from megatron_infer.config.resolved_sizes import ResolvedSizes

LIVE_WIDTHS = 10
"""Activations of a token that live at once, in hidden sizes: the norm's output, a gated MLP's middle of twice four and
the product of it. (The residual stream comes on top, in fp32.)"""
DRAWN_BYTES = 49
"""A row of `kernels.draw_columns.DrawRoom`: four int64, four fp32, a flag."""
MAX_WHOLE_BYTES = 64 << 20
"""Logits that a captured step gathers on each rank, at most; with more rows the ranks exchange behind the step."""


class ShapeBytes(NamedTuple):
    """Estimate for one shape."""

    shape: GraphShape
    activations: int
    scratch: int
    """Of the layer that takes most: partial sums of attention, those and states of the scan, products of experts."""
    draw: int
    """Logits, and what their draw works in."""

    @property
    def live(self) -> int:
        """What it needs of the pool."""
        return self.activations + max(self.scratch, self.draw)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemory:
    """Estimates for one rank's share of a model."""

    model: ModelShape
    max_keys: int
    """Tokens that a request's block table has room for."""
    tensor_parallel_size: int = 1
    is_last: bool = True
    """It has the output layer."""

    @classmethod
    def sized(
        cls, sizes: ResolvedSizes, model: ModelShape, *, tensor_parallel_size: int = 1, is_last: bool = True
    ) -> GraphMemory:
        """Of an engine of these sizes."""
        max_keys = sizes.max_blocks_per_row * sizes.block_size
        return cls(model=model, max_keys=max_keys, tensor_parallel_size=tensor_parallel_size, is_last=is_last)

    def of(self, shape: GraphShape) -> ShapeBytes:
        model = self.model
        heads = (model.num_query_heads + 2 * model.num_kv_heads) * model.head_dim
        widest = max(heads + LIVE_WIDTHS * model.hidden_size, 2 * model.hidden_size + self._mixer_width())
        activations = shape.num_tokens * (4 * model.hidden_size + model.kv_dtype_bytes * widest)
        scratch = max(self._attention(shape), self._scan(shape), self._experts(shape))
        return ShapeBytes(shape, activations, scratch, self._draw(shape) if self.is_last else 0)

    def pool_bytes(self, shapes: Iterable[GraphShape]) -> int:
        """What graphs of these share."""
        return max((self.of(shape).live for shape in shapes), default=0)

    def output_bytes(self, shapes: Iterable[GraphShape]) -> int:
        """What all of them write their results to. A stage that is not the last hands on its residual stream, fp32."""
        model, shapes = self.model, tuple(shapes)
        tokens = max((s.num_tokens for s in shapes if s.num_prefill or not self.is_last), default=0)
        if not self.is_last:
            return 4 * tokens * model.hidden_size
        rows = max((shape.num_rows for shape in shapes), default=0)
        drawn = max((shape.num_rows for shape in shapes if self.draws(shape)), default=0)
        hidden = tokens * model.hidden_size * model.kv_dtype_bytes
        return hidden + rows * self._own_logits() + (rows * DRAWN_BYTES if drawn else 0)

    def draws(self, shape: GraphShape) -> bool:
        """Whether tokens are drawn within its graph."""
        most = self.max_drawn_rows
        return most is None or shape.num_rows <= most

    @property
    def max_drawn_rows(self) -> int | None:
        """Rows whose logits several ranks gather within a graph, at most; None: there is nothing to gather."""
        return None if self.tensor_parallel_size == 1 else MAX_WHOLE_BYTES // self._logits()

    def _logits(self) -> int:
        """Of one row, whole."""
        return self.model.padded_vocab_size * self.model.kv_dtype_bytes

    def _own_logits(self) -> int:
        return self._logits() // self.tensor_parallel_size

    def _draw(self, shape: GraphShape) -> int:
        """Its own logits; of several ranks everyone's as they come and again in rows; and the draw's."""
        logits = shape.num_rows * self._own_logits()
        if not self.draws(shape):
            return logits
        gathered = 2 * shape.num_rows * self._logits() if self.tensor_parallel_size > 1 else 0
        return logits + gathered + draw_bytes(shape.num_rows, self.model.vocab_size)

    def _attention(self, shape: GraphShape) -> int:
        """Decode rows and slices take theirs one after the other."""
        model = self.model
        if not model.num_attention_layers:
            return 0
        group = model.num_query_heads // model.num_kv_heads
        layer = {"num_kv": model.num_kv_heads, "group": group, "head_dim": model.head_dim, "max_keys": self.max_keys}
        slices = slices_bytes(
            shape.num_prefill, element_bytes=model.kv_dtype_bytes, max_queries=shape.prefill_tokens, **layer
        )
        return max(decode_bytes(shape.num_decode, **layer), slices)

    def _scan(self, shape: GraphShape) -> int:
        state = self.model.state
        if state is None:
            return 0
        return scan_bytes(
            shape.num_tokens,
            shape.prefill_tokens,
            ssm_shape=state.ssm_shape,
            num_groups=state.num_groups,
            element_bytes=self.model.kv_dtype_bytes,
        )

    def _mixer_width(self) -> int:
        """A Mamba layer's (z, x, B, C, dt), what its convolution and its scan make of them, and the gated norm's."""
        state = self.model.state
        if state is None:
            return 0
        channels, inner = state.conv_shape[0], state.ssm_shape[0] * state.ssm_shape[1]
        return (inner + channels + state.ssm_shape[0]) + channels + 2 * inner

    def _experts(self, shape: GraphShape) -> int:
        experts = self.model.experts
        if experts is None:
            return 0
        return expert_bytes(
            shape.num_tokens,
            top_k=experts.top_k,
            fc1_width=experts.fc1_width,
            fc2_width=experts.fc2_width,
            hidden=self.model.hidden_size,
            element_bytes=self.model.kv_dtype_bytes,
        )
