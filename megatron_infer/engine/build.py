"""Builds an engine's parts from a live model and a configuration, and keeps what ties them to the weights."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import cast

import torch

from megatron_infer.comm.groups import ParallelGroups
from megatron_infer.comm.lockstep import ALONE_S
from megatron_infer.comm.rank_group import RankGroup
from megatron_infer.comm.stage_link import StageLink
from megatron_infer.comm.startup_checks import agree_on_config
from megatron_infer.config.capacity import GIB, host_places
from megatron_infer.config.inference import InferenceConfig, PreemptionMode, PrefixCachingEvictionPolicy
from megatron_infer.config.model_shape import ModelShape
from megatron_infer.config.resolved_sizes import ResolvedSizes
from megatron_infer.config.sizing import add_graphs
from megatron_infer.config.stage_sizes import StageSizes, agree, stage_limits
from megatron_infer.context.build import build_context
from megatron_infer.context.dynamic_context import DynamicInferenceContext
from megatron_infer.context.prefix_hash import root_of
from megatron_infer.cuda_graphs.padded_step import StepGraphs
from megatron_infer.engine.build_graphs import step_graphs
from megatron_infer.engine.compile_layers import compile_layers
from megatron_infer.engine.cost_meter import CostMeter
from megatron_infer.engine.states import Transition
from megatron_infer.engine.stats import figures_of, held_blocks
from megatron_infer.kernels.quantised import memory_of
from megatron_infer.kernels.select import BackendChoice, ChosenKernels, choose, choose_exact
from megatron_infer.memory.device import Device
from megatron_infer.memory.regions.choose import make_region
from megatron_infer.memory.store import StateStore
from megatron_infer.memory.store_layout import StoreLayout
from megatron_infer.metrics.engine_meter import EngineMeter
from megatron_infer.metrics.engine_snapshot import StepSnapshot
from megatron_infer.metrics.wandb import WandbSink, check_writer
from megatron_infer.models.adopt import AdoptedModel, adopt
from megatron_infer.models.exact_forward import inexact_part
from megatron_infer.parallel.stage_runner import StageRunner
from megatron_infer.parallel.tensor_parallel_sampler import for_group
from megatron_infer.requests.input_processor import InputProcessor, Limits, TextCodec
from megatron_infer.runner.batch import BatchBuilder
from megatron_infer.runner.in_flight import InFlightStep
from megatron_infer.runner.model_runner import ModelRunner, Runner
from megatron_infer.sampling.draw_groups import DeviceOps
from megatron_infer.sampling.row_params import RowParams
from megatron_infer.sampling.sampler import Sampler
from megatron_infer.sampling.token_masks import forbid
from megatron_infer.scheduler.policy import CostModel
from megatron_infer.scheduler.scheduler import Scheduler
from megatron_infer.scheduler.step_plan import StepPlan
from megatron_infer.weights.change_guard import OffloadedWeights, WeightGuard, guarded_tensors
from megatron_infer.weights.derived import DerivedCache, DerivedCaches

log = logging.getLogger("megatron_infer")

TRITON = "triton"
"""What backends of this package's own kernels are called."""
Tick = Callable[[str], None]


def _no_tick(what: str) -> None:
    """For work without a deadline."""


