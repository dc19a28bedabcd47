"""What megatron-core's training step does around a forward: auxiliary losses, 1F1B over pipeline stages, gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_infer.errors import ConfigError, ModelError
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.utils.attributes import replaced

NOT_COVERED = {
    "calculate_per_token_loss": "gradients are then divided by a count of tokens that only the loss knows",
    "overlap_moe_expert_parallel_comm": "only megatron-core's combined schedule computes its weight gradients",
    "delay_wgrad_compute": "only megatron-core's combined schedule computes its weight gradients",
    "fine_grained_activation_offloading": "only megatron-core's schedules reset its buffers",
    "enable_autocast": "only megatron-core's schedules enter the autocast",
}
"""Fields of TransformerConfig that must be off where micro-batches do not run in megatron-core's own schedule."""


def uncovered_option(config: Any) -> str | None:
    """Which of NOT_COVERED is on, and why that is refused; None: none is."""
    return next(
        (f"config.{name}=True: {why}" for name, why in NOT_COVERED.items() if getattr(config, name, False)), None
    )


def replays_graphs(model: torch.nn.Module) -> bool:
    """Whether Transformer Engine's graphs were captured of the model's layers (`cuda_graph_impl`): in train mode they
    run in the place of the layers, and copy any micro-batch into inputs of the shape that they were captured with."""
    return any(getattr(module, "cuda_graphs", None) for module in model.modules())


@contextmanager
def cuda_error_explained(device: torch.device) -> Iterator[None]:
    """On a CPU, an error of the block that asks for CUDA becomes a ModelError that names the remedy."""
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        if device.type != "cpu" or not ("CUDA" in str(error) or "NVIDIA" in str(error)):
            raise
        raise ModelError(
            f"megatron-core asks for a CUDA device here ({error}). On a CPU: its own attention is replaced by "
            "megatron_infer.models.specs.with_inference(spec) when the model is built, or scored with "
            "batch_invariant=True in the InferenceConfig; its schedule over pipeline stages, sequence- and "
            "expert-parallel ranks, its optimizers and recomputation of activations run in tests within `with "
            "megatron_infer.testing.cpu_shim.cpu_shim():` around the session's calls"
        ) from error


def routes_around_padding(config: Any) -> bool:
    """Whether the model takes a padding_mask, so that its routers count real tokens only.

    With sequence parallelism megatron-core divides the mask on one pipeline stage only: padding counts there.
    """
    return getattr(config, "num_moe_experts", None) is not None and not config.sequence_parallel


# ------------------------------------------------------------------ auxiliary losses


def scale_auxiliary_losses(config: Any, num_micro_batches: int, device: torch.device) -> None:
    """Backward passes add the mean of the micro-batches' auxiliary losses, as in megatron-core's schedules.

    Context-parallel ranks have a part of the losses each, and DDP averages over them: they add that many times as much.
    The scale is one for the process, read in the backward pass, and stays (see `auxiliary_scale_kept`).
    """
    if getattr(config, "num_moe_experts", None) is None:
        return
    scale = torch.ones(1, device=device)
    if config.grad_scale_func is not None:
        scale = config.grad_scale_func(scale)
    mcore.MoEAuxLossAutoScaler.set_loss_scale(scale * config.context_parallel_size / num_micro_batches)


def auxiliary_scale_kept() -> AbstractContextManager[None]:
    """Afterwards backward passes scale auxiliary losses as before."""
    return replaced(mcore.MoEAuxLossAutoScaler, main_loss_backward_scale=None)


class AuxiliaryLosses:
    """What routers add to megatron-core's record of auxiliary losses from now on; the record itself stays."""

    def __init__(self) -> None:
        self._before = {name: values.clone() for name, (values, _) in mcore.auxiliary_losses().items()}

    def since(self, num_micro_batches: int) -> dict[str, Tensor]:
        """The mean over micro-batches of each loss, without its coefficient, by layer: fp32 [layers] on the CPU.

        Layers of other pipeline stages are zero.
        """
        found = {}
        for name, (values, group) in mcore.auxiliary_losses().items():
            added = values - self._before[name] if name in self._before else values.clone()
            if group is not None and group.size() > 1:
                dist.all_reduce(added, group=group)
            if bool(added.any()):
                found[name] = (added / num_micro_batches).float().cpu()
        return found


