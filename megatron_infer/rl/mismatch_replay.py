"""One sequence through the engine's own paged path once more, its tokens given: admission, blocks, prefill, decode.

    scheduler of its own ---plan---> batch builder, block tables, kernels of the engine ---> logits ---> given token

Requests of the engine stand where they are: nothing is in flight meanwhile, and what the replay holds it gives back.
Legend: T tokens of a step, S positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.build import Assembly
from megatron_infer.errors import InferenceError
from megatron_infer.kernels.base import Ops, PagedModel, RotaryTable
from megatron_infer.models.layer_probes import MOE, OUTPUT, ForwardTrace, ModuleProbe
from megatron_infer.runner.in_flight import LocalStep
from megatron_infer.runner.model_runner import ModelRunner
from megatron_infer.sampling.row_params import GREEDY_BELOW
from megatron_infer.scheduler.request import CacheUse, Request
from megatron_infer.scheduler.scheduler import Scheduler
from megatron_infer.scheduler.step_plan import StepPlan, StepResult

MOST_DECODED = 64
"""Tokens of a replay that are decoded one by one; those before come in as a prompt does."""
_ASKED: dict[str, Any] = {
    "n": 1,
    "logprobs": None,
    "prompt_logprobs": None,
    "return_sampled_logprobs": True,
    "return_support": False,
    "return_routing": False,
}
"""Of parameters that were a rollout's."""
_salts = itertools.count()


class NoRoom(InferenceError, RuntimeError):
    """The cache has no row or blocks left for a replay."""


@dataclass(slots=True, kw_only=True)
class Replayed:
    """What came of it."""

    first: int
    """Position in the sequence of the first token that was scored."""
    logprobs: list[float] = field(default_factory=list)
    """Of the given tokens from there on, as the engine scores them (raw)."""
    num_cached: int = 0
    """Leading tokens that were found computed."""
    sampler_error: float = 0.0
    """Largest difference between what the sampler says of a token it draws and what the logits say, in nats."""


class Kept:
    """Rows by position, as steps bring them."""

    def __init__(self, num_positions: int, first: int = 0) -> None:
        self.first = first
        self.seen_S = torch.zeros(num_positions, dtype=torch.bool)
        self._rows_SX: Tensor | None = None

    def put(self, positions_T: Tensor, rows_TX: Tensor) -> None:
        """Rows of positions from `first` on; the others are let go."""
        wanted_T = positions_T >= self.first
        if not bool(wanted_T.any()):
            return
        at, rows_TX = positions_T[wanted_T] - self.first, rows_TX[wanted_T]
        if self._rows_SX is None:
            self._rows_SX = rows_TX.new_zeros(len(self.seen_S) - self.first, *rows_TX.shape[1:])
        self._rows_SX[at] = rows_TX
        self.seen_S[at.cpu() + self.first] = True

    def beside(self, its_SX: Tensor, at: int | None = None) -> tuple[Tensor, Tensor]:
        """(kept rows, the same of another tensor that begins with position `first`), fp32; at: of one position."""
        assert self._rows_SX is not None, "no step has brought anything"
        seen = self.seen_S.nonzero().flatten() if at is None else torch.tensor([at])
        seen = (seen - self.first).to(its_SX.device)
        return self._rows_SX[seen].float(), its_SX[seen].float()


class Stand:
    """Takes the model's place in a runner: the same model, watched."""

    routing = None

    def __init__(self, model: Any) -> None:
        self.model = model

    def embed(self, step: Any) -> Tensor:
        out: Tensor = self.model.embed(step)
        return out

    def hidden(self, step: Any) -> Tensor:
        out: Tensor = self.model.hidden(step)
        return out

    def logits(self, hidden_SD: Tensor, ops: Ops) -> Tensor:
        out: Tensor = self.model.logits(hidden_SD, ops)
        return out

    def rotary_table(self, num_positions: int) -> RotaryTable | None:
        table: RotaryTable | None = self.model.rotary_table(num_positions)
        return table

    def packable_weights(self) -> Iterable[Tensor]:
        weights: Iterable[Tensor] = self.model.packable_weights()
        return weights