class Assembly:
    """The parts of one engine. Weight versions count the changes it saw; 0 is what it was built with."""

    def __init__(
        self,
        model: torch.nn.Module,
        adopted: AdoptedModel,
        *,
        config: InferenceConfig,
        sizes: ResolvedSizes,
        chosen: ChosenKernels,
        device: Device,
        name: str,
        owns_weights: bool,
        rank_group: RankGroup,
    ) -> None:
        self.model, self.adopted, self.config, self.sizes, self.chosen = model, adopted, config, sizes, chosen
        self.name = name
        self.rank_group = rank_group
        self.device = device
        self.weight_version = 0
        self.num_updates = 0
        """Times weights were accepted: never the same for two different weights, as a version label may be."""
        self.guard = WeightGuard(self._weights, checksum=chosen.checksum)
        self.derived = DerivedCaches()
        self.offloaded = OffloadedWeights(self._weights, pinned=True) if owns_weights and device.is_cuda else None
        self.input_processor: InputProcessor
        self.context: DynamicInferenceContext
        self.scheduler: Scheduler
        self.runner: Runner
        self.speeds: CostMeter | None = None
        """Only where swapping is a choice, and on the leader; elsewhere the unit of the prices does not matter."""
        self.sink = WandbSink(config.metrics_writer) if config.logging_step_interval > 0 else None
        check_writer(config.metrics_writer)
        self._training: list[torch.nn.Module] = []

    @property
    def shape(self) -> ModelShape:
        return self.adopted.shape

    @property
    def graphs(self) -> StepGraphs | None:
        """The captured steps; None where every step runs as it is."""
        return cast("StepGraphs | None", self.runner.graphs)

    @property
    def kv_dtype(self) -> str:
        """What keys and values are kept in."""
        return self.config.kv_dtype_of(self.shape)

    def root(self) -> bytes:
        """Root of the prefix-hash chain: KV of another model or of earlier weights can never match.

        The count of updates is in it: a version label that is used a second time names other weights.
        """
        return root_of(model=self.name, weight_version=self.weight_version, update=self.num_updates)

    def forward(self, plan: StepPlan) -> InFlightStep:
        """Launch a step: what the context has journaled since the last one, then the forward."""
        flight = self.runner.forward(plan, self.context.take_table_writes())
        if self.context.swap is not None:
            blocks, states = self.context.swap.take_freed()
            if blocks or states:  # after the copies of the steps launched so far
                self.runner.then(partial(self._free_host, blocks, states))
        return flight

    def finish_moves(self) -> None:
        """Carry out copies between pool and host that no step has launched yet.

        When that fails it is unknown what has arrived: all requests are recomputed.
        """
        try:
            with self.rank_group.together("moving blocks"):
                self.runner.store.run_copies(self.context.take_copies())
        except BaseException:
            self.scheduler.requeue_all()
            raise
        finally:
            self.free_host_slots()

    def free_host_slots(self) -> None:
        """Give back host memory of evicted requests that came back or ended."""
        if self.context.swap is not None:
            self._free_host(*self.context.swap.take_freed())

    def _free_host(self, blocks: Iterable[int], states: Iterable[int]) -> None:
        self.runner.store.free_host_slots(blocks, states)

    def enter_inference(self) -> None:
        """Before a step: modules in eval mode, and no collective waits longer than it may."""
        self.rank_group.limit_collectives(True)
        if self.model.training:
            self._training = [module for module in self.model.modules() if module.training]
            self.model.eval()

    def leave_inference(self) -> None:
        """After the last step: the modules go back to the mode they were found in."""
        for module in self._training:
            module.training = True
        self._training = []
        self.rank_group.limit_collectives(False)

    # ------------------------------------------------------------------ weights

    def weights_differ(self) -> bool:
        """Whether weights changed since they were last accepted; their content is read only when nobody is running."""
        fresh = not self.scheduler.num_running and not self.scheduler.num_paused
        return self.guard.changed() if fresh else self.guard.moved()

    def accept_weights(self, version: int, tick: Tick = _no_tick, *, rebuilt: Mapping[int, int] | None = None) -> None:
        """The weights are `version` now: rebuild derived copies and retire cached KV; nothing may be in flight.

        When it fails, derived copies may be of old and new weights: the next step sees to them again.
        rebuilt: derived copies are of these weights already, whose checksums these are.
        """
        try:
            with self.rank_group.together("accepting the weights"):
                self.guard.invalidate()
                read = self.derived.refresh_held(tick) if rebuilt is None else rebuilt  # others wait for the resume
                tick("the weights' checksums")
                self.guard.accept(read)
        except BaseException:
            self.guard.invalidate()  # also where it went well: all ranks try again
            raise
        self.weight_version = version
        self.num_updates += 1
        self.show_weights_to_graphs()
        self.scheduler.set_root(self.root(), version=version)
        log.info("weights changed: version %d", version)
        if self.config.check_invariants:
            self.verify_derived()

    def show_weights_to_graphs(self) -> None:
        """Graphs read weights where these were when they were captured."""
        if self.graphs is not None:
            # Packed copies are made anew with every change.
            copies = self.num_updates if self.chosen.packed.num_bytes else 0
            quantised = () if self.adopted.fp8 is None else self.adopted.fp8.addresses
            self.graphs.pool.see_weights((self.guard.addresses, copies, quantised))

    def verify_derived(self) -> None:
        """Raise StaleCache if a copy is not of the weights as they are now."""
        with self.rank_group.together("verifying what is derived from the weights"):
            self.derived.verify()

    def catch_up_with_weights(self, tick: Tick = _no_tick) -> None:
        """Before running on after a standstill: see weights that changed meanwhile, rebuild what was released.

        All weights are read once: who packs them sums them up.
        """
        read: dict[int, int] | None = None
        if self.derived.is_released:
            with self.rank_group.together("rebuilding what is derived from the weights"):
                read = self.derived.refresh(tick)
        if self.rank_group.any_rank(self.guard.changed(read or {})):
            self.accept_weights(self.weight_version + 1, tick, rebuilt=read)
        elif read is not None:
            self.show_weights_to_graphs()

    def offload_weights(self, transition: Transition) -> None:
        """Move the live weights to the host if they are the engine's own and on a device; a trainer's stay."""
        if self.offloaded is not None and not self.offloaded.num_bytes:
            transition.undo("laying up the weights", partial(self.offloaded.reload, _no_tick))
            self.offloaded.offload(transition.tick)

    def reload_weights(self, transition: Transition) -> None:
        if self.offloaded is not None and self.offloaded.num_bytes:
            self.offloaded.reload(transition.tick)
            transition.undo("taking down the weights", partial(self.offloaded.offload, _no_tick))

    def offloaded_weight_bytes(self) -> int:
        """Live weights on the host, moved there by a suspend."""
        return 0 if self.offloaded is None else self.offloaded.num_bytes

    def weight_bytes(self) -> int:
        """What the live weights and the copies derived from them occupy."""
        parts = (part for tensor in self._weights() for part in memory_of(tensor))
        storages = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}
        return sum(storages.values()) + self.derived.num_bytes

    def _weights(self) -> Iterator[torch.Tensor]:
        yield from guarded_tensors(self.model)
        if self.adopted.fp8 is not None:
            yield from self.adopted.fp8.live_scales()

    def raise_version(self, version: int) -> None:
        """Count on from `version` if that is more, as loaded tokens have such versions. Nothing may be in flight."""
        if version > self.weight_version:
            self.weight_version = version
            self.scheduler.set_root(self.root(), version=version)

    def report(self, plan: StepPlan, seconds: float, *, num_requests: int, step: int, meter: EngineMeter) -> None:
        """Hand a step's figures to the metrics writer, every logging_step_interval steps."""
        if self.sink is None or step % self.config.logging_step_interval:
            return
        scheduler, sizes = self.scheduler, self.sizes
        figures = figures_of(self, meter, state="running", num_steps=step)
        num_free = figures.blocks_free + figures.blocks_cached
        self.sink.write(
            StepSnapshot(
                step=step,
                step_time_s=seconds,
                waiting_queue_len=figures.num_waiting,
                total_requests_dict_size=num_requests,
                total_blocks=sizes.num_usable_blocks,
                allocated_blocks=sizes.num_usable_blocks - num_free,
                active_unique_blocks=len(held_blocks(scheduler.running)),
                active_request_count=figures.num_running,
                paused_request_count=figures.num_paused,
                block_count_avail=num_free,
                active_token_count=plan.num_tokens,
                total_request_count=figures.num_running + figures.num_paused,
                max_requests=sizes.max_requests,
                prefix_cache_hits=figures.prefix_hits,
                prefix_cache_blocks_matched=figures.prefix_hit_tokens // self.config.block_size_tokens,
            ),
            figures,
        )


