"""The routes of SGLang's RL dialect, as slime, miles and AReaL call them."""

from __future__ import annotations

from typing import Any, Literal

from megatron_infer.server.calls import Call, Reply
from megatron_infer.server.control.common import Dialect, Query
from megatron_infer.server.control.control_states import GRAPHS, KV_CACHE, TAGS, WEIGHTS, State
from megatron_infer.server.control.state_machine import ControlMachine, checked_mode, checked_tags
from megatron_infer.server.control.vllm import memory_of
from megatron_infer.server.control.weight_files import checked_path
from megatron_infer.server.control.weight_updates import Updates, checked_version
from megatron_infer.server.http_errors import ApiError, bad_request
from megatron_infer.server.schemas import Body
from megatron_infer.server.settings import ServerConfig

TAG_NAMES = {"weights": (WEIGHTS,), "kv_cache": (KV_CACHE,), "cuda_graph": (GRAPHS,)}
PAUSE_MODES = {"abort": "abort", "in_place": "keep", "retract": "retract"}
ACTIONS = {"checksum": "checksum", "snapshot": "snapshot", "compare": "compare", "reset": "reset"}
ACTIONS |= {"reset_tensors": "reset"}


class PauseBody(Body):
    mode: str | None = None


class AbortBody(Body):
    rid: str | None = None
    abort_all: bool | None = None
    abort_message: str | None = None


class TagsBody(Body):
    tags: list[str] | None = None


class DiskBody(Body, kw_only=True):
    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None
    weight_version: int | str | None = None
    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    keep_pause: bool | None = None
    is_async: Literal[False] | None = None
    torch_empty_cache: bool | None = None
    recapture_cuda_graph: bool | None = None
    """Nothing is held that could be emptied, and no graph that an update in place would break."""


class CheckerBody(Body, kw_only=True):
    action: str


def register(dialect: Dialect, machine: ControlMachine, updates: Updates) -> None:
    routes = SglangRoutes(machine, updates, dialect.settings)
    add = dialect.add
    for method in ("GET", "POST"):
        add(method, "/flush_cache", routes.flush_cache, "Forget cached prefixes")
        add(method, "/get_weight_version", routes.get_version, "The weights' version")
    add("POST", "/pause_generation", routes.pause, "Stand still", body=PauseBody)
    add("POST", "/continue_generation", routes.go_on, "Go on after a pause", body=Body)
    add("POST", "/abort_request", routes.abort, "End requests with what they have", body=AbortBody)
    add("POST", "/release_memory_occupation", routes.release, "Give memory back", body=TagsBody)
    add("POST", "/resume_memory_occupation", routes.take_back, "Take memory back", body=TagsBody)
    add("POST", "/update_weights_from_disk", routes.load, "New weights out of files", body=DiskBody,
        optional_body=False)  # fmt: skip
    add("POST", "/weights_checker", routes.check, "Look at the weights", body=CheckerBody, optional_body=False)
    channels = [f"/update_weights_from_{name}" for name in ("tensor", "distributed", "ipc")]
    for path in ("/init_weights_update_group", *channels):
        add("POST", path, routes.not_served, "Not served: says what is", body=None)


class SglangRoutes:
    """Handlers: SGLang's names on the machine's changes. States and figures are added to its replies."""

    def __init__(self, machine: ControlMachine, updates: Updates, settings: ServerConfig) -> None:
        self._machine, self._updates, self._settings = machine, updates, settings

    async def pause(self, call: Call) -> Reply:
        Query(call).end()
        mode = checked_mode(call.body.mode or "abort", PAUSE_MODES)
        count = await self._machine.pause(PAUSE_MODES[mode])
        return self._done("Generation paused successfully.", num_aborted=count)

    async def go_on(self, call: Call) -> Reply:
        Query(call).end()
        await self._machine.resume()
        return self._done("Generation continued successfully.")

    async def abort(self, call: Call) -> Reply:
        """rid: of the /generate body, or another name of a call."""
        Query(call).end()
        body: AbortBody = call.body
        if not body.abort_all and not body.rid:
            raise bad_request("rid or abort_all: true must be given", "rid", "missing_field")
        count = self._machine.service.abort(None if body.abort_all else [body.rid or ""])
        return self._done("Requests were aborted.", num_aborted=count)

    async def flush_cache(self, call: Call) -> Reply:
        query = Query(call)
        query.text("timeout", "")  # nothing is waited for
        query.end()
        return self._done("Cache flushed.", blocks_freed=await self._machine.reset_prefix_cache())

    # ------------------------------------------------------------------ memory

    async def release(self, call: Call) -> Reply:
        """Requests under way are kept, and computed anew once memory is back."""
        Query(call).end()
        tags = list(TAGS) if call.body.tags is None else checked_tags(call.body.tags, TAG_NAMES)
        if not tags:
            raise bad_request(f"tags is empty; any of {', '.join(TAG_NAMES)}", "tags", "invalid_value")
        reports = await self._machine.sleep(tags, "keep")
        return self._done("Memory was released.", **memory_of(reports))

    async def take_back(self, call: Call) -> Reply:
        Query(call).end()
        tags = None if call.body.tags is None else checked_tags(call.body.tags, TAG_NAMES)
        return self._done("Memory is back.", **memory_of(await self._machine.wake_up(tags)))

    # ------------------------------------------------------------------ weights

    async def load(self, call: Call) -> Reply:
        Query(call).end()
        body: DiskBody = call.body
        root = self._settings.weights_root
        version = checked_version(body.weight_version)
        self._machine.require("load_update")
        path = await self._machine.service.off_loop(checked_path, body.model_path, root)
        # Cached prefixes of other weights are never matched, whatever flush_cache says.
        version = await self._updates.load(path, version, abort=bool(body.abort_all_requests))
        message = "Succeeded to update model weights."
        held = self._machine.service.num_calls if self._machine.standing.state is State.PAUSED else 0
        return self._done(message, weight_version=str(version), num_paused_requests=held)

    async def get_version(self, call: Call) -> Reply:
        Query(call).end()
        await self._machine.look()
        return Reply({"weight_version": str(self._machine.version)})

    async def check(self, call: Call) -> Reply:
        """compare answers 400 where the weights are not those of the snapshot, as its clients expect."""
        Query(call).end()
        action = ACTIONS[checked_mode(call.body.action, ACTIONS)]
        if action == "reset":
            await self._updates.spoil()
            return self._done("The weights were overwritten; an update has to follow.")
        found = await self._updates.check(action)
        different = sorted({name for one in found["replicas"].values() for name in one.get("different", ())})
        if different:
            shown = ", ".join(different[:8])
            raise ApiError(400, f"the weights differ from the snapshot: {shown}", code="weights_differ")
        if not found["equal"]:
            raise ApiError(500, f"the replicas have different weights: {found['replicas']}", code="weights_differ")
        return self._done("Success.", **found)

    async def not_served(self, call: Call) -> Reply:
        text = (
            f"{call.request.url.path} is not served: there is no channel of tensors to other processes; take "
            "/update_weights_from_disk, or send safetensors bytes to /update_weights"
        )
        raise bad_request(text, None, "unsupported_backend")

    def _done(self, message: str, **figures: Any) -> Reply:
        state = self._machine.standing.name
        return Reply({"success": True, "status": "ok", "message": message, "state": state, **figures})
