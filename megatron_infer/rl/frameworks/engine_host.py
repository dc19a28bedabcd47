"""An engine in the workers of a framework.

    first worker     a thread that steps the engine
    other workers    a thread that follows the first one

The framework calls `update` in every worker. All else comes from the first worker alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.async_llm import EngineThread
from megatron_infer.errors import WeightUpdateError
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.rl.session import RolloutSession

BLOCK = "framework's block()"
UPDATE = "framework's update()"


class EngineHost:
    """One rank's side of an engine. Its methods return futures; on other ranks than the first, those of `training` and
    `generating` are done at once, as the first rank's are awaited too."""

    def __init__(self, session: RolloutSession) -> None:
        """The engine is suspended until `generating`."""
        session.engine.relay.require_shared("stepping on a thread, as frameworks do,")
        self.session = session
        self.is_leader = session.engine.relay.is_leader
        self._calls = {BLOCK: self._enter_block, UPDATE: self._run_update}
        self._block = ExitStack()
        self._running: set[str] = set()
        self._failure: BaseException | None = None
        self._updates: queue.SimpleQueue[tuple[int, Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        """Their numbers are equal on all ranks: how many calls of `update` there were."""
        self._num_updates = 0
        self._missed = 0
        """Number of the last update that did not come here in time."""
        if not self.is_leader:
            threading.Thread(target=self._follow, name="megatron-infer-follower", daemon=True).start()
            return
        self._thread = EngineThread(session.engine)
        self.training().result()

    def training(self) -> Future[None]:
        """The engine is suspended, and the model is the trainer's."""
        return self._on_all_ranks(BLOCK, "training")

    def generating(self) -> Future[None]:
        return self._on_all_ranks(BLOCK, "generating")

    def update(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` on every rank at the same time, each its own -> its result here.

        An update that is later than collective_timeout_s on any rank fails on all of them, with WeightUpdateError here.
        """
        if self._failure is not None:
            raise self._failure
        done: Future[Any] = Future()
        self._num_updates += 1
        number = self._num_updates
        self._updates.put((number, work, done))
        if number <= self._missed:
            self._refuse_updates(_too_late(number))
        self._on_all_ranks(UPDATE, number).add_done_callback(lambda one: self._refuse_updates(one.exception()))
        return done

    def reset_prefix_cache(self) -> Future[None]:
        return self._thread.call(self.session.engine.reset_prefix_cache)

    def abort_all(self) -> Future[int]:
        """End all requests with what they have -> how many there were."""

        def end() -> int:
            running, self._running = self._running, set()
            for request_id in running:
                self._thread.abort(request_id)
            return len(running)

        return self._thread.call(end)

    def generate(
        self, prompt_ids: list[int], params: SamplingParams, convert: Callable[[RequestOutput], Any]
    ) -> Future[Any]:
        """`convert` of the finished output, on the thread that steps the engine; what it raises is the future's."""
        done: Future[Any] = Future()

        def sink(item: RequestOutput | BaseException) -> None:
            if isinstance(item, BaseException):
                done.set_exception(item)
            elif item.finished:
                self._running.discard(item.request_id)
                _settle(done, lambda: convert(item))

        def submitted(request: Future[str]) -> None:
            error = request.exception()
            if error is not None:
                done.set_exception(error)
            elif not done.done():
                self._running.add(request.result())

        self._thread.submit({"prompt_token_ids": prompt_ids}, params, None, "final", sink).add_done_callback(submitted)
        return done

    # ------------------------------------------------------------------ all ranks

    def _on_all_ranks(self, call: str, argument: Any) -> Future[Any]:
        if not self.is_leader:
            done: Future[Any] = Future()
            done.set_result(None)
            return done
        return self._thread.call(lambda: self._carry_out(call, argument))

    def _carry_out(self, call: str, argument: Any) -> None:
        if self.session.engine.rank_group.size > 1:
            self.session.engine.relay.meet(call, argument)
        self._calls[call](argument)

    def _enter_block(self, name: str) -> None:
        self._block.close()
        session = self.session
        self._block.enter_context(session.training() if name == "training" else session.generating(restore_rng=False))

    def _run_update(self, number: int) -> None:
        taken: list[tuple[Callable[[], Any], Future[Any]]] = []
        try:
            with self.session.engine.rank_group.together("a weight update"):
                taken.append(self._taken(number))
        except BaseException as error:
            for _, done in taken:
                done.set_exception(error)
            raise
        work, done = taken[0]
        _settle(done, work)

    def _taken(self, number: int) -> tuple[Callable[[], Any], Future[Any]]:
        """This rank's side of an update of the leader's. Earlier ones have failed on the other ranks."""
        limit_s = self.session.engine.config.collective_timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            try:
                own, work, done = self._updates.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                error = WeightUpdateError(f"the framework did not update the weights here within {limit_s:g} s")
                self._missed = number
                self._refuse_updates(error)  # what came since: `update` refuses what comes from now on
                raise error from None
            if own == number:
                return work, done
            done.set_exception(_too_late(own))

    def _follow(self) -> None:
        try:
            self.session.engine.follow({call: partial(self._carry_out, call) for call in self._calls})
        except BaseException as error:
            self._failure = error
            self._refuse_updates(error)

    def _refuse_updates(self, error: BaseException | None) -> None:
        while error is not None:
            try:
                *_, done = self._updates.get_nowait()
            except queue.Empty:
                return
            done.set_exception(error)


def _too_late(number: int) -> WeightUpdateError:
    return WeightUpdateError(f"weight update {number} came too late here, and has failed on all ranks; update again")


def _settle(future: Future[Any], result: Callable[[], Any]) -> None:
    try:
        future.set_result(result())
    except Exception as error:  # raised at the caller
        future.set_exception(error)
