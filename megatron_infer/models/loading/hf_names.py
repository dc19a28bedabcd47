"""How each parameter of a GPTModel or MambaModel is made from Hugging Face tensors.

megatron-core's layout of a parameter is the same for all families and is stated here; `families` names the tensors.
megatron-core keeps Q, K and V fused and interleaved per kv group ([q of group 0, k0, v0, q of group 1, ...]), and gate
and up stacked in fc1. A tensor-parallel rank holds its part of each block of rows, laid out the same way.
Shape legend: N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from megatron_infer.models.loading.families import Family, family_of
from megatron_infer.models.loading.model_description import ModelDescription

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


# Transformer Engine specs have the norm inside the linear after it; a MambaModel calls its last norm otherwise.
_ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "pre_mlp_layernorm.bias",
    "mixer.in_proj.layer_norm_weight": "norm.weight",
    "decoder.final_norm.weight": "decoder.final_layernorm.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """How one parameter of megatron-core lies in the whole model and over tensor-parallel ranks."""

    rows: tuple[str, ...]
    """The size (`_sizes`) of each block of rows that it stacks."""
    columns: tuple[str, ...] = ()
    """The sizes of its other dimensions, which a bias does not have."""
    cut: Literal["rows", "columns", "groups", "vocabulary", "nothing"] = "rows"
    """What each rank has a part of. `groups` are rows, interleaved by kv group. With `columns` a bias is whole."""
    layers: str = ""
    """Symbols of a hybrid's layers that have it."""
    gated: bool = False
    """Whether a gated MLP has its block twice, for gate and up."""
    bias: str = "own"
    """The name of its bias in `linear_biases`. With `own` the source has a bias where the model has one, with `none`
    neither has one."""
    scale: str = ""
    """The field of WeightScales that loading multiplies into it."""


_NORM = _Layout(rows=("hidden",), cut="nothing")
_FC1 = _Layout(rows=("ffn",), columns=("hidden",), layers="-", gated=True, bias="fc1")
_FC2 = _Layout(rows=("hidden",), columns=("ffn",), cut="columns", layers="-", bias="fc2", scale="residual")
_PER_HEAD = _Layout(rows=("mamba_heads",), layers="M")
_VOCABULARY = _Layout(rows=("vocabulary",), columns=("hidden",), cut="vocabulary")
_LAYOUTS = {
    "embedding.word_embeddings": replace(_VOCABULARY, scale="embedding"),
    "embedding.position_embeddings": _Layout(rows=("positions",), columns=("hidden",), cut="nothing"),
    "decoder.final_layernorm": _NORM,
    "output_layer": replace(_VOCABULARY, scale="logits"),
    "norm": replace(_NORM, layers="M"),
    "input_layernorm": replace(_NORM, layers="*"),
    "pre_mlp_layernorm": replace(_NORM, layers="-E"),
    "self_attention.q_layernorm": _Layout(rows=("head_dim",), cut="nothing", layers="*"),
    "self_attention.k_layernorm": _Layout(rows=("head_dim",), cut="nothing", layers="*"),
    "self_attention.linear_qkv": _Layout(
        rows=("queries", "keys", "keys"), columns=("hidden",), cut="groups", layers="*", bias="qkv"
    ),
    "self_attention.linear_proj": _Layout(
        rows=("hidden",), columns=("queries",), cut="columns", layers="*", bias="proj", scale="residual"
    ),
    "mlp.linear_fc1": _FC1,
    "mlp.linear_fc2": _FC2,
    "mlp.router": _Layout(rows=("experts",), columns=("hidden",), cut="nothing", layers="E", bias="none"),
    "mlp.router.expert_bias": _Layout(rows=("experts",), cut="nothing", layers="E"),
    "mlp.experts.linear_fc1": replace(_FC1, rows=("expert_ffn",), layers="E", bias="none"),
    "mlp.experts.linear_fc2": replace(_FC2, columns=("expert_ffn",), layers="E", bias="none"),
    "mlp.shared_experts.linear_fc1": replace(_FC1, rows=("shared_ffn",), layers="E", bias="none"),
    "mlp.shared_experts.linear_fc2": replace(_FC2, columns=("shared_ffn",), layers="E", bias="none"),
    # in_proj's rows are [z | x | B | C | dt] and the convolution's channels [x | B | C] in both worlds.
    "mixer.in_proj": _Layout(
        rows=("inner", "inner", "states", "states", "mamba_heads"), columns=("hidden",), layers="M"
    ),
    "mixer.conv1d": _Layout(rows=("inner", "states", "states"), columns=("one", "taps"), layers="M"),
    "mixer.dt_bias": _PER_HEAD,
    "mixer.A_log": _PER_HEAD,
    "mixer.D": _PER_HEAD,
    "mixer.norm": _Layout(rows=("inner",), layers="M"),
    "mixer.out_proj": _Layout(rows=("hidden",), columns=("inner",), cut="columns", layers="M", scale="residual"),
}
"""megatron-core's module or bare parameter -> its layout. `Family.tensors` has the names in files."""


