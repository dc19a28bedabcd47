"""One factory of engines on tiny models, and what tests do with an engine: submit work, finish it, read outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import pytest
import torch
from model_kinds import buffers, prefix_caching

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.models.adopt import adopt
from megatron_infer.outputs.request_output import CompletionOutput, RequestOutput

BASE: dict[str, Any] = {
    "block_size_tokens": 16,
    "max_sequence_length": 160,
    "max_requests": 16,
    "max_tokens": 512,
    "check_invariants": True,
}
BUFFER_GIB = 0.01
"""Room for all requests of BASE, in every kind of model."""
Work = Sequence[tuple[list[int], SamplingParams]]


def make_engine(
    model: torch.nn.Module,
    *,
    pool_blocks: int | None = None,
    paused_blocks: int = 0,
    prefix: str | None = None,
    draft: torch.nn.Module | Literal["mtp"] | None = None,
    tokenizer: Any = None,
    owns_weights: bool = False,
    **settings: Any,
) -> DynamicInferenceEngine:
    """An engine of BASE with `settings`.

    pool_blocks: a pool of so many usable blocks, `paused_blocks` of which paused requests may keep; None: BUFFER_GIB.
    prefix: the policy of the prefix cache, with room for states where the model keeps some; None: no prefix cache.
    draft: a model that drafts, or "mtp", the model's own MTP layer; always to its full depth.
    """
    asked = BASE | settings
    sized = {"buffer_size_gb": BUFFER_GIB}
    if pool_blocks is not None:
        rows = {"block_size": asked["block_size_tokens"], "max_requests": asked["max_requests"]}
        sized = buffers(model, blocks=pool_blocks, paused_blocks=paused_blocks, draft=draft, **rows)
    if prefix is not None:
        sized |= prefix_caching("hybrid" if adopt(model).ssm_specs else "attention", prefix)
    if draft is not None:
        method = {"method": "mtp"} if draft == "mtp" else {"method": "draft", "draft_model": draft}
        sized["speculative"] = method | {"adaptive": False}
    config = InferenceConfig(**sized | asked)
    return DynamicInferenceEngine(model, config, tokenizer=tokenizer, owns_weights=owns_weights)


def submit(engine: DynamicInferenceEngine, work: Work, *, stream: str = "final") -> None:
    """Add the requests of `work`, named by their place in it."""
    for place, (prompt, params) in enumerate(work):
        engine.add_request(prompt, params, request_id=str(place), stream=stream)


def finish(
    engine: DynamicInferenceEngine, before_step: Callable[[DynamicInferenceEngine], object] | None = None
) -> dict[str, RequestOutput]:
    """Run to the end -> finished outputs by request id; before_step(engine) is called before each step."""
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        if before_step is not None:
            before_step(engine)
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return done


def run(
    engine: DynamicInferenceEngine,
    work: Work,
    before_step: Callable[[DynamicInferenceEngine], object] | None = None,
) -> list[RequestOutput]:
    """The outputs of `work`, in its order; before_step: see `finish`."""
    submit(engine, work)
    done = finish(engine, before_step)
    return [done[str(place)] for place in range(len(work))]


def suspending(mode: str, *steps: int) -> Callable[[DynamicInferenceEngine], None]:
    """For `finish`: suspends and resumes before the steps that follow so many others."""

    def before_step(engine: DynamicInferenceEngine) -> None:
        if engine.num_steps in steps:
            engine.suspend(mode)
            engine.resume()

    return before_step


def tokens_of(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    """Tokens of the first sample of each output."""
    return [output.outputs[0].token_ids for output in outputs]


def logprobs_of(sample: CompletionOutput) -> list[float]:
    """Log probabilities of a sample's own tokens."""
    return [entry[token].logprob for entry, token in zip(sample.logprobs or (), sample.token_ids, strict=True)]


def each_of(values: Iterable[Any]) -> Any:
    """A fixture of a module that takes these values in turn."""
    return pytest.fixture(scope="module", params=values)(lambda request: request.param)
