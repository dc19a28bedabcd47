"""Steering the engines over HTTP: one state machine (machine.py), the routes that two families of RL loops know."""

from __future__ import annotations

from megatron_infer.server.control import info, sglang, sglang_generate, vllm, vllm_generate
from megatron_infer.server.control.common import Dialect
from megatron_infer.server.control.state_machine import ControlMachine
from megatron_infer.server.control.weight_updates import Updates
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.routes import App
from megatron_infer.server.settings import ServerConfig
from megatron_infer.server.structured_fields import Fields


def register(app: App, service: EngineClient, settings: ServerConfig) -> None:
    """Every route; without `control` the application only learns which paths there would be."""
    machine, dialect = ControlMachine(service, max_waiting=settings.max_queue), Dialect(app, settings)
    updates = Updates(machine)
    if settings.control:
        service.gates.append(machine.admit)
    vllm.register(dialect, machine, updates)
    sglang.register(dialect, machine, updates)
    info.register(dialect, machine)
    fields = Fields(service, settings)
    vllm_generate.register(dialect, machine, service, fields)
    sglang_generate.register(dialect, machine, service, fields)
