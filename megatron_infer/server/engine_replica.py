"""An engine as a replica of a coordinator, with the commands that its owner allows."""

from __future__ import annotations

import importlib

from megatron_infer.config.coordinator_options import ReplicaRole
from megatron_infer.coordinator.adapter_commands import AdapterCommands
from megatron_infer.coordinator.replica import Replica
from megatron_infer.coordinator.served_engine import ServedEngine
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.llm import LLM
from megatron_infer.rl.weight_receiver import WeightReceiver
from megatron_infer.server.audio.speech_model import check_vocabulary
from megatron_infer.server.process_options import EngineOptions


def load_engine(what: EngineOptions) -> DynamicInferenceEngine:
    """The engine of one replica. Raises ModelError, ConfigError."""
    if what.loader is None:
        engine = LLM(
            what.model,
            config=what.config,
            dtype=what.dtype,
            device=what.device,
            threads=what.threads_each,
            use_legacy_module=what.use_legacy_module,
        ).engine
    else:
        module, _, function = what.loader.partition(":")
        engine = getattr(importlib.import_module(module), function)(**what.loader_options)
    check_vocabulary(what.model, engine.shape.vocab_size)
    return engine


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
    takes_adapters = control or lora_root is not None
    return Replica(
        engine,
        coordinator,
        name=name,
        key=key,
        control=control,
        commands=WeightReceiver(engine, weights_root=weights_root).commands() if control else None,
        adapter_commands=AdapterCommands(engine, root=lora_root).commands() if takes_adapters else None,
        role=role,
    )
