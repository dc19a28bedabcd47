"""An engine's process: loads a model and serves a coordinator's requests."""

from __future__ import annotations

import signal
from typing import Any

from megatron_infer.server.subprocess_main import tell


def serve(
    *,
    model: str,
    coordinator: str,
    name: str,
    config: dict[str, Any],
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
) -> None:
    """Until SIGTERM, which lets what is under way end. An error of the engine's loop passes through."""
    from megatron_infer.coordinator.replica import Replica
    from megatron_infer.entrypoints.llm import LLM  # torch loads here
    from megatron_infer.rl.remote_weights import RemoteWeights

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to end
    llm = LLM(model, config=config, dtype=dtype, device=device, threads=threads)
    replica = Replica(llm.engine, coordinator, name=name, commands=RemoteWeights(llm.engine).commands())
    signal.signal(signal.SIGTERM, lambda *_: replica.drain())
    shape = llm.engine.shape
    tell(ready={"parameters": shape.num_parameters, "dtype": shape.dtype})
    with replica:
        replica.run()
