"""Megatron-RL's InferenceInterface over a live model in the same process.

    interface = await LocalInterface.launch(model, config=InferenceConfig(...), tokenizer=tokenizer)
    response = await interface.agenerate(interface.prepare_request("...", GenericGenerationArgs(max_tokens=64)))
    await interface.suspend()       # train; unfinished requests are paused and continue after resume()
    interface.set_generation_epoch(iteration)
    await interface.resume()

Names and fields are those of megatron/rl (inference/api.py, inference/inference_interface.py, server/api.py), without
HTTP in between. The engine steps on a thread of its own, so the event loop stays free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.async_llm import EngineThread
from megatron_infer.engine.chosen_config import ConfigOrOptions
from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.rl.prompts import chat_ids
from megatron_infer.rl.session import RolloutSession


@dataclass(frozen=True, slots=True)
class LLMChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericGenerationArgs:
    """None means: temperature 1, no top-k, no top-p, tokens up to the engine's longest sequence."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    max_tokens: int | None = None

    def add(self, generation_args: GenericGenerationArgs) -> GenericGenerationArgs:
        """These arguments, overridden by those that `generation_args` sets."""
        return replace(self, **{name: value for name, value in asdict(generation_args).items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    prompt: list[LLMChatMessage]
    generation_args: GenericGenerationArgs = field(default_factory=GenericGenerationArgs)
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceResponse:
    response: LLMChatMessage
    raw_text: str
    """Text of prompt and answer, with special tokens."""
    token_ids: list[int]
    """Tokens of prompt and answer."""
    prompt_length: int
    logprobs: list[float]
    """One per token of the answer; with logprobs_mode "processed" under the distribution they were drawn from."""
    policy_iteration: list[int]
    """For each token of the answer, the version of the weights that drew it."""
    kv_cache_iteration: list[int]
    """For each token of the answer, the oldest version of any key and value that it attended to."""
    completed_at_step: int
    """Weight version when it ended."""
    num_evictions: int


class LocalInterface:
    """Megatron-RL's InferenceInterface and InferenceServer over a `RolloutSession`, in one process."""

    def __init__(self, session: RolloutSession) -> None:
        """Use `launch`."""
        if session.engine.rank_group.size > 1:
            raise NotImplementedError(
                "LocalInterface over an engine of several ranks; take RolloutSession, whose calls all ranks make"
            )
        self.session = session
        self._block = ExitStack()
        self._thread = EngineThread(session.engine)

    @classmethod
    async def launch(
        cls, model: Any, *, config: ConfigOrOptions = None, tokenizer: Any, **session: Any
    ) -> LocalInterface:
        """Adopt the live model (in its wrappers) and begin to generate. session: options of RolloutSession."""
        config = {"logprobs_mode": "processed"} if config is None else config
        interface = cls(RolloutSession(model, config, tokenizer, **session))
        await interface.resume()
        return interface

    # ------------------------------------------------------------------ requests
    def prepare_request(
        self, prompt: str | Sequence[LLMChatMessage], generation_args: GenericGenerationArgs
    ) -> InferenceRequest:
        messages = [LLMChatMessage("user", prompt)] if isinstance(prompt, str) else list(prompt)
        return InferenceRequest(prompt=messages, generation_args=generation_args)

    async def base_generate(self, request: InferenceRequest) -> InferenceResponse:
        """Any number of calls may run at once. Waits while the engine is suspended; cancelling aborts the request."""
        engine = self.session.engine
        prompt = chat_ids(engine, [asdict(message) for message in request.prompt], request.tools)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[RequestOutput] = loop.create_future()

        def settle(item: RequestOutput | BaseException) -> None:
            if done.done():
                return
            if isinstance(item, BaseException):
                done.set_exception(item)
            elif item.finished:
                done.set_result(item)

        def sink(item: RequestOutput | BaseException) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, item)

        params = params_of(request.generation_args)
        submitted = self._thread.submit({"prompt_token_ids": prompt}, params, None, "final", sink)
        try:
            await asyncio.wrap_future(submitted)
            output = await done
        except asyncio.CancelledError:
            submitted.add_done_callback(self._abort)
            raise
        return self._response(output)

    async def agenerate(self, request: InferenceRequest) -> InferenceResponse:
        return await self.base_generate(request)

    def generate(self, request: InferenceRequest) -> InferenceResponse:
        """For code outside of an event loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.agenerate(request))
        raise InferenceError("generate() inside an event loop would block it; use `await agenerate(...)`")

    # ------------------------------------------------------------------ between generation and training
    async def suspend(self) -> None:
        """Enter `session.training()`: memory is released by the session's suspend mode, requests are paused."""
        await self._on_thread(lambda: self._enter(self.session.training()))

    async def resume(self) -> None:
        """Continue generating; changed weights are detected."""
        await self._on_thread(lambda: self._enter(self.session.generating(restore_rng=False)))

    def set_generation_epoch(self, generation_epoch: int) -> None:
        """Set the weight version: tokens, keys and values from here on have this iteration's number."""
        self._thread.call(lambda: self.session.update_weights(version=generation_epoch)).result()

    async def kill(self) -> None:
        """Shut down: waiting requests fail with an error, the model is left as the trainer had it."""
        await self._on_thread(self._block.close)
        await asyncio.to_thread(self._thread.stop)

    # ------------------------------------------------------------------ internals
    def _enter(self, block: Any) -> None:
        self._block.close()
        self._block.enter_context(block)

    def _abort(self, submitted: Future[str]) -> None:
        """Abort a submitted request whose caller was cancelled."""
        if not submitted.cancelled() and submitted.exception() is None:
            self._thread.abort(submitted.result())

    async def _on_thread(self, command: Any) -> None:
        """Enter and leave session blocks on the engine's thread: autograd's switch is per thread."""
        await asyncio.wrap_future(self._thread.call(command))

    def _response(self, output: RequestOutput) -> InferenceResponse:
        if output.error is not None:
            raise output.error
        sample = output.outputs[0]
        prompt, answer = list(output.prompt_token_ids), list(sample.token_ids)
        tokenizer: Any = self.session.tokenizer
        policies, caches = per_token(sample.spans, len(answer))
        return InferenceResponse(
            response=LLMChatMessage("assistant", sample.text),
            raw_text=tokenizer.decode(prompt + answer, skip_special=False),
            token_ids=prompt + answer,
            prompt_length=len(prompt),
            logprobs=[entry[token].logprob for token, entry in zip(answer, sample.logprobs or [], strict=True)],
            policy_iteration=policies,
            kv_cache_iteration=caches,
            completed_at_step=policies[-1] if policies else self.session.weight_version,
            num_evictions=output.metrics.num_evictions,
        )


def params_of(args: GenericGenerationArgs) -> SamplingParams:
    values: Mapping[str, Any] = {name: value for name, value in asdict(args).items() if value is not None}
    if values.get("max_tokens", 1) < 1:
        raise ConfigError(f"max_tokens is {values['max_tokens']}, it must be at least 1")
    return SamplingParams.from_dict({"max_tokens": None, "logprobs": 0, **values})


def per_token(spans: Sequence[Any], count: int) -> tuple[list[int], list[int]]:
    """(policy version, oldest KV version) of each of `count` tokens."""
    policies: list[int] = []
    caches: list[int] = []
    ends = [span.first_token for span in spans[1:]] + [count]
    for span, end in zip(spans, ends, strict=False):
        policies += [span.policy_version] * (end - span.first_token)
        caches += [span.kv_version_min] * (end - span.first_token)
    return policies, caches
