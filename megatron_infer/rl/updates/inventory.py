"""The live tensors of a model on this rank and their place in the whole model: name, shape, and spans of rows.

    rank 1 of 2, fc1 of SwiGLU     whole  [ gate 0 | gate 1 | up 0 | up 1 ]
                                   local           [ gate 1 ]    [ up 1 ]        two spans along dimension 0

A rank's part is a list of spans along one dimension: Q, K, V interleaved by group and vocabulary are one span, gate and
up two, a Mamba in_proj (z, x, B, C, dt) five, a delta net's six. Layers and experts are numbered in the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_infer.distributed.backends import group_rank, group_size
from megatron_infer.errors import ModelError
from megatron_infer.kernels.te_tensors import is_quantised
from megatron_infer.models.delta_net import convolved_parts, projected_parts
from megatron_infer.models.model_chunks import chunks_of
from megatron_infer.models.sharded_weights import is_managed
from megatron_infer.models.weights.change_guard import guarded_tensors

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
VOCABULARY, KV_GROUPS = "vocabulary", "kv groups"
"""Kinds of padding: dimensions whose end may be longer in one layout than in another, and contributes nothing."""

_FIRST = (
    "word_embeddings.weight", "output_layer.weight", "output_layer.bias", "linear_qkv.weight", "linear_qkv.bias",
    "linear_fc1.weight", "linear_fc1.bias", "mixer.in_proj.weight", "mixer.in_proj.bias", "mixer.conv1d.weight",
    "mixer.conv1d.bias", "mixer.A_log", "mixer.D", "mixer.dt_bias", "mixer.norm.weight",
    *(f"self_attention.{part}" for part in ("in_proj.weight", "in_proj.bias", "conv1d.weight", "conv1d.bias")),
    "self_attention.A_log", "self_attention.dt_bias",
)  # fmt: skip
_SECOND = ("linear_proj.weight", "linear_fc2.weight", "mixer.out_proj.weight", "self_attention.out_proj.weight")
"""Parameters that tensor parallelism splits along their first and second dimension; the others are not split."""

_ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "pre_mlp_layernorm.bias",
    "mixer.in_proj.layer_norm_weight": "norm.weight",
    "mixer.conv1d_weight": "mixer.conv1d.weight",
    "mixer.conv1d_bias": "mixer.conv1d.bias",
}
"""Names within a layer that differ between specs (a norm inside the linear behind it) and megatron-core versions."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")


