"""Engines, requests and disturbances that the tests of suspend share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import engines
import pytest
import torch

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import StateReleased
from megatron_infer.testing.inspect import inspect

VOCAB = 128
MAX_SUSPENDS = 6
MODES = ("persist", "offload", "recompute")
Engine = DynamicInferenceEngine


def workload(drawing: str, n: int = 1) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(5)
    stem = [rng.randrange(4, VOCAB) for _ in range(40)]
    work = []
    for i in range(6 if n > 1 else 10):
        prompt = stem[: rng.choice([0, 33, 40])] + [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 60))]
        how: dict[str, Any] = (
            {"temperature": 0.0} if drawing == "greedy" else {"temperature": 0.9, "seed": i, "top_k": 40}
        )
        work.append((prompt, SamplingParams(n=n, max_tokens=rng.randint(8, 30), ignore_eos=True, logprobs=1, **how)))
    return work


def prefilling(engine: Engine) -> bool:
    return any(request.scheduled for request in inspect(engine).scheduler.admitted_requests.prefilling)


def decoding(engine: Engine) -> bool:
    return any(request.num_output for request in inspect(engine).scheduler.admitted_requests.decoding)


def shares_blocks(engine: Engine) -> bool:
    held: list[int] = [b for r in inspect(engine).scheduler.running for b in r.lease.blocks]  # type: ignore[union-attr]
    return len(held) > len(set(held))


def siblings_wait(engine: Engine) -> bool:
    ids = {request.id for request in inspect(engine).scheduler.running}
    waiting = {r.id for r in inspect(engine).scheduler.waiting}
    return any(name.partition("#")[0] in {other.partition("#")[0] for other in ids} for name in waiting)


PAUSED = "paused rows"
"""Not of pure Mamba models: their blocks take no memory, so nobody ever waits for one."""
SITUATIONS: dict[str, tuple[dict[str, Any], int, Callable[[Engine], bool]]] = {
    "idle": ({}, 1, lambda engine: engine.num_steps == 0),
    "mid prefill chunk": ({"enable_chunked_prefill": True, "max_tokens": 24}, 1, prefilling),
    "mid decode": ({}, 1, decoding),
    PAUSED: ({"pool_blocks": 14, "paused_blocks": 8}, 1, lambda e: e.stats().num_paused > 0),
    "waiting rows": ({"max_requests": 4}, 1, lambda e: e.stats().num_waiting > 0 and decoding(e)),
    "shared prefixes": ({"prefix": "lru", "max_requests": 4}, 1, shares_blocks),
    "groups of 4": ({"max_requests": 6}, 4, siblings_wait),
}


def run(engine: Engine, drawing: str, n: int = 1, suspend: Callable[[Engine], None] | None = None) -> dict[str, Any]:
    engines.submit(engine, workload(drawing, n))
    done = engines.finish(engine, suspend)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks, "a block leaked"
    return done


def answers(done: dict[str, Any]) -> dict[str, list[tuple[list[int], str]]]:
    return {k: [(s.token_ids, s.finish_reason) for s in output.outputs] for k, output in done.items()}


def logprobs(done: dict[str, Any]) -> torch.Tensor:
    rows = [engines.logprobs_of(one) for _, output in sorted(done.items()) for one in output.outputs]
    return torch.tensor(sum(rows, []), dtype=torch.float64)


class Suspender:
    """Suspends and resumes when the situation holds, every few steps and a few times: who recomputes must get on."""

    def __init__(self, holds: Callable[[Engine], bool], mode: str, every: int = 4) -> None:
        self.holds, self.mode, self.every = holds, mode, every
        self.count, self.last = 0, -every
        self.copied = 0

    def __call__(self, engine: Engine) -> None:
        if self.count == MAX_SUSPENDS or engine.num_steps - self.last < self.every or not self.holds(engine):
            return
        report = engine.suspend(self.mode)
        assert engine.state == "suspended" and report.mode == self.mode
        if self.mode != "persist":
            with pytest.raises(StateReleased):
                inspect(engine).store.kv_cache  # noqa: B018
            with pytest.raises(StateReleased):
                inspect(engine).store.states  # noqa: B018
        self.copied += report.tags["kv_cache"].bytes_copied
        engine.resume()
        self.count, self.last = self.count + 1, engine.num_steps
