"""Clients that train on one live model, in turns with the steps of its engine.

LiveTrainer.submit(work)  ─▶  LiveEngine.step(): an operation of a client, or a step of the engine, by share
LiveModel                 this rank's part of the model, and its clients
TrainingClient            values, gradients and AdamW of one client, of an adapter or of all weights; on the model while
                          it trains
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import secrets
import threading
import time
import traceback
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_infer.distributed.groups import ParallelGroups
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.engine.durable import file_format
from megatron_infer.errors import AdapterInUse, InferenceError, LockstepError, RankFailure, RequestError
from megatron_infer.kernels.freed_weights import unpacked
from megatron_infer.models.lora.attach import AttachedLoRA
from megatron_infer.models.trainer_step import reduce_gradients
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.rl.session import RolloutSession
from megatron_infer.server.tinker.losses import LossFunction, loss_named

log = logging.getLogger("megatron_infer.server")

ALPHA = 32.0
"""Of each adapter: its scale is ALPHA / rank, as the API has it."""

MOST_DEBT_S = 5.0
"""Seconds that steps of the engine make up for at most, after an operation that took long."""
PIECE_TOKENS = 65_536
"""Tokens of one operation in the engine's thread, about: a longer batch is several, and requests are served between."""
STATE, SAMPLER = "tinker training state", "tinker sampler of all weights"
LAYOUT, PART = ("tp", "pp", "ep"), "rank{}."
"""Of a state: the ranks of an engine that share it, and how names of a rank's part begin."""
BASE = "base"
"""The content of weights that no client has trained."""
TORN = "torn"
"""The content of weights of which an operation has changed a part."""

_R = TypeVar("_R")


class Datum:
    """One sequence of a batch: its tokens with the last target, and the loss function's numbers of each target."""

    def __init__(self, tokens: Sequence[int], targets: Sequence[int], inputs: Mapping[str, Any]) -> None:
        """inputs: numbers. Raises RequestError: targets that count have to be the tokens that follow, as one forward
        computes."""
        inputs = {name: torch.as_tensor(values, dtype=torch.float32) for name, values in inputs.items()}
        if not tokens or len(tokens) != len(targets):
            raise RequestError(f"data: {len(targets)} target_tokens for {len(tokens)} tokens of model_input")
        for name, values in inputs.items():
            if values.shape != (len(targets),):
                raise RequestError(f"data: {name} is {list(values.shape)}, the targets are [{len(targets)}]")
        self._given = array("q", tokens), array("q", targets), inputs  # a list has 36 bytes a token
        self.sequence = array("q", [*tokens, targets[-1]])
        self.inputs = inputs
        followed = torch.tensor(self.sequence[1:]) == torch.tensor(targets)
        self._counted = None if bool(followed.all()) else followed.nonzero()[:, 0]
        """Places of the targets that count; None: all."""
        if self._counted is not None:
            shares = [values for name, values in inputs.items() if name != "logprobs"]
            if any(bool(values[~followed].any()) for values in shares):
                raise RequestError(
                    "data: target_tokens have to be the tokens of model_input that follow, and one more; another may "
                    "stand where its weight or advantage is 0"
                )
            self.inputs = {name: values[self._counted] for name, values in inputs.items()}

    def packed(self) -> list[Any]:
        """The arguments of the same datum, as JSON."""
        tokens, targets, inputs = self._given
        return [list(tokens), list(targets), {name: values.tolist() for name, values in inputs.items()}]

    def loss(self, x: Tensor, function: LossFunction, settings: Mapping[str, float]) -> Tensor:
        """x: log probabilities of all targets."""
        inputs = {name: values.to(x.device) for name, values in self.inputs.items()}
        return function.compute(x if self._counted is None else x[self._counted.to(x.device)], inputs, settings)


def pieces(data: Sequence[Datum]) -> list[list[Datum]]:
    """A batch in pieces of about PIECE_TOKENS."""
    found: list[list[Datum]] = [[]]
    size = 0
    for datum in data:
        size += len(datum.sequence)
        if found[-1] and size > PIECE_TOKENS:
            found.append([])
            size = len(datum.sequence)
        found[-1].append(datum)
    return found


