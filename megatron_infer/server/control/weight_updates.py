"""New weights for all engines: a bracket of begin, write, finish, or files at once. All engines have them, or none.

Whatever fails is taken back everywhere, and the engines are where they were before; where even that fails they are
SPOILED, and the next update that is finished heals them.
"""

from __future__ import annotations

from typing import Any

from megatron_infer.server.control.control_states import SERVING, ControlStatus, State
from megatron_infer.server.control.state_machine import ControlMachine
from megatron_infer.server.control.weight_files import Entry
from megatron_infer.server.http_errors import ApiError, bad_request

RUNNING = ("keep", "recompute")


class Updates:
    """What changes weights, their version, or looks at them."""

    def __init__(self, machine: ControlMachine) -> None:
        self._machine, self._orders = machine, machine.orders
        self._version_before = 0

    # ------------------------------------------------------------------ the bracket

    async def start(self) -> None:
        await self._machine.change("start_update", self._begin("begin_weights", "begin"))

    async def write(self, entries: list[Entry], data: bytes) -> None:
        """Tensors of the whole model, under megatron-core's or Hugging Face names. On failure the update is over."""
        await self._machine.change("write_weights", self._write(entries, data))

    async def read(self, path: str) -> None:
        """Files into the update that is under way. On failure the update is over."""
        await self._machine.change("write_weights", self._step("load_weights", "read", path=path))

    async def finish(self, version: int | None, running: str = "keep") -> int:
        """-> the version. running: "keep" the keys and values of requests under way, or "recompute" them."""
        return await self._machine.change("finish_update", self._finish(version, running))

    async def cancel(self) -> None:
        """Weights and version are what they were before the start."""
        await self._machine.change("cancel_update", self._cancel("cancel"))

    async def load(self, path: str, version: int | None, running: str = "keep", *, abort: bool = False) -> int:
        """All of it at once, out of files -> the version. abort: requests under way end with what they have."""
        return await self._machine.change("load_update", self._load(path, version, running, abort))

    async def _load(self, path: str, version: int | None, running: str, abort: bool) -> int:
        if abort:
            self._machine.service.abort()
        await self._begin("load_weights", "read", path=path)
        return await self._finish(version, running)

    async def _begin(self, command: str, phase: str, **args: Any) -> None:
        machine = self._machine
        before = machine.standing
        if before.state is State.SERVING:
            await machine.quiesce()
        self._version_before = machine.version
        machine.standing = ControlStatus(state=State.UPDATING, before=before)
        await self._step(command, phase, **args)

    async def _step(self, command: str, phase: str, **args: Any) -> dict[str, Any]:
        """A command of an update; on failure the update is taken back before the error goes on."""
        before = self._before
        try:
            return await self._orders.give(command, f"weight update ({phase})", before.name, **args)
        except ApiError as error:
            await self._cancel(phase, error)
            raise

    async def _write(self, entries: list[Entry], data: bytes) -> None:
        for entry in entries:
            for piece in entry.pieces(data):
                await self._step("write_weights", "write", **piece)

    async def _finish(self, version: int | None, running: str) -> int:
        chosen = self._version_before + 1 if version is None else version
        await self._step("finish_weights", "finish", version=chosen, running=running)
        await self._orders.undo("settle_weights")
        before = self._before
        if before.state is State.SPOILED:
            assert before.before is not None
            before = before.before
        await self._return_to(before)
        await self._machine.service.look()
        return chosen

    async def _cancel(self, phase: str, error: ApiError | None = None) -> None:
        before = self._before
        answers = await self._orders.undo("cancel_weights", version=self._version_before)
        failed = {name: answer.message for name, answer in answers.items() if not answer.ok}
        if failed and before.state is not State.SPOILED:
            self._machine.standing = ControlStatus(state=State.SPOILED, before=before)
            texts = "; ".join(f"replica {name}: {text}" for name, text in failed.items())
            because = f" after {error.message}" if error is not None else ""
            message = f"weight update ({phase}): taking it back failed, {texts}{because}; the engines are SPOILED"
            raise ApiError(500, message, code="engine_error") from error
        await self._return_to(before)

    async def _return_to(self, standing: ControlStatus) -> None:
        if standing.state is State.SERVING:
            await self._machine.go_on(SERVING)
        else:
            self._machine.standing = standing

    @property
    def _before(self) -> ControlStatus:
        before = self._machine.standing.before
        assert before is not None, "inside an update"
        return before

    # ------------------------------------------------------------------ version and content

    async def set_version(self, version: int) -> None:
        """What the weights go by from now on; they are looked at, and cached prefixes are not matched any more."""
        await self._machine.change("set_version", self._set_version(version))

    async def _set_version(self, version: int) -> None:
        current = self._machine.version
        if version < current:
            text = f"weight_version is {version}, the engines have {current}: without new weights it only grows"
            raise bad_request(text, "weight_version", "invalid_value")
        standing = self._machine.standing.name
        await self._orders.give("set_weight_version", "set the version", standing, version=version, running="keep")
        await self._machine.service.look()

    async def check(self, action: str) -> dict[str, Any]:
        """Digests of every replica's live weights -> {"replicas", "checksum", "equal"}; see `check_weights`."""
        return await self._machine.change("check_weights", self._check(action))

    async def _check(self, action: str) -> dict[str, Any]:
        found = await self._orders.give(
            "check_weights", f"weights ({action})", self._machine.standing.name, action=action
        )
        sums = {value["checksum"] for value in found.values()}
        equal = len(sums) == 1
        return {"checksum": sums.pop() if equal else None, "equal": equal, "replicas": found}

    async def spoil(self) -> None:
        """Overwrite all weights: an update that leaves a tensor out then shows. The engines are SPOILED."""
        await self._machine.change("spoil_weights", self._spoil())

    async def _spoil(self) -> None:
        machine = self._machine
        before = machine.standing
        if before.state is State.SERVING:
            await machine.quiesce()
        if before.state is not State.SPOILED:
            machine.standing = ControlStatus(state=State.SPOILED, before=before)
        await self._orders.give("check_weights", "weights (reset)", machine.standing.name, action="reset")


def checked_version(value: int | str | None) -> int | None:
    """A version as loops give it, a number or its digits. Raises ApiError 400."""
    if value is None:
        return None
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
        return int(value)
    if isinstance(value, int) and 0 <= value < 10**18:
        return value
    text = f"weight_version is {value!r}"[:80] + "; here a version is a whole number, as a number or as its digits"
    raise bad_request(text, "weight_version", "invalid_value")
