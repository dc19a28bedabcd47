"""The seams of a step: what a model's layers see, what a kernel backend offers, what the runner needs of a model.

`models` and `forward` never import each other: they meet here. Shape legend: T tokens of the step, S sampled
positions, K kv heads, G query heads per kv head, N = K*G query heads, H head dim, D hidden, F ffn, V vocab (local),
P positions, B block size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from megatron_infer.kernels.experts import ExpertsBackend
    from megatron_infer.kernels.ssm import SsmSpec, SsmWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendSpec:
    """How one attention layer attends; built once at adoption."""

    num_kv_heads: int
    group_size: int
    head_dim: int
    scale: float
    window: int | None = None
    """Keys visible to a query, itself included (position p sees p-window+1 .. p); None: all before it."""
    rotary_dim: int = 0
    """Leading dims of a head that rotate by the step's cos/sin; 0: this layer does not rotate."""
    rotary_interleaved: bool = False
    sinks_N: Tensor | None = field(default=None, compare=False)
    """Logit of each query head that takes part in the softmax and has no value; None: there is none. [N], any float
    dtype, maybe a live parameter: backends read it when they run."""


def _none() -> np.ndarray:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCaptures:
    """States to keep on the way through a slice: after the first `num_tokens[i]` of row `row[i]`'s tokens its state
    goes to slot `state_slot[i]` too. int32 host arrays, by row, then by num_tokens; 0 < num_tokens < q_len."""

    row: np.ndarray = field(default_factory=_none)
    num_tokens: np.ndarray = field(default_factory=_none)
    state_slot: np.ndarray = field(default_factory=_none)


