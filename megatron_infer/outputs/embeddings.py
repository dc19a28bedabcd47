"""Embeddings: a prompt's final hidden states as one vector, or one for each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import InferenceError, RequestError
from megatron_infer.outputs.request_output import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """One prompt's vector, or with pooling="all" one for each of its tokens."""

    prompt_token_ids: list[int]
    values: Any
    """list[float]; list[list[float]] of "all"."""


def params_for(pooling: str) -> SamplingParams:
    """Parameters of a request that returns `RequestOutput.pooled`. Raises RequestError for an unknown pooling."""
    return SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling, detokenize=False, ignore_eos=True)


def flattened(pooled: Sequence[Any] | None) -> Sequence[float] | None:
    """`RequestOutput.pooled` as numbers one after the other."""
    return list(chain.from_iterable(pooled)) if pooled and isinstance(pooled[0], Sequence) else pooled


def unflattened(values: list[float], pooling: str | None, num_tokens: int) -> Any:
    """`RequestOutput.pooled` of its numbers."""
    if pooling != "all" or not num_tokens:
        return values
    width = len(values) // num_tokens
    return [values[start : start + width] for start in range(0, len(values), width)]


def vector_of(output: RequestOutput, *, dimensions: int | None = None, normalize: bool = True) -> Any:
    """The first `dimensions` components (None: all) of the pooled vector, scaled to length 1 if `normalize`; of "all" a
    list with that of each token.

    Raises RequestError for more dimensions than there are, the request's own error if it failed, or InferenceError.
    """
    if output.error is not None:
        raise output.error
    if output.pooled is None:
        raise InferenceError(f"request {output.request_id} ended before its prompt was computed")
    if isinstance(output.pooled[0], Sequence):
        return [_scaled(one, dimensions, normalize) for one in output.pooled]
    return _scaled(output.pooled, dimensions, normalize)


def _scaled(vector: Any, dimensions: int | None, normalize: bool) -> list[float]:
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
