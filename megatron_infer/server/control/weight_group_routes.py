"""Routes by which trainers broadcast weights to the engines: SGLang's, as slime and AReaL call them, and AReaL's own.

vLLM's are in vllm_routes: their paths take files and bodies, too. Here are also the calls by name that SkyRL sends.
"""

from __future__ import annotations

from typing import Any

from megatron_infer.engine.lifecycle_commands import TAGS
from megatron_infer.server.body_types import Body
from megatron_infer.server.control.control_routes import ControlRoutes
from megatron_infer.server.control.control_states import ControlState
from megatron_infer.server.control.state_machine import ControlMachine, checked_tags
from megatron_infer.server.control.trainer_groups import GroupFields, TrainerGroups
from megatron_infer.server.control.version_labels import checked_version
from megatron_infer.server.control.vllm_routes import TAG_NAMES
from megatron_infer.server.control.weight_files import entries_of_base64
from megatron_infer.server.control.weight_updates import WeightUpdates
from megatron_infer.server.endpoint import Call, Reply
from megatron_infer.server.http_errors import ApiError, bad_request
from megatron_infer.server.inactive_fields import FieldTable, no_effect, refused

GROUP = "weight_update_group"
"""SGLang's name of a group where the caller gives none."""
WHOLE_CALL = 1 << 62
"""Bytes of the buffer where all tensors of a call come as one."""
LOAD_FORMATS = {None: None, "auto": None, "flattened_bucket": WHOLE_CALL}
GROUP_FIELDS = FieldTable({"pp_rank": no_effect("the group's name tells the stages of a trainer apart")})
_TENSORS = {
    "flush_cache": no_effect("prefixes computed with other weights never match", True, False),
    "torch_empty_cache": no_effect("no cache of torch is kept", False),
}
TENSORS_FIELDS = FieldTable(_TENSORS)
SERIALIZED_FIELDS = FieldTable(_TENSORS | {"load_format": no_effect("the bytes say what they are")})
RPC_FIELDS = FieldTable(
    {"timeout": no_effect("a command to the engines has 300 s"), "args": refused("arguments have names: kwargs", [])}
)
OTHER_ADAPTERS = "tensors of adapters come by /load_lora_adapter_from_distributed, files by /v1/load_lora_adapter"


class JoinBody(GroupFields, kw_only=True):
    group_name: str = GROUP


class LeaveBody(Body):
    group_name: str = GROUP