class DroppedTokens:
    """Counts what routers drop over the capacity of their experts; generation drops nothing.

    A pair is a token and one of the experts that its router chose.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        config = model.config
        self.factor: float | None = getattr(config, "moe_expert_capacity_factor", None)
        """None: nothing is dropped, and nothing counted."""
        self._pads = self.factor is not None and config.moe_pad_expert_input_to_capacity
        layers = [] if self.factor is None else [one for one in model.modules() if isinstance(one, mcore.MoELayer)]
        self._routers: list[Any] = [layer.router for layer in layers]
        self._parts: list[Tensor] = []

    @contextmanager
    def counted(self, padding_BS: Tensor | None) -> Iterator[None]:
        """One forward. padding_BS: True where a position is padding, which is not counted; None: nowhere."""
        hooks = [router.register_forward_hook(functools.partial(self._count, padding_BS)) for router in self._routers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _count(self, padding_BS: Tensor | None, router: Any, inputs: tuple[Any, ...], outputs: Any) -> None:
        probs_NE, map_NE = outputs[:2]
        # padded to the capacity, the map also has pairs that were not chosen, with a probability of 0
        kept_NE = probs_NE.detach() != 0 if self._pads else map_NE
        dropped_N = router.topk - kept_NE.sum(-1)
        if padding_BS is not None:
            local, (parts, part) = inputs[0].shape[0], mcore.sequence_parts(router)
            own_N = padding_BS.T[part * local : (part + 1) * local].flatten()
            assert len(own_N) * parts == padding_BS.numel(), f"{len(own_N)} positions of {padding_BS.numel()}"
            dropped_N = dropped_N.masked_fill(own_N, 0)
        self._parts.append(dropped_N.sum())

    def take(self) -> int:
        """Pairs of this rank since the last call."""
        parts, self._parts = self._parts, []
        return int(torch.stack(parts).sum()) if parts else 0

    def error(self, call: str, num_dropped: int) -> ConfigError:
        return ConfigError(
            f"{call}: routers dropped {num_dropped:,} pairs of a token and an expert over "
            f"config.moe_expert_capacity_factor={self.factor}; generation drops none, so these scores are of another "
            "policy than the rollouts'. Raise the factor, or set it to None"
        )


# ------------------------------------------------------------------ forward and backward


def without_gradient_sync(chain: Sequence[Any]) -> AbstractContextManager[None]:
    """Inside, a backward pass adds to the gradients of this rank only. chain: a model's wrappers, outermost first."""
    stack = ExitStack()
    for part in chain[:-1]:
        if hasattr(part, "no_sync"):
            stack.enter_context(part.no_sync())
    return stack


def starts_new_weights(model: Any) -> None:
    """Transformer Engine's linears cast their weights again in the next forward, as at a step's first micro-batch."""
    if hasattr(model, "set_is_first_microbatch"):
        model.set_is_first_microbatch()


def scaled_loss(config: Any, loss: Tensor) -> Tensor:
    """Multiplied by the optimizer's loss scale, as in megatron-core's backward pass."""
    return loss if config.grad_scale_func is None else config.grad_scale_func(loss)


def run_1f1b(
    chain: Sequence[Any],
    forward_step: Callable[..., Any],
    micro_batches: Sequence[Any],
    *,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
) -> None:
    """megatron-core's schedule over pipeline stages: forwards and backwards of all micro-batches.

    forward_step(iterator of micro_batches, model): as megatron-core takes it. shapes: (rows, positions) of each
    micro-batch; where they differ, stages exchange them. dtype: of what stages send. Gradients are reduced by
    `reduce_gradients`, not here.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = chain[-1].config
    roots = list(chain[0]) if isinstance(chain[0], torch.nn.ModuleList) else [chain[0]]
    batches = [iter(micro_batches) for _ in roots]
    changes: dict[str, Any] = {"finalize_model_grads_func": _keep_gradients, "pipeline_dtype": dtype}
    if len(set(shapes)) > 1:
        changes["variable_seq_lengths"] = True
    if config.no_sync_func is None:
        changes["no_sync_func"] = functools.partial(without_gradient_sync, chain)
    rows, positions = shapes[0]
    with replaced(config, **changes), cuda_error_explained(next(chain[-1].parameters()).device):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches if len(roots) > 1 else batches[0],
            model=roots,
            num_microbatches=len(micro_batches),
            seq_length=positions,
            micro_batch_size=rows,
            forward_only=False,
        )


def is_interleaved_count(config: Any, num_stages: int) -> Callable[[int], bool]:
    """Which numbers of micro-batches megatron-core's schedule over virtual pipeline stages runs."""
    group = config.microbatch_group_size_per_vp_stage or num_stages

    def is_count(number: int) -> bool:
        return number >= group and (number % group == 0 or number % group >= num_stages)

    return is_count


