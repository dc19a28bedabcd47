"""Commands to all replicas: each is carried out by all of them, or the caller undoes it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from itertools import chain
from typing import Any

from megatron_infer.coordinator import protocol
from megatron_infer.engine.lifecycle_commands import COMMANDS
from megatron_infer.errors import InferenceError
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.http_errors import RETRY_AFTER_S, ApiError

log = logging.getLogger("megatron_infer.server")

CLIENT_ERRORS = (
    *("ConfigError", "RequestError", "WeightUpdateError", "ModelError", "InvalidPrompt"),
    *("BadMessage", "MessageTooLarge"),
)
"""Errors of replicas, or of the way to them, that the client's arguments caused."""
REFUSALS = (*CLIENT_ERRORS, "WrongState", "AdapterInUse", "UnknownAdapter", "AccessRefused", "WeightsPathRefused")
"""Errors of replicas that have changed nothing."""

OF_ALL = {
    ("WrongState",): (409, "wrong_state"),
    ("AdapterInUse",): (409, "adapter_in_use"),
    ("UnknownAdapter",): (404, "model_not_found"),
    CLIENT_ERRORS: (400, "invalid_value"),
}
OF_ANY = {
    ("AccessRefused", "WeightsPathRefused"): (403, "refused_by_engine"),
    ("ConnectionLost", "ReplicaLost"): (503, "engine_unavailable"),
    ("TransitionTimeout",): (504, "timeout"),
}
"""Status and code of a command that failed on replicas, by the kinds of their errors: of all of them, else of one."""

RECONNECT_S, AGAIN_S = 30.0, 0.2
"""Seconds for which a command that ends another one is sent again while the coordinator is away, and between tries."""


class FanoutFailed(ApiError):
    """A command that not every replica carried out; the reply has these replicas, the phase and the state now."""

    def __init__(
        self, status: int, message: str, *, code: str, state: str, phase: str, replicas: list[dict[str, str]]
    ) -> None:
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
        super().__init__(status, message, code=code, headers=headers)
        self.state, self.phase, self.replicas = state, phase, replicas
        self.is_refused_by_all = False
        """No replica has changed anything: there is nothing to undo."""

    def body(self) -> dict[str, Any]:
        details = {"state": self.state, "phase": self.phase, "replicas": self.replicas}
        return {"error": {**super().body()["error"], **details}}


class Fanout:
    """Sends commands to all replicas through the coordinator, each with its usual deadline."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def run(
        self, command: str, phase: str, state: str, *, lost_counts: bool = True, **args: Any
    ) -> dict[str, Any]:
        """Every replica's value by its name. phase, state: for the error. lost_counts: False where a replica that is
        lost before it answers, and gets the command when it is back, does not make it fail.

        A command that ends another does not fail by replicas that are not there: they get it when they join.
        Raises FanoutFailed; the caller has to undo the command on the replicas that carried it out.
        """
        answers = await self._send(command, **args)
        is_end = COMMANDS[command].ends_another
        if is_end or (not lost_counts and any(answer.ok for answer in answers.values())):
            answers = {name: answer for name, answer in answers.items() if answer.kind != "ReplicaLost"}
        failed = {name: answer for name, answer in answers.items() if not answer.ok}
        if not answers and not is_end:
            message = f"{phase}: no engine is there to do it; ask again in a moment"
            raise FanoutFailed(503, message, code="no_engine", state=state, phase=phase, replicas=[])
        if failed:
            raise _failure(failed, len(answers), phase, state)
        return {name: answer.value for name, answer in answers.items()}

    async def end(self, command: str, **args: Any) -> Mapping[str, protocol.Answer]:
        """Send a command that undoes or settles another -> every answer. Errors are logged: not every replica has
        carried that out."""
        answers = await self._send(command, **args)
        for name, answer in answers.items():
            if not answer.ok:
                log.warning("%s on replica %s: %s", command, name, answer.message)
        return answers

    async def _send(self, command: str, **args: Any) -> dict[str, protocol.Answer]:
        deadline, is_again = time.monotonic() + RECONNECT_S, False
        while True:
            try:
                answers = await self._client.coordinator.control(command, check=False, **args)
                if is_again and command == "unpause":  # an engine that runs has done so for the coordinator before
                    return {name: one for name, one in answers.items() if one.kind != "WrongState"}
                return answers
            except InferenceError as error:
                if COMMANDS[command].ends_another and time.monotonic() < deadline:
                    is_again = True
                    await asyncio.sleep(AGAIN_S)  # for the next coordinator: it has to know that the engines go on
                    continue
                return {"coordinator": protocol.Answer(ok=False, kind=type(error).__name__, message=str(error))}


def _failure(failed: Mapping[str, protocol.Answer], total: int, phase: str, state: str) -> FanoutFailed:
    kinds = {answer.kind for answer in failed.values()}
    alike = (reply for errors, reply in OF_ALL.items() if kinds <= set(errors))
    among = (reply for errors, reply in OF_ANY.items() if kinds & set(errors))
    status, code = next(chain(alike, among), (500, "engine_error"))
    texts = "; ".join(f"replica {name}: {answer.message}" for name, answer in failed.items())
    message = f"{phase} failed on {len(failed)} of {total} replicas, {texts}; the engines are {state}"
    replicas = [{"name": name, "kind": one.kind, "message": one.message} for name, one in failed.items()]
    error = FanoutFailed(status, message, code=code, state=state, phase=phase, replicas=replicas)
    error.is_refused_by_all = len(failed) == total and kinds <= set(REFUSALS)
    return error
