"""SGLang's control routes for RL, as slime, miles and AReaL call them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from megatron_infer.engine.lifecycle_commands import GRAPHS, KV_CACHE, TAGS, WEIGHTS
from megatron_infer.server.body_types import Body
from megatron_infer.server.control.control_routes import ControlRoutes, replying
from megatron_infer.server.control.control_states import ControlState
from megatron_infer.server.control.state_machine import ControlMachine, checked_mode, checked_tags
from megatron_infer.server.control.version_labels import checked_version
from megatron_infer.server.control.vllm_routes import memory_of
from megatron_infer.server.control.weight_files import checked_path
from megatron_infer.server.control.weight_updates import WeightUpdates
from megatron_infer.server.endpoint import Call, Reply
from megatron_infer.server.http_errors import ApiError, bad_request
from megatron_infer.server.inactive_fields import FieldTable, no_effect, refused
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.utils.json_file import read_json

TAG_NAMES = {"weights": (WEIGHTS,), "kv_cache": (KV_CACHE,), "cuda_graph": (GRAPHS,)}
PAUSE_MODES = {"abort": "abort", "in_place": "keep", "retract": "retract"}
ACTIONS = {"checksum": "checksum", "snapshot": "snapshot", "compare": "compare", "reset": "reset"}
ACTIONS |= {"reset_tensors": "reset"}

_NO_CACHE = "no cache of torch is kept"
_ONE_MODEL = refused("there is one model", "all", "target")
DISK_FIELDS = FieldTable(
    {
        "flush_cache": no_effect("prefixes computed with other weights never match", True),
        "keep_pause": no_effect("engines that were paused stay paused, others go on", False),
        "torch_empty_cache": no_effect(_NO_CACHE, False),
        "recapture_cuda_graph": no_effect("graphs stay valid as weights are written in place", False),
        "token_step": no_effect("version_spans has the version of every token", 0),
        "manifest": no_effect("the files say what is in them"),
        "is_async": refused("the reply comes when the engines have the weights", False),
        "load_format": refused("the format follows from the files", "auto", "safetensors"),
    }
)
CONTINUE_FIELDS = FieldTable({"torch_empty_cache": no_effect(_NO_CACHE, True, False)})
ABORT_FIELDS = FieldTable(
    {
        "abort_message finished_reason": no_effect("replies name the finish reason"),
        "weight_versions": no_effect("replies have version_spans"),
    }
)
CHECKER_FIELDS = FieldTable(
    {
        "allow_quant_error": refused("weights are compared bit by bit", False),
        "skip_tensor_list": refused("all tensors are compared", []),
        "selector": _ONE_MODEL,
    }
)
UPDATE_FIELDS = FieldTable({"selector": _ONE_MODEL})


class PauseBody(Body):
    mode: str | None = None


class SglangAbortBody(Body):
    rid: str | None = None
    abort_all: bool | None = None


class TagsBody(Body):
    tags: list[str] | None = None


class DiskBody(Body, kw_only=True):
    model_path: str
    weight_version: int | str | None = None
    abort_all_requests: bool | None = None


class PullBody(Body, kw_only=True):
    source_dir: str
    """Where a trainer publishes whole checkpoints as weight_v000001, ..., below --weights-root."""
    local_checkpoint_dir: str
    """What /update_weights_from_disk calls the version afterwards; nothing is copied there."""
    target_version: Annotated[int, Meta(ge=1, le=10**9)]


class CheckerBody(Body):
    action: str | None = None
    """None: checksum."""


class EndUpdateBody(Body):
    weight_version: int | str | None = None


def register(control_routes: ControlRoutes, machine: ControlMachine, updates: WeightUpdates) -> None:
    routes = SglangRoutes(machine, updates, control_routes.settings)
    add = control_routes.add
    for method in ("GET", "POST"):
        add(method, "/flush_cache", routes.flush_cache, "Empty the prefix cache", query=("timeout",))
        add(method, "/get_weight_version", routes.get_version, "The weight version")
        add(method, "/release_memory_occupation", routes.release, "Release memory", body=TagsBody)
        add(method, "/resume_memory_occupation", routes.restore, "Restore memory", body=TagsBody)
        checker: dict[str, Any] = {"body": CheckerBody, "fields": CHECKER_FIELDS}
        add(method, "/weights_checker", routes.check, "Checksums of the weights", **checker)
    resume = replying(routes.reply, "Generation continued successfully.", routes.resume)
    resuming: dict[str, Any] = {"body": Body, "fields": CONTINUE_FIELDS}
    load: dict[str, Any] = {"body": DiskBody, "fields": DISK_FIELDS, "optional_body": False}
    for prefix, weights in (("/", "update_weights_from_disk"), ("/areal_", "update_weights")):
        add("POST", f"{prefix}pause_generation", routes.pause, "Pause", body=PauseBody)
        add("POST", f"{prefix}continue_generation", resume, "Resume after a pause", **resuming)
        add("POST", f"{prefix}{weights}", routes.load, "Update weights from files", **load)
    aborting: dict[str, Any] = {"body": SglangAbortBody, "fields": ABORT_FIELDS}
    add("POST", "/abort_request", routes.abort, "Abort requests, which reply with what they have", **aborting)
    begin = replying(routes.reply, "The weight update has begun.", updates.start)
    beginning: dict[str, Any] = {"body": Body, "fields": UPDATE_FIELDS}
    add("POST", "/begin_weight_update", begin, "Begin a weight update", **beginning)
    pulling: dict[str, Any] = {"body": PullBody, "optional_body": False}
    add("POST", "/pull_weights", routes.pull, "Choose a version that a trainer has published", **pulling)
    add("POST", "/end_weight_update", routes.end, "Finish a weight update", body=EndUpdateBody)
    control_routes.add_not_served(NOT_SERVED)


NOT_SERVED = {
    "/update_weights_from_ipc": "memory of another process is not mapped; /init_weights_update_group brings tensors",
    "/post_process_weights": "derived copies of the weights are made again when an update is finished",
    "/get_weights_by_name": "weights are not sent out; /weights_checker has their checksum",
    "/slow_down": "engines are not slowed down; /pause_generation stops them",
}
"""Routes that are answered with 501 -> why."""


class SglangRoutes:
    """Handlers. Replies are SGLang's, with the state and figures added."""

    def __init__(self, machine: ControlMachine, updates: WeightUpdates, settings: ServerConfig) -> None:
        self._machine, self._updates, self._settings = machine, updates, settings
        self._pulled: dict[str, str] = {}
        """local_checkpoint_dir -> the published version that it stands for; one at a time."""

    def reply(self, message: str, **figures: Any) -> Reply:
        state = self._machine.status.name
        return Reply({"success": True, "status": "ok", "message": message, "state": state, **figures})

    async def pause(self, call: Call) -> Reply:
        mode = checked_mode(call.body.mode or "abort", PAUSE_MODES)
        count = await self._machine.pause(PAUSE_MODES[mode])
        return self.reply("Generation paused successfully.", num_aborted=count)

    async def resume(self) -> None:
        """An update that tensors have begun is finished first: slime and AReaL send no other end of it."""
        await self._updates.end_received()
        await self._machine.resume()

    async def abort(self, call: Call) -> Reply:
        """rid: of the /generate body, an id of a reply, or X-Request-Id."""
        body: SglangAbortBody = call.body
        if not body.abort_all and not body.rid:
            raise bad_request("rid or abort_all: true must be given", "rid", "missing_field")
        count = self._machine.client.abort(None if body.abort_all else [body.rid or ""])
        return self.reply("Requests were aborted.", num_aborted=count)

    async def flush_cache(self, call: Call) -> Reply:
        """timeout is accepted: there is nothing to wait for."""
        return self.reply("Cache flushed.", blocks_freed=await self._machine.reset_prefix_cache())

    # ------------------------------------------------------------------ memory

    async def release(self, call: Call) -> Reply:
        """Running requests are kept, and recomputed once memory is restored."""
        tags = list(TAGS) if call.body.tags is None else checked_tags(call.body.tags, TAG_NAMES)
        if not tags:
            raise bad_request(f"tags is empty; any of {', '.join(TAG_NAMES)}", "tags", "invalid_value")
        reports = await self._machine.sleep(tags, "keep")
        return self.reply("Memory was released.", **memory_of(reports))

    async def restore(self, call: Call) -> Reply:
        tags = None if call.body.tags is None else checked_tags(call.body.tags, TAG_NAMES)
        return self.reply("Memory is back.", **memory_of(await self._machine.wake_up(tags)))

    # ------------------------------------------------------------------ weights

    async def load(self, call: Call) -> Reply:
        body: DiskBody = call.body
        root = self._settings.weights_root
        version = checked_version(body.weight_version)
        self._machine.require("load_update")
        given = self._pulled.get(body.model_path, body.model_path)
        path = await self._machine.client.run_in_thread(checked_path, given, root)
        # flush_cache needs no action: prefixes cached with other weights are never matched.
        version = await self._updates.load(path, version, abort=bool(body.abort_all_requests))
        message = "Succeeded to update model weights."
        num_paused = self._machine.client.num_calls if self._machine.status.state is ControlState.PAUSED else 0
        return self.reply(message, weight_version=str(version), num_paused_requests=num_paused)

    async def pull(self, call: Call) -> Reply:
        """slime has each host copy a version. Engines here read it where it was published."""
        body: PullBody = call.body
        published = f"{body.source_dir}/weight_v{body.target_version:06d}"
        path = await self._machine.client.run_in_thread(_whole_version, published, self._settings.weights_root)
        self._pulled = {body.local_checkpoint_dir: path}
        return self.reply("Success.")

    async def end(self, call: Call) -> Reply:
        version = await self._updates.finish(checked_version(call.body.weight_version))
        return self.reply("The weight update is finished.", weight_version=str(version))

    async def get_version(self, call: Call) -> Reply:
        await self._machine.refresh()
        return Reply({"weight_version": str(self._machine.shown_version())})

    async def check(self, call: Call) -> Reply:
        """compare replies 400 where the weights differ from the snapshot, as SGLang's clients expect."""
        action = ACTIONS[checked_mode(call.body.action or "checksum", ACTIONS, name="action")]
        if action == "reset":
            await self._updates.spoil()
            return self.reply("The weights were overwritten; an update has to follow.")
        found = await self._updates.check(action)
        different = sorted({name for one in found["replicas"].values() for name in one.get("different", ())})
        if different:
            shown = ", ".join(different[:8])
            raise ApiError(400, f"the weights differ from the snapshot: {shown}", code="weights_differ")
        if not found["equal"]:
            raise ApiError(500, f"the replicas have different weights: {found['replicas']}", code="weights_differ")
        return self.reply("Success.", **found)


def _whole_version(path: str, root: str | None) -> str:
    """`checked_path` of a published version. Raises ApiError 400 for one that has only what has changed."""
    found = checked_path(path, root)
    index = Path(found) / "model.safetensors.index.json"
    if index.exists() and "delta_encoding" in (read_json(index).get("metadata") or {}):
        text = "source_dir has deltas, which are not applied here; have the trainer publish whole checkpoints"
        raise bad_request(text, "source_dir", "delta_refused")
    return found
