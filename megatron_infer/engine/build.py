"""Builds an engine's objects from a live model and a configuration, each finished before the next one uses it.

adopted model -> ranks -> sizes -> kernels -> cache, batch builder, sampler, graphs: runner     (ModelSetup)
-> context, scheduler -> weights -> executor, step loop -> files, intake, relay, suspend        (BuiltEngine)
"""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from megatron_infer.comm.groups import ParallelGroups
from megatron_infer.comm.lockstep import ALONE_S
from megatron_infer.comm.rank_group import RankGroup
from megatron_infer.comm.stage_link import StageLink
from megatron_infer.comm.startup_checks import agree_on_config
from megatron_infer.config.batching import BatchingLimits
from megatron_infer.config.capacity import GIB, host_places
from megatron_infer.config.inference import (
    BatchingPolicy,
    ConfigWarning,
    InferenceConfig,
    PreemptionMode,
    PrefixCachingEvictionPolicy,
    StepRanges,
)
from megatron_infer.config.model_shape import ModelShape
from megatron_infer.config.resolved_sizes import ResolvedSizes
from megatron_infer.config.sizing import add_graphs
from megatron_infer.config.stage_sizes import StageSizes, agree, stage_limits
from megatron_infer.context.adapter_slots import AdapterSlots
from megatron_infer.context.build import build_context
from megatron_infer.context.dynamic_context import DynamicInferenceContext
from megatron_infer.context.prefix_hash import root_of
from megatron_infer.cuda_graphs.padded_step import StepGraphs
from megatron_infer.durable.kv_restore import KVArchive
from megatron_infer.durable.snapshot import Archive
from megatron_infer.durable.snapshot_manager import SnapshotManager
from megatron_infer.engine.adapters import EngineAdapters
from megatron_infer.engine.admission_delay import AdmissionDelay
from megatron_infer.engine.build_drafts import make_drafts, make_synthetic, without_drafts
from megatron_infer.engine.build_graphs import captures_at_start, step_graphs
from megatron_infer.engine.chosen_config import ConfigOrOptions, choose_config, options_before_the_shape
from megatron_infer.engine.command_relay import CommandRelay, Outbox
from megatron_infer.engine.controls import EngineControls
from megatron_infer.engine.cost_meter import CostMeter, measured_costs
from megatron_infer.engine.draft_model import DraftModel, MTPDraft, make_draft
from megatron_infer.engine.executor import Executor
from megatron_infer.engine.logits_hooks import LogitsHooks
from megatron_infer.engine.profile import MethodRanges, StepProfiler, mark_always
from megatron_infer.engine.request_intake import RequestIntake
from megatron_infer.engine.sequence_replay import SequenceReplay
from megatron_infer.engine.states import Lifecycle
from megatron_infer.engine.stats import StatLogger
from megatron_infer.engine.step_cost_meter import StepCostMeter
from megatron_infer.engine.step_loop import StepLoop, StepObserver
from megatron_infer.engine.suspend import Suspension
from megatron_infer.errors import ConfigError
from megatron_infer.kernels import select
from megatron_infer.kernels.select import ATTENTION, SCAN, BackendChoice, ChosenKernels
from megatron_infer.lora.bank import AdapterBank
from megatron_infer.memory.device import Device
from megatron_infer.memory.regions.choose import make_region
from megatron_infer.memory.store import CacheStore
from megatron_infer.memory.store_layout import StoreLayout
from megatron_infer.models.adopt import AdoptedModel, adopt
from megatron_infer.models.exact_forward import inexact_part
from megatron_infer.parallel.stage_runner import StageRunner
from megatron_infer.parallel.tensor_parallel_sampler import for_group
from megatron_infer.requests.input_processor import InputProcessor, Limits, TextCodec
from megatron_infer.requests.output_processor import OutputProcessor
from megatron_infer.runner.batch import BatchBuilder
from megatron_infer.runner.model_runner import ModelRunner, Runner
from megatron_infer.runner.warm_up import launch_kernels
from megatron_infer.sampling.draw_groups import DeviceOps
from megatron_infer.sampling.row_params import RowParams
from megatron_infer.sampling.sampler import Sampler
from megatron_infer.sampling.token_masks import forbid
from megatron_infer.scheduler.drafts import DraftPlanner
from megatron_infer.scheduler.phases import Phased, Phases, PrefillFirst
from megatron_infer.scheduler.policy import CostModel
from megatron_infer.scheduler.running_set import EventHook
from megatron_infer.scheduler.scheduler import Scheduler
from megatron_infer.speculative.verify import Verifier
from megatron_infer.weights.derived import DerivedCache, DerivedCaches, packed_weights
from megatron_infer.weights.manager import WeightManager

