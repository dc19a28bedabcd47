"""Whether an engine's steps are captured as CUDA graphs, and why not."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_infer.config.graph_memory import GraphMemory
from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.config.inference import ConfigWarning, GraphCapture, InferenceConfig
from megatron_infer.config.resolved_sizes import ResolvedSizes
from megatron_infer.distributed.backends import backend_on
from megatron_infer.distributed.groups import ParallelGroups
from megatron_infer.distributed.stage_link import StageLink
from megatron_infer.kernels.base import PagedModel
from megatron_infer.kernels.select import BackendChoice, ChosenKernels
from megatron_infer.kernels.triton_scratch import lora_bytes
from megatron_infer.memory.device import Device
from megatron_infer.models.adopt import AdoptedModel
from megatron_infer.runner.batch import BatchBuilder
from megatron_infer.runner.cuda_graphs.captured_draw import CapturedDraw
from megatron_infer.runner.cuda_graphs.graph_pool import GraphPool, Recorder, make_recorder
from megatron_infer.runner.cuda_graphs.padded_step import PaddedStep, StepGraphs
from megatron_infer.runner.parallel.tensor_parallel_sampler import gather_rows
from megatron_infer.runner.sampling.sampler import Sampler

OPERATION = "CUDA graphs"


def step_graphs(
    adopted: AdoptedModel,
    model: PagedModel,
    config: InferenceConfig,
    sizes: ResolvedSizes,
    chosen: ChosenKernels,
    builder: BatchBuilder,
    sampler: Sampler,
    link: StageLink | None,
    groups: ParallelGroups,
) -> StepGraphs | None:
    """The graphs that the config asks for, or None; a row of the start-up table says which, or why not.

    model: what a step runs, `adopted` or what is around it.
    """
    device, num_exchanging = builder.device, groups.ep_size if groups.own_requests else 1
    if not config.num_cuda_graphs:
        if device.is_cuda:
            chosen.rows.append(BackendChoice(OPERATION, "none", {"graphs": "num_cuda_graphs=0"}))
        return None
    found = make_recorder(device)
    reason = found if isinstance(found, str) else None
    shapes: tuple[GraphShape, ...] = ()
    if not isinstance(found, str):
        reason = why_not(adopted, chosen, found)
        shapes = tuple(
            shape
            for shape in sizes.graph_shapes
            if not adopted.waits_for_device(chosen.ops, num_exchanging * shape.num_tokens)
            and (shape.is_decode_only or not groups.own_requests)
        )
        if reason is None and not shapes:
            reason = "the model's experts are chosen on the host for steps of these sizes"
    if link is not None:  # a stage sends padded or unpadded tensors: all stages must do the same
        digest = 0 if reason is not None else zlib.crc32(repr(shapes).encode())
        if len(set(link.compare([digest])[:, 0].tolist())) > 1:
            reason = reason or "another pipeline stage cannot be captured in the same shapes"
    if isinstance(found, str) or reason is not None:
        assert reason is not None
        chosen.rows.append(BackendChoice(OPERATION, "none", {"graphs": reason}))
        warnings.warn(
            f"num_cuda_graphs={config.num_cuda_graphs}: {reason}; every step runs eagerly (0 asks for that)",
            ConfigWarning,
            stacklevel=5,
        )
        return None
    if chosen.lora is not None and chosen.lora.graph_safe:
        shapes += tuple(replace(shape, has_adapters=True) for shape in shapes)
    at_start = config.cuda_graph_capture is GraphCapture.START
    when = "all at start and at a resume" if at_start else "each at its first use"
    chosen.rows.append(BackendChoice(OPERATION, f"{found.name} of {len(shapes)} shapes, {when}", {}))
    num_parts = 1 if adopted.tp_group is None else adopted.tp_group.size()
    memory = GraphMemory.sized(sizes, adopted.shape, tensor_parallel_size=num_parts, is_last=adopted.is_last_stage)
    gather = partial(gather_rows, group=adopted.tp_group) if num_parts > 1 else None
    draw = CapturedDraw(sampler, chosen.device_sampling, gather) if adopted.is_last_stage else None
    step = PaddedStep(
        model,
        shapes,
        builder=builder,
        draw=draw,
        max_drawn_rows=memory.max_drawn_rows,
        received_TD=None if adopted.is_first_stage else _room_for_received(adopted, shapes, device),
        hidden_size=adopted.shape.hidden_size,
        num_logits=adopted.shape.padded_vocab_size // num_parts,
        dtype=getattr(torch, adopted.shape.dtype),
        num_exchanging=num_exchanging,
    )
    pool = GraphPool(
        shapes,
        found,
        step,
        device=device,
        expected_bytes=lambda shape: memory.of(shape).live + _of_adapters(shape, config),
        expected_outputs=memory.output_bytes(shapes),
        all_ranks=partial(_all_ranks, adopted.groups(), device) if adopted.groups() else None,
        all_at_once=at_start,
    )
    return StepGraphs(step, pool, has_routing=adopted.routing is not None and adopted.routing.num_layers > 0)


def _of_adapters(shape: GraphShape, config: InferenceConfig) -> int:
    """Bytes of what adapters compute in between, one linear after the other."""
    if config.lora is None or not shape.has_adapters:
        return 0
    return lora_bytes(shape.num_tokens, 3 * config.lora.max_rank)


def _all_ranks(groups: Sequence[Any], device: Device, flag: bool) -> bool:
    """Whether `flag` is set on all members of the groups; waits for them."""
    for group in groups:
        agreed = torch.tensor([int(flag)], device=device.torch)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
        flag = bool(device.begin_read(agreed).wait()[0].item())
    return flag


def _room_for_received(adopted: AdoptedModel, shapes: Sequence[GraphShape], device: Device) -> Tensor:
    num_tokens = max(shape.num_tokens for shape in shapes)
    with torch.inference_mode():
        return torch.zeros(num_tokens, adopted.shape.hidden_size, device=device.torch)


def why_not(adopted: AdoptedModel, chosen: ChosenKernels, recorder: Recorder) -> str | None:
    """The first part of this engine that cannot be captured, and why; None: all can."""
    if adopted.num_chunks > 1:
        return "the model has several chunks on a rank, and a graph would run one of them"
    if adopted.specs and not chosen.attention.graph_safe:
        return f"attention {chosen.attention.name!r} decides on the host"
    if chosen.scan is not None and not chosen.scan.graph_safe:
        return f"the selective scan {chosen.scan.name!r} decides on the host"
    if (layer := adopted.foreign_layer()) is not None:
        return f"{layer} is a class of the user's own, and its device work is unknown"
    for group in (*adopted.groups(), *adopted.expert_groups):
        backend = backend_on(group, adopted.device.type)
        if recorder.collectives is not None and backend not in recorder.collectives:
            return f"{recorder.name} holds no collectives of {backend}"
    return None
