"""Kernels compiled and loaded while the engine is built, instead of while its first request waits for them.

Triton compiles a kernel when it is first launched, about a second each; on disk it keeps them for the next process,
which still loads each. Steps of padding alone launch what steps launch: they touch the dummy block, slot and row, and
nothing that lives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.cuda_graphs.padded_step import NOTHING
from megatron_infer.runner.batch import Batch, BatchBuilder
from megatron_infer.sampling.row_params import RowParams
from megatron_infer.sampling.sampler import SamplerInput, SamplerOutput
from megatron_infer.sampling.token_masks import TokenMasks
from megatron_infer.scheduler.request import Request

PROMPT_TOKENS = 256
"""From which on a prompt launches all that longer ones do; a scan has kernels for whole segments of as many."""
GREEDY = SamplingParams(temperature=0.0)
EDITED = SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1, logit_bias={0: 1.0})
MASKED = SamplingParams(temperature=0.0, structured=StructuredOutput(choice=("warm-up",)))
"""What it may be is not asked: the mask that comes along is of any token."""
DRAWN = SamplingParams(temperature=1.0, seed=0, top_k=2, top_p=0.9, logprobs=1)
WISHES = (
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
"""What rows want that are drawn together: each kind of draw has kernels of its own, on the model's logits or on a copy
of those of some rows."""


def run_padding(
    builder: BatchBuilder, layers: Callable[[Batch], Tensor | None], prompts: Sequence[int]
) -> Tensor | None:
    """Launch a step that decodes and one that prefills for each of so many tokens -> the hidden state of the last one's
    one row, if `layers` gives any: layers(batch) -> [T, D] or None."""
    builder.derive(batch := builder.build(NOTHING, (), shape=GraphShape(1, 0, 1)))
    hidden_TD = layers(batch)
    for num_tokens in prompts:
        builder.derive(batch := builder.build(NOTHING, (), shape=GraphShape(num_tokens, 1, 0)))
        hidden_TD = layers(batch)
    return None if hidden_TD is None else hidden_TD[:1]


def draw_padding(
    builder: BatchBuilder, params: RowParams, sample: Callable[[SamplerInput], SamplerOutput], *, dummy_row: int
) -> None:
    """Launch draws of every kind for the dummy row and the first, which have no wishes again afterwards."""
    both = np.array([dummy_row, 0], dtype=np.int32)
    try:
        for wishes in WISHES:
            for row, one in zip(both.tolist(), wishes, strict=False):
                nobody = Request(id="warm-up", tokens=[0], prompt_len=1, params=one, max_total=2, seed=0)
                params.set(row, nobody)
            masked = np.flatnonzero([one.structured is not None for one in wishes])
            masks = TokenMasks(masked, np.full((len(masked), -(-params.vocab_size // 32)), -1, dtype=np.int32))
            inputs = SamplerInput(
                rows=both[: len(wishes)],
                positions=np.ones(len(wishes), dtype=np.int64),
                token_pool=builder.token_pool,
                masks=masks if len(masked) else None,
            )
            sample(inputs)
    finally:
        for row in both.tolist():
            params.clear(row)
