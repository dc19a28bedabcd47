"""One exception family. Errors carry data: what, got, limit, remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class InferenceError(Exception):
    """Root of every error this package raises on purpose."""


class RequestError(InferenceError, ValueError):
    """A request that cannot be served as asked; belongs to that request alone."""


class PromptTooLong(RequestError):
    """Prompt (plus one generated token) does not fit a limit."""

    def __init__(self, *, got: int, limit: int, limit_name: str, remedy: str) -> None:
        super().__init__(f"prompt has {got:,} tokens, limit is {limit:,} ({limit_name}); {remedy}")
        self.got, self.limit, self.limit_name = got, limit, limit_name


class InvalidPrompt(RequestError):
    """Empty prompt, ids outside the vocabulary, or a prompt of the wrong type."""


class DuplicateRequest(RequestError):
    """A request id that is already in the engine."""


class UnknownRequest(InferenceError, KeyError):
    """An operation on a request id the engine does not hold."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0])


class StateReleased(InferenceError):
    """The large tensors were asked for while their memory is given back (between suspend and resume)."""


class ConfigError(InferenceError, ValueError):
    """A configuration value that is wrong by itself or together with another."""


class CapacityError(ConfigError):
    """The memory given cannot hold what the configuration asks for."""


class ModelError(InferenceError, ValueError):
    """A model or checkpoint that cannot be loaded."""


class AdoptionError(ModelError):
    """A live model that cannot become paged; names the module and the reason."""

    def __init__(self, module_name: str, reason: str) -> None:
        super().__init__(f"{module_name or '<root>'}: {reason}")
        self.module_name, self.reason = module_name, reason


class WrongState(InferenceError, RuntimeError):
    """A call that the engine's state does not allow; `state` is its name."""

    def __init__(self, message: str, *, state: str) -> None:
        super().__init__(message)
        self.state = state


class TransitionFailed(InferenceError, RuntimeError):
    """A pause, suspend, resume or update that failed and was undone; the cause is its __cause__."""


class OtherRankFailed(TransitionFailed):
    """What failed failed elsewhere, and was undone here; `ranks` are those it failed on, counted in the engine."""

    def __init__(self, message: str, *, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class SwitchFailed(TransitionFailed):
    """A suspend, update and resume that is undone on all ranks.

    `rank` counts within the engine, `phase` is "suspend", "update" or "resume", `tensor` the one that could not be
    written, "" where it was none. `error.__cause__` is what this rank saw.
    """

    def __init__(self, message: str, *, rank: int, phase: str, tensor: str) -> None:
        super().__init__(message)
        self.rank, self.phase, self.tensor = rank, phase, tensor


class TransitionTimeout(TransitionFailed, TimeoutError):
    """A transition that did not end in the time allowed and was undone."""


class MismatchAlarm(InferenceError, RuntimeError):
    """Rollouts and the trainer's forward disagree by more than the alarm allows.

    `report` is the MismatchReport: the figures, what tripped, and the place. The engine and its requests are as before.
    """

    def __init__(self, message: str, *, report: object) -> None:
        super().__init__(message)
        self.report = report


class StaleCache(InferenceError, RuntimeError):
    """Something derived from the weights does not belong to the weights the model has now."""


class WeightUpdateError(InferenceError, ValueError):
    """Weights that could not be written, or that are not what they should be.

    tensor: the first that is wrong, "" where it is not about one. rank: where. written: tensors that had been written
    by then and were not put back; 0: the model is as it was before.
    """

    def __init__(self, message: str, *, tensor: str = "", rank: int = 0, written: int = 0) -> None:
        super().__init__(message)
        self.tensor, self.rank, self.written = tensor, rank, written


class SnapshotError(InferenceError, ValueError):
    """A file of saved requests that is damaged, foreign to this engine or in its way; nothing was loaded or written."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = str(path), reason


class NotLeader(InferenceError, RuntimeError):
    """A call that belongs to the first rank of an engine, made on another."""


class LockstepError(InferenceError, RuntimeError):
    """The ranks of an engine are not doing the same: different calls, arguments or plans."""


class RankFailure(InferenceError, RuntimeError):
    """A rank of the engine died, stalled or failed alone. The engine cannot go on, on any rank.

    `rank` counts within the engine, `phase` is what the engine was doing when it was noticed.
    """

    def __init__(self, rank: int, phase: str, reason: str) -> None:
        super().__init__(f"rank {rank} of the engine failed in {phase}: {reason}")
        self.rank, self.phase, self.reason = rank, phase, reason


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Message for an unknown keyword, with the nearest known name when there is one."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"unknown {kind} {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
