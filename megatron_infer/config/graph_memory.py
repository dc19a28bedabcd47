"""An estimate of the device memory that captured steps take, by shape, before any is captured. Pure: needs no torch.

    live memory of a shape:  activations + the larger of (a layer's scratch, logits and the scratch of their draw)
    pool of all graphs:      the most that any shape needs, since one graph runs at a time and all share the memory
    outputs beside it:       hidden states, logits, drawn tokens of the largest shape, allocated at the first capture

Scratch is that of `kernels.triton`, the default backend of captured steps, at upper bounds: every row may be as long as
the context allows, and no layer has a window. Fragmentation of the allocator is not counted, nor is what a graph itself
takes (kernels' arguments); the figures measured when a shape is captured include both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.config.model_shape import LOGIT_BYTES
from megatron_infer.kernels.triton_scratch import (
    decode_bytes,
    delta_bytes,
    draw_bytes,
    expert_bytes,
    index_bytes,
    scan_bytes,
)

if TYPE_CHECKING:
    from megatron_infer.config.model_shape import ModelShape
    from megatron_infer.config.resolved_sizes import ResolvedSizes

LIVE_WIDTHS = 10
"""Activations of one token that are live at once, in hidden sizes: the norm's output, 2 x 4 in the middle of a gated
MLP and their product. (The residual stream comes on top, in fp32.)"""
DRAWN_BYTES = 41
"""Bytes of one row of `kernels.draw_columns.DrawRoom`: three int64, four fp32, a flag."""
MAX_WHOLE_BYTES = 64 << 20
"""Bytes of logits that a captured step gathers on each rank, at most; with more, ranks exchange after the step."""


class ShapeBytes(NamedTuple):
    """The estimate for one shape."""

    shape: GraphShape
    activations: int
    scratch: int
    """The largest need of a layer: partial sums of attention, partial sums and states of a scan, or expert outputs."""
    draw: int
    """Logits, and the scratch of their draw."""

    @property
    def live(self) -> int:
        """Bytes of the pool that the shape needs."""
        return self.activations + max(self.scratch, self.draw)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemory:
    """Estimates for one rank's share of a model."""

    model: ModelShape
    max_keys: int
    """Tokens that the block table of a request has room for."""
    tensor_parallel_size: int = 1
    is_last: bool = True
    """This rank has the output layer."""

    @classmethod
    def sized(
        cls, sizes: ResolvedSizes, model: ModelShape, *, tensor_parallel_size: int = 1, is_last: bool = True
    ) -> GraphMemory:
        """The estimates for an engine of these sizes."""
        max_keys = sizes.max_blocks_per_row * sizes.block_size
        return cls(model=model, max_keys=max_keys, tensor_parallel_size=tensor_parallel_size, is_last=is_last)

    def of(self, shape: GraphShape) -> ShapeBytes:
        model = self.model
        heads = (model.num_query_heads + 2 * model.num_kv_heads) * model.head_dim
        if (latent := model.latent) is not None:  # besides the queries in latent space: before it, and its sums
            heads += model.num_query_heads * (latent.key_dim + latent.rank + latent.value_dim)
        widest = max(heads + LIVE_WIDTHS * model.hidden_size, 2 * model.hidden_size + self._mixer_width())
        activations = shape.num_tokens * (4 * model.hidden_size + model.kv_dtype_bytes * widest)
        scratch = max(self._attention(shape), self._scan(shape), self._experts(shape))
        return ShapeBytes(shape, activations, scratch, self._draw(shape) if self.is_last else 0)

    def pool_bytes(self, shapes: Iterable[GraphShape]) -> int:
        """The pool that graphs of these shapes share."""
        return max((self.of(shape).live for shape in shapes), default=0)

    def output_bytes(self, shapes: Iterable[GraphShape]) -> int:
        """The outputs of graphs of these shapes. A stage that is not the last passes on its residual stream, in
        fp32."""
        model, shapes = self.model, tuple(shapes)
        tokens = max((s.num_tokens for s in shapes if s.num_prefill or not self.is_last), default=0)
        if not self.is_last:
            return 4 * tokens * model.hidden_size
        rows = max((shape.num_rows for shape in shapes), default=0)
        drawn = max((shape.num_rows for shape in shapes if self.draws(shape)), default=0)
        hidden = tokens * model.hidden_size * model.kv_dtype_bytes
        return hidden + rows * self._own_logits() + (rows * DRAWN_BYTES if drawn else 0)

    def draws(self, shape: GraphShape) -> bool:
        """Whether tokens are drawn inside the graph of this shape."""
        most = self.max_drawn_rows
        return most is None or shape.num_rows <= most

    @property
    def max_drawn_rows(self) -> int | None:
        """The most rows whose logits several ranks gather inside a graph; None: one rank has them all."""
        return None if self.tensor_parallel_size == 1 else MAX_WHOLE_BYTES // self._logits()

    def _logits(self) -> int:
        """Bytes of the logits of one row, whole vocabulary."""
        return self.model.padded_vocab_size * LOGIT_BYTES

    def _own_logits(self) -> int:
        return self._logits() // self.tensor_parallel_size

    def _draw(self, shape: GraphShape) -> int:
        """The rank's own logits; with several ranks the gathered ones twice (as received, and by row); scratch of the
        draw."""
        logits = shape.num_rows * self._own_logits()
        if not self.draws(shape):
            return logits
        gathered = 2 * shape.num_rows * self._logits() if self.tensor_parallel_size > 1 else 0
        return logits + gathered + draw_bytes(shape.num_rows, self.model.vocab_size)

    def _attention(self, shape: GraphShape) -> int:
        """Partial sums of decode rows (prefill rows have none), and scores of sparse attention."""
        model = self.model
        if not model.num_attention_layers:
            return 0
        group = model.num_query_heads // model.num_kv_heads
        is_sparse = model.latent is not None and model.latent.index_dim > 0
        scores = index_bytes(shape.num_tokens, self.max_keys) if is_sparse else 0
        return scores + decode_bytes(
            shape.num_decode,
            num_kv=model.num_kv_heads,
            group=group,
            head_dim=model.value_dim,
            max_keys=self.max_keys,
            is_latent=model.latent is not None,
        )

    def _scan(self, shape: GraphShape) -> int:
        state = self.model.state
        if state is None:
            return 0
        tokens, width = (shape.num_tokens, shape.prefill_tokens), self.model.kv_dtype_bytes
        if state.is_delta:
            return delta_bytes(*tokens, num_heads=state.ssm_shape[0], element_bytes=width)
        return scan_bytes(*tokens, ssm_shape=state.ssm_shape, num_groups=state.num_groups, element_bytes=width)

    def _mixer_width(self) -> int:
        """A Mamba layer's (z, x, B, C, dt), the outputs of its convolution and its scan, and the gated norm's."""
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
