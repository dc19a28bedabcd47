"""vLLM's control routes for RL, as TRL's asynchronous trainers, SkyRL and verifiers call them."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from megatron_infer.engine.lifecycle_commands import GRAPHS, KV_CACHE, RUNNING_CHOICES, TAGS, WEIGHTS
from megatron_infer.server import request_body
from megatron_infer.server.body_types import Body
from megatron_infer.server.control.control_routes import (
    ControlRoutes,
    query_switch,
    query_text,
    query_values,
    replying,
)
from megatron_infer.server.control.control_states import ControlState
from megatron_infer.server.control.state_machine import ControlMachine, checked_mode, checked_tags
from megatron_infer.server.control.trainer_groups import GroupFields, TrainerGroups
from megatron_infer.server.control.version_labels import checked_version
from megatron_infer.server.control.weight_files import checked_path, entries_of
from megatron_infer.server.control.weight_updates import WeightUpdates
from megatron_infer.server.endpoint import Call, Reply
from megatron_infer.server.http_errors import bad_request, of_validation
from megatron_infer.server.inactive_fields import ignore
from megatron_infer.server.server_config import ServerConfig

TAG_NAMES = {"weights": (WEIGHTS,), "kv_cache": (GRAPHS, KV_CACHE)}
PAUSE_MODES = ("abort", "wait", "keep")
T = TypeVar("T", bound=Body)
OCTETS = b"application/octet-stream"
GROUP = "the group of vLLM's routes"
PACKED_BYTES = 1 << 30
"""vLLM's size of a buffer of joined tensors."""
BROADCAST = ("nccl", "skyrl_nccl", "gloo", None)
"""Backends of an init_info that names where a trainer is: clients name the protocol so, whatever carries it."""


class VllmAbortBody(Body):
    request_ids: list[str] | None = None


class ResetBody(Body):
    """What vLLM takes in the query and SkyRL sends in the body."""

    reset_running_requests: bool | None = None
    reset_external: bool | None = None


class InitBody(Body):
    init_info: dict[str, Any] | None = None


BufferBytes = Annotated[int, Meta(ge=1, le=1 << 40)]


class GroupInfo(GroupFields, kw_only=True):
    """The init_info of a group with a trainer."""

    packed: bool | None = None
    """Tensors come joined to buffers."""
    packed_buffer_size_bytes: BufferBytes | None = None
    packed_num_buffers: int | None = None
    """It has no effect: how many of its buffers are under way is the trainer's."""


