"""The body of a decoder layer as few calls: kernels' `Ops` on the live weights, no modules, no autograd.

    x, residual ──▶ add_rms_norm ──▶ qkv linear ──▶ step.attend ──▶ proj linear ──▶ add_rms_norm ──▶ MLP ──▶ x, residual

A layer hands its last product and the residual on unadded, so that the next layer's norm adds them in one pass. The
residual is kept in fp32 whatever the weights' dtype: sixty bf16 additions are most of a bf16 model's rounding noise.
Weights are read through the module's own `_parameters` mapping at every use: a parameter that training re-points or
replaces is seen at once, and a lookup costs a tenth of an `nn.Module` attribute. Objects here hold no tensors.
Legend: kernels/base.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_infer.errors import AdoptionError
from megatron_infer.kernels.base import AttendSpec, Norms, Ops, StepInputs
from megatron_infer.models.activations import activation_of
from megatron_infer.models.core_attention import TorchNorm
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
)
from megatron_infer.models.tp_collectives import Reducer

Parameters = dict[str, Tensor | None] | LiveParameters
RMS, LAYER, L2 = "rms", "layer", "l2"


class FeedForward(Protocol):
    """What stands behind the second norm: an MLP or experts."""

    def run_step(self, step: StepInputs, x_TD: Tensor) -> Tensor: ...

    def linears(self) -> Iterator[FusedLinear]: ...

    def weights(self) -> Iterator[Tensor]: ...


class FusedNorm:
    """A norm module as one call on its live weight."""

    __slots__ = ("eps", "kind", "parameters", "zero_centered")

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
                f"norm class {type(module).__module__}.{type(module).__qualname__} is not known; "
                "known are torch's RMSNorm and LayerNorm (megatron-core's local spec), Transformer Engine's, Apex's "
                "FusedLayerNorm, L2Norm and specs.gpt_spec's",
            )
        self.zero_centered: bool = getattr(module, "zero_centered_gamma", False)
        self.parameters: Parameters = module._parameters if foreign is None else foreign[1]
        if self.kind != L2 and self.parameters["weight"] is None:
            raise AdoptionError(name, "a norm without a weight (elementwise_affine=False)")
        eps = module.eps
        self.eps: float = torch.finfo(torch.float32).eps if eps is None else eps

    @property
    def plain_rms(self) -> bool:
        """True when `ops.add_rms_norm` can run it on the bare weight."""
        return self.kind == RMS and not self.zero_centered

    def run(self, ops: Ops, x_TD: Tensor) -> Tensor:
        if ops.norms is not None and (self.zero_centered or self.kind == L2):
            return self._run_at_once(ops.norms, x_TD)
        if self.kind == L2:
            return ops.rms_norm(x_TD, x_TD.new_ones(x_TD.shape[-1]), self.eps)
        weight = self.parameters["weight"]
        assert weight is not None
        if self.zero_centered:
            weight = weight + 1
        if self.kind == RMS:
            return ops.rms_norm(x_TD, weight, self.eps)
        return ops.layer_norm(x_TD, weight, self.parameters["bias"], self.eps)

    def run_added(self, ops: Ops, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); the sum may overwrite residual."""
        if residual_TD is None:
            return self.run(ops, x_TD), x_TD.float()
        if self.kind == RMS and not self.zero_centered:
            return ops.add_rms_norm(x_TD, residual_TD, self.parameters["weight"], self.eps)
        if ops.norms is not None:
            return self._run_at_once(ops.norms, x_TD, residual_TD), residual_TD
        total_TD = residual_TD + x_TD if torch.is_grad_enabled() else residual_TD.add_(x_TD)
        return self.run(ops, total_TD.to(x_TD.dtype)), total_TD

    def run_heads(self, ops: Ops, x_THs: Tensor) -> Tensor:
        """The norm over the last axis of a strided [T, ..., H] view -> contiguous."""
        if ops.norms is not None:
            return self._run_at_once(ops.norms, x_THs)
        # reshape alone may give a strided view: rows of one head are evenly spaced in the projection
        return self.run(ops, x_THs.reshape(-1, x_THs.shape[-1]).contiguous()).view(x_THs.shape)

    def _run_at_once(self, norms: Norms, x: Tensor, residual: Tensor | None = None) -> Tensor:
        weight, bias = None, None
        if self.kind != L2:
            weight = self.parameters["weight"]
            bias = self.parameters["bias"] if self.kind == LAYER else None
        centered = self.kind == LAYER
        form = {"centered": centered, "zero_centered": self.zero_centered}
        return norms.norm(x, weight, bias, self.eps, **form, residual=residual)


