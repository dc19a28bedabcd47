"""The parts of a decoder twice: as the trainer's modules and as what the engine runs, to be compared one by one.

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

from megatron_infer.errors import ModelError
from megatron_infer.kernels.base import StepInputs
from megatron_infer.models.adopt import AdoptedModel
from megatron_infer.models.adoption_checks import final_norm_of
from megatron_infer.models.mcore_compat import IdentityOp, MoELayer
from megatron_infer.models.moe import chosen_ids

EMBEDDING, NORM, ATTENTION, MAMBA, MLP, MOE, OUTPUT = "embedding", "norm", "attention", "mamba", "mlp", "moe", "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One piece of a model, in the order of the forward."""

    name: str
    """As in the state dict: decoder.layers.3.self_attention."""
    kind: str
    layer: int | None
    """Which of this rank's decoder layers, from 0; None: before or behind them."""
    module: Any
    """What the trainer runs."""
    run: Callable[[StepInputs, Tensor], Tensor]
    """What the engine runs instead: run(step, its input [T, D]) -> [T, D] ([T, V] of the output layer)."""
    moe: int | None = None
    """Which of this rank's mixture-of-experts layers."""


def parts_of(adopted: AdoptedModel) -> list[Part]:
    """Of a whole model. Raises ModelError for a pipeline stage and for layers that are the user's own."""
    live: Any = adopted.live
    if not (adopted.is_first_stage and adopted.is_last_stage):
        raise ModelError("the model is a stage of a pipeline: its parts cannot be compared one by one")
    foreign = adopted.foreign_layer()
    if foreign is not None:
        raise ModelError(f"{foreign} is a layer of the user's own: what is inside of it is not known")
    parts = [Part(name="embedding", kind=EMBEDDING, layer=None, module=live.embedding, run=_embed(adopted))]
    num_moe = 0
    for number, layer in enumerate(live.decoder.layers):
        for part in _parts_of_layer(number, layer, num_moe):
            parts.append(part)
            num_moe += part.kind == MOE
    where, norm = final_norm_of(live)
    if norm is not None:
        parts.append(Part(name=where, kind=NORM, layer=None, module=norm, run=adopted.final_norm))
    logits = lambda step, x_TD: adopted.logits(x_TD, step.ops)  # noqa: E731
    parts.append(Part(name="output_layer", kind=OUTPUT, layer=None, module=live.output_layer, run=logits))
    return parts


def _embed(adopted: AdoptedModel) -> Callable[[StepInputs, Tensor], Tensor]:
    return lambda step, _: adopted.embed(step).squeeze(1)


def _parts_of_layer(number: int, layer: Any, num_moe: int) -> Iterator[Part]:
    """Norms and what stands behind them."""
    lean, name = layer.lean, f"decoder.layers.{number}"
    part = partial(Part, layer=number)
    if hasattr(layer, "mixer"):
        if not _inside(layer.norm):
            yield part(name=f"{name}.norm", kind=NORM, module=layer.norm, run=_norm(lean.norm))
        run = _behind(layer.norm, lean.norm, lean.body.run)
        yield part(name=f"{name}.mixer", kind=MAMBA, module=layer.mixer, run=run)
        return
    attends, feeds = (type(half) is not IdentityOp for half in (layer.self_attention, layer.mlp))
    if attends:
        norm, run = (lean.input_norm, lean.attention.run) if feeds else (lean.norm, lean.body.run)
        before = layer.input_layernorm
        if not _inside(before):
            yield part(name=f"{name}.input_layernorm", kind=NORM, module=before, run=_norm(norm))
        run = _behind(before, norm, run)
        yield part(name=f"{name}.self_attention", kind=ATTENTION, module=layer.self_attention, run=run)
    if feeds:
        norm, run = (lean.mlp_norm, lean.mlp.run_step) if attends else (lean.norm, lean.body.run)
        moe = num_moe if type(layer.mlp) is MoELayer else None
        kind = MLP if moe is None else MOE
        before = layer.pre_mlp_layernorm
        if not _inside(before):
            yield part(name=f"{name}.pre_mlp_layernorm", kind=NORM, module=before, run=_norm(norm))
        run = _behind(before, norm, run)
        yield part(name=f"{name}.mlp", kind=kind, module=layer.mlp, run=run, moe=moe)


