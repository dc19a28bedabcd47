"""Neighbouring operations of a layer as one pure torch function, compiled by torch.compile and shared by all layers.

    operation, operation, operation -> piece(x, residual, live tensors) -> torch.compile -> one call a layer

`PURE` has the pure form of each kind of operation: the arithmetic of its `run`, in fp32 and rounded at the end of the
operation as in the kernels' `Ops`. Every call passes the weights: a weight that training changed in place or replaced
is the next argument, and all layers with the same operations share one function. The number of tokens is dynamic;
torch.compile compiles one token as a case of its own. Legend: kernels/base.py.
"""

from __future__ import annotations

import logging
import time
import types
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_infer.kernels.activations import GatedActivation
from megatron_infer.kernels.base import StepInputs
from megatron_infer.models.fused_layers import (
    L2,
    RMS,
    FusedActivation,
    FusedLinear,
    FusedNorm,
    LayerOp,
    Parameters,
    SplitHeads,
)
from megatron_infer.models.fused_mixer import GatedNorm, SplitColumns

log = logging.getLogger("megatron_infer")

Live = tuple[Tensor | None, ...]
Source = tuple[Parameters, str]


@dataclass(frozen=True, slots=True)
class PureForm:
    """An operation as a function of tensors only."""

    key: Hashable
    """Equal keys: the same arithmetic."""
    apply: Callable[[Any, Any, Live], tuple[Any, Any]]
    """(x, residual, its live tensors) -> (x, residual)."""
    sources: tuple[Source, ...] = ()
    """Where its live tensors are read."""
    uses_residual: bool = False


def pure_norm(norm: FusedNorm) -> PureForm:
    kind, eps, zero_centered = norm.kind, norm.eps, norm.zero_centered

    def apply(x: Tensor, residual: Tensor | None, live: Live) -> tuple[Tensor, Tensor]:
        total = x.float() if residual is None else residual + x
        return _normed(total, *live, kind=kind, eps=eps, zero_centered=zero_centered).to(x.dtype), total

    return PureForm(("norm", kind, eps, zero_centered), apply, _norm_sources(norm), uses_residual=True)


def pure_linear(linear: FusedLinear) -> PureForm | None:
    """None for one with a pair that trains."""
    if linear.attached is not None:
        return None
    sources: tuple[Source, ...] = ((linear.parameters, "weight"),)
    if linear.reduce is None:
        sources = (*sources, (linear.parameters, "bias"))
    return PureForm(("linear", len(sources)), lambda x, residual, live: (F.linear(x, *live), residual), sources)


def pure_activation(activation: FusedActivation) -> PureForm:
    form = GatedActivation(F.silu, None, 0.0) if activation.function is None else activation.function
    if type(form) is not GatedActivation:
        function = form
        return PureForm(("activation", function), lambda x, residual, live: (function(x.float()).to(x.dtype), residual))
    function, clamp, offset = form.function, form.clamp, form.offset

    def apply(x: Tensor, residual: Any, live: Live) -> tuple[Tensor, Any]:
        gate, up = x.float().chunk(2, dim=-1)
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp)
        return (function(gate) * (up + offset)).to(x.dtype), residual

    return PureForm(("gated", function, clamp, offset), apply)


def pure_heads(split: SplitHeads) -> PureForm | None:
    """None where no head has a norm: the views cost nothing."""
    heads, queries, dim = split.shape_q
    norms = (split.q_norm, split.k_norm)
    if norms == (None, None):
        return None
    forms = [None if norm is None else (norm.kind, norm.eps, norm.zero_centered) for norm in norms]
    sources = [_NOTHING if norm is None else _norm_sources(norm) for norm in norms]

    def apply(x: Tensor, residual: Any, live: Live) -> tuple[tuple[Tensor, Tensor, Tensor], Any]:
        cells = x.unflatten(-1, (heads, queries + 2, dim))
        normed = [cells[:, :, :queries], cells[:, :, queries]]
        for i, form in enumerate(forms):
            if form is not None:
                kind, eps, zero_centered = form
                weight, bias = live[2 * i : 2 * i + 2]
                one = normed[i].float()
                normed[i] = _normed(one, weight, bias, kind=kind, eps=eps, zero_centered=zero_centered).to(x.dtype)
        return (normed[0], normed[1], cells[:, :, queries + 1]), residual

    return PureForm(("heads", heads, queries, dim, *forms), apply, (*sources[0], *sources[1]))


def pure_gated_norm(gated: GatedNorm) -> PureForm:
    norm, eps, group_size = gated.parameters, gated.eps, gated.group_size

    def apply(x: tuple[Tensor, Tensor], residual: Any, live: Live) -> tuple[Tensor, Any]:
        y, gate = x
        out = y.float() * F.silu(gate.float())
        if norm is not None:
            groups = out.unflatten(-1, (-1, group_size))
            out = _normed(groups, None, None, kind=RMS, eps=eps, zero_centered=False).flatten(1) * live[0]
        return out.to(y.dtype), residual

    return PureForm(("gated norm", norm is None, eps, group_size), apply, () if norm is None else ((norm, "weight"),))