def assemble(
    model: torch.nn.Module,
    config: InferenceConfig,
    *,
    tokenizer: TextCodec | None,
    eos_ids: Sequence[int],
    device: str,
    name: str,
    owns_weights: bool,
    on_event: Callable[..., None],
) -> Assembly:
    """Adopt the model, size the pool, choose kernels, and connect everything."""
    adopted = adopt(model, name=name, vocab_size=config.vocab_size, state_config=config.mamba_inference_state_config)
    groups = ParallelGroups.of(config.pg_collection, adopted.live)
    rank_group = RankGroup(groups, timeout_s=config.collective_timeout_s)
    where = Device(device if device != "auto" else adopted.device)
    where.make_current()
    if rank_group.lockstep is not None:
        # Who has closed its engine has launched all of its last step: the others read theirs.
        where.on_wait = partial(rank_group.check_alive, goodbyes=False)
    shape = adopted.shape
    agreed = agreed_sizes(config, shape, where, rank_group)
    sizes = agreed.sizes
    if config.batch_invariant and (reason := inexact_part(adopted)) is not None:
        raise NotImplementedError(f"batch_invariant=True: {reason}; leave it False")
    chosen = kernels_for(adopted, config, where)
    if (fp8 := adopted.fp8) is not None:
        chosen.rows.append(BackendChoice("products in FP8", f"transformer_engine ({fp8.num_products} linears)", {}))
    compile_layers(adopted, config, chosen, any_rank=rank_group.any_rank)
    parts = Assembly(
        adopted.live,
        adopted,
        config=config,
        sizes=sizes,
        chosen=chosen,
        device=where,
        name=name,
        owns_weights=owns_weights,
        rank_group=rank_group,
    )
    parts.context = make_context(config, agreed)
    link = None
    if groups.pp is not None:
        link = StageLink(
            groups.pp, hidden_size=shape.hidden_size, device=where.torch, timeout_s=config.collective_timeout_s
        )
    parts.runner = make_runner(adopted, config, agreed, chosen, where, link, on_wait=rank_group.check_alive)
    register_derived(parts)
    warm_up(parts)
    graphs = parts.graphs
    parts.scheduler = Scheduler(
        parts.context,
        max_tokens=sizes.max_tokens,
        chunked_prefill=config.enable_chunked_prefill,
        paused_block_limit=sizes.paused_block_limit,
        root=parts.root(),
        preemption=config.preemption_mode,
        costs=measured_costs(parts),
        num_micro_batches=num_micro_batches_of(groups, config),
        prefill_room=graphs.pool.index.prefill_room if graphs is not None and config.cuda_graph_all_prefills else None,
        on_event=on_event,
    )
    limits = Limits(
        vocab_size=shape.vocab_size,
        max_sequence_length=sizes.max_sequence_length,
        max_tokens_per_step=sizes.max_tokens,
        chunked_prefill=config.enable_chunked_prefill,
        block_size=config.block_size_tokens,
        num_usable_blocks=sizes.num_usable_blocks,
        knows_routing=parts.runner.routing is not None,
    )
    seed = config.seed
    if config.offset_sampling_seed_by_dp_rank:
        seed = (seed + groups.dp_rank) % 2**64
    parts.input_processor = InputProcessor(limits, tokenizer=tokenizer, eos_ids=eos_ids, seed=seed)
    return parts