@dataclass(frozen=True, slots=True)
class Span:
    """`size` rows that begin at row `whole` of the whole tensor and at row `local` of this rank's tensor."""

    whole: int
    local: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which part of a tensor of the whole model a rank holds."""

    name: str
    """Name in the whole model."""
    shape: tuple[int, ...]
    """Shape of the whole tensor, with padding."""
    dim: int
    """The dimension that `spans` count along."""
    spans: tuple[Span, ...]
    dtype: torch.dtype
    padded: str = ""
    """Kind of padding that `dim` may end with: VOCABULARY, KV_GROUPS or "" (none)."""
    true_size: int | None = None
    """Length of `dim` without padding, if known."""
    unit: int = 1
    """Rows that are padded together: for KV_GROUPS the rows of one group."""

    @property
    def is_whole(self) -> bool:
        return self.spans == (Span(0, 0, self.shape[self.dim]),)

    @property
    def row_numel(self) -> int:
        """Elements of one row."""
        rest = 1
        for at, size in enumerate(self.shape):
            rest *= 1 if at == self.dim else size
        return rest

    def along(self, dim: int) -> Layout:
        """A whole layout counted along another dimension; a split one is returned unchanged."""
        if dim == self.dim or not self.is_whole:
            return self
        return replace(self, dim=dim, spans=(Span(0, 0, self.shape[dim]),))

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole tensor. Padding that `whole` lacks becomes zeros."""
        size = whole.shape[self.dim]
        pieces = []
        for span in self.spans:
            held = max(0, min(span.size, size - span.whole))
            pieces.append(whole.narrow(self.dim, min(span.whole, size), held))
            if held < span.size:
                missing = list(whole.shape)
                missing[self.dim] = span.size - held
                pieces.append(whole.new_zeros(missing))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def accepts_whole(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape is the whole one, with or without padding."""
        given, own = tuple(shape), self.shape
        if given == own:
            return True
        if not self.padded or self.true_size is None or len(given) != len(own):
            return False
        return given == tuple(self.true_size if at == self.dim else size for at, size in enumerate(own))


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """One live parameter or persistent buffer of this rank."""

    name: str
    """Name in this rank's module."""
    layout: Layout
    tensor: Tensor


class Inventory:
    """All live tensors of a model on this rank that training may change, with their layouts."""

    def __init__(
        self, tensors: Iterable[LocalTensor], *, num_layers: int, num_experts: int, is_stage: bool, is_tied: bool
    ) -> None:
        self.tensors = list(tensors)
        self.is_tied = is_tied
        """Whether the output layer shares the embedding's weight."""
        self.by_name = {local.name: local for local in self.tensors}
        self.of_whole: dict[str, list[LocalTensor]] = {}
        """Name in the whole model -> tensors of this rank; a tied embedding may be listed twice."""
        for local in self.tensors:
            self.of_whole.setdefault(local.layout.name, []).append(local)
        self._num_layers, self._num_experts, self._is_stage = num_layers, num_experts, is_stage

    @classmethod
    def of(cls, model: nn.Module | Sequence[nn.Module], *, gathered: Mapping[int, Tensor] | None = None) -> Inventory:
        """For a plain, wrapped (DDP, Float16Module) or chunked model. gathered: by the id of a parameter that has a
        shard of it, of a model in FSDP.

        Raises ModelError for an unknown split.
        """
        chunks = [bare(chunk) for chunk in chunks_of(model)]
        tensors: list[LocalTensor] = []
        for number, chunk in enumerate(chunks):
            prefix = f"chunks.{number}." if len(chunks) > 1 else ""
            if is_managed(chunk) and not gathered:
                raise ModelError(
                    "FSDP shards the weights of this model, whose state dict would put the shards back; the state dict "
                    "is a source of weights, and RolloutSession(model) generates with this model"
                )
            tensors += (replace(local, name=prefix + local.name) for local in _tensors_of(chunk, gathered or {}))
        first = chunks[0]
        return cls(
            tensors,
            num_layers=first.config.num_layers,
            num_experts=getattr(first.config, "num_moe_experts", None) or 0,
            is_stage=not (first.pre_process and chunks[-1].post_process),
            is_tied=bool(first.share_embeddings_and_output_weights),
        )

    def is_elsewhere(self, name: str) -> bool:
        """Whether a name of the whole model belongs to another rank: to another stage, or to another expert."""
        found = _LAYER.fullmatch(name)
        if found is None:
            outer = name == EMBEDDING or name.startswith(("embedding.", "decoder.final_", "output_layer."))
            return self._is_stage and outer
        if int(found[1]) >= self._num_layers:
            return False
        of_layer = [known for known in self.of_whole if known.startswith(f"decoder.layers.{found[1]}.")]
        if not of_layer:
            return self._is_stage
        expert = _EXPERT.fullmatch(found[2])
        return expert is not None and int(expert[1]) < self._num_experts and any(".experts." in n for n in of_layer)


def bare(model: Any) -> Any:
    """The language model inside its wrappers."""
    while not hasattr(model, "decoder") and isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    if not hasattr(model, "decoder") or not hasattr(model, "config"):
        raise ModelError(f"{type(model).__name__} is not a megatron-core language model, nor a wrapper around one")
    return model


def whole_name(name: str) -> str:
    """The canonical name in the whole model, independent of layer spec and megatron-core version."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    part = re.sub(r"^mamba_mixer\.", "mixer.", found[2])  # Megatron-Bridge's Falcon-H1
    part = _ALIASES.get(part, part)
    grouped = _GROUPED_EXPERT.fullmatch(part)
    if grouped is not None:
        part = f"mlp.experts.local_experts.{grouped[3]}.{grouped[1]}.{grouped[2]}"
    return f"decoder.layers.{found[1]}.{part}"


def listed(names: list[str], *, most: int = 8) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _tensors_of(model: Any, gathered: Mapping[int, Tensor]) -> Iterator[LocalTensor]:
    wanted = {id(tensor) for tensor in guarded_tensors(model)}
    for name, tensor in _named(model):
        if id(tensor) not in wanted:
            continue
        wanted.remove(id(tensor))
        tensor = gathered.get(id(tensor), tensor)
        if is_quantised(tensor):
            raise ModelError(
                f"{name} is a {type(tensor).__qualname__}: a shard of an 8-bit weight cannot be moved between layouts, "
                "because its scale belongs to the whole weight; generate with the trainer's own model, which needs no "
                "transfer, or train without fp8_param"
            )
        held = tensor if tensor.ndim else tensor.detach().view(1)
        yield LocalTensor(name=name, layout=_layout(model, name, held), tensor=held)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Names as in the model's state dict, whose hooks would put FSDP's shards back."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            yield prefix + name, tensor


def _layout(model: Any, name: str, tensor: Tensor) -> Layout:
    whole, is_expert = _placed(model, name)
    groups = model.pg_collection
    group = getattr(groups, "expt_tp", None) if is_expert else groups.tp
    rank, size = group_rank(group), group_size(group)
    dim = _split_dim(whole, tensor, size)
    shape = tuple(tensor.shape)
    if dim is None:
        return Layout(name=whole, shape=shape, dim=0, spans=(Span(0, 0, shape[0]),), dtype=tensor.dtype)
    parts = _parts(model, name, whole, shape[dim])
    spans = _spans(parts, rank, size)
    shape = tuple(length * size if at == dim else length for at, length in enumerate(shape))
    padded, true_size, unit = "", None, 1
    if whole in (EMBEDDING, HEAD):
        padded, true_size = VOCABULARY, getattr(model, "true_vocab_size", None)
    elif ".linear_qkv." in whole or whole.endswith(".linear_proj.weight"):
        padded, unit = KV_GROUPS, max(1, shape[dim] // (getattr(model.config, "num_query_groups", None) or 1))
    return Layout(
        name=whole,
        shape=shape,
        dim=dim,
        spans=spans,
        dtype=tensor.dtype,
        padded=padded,
        true_size=true_size,
        unit=unit,
    )


def _placed(model: Any, name: str) -> tuple[str, bool]:
    """(name in the whole model, whether it belongs to one expert of several)."""
    if name == HEAD and model.share_embeddings_and_output_weights:
        return EMBEDDING, False
    found = _LAYER.fullmatch(name)
    if found is None:
        return name, False
    layer = model.decoder.layers[int(found[1])]
    part = whole_name(name).split(".", 3)[3]
    expert = _EXPERT.fullmatch(part)
    if expert is not None:
        indices = layer.mlp.local_expert_indices
        part = f"mlp.experts.local_experts.{indices[int(expert[1])]}.{expert[2]}"
    return f"decoder.layers.{layer.layer_number - 1}.{part}", expert is not None


def _split_dim(whole: str, tensor: Tensor, size: int) -> int | None:
    known = 0 if whole.endswith(_FIRST) else 1 if whole.endswith(_SECOND) else None
    declared = getattr(tensor, "partition_dim", None) if getattr(tensor, "tensor_model_parallel", False) else None
    if size > 1 and declared is not None and declared >= 0 and declared != known:
        if known is not None:
            raise ModelError(f"{whole}: split along dimension {declared}, but such tensors are split along {known}")
        if getattr(tensor, "partition_stride", 1) != 1:
            raise ModelError(f"{whole}: unknown split (partition_stride {tensor.partition_stride})")
        return int(declared)
    return known


def _parts(model: Any, name: str, whole: str, length: int) -> Sequence[int]:
    """Lengths of the parts concatenated in a rank's tensor; each part is split over the ranks."""
    whole = whole.removesuffix(".lora.b")  # of an adapter that trains: its rows are those of the weight
    if whole.endswith((".linear_fc1", ".linear_fc1.weight", ".linear_fc1.bias")) and model.config.gated_linear_unit:
        return length // 2, length // 2
    if whole.endswith(".mixer.in_proj") or ".mixer.in_proj." in whole or ".mixer.conv1d." in whole:
        layer = model.decoder.layers[int(name.split(".")[2])]
        mixer = getattr(layer, "mixer", None) or layer.mamba_mixer
        state = mixer.ngroups_local_tp * mixer.d_state
        channels = (mixer.d_inner_local_tp, state, state)
        parts = channels if ".conv1d." in whole else (mixer.d_inner_local_tp, *channels, mixer.nheads_local_tp)
        assert sum(parts) == length, f"{whole}: {length} rows, parts {parts}"
        return parts
    if whole.endswith(".self_attention.in_proj") or ".self_attention.in_proj." in whole or ".conv1d." in whole:
        net = model.decoder.layers[int(name.split(".")[2])].self_attention
        parts = tuple((convolved_parts if ".conv1d." in whole else projected_parts)(net).values())
        assert sum(parts) == length, f"{whole}: {length} rows, parts {parts}"
        return parts
    return (length,)


def _spans(parts: Sequence[int], rank: int, size: int) -> tuple[Span, ...]:
    spans: list[Span] = []
    whole = local = 0
    for length in parts:
        span = Span(whole + rank * length, local, length)
        last = spans[-1] if spans else None
        if last is not None and last.whole + last.size == span.whole:
            spans[-1] = Span(last.whole, last.local, last.size + length)
        else:
            spans.append(span)
        whole, local = whole + length * size, local + length
    return tuple(spans)
