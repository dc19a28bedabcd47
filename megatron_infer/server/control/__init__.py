"""Steering the engines over HTTP: one state machine (machine.py), the routes that two families of RL loops know."""

from __future__ import annotations

from megatron_infer.server.control import info, sglang, sglang_generate, vllm, vllm_generate
from megatron_infer.server.control.asking import Dialect
from megatron_infer.server.control.machine import Machine
from megatron_infer.server.control.updates import Updates
from megatron_infer.server.registry import App
from megatron_infer.server.service import Service
from megatron_infer.server.settings import ServerConfig
from megatron_infer.server.structured import Fields


def register(app: App, service: Service, settings: ServerConfig) -> None:
    """Every route; without `control` the application only learns which paths there would be."""
    machine, dialect = Machine(service, max_waiting=settings.max_queue), Dialect(app, settings)
    updates = Updates(machine)
    if settings.control:
        service.gates.append(machine.admit)
    vllm.register(dialect, machine, updates)
    sglang.register(dialect, machine, updates)
    info.register(dialect, machine)
    fields = Fields(service, settings)
    vllm_generate.register(dialect, machine, service, fields)
    sglang_generate.register(dialect, machine, service, fields)
