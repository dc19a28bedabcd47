"""What a trainer or an operator does with an engine beside requests: pause, suspend, change weights, save requests."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

from megatron_infer.config.inference import KVCacheManagementMode
from megatron_infer.engine.adapters import EngineAdapters, check_running
from megatron_infer.engine.command_relay import CommandRelay
from megatron_infer.engine.durable.parcel import Parcel
from megatron_infer.engine.durable.snapshot import RECOMPUTE, REFUSE, LoadReport
from megatron_infer.engine.durable.snapshot_manager import SnapshotManager
from megatron_infer.engine.lifecycle_commands import PAUSE_MODES
from megatron_infer.engine.logits_hooks import LogitsHook, LogitsHooks
from megatron_infer.engine.profile import StepProfiler
from megatron_infer.engine.requests.drawn_sequence import DrawnSequence
from megatron_infer.engine.states import EngineState, Lifecycle
from megatron_infer.engine.step_loop import StepLoop
from megatron_infer.engine.suspend import MemoryReport, Suspension
from megatron_infer.errors import ConfigError, InferenceError, UnknownRequest, WrongState, check_known
from megatron_infer.models.weights.manager import WeightManager
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.scheduler.scheduler import Scheduler


def check_version(version: int, running: str) -> None:
    """Raise ConfigError for a version that weights cannot have or an unknown choice for running requests."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise ConfigError(f"version is {version!r}, it must be an integer of 0 or more")
    check_running(running)