class Norms(Protocol):
    """Norms of every kind as one launch each."""

    def norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        *,
        centered: bool,
        zero_centered: bool,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Norm over the last axis -> contiguous, in x's dtype. x is any view of up to 4 axes whose last is contiguous.

        centered: a layer norm, else RMS. zero_centered: the factor is weight + 1. residual: contiguous, fp32 or x's
        dtype; what is normed is x + residual, which is written there.
        """
        ...


class Ops(Protocol):
    """Elementwise, norm and linear primitives of one backend. Never autograd; inputs are contiguous [T, *]."""

    name: str
    experts: ExpertsBackend | None
    """All experts of a mixture-of-experts layer at once; None: those that were chosen run one after the other."""
    norms: Norms | None
    """Norms that the methods below do not have; None: they are made of several calls."""

    def linear(self, x_TX: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def rms_norm(self, x_TD: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual) in x's dtype, x + residual in residual's); may write the sum into residual_TD.

        residual_TD is in x's dtype or fp32.
        """
        ...

    def layer_norm(self, x_TD: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...

    def silu_mul(self, x_T2F: Tensor) -> Tensor:
        """silu(x[:, :F]) * x[:, F:] -> [T, F]."""
        ...

    def gated_rms_norm(
        self, y_TM: Tensor, gate_TM: Tensor, weight: Tensor | None, eps: float, *, group_size: int
    ) -> Tensor:
        """RMS norm of y * silu(gate) over each run of group_size channels; without a weight only the product.

        gate may be a strided view (last dim contiguous).
        """
        ...

    def rowwise(self, function: Callable[[Tensor], Any], x_TX: Tensor) -> Any:
        """function(x): torch code that treats each row by itself, giving [T, *] or several of them.

        Only exact kernels see to it that a row's bits do not depend on how many come along.
        """
        ...


@dataclass(slots=True)
class StepMetadata:
    """One step as a kernel backend sees it. Rows are the plan's sequences: decode rows first, one query token each.

    Host arrays (int32, valid until the next step is built) and their device mirrors describe the same thing; backends
    that launch from the host use the former, device kernels the latter.

    A step that is padded (for a CUDA graph) has num_tokens, num_rows and num_decode of its shape. Rows that pad are
    the dummy row's: a decode row has q_len 1 and kv_len 1, a later one q_len 0 and kv_len 0. Tokens behind the last
    row belong to nobody. All of them write to the dummy block and the dummy slot only, which many may do at once.
    """

    num_tokens: int
    num_rows: int
    num_decode: int
    """The first num_decode rows have q_len 1 and start > 0 or not; token i of them is row i's query."""
    q_len: np.ndarray
    kv_len: np.ndarray
    """Keys visible to the row's last query, this step's own included: start + q_len."""
    cu_q: np.ndarray
    """[rows + 1] token offsets."""
    table_row: np.ndarray
    """Row of `block_table` that belongs to each sequence."""
    num_prompt_queries: np.ndarray
    """Leading queries of the row that are positions of its request's prompt; the others are of its output. 0 in decode
    rows. On the host alone."""
    q_len_R: Tensor
    kv_len_R: Tensor
    cu_q_R1: Tensor
    table_row_R: Tensor
    """int32 device mirrors of the arrays above."""
    block_table: Tensor
    """int32 [request rows + 1, max blocks] on the device; only the entries a row's kv_len reaches are meaningful."""
    positions_T: Tensor
    """int64 position of each token in its sequence."""
    kv_pos_T: Tensor
    """int64 block * B + offset: where each token's key and value go in the flat cache."""
    cos_TR: Tensor | None
    """cos/sin of each token's position in the activation dtype, [T, rotary_dim]; None without rotary embedding."""
    sin_TR: Tensor | None
    captures: StateCaptures = field(default_factory=StateCaptures)
    """Recurrent states to keep on the way (see `kernels.ssm.ScanBackend.run`)."""
    max_q_len: int = 0
    """No row has more queries, whatever the device mirrors hold when the step runs; 0: as the host arrays say."""
    max_kv_len: int = 0
    """No row sees more keys; 0: as the host arrays say. In a graph's step it is what the block table can hold."""

    def __post_init__(self) -> None:
        if not self.max_q_len:
            self.max_q_len = int(self.q_len.max(initial=0))
        if not self.max_kv_len:
            self.max_kv_len = int(self.kv_len.max(initial=0))


class AttentionBackend(Protocol):
    """Paged attention behind plan/run. `kv_cache` is [layers, 2, num_blocks, B, K, H]."""

    name: str
    graph_safe: bool
    """What `plan` and `run` do is a function of the step's shape (its num_ and max_ fields) and of what its device
    tensors hold when it runs: it can be captured once and replayed. Host arrays are not read, nobody waits."""

    def supports(
        self, spec: AttendSpec, *, dtype: object, block_size: int, kv_dtype: object | None = None
    ) -> str | None:
        """None when it can run the layer, else the reason it cannot. kv_dtype: the cache's; None: as activations."""
        ...

    def plan(self, step: StepMetadata) -> None:
        """Once a step, before the first layer."""
        ...

    def run(
        self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> Tensor:
        """Rotate q and k, append k and v to the cache, attend causally -> out [T, N*H] contiguous.

        All slices' keys and values are in the cache before any row attends: a slice may read blocks that another slice
        of the same step fills (a shared prefix). Only a decode row (the first num_decode) is read by itself alone.
        q, k, v may be strided views of one fused projection (last dim contiguous); they may be overwritten.
        A cache of another dtype than theirs holds what `kernels.kv_rounding` makes of keys and values, and every query
        sees them so, those of this step included.
        Query i of row r sits at position kv_len[r] - q_len[r] + i and sees keys 0 .. that position (within `window`).
        The native backend attends prompt positions one way and output positions another, whatever row they come in, so
        that a position's answer has the same bits however the work was cut; the others agree within rounding.
        """
        ...


class StepInputs(Protocol):
    """What a paged layer sees of the step: passed through the decoder as `inference_context`."""

    num_tokens: int
    ops: Ops
    positions_T: Tensor
    token_ids_T: Tensor
    is_padded: bool
    """Of a graph's shape: nothing may ask the device for a value on the way."""
    padding_T1: Tensor | None
    """bool, which tokens of a padded step pad it; None: it is not padded."""
    routing_TLK: Tensor | None
    """Where mixture-of-experts layers note which experts each token goes to; None: nobody asks."""

    def attend(self, layer: int, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttendSpec) -> Tensor:
        """Attention layer number `layer` of this rank (see `AttentionBackend.run`)."""
        ...

    def ssm(self, layer: int, xBC_TC: Tensor, dt_TH: Tensor, weights: SsmWeights, spec: SsmSpec) -> Tensor:
        """Mamba layer number `layer` of this rank (see `kernels.ssm.ScanBackend.run`)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingShape:
    """What a token's routing is, of this rank's layers: which `top_k` of `num_experts`, in each of `num_layers`."""

    num_layers: int
    top_k: int
    num_experts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryTable:
    """cos and sin for every position, [P, rotary_dim] fp32 (halves repeated, or interleaved, as the model wants)."""

    cos_PR: Tensor
    sin_PR: Tensor


class PagedModel(Protocol):
    """A live model whose layers have been adopted; the runner drives it through this."""

    routing: RoutingShape | None
    """None: a layer may have experts whose choice is not seen."""

    def embed(self, step: StepInputs) -> Tensor:
        """Token (and learned position) embeddings -> the decoder's input, megatron-core's [T, 1, D]."""
        ...

    def hidden(self, step: StepInputs) -> Tensor:
        """Embedding and decoder -> final normed hidden states [T, D]."""
        ...

    def logits(self, hidden_SD: Tensor, ops: Ops) -> Tensor:
        """[S, V] in the model's dtype, padding vocabulary entries included (the sampler masks them).

        V is this rank's part where the vocabulary is split over tensor-parallel ranks.
        """
        ...

    def rotary_table(self, num_positions: int) -> RotaryTable | None: ...

    def packable_weights(self) -> Iterable[Tensor]:
        """2-D weights that go through `ops.linear`: a backend may keep prepacked copies of them."""
        ...
