"""The dimensions of a model that sizes depend on, for one rank's share of it. Pure: ints and names of dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

CACHE_LINE = 64
MAKING_COST = 2.0
"""Time of a multiplication that makes full keys of latents, where one in attention takes 1; measured on a CPU
(`tools/bench/variants.py latent-prompts`)."""
LEAST_EXPANDED = 256
"""Queries of a chunk that full keys are made for, at least: of fewer, the calls take more than they save."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FP8_E4M3 = "float8_e4m3fn"
"""A dtype of keys and values only."""
KV_DTYPE_BYTES = DTYPE_BYTES | {FP8_E4M3: 1}
LOGIT_BYTES = DTYPE_BYTES["float32"]
"""Logits are sums that are not rounded, whatever the model's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """The recurrent state of one request on one rank, over all its Mamba layers."""

    num_layers: int
    """Mamba layers of this rank."""
    conv_shape: tuple[int, int]
    """[channels, taps] of one layer: the last inputs of the convolution."""
    ssm_shape: tuple[int, int, int]
    """[heads, head dim, state dim] of one layer."""
    conv_dtype: str
    ssm_dtype: str
    is_delta: bool = False
    """The layers are gated delta nets, else Mamba-2's."""

    @property
    def num_groups(self) -> int:
        """Groups of heads that share B and C, or q and k; the channels of the convolution are (x, B, C)."""
        heads, head_dim, state_dim = self.ssm_shape
        return (self.conv_shape[0] - heads * head_dim) // (2 * state_dim)

    @property
    def conv_bytes(self) -> int:
        """Bytes of the convolution states of all layers, rounded up to a cache line."""
        return _cache_lines(self.num_layers * math.prod(self.conv_shape) * DTYPE_BYTES[self.conv_dtype])

    @property
    def ssm_bytes(self) -> int:
        """Bytes of the SSM states of all layers, rounded up to a cache line."""
        return _cache_lines(self.num_layers * math.prod(self.ssm_shape) * DTYPE_BYTES[self.ssm_dtype])

    @property
    def slot_bytes(self) -> int:
        """Bytes of one state slot. Example: 24 layers, conv (1792, 4), ssm (24, 64, 128), fp32 -> 19,562,496."""
        return self.conv_bytes + self.ssm_bytes


