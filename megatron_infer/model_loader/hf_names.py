"""How each parameter of a GPTModel is made from Hugging Face tensors, with the names of each family.

megatron-core keeps Q, K and V fused and interleaved per kv group ([q of group 0, k0, v0, q of group 1, ...]), and gate
and up stacked in fc1.
Shape legend: N query heads, K kv heads, H head dim, D hidden, F ffn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from megatron_infer.model_loader.model_description import ModelDescription

Span = tuple[int, int]


class TensorReader(Protocol):
    """A model's tensors under their Hugging Face names."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Full shape of every tensor, without reading any."""
        ...

    def read(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        """One tensor, or a range of its first (rows) or second (columns) dimension."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """This rank's part of tensor parallelism."""

    rank: int = 0
    size: int = 1

    def span(self, total: int) -> Span:
        share = total // self.size
        return self.rank * share, (self.rank + 1) * share


WHOLE = Shard()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlace:
    """Which experts this rank holds, and which part of each."""

    rank: int = 0
    size: int = 1
    """rank and size: in expert parallelism."""
    shard: Shard = WHOLE
    """This rank's part in the tensor parallelism inside experts."""

    @classmethod
    def of(cls, model: nn.Module) -> ExpertPlace:
        """The place in the groups of the model's experts; a single rank where it has none."""
        for module in model.modules():
            ep, tp = getattr(module, "ep_group", None), getattr(module, "tp_group", None)
            if hasattr(module, "local_experts") and ep is not None and tp is not None:
                return cls(rank=ep.rank(), size=ep.size(), shard=Shard(rank=tp.rank(), size=tp.size()))
        return cls()


@dataclass(slots=True)
class Recipe:
    """How one megatron-core parameter is made: the tensors it needs, with their full shapes, and a function."""

    sources: dict[str, tuple[int, ...]] = field(default_factory=dict)
    make: Callable[[TensorReader, Shard], Tensor] | None = None
    """None: zeros (a bias the source does not have)."""


# Transformer Engine specs have the norm inside the linear behind it, the local spec as a module of its own.
NORM_ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "pre_mlp_layernorm.bias",
}


class LlamaNames:
    """Recipes for Llama's names: model.layers.N.self_attn.q_proj and so on."""

    base = "model"
    """Prefix of all tensors but the head."""
    embedding, final_norm, positions, head = "model.embed_tokens", "model.norm", "", "lm_head"
    prefix = "model.layers"
    attention, mlp = "self_attn", "mlp"
    transposed: ClassVar = False
    """Linears are stored as [in, out]."""
    norms: ClassVar = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}

    def __init__(self, description: ModelDescription, model: nn.Module) -> None:
        config = description.transformer
        self.description = description
        self.hidden: int = config["hidden_size"]
        self.ffn: int = config["ffn_hidden_size"]
        self.gated: bool = config["gated_linear_unit"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_query_groups"]
        self.head_dim: int = config["kv_channels"]
        self.model_vocab: int = getattr(model, "vocab_size", description.vocab_size)

    def outer(self, name: str) -> Recipe | None:
        """A parameter outside the layers."""
        if name == "embedding.word_embeddings.weight":
            return self._vocabulary(f"{self.embedding}.weight")
        if name == "output_layer.weight":
            return self._vocabulary(f"{self.embedding if self.description.tied_embeddings else self.head}.weight")
        if name == "embedding.position_embeddings.weight" and self.positions:
            return whole(f"{self.positions}.weight", (self.description.max_sequence_length, self.hidden))
        if name in ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "decoder.final_norm.weight"):
            return whole(f"{self.final_norm}.{name.rsplit('.', 1)[1]}", (self.hidden,))
        return None

    def layer(self, index: int, part: str) -> Recipe | None:
        """A parameter of layer `index` (0-based); `part` is its name within the layer."""
        part = NORM_ALIASES.get(part, part)
        module, kind = part.rsplit(".", 1)
        prefix = f"{self.prefix}.{index}"
        if module in self.norms:
            return whole(f"{prefix}.{self.norms[module]}.{kind}", (self.hidden,))
        if module in ("self_attention.q_layernorm", "self_attention.k_layernorm"):
            letter = module.split(".")[1][0]
            return whole(f"{prefix}.self_attn.{letter}_norm.{kind}", (self.head_dim,))
        linears = {
            "self_attention.linear_qkv": ("qkv", self._qkv),
            "self_attention.linear_proj": ("proj", self._proj),
            "mlp.linear_fc1": ("fc1", self._fc1),
            "mlp.linear_fc2": ("fc2", self._fc2),
        }
        if module not in linears or kind not in ("weight", "bias"):
            return None
        short, recipe = linears[module]
        if kind == "bias" and short not in self.description.linear_biases:
            return Recipe()
        return recipe(prefix, kind)

    def _vocabulary(self, source: str) -> Recipe:
        true = self.description.vocab_size

        def make(reader: TensorReader, shard: Shard) -> Tensor:
            start, stop = shard.span(self.model_vocab)
            return reader.read(source, rows=(min(start, true), min(stop, true)))

        return Recipe({source: (true, self.hidden)}, make)

    def _qkv(self, prefix: str, kind: str) -> Recipe:
        names = [f"{prefix}.{self.attention}.{letter}_proj.{kind}" for letter in "qkv"]
        tail = (self.hidden,) if kind == "weight" else ()
        rows = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]

        def make(reader: TensorReader, shard: Shard) -> Tensor:
            groups = self._groups(shard)
            parts = [reader.read(name, rows=groups.span(count)) for name, count in zip(names, rows, strict=True)]
            return self._interleave(parts, shard)

        return Recipe({name: (count, *tail) for name, count in zip(names, rows, strict=True)}, make)

    def _groups(self, shard: Shard) -> Shard:
        """The kv groups in this rank's part of the fused projection, as a part of all groups."""
        if shard.size <= self.kv_heads:
            return shard
        return Shard(rank=shard.rank // (shard.size // self.kv_heads), size=self.kv_heads)

    def _interleave(self, parts: list[Tensor], shard: Shard) -> Tensor:
        """[N*H, ...], [K*H, ...], [K*H, ...] -> [K * (N/K + 2) * H, ...], group by group.

        The parts are those of `_groups`. With fewer kv heads than ranks the result is this rank's piece of its group.
        """
        groups = self.kv_heads // self._groups(shard).size
        fused = torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)
        if shard.size <= self.kv_heads:
            return fused
        sharers = shard.size // self.kv_heads
        start, stop = Shard(rank=shard.rank % sharers, size=sharers).span(len(fused))
        return fused[start:stop]

    def _proj(self, prefix: str, kind: str) -> Recipe:
        return self._row_parallel(f"{prefix}.{self.attention}.o_proj.{kind}", self.heads * self.head_dim)

    def _fc1(self, prefix: str, kind: str) -> Recipe:
        gate = [f"{prefix}.{self.mlp}.gate_proj.{kind}"] if self.gated else []
        return self._stacked([*gate, f"{prefix}.{self.mlp}.up_proj.{kind}"], kind)

    def _fc2(self, prefix: str, kind: str) -> Recipe:
        return self._row_parallel(f"{prefix}.{self.mlp}.down_proj.{kind}", self.ffn)

    def _stacked(self, names: list[str], kind: str) -> Recipe:
        tail = (self.hidden,) if kind == "weight" else ()

        def make(reader: TensorReader, shard: Shard) -> Tensor:
            return torch.cat([reader.read(name, rows=shard.span(self.ffn)) for name in names])

        return Recipe(dict.fromkeys(names, (self.ffn, *tail)), make)

    def _row_parallel(self, name: str, width: int) -> Recipe:
        """A linear split over its inputs; every rank has the whole bias."""
        if name.endswith(".bias"):
            return whole(name, (self.hidden,))
        return Recipe({name: (self.hidden, width)}, lambda reader, shard: reader.read(name, columns=shard.span(width)))


