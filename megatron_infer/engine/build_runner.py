"""Makes what runs an engine's steps on one rank, and prepares it before the first request."""

from __future__ import annotations

import logging
import time
from itertools import pairwise

import torch

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.stage_sizes import StageSizes
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.distributed.stage_link import StageLink
from megatron_infer.engine.build_drafts import max_drafts_of
from megatron_infer.engine.build_graphs import step_graphs
from megatron_infer.engine.draft_model import DraftModel
from megatron_infer.engine.logits_hooks import LogitsHooks
from megatron_infer.errors import ConfigError
from megatron_infer.kernels.select import ATTENTION, SCAN, ChosenKernels
from megatron_infer.memory.build_store import build_store
from megatron_infer.memory.device import Device
from megatron_infer.models.adopt import AdoptedModel
from megatron_infer.models.lora.bank import AdapterBank
from megatron_infer.runner.batch import BatchBuilder
from megatron_infer.runner.cuda_graphs.padded_step import StepGraphs
from megatron_infer.runner.model_runner import ModelRunner, Runner
from megatron_infer.runner.parallel.stage_runner import StageRunner
from megatron_infer.runner.parallel.tensor_parallel_sampler import for_group
from megatron_infer.runner.sampling.draw_groups import DeviceOps
from megatron_infer.runner.sampling.row_params import RowParams
from megatron_infer.runner.sampling.sampler import Sampler
from megatron_infer.runner.sampling.token_masks import forbid
from megatron_infer.runner.warm_up import launch_kernels

log = logging.getLogger("megatron_infer")

TRITON = "triton"
"""Name of the backends that are this package's own Triton kernels."""


def build_runner(
    adopted: AdoptedModel,
    config: InferenceConfig,
    agreed: StageSizes,
    chosen: ChosenKernels,
    device: Device,
    rank_group: RankGroup,
    hooks: LogitsHooks,
    bank: AdapterBank | None,
    draft: DraftModel | None,
) -> tuple[Runner, ModelRunner, StepGraphs | None]:
    """Cache, batch builder, sampler and graphs -> (runner, what computes in it, graphs).

    chosen: gets a row for the graphs. hooks: edit logits before draws. bank: None without adapters.
    """
    shape = adopted.shape
    sizes = agreed.sizes
    dtype = getattr(torch, shape.dtype)
    drafting = None if draft is None else draft.shape
    store = build_store(config, shape, agreed, device, layer_order=adopted.cache_order, draft=drafting)
    rotary = adopted.rotary_table(sizes.max_sequence_length)
    max_drafts = max_drafts_of(config)
    builder = BatchBuilder(device, sizes, store, chosen, rotary=rotary, dtype=dtype, max_drafts=max_drafts)
    masks = forbid if chosen.device_sampling is None else chosen.device_sampling.forbid
    params = RowParams(sizes.max_requests + 1, shape.vocab_size)
    drafter = None if draft is None else draft.drafter(device, sizes, store, builder.rows, params, chosen)
    model = adopted if drafter is None or drafter.target is None else drafter.target
    sampler = (Sampler if drafter is None else drafter.verifying_sampler)(
        params,
        padded_vocab_size=shape.padded_vocab_size,
        logprobs_mode=config.logprobs_mode,
        argmax=chosen.argmax,
        kernels=chosen.sampling,
        ops=DeviceOps(to_device=device.to_device, forbid=masks),
    )
    link: StageLink | None = None
    if (stages := rank_group.groups.pp) is not None:
        link = StageLink(
            stages,
            hidden_size=shape.hidden_size,
            device=device.torch,
            timeout_s=config.collective_timeout_s,
            num_chunks=adopted.num_chunks,
        )
        _check_order(adopted, link)
    elif adopted.num_chunks > 1:
        raise ConfigError(
            f"{adopted.num_chunks} model chunks and one pipeline stage; give the pipeline's groups (pg_collection)"
        )
    graphs = step_graphs(adopted, model, config, sizes, chosen, builder, sampler, link, rank_group.groups)
    runner = ModelRunner(
        model,
        builder,
        for_group(sampler, adopted.tp_group),
        graphs=graphs,
        edit_logits=hooks,
        load_adapter=None if bank is None else bank.write,
        draft=drafter,
        chooses_keys=adopted.chooses_keys,
    )
    if link is None:
        return runner, runner, graphs
    whole_stage_raises = rank_group.whole_stage_raises
    stage = StageRunner(runner, link, on_wait=rank_group.check_alive, whole_stage_raises=whole_stage_raises)
    return stage, runner, graphs


def _check_order(adopted: AdoptedModel, link: StageLink) -> None:
    """Raise ConfigError unless steps reach all layers in their order. Every stage calls it."""
    own = [number for span in adopted.layer_numbers() for number in span]
    spans = link.compare(own).reshape(link.num_stages, link.num_chunks, 2)
    around = [span for span in spans.swapaxes(0, 1).reshape(-1, 2).tolist() if span[0]]
    if any(before[1] >= after[0] for before, after in pairwise(around)):
        raise ConfigError(
            "the model's layers are not in their order around the pipeline stages: first and last of each are "
            f"{around}; build each chunk with its own vp_stage and rank"
        )


def warm_up(runner: Runner, adopted: AdoptedModel, kernels: ChosenKernels, device: Device, *, max_tokens: int) -> None:
    """Compile the kernels, where all are Triton's; with others an engine runs no step before its first request.

    max_tokens: of a step.
    """
    used = {kernels.ops.name} | {row.chosen for row in kernels.rows if row.operation.startswith((ATTENTION, SCAN))}
    is_whole = adopted.foreign_layer() is None and adopted.num_chunks == 1
    if device.is_cuda and used == {TRITON} and is_whole:
        started = time.perf_counter()
        launch_kernels(runner, max_tokens, [n for n in adopted.token_counts(kernels.ops) if n <= max_tokens])
        log.info("kernels compiled and loaded in %.1f s", time.perf_counter() - started)
