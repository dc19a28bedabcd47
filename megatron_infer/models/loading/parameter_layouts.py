"""How each parameter of megatron-core lies in a whole model and over tensor-parallel ranks: one table. No torch.

`hf_names` makes parameters of Hugging Face tensors by it, `description_shape` counts a model that is not built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.model_description import ModelDescription


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one parameter of megatron-core lies in the whole model and over tensor-parallel ranks."""

    rows: tuple[str, ...]
    """The size (`sizes_of`) of each block of rows that it stacks."""
    columns: tuple[str, ...] = ()
    """The sizes of its other dimensions, which a bias does not have."""
    cut: Literal["rows", "columns", "groups", "vocabulary", "nothing", "whole heads"] = "rows"
    """What each rank has a part of. `groups` are rows, interleaved by kv group. With `columns` a bias is whole. With
    `whole heads` rows, if they are those of all heads (`Extensions.whole_head_norms`)."""
    layers: str = ""
    """Symbols of the layers that have it (`description_shape`); a hybrid's pattern has them."""
    gated: bool = False
    """Whether a gated MLP has its block twice, for gate and up."""
    bias: str = "own"
    """The name of its bias in `linear_biases`. With `own` the source has a bias where the model has one, with `none`
    neither has one."""
    scale: str = ""
    """The field of WeightScales that loading multiplies into it."""
    is_around_one: bool = False
    """Whether the source adds 1 to it where megatron-core's norms are zero-centred."""

    def heights(self, sizes: Mapping[str, int], *, is_gated: bool) -> list[int]:
        """Rows of each block. sizes: `sizes_of` the model; is_gated: its MLPs are."""
        blocks = self.rows * 2 if self.gated and is_gated else self.rows
        return [sizes[name] for name in blocks]

    def num_elements(self, sizes: Mapping[str, int], *, is_gated: bool, has_bias: bool) -> int:
        """Numbers in the whole parameter, and in its bias."""
        return sum(self.heights(sizes, is_gated=is_gated)) * (
            math.prod(map(sizes.__getitem__, self.columns)) + has_bias
        )