class AnnouncingBody(Body, kw_only=True):
    """Tensors that the trainer broadcasts."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = GROUP

    def tensors(self) -> dict[str, Any]:
        return {"names": self.names, "dtypes": self.dtypes, "shapes": self.shapes}


class TensorsBody(AnnouncingBody, kw_only=True):
    load_format: str | None = None
    """flattened_bucket: all tensors come in one broadcast of their bytes."""
    weight_version: int | str | None = None
    abort_all_requests: bool | None = None


class SerializedBody(Body, kw_only=True):
    serialized_named_tensors: list[str]
    weight_version: int | str | None = None


class RpcBody(Body, kw_only=True):
    method: str
    kwargs: dict[str, Any] | None = None


def register(
    control_routes: ControlRoutes, machine: ControlMachine, updates: WeightUpdates, groups: TrainerGroups
) -> None:
    routes = WeightGroupRoutes(machine, updates, groups)
    add = control_routes.add
    needed: dict[str, Any] = {"optional_body": False}
    joining: dict[str, Any] = {"body": JoinBody, "fields": GROUP_FIELDS, **needed}
    for prefix in ("/", "/areal_"):
        add("POST", f"{prefix}init_weights_update_group", routes.join, "Join a trainer's group", **joining)
    add("POST", "/destroy_weights_update_group", routes.leave, "Leave a trainer's group", body=LeaveBody)
    tensors: dict[str, Any] = {"body": TensorsBody, "fields": TENSORS_FIELDS, **needed}
    add("POST", "/update_weights_from_distributed", routes.receive, "Receive tensors in a group", **tensors)
    add("POST", "/areal_set_update_weight_meta", routes.announce, "Say which tensors will come", **tensors)
    add("POST", "/areal_update_weights_xccl", routes.receive_announced, "Receive these tensors", body=Body)
    serialized: dict[str, Any] = {"body": SerializedBody, "fields": SERIALIZED_FIELDS, "body_limit": "max_weight_bytes"}
    add("POST", "/update_weights_from_tensor", routes.write, "Tensors as safetensors in base64", **serialized, **needed)
    add("POST", "/collective_rpc", routes.call, "SkyRL's calls by name", body=RpcBody, fields=RPC_FIELDS, **needed)


class WeightGroupRoutes:
    """Handlers. Replies are SGLang's, with the state."""

    def __init__(self, machine: ControlMachine, updates: WeightUpdates, groups: TrainerGroups) -> None:
        self._machine = machine
        self._updates = updates
        self._groups = groups
        self._announced: TensorsBody | None = None

    def reply(self, message: str, **figures: Any) -> Reply:
        return Reply({"success": True, "message": message, "state": self._machine.status.name, **figures})

    async def join(self, call: Call) -> Reply:
        await self._groups.join(call, call.body.group_name, call.body, kind="torch")
        return self.reply("Succeeded to initialize custom process group.")

    async def leave(self, call: Call) -> Reply:
        await self._updates.leave(call.body.group_name)
        return self.reply("Succeeded to destroy custom process group.")

    async def receive(self, call: Call) -> Reply:
        return await self._receive(call.body)

    async def announce(self, call: Call) -> Reply:
        self._announced = call.body
        return self.reply("Success")

    async def receive_announced(self, call: Call) -> Reply:
        announced, self._announced = self._announced, None
        if announced is None:
            raise bad_request("no tensors were announced; /areal_set_update_weight_meta goes before", "names")
        return await self._receive(announced)

    async def _receive(self, body: TensorsBody) -> Reply:
        known = ", ".join(name for name in LOAD_FORMATS if name)
        async with self._updates.leaving_if_refused(body.group_name):
            if body.load_format not in LOAD_FORMATS:
                raise bad_request(f"load_format is {str(body.load_format)[:40]!r}; one of {known}", "load_format")
            self._begins_with_tensors(abort=bool(body.abort_all_requests))
            size, version = LOAD_FORMATS[body.load_format], checked_version(body.weight_version)
            await self._updates.receive(body.group_name, version=version, **body.tensors(), buffer_bytes=size)
        return self.reply("Succeeded to update parameter online.", num_tensors=len(body.names))

    def _begins_with_tensors(self, *, abort: bool = False) -> None:
        """Raises ApiError 409 where nothing would end an update that tensors begin."""
        self._machine.require("receive_weights")
        if abort and self._machine.status.state is not ControlState.UPDATING:
            self._machine.client.abort()

    async def write(self, call: Call) -> Reply:
        """Tensors in the body itself."""
        body: SerializedBody = call.body
        field = "serialized_named_tensors"
        entries, data = await self._machine.client.run_in_thread(
            entries_of_base64, body.serialized_named_tensors, field
        )
        self._begins_with_tensors()
        await self._updates.write_first(entries, data, version=checked_version(body.weight_version))
        return self.reply("Success", num_tensors=len(entries))

    async def call(self, call: Call) -> Reply:
        """vLLM calls a function of its workers; here a few names of SkyRL's act."""
        body: RpcBody = call.body
        given = dict(body.kwargs or {})
        if body.method == "skyrl_sleep_for_weight_sync":
            given.pop("offload_kv", None)  # kept requests are recomputed
            work = self._machine.sleep(TAGS, "keep")
        elif body.method == "skyrl_wake_for_weight_sync":
            work = self._machine.wake_up(checked_tags(given.pop("tags", None) or TAG_NAMES, TAG_NAMES))
        else:
            names = "skyrl_sleep_for_weight_sync, skyrl_wake_for_weight_sync"
            why = OTHER_ADAPTERS if "lora" in body.method else "functions of the engines are not called by name"
            text = f"/collective_rpc of {body.method[:60]!r} is not served ({names} are): {why}"
            raise ApiError(501, text, param="method", code="not_served")
        await work
        return Reply({"results": [None] * sum(self._machine.ranks), "state": self._machine.status.name})
