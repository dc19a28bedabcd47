"""An adapter that trains on a live megatron-core model, and that an engine of this model generates with.

attach_lora(model)  ─▶  freeze the base, put a pair on each target  ─▶  wrap in DDP, build the optimizer, train
RolloutSession      ─▶  adopts the pairs with the model: nothing is copied, merged or written to a file
adapter.save        ─▶  a PEFT directory of the whole model, whatever the parallel layout
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_infer.distributed.backends import group_rank, group_size
from megatron_infer.errors import AdoptionError, ConfigError, ModelError, WrongState, check_known
from megatron_infer.kernels.freed_weights import unpack_weights
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.adoption_checks import unwrap
from megatron_infer.models.attached_lora import CHILD, AddProduct, LinearLoRA, RecordInput, attached
from megatron_infer.models.loading.model_description import ModelDescription
from megatron_infer.models.lora.adapter import Adapter, LoRAPair
from megatron_infer.models.lora.bank import parts_of
from megatron_infer.models.lora.names import LAYERS, PARTS, AdaptedLinears
from megatron_infer.models.lora.peft import write_adapter
from megatron_infer.models.lora.peft_config import scale_of
from megatron_infer.models.mamba_mixer import split_in_parts
from megatron_infer.models.model_chunks import chunks_of
from megatron_infer.models.module_guard import plain_class
from megatron_infer.models.sharded_weights import gathered
from megatron_infer.models.te_apex import qualified

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def attach_lora(
    model: nn.Module | Sequence[nn.Module],
    *,
    rank: int = 16,
    alpha: float = 32.0,
    targets: Sequence[str] = TARGETS,
    dropout: float = 0.0,
    rslora: bool = False,
    seed: int = 0,
    description: ModelDescription | None = None,
    trains_only: bool = False,
) -> AttachedLoRA:
    """Put a pair of low-rank factors on each target of a live model and freeze everything else, in place.

    model: bare or in Float16Module, one pipeline stage or tensor-parallel rank of it, or the list of its chunks; call
    this before DDP and the optimizer are built, on every rank. targets: ends of megatron-core's names: linear_qkv,
    linear_proj, linear_fc1, linear_fc2 (of shared experts too), in_proj, out_proj; routed experts have no pairs.
    dropout: of a pair's input, in training only. rslora: scale alpha / sqrt(rank) in the place of alpha / rank. seed:
    of the first values, which are PEFT's (a uniform, b zero) and the same in every parallel layout. description: the
    base model's, by whose family `save` names the linears; None: that of the source of `build_model`, or else the
    model's own with Llama's names. trains_only: an engine of the model generates without the adapter, and may have
    adapters of its own, such as copies of this one (`to_adapter`).
    Raises ConfigError and AdoptionError with nothing changed.
    """
    _check(rank, alpha, dropout, targets)
    live = _bare(model)
    unpack_weights(live)
    names = _targets(live, targets)
    _check_names(live, names, description)
    linears = {path: live.get_submodule(name) for path, name in names.items()}
    scale = scale_of(float(alpha), rank, rslora=rslora)
    groups = live.config.num_query_groups or 1
    true_share = getattr(live, "true_kv_groups", groups) / groups
    pairs: dict[str, LinearLoRA] = {}
    shares: dict[str, float] = {}
    for path, linear in linears.items():
        sections = tuple(parts_of(names[path], live, linear.weight.shape[0]))
        pairs[path] = LinearLoRA(linear, rank=rank, scale=scale, dropout=float(dropout), sections=sections)
        pairs[path].trains_only = trains_only
        shares[path] = true_share if path.endswith(".linear_proj") else 1.0
        _initialise(pairs[path].a, pairs[path], path, linear.tp_group, seed, shares[path])
    return AttachedLoRA(
        live, linears, pairs, rank=rank, alpha=float(alpha), rslora=rslora, description=description, shares=shares
    )


class AttachedLoRA:
    """The adapter of a live model. Calls that are collective are made on every rank of the model."""

    def __init__(
        self,
        model: Any,
        linears: Mapping[str, Any],
        pairs: Mapping[str, LinearLoRA],
        *,
        rank: int,
        alpha: float,
        rslora: bool,
        shares: Mapping[str, float],
        description: ModelDescription | None = None,
    ) -> None:
        """linears, pairs: by path in the whole model; of this rank. shares: see `_initialise`."""
        self._true_shares = dict(shares)
        self._description = description
        self.model, self._linears, self._pairs = model, dict(linears), dict(pairs)
        self.alpha, self.rank, self.scale, self._rslora = alpha, rank, scale_of(alpha, rank, rslora=rslora), rslora
        self._merged: dict[str, Tensor] = {}
        """The weights without the adapter, while it is merged."""
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        """What was trained before."""
        model.requires_grad_(False)
        self._hooks = [
            linear.register_forward_hook(AddProduct(pairs[path]), with_kwargs=True) for path, linear in linears.items()
        ]
        if getattr(model, "pre_process", True):
            self._hooks.append(model.embedding.register_forward_hook(RecordInput()))
        for path, linear in linears.items():
            setattr(linear, CHILD, pairs[path].train(linear.training))

    # ------------------------------------------------------------------ parameters

    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, for an optimizer."""
        return [parameter for pair in self._pairs.values() for parameter in (pair.a, pair.b)]

    def first_values(self, *, rank: int, seed: int) -> list[Tensor]:
        """New values of `parameters`, of another rank and seed, in tensors of their own."""
        values = []
        for path, pair in self._pairs.items():
            a, b = pair.a.new_zeros(rank, pair.a.shape[1]), pair.b.new_zeros(pair.b.shape[0], rank)
            _initialise(a, pair, path, self._linears[path].tp_group, seed, self._true_shares[path])
            values += [a, b]
        return values

    def lend(self, values: Sequence[Tensor], *, rank: int, alpha: float) -> None:
        """The parameters use the memory of these tensors, which `first_values` gave."""
        self._require_apart("lend()")
        self.rank = rank
        self.alpha = alpha
        self.scale = scale_of(alpha, rank, rslora=self._rslora)
        for parameter, value in zip(self.parameters(), values, strict=True):
            if parameter.shape != value.shape:
                # megatron-core's dispatchers of tokens keep a graph, whose end has the shape from before; torch makes
                # another end only where the type changes
                parameter.data = value.new_empty(0, dtype=torch.float64)
            parameter.data = value
        for pair in self._pairs.values():
            pair.rank, pair.scaling = rank, self.scale
            pair.set_merged(False)

    @property
    def num_parameters(self) -> int:
        """Elements of this rank's parameters of the adapter."""
        return sum(parameter.numel() for parameter in self.parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parts, by megatron-core's path and PEFT's names of the factors."""
        return {
            f"{path}.lora_{side}.weight": tensor.detach()
            for path, pair in self._pairs.items()
            for side, tensor in (("A", pair.a), ("B", pair.b))
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what `state_dict`, or a load of `sharded_state_dict`, gave. Raises ConfigError with nothing changed."""
        self._require_apart("load_state_dict()")
        own = self.state_dict()
        if missing := sorted(own.keys() - tensors.keys()):
            raise ConfigError(f"{len(missing)} tensors of the adapter are missing, the first is {missing[0]}")
        if unknown := sorted(tensors.keys() - own.keys()):
            raise ConfigError(f"{len(unknown)} tensors are not of this adapter, the first is {unknown[0]}")
        for name, tensor in tensors.items():
            if tensor.shape != own[name].shape:
                raise ConfigError(f"{name} is {list(tensor.shape)}, the adapter's is {list(own[name].shape)}")
        with torch.no_grad():
            for path, pair in self._pairs.items():
                pair.a.copy_(tensors[f"{path}.lora_A.weight"])
                pair.b.copy_(tensors[f"{path}.lora_B.weight"])

    def sharded_state_dict(self, prefix: str = "lora.") -> dict[str, Any]:
        """For megatron-core's dist_checkpointing: what is saved loads in any tensor- and pipeline-parallel layout.

        Pass it as the model's to the optimizer's own sharded_state_dict; what a load gives goes to `load_state_dict`.
        prefix: of the keys in the checkpoint.
        """
        replicas = getattr(self.model.pg_collection, "dp_cp", None)
        metadata = mcore.ensure_metadata_has_dp_cp_group(None if replicas is None else {"dp_cp_group": replicas})
        found: dict[str, Any] = {}
        for path, pair in self._pairs.items():
            keys = {"A": f"{path}.lora_A.weight", "B": f"{path}.lora_B.weight"}
            state = {keys["A"]: pair.a, keys["B"]: pair.b}
            axes = {keys["A"]: 1} if pair.is_row_parallel else {keys["B"]: 0}
            sharded = mcore.make_sharded_tensors_for_checkpoint(
                state, prefix, axes, tp_group=self._linears[path].tp_group, dp_cp_group=metadata["dp_cp_group"]
            )
            if len(pair.sections) > 1:
                split_in_parts(sharded, prefix + keys["B"], dict(zip("01234", pair.sections, strict=False)))
            found |= {name.removeprefix(prefix): one for name, one in sharded.items()}
        return found

    # ------------------------------------------------------------------ export

    def to_adapter(self, name: str = "attached") -> Adapter:
        """The adapter of the whole model, in copies on the host. Collective; every rank has it."""
        own = {path: _whole(self._linears[path], pair) for path, pair in self._pairs.items()}
        stages = self.model.pg_collection.pp
        if group_size(stages) > 1:
            parts: list[Any] = [None] * group_size(stages)
            dist.all_gather_object(parts, own, group=stages)
            own = {path: pair for part in parts for path, pair in part.items()}
        return Adapter(name, {path: LoRAPair.of(a, b, self.scale) for path, (a, b) in own.items()})

    def save(
        self, directory: str | Path, *, description: ModelDescription | None = None, base: str | None = None
    ) -> None:
        """Write a PEFT directory, which vLLM and transformers read too. Collective; the first rank of the first
        data-parallel replica writes, and its ModelError is one of all ranks of that replica.

        description: see `attach_lora`, which may have been given it. base: name of the base model in the file.
        """
        adapter, groups, failure = self.to_adapter(), self.model.pg_collection, ""
        if not any(group_rank(getattr(groups, name, None)) for name in ("tp", "pp", "dp_cp")):
            try:
                linears = AdaptedLinears.of(self.model, description=description or self._description)
                write_adapter(directory, adapter, linears, alpha=self.alpha, rslora=self._rslora, base=base)
            except ModelError as error:
                failure = str(error)
        for group in (groups.tp, groups.pp):
            if group_size(group) > 1:
                found: list[Any] = [None] * group_size(group)
                dist.all_gather_object(found, failure, group=group)
                failure = max(found)
        if failure:
            raise ModelError(failure)

    @property
    def is_merged(self) -> bool:
        return bool(self._merged)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the products to the base's weights, in place; forwards add nothing then. `unmerge` undoes it exactly.

        Keeps a copy of the weights on the host meanwhile.
        """
        self._require_apart("merge()")
        for path, pair in self._pairs.items():
            weight = self._linears[path].weight
            self._merged[path] = weight.detach().to("cpu", copy=True)
            weight.copy_(weight.float() + (pair.b.float() @ pair.a.float()) * pair.scaling)
            pair.set_merged(True)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Undo `merge`: the weights have the bits that they had."""
        if not self._merged:
            raise WrongState("unmerge() of an adapter that is not merged", state="attached")
        for path, before in self._merged.items():
            self._linears[path].weight.copy_(before)
            self._pairs[path].set_merged(False)
        self._merged = {}

    def detach(self) -> None:
        """Take the adapter off the model, which then is as before `attach_lora`: the base trains what it trained."""
        self._require_apart("detach()")
        for hook in self._hooks:
            hook.remove()
        for linear in self._linears.values():
            delattr(linear, CHILD)
        for parameter in self._trained:
            parameter.requires_grad_(True)
        self._linears, self._pairs, self._hooks = {}, {}, []

    def _require_apart(self, call: str) -> None:
        if self._merged:
            raise WrongState(f"{call} while the adapter is merged: call unmerge() first", state="merged")


# ---------------------------------------------------------------------- what is attached to what


def _bare(model: Any) -> Any:
    live = unwrap(model)
    for outer in chunks_of(model):
        bare = unwrap(outer)
        while outer is not bare:
            if not isinstance(outer, mcore.Float16Module):
                raise ConfigError(
                    f"attach_lora() on a model within {type(outer).__name__}, which would not train the adapter: "
                    "call it before DDP and the optimizer are built"
                )
            outer = outer.module
    if any(plain_class(module) is not type(module) for module in live.modules()):
        raise ConfigError(
            "attach_lora() after FSDP2's fully_shard, which would neither shard the adapter nor reduce its gradients: "
            "attach it before"
        )
    if next(attached(live), None) is not None:
        raise ConfigError("attach_lora() on a model that has an adapter already: detach() it first")
    return live


def _check(rank: int, alpha: float, dropout: float, targets: Sequence[str]) -> None:
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"rank is {rank!r}, it must be an integer from 1 on")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha <= 0:
        raise ConfigError(f"alpha is {alpha!r}, it must be a finite number above 0")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ConfigError(f"dropout is {dropout!r}, it must be from 0 to below 1")
    if isinstance(targets, str) or not targets:
        raise ConfigError(f"targets is {targets!r}, it must be a list of names, such as {', '.join(TARGETS)}")
    known = sorted({part.rpartition(".")[2] for part in PARTS})
    check_known("linear", targets, known, where="targets: ", lists_known=True)


