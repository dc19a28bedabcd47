"""How each parameter of a GPTModel or MambaModel is made from Hugging Face tensors.

`parameter_layouts` has megatron-core's layout of a parameter, `families` the names of its tensors in files.
megatron-core keeps Q, K and V fused and interleaved per kv group ([q of group 0, k0, v0, q of group 1, ...]), and gate
and up stacked in fc1. A tensor-parallel rank holds its part of each block of rows, laid out the same way.
Shape legend: N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron_infer.distributed.backends import group_rank, group_size
from megatron_infer.models.loading.families import Family, family_of
from megatron_infer.models.loading.model_description import ModelDescription
from megatron_infer.models.loading.parameter_layouts import LAYOUTS, Layout, sizes_of
from megatron_infer.models.stage_layers import delta_layers

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

    @classmethod
    def of(cls, tp: Any) -> Shard:
        """tp: the process group; None: one rank."""
        return cls(rank=group_rank(tp), size=group_size(tp))

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
                return cls(rank=ep.rank(), size=ep.size(), shard=Shard.of(tp))
        return cls()


@dataclass(slots=True)
class Recipe:
    """How one megatron-core parameter is made: the tensors it needs, with their full shapes, and a function."""

    sources: dict[str, tuple[int, ...]] = field(default_factory=dict)
    make: Callable[[TensorReader, Shard], Tensor] | None = None
    """None: zeros (a bias the source does not have)."""
    shift: float = 0.0
    """What loading adds to what `make` gives."""


# Transformer Engine specs have the norm inside the linear after it; a MambaModel calls its last norm otherwise.
_ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "pre_mlp_layernorm.bias",
    "mixer.in_proj.layer_norm_weight": "norm.weight",
    "decoder.final_norm.weight": "decoder.final_layernorm.weight",
}


class Recipes:
    """The recipe of each parameter of a model, by its family's row."""

    def __init__(self, description: ModelDescription, model: nn.Module, family: Family | None = None) -> None:
        """family: None is the description's."""
        self._of_window: Recipes | None = None
        """Those of the layers with a window, where they have other heads."""
        self._has_window = description.window_layers
        if description.extensions.local_query_groups is not None:
            self._of_window = Recipes(description.of_layers(has_window=True), model, family)
        self.description = description
        self.family = family_of(description) if family is None else family
        self._sizes = sizes_of(description)
        self._model_vocab: int = getattr(model, "vocab_size", description.vocab_size)
        self._kv_heads: int = description.transformer["num_query_groups"]
        self._has_whole_head_norms = description.extensions.whole_head_norms
        layers = description.transformer
        is_delta = delta_layers(layers["num_layers"], layers.get("linear_attention_freq"))
        self._is_delta = is_delta if description.hybrid is None else None
        """Which layers have a delta net in the place of attention; None: a hybrid's pattern says what they are."""
        self._place = ExpertPlace.of(model)

    def recipe(self, name: str, layer: int | None = None) -> Recipe | None:
        """None says that the family has no such parameter. layer: from 0 on; `name` is then that within the layer."""
        if self._of_window is not None and layer is not None and self._has_window[layer]:
            return self._of_window.recipe(name, layer)
        name = _ALIASES.get(name, name)
        found = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.+)", name)
        name, local = (f"mlp.experts.{found[2]}", int(found[1])) if found else (name, None)
        module, _, kind = (name, "", "") if name in LAYOUTS else name.rpartition(".")
        if module not in LAYOUTS or kind not in ("", "weight", "bias"):
            return None
        layout = LAYOUTS[module]
        sources = self._sources(module, kind, layer)
        hybrid = self.description.hybrid
        if not sources or (layer is not None and hybrid is not None and hybrid.pattern[layer] not in layout.layers):
            return None
        in_attention = layer is not None and module.startswith("self_attention.")
        if in_attention and self._is_delta is not None and self._is_delta[layer] != (layout.layers == "G"):
            return None
        if kind == "bias":
            if layout.bias == "none":
                return None
            if layout.bias != "own" and layout.bias not in self.description.linear_biases:
                return Recipe()
            layout = replace(layout, columns=(), cut="nothing" if layout.cut == "columns" else layout.cut)
        recipe = self._made(sources, layout, local, by_key_head=module in self.family.by_key_head)
        if module in self.family.in_rows:
            recipe = _of_row(recipe)
        if layout.is_around_one and self.description.transformer.get("layernorm_zero_centered_gamma"):
            recipe.shift = -1.0
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
        if module.startswith("mlp.experts.") and self.family.stacked_experts != "rows":
            suffix = "" if kind == "weight" else f"_{kind}"
        return tuple(f"{prefix}{name}{suffix}" for name in names)

    def _blocks(self, sources: tuple[str, ...], layout: Layout) -> list[tuple[str, int, int]]:
        """(tensor, first row in the tensor, number of rows) of each block of rows."""
        heights = layout.heights(self._sizes, is_gated=self.description.transformer["gated_linear_unit"])
        given = sources * len(heights) if len(sources) == 1 else sources
        given = given[-len(heights) :]  # without gating there is no gate, which comes first
        blocks, ends = [], dict.fromkeys(given, 0)
        for name, height in zip(given, heights, strict=True):
            blocks.append((name, ends[name], height))
            ends[name] += height
        return blocks

    def _made(
        self, sources: tuple[str, ...], layout: Layout, local: int | None, *, by_key_head: bool = False
    ) -> Recipe:
        """local: the expert's number on its rank; None: it belongs to no expert. by_key_head: as in `Family`."""
        blocks = self._blocks(sources, layout)
        tail = tuple(self._sizes[name] for name in layout.columns)
        shapes = {name: (sum(height for one, _, height in blocks if one == name), *tail) for name, _, _ in blocks}
        transposed = self.family.transposed and len(layout.columns) == 1 and bool(layout.layers)
        if transposed:
            shapes = {name: shape[::-1] for name, shape in shapes.items()}
        experts = range(0) if local is None else self._at_local(local)
        stacked = self.family.stacked_experts
        alternates = stacked == "alternating columns" and layout.gated

        def make(reader: TensorReader, shard: Shard) -> Tensor:
            if local is not None:
                expert = experts[self._place.rank]
                reader = _ExpertReader(reader, expert, transposed=stacked != "rows", alternates=alternates)
                shard = self._place.shard

            def read(name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
                return reader.read(name, columns, rows).t() if transposed else reader.read(name, rows, columns)

            if layout.cut == "nothing" or (layout.cut == "whole heads" and not self._has_whole_head_norms):
                return read(sources[0])
            if layout.cut == "columns":
                return read(sources[0], columns=shard.span(tail[0]))
            if layout.cut == "vocabulary":
                start, stop = (min(end, self._sizes["vocabulary"]) for end in shard.span(self._model_vocab))
                return read(sources[0], rows=(start, stop))
            if by_key_head:
                return self._of_key_heads(read, blocks, shapes, shard)
            groups = self._groups(shard) if layout.cut == "groups" else shard
            spans = [(name, at, groups.span(height)) for name, at, height in blocks]
            parts = [read(name, rows=(at + start, at + stop)) for name, at, (start, stop) in spans]
            return self._interleave(parts, shard) if layout.cut == "groups" else torch.cat(parts)

        if local is not None:
            turn = slice(None, None, 1 if stacked == "rows" else -1)
            shapes = {
                name.format(expert=expert): shape if "{expert}" in name else (self._sizes["experts"], *shape[turn])
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

    def _of_key_heads(
        self,
        read: Callable[..., Tensor],
        blocks: list[tuple[str, int, int]],
        shapes: Mapping[str, tuple[int, ...]],
        shard: Shard,
    ) -> Tensor:
        """This rank's part of each block, of tensors that have a part of all their blocks for each key head."""
        heads = self.description.transformer["linear_num_key_heads"]
        local, found = heads // shard.size, {}
        for name, (rows, *_) in shapes.items():
            part = read(name, rows=shard.span(rows))
            found[name] = part.reshape(local, rows // heads, *part.shape[1:])
        parts = [found[name][:, at // heads : (at + height) // heads] for name, at, height in blocks]
        return torch.cat([part.flatten(0, 1) for part in parts])

    def _interleave(self, parts: list[Tensor], shard: Shard) -> Tensor:
        """[N*H, ...], [K*H, ...], [K*H, ...] -> [K * (N/K + 2) * H, ...], group by group.

        The parts are those of `_groups`. With fewer kv heads than ranks the result is this rank's piece of its group.
        """
        groups = self._kv_heads // self._groups(shard).size
        if self.description.transformer.get("attention_output_gate"):  # [N, 2, H]: a head's query, then its gate
            q = parts[0].reshape(groups, -1, 2, self.description.transformer["kv_channels"], *parts[0].shape[1:])
            parts = [q.transpose(1, 2).reshape(parts[0].shape), *parts[1:]]
        fused = torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)
        if shard.size <= self._kv_heads:
            return fused
        sharers = shard.size // self._kv_heads
        start, stop = Shard(rank=shard.rank % sharers, size=sharers).span(len(fused))
        return fused[start:stop]


class _ExpertReader:
    """The tensors of one expert, by names with {expert}, or in tensors of all experts."""

    def __init__(self, reader: TensorReader, expert: int, *, transposed: bool, alternates: bool) -> None:
        """transposed, alternates: tensors of all experts are [in, out], with gate and up in turn."""
        self._reader = reader
        self._expert = expert
        self._transposed, self._alternates = transposed, alternates
        self._stacked: dict[str, Tensor] = {}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._reader.shapes()

    def read(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        if "{expert}" in name:
            return self._reader.read(name.format(expert=self._expert), rows, columns)
        if name not in self._stacked:
            one = self._reader.read(name, rows=(self._expert, self._expert + 1)).squeeze(0)
            one = one.t() if self._transposed else one
            self._stacked[name] = torch.cat((one[::2], one[1::2])) if self._alternates else one
        one = self._stacked[name]
        one = one[rows[0] : rows[1]] if rows else one
        return one[:, columns[0] : columns[1]] if columns else one


def _of_row(recipe: Recipe) -> Recipe:
    """The recipe of a vector whose one tensor is [1, n]."""
    make = recipe.make
    assert make is not None
    sources = {name: (1, *shape) for name, shape in recipe.sources.items()}
    return Recipe(sources, lambda reader, shard: make(reader, shard).squeeze(0))


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
