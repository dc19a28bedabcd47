"""megatron-core's sparse attention (DSA) as modules that are built in any of its versions, without Transformer Engine.

Parameter names are those of megatron-core 0.19. Legend: b sequences of s positions, n heads, i index heads.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels.torch.cpu_torch import apply_rotary
from megatron_infer.models.core_attention import TorchNorm, WholeLinear
from megatron_infer.models.extensions import extensions_of
from megatron_infer.models.mcore_compat import (
    AttnMaskType,
    MegatronModule,
    TransformerConfig,
    cuda_available,
    gather_from_sequence_parallel_region,
    packed_lengths,
    sharded_tensors,
)
from megatron_infer.models.rotary import DeviceAgnosticRotary, DeviceAgnosticYarn, latent_rotary_table

_LAST_CHOICE = "_keys_of_last_indexer"
"""Attribute of a config, which all layers share: bool [b, s, s] of the last indexer that ran, until the last layer that
attends to the same keys has run."""


class TorchIndexer(MegatronModule):
    """The indexer of a layer: which keys a query attends to. Every tensor-parallel rank has it whole."""

    def __init__(self, config: TransformerConfig, *, tp_group: Any) -> None:
        super().__init__(config=config)
        extensions = extensions_of(config)
        self.num_heads = config.dsa_indexer_n_heads
        self.dim = config.dsa_indexer_head_dim
        self.top_k = config.dsa_indexer_topk
        self.rope_interleaved = extensions.index_interleaved
        self._tp_group = tp_group
        made = {"config": config, "init_method": config.init_method}
        hidden = config.hidden_size
        queries_of = hidden if config.q_lora_rank is None else config.q_lora_rank
        self.linear_wq_b = WholeLinear(queries_of, self.num_heads * self.dim, **made)
        self.linear_wk = WholeLinear(hidden, self.dim, **made)
        of_norm = copy.copy(config)
        of_norm.normalization = "LayerNorm"
        self.k_norm = TorchNorm(of_norm, self.dim, eps=extensions.index_norm_epsilon or config.layernorm_epsilon)
        self.linear_weights_proj = WholeLinear(hidden, self.num_heads, **made)
        self.rotary_pos_emb = _rotary(config)
        for parameter in self.parameters():
            parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def forward(self, x_sbD: Tensor, latent_sbX: Tensor) -> Tensor:
        """Hidden states and normed latents of queries -> bool [b, s, s]: query i attends to key j."""
        if self.config.sequence_parallel:
            x_sbD, latent_sbX = (
                gather_from_sequence_parallel_region(part, group=self._tp_group) for part in (x_sbD, latent_sbX)
            )
        q_sbiH, k_sbH, weights_sbi = self.forward_before_topk(x_sbD, latent_sbX)
        length = len(x_sbD)
        scores = torch.einsum("sbih,tbh->bsit", q_sbiH.float(), k_sbH.float()).relu()
        scores = (scores * weights_sbi.float().transpose(0, 1).unsqueeze(-1)).sum(2)
        seen = torch.ones(length, length, dtype=torch.bool, device=x_sbD.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
        order = scores.sort(dim=-1, descending=True, stable=True).indices[..., : min(self.top_k, length)]
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True) & seen

    def forward_before_topk(
        self, x_sbD: Tensor, latent_sbX: Tensor, packed_seq_params: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(index queries [s, b, i, dim], index keys [s, b, dim], both rotated, weights of index heads [s, b, i]), as
        of megatron-core's own indexer. packed_seq_params: not supported."""
        assert packed_seq_params is None, "packed sequences are taken apart before"
        length = len(x_sbD)
        table = latent_rotary_table(self.rotary_pos_emb, length, x_sbD.device)
        cos, sin = (part.to(x_sbD.dtype) for part in (table.cos_PR, table.sin_PR))
        if not self.rope_interleaved:
            cos, sin = (torch.cat((part[:, ::2],) * 2, dim=-1) for part in (cos, sin))
        turn = {"dim": cos.shape[1], "interleaved": self.rope_interleaved}
        q_sbiH = apply_rotary(self.linear_wq_b(latent_sbX)[0].unflatten(-1, (self.num_heads, -1)), cos, sin, **turn)
        k_sbH = apply_rotary(self.k_norm(self.linear_wk(x_sbD)[0]), cos, sin, **turn)
        return q_sbiH, k_sbH, self.linear_weights_proj(x_sbD)[0] * self.num_heads**-0.5 * self.dim**-0.5