def _targets(live: Any, targets: Sequence[str]) -> dict[str, str]:
    """Names of this rank's linears by their path in the whole model."""
    found: dict[str, str] = {}
    chunks = chunks_of(live)
    prefixes = [f"chunks.{number}." if len(chunks) > 1 else "" for number in range(len(chunks))]
    layers = [
        (f"{prefix}{LAYERS}.{place}", layer)
        for prefix, chunk in zip(prefixes, chunks, strict=True)
        for place, layer in enumerate(chunk.decoder.layers)
    ]
    for of_layer, layer in layers:
        for part in PARTS:
            try:
                linear = layer.get_submodule(part)
            except AttributeError:
                continue  # this layer has no such linear
            name = f"{of_layer}.{part}"
            if part.rpartition(".")[2] not in targets:
                continue
            if type(linear) not in (mcore.ColumnParallelLinear, mcore.RowParallelLinear):
                raise AdoptionError(
                    name,
                    f"a pair cannot be attached to {qualified(linear)}; build the model from megatron-core's local "
                    "spec or from megatron_infer.models.specs",
                )
            found[f"{LAYERS}.{layer.layer_number - 1}.{part}"] = name
    if not found and live.pre_process and live.post_process:
        raise ConfigError(f"targets {', '.join(targets)}: no layer has such a linear outside of its routed experts")
    return found