class TensorsInfo(Body, kw_only=True):
    """The update_info of tensors that the trainer broadcasts. The last fields: as vLLM before 0.28 has them here."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool | None = None
    packed_buffer_size_bytes: BufferBytes | None = None
    packed_num_buffers: int | None = None


class UpdateBody(Body):
    update_info: dict[str, Any] | None = None


class FinishBody(Body):
    weight_version: int | str | None = None
    running: str | None = None
    """For running requests: "keep" their keys and values, or "recompute" them."""


class VersionBody(Body):
    new_version: int | str | None = None
    """The name of vLLM and SGLang; weight_version is the same."""
    weight_version: int | str | None = None
    abort_all_requests: bool | None = None
    """True: running requests end with the tokens they have."""


class VllmCheckerBody(Body, kw_only=True):
    action: str
    baseline: dict[str, str] | None = None
    """Checksums of an earlier reply, to compare with."""


def register(
    control_routes: ControlRoutes, machine: ControlMachine, updates: WeightUpdates, groups: TrainerGroups
) -> None:
    routes = VllmRoutes(machine, updates, groups, control_routes.settings)
    add = control_routes.add
    done = partial(replying, routes.reply)
    pausing = {"query": ("mode", "clear_cache")}
    add("POST", "/pause", routes.pause, "Pause: abort, wait for or keep running requests", **pausing)
    add("POST", "/resume", done("resumed", machine.resume), "Resume after a pause")
    add("GET", "/is_paused", routes.is_paused, "Whether the engines are paused")
    for path, summary in (
        ("/abort_requests", "Abort requests, which reply with what they have"),
        ("/inference/v1/abort_requests", "The same"),
    ):
        add("POST", path, routes.abort_requests, summary, body=VllmAbortBody)
    add("POST", "/sleep", routes.sleep, "Release memory", query=("level", "mode", "tags"))
    add("POST", "/wake_up", routes.wake_up, "Restore memory", query=("tags",))
    add("GET", "/is_sleeping", routes.is_sleeping, "Whether memory is released")
    resetting: dict[str, Any] = {"body": ResetBody, "query": ("reset_running_requests", "reset_external")}
    add("POST", "/reset_prefix_cache", routes.reset_prefix_cache, "Empty the prefix cache", **resetting)
    # SkyRL's router keeps sessions; an engine finds a prefix by its tokens.
    add("POST", "/finish_session", done("ok"), "Nothing is kept of a session", query=("session_id",))
    for path in ("/get_world_size", "/get_world_size/"):  # TRL's own server has the second
        add("GET", path, routes.world_size, "Ranks of all engines together", query=("include_dp",))
    add("POST", "/init_weight_transfer_engine", routes.init_transfer, "Choose the weight transfer", body=InitBody)
    add("POST", "/start_weight_update", done("ok", updates.start), "Begin a weight update")
    octets: dict[str, Any] = {"body": None, "body_limit": "max_weight_bytes"}
    add("POST", "/update_weights", routes.update_weights, "Weights: a path, or safetensors bytes", **octets)
    add("POST", "/finish_weight_update", routes.finish_update, "Finish a weight update", body=FinishBody)
    add("POST", "/cancel_weight_update", done("ok", updates.cancel), "Undo a weight update")
    versions: dict[str, Any] = {"body": VersionBody, "query": ("new_version",)}
    add("POST", "/update_weight_version", routes.set_version, "Set the weight version", **versions)
    add("GET", "/weight_info", routes.weight_info, "Version and state of the weights")
    add("POST", "/weight_checker", routes.check, "Checksums of the weights", body=VllmCheckerBody, optional_body=False)
    add("POST", "/shutdown_weight_transfer_engine", routes.shut_transfer, "Leave the trainer's group")
    add("POST", "/release_kv_cache_memory", routes.release_cache, "Release the memory of the cache")
    for path in ("/reset_mm_cache", "/reset_encoder_cache"):
        add("POST", path, done("ok"), "There is no such cache")
    control_routes.add_not_served(NOT_SERVED)


NOT_SERVED = {
    "/fetch_weights": "deltas of checkpoints are not applied here; send update_info {path} of a whole one",
    "/v1/chat/completions/render": "send the messages to /tokenize, which has the token ids of their prompt",
    "/start_draft_weight_update": "there is no draft model with weights of its own",
    **dict.fromkeys(
        ("/init_communicator/", "/close_communicator/", "/update_named_param/", "/batch_update_named_params/"),
        "weights do not come by NCCL; send them to /update_weights (ServerWeights of megatron_infer.rl.frameworks.trl)",
    ),
}
"""Routes of vLLM and TRL that are answered with 501 -> why."""


class VllmRoutes:
    """Handlers. Replies are vLLM's, with the state and figures added."""

    def __init__(
        self, machine: ControlMachine, updates: WeightUpdates, groups: TrainerGroups, settings: ServerConfig
    ) -> None:
        self._machine = machine
        self._updates = updates
        self._groups = groups
        self._settings = settings
        self._buffer_bytes: int | None = None

    def reply(self, status: str, **figures: Any) -> Reply:
        return Reply({"status": status, "state": self._machine.status.name, **figures})

    # ------------------------------------------------------------------ pause

    async def pause(self, call: Call) -> Reply:
        mode = checked_mode(query_text(call, "mode", "abort"), PAUSE_MODES)
        clear = query_switch(call, "clear_cache")
        if clear and mode == "keep":
            text = "requests that are kept need their keys and values; see /reset_prefix_cache?reset_running_requests="
            ignore(call.ignored, "clear_cache", text, strict=self._settings.strict_fields)
        count = await self._machine.pause(mode)
        if clear and mode != "keep":
            await self._machine.reset_prefix_cache()
        return self.reply("paused", num_aborted=count)

    async def is_paused(self, call: Call) -> Reply:
        await self._machine.refresh()
        status = self._machine.status
        return Reply({"is_paused": status.state is not ControlState.SERVING, "state": status.name})

    async def abort_requests(self, call: Call) -> Reply:
        """request_ids: ids of replies (cmpl-...), X-Request-Id or request_id; none: all requests."""
        count = self._machine.client.abort(call.body.request_ids or None)
        return self.reply("aborted", aborted=count, num_aborted=count)

    # ------------------------------------------------------------------ sleep

    async def sleep(self, call: Call) -> Reply:
        level = checked_mode(query_text(call, "level", "1"), ("0", "1", "2"), name="level")
        mode = checked_mode(query_text(call, "mode", "abort"), PAUSE_MODES)
        given = _tags_of(call)
        if level == "0" and given:
            raise bad_request("tags are given back at level 1 and 2; level 0 stops the scheduling alone", "tags")
        tags = [] if level == "0" else list(TAGS)
        reports = await self._machine.sleep(checked_tags(given, TAG_NAMES) if given else tags, mode)
        return self.reply("sleeping", **memory_of(reports))

    async def wake_up(self, call: Call) -> Reply:
        given = _tags_of(call)
        tags = checked_tags(given, TAG_NAMES) if given else None
        if tags is not None:  # graphs are released and restored with the cache
            tags = [tag for tag in tags if tag is not GRAPHS or GRAPHS in self._machine.status.tags]
        return self.reply("awake", **memory_of(await self._machine.wake_up(tags)))

    async def is_sleeping(self, call: Call) -> Reply:
        await self._machine.refresh()
        status = self._machine.status
        return Reply({"is_sleeping": status.state is ControlState.ASLEEP, "state": status.name, "tags": status.tags})

    async def reset_prefix_cache(self, call: Call) -> Reply:
        """There is no cache outside the engines that reset_external could empty."""
        running = query_switch(call, "reset_running_requests") or bool(call.body.reset_running_requests)
        query_switch(call, "reset_external")
        return self.reply("ok", blocks_freed=await self._machine.reset_prefix_cache(running=running))

    async def release_cache(self, call: Call) -> Reply:
        """/sleep?tags=kv_cache&mode=keep: requests are kept, and recomputed after /wake_up."""
        reports = await self._machine.sleep(checked_tags(["kv_cache"], TAG_NAMES), "keep")
        return self.reply("kv_cache_released", **memory_of(reports))

    # ------------------------------------------------------------------ weights

    async def init_transfer(self, call: Call) -> Reply:
        """Weights come from files, request bodies, or a trainer's broadcasts, for which the engines join its group."""
        info = dict(call.body.init_info or {})
        backend = info.pop("backend", None if "master_address" in info else "disk")
        if "master_address" in info and backend in BROADCAST:
            given = _converted(info, GroupInfo)
            given.backend = backend if backend == "gloo" else None
            await self._groups.join(call, GROUP, given, kind="stateless")
            self._buffer_bytes = _buffer_bytes(given)
        elif backend not in ("disk", "http") or info:
            named = ", ".join(sorted(info))[:200] if backend in ("disk", "http") else f"backend {str(backend)[:40]!r}"
            text = (
                f"init_info: {named} is not served; there are disk (update_info: path, below --weights-root), http "
                "(safetensors bytes to /update_weights) and a group with the trainer (master_address, master_port, "
                "rank_offset, world_size)"
            )
            raise bad_request(text, "init_info", "unsupported_backend")
        return Reply({"message": "Weight transfer initialized", "backend": backend or "broadcast"})

    async def shut_transfer(self, call: Call) -> Reply:
        """Files and request bodies need no channel that could be shut down."""
        await self._updates.leave(GROUP)
        return Reply({"message": "Weight transfer shut down"})

    async def update_weights(self, call: Call) -> Reply:
        kind = call.request.headers.get("content-type", "").split(";")[0].strip().lower().encode()
        if kind == OCTETS:
            self._machine.require("write_weights")
            entries = await self._machine.client.run_in_thread(entries_of, call.body)
            await self._updates.write(entries, call.body)
            return self.reply("ok", message="Weights updated", num_tensors=len(entries), num_bytes=len(call.body))
        request_body.check_content_type(dict(call.request.scope["headers"]))
        try:
            body = msgspec.json.decode(call.body, type=UpdateBody)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise of_validation(error, UpdateBody) from None
        info = dict(body.update_info or {})
        if "names" in info:
            return await self._receive(info)
        self._machine.require("write_weights")
        path = info.pop("path", None)
        if not isinstance(path, str) or info:
            text = "update_info has a path, or the names, dtype_names and shapes of tensors that the trainer broadcasts"
            raise bad_request(f"{text}; else they come as application/octet-stream", "update_info", "invalid_value")
        root = self._settings.weights_root
        await self._updates.read(await self._machine.client.run_in_thread(checked_path, path, root))
        return self.reply("ok", message="Weights updated")

    async def _receive(self, info: dict[str, Any]) -> Reply:
        """Tensors that the trainer broadcasts."""
        async with self._updates.leaving_if_refused(GROUP):
            self._machine.require("write_weights")
            given = _converted(info, TensorsInfo)
            size = self._buffer_bytes if given.packed is None else _buffer_bytes(given)
            types, shapes = given.dtype_names, given.shapes
            await self._updates.receive(GROUP, names=given.names, dtypes=types, shapes=shapes, buffer_bytes=size)
        return self.reply("ok", message="Weights updated", num_tensors=len(given.names))

    async def finish_update(self, call: Call) -> Reply:
        running = checked_mode(call.body.running or "keep", RUNNING_CHOICES)
        version = await self._updates.finish(checked_version(call.body.weight_version), running)
        return self.reply("ok", weight_version=version)

    async def set_version(self, call: Call) -> Reply:
        body: VersionBody = call.body
        names = (query_text(call, "new_version", "") or None, body.new_version, body.weight_version)
        given = [name for name in names if name is not None]
        version = checked_version(given[0]) if given else None
        if version is None:
            raise bad_request("new_version must be given", "new_version", "missing_field")
        await self._updates.set_version(version, abort=bool(body.abort_all_requests))
        return self.reply("ok", success=True, new_version=version, weight_version=version)

    async def weight_info(self, call: Call) -> Reply:
        machine = self._machine
        await machine.refresh()
        replicas = {replica["name"]: replica["weight_version"] for replica in machine.client.replicas}
        return self.reply("ok", weight_version=machine.shown_version(), order=machine.version, replicas=replicas)

    async def check(self, call: Call) -> Reply:
        """checksum, compare with the `baseline` of an earlier reply, or reset (overwrite all weights)."""
        body: VllmCheckerBody = call.body
        checked_mode(body.action, ("checksum", "compare", "reset"), name="action")
        if body.action == "reset":
            await self._updates.spoil()
            return self.reply("reset")
        if body.action == "compare" and body.baseline is None:
            raise bad_request("baseline: compare needs the checksums of an earlier reply", "baseline", "missing_field")
        found = await self._updates.check("checksum")
        sums = {name: value["checksum"] for name, value in found["replicas"].items()}
        if found["equal"]:
            sums = {"weights": found["checksum"]}
        if body.action == "checksum":
            return self.reply("ok", checksums=sums)
        baseline = body.baseline or {}
        wrong = sorted(name for name in sums.keys() | baseline.keys() if sums.get(name) != baseline.get(name))
        return self.reply("ok", match=not wrong, mismatches=wrong)

    async def world_size(self, call: Call) -> Reply:
        query_switch(call, "include_dp")
        await self._machine.client.refresh()
        return Reply({"world_size": sum(self._machine.ranks)})


def _buffer_bytes(info: GroupInfo | TensorsInfo) -> int | None:
    return (info.packed_buffer_size_bytes or PACKED_BYTES) if info.packed else None


def _converted(info: dict[str, Any], kind: type[T]) -> T:
    """Raises ApiError 400."""
    try:
        return msgspec.convert(info, kind)
    except msgspec.ValidationError as error:
        raise of_validation(error, kind) from None


def _tags_of(call: Call) -> list[str]:
    """Accepts tags=a&tags=b and tags=a,b."""
    return [tag for value in query_values(call, "tags") for tag in value.split(",") if tag]


def memory_of(reports: dict[str, Any]) -> dict[str, Any]:
    """Bytes that each tag freed over all replicas (negative: allocated), and each replica's report."""
    freed: dict[str, int] = {}
    for report in reports.values():
        for tag, one in report.get("tags", {}).items():
            freed[tag] = freed.get(tag, 0) + one["bytes_freed"]
    return {"bytes_freed": freed, "replicas": reports}
