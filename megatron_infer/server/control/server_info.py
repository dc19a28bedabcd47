"""/server_info and /v1/loads: what an RL loop queries before it starts: model, parallel sizes, load."""

from __future__ import annotations

import time
from typing import Any

from megatron_infer import __version__
from megatron_infer.server.control.control_routes import ControlRoutes, query_text
from megatron_infer.server.control.state_machine import ControlMachine
from megatron_infer.server.endpoint import Call, Reply
from megatron_infer.server.http_errors import bad_request

SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
"""SGLang's sections. Every reply has core; the others are empty here."""


def register(control_routes: ControlRoutes, machine: ControlMachine) -> None:
    async def server_info(call: Call) -> Reply:
        """Fields under vLLM's and SGLang's names."""
        await machine.refresh()
        settings = control_routes.settings
        info = _info(machine, reads_files=settings.weights_root is not None)
        info["vllm_config"]["lora_config"] = None if settings.lora_root is None else _lora_limits(machine)
        return Reply(info)

    async def loads(call: Call) -> Reply:
        for name in query_text(call, "include", "core").split(","):
            if name not in SECTIONS:
                text = f"include is {name[:40]!r}; any of {', '.join(SECTIONS)}, with commas between"
                raise bad_request(text, "include", "invalid_value")
        await machine.client.refresh()
        return Reply(_loads(machine))

    for path in ("/server_info", "/get_server_info"):
        summary = "Model, version, state and parallel sizes"
        control_routes.add("GET", path, server_info, summary, query=("config_format",))
    control_routes.add("GET", "/v1/loads", loads, "Load of each engine", query=("include",))


def _info(machine: ControlMachine, *, reads_files: bool) -> dict[str, Any]:
    client = machine.client
    replicas = client.replicas
    ranks = machine.ranks
    model = client.model_names[0]
    backends = [*(["disk"] if reads_files else []), "http", "broadcast"]
    dtype = next((replica["dtype"] for replica in replicas if replica["dtype"]), None)
    return {
        "server": "megatron-infer",
        "version": __version__,
        "model_path": model,
        "served_model_name": model,
        "state": machine.status.name,
        "weight_version": str(machine.shown_version()),
        "max_model_len": client.max_length,
        "max_total_num_tokens": client.max_length,
        "world_size": sum(ranks),
        "dp_size": len(replicas),
        "ranks_of_replicas": ranks,
        "weight_backends": backends,
        "vllm_config": {
            "model_config": {
                "model": model,
                "max_model_len": client.max_length,
                "dtype": None if dtype is None else f"torch.{dtype}",
            },
            "parallel_config": {"world_size": sum(ranks), "data_parallel_size": len(replicas)},
            "weight_transfer_config": {"backend": backends[0]},
        },
        "replicas": [
            {name: replica[name] for name in ("name", "state", "weight_version", "capacity", "limits")}
            for replica in replicas
        ],
    }


def _lora_limits(machine: ControlMachine) -> dict[str, int] | None:
    """vLLM's names, by which TRL decides whether it sends adapters; None: an engine takes none."""
    limits = [replica["limits"] for replica in machine.client.replicas]
    names = ("max_loras", "max_lora_rank")
    if not limits or not all(name in one for one in limits for name in names):
        return None
    return {name: min(one[name] for one in limits) for name in names}


def _loads(machine: ControlMachine) -> dict[str, Any]:
    loads = []
    for place, replica in enumerate(machine.client.replicas):
        stats = replica["stats"]
        blocks, free = stats.get("num_blocks", 0), stats.get("num_free_blocks", 0)
        loads.append(
            {
                "dp_rank": place,
                "name": replica["name"],
                "num_running_reqs": stats.get("num_running", replica["running"]),
                "num_waiting_reqs": stats.get("num_waiting", 0) + replica["waiting"],
                "num_total_reqs": replica["running"] + replica["waiting"],
                "token_usage": 0.0 if not blocks else (blocks - free) / blocks,
                "num_used_blocks": blocks - free,
                "num_blocks": blocks,
                "max_running_requests": replica["capacity"],
            }
        )
    total = {
        name: sum(one[name] for one in loads) for name in ("num_running_reqs", "num_waiting_reqs", "num_total_reqs")
    }
    return {
        "timestamp": time.time(),
        "version": __version__,
        "dp_rank_count": len(loads),
        "waiting": machine.client.stats.get("waiting", 0),
        "loads": loads,
        "aggregate": total,
    }
