"""Sampling as its definition reads: one row at a time, Python lists and float64, no torch. Slow on purpose."""

from __future__ import annotations

import math

import numpy as np

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.runner.sampling.rng import uniform
from megatron_infer.scheduler.request import Request


def make_request(prompt, output=(), *, seed=0, stop_ids=(), **params) -> Request:
    tokens = [*map(int, prompt), *map(int, output)]
    return Request(
        id="r",
        tokens=tokens,
        prompt_len=len(prompt),
        params=SamplingParams(**{"max_tokens": None, **params}),
        max_total=len(tokens) + 100,
        seed=seed,
        stop_ids=frozenset(stop_ids),
    )


def process(logits, request: Request) -> list[np.float32]:
    """Logits after bias, masks and penalties, in fp32 as the sampler computes them."""
    params, one = request.params, np.float32
    out = [one(x) for x in logits]
    for token, bias in (params.logit_bias or {}).items():
        out[token] = out[token] + one(bias)
    if params.allowed_token_ids is not None:
        out = [x if i in set(params.allowed_token_ids) else one(-math.inf) for i, x in enumerate(out)]
    for token in params.bad_token_ids or ():
        out[token] = one(-math.inf)
    for token in set(request.tokens):
        penalty = one(params.repetition_penalty)
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    output = request.tokens[request.prompt_len :]
    for token in set(output):
        out[token] = out[token] - one(params.frequency_penalty) * one(output.count(token))
        out[token] = out[token] - one(params.presence_penalty)
    if len(output) < params.min_tokens:
        for token in request.stop_ids:
            out[token] = one(-math.inf)
    return out


def distribution(logits, params: SamplingParams) -> list[tuple[int, float]]:
    """(id, probability) of every token that may be drawn, in the order in which their probabilities are added up."""
    top = float(max(logits))
    if params.temperature < 1e-5:
        return [(min(i for i, x in enumerate(logits) if x == top), 1.0)]
    weight = [math.exp((float(x) - top) / params.temperature) for x in logits]
    top_k = params.top_k if params.top_k > 0 else len(logits)
    if top_k >= len(logits) and params.top_p == 1.0 and params.min_p == 0.0:
        order = list(range(len(logits)))
    else:
        order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))[:top_k]
        mass, before, nucleus = sum(weight[i] for i in order), 0.0, []
        for i in order:
            if params.top_p < 1.0 and nucleus and before >= params.top_p * mass:
                break
            nucleus.append(i)
            before += weight[i]
        order = [i for i in nucleus if weight[i] >= params.min_p]
    mass = math.fsum(weight[i] for i in order)
    return [(i, weight[i] / mass) for i in order if weight[i] > 0.0]


def draw(logits, request: Request) -> int:
    """The token for the next position of `request`."""
    seed = np.array([request.seed % 2**64], dtype=np.uint64)
    left = float(uniform(seed, np.array([len(request.tokens)]))[0])
    candidates = distribution(process(logits, request), request.params)
    for token, probability in candidates:
        left -= probability
        if left < 0:
            return token
    return candidates[-1][0]
