"""How each parameter of a MambaModel is made from Hugging Face tensors, with the names of each family.

in_proj's rows are [z | x | B | C | dt] and the convolution's channels [x | B | C] in both worlds. A tensor-parallel
rank holds its heads of z, x and dt and its groups of B and C, laid out the same way.
Legend: D hidden, M inner width, G groups, N state dim, H heads, F ffn, W convolution taps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from megatron_infer.model_loader.hf_names import ExpertPlace, LlamaNames, Recipe, Shard, TensorReader, whole
from megatron_infer.model_loader.model_description import ModelDescription

# Transformer Engine specs have the norm inside the linear behind it.
_NORMS = {
    "norm.weight": "M",
    "mixer.in_proj.layer_norm_weight": "M",
    "input_layernorm.weight": "*",
    "self_attention.linear_qkv.layer_norm_weight": "*",
    "pre_mlp_layernorm.weight": "-E",
    "mlp.linear_fc1.layer_norm_weight": "-",
}
"""Name of the norm before a layer's body -> symbols of the layers that have it."""


class HybridNames(LlamaNames):
    """Mamba2 and NemotronH: one block per layer, its norm `norm`, its body `mixer`."""

    base = "backbone"
    embedding, final_norm, positions, head = "backbone.embeddings", "backbone.norm_f", "", "lm_head"
    prefix = "backbone.layers"
    attention = mlp = mixer = "mixer"

    def __init__(self, description: ModelDescription, model: nn.Module) -> None:
        super().__init__(description, model)
        config = description.transformer
        assert description.hybrid is not None
        self.hybrid = description.hybrid
        self.mamba_heads: int = config["mamba_num_heads"]
        self.inner: int = self.mamba_heads * config["mamba_head_dim"]
        self.shared_width: int = config["mamba_num_groups"] * config["mamba_state_dim"]
        self.expert_ffn: int = config.get("moe_ffn_hidden_size", 0)
        self.shared_ffn: int = config.get("moe_shared_expert_intermediate_size", 0)
        self.num_experts: int = config.get("num_moe_experts", 0)
        self.place = ExpertPlace.of(model)

    def block(self, index: int) -> tuple[str, str]:
        """(prefix of a block's tensors, name of its norm)."""
        prefix = f"{self.prefix}.{index}"
        return prefix, f"{prefix}.norm"

    def outer(self, name: str) -> Recipe | None:
        recipe = super().outer(name)
        scales = self.description.scales
        if recipe is None or scales is None:
            return recipe
        if name == "embedding.word_embeddings.weight":
            return scaled(recipe, scales.embedding)
        if name == "output_layer.weight":
            source = self.embedding if scales.head_from_embedding else self.head
            return scaled(self._vocabulary(f"{source}.weight"), scales.logits)
        return recipe

    def layer(self, index: int, part: str) -> Recipe | None:
        symbol = self.hybrid.pattern[index]
        prefix, norm = self.block(index)
        if part in _NORMS:
            return whole(f"{norm}.weight", (self.hidden,)) if symbol in _NORMS[part] else None
        module, _, kind = part.rpartition(".")
        if symbol == "M":
            recipe = self._mixer(f"{prefix}.{self.mixer}", part.removeprefix("mixer."))
            last = module == "mixer.out_proj"
        elif symbol == "E":
            recipe = self._experts(prefix, part.removeprefix("mlp."))
            last = module.endswith(".linear_fc2")
        else:
            linears = {
                "*self_attention.linear_qkv": ("qkv", self._qkv),
                "*self_attention.linear_proj": ("proj", self._proj),
                "-mlp.linear_fc1": ("fc1", self._fc1),
                "-mlp.linear_fc2": ("fc2", self._fc2),
            }
            if symbol + module not in linears or kind not in ("weight", "bias"):
                return None
            short, make = linears[symbol + module]
            recipe = Recipe() if kind == "bias" and short not in self.description.linear_biases else make(prefix, kind)
            last = short in ("proj", "fc2")
        if recipe is not None and last and self.description.scales is not None:
            return scaled(recipe, self.description.scales.residual)
        return recipe

    def _mixer(self, prefix: str, part: str) -> Recipe | None:
        inner, shared, heads = self.inner, self.shared_width, self.mamba_heads
        channels = (inner, shared, shared)
        projected = (inner, *channels, heads)
        tails = {"in_proj.weight": (self.hidden,), "conv1d.weight": (1, self.hybrid.conv_width)}
        name = f"{prefix}.{part}"
        if part in ("in_proj.weight", "in_proj.bias"):
            return _split(name, projected, tails.get(part, ()))
        if part in ("conv1d.weight", "conv1d.bias"):
            return _split(name, channels, tails.get(part, ()))
        if part in ("dt_bias", "A_log", "D"):
            return _split(name, (heads,))
        if part == "norm.weight":
            return _split(name, (inner,))
        if part in ("out_proj.weight", "out_proj.bias"):
            return self._row_parallel(name, inner)
        return None

    def _experts(self, prefix: str, part: str) -> Recipe | None:
        """A part of a mixture of experts: the router, expert i, or the shared experts."""
        body = f"{prefix}.{self.mlp}"
        if part == "router.weight":
            return whole(f"{body}.gate.weight", (self.num_experts, self.hidden))
        if part == "router.expert_bias":
            return whole(f"{body}.gate.e_score_correction_bias", (self.num_experts,))
        if part in ("shared_experts.linear_fc1.weight", "shared_experts.linear_fc2.weight"):
            name = f"{body}.shared_experts"
            if part.endswith("linear_fc1.weight"):
                return _split(f"{name}.up_proj.weight", (self.shared_ffn,), (self.hidden,))
            return self._row_parallel(f"{name}.down_proj.weight", self.shared_ffn)
        found = _local_expert(part)
        if found is None:
            return None
        local, linear = found
        projection = "up_proj" if linear == "linear_fc1" else "down_proj"
        names = [f"{body}.experts.{expert}.{projection}.weight" for expert in self._at_local(local)]
        shape = (self.expert_ffn, self.hidden) if linear == "linear_fc1" else (self.hidden, self.expert_ffn)
        mine = names[self.place.rank]

        def make(reader: TensorReader, shard: Shard) -> Tensor:
            span = self.place.shard.span(self.expert_ffn)
            return reader.read(mine, rows=span) if linear == "linear_fc1" else reader.read(mine, columns=span)

        return Recipe(dict.fromkeys(names, shape), make)

    def _at_local(self, local: int) -> range:
        """The experts with number `local` on their ranks, by rank. Each rank names all of them as sources, so that it
        checks the whole file against the config, and reads its own."""
        return range(local, self.num_experts, self.num_experts // self.place.size)


class BambaNames(HybridNames):
    """Bamba: two blocks per layer."""

    base = "model"
    embedding, final_norm, positions, head = "model.embed_tokens", "model.final_layernorm", "", "lm_head"
    prefix = "model.layers"
    attention, mlp, mixer = "self_attn", "feed_forward", "mamba"
    block_norms: ClassVar = ("input_layernorm", "pre_ff_layernorm")

    def block(self, index: int) -> tuple[str, str]:
        prefix = f"{self.prefix}.{index // 2}"
        return prefix, f"{prefix}.{self.block_norms[index % 2]}"


class GraniteNames(BambaNames):
    """GraniteMoeHybrid: Bamba's layers with gate and up in one tensor, and all experts in one tensor."""

    final_norm = "model.norm"
    block_norms: ClassVar = ("input_layernorm", "post_attention_layernorm")

    def _fc1(self, prefix: str, kind: str) -> Recipe:
        return _split(f"{prefix}.shared_mlp.input_linear.{kind}", (self.ffn, self.ffn), (self.hidden,))

    def _fc2(self, prefix: str, kind: str) -> Recipe:
        return self._row_parallel(f"{prefix}.shared_mlp.output_linear.{kind}", self.ffn)

    def _experts(self, prefix: str, part: str) -> Recipe | None:
        if part == "router.weight":
            return whole(f"{prefix}.block_sparse_moe.router.layer.weight", (self.num_experts, self.hidden))
        if part in ("shared_experts.linear_fc1.weight", "shared_experts.linear_fc2.weight"):
            name = f"{prefix}.shared_mlp"
            if part.endswith("linear_fc1.weight"):
                return _split(f"{name}.input_linear.weight", (self.shared_ffn,) * 2, (self.hidden,))
            return self._row_parallel(f"{name}.output_linear.weight", self.shared_ffn)
        found = _local_expert(part)
        if found is None:
            return None
        local, linear = found
        ffn, expert = self.expert_ffn, self._at_local(local)[self.place.rank]
        gate_up = linear == "linear_fc1"
        name = f"{prefix}.block_sparse_moe.{'input_linear' if gate_up else 'output_linear'}.weight"
        shape = (2 * ffn, self.hidden) if gate_up else (self.hidden, ffn)

        def make(reader: TensorReader, shard: Shard) -> Tensor:
            start, stop = self.place.shard.span(ffn)
            whole = reader.read(name, rows=(expert, expert + 1)).squeeze(0)
            if gate_up:
                return torch.cat([whole[start:stop], whole[ffn + start : ffn + stop]])
            return whole[:, start:stop]

        return Recipe({name: (self.num_experts, *shape)}, make)


def _local_expert(part: str) -> tuple[int, str] | None:
    """(number on its rank, linear) of an expert's weight; None for anything else."""
    found = re.fullmatch(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", part)
    return (int(found[1]), found[2]) if found else None


def _split(name: str, widths: tuple[int, ...], tail: tuple[int, ...] = ()) -> Recipe:
    """Rows in several parts, each divided over the ranks."""

    def make(reader: TensorReader, shard: Shard) -> Tensor:
        parts, at = [], 0
        for width in widths:
            start, stop = shard.span(width)
            parts.append(reader.read(name, rows=(at + start, at + stop)))
            at += width
        return torch.cat(parts)

    return Recipe({name: (sum(widths), *tail)}, make)


def scaled(recipe: Recipe, factor: float) -> Recipe:
    """The recipe's result times `factor`, in fp32 at least."""
    make = recipe.make
    if make is None or factor == 1.0:
        return recipe

    def scale(reader: TensorReader, shard: Shard) -> Tensor:
        value = make(reader, shard)
        return value.to(torch.promote_types(value.dtype, torch.float32)) * factor

    return Recipe(recipe.sources, scale)


HYBRID_NAMES: Mapping[str, type[LlamaNames]] = {
    "Mamba2ForCausalLM": HybridNames,
    "NemotronHForCausalLM": HybridNames,
    "BambaForCausalLM": BambaNames,
    "GraniteMoeHybridForCausalLM": GraniteNames,
}
