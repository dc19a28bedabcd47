"""Engines over random models, filled with requests, and the time their steps take."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import torch

from light.machine import wait
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.model_shape import ModelShape, kv_token_bytes, state_bytes
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.step_work import StepCounter
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.suspend import MemoryReport
from megatron_infer.testing.inspect import inspect

GIB = 2**30
BLOCK = 64


@dataclass(slots=True)
class Bench:
    """One model, its engine, and what its steps must move."""

    engine: DynamicInferenceEngine
    counter: StepCounter
    device: torch.device

    @property
    def vocabulary(self) -> int:
        return self.engine.shape.vocab_size

    def prompt(self, length: int, seed: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(self.vocabulary) for _ in range(length)]

    def add(self, length: int, new_tokens: int, seed: int) -> str:
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        return self.engine.add_request(self.prompt(length, seed), params, stream="final")

    def fill(self, batch: int, context: int, new_tokens: int) -> None:
        """`batch` requests of `context` prompt tokens, all of them decoding when this returns."""
        for seed in range(batch):
            self.add(context, new_tokens, seed)
        self.prefill()

    def prefill(self) -> None:
        """Step until every request decodes."""
        while self.engine.stats().num_waiting or inspect(self.engine).scheduler.admitted_requests.prefilling:
            self.engine.step()

    def steps(self, count: int) -> float:
        """Seconds a step takes, host work included, over `count` of them."""
        wait(self.device)
        begun = time.perf_counter()
        for _ in range(count):
            self.engine.step()
        wait(self.device)
        return (time.perf_counter() - begun) / count

    def wake(self) -> tuple[MemoryReport, float]:
        """Resume and take a step -> (the report, seconds until both are done)."""
        wait(self.device)
        begun = time.perf_counter()
        report = self.engine.resume()
        self.engine.step()
        wait(self.device)
        return report, time.perf_counter() - begun

    def drain(self) -> None:
        """Abort what is left."""
        for request in [*inspect(self.engine).scheduler.running, *inspect(self.engine).scheduler.waiting]:
            self.engine.abort(request.id)
        while self.engine.has_unfinished():
            self.engine.step()
        wait(self.device)


def pool_gib(shape: ModelShape, *, max_requests: int, max_tokens: int) -> float:
    """GiB that hold so many requests with so many tokens each, with a block to spare for each of them."""
    kv = (max_requests * (max_tokens // BLOCK + 2) + 2) * BLOCK * kv_token_bytes(shape)
    states = (max_requests + 2) * state_bytes(shape)
    # Both parts are cut to whole blocks and states.
    return 1.03 * (kv + states) / GIB + 1 / 1024


def make_bench(
    model: Any, counter: StepCounter, device: torch.device, *, max_requests: int, max_length: int, **options: Any
) -> Bench:
    """An engine on `model` with room for max_requests of max_length tokens; `options` are InferenceConfig's."""
    settings: dict[str, Any] = {
        "buffer_size_gb": pool_gib(counter.shape, max_requests=max_requests, max_tokens=max_length),
        "block_size_tokens": BLOCK,
        "max_requests": max_requests,
        "max_tokens": 8192,
        "max_sequence_length": max_length,
        "enable_chunked_prefill": True,
        "overlap": True,
        "num_cuda_graphs": -1 if device.type == "cuda" else None,
    }
    config = InferenceConfig(**(settings | options))
    engine = DynamicInferenceEngine(model, config, eos_ids=(), device=str(device))
    return Bench(engine, counter, device)
