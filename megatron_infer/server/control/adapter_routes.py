"""vLLM's and SGLang's routes that load and unload LoRA adapters on all engines, for --lora-root or --control."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from starlette.responses import PlainTextResponse, Response

from megatron_infer.config.lora import check_adapter_name
from megatron_infer.coordinator.weight_paths import WeightsPathRefused, adapter_path
from megatron_infer.errors import ConfigError
from megatron_infer.server.body_types import Body
from megatron_infer.server.control.control_routes import ControlRoutes
from megatron_infer.server.control.fanout import FanoutFailed
from megatron_infer.server.control.state_machine import ControlMachine
from megatron_infer.server.endpoint import Call, Reply
from megatron_infer.server.http_errors import ApiError, bad_request


class LoadAdapterBody(Body, kw_only=True):
    lora_name: str
    lora_path: str
    """A PEFT directory below --lora-root: absolute, or from the root."""
    load_inplace: bool | None = None
    """True: an adapter of that name with another content is replaced (vLLM's name)."""
    pinned: bool | None = None
    """SGLang's name; it has no effect: whom running requests need stays, others make room by their last use."""
    running: str | None = None
    """For running requests of an adapter that is replaced: "keep" their keys and values, or "recompute" them."""


class UnloadAdapterBody(Body, kw_only=True):
    lora_name: str
    lora_int_id: int | None = None
    """vLLM's number of the adapter; it has no effect."""
    abort: bool | None = None
    """True: unfinished requests of the adapter end with an error; else they keep it from being unloaded."""


def register(control_routes: ControlRoutes, machine: ControlMachine) -> None:
    routes = AdapterRoutes(machine, control_routes.settings.lora_root)
    shared: dict[str, Any] = {"optional_body": False, "control": control_routes.settings.lora_root is None}
    for prefix, kind in (("/v1", routes.vllm), ("", routes.sglang)):
        load = {"body": LoadAdapterBody, **shared}
        control_routes.add("POST", f"{prefix}/load_lora_adapter", kind(routes.load), "Load a LoRA adapter", **load)
        unload = {"body": UnloadAdapterBody, **shared}
        control_routes.add("POST", f"{prefix}/unload_lora_adapter", kind(routes.unload), "Unload one", **unload)


class AdapterRoutes:
    """Handlers; an adapter has one change at a time, on all engines or on none."""

    def __init__(self, machine: ControlMachine, root: str | None) -> None:
        self._machine, self._root = machine, root
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By adapter: those of several names are loaded at once."""

    @staticmethod
    def vllm(handler: Any) -> Any:
        """Reply as vLLM does, with a line of text."""

        async def reply(call: Call) -> Response:
            name, done = await handler(call)
            return PlainTextResponse(f"Success: LoRA adapter {name!r} {done} successfully.")

        return reply

    def sglang(self, handler: Any) -> Any:
        """Reply as SGLang does, with the adapters that are loaded now."""

        async def reply(call: Call) -> Reply:
            await handler(call)
            return loaded_adapters(self._machine)

        return reply

    async def load(self, call: Call) -> tuple[str, str]:
        body: LoadAdapterBody = call.body
        name, client = checked_name(body.lora_name, self._machine), self._machine.client
        if body.pinned:
            call.ignored.append("pinned")
        try:
            path = await client.run_in_thread(adapter_path, body.lora_path, self._root)
        except WeightsPathRefused as error:
            raise _refusal(error) from None
        how = {"replace": bool(body.load_inplace), "running": body.running or "keep"}
        await self._change("load_adapter", name, path=path, **how)
        return name, "added"

    async def unload(self, call: Call) -> tuple[str, str]:
        body: UnloadAdapterBody = call.body
        await self._change("unload_adapter", body.lora_name, abort=bool(body.abort))
        return body.lora_name, "removed"

    async def _change(self, command: str, name: str, **args: Any) -> None:
        """Carry a command out on all engines that live, which have the same content then; or undo it on all."""
        fanout, change = self._machine.fanout, secrets.token_hex(8)
        async with self._locks.setdefault(name, asyncio.Lock()):
            try:
                values = await fanout.run(
                    command, command, self._machine.status.name, lost_counts=False, name=name, change=change, **args
                )
                if len({value.get("digest") for value in values.values()}) > 1:
                    raise _differ(name, values)
            except ApiError as error:
                if not (isinstance(error, FanoutFailed) and error.is_refused_by_all):
                    await fanout.end("undo_adapter", name=name, change=change)
                raise
            else:
                await fanout.end("settle_adapter", name=name, change=change)
            finally:
                await self._machine.client.refresh()


def checked_name(name: str, machine: ControlMachine) -> str:
    """The name of an adapter that is to be loaded. Raises ApiError 400."""
    try:
        check_adapter_name(name)
    except ConfigError as error:
        raise bad_request(str(error), "lora_name", "invalid_value") from None
    if name in machine.client.model_names:
        raise bad_request(f"lora_name: {name!r} is the model's own name; choose another", "lora_name")
    return name


def loaded_adapters(machine: ControlMachine) -> Reply:
    """SGLang's reply to a change of an adapter: those that are loaded now."""
    adapters = {name: name for name in machine.client.adapters}
    return Reply({"success": True, "error_message": "", "loaded_adapters": adapters})


def _differ(name: str, values: Mapping[str, Any]) -> ApiError:
    replicas = ", ".join(sorted(values))
    message = f"adapter {name!r} has not the same content on replicas {replicas}: give all of them the same directory"
    return ApiError(409, message, param="lora_path", code="adapters_differ")


def _refusal(error: WeightsPathRefused) -> ApiError:
    status = {"no_lora_root": 403, "outside_weights_root": 403, "not_found": 404}.get(error.code, 400)
    return ApiError(status, str(error).replace("path", "lora_path", 1), param="lora_path", code=error.code)
