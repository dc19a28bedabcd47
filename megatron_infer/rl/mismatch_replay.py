"""Replays one sequence with given tokens through the engine's paged path: admission, blocks, prefill, decode.

    its own scheduler ---plan---> the engine's batch builder, block tables, kernels ---> logits ---> given token

No step of the engine is in flight meanwhile, its requests are not changed, and the replay releases what it holds.
Legend: T tokens of a step, S positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.build import Assembly
from megatron_infer.errors import InferenceError
from megatron_infer.kernels.base import PagedModel, RoutingShape
from megatron_infer.models.layer_probes import MOE, OUTPUT, ForwardTrace, ModuleProbe
from megatron_infer.runner.in_flight import LocalStep
from megatron_infer.runner.model_runner import ModelRunner
from megatron_infer.sampling.row_params import GREEDY_BELOW
from megatron_infer.scheduler.request import CacheUse, Request
from megatron_infer.scheduler.scheduler import Scheduler
from megatron_infer.scheduler.step_plan import StepPlan, StepResult

MOST_DECODED = 64
"""Tokens of a replay that are decoded one by one; those before are prefilled as a prompt."""
_REPLAYED: dict[str, Any] = {
    "n": 1,
    "logprobs": None,
    "prompt_logprobs": None,
    "return_sampled_logprobs": True,
    "return_support": False,
    "return_routing": False,
}
"""Sampling parameters that a replay changes."""
_salts = itertools.count()


class NoRoomForReplay(InferenceError, RuntimeError):
    """The cache has no row or blocks left for a replay."""


@dataclass(slots=True, kw_only=True)
class ReplayResult:
    """Scores of the given tokens, and the sampler's error."""

    first: int
    """Position in the sequence of the first token that was scored."""
    logprobs: list[float] = field(default_factory=list)
    """Of the given tokens from `first` on, as the engine scores them (raw)."""
    num_cached: int = 0
    """Leading tokens found in the prefix cache."""
    sampler_error: float = 0.0
    """Largest difference between the sampler's log probability of a token and that of the logits, in nats."""


class RowsByPosition:
    """Rows of a tensor by position in the sequence, collected over the steps of a replay."""

    def __init__(self, num_positions: int, first: int = 0) -> None:
        self.first = first
        self.seen_S = torch.zeros(num_positions, dtype=torch.bool)
        self._rows_SX: Tensor | None = None

    def put(self, positions_T: Tensor, rows_TX: Tensor) -> None:
        """Keep the rows of positions from `first` on; ignore the others."""
        wanted_T = positions_T >= self.first
        if not bool(wanted_T.any()):
            return
        at, rows_TX = positions_T[wanted_T] - self.first, rows_TX[wanted_T]
        if self._rows_SX is None:
            self._rows_SX = rows_TX.new_zeros(len(self.seen_S) - self.first, *rows_TX.shape[1:])
        self._rows_SX[at] = rows_TX
        self.seen_S[at.cpu() + self.first] = True

    def paired_with(self, other_SX: Tensor, at: int | None = None) -> tuple[Tensor, Tensor]:
        """(rows kept here, the same rows of a tensor that begins at position `first`), fp32; at: one position only."""
        assert self._rows_SX is not None, "no step has put a row"
        seen = self.seen_S.nonzero().flatten() if at is None else torch.tensor([at])
        seen = (seen - self.first).to(other_SX.device)
        return self._rows_SX[seen].float(), other_SX[seen].float()


class ModelProxy:
    """A PagedModel that passes calls on to another; a subclass computes `hidden`."""

    routing: RoutingShape | None = None

    def __init__(self, model: Any) -> None:
        self.model = model
        self.embed, self.logits = model.embed, model.logits
        self.rotary_table, self.packable_weights = model.rotary_table, model.packable_weights


class RecordingModel(ModelProxy):
    """Records the residual stream after every layer, and the experts that routers choose."""

    def __init__(self, model: Any, num_positions: int) -> None:
        super().__init__(model)
        self._num_positions = num_positions
        self.layers: list[RowsByPosition] = []
        num_experts = 0 if model.routing is None else model.routing.num_layers
        self.experts = [RowsByPosition(num_positions) for _ in range(num_experts)]
        """One for each mixture-of-experts layer."""

    def hidden(self, step: Any) -> Tensor:
        at = itertools.count()
        _allocate_routing(step, self.model)

        def around(run: Any, *arguments: Any) -> Any:
            x_TD, residual_TD = run(*arguments)
            number = next(at)
            if number == len(self.layers):
                self.layers.append(RowsByPosition(self._num_positions))
            self.layers[number].put(step.positions_T, residual_TD.float() + x_TD.float())
            return x_TD, residual_TD

        out: Tensor = self.model.decode(step, around=around)
        for layer, kept in enumerate(self.experts):
            kept.put(step.positions_T, step.routing_TLK[:, layer])
        return out


class TeacherForcedModel(ModelProxy):
    """Gives each part the input that it had in the trainer's forward, so that errors do not add up over parts."""

    def __init__(self, model: Any, probes: Sequence[ModuleProbe], trace: ForwardTrace) -> None:
        super().__init__(model)
        self._probes, self._trace = probes, trace
        num_positions = len(trace.outputs[probes[0].name])
        self.outputs = {
            probe.name: RowsByPosition(num_positions, trace.logits_from if probe.kind == OUTPUT else 0)
            for probe in probes
        }
        self.experts = {probe.name: RowsByPosition(num_positions) for probe in probes if probe.kind == MOE}
        self._nothing = torch.empty(num_positions, 0, device=model.device)
        """Input of the embedding, which reads the step's tokens instead."""
        self._dtype = getattr(torch, model.shape.dtype)

    def hidden(self, step: Any) -> Tensor:
        positions_T = step.positions_T
        _allocate_routing(step, self.model)
        given_TD = positions_T
        for probe in self._probes:
            kept = self.outputs[probe.name]
            given = self._trace.inputs.get(probe.name, self._nothing)
            given_TD = given.index_select(0, positions_T).to(self._dtype).contiguous()
            if probe.kind == OUTPUT:
                wanted_T = positions_T >= kept.first
                if bool(wanted_T.any()):
                    kept.put(positions_T[wanted_T], probe.run(step, given_TD[wanted_T].contiguous()))
                continue
            kept.put(positions_T, probe.run(step, given_TD))
            if probe.moe is not None:
                self.experts[probe.name].put(positions_T, step.routing_TLK[:, probe.moe])
        return given_TD


