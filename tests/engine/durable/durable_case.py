"""Engines and requests that the tests of saved requests share."""

from __future__ import annotations

import engines
import model_kinds

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine

VOCAB = 128
PROMPT = list(range(5, 45))


def make_model(**changes):
    return model_kinds.make_model("attention", **changes)


def make_engine(model, **settings) -> DynamicInferenceEngine:
    """Pools of any block size and many requests fit."""
    sizes = {"buffer_size_gb": 0.05, "max_sequence_length": 200, "max_tokens": 64, "enable_chunked_prefill": True}
    return engines.make_engine(model, **sizes | settings)


def pool_of(model, num_blocks: int) -> float:
    """buffer_size_gb of a pool of `num_blocks` usable blocks of 16 tokens."""
    return (num_blocks + 1.5) * make_engine(model).sizes.block_bytes / 2**30


def add_all(engine) -> None:
    """Requests of every kind; with 64 tokens a step the third prompt takes several steps, with 6 rows some wait."""
    engine.add_request(PROMPT, SamplingParams(max_tokens=18, temperature=0.0, ignore_eos=True, logprobs=3))
    sampled = SamplingParams(n=4, max_tokens=20, logprobs=2, prompt_logprobs=1, stop_token_ids=list(range(0, VOCAB, 9)))
    engine.add_request(PROMPT[3:], sampled, request_id="group", stream="delta")
    engine.add_request(list(range(VOCAB)), SamplingParams(max_tokens=25, temperature=0.9, seed=7, ignore_eos=True))
    engine.add_request(PROMPT[::-1], SamplingParams(max_tokens=9, temperature=1.1), stream="final")
    penalties = SamplingParams(max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={3: 2.0})
    engine.add_request(PROMPT[:5], penalties, stream="delta", request_id="biased")


class Collector:
    """What a caller sees of each sample: tokens, text and logprobs put together, and how it ended."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.text: dict[tuple[str, int], str] = {}
        self.logprobs: dict[tuple[str, int], list] = {}
        self.ends: dict[tuple[str, int], tuple] = {}
        self.finished: dict[str, object] = {}

    def take(self, outputs, *, deltas: tuple[str, ...] = ("group", "biased")) -> None:
        for output in outputs:
            for one in output.outputs:
                key = (output.request_id, one.index)
                if output.request_id not in deltas:
                    self.tokens[key], self.text[key], self.logprobs[key] = [], "", []
                self.tokens[key] = self.tokens.get(key, []) + one.token_ids
                self.text[key] = self.text.get(key, "") + one.text
                self.logprobs[key] = self.logprobs.get(key, []) + (one.logprobs or [])
                if one.finish_reason is not None:
                    self.ends[key] = (one.finish_reason, one.stop_reason)
            if output.finished:
                assert output.request_id not in self.finished
                self.finished[output.request_id] = output

    def step(self, engine, count: int | None = None, **options) -> Collector:
        """Run `count` steps, or to the end."""
        while engine.has_unfinished() if count is None else count:
            self.take(engine.step(), **options)
            count = None if count is None else count - 1
        return self


def assert_same(got: Collector, want: Collector) -> None:
    assert got.tokens == want.tokens and got.ends == want.ends and got.text == want.text
    for key, positions in want.logprobs.items():
        for mine, theirs in zip(got.logprobs[key], positions, strict=True):
            # Computed in other batches the last bits differ, and with them the order of near-equal ones.
            token = next(iter(theirs))
            assert next(iter(mine)) == token and abs(mine[token].logprob - theirs[token].logprob) < 1e-4
