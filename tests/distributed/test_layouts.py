"""Four ranks in every mixed layout give what one process gives, whatever the scheduler does on the way."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_ranks as ranks
import pytest
import torch
from gloo_ranks import new_groups, run_on_ranks, stage_ends
from model_kinds import LATENT, PARALLEL, SPARSE

from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import RankFailure
from megatron_infer.models.specs import gpt_spec
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.inspect import run_one_by_one
from megatron_infer.testing.tiny import DELTA, EXPERTS, tiny_gpt, tiny_hybrid

SETTINGS = {"position_embedding_type": "rope", "init_method_std": 0.2, "max_sequence_length": 512}
SHARED = {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True}

NETS = DELTA | {"linear_attention_freq": [1, 0, 1, 0], "num_layers": 4}
"""A gated delta net, then gated attention, in each of two stages."""


def gpt(experts: dict[str, Any] | None = None, *, stage: int = 0, **sizes: Any) -> torch.nn.Module:
    def spec(config: Any) -> Any:
        return gpt_spec(config, pp_rank=stage)

    return tiny_gpt(spec=spec, **{"num_layers": 2} | SETTINGS | (experts or {}) | sizes)


MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "gpt": gpt,
    "moe": lambda **sizes: gpt(EXPERTS | SHARED, **sizes),
    "delta": lambda **sizes: gpt(NETS | EXPERTS | SHARED, **sizes),
    "hybrid": lambda stage=0, **sizes: tiny_hybrid("M*EM*-", moe_latent_size=24, **SETTINGS, **sizes),
    "latent": lambda **sizes: gpt(EXPERTS | LATENT, **sizes),
    "sparse": lambda **sizes: gpt(EXPERTS | SPARSE, **sizes),
    "parallel": lambda stage=0, **sizes: tiny_hybrid("P-P-", **SETTINGS | PARALLEL | sizes),
}
TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
LAYOUTS: dict[str, dict[str, int]] = {
    "TP2 x PP2": {TP: 2, PP: 2},
    "EP2 x PP2": {EP: 2, PP: 2},
    "TP2 x EP2": {TP: 2, EP: 2},
    "DP2 x TP2": {TP: 2},
}
BUSY = {
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "prefix_caching_eviction_policy": "lru",
    "prefix_caching_mamba_gb": 0.01,
    "max_tokens": 48,
    "pool_blocks": 14,
    "paused_blocks": 4,
    "preemption_mode": "swap",
    "swap_buffer_size_gb": 0.01,
}
"""A prompt takes some steps, and its requests want twice as many blocks as there are."""
OVERLAPPED = BUSY | {"overlap": True, "preemption_mode": "recompute"}
DRAFTED = OVERLAPPED | {"speculative": {"num_speculative_tokens": 3}}
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "TP2 x PP2": {
        "delta": OVERLAPPED,
        "gpt": BUSY,
        "moe": OVERLAPPED,
        "hybrid": BUSY | {"overlap": True},
        "latent": BUSY,
        "parallel": OVERLAPPED,
    },
    "EP2 x PP2": {"delta": BUSY, "moe": BUSY, "hybrid": DRAFTED, "sparse": DRAFTED},
    "TP2 x EP2": {"delta": BUSY, "moe": DRAFTED, "hybrid": BUSY, "latent": DRAFTED},
    "DP2 x TP2": {"gpt": OVERLAPPED | {"drafts_for_itself": True}, "moe": BUSY, "hybrid": BUSY | {"overlap": True}},
}
"""Each with EVENTS on the way."""
EVENTS: dict[int, Callable[[DynamicInferenceEngine], Any]] = {
    3: lambda engine: (engine.suspend("persist"), engine.resume()),
    5: lambda engine: (engine.pause("keep"), engine.unpause()),
    8: lambda engine: (engine.suspend("offload"), engine.resume()),
    11: lambda engine: (engine.pause("retract"), engine.unpause()),
    14: lambda engine: (engine.suspend("recompute"), engine.resume()),
    17: lambda engine: engine.reset_prefix_cache(),
}
SPLIT = ("TP2 x PP2", "DP2 x TP2")
"""Trained with sequence parallelism too. Not with latent attention: megatron-core's, of column-parallel linears, leaves
the other ranks' heads out of the gradient of the keys' rotary part."""
STEPS = 2
LEARNING_RATE = 0.1


def make_engine(model: torch.nn.Module, settings: dict[str, Any]) -> DynamicInferenceEngine:
    has_states = any(hasattr(layer, "mixer") for layer in model.decoder.layers)
    if not has_states and not model.config.linear_attention_freq:
        settings = {key: value for key, value in settings.items() if key != "prefix_caching_mamba_gb"}
    return ranks.make_engine(model, **settings)


def play(engine: DynamicInferenceEngine, work: list[Any], order: list[int], *, eventful: bool) -> dict[str, Any]:
    """The work in two batches, with every event on the way."""
    leads, done, step = engine.rank_group.groups.is_leader, [], 0
    late = order[2 * len(order) // 3 :]

    def add(part: list[int]) -> None:
        for index in part if leads else ():
            engine.add_request(*work[index], request_id=str(index), stream="final")

    add(order[: -len(late)])
    if leads and eventful:
        engine.add_request([9, 8, 7], work[0][1], request_id="gone")
    while engine.has_unfinished():
        if step == 6:
            add(late)
            if leads and eventful:
                engine.abort("gone")
        if eventful and step in EVENTS:
            EVENTS[step](engine)
        done += [output for output in engine.step() if output.finished and output.request_id != "gone"]
        step += 1
    assert step > max(EVENTS)
    ranks.assert_no_block_leaked(engine)
    return ranks.account(done)


def build(kind: str, sizes: dict[str, int], **settings: Any) -> torch.nn.Module:
    """A model of this rank, of the layout that the groups are in."""
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    ends = stage_ends(stage, sizes[PP]) if PP in sizes else {}
    return MODELS[kind](stage=stage, **sizes, **ends, **settings)


def check_counters(counters: dict[str, int], mode: str, where: Any) -> None:
    """What the settings are there for has happened."""
    assert counters["prefix_hits"] and counters["evicted"], (where, counters)
    if mode == "swap":
        assert counters["swapped_out"] and counters["swapped_in"], (where, counters)


def runs_of(part: int) -> list[tuple[str, str]]:
    """Layouts and models: every third one; those of all parts together are all."""
    return [(layout, kind) for layout in RUNS for kind in RUNS[layout]][part::NUM_PARTS]


def trained_in(part: int) -> list[str]:
    """Models that also train with split sequences in this part."""
    return [kind for kind in [*MODELS][part::NUM_PARTS] if kind not in ("latent", "delta", "sparse")]


def on_rank(rank: int, size: int, folder: Path, part: int) -> None:
    work = ranks.workload(WORK)
    for layout, sizes in LAYOUTS.items():
        new_groups(**sizes)
        for kind, settings in RUNS[layout].items():
            if (layout, kind) not in runs_of(part):
                continue
            weights, want = torch.load(folder / f"{kind}.pt")
            model = build(kind, sizes)
            ranks.take_part(model, weights)
            if layout == "DP2 x TP2":
                settings = settings | {"pool_blocks": 10, "paused_blocks": 1}  # a replica has half of the requests
            engine = make_engine(model, settings)
            groups = engine.rank_group.groups
            assert groups.engine_size * groups.dp_size == size, groups
            order = list(range(len(work)))[:: 1 - 2 * groups.dp_rank]  # another one on the second replica
            got = play(engine, work, order, eventful=True)
            ranks.assert_same_account(got, want, (layout, kind))
            check_counters(engine.stats().counters, settings["preemption_mode"], (layout, kind))
            if "drafts_for_itself" in settings:
                found = engine.spec_decode_metrics()
                assert found.num_drafted - found.num_accepted in (0, 4), found  # "gone" may be aborted in a step
                assert found.num_accepted > 50, found
            engine.rank_group.lockstep.close()
        if layout in SPLIT:
            check_split(rank, sizes, folder, trained_in(part))
    new_groups(**LAYOUTS[SPLIT[0]])
    check_one_sided_failure(rank)  # last: it breaks the groups


def check_one_sided_failure(rank: int) -> None:
    """A forward that raises on one rank of a stage: the others of the stage have waited for it in vain."""
    engine = ranks.make_engine(build("gpt", LAYOUTS[SPLIT[0]]), collective_timeout_s=10, check_invariants=False)
    if rank == 1:

        def raising(*args: Any) -> Any:
            raise MemoryError("no room")

        run_one_by_one(engine, {-1: SimpleNamespace(run=raising)})
    started = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 of the engine failed in .*: MemoryError: no room"):
        engine.generate([[5, 6, 7]], ranks.workload(1)[0][1])
    assert time.monotonic() - started < 30
    engine.rank_group.lockstep.close()


def check_split(rank: int, sizes: dict[str, int], folder: Path, kinds: list[str]) -> None:
    """Steps of sequence-parallel training, and generation between them."""
    for kind in kinds:
        model = build(kind, sizes, sequence_parallel=True)
        ranks.take_part(model, torch.load(folder / f"{kind}.pt")[0])
        got, want = rounds(model, train_stage if PP in sizes else train_whole), torch.load(folder / f"{kind}.rounds.pt")
        for mine, its in zip(got["losses"], want["losses"], strict=True):
            assert abs(mine - its) < 1e-5, (kind, got["losses"], want["losses"])
        if got["answers"][0]:
            for mine, its in zip(got["answers"], want["answers"], strict=True):
                ranks.assert_same_account(mine, its, kind, tolerance=2e-5)


def rounds(model: torch.nn.Module, train: Callable[[torch.nn.Module, int], float]) -> dict[str, Any]:
    """Generate and train by turns -> answers and losses. train: a step of the trainer."""
    split = model.config.sequence_parallel
    flags = flags_of(model)
    settings = {"enable_chunked_prefill": True, "max_tokens": 40, "enable_prefix_caching": True}
    if hasattr(model, "hybrid_override_pattern"):
        settings["prefix_caching_mamba_gb"] = 0.01
    engine = ranks.make_engine(model, **settings)
    leads = engine.rank_group.groups.is_leader
    found: dict[str, Any] = {"answers": [], "losses": []}
    for step in range(STEPS + 1):
        prompts, params = zip(*ranks.workload(5), strict=True)
        outputs = engine.generate(list(prompts), list(params)) if leads else engine.generate([])
        found["answers"].append(ranks.account(outputs))
        assert flags_of(model) == flags and model.config.sequence_parallel == split
        if step < STEPS:
            found["losses"].append(train(model, step))
    engine.rank_group.lockstep.close()
    return found


def flags_of(model: torch.nn.Module) -> dict[str, bool]:
    named = [*model.named_modules(), *model.named_parameters()]
    return {name: thing.sequence_parallel for name, thing in named if hasattr(thing, "sequence_parallel")}


def train_whole(model: torch.nn.Module, step: int) -> float:
    """A step of gradient descent on a model that is not in stages, as the trainer takes it -> its loss."""
    ids, positions = training_batch(step)
    widths: list[int] = []
    hook = model.decoder.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(len(kwargs.get("hidden_states", args[0] if args else None))),
        with_kwargs=True,
    )
    split = model.config.sequence_parallel
    model.train()
    with cpu_shim(1) if split else contextlib.nullcontext():
        loss = model(ids, positions, None, labels=ids.roll(-1, 1)).mean()
        loss.backward()
    hook.remove()
    assert widths == [6 if split else 12], "the tokens were not spread over the ranks"
    descend(model)
    return loss.item()


def training_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, positions)"""
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(step))
    return ids, torch.arange(12)[None].expand(2, -1)


