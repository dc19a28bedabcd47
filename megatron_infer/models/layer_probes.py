"""The modules of a decoder beside the operations that the engine runs for them, to be compared one by one.

Legend: S positions of one sequence, T tokens of a step, D hidden, V this rank's vocabulary, E experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_infer.distributed.backends import group_size
from megatron_infer.errors import ModelError
from megatron_infer.kernels.base import StepInputs
from megatron_infer.models.adopt import AdoptedModel
from megatron_infer.models.adoption_checks import final_norm_of
from megatron_infer.models.bridge_modules import FALCON_H1_LAYER, is_of
from megatron_infer.models.fused_layers import AddResidual, FusedNorm, LayerOp
from megatron_infer.models.mcore_compat import IdentityOp, MoELayer
from megatron_infer.models.moe import chosen_ids

EMBEDDING, NORM, ATTENTION, MAMBA, MLP, MOE, OUTPUT = "embedding", "norm", "attention", "mamba", "mlp", "moe", "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleProbe:
    """One module of a model, in the order of the forward."""

    name: str
    """Its name in the state dict: decoder.layers.3.self_attention."""
    kind: str
    layer: int | None
    """Number of this rank's decoder layer, from 0; None: before or behind the layers."""
    module: Any
    """What the trainer runs."""
    run: Callable[[StepInputs, Tensor], Tensor]
    """What the engine runs for it: run(step, its input [T, D]) -> [T, D] ([T, V] of the output layer)."""
    moe: int | None = None
    """Number of this rank's mixture-of-experts layer."""


def module_probes(adopted: AdoptedModel) -> list[ModuleProbe]:
    """The probes of a whole model. Raises ModelError for a pipeline stage and for layer classes of the user's."""
    live: Any = adopted.live
    if not (adopted.is_first_stage and adopted.is_last_stage):
        raise ModelError("the model is a stage of a pipeline: its parts cannot be compared one by one")
    foreign = adopted.foreign_layer()
    if foreign is not None:
        raise ModelError(f"{foreign} is a layer of the user's own: what is inside of it is not known")
    embed = lambda step, _: adopted.embed(step).squeeze(1)  # noqa: E731
    probes = [ModuleProbe(name="embedding", kind=EMBEDDING, layer=None, module=live.embedding, run=embed)]
    num_moe = 0
    for number, layer in enumerate(live.decoder.layers):
        for probe in _layer_probes(number, layer, num_moe):
            probes.append(probe)
            num_moe += probe.kind == MOE
    where, norm = final_norm_of(live)
    if norm is not None:
        probes.append(ModuleProbe(name=where, kind=NORM, layer=None, module=norm, run=adopted.final_norm))
    logits = lambda step, x_TD: adopted.logits(x_TD, step.ops)  # noqa: E731
    probes.append(ModuleProbe(name="output_layer", kind=OUTPUT, layer=None, module=live.output_layer, run=logits))
    return probes


def _layer_probes(number: int, layer: Any, num_moe: int) -> Iterator[ModuleProbe]:
    """Norms and the bodies behind them."""
    if is_of(layer, FALCON_H1_LAYER):  # its modules give what its own forward multiplies
        return
    names = _TRANSFORMER if hasattr(layer, "self_attention") else (("norm", "mixer"),)
    present = [pair for pair in names if type(getattr(layer, pair[1])) is not IdentityOp]
    for (norm_name, name), (norm, body) in zip(present, layer.fused.blocks, strict=True):
        before, module = getattr(layer, norm_name), getattr(layer, name)
        probe = partial(ModuleProbe, layer=number)
        # Where the norm is inside the linear behind it (Transformer Engine), the trainer never runs it by itself.
        inside = norm if type(before) is IdentityOp and isinstance(norm, FusedNorm) else None
        if type(before) is not IdentityOp:
            assert not isinstance(norm, AddResidual)
            yield probe(name=f"decoder.layers.{number}.{norm_name}", kind=NORM, module=before, run=_run_norm(norm))
        is_moe = type(module) is MoELayer
        yield probe(
            name=f"decoder.layers.{number}.{name}",
            kind=MOE if is_moe else _KINDS[name],
            module=module,
            run=_run_body(body, inside),
            moe=num_moe if is_moe else None,
        )