class TrainingClient:
    """One client's values and optimizer, this rank's part of them. Calls are every rank's, in the engine's thread."""

    def __init__(self, model: LiveModel, values: list[Tensor], *, rank: int) -> None:
        """values: of what trains, in the model's dtype. rank: of the adapter; 0: all weights train."""
        self._model = model
        self.values = values
        self.rank = rank
        self._groups = model.session.engine.rank_group.groups
        self.version = 0
        """Steps of its optimizer."""
        self.is_torn = False
        """Whether a step or a load has changed a part of the values only."""
        self.parameters = [nn.Parameter(tensor.float()) for tensor in self.values]
        """What AdamW steps, in fp32: the same memory as the values of a model in fp32."""
        self._optimizer = torch.optim.AdamW(self.parameters, lr=0.0)
        self._batch: list[Tensor | None] = []
        """Gradients of the batch that is being computed, of each parameter; the parameters have those that count."""

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, settings: Mapping[str, float], *, backward: bool
    ) -> tuple[float, list[Tensor]]:
        """(the loss summed over all tokens, log probabilities of each datum's targets). Gradients of the pieces of a
        batch are added up; they count with `take_batch`.

        Data ranks divide the data, and compute as many each: one that has fewer computes the first too, and does not
        count it.
        """
        self.check_whole()
        groups, session, function = self._groups, self._model.session, loss_named(loss_fn)
        places = range(groups.data_rank, len(data), groups.data_size)
        own = [data[place] for place in places]
        own += [data[0]] * (-(-len(data) // groups.data_size) - len(own))
        sequences = [datum.sequence for datum in own]

        def loss(scores: Sequence[Tensor], indices: Sequence[int]) -> Tensor:
            parts = [
                own[i].loss(x, function, settings) * (i < len(places)) for x, i in zip(scores, indices, strict=True)
            ]
            return torch.stack(parts).sum()

        model = self._model
        with model.lent(self):
            with model.together(f"the forward of {loss_fn}"):
                if backward:
                    with session.training():
                        report = session.score_and_backward(sequences, loss, auxiliary_losses=False)
                        gradients = model.gradients()
                    own_loss, scores = report.loss, report.scores
                else:
                    scores, gradients = session.score(sequences), []
                    own_loss = float(loss(scores, range(len(own))))
            total, scores = self._united(own_loss, scores, places, data)
            if backward:
                self._add(gradients)
        if backward:
            self._check_finite(total)
        return total, scores

    def _add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add this rank's gradients, summed over all data, to those of the batch."""
        for live, gradient in zip(self._model.parameters(), gradients, strict=True):
            # an expert's gradient has the tokens of all expert-parallel ranks already
            group = self._groups.dp if _is_of_experts(live) else self._groups.data
            if gradient is not None and group is not None:
                dist.all_reduce(gradient, group=group)
        before = self._batch or [None] * len(gradients)
        self._batch = [_summed(*pair) for pair in zip(before, gradients, strict=True)]

    def _check_finite(self, loss: float) -> None:
        is_finite = math.isfinite(loss) and all(map(_is_finite, self._batch))
        if self._model.session.engine.rank_group.any_rank(not is_finite):
            raise RequestError(f"the loss is {loss} or its gradients are not finite; the gradients are dropped")

    def take_batch(self) -> None:
        """The gradients of the batch count from now on, with those of earlier ones. The client is torn if it fails."""
        try:
            for parameter, gradient in zip(self.parameters, self._batch, strict=True):
                parameter.grad = _summed(parameter.grad, gradient)
        except BaseException:
            self.tear()
            raise
        self.drop_batch()

    def drop_batch(self) -> None:
        """The batch has failed or was given up; gradients of earlier ones stay."""
        self._batch = []

    def _united(
        self, loss: float, scores: Sequence[Tensor], places: range, data: Sequence[Datum]
    ) -> tuple[float, list[Tensor]]:
        """Loss and scores of all data ranks. places: in the data, of this one's."""
        if self._groups.data is None:
            return loss, [score.detach().cpu() for score in scores]
        lengths = [1, *(len(datum.sequence) - 1 for datum in data)]
        flat = torch.zeros(sum(lengths), dtype=torch.float64, device=self.values[0].device)
        total, *parts = flat.split(lengths)
        total.fill_(loss)
        for place, score in zip(places, scores, strict=False):
            parts[place].copy_(score.detach())
        dist.all_reduce(flat, group=self._groups.data)
        return float(total), [part.float().cpu() for part in parts]

    def optim_step(
        self,
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        grad_clip_norm: float,
    ) -> dict[str, float]:
        """AdamW with these numbers -> metrics. Raises RequestError without gradients."""
        self.check_whole()
        if all(one.grad is None for one in self.parameters):
            raise RequestError("optim_step before any forward_backward: there are no gradients")
        norm = self._norm()
        if not math.isfinite(norm):
            self.drop_gradients()
            raise RequestError(
                f"optim_step: the norm of the gradients is {norm}, beyond fp32; the gradients are dropped"
            )
        with self._changing():
            nn.utils.clip_grads_with_norm_(self.parameters, grad_clip_norm or math.inf, norm)
            for group in self._optimizer.param_groups:
                group |= {"lr": learning_rate, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._take_values()
            self.version += 1
            self._model.changed(secrets.token_hex(8))
        return {"grad_norm": float(norm), "version": float(self.version)}

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """The client is whole afterwards, and torn if the body raises."""
        try:
            yield
        except BaseException:
            self.tear()
            raise
        self.is_torn = False

    def tear(self) -> None:
        """Refuse what needs the values, until `load` writes all of them."""
        self.is_torn = True
        self.drop_gradients()
        if self._model.adapter is None:
            self._model.content = TORN

    def check_whole(self) -> None:
        """Raises RequestError for a client that is torn."""
        if self.is_torn:
            raise RequestError(
                "an optim_step or load_state of this client has failed half-way, and a part of its values has changed: "
                "load a state that was saved before, or make another client"
            )

    def _norm(self) -> Tensor:
        """Of the gradients, over all ranks of the engine."""
        pairs = zip(self._model.parameters(), self.parameters, strict=True)
        own = [one.grad for live, one in pairs if one.grad is not None and _counts(live, self._groups)]
        square = nn.utils.get_total_norm(own).square().to(self.values[0].device)
        if self._groups.engine is not None:
            dist.all_reduce(square, group=self._groups.engine)
        return square.sqrt()

    def drop_gradients(self) -> None:
        self._optimizer.zero_grad()
        self.drop_batch()

    def _take_values(self) -> None:
        for value, parameter in zip(self.values, self.parameters, strict=True):
            if value.dtype != parameter.dtype:
                value.copy_(parameter.detach())

    def save(self, path: str | Path, **about: Any) -> None:
        """Write parameters, optimizer and version; a file that is there has the old content or all of the new. about:
        of the manifest."""
        self.check_whole()
        groups, path = self._groups, Path(path)
        if groups.dp_rank:
            return
        tensors = {f"parameter.{i}": one.detach() for i, one in enumerate(self.parameters)}
        for i, one in enumerate(self.parameters):
            for name, value in self._optimizer.state.get(one, {}).items():
                tensors[f"optimizer.{i}.{name}"] = torch.as_tensor(value)
        if groups.engine is not None:
            parts = _of_all_ranks(tensors, self._model.session.engine.rank_group, self.values[0].device)
            tensors = {PART.format(rank) + name: one for rank, part in enumerate(parts) for name, one in part.items()}
        if not groups.engine_rank:
            path.parent.mkdir(parents=True, exist_ok=True)
            known = {"kind": STATE, "rank": self.rank, "version": self.version, "content": self._model.content}
            known |= {"base": self._model.base, **{name: getattr(groups, f"{name}_size") for name in LAYOUT}}
            file_format.write(path, {**known, **about}, tensors)

    def load(self, path: str | Path, *, optimizer: bool) -> None:
        """Take what `save` wrote. Raises RequestError for a state of another rank, layout or model, with nothing
        changed, and SnapshotError for a damaged file."""
        about, tensors = file_format.read(Path(path))
        if about.get("kind") != STATE:
            raise RequestError("the file is no state of a training client")
        for name in LAYOUT:
            if (saved := about.get(name, 1)) != (size := getattr(self._groups, f"{name}_size")):
                raise RequestError(f"the state was saved with --{name} {saved}, this server has {size}")
        if self._groups.engine is not None:
            prefix = PART.format(self._groups.engine_rank)
            tensors = {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
        values = [tensors.get(f"parameter.{i}") for i in range(len(self.parameters))]
        if any(value is None or value.shape != own.shape for own, value in zip(self.parameters, values, strict=True)):
            raise RequestError("the saved client has another rank, or is of another model")
        if about.get("base", self._model.base) != self._model.base:
            raise RequestError("the saved client was trained on other base weights than this server has")
        with self._changing():
            with torch.no_grad():
                for own, value in zip(self.parameters, values, strict=True):
                    own.copy_(value)
            self._take_values()
            for own in self.parameters:
                own.grad = None
            self._optimizer = torch.optim.AdamW(self.parameters, lr=0.0)
            self.version = int(about["version"])
            for i, one in enumerate(self.parameters if optimizer else ()):
                prefix = f"optimizer.{i}."
                found = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
                if found:
                    moved = {name: value if name == "step" else value.to(one.device) for name, value in found.items()}
                    self._optimizer.state[one] = moved
            self._model.changed(about.get("content", BASE))

    def save_for_sampler(self, path: str | Path) -> None:
        """Write the adapter as PEFT has it; of all weights, which they are."""
        self.check_whole()
        path = Path(path)
        if self._model.adapter is not None:
            with self._model.lent(self):
                self._model.adapter.save(path)
        elif not self._groups.dp_rank and not self._groups.engine_rank:
            path.parent.mkdir(parents=True, exist_ok=True)
            about = {"kind": SAMPLER, "content": self._model.content, "version": self.version}
            file_format.write(path, about, {"none": torch.zeros(0)})

    def publish(self, name: str) -> None:
        """Load the adapter, as it is now, into the engine."""
        self.check_whole()
        model = self._model
        assert model.adapter is not None
        with model.lent(self):
            adapter = model.adapter.to_adapter(name)
        model.session.engine.load_adapter(name, adapter)


def _summed(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """In the memory of the first."""
    return one.add_(other) if one is not None and other is not None else other if one is None else one


def _is_of_experts(live: Tensor) -> bool:
    """Whether expert-parallel ranks have different ones."""
    return not getattr(live, "allreduce", True)


def _counts(live: Tensor, groups: ParallelGroups) -> bool:
    """Whether the norm has this rank's gradient of a parameter: it is a part, or of the first rank that has it."""
    if _is_of_experts(live):
        return True
    is_first: bool = not groups.tp_rank or getattr(live, "tensor_model_parallel", False)
    is_first &= groups.divides_experts_within_tp or not groups.ep_rank
    return is_first and not getattr(live, "shared", False)


def _is_finite(gradient: Tensor | None) -> bool:
    return gradient is None or bool(torch.isfinite(gradient).all())


def _of_all_ranks(tensors: Mapping[str, Tensor], ranks: RankGroup, device: torch.device) -> list[dict[str, Tensor]]:
    """On the first rank of an engine the fp32 tensors of each of its ranks, on the host; [] on the others."""
    group, own = ranks.groups.engine, json.dumps({name: list(one.shape) for name, one in tensors.items()})
    each = [json.loads(text) for text in ranks.lockstep.gather("the parts of a state", own)]
    if ranks.groups.engine_rank:
        for one in tensors.values():
            dist.send(one.to(device).contiguous(), dst=ranks.ranks[0], group=group)
        return []
    found = [{name: one.cpu() for name, one in tensors.items()}]
    for rank, shapes in zip(ranks.ranks[1:], each[1:], strict=True):
        found.append({})
        for name, shape in shapes.items():
            part = torch.empty(shape, device=device)
            dist.recv(part, src=rank, group=group)
            found[-1][name] = part.cpu()
    return found


def _digest_of_base(model: nn.Module, adapter: AttachedLoRA) -> str:
    """A digest of the weights that do not train, in bf16: the same for a model that is served in fp32. Reads all."""
    own, digest = {id(one) for one in adapter.parameters()}, hashlib.blake2b(digest_size=16)
    with unpacked(model):
        for name, one in sorted(model.named_parameters()):
            if id(one) not in own:
                file_format.add_tensor(digest, name, one.detach().to(torch.bfloat16))
    return digest.hexdigest()


class LiveModel:
    """This rank's part of the model, and its clients. Operations are called on every rank in the same order."""

    def __init__(self, session: RolloutSession, adapter: AttachedLoRA | None) -> None:
        """adapter: attached with trains_only, before the session was made; None: one client trains all weights."""
        self.session = session
        self.adapter = adapter
        self._max_rank = 0 if adapter is None else adapter.rank
        self.clients: dict[str, TrainingClient] = {}
        self.content = BASE
        """A name of all weights as they are, which a saved state has too."""
        base = "" if adapter is None else _digest_of_base(session.model, adapter)
        self.base = "".join(session.engine.rank_group.lockstep.gather("digests of the base weights", base))
        """Digests of the base weights, of each rank's part; "": all weights train."""
        self.together: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
        """What ranks compute on their own: it succeeds on all or fails on all. `JobRanks` has another."""
        self._outdated: list[str] = []
        """Adapters that requests of this engine used when they were to be unloaded."""

    def create(self, id: str, *, rank: int, seed: int | None) -> TrainingClient:
        """rank 0: of all weights. seed None: `load` follows."""
        if self.adapter is not None:
            if not 1 <= rank <= self._max_rank:
                limit = f"it must be from 1 to {self._max_rank} (--lora-rank)"
                raise RequestError(f"lora_config: rank is {rank}, {limit}")
            values = self.adapter.first_values(rank=rank, seed=seed or 0)
        elif self.clients:
            raise RequestError(
                "--full: one client trains all weights, and there is no second; unload the first or end its session"
            )
        elif seed is not None and self.content != BASE:
            raise RequestError(
                "--full: the weights are as a client that is gone has left them; create_training_client_from_state, or "
                "start the server again"
            )
        else:
            values, rank = [one.data for one in self.parameters()], 0
        client = self.clients[id] = TrainingClient(self, values, rank=rank)
        return client

    def forget(self, id: str) -> None:
        self.clients.pop(id, None)

    def load_adapter(self, name: str, path: str | Path) -> None:
        self.session.engine.load_adapter(name, path)

    def unload(self, name: str) -> None:
        """One that requests use, with a later call."""
        waiting, self._outdated = [*self._outdated, name], []
        for name in waiting:
            try:
                self.session.engine.unload_adapter(name)
            except AdapterInUse:
                self._outdated.append(name)

    def parameters(self) -> list[nn.Parameter]:
        """What trains."""
        return list(self.session.model.parameters()) if self.adapter is None else self.adapter.parameters()

    def gradients(self) -> list[Tensor | None]:
        """The gradients of `parameters` from this rank's data, in fp32. Within training(), where tokens are divided."""
        groups = self.session.engine.rank_group.groups
        if groups.engine is not None:  # of what several ranks have, with the gradients of their heads, tokens or ends
            reduce_gradients([self.session.model], num_ranks=groups.engine_size, moves_biases=False)
        return [None if one.grad is None else one.grad.float() for one in self.parameters()]

    @contextmanager
    def lent(self, client: TrainingClient) -> Iterator[None]:
        """Inside, the model has the values of a client: the same memory, nothing is copied. It has no gradients
        afterwards."""
        if self.adapter is not None:
            self.adapter.lend(client.values, rank=client.rank, alpha=ALPHA)
        try:
            yield
        finally:
            self.session.zero_grad(self.session.model)

    def changed(self, content: str) -> None:
        """The values of a client are others."""
        if self.adapter is None:
            self.content = content
            self.session.update_weights()


class LiveTrainer:
    """What trains next to an engine: operations are queued from any thread and run in the engine's.

    training_share: of the time, for training, while requests wait for steps too.
    """

    def __init__(
        self,
        model: LiveModel,
        *,
        training_share: float = 0.5,
        everywhere: Callable[[str, Any], Any] = lambda client, local: local,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """everywhere: gives an object whose methods run on every rank of the job. client: its id; "": it is the
        model. end: no operation follows; called in the engine's thread."""
        self.local = model
        self.session = model.session
        self._everywhere = everywhere
        self.end = end
        self._share = training_share
        self.model: LiveModel = everywhere("", model)
        """Its operations run on every rank."""
        self._queue: OrderedDict[str, deque[tuple[Callable[[], Any], Future[Any]]]] = OrderedDict()
        """Operations by their callers, of whom the first is the next."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._debt = 0.0
        """Seconds that training has had beyond its share."""
        self.wake: Callable[[], None] = lambda: None
        """Called after an operation was queued."""

    def create(self, id: str, *, rank: int, seed: int | None) -> TrainingClient:
        """`LiveModel.create` of a client whose operations run on every rank; in the engine's thread."""
        self.model.create(id, rank=rank, seed=seed)
        client: TrainingClient = self._everywhere(id, self.local.clients[id])
        return client

    def submit(self, work: Callable[[], _R], *, caller: str = "") -> Future[_R]:
        """Queue an operation; from any thread. Callers take turns, and those of a caller run in their order."""
        future: Future[_R] = Future()
        with self._lock:
            if self._is_closed:
                future.cancel()
            else:
                self._queue.setdefault(caller, deque()).append((work, future))
        self.wake()
        return future

    def close(self) -> None:
        """No operation runs any more: those that wait, and later ones, are cancelled."""
        with self._lock:
            self._is_closed = True
            for waiting in self._queue.values():
                for _, future in waiting:
                    future.cancel()
            self._queue.clear()

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def is_due(self, *, engine_waits: bool) -> bool:
        """Whether the next turn is training's."""
        return self.has_work and (not engine_waits or self._debt <= 0)

    def run_one(self) -> None:
        """Run the next caller's operation that has waited longest. Its error is its future's."""
        with self._lock:
            caller, waiting = self._queue.popitem(last=False)
            work, future = waiting.popleft()
            if waiting:
                self._queue[caller] = waiting
        if not future.set_running_or_notify_cancel():
            return
        began = time.monotonic()
        try:
            result = work()
        except Exception as error:
            if not isinstance(error, InferenceError):
                log.exception("an operation of a training client has failed")
            traceback.clear_frames(error.__traceback__)  # which hold tensors, for as long as the error is held
            future.set_exception(error.with_traceback(None))
            if isinstance(error, RankFailure | LockstepError):  # no operation can follow
                raise
        else:
            future.set_result(result)
        self._debt = min(MOST_DEBT_S, self._debt + (time.monotonic() - began) * (1 - self._share))

    def engine_ran(self, seconds: float) -> None:
        self._debt = max(0.0, self._debt - seconds * self._share)


class LiveEngine:
    """The session's engine as a replica steps it: some of the steps are operations of a trainer."""

    def __init__(self, engine: Any, trainer: LiveTrainer) -> None:
        self._engine, self._trainer = engine, trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def has_unfinished(self) -> bool:
        return self._trainer.has_work or bool(self._engine.has_unfinished())

    def can_step(self) -> bool:
        return self._trainer.has_work or bool(self._engine.can_step())

    def step(self) -> list[RequestOutput]:
        if self._trainer.is_due(engine_waits=self._engine.can_step()):
            self._trainer.run_one()
            return []
        began = time.monotonic()
        outputs: list[RequestOutput] = self._engine.step()
        self._trainer.engine_ran(time.monotonic() - began)
        return outputs
