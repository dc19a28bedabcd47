"""Pad kv groups that do not divide over tensor-parallel ranks: groups of zeros follow the model's own.

A group of zeros attends evenly to values of zero, and the output projection has zeros for it: the answers are those of
the model without padding. It takes its share of memory and time, a quarter where 3 groups become 4.

A torch_dist checkpoint of a padded model holds the padding, and the description of the model without it. It loads for
any number of ranks: megatron-core cuts what is too long and fills with zeros. Megatron-LM loads it only if its own
arguments give the padded numbers of heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_infer.models.loading.families import family_of
from megatron_infer.models.loading.model_description import ModelDescription

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_infer.models.loading.hf_names import Span, TensorReader

_PADDED = (
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.linear_proj.weight",
    "self_attention.core_attention.softmax_offset",
)
"""megatron-core's parameters that consist of parts of groups, one group behind the other."""


def pad_groups(description: ModelDescription, num_groups: int) -> ModelDescription:
    """The description with `num_groups` kv groups, each with as many query heads as before."""
    layers = description.transformer
    heads = layers["num_attention_heads"] // (layers.get("num_query_groups") or layers["num_attention_heads"])
    heads *= num_groups
    return replace(description, transformer={**layers, "num_attention_heads": heads, "num_query_groups": num_groups})


def divisible(description: ModelDescription, ranks: int) -> ModelDescription:
    """The description with the fewest kv groups that divide over `ranks`; unchanged where they divide, or cannot be
    padded."""
    groups = description.transformer.get("num_query_groups") or description.transformer["num_attention_heads"]
    is_fused = isinstance(family_of(description).tensors.get("self_attention.linear_qkv"), str)
    is_latent = bool(description.transformer.get("multi_latent_attention"))
    # of whole heads the norm's mean would count the padding
    extensions = description.extensions
    is_one = description.hybrid is not None or is_fused or is_latent or extensions.whole_head_norms
    is_one = is_one or extensions.mixes_heads
    if is_one or groups % ranks == 0 or groups < ranks:
        return description
    return pad_groups(description, -(-groups // ranks) * ranks)


def unpadded(description: ModelDescription, model: Any) -> ModelDescription:
    """The description of a live model without the groups that `build_model` added."""
    groups = getattr(model, "true_kv_groups", None)
    return (
        description
        if groups in (None, description.transformer["num_query_groups"])
        else pad_groups(description, groups)
    )


def allow_padding(sharded: Any) -> None:
    """Let the attention of a sharded state dict be loaded from tensors with more or fewer groups at the end."""
    for key, value in sharded.items():
        if key.endswith(_PADDED):
            value.allow_shape_mismatch = True


class PaddedReader:
    """A model's tensors, those of attention with zeros at the end."""

    def __init__(
        self, reader: TensorReader, own: Mapping[str, tuple[int, ...]], padded: Mapping[str, tuple[int, ...]]
    ) -> None:
        """own, padded: shapes of the tensors without and with the added groups."""
        self._reader = reader
        self._shapes = {
            name: padded[name] if shape == own.get(name) else shape for name, shape in reader.shapes().items()
        }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        own, shown = self._reader.shapes()[name], self._shapes[name]
        if own == shown:
            return self._reader.read(name, rows, columns)
        dim = next(i for i, (a, b) in enumerate(zip(own, shown, strict=True)) if a != b)
        span = (rows, columns)[dim] or (0, shown[dim])
        inside = (min(span[0], own[dim]), min(span[1], own[dim]))
        held = self._reader.read(name, **{("rows", "columns")[dim]: inside})
        wanted = list(held.shape)
        wanted[dim] = span[1] - span[0]
        padded = held.new_zeros(wanted)
        padded.narrow(dim, 0, held.shape[dim]).copy_(held)
        return padded
