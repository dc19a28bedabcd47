"""A launched step, and what it leaves for the host: everything of it sets out at the launch, as one read."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from torch import Tensor

from megatron_infer.comm.stage_link import FAILED
from megatron_infer.config.graph_shapes import GraphShape
from megatron_infer.cuda_graphs.padded_step import Replayed
from megatron_infer.memory.device import Device, HostRead
from megatron_infer.runner.batch import Batch
from megatron_infer.runner.pooling import Pooled
from megatron_infer.sampling.logprobs import LogprobBatch
from megatron_infer.sampling.returned_details import TokenDetailsBatch
from megatron_infer.sampling.sampler import SamplerOutput
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.step_plan import StepPlan, StepResult


@dataclass(slots=True)
class PromptScores:
    """Log probabilities of prompt tokens first .. first+len-1 of one request, as the model gives them (raw)."""

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
    routing: np.ndarray | None = None
    """uint8 or uint16 [T, layers, top-k]: the experts of every token of the step, where some request asks."""
    error: str = ""
    """The step failed after its launch (on another pipeline stage, say), and drew nothing."""
    cause: str = ""
    """What raised, where that was on this rank; `error` is every rank's."""
    pooled: list[Pooled] = field(default_factory=list)
    failed_stage: int | None = None
    """A pipeline stage before this one that failed: nothing here means anything."""


@dataclass(slots=True)
class InFlightStep:
    """A step that was launched and whose result has not been read."""

    plan: StepPlan
    batch: Batch = None  # type: ignore[assignment]
    """Made by the forward."""
    logits_SV: Tensor | None = None
    prompt_scores: list[PromptScores] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)
    shape: GraphShape | None = None
    """What the step is padded to; None: it runs as it is."""
    replayed: Replayed | None = None
    """What such a step left."""
    routed_TLK: Tensor | None = None
    """What the layers, of this stage and those before, note of their choice."""
    failed_before: Tensor | None = None
    """fp32 [1] on the device, from the pipeline stage before: the first that failed, or FAILED."""
    _drawn: SamplerOutput | None = None
    _read: HostRead | None = None

    def depart(self, device: Device, drawn: SamplerOutput | None = None) -> None:
        """The step is launched and has drawn this: start copying what it leaves to the host."""
        self.logits_SV, self.replayed, self._drawn = None, None, drawn
        tensors = [] if drawn is None else [drawn.tokens_S, drawn.bad_S]
        if self.routed_TLK is not None:
            tensors.append(self.routed_TLK)
        if self.failed_before is not None:
            tensors.append(self.failed_before)
        self._read = device.begin_read(*tensors, *(tensor for part in self._parts() for tensor in _tensors_of(part)))

    def is_done(self) -> bool:
        """Whether `read` would not have to wait."""
        return self._read is None or self._read.is_done()

    def read(self) -> RunnerOutput:
        """Wait for the device and give the tokens."""
        assert self._read is not None, "the step was not sampled"
        host = list(self._read.wait())[::-1]
        tokens, bad = (host.pop().numpy(), host.pop().numpy()) if self._drawn is not None else _NOTHING
        routing = None if self.routed_TLK is None else as_ids(host.pop())
        failed = FAILED if self.failed_before is None else int(host.pop())
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
            routing,
            pooled=pooled,
            failed_stage=None if failed == FAILED else failed,
        )

    def _parts(self) -> list[Any]:
        """Everything with tensors in it, None where there is none: logprobs, carried, prompt scores, pooled."""
        drawn = self._drawn
        first = (None, None) if drawn is None else (drawn.logprobs, drawn.token_details)
        return [*first, *self.prompt_scores, *self.pooled]


def _names_of_tensors(part: Any) -> list[str]:
    return [] if part is None else [one.name for one in fields(part) if isinstance(getattr(part, one.name), Tensor)]


def _tensors_of(part: Any) -> list[Tensor]:
    return [getattr(part, name) for name in _names_of_tensors(part)]


def _with_tensors(part: Any, host: list[Tensor]) -> Any:
    """`part` with its tensors replaced by the last ones of `host`, which are taken off, the last first."""
    return None if part is None else replace(part, **{name: host.pop() for name in _names_of_tensors(part)})


def as_ids(routing: Tensor) -> np.ndarray:
    """Expert ids on the host: uint8, or uint16 where int16 stood for it."""
    ids: np.ndarray = routing.numpy()
    return ids if ids.dtype == np.uint8 else ids.view(np.uint16)


_NOTHING = np.empty(0, dtype=np.int64), np.empty(0, dtype=bool)