def _check_names(live: Any, names: Mapping[str, str], description: ModelDescription | None) -> None:
    """Raise ConfigError for a linear that `AttachedLoRA.save` could not name; warn where it needs a description."""
    remedy = "give attach_lora() the base model's description: open_source(directory).config()"
    try:
        known = AdaptedLinears.of(live, description=description).by_path
    except ModelError as error:
        warnings.warn(f"save() of the adapter would fail: {error}; {remedy}", stacklevel=3)
        return
    if unnamed := [path for path in names if path not in known]:
        raise ConfigError(f"{unnamed[0]}: no Hugging Face name is known for it, which save() needs; {remedy}")


@torch.no_grad()
def _initialise(a: Tensor, pair: LinearLoRA, path: str, tp: Any, seed: int, true_share: float) -> None:
    """a uniform within 1 / sqrt(inputs), b zero, as in PEFT: drawn for the whole linear, a rank takes its part of it.

    true_share: of the inputs that are not padding, which comes last and stays zero.
    """
    parts, own = (group_size(tp), group_rank(tp)) if pair.is_row_parallel else (1, 0)
    rank, width = a.shape
    inputs = round(parts * width * true_share)
    number = int.from_bytes(hashlib.blake2b(f"{seed} {path}".encode(), digest_size=7).digest(), "little")
    drawn = torch.rand(rank, inputs, generator=torch.Generator().manual_seed(number))
    whole = torch.zeros(rank, parts * width)
    whole[:, :inputs] = (2 * drawn - 1) / math.sqrt(inputs)
    a.copy_(whole[:, own * width : (own + 1) * width])


# ---------------------------------------------------------------------- over ranks


def _whole(linear: Any, pair: LinearLoRA) -> tuple[Tensor, Tensor]:
    """(a, b) of the whole linear, on the host."""
    a, b = gathered(pair.a).detach(), gathered(pair.b).detach()
    tp = linear.tp_group
    if group_size(tp) > 1:
        if pair.is_row_parallel:
            a = torch.cat(_gathered(a, tp), dim=1)
        else:
            parts = zip(*(part.split(pair.sections) for part in _gathered(b, tp)), strict=True)
            b = torch.cat([section for ranks in parts for section in ranks])
    return a.to("cpu", copy=True), b.to("cpu", copy=True)


def _gathered(tensor: Tensor, group: Any) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
