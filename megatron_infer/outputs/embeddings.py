"""Embeddings: a prompt's final hidden states as one vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import InferenceError, RequestError
from megatron_infer.outputs.request_output import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """One prompt's vector."""

    prompt_token_ids: list[int]
    values: list[float]


def params_for(pooling: str) -> SamplingParams:
    """Parameters of a request that returns `RequestOutput.pooled`. Raises RequestError for an unknown pooling."""
    return SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling, detokenize=False, ignore_eos=True)


def vector_of(output: RequestOutput, *, dimensions: int | None = None, normalize: bool = True) -> list[float]:
    """The first `dimensions` components (None: all) of the pooled vector, scaled to length 1 if `normalize`.

    Raises RequestError for more dimensions than there are, the request's own error if it failed, or InferenceError.
    """
    if output.error is not None:
        raise output.error
    if output.pooled is None:
        raise InferenceError(f"request {output.request_id} ended before its prompt was computed")
    vector = output.pooled
    if dimensions is not None:
        if not 1 <= dimensions <= len(vector):
            raise RequestError(f"dimensions is {dimensions}, the model's vectors have {len(vector)}; ask for fewer")
        vector = vector[:dimensions]
    if not normalize:
        return list(vector)
    length = math.sqrt(math.fsum(one * one for one in vector)) or 1.0
    return [one / length for one in vector]


def embeddings_of(outputs: Sequence[RequestOutput], *, dimensions: int | None, normalize: bool) -> list[Embedding]:
    return [
        Embedding(
            prompt_token_ids=output.prompt_token_ids,
            values=vector_of(output, dimensions=dimensions, normalize=normalize),
        )
        for output in outputs
    ]
