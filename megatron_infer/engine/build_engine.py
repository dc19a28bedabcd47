"""Builds an engine's objects from a live model and a configuration, each finished before the next one uses it.

adopted model -> ranks -> sizes -> kernels -> cache, batch builder, sampler, graphs: runner     (ModelSetup)
-> context, scheduler -> weights -> executor, step loop -> files, intake, relay, suspend        (BuiltEngine)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.stage_sizes import StageSizes
from megatron_infer.distributed.groups import ParallelGroups, num_micro_batches_of
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.distributed.startup_checks import agree_on_config, agree_on_sizes
from megatron_infer.engine.adapters import EngineAdapters
from megatron_infer.engine.admission_delay import AdmissionDelay
from megatron_infer.engine.build_drafts import make_drafts, make_synthetic, max_drafts_of, without_drafts
from megatron_infer.engine.build_runner import build_runner, warm_up
from megatron_infer.engine.chosen_config import (
    ConfigOrOptions,
    choose_config,
    options_before_the_shape,
)
from megatron_infer.engine.command_relay import CommandRelay, Outbox
from megatron_infer.engine.controls import EngineControls
from megatron_infer.engine.cost_meter import CostMeter, agreed_costs
from megatron_infer.engine.dp_attention import has_own_requests
from megatron_infer.engine.draft_model import DraftModel, make_draft
from megatron_infer.engine.durable.kv_restore import KVArchive
from megatron_infer.engine.durable.snapshot import Archive
from megatron_infer.engine.durable.snapshot_manager import SnapshotManager
from megatron_infer.engine.executor import Executor
from megatron_infer.engine.logits_hooks import LogitsHooks
from megatron_infer.engine.profile import make_profiler
from megatron_infer.engine.request_intake import RequestIntake
from megatron_infer.engine.requests.input_processor import InputProcessor, TextCodec
from megatron_infer.engine.requests.output_processor import OutputProcessor
from megatron_infer.engine.states import Lifecycle
from megatron_infer.engine.stats import StatLogger
from megatron_infer.engine.step_cost_meter import StepCostMeter
from megatron_infer.engine.step_loop import StepLoop, StepObserver
from megatron_infer.engine.suspend import Suspension
from megatron_infer.engine.teacher_forcing import TeacherForcing
from megatron_infer.kernels import select
from megatron_infer.kernels.select import ChosenKernels
from megatron_infer.memory.device import Device
from megatron_infer.models.adopt import AdoptedModel, adopt
from megatron_infer.models.exact_forward import inexact_part
from megatron_infer.models.kernel_choice import kernels_for
from megatron_infer.models.lora.bank import AdapterBank
from megatron_infer.models.weights.derived import DerivedCache, DerivedCaches, fp8_weights, packed_weights, scan_weights
from megatron_infer.models.weights.manager import WeightManager
from megatron_infer.runner.cuda_graphs.padded_step import StepGraphs
from megatron_infer.runner.model_runner import ModelRunner, Runner
from megatron_infer.runner.speculative.verify import Verifier
from megatron_infer.scheduler.build_scheduler import build_scheduler
from megatron_infer.scheduler.context.build_context import context_for
from megatron_infer.scheduler.scheduler import Scheduler

log = logging.getLogger("megatron_infer")

NO_ROUTING = {
    "return_routing": "the model has no mixture-of-experts layers, or has layers of a class of its own, whose choice "
    "is not seen; leave it False"
}


def _without_choices(setup: ModelSetup) -> dict[str, str]:
    """Why no request can return the keys that indexers choose; {}: requests can."""
    if setup.rank_group.groups.pp_size > 1:
        reason = "pipeline stages do not pass on which keys their layers' indexers chose"
    elif not setup.adopted.chooses_keys:
        reason = "the model has no layers with an indexer (sparse attention)"
    else:
        return {}
    return {"return_index_choices": f"{reason}; leave it False"}


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
    draft: DraftModel | None
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
    replay: TeacherForcing


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
    synthetic = make_synthetic(config)
    context = context_for(config, setup.agreed, publishes=synthetic is None, num_draft_states=max_drafts_of(config))
    costs = None if context.swap is None else agreed_costs(runner.store, rank_group)
    loaded = None if context.adapters is None else context.adapters.versions
    input_processor = make_input_processor(config, setup, tokenizer, eos_ids, loaded)
    grammars = input_processor.grammars
    drafts = make_drafts(config, adopted.shape, context, grammars, rank_group, has_tokenizer=tokenizer is not None)
    graphs = setup.graphs
    scheduler = build_scheduler(
        config,
        context,
        setup.agreed.sizes,
        model=adopted.name,
        num_micro_batches=num_micro_batches_of(rank_group.groups, config),
        prefill_room=graphs.pool.index.prefill_room if graphs is not None and config.cuda_graph_all_prefills else None,
        costs=costs,
        drafts=drafts,
        on_event=output_processor.on_event,
    )
    weights = make_weights(config, setup, scheduler, owns_weights=owns)
    warm_up(runner, adopted, setup.kernels, setup.device, max_tokens=setup.agreed.sizes.max_tokens)
    if graphs is not None:
        graphs.pool.capture_missing()
    executor = Executor(adopted.live, runner, scheduler, rank_group, checks_plans=config.check_invariants)
    outbox = Outbox(rank_group.groups)
    stat_logger = StatLogger(scheduler, output_processor, weights, setup.graphs, config, setup.agreed.sizes, drafts)
    observers = _observers(setup, scheduler, stat_logger, outbox)
    verifier = None if drafts is None else Verifier(drafts, synthetic)
    loop = StepLoop(scheduler, executor, weights, output_processor, grammars, config, observers, verifier)
    kv_dtype = config.kv_dtype_of(adopted.shape)
    drafting = {} if setup.draft is None else {"draft": setup.draft.adopted, "draft_shape": setup.draft.shape}
    dtypes = {"kv_dtype": kv_dtype, "weight_dtype": config.weight_dtype.value}
    kv_archive = KVArchive(adopted, runner.store, scheduler, weights, rank_group, **dtypes, **drafting)
    archive = Archive(input_processor, output_processor, scheduler, weights, kv_archive, rank_group)
    snapshots = SnapshotManager(archive, input_processor, output_processor, scheduler, rank_group)
    rank = rank_group.sharing.rank
    intake = RequestIntake(input_processor, output_processor, scheduler, loop, snapshots, outbox, rank)
    executed = {"queue": intake.queue, "continue_from": intake.continue_from, "submit": intake.submit}
    relay = CommandRelay(rank_group, outbox, loop, scheduler, **executed)
    lifecycle = Lifecycle()
    model_runner = setup.model_runner
    profiler = make_profiler(
        config,
        loop,
        scheduler,
        model_runner,
        adopted=adopted,
        device=setup.device,
        has_threads=runner is not model_runner,
    )
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
        replay=TeacherForcing(adopted, executor, scheduler, weights, config),
    )


def _observers(setup: ModelSetup, scheduler: Scheduler, stat_logger: StatLogger, outbox: Outbox) -> list[StepObserver]:
    """What hears of each step. The leader of several ranks sends what it measures to all of them through the outbox."""
    config = setup.config
    is_leader = setup.rank_group.groups.is_leader
    is_alone = not setup.rank_group.groups.shares_requests
    observers: list[StepObserver] = [stat_logger]
    if is_leader:
        set_costs = scheduler.set_costs if is_alone else outbox.set_costs
        observers = [CostMeter(setup.runner.store, set_costs), stat_logger]
    if config.ce_delay_ms:
        scheduler.queue.release(0)
        if is_leader:
            release = scheduler.queue.release if is_alone else outbox.release
            observers.append(AdmissionDelay(config.ce_delay_ms / 1000, scheduler.queue, release))
    if is_leader:
        observers.append(StepCostMeter(scheduler.set_step_costs if is_alone else outbox.set_step_costs))
    return observers


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
    exact = getattr(getattr(adopted.live, "config", None), "batch_invariant_mode", False)
    config = choose_config(options, adopted.shape, own_device, rank_group, is_trained_exact=exact)
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
    own_layers = None if draft is None else draft.own_layers
    available = own_device.available_bytes()
    agreed = agree_on_sizes(config, adopted.shape, rank_group, available_bytes=available, draft=own_layers)
    if has_own_requests(config, adopted, draft, rank_group, max_requests=agreed.sizes.max_requests):
        rank_group.divide_requests(ParallelGroups.of(config.pg_collection, adopted.live, own_requests=True))
    if config.batch_invariant:
        reason = rank_group.first_text("whether the model can be exact", inexact_part(adopted))
        if reason is not None:
            whose = "the model's config.batch_invariant_mode" if exact else "batch_invariant"
            raise NotImplementedError(f"{whose}=True: {reason}; leave it False")
    kernels = kernels_for(adopted, config, own_device)
    if lora is not None:
        kernels = select.add_lora(kernels, *lora)
    hooks = LogitsHooks(config.request_metadata_types, own_device, adopted.tp_group)
    runner, model_runner, graphs = build_runner(
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


def make_input_processor(
    config: InferenceConfig,
    setup: ModelSetup,
    tokenizer: TextCodec | None,
    eos_ids: Sequence[int],
    adapters: Mapping[str, tuple[int, str]] | None,
) -> InputProcessor:
    """adapters: those loaded, live; None: the engine has none."""
    has_routing, seed = setup.runner.routing is not None, config.seed
    if config.offset_sampling_seed_by_dp_rank:
        seed = (seed + setup.rank_group.groups.dp_rank) % 2**64
    return InputProcessor(
        config,
        setup.agreed.sizes,
        vocab_size=setup.adopted.shape.vocab_size,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        seed=seed,
        unavailable={
            **({} if has_routing else NO_ROUTING),
            **_without_choices(setup),
            **without_drafts(config),
            **setup.adopted.unavailable,
        },
        adapters=adapters,
    )


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
        derived.register(scan_weights(adopted))
    if adopted.fp8 is not None:
        derived.register(fp8_weights(adopted))
