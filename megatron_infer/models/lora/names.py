"""Which linears of a model an adapter may change, and how their Hugging Face linears lie in megatron-core's.

The recipes of `models.loading.hf_names`, which make a weight of Hugging Face tensors, are given tensors of numbered
rows: what they make says where each row of a linear comes from. So an adapter goes the way that the weights go.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.checkpoint import description_by_names
from megatron_infer.models.loading.families import FAMILIES, family_of, is_hf_name
from megatron_infer.models.loading.head_padding import pad_groups, unpadded
from megatron_infer.models.loading.hf_names import WHOLE, Recipe, Recipes, Span
from megatron_infer.models.loading.model_description import ModelDescription

PARTS = (
    *("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"),
    *(f"self_attention.linear_{one}" for one in ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj")),
    *("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2", "mixer.in_proj", "mixer.out_proj"),
    *("self_attention.in_proj", "self_attention.out_proj"),
)
"""megatron-core's linears of a layer that an adapter may change. Not latent attention's linear_kv_up_proj: no vector is
multiplied by it as it is."""
LAYERS = "decoder.layers"
_REFUSED = (
    (r"embed|\bwte\b|\bwpe\b", "an embedding"),
    (r"lm_head|output_layer|\bhead\b|\bscore\b|classifier", "an output layer"),
    (r"\bexperts\b|block_sparse_moe\.(input|output)_linear", "routed experts"),
    (r"conv1d", "a convolution"),
    (r"router|\bgate$", "a router"),
    (r"norm|\bln_", "a norm"),
)
"""Pattern in a linear's name -> what it is, where an adapter of it is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLinear:
    """A linear of the whole model, and the Hugging Face linears whose rows it has."""

    path: str
    shape: tuple[int, int]
    """(out, in) of its weight."""
    sources: Mapping[str, tuple[int, int]]
    """Name of each Hugging Face linear -> its (out, in), in order."""
    rows: Mapping[str, Tensor]
    """int32 [out_s]: which row of the linear each row of a source is. Other rows are padding."""
    factor: float
    """What loading multiplies into its weight (`WeightScales`)."""

    def scaled(self, b: Tensor) -> Tensor:
        return b if self.factor == 1.0 else b.float() * self.factor

    def parted(self, rows: Tensor) -> dict[str, Tensor]:
        """[out, n] in megatron-core's order -> [out_s, n] of each source."""
        if self.factor != 1.0:
            rows = (rows.float() / self.factor).to(rows.dtype)
        return {source: rows[own.long()] for source, own in self.rows.items()}


class AdaptedLinears:
    """All linears of a model that an adapter may change, by megatron-core's path and by Hugging Face's name."""

    def __init__(self, description: ModelDescription, *, num_groups: int | None = None) -> None:
        """num_groups: kv groups of the model, where `build_model` has added some to the description's."""
        self.description = description
        self.by_path = _linears(json.dumps(description.to_json(), sort_keys=True), num_groups)
        self.by_source = {source: one for one in self.by_path.values() for source in one.sources}

    @classmethod
    def of(cls, model: Any, names: tuple[str, ...] = (), description: ModelDescription | None = None) -> AdaptedLinears:
        """Those of a live model, or of the model that one pipeline stage belongs to.

        description: None: that of the source that `build_model` read, or else the model's own with the family that
        names (of tensors) imply. Raises ModelError for a model or family that needs one.
        """
        if description is None:
            description = getattr(model, "source_description", None)
        if description is None:
            description = unpadded(description_by_names(model, names), model)
            if description.hybrid is not None and _is_unknown(description) and any(map(is_hf_name, names)):
                raise ModelError(
                    f"{names[0]}: the names do not say which family of hybrid models they are of; give "
                    "description=open_source(directory).config()"
                )
        return cls(description, num_groups=model.config.num_query_groups)

    @property
    def is_transposed(self) -> bool:
        """The family stores its linears as [in, out]."""
        return family_of(self.description).transposed

    def in_memory(self, source: str) -> str:
        """The name that a linear has in transformers' model, which for some families is not that in files."""
        family = family_of(self.description)
        return f"{family.base_in_memory or family.base}.{source.removeprefix(f'{family.base}.')}"

    def shortest_targets(self, sources: Sequence[str]) -> list[str]:
        """PEFT's target_modules that name these linears: the ends of their names, where these name no other."""
        ends = sorted({source.rpartition(".")[2] for source in sources})
        others = [source for source in self.by_source if source not in set(sources)]
        is_clear = not any(other.endswith(tuple(f".{end}" for end in ends)) for other in others)
        if is_clear and not self.description.transformer.get("num_moe_experts"):  # experts have linears of these names
            return ends
        return [self.in_memory(source) for source in sources]

    def refusal(self, source: str) -> str:
        """Why a Hugging Face linear, or a megatron-core one, that is none of these cannot have an adapter."""
        for pattern, what in _REFUSED:
            if re.search(pattern, source):
                return f"{source} is {what}, whose adapters are not supported"
        last = source.rpartition(".")[2]
        near = difflib.get_close_matches(last, {name.rpartition(".")[2] for name in (*self.by_source, *self.by_path)})
        hint = f"; did you mean {near[0]}?" if near and last not in near else ""
        return f"{source} is no linear of this {self.description.architecture}{hint}"