def _allocate_routing(step: Any, model: Any) -> None:
    if model.routing is not None and model.routing.num_layers:
        step.routing_TLK = step.positions_T.new_empty(step.num_tokens, model.routing.num_layers, model.routing.top_k)


def replay(
    parts: Assembly,
    ids: Sequence[int],
    *,
    prompt_len: int,
    model: PagedModel | None = None,
    params: SamplingParams | None = None,
    use_cache: bool = False,
) -> ReplayResult:
    """Run `ids` through the engine, which has no step in flight.

    use_cache: use the cached prefix, as a new request does; otherwise no cached block is touched. model: replaces the
    engine's, see `ModelProxy`. Raises NoRoomForReplay. With several ranks all make the same call.
    """
    known = max(prompt_len, len(ids) - MOST_DECODED)
    salt = "" if use_cache else f"mismatch replay {next(_salts)}"
    request = Request(
        id=f"replay {salt}",
        tokens=list(ids[:known]),
        prompt_len=prompt_len,
        params=replace(params or SamplingParams(), **_REPLAYED),
        max_total=len(ids) + 1,
        seed=0,  # drawn tokens are compared and discarded
        cache=CacheUse(allowed=True, salt=salt),
    )
    scheduler = _scheduler(parts, request)
    replayed = parts.adopted if model is None else model
    runner = ModelRunner(
        replayed,
        store=parts.runner.store,
        builder=parts.runner.builder,
        sampler=parts.runner.sampler,
        device=parts.device,
    )
    found = ReplayResult(first=known)
    try:
        while len(request.tokens) < len(ids):
            _step(parts, scheduler, runner, request, ids, found)
        found.num_cached = request.history.cached_tokens
    finally:
        scheduler.abort(request)
        parts.finish_moves()
    return found


def _scheduler(parts: Assembly, request: Request) -> Scheduler:
    context, config = parts.context, parts.config
    blocks = -(-request.max_total // context.block_size)
    if not context.num_free_rows or context.num_free_blocks < blocks:
        raise NoRoomForReplay(
            f"a replay of {request.max_total - 1} tokens needs a row and {blocks} blocks, {context.num_free_rows} rows "
            f"and {context.num_free_blocks} blocks are free; let requests finish first"
        )
    scheduler = Scheduler(
        context,
        max_tokens=parts.sizes.max_tokens,
        chunked_prefill=config.enable_chunked_prefill,
        paused_block_limit=parts.sizes.paused_block_limit,
        root=parts.root(),
        version=parts.weight_version,
    )
    scheduler.add(request)
    return scheduler


def _step(
    parts: Assembly,
    scheduler: Scheduler,
    runner: ModelRunner,
    request: Request,
    ids: Sequence[int],
    found: ReplayResult,
) -> None:
    plan = scheduler.schedule()
    if not plan.num_tokens:
        raise NoRoomForReplay("the cache ran out of blocks during a replay; let requests finish first")
    tokens: tuple[int, ...] = ()
    try:
        flight = runner.forward(plan, parts.context.take_table_writes())
        parts.free_host_slots()
        if plan.sampled:
            tokens = (ids[len(request.tokens)],)
            _score(parts, runner, flight, plan, tokens[0], found)
            runner.builder.store_sampled(flight.batch, torch.tensor(tokens, device=parts.device.torch))
    except BaseException:
        scheduler.cancel(plan)
        raise
    scheduler.commit(plan, StepResult(tokens))


@torch.inference_mode()
def _score(
    parts: Assembly, runner: ModelRunner, flight: LocalStep, plan: StepPlan, token: int, found: ReplayResult
) -> None:
    """Score the given token, and compare the sampler with the logits it draws from."""
    logits_1V, vocab = flight.logits_SV, parts.shape.vocab_size
    assert logits_1V is not None
    given = torch.tensor([token], device=logits_1V.device)
    width = logits_1V.shape[1] if logits_1V.shape[1] != parts.shape.padded_vocab_size else vocab
    found.logprobs.append(float(runner.sampler.score(logits_1V[:, :width], given, 0)[0]))
    row_V = parts.adopted.whole_logits(logits_1V)[0, :vocab].float()
    reference_V = row_V.log_softmax(-1)
    errors = [abs(found.logprobs[-1] - float(reference_V[token]))]
    runner.sample(flight)
    read, params = flight.read(), plan.sampled[0].params
    drawn, token_details = read.result.tokens[0], read.token_details
    if token_details is not None:
        errors.append(abs(float(token_details.raw[0]) - float(reference_V[drawn])))
        if only_temperature(params):
            expected_V = (row_V / params.temperature).log_softmax(-1)
            errors.append(abs(float(token_details.processed[0]) - float(expected_V[drawn])))
    found.sampler_error = max(found.sampler_error, *errors)


def only_temperature(params: SamplingParams) -> bool:
    """Whether tokens are drawn from exactly softmax(logits / temperature)."""
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