def _cache_lines(num_bytes: int) -> int:
    return -(-num_bytes // CACHE_LINE) * CACHE_LINE


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Mixture-of-experts layers: one rank's share of one expert."""

    top_k: int
    """Experts that each token is routed to."""
    fc1_width: int
    """Outputs of the first linear layer."""
    fc2_width: int
    """Inputs of the second linear layer."""

    @classmethod
    def of(cls, field: Callable[[str], Any], num_ranks: int) -> ExpertShape | None:
        """None for a model without experts.

        field: reads a field of a TransformerConfig. num_ranks: the ranks that share an expert.
        """
        if not field("num_moe_experts"):
            return None
        width = (field("moe_ffn_hidden_size") or field("ffn_hidden_size")) // num_ranks
        gates = 2 if field("gated_linear_unit") else 1
        return cls(top_k=field("moe_router_topk"), fc1_width=gates * width, fc2_width=width)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Latent attention: a layer keeps one vector of a token, [rotary part | latent | index key], whose first two parts
    are the key of all heads; its latent part is the value. Every tensor-parallel rank keeps all of it.

    Source: multi-head latent attention of DeepSeek-V2, arXiv:2405.04434.
    """

    rank: int
    """Width of the latent part (kv_lora_rank)."""
    num_heads: int
    """Query heads of all ranks."""
    rotary_dim: int
    """Width of the rotary part, which the keys of all heads share."""
    key_dim: int
    """Width of a head's full key, which is not kept."""
    value_dim: int
    """Width of a head's full value."""
    index_dim: int = 0
    """Width of the index key of sparse attention, which a token keeps after its latent; 0: attention is not sparse."""

    @property
    def full_width(self) -> int:
        """Numbers that full keys and values of a token would take in a layer, over all ranks."""
        return self.num_heads * (self.key_dim + self.value_dim)

    @property
    def expands_from(self) -> int | None:
        """Queries of a chunk of a prompt from which on full keys and values, made of the latents, take less time than
        queries in the latents' space; None: never.

        A head's query and key take rotary_dim + 2 rank multiplications there, with full ones key_dim + value_dim. A
        full key and value take rank * (key_dim - rotary_dim + value_dim) to make, which so many queries must share.
        Example: DeepSeek-V3 (rank 512, rotary_dim 64, key_dim 192, value_dim 128): 2 * 131,072 / (1,088 - 320) = 342.
        """
        saved = self.rotary_dim + 2 * self.rank - self.key_dim - self.value_dim
        if self.index_dim or saved <= 0:
            return None
        made = MAKING_COST * self.rank * (self.key_dim - self.rotary_dim + self.value_dim)
        return max(LEAST_EXPANDED, math.ceil(made / saved))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One rank's share of a model."""

    num_layers: int
    num_attention_layers: int
    """Layers of this rank that keep keys and values."""
    num_query_heads: int
    num_kv_heads: int
    """KV heads of this rank (see `heads_per_rank`)."""
    head_dim: int
    latent: LatentShape | None = None
    """Set where layers keep latents: then num_kv_heads is 1 and head_dim the width of what a token keeps."""
    hidden_size: int
    vocab_size: int
    """The number of tokens that exist; entries of the padded vocabulary beyond it are never drawn."""
    padded_vocab_size: int
    max_position: int | None
    """Positions the model can tell apart; None: unbounded."""
    kv_dtype_bytes: int
    """Bytes of one element of `dtype`."""
    dtype: str
    """"float32", "bfloat16" or "float16": the dtype of parameters and activations, and of the cache unless
    kv_cache_dtype says otherwise."""
    num_parameters: int
    state: StateShape | None = None
    """None: no layer of this rank keeps a recurrent state."""
    experts: ExpertShape | None = None
    """None: the model has no experts."""
    is_stage: bool = False
    """One of several pipeline stages: it may lack attention layers or states, or both, that other stages have."""
    num_mtp_layers: int = 0
    """Multi-token prediction layers of this rank, which `num_layers` does not count."""

    @property
    def kv_planes(self) -> int:
        """Vectors of a token, layer and KV head in the cache: a key and a value, or one that is both."""
        return 2 if self.latent is None else 1

    @property
    def value_dim(self) -> int:
        """Width of what attention adds up for a query head."""
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters in `dtype`."""
        return self.num_parameters * self.kv_dtype_bytes


def mtp_shape(shape: ModelShape, *, kv_element_bytes: int) -> ModelShape:
    """An MTP layer of the model as the model that drafts: one layer of keys and values, and in the bytes of further
    ones each token's hidden state. Its parameters count among the model's.

    Example: 3 KV heads of 64 in bf16 are 768 bytes of a token, a hidden state of 576 is 1,152: 1 + 2 layers.
    """
    layer_bytes = kv_token_bytes(replace(shape, num_attention_layers=1), kv_element_bytes)
    count = 1 + -(-shape.hidden_size * shape.kv_dtype_bytes // layer_bytes)
    return replace(shape, num_layers=count, num_attention_layers=count, num_parameters=0, num_mtp_layers=0)


def heads_per_rank(num_heads: int, tensor_parallel_size: int) -> int:
    """KV heads of one rank; at least one: heads are replicated when there are more ranks than heads."""
    return max(1, num_heads // tensor_parallel_size)


def kv_block_bytes(
    *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype_bytes: int, planes: int = 2
) -> int:
    """Bytes of one block over all attention layers, keys and values. Example: 30 x 16 x 3 x 64 bf16 -> 368,640.

    planes: see `ModelShape.kv_planes`.
    """
    return dtype_bytes * planes * num_layers * block_size * num_kv_heads * head_dim


def kv_token_bytes(shape: ModelShape, element_bytes: int | None = None) -> int:
    """Bytes of one token's keys and values, all layers. element_bytes: of a number in the cache; None: the model's."""
    return kv_block_bytes(
        num_layers=shape.num_attention_layers,
        block_size=1,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype_bytes=shape.kv_dtype_bytes if element_bytes is None else element_bytes,
        planes=shape.kv_planes,
    )


def state_bytes(shape: ModelShape) -> int:
    """Bytes of one request's recurrent states, all layers; 0 without Mamba layers."""
    return 0 if shape.state is None else shape.state.slot_bytes
