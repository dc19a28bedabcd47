"""One rank's engine at a coordinator: a thread that serves, and states that all ranks reach together.

rank 0                     Coordinator, a thread
    |  ZMQ
first rank of each model   Replica.run on the engine's thread: requests, and the commands of clients
    |  lockstep
other ranks                engine.follow on the engine's thread

After a command the first ranks of all models agree that it was carried out. Then every rank sets the event that
`engine.wait_until` waits for. A replica that loses the coordinator stops: both belong to one job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_infer.coordinator import protocol
from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.coordinator.coordinator import Coordinator, running
from megatron_infer.coordinator.replica import Replica
from megatron_infer.engine.states import EngineState
from megatron_infer.errors import ConfigError, OtherRankFailed, TransitionTimeout, WrongState

if TYPE_CHECKING:
    from megatron_infer.mcore.engine import DynamicInferenceEngine

log = logging.getLogger("megatron_infer.mcore")

HERE: dict[str, Listening] = {}
"""Engines of this process that listen, by their coordinator's address: megatron-core's client and server are given the
address alone."""
REACHED = "reached()"
START_TIMEOUT_S = 120.0
COMMANDS = {"pause": "PAUSED", "unpause": "RUNNING", "suspend": "SUSPENDED", "resume": "RESUMED"}
"""Command -> the state of megatron-core that it leads to."""


class _JobReplica(Replica):
    def on_lost(self, error: protocol.CoordinatorError, final: bool) -> None:
        super().on_lost(error, final)
        if self.connection.welcomed.is_set() or self._welcomed_as:  # it was there: the job's coordinator has ended
            self.stop()


class Listening:
    """The thread of one rank's engine, and on rank 0 the coordinator."""

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        loop: asyncio.AbstractEventLoop,
        port: int | None,
        hostname: str | None,
        launch: bool,
    ) -> None:
        """Returns once the engines of all ranks serve; called on every rank."""
        self.engine = engine
        self.inner = engine.inner
        self._loop = loop
        self._stack = contextlib.ExitStack()
        is_leader = self.inner.relay.is_leader
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (is_leader, socket.gethostname()))
        leaders = [rank for rank, (leads, _) in enumerate(ranks) if leads]
        host = hostname or ("127.0.0.1" if len({name for _, name in ranks}) == 1 else ranks[0][1])
        shared: list[Any] = [f"tcp://{host}:{port or 0}", None]
        if launch and dist.get_rank() == 0:
            coordinator = self._stack.enter_context(running(_bound(socket.gethostbyname(host), port)))
            shared = [coordinator.address, coordinator.key]
        dist.broadcast_object_list(shared, src=0)
        self.address, self.key = shared
        self._leaders = dist.new_group(leaders, backend="gloo") if len(leaders) > 1 else None
        HERE[self.address] = self
        serve = self._lead if is_leader else self._follow
        self._thread = threading.Thread(target=self._run, args=(serve,), name="megatron-infer-engine", daemon=True)
        self._thread.start()
        if dist.get_rank() == 0:
            self._wait_for_replicas(len(leaders))
        dist.barrier()

    def stop_coordinator(self) -> None:
        """End the coordinator, and with it the engines of all ranks. Raises WrongState elsewhere than on rank 0."""
        state = self.engine.state.name
        if dist.get_rank() != 0:
            raise WrongState("engines are stopped where their coordinator runs, on rank 0", state=state)
        if state not in ("PAUSED", "SUSPENDED"):
            raise WrongState(f"engines are stopped once they are paused or suspended; they are {state}", state=state)
        self._stack.close()

    def fail(self, error: BaseException) -> None:
        """Raise `error` where a state is waited for; from any thread."""
        self._post(self._end, error)

    # ------------------------------------------------------------------ the engine's thread
    def _run(self, serve: Any) -> None:
        try:
            self.inner.device.make_current()
            serve()
        except BaseException as error:  # raised where a state is waited for
            log.exception("the engine has ended")
            self._post(self._end, error)
        else:
            self._post(self.engine.reach, "STOPPED")
            self._post(self._end, None)
        finally:
            HERE.pop(self.address, None)

    def _lead(self) -> None:
        commands = {name: partial(self._carry_out, name) for name in COMMANDS}
        name = f"rank{dist.get_rank()}"
        with _JobReplica(self.inner, self.address, name=name, key=self.key, control=True, commands=commands) as replica:
            replica.run()
        self.inner.dismiss()

    def _follow(self) -> None:
        self.inner.follow({REACHED: self._reach})

    def _carry_out(self, command: str, **arguments: Any) -> Any:
        """A client's command on a model's first rank, as megatron-core's engine takes it."""
        if command == "pause" and self.inner.state is not EngineState.RUNNING:
            return None  # in any other state the engine has stopped for longer
        failure: Exception | None = None
        result = None
        try:
            if command == "suspend" and self.inner.state is not EngineState.PAUSED:
                state = self.inner.state.value
                raise WrongState(f"suspend_engines() is for engines that are paused; this one is {state}", state=state)
            result = getattr(self.inner, command)(**arguments)
        except Exception as error:
            failure = error
        all_done = torch.tensor(int(failure is None))
        if self._leaders is not None:
            dist.all_reduce(all_done, op=dist.ReduceOp.MIN, group=self._leaders)
        if failure is not None:
            raise failure
        if not all_done:
            raise OtherRankFailed(f"{command} failed at another replica, and was carried out here")
        if self.inner.rank_group.size > 1:
            self.inner.relay.meet(REACHED, COMMANDS[command])
        self._reach(COMMANDS[command])
        return result

    def _reach(self, name: str) -> None:
        self._post(self.engine.reach, name)

    def _post(self, call: Any, argument: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(call, argument)

    def _end(self, error: BaseException | None) -> None:
        task = self.engine.engine_loop_task
        assert task is not None
        if task.done():
            return
        if error is None:
            task.set_result(None)
        else:
            task.set_exception(error)

    def _wait_for_replicas(self, count: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        with InferenceClient(self.address, key=self.key, name="start") as client:
            while len(client.stats().get("replicas", ())) < count:
                if time.monotonic() > deadline:
                    raise TransitionTimeout(f"fewer than {count} engines serve after {START_TIMEOUT_S:g} s")
                time.sleep(0.01)


def _bound(host: str, port: int | None) -> Coordinator:
    """A coordinator at the port, or at a free one where another process has it, as megatron-core's."""
    if port is not None:
        with contextlib.suppress(ConfigError):
            return Coordinator(f"tcp://{host}:{port}")
    return Coordinator(f"tcp://{host}:0")