_TRANSFORMER = (("input_layernorm", "self_attention"), ("pre_mlp_layernorm", "mlp"))
"""Norm and body by their names in a layer, in order."""
_KINDS = {"self_attention": ATTENTION, "mlp": MLP, "mixer": MAMBA}


def _run_norm(norm: FusedNorm) -> Callable[[StepInputs, Tensor], Tensor]:
    return lambda step, x_TD: norm.norm(step.ops, x_TD)


def _run_body(body: LayerOp, norm: FusedNorm | None) -> Callable[[StepInputs, Tensor], Tensor]:
    """norm: the one that the trainer's module has inside; None: it has none."""
    return lambda step, x_TD: body.run(step, x_TD if norm is None else norm.norm(step.ops, x_TD), None)[0]


@dataclass(slots=True, kw_only=True)
class ForwardTrace:
    """Inputs and outputs of the modules in a trainer's forward over one sequence, by the probe's name."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    layers: list[Tensor] = field(default_factory=list)
    """The residual stream behind each decoder layer, [S, D]."""
    logits_from: int = 0
    """The output layer has outputs from this position on only."""
    experts: dict[str, Tensor] = field(default_factory=dict)
    """int64 [S, K], ascending: the experts that the router of a mixture-of-experts layer chose for each position."""


@torch.no_grad()
def trace_forward(
    model: Any, probes: Sequence[ModuleProbe], ids: Sequence[int], *, tp: Any, logits_from: int = 0
) -> ForwardTrace:
    """Run the stock modules over one sequence and keep their inputs and outputs; the caller sets modes and flags.

    tp: the group that tensors are split over, None for one process. Where sequence parallelism divides positions over
    its ranks they are gathered: every rank gets all positions, but of the logits its own part of the vocabulary.
    """
    size = group_size(tp)
    length = len(ids)
    padded = length + (-length % size if model.config.sequence_parallel else 0)
    device = next(model.parameters()).device
    ids_1S = torch.zeros(1, padded, dtype=torch.int64, device=device)
    ids_1S[0, :length] = torch.tensor(list(ids))
    found = ForwardTrace(logits_from=logits_from)

    def whole(x: Tensor) -> Tensor:
        x = x.detach()
        if x.shape[0] * size == padded and size > 1:
            parts = [torch.empty_like(x) for _ in range(size)]
            dist.all_gather(parts, x.contiguous(), group=tp)
            x = torch.cat(parts)
        return x[:length].clone()

    def keep(probe: ModuleProbe, _: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        if probe.kind != EMBEDDING:
            given = args[0] if args else next(value for value in kwargs.values() if torch.is_tensor(value))
            found.inputs[probe.name] = whole(given[:, 0])
        value, bias = _first(out), out[1] if isinstance(out, tuple) and len(out) > 1 else None
        if probe.kind == OUTPUT:  # never divided over positions
            found.outputs[probe.name] = value.detach()[logits_from : len(found.inputs[probe.name]), 0].clone()
        else:
            found.outputs[probe.name] = whole((value + bias if torch.is_tensor(bias) else value)[:, 0])

    def keep_routing(probe: ModuleProbe, router: Any, args: Any, kwargs: Any, out: Any) -> None:
        found.experts[probe.name] = whole(chosen_ids(out[1], router.topk))

    with contextlib.ExitStack() as stack:

        def add_hook(module: Any, hook: Callable[..., None]) -> None:
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)

        for probe in probes:
            add_hook(probe.module, partial(keep, probe))
            if probe.kind == MOE:
                add_hook(probe.module.router, partial(keep_routing, probe))
        for layer in model.decoder.layers:
            add_hook(layer, lambda _m, _a, _k, out: found.layers.append(whole(_first(out)[:, 0])))
        model(ids_1S, torch.arange(padded, device=device)[None], None)
    missing = [probe.name for probe in probes if probe.name not in found.outputs]
    if missing:
        raise ModelError(f"the trainer's forward did not call {', '.join(missing)}")
    return found


def _first(out: Any) -> Tensor:
    value: Tensor = out[0] if isinstance(out, tuple) else out
    return value
