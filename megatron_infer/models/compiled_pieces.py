"""Stretches of a layer as pure torch functions, compiled by torch.compile: one function for all layers alike.

    part, part, part ──▶ piece(x, other, live tensors) ──▶ torch.compile ──▶ one call a layer

A function is given its weights with every call, so that it knows none of them: one that training changed in place or
replaced is simply the next argument, and all layers of the same make share what was compiled. The number of tokens is
dynamic; one token is a size of its own to torch.compile. Arithmetic is in fp32 and rounded at the end of a part, as in
the kernels' `Ops`. Legend: kernels/base.py.
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

from megatron_infer.kernels.activations import Activation, GatedActivation
from megatron_infer.models.fused_layers import L2, RMS, FusedAttention, FusedLinear, FusedNorm, Parameters

log = logging.getLogger("megatron_infer")

Live = tuple[Tensor | None, ...]
Source = tuple[Parameters, str]


@dataclass(frozen=True, slots=True)
class Part:
    """What one stretch computes, and the live tensors that it reads."""

    key: Hashable
    """Equal keys: the same arithmetic."""
    apply: Callable[[Any, Any, Live], tuple[Any, Any]]
    """(x, other, its tensors) -> (x, other); other is the residual or a gate."""
    sources: tuple[Source, ...] = ()


def norm_part(norm: FusedNorm) -> Part:
    """x, residual -> norm(x + residual), x + residual in fp32; without a residual x is all there is."""
    kind, eps, zero_centered = norm.kind, norm.eps, norm.zero_centered

    def apply(x: Tensor, residual: Tensor | None, live: Live) -> tuple[Tensor, Tensor]:
        total = x.float() if residual is None else residual + x
        return _normed(total, *live, kind=kind, eps=eps, zero_centered=zero_centered).to(x.dtype), total

    return Part(("norm", kind, eps, zero_centered), apply, _norm_sources(norm))


def linear_part(linear: FusedLinear) -> Part:
    """This rank's product; the bias of one that ranks add up comes after the sum."""
    sources: tuple[Source, ...] = ((linear.parameters, "weight"),)
    if linear.reduce is None:
        sources = (*sources, (linear.parameters, "bias"))

    def apply(x: Tensor, other: Any, live: Live) -> tuple[Tensor, Any]:
        return F.linear(x, *live), other  # type: ignore[arg-type]

    return Part(("linear", len(sources)), apply, sources)


def bias_part(linear: FusedLinear) -> Part:
    """What comes after the ranks' sum."""

    def apply(x: Tensor, other: Any, live: Live) -> tuple[Tensor, Any]:
        return x if live[0] is None else x + live[0], other

    return Part(("bias",), apply, ((linear.parameters, "bias"),))


def activation_part(activation: Activation | None) -> Part:
    """As `FusedMLP.activate`; None is SwiGLU."""
    if activation is None:
        activation = GatedActivation(F.silu, None, 0.0)
    if type(activation) is not GatedActivation:
        function = activation
        return Part(("activation", function), lambda x, other, live: (function(x.float()).to(x.dtype), other))
    function, clamp, offset = activation.function, activation.clamp, activation.offset

    def apply(x: Tensor, other: Any, live: Live) -> tuple[Tensor, Any]:
        gate, up = x.float().chunk(2, dim=-1)
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp)
        return (function(gate) * (up + offset)).to(x.dtype), other

    return Part(("gated", function, clamp, offset), apply)


def heads_part(attention: FusedAttention) -> Part:
    """The projection -> (q, k, v), queries and keys under norms of their own."""
    heads, queries, dim = attention.shape_q
    norms = (attention.q_norm, attention.k_norm)
    forms = [None if norm is None else (norm.kind, norm.eps, norm.zero_centered) for norm in norms]
    sources = [_NOTHING if norm is None else _norm_sources(norm) for norm in norms]

    def apply(x: Tensor, other: Any, live: Live) -> tuple[tuple[Tensor, Tensor, Tensor], Any]:
        cells = x.unflatten(-1, (heads, queries + 2, dim))
        turned = [cells[:, :, :queries], cells[:, :, queries]]
        for i, form in enumerate(forms):
            if form is not None:
                kind, eps, zero_centered = form
                weight, bias = live[2 * i : 2 * i + 2]
                one = turned[i].float()
                turned[i] = _normed(one, weight, bias, kind=kind, eps=eps, zero_centered=zero_centered).to(x.dtype)
        return (turned[0], turned[1], cells[:, :, queries + 1]), other

    return Part(("heads", heads, queries, dim, *forms), apply, (*sources[0], *sources[1]))


