"""A launched step, and its outputs on the way to the host: all of them are copied by one read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.memory.device import Device, HostRead
from megatron_infer.runner.batch import Batch
from megatron_infer.runner.pooling import Pooled
from megatron_infer.runner.routing import expert_ids
from megatron_infer.runner.sampling.logprobs import LogprobBatch
from megatron_infer.runner.sampling.returned_details import TokenDetailsBatch
from megatron_infer.runner.sampling.sampler import SamplerOutput
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.step_plan import StepPlan, StepResult

if TYPE_CHECKING:
    from megatron_infer.runner.step_padding import PaddedOutput, RankSizes

_T = TypeVar("_T")


@dataclass(slots=True)
class PromptScores:
    """Log probabilities of prompt tokens first .. first+len-1 of one request, in the model's distribution."""

    request: Request
    first: int
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@dataclass(slots=True)
class RunnerOutput:
    """A step's result on the host."""

    result: StepResult
    logprobs: LogprobBatch | None
    bad: list[int]
    """Indices into plan.sampled whose logits were not finite: no token was drawn for them."""
    prompt_scores: list[PromptScores]
    token_details: TokenDetailsBatch | None = None
    positions: Mapping[str, np.ndarray] = field(default_factory=dict)
    """By key of a PositionOutput that a request returns: [T, layers, k] of every token of the step."""
    error: str = ""
    """The step failed after its launch, for instance on another pipeline stage, and drew nothing."""
    is_out_of_memory: bool = False
    """Why it failed: fewer tokens may fit."""
    cause: str = ""
    """The exception, where it was raised on this rank; `error` is the same on all ranks."""
    pooled: list[Pooled] = field(default_factory=list)
    also_read: tuple[Tensor, ...] = ()
    """See LocalStep."""
    drafts: list[int] = field(default_factory=list)
    """What the draft model drew, chunk by chunk, for the plan's chunks that have drafts `ON_DEVICE`."""
    seconds_drafting: float = 0.0
    """Host time of the draft model's steps."""


class InFlightStep(Protocol):
    """A step that was launched and whose result has not been read."""

    @property
    def plan(self) -> StepPlan: ...

    def is_done(self) -> bool:
        """Whether `read` would return without waiting."""
        ...

    def read(self) -> RunnerOutput:
        """Wait for the step's result."""
        ...


@dataclass(slots=True)
class LocalStep:
    """A step that this rank's device computes: an InFlightStep once its outputs are being read."""

    plan: StepPlan
    ranks: RankSizes | None = None
    """See `Runner.forward`."""
    batch: Batch = None  # type: ignore[assignment]
    """Set by `ModelRunner.prepare`."""
    logits_SV: Tensor | None = None
    """None: nothing is drawn from them."""
    greedy: SamplerOutput | None = None
    """The tokens, where they follow without all logits."""
    prompt_scores: list[PromptScores] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)
    shape: GraphShape | None = None
    """The shape that the step is padded to; None: it runs as it is."""
    padded: PaddedOutput | None = None
    """What the padded step has computed."""
    routed_TLK: Tensor | None = None
    """The experts of its tokens, of this pipeline stage's layers and those before; see `routing_buffer`."""
    chosen_TLC: Tensor | None = None
    """int32: the keys that each layer's indexer chose for its tokens, see `SampleOutputs.index_choices`."""
    also_read: tuple[Tensor, ...] = ()
    """Other device tensors to be read with the step's outputs."""
    drafts_N: Tensor | None = None
    """int64: see `RunnerOutput.drafts`; None: the step has no drafts on the device."""
    seconds_drafting: float = 0.0
    _sampled: SamplerOutput | None = None
    _read: HostRead | None = None

    def begin_read(self, device: Device, sampled: SamplerOutput | None = None) -> None:
        """Everything is enqueued, and these tokens are drawn: start copying the step's outputs to the host."""
        self.logits_SV, self.padded, self.greedy, self._sampled = None, None, None, sampled
        tensors = [] if sampled is None else [sampled.tokens_S, sampled.bad_S]
        tensors += [one for one in (self.routed_TLK, self.chosen_TLC, self.drafts_N) if one is not None]
        parts = [tensor for part in self._parts() for tensor in _tensors_of(part)]
        self._read = device.begin_read(*tensors, *self.also_read, *parts)

    def is_done(self) -> bool:
        return self._read is None or self._read.is_done()

    def read(self) -> RunnerOutput:
        assert self._read is not None, "the step was not sampled"
        host = list(self._read.wait())[::-1]
        tokens, bad = (host.pop().numpy(), host.pop().numpy()) if self._sampled is not None else _NOTHING
        positions: dict[str, np.ndarray] = {}
        if self.routed_TLK is not None:
            positions["routing"] = expert_ids(host.pop())
        if self.chosen_TLC is not None:
            positions["choices"] = host.pop().numpy()
        drafts = [] if self.drafts_N is None else host.pop().tolist()
        also_read = tuple(host.pop() for _ in self.also_read)
        logprobs, token_details, scores, pooled = None, None, self.prompt_scores, self.pooled
        if host:
            logprobs, token_details, *others = (_with_tensors(part, host) for part in self._parts())
            scores, pooled = others[: len(scores)], others[len(scores) :]
        return RunnerOutput(
            StepResult(tokens.tolist()),
            logprobs,
            np.flatnonzero(bad).tolist(),
            scores,
            token_details,
            positions,
            pooled=pooled,
            also_read=also_read,
            drafts=drafts,
            seconds_drafting=self.seconds_drafting,
        )

    def _parts(self) -> list[Any]:
        """Everything that has tensors, None where there is none: logprobs, token details, prompt scores, pooled."""
        sampled = self._sampled
        first = (None, None) if sampled is None else (sampled.logprobs, sampled.token_details)
        return [*first, *self.prompt_scores, *self.pooled]


def arrays_of(part: Any) -> dict[str, Any]:
    """The tensors and numpy arrays of a dataclass by their fields' names, "field.key" in a dict of them."""
    found: dict[str, Any] = {}
    for field_name, value in ((one.name, getattr(part, one.name)) for one in fields(part)):
        if isinstance(value, dict):
            found |= {f"{field_name}.{key}": array for key, array in value.items()}
        elif isinstance(value, (Tensor, np.ndarray)):
            found[field_name] = value
    return found


def with_arrays(make: Callable[..., _T], arrays: Mapping[str, Any]) -> _T:
    """`make` called with the fields that `arrays_of` found."""
    values: dict[str, Any] = {}
    for name, array in arrays.items():
        field_name, dot, key = name.partition(".")
        if dot:
            values.setdefault(field_name, {})[key] = array
        else:
            values[field_name] = array
    return make(**values)


def _tensors_of(part: Any) -> list[Tensor]:
    return [] if part is None else [one for one in arrays_of(part).values() if isinstance(one, Tensor)]


def _with_tensors(part: Any, host: list[Tensor]) -> Any:
    """`part` with its tensors replaced by those at the end of `host`, which are removed, the last one first."""
    if part is None:
        return None
    arrays = {name: host.pop() if isinstance(one, Tensor) else one for name, one in arrays_of(part).items()}
    return with_arrays(partial(replace, part), arrays)


_NOTHING = np.empty(0, dtype=np.int64), np.empty(0, dtype=bool)
