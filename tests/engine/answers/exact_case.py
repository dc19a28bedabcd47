"""Requests for an exact engine, and the comparison of its log probabilities with the training forward's, bit by bit."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from model_kinds import buffers, make_model, prefix_caching

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.models.exact_forward import exact_logprobs
from megatron_infer.outputs.request_output import RequestOutput

VOCAB = 128
BLOCK = 16
TEMPERATURE = 0.8
BF16 = {"params_dtype": torch.bfloat16}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "none",
    "moe_shared_expert_intermediate_size": 32,
    "moe_shared_expert_gate": True,
}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_dtype": "fp32"}
LAYER_NORM = {
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation_func": F.gelu,
    "add_bias_linear": True,
    "position_embedding_type": "learned_absolute",
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "swiglu": ("attention", {"qk_layernorm": True}),
    "tied bf16": ("attention", {"share_embeddings_and_output_weights": True, "window_size": (40, 0), **BF16}),
    "layer norm, gelu": ("attention", LAYER_NORM),
    "layer norm, gelu bf16": ("attention", {**LAYER_NORM, **BF16}),
    "experts": ("attention", {**EXPERTS, "moe_router_dtype": "fp64"}),
    "experts bf16": ("attention", {**EXPERTS, **SIGMOID, **BF16}),
    "hybrid": ("hybrid", {}),
    "hybrid bf16": ("hybrid", BF16),
    "mamba": ("mamba", {}),
}
"""Kind, and what its model is built with."""
BASE: dict[str, Any] = {
    "buffer_size_gb": 0.008,
    "block_size_tokens": BLOCK,
    "max_sequence_length": 256,
    "max_requests": 16,
    "max_tokens": 512,
    "check_invariants": True,
    "batch_invariant": True,
}


def model_of(name: str) -> torch.nn.Module:
    kind, settings = MODELS[name]
    return make_model(kind, vocab_size=VOCAB, **settings)


def make_engine(model: torch.nn.Module, kind: str = "attention", **settings: Any) -> DynamicInferenceEngine:
    settings = {**BASE, **settings}
    if settings.pop("prefix", False):
        settings |= prefix_caching(kind)
    if (pool := settings.pop("pool_blocks", None)) is not None:
        settings |= buffers(model, blocks=pool, block_size=BLOCK, max_requests=settings["max_requests"])
    return DynamicInferenceEngine(model, InferenceConfig(**settings))


def workload(seed: int, *, sampled: bool) -> list[tuple[list[int], SamplingParams]]:
    """Prompts with a common stem, some of several samples; half of them ask for their prompt's log probabilities."""
    rng = random.Random(seed)
    stem = [rng.randrange(4, VOCAB) for _ in range(70)]
    work = []
    for i, (shared, own, drawn) in enumerate([(0, 1, 70), (48, 17, 50), (70, 61, 30), (32, 3, 40), (64, 9, 40)]):
        prompt = stem[:shared] + [rng.randrange(4, VOCAB) for _ in range(own)]
        how: dict[str, Any] = {"temperature": TEMPERATURE, "seed": i} if sampled else {"temperature": 0.0}
        how |= {"n": 3 if i == 3 and sampled else 1, "prompt_logprobs": 0 if i % 2 == 0 else None}
        work.append((prompt, SamplingParams(max_tokens=drawn, ignore_eos=True, logprobs=0, **how)))
    return work


def run(
    engine: DynamicInferenceEngine, work: list[tuple[list[int], SamplingParams]], suspend: tuple[str, ...] = ()
) -> list[RequestOutput]:
    """All requests; suspended in the modes given, some steps apart."""
    first = engine.num_steps
    for i, (prompt, params) in enumerate(work):
        engine.add_request(prompt, params, request_id=str(i), stream="final")
    done, modes = {}, list(suspend)
    while engine.has_unfinished():
        if modes and engine.num_steps >= first + 3 + 6 * (len(suspend) - len(modes)):
            engine.suspend(modes.pop(0))
            engine.resume()
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert not modes, "ended before the last suspend"
    return [done[str(i)] for i in range(len(work))]


def differing(
    model: torch.nn.Module,
    work: list[tuple[list[int], SamplingParams]],
    outputs: list[RequestOutput],
    *,
    temperature: float = 1.0,
) -> tuple[int, int]:
    """(log probabilities whose bits are not the training forward's, all of them)."""
    answers = [(i, sample) for i, output in enumerate(outputs) for sample in output.outputs]
    scored = exact_logprobs(model, [work[i][0] + s.token_ids for i, s in answers], temperature=temperature)
    wrong = total = 0
    for (i, sample), whole in zip(answers, scored, strict=True):
        prompt = work[i][0]
        pairs = [(sample.logprobs, sample.token_ids, whole[len(prompt) - 1 :])]
        if outputs[i].prompt_logprobs and temperature == 1.0:
            pairs.append((outputs[i].prompt_logprobs[1:], prompt[1:], whole[: len(prompt) - 1]))
        for entries, ids, wanted in pairs:
            got = torch.tensor([entry[token].logprob for entry, token in zip(entries, ids, strict=True)])
            assert got.dtype is wanted.dtype is torch.float32 and got.shape == wanted.shape
            wrong += int((got != wanted).sum())
            total += len(got)
    return wrong, total
