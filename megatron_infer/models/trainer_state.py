"""What a trainer puts around a model and onto it: found, taken out of generation's way, put back as it was.

Each context manager leaves behind exactly what it found, whatever happens in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.adoption_checks import unwrap

SPLIT = {"sequence_parallel": False, "scatter_to_sequence_parallel": False, "reduce_scatter_embeddings": False}
"""Sequence parallelism splits a step's tokens over ranks; in generation every rank has all of them."""
GRAPHS = {"cuda_graph_impl": "none", "flash_decode": False}
"""megatron-core's own graphs and decoding would capture the decoder under us."""
PADDING = ("moe_pad_expert_input_to_capacity", "moe_expert_capacity_factor", "drop_and_pad")
"""megatron-core's own inference sets them while it decodes; here they are only guarded."""
GRAPH_MANAGER = "cudagraph_manager"


def wrapper_chain(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[Any]:
    """DDP, Float16Module and what else stands around a model, outermost first; the model itself is last.

    `model` may be Megatron's one-element list of chunks. Raises AdoptionError as `unwrap` does.
    """
    inner = unwrap(model)
    chain: list[Any] = [model[0] if isinstance(model, list | tuple) else model]
    while chain[-1] is not inner:
        chain.append(chain[-1].module)
    return chain


@contextmanager
def whole_parameters(chain: Sequence[Any]) -> Iterator[None]:
    """Parameters that megatron-core's DDP gathers as the training forward comes to them are all there at once.

    A collective of the data-parallel ranks where overlap_param_gather is on, nothing elsewhere.
    """
    late = [part for part in chain if getattr(part, "remove_forward_pre_hook_handles", None)]
    with ExitStack() as stack:
        for ddp in late:
            ddp.disable_forward_pre_hook()
            stack.callback(ddp.enable_forward_pre_hook)
        yield


@contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode; every module goes back to the mode that it was in, mixed ones too."""
    found = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(found[0][1])  # some modules drop what they derived from weights when they hear of it
        for module, training in found:
            if module.training is not training:
                module.training = training


@contextmanager
def inference_flag(active: bool) -> Iterator[None]:
    """megatron-core's process-wide word on whether an engine uses the model; before 0.19 there is none."""
    flag = mcore.inference_mode()
    if flag is None:
        yield
        return
    found = flag.is_active()
    (flag.set_active if active else flag.unset_active)()
    try:
        yield
    finally:
        (flag.set_active if found else flag.unset_active)()


@contextmanager
def inference_attributes(model: torch.nn.Module) -> Iterator[None]:
    """SPLIT and GRAPHS are off in every module and config, graph managers are out, PADDING is guarded."""
    wanted, absent = SPLIT | GRAPHS, object()
    found = [
        (holder, name, vars(holder).get(name, absent))
        for holder in _holders(model)
        for name in (*wanted, *PADDING, GRAPH_MANAGER)
    ]
    # A manager that is a module itself has a place among the others, which a state dict shows.
    managed = [(module, dict(module._modules)) for module in list(model.modules()) if GRAPH_MANAGER in module._modules]
    try:
        for holder, name, value in found:
            if value is absent:
                continue
            if name in wanted:
                setattr(holder, name, wanted[name])
            elif name == GRAPH_MANAGER:
                delattr(holder, name)
        for module, _ in managed:
            delattr(module, GRAPH_MANAGER)
        yield
    finally:
        for holder, name, value in found:
            now = vars(holder).get(name, absent)
            if now is value:
                continue
            if value is absent:
                delattr(holder, name)
            else:
                setattr(holder, name, value)
        for module, parts in managed:
            module._modules.clear()
            module._modules.update(parts)


def _holders(model: torch.nn.Module) -> list[Any]:
    """Modules, their configs, and the dispatchers of experts, each once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        for holder in (module, getattr(module, "config", None), dispatcher, getattr(dispatcher, "config", None)):
            if hasattr(holder, "__dict__"):
                found[id(holder)] = holder
    return list(found.values())