class TorchSparseAttention(MegatronModule):
    """Spec slot `core_attention` of latent attention: softmax over the keys that the layer's indexer chooses, or over
    those of the last layer with an indexer (`Extensions.index_shared`).

    Has no loss that trains the indexer: its parameters get no gradients. Raises NotImplementedError where the config
    asks for that loss.
    """

    requires_dsa_inputs = True

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        shared = extensions_of(config).index_shared
        if config.dsa_indexer_loss_coeff:
            raise NotImplementedError("dsa_indexer_loss_coeff: TorchSparseAttention does not train its indexer")
        if config.context_parallel_size > 1:
            raise NotImplementedError("context parallelism: TorchSparseAttention sees one rank's positions only")
        if any(shared) and config.recompute_granularity is not None:
            raise NotImplementedError("recomputed layers that share the choice of one indexer")
        # megatron-core builds every attention's core twice: the first one gets no scale
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self._next_shares = layer_number < len(shared) and bool(shared[layer_number])
        self.rope_interleaved = extensions_of(config).index_interleaved
        self.tp_group = pg_collection.tp if pg_collection is not None else None
        self.indexer: TorchIndexer | None = None
        if not (shared and shared[layer_number - 1]):
            self.indexer = TorchIndexer(config, tp_group=self.tp_group)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        x: Tensor,
        qr: Tensor,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """[s, b, n, h] queries, keys and values, causal -> [s, b, n * h]; packed (thd) [t, n, h] -> [t, n * h]."""
        if attention_bias is not None:
            raise NotImplementedError("attention_bias: TorchSparseAttention has none")
        x, qr = x.detach(), qr.detach()
        if packed_seq_params is None:
            return self._attend(query, key, value, x, qr)
        lengths = packed_lengths(packed_seq_params, length=len(query), batch=1)
        if len(lengths) > 1 and extensions_of(self.config).index_shared:
            raise NotImplementedError("packed sequences whose layers share the choice of one indexer")
        dense = [part if part.ndim == 4 else part.unsqueeze(1) for part in (query, key, value)]
        whole = [part if part.ndim == 3 else part.unsqueeze(1) for part in (x, qr)]
        pieces = zip(*(part.split(lengths) for part in (*dense, *whole)), strict=True)
        return torch.cat([self._attend(*piece) for piece in pieces]).squeeze(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, x: Tensor, qr: Tensor) -> Tensor:
        mask_bss = vars(self.config).pop(_LAST_CHOICE, None) if self.indexer is None else self.indexer(x, qr)
        assert mask_bss is not None, "attends to the choice of the layer before, which has not run"
        if self._next_shares:
            setattr(self.config, _LAST_CHOICE, mask_bss)
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask_bss.unsqueeze(1), scale=self.softmax_scale
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The indexer, which every tensor-parallel rank has whole."""
        return sharded_tensors(self, prefix, {}, sharded_offsets, metadata, self.tp_group)


def _rotary(config: TransformerConfig) -> Any:
    """The rotary embedding that latent attention of this config has."""
    on_cpu = {"use_cpu_initialization": not cuda_available()}
    if config.rope_type == "rope":
        percent, base = config.rotary_percent, config.rotary_base
        return DeviceAgnosticRotary(config.qk_pos_emb_head_dim, rotary_percent=percent, rotary_base=base, **on_cpu)
    return DeviceAgnosticYarn(
        config.qk_pos_emb_head_dim,
        rotary_base=config.rotary_base,
        scaling_factor=config.rotary_scaling_factor,
        original_max_position_embeddings=config.original_max_position_embeddings,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
        mscale=config.mscale,
        mscale_all_dim=config.mscale_all_dim,
        **on_cpu,
    )
