"""The indexer of sparse attention (DSA) as operations on its live weights: index queries, their weights, index keys.

    x ──────────────── wk ── norm ──▶ index key, which the cache keeps
    normed latent ──── wq_b ────────▶ index queries
    x ──────────────── weights_proj ▶ a weight of each index head

Attention rotates queries and keys, and chooses (kernels/base.py: IndexSpec). Every tensor-parallel rank computes the
whole of it, and so chooses the same keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from megatron_infer.errors import AdoptionError
from megatron_infer.kernels.base import IndexQueries, IndexSpec, StepInputs
from megatron_infer.models.fused_layers import FusedLinear, FusedNorm
from megatron_infer.models.mcore_compat import DSAttention
from megatron_infer.models.rotary import rotate_alike
from megatron_infer.models.sparse_module import TorchSparseAttention
from megatron_infer.models.te_apex import has_norm_inside
from megatron_infer.models.tp_collectives import Reducer


class FusedIndexer:
    """The operations of one layer's indexer."""

    def __init__(self, indexer: Any, name: str, *, num_heads: int, tp: Reducer | None) -> None:
        self._num_heads = num_heads
        self._queries = FusedLinear(indexer.linear_wq_b, f"{name}.linear_wq_b", tp=tp)
        self._wk = FusedLinear(indexer.linear_wk, f"{name}.linear_wk", tp=tp)
        self._norm = FusedNorm(indexer.k_norm, f"{name}.k_norm")
        self._weights = FusedLinear(indexer.linear_weights_proj, f"{name}.linear_weights_proj", tp=tp)

    def key(self, step: StepInputs, x_TD: Tensor) -> Tensor:
        """[T, index dim], normed and not rotated."""
        key_TH, _ = self._wk.run(step, x_TD, None)
        return self._norm.norm(step.ops, key_TH)

    def queries(self, step: StepInputs, x_TD: Tensor, latent_TX: Tensor) -> IndexQueries:
        """latent: what the layer's queries are made of."""
        q_TX, _ = self._queries.run(step, latent_TX, None)
        weights_TI, _ = self._weights.run(step, x_TD, None)
        q_TIH = q_TX.unflatten(1, (self._num_heads, -1))
        # in the order, and with the rounding between, of megatron-core
        return IndexQueries(q_TIH, weights_TI * self._num_heads**-0.5 * q_TIH.shape[-1] ** -0.5)

    def linears(self) -> Iterator[FusedLinear]:
        yield from (self._queries, self._wk, self._weights)


def is_sparse(core: Any) -> bool:
    """Whether a core attention attends to the keys that an indexer chooses."""
    return type(core) in (TorchSparseAttention, DSAttention)


def index_spec(attention: Any, name: str, *, rotary_dim: int) -> IndexSpec:
    """How the layer chooses keys. Raises AdoptionError for what is not known."""
    core, config = attention.core_attention, attention.config
    where = f"{name}.core_attention"
    sizes = {
        "num_heads": config.dsa_indexer_n_heads,
        "dim": config.dsa_indexer_head_dim,
        "top_k": config.dsa_indexer_topk,
        "rotary_dim": rotary_dim,
    }
    if type(core) is TorchSparseAttention:
        interleaved = core.rope_interleaved
        return IndexSpec(**sizes, rotary_interleaved=interleaved)
    if not hasattr(config, "dsa_indexer_rotate_activation"):
        raise AdoptionError(
            where, "the indexer of megatron-core before 0.19 rotates last dims and multiplies by a Hadamard matrix"
        )
    if config.dsa_indexer_rotate_activation:
        raise AdoptionError(
            where, "dsa_indexer_rotate_activation=True: products with a Hadamard matrix are not computed"
        )
    last = "linear_q_proj" if config.q_lora_rank is None else "linear_q_up_proj"
    if has_norm_inside(getattr(attention, last)):
        raise AdoptionError(f"{name}.{last}", "norms its input, and the indexer takes the latent before that norm")
    return IndexSpec(
        **sizes, rotary_interleaved=config.dsa_indexer_rope_interleaved, relu=config.dsa_indexer_scoring_relu
    )


def indexer_of(attention: Any, name: str, *, tp: Reducer | None) -> FusedIndexer | None:
    """The layer's indexer; None: it attends to the choice of the layer before."""
    indexer, where = attention.core_attention.indexer, f"{name}.core_attention.indexer"
    if indexer is None:
        return None
    if not rotate_alike(attention.rotary_pos_emb, indexer.rotary_pos_emb):
        raise AdoptionError(f"{where}.rotary_pos_emb", "rotates otherwise than the attention's")
    return FusedIndexer(indexer, where, num_heads=attention.config.dsa_indexer_n_heads, tp=tp)
