"""Emptying one engine: the others take its requests, with what is computed of them."""

from __future__ import annotations

from megatron_infer.coordinator.protocol import ControlFailed
from megatron_infer.server.control.control_routes import ControlRoutes, query_switch
from megatron_infer.server.endpoint import Call, Reply
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.http_errors import ApiError


def register(control_routes: ControlRoutes, client: EngineClient) -> None:
    async def change(call: Call, *, end: bool) -> Reply:
        name, move = call.request.path_params["name"], not end and query_switch(call, "move")
        try:
            answers = await client.coordinator.drain(name, move=move, end=end)
        except ControlFailed as error:
            if any(answer.kind == "AccessRefused" for answer in error.results.values()):
                raise ApiError(403, str(error), code="refused_by_engine") from None
            raise ApiError(404, str(error), code="no_such_replica") from None
        running = sum(answer.value["running"] for answer in answers.values())
        return Reply({"replica": name, "draining": not end, "running": running})

    async def drain(call: Call) -> Reply:
        return await change(call, end=False)

    async def undrain(call: Call) -> Reply:
        return await change(call, end=True)

    path, query = "/v1/replicas/{name}", ("move",)
    control_routes.add(
        "POST", f"{path}/drain", drain, "An engine takes no more requests; move: nor keeps any", query=query
    )
    control_routes.add("POST", f"{path}/undrain", undrain, "It takes requests again")
