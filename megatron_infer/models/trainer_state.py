"""A trainer's wrappers and settings of a model, switched off while the engine generates and restored afterwards.

Each context manager restores exactly the state that it found, also after an exception.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.adoption_checks import unwrap
from megatron_infer.models.model_chunks import ModelChunks
from megatron_infer.models.module_guard import GRAPH_MANAGER
from megatron_infer.utils.attributes import replaced

SPLIT = {"sequence_parallel": False, "scatter_to_sequence_parallel": False, "reduce_scatter_embeddings": False}
"""Sequence parallelism divides tokens over ranks; in generation every rank has all tokens."""
GRAPHS = {"cuda_graph_impl": "none", "flash_decode": False}
"""megatron-core's own graphs and decoding, which would capture the decoder."""
PADDING = ("moe_pad_expert_input_to_capacity", "moe_expert_capacity_factor", "drop_and_pad")
"""megatron-core's own inference sets them while it decodes; here they are only restored."""


def wrapper_chain(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[Any]:
    """DDP, Float16Module and other wrappers of a model, outermost first; the model itself is last.

    `model` may be Megatron's list of chunks. Of several the first is the list of them, the last a `ModelChunks`, and
    between them are the wrappers of all chunks. Raises AdoptionError as `unwrap` does.
    """
    inner = unwrap(model)
    if isinstance(inner, ModelChunks):
        roots = list(model) if isinstance(model, list | tuple) else list(inner.chunks)
        wrappers = [part for root in roots for part in wrapper_chain(root)[:-1]]
        return [torch.nn.ModuleList(roots), *wrappers, inner]
    chain: list[Any] = [model[0] if isinstance(model, list | tuple) else model]
    while chain[-1] is not inner:
        chain.append(chain[-1].module)
    return chain


@contextmanager
def whole_parameters(chain: Sequence[Any]) -> Iterator[None]:
    """Inside, all parameters are gathered, also those that megatron-core's DDP gathers during the training forward.

    A collective over the data-parallel ranks where overlap_param_gather is on, a no-op elsewhere.
    """
    late = [part for part in chain if getattr(part, "remove_forward_pre_hook_handles", None)]
    with ExitStack() as stack:
        for ddp in late:
            ddp.disable_forward_pre_hook()
            stack.callback(ddp.enable_forward_pre_hook)
        yield


@contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode; afterwards every module is in the mode that it was in, also where modes were mixed."""
    found = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(found[0][1])  # in `train`, some modules drop what they derived from weights
        for module, training in found:
            if module.training is not training:
                module.training = training


@contextmanager
def train_mode(chain: Sequence[Any], *, dropout: bool, auxiliary_losses: bool = True) -> Iterator[None]:
    """Train mode inside, each module's own mode afterwards; a model in train mode keeps its modules in eval mode.

    chain: see `wrapper_chain`; a wrapper's own mode says nothing, a new one is in train mode. dropout False: every
    dropout of modules and configs is 0. auxiliary_losses False: routers compute none.
    """
    root = chain[0]
    found = [(module, module.training) for module in root.modules()]
    try:
        if not chain[-1].training:
            root.train()
        with ExitStack() as changes:
            for holder in _holders(root):
                wanted: dict[str, Any] = {} if dropout else _no_dropout(holder)
                if not auxiliary_losses:
                    wanted |= _no_auxiliary_losses(holder)
                changes.enter_context(replaced(holder, **wanted))
            yield
    finally:
        for module, training in found:
            if module.training is not training:
                module.training = training


def dropout_of(model: torch.nn.Module) -> float:
    """The largest probability with which any module of the model drops."""
    return max((getattr(holder, name) for holder in _holders(model) for name in _no_dropout(holder)), default=0.0)


def auxiliary_losses_of(config: Any) -> list[str]:
    """The coefficients of a TransformerConfig with which routers add auxiliary losses."""
    if getattr(config, "num_moe_experts", None) is None:
        return []
    unused = ["moe_aux_loss_coeff"] if config.moe_router_load_balancing_type == "none" else []
    return [name for name in _no_auxiliary_losses(config) if name not in unused and getattr(config, name) != [0.0]]


def _no_dropout(holder: Any) -> dict[str, float]:
    """Probabilities that a torch dropout module, a layer, an attention or a config holds."""
    is_dropout = isinstance(holder, torch.nn.modules.dropout._DropoutNd)
    return {
        name: 0.0
        for name, value in vars(holder).items()
        if ("dropout" in name or (is_dropout and name == "p")) and type(value) in (int, float) and value > 0
    }


def _no_auxiliary_losses(holder: Any) -> dict[str, Any]:
    own = vars(holder)
    found: dict[str, Any] = {}
    if own.get("moe_aux_loss_coeff"):
        several = isinstance(own["moe_aux_loss_coeff"], list)
        found["moe_aux_loss_coeff"] = [0.0] * len(own["moe_aux_loss_coeff"]) if several else 0.0
    if own.get("moe_z_loss_coeff"):
        found["moe_z_loss_coeff"] = None
    return found


@contextmanager
def inference_flag(active: bool) -> Iterator[None]:
    """Set megatron-core's process-wide flag that an engine uses the model; a no-op before 0.19."""
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
    """Turn SPLIT and GRAPHS off in every module and config and remove graph managers; restore them and PADDING."""
    wanted, absent = SPLIT | GRAPHS, object()
    found = [
        (holder, name, vars(holder).get(name, absent))
        for holder in _holders(model)
        for name in (*wanted, *PADDING, GRAPH_MANAGER)
    ]
    # A manager that is a module also has a place in `_modules`, whose order a state dict shows.
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
