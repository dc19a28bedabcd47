"""Tiny random models with equal weights on a device and on a CPU, engines over them, and the same requests for both."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import model_kinds
import torch

from gpu_checks.context import Context
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.testing.tiny import tiny_hybrid

VOCABULARY = 128
KINDS = ("attention", "windows", "experts", "hybrid", "mamba", "latent", "sparse", "delta")
"""GQA with RoPE; sliding windows; MoE; Mamba, attention, MLP and experts in one stack; Mamba alone; latent attention;
the same to chosen keys; gated delta nets."""
OF_ATTENTION: dict[str, dict[str, Any]] = {
    "attention": {"kv_channels": 64},
    "windows": {"kv_channels": 64, "window_size": (24, 0)},
    "experts": {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 48,
        "moe_router_load_balancing_type": "none",
    },
}
"""Fields of the config of kinds that are the tests' model of attention but for these."""
CPU = torch.device("cpu")
Work = list[tuple[list[int], SamplingParams]]


@contextlib.contextmanager
def environment(name: str, value: str | None) -> Iterator[None]:
    """The variable is `value` inside; None: absent."""
    with mock.patch.dict(os.environ):
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
        yield


def make_model(kind: str, dtype: torch.dtype, device: torch.device, **sizes: Any) -> Any:
    """The same weights for every device: drawn on the CPU in fp32, rounded and moved. sizes: fields of its config."""
    model = _drawn(kind, dtype, sizes)
    if dtype != torch.float32:  # other dtypes take other numbers from the generator
        model.load_state_dict(_drawn(kind, torch.float32, sizes).state_dict())
    return model.to(device)


def _drawn(kind: str, dtype: torch.dtype, sizes: dict[str, Any]) -> Any:
    settings = {"use_cpu_initialization": True, "params_dtype": dtype, **sizes}
    if kind == "hybrid":
        plain = {"vocab_size": VOCABULARY, "max_sequence_length": 512, "init_method_std": 0.2}
        return tiny_hybrid(model_kinds.HYBRID_PATTERN, position_embedding_type="rope", **plain | settings)
    base = "attention" if kind in OF_ATTENTION else kind
    return model_kinds.make_model(base, **OF_ATTENTION.get(kind, {}) | settings)


def make_engine(model: Any, device: torch.device, **options: Any) -> DynamicInferenceEngine:
    settings: dict[str, Any] = {
        "buffer_size_gb": 0.06,
        "block_size_tokens": 16,
        "max_requests": 16,
        "max_tokens": 256,
        "max_sequence_length": 320,
        "enable_chunked_prefill": True,
        "num_cuda_graphs": 0,
        "overlap": False,
    }
    return DynamicInferenceEngine(model, InferenceConfig(**(settings | options)), eos_ids=(), device=str(device))


def workload(ctx: Context, *, count: int | None = None, **params: Any) -> Work:
    """Prompts of several lengths, some with a common beginning, some longer than a chunk."""
    rng = random.Random(5)
    stem = [rng.randrange(VOCABULARY) for _ in range(40)]
    longest, answer = ctx.pick((280, 30), (20, 4))
    work: Work = []
    for i in range(count or ctx.pick(12, 2)):
        prompt = stem[: rng.choice((0, 33, 40)) % longest] + [
            rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest - 40 if longest > 60 else longest - 8))
        ]
        chosen = {"temperature": 0.0, "seed": i} | params
        tokens = rng.randint(answer // 2, answer)
        work.append((prompt[:longest], SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **chosen)))
    return work


def answers(engine: DynamicInferenceEngine, work: Work) -> list[Any]:
    """Their outputs, in order."""
    outputs = engine.generate([prompt for prompt, _ in work], [params for _, params in work])
    wrong = [output.error for output in outputs if getattr(output, "error", None)]
    assert not wrong, f"requests failed: {wrong[:2]}"
    return outputs


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]
