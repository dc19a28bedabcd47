"""Adapters of many clients that train on one live model, in turns with the steps of its engine.

LiveTrainer.submit(work)  ─▶  LiveEngine.step(): an operation of a client, or a step of the engine, by share
TrainingClient            adapter's values, gradients and AdamW of one client; on the model while it trains
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megatron_infer.engine.durable import file_format
from megatron_infer.errors import ConfigError, RequestError
from megatron_infer.models.lora.attach import AttachedLoRA
from megatron_infer.outputs.request_output import RequestOutput
from megatron_infer.rl.session import RolloutSession
from megatron_infer.server.tinker.losses import LossFunction

ALPHA = 32.0
"""Of each adapter: its scale is ALPHA / rank, as the API has it."""

MOST_DEBT_S = 5.0
"""Seconds that steps of the engine make up for at most, after an operation that took long."""
PIECE_TOKENS = 65_536
"""Tokens of one operation in the engine's thread, about: a longer batch is several, and requests are served between."""
STATE = "tinker training state"

_R = TypeVar("_R")


class Datum:
    """One sequence of a batch: its tokens with the last target, and the loss function's numbers of each target."""

    def __init__(self, tokens: Sequence[int], targets: Sequence[int], inputs: Mapping[str, Tensor]) -> None:
        """Raises RequestError: targets that count have to be the tokens that follow, as one forward computes."""
        if not tokens or len(tokens) != len(targets):
            raise RequestError(f"data: {len(targets)} target_tokens for {len(tokens)} tokens of model_input")
        for name, values in inputs.items():
            if values.shape != (len(targets),):
                raise RequestError(f"data: {name} is {list(values.shape)}, the targets are [{len(targets)}]")
        self.sequence = [*tokens, targets[-1]]
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
    """One client's adapter and optimizer. Calls are made in the engine's thread."""

    def __init__(self, trainer: LiveTrainer, *, rank: int, seed: int) -> None:
        if not 1 <= rank <= trainer.max_rank:
            raise RequestError(f"lora_config: rank is {rank}, it must be from 1 to {trainer.max_rank} (--lora-rank)")
        self._trainer, self.rank = trainer, rank
        self.version = 0
        """Steps of its optimizer."""
        self.values = trainer.adapter.first_values(rank=rank, seed=seed)
        """Of the adapter, in the model's dtype."""
        self.parameters = [nn.Parameter(tensor.float()) for tensor in self.values]
        """What AdamW steps, in fp32: the same memory as the values of a model in fp32."""
        self._optimizer = torch.optim.AdamW(self.parameters, lr=0.0)

    def forward_backward(
        self, data: Sequence[Datum], function: LossFunction, settings: Mapping[str, float], *, backward: bool
    ) -> tuple[float, list[Tensor]]:
        """(the loss summed over all tokens, log probabilities of each datum's targets). Gradients are added up."""
        sequences = [datum.sequence for datum in data]

        def loss(scores: Sequence[Tensor], indices: Sequence[int]) -> Tensor:
            parts = [data[i].loss(x, function, settings) for x, i in zip(scores, indices, strict=True)]
            return torch.stack(parts).sum()

        session = self._trainer.session
        with self._trainer.on_model(self):
            if not backward:
                scores = session.score(sequences)
                return float(loss(scores, range(len(data)))), [score.cpu() for score in scores]
            with session.training():
                report = session.score_and_backward(sequences, loss)
        if not math.isfinite(report.loss) or not all(_is_finite(one.grad) for one in self.parameters):
            self.drop_gradients()
            raise RequestError(f"the loss is {report.loss} or its gradients are not finite; the gradients are dropped")
        return report.loss, [score.detach().cpu() for score in report.scores]

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
        if all(one.grad is None for one in self.parameters):
            raise RequestError("optim_step before any forward_backward: there are no gradients")
        norm = nn.utils.clip_grad_norm_(self.parameters, grad_clip_norm or math.inf)
        for group in self._optimizer.param_groups:
            group |= {"lr": learning_rate, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._take_values()
        self.version += 1
        return {"grad_norm": float(norm), "version": float(self.version)}

    def drop_gradients(self) -> None:
        self._optimizer.zero_grad()

    def _take_values(self) -> None:
        for value, parameter in zip(self.values, self.parameters, strict=True):
            if value.dtype != parameter.dtype:
                value.copy_(parameter.detach())

    def add_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Of the values, to those of the parameters."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                found = gradient.float()
                parameter.grad = found if parameter.grad is None else parameter.grad.add_(found)

    def save(self, path: Path, **about: Any) -> None:
        """Write adapter, optimizer and version; a file that is there has the old content or all of the new. about: of
        the manifest, see `manifest_of`."""
        tensors = {f"parameter.{i}": one.detach() for i, one in enumerate(self.parameters)}
        for i, one in enumerate(self.parameters):
            for name, value in self._optimizer.state.get(one, {}).items():
                tensors[f"optimizer.{i}.{name}"] = torch.as_tensor(value)
        path.parent.mkdir(parents=True, exist_ok=True)
        file_format.write(path, {"kind": STATE, "rank": self.rank, "version": self.version, **about}, tensors)

    def load(self, path: Path, *, optimizer: bool) -> None:
        """Take what `save` wrote. Raises RequestError for a state of another rank or model, with nothing changed, and
        SnapshotError for a damaged file."""
        about, tensors = file_format.read(path)
        if about.get("kind") != STATE:
            raise RequestError("the file is no state of a training client")
        values = [tensors.get(f"parameter.{i}") for i in range(len(self.parameters))]
        if any(value is None or value.shape != own.shape for own, value in zip(self.parameters, values, strict=True)):
            raise RequestError("the saved adapter has another rank, or is of another model")
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


def manifest_of(path: Path) -> dict[str, Any]:
    """What is known of a saved client without its tensors: rank, version, and what else was given. Raises
    SnapshotError."""
    return file_format.read_manifest(path)


def _is_finite(gradient: Tensor | None) -> bool:
    return gradient is None or bool(torch.isfinite(gradient).all())


class LiveTrainer:
    """What trains next to an engine: operations are queued from any thread and run in the engine's.

    training_share: of the time, for training, while requests wait for steps too.
    """

    def __init__(self, session: RolloutSession, adapter: AttachedLoRA, *, training_share: float = 0.5) -> None:
        """adapter: attached with trains_only, before the session was made."""
        if not 0 < training_share < 1:
            raise ConfigError(f"training_share is {training_share}, it must be between 0 and 1")
        self.session, self.adapter, self.max_rank = session, adapter, adapter.rank
        self._share = training_share
        self._queue: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._lock = threading.Lock()
        self._debt = 0.0
        """Seconds that training has had beyond its share."""
        self.wake: Callable[[], None] = lambda: None
        """Called after an operation was queued."""

    def submit(self, work: Callable[[], _R]) -> Future[_R]:
        """Queue an operation; from any thread."""
        future: Future[_R] = Future()
        with self._lock:
            self._queue.append((work, future))
        self.wake()
        return future

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    def is_due(self, *, engine_waits: bool) -> bool:
        """Whether the next turn is training's."""
        return self.has_work and (not engine_waits or self._debt <= 0)

    def run_one(self) -> None:
        """Run the operation that has waited longest. Its error is its future's."""
        with self._lock:
            work, future = self._queue.popleft()
        if not future.set_running_or_notify_cancel():
            return
        began = time.monotonic()
        try:
            result = work()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # which hold tensors, for as long as the error is held
            future.set_exception(error.with_traceback(None))
        else:
            future.set_result(result)
        self._debt = min(MOST_DEBT_S, self._debt + (time.monotonic() - began) * (1 - self._share))

    def engine_ran(self, seconds: float) -> None:
        self._debt = max(0.0, self._debt - seconds * self._share)

    def save_peft(self, client: TrainingClient, directory: Path) -> None:
        """Write a client's adapter as PEFT has it."""
        with self.on_model(client):
            self.adapter.save(directory)

    def on_model(self, client: TrainingClient) -> _OnModel:
        """Inside, the model's adapter has the values of a client: the same memory, nothing is copied. Gradients are
        added to the client's at the end, but not if the body raises."""
        return _OnModel(self.adapter, client)


class _OnModel:
    def __init__(self, adapter: AttachedLoRA, client: TrainingClient) -> None:
        self._adapter, self._client = adapter, client

    def __enter__(self) -> None:
        self._adapter.lend(self._client.values, rank=self._client.rank, alpha=ALPHA)

    def __exit__(self, failed: object, *exc: object) -> None:
        lent = self._adapter.parameters()
        if failed is None:
            self._client.add_gradients([one.grad for one in lent])
        for one in lent:
            one.grad = None


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