class FusedLinear:
    """A column- or row-parallel linear on this rank's part of the weight; a row-parallel one adds up over the ranks."""

    __slots__ = ("foreign", "parameters", "product", "reduce", "spread")

    def __init__(
        self,
        module: torch.nn.Module,
        name: str,
        *,
        tp: Reducer | None,
        norm_apart: bool = False,
        expert: int | None = None,
    ) -> None:
        """tp: the ranks that the weight is split over; None: it is whole here. norm_apart: a norm inside the module is
        somebody else's, who has run it on the input. expert: which one's of a grouped linear; None: it is not one."""
        self.reduce: Reducer | None = None
        self.spread: Reducer | None = None
        self.product: Fp8Product | None = None
        """What multiplies in FP8; None: `ops.linear` does, by the weight."""
        self.foreign: tuple[Any, str, str] | None = None
        """Transformer Engine's module, its name here and which of its weights it is; None: megatron-core's own."""
        role, whole = linear_role(module), ""
        if type(module) is RowParallelLinear:
            self.reduce = tp
            whole = "" if module.input_is_parallel else "takes its whole input (input_is_parallel=False)"
        elif type(module) is ColumnParallelLinear:
            self.spread = tp
            whole = "gathers its output (gather_output=True)" if module.gather_output else ""
        elif role is not None and (norm_apart or not has_norm_inside(module)):
            self.spread, self.reduce = tp if role is COLUMN else None, tp if role is ROW else None
        else:
            raise AdoptionError(
                name,
                f"linear class {type(module).__module__}.{type(module).__qualname__} is not known here; known are "
                "megatron-core's ColumnParallelLinear and RowParallelLinear (its local spec) and those of Transformer "
                "Engine",
            )
        if whole and tp is not None:
            raise AdoptionError(name, f"{whole}: between the linears of a layer each rank keeps its own part")
        if role is None:
            self.parameters: Parameters = module._parameters
        else:
            number = "" if expert is None else str(expert)
            check_linear(module, name, (f"weight{number}",))
            self.parameters = LiveParameters(module, weight=f"weight{number}", bias=f"bias{number}")
            self.foreign = module, name, number

    def run(self, ops: Ops, x_TX: Tensor) -> Tensor:
        bias = self.parameters["bias"]
        if self.reduce is None:
            return self.multiply(ops, x_TX if self.spread is None else self.spread.spread(x_TX), bias)
        out = self.reduce.all_reduce(self.multiply(ops, x_TX, None))
        return out if bias is None else out + bias

    def multiply(self, ops: Ops, x_TX: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's product."""
        if self.product is not None:
            return self.product(x_TX, bias)
        return ops.linear(x_TX, self.weight(), bias)

    def weight(self) -> Tensor:
        weight = self.parameters["weight"]
        assert weight is not None
        return weight


def weights_of(linears: Iterable[FusedLinear]) -> Iterator[Tensor]:
    """Those that go through `ops.linear`."""
    return (linear.weight() for linear in linears if linear.product is None)


class FusedMLP:
    """fc1, activation, fc2."""

    __slots__ = ("activation", "fc1", "fc2")

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
        """weighted: an expert, scaled per token; norm_apart and expert: as of `FusedLinear`."""
        self.fc1 = FusedLinear(mlp.linear_fc1, f"{name}.linear_fc1", tp=tp, norm_apart=norm_apart, expert=expert)
        self.fc2 = FusedLinear(mlp.linear_fc2, f"{name}.linear_fc2", tp=tp, expert=expert)
        self.activation = activation_of(mlp, name, weighted=weighted)

    def run_step(self, step: StepInputs, x_TD: Tensor) -> Tensor:
        return self.run(step.ops, x_TD)

    def run(self, ops: Ops, x_TD: Tensor) -> Tensor:
        return self.fc2.run(ops, self.inner(ops, x_TD))

    def inner(self, ops: Ops, x_TD: Tensor) -> Tensor:
        """The activated middle, [T, F]."""
        return self.activate(ops, self.fc1.run(ops, x_TD))

    def activate(self, ops: Ops, middle_TF: Tensor) -> Tensor:
        return ops.silu_mul(middle_TF) if self.activation is None else ops.rowwise(self.activation, middle_TF)

    def linears(self) -> Iterator[FusedLinear]:
        yield from (self.fc1, self.fc2)

    def weights(self) -> Iterator[Tensor]:
        return weights_of(self.linears())


class FusedAttention:
    """Fused projection, head norms, paged attention, output projection."""

    __slots__ = ("at_k", "at_q", "at_v", "gather", "k_norm", "layer", "proj", "q_norm", "qkv", "shape_kv", "shape_q",
                 "spec", "strides_kv", "strides_q")  # fmt: skip

    def __init__(self, attention: Any, name: str, *, layer: int, spec: AttendSpec, tp: Reducer | None) -> None:
        self.layer, self.spec = layer, spec
        self.qkv = FusedLinear(attention.linear_qkv, f"{name}.linear_qkv", tp=tp, norm_apart=True)
        self.proj = FusedLinear(attention.linear_proj, f"{name}.linear_proj", tp=tp)
        self.q_norm = head_norm(attention.q_layernorm, f"{name}.q_layernorm")
        self.k_norm = head_norm(attention.k_layernorm, f"{name}.k_layernorm")
        # The projection's rows are [K, G + 2, H]: a group's queries, then its key, then its value.
        heads, queries, dim = spec.num_kv_heads, spec.group_size, spec.head_dim
        self.gather: Reducer | None = None
        """Where ranks share a kv head their parts of the projection end inside a group: a rank takes the whole
        projection, and of its kv head's group its own queries, the key and the value."""
        group, first_group, first_query, num_groups = queries, 0, 0, heads
        num_kv_heads = attention.config.num_query_groups
        if tp is not None and num_kv_heads < tp.size:
            sharers = tp.size // num_kv_heads
            self.gather, num_groups, group = tp, num_kv_heads, queries * sharers
            first_group, first_query = tp.rank // sharers, tp.rank % sharers * queries
        cell = (group + 2) * dim
        row, at = num_groups * cell, first_group * cell
        self.shape_q, self.strides_q = (heads, queries, dim), (row, cell, dim, 1)
        self.shape_kv, self.strides_kv = (heads, dim), (row, cell, 1)
        self.at_q, self.at_k, self.at_v = at + first_query * dim, at + group * dim, at + (group + 1) * dim

    def run(self, step: StepInputs, normed_TD: Tensor) -> Tensor:
        ops = step.ops
        qkv_TX = self.qkv.run(ops, normed_TD)
        if self.gather is not None:
            qkv_TX = self.gather.all_gather(qkv_TX)
        return self.proj.run(ops, self.attend(step, qkv_TX))

    def attend(self, step: StepInputs, qkv_TX: Tensor) -> Tensor:
        """[T, K * (G + 2) * H] -> [T, N * H]."""
        # as_strided: three views for three dispatches, half the time of view + narrow + select
        num_tokens, start = qkv_TX.shape[0], qkv_TX.storage_offset()
        q = qkv_TX.as_strided((num_tokens, *self.shape_q), self.strides_q, start + self.at_q)
        k = qkv_TX.as_strided((num_tokens, *self.shape_kv), self.strides_kv, start + self.at_k)
        v = qkv_TX.as_strided((num_tokens, *self.shape_kv), self.strides_kv, start + self.at_v)
        if self.q_norm is not None:
            q = self.q_norm.run_heads(step.ops, q)
        if self.k_norm is not None:
            k = self.k_norm.run_heads(step.ops, k)
        return step.attend(self.layer, q, k, v, self.spec)

    def linears(self) -> Iterator[FusedLinear]:
        yield from (self.qkv, self.proj)

    def weights(self) -> Iterator[Tensor]:
        return weights_of(self.linears())


def head_norm(module: torch.nn.Module | None, name: str) -> FusedNorm | None:
    """The norm over each query or key head, None where there is none."""
    if module is None or type(module) is IdentityOp:
        return None
    return FusedNorm(module, name)


class FusedLayer:
    """One pre-norm decoder layer."""

    __slots__ = ("attention", "input_norm", "mlp", "mlp_norm", "plain")

    def __init__(
        self, *, input_norm: FusedNorm, attention: FusedAttention, mlp_norm: FusedNorm, mlp: FeedForward
    ) -> None:
        self.input_norm, self.attention, self.mlp_norm, self.mlp = input_norm, attention, mlp_norm, mlp
        self.plain = self._is_plain()

    def _is_plain(self) -> bool:
        """Whether `_run_plain` computes the layer."""
        input_norm, attention, mlp_norm, mlp = self.input_norm, self.attention, self.mlp_norm, self.mlp
        return (
            input_norm.plain_rms
            and mlp_norm.plain_rms
            and type(mlp) is FusedMLP
            and mlp.activation is None
            and attention.gather is None
            and attention.proj.reduce is mlp.fc2.reduce is None
            and all(linear.product is None for linear in self.linears())
        )

    def linears(self) -> Iterator[FusedLinear]:
        yield from self.attention.linears()
        yield from self.mlp.linears()

    def see_products(self) -> None:
        """Some of its linears were given products in FP8."""
        self.plain = self._is_plain()

    def run(self, step: StepInputs, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """(product, residual) of the layer before -> those of this one; residual None: x is the decoder's input.

        May write into residual_TD and into x_TD when residual_TD is None.
        """
        if self.plain:
            return self._run_plain(step, x_TD, residual_TD)
        ops = step.ops
        normed_TD, residual_TD = self.input_norm.run_added(ops, x_TD, residual_TD)
        mixed_TD = self.attention.run(step, normed_TD)
        normed_TD, residual_TD = self.mlp_norm.run_added(ops, mixed_TD, residual_TD)
        return self.mlp.run_step(step, normed_TD), residual_TD

    def _run_plain(self, step: StepInputs, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """RMS norms, SwiGLU, one rank: the same arithmetic with every call inlined."""
        ops, norm, attention, mlp = step.ops, self.input_norm, self.attention, self.mlp
        linear = ops.linear
        if residual_TD is None:
            normed_TD, residual_TD = ops.rms_norm(x_TD, norm.parameters["weight"], norm.eps), x_TD.float()
        else:
            normed_TD, residual_TD = ops.add_rms_norm(x_TD, residual_TD, norm.parameters["weight"], norm.eps)
        p = attention.qkv.parameters
        mixed_TX = attention.attend(step, linear(normed_TD, p["weight"], p["bias"]))
        p = attention.proj.parameters
        norm = self.mlp_norm
        normed_TD, residual_TD = ops.add_rms_norm(
            linear(mixed_TX, p["weight"], p["bias"]), residual_TD, norm.parameters["weight"], norm.eps
        )
        p = mlp.fc1.parameters
        middle_TF = ops.silu_mul(linear(normed_TD, p["weight"], p["bias"]))
        p = mlp.fc2.parameters
        return linear(middle_TF, p["weight"], p["bias"]), residual_TD

    def weights(self) -> Iterator[Tensor]:
        """Every 2-D weight that goes through `ops.linear`."""
        yield from self.attention.weights()
        yield from self.mlp.weights()


class Body(Protocol):
    """What stands behind the one norm of a hybrid decoder's layer."""

    def run(self, step: StepInputs, normed_TD: Tensor) -> Tensor: ...

    def linears(self) -> Iterator[FusedLinear]: ...

    def weights(self) -> Iterator[Tensor]: ...


class FeedForwardBody:
    """An MLP or experts as the body of a layer of its own."""

    __slots__ = ("mlp",)

    def __init__(self, mlp: FeedForward) -> None:
        self.mlp = mlp

    def run(self, step: StepInputs, normed_TD: Tensor) -> Tensor:
        return self.mlp.run_step(step, normed_TD)

    def linears(self) -> Iterator[FusedLinear]:
        return self.mlp.linears()

    def weights(self) -> Iterator[Tensor]:
        yield from self.mlp.weights()


class FusedBlock:
    """One pre-norm layer of a hybrid decoder: a norm and a mixer, an attention, an MLP or experts."""

    __slots__ = ("body", "norm")

    def __init__(self, norm: FusedNorm, body: Body) -> None:
        self.norm, self.body = norm, body

    def run(self, step: StepInputs, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `FusedLayer.run`."""
        normed_TD, residual_TD = self.norm.run_added(step.ops, x_TD, residual_TD)
        return self.body.run(step, normed_TD), residual_TD

    def linears(self) -> Iterator[FusedLinear]:
        return self.body.linears()

    def see_products(self) -> None:
        """As of `FusedLayer`: it always asks."""

    def weights(self) -> Iterator[Tensor]:
        yield from self.body.weights()