def descend(model: torch.nn.Module) -> None:
    """Take a step down the gradients, and leave the model as inference wants it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if model.config.sequence_parallel and getattr(parameter, "sequence_parallel", False):
                torch.distributed.all_reduce(parameter.grad, group=model.pg_collection.tp)
            parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
            parameter.grad = None
    model.eval()


def train_stage(model: torch.nn.Module, step: int) -> float:
    """`train_whole` on a stage of two, with sequence parallelism -> the loss, on every rank."""
    ids, positions = training_batch(step)
    stages = torch.distributed.get_process_group_ranks(model.pg_collection.pp)
    received = torch.empty(len(ids[0]) // 2, len(ids), model.config.hidden_size)
    model.train()
    with cpu_shim(1):
        if model.pre_process:
            sent = model(ids, positions, None)
            assert sent.shape == received.shape, "the tokens were not spread over the ranks"
            torch.distributed.send(sent.detach(), stages[1])
            torch.distributed.recv(received, stages[1])
            sent.backward(received)
            loss = torch.zeros(1)
        else:
            torch.distributed.recv(received, stages[0])
            model.set_input_tensor(received.requires_grad_())
            loss = model(ids, positions, None, labels=ids.roll(-1, 1)).mean()
            loss.backward()
            torch.distributed.send(received.grad, stages[0])
    descend(model)
    loss = loss.detach().reshape(1).clone()
    torch.distributed.broadcast(loss, stages[1], group=model.pg_collection.pp)
    return loss.item()


WORK = 10
NUM_PARTS = 3


@pytest.mark.long
@pytest.mark.timeout(280)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_mixed_layouts_give_what_one_process_gives(tmp_path: Path, part: int) -> None:
    """GPT, experts and a hybrid, with chunked prefill, prefix hits, swaps or recomputed evictions, pauses, an abort and
    suspends in all modes, against one process with room for everything; and sequence-parallel training in between."""
    torch.set_num_threads(1)
    for kind, make in MODELS.items():
        model = make()
        weights = ranks.weights_of(model)
        work = ranks.workload(WORK)
        want = play(make_engine(model, {}), work, list(range(len(work))), eventful=False)
        torch.save((weights, want), tmp_path / f"{kind}.pt")
        if kind in trained_in(part):
            torch.save(rounds(model, train_whole), tmp_path / f"{kind}.rounds.pt")
    run_on_ranks(on_rank, 4, tmp_path, part)