def _inside(before: Any) -> bool:
    """The norm is inside the linear behind it (Transformer Engine): the trainer never runs it by itself."""
    return type(before) is IdentityOp


def _behind(
    before: Any, norm: Any, run: Callable[[StepInputs, Tensor], Tensor]
) -> Callable[[StepInputs, Tensor], Tensor]:
    """As the trainer's module has it: with the norm that is inside of it."""
    return (lambda step, x_TD: run(step, norm.run(step.ops, x_TD))) if _inside(before) else run


def _norm(lean: Any) -> Callable[[StepInputs, Tensor], Tensor]:
    return lambda step, x_TD: lean.run(step.ops, x_TD)


@dataclass(slots=True, kw_only=True)
class Trace:
    """What a trainer's forward over one sequence took in and gave, by the name of the part."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    layers: list[Tensor] = field(default_factory=list)
    """The residual stream behind each decoder layer, [S, D]."""
    logits_from: int = 0
    """Of the output layer there are only outputs from this position on."""
    experts: dict[str, Tensor] = field(default_factory=dict)
    """int64 [S, K], ascending: where the router of a mixture-of-experts layer sent each position."""


@torch.no_grad()
def trace(model: Any, parts: Sequence[Part], ids: Sequence[int], *, tp: Any, logits_from: int = 0) -> Trace:
    """Run the stock modules over one sequence and keep what passes; the caller has set modes and flags.

    tp: the group that tensors are split over, None for one process. Where sequence parallelism spreads positions over
    its ranks they are gathered: every rank has all, but of the logits its own part of the vocabulary.
    """
    size = 1 if tp is None else tp.size()
    length = len(ids)
    padded = length + (-length % size if model.config.sequence_parallel else 0)
    device = next(model.parameters()).device
    ids_1S = torch.zeros(1, padded, dtype=torch.int64, device=device)
    ids_1S[0, :length] = torch.tensor(list(ids))
    found = Trace(logits_from=logits_from)

    def whole(x: Tensor) -> Tensor:
        x = x.detach()
        if x.shape[0] * size == padded and size > 1:
            pieces = [torch.empty_like(x) for _ in range(size)]
            dist.all_gather(pieces, x.contiguous(), group=tp)
            x = torch.cat(pieces)
        return x[:length].clone()

    with contextlib.ExitStack() as stack:

        def listen(module: Any, heard: Callable[..., None]) -> None:
            stack.callback(module.register_forward_hook(heard, with_kwargs=True).remove)

        for part in parts:
            listen(part.module, partial(_hear, found, part, whole))
            if part.kind == MOE:
                listen(part.module.router, partial(_hear_router, found, part, whole))
        for layer in model.decoder.layers:
            listen(layer, lambda _m, _a, _k, out: found.layers.append(whole(_first(out)[:, 0])))
        model(ids_1S, torch.arange(padded, device=device)[None], None)
    missing = [part.name for part in parts if part.name not in found.outputs]
    if missing:
        raise ModelError(f"the trainer's forward did not call {', '.join(missing)}")
    return found


def _hear(
    found: Trace, part: Part, whole: Callable[[Tensor], Tensor], _: Any, args: Any, kwargs: dict[str, Any], out: Any
) -> None:
    if part.kind != EMBEDDING:
        given = args[0] if args else next(value for value in kwargs.values() if torch.is_tensor(value))
        found.inputs[part.name] = whole(given[:, 0])
    value, bias = _first(out), out[1] if isinstance(out, tuple) and len(out) > 1 else None
    if part.kind == OUTPUT:  # never split over positions
        length = len(found.inputs[part.name])
        found.outputs[part.name] = value.detach()[found.logits_from : length, 0].clone()
        return
    found.outputs[part.name] = whole((value + bias if torch.is_tensor(bias) else value)[:, 0])


def _hear_router(
    found: Trace, part: Part, whole: Callable[[Tensor], Tensor], router: Any, args: Any, kwargs: Any, out: Any
) -> None:
    found.experts[part.name] = whole(chosen_ids(out[1], router.topk))


def _first(out: Any) -> Tensor:
    value: Tensor = out[0] if isinstance(out, tuple) else out
    return value
