"""Experts spread over two ranks, or split over them, give what one process gives, whatever the scheduler does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_ranks as ranks
import pytest
import torch
from gloo_ranks import new_groups, run_on_ranks
from test_adopt_tensor_parallel import share
from test_tp_parity import CACHED, TOLERANCE, play, settings_of

from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt, tiny_hybrid

SETTINGS = {"position_embedding_type": "rope", "init_method_std": 0.2}
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "attention": lambda **sizes: tiny_gpt(
        **EXPERTS, **SETTINGS, moe_shared_expert_intermediate_size=40, moe_shared_expert_gate=True, **sizes
    ),
    "hybrid": lambda **sizes: tiny_hybrid("ME*-ME", **SETTINGS, **sizes),
}
LAYOUTS = {
    "whole experts": {"expert_model_parallel_size": 2},
    "parts of experts": {"tensor_model_parallel_size": 2},
}
MOVED_EXPERTS = (2, 3)
"""Of four: on the second of two ranks where experts are whole."""
REPLICATED = ("router.weight", "gate_weight", "norm.weight")


def expert_of(name: str) -> int | None:
    return int(name.split(".local_experts.")[1].split(".")[0]) if ".local_experts." in name else None


def moving_experts(engine: DynamicInferenceEngine, step: int) -> None:
    """Some experts change, and the engine is not told: where experts are whole only one rank can see it."""
    if step not in (4, 12):
        return
    groups = engine.rank_group.groups
    first = 2 * groups.ep_rank
    changed = 0
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            expert = expert_of(name)
            if expert is not None and expert + first in MOVED_EXPERTS:
                parameter.mul_(1.2)
                changed += 1
    assert bool(changed) == (groups.ep_size == 1 or groups.ep_rank == 1)


SCENARIOS: dict[str, tuple[tuple[str, ...], str, dict[str, Any], Any]] = {
    # where it is played; the scenario of test_tp_parity; settings beside its own; what is done on the way
    "prefixes": (tuple(LAYOUTS), "prefixes", {}, None),
    "evicting": (("whole experts",), "evicting", CACHED, None),
    "swapping, overlapped": (tuple(LAYOUTS), "swapping", {"overlap": True}, None),
    "persist": (("whole experts",), "persist", CACHED, None),
    "offload": (tuple(LAYOUTS), "offload", {}, None),
    "recompute": (("whole experts",), "recompute", {}, None),
    "pause": (("whole experts",), "pause", {}, None),
    "sampled": (tuple(LAYOUTS), "sampled", {"enable_chunked_prefill": True, "max_tokens": 40}, None),
    "experts change": (tuple(LAYOUTS), "plain", CACHED | {"overlap": True}, moving_experts),
}


def played(model: torch.nn.Module, kind: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what is compared, the engine's counters)."""
    _, scenario, extra, act = SCENARIOS[name]
    settings = settings_of(scenario, kind) | extra
    if kind == "attention":
        settings.pop("prefix_caching_mamba_gb", None)
    engine = ranks.make_engine(model, **settings)
    outputs = play(engine, scenario, act)
    stats = engine.stats()
    if act is moving_experts:
        assert engine.weights.num_updates == 2, engine.weights.num_updates
    engine.rank_group.lockstep.close()
    return ranks.account(outputs), dict(stats.counters)


def take_part(model: torch.nn.Module, weights: dict[str, torch.Tensor], layout: str, rank: int) -> None:
    """This rank's parameters of the unsharded model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            expert = expert_of(name)
            if layout == "whole experts":
                if expert is not None:
                    name = name.replace(f".local_experts.{expert}.", f".local_experts.{expert + 2 * rank}.")
                parameter.copy_(weights[name])
            elif name.endswith(REPLICATED) and "mixer" not in name:
                parameter.copy_(weights[name])
            else:
                parameter.copy_(share(name, weights[name], model, rank, 2))


def on_rank(rank: int, size: int, folder: Path) -> None:
    worst = 0.0
    for layout, sizes in LAYOUTS.items():
        new_groups(**sizes)
        for kind, make in MODELS.items():
            model, weights = make(**sizes), torch.load(folder / f"{kind}.pt")
            for name, (layouts, *_) in SCENARIOS.items():
                if layout not in layouts or not (folder / f"{kind}.{name}.pt").exists():
                    continue  # elsewhere, or of the other part
                take_part(model, weights, layout, rank)
                got, counters = played(model, kind, name)
                want, expected_counters = torch.load(folder / f"{kind}.{name}.pt")
                assert got.keys() == want.keys()
                for key, (tokens, reason, logprobs) in want.items():
                    assert got[key][:2] == (tokens, reason), (layout, kind, name, key)
                    worst = max(worst, *(abs(a - b) for a, b in zip(got[key][2], logprobs, strict=True)))
                assert worst < TOLERANCE, (layout, kind, name, worst)
                assert counters == expected_counters, (layout, kind, name)
    (folder / f"worst.{rank}").write_text(str(worst))


@pytest.mark.long
@pytest.mark.timeout(280)
@pytest.mark.parametrize("part", [0, 1])
def test_experts_over_two_ranks_give_what_one_process_gives(tmp_path: Path, part: int) -> None:
    """A GPT and a hybrid: chunks, prefixes with snapshots of states, evictions, swaps, overlap, suspends, and weights
    of which only one rank sees that they changed; check_invariants compares the ranks' plans in every step."""
    torch.set_num_threads(1)
    for kind, make in MODELS.items():
        model = make()
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        torch.save(weights, tmp_path / f"{kind}.pt")
        for name in [*SCENARIOS][(part + (kind == "hybrid")) % 2 :: 2]:
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    parameter.copy_(weights[key])
            got, counters = played(model, kind, name)
            if name == "prefixes":
                assert counters["prefix_hits"], counters
            torch.save((got, counters), tmp_path / f"{kind}.{name}.pt")
    run_on_ranks(on_rank, 2, tmp_path)
    print("worst logprob difference", (tmp_path / "worst.0").read_text())