log = logging.getLogger("megatron_infer")

NO_ROUTING = {
    "return_routing": "the model has no mixture-of-experts layers, or has layers of a class of its own, whose choice "
    "is not seen; leave it False"
}
TRITON = "triton"
"""Name of the backends that are this package's own Triton kernels."""
WARMED_UP = frozenset({TRITON, "flash_attn", "flash_attn_3"})
"""With other backends, which compile with nvcc or not at all, an engine runs no step before its first request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup:
    """One rank's model and what works on its tensors."""

    config: InferenceConfig
    """What the caller gave, with what it leaves to the device decided."""
    adopted: AdoptedModel
    rank_group: RankGroup
    device: Device
    agreed: StageSizes
    kernels: ChosenKernels
    runner: Runner
    model_runner: ModelRunner
    """`runner` itself, or what computes within its pipeline stage."""
    graphs: StepGraphs | None
    logits_hooks: LogitsHooks
    bank: AdapterBank | None
    """Adapters; None: the engine has none."""
    draft: DraftModel | MTPDraft | None
    """None: no model drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """The parts of a `DynamicInferenceEngine`."""

    setup: ModelSetup
    scheduler: Scheduler
    weights: WeightManager
    input_processor: InputProcessor
    output_processor: OutputProcessor
    loop: StepLoop
    stat_logger: StatLogger
    lifecycle: Lifecycle
    relay: CommandRelay
    intake: RequestIntake
    controls: EngineControls
    replay: SequenceReplay


def build_engine(
    model: torch.nn.Module,
    options: ConfigOrOptions,
    *,
    tokenizer: TextCodec | None,
    eos_ids: Sequence[int],
    device: str,
    name: str,
    owns: bool,
) -> BuiltEngine:
    """Every rank of the engine calls it. owns: see owns_weights of `DynamicInferenceEngine`."""
    setup = set_up_model(model, options, device=device, name=name, tokenizer=tokenizer)
    config = setup.config
    adopted, runner, rank_group = setup.adopted, setup.runner, setup.rank_group
    events = {"token": config.track_generated_token_events, "pause": config.track_paused_request_events}
    output_processor = OutputProcessor(tokenizer, token_events=events["token"], pause_events=events["pause"])
    context = make_context(config, setup.agreed)
    swaps = context.swap is not None
    costs = agreed_costs(setup) if swaps else None
    loaded = None if context.adapters is None else context.adapters.versions
    input_processor = make_input_processor(config, setup, tokenizer, eos_ids, loaded)
    grammars = input_processor.grammars
    drafts = make_drafts(config, adopted.shape, context, grammars, rank_group, has_tokenizer=tokenizer is not None)
    scheduler = make_scheduler(config, setup, context, costs=costs, drafts=drafts, on_event=output_processor.on_event)
    weights = make_weights(config, setup, scheduler, owns_weights=owns)
    warm_up(setup)
    capture_at_start(setup)
    executor = Executor(adopted.live, runner, scheduler, rank_group, checks_plans=config.check_invariants)
    outbox = Outbox(rank_group.lockstep)
    stat_logger = StatLogger(scheduler, output_processor, weights, setup.graphs, config, setup.agreed.sizes, drafts)
    observers: list[StepObserver] = [stat_logger]
    if swaps and rank_group.groups.is_leader:
        set_costs = scheduler.set_costs if rank_group.size == 1 else outbox.set_costs
        observers = [CostMeter(runner.store, set_costs), stat_logger]
    if config.ce_delay_ms:
        scheduler.queue.release(0)
        if rank_group.groups.is_leader:
            release = scheduler.queue.release if rank_group.size == 1 else outbox.release
            observers.append(AdmissionDelay(config.ce_delay_ms / 1000, scheduler.queue, release))
    if rank_group.groups.is_leader:
        observers.append(StepCostMeter(scheduler.set_step_costs if rank_group.size == 1 else outbox.set_step_costs))
    verifier = None if drafts is None else Verifier(drafts, make_synthetic(config))
    loop = StepLoop(scheduler, executor, weights, output_processor, grammars, config, observers, verifier)
    kv_dtype = config.kv_dtype_of(adopted.shape)
    drafting = {} if setup.draft is None else {"draft": setup.draft.adopted, "draft_shape": setup.draft.shape}
    dtypes = {"kv_dtype": kv_dtype, "weight_dtype": config.weight_dtype.value}
    kv_archive = KVArchive(adopted, runner.store, scheduler, weights, rank_group, **dtypes, **drafting)
    archive = Archive(input_processor, output_processor, scheduler, weights, kv_archive, rank_group)
    snapshots = SnapshotManager(archive, input_processor, output_processor, scheduler, rank_group)
    intake = RequestIntake(input_processor, output_processor, scheduler, loop, snapshots, outbox)
    relay = CommandRelay(
        rank_group.lockstep,
        outbox,
        loop,
        queue=intake.queue,
        set_costs=scheduler.set_costs,
        release=scheduler.queue.release,
        set_step_costs=scheduler.set_step_costs,
    )
    lifecycle, profiler = Lifecycle(), _make_profiler(setup, config, loop, scheduler)
    adapters = EngineAdapters(adopted, setup.bank, scheduler, loop, lifecycle, relay, rank_group)
    if config.lora is not None:
        adapters.load_all(config.lora.adapters)
    suspension = Suspension(loop, lifecycle, executor, scheduler, weights, setup.device, setup.graphs, config)
    return BuiltEngine(
        setup=setup,
        scheduler=scheduler,
        weights=weights,
        input_processor=input_processor,
        output_processor=output_processor,
        loop=loop,
        stat_logger=stat_logger,
        lifecycle=lifecycle,
        relay=relay,
        intake=intake,
        controls=EngineControls(
            loop, scheduler, weights, lifecycle, suspension, snapshots, relay, setup.logits_hooks, profiler, adapters
        ),
        replay=SequenceReplay(adopted, executor, scheduler, weights, config),
    )


def set_up_model(
    model: torch.nn.Module, options: ConfigOrOptions, *, device: str, name: str, tokenizer: TextCodec | None
) -> ModelSetup:
    """Adopt the model, link the ranks, size the cache and choose the kernels."""
    config = options_before_the_shape(options)
    adopted = adopt(model, name=name, vocab_size=config.vocab_size, state_config=config.mamba_inference_state_config)
    groups = ParallelGroups.of(config.pg_collection, adopted.live)
    rank_group = RankGroup(groups, timeout_s=config.collective_timeout_s)
    own_device = Device(device if device != "auto" else adopted.device)
    own_device.make_current()
    config = choose_config(options, adopted.shape, own_device, rank_group)
    if rank_group.size > 1:
        # A rank that has closed its engine has launched all of its last step: the others still read theirs.
        own_device.on_wait = partial(rank_group.check_alive, goodbyes=False)
    # before the cache takes what is left of the device's memory
    bank = lora = None
    if config.lora is not None:
        lora = select.choose_lora(own_device.torch, getattr(torch, adopted.shape.dtype))
        bank = AdapterBank(adopted, config.lora, lora[0])
    agree_on_config(config, rank_group.lockstep)
    draft = make_draft(config, adopted, own_device, tokenizer, kernels_for, rank_group)
    agreed = agreed_sizes(config, adopted.shape, own_device, rank_group, draft)
    if config.batch_invariant and (reason := inexact_part(adopted)) is not None:
        raise NotImplementedError(f"batch_invariant=True: {reason}; leave it False")
    kernels = kernels_for(adopted, config, own_device)
    if lora is not None:
        kernels = select.add_lora(kernels, *lora)
    hooks = LogitsHooks(config.request_metadata_types, own_device, adopted.tp_group)
    runner, model_runner, graphs = make_runner(
        adopted, config, agreed, kernels, own_device, rank_group, hooks, bank, draft
    )
    return ModelSetup(
        config=config,
        adopted=adopted,
        rank_group=rank_group,
        device=own_device,
        agreed=agreed,
        kernels=kernels,
        runner=runner,
        model_runner=model_runner,
        graphs=graphs,
        logits_hooks=hooks,
        bank=bank,
        draft=draft,
    )


def kernels_for(adopted: AdoptedModel, config: InferenceConfig, device: Device) -> ChosenKernels:
    """The backends that run a model, without adapters. Raises ConfigError for an option that is not possible."""
    shape = adopted.shape
    if config.weight_dtype != "auto" and (reason := adopted.unpackable()) is not None:
        raise ConfigError(f'weight_dtype={config.weight_dtype.value!r}: {reason}; leave it "auto"')
    asked = {
        "attention": config.attention_backend.value,
        "sampling": config.sampling_backend.value,
        "linear": config.linear_backend.value,
        "weight_dtype": config.weight_dtype.value,
        "fused_rope": config.use_flashinfer_fused_rope,
        "kv_dtype": getattr(torch, config.kv_dtype_of(shape)),
    }
    chosen = (select.choose_exact if config.batch_invariant else functools.partial(select.choose, **asked))(
        device.torch,
        getattr(torch, shape.dtype),
        specs=[*adopted.specs, *([] if adopted.heads is None else [adopted.heads.spec])],
        block_size=config.block_size_tokens,
        ssm_specs=adopted.ssm_specs,
        conv_dtype=None if shape.state is None else getattr(torch, shape.state.conv_dtype),
        ssm_dtype=None if shape.state is None else getattr(torch, shape.state.ssm_dtype),
    )
    if (fp8 := adopted.fp8) is not None:
        chosen.rows.append(BackendChoice("products in FP8", f"transformer_engine ({fp8.num_products} linears)", {}))
    if device.is_cuda:
        chosen.rows.append(BackendChoice("host work", "beside the device's" if config.overlap else "between steps", {}))
    return chosen


def num_micro_batches_of(groups: ParallelGroups, config: InferenceConfig) -> int:
    """Micro-batches in flight: one per pipeline stage, and one more where host work overlaps with all of them."""
    if groups.pp is None:
        return 1
    if config.max_steps_in_flight > 1:
        raise ConfigError(
            f"max_steps_in_flight is {config.max_steps_in_flight}, the {groups.pp_size} pipeline stages keep "
            f"{groups.pp_size + bool(config.overlap)} steps in flight by themselves; leave it at 1"
        )
    return groups.pp_size + bool(config.overlap)


def make_context(config: InferenceConfig, agreed: StageSizes) -> DynamicInferenceContext:
    """Which request holds which rows, blocks and state slots of the cache."""
    sizes, (num_host_slots, num_host_states) = agreed.sizes, agreed.host
    return build_context(
        num_blocks=sizes.num_usable_blocks,
        block_size=config.block_size_tokens,
        num_rows=sizes.max_requests,
        max_blocks_per_row=sizes.max_blocks_per_row,
        prefix_caching=config.enable_prefix_caching and make_synthetic(config) is None,
        keep_cached=config.prefix_caching_eviction_policy is PrefixCachingEvictionPolicy.LRU,
        num_host_slots=num_host_slots,
        recurrent=agreed.recurrent,
        num_cached_states=sizes.num_cached_states,
        num_host_states=num_host_states,
        num_draft_states=max_drafts_of(config) if agreed.recurrent else 0,
        adapters=None if config.lora is None else AdapterSlots(config.lora.max_loras),
    )


def make_scheduler(
    config: InferenceConfig,
    setup: ModelSetup,
    context: DynamicInferenceContext,
    *,
    costs: CostModel | None,
    drafts: DraftPlanner | None,
    on_event: EventHook,
) -> Scheduler:
    """costs: prices of evictions; None where requests are never swapped and the unit of the prices does not matter."""
    graphs, sizes, room = setup.graphs, setup.agreed.sizes, None
    limits = BatchingLimits.of(config, sizes)
    if graphs is not None and config.cuda_graph_all_prefills:
        room = graphs.pool.index.prefill_room
    return Scheduler(
        context,
        max_tokens=sizes.max_tokens,
        chunked_prefill=config.enable_chunked_prefill,
        paused_block_limit=sizes.paused_block_limit,
        root=root_of(model=setup.adopted.name),
        preemption=config.preemption_mode,
        costs=costs,
        num_micro_batches=num_micro_batches_of(setup.rank_group.groups, config),
        prefill_room=room,
        limits=limits,
        phases=_phases_of(config, limits),
        drafts=drafts,
        on_event=on_event,
    )


def max_drafts_of(config: InferenceConfig) -> int:
    """The most tokens drafted for a request in a step."""
    return 0 if config.speculative is None else config.speculative.num_speculative_tokens


def _make_profiler(setup: ModelSetup, config: InferenceConfig, loop: StepLoop, scheduler: Scheduler) -> StepProfiler:
    runner = setup.model_runner
    parts = [
        (scheduler, "schedule", "schedule"),
        (runner.builder, "build", "build"),
        (runner, "run_layers", "layers"),
        (runner, "sample", "sampling"),
        (scheduler, "commit", "commit"),
    ]
    has_threads, is_cuda = setup.runner is not runner, setup.device.is_cuda
    if config.step_ranges is not StepRanges.OFF:
        detailed = config.step_ranges is StepRanges.DETAILED
        if detailed and (layer := setup.adopted.foreign_layer()) is not None:
            why = f"{layer} is a class of the user's own, so megatron-core's decoder drives the layers"
            warnings.warn(f"step_ranges='detailed': {why}; one range is around all", ConfigWarning, stacklevel=4)
            detailed = False
        mark_always(parts, setup.device.range, adopted=setup.adopted if detailed else None)
        parts = parts if is_cuda else []  # torch.profiler has the ranges of every step already
    return StepProfiler(loop, MethodRanges(parts), is_cuda=is_cuda, has_threads=has_threads)


def _phases_of(config: InferenceConfig, limits: BatchingLimits) -> Phases | None:
    if config.batching is BatchingPolicy.PREFILL_FIRST:
        return PrefillFirst()
    if limits.min_decoding is not None:
        first = config.enable_prioritize_first_decode
        return Phased(min_decoding=limits.min_decoding, prioritizes_first_decode=first)
    return None


def agreed_costs(setup: ModelSetup) -> CostModel:
    """Costs of cache copies as the leader measures them: all ranks decide on evictions with the same prices."""
    rank_group = setup.rank_group
    measured = asdict(measured_costs(setup.runner.store)) if rank_group.groups.is_leader else None
    return CostModel(**rank_group.from_leader("prices of evictions", measured))


def make_input_processor(
    config: InferenceConfig,
    setup: ModelSetup,
    tokenizer: TextCodec | None,
    eos_ids: Sequence[int],
    adapters: Mapping[str, tuple[int, str]] | None,
) -> InputProcessor:
    """adapters: those loaded, live; None: the engine has none."""
    sizes, routing = setup.agreed.sizes, setup.runner.routing is not None
    limits = Limits(
        vocab_size=setup.adopted.shape.vocab_size,
        max_sequence_length=sizes.max_sequence_length,
        max_tokens_per_step=sizes.max_tokens,
        chunked_prefill=config.enable_chunked_prefill,
        block_size=config.block_size_tokens,
        num_usable_blocks=sizes.num_usable_blocks,
        unavailable={**({} if routing else NO_ROUTING), **without_drafts(config), **setup.adopted.unavailable},
        adapters=adapters,
        metadata_types=config.request_metadata_types,
    )
    seed = config.seed
    if config.offset_sampling_seed_by_dp_rank:
        seed = (seed + setup.rank_group.groups.dp_rank) % 2**64
    return InputProcessor(limits, tokenizer=tokenizer, eos_ids=eos_ids, seed=seed)


def make_weights(
    config: InferenceConfig, setup: ModelSetup, scheduler: Scheduler, *, owns_weights: bool
) -> WeightManager:
    """The weights, with everything that the engine itself derives from them, computed for the first time."""
    graphs = setup.graphs
    weights = WeightManager(
        setup.adopted,
        setup.kernels,
        setup.rank_group,
        owns_weights=owns_weights,
        can_offload=owns_weights and setup.device.is_cuda,
        verifies=config.check_invariants,
        set_root=scheduler.set_root,
        show_to_graphs=None if graphs is None else graphs.pool.see_weights,
    )
    is_own = owns_weights and (setup.draft is None or setup.draft.is_own)
    register_derived(weights.derived, setup, is_own=is_own)
    weights.derived.refresh()
    weights.update_graphs()
    return weights


def register_derived(derived: DerivedCaches, setup: ModelSetup, *, is_own: bool) -> None:
    """Register everything that the engine itself derives from the weights. is_own: see `packed_weights`."""
    adopted, packed, builder = setup.adopted, setup.kernels.packed, setup.runner.builder
    positions = setup.agreed.sizes.max_sequence_length
    derived.register(packed_weights("packed weights", packed, adopted, is_own=is_own))
    derived.register(
        DerivedCache(
            name="rotary tables",
            refresh=lambda: builder.rotations.set(adopted.rotary_table(positions)),
            differs=lambda: builder.rotations.differs(adopted.rotary_table(positions)),
        )
    )
    if setup.draft is not None:
        setup.draft.register_derived(derived)
    if adopted.ssm_specs:
        derived.register(
            DerivedCache(name="scan weights", refresh=adopted.refresh_scan_weights, differs=adopted.scan_weights_differ)
        )
    if adopted.fp8 is not None:
        fp8 = adopted.products_in_fp8  # others after modules were adopted again
        derived.register(
            DerivedCache(
                name="FP8 weights",
                refresh=lambda: fp8().refresh(),
                differs=lambda: fp8().differs(),
                release=lambda: fp8().release(),
                num_bytes=lambda: fp8().num_bytes,
            )
        )


def warm_up(setup: ModelSetup) -> None:
    """Compile kernels that are compiled at their first launch; packages that compile by themselves are left to it."""
    adopted, kernels, most = setup.adopted, setup.kernels, setup.agreed.sizes.max_tokens
    used = {kernels.ops.name} | {row.chosen for row in kernels.rows if row.operation.startswith((ATTENTION, SCAN))}
    if setup.device.is_cuda and TRITON in used and used <= WARMED_UP and adopted.foreign_layer() is None:
        started = time.perf_counter()
        launch_kernels(setup.runner, most, [count for count in adopted.token_counts(kernels.ops) if count <= most])
        log.info("kernels compiled and loaded in %.1f s", time.perf_counter() - started)


def capture_at_start(setup: ModelSetup) -> None:
    """Capture the graphs that are not left to their first use."""
    if setup.graphs is not None and captures_at_start(setup.config):
        with torch.inference_mode():
            setup.graphs.pool.capture_all(decode_only=True)


def host_places_of(config: InferenceConfig, sizes: ResolvedSizes) -> tuple[int, int]:
    """(blocks, recurrent states) of swapped requests that the host holds."""
    if config.preemption_mode is PreemptionMode.RECOMPUTE:
        return 0, 0
    return host_places(
        int(config.swap_buffer_size_gb * GIB),
        block_bytes=sizes.block_bytes,
        slot_bytes=sizes.state_slot_bytes,
        max_requests=sizes.max_requests,
        max_blocks_per_row=sizes.max_blocks_per_row,
    )


def agreed_sizes(
    config: InferenceConfig,
    shape: ModelShape,
    device: Device,
    rank_group: RankGroup,
    draft: DraftModel | MTPDraft | None,
) -> StageSizes:
    """Sizes that every rank of the engine can hold, equal on all of them."""
    lockstep = rank_group.lockstep
    available = min(lockstep.least("comparison of free memory", [device.available_bytes()]))
    with rank_group.together("sizing the cache"):
        size = rank_group.groups.tp_size
        drafting = draft.shape if isinstance(draft, DraftModel) else None
        sizes = config.resolve(shape, tensor_parallel_size=size, available_bytes=available, draft=drafting)
    limits = stage_limits(shape, sizes, host_places_of(config, sizes))
    agreed = agree(sizes, lockstep.least("comparison of sizes", limits))
    sizes = add_graphs(config, agreed.sizes, shape, tensor_parallel_size=rank_group.groups.tp_size)
    return replace(agreed, sizes=sizes)


def make_runner(
    adopted: AdoptedModel,
    config: InferenceConfig,
    agreed: StageSizes,
    chosen: ChosenKernels,
    device: Device,
    rank_group: RankGroup,
    hooks: LogitsHooks,
    bank: AdapterBank | None,
    draft: DraftModel | MTPDraft | None,
) -> tuple[Runner, ModelRunner, StepGraphs | None]:
    """Cache, batch builder, sampler and graphs -> (runner, what computes in it, graphs)."""
    shape, dtype, sizes = adopted.shape, getattr(torch, adopted.shape.dtype), agreed.sizes
    kv_dtype = getattr(torch, config.kv_dtype_of(shape))
    drafting = {}
    if draft is not None:
        drafting = {"draft": draft.shape, "draft_dtype": getattr(torch, config.kv_dtype_of(draft.shape))}
    layout = StoreLayout.of(shape, sizes, dtype=kv_dtype, layer_order=adopted.cache_order, **drafting)
    region = make_region(
        (layout.num_bytes,),
        torch.uint8,
        device.torch,
        static_pointers=config.static_kv_memory_pointers,
        unified_memory=config.unified_memory_level > 0,
        spill_bytes=int((config.paused_buffer_size_gb or 0) * GIB) if config.unified_memory_level else 0,
    )
    store = CacheStore(layout, region, agreed.host)
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
            stages, hidden_size=shape.hidden_size, device=device.torch, timeout_s=config.collective_timeout_s
        )
    graphs = step_graphs(adopted, model, config, sizes, chosen, builder, sampler, link)
    runner = ModelRunner(
        model,
        builder,
        for_group(sampler, adopted.tp_group),
        graphs=graphs,
        edit_logits=hooks,
        load_adapter=None if bank is None else bank.write,
        draft=None if drafter is None else drafter.run,
    )
    if link is None:
        return runner, runner, graphs
    alone_s = ALONE_S if adopted.groups() else None
    return StageRunner(runner, link, on_wait=rank_group.check_alive, alone_s=alone_s), runner, graphs
