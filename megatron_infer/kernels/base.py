"""The protocols between a model's layers, the kernels and the runner: what a kernel backend implements.

    AttentionBackend   paged attention (layers with recurrent states: ScanBackend in kernels/ssm.py)
    Ops, Norms         linears, norms and activations (all experts at once: ExpertsBackend in kernels/experts.py)
    LoRABackend        products of adapters, added to those of linears (kernels/lora.py)
    StepInputs         a step as a model's layer sees it
    PagedModel         a model as the runner sees it

A backend sees tensors and lengths, never requests. Attention and scan say with `supports(spec)` whether they can run a
layer, get each step once in `plan(step)`, and run every layer with `run(...)`. kernels/select.py takes, for each
operation, the first backend that supports every layer. `models` and `runner` never import each other: they meet here.

A row is a sequence of the step. A decode row has one query token; a row that may have several is a slice: a chunk of a
prompt, or drafts. Shape legend: T tokens of the step, S sampled positions, K kv heads, G query heads per kv head,
N = K*G query heads, H head dim, D hidden, F ffn, V vocabulary (this rank's part), P positions, B block size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from megatron_infer.kernels.experts import ExpertsBackend, RoutingRules
    from megatron_infer.kernels.lora import LoRABackend
    from megatron_infer.kernels.native.native_layers import LayerProgram
    from megatron_infer.kernels.ssm import RecurrentSpec, SsmWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """How a layer chooses the keys that a query attends to, by index keys in the cache.

    A key's score is the sum over index heads of weight * (query . index key), of its positive part where `relu`. The
    `top_k` highest are chosen; of equal scores the earlier key. Source: DeepSeek Sparse Attention, DeepSeek-V3.2.
    """

    num_heads: int
    dim: int
    """Width of an index query and of an index key: the last dims of what the cache keeps of a token."""
    top_k: int
    rotary_dim: int
    """Leading dims of both that the step's cos/sin rotate."""
    rotary_interleaved: bool
    relu: bool = True


@dataclass(slots=True)
class IndexQueries:
    """The index queries of a step, not rotated, and the weights of their heads; I index heads."""

    q_TIH: Tensor
    weights_TI: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendSpec:
    """The parameters of one attention layer; built once at adoption."""

    num_kv_heads: int
    group_size: int
    head_dim: int
    scale: float
    window: int | None = None
    """Keys visible to a query, itself included (position p sees p-window+1 .. p); None: all before it."""
    rotary_dim: int = 0
    """Leading dims of a head that the step's cos/sin rotate; 0: the layer has no rotary embedding."""
    rotary_interleaved: bool = False
    rotary_at: int = 0
    """First column of the step's cos/sin that this layer's heads use, where two ropes lie side by side in one table."""
    softcap: float | None = None
    """c: the softmax takes c * tanh(score / c) of each scaled score; None: the score itself."""
    sinks: Callable[[], Tensor] | None = field(default=None, compare=False)
    """Gives the softmax sinks as they are now (`sinks_N`); None: no sinks. The spec keeps no parameter alive."""
    value_start: int | None = None
    """Set for latent attention: a key's dims from there on, which do not rotate, are its value, and the cache has one
    plane. None: values are vectors of their own."""
    index: IndexSpec | None = None
    """Set for sparse attention over latents: head_dim counts an index key after a key's dims, which queries and values
    do not have. None: a query attends to all keys it sees."""
    expands_from: int | None = None
    """With latents: in a step's chunks of so many prompt queries or more, attention to full keys and values takes less
    time (see `StepInputs.absorbed_S`). None: it never does."""
    unread_dim: int = 0
    """Last dims of head_dim that queries and values do not have either, without an indexer."""

    @property
    def sinks_N(self) -> Tensor | None:
        """Softmax sinks: a logit of each query head, [N], which takes part in the softmax and has no value.

        Any float dtype, maybe a live parameter: backends read it in `run`.
        """
        return None if self.sinks is None else self.sinks()

    @property
    def value_dim(self) -> int:
        """Width of a value, and so of a query head's output (V below)."""
        return self.query_dim - (self.value_start or 0)

    @property
    def query_dim(self) -> int:
        """Width of a query head: head_dim without an index key."""
        return self.head_dim - (self.unread_dim if self.index is None else self.index.dim)

    @property
    def planes(self) -> int:
        """Vectors that the cache keeps of a token and KV head."""
        return 2 if self.value_start is None else 1


NO_INDEXER = "chooses no keys by an indexer"
"""Why a dense backend cannot run a layer with an `AttendSpec.index`."""