def gated_norm_part(norm: Parameters | None, *, eps: float, group_size: int) -> Part:
    """y, gate -> as `Ops.gated_rms_norm`."""

    def apply(y: Tensor, gate: Tensor, live: Live) -> tuple[Tensor, None]:
        out = y.float() * F.silu(gate.float())
        if norm is not None:
            runs = out.unflatten(-1, (-1, group_size))
            out = _normed(runs, None, None, kind=RMS, eps=eps, zero_centered=False).flatten(1) * live[0]
        return out.to(y.dtype), None

    return Part(("gated norm", norm is None, eps, group_size), apply, () if norm is None else ((norm, "weight"),))


def split_part(widths: Sequence[int]) -> Part:
    """Columns side by side -> the runs of them."""
    widths = tuple(widths)
    return Part(("split", widths), lambda x, other, live: (x.split(widths, dim=-1), other))


_NONE: Parameters = {"weight": None, "bias": None}
_NOTHING: tuple[Source, Source] = ((_NONE, "weight"), (_NONE, "bias"))


def _norm_sources(norm: FusedNorm) -> tuple[Source, Source]:
    """Weight and bias; an RMS norm's module may know no bias."""
    if norm.kind == L2:
        return _NOTHING
    return (norm.parameters, "weight"), (_NONE if norm.kind == RMS else norm.parameters, "bias")


def _normed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, kind: str, eps: float, zero_centered: bool
) -> Tensor:
    """Over the last axis, in fp32."""
    if kind not in (RMS, L2):
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        x = x * (weight + 1 if zero_centered else weight)
    return x if bias is None else x + bias


class Piece:
    """Parts one after the other, on the live tensors of one layer."""

    __slots__ = ("_run", "_sources")

    def __init__(self, run: Callable[[Any, Any, Live], tuple[Any, Any]], sources: Sequence[Source]) -> None:
        self._run, self._sources = run, tuple(sources)

    def __call__(self, x: Any, other: Any = None) -> tuple[Any, Any]:
        return self._run(x, other, tuple([parameters[name] for parameters, name in self._sources]))

    def warm_up(self, x: Tensor, other: Tensor | None = None) -> tuple[Any, Any]:
        """As a call, telling torch.compile that there may be any number of tokens."""
        for tensor in (x, other):
            if tensor is not None and tensor.shape[0] > 1:
                torch._dynamo.mark_dynamic(tensor, 0)
        return self(x, other)


class PieceCompiler:
    """Makes pieces, and counts what torch.compile made of them."""

    def __init__(self) -> None:
        self._functions: dict[Hashable, Callable[[Any, Any, Live], tuple[Any, Any]]] = {}
        self.num_compiles = 0
        """Times that a function was compiled: for a number of tokens, for one token, with and without a residual."""
        self.compile_s = 0.0
        self.expects_more = True
        """Until the start-up is over; a compile after it is told."""

    @property
    def num_functions(self) -> int:
        return len(self._functions)

    def piece(self, *parts: Part) -> Piece:
        """The parts as one function: a known one, if their arithmetic and their tensors' shapes are."""
        sources = [source for part in parts for source in part.sources]
        tensors = [parameters[name] for parameters, name in sources]
        shapes = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors)
        key = (tuple(part.key for part in parts), shapes)
        if key not in self._functions:
            self._functions[key] = torch.compile(_chained(parts), backend=self._compile, fullgraph=True)
        return Piece(self._functions[key], sources)

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


def _chained(parts: Sequence[Part]) -> Callable[[Any, Any, Live], tuple[Any, Any]]:
    steps, start = [], 0
    for part in parts:
        steps.append((part.apply, start, start + len(part.sources)))
        start += len(part.sources)

    def run(x: Any, other: Any, live: Live) -> tuple[Any, Any]:
        for apply, first, stop in steps:
            x, other = apply(x, other, live[first:stop])
        return x, other

    # Code of its own: torch.compile keeps what it compiled, and how often it may, by code object.
    run.__code__ = run.__code__.replace()
    assert isinstance(run, types.FunctionType)
    return run
