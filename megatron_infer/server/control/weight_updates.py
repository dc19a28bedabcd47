"""Weight updates of all engines: start, write, finish; or files in one step. All engines get the weights, or none.

A failed update is undone on every replica, and the engines return to the state before. If undoing fails too, they are
SPOILED until the next update finishes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any

from megatron_infer.config.lora import ReceivedAdapter
from megatron_infer.server.control.control_states import SERVING, ControlState, ControlStatus
from megatron_infer.server.control.fanout import FanoutFailed
from megatron_infer.server.control.state_machine import ControlMachine, as_change, wrong_state
from megatron_infer.server.control.version_labels import Version
from megatron_infer.server.control.weight_files import TensorEntry
from megatron_infer.server.http_errors import ApiError, bad_request

log = logging.getLogger("megatron_infer.server")

IDLE_S = 300.0
"""Seconds without a call after which an update is cancelled, where the server has groups with trainers."""


class WeightUpdates:
    """Changes the weights and their version, and computes checksums of them."""

    def __init__(self, machine: ControlMachine) -> None:
        self._machine, self._fanout = machine, machine.fanout
        self.change = machine.change
        self._version_before = 0
        self._groups: set[str] = set()
        """Those with trainers."""
        self._is_of_trainer = False
        """There was a group with a trainer when the update began; the engines may have left that group since."""
        self._ends_at_resume = False
        """The first tensors that came have begun the update, and no call will finish it."""
        self._version_of_tensors: Version | None = None
        self._adapter: ReceivedAdapter | None = None
        """What the update under way is of; None: of the model."""
        self._came_by: set[str] = set()
        """Groups that have brought tensors of the update."""
        self._idle: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ an update

    @as_change("start_update")
    async def start(self) -> None:
        await self._begin("begin_weights", "begin")

    @as_change("write_weights")
    async def write(self, entries: list[TensorEntry], data: bytes) -> None:
        """Write tensors of the whole model, with megatron-core's or Hugging Face names; a failure ends the update."""
        self._require_update_of(None)
        await self._write(entries, data)

    @as_change("receive_weights")
    async def write_first(self, entries: list[TensorEntry], data: bytes, *, version: Version | None) -> None:
        """Like `write`; the first tensors begin an update that `end_received` finishes, unless one has begun."""
        await self._begin_with_tensors(version, None)
        await self._write(entries, data)

    @as_change("load_adapter")
    async def write_adapter(self, adapter: ReceivedAdapter, entries: list[TensorEntry], data: bytes) -> None:
        """A whole update of an adapter, from a body."""
        await self._begin("begin_weights", "begin", adapter=adapter)
        await self._write(entries, data)
        await self._finish(None, "keep")

    async def _write(self, entries: list[TensorEntry], data: bytes) -> None:
        for entry in entries:
            for chunk in entry.chunks(data):
                await self._step("write_weights", "write", **chunk)

    @as_change("join_group")
    async def join(self, name: str, where: dict[str, Any], num_ranks: int) -> None:
        """Have all engines join a trainer's group, or none. A trainer that begins again ends the update it has left."""
        machine = self._machine
        if machine.status.state is ControlState.UPDATING:
            if not self._is_of_trainer:
                raise wrong_state(
                    f"a group of weights while the engines are {machine.status.name}: finish or cancel it"
                )
            await self._cancel("a trainer begins again")
        try:
            await self._fanout.run(
                "join_weight_group", "join", machine.status.name, name=name, where=where, num_ranks=num_ranks
            )
        except ApiError:
            await self._leave(name)
            raise
        self._groups.add(name)

    @as_change("leave_group")
    async def leave(self, name: str) -> None:
        await self._leave(name)

    async def _leave(self, name: str) -> None:
        self._groups.discard(name)
        await self._fanout.end("leave_weight_group", name=name)

    @as_change("receive_weights")
    async def receive(
        self, group: str, *, version: Version | None = None, adapter: ReceivedAdapter | None = None, **tensors: Any
    ) -> None:
        """Receive tensors in a group. The first begin an update that `end_received` finishes, unless one has begun.

        tensors: further arguments of `WeightCommands.receive_weights`. version: for the end; the latest that a call has
        given counts. adapter: what the tensors become; None: the model's. An adapter's update is finished at once when
        tensors of all groups have come: each has a stage of the trainer.
        A failure ends the update, and the group, in which the trainer is ahead then.
        """
        async with self._leaving(group):
            await self._begin_with_tensors(version, adapter)
            await self._step("receive_weights", "receive", group=group, **tensors)
        self._came_by.add(group)
        if adapter is not None and self._came_by >= self._groups:
            await self._finish(None, "keep")

    @as_change("load_adapter")
    async def receive_adapter(self, adapter: ReceivedAdapter, group: str, **tensors: Any) -> None:
        """A whole update of an adapter, whose tensors come in a group."""
        async with self._leaving(group):
            await self._begin("begin_weights", "begin", adapter=adapter)
            await self._step("receive_weights", "receive", group=group, **tensors)
        await self._finish(None, "keep")

    @contextlib.asynccontextmanager
    async def leaving_if_refused(self, group: str) -> AsyncIterator[None]:
        """After an error before engines have received tensors, what the trainer broadcasts fails and does not wait."""
        try:
            yield
        except ApiError as error:
            if not isinstance(error, FanoutFailed):
                await self.leave(group)
            raise

    @contextlib.asynccontextmanager
    async def _leaving(self, group: str) -> AsyncIterator[None]:
        """After an error the engines leave the group: what the trainer still sends there fails."""
        try:
            yield
        except ApiError:
            await self._leave(group)
            raise

    async def _begin_with_tensors(self, version: Version | None, adapter: ReceivedAdapter | None) -> None:
        if self._machine.status.state is not ControlState.UPDATING:
            await self._begin("begin_weights", "begin", adapter=adapter)
            self._ends_at_resume, self._version_of_tensors = True, None
        self._require_update_of(adapter)
        if version is not None:
            self._version_of_tensors = version

    def _require_update_of(self, adapter: ReceivedAdapter | None) -> None:
        """Raises ApiError 409 where the update under way is of something else."""
        if adapter != self._adapter:
            own = "the model" if self._adapter is None else f"adapter {self._adapter.name!r}"
            state = self._machine.status.name
            raise wrong_state(f"tensors of something else while the engines are {state} ({own}): finish or cancel it")

    async def end_received(self) -> None:
        """Finish the update that received tensors have begun, if one is under way."""
        if self._ends_at_resume:
            await self.finish(self._version_of_tensors)

    def _watch(self, *, is_on: bool = True) -> None:
        """From now on the next call of the update is waited for. A trainer that has died sends none."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if is_on and self._groups:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(IDLE_S, lambda: loop.create_task(self._give_up()))

    async def _give_up(self) -> None:
        waited = self._idle

        async def cancel() -> None:
            if self._idle is waited:
                log.warning("no call of the weight update came for %g s: it is cancelled", IDLE_S)
                await self._cancel("idle")

        with contextlib.suppress(ApiError):
            await self.change("cancel_update", cancel())

    @as_change("write_weights")
    async def read(self, path: str) -> None:
        """Read files into the running update; a failure ends the update."""
        self._require_update_of(None)
        await self._step("load_weights", "read", path=path)

    @as_change("finish_update")
    async def finish(self, version: Version | None, running: str = "keep") -> Version:
        """-> the new version. running: "keep" the keys and values of running requests, or "recompute" them."""
        return await self._finish(version, running)

    @as_change("cancel_update")
    async def cancel(self) -> None:
        """Restore the weights and the version from before the start."""
        await self._cancel("cancel")

    @as_change("load_update")
    async def load(self, path: str, version: Version | None, running: str = "keep", *, abort: bool = False) -> Version:
        """A whole update from files -> the new version. abort: running requests end with the tokens they have."""
        if abort:
            self._machine.client.abort()
        await self._begin("load_weights", "read", path=path)
        return await self._finish(version, running)

    async def _begin(self, command: str, phase: str, *, adapter: ReceivedAdapter | None = None, **args: Any) -> None:
        machine = self._machine
        before = machine.status
        if adapter is not None and before.state is ControlState.SPOILED:
            raise wrong_state(f"an adapter while the engines are {before.name}: finish an update of the model first")
        if before.state is ControlState.SERVING:
            await machine.quiesce()
        self._version_before = machine.version
        machine.status = ControlStatus(state=ControlState.UPDATING, before=before)
        self._is_of_trainer = bool(self._groups)
        self._ends_at_resume = False
        self._adapter = adapter
        self._came_by.clear()
        if adapter is not None:
            args["adapter"] = {one.name: getattr(adapter, one.name) for one in fields(adapter)}
        await self._step(command, phase, **args)

    async def _step(self, command: str, phase: str, **args: Any) -> dict[str, Any]:
        """Run a command of an update; on failure the update is undone before the error is raised."""
        before = self._before
        self._watch(is_on=False)
        try:
            values = await self._fanout.run(command, f"weight update ({phase})", before.name, **args)
        except ApiError as error:
            await self._cancel(phase, error)
            raise
        self._watch()
        return values

    async def _finish(self, version: Version | None, running: str) -> Version:
        """An adapter has versions of its own: the weights' version stays."""
        labels, of_adapter = self._machine.labels, self._adapter is not None
        chosen = self._version_before if of_adapter else labels.number_of(version, self._version_before, is_new=True)
        await self._step("finish_weights", "finish", version=chosen, running=running)
        before = self._before
        if before.state is ControlState.SPOILED:
            assert before.before is not None
            before = before.before
        if not of_adapter:
            labels.keep(version, chosen)
        try:
            if of_adapter:  # it is loaded here
                await self._fanout.run("settle_weights", "weight update (load)", before.name)
            else:
                await self._fanout.end("settle_weights")
        finally:
            await self._return_to(before)
            await self._machine.client.refresh()
        return labels.shown(chosen)

    async def _cancel(self, phase: str, error: ApiError | None = None) -> None:
        before = self._before
        answers = await self._fanout.end("cancel_weights", version=self._version_before)
        failed = {n: one.message for n, one in answers.items() if not one.ok and one.kind != "ReplicaLost"}
        if failed and before.state is not ControlState.SPOILED:
            self._machine.status = ControlStatus(state=ControlState.SPOILED, before=before)
            texts = "; ".join(f"replica {name}: {text}" for name, text in failed.items())
            because = f" after {error.message}" if error is not None else ""
            message = f"weight update ({phase}): taking it back failed, {texts}{because}; the engines are SPOILED"
            raise ApiError(500, message, code="engine_error") from error
        await self._return_to(before)

    async def _return_to(self, status: ControlStatus) -> None:
        self._ends_at_resume = False
        self._watch(is_on=False)
        if status.state is ControlState.SERVING:
            await self._machine.unpause(SERVING)
        else:
            self._machine.status = status

    @property
    def _before(self) -> ControlStatus:
        before = self._machine.status.before
        assert before is not None, "inside an update"
        return before

    # ------------------------------------------------------------------ version and checksums

    @as_change("set_version")
    async def set_version(self, version: Version, *, abort: bool = False) -> None:
        """Set the version; changed weights are detected, and prefixes cached before are not matched any more.

        abort: running requests end with the tokens they have.
        """
        machine = self._machine
        number = machine.labels.number_of(version, machine.version, is_new=False)
        if number < machine.version:
            text = f"weight_version is {number}, the engines have {machine.version}: without new weights it only grows"
            raise bad_request(text, "weight_version", "invalid_value")
        if abort:
            machine.client.abort()
        state = machine.status.name
        await self._fanout.run("set_weight_version", "set the version", state, version=number, running="keep")
        machine.labels.keep(version, number)
        await machine.client.refresh()

    @as_change("check_weights")
    async def check(self, action: str) -> dict[str, Any]:
        """Checksums of every replica's live weights -> {"replicas", "checksum", "equal"}; see `check_weights`."""
        found = await self._fanout.run("check_weights", f"weights ({action})", self._machine.status.name, action=action)
        sums = {value["checksum"] for value in found.values()}
        equal = len(sums) == 1
        return {"checksum": sums.pop() if equal else None, "equal": equal, "replicas": found}

    @as_change("spoil_weights")
    async def spoil(self) -> None:
        """Overwrite all weights, so that an update that omits a tensor shows. The engines are SPOILED."""
        machine = self._machine
        before = machine.status
        if before.state is ControlState.SERVING:
            await machine.quiesce()
        if before.state is not ControlState.SPOILED:
            machine.status = ControlStatus(state=ControlState.SPOILED, before=before)
        await self._fanout.run("check_weights", "weights (reset)", machine.status.name, action="reset")