def pure_columns(split: SplitColumns) -> PureForm:
    widths = split.widths
    return PureForm(("split", widths), lambda x, residual, live: (x.split(widths, dim=-1), residual))


PURE: dict[type[LayerOp], Callable[[Any], PureForm | None]] = {
    FusedNorm: pure_norm,
    FusedLinear: pure_linear,
    FusedActivation: pure_activation,
    SplitHeads: pure_heads,
    GatedNorm: pure_gated_norm,
    SplitColumns: pure_columns,
}
"""LayerOps of other kinds call a kernel or a collective and are never compiled."""


def pure_form_of(operation: LayerOp) -> PureForm | None:
    pure = PURE.get(type(operation))
    return None if pure is None else pure(operation)


_NONE: Parameters = {"weight": None, "bias": None}
_NOTHING: tuple[Source, Source] = ((_NONE, "weight"), (_NONE, "bias"))


def _norm_sources(norm: FusedNorm) -> tuple[Source, Source]:
    """Weight and bias; an RMS norm's module may have no entry for a bias."""
    if norm.kind == L2:
        return _NOTHING
    return (norm.parameters, "weight"), (_NONE if norm.kind == RMS else norm.parameters, "bias")


def _normed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, kind: str, eps: float, zero_centered: bool
) -> Tensor:
    """x normed over its last axis, in fp32."""
    if kind not in (RMS, L2):
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        x = x * (weight + 1 if zero_centered else weight)
    return x if bias is None else x + bias


class CompiledPiece(LayerOp):
    """Several operations of one layer as a call of a compiled function, on the layer's live tensors."""

    __slots__ = ("_function", "_sources", "_uses_residual")

    def __init__(
        self, function: Callable[[Any, Any, Live], tuple[Any, Any]], sources: Sequence[Source], *, uses_residual: bool
    ) -> None:
        self._function, self._sources, self._uses_residual = function, tuple(sources), uses_residual

    def run(self, step: StepInputs | None, x: Any, residual_TD: Tensor | None) -> tuple[Any, Tensor | None]:
        """Writes into neither argument."""
        live = tuple([parameters[name] for parameters, name in self._sources])
        if self._uses_residual:
            x, residual_TD = self._function(x, residual_TD, live)
        else:
            x, _ = self._function(x, None, live)
        return (x.contiguous() if isinstance(x, Tensor) else x), residual_TD

    def dry_run(self, x: Any, residual_TD: Tensor | None) -> tuple[Any, Tensor | None]:
        """Calls the function, which compiles it, with the number of tokens marked as dynamic."""
        for tensor in (*(x if isinstance(x, tuple) else (x,)), residual_TD):
            if tensor is not None and tensor.shape[0] > 1:
                torch._dynamo.mark_dynamic(tensor, 0)
        return self.run(None, x, residual_TD)


class PieceCompiler:
    """Makes pieces, and counts what torch.compile compiled for them."""

    def __init__(self) -> None:
        self._functions: dict[Hashable, Callable[[Any, Any, Live], tuple[Any, Any]]] = {}
        self.num_compiles = 0
        """Compiles of a function: for many tokens, for one token, with and without a residual."""
        self.compile_s = 0.0
        self.expects_more = True
        """Until the start-up is over; a later compile is logged as a warning."""

    @property
    def num_functions(self) -> int:
        return len(self._functions)

    def piece(self, forms: Sequence[PureForm]) -> CompiledPiece:
        """The forms as one function; a known one where arithmetic and shapes of tensors are the same."""
        sources = [source for form in forms for source in form.sources]
        tensors = [parameters[name] for parameters, name in sources]
        shapes = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors)
        key = (tuple(form.key for form in forms), shapes)
        if key not in self._functions:
            self._functions[key] = torch.compile(_chained(forms), backend=self._compile, fullgraph=True)
        return CompiledPiece(self._functions[key], sources, uses_residual=any(form.uses_residual for form in forms))

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        started = time.perf_counter()
        compiled: Callable[..., Any] = compile_fx(graph, inputs)
        seconds = time.perf_counter() - started
        self.num_compiles += 1
        self.compile_s += seconds
        if not self.expects_more:
            log.warning(
                "a layer's code was compiled again within a step, in %.1f s: torch's or a tensor's kind changed",
                seconds,
            )
        return compiled


def _chained(forms: Sequence[PureForm]) -> Callable[[Any, Any, Live], tuple[Any, Any]]:
    steps, start = [], 0
    for form in forms:
        steps.append((form.apply, start, start + len(form.sources)))
        start += len(form.sources)

    def run(x: Any, residual: Any, live: Live) -> tuple[Any, Any]:
        for apply, first, stop in steps:
            x, residual = apply(x, residual, live[first:stop])
        return x, residual

    # A code object of its own: torch.compile caches compiled code, and limits recompiles, by code object.
    run.__code__ = run.__code__.replace()
    assert isinstance(run, types.FunctionType)
    return run
