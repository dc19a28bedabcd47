"""A fake LLM with the engine's interface: its output is the prompt's ids reversed, one token per step."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import InferenceError, InvalidPrompt, PromptTooLong
from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from megatron_infer.scheduler.drafts import SpecDecodeMetrics

LIMIT = 200


class FakeTokenizer:
    """One token per byte."""

    has_chat_template = True
    special_ids = frozenset({0})
    eos_ids = (0,)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        assert add_generation_prompt
        return "".join(f"<{m['role'][0]}>{m['content']}" for m in messages)


class FakeEngine:
    """Each request outputs its prompt reversed. interrupt_at: the step of a Ctrl-C; fail: prompts that fail."""

    def __init__(self) -> None:
        self.live: dict[str, Any] = {}
        self.added: list[Any] = []
        self.num_steps = 0
        self.interrupt_at: int | None = None
        self.fail: set[bytes] = set()
        self.drafts: SpecDecodeMetrics | None = None

    def spec_decode_metrics(self) -> SpecDecodeMetrics | None:
        """Three more drafts whenever it is called, of which two were kept; None without drafts."""
        if self.drafts is not None:
            counts = {"drafted_per_position": [2, 1], "accepted_per_position": [2, 0]}
            for name, new in counts.items():
                had = getattr(self.drafts, name) or [0, 0]
                setattr(self.drafts, name, [a + b for a, b in zip(had, new, strict=True)])
            self.drafts.num_verifications += 2
        return None if self.drafts is None else replace(self.drafts)

    def add_request(
        self, prompt: Any, params: SamplingParams, *, request_id: str | None = None, stream: str = "cumulative"
    ) -> str:
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidPrompt("the prompt is empty")
        if len(ids) > LIMIT:
            raise PromptTooLong(got=len(ids), limit=LIMIT, limit_name="limit", remedy="shorten it")
        request_id = request_id or str(len(self.added))
        metrics = RequestMetrics(arrival_time=0.0, num_prompt_tokens=len(ids))
        self.live[request_id] = SimpleNamespace(
            id=request_id, ids=ids, params=params, stream=stream, drawn=[], metrics=metrics, stopped=False
        )
        self.added.append(self.live[request_id])
        return request_id

    def has_unfinished(self) -> bool:
        return bool(self.live)

    def step(self) -> list[RequestOutput]:
        self.num_steps += 1
        if self.interrupt_at == self.num_steps:
            raise KeyboardInterrupt
        outputs = []
        for r in list(self.live.values()):
            answer = r.ids[::-1]
            r.drawn.append(answer[len(r.drawn) % len(answer)])
            error = InferenceError("the forward raised") if bytes(r.ids) in self.fail else None
            done = len(r.drawn) >= (r.params.max_tokens or 10**9) or (
                not r.params.ignore_eos and len(r.drawn) >= len(answer)
            )
            if done or error is not None:
                del self.live[r.id]
            if done or error is not None or r.stream == "cumulative":
                outputs.append(self._output(r, "error" if error else "length" if done else None, error))
        return outputs

    def abort(self, request_id: str) -> RequestOutput:
        return self._output(self.live.pop(request_id), "abort", None)

    def stats(self) -> Any:
        counters = {"prefix_hits": 0, "paused": 0}
        return SimpleNamespace(num_steps=self.num_steps, num_blocks=8, num_free_blocks=8, counters=counters)

    @staticmethod
    def _output(r: Any, reason: str | None, error: Any) -> RequestOutput:
        r.metrics.num_output_tokens = len(r.drawn) * r.params.n
        r.metrics.first_token_time = 0.25
        logprobs = None
        if r.params.logprobs is not None:
            logprobs = [{t: Logprob(-0.5, 1, chr(t))} for t in r.drawn]
        outputs = [
            CompletionOutput(
                index=i,
                text=bytes(r.drawn).decode(errors="replace"),
                token_ids=list(r.drawn),
                logprobs=logprobs,
                cumulative_logprob=None if logprobs is None else -0.5 * len(r.drawn),
                finish_reason=reason,
            )
            for i in range(r.params.n)
        ]
        return RequestOutput(r.id, None, r.ids, None, outputs, reason is not None, r.metrics, error=error)


class FakeLLM:
    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.tokenizer = FakeTokenizer()


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture
def command(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """command("generate", "model", "--prompt", "x") -> exit code, on the fake LLM."""

    def call(name: str, *argv: str) -> int:
        module = importlib.import_module(f"megatron_infer.cli.{name}")
        monkeypatch.setattr(module, "load_llm", lambda args: llm)
        parser = argparse.ArgumentParser()
        module.add_parser(parser.add_subparsers(required=True))
        args = parser.parse_args([name, *argv])
        assert args.run is module.run
        return module.run(args)

    return call
