"""Requests for an exact engine, and the comparison of its log probabilities with the training forward's, bit by bit."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import engines
import torch
import torch.nn.functional as F
from model_kinds import make_model

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.models.exact_forward import exact_logprobs
from megatron_infer.models.extensions import Extensions
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.testing import tiny

VOCAB = 128
TEMPERATURE = 0.8
BF16 = {"params_dtype": torch.bfloat16}
EXPERTS = tiny.EXPERTS | {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_dtype": "fp32"}
LAYER_NORM = {
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation_func": F.gelu,
    "add_bias_linear": True,
    "position_embedding_type": "learned_absolute",
}
GPT_OSS = {
    "softmax_type": "learnable",
    "window_size": (40, 0),
    "window_attn_skip_freq": 2,
    "add_bias_linear": True,
    "activation_func": F.silu,
    "activation_func_clamp_value": 0.5,
    "glu_linear_offset": 1.0,
    "position_embedding_type": "yarn",
    **tiny.YARN,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "swiglu": ("attention", {"qk_layernorm": True}),
    "tied bf16": ("attention", {"share_embeddings_and_output_weights": True, "window_size": (40, 0), **BF16}),
    "layer norm, gelu": ("attention", LAYER_NORM),
    "layer norm, gelu bf16": ("attention", {**LAYER_NORM, **BF16}),
    "experts": ("attention", {**EXPERTS, "moe_router_dtype": "fp64"}),
    "latent experts bf16": ("attention", {**EXPERTS, **SIGMOID, **BF16, "moe_latent_size": 24}),
    "experts bf16": ("attention", {**EXPERTS, **SIGMOID, **BF16}),
    # without biases: with those of experts megatron-core's own MLP has no backward on one rank
    "experts like gpt-oss's": ("attention", {**tiny.EXPERTS, **GPT_OSS, "add_bias_linear": False}),
    "sinks, yarn bf16": ("attention", {**GPT_OSS, **BF16}),
    "hybrid": ("hybrid", {}),
    "hybrid bf16": ("hybrid", BF16),
    "mamba": ("mamba", {}),
    "softcapped": ("softcapped", {}),
    "softcapped bf16": ("softcapped", BF16),
    "mixed bf16": ("mixed", {**EXPERTS, **SIGMOID, **BF16}),
    "norms after": (
        "attention",
        {"extensions": Extensions(norms="after", whole_head_norms=True), "qk_layernorm": True},
    ),
    "delta": ("delta", {}),
    "delta bf16": ("delta", {**EXPERTS, **BF16}),
    "latent": ("latent", {}),
    "latent bf16": ("latent", {**EXPERTS, **SIGMOID, **BF16, "q_lora_rank": None}),
    "parallel": ("parallel", {}),
    "parallel bf16": ("parallel", BF16),
}
"""Kind, and what its model is built with."""
make_engine = partial(engines.make_engine, max_sequence_length=256, batch_invariant=True)


def model_of(name: str) -> torch.nn.Module:
    kind, settings = MODELS[name]
    return make_model(kind, vocab_size=VOCAB, **settings)


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


def run(engine: DynamicInferenceEngine, work: engines.Work, suspend: tuple[str, ...] = ()) -> list[RequestOutput]:
    """All requests; suspended in the modes given, some steps apart."""
    first, modes = engine.num_steps, list(suspend)

    def before_step(engine: DynamicInferenceEngine) -> None:
        if modes and engine.num_steps >= first + 3 + 6 * (len(suspend) - len(modes)):
            engine.suspend(modes.pop(0))
            engine.resume()

    outputs = engines.run(engine, work, before_step)
    assert not modes, "ended before the last suspend"
    return outputs


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