def measured_costs(parts: Assembly) -> CostModel | None:
    """Prices of evictions, the same on every rank; None where nothing can be swapped."""
    if parts.context.swap is None:
        return None
    if parts.rank_group.groups.is_leader:
        parts.speeds = CostMeter(parts.runner.store)
    prices = None if parts.speeds is None else asdict(parts.speeds.costs)
    return CostModel(**parts.rank_group.from_leader("prices of evictions", prices))


def kernels_for(adopted: AdoptedModel, config: InferenceConfig, where: Device) -> ChosenKernels:
    """The backends that run the model. Raises ConfigError where an option asks for what cannot."""
    shape = adopted.shape
    asked = {
        "attention": config.attention_backend.value,
        "sampling": config.sampling_backend.value,
        "fused_rope": config.use_flashinfer_fused_rope,
        "kv_dtype": getattr(torch, config.kv_dtype_of(shape)),
    }
    return (choose_exact if config.batch_invariant else functools.partial(choose, **asked))(
        where.torch,
        getattr(torch, shape.dtype),
        specs=adopted.specs,
        block_size=config.block_size_tokens,
        ssm_specs=adopted.ssm_specs,
        conv_dtype=None if shape.state is None else getattr(torch, shape.state.conv_dtype),
        ssm_dtype=None if shape.state is None else getattr(torch, shape.state.ssm_dtype),
    )