class Watched(Stand):
    """Notes the residual stream behind every layer, and where experts' routers send tokens."""

    def __init__(self, model: Any, num_positions: int) -> None:
        super().__init__(model)
        self._num_positions = num_positions
        self.layers: list[Kept] = []
        num_experts = 0 if model.routing is None else model.routing.num_layers
        self.experts = [Kept(num_positions) for _ in range(num_experts)]
        """Of each mixture-of-experts layer."""

    def hidden(self, step: Any) -> Tensor:
        at = itertools.count()
        _make_room_for_routing(step, self.model)

        def around(run: Any, *arguments: Any) -> Any:
            x_TD, residual_TD = run(*arguments)
            number = next(at)
            if number == len(self.layers):
                self.layers.append(Kept(self._num_positions))
            self.layers[number].put(step.positions_T, residual_TD.float() + x_TD.float())
            return x_TD, residual_TD

        out: Tensor = self.model.decode(step, around=around)
        for layer, kept in enumerate(self.experts):
            kept.put(step.positions_T, step.routing_TLK[:, layer])
        return out


class Forced(Stand):
    """Gives every part what the trainer's forward gave it, whatever the part before has made: errors stay apart."""

    def __init__(self, model: Any, probes: Sequence[ModuleProbe], trace: ForwardTrace) -> None:
        super().__init__(model)
        self._probes, self._trace = probes, trace
        num_positions = len(trace.outputs[probes[0].name])
        self.outputs = {
            probe.name: Kept(num_positions, trace.logits_from if probe.kind == OUTPUT else 0) for probe in probes
        }
        self.experts = {probe.name: Kept(num_positions) for probe in probes if probe.kind == MOE}
        self._nothing = torch.empty(num_positions, 0, device=model.device)
        """What the embedding is given, beside the step's tokens."""
        self._dtype = getattr(torch, model.shape.dtype)

    def hidden(self, step: Any) -> Tensor:
        positions_T = step.positions_T
        _make_room_for_routing(step, self.model)
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


def _make_room_for_routing(step: Any, model: Any) -> None:
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
) -> Replayed:
    """Run `ids` through the engine; nothing is in flight. use_cache: with the prefix that is cached, as a new request.

    Otherwise no cached block is touched. model: in the place of the engine's, see `Stand`.
    Raises NoRoom. With several ranks all call it alike.
    """
    known = max(prompt_len, len(ids) - MOST_DECODED)
    salt = "" if use_cache else f"mismatch replay {next(_salts)}"
    request = Request(
        id=f"replay {salt}",
        tokens=list(ids[:known]),
        prompt_len=prompt_len,
        params=replace(params or SamplingParams(), **_ASKED),
        max_total=len(ids) + 1,
        seed=0,  # what the sampler draws is looked at and thrown away
        cache=CacheUse(allowed=True, salt=salt),
    )
    scheduler = _scheduler(parts, request)
    stand = parts.adopted if model is None else model
    runner = ModelRunner(
        stand,
        store=parts.runner.store,
        builder=parts.runner.builder,
        sampler=parts.runner.sampler,
        device=parts.device,
    )
    found = Replayed(first=known)
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
        raise NoRoom(
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
    parts: Assembly, scheduler: Scheduler, runner: ModelRunner, request: Request, ids: Sequence[int], found: Replayed
) -> None:
    plan = scheduler.schedule()
    if not plan.num_tokens:
        raise NoRoom("the cache ran out of blocks during a replay; let requests finish first")
    tokens: tuple[int, ...] = ()
    try:
        flight = runner.forward(plan, parts.context.take_table_writes())
        parts.free_host_slots()
        if plan.sampled:
            tokens = (ids[len(request.tokens)],)
            _look(parts, runner, flight, plan, tokens[0], found)
            runner.builder.store_sampled(flight.batch, torch.tensor(tokens, device=parts.device.torch))
    except BaseException:
        scheduler.cancel(plan)
        raise
    scheduler.commit(plan, StepResult(tokens))


@torch.inference_mode()
def _look(parts: Assembly, runner: ModelRunner, flight: LocalStep, plan: StepPlan, token: int, found: Replayed) -> None:
    """Score the given token, and hold the sampler against the logits it draws from."""
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
    """Whether what is drawn from is softmax(logits / temperature), and nothing else."""
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