def _none() -> np.ndarray:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCaptures:
    """Recurrent states to keep from inside a slice: the state after the first `num_tokens[i]` tokens of row `row[i]` is
    also written to slot `state_slot[i]`. int32 host arrays, sorted by row, then by num_tokens; 0 < num_tokens < q_len.
    """

    row: np.ndarray = field(default_factory=_none)
    num_tokens: np.ndarray = field(default_factory=_none)
    state_slot: np.ndarray = field(default_factory=_none)


class Norms(Protocol):
    """Every kind of norm as one launch."""

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

        centered: a layer norm, else an RMS norm. zero_centered: the factor is weight + 1. residual: contiguous, fp32 or
        x's dtype; the norm is that of x + residual, and the sum is written into residual.
        """
        ...


class Ops(Protocol):
    """Linears, norms and elementwise operations of one backend. No autograd; inputs are contiguous [T, *]."""

    name: str
    experts: ExpertsBackend | None
    """All experts of a mixture-of-experts layer at once; None: chosen experts run one after the other."""
    norms: Norms | None
    """Norms that have no method below; None: they take several calls."""
    fp32_linear: Callable[[Tensor, Tensor, Tensor | None, int], Tensor]
    """fp32_linear(x, weight, bias, rows) -> fp32 [S, rows], `linear` by the weight's first rows: the sums, which are
    not rounded to x's dtype."""
    embedding: Callable[[Tensor, Tensor], Tensor]
    """embedding(ids, weight [V, D]): the weight's rows of these ids, [*ids, D]."""
    argmax_linear: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor] | None] | None
    """argmax_linear(x, weight, rows) -> (int64 [S], lowest id of the largest output of `fp32_linear` without a bias;
    bool [S], that it is not finite, and the id 0), without all of them. None, or giving None: that is as fast."""
    route: Callable[[Tensor, Tensor | None, RoutingRules, Callable[[Tensor], Any]], tuple[Tensor, Tensor]] | None
    """route(logits [T, E], bias [E], rules, formula) -> a router's choice: (weights in the dtype of the logits, bool),
    both [T, E]. formula(logits) is that of torch, for what no kernel follows. None: there is no kernel."""

    def linear(self, x_TX: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def into_latent(self, q_TNX: Tensor, weight_NHL: Tensor) -> Tensor:
        """[T, N, H + R], contiguous -> [T, N, R + L]: a head's last R numbers, then its first H times its weight.

        The weight may be a view whose heads lie apart, each contiguous.
        """
        ...

    def out_of_latent(self, x_TNL: Tensor, weight_NVL: Tensor) -> Tensor:
        """[T, N, L], contiguous -> [T, N * V]: each head's x times the transpose of its weight, as of `into_latent`."""
        ...

    def rms_norm(self, x_TD: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
        """zero_centered: the factor is weight + 1, which is not rounded to the weight's dtype."""
        ...

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(norm(x + residual) in x's dtype, x + residual in residual's dtype); may write the sum into residual_TD.

        residual_TD is in x's dtype or fp32.
        """
        ...

    def layer_norm(self, x_TD: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...

    def silu_mul(self, x_T2F: Tensor) -> Tensor:
        """silu(x[:, :F]) * x[:, F:] -> [T, F]."""
        ...

    def softcap(self, x_SV: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) of fp32 x, e.g. logits; may overwrite x."""
        ...

    def gated_rms_norm(
        self, y_TM: Tensor, gate_TM: Tensor, weight: Tensor | None, eps: float, *, group_size: int
    ) -> Tensor:
        """RMS norm of y * silu(gate) over each group of group_size neighbouring channels; without a weight the product.

        gate may be a strided view (last dim contiguous).
        """
        ...

    def sigmoid_mul(self, x_TM: Tensor, gate_TM: Tensor) -> Tensor:
        """x * sigmoid(gate) -> [T, M] contiguous. gate may be a strided view (last dim contiguous)."""
        ...

    def rowwise(self, function: Callable[[Tensor], Any], x_TX: Tensor) -> Any:
        """function(x) for torch code that computes each row by itself -> [T, *], or several such tensors.

        Only exact kernels make a row's bits independent of the number of rows.
        """
        ...


@dataclass(slots=True)
class StepMetadata:
    """One step as a kernel backend sees it: its rows, decode rows first.

    Host arrays (int32, valid until the next step is built) and their device mirrors hold the same numbers; backends
    that launch from the host use the arrays, device kernels the mirrors.

    A padded step (for a CUDA graph) has num_tokens, num_rows and num_decode of its shape. Padding rows are those of the
    dummy row: a decode row has q_len 1 and kv_len 1, a later row q_len 0 and kv_len 0. Tokens behind the last row are
    padding tokens. They write only to the dummy block and the dummy slot, which several may do at once.
    """

    num_tokens: int
    num_rows: int
    num_decode: int
    """The first num_decode rows have q_len 1, at any position; token i is the query of row i."""
    q_len: np.ndarray
    kv_len: np.ndarray
    """Keys visible to the row's last query, those of this step included: start + q_len."""
    cu_q: np.ndarray
    """[rows + 1] token offsets."""
    table_row: np.ndarray
    """Row of `block_table` of each sequence."""
    num_prompt_queries: np.ndarray
    """Leading queries of the row that are positions of the prompt; the others are output positions. 0 in decode rows.
    Has no device mirror."""
    q_len_R: Tensor
    kv_len_R: Tensor
    cu_q_R1: Tensor
    table_row_R: Tensor
    """int32 device mirrors of the arrays above."""
    block_table: Tensor
    """int32 [request rows + 1, max blocks] on the device; only the entries that a row's kv_len reaches are valid."""
    positions_T: Tensor
    """int64 position of each token in its sequence."""
    kv_pos_T: Tensor
    """int64 block * B + offset: the place of each token's key and value in the flat cache."""
    cos_TR: Tensor | None
    """cos/sin of each token's position in the activation dtype, [T, R], R the width of the model's `RotaryTable`; None
    without rotary embedding."""
    sin_TR: Tensor | None
    captures: StateCaptures = field(default_factory=StateCaptures)
    """Recurrent states to keep from inside slices (see `kernels.ssm.ScanBackend.run`)."""
    max_q_len: int = 0
    """No row has more queries, whatever the device mirrors hold when the step runs; 0: the maximum of q_len."""
    max_kv_len: int = 0
    """No row sees more keys; 0: the maximum of kv_len. In a captured step it is the capacity of the block table."""

    def rotation(self, spec: AttendSpec) -> tuple[Tensor, Tensor] | None:
        """(cos, sin) [T, rotary_dim] of a layer, views of the step's; None: it does not rotate."""
        if not spec.rotary_dim or self.cos_TR is None or self.sin_TR is None:
            return None
        columns = slice(spec.rotary_at, spec.rotary_at + spec.rotary_dim)
        return self.cos_TR[:, columns], self.sin_TR[:, columns]

    def __post_init__(self) -> None:
        if not self.max_q_len:
            self.max_q_len = int(self.q_len.max(initial=0))
        if not self.max_kv_len:
            self.max_kv_len = int(self.kv_len.max(initial=0))


class AttentionBackend(Protocol):
    """Paged attention behind plan/run. `kv_cache` is [layers, planes, num_blocks, B, K, H]: keys and values, or keys
    alone where values are a part of them (`AttendSpec.value_start`)."""

    name: str
    graph_safe: bool
    """What `plan` and `run` do depends only on the step's shape (its num_ and max_ fields) and on the content of device
    tensors at run time, so that padded steps can be captured once and replayed. They read no host array and do not
    wait."""

    def supports(
        self, spec: AttendSpec, *, dtype: object, block_size: int, kv_dtype: object | None = None
    ) -> str | None:
        """None when it can run the layer, else the reason. kv_dtype: the cache's; None: the activations' dtype."""
        ...

    def plan(self, step: StepMetadata) -> None:
        """Called once per step, before the first layer."""
        ...

    def run(
        self, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, kv_cache: Tensor, *, layer: int, spec: AttendSpec
    ) -> Tensor:
        """Rotate q and k, append k and v to the cache, attend causally -> out [T, N*H] contiguous.

        With `value_start` v is that part of k, and out is [T, N * value_dim].

        The keys and values of all slices are in the cache before any row attends: a slice may read blocks that another
        slice of the same step fills (a shared prefix). Only the blocks of a decode row (the first num_decode) are read
        by no other row. q, k, v may be strided views of one fused projection (last dim contiguous); run may overwrite
        them. A cache of another dtype holds keys and values as `kernels.kv_rounding` rounds them, and every query sees
        the rounded ones, those of this step included.
        Query i of row r is at position kv_len[r] - q_len[r] + i and sees keys 0 .. that position (within `window`).
        The native backend computes prompt positions one way and output positions another, in whatever row they are, so
        that a position has the same bits however its prompt was chunked; the others agree within rounding.
        """
        ...


class SparseAttentionBackend(AttentionBackend, Protocol):
    """Paged attention that also runs layers with an `AttendSpec.index`."""

    def run_sparse(
        self,
        q_TKGH: Tensor,
        k_TKH: Tensor,
        kv_cache: Tensor,
        *,
        layer: int,
        spec: AttendSpec,
        index: IndexQueries | None,
    ) -> Tensor:
        """`run`, but a query attends to the keys that its index queries choose; to all, where it sees at most top_k.

        q: [T, 1, G, query_dim]; k: [T, 1, head_dim], its index key not rotated. index: None for a layer that attends to
        the choice of the layer before it.
        """
        ...

    def choice_of_step(self, most: int) -> Tensor:
        """Keys that each token attends to in the layer that ran last: int32 positions [T, top_k], ascending, and behind
        them -1; at most `most` columns, which no sequence is longer than."""
        ...


class StepInputs(Protocol):
    """What a paged layer sees of the step; the decoder passes it as `inference_context`."""

    num_tokens: int
    ops: Ops
    positions_T: Tensor
    token_ids_T: Tensor
    is_padded: bool
    """The step has a graph's shape: its layers must not wait for a value of the device."""
    padding_T1: Tensor | None
    """bool: the padding tokens of a padded step; None: the step is not padded."""
    routing_TLK: Tensor | None
    """Where mixture-of-experts layers write the experts of each token; None: no request asks for them."""
    tokens_of_ranks: Sequence[int] | None
    """Each expert-parallel rank has tokens of its own, and so many; None: all have the same tokens."""
    lora: LoRABackend | None
    """What adds adapters' products to those of linears, planned for the step; None: no token has an adapter."""

    @property
    def absorbed_S(self) -> Tensor | None:
        """Latent attention: the tokens whose queries `attend` takes in the latents' space. Those of the others it does
        not read, nor give an output for: `attend_expanded` does. None: all of them."""
        ...

    def attend_expanded(self, layer: int, q_TNH: Tensor, weight_XL: Tensor, spec: AttendSpec, out_TX: Tensor) -> None:
        """See `NativeLatentAttention.run_expanded`; after `attend` of the layer."""
        ...

    def attend(self, layer: int, q_TKGH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttendSpec) -> Tensor:
        """Attention layer number `layer` of this rank (see `AttentionBackend.run`)."""
        ...

    def attend_to_chosen(
        self, layer: int, q_TKGH: Tensor, k_TKH: Tensor, spec: AttendSpec, index: IndexQueries | None
    ) -> Tensor:
        """Sparse attention layer number `layer` of this rank (see `SparseAttentionBackend.run_sparse`)."""
        ...

    def ssm(self, layer: int, xBC_TC: Tensor, dt_TX: Tensor, weights: SsmWeights, spec: RecurrentSpec) -> Tensor:
        """Layer number `layer` of those with recurrent states (see `kernels.ssm.ScanBackend.run`)."""
        ...

    def run_program(
        self, program: LayerProgram, x_TX: Tensor, residual_TD: Tensor | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """What the program's operations return one by one, to the bit; None: they must run one by one.

        May write into residual_TD.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingShape:
    """A token's routing in this rank's layers: `top_k` of `num_experts` in each of `num_layers`."""

    num_layers: int
    top_k: int
    num_experts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryTable:
    """cos and sin of every position, [P, R] fp32 (halves repeated, or interleaved, as the model needs).

    R is rotary_dim, or the sum of those of several ropes, which lie side by side (`AttendSpec.rotary_at`).
    """

    cos_PR: Tensor
    sin_PR: Tensor


class PagedModel(Protocol):
    """A live model whose layers have been adopted, as the runner drives it."""

    routing: RoutingShape | None
    """None: a layer may have experts whose choice cannot be read."""

    def embed(self, step: StepInputs) -> Tensor:
        """Token (and learned position) embeddings -> the decoder's input, megatron-core's [T, 1, D]."""
        ...

    def hidden(self, step: StepInputs) -> Tensor:
        """Embedding and decoder -> final normed hidden states [T, D]."""
        ...

    def logits(self, hidden_SD: Tensor, ops: Ops) -> Tensor:
        """fp32 [S, V], padding vocabulary entries included (the sampler masks them).

        V is this rank's part where the vocabulary is split over tensor-parallel ranks.
        """
        ...

    def argmax(self, hidden_SD: Tensor, ops: Ops, count: int) -> tuple[Tensor, Tensor] | None:
        """Of the logits of the lowest `count` tokens, see `Ops.argmax_linear`; None: `logits` is as fast."""
        ...

    def rotary_table(self, num_positions: int) -> RotaryTable | None: ...

    def packable_weights(self) -> Iterable[Tensor]:
        """2-D weights that go through `ops.linear`; a backend may keep prepacked copies of them."""
        ...

    def serve(self, ops: Ops, tokens_of_ranks: Sequence[int]) -> None:
        """This rank's part of a forward in which only other ranks have tokens: its experts answer them.

        Runs under torch.inference_mode().
        """
        ...


Argmax = Callable[[Tensor], tuple[Tensor, Tensor]]
"""logits_SV, maybe strided -> (int64 [S], lowest id of the largest logit; fp32 [S], that logit, NaN beside a NaN)."""


def lowest_argmax(logits_SV: Tensor) -> tuple[Tensor, Tensor]:
    """`Argmax` of torch, which on a CPU prefers the lowest id. amax, because an argmax may pass over a NaN."""
    return logits_SV.argmax(-1), logits_SV.amax(-1).float()