def num_micro_batches_of(groups: ParallelGroups, config: InferenceConfig) -> int:
    """Micro-batches in flight: one a pipeline stage, and one more where host work is to overlap with all of them."""
    return 1 if groups.pp is None else groups.pp_size + config.overlap


def make_context(config: InferenceConfig, agreed: StageSizes) -> DynamicInferenceContext:
    """Which sequence holds which rows, blocks and state slots."""
    sizes, (num_host_slots, num_host_states) = agreed.sizes, agreed.host
    return build_context(
        num_blocks=sizes.num_usable_blocks,
        block_size=config.block_size_tokens,
        num_rows=sizes.max_requests,
        max_blocks_per_row=sizes.max_blocks_per_row,
        prefix_caching=config.enable_prefix_caching,
        keep_cached=config.prefix_caching_eviction_policy is PrefixCachingEvictionPolicy.LRU,
        num_host_slots=num_host_slots,
        recurrent=agreed.recurrent,
        num_cached_states=sizes.num_snapshot_slots,
        num_host_states=num_host_states,
    )


def register_derived(parts: Assembly) -> None:
    """Everything the engine itself derives from the weights; computed here for the first time."""
    adopted, packed, builder = parts.adopted, parts.chosen.packed, parts.runner.builder
    positions = parts.sizes.max_sequence_length
    parts.derived.register(
        DerivedCache(
            name="packed weights",
            refresh=lambda: packed.pack(adopted.packable_weights()),
            differs=lambda: packed.differs(adopted.packable_weights()),
            release=packed.clear,
            num_bytes=lambda: packed.num_bytes,
        )
    )
    parts.derived.register(
        DerivedCache(
            name="rotary tables",
            refresh=lambda: builder.rotations.set(adopted.rotary_table(positions)),
            differs=lambda: builder.rotations.differs(adopted.rotary_table(positions)),
        )
    )
    if adopted.ssm_specs:
        parts.derived.register(
            DerivedCache(name="scan weights", refresh=adopted.refresh_scan_weights, differs=adopted.scan_weights_differ)
        )
    if (fp8 := adopted.fp8) is not None:
        parts.derived.register(
            DerivedCache(
                name="FP8 weights",
                refresh=fp8.refresh,
                differs=fp8.differs,
                release=fp8.release,
                num_bytes=lambda: fp8.num_bytes,
            )
        )
    parts.derived.refresh()
    parts.show_weights_to_graphs()