def _keep_gradients(*_: Any, **__: Any) -> None:
    """The schedule computes deferred weight gradients only where it has a function to finalize gradients."""


# ------------------------------------------------------------------ after the backward


def reduces_while_backward(chain: Sequence[Any]) -> bool:
    """Whether megatron-core's DDP reduces a bucket as soon as its gradients are there, once a step."""
    return any(getattr(getattr(part, "ddp_config", None), "overlap_grad_reduce", False) for part in chain)


def check_all_get_gradients(chain: Sequence[Any], call: str) -> None:
    """Raise ConfigError where DDP waits for the gradients of MTP layers, which scores do not depend on."""
    layers = getattr(chain[-1], "mtp", None)
    waits = "overlap_grad_reduce=True" if reduces_while_backward(chain) else ""
    for part in chain:
        if isinstance(part, torch.nn.parallel.DistributedDataParallel) and not part.find_unused_parameters:
            waits = "torch's DistributedDataParallel without find_unused_parameters=True"
    if waits and layers is not None and any(weight.requires_grad for weight in layers.parameters()):
        raise ConfigError(
            f"{call} of a model with MTP layers, which get no gradients from scores, with {waits}, which waits for "
            "them; change that, or freeze the layers before DDP is built: model.mtp.requires_grad_(False)"
        )


def check_sums_over(chain: Sequence[Any], shards: Sequence[Any], group: dist.ProcessGroup, call: str) -> None:
    """Raise ConfigError unless DDP adds up the gradients of these context-parallel ranks, each of which has a part.

    shards: groups over which FSDP does.
    """
    wanted, found = set(dist.get_process_group_ranks(group)), "no DDP around the model"
    ddps = [getattr(part, "dp_cp_group", None) or getattr(part, "process_group", None) for part in chain]
    for kind, over in [*(("DDP", one) for one in ddps if one is not None), *(("FSDP", one) for one in shards)]:
        found = f"{kind} over ranks {sorted(dist.get_process_group_ranks(over))}"
        if wanted <= set(dist.get_process_group_ranks(over)):
            return
    raise ConfigError(
        f"{call} over context-parallel ranks {sorted(wanted)}, of which each computes a part of the gradients, and "
        f"{found} adds them up; wrap the model in megatron-core's DistributedDataParallel, whose group dp_cp has them"
    )


def reduce_gradients(chain: Sequence[Any], *, num_ranks: int, moves_biases: bool = True) -> None:
    """What megatron-core does between backward and optimizer: gradients are complete, and equal on all ranks.

    Over data-parallel ranks by megatron-core's DDP (torch's has done it in the backward pass); norms of sequence
    parallelism, tied embeddings of pipeline stages, biases of routers. num_ranks: of one replica. moves_biases:
    those of routers follow the load of experts, where the model's config says so.
    """
    from megatron.core.distributed import finalize_model_grads

    config = chain[-1].config
    ddps = [part for part in chain[:-1] if hasattr(part, "finish_grad_sync")]
    if not ddps:
        if num_ranks == 1 and getattr(config, "num_moe_experts", None) is None:
            return
        ddps = [
            SimpleNamespace(
                module=root,
                ddp_config=SimpleNamespace(use_megatron_fsdp=False),
                finish_grad_sync=lambda force_all_reduce=False: None,
            )
            for root in (chain[0] if isinstance(chain[0], torch.nn.ModuleList) else [chain[0]])
        ]
    with replaced(config, **({} if moves_biases else {"moe_router_enable_expert_bias": False})):
        (config.finalize_model_grads_func or finalize_model_grads)(ddps, None)


def zero_gradients(chain: Sequence[Any], optimizer: Any) -> None:
    """Drop all gradients, those in the buffers of megatron-core's DDP too."""
    for part in chain:
        if hasattr(part, "zero_grad_buffer"):
            part.zero_grad_buffer()
    optimizer.zero_grad()
