"""Runs of neighbouring operations, over any number of layers, as one program of the kernels.

    norm, qkv, attend, proj, norm, fc1, SwiGLU, fc2, norm, qkv, ...   one call a step in the place of eight a layer

The operations of `fused_layers` stay the one description of a layer: a program is read off them. It saves the time
between two kernels, an eighth of a small decode step. Where kernels cannot run one (weights that are not packed,
a norm that is not RMS) the operations run one by one, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_infer.kernels.activations import GEGLU, SWIGLU, form_of
from megatron_infer.kernels.base import StepInputs
from megatron_infer.kernels.native.native_experts import ACTIVATIONS
from megatron_infer.kernels.native.native_layers import (
    ActivateOp,
    AttendOp,
    ExpertsOp,
    GatedOp,
    LayerProgram,
    LinearOp,
    NormOp,
    ProgramOp,
)
from megatron_infer.models.fused_layers import (
    RMS,
    Attend,
    FusedActivation,
    FusedLinear,
    FusedNorm,
    LayerOp,
    LayerOps,
    NormAfter,
    SplitHeads,
)
from megatron_infer.models.moe import FusedExperts


class ProgramOps(LayerOps):
    """Operations that the kernels run as one program where they can."""

    def __init__(self, operations: Iterable[LayerOp], program: LayerProgram) -> None:
        super().__init__(*operations)
        self.program = program

    def run(self, step: StepInputs, x: Any, residual_TD: Tensor | None = None) -> tuple[Any, Tensor | None]:
        done = step.run_program(self.program, x, residual_TD)
        return super().run(step, x, residual_TD) if done is None else done


def with_programs(operations: Iterable[LayerOp], *, end_model: bool) -> list[LayerOp]:
    """The same operations, each run of several that a program can hold as one `ProgramOps`.

    end_model: the last of them gives the model's final hidden states.
    """
    found: list[LayerOp] = []
    run: list[tuple[LayerOp, ProgramOp | None]] = []

    def close(*, ends_model: bool = False) -> None:
        ops = [op for _, op in run if op is not None]
        operations = [operation for operation, _ in run]
        is_program = len(ops) > 1 or any(isinstance(op, ExpertsOp) for op in ops)
        found.extend([ProgramOps(operations, LayerProgram(ops, ends_model=ends_model))] if is_program else operations)
        run.clear()

    for group in _with_heads(operations):
        make = _PROGRAM_OPS.get(type(group[-1]))
        op = None if make is None else make(*group)
        if op is None:
            close()
            found.extend(group)
        else:
            run += [(operation, op if operation is group[-1] else None) for operation in group]
    close(ends_model=end_model)
    return found


def _with_heads(operations: Iterable[LayerOp]) -> Iterator[tuple[LayerOp, ...]]:
    """Each operation by itself; the views of heads and their attention together, as the views are no single tensor."""
    heads: SplitHeads | None = None
    for operation in operations:
        if type(operation) is SplitHeads:
            heads = operation
        else:
            yield (operation,) if heads is None else (heads, operation)
            heads = None


def _norm(norm: FusedNorm) -> NormOp | None:
    if norm.kind != RMS:
        return None
    return NormOp(weight=(norm.parameters, "weight"), eps=norm.eps, zero_centered=norm.zero_centered)


def _norm_after(after: NormAfter) -> ProgramOp | None:
    op = _norm(after.norm)
    return None if op is None else replace(op, alone=True)


def _linear(linear: FusedLinear) -> ProgramOp | None:
    if any(one is not None for one in (linear.product, linear.spread, linear.foreign, linear.attached)):
        return None
    bias = None if linear.reduce is not None else (linear.parameters, "bias")
    return LinearOp(weight=(linear.parameters, "weight"), bias=bias, adapted=linear)


def _activation(activation: FusedActivation) -> ProgramOp | None:
    if activation.function is None:
        return GatedOp()
    form = form_of(activation.function)
    if form == GEGLU:
        return GatedOp(has_gelu=True)
    return ActivateOp(form=form) if form in ACTIVATIONS and form != SWIGLU else None


def _attend(heads: SplitHeads, attend: Attend) -> ProgramOp | None:
    if heads.q_norm is not None or heads.k_norm is not None:
        return None
    at = {"at_q": heads.at_q, "at_k": heads.at_k, "at_v": heads.at_v, "cell": heads.strides_q[1]}
    return AttendOp(layer=attend.layer, spec=attend.spec, **at)


def _experts(experts: FusedExperts) -> ProgramOp | None:
    """Whole: also what ranks add up is left to be run one by one."""
    router, rules = experts.router, experts.rules
    num_experts = router.config.num_moe_experts
    if rules is None or rules.unroutable(num_experts) is not None or experts.reduce is not None:
        return None
    if experts.probs_on_input or experts.softmax_scores:
        return None
    is_native = (experts.router_dtype or router.weight.dtype) is torch.float32  # see NativeRouter.choose
    if not is_native or experts.grouped.form not in ACTIVATIONS:
        return None
    if any(_linear(linear) is None for one in experts.experts for linear in one.linears()):
        return None
    shared: list[Any] = []
    if experts.shared is not None:
        shared = [_PROGRAM_OPS.get(type(one), lambda _: None)(one) for one in experts.shared.flat()]
        if None in shared:
            return None
    gate: tuple[LinearOp, ...] = ()
    if experts.has_shared_gate:
        gate = (LinearOp(weight=(experts.shared_module._parameters, "gate_weight"), bias=None),)
    around = [] if experts.down is None or experts.up is None else [_linear(experts.down), _linear(experts.up)]
    if None in around:
        return None
    return ExpertsOp(
        of=experts,
        router=LinearOp(
            weight=(router._parameters, "weight"), bias=None if router.bias is None else (router._parameters, "bias")
        ),
        bias=None if router.expert_bias is None else (router._buffers, "expert_bias"),
        rules=rules,
        weights=experts.grouped,
        shared=tuple(shared),
        gate=gate,
        around=tuple(one for one in around if isinstance(one, LinearOp)),
    )


_PROGRAM_OPS: dict[type, Callable[..., ProgramOp | None]] = {
    FusedNorm: _norm,
    NormAfter: _norm_after,
    FusedLinear: _linear,
    FusedActivation: _activation,
    Attend: _attend,
    FusedExperts: _experts,
}
