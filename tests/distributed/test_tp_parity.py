"""Two tensor-parallel ranks give the tokens and logprobs of one process, whatever the scheduler does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_ranks as ranks
import pytest
import torch

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine

Engine = DynamicInferenceEngine
TOLERANCE = 1e-5
CACHED = {"enable_prefix_caching": True, "prefix_caching_eviction_policy": "lru", "prefix_caching_mamba_gb": 0.01}
TINY_POOL = {"pool_blocks": 14, "paused_blocks": 6}


def nothing(engine: Engine, step: int) -> None:
    pass


def suspending(mode: str) -> Callable[[Engine, int], None]:
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


SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Engine, int], None]]] = {
    "plain": ({}, {}, nothing),
    "chunked": ({"enable_chunked_prefill": True, "max_tokens": 40}, {}, nothing),
    "prefixes": ({**CACHED, "max_requests": 4, "enable_chunked_prefill": True, "max_tokens": 64}, {}, nothing),
    "evicting": (TINY_POOL, {}, nothing),
    "swapping": ({**TINY_POOL, "preemption_mode": "swap", "swap_buffer_size_gb": 0.01}, {}, nothing),
    "by price": ({**TINY_POOL, "preemption_mode": "auto", "swap_buffer_size_gb": 0.01}, {}, nothing),
    "overlapped": ({"overlap": True, **TINY_POOL}, {}, nothing),
    "persist": ({}, {}, suspending("persist")),
    "offload": ({**CACHED, **TINY_POOL}, {}, suspending("offload")),
    "recompute": ({"overlap": True}, {}, suspending("recompute")),
    "update": ({"overlap": True}, {}, updating),
    "pause": (CACHED, {}, pausing),
    "sampled": ({}, {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "n": 2}, nothing),
    "processed": ({"logprobs_mode": "processed"}, {"temperature": 0.7, "repetition_penalty": 1.2}, nothing),
}
ATTENTION_ONLY = ("processed",)
EACH = 7
PARTS = ((0,), (1, 3, 5), (2, 4, 6))
"""Which scenarios a part has: every EACH-th from these numbers on."""


def settings_of(name: str, kind: str) -> dict[str, Any]:
    settings = dict(SCENARIOS[name][0])
    if kind == "attention":
        settings.pop("prefix_caching_mamba_gb", None)
    return settings


def play(engine: Engine, name: str, act: Callable[[Engine, int], None] | None = None) -> list[Any]:
    """A scenario, step by step: the leader adds requests, the others hear of them. act: in place of its own."""
    _, how, usual = SCENARIOS[name]
    act = act or usual
    leads = engine.rank_group.groups.is_leader
    work = ranks.workload(**how)
    done, step = [], 0

    def add(part: list[tuple[list[int], SamplingParams]], first: int) -> None:
        for i, (prompt, params) in enumerate(part, start=first):
            engine.add_request(prompt, params, request_id=str(i), stream="final")

    if leads:
        add(work[:6], 0)
    while engine.has_unfinished():
        if step == 5 and leads:
            add(work[6:], 6)
        act(engine, step)
        done += [output for output in engine.step() if output.finished]
        step += 1
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks, "a block leaked"
    if "pool_blocks" in SCENARIOS[name][0] and name != "offload":
        assert stats.counters["evicted"] or stats.counters["paused"], "the pool was never short"
    return done


def scenarios_of(kind: str, part: int) -> list[str]:
    """Others for the other kind of model; those of all parts together are all."""
    names = [name for name in SCENARIOS if kind == "attention" or name not in ATTENTION_ONLY]
    return [name for first in PARTS[part] for name in names[(first + 3 * (kind == "hybrid")) % EACH :: EACH]]


def check_parity(rank: int, size: int, folder: str) -> None:
    worst = 0.0
    for kind in ("attention", "hybrid"):
        for name in SCENARIOS:
            if not Path(folder, f"{kind}.{name}.pt").exists():
                continue  # of the other part
            engine = ranks.make_engine(ranks.part_of_model(kind, folder, rank, size), **settings_of(name, kind))
            assert engine.shape.num_kv_heads == 2 // size
            got, want = ranks.account(play(engine, name)), torch.load(f"{folder}/{kind}.{name}.pt")
            assert got.keys() == want.keys()
            for key, (tokens, reason, logprobs) in want.items():
                assert got[key][:2] == (tokens, reason), (kind, name, key)
                worst = max(worst, *(abs(a - b) for a, b in zip(got[key][2], logprobs, strict=True)))
            assert worst < TOLERANCE, (kind, name, worst)
            engine.rank_group.lockstep.close()
    Path(folder, f"worst.{rank}").write_text(str(worst))


@pytest.mark.timeout(280)
@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, len(PARTS)))])
def test_two_ranks_give_what_one_process_gives(tmp_path: Path, part: int):
    """Attention and hybrid: chunks, prefixes, pauses, evictions, swaps, overlap, suspends, updates; check_invariants
    compares the ranks' plans in every step."""
    torch.set_num_threads(1)
    for kind in ("attention", "hybrid"):
        model = ranks.whole_model(kind)
        weights = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
        torch.save(weights, tmp_path / f"{kind}.weights.pt")
        for name in scenarios_of(kind, part):
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    parameter.copy_(weights[key])
            done = play(ranks.make_engine(model, **settings_of(name, kind)), name)
            torch.save(ranks.account(done), tmp_path / f"{kind}.{name}.pt")
    ranks.run_ranks(check_parity, tmp_path)
    print("worst logprob difference", (tmp_path / "worst.0").read_text())
