"""The routes of vLLM's RL dialect, as TRL's asynchronous trainers, SkyRL and verifiers call them."""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_infer.server import limits
from megatron_infer.server.calls import Call, Reply
from megatron_infer.server.control.common import Dialect, Query
from megatron_infer.server.control.control_states import GRAPHS, KV_CACHE, TAGS, WEIGHTS, State
from megatron_infer.server.control.state_machine import ControlMachine, checked_mode, checked_tags
from megatron_infer.server.control.weight_files import checked_path, entries_of
from megatron_infer.server.control.weight_updates import RUNNING, Updates, checked_version
from megatron_infer.server.http_errors import bad_request, of_validation
from megatron_infer.server.schemas import Body
from megatron_infer.server.settings import ServerConfig

TAG_NAMES = {"weights": (WEIGHTS,), "kv_cache": (GRAPHS, KV_CACHE)}
PAUSE_MODES = ("abort", "wait", "keep")
OCTETS = b"application/octet-stream"


class AbortBody(Body):
    request_ids: list[str] | None = None


class InitBody(Body):
    init_info: dict[str, Any] | None = None


class UpdateBody(Body):
    update_info: dict[str, Any] | None = None


class VersionBody(Body):
    weight_version: int | str | None = None
    running: str | None = None
    """What becomes of requests under way: "keep" their keys and values, or "recompute" them."""


def register(dialect: Dialect, machine: ControlMachine, updates: Updates) -> None:
    routes = VllmRoutes(machine, updates, dialect.settings)
    add = dialect.add
    add("POST", "/pause", routes.pause, "Stand still: abort, wait for or keep what is under way")
    add("POST", "/resume", routes.resume, "Go on after a pause")
    add("GET", "/is_paused", routes.is_paused, "Whether the engines are paused")
    add("POST", "/abort_requests", routes.abort_requests, "End requests with what they have", body=AbortBody)
    add("POST", "/inference/v1/abort_requests", routes.abort_requests, "The same", body=AbortBody)
    add("POST", "/sleep", routes.sleep, "Give memory back")
    add("POST", "/wake_up", routes.wake_up, "Take memory back")
    add("GET", "/is_sleeping", routes.is_sleeping, "Whether memory is away")
    add("POST", "/reset_prefix_cache", routes.reset_prefix_cache, "Forget cached prefixes")
    add("GET", "/get_world_size", routes.world_size, "Ranks of all engines together")
    add("POST", "/init_weight_transfer_engine", routes.init_transfer, "Say how weights will come", body=InitBody)
    add("POST", "/start_weight_update", routes.start_update, "Begin a weight update")
    add("POST", "/update_weights", routes.update_weights, "Weights: a path, or safetensors bytes", body=None,
        body_limit="max_weight_bytes")  # fmt: skip
    add("POST", "/finish_weight_update", routes.finish_update, "All weights have come", body=VersionBody)
    add("POST", "/cancel_weight_update", routes.cancel_update, "Take a weight update back")
    add("POST", "/update_weight_version", routes.set_version, "Name the weights' version", body=VersionBody)
    add("GET", "/weight_info", routes.weight_info, "Version and state of the weights")


