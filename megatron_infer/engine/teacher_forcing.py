"""Runs one sequence of given tokens through the engine's own paged path: admission, blocks, prefill, decode.

    scheduler of its own ---plan---> batch builder, block tables, kernels of the engine ---> logits ---> given token

Requests of the engine wait meanwhile: nothing is in flight, and the replay gives back what it held.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.executor import Executor
from megatron_infer.engine.step_loop import StepLoop
from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.kernels.base import PagedModel
from megatron_infer.models.adopt import AdoptedModel
from megatron_infer.models.weights.manager import WeightManager
from megatron_infer.outputs.token_outputs import PARAMETERS
from megatron_infer.runner.in_flight import LocalStep
from megatron_infer.runner.model_runner import ModelRunner, Runner
from megatron_infer.runner.sampling.row_params import GREEDY_BELOW
from megatron_infer.scheduler.context.dynamic_context import DynamicInferenceContext
from megatron_infer.scheduler.request import CacheUse, Request
from megatron_infer.scheduler.scheduler import Scheduler
from megatron_infer.scheduler.step_plan import StepPlan, StepResult

MOST_DECODED = 64
"""Tokens of a replay that are decoded one by one; those before are prefilled."""
_REQUESTED: dict[str, Any] = {
    "n": 1,
    "logprobs": None,
    "prompt_logprobs": None,
    **dict.fromkeys(PARAMETERS, False),
    "return_sampled_logprobs": True,
}
"""Replaces these parameters of a request that is replayed."""
_salts = itertools.count()


class NoRoomForTeacherForcing(InferenceError, RuntimeError):
    """The cache has no row or blocks left for a replay."""


@dataclass(slots=True, kw_only=True)
class TeacherForcingResult:
    first: int
    """Position in the sequence of the first token that was scored."""
    logprobs: list[float] = field(default_factory=list)
    """Raw log probabilities of the given tokens from there on, as the engine scores them."""
    num_cached: int = 0
    """Leading tokens that were found in the prefix cache."""
    sampler_error: float = 0.0
    """Largest difference between the sampler's log probability of a token that it draws and the logits', in nats."""


class TeacherForcing:
    """Replays sequences on one rank; with several ranks all call it alike."""

    def __init__(
        self,
        model: AdoptedModel,
        executor: Executor,
        scheduler: Scheduler,
        weights: WeightManager,
        config: InferenceConfig,
    ) -> None:
        """scheduler: the engine's, whose context and limits a replay shares."""
        self.model = model
        self._executor, self._scheduler, self._weights = executor, scheduler, weights
        self._config = config

    @property
    def runner(self) -> Runner:
        """What the engine runs its steps with."""
        return self._executor.runner

    @property
    def context(self) -> DynamicInferenceContext:
        """Which sequence holds which rows and blocks."""
        return self._scheduler.context

    @contextmanager
    def inference(self, loop: StepLoop) -> Iterator[None]:
        """The model is in eval mode within the body, and afterwards in the mode that the step loop needs."""
        self._executor.enter_inference()
        try:
            yield
        finally:
            if loop.is_idle:
                self._executor.leave_inference()

    def run(
        self,
        ids: Sequence[int],
        *,
        prompt_len: int,
        model: PagedModel | None = None,
        params: SamplingParams | None = None,
        use_cache: bool = False,
    ) -> TeacherForcingResult:
        """Run `ids` through the engine; nothing is in flight.

        use_cache: with the cached prefix, as a new request would; else no cached block is used. model: runs in place of
        the engine's. Raises NoRoomForTeacherForcing.
        """
        if params is not None and params.adapter is not None:
            raise ConfigError(f"adapter={params.adapter!r}: requests of adapters loaded by name are not replayed")
        known = max(prompt_len, len(ids) - MOST_DECODED)
        salt = "" if use_cache else f"mismatch replay {next(_salts)}"
        request = Request(
            id=f"replay {salt}",
            tokens=list(ids[:known]),
            prompt_len=prompt_len,
            params=replace(params or SamplingParams(), **_REQUESTED),
            max_total=len(ids) + 1,
            seed=0,  # draws are compared with the logits and then dropped
            cache=CacheUse(allowed=True, salt=salt),
        )
        scheduler, runner = self._make_scheduler(request), self._make_runner(self.model if model is None else model)
        found = TeacherForcingResult(first=known)
        try:
            while len(request.tokens) < len(ids):
                self._step(scheduler, runner, request, ids, found)
            found.num_cached = request.history.cached_tokens
        finally:
            scheduler.abort(request)
            self._executor.finish_copies()
        return found

    def _make_runner(self, model: PagedModel) -> ModelRunner:
        own = self._executor.runner
        return ModelRunner(model, own.builder, own.sampler)

    def _make_scheduler(self, request: Request) -> Scheduler:
        shared, context = self._scheduler, self._scheduler.context
        blocks = -(-request.max_total // context.block_size)
        if not context.num_free_rows or context.num_free_blocks < blocks:
            raise NoRoomForTeacherForcing(
                f"a replay of {request.max_total - 1} tokens needs a row and {blocks} blocks, {context.num_free_rows} "
                f"rows and {context.num_free_blocks} blocks are free; let requests finish first"
            )
        scheduler = Scheduler(
            context,
            max_tokens=shared.budget.max_tokens,
            chunked_prefill=self._config.enable_chunked_prefill,
            paused_block_limit=shared.preemption.paused_block_limit,
            root=self._weights.root,
            version=self._weights.version,
        )
        scheduler.add(request)
        return scheduler

    def _step(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        request: Request,
        ids: Sequence[int],
        found: TeacherForcingResult,
    ) -> None:
        plan = scheduler.schedule()
        if not plan.num_tokens:
            raise NoRoomForTeacherForcing("the cache ran out of blocks during a replay; let requests finish first")
        tokens: tuple[int, ...] = ()
        try:
            context = scheduler.context
            step = runner.forward(plan, context.take_table_writes())
            self._executor.free_host_slots()
            if plan.sampled:
                tokens = (ids[len(request.tokens)],)
                self._score(runner, step, plan, tokens[0], found)
                runner.builder.store_sampled(step.batch, torch.tensor(tokens, device=runner.device.torch))
        except BaseException:
            scheduler.cancel(plan)
            raise
        scheduler.commit(plan, StepResult(tokens))

    @torch.inference_mode()
    def _score(
        self, runner: ModelRunner, step: LocalStep, plan: StepPlan, token: int, found: TeacherForcingResult
    ) -> None:
        """Score the given token, and compare the sampler with the logits that it draws from."""
        shape = self.model.shape
        logits_1V, vocab = step.logits_SV, shape.vocab_size
        assert logits_1V is not None
        given = torch.tensor([token], device=logits_1V.device)
        width = logits_1V.shape[1] if logits_1V.shape[1] != shape.padded_vocab_size else vocab
        found.logprobs.append(float(runner.sampler.score(logits_1V[:, :width], given, 0)[0]))
        row_V = self.model.whole_logits(logits_1V)[0, :vocab].float()
        reference_V = row_V.log_softmax(-1)
        errors = [abs(found.logprobs[-1] - float(reference_V[token]))]
        runner.sample(step)
        read, params = step.read(), plan.sampled[0].params
        drawn, token_details = read.result.tokens[0], read.token_details
        if token_details is not None:
            errors.append(abs(float(token_details.values["raw"][0]) - float(reference_V[drawn])))
            if only_temperature(params):
                expected_V = (row_V / params.temperature).log_softmax(-1)
                errors.append(abs(float(token_details.values["processed"][0]) - float(expected_V[drawn])))
        found.sampler_error = max(found.sampler_error, *errors)


def only_temperature(params: SamplingParams) -> bool:
    """Whether tokens are drawn from softmax(logits / temperature) and nothing else."""
    return (
        params.temperature >= GREEDY_BELOW
        and params.top_p >= 1.0
        and params.top_k <= 0
        and not params.min_p
        and params.repetition_penalty == 1.0
        and not params.presence_penalty
        and not params.frequency_penalty
        and not params.logit_bias
        and params.allowed_token_ids is None
        and not params.bad_token_ids
        and not params.min_tokens
    )
