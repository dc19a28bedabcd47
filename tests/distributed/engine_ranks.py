"""Engines of several gloo ranks for tests, and the same model in one process to compare with."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from child_paths import python_path
from gloo_ranks import start_ranks
from model_kinds import buffers
from test_adopt_tensor_parallel import fill_vectors, share

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

VOCAB = 128
GPT: dict[str, Any] = {"qk_layernorm": True, "init_method_std": 0.2, "max_sequence_length": 512}
HYBRID: dict[str, Any] = {"position_embedding_type": "rope", "init_method_std": 0.2, "max_sequence_length": 512}
BASE: dict[str, Any] = {
    "buffer_size_gb": 0.008,
    "block_size_tokens": 16,
    "max_sequence_length": 160,
    "max_requests": 16,
    "max_tokens": 512,
    "check_invariants": True,
    "collective_timeout_s": 30,
}


def whole_model(kind: str) -> torch.nn.Module:
    if kind == "attention":
        model = tiny_gpt(**GPT, randomize=False)
        fill_vectors(model, 0, 1)
        return model
    return tiny_hybrid("M*-M", **HYBRID)


def part_of_model(kind: str, folder: str, rank: int, size: int, *, seed: int = 0) -> torch.nn.Module:
    """This rank's part of `whole_model`. seed: of an "attention" model with other weights."""
    if kind == "attention":
        model = tiny_gpt(**GPT, seed=seed, randomize=False, tensor_model_parallel_size=size)
        fill_vectors(model, rank, size)
        return model
    weights = torch.load(f"{folder}/{kind}.weights.pt")
    model = tiny_hybrid("M*-M", **HYBRID, tensor_model_parallel_size=size)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(share(key, weights[key], model, rank, size))
    return model


def make_engine(model: torch.nn.Module, **settings: Any) -> DynamicInferenceEngine:
    settings = {**BASE, **settings}
    drafts = settings.pop("drafts_for_itself", False)
    if drafts:
        settings["speculative"] = {"method": "draft", "draft_model": model, "adaptive": False}
    pool, paused = settings.pop("pool_blocks", None), settings.pop("paused_blocks", None)
    if pool is not None:
        sized = {"blocks": pool, "block_size": 16, "max_requests": settings["max_requests"]}
        settings |= buffers(model, paused_blocks=paused or 0, draft=model if drafts else None, **sized)
    return DynamicInferenceEngine(model, InferenceConfig(**settings))


def workload(count: int = 10, **how: Any) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(5)
    stem = [rng.randrange(4, VOCAB) for _ in range(40)]
    how = {"temperature": 0.0} | how
    work = []
    for _ in range(count):
        prompt = stem[: rng.choice([0, 33, 40])] + [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 60))]
        params = SamplingParams(max_tokens=rng.randint(8, 24), ignore_eos=True, logprobs=1, **how)
        work.append((prompt, params))
    return work


def account(outputs: list[Any]) -> dict[str, Any]:
    """What is compared: tokens and logprobs of every sample."""
    return {
        f"{output.request_id}#{sample.index}": (
            list(sample.token_ids),
            str(sample.finish_reason),
            [entry[token].logprob for entry, token in zip(sample.logprobs or [], sample.token_ids, strict=False)],
        )
        for output in outputs
        for sample in output.outputs
    }


def start_rank(rank: int, size: int, folder: str) -> None:
    """torch.distributed and megatron-core's groups for `size` tensor-parallel ranks."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)


WORKER = """
import sys, importlib, engine_ranks
engine_ranks.run(importlib.import_module(sys.argv[1]), *sys.argv[2:])
"""


def run(module: Any, function: str, rank: str, size: str, folder: str) -> None:
    start_rank(int(rank), int(size), folder)
    try:
        getattr(module, function)(int(rank), int(size), folder)
    except BaseException:
        Path(folder, f"error.{rank}").write_text(traceback.format_exc())
        raise


def launch(function: Any, folder: Path, size: int = 2) -> list[subprocess.Popen[bytes]]:
    """Run function(rank, size, folder) of a test module in `size` processes."""
    command = [sys.executable, "-W", "ignore", "-c", WORKER, function.__module__, function.__name__]
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen([*command, str(rank), str(size), str(folder)], env=environment, stderr=subprocess.DEVNULL)
        for rank in range(size)
    ]


def run_ranks(function: Any, folder: Path, size: int = 2) -> None:
    """The same, to the end; an error of a rank is shown."""
    start_ranks(_enter, (function, size, str(folder)), size)


def _enter(rank: int, function: Any, size: int, folder: str) -> None:
    start_rank(rank, size, folder)
    function(rank, size, folder)