def _sizes(description: ModelDescription) -> dict[str, int]:
    layers, hybrid = description.transformer, description.hybrid
    heads = layers.get("mamba_num_heads") or 0
    return {
        "one": 1,
        "vocabulary": description.vocab_size,
        "positions": description.max_sequence_length,
        "hidden": layers["hidden_size"],
        "head_dim": layers["kv_channels"],
        "queries": layers["num_attention_heads"] * layers["kv_channels"],
        "keys": layers["num_query_groups"] * layers["kv_channels"],
        "ffn": layers["ffn_hidden_size"],
        "experts": layers.get("num_moe_experts") or 0,
        "expert_ffn": layers.get("moe_ffn_hidden_size") or 0,
        "shared_ffn": layers.get("moe_shared_expert_intermediate_size") or 0,
        "mamba_heads": heads,
        "inner": heads * (layers.get("mamba_head_dim") or 0),
        "states": (layers.get("mamba_num_groups") or 0) * (layers.get("mamba_state_dim") or 0),
        "taps": 0 if hybrid is None else hybrid.conv_width,
    }


class Recipes:
    """The recipe of each parameter of a model, by its family's row."""

    def __init__(self, description: ModelDescription, model: nn.Module, family: Family | None = None) -> None:
        """family: None is the description's."""
        self.description = description
        self.family = family_of(description) if family is None else family
        self._sizes = _sizes(description)
        self._model_vocab: int = getattr(model, "vocab_size", description.vocab_size)
        self._kv_heads: int = description.transformer["num_query_groups"]
        self._place = ExpertPlace.of(model)

    def recipe(self, name: str, layer: int | None = None) -> Recipe | None:
        """None says that the family has no such parameter. layer: from 0 on; `name` is then that within the layer."""
        name = _ALIASES.get(name, name)
        found = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.+)", name)
        name, local = (f"mlp.experts.{found[2]}", int(found[1])) if found else (name, None)
        module, _, kind = (name, "", "") if name in _LAYOUTS else name.rpartition(".")
        if module not in _LAYOUTS or kind not in ("", "weight", "bias"):
            return None
        layout = _LAYOUTS[module]
        sources = self._sources(module, kind, layer)
        hybrid = self.description.hybrid
        if not sources or (layer is not None and hybrid is not None and hybrid.pattern[layer] not in layout.layers):
            return None
        if kind == "bias":
            if layout.bias == "none":
                return None
            if layout.bias != "own" and layout.bias not in self.description.linear_biases:
                return Recipe()
            layout = replace(layout, columns=(), cut="nothing" if layout.cut == "columns" else layout.cut)
        recipe = self._made(sources, layout, local)
        scales = self.description.scales
        return scaled(recipe, getattr(scales, layout.scale)) if scales is not None and layout.scale else recipe

    def _sources(self, module: str, kind: str, layer: int | None) -> tuple[str, ...]:
        """Names of the tensors, with {expert} in those of experts."""
        tensors = self.family.tensors
        if module == "output_layer" and head_from_embedding(self.description):
            module = "embedding.word_embeddings"
        group, _, rest = module.partition(".")
        named = tensors[module] if module in tensors else f"{tensors[group]}.{rest}" if group in tensors else ()
        names = (named,) if isinstance(named, str) else named
        prefix = "" if layer is None else f"{self.family.layers}.{layer // self.family.blocks_per_layer}."
        suffix = f".{kind}" if kind else ""  # a bare parameter has its whole name in the row
        return tuple(f"{prefix}{name}{suffix}" for name in names)

    def _blocks(self, sources: tuple[str, ...], layout: _Layout) -> list[tuple[str, int, int]]:
        """(tensor, first row in the tensor, number of rows) of each block of rows."""
        rows = layout.rows * 2 if layout.gated and self.description.transformer["gated_linear_unit"] else layout.rows
        heights = [self._sizes[name] for name in rows]
        if len(sources) == 1:
            starts = itertools.accumulate([0, *heights[:-1]])
            return [(sources[0], start, height) for start, height in zip(starts, heights, strict=True)]
        given = sources[-len(heights) :]  # without gating there is no gate, which comes first
        return [(name, 0, height) for name, height in zip(given, heights, strict=True)]

    def _made(self, sources: tuple[str, ...], layout: _Layout, local: int | None) -> Recipe:
        """local: the expert's number on its rank; None: the parameter belongs to no expert."""
        blocks = self._blocks(sources, layout)
        tail = tuple(self._sizes[name] for name in layout.columns)
        shapes = {name: (sum(height for one, _, height in blocks if one == name), *tail) for name, _, _ in blocks}
        transposed = self.family.transposed and len(layout.columns) == 1 and bool(layout.layers)
        if transposed:
            shapes = {name: shape[::-1] for name, shape in shapes.items()}
        experts = range(0) if local is None else self._at_local(local)

        def make(reader: TensorReader, shard: Shard) -> Tensor:
            if local is not None:
                reader = _ExpertReader(reader, experts[self._place.rank])
                shard = self._place.shard

            def read(name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
                return reader.read(name, columns, rows).t() if transposed else reader.read(name, rows, columns)

            if layout.cut == "nothing":
                return read(sources[0])
            if layout.cut == "columns":
                return read(sources[0], columns=shard.span(tail[0]))
            if layout.cut == "vocabulary":
                start, stop = (min(end, self._sizes["vocabulary"]) for end in shard.span(self._model_vocab))
                return read(sources[0], rows=(start, stop))
            groups = self._groups(shard) if layout.cut == "groups" else shard
            spans = [(name, at, groups.span(height)) for name, at, height in blocks]
            parts = [read(name, rows=(at + start, at + stop)) for name, at, (start, stop) in spans]
            return self._interleave(parts, shard) if layout.cut == "groups" else torch.cat(parts)

        if local is not None:
            shapes = {
                name.format(expert=expert): shape if "{expert}" in name else (self._sizes["experts"], *shape)
                for expert in experts
                for name, shape in shapes.items()
            }
        return Recipe(shapes, make)

    def _at_local(self, local: int) -> range:
        """The experts with number `local` on their ranks, by rank. Each rank names all of them as sources, so that it
        checks the whole file against the config, and reads its own."""
        count = self._sizes["experts"]
        return range(local, count, count // self._place.size)

    def _groups(self, shard: Shard) -> Shard:
        """The kv groups in this rank's part of the fused projection, as a part of all groups."""
        if shard.size <= self._kv_heads:
            return shard
        return Shard(rank=shard.rank // (shard.size // self._kv_heads), size=self._kv_heads)

    def _interleave(self, parts: list[Tensor], shard: Shard) -> Tensor:
        """[N*H, ...], [K*H, ...], [K*H, ...] -> [K * (N/K + 2) * H, ...], group by group.

        The parts are those of `_groups`. With fewer kv heads than ranks the result is this rank's piece of its group.
        """
        groups = self._kv_heads // self._groups(shard).size
        fused = torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)
        if shard.size <= self._kv_heads:
            return fused
        sharers = shard.size // self._kv_heads
        start, stop = Shard(rank=shard.rank % sharers, size=sharers).span(len(fused))
        return fused[start:stop]


class _ExpertReader:
    """The tensors of one expert, by names with {expert}, or in tensors of all experts."""

    def __init__(self, reader: TensorReader, expert: int) -> None:
        self._reader = reader
        self._expert = expert
        self._stacked: dict[str, Tensor] = {}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._reader.shapes()

    def read(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        if "{expert}" in name:
            return self._reader.read(name.format(expert=self._expert), rows, columns)
        if name not in self._stacked:
            self._stacked[name] = self._reader.read(name, rows=(self._expert, self._expert + 1)).squeeze(0)
        every = slice(None)
        return self._stacked[name][slice(*rows) if rows else every, slice(*columns) if columns else every]


def head_from_embedding(description: ModelDescription) -> bool:
    """The source has one tensor for embedding and head."""
    return description.tied_embeddings or (description.scales is not None and description.scales.head_from_embedding)


def scaled(recipe: Recipe, factor: float) -> Recipe:
    """The recipe's result times `factor`, in fp32 at least."""
    make = recipe.make
    if make is None or factor == 1.0:
        return recipe

    def scale(reader: TensorReader, shard: Shard) -> Tensor:
        value = make(reader, shard)
        return value.to(torch.promote_types(value.dtype, torch.float32)) * factor

    return Recipe(recipe.sources, scale)
