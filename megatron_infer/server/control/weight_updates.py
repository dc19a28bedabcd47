"""Weight updates of all engines: start, write, finish; or files in one step. All engines get the weights, or none.

A failed update is undone on every replica, and the engines return to the state before. If undoing fails too, they are
SPOILED until the next update finishes.
"""

from __future__ import annotations

from typing import Any

from megatron_infer.server.control.control_states import SERVING, ControlState, ControlStatus
from megatron_infer.server.control.state_machine import ControlMachine, as_change
from megatron_infer.server.control.version_labels import Version
from megatron_infer.server.control.weight_files import TensorEntry
from megatron_infer.server.http_errors import ApiError, bad_request


class WeightUpdates:
    """Changes the weights and their version, and computes checksums of them."""

    def __init__(self, machine: ControlMachine) -> None:
        self._machine, self._fanout = machine, machine.fanout
        self.change = machine.change
        self._version_before = 0

    # ------------------------------------------------------------------ an update

    @as_change("start_update")
    async def start(self) -> None:
        await self._begin("begin_weights", "begin")

    @as_change("write_weights")
    async def write(self, entries: list[TensorEntry], data: bytes) -> None:
        """Write tensors of the whole model, with megatron-core's or Hugging Face names; a failure ends the update."""
        for entry in entries:
            for chunk in entry.chunks(data):
                await self._step("write_weights", "write", **chunk)

    @as_change("write_weights")
    async def read(self, path: str) -> None:
        """Read files into the running update; a failure ends the update."""
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

    async def _begin(self, command: str, phase: str, **args: Any) -> None:
        machine = self._machine
        before = machine.status
        if before.state is ControlState.SERVING:
            await machine.quiesce()
        self._version_before = machine.version
        machine.status = ControlStatus(state=ControlState.UPDATING, before=before)
        await self._step(command, phase, **args)

    async def _step(self, command: str, phase: str, **args: Any) -> dict[str, Any]:
        """Run a command of an update; on failure the update is undone before the error is raised."""
        before = self._before
        try:
            return await self._fanout.run(command, f"weight update ({phase})", before.name, **args)
        except ApiError as error:
            await self._cancel(phase, error)
            raise

    async def _finish(self, version: Version | None, running: str) -> Version:
        labels = self._machine.labels
        chosen = labels.number_of(version, self._version_before, is_new=True)
        await self._step("finish_weights", "finish", version=chosen, running=running)
        await self._fanout.end("settle_weights")
        before = self._before
        if before.state is ControlState.SPOILED:
            assert before.before is not None
            before = before.before
        labels.keep(version, chosen)
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