def _is_unknown(description: ModelDescription) -> bool:
    return description.architecture.startswith("Megatron")


@lru_cache(maxsize=2)
def _linears(text: str, num_groups: int | None) -> dict[str, AdaptedLinear]:
    """By path. text: the description as JSON. Kept, as each adapter of a model asks for the same."""
    description = ModelDescription.from_json(json.loads(text))
    groups = description.transformer["num_query_groups"]
    padded = description if num_groups in (None, groups) else pad_groups(description, num_groups)
    return {one.path: one for one in _linears_of(description, padded)}


def _linears_of(description: ModelDescription, padded: ModelDescription) -> Iterator[AdaptedLinear]:
    # An unknown hybrid is adapted by megatron-core's names; the family gives the shapes alone.
    is_unknown = description.hybrid is not None and _is_unknown(description)
    family = FAMILIES["NemotronHForCausalLM"] if is_unknown else family_of(description)
    both = [Recipes(one, nn.Module(), family) for one in (description, padded)]
    for number in range(description.transformer["num_layers"]):
        for part in PARTS:
            recipe, target = (one.recipe(f"{part}.weight", number) for one in both)
            if recipe is None or target is None or not all(map(all, recipe.sources.values())):
                continue  # this layer has no such linear
            yield _linear(f"{LAYERS}.{number}.{part}", recipe, target, transposed=family.transposed)


def _linear(path: str, own: Recipe, target: Recipe, *, transposed: bool) -> AdaptedLinear:
    def as_linear(shape: tuple[int, ...]) -> tuple[int, int]:
        return (shape[1], shape[0]) if transposed else (shape[0], shape[1])

    assert target.make is not None
    sources = {name.removesuffix(".weight"): as_linear(shape) for name, shape in own.sources.items()}
    sizes = {name: (as_linear(own.sources[name])[0], as_linear(shape)[0]) for name, shape in target.sources.items()}
    numbers = target.make(_Rows(sizes, transposed=transposed, numbered=True), WHOLE).flatten().double()
    factors = target.make(_Rows(sizes, transposed=transposed, numbered=False), WHOLE).flatten().double()
    factor = float(factors.max())
    row = (numbers / factor).round().int()
    own, order = row.sort(stable=True)
    counts = [out for out, _ in sources.values()]
    inputs = {as_linear(shape)[1] for shape in target.sources.values()}
    assert len(inputs) == 1 and bool((factors[row > 0] == factor).all()), f"{path}: its sources differ"
    assert own[own > 0].tolist() == list(range(1, sum(counts) + 1)), f"{path}: its rows are not those of its sources"
    rows = dict(zip(sources, order[own > 0].int().split(counts), strict=True))
    return AdaptedLinear(path=path, shape=(len(row), inputs.pop()), sources=sources, rows=rows, factor=factor)


class _Rows:
    """A TensorReader of linears with one input, which hold the numbers of their rows from 1 on, counted through all
    sources, or ones; 0 in the rows that padding adds."""

    def __init__(self, sizes: Mapping[str, tuple[int, int]], *, transposed: bool, numbered: bool) -> None:
        """sizes: rows of each source without and with padding."""
        self._transposed, self._held, at = transposed, {}, 1
        for name, (count, padded) in sizes.items():
            values = torch.zeros(padded, dtype=torch.float64)
            values[:count] = torch.arange(at, at + count) if numbered else 1.0
            self._held[name], at = values, at + count

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: (1, len(held)) if self._transposed else (len(held), 1) for name, held in self._held.items()}

    def read(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        span = columns if self._transposed else rows  # the other one is the linear's input
        held = self._held[name] if span is None else self._held[name][slice(*span)]
        return held[None] if self._transposed else held[:, None]