def warm_up(parts: Assembly) -> None:
    """See kernels compiled that are compiled when they are first launched; those of packages are their own affair."""
    adopted, chosen = parts.adopted, parts.chosen
    used = [chosen.ops.name]
    used += [chosen.attention.name] if adopted.specs else []
    used += [] if chosen.scan is None else [chosen.scan.name]
    if parts.device.is_cuda and set(used) == {TRITON} and adopted.foreign_layer() is None:
        started = time.perf_counter()
        most = parts.sizes.max_tokens
        parts.runner.warm_up(most, [count for count in adopted.token_counts(chosen.ops) if count <= most])
        log.info("kernels compiled and loaded in %.1f s", time.perf_counter() - started)


def host_places_of(config: InferenceConfig, sizes: ResolvedSizes) -> tuple[int, int]:
    """(blocks, recurrent states) the host holds of evicted requests."""
    if config.preemption_mode is PreemptionMode.RECOMPUTE:
        return 0, 0
    return host_places(
        int(config.swap_buffer_size_gb * GIB),
        block_bytes=sizes.block_bytes,
        slot_bytes=sizes.state_slot_bytes,
        max_requests=sizes.max_requests,
        max_blocks_per_row=sizes.max_blocks_per_row,
    )


def agreed_sizes(config: InferenceConfig, shape: ModelShape, where: Device, rank_group: RankGroup) -> StageSizes:
    """Sizes that every rank of the engine can hold, equal on all of them."""
    available, lockstep = where.available_bytes(), rank_group.lockstep
    if lockstep is not None:
        agree_on_config(config, lockstep)
        available = min(lockstep.least("comparison of free memory", [available]))
    with rank_group.together("sizing the cache"):
        sizes = config.resolve(shape, tensor_parallel_size=rank_group.groups.tp_size, available_bytes=available)
    limits = stage_limits(shape, sizes, host_places_of(config, sizes))
    agreed = agree(shape, sizes, limits if lockstep is None else lockstep.least("comparison of sizes", limits))
    sizes = add_graphs(config, agreed.sizes, shape, tensor_parallel_size=rank_group.groups.tp_size)
    return replace(agreed, sizes=sizes)


def make_runner(
    adopted: AdoptedModel,
    config: InferenceConfig,
    agreed: StageSizes,
    chosen: ChosenKernels,
    where: Device,
    link: StageLink | None,
    *,
    on_wait: Callable[[], None],
) -> Runner:
    """The device side: cache, batch builder, sampler."""
    shape, dtype, sizes = adopted.shape, getattr(torch, adopted.shape.dtype), agreed.sizes
    kv_dtype = getattr(torch, config.kv_dtype_of(shape))
    layout = StoreLayout.of(shape, sizes, dtype=kv_dtype, layer_order=adopted.cache_order)
    region = make_region(
        (layout.num_bytes,),
        torch.uint8,
        where.torch,
        static_pointers=config.static_kv_memory_pointers,
        unified_memory=config.unified_memory_level > 0,
        spill_bytes=int((config.paused_buffer_size_gb or 0) * GIB) if config.unified_memory_level else 0,
    )
    store = StateStore(layout, region, agreed.host)
    rotary = adopted.rotary_table(sizes.max_sequence_length)
    builder = BatchBuilder(where, sizes, store, chosen, rotary=rotary, dtype=dtype)
    masks = forbid if chosen.device_sampling is None else chosen.device_sampling.forbid
    sampler = Sampler(
        RowParams(sizes.max_requests + 1, shape.vocab_size),
        padded_vocab_size=shape.padded_vocab_size,
        logprobs_mode=config.logprobs_mode,
        argmax=chosen.argmax,
        kernels=chosen.sampling,
        search=chosen.search,
        ops=DeviceOps(to_device=where.to_device, forbid=masks),
    )
    runner = ModelRunner(
        adopted,
        store=store,
        builder=builder,
        sampler=for_group(sampler, adopted.tp_group),
        device=where,
        graphs=step_graphs(adopted, config, sizes, chosen, where, builder, store, sampler, link),
    )
    if link is None:
        return runner
    return StageRunner(runner, link, on_wait=on_wait, alone_s=ALONE_S if adopted.groups() else None)
