"""Routes by which trainers send the tensors of LoRA adapters: in a group with the engines, as AReaL and miles do, or in
the body.

An adapter is updated as the model is: on all engines, or on none, which keep the one that they had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from megatron_infer.config.lora import ReceivedAdapter
from megatron_infer.server.body_types import Body
from megatron_infer.server.control.adapter_routes import checked_name, loaded_adapters
from megatron_infer.server.control.control_routes import ControlRoutes
from megatron_infer.server.control.state_machine import ControlMachine
from megatron_infer.server.control.weight_files import TensorEntry, entries_of_base64
from megatron_infer.server.control.weight_group_routes import AnnouncingBody
from megatron_infer.server.control.weight_updates import WeightUpdates
from megatron_infer.server.endpoint import Call, Reply
from megatron_infer.server.http_errors import bad_request
from megatron_infer.server.inactive_fields import FieldTable, no_effect, refused

AREAL_FIELDS = FieldTable({"base_model_name": no_effect("adapters are of the model that is served")})
_SGLANG = {
    "pinned": no_effect("adapters that requests need stay, others make room by their last use", False),
    "lora_id": no_effect("adapters are told apart by their names"),
    "added_tokens_config": refused("embeddings of adapters are not supported", {}),
}
SGLANG_FIELDS = FieldTable(_SGLANG)
BODY_FIELDS = FieldTable(_SGLANG | {"load_format": no_effect("the bytes say what they are")})


class ArealAdapterBody(AnnouncingBody, kw_only=True):
    lora_name: str
    lora_int_id: int
    """Loading an adapter unloads the one that was loaded last with the same id."""
    lora_target_modules: list[str] | str
    lora_rank: int
    lora_alpha: float
    lora_bias: str = "none"


class BroadcastAdapterBody(AnnouncingBody, kw_only=True):
    lora_name: str
    config_dict: dict[str, Any]
    """Fields of an adapter_config.json."""
    upsert: bool | None = None
    """True: an adapter of that name with another content is replaced."""


class SerializedAdapterBody(Body, kw_only=True):
    """The tensors are safetensors bytes in base64, under one of both names."""

    lora_name: str
    config_dict: dict[str, Any]
    upsert: bool | None = None
    serialized_tensors: str | None = None
    serialized_named_tensors: list[str] | None = None
    expected_checksums: dict[str, str] | None = None
    """SHA-256 of each tensor's bytes."""


def register(control_routes: ControlRoutes, machine: ControlMachine, updates: WeightUpdates) -> None:
    routes = AdapterTensorRoutes(machine, updates)
    add = control_routes.add
    needed: dict[str, Any] = {"optional_body": False}
    areal: dict[str, Any] = {"body": ArealAdapterBody, "fields": AREAL_FIELDS, **needed}
    add("POST", "/areal_set_update_weight_meta_lora", routes.announce, "Say which tensors will come", **areal)
    add("POST", "/areal_update_weights_lora_xccl", routes.receive_of_areal, "Receive an adapter", **areal)
    received: dict[str, Any] = {"body": BroadcastAdapterBody, "fields": SGLANG_FIELDS, **needed}
    add("POST", "/load_lora_adapter_from_distributed", routes.receive, "Receive an adapter in a group", **received)
    serialized: dict[str, Any] = {
        "body": SerializedAdapterBody,
        "fields": BODY_FIELDS,
        "body_limit": "max_weight_bytes",
    }
    add("POST", "/load_lora_adapter_from_tensors", routes.write, "An adapter in base64", **serialized, **needed)


class AdapterTensorRoutes:
    """Handlers."""

    def __init__(self, machine: ControlMachine, updates: WeightUpdates) -> None:
        self._machine = machine
        self._updates = updates

    async def announce(self, call: Call) -> Reply:
        """Checked only: the second call says the same again."""
        async with self._updates.leaving_if_refused(call.body.group_name):
            self._of_areal(call.body)
        return Reply({"success": True, "message": "Success", "state": self._machine.status.name})

    async def receive_of_areal(self, call: Call) -> Reply:
        body: ArealAdapterBody = call.body
        async with self._updates.leaving_if_refused(body.group_name):
            adapter = self._of_areal(body)
            self._machine.require("receive_weights")
            await self._updates.receive(body.group_name, adapter=adapter, **body.tensors())
        state = self._machine.status.name
        return Reply({"success": True, "message": "Success", "state": state, "num_tensors": len(body.names)})

    def _of_areal(self, body: ArealAdapterBody) -> ReceivedAdapter:
        config = {
            "r": body.lora_rank,
            "lora_alpha": body.lora_alpha,
            "target_modules": body.lora_target_modules,
            "bias": body.lora_bias,
        }
        name = checked_name(body.lora_name, self._machine)
        return ReceivedAdapter(name=name, config=config, replace=True, number=body.lora_int_id)

    async def receive(self, call: Call) -> Reply:
        body: BroadcastAdapterBody = call.body
        async with self._updates.leaving_if_refused(body.group_name):
            name = checked_name(body.lora_name, self._machine)
            adapter = ReceivedAdapter(name=name, config=body.config_dict, replace=bool(body.upsert))
            await self._updates.receive_adapter(adapter, body.group_name, **body.tensors())
        return loaded_adapters(self._machine)

    async def write(self, call: Call) -> Reply:
        body: SerializedAdapterBody = call.body
        name = checked_name(body.lora_name, self._machine)
        adapter = ReceivedAdapter(name=name, config=body.config_dict, replace=bool(body.upsert))
        entries, data = await self._machine.client.run_in_thread(_tensors_of, body)
        await self._updates.write_adapter(adapter, entries, data)
        return loaded_adapters(self._machine)


def _tensors_of(body: SerializedAdapterBody) -> tuple[list[TensorEntry], bytes]:
    """Raises ApiError 400."""
    texts, given = body.serialized_named_tensors, body.serialized_tensors
    if (texts is None) is (given is None):
        text = "serialized_named_tensors or serialized_tensors must be given, and one of them only"
        raise bad_request(text, "serialized_named_tensors", "invalid_value")
    field = "serialized_tensors" if texts is None else "serialized_named_tensors"
    entries, data = entries_of_base64([given or ""] if texts is None else texts, field)
    if body.expected_checksums is not None:
        _check_checksums(body.expected_checksums, entries, data)
    return entries, data


def _check_checksums(expected: Mapping[str, str], entries: list[TensorEntry], data: bytes) -> None:
    found = {entry.name: hashlib.sha256(data[entry.start : entry.end]).hexdigest() for entry in entries}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        text = f"expected_checksums: {wrong[0][:200]} has other bytes, or is there once only"
        raise bad_request(text, "expected_checksums", "checksum_mismatch")
