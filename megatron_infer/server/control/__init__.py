"""Control of the engines over HTTP, for RL loops: vLLM's routes and SGLang's, on one state machine.

vllm_routes, sglang_routes      pause, sleep, weights             vllm_generate, sglang_generate     requests
        |                                                                 |
WeightUpdates --> ControlMachine (state_machine.py)               generation.py
                      |   admits or delays requests while the state changes
                  Fanout: one command to all replicas, undone where some failed
"""

from __future__ import annotations

from megatron_infer.server.control import (
    adapter_routes,
    adapter_tensor_routes,
    profile_routes,
    replica_routes,
    server_info,
    sglang_generate,
    sglang_routes,
    trl_routes,
    vllm_generate,
    vllm_routes,
    weight_group_routes,
)
from megatron_infer.server.control.control_routes import ControlRoutes
from megatron_infer.server.control.state_machine import ControlMachine
from megatron_infer.server.control.trainer_groups import TrainerGroups
from megatron_infer.server.control.weight_updates import WeightUpdates
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.routes import Routes
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.structured_outputs import StructuredOutputFields


def register(routes: Routes, client: EngineClient, settings: ServerConfig) -> None:
    """Every control route; without `ServerConfig.control` the server only knows their paths."""
    machine, control_routes = ControlMachine(client, max_waiting=settings.max_queue), ControlRoutes(routes, settings)
    updates = WeightUpdates(machine)
    groups = TrainerGroups(machine, updates, settings.trainer_host)
    if settings.control:
        client.admission_hooks.append(machine.admit)
    adapter_routes.register(control_routes, machine)
    vllm_routes.register(control_routes, machine, updates, groups)
    weight_group_routes.register(control_routes, machine, updates, groups)
    adapter_tensor_routes.register(control_routes, machine, updates)
    sglang_routes.register(control_routes, machine, updates)
    server_info.register(control_routes, machine)
    profile_routes.register(control_routes, machine)
    replica_routes.register(control_routes, client)
    fields = StructuredOutputFields(client, settings)
    vllm_generate.register(control_routes, machine, fields)
    trl_routes.register(control_routes, machine, fields)
    sglang_generate.register(control_routes, machine, fields)
