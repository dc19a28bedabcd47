"""What a trainer or an operator does with an engine, beside requests: stand still, give memory back, change weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_infer.config.inference import KVCacheManagementMode
from megatron_infer.engine.build import Assembly
from megatron_infer.engine.command_relay import DISMISS, ROLLOUT, CommandRelay
from megatron_infer.engine.states import EngineState, Lifecycle
from megatron_infer.engine.step_loop import StepLoop
from megatron_infer.engine.suspend import MemoryReport, Suspension
from megatron_infer.errors import ConfigError, InferenceError, WrongState, unknown_name

PAUSE_MODES = ("keep", "abort", "retract")
RUNNING_CHOICES = ("keep", "recompute")


def check_version(version: int, running: str) -> None:
    """Raise ConfigError for what weights cannot be taken as."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise ConfigError(f"version is {version!r}, it must be an integer of 0 or more")
    if running not in RUNNING_CHOICES:
        known = ", ".join(RUNNING_CHOICES)
        raise ConfigError(f"running: {unknown_name('value', str(running), RUNNING_CHOICES)}; one of {known}")


class EngineControls:
    """The commands that are transitions of `lifecycle.TRANSITIONS`: each happens whole or not at all.

    timeout_s of each: the time it may take, None for lifecycle.DEFAULT_TIMEOUT_S; past it the call raises
    TransitionTimeout, says what it was waiting for, and everything is as before.
    With several ranks every rank calls each of them, with the same arguments; they happen on all ranks or on none.
    """

    def __init__(self, parts: Assembly, loop: StepLoop) -> None:
        self.parts, self.loop = parts, loop
        self.lifecycle = Lifecycle()
        self._suspension = Suspension(parts, loop, self.lifecycle)
        self.relay: CommandRelay | None = None
        """What ties the ranks of this engine together; None for a process alone."""

    def _meet(self, call: str, **arguments: Any) -> None:
        """Begin a call that all ranks make."""
        if self.relay is not None:
            self.relay.meet(call, arguments)

    @property
    def state(self) -> EngineState:
        return self.lifecycle.state

    @property
    def suspended_tags(self) -> frozenset[str]:
        """What is suspended now."""
        return self._suspension.tags

    def pause(self, mode: str = "keep", *, timeout_s: float | None = None) -> None:
        """Stop between two steps and leave memory where it is; requests are accepted and wait.

        keep: everyone goes on at unpause() exactly where it stood. retract: everyone goes back to the queue, in order,
        and is computed anew. abort: everyone ends with the tokens it has; the outputs come with the next step().
        """
        if mode not in PAUSE_MODES:
            raise ConfigError(f"{unknown_name('pause mode', str(mode), PAUSE_MODES)}; one of {', '.join(PAUSE_MODES)}")
        self._meet("pause()", mode=mode, timeout_s=timeout_s)
        with self.lifecycle.transition("pause", timeout_s=timeout_s) as transition:
            self.loop.quiesce(transition.tick)
            if mode == "abort":
                self.loop.end_all()
            elif mode == "retract":
                self.parts.scheduler.requeue_all()

    def unpause(self, *, timeout_s: float | None = None) -> None:
        """Go on after pause(). Weights that changed meanwhile are noticed, however they were written."""
        self._meet("unpause()", timeout_s=timeout_s)
        with self.lifecycle.transition("unpause", timeout_s=timeout_s) as transition:
            with self.parts.rank_group.together("the look whether weights changed"):
                transition.tick("the look whether weights changed")
            self.parts.catch_up_with_weights(transition.tick)

    def suspend(
        self,
        mode: str | KVCacheManagementMode | None = None,
        tags: Iterable[str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> MemoryReport:
        """Stop between two steps and give memory back before returning; requests are accepted and wait.

        mode: what becomes of the KV cache (None: the config's kv_cache_management_mode). "persist" keeps it, "offload"
        moves the blocks that requests hold to host memory, "recompute" drops it and requests are computed anew.
        tags: any of "kv_cache", "weights" (copies derived from the weights; the parameters too if the engine owns them
        and they are on a device), "graphs"; None: all. More tags can follow while suspended.
        Raises TransitionFailed or TransitionTimeout with everything as it was before.
        """
        tags = None if tags is None else {tags} if isinstance(tags, str) else set(tags)
        self._meet("suspend()", mode=mode, tags=tags, timeout_s=timeout_s)
        return self._suspension.suspend(mode=mode, tags=tags, timeout_s=timeout_s)

    def resume(self, tags: Iterable[str] | None = None, *, timeout_s: float | None = None) -> MemoryReport:
        """Take back what was suspended (all, or `tags` now and the rest later) and go on once nothing is left.

        Trainers do resume({"weights"}), push weights, resume(). Weights that changed are noticed by their content.
        Raises TransitionFailed (out of memory, say) with the engine SUSPENDED as before: a retry may succeed.
        """
        tags = None if tags is None else {tags} if isinstance(tags, str) else set(tags)
        self._meet("resume()", tags=tags, timeout_s=timeout_s)
        return self._suspension.resume(tags=tags, timeout_s=timeout_s)

    @contextmanager
    def suspended(
        self, mode: str | KVCacheManagementMode | None = None, tags: Iterable[str] | None = None
    ) -> Iterator[MemoryReport]:
        """`with engine.suspended(): train()`: resumes whatever the body does. A failed resume is raised, beside the
        body's own error if there was one."""
        before = self.state
        try:
            report = self.suspend(mode, tags)
        except BaseException:  # an interrupt that had to wait until all was suspended
            if self.state is EngineState.SUSPENDED and before is not EngineState.SUSPENDED:
                self.resume()
            raise
        try:
            yield report
        except BaseException as error:
            if self.state is EngineState.SUSPENDED:
                try:
                    self.resume()
                except InferenceError as second:
                    error.add_note(f"the resume after it failed as well: {second}")
            raise
        if self.state is EngineState.SUSPENDED:
            self.resume()

    def set_weight_version(self, version: int, running: str = "keep", *, timeout_s: float | None = None) -> None:
        """The weights that the model has now are `version`: call it after writing them, in any state.

        Cached KV of earlier weights is never matched again and derived copies are rebuilt. running: "keep" lets
        unfinished requests go on with the KV they have (their spans say so), "recompute" computes it anew.
        """
        check_version(version, running)
        self._meet("update()", version=version, running=running, timeout_s=timeout_s)
        with self.lifecycle.transition("update", timeout_s=timeout_s) as transition:
            if self.parts.offloaded_weight_bytes():
                raise WrongState(
                    "set_weight_version() while the weights are on the host; call resume({'weights'}) first",
                    state=EngineState.SUSPENDED.value,
                )
            self.loop.quiesce(transition.tick)
            self.parts.accept_weights(version, transition.tick)
            if running == "recompute":
                self.parts.scheduler.requeue_all()

    def refresh_weights(self) -> None:
        """Weights changed in place: what set_weight_version(the next number) does; running requests keep their KV.

        Every step sees parameters updated in place or re-pointed by itself, and the first step after idling any change
        at all; call it when weights were written through `.data` while requests are running.
        """
        self.set_weight_version(self.parts.weight_version + 1)

    def follow(self, also: Mapping[str, Callable[[Any], Any]] | None = None) -> None:
        """On every rank but the leader: take part in what the leader calls until it calls dismiss().

        also: further calls of the leader's, by the name it meets the others under.
        For scripts that only the leader runs. Outputs of steps are the leader's to take.
        """
        if self.relay is None or self.relay.lockstep.is_leader:
            raise WrongState("follow() is for the ranks beside the leader of an engine", state=self.state.value)
        self.relay.follow(self.followed() | dict(also or {}))

    def dismiss(self) -> None:
        """On the leader: the other ranks' follow() returns. Without other ranks it does nothing."""
        if self.relay is not None:
            self.relay.require_leader(DISMISS)
            self.relay.meet(DISMISS)

    def followed(self) -> dict[str, Callable[[Any], Any]]:
        """What a leader may call, by the name it goes by."""
        return {
            "pause()": lambda given: self.pause(**given),
            "unpause()": lambda given: self.unpause(**given),
            "suspend()": lambda given: self.suspend(**given),
            "resume()": lambda given: self.resume(**given),
            "update()": lambda given: self.set_weight_version(**given),
            ROLLOUT: lambda given: self._meet(ROLLOUT),
            "reset_prefix_cache()": lambda given: self.reset_prefix_cache(),
            "verify_weights()": lambda given: self.verify_weights(),
        }

    def reset_prefix_cache(self) -> int:
        """Nothing computed before is matched by a later prompt -> cached blocks that came free. In any state.

        Requests under way keep what they have.
        """
        self._meet("reset_prefix_cache()")
        return self.parts.scheduler.reset_prefix_cache()

    def verify_weights(self) -> None:
        """Raise StaleCache if anything derived from the weights does not belong to those the model has now.

        Computes every derived copy once more; `parts.derived` is the registry to put one's own into.
        """
        self._meet("verify_weights()")
        self.parts.verify_derived()
