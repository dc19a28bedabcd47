"""Suspend, update and resume as one: on all ranks, or on none.

suspend ──▶ update ──▶ resume ──▶ done
   │           │          │
   ▼           ▼          ▼       after each phase all ranks exchange their outcomes
 undone     overwritten weights and their version are restored, and the engine is resumed
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.states import EngineState
from megatron_infer.engine.suspend import MemoryReport
from megatron_infer.errors import (
    InferenceError,
    LockstepError,
    OtherRankFailed,
    RankFailure,
    SwitchFailed,
    TransitionFailed,
    WeightUpdateError,
)
from megatron_infer.rl.train_mode import failures_noted_on
from megatron_infer.rl.update_report import UpdateReport

SUSPEND, UPDATE, RESUME = "suspend", "update", "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionReport:
    suspend: MemoryReport
    update: UpdateReport
    resume: MemoryReport


class SessionUpdate(Protocol):
    """One update of the session's weights."""

    def run(self) -> UpdateReport:
        """Called on every rank of the engine."""
        ...

    def rollback(self) -> None:
        """Restore the weights that `run` overwrote; also after `run` has failed."""
        ...


class WeightTransition:
    """One suspend, update and resume of an engine; every rank creates one, with the same arguments."""

    def __init__(self, engine: DynamicInferenceEngine, update: SessionUpdate, *, mode: Any, ranks: RankGroup) -> None:
        """ranks: that do it together, those of the engine and of others."""
        self._engine, self._update, self._suspend_mode, self._ranks = engine, update, mode, ranks
        self._state_before = engine.state

    def run(self) -> TransitionReport:
        """Raises SwitchFailed, on all ranks, with requests, weights and version as they were.

        Only weights that the trainer had written into the model itself stay: the engine then has them under a new
        version. RankFailure and LockstepError are raised as they are: there is no engine left to roll back.
        """
        engine = self._engine
        suspended = self._phase(SUSPEND, lambda: engine.suspend(self._suspend_mode))
        updated = self._phase(UPDATE, self._update.run)
        resumed = self._phase(RESUME, engine.resume)
        return TransitionReport(suspend=suspended, update=updated, resume=resumed)

    def _phase(self, phase: str, action: Callable[[], Any]) -> Any:
        result, error = None, None
        try:
            result = action()
        except (RankFailure, LockstepError):
            raise
        except BaseException as failure:  # all ranks must know of it before it is raised, an interrupt too
            error = failure
        outcomes = [PhaseOutcome(*json.loads(text)) for text in self._gather(phase, PhaseOutcome.of(error))]
        failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.text is not None]
        if failed:
            self._fail(phase, failed, error)
        return result

    def _gather(self, phase: str, outcome: PhaseOutcome) -> list[str]:
        text = json.dumps([outcome.text, outcome.is_own, outcome.tensor])
        return self._ranks.lockstep.gather(f"the outcome of the {phase}", text)

    def _fail(self, phase: str, failed: list[tuple[int, PhaseOutcome]], error: BaseException | None) -> NoReturn:
        """Undo the phases so far, then raise."""
        rank, first = next(((rank, outcome) for rank, outcome in failed if outcome.is_own), failed[0])
        raised = SwitchFailed("", rank=rank, phase=phase, tensor=first.tensor)
        if phase != SUSPEND:  # a failed suspend has undone itself
            with failures_noted_on(raised, "restoring the weights"):
                self._update.rollback()
            if self._state_before is not EngineState.SUSPENDED and self._engine.state is EngineState.SUSPENDED:
                with failures_noted_on(raised, "resuming the engine again"):
                    self._engine.resume()
        at = f" at {first.tensor}" if first.tensor else ""
        raised.args = (
            f"rank {rank} failed in the {phase}{at}: {first.text}; rolled back: the engine is "
            f"{self._engine.state.name} with weights of version {self._engine.weight_version}",
        )
        if error is not None and not isinstance(error, Exception):
            error.add_note(str(raised))
            raise error
        raise raised from error


@dataclass(frozen=True, slots=True)
class PhaseOutcome:
    """How a phase ended on one rank."""

    text: str | None
    """The error; None: success."""
    is_own: bool = False
    """The error began on this rank; otherwise another rank reported it."""
    tensor: str = ""

    @classmethod
    def of(cls, error: BaseException | None) -> PhaseOutcome:
        if error is None:
            return cls(None)
        chain = [error]
        while (cause := chain[-1].__cause__) is not None:
            chain.append(cause)
        tensor = next((found for link in chain if (found := getattr(link, "tensor", ""))), "")
        # The innermost error of our own is the most specific; TransitionFailed only wraps it.
        ours = [link for link in chain if isinstance(link, InferenceError) and type(link) is not TransitionFailed]
        text = str(ours[-1]) if ours else f"{type(chain[-1]).__name__}: {chain[-1]}"
        return cls(text, _is_own(chain), tensor)


def _is_own(chain: list[BaseException]) -> bool:
    """Whether the error began on this rank."""
    shared = next((link for link in chain if isinstance(link, WeightUpdateError)), None)  # raised on all ranks
    if shared is not None:
        return shared.rank == (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    return not any(isinstance(link, OtherRankFailed) for link in chain)
