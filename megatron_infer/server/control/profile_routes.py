"""/start_profile and /stop_profile, by the names of vLLM and SGLang."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from megatron_infer.server.body_types import Body
from megatron_infer.server.control.control_routes import ControlRoutes
from megatron_infer.server.control.state_machine import ControlMachine
from megatron_infer.server.endpoint import Call, Reply
from megatron_infer.server.inactive_fields import FieldTable, no_effect, refused

MAX_STEPS = 1000
FIELDS = FieldTable(
    {
        "output_dir": refused("the folder is that of the engine's MEGATRON_INFER_PROFILE_DIR"),
        "start_step": refused("the trace begins with the next step", 0),
        "activities": no_effect("what the engine's device does is traced"),
        "profile_by_stage": refused("steps are traced as they run, prompts and decode together", False),
        "with_stack": no_effect("stacks are not traced", False),
        "record_shapes": no_effect("shapes are not traced", False),
    }
)


class ProfileBody(Body):
    num_steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] | None = None
    """Steps to trace; None: until /stop_profile, 1000 at most."""


def register(control_routes: ControlRoutes, machine: ControlMachine) -> None:
    async def start(call: Call) -> Reply:
        steps = call.body.num_steps or MAX_STEPS
        found = await machine.fanout.run("profile", "start_profile", machine.status.name, steps=steps)
        return Reply({"status": "profiling", "num_steps": steps, "replicas": found})

    async def stop(call: Call) -> Reply:
        await machine.fanout.run("profile", "stop_profile", machine.status.name, steps=0)
        return Reply({"status": "stopped"})

    summary = "Trace the next steps of each engine"
    control_routes.add("POST", "/start_profile", start, summary, body=ProfileBody, fields=FIELDS)
    control_routes.add("POST", "/stop_profile", stop, "End the traces and write them")