class VllmRoutes:
    """Handlers: vLLM's names on the machine's changes. States and figures are added to its replies."""

    def __init__(self, machine: ControlMachine, updates: Updates, settings: ServerConfig) -> None:
        self._machine, self._updates, self._settings = machine, updates, settings

    # ------------------------------------------------------------------ pause

    async def pause(self, call: Call) -> Reply:
        query = Query(call)
        mode = checked_mode(query.text("mode", "abort"), PAUSE_MODES)
        clear = query.switch("clear_cache", False)
        query.end()
        if clear and mode == "keep":
            text = "clear_cache has no meaning with mode=keep; call /reset_prefix_cache?reset_running_requests=true"
            raise bad_request(text, "clear_cache", "invalid_value")
        count = await self._machine.pause(mode)
        if clear:
            await self._machine.reset_prefix_cache()
        return self._state("paused", num_aborted=count)

    async def resume(self, call: Call) -> Reply:
        Query(call).end()
        await self._machine.resume()
        return self._state("resumed")

    async def is_paused(self, call: Call) -> Reply:
        Query(call).end()
        await self._machine.look()
        standing = self._machine.standing
        return Reply({"is_paused": standing.state is not State.SERVING, "state": standing.name})

    async def abort_requests(self, call: Call) -> Reply:
        """Those that go by the ids: of replies (cmpl-...), X-Request-Id or request_id; none given: all."""
        Query(call).end()
        names = call.body.request_ids
        return self._state("ok", num_aborted=self._machine.service.abort(names))

    # ------------------------------------------------------------------ sleep

    async def sleep(self, call: Call) -> Reply:
        query = Query(call)
        level = query.number("level", 1, (0, 1, 2))
        mode = checked_mode(query.text("mode", "abort"), PAUSE_MODES)
        given = _split(query.all("tags"))
        query.end()
        if level == 0 and given:
            raise bad_request("tags are given back at level 1 and 2; level 0 stops the scheduling alone", "tags")
        tags = [] if level == 0 else list(TAGS)
        reports = await self._machine.sleep(checked_tags(given, TAG_NAMES) if given else tags, mode)
        return self._state("sleeping", **memory_of(reports))

    async def wake_up(self, call: Call) -> Reply:
        query = Query(call)
        given = _split(query.all("tags"))
        query.end()
        tags = checked_tags(given, TAG_NAMES) if given else None
        if tags is not None:  # graphs come and go with the cache here, if they are away
            tags = [tag for tag in tags if tag is not GRAPHS or GRAPHS in self._machine.standing.tags]
        return self._state("awake", **memory_of(await self._machine.wake_up(tags)))

    async def is_sleeping(self, call: Call) -> Reply:
        Query(call).end()
        await self._machine.look()
        standing = self._machine.standing
        return Reply({"is_sleeping": standing.state is State.ASLEEP, "state": standing.name, "tags": standing.tags})

    async def reset_prefix_cache(self, call: Call) -> Reply:
        query = Query(call)
        running = query.switch("reset_running_requests", False)
        query.switch("reset_external", False)  # there is no cache outside the engines
        query.end()
        return self._state("ok", blocks_freed=await self._machine.reset_prefix_cache(running=running))

    # ------------------------------------------------------------------ weights

    async def init_transfer(self, call: Call) -> Reply:
        """Weights come by files or as bodies: what needs a channel between processes is refused."""
        Query(call).end()
        info = dict(call.body.init_info or {})
        backend = info.pop("backend", "disk")
        if backend not in ("disk", "http") or info:
            named = (
                f"backend {str(backend)[:40]!r}" if backend not in ("disk", "http") else ", ".join(sorted(info))[:200]
            )
            text = (
                f"init_info: {named} is not served; there are disk (update_info: path, below --weights-root) and http "
                "(safetensors bytes to /update_weights), which need nothing else"
            )
            raise bad_request(text, "init_info", "unsupported_backend")
        return Reply({"message": "Weight transfer initialized", "backend": backend})

    async def start_update(self, call: Call) -> Reply:
        Query(call).end()
        await self._updates.start()
        return self._state("ok")

    async def update_weights(self, call: Call) -> Reply:
        Query(call).end()
        kind = call.request.headers.get("content-type", "").split(";")[0].strip().lower().encode()
        if kind == OCTETS:
            self._machine.require("write_weights")
            entries = await self._machine.service.off_loop(entries_of, call.body)
            await self._updates.write(entries, call.body)
            return self._state("ok", message="Weights updated", num_tensors=len(entries), num_bytes=len(call.body))
        limits.check_content_type(kind)
        try:
            body = msgspec.json.decode(call.body, type=UpdateBody)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise of_validation(error, UpdateBody, {}) from None
        info = dict(body.update_info or {})
        path = info.pop("path", None)
        if not isinstance(path, str) or info:
            text = "update_info has a path and nothing else; tensors themselves come as application/octet-stream"
            raise bad_request(text, "update_info", "invalid_value")
        self._machine.require("write_weights")
        root = self._settings.weights_root
        await self._updates.read(await self._machine.service.off_loop(checked_path, path, root))
        return self._state("ok", message="Weights updated")

    async def finish_update(self, call: Call) -> Reply:
        Query(call).end()
        running = call.body.running or "keep"
        checked_mode(running, RUNNING)
        version = await self._updates.finish(checked_version(call.body.weight_version), running)
        return self._state("ok", weight_version=version)

    async def cancel_update(self, call: Call) -> Reply:
        Query(call).end()
        await self._updates.cancel()
        return self._state("ok")

    async def set_version(self, call: Call) -> Reply:
        query = Query(call)
        given = query.text("new_version", "") or call.body.weight_version
        query.end()
        version = checked_version(given)
        if version is None:
            raise bad_request("weight_version must be given", "weight_version", "missing_field")
        await self._updates.set_version(version)
        return self._state("ok", weight_version=version)

    async def weight_info(self, call: Call) -> Reply:
        Query(call).end()
        await self._machine.look()
        replicas = {replica["name"]: replica["weight_version"] for replica in self._machine.service.replicas}
        return self._state("ok", weight_version=self._machine.version, replicas=replicas)

    async def world_size(self, call: Call) -> Reply:
        query = Query(call)
        query.switch("include_dp", True)
        query.end()
        await self._machine.service.look()
        ranks = [replica["limits"].get("num_ranks", 1) for replica in self._machine.service.replicas]
        return Reply({"world_size": sum(ranks)})

    def _state(self, status: str, **figures: Any) -> Reply:
        return Reply({"status": status, "state": self._machine.standing.name, **figures})


def _split(values: list[str]) -> list[str]:
    """tags=a&tags=b and tags=a,b."""
    return [tag for value in values for tag in value.split(",") if tag]


def memory_of(reports: dict[str, Any]) -> dict[str, Any]:
    """Bytes that each tag gave back (negative: took) over all replicas, and each replica's report."""
    freed: dict[str, int] = {}
    for report in reports.values():
        for tag, one in report.get("tags", {}).items():
            freed[tag] = freed.get(tag, 0) + one["bytes_freed"]
    return {"bytes_freed": freed, "replicas": reports}