_NORM = Layout(rows=("hidden",), cut="nothing")
_FC1 = Layout(rows=("ffn",), columns=("hidden",), layers="-", gated=True, bias="fc1")
_FC2 = Layout(rows=("hidden",), columns=("ffn",), cut="columns", layers="-", bias="fc2", scale="residual")
_EXPERT = Layout(rows=(), layers="E", bias="experts")
_PER_HEAD = Layout(rows=("mamba_heads",), layers="MP")
_VOCABULARY = Layout(rows=("vocabulary",), columns=("hidden",), cut="vocabulary")
LAYOUTS = {
    "embedding.word_embeddings": replace(_VOCABULARY, scale="embedding"),
    "embedding.position_embeddings": Layout(rows=("positions",), columns=("hidden",), cut="nothing"),
    "decoder.final_layernorm": _NORM,
    "output_layer": replace(_VOCABULARY, scale="logits"),
    "norm": replace(_NORM, layers="M"),
    "input_layernorm": replace(_NORM, layers="*P"),
    "pre_mlp_layernorm": replace(_NORM, layers="-E"),
    "self_attention.q_layernorm": Layout(rows=("q_norm",), cut="whole heads", layers="*P"),
    "self_attention.k_layernorm": Layout(rows=("k_norm",), cut="whole heads", layers="*P"),
    "self_attention.linear_qkv": Layout(
        rows=("queries", "keys", "values"), columns=("hidden",), cut="groups", layers="*P", bias="qkv"
    ),
    "self_attention.core_attention.softmax_offset": Layout(rows=("heads",), layers="*P"),
    "self_attention.core_attention.indexer.linear_wq_b": Layout(
        rows=("index_queries",), columns=("q_rank",), cut="nothing", layers="*P"
    ),
    "self_attention.core_attention.indexer.linear_wk": Layout(
        rows=("index_key",), columns=("hidden",), cut="nothing", layers="*P"
    ),
    "self_attention.core_attention.indexer.k_norm": Layout(rows=("index_key",), cut="nothing", layers="*P"),
    "self_attention.core_attention.indexer.linear_weights_proj": Layout(
        rows=("index_heads",), columns=("hidden",), cut="nothing", layers="*P"
    ),
    "self_attention.linear_proj": Layout(
        rows=("hidden",), columns=("mixed",), cut="columns", layers="*P", bias="proj", scale="residual"
    ),
    "self_attention.linear_proj.post_layernorm": replace(_NORM, layers="*P"),
    "mlp.linear_fc2.post_layernorm": replace(_NORM, layers="-"),
    "self_attention.linear_q_proj": Layout(rows=("queries",), columns=("hidden",), layers="*P"),
    "self_attention.linear_q_down_proj": Layout(rows=("q_rank",), columns=("hidden",), layers="*P"),
    "self_attention.linear_q_up_proj": Layout(rows=("queries",), columns=("q_rank",), layers="*P"),
    "self_attention.linear_kv_down_proj": Layout(rows=("kv_down",), columns=("hidden",), layers="*P"),
    "self_attention.kv_layernorm": Layout(rows=("kv_rank",), cut="nothing", layers="*P"),
    "self_attention.linear_kv_up_proj": Layout(rows=("kv_up",), columns=("kv_rank",), layers="*P"),
    "mlp.linear_fc1": _FC1,
    "mlp.linear_fc2": _FC2,
    "mlp.router": Layout(rows=("experts",), columns=("hidden",), cut="nothing", layers="E", bias="router"),
    "mlp.router.expert_bias": Layout(rows=("experts",), cut="nothing", layers="E"),
    "mlp.fc1_latent_proj": Layout(rows=("expert_hidden",), columns=("hidden",), cut="nothing", layers="E", bias="none"),
    "mlp.fc2_latent_proj": Layout(rows=("hidden",), columns=("expert_hidden",), cut="nothing", layers="E", bias="none"),
    "mlp.experts.linear_fc1": replace(
        _FC1, rows=("expert_ffn",), columns=("expert_hidden",), layers="E", bias="experts"
    ),
    "mlp.experts.linear_fc2": replace(
        _FC2, rows=("expert_hidden",), columns=("expert_ffn",), layers="E", bias="experts"
    ),
    "mlp.shared_experts.linear_fc1": replace(_FC1, rows=("shared_ffn",), layers="E", bias="none"),
    "mlp.shared_experts.linear_fc2": replace(_FC2, columns=("shared_ffn",), layers="E", bias="none"),
    "mlp.shared_experts.gate_weight": Layout(rows=("one",), columns=("hidden",), cut="nothing", layers="E"),
    "self_attention.in_proj": Layout(
        rows=("delta_keys", "delta_keys", "delta_values", "delta_values", "delta_heads", "delta_heads"),
        columns=("hidden",),
        layers="G",
    ),
    "self_attention.conv1d": Layout(
        rows=("delta_keys", "delta_keys", "delta_values"), columns=("one", "delta_taps"), layers="G"
    ),
    "self_attention.dt_bias": Layout(rows=("delta_heads",), layers="G"),
    "self_attention.A_log": Layout(rows=("delta_heads",), layers="G"),
    "self_attention.out_norm": Layout(rows=("delta_head_dim",), cut="nothing", layers="G", is_around_one=True),
    "self_attention.out_proj": Layout(rows=("hidden",), columns=("delta_values",), cut="columns", layers="G"),
    # in_proj's rows are [z | x | B | C | dt] and the convolution's channels [x | B | C] in both worlds.
    "mixer.in_proj": Layout(
        rows=("inner", "inner", "states", "states", "mamba_heads"), columns=("hidden",), layers="MP"
    ),
    "mixer.conv1d": Layout(rows=("inner", "states", "states"), columns=("one", "taps"), layers="MP"),
    "mixer.dt_bias": _PER_HEAD,
    "mixer.A_log": _PER_HEAD,
    "mixer.D": _PER_HEAD,
    "mixer.norm": Layout(rows=("inner",), layers="MP"),
    "mixer.out_proj": Layout(rows=("hidden",), columns=("inner",), cut="columns", layers="MP", scale="residual"),
}
"""megatron-core's module or bare parameter -> its layout. `Family.tensors` has the names in files."""


