"""A decoder layer as a list of operations on the live weights: no module calls, no autograd.

    x, residual -> norm, qkv, split heads, attend, proj, norm, fc1, activation, fc2 -> x, residual

`FusedLayer.operations` is the one description of a layer. A step calls `run` of each operation, which uses the kernels'
`Ops`.

A layer returns its last product and the residual without adding them, so that the norm of the next layer adds them in
one pass. The residual is fp32 whatever the dtype of the weights: sixty bf16 additions are most of a bf16 model's
rounding noise. Weights are read through the module's own `_parameters` mapping at every use, so a parameter that
training replaces is seen at once; a lookup costs a tenth of an `nn.Module` attribute. The objects here hold no tensors.
Legend: kernels/base.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.errors import AdoptionError
from megatron_infer.kernels.activations import Activation
from megatron_infer.kernels.base import AttendSpec, Norms, Ops, StepInputs
from megatron_infer.kernels.lora import AdapterPairs
from megatron_infer.models.activations import activation_of
from megatron_infer.models.attached_lora import LinearLoRA, lora_of
from megatron_infer.models.bridge_modules import NORMED_ROW_LINEAR, WHOLE_HEAD_ATTENTION, WHOLE_HEAD_NORM, is_of
from megatron_infer.models.core_attention import TorchNorm, WholeLinear
from megatron_infer.models.extended_modules import KeyNorm, NormedRowParallelLinear, QueryNorm
from megatron_infer.models.fp8 import Fp8Product
from megatron_infer.models.mcore_compat import MLP, ColumnParallelLinear, IdentityOp, L2Norm, RowParallelLinear
from megatron_infer.models.te_apex import (
    COLUMN,
    ROW,
    LiveParameters,
    check_linear,
    has_norm_inside,
    linear_role,
    norm_of,
    qualified,
)
from megatron_infer.models.tp_collectives import Reducer

Parameters = dict[str, Tensor | None] | LiveParameters
Heads = tuple[Tensor, ...]
"""q [T, K, G, H], k [T, K, H], v [T, K, H], and a gate as q where attention has one; the last axis is contiguous."""
RMS, LAYER, L2 = "rms", "layer", "l2"


class LayerOp:
    """One operation of a layer: (x, residual) -> (x, residual).

    x is what the next operation takes: [T, D] between layers, a tuple where a kernel takes several tensors. Only norms
    use the residual, fp32 [T, D]; it is None before the norm of the first layer.
    """

    def run(self, step: StepInputs, x: Any, residual_TD: Tensor | None) -> tuple[Any, Tensor | None]:
        """May write into residual_TD, and into x where residual_TD is None."""
        raise NotImplementedError

    def flat(self) -> tuple[LayerOp, ...]:
        """The operations that this one consists of."""
        return (self,)

    def linears(self) -> Iterator[FusedLinear]:
        return iter(())

    def weights(self) -> Iterator[Tensor]:
        """The 2-D weights that go through `ops.linear`."""
        return (linear.weight() for linear in self.linears() if linear.product is None)


class LayerOps(LayerOp):
    """Operations one after the other."""

    def __init__(self, *operations: LayerOp) -> None:
        self.operations = operations

    def run(self, step: StepInputs, x: Any, residual_TD: Tensor | None = None) -> tuple[Any, Tensor | None]:
        for operation in self.operations:
            x, residual_TD = operation.run(step, x, residual_TD)
        return x, residual_TD

    def flat(self) -> tuple[LayerOp, ...]:
        return self.operations

    def linears(self) -> Iterator[FusedLinear]:
        for operation in self.operations:
            yield from operation.linears()

    def weights(self) -> Iterator[Tensor]:
        for operation in self.operations:
            yield from operation.weights()


class FusedNorm(LayerOp):
    """A norm module as one call on its live weight, which also adds the residual."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        kinds = {torch.nn.RMSNorm: RMS, torch.nn.LayerNorm: LAYER, L2Norm: L2}
        foreign = norm_of(module)
        if foreign is not None:
            self.kind = RMS if foreign[0] else LAYER
        elif type(module) is TorchNorm:
            self.kind = RMS if module.rms else LAYER
        elif type(module) in kinds:
            self.kind = kinds[type(module)]
        else:
            raise AdoptionError(
                name,
                f"norm class {qualified(module)} is not known; "
                "known are torch's RMSNorm and LayerNorm (megatron-core's local spec), Transformer Engine's, Apex's "
                "FusedLayerNorm, L2Norm and specs.gpt_spec's",
            )
        self.zero_centered: bool = getattr(module, "zero_centered_gamma", False)
        self.parameters: Parameters = module._parameters if foreign is None else foreign[1]
        if self.kind != L2 and self.parameters["weight"] is None:
            raise AdoptionError(name, "a norm without a weight (elementwise_affine=False)")
        eps = module.eps
        self.eps: float = torch.finfo(torch.float32).eps if eps is None else eps

    def run(self, step: StepInputs, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(norm(x + residual), x + residual); the sum may overwrite residual."""
        ops = step.ops
        if residual_TD is None:
            return self.norm(ops, x_TD), x_TD.float()
        if self.kind == RMS:
            weight = self.parameters["weight"]
            return ops.add_rms_norm(x_TD, residual_TD, weight, self.eps, zero_centered=self.zero_centered)
        if ops.norms is not None:
            return self._norm_at_once(ops.norms, x_TD, residual_TD), residual_TD
        total_TD = residual_TD + x_TD if torch.is_grad_enabled() else residual_TD.add_(x_TD)
        return self.norm(ops, total_TD.to(x_TD.dtype)), total_TD

    def norm(self, ops: Ops, x_TD: Tensor) -> Tensor:
        if ops.norms is not None and (self.kind == L2 or (self.kind == LAYER and self.zero_centered)):
            return self._norm_at_once(ops.norms, x_TD)
        if self.kind == L2:
            return ops.rms_norm(x_TD, x_TD.new_ones(x_TD.shape[-1]), self.eps)
        weight = self.parameters["weight"]
        assert weight is not None
        if self.kind == RMS:
            return ops.rms_norm(x_TD, weight, self.eps, zero_centered=self.zero_centered)
        if self.zero_centered:
            weight = weight + 1
        return ops.layer_norm(x_TD, weight, self.parameters["bias"], self.eps)

    def norm_heads(self, ops: Ops, x_THs: Tensor) -> Tensor:
        """The norm over the last axis of a strided [T, ..., H] view -> contiguous."""
        if ops.norms is not None:
            return self._norm_at_once(ops.norms, x_THs)
        # reshape alone may give a strided view: rows of one head are evenly spaced in the projection
        return self.norm(ops, x_THs.reshape(-1, x_THs.shape[-1]).contiguous()).view(x_THs.shape)

    def _norm_at_once(self, norms: Norms, x: Tensor, residual: Tensor | None = None) -> Tensor:
        weight, bias = None, None
        if self.kind != L2:
            weight = self.parameters["weight"]
            bias = self.parameters["bias"] if self.kind == LAYER else None
        centered = self.kind == LAYER
        form = {"centered": centered, "zero_centered": self.zero_centered}
        return norms.norm(x, weight, bias, self.eps, **form, residual=residual)


class NormAfter(LayerOp):
    """The norm of a body's output, before the residual is added."""

    def __init__(self, norm: FusedNorm) -> None:
        self.norm = norm

    def run(self, step: StepInputs, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.norm.norm(step.ops, x_TD), residual_TD


class AddResidual(LayerOp):
    """What stands in the place of the norm before a body that has none: (x + residual, x + residual)."""

    def run(self, step: StepInputs, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if residual_TD is None:
            return x_TD, x_TD.float()
        total_TD = residual_TD + x_TD if torch.is_grad_enabled() else residual_TD.add_(x_TD)
        return total_TD.to(x_TD.dtype), total_TD


class WholeHeadsNorm:
    """An RMS norm of queries or keys over all heads together, also those of other tensor-parallel ranks."""

    def __init__(self, module: Any, name: str, *, tp: Reducer | None, global_dim: int) -> None:
        """global_dim: width of all ranks' heads."""
        self.parameters: Parameters = module._parameters
        self.eps: float = module.eps
        self.global_dim = global_dim
        self.reducer = tp
        ranks = 1 if tp is None else tp.size
        weight = self.parameters["weight"]
        if weight is None or len(weight) * ranks != global_dim:
            shape = None if weight is None else list(weight.shape)
            raise AdoptionError(
                name, f"a norm over heads of {global_dim} dims on {ranks} ranks with a weight of {shape}"
            )

    def norm_heads(self, ops: Ops, x_THs: Tensor) -> Tensor:
        """The norm of a strided [T, ..., H] view over all axes but the first -> contiguous."""
        weight = self.parameters["weight"]
        assert weight is not None
        flat_TX = x_THs.reshape(len(x_THs), -1).contiguous()
        if self.reducer is None:
            return ops.rms_norm(flat_TX, weight, self.eps).view(x_THs.shape)
        wide_TX = flat_TX.float()
        squares_T1 = self.reducer.all_reduce(ops.rowwise(_sum_of_squares, wide_TX))
        # Each rank norms heads of its own by the sum: its gradient is that of all ranks.
        mean_T1 = self.reducer.spread(squares_T1) / self.global_dim
        return (wide_TX * torch.rsqrt(mean_T1 + self.eps) * weight).to(flat_TX.dtype).view(x_THs.shape)


def _sum_of_squares(x_TX: Tensor) -> Tensor:
    return x_TX.square().sum(-1, keepdim=True)


class FusedLinear(LayerOp):
    """A column- or row-parallel linear on this rank's part of the weight.

    Where ranks sum their products, `flat` gives the product and an `AllReduce`, which also adds the bias. After both
    comes the norm of the output, where the module has one.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        name: str,
        *,
        tp: Reducer | None,
        norm_apart: bool = False,
        expert: int | None = None,
    ) -> None:
        """tp: the ranks that the weight is split over; None: it is whole here. norm_apart: the caller runs the norm
        that is inside the module. expert: its number in a grouped linear; None: the module is no grouped linear."""
        self.reduce: Reducer | None = None
        self.spread: Reducer | None = None
        self.product: Fp8Product | None = None
        """What multiplies in FP8; None: `ops.linear` does, by the weight."""
        self.after: FusedNorm | None = None
        if type(module) is NormedRowParallelLinear or is_of(module, NORMED_ROW_LINEAR):
            self.after = FusedNorm(module.post_layernorm, f"{name}.post_layernorm")
        self.attached: LinearLoRA | None = lora_of(module)
        """The pair that trains on the live module; None: there is none."""
        self.name = name
        self.lora: AdapterPairs | None = None
        """Adapters' pairs for this linear; None: the engine has no adapters, or none may have a pair for it."""
        self.foreign: tuple[Any, str, str] | None = None
        """Transformer Engine's module, its name here and which of its weights it is; None: megatron-core's own."""
        role, whole = linear_role(module), ""
        if type(module) in (RowParallelLinear, NormedRowParallelLinear):
            self.reduce = tp
            whole = "" if module.input_is_parallel else "takes its whole input (input_is_parallel=False)"
        elif type(module) is ColumnParallelLinear:
            self.spread = tp
            whole = "gathers its output (gather_output=True)" if module.gather_output else ""
        elif type(module) is WholeLinear:
            pass
        elif role is not None and (norm_apart or not has_norm_inside(module)):
            self.spread, self.reduce = tp if role is COLUMN else None, tp if role is ROW else None
        else:
            raise AdoptionError(
                name,
                f"linear class {qualified(module)} is not known here; known are "
                "megatron-core's ColumnParallelLinear and RowParallelLinear (its local spec), those of Transformer "
                "Engine and Megatron-Bridge's TERowParallelLinearLayerNorm",
            )
        if whole and tp is not None:
            raise AdoptionError(name, f"{whole}: between the linears of a layer each rank keeps its own part")
        if role is None:
            self.parameters: Parameters = module._parameters
        else:
            number = "" if expert is None else str(expert)
            check_linear(module, name, f"weight{number}")
            self.parameters = LiveParameters(module, weight=f"weight{number}", bias=f"bias{number}")
            self.foreign = module, name, number

    def run(self, step: StepInputs, x_TX: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        given_TX = x_TX
        if self.spread is not None:
            x_TX = self.spread.spread(x_TX)
        parameters = self.parameters
        bias = None if self.reduce is not None else parameters["bias"]
        if self.product is not None:
            out_TW = self.product(x_TX, bias)
        else:
            out_TW = step.ops.linear(x_TX, parameters["weight"], bias)
        if self.attached is not None:
            out_TW = self.attached.add_to(step.ops, given_TX, out_TW, spread=self.spread, reduce=self.reduce)
        # A graph serves adapters that are loaded after its capture.
        if step.lora is not None and self.lora is not None and (self.lora.num_pairs or step.is_padded):
            out_TW = step.lora.run(out_TW, x_TX, self.lora)
        return out_TW, residual_TD

    def multiply(self, ops: Ops, x_TX: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's product with the bias that is given; for experts, which are never split here."""
        if self.product is not None:
            return self.product(x_TX, bias)
        return ops.linear(x_TX, self.weight(), bias)

    def flat(self) -> tuple[LayerOp, ...]:
        reduced = () if self.reduce is None else (AllReduce(self.reduce, self.parameters),)
        normed = () if self.after is None else (NormAfter(self.after),)
        return (self, *reduced, *normed)

    def weight(self) -> Tensor:
        weight = self.parameters["weight"]
        assert weight is not None
        return weight

    def linears(self) -> Iterator[FusedLinear]:
        yield self


class AllReduce(LayerOp):
    """The sum of the ranks' products, and then the bias."""

    def __init__(self, reducer: Reducer, parameters: Parameters) -> None:
        self.reducer, self.parameters = reducer, parameters

    def run(self, step: StepInputs, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        x_TD, bias = self.reducer.all_reduce(x_TD), self.parameters["bias"]
        return (x_TD if bias is None else x_TD + bias), residual_TD


class FusedActivation(LayerOp):
    """The activation between fc1 and fc2; None is SwiGLU."""

    def __init__(self, function: Activation | None) -> None:
        self.function = function

    def run(self, step: StepInputs, x_TF: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.activate(step.ops, x_TF), residual_TD

    def activate(self, ops: Ops, x_TF: Tensor) -> Tensor:
        return ops.silu_mul(x_TF) if self.function is None else ops.rowwise(self.function, x_TF)


class FusedMLP(LayerOps):
    """fc1, activation, fc2."""

    def __init__(
        self,
        mlp: MLP,
        name: str,
        *,
        tp: Reducer | None,
        weighted: bool = False,
        norm_apart: bool = False,
        expert: int | None = None,
    ) -> None:
        """weighted: an expert, scaled per token; norm_apart and expert: see `FusedLinear`."""
        self.fc1 = FusedLinear(mlp.linear_fc1, f"{name}.linear_fc1", tp=tp, norm_apart=norm_apart, expert=expert)
        self.activation = FusedActivation(activation_of(mlp, name, weighted=weighted))
        self.fc2 = FusedLinear(mlp.linear_fc2, f"{name}.linear_fc2", tp=tp, expert=expert)
        super().__init__(*self.fc1.flat(), self.activation, *self.fc2.flat())


class AllGather(LayerOp):
    """The columns of all ranks side by side."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer

    def run(self, step: StepInputs, x_TX: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.reducer.all_gather(x_TX), residual_TD


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadForm:
    """How a layer's heads differ from those of the cache, which holds all layers."""

    repeats: int = 1
    """How often the cache has each of the layer's KV heads: other layers have more."""
    value_dim: int | None = None
    """Head size of values, which the cache pads with zeros to the head size of keys; None: the sizes are equal."""
    value_scale: float = 1.0
    """Multiplies values."""


class SplitHeads(LayerOp):
    """The fused projection [T, X] -> `Heads`, with the norms of queries and keys."""

    def __init__(
        self,
        spec: AttendSpec,
        *,
        q_norm: FusedNorm | WholeHeadsNorm | None,
        k_norm: FusedNorm | WholeHeadsNorm | None,
        num_kv_heads: int,
        gathered: Reducer | None,
        is_gated: bool = False,
        value_dim: int | None = None,
    ) -> None:
        """num_kv_heads: those of all ranks. gathered: ranks that share kv heads and whose columns x holds side by side;
        this rank takes its own queries of its kv head's group, the key and the value. is_gated: queries have gates.
        value_dim: see `HeadForm`."""
        self.q_norm, self.k_norm = q_norm, k_norm
        # The columns are [K, G + 2, H]: a group's queries, then its key, then its value. Gates follow the queries.
        heads, queries, dim = spec.num_kv_heads, spec.group_size, spec.head_dim
        group, first_group, first_query, num_groups = queries, 0, 0, heads
        if gathered is not None:
            sharers = gathered.size // num_kv_heads
            num_groups, group = num_kv_heads, queries * sharers
            first_group, first_query = gathered.rank // sharers, gathered.rank % sharers * queries
        before_key = 2 * group if is_gated else group
        value_dim = dim if value_dim is None else value_dim
        cell = (before_key + 1) * dim + value_dim
        row, at = num_groups * cell, first_group * cell
        self.num_columns = row
        self.shape_q, self.strides_q = (heads, queries, dim), (row, cell, dim, 1)
        self.shape_k = (heads, dim)
        self.shape_v = (heads, value_dim)
        self.strides_kv = (row, cell, 1)
        self.at_q = at + first_query * dim
        self.at_k, self.at_v = at + before_key * dim, at + (before_key + 1) * dim
        self.at_gate = self.at_q + group * dim if is_gated else None

    def run(
        self, step: StepInputs, qkv_TX: Tensor, residual_TD: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        q, k, v, *gate = self._views(qkv_TX)
        if self.q_norm is not None:
            q = self.q_norm.norm_heads(step.ops, q)
        if self.k_norm is not None:
            k = self.k_norm.norm_heads(step.ops, k)
        return (q, k, v, *gate), residual_TD

    def _views(self, qkv_TX: Tensor) -> Heads:
        # as_strided: three views for three dispatches, half the time of view + narrow + select
        num_tokens, start = qkv_TX.shape[0], qkv_TX.storage_offset()
        heads = (
            qkv_TX.as_strided((num_tokens, *self.shape_q), self.strides_q, start + self.at_q),
            qkv_TX.as_strided((num_tokens, *self.shape_k), self.strides_kv, start + self.at_k),
            qkv_TX.as_strided((num_tokens, *self.shape_v), self.strides_kv, start + self.at_v),
        )
        if self.at_gate is None:
            return heads
        return (*heads, qkv_TX.as_strided((num_tokens, *self.shape_q), self.strides_q, start + self.at_gate))


class Attend(LayerOp):
    """`Heads` -> paged attention [T, N * H]."""

    def __init__(self, layer: int, spec: AttendSpec) -> None:
        self.layer, self.spec = layer, spec

    def run(self, step: StepInputs, qkv: Heads, residual_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        q_TKGH, k_TKH, v_TKH = qkv
        return step.attend(self.layer, q_TKGH, k_TKH, v_TKH, self.spec), residual_TD


class GatedAttend(Attend):
    """`Heads` with a gate -> paged attention * sigmoid(gate)."""

    def run(self, step: StepInputs, qkv: Heads, residual_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        *heads, gate_TKGH = qkv
        out_TM, residual_TD = super().run(step, tuple(heads), residual_TD)
        return step.ops.sigmoid_mul(out_TM, gate_TKGH.flatten(1)), residual_TD


class FormedAttend(Attend):
    """`Heads` in a form of the layer's own -> paged attention [T, N * value_dim]."""

    def __init__(self, layer: int, spec: AttendSpec, form: HeadForm) -> None:
        super().__init__(layer, spec)
        self.form = form

    def run(self, step: StepInputs, qkv: Heads, residual_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        q_TKGH, k_TKH, v_TKV = qkv
        repeats, head_dim = self.form.repeats, self.spec.head_dim
        q_TKGH = q_TKGH.unflatten(2, (repeats, -1)).flatten(1, 2)
        v_TKH = F.pad(v_TKV * self.form.value_scale, (0, head_dim - v_TKV.shape[-1]))
        k_TKH, v_TKH = (part.repeat_interleave(repeats, dim=1) for part in (k_TKH, v_TKH))
        out_TM, residual_TD = super().run(step, (q_TKGH, k_TKH, v_TKH), residual_TD)
        return out_TM.unflatten(1, (-1, head_dim))[..., : v_TKV.shape[-1]].flatten(1), residual_TD


class FusedAttention(LayerOps):
    """Fused projection, norms of heads, paged attention, output projection."""

    def __init__(
        self,
        attention: Any,
        name: str,
        *,
        layer: int,
        spec: AttendSpec,
        tp: Reducer | None,
        form: HeadForm = HeadForm(),
    ) -> None:
        """spec: of the layer's own heads."""
        num_kv_heads = attention.config.num_query_groups
        # Ranks that share a kv head end their parts of the projection inside a group: each takes the whole of it.
        gathered = tp if tp is not None and num_kv_heads < tp.size else None
        is_gated = bool(getattr(attention.config, "attention_output_gate", False))
        heads = SplitHeads(
            spec,
            q_norm=_head_norm(attention, "q_layernorm", name, tp=tp, num_heads=attention.config.num_attention_heads),
            k_norm=_head_norm(attention, "k_layernorm", name, tp=tp, num_heads=num_kv_heads),
            num_kv_heads=num_kv_heads,
            gathered=gathered,
            is_gated=is_gated,
            value_dim=form.value_dim,
        )
        qkv = FusedLinear(attention.linear_qkv, f"{name}.linear_qkv", tp=tp, norm_apart=True)
        proj = FusedLinear(attention.linear_proj, f"{name}.linear_proj", tp=tp)
        rows, wanted = qkv.weight().shape[0], heads.num_columns // (1 if gathered is None else gathered.size)
        if rows != wanted:
            raise AdoptionError(f"{name}.linear_qkv", f"{rows} rows, expected {wanted} of queries, keys and values")
        kept = replace(spec, num_kv_heads=spec.num_kv_heads * form.repeats, group_size=spec.group_size // form.repeats)
        if form == HeadForm():
            self.attend = GatedAttend(layer, spec) if is_gated else Attend(layer, spec)
        elif is_gated or gathered is not None or spec.group_size % form.repeats:
            raise AdoptionError(name, f"gates or shared kv heads, and {form}: not supported together")
        else:
            self.attend = FormedAttend(layer, kept, form)
        gather = () if gathered is None else (AllGather(gathered),)
        super().__init__(*qkv.flat(), *gather, heads, self.attend, *proj.flat())


class AttendAndMix(LayerOps):
    """Attention and a mixer of the same input; the sum of both, each with a factor."""

    def __init__(self, attention: LayerOps, mixer: LayerOps, factors: tuple[float, float]) -> None:
        super().__init__(attention, mixer)
        self.factors = factors

    def run(self, step: StepInputs, x_TD: Any, residual_TD: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        attended_TD, mixed_TD = (part.run(step, x_TD, residual_TD)[0] for part in self.operations)
        return mixed_TD * self.factors[1] + attended_TD * self.factors[0], residual_TD

    def flat(self) -> tuple[LayerOp, ...]:
        return (self,)


def norm_unless_none(module: torch.nn.Module | None, name: str) -> FusedNorm | None:
    """A norm within attention, None where there is none."""
    return None if module is None or type(module) is IdentityOp else FusedNorm(module, name)


def _head_norm(
    attention: Any, slot: str, name: str, *, tp: Reducer | None, num_heads: int
) -> FusedNorm | WholeHeadsNorm | None:
    """The norm over each query or key head, or over all of them; None where there is none. num_heads: of all ranks."""
    module, name = getattr(attention, slot), f"{name}.{slot}"
    if module is None or type(module) is IdentityOp:
        return None
    width = num_heads * attention.hidden_size_per_attention_head
    if type(module) in (QueryNorm, KeyNorm) or is_of(module, WHOLE_HEAD_NORM):
        return WholeHeadsNorm(module, name, tp=tp, global_dim=width)
    norm = FusedNorm(module, name)
    if not is_of(attention, WHOLE_HEAD_ATTENTION):
        return norm
    if tp is not None:
        raise AdoptionError(name, f"is as wide as all heads ({width}): its class runs on one tensor-parallel rank only")
    if norm.kind != RMS or norm.zero_centered:
        raise AdoptionError(name, "a norm over all heads that is not an RMS norm with weights around 1")
    return WholeHeadsNorm(module, name, tp=None, global_dim=width)


class FusedLayer(LayerOps):
    """A decoder layer with norms before its bodies, after them or both.

    (product, residual) of the layer before -> those of this one.
    """

    def __init__(self, *blocks: tuple[FusedNorm | AddResidual, LayerOp]) -> None:
        """blocks: a norm, or what stands in its place, and the body after it. A transformer layer has attention and an
        MLP or experts, a layer of a hybrid decoder has one body: attention, an MLP, experts or a mixer."""
        self.blocks: Sequence[tuple[FusedNorm | AddResidual, LayerOp]] = blocks
        super().__init__(*(operation for norm, body in blocks for operation in (norm, *body.flat())))
