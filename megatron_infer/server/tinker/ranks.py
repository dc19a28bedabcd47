"""The Tinker API over the ranks of a torchrun job: every rank runs the same operations, in rank 0's order.

    rank 0                       HTTP and coordinator; JobRanks.run(operation)
      │ engines.meet
    first rank of another engine _listen(): the operation is queued for the engine's thread, which does as rank 0's
      │ relay.meet
    an engine's other ranks      engine.follow()

An operation succeeds on all ranks or fails on all; a rank that is gone ends the job.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_infer.config.layout import Layout
from megatron_infer.coordinator.replica import Replica
from megatron_infer.distributed.groups import lockstep_over
from megatron_infer.distributed.lockstep import FOLLOW, LocalLockstep, Lockstep
from megatron_infer.engine.command_relay import plain
from megatron_infer.errors import ConfigError, LockstepError, RankFailure, RequestError
from megatron_infer.server.tinker.serve import run_engine
from megatron_infer.server.tinker.training import Datum, LiveEngine, LiveModel, LiveTrainer, TrainingClient
from megatron_infer.server.torchrun import groups_of_job, ignore_signals

log = logging.getLogger("megatron_infer.server")

CALL, END = "tinker()", "end of the Tinker API"
WITH_DATA = "forward_backward"
"""The operation whose first argument is data."""


@contextmanager
def _of_job() -> Iterator[None]:
    """A RankFailure of the block names the rank by its number in the job alone."""
    try:
        yield
    except RankFailure as failure:
        if failure.is_of_job or failure.job_rank is None:
            raise
        raise RankFailure(failure.job_rank, failure.phase, failure.reason, is_of_job=True) from failure


class OnEveryRank:
    """An object of rank 0, whose methods every rank runs on its own; attributes are rank 0's."""

    def __init__(self, ranks: JobRanks, client: str, local: Any) -> None:
        self._ranks = ranks
        self._client = client
        self._local = local

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._local, name)
        return partial(self._ranks.run, self._client, name) if callable(found) else found


class JobRanks:
    """This rank's part of operations."""

    def __init__(self, model: LiveModel) -> None:
        """Links the ranks; every rank calls it."""
        self._model = model
        self._engine = model.session.engine
        groups, timeout_s = self._engine.rank_group.groups, self._engine.config.collective_timeout_s
        self._world = lockstep_over(dist.group.WORLD, timeout_s=timeout_s)
        self._engines: Lockstep | LocalLockstep = LocalLockstep()
        """The lockstep of the first ranks of the engines."""
        if groups.is_leader and groups.dp is not None:
            self._engines = lockstep_over(groups.dp, timeout_s=timeout_s)
        model.together = self._world.together
        self._failure: BaseException | None = None
        """Why `_listen` has ended early."""

    @_of_job()
    def run(self, client: str, name: str, *args: Any, **given: Any) -> Any:
        """On rank 0: an operation of a client, or of the model, on every rank -> what it gave here."""
        sent = [[one.packed() for one in args[0]], *args[1:]] if name == WITH_DATA else list(args)
        call = plain({"client": client, "name": name, "args": sent, "given": given})
        self._engines.meet(CALL, arguments=call, compare=False)
        return self._run_on_engine(call)

    def _listen(self, trainer: LiveTrainer, stop: Callable[[], None]) -> None:
        """On the first rank of another engine, in a thread: queue what rank 0 runs, until it ends."""
        try:
            with _of_job():
                while (met := self._engines.meet(FOLLOW)).call != END:
                    trainer.submit(partial(self._run_on_engine, met.arguments))
        except (RankFailure, LockstepError) as error:
            self._failure = error
        finally:
            stop()

    def _follow(self) -> None:
        """On an engine's other ranks: take part until it ends."""

        def run(call: dict[str, Any]) -> None:
            self._engine.relay.meet(CALL)
            try:
                self._run_here(call)
            except (RankFailure, LockstepError):
                raise
            except Exception as error:  # rank 0 has one too
                log.debug("%s: %s", call["name"], error)

        with self._model.session.generating(restore_rng=False):
            self._engine.follow({CALL: run})
            self._part()

    def join(self, coordinator: str) -> None:
        """On the other ranks: take part until rank 0 ends."""
        if not self._engine.rank_group.groups.is_leader:
            self._follow()
            return
        trainer = self.trainer(training_share=1.0)
        name = f"live{self._engine.rank_group.groups.dp_rank}"
        replica = Replica(LiveEngine(self._engine, trainer), coordinator, name=name)
        threading.Thread(target=self._listen, args=(trainer, replica.stop), daemon=True).start()
        run_engine(trainer, replica)
        if self._failure is not None:
            raise self._failure

    def trainer(self, *, training_share: float) -> LiveTrainer:
        return LiveTrainer(
            self._model, training_share=training_share, everywhere=partial(OnEveryRank, self), end=self._end
        )

    @_of_job()
    def _end(self) -> None:
        """On the first rank of an engine."""
        if self._engines.is_leader:
            self._engines.meet(END)
        self._engine.dismiss()
        self._part()

    @_of_job()
    def _part(self) -> None:
        """Raises RankFailure where a rank has gone before."""
        self._world.agree(False, END)

    def _run_on_engine(self, call: dict[str, Any]) -> Any:
        self._engine.relay.meet(CALL, call, compare=False)
        return self._run_here(call)

    @_of_job()
    def _run_here(self, call: dict[str, Any]) -> Any:
        name, args = call["name"], call["args"]
        target = self._model.clients.get(call["client"]) if call["client"] else self._model
        together = self._world.together(name, has_collectives=True)
        self._world.phase, is_done = name, False
        try:
            with together:
                if target is None:
                    raise RequestError("the training client was unloaded, or its session has ended")
                if name == WITH_DATA:
                    args = [[Datum(*one) for one in args[0]], *args[1:]]
                found = getattr(target, name)(*args, **call["given"])
                is_done = True
            return found
        except (RankFailure, LockstepError):
            raise
        except Exception:
            if isinstance(target, TrainingClient):
                is_done = is_done or target.is_torn
            if self._world.agree(is_done, f"undoing {name}"):
                self._undo(target, name, args)
            raise

    def _undo(self, target: Any, name: str, args: list[Any]) -> None:
        """An operation has failed on some ranks, and others have done it."""
        if name == "create":
            self._model.forget(args[0])
        elif name == WITH_DATA:
            target.drop_batch()
        elif name in ("take_batch", "optim_step", "load"):
            target.tear()


def build_job(layout: Layout) -> Any:
    """The process groups of all ranks. Raises ConfigError for a launcher's numbers that do not fit."""
    world = os.environ["WORLD_SIZE"]
    if os.environ.get("LOCAL_WORLD_SIZE", world) != world:
        raise ConfigError("the Tinker API over ranks of several machines is not supported; start all on one")
    return groups_of_job(layout.dp, tp=layout.tp, pp=layout.pp, ep=layout.ep)


def serve_ranks(model: LiveModel, *, training_share: float, serve: Callable[..., None]) -> None:
    """Serve on this rank until rank 0 ends. serve(trainer, on_coordinator=): on rank 0. Raises RankFailure."""
    ranks, address = JobRanks(model), [""]
    if dist.get_rank():
        ignore_signals()  # rank 0 ends the job
        dist.broadcast_object_list(address, src=0)
        if address[0]:
            ranks.join(address[0])
        return

    def announce(found: str) -> None:
        address[0] = found
        dist.broadcast_object_list(address, src=0)

    try:
        serve(ranks.trainer(training_share=training_share), on_coordinator=announce)
    finally:
        if not address[0]:  # it could not begin
            announce("")
