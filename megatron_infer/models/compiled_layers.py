"""Lean layers whose torch code between attention, scan, experts and collectives is compiled into pieces.

    x, residual ──▶ [norm, qkv, head norms] ──▶ step.attend ──▶ [proj, norm, fc1, activation, fc2] ──▶ x, residual
                     a compiled piece            the kernels      a compiled piece

What it is for: norms, biases and activations that the kernels' `Ops` have no launch for are fused with their
neighbours, and an eager step has two calls a layer in the place of eight. A layer of RMS norms and SwiGLU has one
launch for each of these already. Products are torch's own: packed copies of weights are not used.
Runs under inference mode alone; in any other a layer runs as it is. Legend: kernels/base.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_infer.kernels.base import StepInputs
from megatron_infer.models.compiled_pieces import (
    Part,
    Piece,
    PieceCompiler,
    activation_part,
    bias_part,
    gated_norm_part,
    heads_part,
    linear_part,
    norm_part,
    split_part,
)
from megatron_infer.models.fused_layers import (
    FeedForward,
    FeedForwardBody,
    FusedAttention,
    FusedBlock,
    FusedLayer,
    FusedLinear,
    FusedMLP,
    FusedNorm,
)
from megatron_infer.models.fused_mixer import FusedMixer

WARM_UP_TOKENS = (64, 1)
"""One token is a size of its own to torch.compile; any other number stands for all."""
Call = Callable[[Piece, Any, Any], tuple[Any, Any]]


class Compiled:
    """A layer or a block of one: pieces with the kernels' calls between them."""

    __slots__ = ("lean",)

    lean: FusedLayer | FusedBlock

    def run(self, step: StepInputs, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `FusedLayer.run`, of which it writes into neither argument."""
        if not torch.is_inference_mode_enabled():
            return self.lean.run(step, x_TD, residual_TD)
        return self.flow(step, x_TD, residual_TD)

    def flow(self, step: StepInputs | None, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """step None: to see all pieces compiled; zeros stand for what kernels and other ranks would give."""
        raise NotImplementedError

    def weights(self) -> Iterator[Tensor]:
        """2-D weights that still go through `ops.linear`."""
        return iter(())


class _Attends:
    """Norm, projection and attention, up to the output projection."""

    __slots__ = ("attention", "front", "has_heads")

    def __init__(self, compiler: PieceCompiler, norm: FusedNorm, attention: FusedAttention) -> None:
        self.attention = attention
        has_norms = attention.q_norm is not None or attention.k_norm is not None
        self.has_heads = has_norms and attention.gather is None
        heads = (heads_part(attention),) if self.has_heads else ()
        self.front = compiler.piece(norm_part(norm), linear_part(attention.qkv), *heads)

    def flow(self, step: StepInputs | None, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        attention = self.attention
        out, residual_TD = _call(step, self.front, x_TD, residual_TD)
        assert residual_TD is not None
        if step is None:
            spec = attention.spec
            return x_TD.new_zeros(len(x_TD), spec.num_kv_heads * spec.group_size * spec.head_dim), residual_TD
        if self.has_heads:
            return step.attend(attention.layer, *out, attention.spec), residual_TD
        if attention.gather is not None:
            out = attention.gather.all_gather(out)
        return attention.attend(step, out.contiguous()), residual_TD  # which takes it as lying row by row


class CompiledLayer(Compiled):
    """One pre-norm decoder layer in two pieces."""

    __slots__ = ("attends", "back", "experts", "fc2", "lean", "proj")

    def __init__(self, compiler: PieceCompiler, lean: FusedLayer) -> None:
        self.lean = lean
        self.attends = _Attends(compiler, lean.input_norm, lean.attention)
        self.proj: FusedLinear | None = lean.attention.proj
        """None: it is in the piece behind attention, as no rank adds anything to it."""
        parts: list[Part] = [bias_part(self.proj)]
        if self.proj.reduce is None:
            parts, self.proj = [linear_part(self.proj)], None
        mlp: Any = lean.mlp
        self.experts: FeedForward | None = mlp if type(mlp) is not FusedMLP else None
        self.fc2: FusedLinear | None = None if self.experts is not None else mlp.fc2
        self.back = compiler.piece(*parts, norm_part(lean.mlp_norm), *(() if self.experts is not None else _mlp(mlp)))

    def flow(self, step: StepInputs | None, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        mixed_TX, residual_TD = self.attends.flow(step, x_TD, residual_TD)
        if self.proj is not None:
            mixed_TX = _summed(step, self.proj, mixed_TX, width=x_TD.shape[1])
        x_TD, residual_TD = _call(step, self.back, mixed_TX, residual_TD)
        if self.fc2 is not None:
            x_TD = _finished(step, self.fc2, x_TD)
        elif step is not None:
            assert self.experts is not None
            x_TD = self.experts.run_step(step, x_TD)
        return x_TD, residual_TD  # type: ignore[return-value]

    def weights(self) -> Iterator[Tensor]:
        if self.proj is not None:
            yield self.proj.weight()
        if self.experts is not None:
            yield from self.experts.weights()


class CompiledAttention(Compiled):
    """A hybrid's attention layer: a piece before it; the output projection is one call anyway."""

    __slots__ = ("attends", "lean")

    def __init__(self, compiler: PieceCompiler, lean: FusedBlock, body: FusedAttention) -> None:
        self.lean = lean
        self.attends = _Attends(compiler, lean.norm, body)

    def flow(self, step: StepInputs | None, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        mixed_TX, residual_TD = self.attends.flow(step, x_TD, residual_TD)
        if step is None:
            return torch.zeros_like(x_TD), residual_TD
        return self.attends.attention.proj.run(step.ops, mixed_TX), residual_TD

    def weights(self) -> Iterator[Tensor]:
        yield self.attends.attention.proj.weight()


class CompiledMLP(Compiled):
    """A hybrid's MLP layer in one piece."""

    __slots__ = ("fc2", "lean", "piece")

    def __init__(self, compiler: PieceCompiler, lean: FusedBlock, body: FusedMLP) -> None:
        self.lean, self.fc2 = lean, body.fc2
        self.piece = compiler.piece(norm_part(lean.norm), *_mlp(body))

    def flow(self, step: StepInputs | None, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = _call(step, self.piece, x_TD, residual_TD)
        return _finished(step, self.fc2, x_TD), residual_TD  # type: ignore[return-value]


class CompiledMixer(Compiled):
    """A Mamba layer: a piece on either side of the scan."""

    __slots__ = ("back", "body", "front", "lean")

    def __init__(self, compiler: PieceCompiler, lean: FusedBlock, body: FusedMixer) -> None:
        self.lean, self.body = lean, body
        self.front = compiler.piece(norm_part(lean.norm), linear_part(body.in_proj), split_part(body.widths))
        gated = gated_norm_part(body.norm, eps=body.norm_eps, group_size=body.norm_group)
        self.back = compiler.piece(gated, linear_part(body.out_proj))

    def flow(self, step: StepInputs | None, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        body = self.body
        (gate_TM, xBC_TC, dt_TH), residual_TD = _call(step, self.front, x_TD, residual_TD)
        if step is None:
            y_TM = gate_TM.new_zeros(gate_TM.shape)
        else:
            y_TM = step.ssm(body.layer, xBC_TC, dt_TH, body.scan.weights, body.spec)
        x_TD, _ = _call(step, self.back, y_TM, gate_TM)
        return _finished(step, body.out_proj, x_TD), residual_TD  # type: ignore[return-value]


def compiled_layer(compiler: PieceCompiler, lean: FusedLayer | FusedBlock) -> Compiled | None:
    """None: nothing of the layer is compiled (experts by themselves)."""
    if type(lean) is FusedLayer:
        return CompiledLayer(compiler, lean)
    assert type(lean) is FusedBlock
    body: Any = lean.body
    if type(body) is FusedAttention:
        return CompiledAttention(compiler, lean, body)
    if type(body) is FusedMixer:
        return CompiledMixer(compiler, lean, body)
    if type(body) is FeedForwardBody and type(body.mlp) is FusedMLP:
        return CompiledMLP(compiler, lean, body.mlp)
    return None


@torch.inference_mode()
def warm_up(
    layers: Sequence[Compiled | None], *, width: int, dtype: torch.dtype, device: torch.device, is_first: bool
) -> None:
    """See every piece compiled as steps will call it. is_first: the first layer is given no residual."""
    for num_tokens in WARM_UP_TOKENS:
        x_TD = torch.zeros(num_tokens, width, dtype=dtype, device=device)
        residual_TD = None if is_first else x_TD.float()
        for layer in layers:
            if layer is None:
                residual_TD = x_TD.float() if residual_TD is None else residual_TD
                continue
            x_TD, residual_TD = layer.flow(None, x_TD, residual_TD)


def _mlp(mlp: FusedMLP) -> tuple[Part, ...]:
    return linear_part(mlp.fc1), activation_part(mlp.activation), linear_part(mlp.fc2)


def _call(step: StepInputs | None, piece: Piece, x: Any, other: Any) -> tuple[Any, Any]:
    return piece.warm_up(x, other) if step is None else piece(x, other)


def _summed(step: StepInputs | None, linear: FusedLinear, x_TX: Tensor, *, width: int) -> Tensor:
    """The ranks' products added up, without the bias."""
    if step is None:
        return x_TX.new_zeros(len(x_TX), width)
    assert linear.reduce is not None
    return linear.reduce.all_reduce(step.ops.linear(x_TX, linear.weight()))


def _finished(step: StepInputs | None, linear: FusedLinear, x_TD: Tensor) -> Tensor:
    """What other ranks and the bias add to a piece's last product, where they do."""
    if linear.reduce is None:
        return x_TD
    if step is not None:
        x_TD = linear.reduce.all_reduce(x_TD)
    bias = linear.parameters["bias"]
    return x_TD if bias is None else x_TD + bias
