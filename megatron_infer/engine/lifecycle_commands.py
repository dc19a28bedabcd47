# mypy: disable-error-code="no-any-return"
"""The lifecycle commands of an engine, in one table (`COMMANDS`). Every front forwards by it.

    front                                         a command goes to
    DynamicInferenceEngine                        `EngineControls` of this rank's engine, at once
    AsyncLLM                                      the same, on the engine's thread between two steps
    InferenceClient, AsyncInferenceClient         all replicas of a coordinator
    RayReplicas                                   all actors
    the control routes of HTTP (server/control)   all replicas, or none

A command is a method of a class below: the method has its name, its parameters and its meaning. The row in `COMMANDS`
has what a signature cannot say. A new command of the engine is a method of `EngineCommands` with a row here, and a
method of `EngineControls`. Every front has the command then, except HTTP: each dialect there has routes of its own
(`server.control`).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from megatron_infer.config.inference import KVCacheManagementMode
from megatron_infer.engine.states import TRANSITIONS, EngineState

PAUSE_MODES = ("keep", "abort", "retract")
RUNNING_CHOICES = ("keep", "recompute")
"""What running requests do with keys and values of earlier weights."""
WEIGHTS, GRAPHS, KV_CACHE = "weights", "graphs", "kv_cache"
TAGS = (WEIGHTS, GRAPHS, KV_CACHE)
"""In the order they are resumed: weights are pushed before the cache takes its memory again."""

Done = TypeVar("Done")
Report = TypeVar("Report")
Count = TypeVar("Count")


class EngineCommands(ABC, Generic[Done, Report, Count]):
    """The commands that every front has. A front says in `_command` how it forwards one.

    Done, Report and Count are the types that a front returns. The engine returns None, a `MemoryReport` and an integer.
    A client returns every replica's answer by its name for each of the three. An asynchronous front returns awaitables.
    A command happens whole or not at all, on all ranks. timeout_s: the seconds that it may take, None for
    `states.DEFAULT_TIMEOUT_S`; past it the call raises TransitionTimeout with everything as before. A state that does
    not allow the command (`states.TRANSITIONS`) raises WrongState. A client raises ControlFailed, which has the
    answers, unless all replicas carry the command out.
    """

    @abstractmethod
    def _command(self, name: str, *, timeout_s: float | None, **args: Any) -> Any:
        """Carry out the command of that name, with its arguments."""

    def pause(self, mode: str = "keep", *, timeout_s: float | None = None) -> Done:
        """Stop between two steps and leave memory where it is; requests are accepted and wait.
        keep: each goes on at unpause() where it was. retract: all are queued again, in order, and recomputed. abort:
        all end with the tokens they have; the outputs come with the next step().
        """
        return self._command("pause", mode=mode, timeout_s=timeout_s)

    def unpause(self, *, timeout_s: float | None = None) -> Done:
        """Go on after pause(). Weights that changed meanwhile are noticed, however they were written."""
        return self._command("unpause", timeout_s=timeout_s)

    def suspend(
        self,
        mode: str | KVCacheManagementMode | None = None,
        tags: Iterable[str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Report:
        """Stop between two steps and give memory back before returning; requests are accepted and wait.

        mode: what becomes of the KV cache (None: the config's kv_cache_management_mode). "persist" keeps it, "offload"
        moves the blocks that requests hold to host memory, "recompute" drops it and requests are recomputed.
        tags: any of "kv_cache", "weights" (copies derived from the weights; the parameters too if the engine owns them
        and they are on a device), "graphs"; None: all. More tags can follow while suspended.
        Raises TransitionFailed or TransitionTimeout with everything as it was before.
        """
        return self._command("suspend", mode=mode, tags=tags, timeout_s=timeout_s)

    def resume(self, tags: Iterable[str] | None = None, *, timeout_s: float | None = None) -> Report:
        """Take back what was suspended (all, or `tags` now and the rest later) and go on once nothing is left.
        Trainers do resume({"weights"}), push weights, resume(). Weights that changed are noticed by their content.
        Raises TransitionFailed (out of memory, say) with the engine SUSPENDED as before: a retry may succeed.
        """
        return self._command("resume", tags=tags, timeout_s=timeout_s)

    def set_weight_version(self, version: int, running: str = "keep", *, timeout_s: float | None = None) -> Done:
        """The weights that the model has now are `version`: call it after writing them, in any state. Cached KV of
        earlier weights is never matched again. running: "keep" lets unfinished requests go on with the KV they have
        (their spans say so), "recompute" recomputes it. Warns about a version below an earlier one.
        """
        return self._command("set_weight_version", version=version, running=running, timeout_s=timeout_s)

    def reset_prefix_cache(self, *, timeout_s: float | None = None) -> Count:
        """No later prompt matches what was computed before; running requests keep theirs -> cached blocks freed."""
        return self._command("reset_prefix_cache", timeout_s=timeout_s)


class ProfileCommand(Protocol):
    """Replicas write the trace below a folder that their own environment names (`coordinator.commands`)."""

    def profile(self, *, steps: int) -> Any:
        """Trace the engine's next `steps` steps into a new file -> its path; 0: end the trace now."""


class WeightCommands(Protocol):
    """How a replica receives new weights (`rl.weight_receiver`). A client sends these by `InferenceClient.control`."""

    def load_weights(self, path: str) -> Any:
        """Write tensors from files below the replica's root: all tensors, or those of one file of several."""

    def begin_weights(self, adapter: Mapping[str, Any] | None = None) -> Any:
        """Begin an update. The engine refuses to run until the update has ended.

        adapter: fields of `config.lora.ReceivedAdapter`. The tensors are an adapter's then. The model keeps its weights
        and their version, and the engine may run.
        """

    def write_weights(self, name: str, dtype: str, shape: list[int], offset: int, data: bytes) -> Any:
        """Write a piece of one tensor of the whole model; all its pieces in order, before those of the next tensor."""

    def join_weight_group(self, name: str, where: dict[str, Any], num_ranks: int) -> Any:
        """Become a member of a group in which a trainer broadcasts weights; a group of that name is left before.

        where: fields of `rl.trainer_group.GroupAddress`. num_ranks: ranks of all engines together.
        """

    def leave_weight_group(self, name: str) -> Any:
        """Leave a group; nothing happens where there is none of that name."""

    def receive_weights(
        self,
        group: str,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        buffer_bytes: int | None = None,
    ) -> Any:
        """Write tensors of the whole model that a trainer broadcasts in a group, in this order. An error ends the
        membership in the group.

        buffer_bytes: None: one broadcast for each tensor. Else they are packed (`rl.trainer_group.tensors`).
        """

    def finish_weights(self, version: int, running: str = "keep") -> Any:
        """The engine has the new weights; `cancel_weights` can still restore the old ones. A new adapter is checked."""

    def settle_weights(self) -> Any:
        """Make the update final: the old weights cannot be restored any more. The engine has the new adapter from here
        on -> its name, its digest, and which adapter it retires. Raises WrongState before the finish."""

    def cancel_weights(self, version: int | None = None) -> Any:
        """Restore weights and version from before the update; nothing happens without one.

        version: the one that the coordinator expects of its replicas from now on.
        """

    def check_weights(self, action: str) -> Any:
        """checksum: digest of all weights. snapshot: keep their digests. compare: with the snapshot. reset: overwrite.

        Each action except reset reads all weights once; derived copies are recomputed and compared. reset overwrites
        all weights with random values, and the engine refuses to run until an update has written every tensor.
        """

    def restore_weights(self, sources: Sequence[Sequence[str]], version: int) -> Any:
        """Read the files of an update that has been settled, all or none; an update that is under way is cancelled.

        sources: (path, fingerprint) in the order in which they were read. Raises WeightUpdateError for files that were
        changed since.
        """


class AdapterChanges(Protocol):
    """How a replica loads LoRA adapters (`coordinator.adapter_commands`). A client sends these by
    `InferenceClient.control`.

    change: the name of a load or unload. The change can be undone under this name until it is settled.
    """

    def load_adapter(
        self,
        *,
        name: str,
        path: str,
        replace: bool = False,
        running: str = "keep",
        digest: str | None = None,
        change: str | None = None,
    ) -> Any:
        """Load an adapter from a directory below the replica's root -> its name, version, digest and rank."""

    def unload_adapter(self, *, name: str, abort: bool = False, change: str | None = None) -> Any:
        """Forget an adapter. abort: unfinished requests of the adapter end with an error; without it they
        raise AdapterInUse."""

    def undo_adapter(self, *, name: str, change: str) -> Any:
        """Undo a load or unload of the adapter, if it was made here."""

    def settle_adapter(self, *, name: str, change: str) -> Any:
        """The load or unload will not be undone: what that would take is given back."""


class Group(Enum):
    """Who carries a command out at a replica."""

    ENGINE = EngineCommands
    """The engine; every front has the method."""
    PROFILE = ProfileCommand
    WEIGHTS = WeightCommands
    """`Replica(commands=)`."""
    ADAPTERS = AdapterChanges
    """`Replica(adapter_commands=)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleCommand:
    """A row of the table. All commands of a client go to all replicas."""

    name: str
    group: Group
    parameters: dict[str, inspect.Parameter]
    """By name, timeout_s included where the command has a deadline."""
    meaning: str
    transition: str | None = None
    """The one in `states.TRANSITIONS` that has its states before and after. None: it changes no state."""
    ended_by: str | None = None
    """The command holds until this one: replicas that join meanwhile get it, too."""
    ends_another: bool = False
    """A replica that is lost before it answers gets the command when it joins again; it can be sent again."""
    within_update: bool = False
    """Part of a weight update, until that is settled or cancelled."""

    @property
    def states(self) -> dict[EngineState, EngineState] | None:
        """The state after the command for each state that it may begin in; None: it may begin in any, and keeps it."""
        return None if self.transition is None else TRANSITIONS[self.transition].targets

    @property
    def call(self) -> str:
        """The name under which the ranks of one engine begin it together."""
        return f"{self.transition or self.name}()"

    @property
    def has_deadline(self) -> bool:
        return "timeout_s" in self.parameters


def _row(method: Callable[..., Any], group: Group, **facts: Any) -> LifecycleCommand:
    _, *parameters = inspect.signature(method).parameters.values()  # without self
    return LifecycleCommand(
        name=method.__name__,
        group=group,
        parameters={one.name: one for one in parameters},
        meaning=inspect.getdoc(method) or "",
        **facts,
    )


_ROWS = (
    _row(EngineCommands.pause, Group.ENGINE, transition="pause", ended_by="unpause"),
    _row(EngineCommands.unpause, Group.ENGINE, transition="unpause", ends_another=True),
    _row(EngineCommands.suspend, Group.ENGINE, transition="suspend", ended_by="resume"),
    _row(EngineCommands.resume, Group.ENGINE, transition="resume"),
    _row(EngineCommands.set_weight_version, Group.ENGINE, transition="update"),
    _row(EngineCommands.reset_prefix_cache, Group.ENGINE),
    _row(ProfileCommand.profile, Group.PROFILE),
    _row(WeightCommands.load_weights, Group.WEIGHTS, within_update=True),
    _row(WeightCommands.begin_weights, Group.WEIGHTS, within_update=True),
    _row(WeightCommands.write_weights, Group.WEIGHTS, within_update=True),
    _row(WeightCommands.join_weight_group, Group.WEIGHTS),
    _row(WeightCommands.leave_weight_group, Group.WEIGHTS),
    _row(WeightCommands.receive_weights, Group.WEIGHTS, within_update=True),
    _row(WeightCommands.finish_weights, Group.WEIGHTS, within_update=True),
    _row(WeightCommands.settle_weights, Group.WEIGHTS, ends_another=True),
    _row(WeightCommands.cancel_weights, Group.WEIGHTS, ends_another=True),
    _row(WeightCommands.check_weights, Group.WEIGHTS),
    _row(WeightCommands.restore_weights, Group.WEIGHTS),
    _row(AdapterChanges.load_adapter, Group.ADAPTERS),
    _row(AdapterChanges.unload_adapter, Group.ADAPTERS),
    _row(AdapterChanges.undo_adapter, Group.ADAPTERS),
    _row(AdapterChanges.settle_adapter, Group.ADAPTERS),
)
COMMANDS: dict[str, LifecycleCommand] = {row.name: row for row in _ROWS}
ENDED_BY: dict[str, str] = {row.name: row.ended_by for row in _ROWS if row.ended_by is not None}
"""Commands that hold until another one, with that one."""


def names_of(group: Group) -> tuple[str, ...]:
    return tuple(row.name for row in _ROWS if row.group is group)