class Phi3Names(LlamaNames):
    """Phi-3: q, k, v in one tensor (whole blocks, not interleaved), gate and up in another."""

    def _qkv(self, prefix: str, kind: str) -> Recipe:
        name = f"{prefix}.self_attn.qkv_proj.{kind}"
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim

        def make(reader: TensorReader, shard: Shard) -> Tensor:
            groups = self._groups(shard)
            spans = ((0, groups.span(q)), (q, groups.span(kv)), (q + kv, groups.span(kv)))
            return self._interleave([reader.read(name, rows=(at + a, at + b)) for at, (a, b) in spans], shard)

        return Recipe({name: (q + 2 * kv, self.hidden)}, make)

    def _fc1(self, prefix: str, kind: str) -> Recipe:
        name = f"{prefix}.mlp.gate_up_proj.{kind}"

        def make(reader: TensorReader, shard: Shard) -> Tensor:
            start, stop = shard.span(self.ffn)
            return torch.cat([reader.read(name, rows=(at + start, at + stop)) for at in (0, self.ffn)])

        return Recipe({name: (2 * self.ffn, self.hidden)}, make)


class GPT2Names(LlamaNames):
    """GPT-2: learned positions, and linears stored as [in, out]."""

    base = "transformer"
    embedding, final_norm, positions, head = "transformer.wte", "transformer.ln_f", "transformer.wpe", "lm_head"
    prefix = "transformer.h"
    transposed = True
    norms: ClassVar = {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2"}

    def _qkv(self, prefix: str, kind: str) -> Recipe:
        name, width = f"{prefix}.attn.c_attn.{kind}", self.hidden

        def make(reader: TensorReader, shard: Shard) -> Tensor:
            start, stop = shard.span(width)
            spans = [(at + start, at + stop) for at in (0, width, 2 * width)]
            if kind == "bias":
                return self._interleave([reader.read(name, rows=span) for span in spans], shard)
            return self._interleave([reader.read(name, columns=span).t() for span in spans], shard)

        return Recipe({name: (width, 3 * width) if kind == "weight" else (3 * width,)}, make)

    def _proj(self, prefix: str, kind: str) -> Recipe:
        return self._transposed_row(f"{prefix}.attn.c_proj.{kind}", self.hidden)

    def _fc1(self, prefix: str, kind: str) -> Recipe:
        name = f"{prefix}.mlp.c_fc.{kind}"
        if kind == "bias":
            return Recipe({name: (self.ffn,)}, lambda reader, shard: reader.read(name, rows=shard.span(self.ffn)))
        shape = (self.hidden, self.ffn)
        return Recipe({name: shape}, lambda reader, shard: reader.read(name, columns=shard.span(self.ffn)).t())

    def _fc2(self, prefix: str, kind: str) -> Recipe:
        return self._transposed_row(f"{prefix}.mlp.c_proj.{kind}", self.ffn)

    def _transposed_row(self, name: str, width: int) -> Recipe:
        if name.endswith(".bias"):
            return whole(name, (self.hidden,))
        return Recipe({name: (width, self.hidden)}, lambda reader, shard: reader.read(name, rows=shard.span(width)).t())


def whole(name: str, shape: tuple[int, ...]) -> Recipe:
    return Recipe({name: shape}, lambda reader, shard: reader.read(name))
