"""Shared by tests of pipelines: tiny engines, contexts of a workload, and loops over `execute`."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

from model_kinds import buffers, make_model

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.outputs.request_output import CompletionOutput
from megatron_infer.pipelines.mcore_model import McorePipelineModel
from megatron_infer.pipelines.overlap import OverlapTextGenerationPipeline
from megatron_infer.pipelines.text_generation import TextContext, TextGenerationInputs, TextGenerationOutput

VOCAB = 128
CLOSE = 5e-5
"""Between log probabilities of the same tokens computed in other steps."""
BASE: dict[str, Any] = {
    "buffer_size_gb": 0.01,
    "block_size_tokens": 16,
    "max_sequence_length": 200,
    "max_requests": 8,
    "max_tokens": 64,
    "enable_chunked_prefill": True,
    "check_invariants": True,
}


@lru_cache(maxsize=4)
def model_of(kind: str):
    return make_model(kind, vocab_size=VOCAB)


def make_engine(kind: str = "attention", *, blocks: int | None = None, **settings: Any) -> DynamicInferenceEngine:
    """blocks: of the pool; None: as many as any test needs."""
    if blocks is not None:
        settings |= buffers(model_of(kind), blocks=blocks, block_size=16, max_requests=BASE["max_requests"])
    return DynamicInferenceEngine(model_of(kind), InferenceConfig(**BASE | settings))


def workload(count: int = 10, seed: int = 1) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 90))],
            SamplingParams(max_tokens=rng.randint(1, 16), temperature=rng.choice([0.0, 1.0]), seed=number, logprobs=1),
        )
        for number in range(count)
    ]


def contexts_of(work, prefix: str = "") -> list[TextContext]:
    return [
        TextContext(request_id=f"{prefix}{number}", tokens=list(prompt), prompt_len=len(prompt), params=params)
        for number, (prompt, params) in enumerate(work)
    ]


def collect(answers: dict[str, TextGenerationOutput], news: dict[str, TextGenerationOutput]) -> None:
    for request_id, output in news.items():
        if request_id in answers:
            answers[request_id].extend(output)
        else:
            answers[request_id] = output


def run_to_end(
    pipeline: OverlapTextGenerationPipeline, contexts: list[TextContext], rng: random.Random | None = None
) -> dict[str, TextGenerationOutput]:
    """Execute until all have ended, with rng random ones of them each time -> answers by id."""
    answers: dict[str, TextGenerationOutput] = {}
    while any(not context.is_done for context in contexts):
        live = [context for context in contexts if not context.is_done]
        chosen = live if rng is None else rng.sample(live, rng.randint(1, len(live)))
        collect(answers, pipeline.execute(TextGenerationInputs.of(chosen)))
    while pipeline.has_pending_outputs():
        collect(answers, pipeline.execute(TextGenerationInputs.empty()))
    return answers


def check_same(answers: dict[str, TextGenerationOutput], expected, prefix: str = "") -> None:
    """Tokens, log probabilities and ends equal those of `engine.generate`."""
    assert answers.keys() == {f"{prefix}{number}" for number in range(len(expected))}
    for number, output in enumerate(expected):
        answer, sequence = answers[f"{prefix}{number}"], output.outputs[0]
        assert answer.tokens == sequence.token_ids
        assert (answer.final_status.value == "end_of_sequence") == (sequence.finish_reason == "stop")
        found = answer.log_probabilities.token_log_probabilities
        assert max(abs(a - b) for a, b in zip(found, drawn(sequence), strict=True)) < CLOSE


def generate_by_hand(model: McorePipelineModel, contexts, *, claims: bool, steps: int = 6, top: int = 3, echo=False):
    """Greedy tokens -> log probabilities of each step by context."""
    manager, found = model.kv_manager, [[] for _ in contexts]
    kv_inputs = None
    if claims:
        for context in contexts:
            manager.claim(context.request_id)
            manager.alloc(context, num_steps=steps)
        kv_inputs = manager.runtime_inputs(contexts)
    inputs = model.prepare_initial_token_inputs(contexts, kv_cache_inputs=kv_inputs)
    for number in range(steps):
        outputs = model.execute(inputs)
        tokens = outputs.next_token_logits.argmax(-1)
        count = len(contexts)
        scored = model.compute_log_probabilities(
            model.session, inputs, outputs, tokens, [top] * count, [echo and number == 0] * count
        )
        for context, token, scores, one in zip(contexts, tokens.tolist(), scored, found, strict=True):
            context.update(token)
            one.append(scores)
        manager.step(contexts)
        if number < steps - 1:
            inputs = model.prepare_next_token_inputs(tokens, inputs)
    return found


def drawn(sequence: CompletionOutput) -> list[float]:
    """Log probabilities of a sequence's tokens."""
    return [entry[token].logprob for token, entry in zip(sequence.token_ids, sequence.logprobs, strict=True)]


def free_pages(engine: DynamicInferenceEngine) -> tuple[int, int]:
    return engine.replay.context.num_free_blocks, engine.replay.context.num_free_rows
