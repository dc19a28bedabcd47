"""Models, engines and requests that the tests of what samples carry share."""

from __future__ import annotations

import random
from typing import Any

import engines
import torch
from engines import logprobs_of
from model_kinds import HYBRID_PATTERN

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.outputs.request_output import CompletionOutput
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt, tiny_hybrid

VOCAB = 128
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "max_sequence_length": 512, "init_method_std": 0.2}
ALL = {"return_sampled_logprobs": True, "return_support": True, "return_routing": True}
BASE = engines.BASE | {"buffer_size_gb": engines.BUFFER_GIB}
make_engine = engines.make_engine
NO_ROUTING = ALL | {"return_routing": False}


def make_model(kind: str, **changes: Any) -> torch.nn.Module:
    """dense; experts: one dense layer between two of experts; hybrid: Mamba, attention, MLP and experts."""
    if kind == "dense":
        return tiny_gpt(**SIZES, **changes)
    if kind == "experts":
        return tiny_gpt(**{**SIZES, **EXPERTS, "num_layers": 3, "moe_layer_freq": [1, 0, 1], **changes})
    return tiny_hybrid(HYBRID_PATTERN + "E", position_embedding_type="rope", **SIZES, **changes)


def workload(asked: dict[str, Any], n: int = 1) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share prefixes; greedy and drawn, filtered and not. asked: of every second request."""
    rng = random.Random(5)
    stem = [rng.randrange(4, VOCAB) for _ in range(40)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 3},
        {"min_p": 0.1, "bad_token_ids": [7, 9], "logit_bias": {5: 2.0}},
        {"top_k": 20, "repetition_penalty": 1.2},
    ]
    work = []
    for i in range(10):
        prompt = stem[: rng.choice([0, 33, 40])] + [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 50))]
        how = {"max_tokens": rng.randint(8, 28), "ignore_eos": True, "logprobs": 0, "seed": i, "n": n}
        asks = asked if i % 2 == 0 or n > 1 else {}
        work.append((prompt, SamplingParams(**how, **kinds[i % len(kinds)], **asks)))
    return work


def told(one: CompletionOutput) -> dict[str, Any]:
    """Everything of a sample that may not depend on what else went on."""
    return {
        "tokens": one.token_ids,
        "logprobs": logprobs_of(one),
        "raw": one.raw_logprobs,
        "processed": one.processed_logprobs,
        "support": None if one.support is None else [one.support.ids_at(i).tolist() for i in range(len(one.support))],
        "routing": None if one.routing is None else one.routing.tolist(),
    }