def sizes_of(description: ModelDescription) -> dict[str, int]:
    """Sizes of a whole model by the names that layouts have for them."""
    layers, hybrid = description.transformer, description.hybrid
    heads, mamba_heads = layers["num_attention_heads"], layers.get("mamba_num_heads") or 0
    groups, value_dim = layers.get("num_query_groups") or heads, description.extensions.value_dim
    queries, keys = (count * layers["kv_channels"] for count in (heads, groups))
    q_rank, kv_rank = layers.get("q_lora_rank") or 0, layers.get("kv_lora_rank") or 0
    is_latent = bool(layers.get("multi_latent_attention"))
    index_heads, index_key = layers.get("dsa_indexer_n_heads") or 0, layers.get("dsa_indexer_head_dim") or 0
    q_norm, k_norm = (queries, keys) if description.extensions.whole_head_norms else (layers["kv_channels"],) * 2
    return {
        "one": 1,
        "vocabulary": description.vocab_size,
        "positions": description.max_sequence_length,
        "hidden": layers["hidden_size"],
        "heads": heads,
        "q_norm": q_rank if is_latent else q_norm,
        "k_norm": k_norm,
        "queries": queries * (2 if layers.get("attention_output_gate") else 1),
        "mixed": heads * (value_dim or layers["v_head_dim" if is_latent else "kv_channels"]),
        "q_rank": q_rank,
        "kv_rank": kv_rank,
        "index_heads": index_heads,
        "index_key": index_key,
        "index_queries": index_heads * index_key,
        "kv_down": kv_rank + layers["qk_pos_emb_head_dim"] if is_latent else 0,
        "kv_up": heads * (layers["qk_head_dim"] + layers["v_head_dim"]) if is_latent else 0,
        "keys": keys,
        "values": groups * (value_dim or layers["kv_channels"]),
        "ffn": layers["ffn_hidden_size"],
        "experts": layers.get("num_moe_experts") or 0,
        "expert_hidden": layers.get("moe_latent_size") or layers["hidden_size"],
        "expert_ffn": layers.get("moe_ffn_hidden_size") or 0,
        "shared_ffn": layers.get("moe_shared_expert_intermediate_size") or 0,
        "mamba_heads": mamba_heads,
        "inner": mamba_heads * (layers.get("mamba_head_dim") or 0),
        "states": (layers.get("mamba_num_groups") or 0) * (layers.get("mamba_state_dim") or 0),
        "taps": 0 if hybrid is None else hybrid.conv_width,
        "delta_keys": (layers.get("linear_num_key_heads") or 0) * (layers.get("linear_key_head_dim") or 0),
        "delta_values": (layers.get("linear_num_value_heads") or 0) * (layers.get("linear_value_head_dim") or 0),
        "delta_heads": layers.get("linear_num_value_heads") or 0,
        "delta_head_dim": layers.get("linear_value_head_dim") or 0,
        "delta_taps": layers.get("linear_conv_kernel_dim") or 0,
    }


def check_split(description: ModelDescription, *, tensor: int, expert: int = 1, expert_tensor: int = 1) -> None:
    """Raise ModelError, with both numbers, for a size that does not divide over so many ranks.

    expert, expert_tensor: expert-parallel ranks, and ranks that each expert is split over.
    """
    hybrid, local = description.hybrid, description.extensions.local_query_groups
    layers = {**description.transformer, "local_query_groups": local}
    symbols = "*-G" if hybrid is None else hybrid.pattern.replace("P", "*M")
    dense = {
        "*": ("num_attention_heads", "num_query_groups", "local_query_groups"),
        "-": ("ffn_hidden_size",),
        "M": ("mamba_num_heads", "mamba_num_groups"),
        "G": ("linear_num_key_heads", "linear_num_value_heads"),
    }
    keys = [key for symbol, several in dense.items() if symbol in symbols for key in several]
    split = [(key, tensor, "tensor-parallel") for key in (*keys, "moe_shared_expert_intermediate_size")]
    split.append(("num_moe_experts", expert, "expert-parallel"))
    split.append(("moe_ffn_hidden_size", expert_tensor, "expert-tensor-parallel"))
    for key, ranks, kind in split:
        count = layers.get(key)
        # ranks may share kv heads, where each rank has one
        if count and count % ranks and not (key == "num_query_groups" and ranks % count == 0):
            raise ModelError(f"{description.name}: {key} {count} cannot be split over {ranks} {kind} ranks")
    if hybrid is not None and hybrid.gated_norm and tensor > 1 and hybrid.norm_groups % tensor:
        raise ModelError(
            f"{description.name}: the gated norm runs over {hybrid.norm_groups} groups of channels, "
            f"which cannot be split over {tensor} tensor-parallel ranks"
        )
