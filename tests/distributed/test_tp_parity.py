"""Two ranks give the tokens and logprobs of one process, whatever the scheduler does: layers or experts are divided."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import engine_ranks as ranks
import pytest
import torch
from gloo_ranks import new_groups, run_on_ranks
from model_kinds import LATENT, make_model

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.models.extensions import Extensions
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt, tiny_hybrid

Engine = DynamicInferenceEngine
Act = Callable[[Engine, int], None]
"""What is done before a step of that number."""
CACHED = {"enable_prefix_caching": True, "prefix_caching_eviction_policy": "lru", "prefix_caching_mamba_gb": 0.01}
CHUNKED = {"enable_chunked_prefill": True, "max_tokens": 40}
TINY_POOL = {"pool_blocks": 14, "paused_blocks": 6}
SWAPPED = {**TINY_POOL, "preemption_mode": "swap", "swap_buffer_size_gb": 0.01}
SHAPE = {"position_embedding_type": "rope", "init_method_std": 0.2}
SHARED = {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True}
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "attention": lambda **sizes: tiny_gpt(**ranks.GPT, **sizes),
    "hybrid": lambda **sizes: tiny_hybrid("M*-M", **ranks.HYBRID, **sizes),
    "latent": lambda **sizes: tiny_gpt(**LATENT, **SHAPE, max_sequence_length=512, **sizes),
    "softcapped": lambda **sizes: make_model("softcapped", **sizes),
    "sparse": lambda **sizes: make_model("sparse", **sizes),
    "norms after": lambda **sizes: tiny_gpt(
        **ranks.GPT, extensions=Extensions(norms="after", whole_head_norms=True), **sizes
    ),
    "experts": lambda **sizes: tiny_gpt(**EXPERTS, **SHAPE, **SHARED, **sizes),
    "hybrid of experts": lambda **sizes: tiny_hybrid("ME*-ME", **SHAPE, **sizes),
}
TP2, EP2 = "TP2", "EP2"
LAYOUTS = {TP2: {"tensor_model_parallel_size": 2}, EP2: {"expert_model_parallel_size": 2}}
MOVED_EXPERTS = (2, 3)
"""Of four: on the second of two ranks where experts are whole."""


def nothing(engine: Engine, step: int) -> None:
    pass


def suspending(mode: str) -> Act:
    def act(engine: Engine, step: int) -> None:
        if step in (3, 9, 14):
            report = engine.suspend(mode)
            assert report.mode == mode
            engine.resume()

    return act


def updating(engine: Engine, step: int) -> None:
    """Weights change in place while requests run: once the engine is told, once it has to notice."""
    with torch.no_grad():
        if step in (4, 12):
            for parameter in engine.model.parameters():
                parameter.mul_(1.02)
        if step == 4:
            engine.refresh_weights()


def pausing(engine: Engine, step: int) -> None:
    if step in (2, 7):
        engine.pause("retract" if step == 7 else "keep")
        engine.unpause()
    if step == 9:
        engine.reset_prefix_cache()


def moving_experts(engine: Engine, step: int) -> None:
    """Some experts change, and the engine is not told: where experts are whole only one rank can see it."""
    if step not in (4, 12):
        return
    groups, changed = engine.rank_group.groups, 0
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            expert = ranks.expert_of(name)
            if expert is not None and expert + 2 * groups.ep_rank in MOVED_EXPERTS:
                parameter.mul_(1.2)
                changed += 1
    assert bool(changed) == (groups.ep_size == 1 or groups.ep_rank == 1)


class Scenario(NamedTuple):
    settings: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    act: Act = nothing
    layouts: tuple[str, ...] = (TP2, EP2)
    """Of a model with experts."""


PLAIN = {
    "plain": Scenario(),
    "chunked": Scenario(CHUNKED),
    "prefixes": Scenario({**CACHED, "max_requests": 4, "enable_chunked_prefill": True, "max_tokens": 64}),
    "evicting": Scenario(TINY_POOL),
    "swapping": Scenario(SWAPPED),
    "by price": Scenario(SWAPPED | {"preemption_mode": "auto"}),
    "overlapped": Scenario({"overlap": True, **TINY_POOL}),
    "persist": Scenario(act=suspending("persist")),
    "offload": Scenario({**CACHED, **TINY_POOL}, act=suspending("offload")),
    "recompute": Scenario({"overlap": True}, act=suspending("recompute")),
    "update": Scenario({"overlap": True}, act=updating),
    "pause": Scenario(CACHED, act=pausing),
    "sampled": Scenario(sampling={"temperature": 0.8, "top_k": 50, "top_p": 0.9, "n": 2}),
    "processed": Scenario({"logprobs_mode": "processed"}, {"temperature": 0.7, "repetition_penalty": 1.2}),
}
WITH_EXPERTS = {
    "prefixes": PLAIN["prefixes"],
    "evicting": Scenario({**TINY_POOL, **CACHED}, layouts=(EP2,)),
    "swapping, overlapped": Scenario(SWAPPED | {"overlap": True}),
    "persist": Scenario(CACHED, act=suspending("persist"), layouts=(EP2,)),
    "offload": PLAIN["offload"],
    "recompute": PLAIN["recompute"]._replace(layouts=(EP2,)),
    "pause": PLAIN["pause"]._replace(layouts=(EP2,)),
    "sampled": PLAIN["sampled"]._replace(settings=CHUNKED),
    "experts change": Scenario(CACHED | {"overlap": True}, act=moving_experts),
}
EACH = 7
PLAIN_PARTS = ((0,), (1, 3, 6), (2, 4, 5))
"""Which scenarios of PLAIN a part has: every EACH-th from these numbers on. The first two have each with some kind."""
QUICK = "a scenario of each kind"
"""Of the first part, which has the other ones."""
MARKS = [[pytest.mark.long], [pytest.mark.long], [pytest.mark.slow], [pytest.mark.long], [pytest.mark.long]]
"""Of the parts."""


def scenarios_of(part: int | str) -> dict[str, dict[str, Scenario]]:
    """Those of a part by kind of model, others for the other kind; of three kinds all parts together have all."""
    if part not in (QUICK, 0):
        return whole_part(int(part))
    quick, rest = {}, {}
    for kind, scenarios in whole_part(0).items():
        one = [*scenarios][0 if kind == "latent" else -1]  # no two kinds have the same one
        quick[kind] = {one: scenarios.pop(one)}
        rest |= {kind: scenarios} if scenarios else {}
    return quick if part == QUICK else rest


def whole_part(part: int) -> dict[str, dict[str, Scenario]]:
    if part >= len(PLAIN_PARTS):
        first, names = part - len(PLAIN_PARTS), [*WITH_EXPERTS]
        chosen = {"experts": names[first::2], "hybrid of experts": names[1 - first :: 2]}
        return {kind: {name: WITH_EXPERTS[name] for name in chosen[kind]} for kind in chosen}
    found: dict[str, dict[str, Scenario]] = {}
    for kind, shift in (("attention", 0), ("hybrid", 3), ("latent", 4)):
        names = [name for name in PLAIN if kind == "attention" or name != "processed"]
        if kind == "attention":  # the kinds beside it have some
            at = PLAIN_PARTS[part][0]
            found["softcapped"] = {names[at]: PLAIN[names[at]]}
            found["sparse"] = {names[at + 1]: PLAIN[names[at + 1]]}
            found["norms after"] = {names[at + 2]: PLAIN[names[at + 2]]}
        found[kind] = {name: PLAIN[name] for at in PLAIN_PARTS[part] for name in names[(at + shift) % EACH :: EACH]}
    return found


def play(model: torch.nn.Module, kind: str, scenario: Scenario) -> tuple[dict[str, Any], dict[str, int]]:
    """A scenario, step by step: the leader adds requests, the others follow -> (account, the engine's counters)."""
    settings = dict(scenario.settings)
    if "hybrid" not in kind:
        settings.pop("prefix_caching_mamba_gb", None)
    engine = ranks.make_engine(model, **settings)
    work, done, step = ranks.workload(**scenario.sampling), [], 0

    def add(part: list[tuple[list[int], SamplingParams]], first: int) -> None:
        for i, (prompt, params) in enumerate(part if engine.rank_group.groups.is_leader else (), start=first):
            engine.add_request(prompt, params, request_id=str(i), stream="final")

    add(work[:6], 0)
    while engine.has_unfinished():
        if step == 5:
            add(work[6:], 6)
        scenario.act(engine, step)
        done += [output for output in engine.step() if output.finished]
        step += 1
    ranks.assert_no_block_leaked(engine)
    counters = dict(engine.stats().counters)
    if "pool_blocks" in settings and scenario is not PLAIN["offload"]:
        assert counters["evicted"] or counters["paused"], "the pool was never short"
    if scenario.act is moving_experts:
        assert engine.weights.num_updates == 2, engine.weights.num_updates
    engine.rank_group.lockstep.close()
    return ranks.account(done), counters


def on_rank(rank: int, size: int, folder: Path, part: int | str) -> None:
    for layout, sizes in LAYOUTS.items():
        new_groups(**sizes)
        for kind, scenarios in scenarios_of(part).items():
            has_experts = "experts" in kind
            if layout != TP2 and not has_experts:
                continue
            model, weights = MODELS[kind](**sizes), torch.load(folder / f"{kind}.pt")
            for name, scenario in scenarios.items():
                if layout not in scenario.layouts and has_experts:
                    continue
                ranks.take_part(model, weights)
                got, counters = play(model, kind, scenario)
                want, expected_counters = torch.load(folder / f"{kind}.{name}.pt")
                ranks.assert_same_account(got, want, (layout, kind, name))
                assert counters == expected_counters or not has_experts, (layout, kind, name)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("part", [QUICK, *(pytest.param(n, marks=marks) for n, marks in enumerate(MARKS))])
def test_two_ranks_give_what_one_process_gives(tmp_path: Path, part: int | str) -> None:
    """Chunks, prefixes, pauses, evictions, swaps, overlap, suspends, and updates, also those that only one rank sees;
    check_invariants compares the ranks' plans in every step."""
    torch.set_num_threads(1)
    for kind, scenarios in scenarios_of(part).items():
        model = MODELS[kind]()
        weights = ranks.weights_of(model)
        torch.save(weights, tmp_path / f"{kind}.pt")
        for name, scenario in scenarios.items():
            ranks.take_part(model, weights)
            got, counters = play(model, kind, scenario)
            assert counters["prefix_hits"] or name != "prefixes", counters
            torch.save((got, counters), tmp_path / f"{kind}.{name}.pt")
    run_on_ranks(on_rank, 2, tmp_path, part)
