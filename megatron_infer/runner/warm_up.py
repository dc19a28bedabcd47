"""Kernels compiled and loaded while the engine is built, so that the first request does not wait for them.

Triton compiles a kernel when it is first launched, about a second each; it caches them on disk for the next process,
which still loads each. Steps of padding alone launch what steps launch: they touch the dummy block, state slot and row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.runner.batch import EMPTY_PLAN, BatchBuilder
from megatron_infer.runner.model_runner import Runner
from megatron_infer.runner.sampling.sampler import SamplerInput, StepSampler
from megatron_infer.runner.sampling.token_masks import TokenMasks
from megatron_infer.scheduler.request import Request

PROMPT_TOKENS = 256
"""A prompt of so many tokens launches all that longer ones do: a scan has kernels for whole segments of as many."""
GREEDY = SamplingParams(temperature=0.0)
EDITED = SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1, logit_bias={0: 1.0})
MASKED = SamplingParams(temperature=0.0, structured=StructuredOutput(choice=("warm-up",)))
"""Its choices do not matter: the mask allows every token."""
DRAWN = SamplingParams(temperature=1.0, seed=0, top_k=2, top_p=0.9, logprobs=1)
KINDS = (
    (GREEDY,),
    (SamplingParams(temperature=0.0, logprobs=0),),
    (SamplingParams(temperature=1.0, seed=0),),
    (DRAWN,),
    (DRAWN, GREEDY),
    (EDITED,),
    (dataclasses.replace(EDITED, temperature=1.0, seed=0, logprobs=1),),
    (MASKED,),
    (MASKED, EDITED),
    (MASKED, GREEDY),
    (SamplingParams(temperature=1.0, seed=0, top_k=2, return_sampled_logprobs=True, return_support=True),),
)
"""Parameters of rows that are drawn together: each kind of draw has kernels of its own, on the model's logits or on a
copy of some rows."""


@torch.inference_mode()
def launch_kernels(runner: Runner, max_tokens: int, token_counts: Sequence[int] = ()) -> None:
    """Launch what steps of up to max_tokens tokens launch: a decode step, prefills, and draws of every kind.

    Called before the first step, by all ranks. token_counts: the least tokens of steps that run other kernels than
    smaller ones.
    """
    model, builder, received = runner.model, runner.builder, runner.received
    prompts = (GraphShape(count, 1, 0) for count in (min(PROMPT_TOKENS, max_tokens), *token_counts))
    for shape in (GraphShape(1, 0, 1), *prompts):
        builder.derive(batch := builder.build(EMPTY_PLAN, (), shape=shape))
        hidden_TD = model.hidden(batch) if received is None else model.hidden(batch, received(batch.num_tokens))
    if runner.draws:
        # the weights may hold anything at this point, logits that are drawn from must not
        _draw_padding(builder, runner.sampler, torch.zeros_like(model.logits(hidden_TD[:1], batch.ops))[0])


def _draw_padding(builder: BatchBuilder, sampler: StepSampler, logits_V: Tensor) -> None:
    """Launch draws of every kind for the dummy row and the first one, whose parameters are cleared afterwards."""
    params, both = sampler.params, np.array([builder.rows.dummy_row, 0], dtype=np.int32)
    try:
        for kind in KINDS:
            for row, one in zip(both.tolist(), kind, strict=False):
                params.set(row, Request(id="warm-up", tokens=[0], prompt_len=1, params=one, max_total=2, seed=0))
            masked = np.flatnonzero([one.structured is not None for one in kind])
            masks = TokenMasks(masked, np.full((len(masked), -(-params.vocab_size // 32)), -1, dtype=np.int32))
            inputs = SamplerInput(
                rows=both[: len(kind)],
                positions=np.ones(len(kind), dtype=np.int64),
                token_pool=builder.token_pool,
                masks=masks if len(masked) else None,
            )
            sampler.sample(logits_V.repeat(len(kind), 1), inputs)
    finally:
        for row in both.tolist():
            params.clear(row)
