"""Kernels compiled and loaded while the engine is built, instead of while its first request waits for them.

Triton compiles a kernel when it is first launched, about a second each; on disk it keeps them for the next process,
which still loads each. Steps of padding alone launch what steps launch: they touch the dummy block, slot and row, and
nothing that lives.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from megatron_infer.forward.batch import Batch, BatchBuilder
from megatron_infer.forward.step_graphs import NOTHING
from megatron_infer.graph_shapes import GraphShape
from megatron_infer.sampling.params import RowParams
from megatron_infer.sampling.sampler import SampleInputs, SampleOutput
from megatron_infer.schedule.params import SamplingParams
from megatron_infer.schedule.request import Request

PROMPT_TOKENS = 256
"""From which on a prompt launches all that longer ones do; a scan has kernels for whole segments of as many."""
WISHES = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=0),
    SamplingParams(temperature=1.0, seed=0, top_k=2, top_p=0.9, logprobs=1),
)
"""What draws are tried: each kind has kernels of its own."""


def run_padding(builder: BatchBuilder, layers: Callable[[Batch], Tensor | None], *, max_tokens: int) -> Tensor | None:
    """Launch a step that decodes and one that prefills -> the hidden state of the latter's one row, if `layers` gives
    any: layers(batch) -> [T, D] or None."""
    builder.derive(batch := builder.build(NOTHING, (), shape=GraphShape(1, 0, 1)))
    layers(batch)
    builder.derive(batch := builder.build(NOTHING, (), shape=GraphShape(min(PROMPT_TOKENS, max_tokens), 1, 0)))
    hidden_TD = layers(batch)
    return None if hidden_TD is None else hidden_TD[:1]


def draw_padding(
    builder: BatchBuilder, params: RowParams, sample: Callable[[SampleInputs], SampleOutput], *, dummy_row: int
) -> None:
    """Launch draws of every kind for the dummy row, which has no wishes again afterwards."""
    rows, positions = np.array([dummy_row], dtype=np.int32), np.array([1], dtype=np.int64)
    inputs = SampleInputs(rows=rows, positions=positions, token_pool=builder.token_pool)
    try:
        for wishes in WISHES:
            nobody = Request(id="warm-up", tokens=[0], prompt_len=1, params=wishes, max_total=2, seed=0)
            params.set(dummy_row, nobody)
            sample(inputs)
    finally:
        params.clear(dummy_row)
