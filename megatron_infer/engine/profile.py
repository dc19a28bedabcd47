"""Ranges around the parts of each step, and `engine.profile`: a torch.profiler trace of a few steps with them."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

from megatron_infer.config.inference import ConfigWarning, InferenceConfig, StepRanges
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.step_loop import StepLoop
from megatron_infer.errors import ConfigError
from megatron_infer.memory.device import Device
from megatron_infer.models.adopt import AdoptedModel
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.runner.model_runner import ModelRunner
from megatron_infer.scheduler.scheduler import Scheduler

log = logging.getLogger("megatron_infer")

Mark = Callable[[str], AbstractContextManager[Any]]
"""Name of a range -> what is entered around it."""


Part = tuple[Any, str, str]
"""(object, its method, name of the range around it)."""


class MethodRanges:
    """Ranges around methods of an engine's objects. They are put around them on `install` and gone after `remove`, so
    that an engine without ranges runs the methods themselves."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._before: list[Any] = []
        """What each object itself had in place of its class's method; None: nothing."""

    def install(self, mark: Mark) -> None:
        self._before = [vars(owner).get(method) for owner, method, _ in self._parts]
        for owner, method, name in self._parts:
            setattr(owner, method, _marked(getattr(owner, method), mark, name))

    def remove(self) -> None:
        for (owner, method, _), before in zip(self._parts, self._before, strict=True):
            if before is None:
                delattr(owner, method)
            else:
                setattr(owner, method, before)
        self._before = []


def mark_always(parts: Sequence[Part], mark: Mark, *, adopted: Any = None) -> None:
    """Put ranges around `parts` for good.

    adopted: an `AdoptedModel`, each of whose layers gets a range, "layer N" of this stage from 0 on; None: they do not.
    """
    MethodRanges(parts).install(mark)
    if adopted is not None:
        adopted.decode = _with_layers_marked(adopted.decode, mark)


def _with_layers_marked(decode: Callable[..., Tensor], mark: Mark) -> Callable[..., Tensor]:
    @functools.wraps(decode)
    def marked(*args: Any, around: Callable[..., Any] | None = None, **kwargs: Any) -> Tensor:
        numbers = itertools.count()

        def layer(run: Callable[..., Any], *arguments: Any) -> Any:
            with mark(f"layer {next(numbers)}"):
                return run(*arguments) if around is None else around(run, *arguments)

        return decode(*args, around=layer, **kwargs)

    return marked


def _marked(call: Callable[..., Any], mark: Mark, name: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with mark(name):
            return call(*args, **kwargs)

    return marked


class StepProfiler:
    """Traces the next steps of this rank, as a listener of its loop for as long."""

    def __init__(self, loop: StepLoop, ranges: MethodRanges, *, is_cuda: bool, has_threads: bool) -> None:
        """has_threads: steps run on threads beside the one that calls `engine.step`."""
        self._loop, self._ranges = loop, ranges
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
        self._has_threads = has_threads
        self._profile: profile | None = None
        self._path = Path()
        self._left = 0

    def start(self, path: str | os.PathLike[str], steps: int) -> None:
        """Raises ConfigError if a profile is being taken, or for a path that cannot be written."""
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ConfigError(f"steps is {steps!r}, it must be an integer of at least 1")
        if self._profile is not None:
            raise ConfigError(f"a profile of {self._left} more steps is being taken; end it with profile(None) first")
        self._path = Path(path)
        if not self._path.parent.is_dir() or self._path.is_dir():
            raise ConfigError(f"{self._path} is no file in an existing folder; give the path of the trace to write")
        options = _ExperimentalConfig(profile_all_threads=True) if self._has_threads else None
        self._profile = profile(activities=self._activities, experimental_config=options)
        self._left = steps
        self._profile.start()
        self._ranges.install(record_function)
        self._loop.listeners.append(self)

    def stop(self) -> None:
        """Write what was traced; does nothing if no profile is being taken. Raises OSError if it cannot be written."""
        if self._profile is None:
            return
        running, self._profile = self._profile, None
        self._loop.listeners.remove(self)
        self._ranges.remove()
        running.stop()
        unfinished = self._path.with_name(f".{self._path.name}")
        with unfinished.open("wb"):  # torch only logs that it cannot
            pass
        running.export_chrome_trace(str(unfinished))
        unfinished.replace(self._path)

    # ------------------------------------------------------------------ as a listener of the loop

    def on_add(self, request_id: str, token_ids: list[int], params: SamplingParams, step: int) -> None:
        pass

    def on_abort(self, request_id: str, step: int) -> None:
        pass

    def on_step(self, step: int, outputs: list[RequestOutput]) -> None:
        self._left -= 1
        if self._left <= 0:
            try:
                self.stop()
            except OSError as error:  # the step was computed: its outputs count
                log.error("the profile could not be written to %s: %s", self._path, error)


def make_profiler(
    config: InferenceConfig,
    loop: StepLoop,
    scheduler: Scheduler,
    runner: ModelRunner,
    *,
    adopted: AdoptedModel,
    device: Device,
    has_threads: bool,
) -> StepProfiler:
    """The profiler of an engine; puts ranges around the parts of every step where `config.step_ranges` asks for them.

    has_threads: the runner works in threads of its own, too, as a pipeline stage does.
    """
    parts = [
        (scheduler, "schedule", "schedule"),
        (runner.builder, "build", "build"),
        (runner, "run_layers", "layers"),
        (runner, "sample", "sampling"),
        (scheduler, "commit", "commit"),
    ]
    is_cuda = device.is_cuda
    if config.step_ranges is not StepRanges.OFF:
        detailed = config.step_ranges is StepRanges.DETAILED
        if detailed and (layer := adopted.foreign_layer()) is not None:
            why = f"{layer} is a class of the user's own, so megatron-core's decoder drives the layers"
            warnings.warn(f"step_ranges='detailed': {why}; one range is around all", ConfigWarning, stacklevel=4)
            detailed = False
        mark_always(parts, device.range, adopted=adopted if detailed else None)
        parts = parts if is_cuda else []  # torch.profiler has the ranges of every step already
    return StepProfiler(loop, MethodRanges(parts), is_cuda=is_cuda, has_threads=has_threads)
