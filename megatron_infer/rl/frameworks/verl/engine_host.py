"""An engine in the workers of a replica of verl.

    first worker     a thread that steps the engine, and a thread that answers the calls of the replica's server
    other workers    a thread that follows the first one

verl calls `update` in every worker, with the tensors of each. All else comes from the first worker alone.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.async_llm import EngineThread
from megatron_infer.errors import WeightUpdateError
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.rl.session import RolloutSession

log = logging.getLogger("megatron_infer.verl")

CALL = "verl()"
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


class EngineHost:
    """One rank's side of an engine. Its methods return futures; on other ranks than the first, those of `training` and
    `generating` are done at once, as the first rank's are awaited too."""

    def __init__(self, session: RolloutSession, config: Any, server: Any) -> None:
        """server: handle of a `RolloutServer`; None on other ranks than the first. The engine is suspended until
        `generating`."""
        self.session = session
        self._config = config
        self._server = server
        self._block = ExitStack()
        self._running: set[str] = set()
        self._failure: BaseException | None = None
        self._updates: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        engine = session.engine
        if server is None:
            threading.Thread(target=self._follow, name="megatron-infer-verl", daemon=True).start()
            return
        self._thread = EngineThread(engine)
        self.training().result()
        ray.get(server.attach.remote())
        threading.Thread(target=self._take_calls, name="megatron-infer-verl", daemon=True).start()

    def training(self) -> Future[None]:
        """The engine is suspended, and the model is the trainer's."""
        return self._on_all_ranks("training")

    def generating(self) -> Future[None]:
        return self._on_all_ranks("generating")

    def update(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` on every rank at the same time, each its own -> its result here."""
        if self._failure is not None:
            raise self._failure
        done: Future[Any] = Future()
        self._updates.put((work, done))
        self._on_all_ranks("update").add_done_callback(lambda one: self._refuse_updates(one.exception()))
        return done

    def reset_prefix_cache(self) -> Future[None]:
        return self._thread.call(self.session.engine.reset_prefix_cache)

    def _on_all_ranks(self, command: str) -> Future[Any]:
        if self._server is None:
            done: Future[Any] = Future()
            done.set_result(None)
            return done
        return self._thread.call(lambda: self._carry_out(command))

    def _carry_out(self, command: str) -> None:
        if self.session.engine.rank_group.size > 1:
            self.session.engine.relay.meet(CALL, command)
        if command == "update":
            self._run_update()
            return
        self._block.close()
        session = self.session
        self._block.enter_context(
            session.training() if command == "training" else session.generating(restore_rng=False)
        )

    def _run_update(self) -> None:
        limit_s = self.session.engine.config.collective_timeout_s
        taken: list[tuple[Callable[[], Any], Future[Any]]] = []
        try:
            with self.session.engine.rank_group.together("verl's update_weights"):
                try:
                    taken.append(self._updates.get(timeout=limit_s))
                except queue.Empty:
                    raise WeightUpdateError(f"verl did not call update_weights here within {limit_s:g} s") from None
        except BaseException as error:
            for _, done in taken:
                done.set_exception(error)
            raise
        work, done = taken[0]
        _settle(done, work)

    def _follow(self) -> None:
        try:
            self.session.engine.follow({CALL: self._carry_out})
        except BaseException as error:
            self._failure = error
            self._refuse_updates(error)

    def _refuse_updates(self, error: BaseException | None) -> None:
        while error is not None and not self._updates.empty():
            self._updates.get()[1].set_exception(error)

    def abort_all(self) -> Future[int]:
        """End all requests with what they have -> how many there were."""

        def end() -> int:
            running, self._running = self._running, set()
            for request_id in running:
                self._thread.abort(request_id)
            return len(running)

        return self._thread.call(end)

    def generate(self, prompt_ids: list[int], given: dict[str, Any]) -> Future[TokenOutput]:
        engine = self.session.engine
        done: Future[TokenOutput] = Future()
        params = sampling_params(given, self._config, len(prompt_ids), engine.sizes.max_sequence_length)

        def sink(item: RequestOutput | BaseException) -> None:
            if isinstance(item, BaseException):
                done.set_exception(item)
            elif item.finished:
                self._running.discard(item.request_id)
                _settle(done, lambda: token_output(item, engine.weight_version))

        def submitted(request: Future[str]) -> None:
            error = request.exception()
            if error is not None:
                done.set_exception(error)
            elif not done.done():
                self._running.add(request.result())

        self._thread.submit({"prompt_token_ids": prompt_ids}, params, None, "final", sink).add_done_callback(submitted)
        return done

    def _take_calls(self) -> None:
        while True:
            try:
                calls = ray.get(self._server.take.remote())
            except ray.exceptions.RayError as error:  # the job ends, or the actor has died with its requests
                log.info("no more calls: %s", error)
                return
            for number, name, args in calls:
                future: Future[Any] = Future()
                try:
                    future = getattr(self, name)(*args)
                except Exception as error:  # the caller's
                    future.set_exception(error)
                future.add_done_callback(lambda done, number=number: self._answer(number, done))

    def _answer(self, number: int, done: Future[Any]) -> None:
        error = done.exception()
        text = "" if error is None else f"{type(error).__name__}: {error}"
        self._server.settle.remote(number, None if text else done.result(), text)


def _settle(future: Future[Any], result: Callable[[], Any]) -> None:
    try:
        future.set_result(result())
    except Exception as error:  # raised at the caller
        future.set_exception(error)
