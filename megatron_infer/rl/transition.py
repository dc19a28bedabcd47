"""Suspend, update and resume as one: on all ranks, or on none.

suspend ──▶ update ──▶ resume ──▶ done
   │           │          │
   ▼           ▼          ▼       after each phase all ranks tell how they fared
 undone     weights put back where they were overwritten, their version too, and the engine woken again
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

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
from megatron_infer.rl.train_mode import noted
from megatron_infer.rl.update_report import UpdateReport

SUSPEND, UPDATE, RESUME = "suspend", "update", "resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionReport:
    """What each phase did."""

    suspend: MemoryReport
    update: UpdateReport
    resume: MemoryReport


class Update(Protocol):
    """How the weights become others."""

    def run(self) -> UpdateReport:
        """On every rank of the engine."""
        ...

    def roll_back(self) -> None:
        """The weights that were there before, as far as they were overwritten here; after `run` has failed, too."""
        ...


class WeightTransition:
    """One suspend, update and resume of an engine; every rank of it makes one, with the same arguments."""

    def __init__(self, engine: DynamicInferenceEngine, update: Update, *, mode: Any) -> None:
        self._engine, self._update, self._mode = engine, update, mode
        self._source = engine.state

    def run(self) -> TransitionReport:
        """Raises SwitchFailed, on all ranks, with requests, weights and version as they were.

        Only what the trainer had written into the model itself before stays: the engine then has it with a version of
        its own. RankFailure and LockstepError pass: there is no engine left to roll back.
        """
        engine = self._engine
        suspended = self._phase(SUSPEND, lambda: engine.suspend(self._mode))
        updated = self._phase(UPDATE, self._update.run)
        resumed = self._phase(RESUME, engine.resume)
        return TransitionReport(suspend=suspended, update=updated, resume=resumed)

    def _phase(self, phase: str, action: Callable[[], Any]) -> Any:
        result, error = None, None
        try:
            result = action()
        except (RankFailure, LockstepError):
            raise
        except BaseException as failure:  # all ranks have to hear of it before it is raised, an interrupt too
            error = failure
        outcomes = [Outcome(*json.loads(text)) for text in self._tell(phase, Outcome.of(error))]
        failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.text is not None]
        if failed:
            self._fail(phase, failed, error)
        return result

    def _tell(self, phase: str, outcome: Outcome) -> list[str]:
        text = json.dumps([outcome.text, outcome.is_own, outcome.tensor])
        return self._engine.rank_group.lockstep.gather(f"how the {phase} went", text)

    def _fail(self, phase: str, failed: list[tuple[int, Outcome]], error: BaseException | None) -> NoReturn:
        """Undo what was done, then raise."""
        rank, first = next(((rank, outcome) for rank, outcome in failed if outcome.is_own), failed[0])
        told = SwitchFailed("", rank=rank, phase=phase, tensor=first.tensor)
        if phase != SUSPEND:  # a failed suspend has undone itself
            with noted(told, "putting the weights back"):
                self._update.roll_back()
            if self._source is not EngineState.SUSPENDED and self._engine.state is EngineState.SUSPENDED:
                with noted(told, "waking the engine again"):
                    self._engine.resume()
        at = f" at {first.tensor}" if first.tensor else ""
        told.args = (
            f"rank {rank} failed in the {phase}{at}: {first.text}; rolled back: the engine is "
            f"{self._engine.state.name} with weights of version {self._engine.weight_version}",
        )
        if error is not None and not isinstance(error, Exception):
            error.add_note(str(told))
            raise error
        raise told from error


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a phase went on one rank."""

    text: str | None
    """None: well."""
    is_own: bool = False
    """The fault lies here; else this rank has only heard of it."""
    tensor: str = ""

    @classmethod
    def of(cls, error: BaseException | None) -> Outcome:
        if error is None:
            return cls(None)
        chain = [error]
        while (cause := chain[-1].__cause__) is not None:
            chain.append(cause)
        tensor = next((found for link in chain if (found := getattr(link, "tensor", ""))), "")
        # What wraps an error says less than it does, except where it was made for it.
        ours = [link for link in chain if isinstance(link, InferenceError) and type(link) is not TransitionFailed]
        text = str(ours[-1]) if ours else f"{type(chain[-1]).__name__}: {chain[-1]}"
        return cls(text, _is_own(chain), tensor)


def _is_own(chain: list[BaseException]) -> bool:
    """Whether this rank is where it happened."""
    told = next((link for link in chain if isinstance(link, WeightUpdateError)), None)  # all ranks have it
    if told is not None:
        return told.rank == (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    return not any(isinstance(link, OtherRankFailed) for link in chain)