class EngineControls:
    """The transitions in `states.TRANSITIONS`, each of which happens whole or not at all, and files of requests.

    With several ranks each call begins on all of them together. `EngineCommands` and `DynamicInferenceEngine` document
    the methods.
    """

    def __init__(
        self,
        loop: StepLoop,
        scheduler: Scheduler,
        weights: WeightManager,
        lifecycle: Lifecycle,
        suspension: Suspension,
        snapshots: SnapshotManager,
        relay: CommandRelay,
        logits_hooks: LogitsHooks,
        profiler: StepProfiler,
        adapters: EngineAdapters,
    ) -> None:
        self.suspension, self.snapshots, self.adapters = suspension, snapshots, adapters
        self._loop, self._scheduler, self._weights = loop, scheduler, weights
        self._lifecycle, self._relay, self._logits_hooks = lifecycle, relay, logits_hooks
        self._profiler = profiler

    def on_logits(self, hook: LogitsHook) -> Callable[[], None]:
        if not callable(hook):
            raise ConfigError(f"on_logits takes a callable of (logits, metadata), got {hook!r}")
        self._relay.meet("on_logits()")
        self._logits_hooks.hooks.append(hook)
        return partial(self._logits_hooks.hooks.remove, hook)

    def profile(self, path: str | os.PathLike[str] | None, steps: int) -> None:
        if path is None:
            self._profiler.stop()
        else:
            self._profiler.start(path, steps)

    def pause(self, *, mode: str, timeout_s: float | None) -> None:
        check_known("pause mode", [mode], PAUSE_MODES, lists_known=True)
        self._relay.meet("pause()", {"mode": mode, "timeout_s": timeout_s})
        with self._lifecycle.transition("pause", timeout_s=timeout_s) as transition:
            self._loop.quiesce(transition.tick)
            if mode == "abort":
                self._loop.abort_all()
            elif mode == "retract":
                self._scheduler.requeue_all()

    def unpause(self, *, timeout_s: float | None) -> None:
        self._relay.meet("unpause()", {"timeout_s": timeout_s})
        with self._lifecycle.transition("unpause", timeout_s=timeout_s) as transition:
            self._weights.catch_up(transition.tick)

    def suspend(
        self, *, mode: str | KVCacheManagementMode | None, tags: Iterable[str] | None, timeout_s: float | None
    ) -> MemoryReport:
        tags = None if tags is None else {tags} if isinstance(tags, str) else set(tags)
        self._relay.meet("suspend()", {"mode": mode, "tags": tags, "timeout_s": timeout_s})
        return self.suspension.suspend(mode=mode, tags=tags, timeout_s=timeout_s)

    def resume(self, tags: Iterable[str] | None = None, *, timeout_s: float | None = None) -> MemoryReport:
        tags = None if tags is None else {tags} if isinstance(tags, str) else set(tags)
        self._relay.meet("resume()", {"tags": tags, "timeout_s": timeout_s})
        return self.suspension.resume(tags=tags, timeout_s=timeout_s)

    @contextmanager
    def suspended(self, mode: str | KVCacheManagementMode | None, tags: Iterable[str] | None) -> Iterator[MemoryReport]:
        before = self._lifecycle.state
        try:
            report = self.suspend(mode=mode, tags=tags, timeout_s=None)
        except BaseException:  # an interrupt that had to wait until all was suspended
            if self._lifecycle.state is EngineState.SUSPENDED and before is not EngineState.SUSPENDED:
                self.resume()
            raise
        try:
            yield report
        except BaseException as error:
            if self._lifecycle.state is EngineState.SUSPENDED:
                try:
                    self.resume()
                except InferenceError as second:
                    error.add_note(f"the resume after it failed as well: {second}")
            raise
        if self._lifecycle.state is EngineState.SUSPENDED:
            self.resume()

    def set_weight_version(self, *, version: int, running: str, timeout_s: float | None) -> None:
        check_version(version, running)
        self._relay.meet("update()", {"version": version, "running": running, "timeout_s": timeout_s})
        with self._lifecycle.transition("update", timeout_s=timeout_s) as transition:
            if self._weights.offloaded_bytes:
                raise WrongState(
                    "set_weight_version() while the weights are on the host; call resume({'weights'}) first",
                    state=EngineState.SUSPENDED.value,
                )
            self._loop.quiesce(transition.tick)
            if version < self._weights.highest_version:
                warnings.warn(
                    f"set_weight_version({version:,}): the engine had version {self._weights.highest_version:,} "
                    "before; spans and staleness of tokens count on rising versions, and take tokens of these weights "
                    f"for those of earlier ones; give {self._weights.highest_version + 1:,} or more",
                    stacklevel=4,
                )
            self._weights.accept(version, transition.tick)
            if running == "recompute":
                self._scheduler.requeue_all()

    def reset_prefix_cache(self, *, timeout_s: float | None) -> int:
        """timeout_s: not used, it is done at once."""
        self._relay.meet("reset_prefix_cache()", {"timeout_s": timeout_s})
        return self._scheduler.reset_prefix_cache()

    # ------------------------------------------------------------------ requests in files

    def save_requests(self, path: str | os.PathLike[str], *, kv: bool) -> None:
        if kv:
            self._relay.meet("save_requests()", {"path": os.fspath(path), "kv": True})
            self._lifecycle.require("save_requests(kv=True)", EngineState.RUNNING, EngineState.PAUSED)
            self._loop.drain()
        else:
            self._relay.require_leader("save_requests() without kv")
        self.snapshots.save(path, self._loop.backlog, kv=kv)

    def load_requests(self, path: str | os.PathLike[str], changed_adapters: str) -> LoadReport:
        if changed_adapters not in (REFUSE, RECOMPUTE):
            raise ConfigError(f"changed_adapters is {changed_adapters!r}, it must be {REFUSE!r} or {RECOMPUTE!r}")
        self._relay.meet("load_requests()", {"path": os.fspath(path), "changed_adapters": changed_adapters})
        self._lifecycle.require("load_requests()", EngineState.RUNNING, EngineState.PAUSED)
        content = self.snapshots.read(path, changed_adapters)
        self._loop.drain()
        return self.snapshots.put_back(content, self._loop.backlog)

    def hand_out(self, request_id: str, *, whole: bool) -> Parcel:
        self._relay.require_shared("hand_out()")
        self._relay.meet("hand_out()", {"request_id": request_id, "whole": whole})
        self._lifecycle.require("hand_out()", EngineState.RUNNING, EngineState.PAUSED)
        self._loop.drain()
        state = self._loop.output_processor.get(request_id)
        if state is None:
            raise UnknownRequest(f"no request {request_id!r} in the engine: it has finished or was never added")
        parcel = self.snapshots.hand_out(state, self._loop.backlog, whole=whole)
        self._loop.let_go(state)
        return parcel

    def take_in(
        self,
        parcel: Parcel | bytes | None,
        request_id: str | None,
        drawn: Sequence[DrawnSequence] | None,
        caller: int,
        *,
        whole: bool,
    ) -> LoadReport:
        self._relay.require_shared("take_in()")
        given = {"request_id": request_id, "drawn": None if drawn is None else list(map(asdict, drawn))}
        self._relay.meet("take_in()", {**given, "caller": caller, "whole": whole})
        self._lifecycle.require("take_in()", EngineState.RUNNING, EngineState.PAUSED)
        self._loop.drain()
        return self.snapshots.take_in(parcel, request_id, drawn, caller, whole=whole)

    def kept(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The outputs of step(), once kept files hold them; if writing fails, the next step() returns them."""
        if self.snapshots.journal is None:
            return outputs
        try:
            self.snapshots.stepped([*outputs, *self._loop.backlog])
        except BaseException:
            self._loop.backlog = outputs + self._loop.backlog
            raise
        return outputs
