"""An engine as a replica of a coordinator, with the commands that its owner allows."""

from __future__ import annotations

from megatron_infer.config.coordinator_options import ReplicaRole
from megatron_infer.coordinator.adapter_commands import AdapterCommands
from megatron_infer.coordinator.replica import Replica
from megatron_infer.coordinator.served_engine import ServedEngine
from megatron_infer.rl.weight_receiver import WeightReceiver


def engine_replica(
    engine: ServedEngine,
    coordinator: str,
    *,
    name: str,
    key: bytes | None = None,
    control: bool = False,
    weights_root: str | None = None,
    lora_root: str | None = None,
    role: ReplicaRole | str = ReplicaRole.BOTH,
) -> Replica:
    """The replica that serves `engine` at the address `coordinator`. control, weights_root, lora_root: `ServerConfig`.

    Raises ConfigError.
    """
    return Replica(
        engine,
        coordinator,
        name=name,
        key=key,
        control=control,
        commands=WeightReceiver(engine, weights_root=weights_root).commands() if control else None,
        adapter_commands=None if lora_root is None else AdapterCommands(engine, root=lora_root).commands(),
        role=role,
    )
