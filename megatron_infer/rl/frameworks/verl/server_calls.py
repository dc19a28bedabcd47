"""verl's calls of a replica's server, carried out by the engine of the replica's first worker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.rl.frameworks.engine_host import EngineHost

log = logging.getLogger("megatron_infer.verl")

REASONS = {"stop": "completed", "length": "completed", "abort": "aborted"}
"""finish_reason -> verl's stop_reason."""


def sampling_params(given: Mapping[str, Any], config: Any, num_prompt: int, max_length: int) -> SamplingParams:
    """Raises RequestError for an unknown parameter, and for a prompt that leaves no room."""
    values = {"repetition_penalty": config.repetition_penalty, "ignore_eos": config.ignore_eos, **given}
    limits = [values.pop(name) for name in ("max_tokens", "max_new_tokens") if name in values]
    room = config.prompt_length + config.response_length - num_prompt
    limit = limits[0] if limits else min(config.response_length, room)
    return SamplingParams.from_dict(
        values
        | {
            "max_tokens": max(1, min(limit, max_length - num_prompt)),
            "top_k": max(0, values.get("top_k", 0)),
            "logprobs": 0 if values.get("logprobs") else None,
            "return_routing": bool(config.enable_rollout_routing_replay),
            "detokenize": False,
        }
    )


def token_output(output: RequestOutput, version: int) -> TokenOutput:
    """verl's form of a finished output. version: that of an output without tokens. Raises the request's error."""
    if output.error is not None:
        raise output.error
    sample = output.outputs[0]
    versions = [span.policy_version for span in sample.spans] or [version]
    logprobs = None
    if sample.logprobs is not None:
        logprobs = [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
    return TokenOutput(
        token_ids=list(sample.token_ids),
        log_probs=logprobs,
        routed_experts=sample.routing,
        stop_reason=REASONS.get(sample.finish_reason or "", sample.finish_reason),
        num_preempted=output.metrics.num_pauses + output.metrics.num_evictions,
        extra_fields={
            "global_steps": versions[-1],
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            "num_cached_tokens": output.num_cached_tokens,
        },
    )


class ServerCalls:
    """A thread that takes the calls of a `RolloutServer`, and settles them."""

    def __init__(self, host: EngineHost, config: Any, server: Any) -> None:
        """server: handle of the `RolloutServer`."""
        self._host = host
        self._config = config
        self._server = server
        ray.get(server.attach.remote())
        threading.Thread(target=self._take, name="megatron-infer-verl", daemon=True).start()

    def _generate(self, prompt_ids: list[int], given: dict[str, Any]) -> Future[TokenOutput]:
        engine = self._host.session.engine
        params = sampling_params(given, self._config, len(prompt_ids), engine.sizes.max_sequence_length)
        return self._host.generate(prompt_ids, params, lambda output: token_output(output, engine.weight_version))

    def _take(self) -> None:
        while True:
            try:
                calls = ray.get(self._server.take.remote())
            except ray.exceptions.RayError as error:  # the job ends, or the actor has died with its requests
                log.info("no more calls: %s", error)
                return
            for number, name, args in calls:
                future: Future[Any] = Future()
                try:
                    future = (self._generate if name == "generate" else getattr(self._host, name))(*args)
                except Exception as error:  # the caller's
                    future.set_exception(error)
                future.add_done_callback(lambda done, number=number: self._answer(number, done))

    def _answer(self, number: int, done: Future[Any]) -> None:
        error = done.exception()
        text = "" if error is None else f"{type(error).__name__}: {error}"
        self._server.settle.remote(number, None if text else done.result(), text)
