"""What the engines and the HTTP processes of a server are built from; JSON on the way to a process."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_infer.config.coordinator_options import ReplicaRole
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.supervisor import ProcessSpec

HTTP_HANG_S = 60.0
"""Seconds without a beat after which an HTTP process is killed: as long as the coordinator keeps its streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What each engine is built from."""

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    """Options of InferenceConfig; the others are chosen for the machine."""
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    use_legacy_module: bool = False
    """See `build_model`."""
    roles: tuple[str, ...] = (ReplicaRole.BOTH.value,)
    """The role of each engine, which is a replica."""
    chat_template: str | None = None
    """Goes before the model's own."""
    loader: str | None = None
    """module:function that makes the engine from `loader_options`, in place of one of `model`."""
    loader_options: dict[str, Any] = field(default_factory=dict)
    endpoint_base: str | None = None
    """What the addresses of the processes begin with (see `SocketBase`); None: a folder of their own."""

    @property
    def dp(self) -> int:
        """Engines."""
        return len(self.roles)

    @property
    def threads_each(self) -> int | None:
        """Threads of each engine; several engines share the processors where none are given. None: the engine's own."""
        if self.threads is not None or self.dp == 1:
            return self.threads
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cpus // self.dp)

    def process(self, index: int, coordinator: str, settings: ServerConfig) -> ProcessSpec:
        name = f"replica{index}"
        replica = {"coordinator": coordinator, "name": name, "role": self.roles[index]}
        options = {"options": asdict(self), "allowed": allowed_by(settings), **replica}
        return ProcessSpec(name=name, role="engine", options=options, is_worker=True, hang_timeout_s=30.0)


def allowed_by(settings: ServerConfig) -> dict[str, Any]:
    """What a server's settings allow its engines: arguments of `engine_replica`."""
    return {"control": settings.control, "weights_root": settings.weights_root, "lora_root": settings.lora_root}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """What each HTTP process is built from."""

    settings: ServerConfig
    coordinator: str
    """The coordinator's address."""
    key: bytes | None = field(default=None, repr=False)
    """The coordinator's shared key."""
    tokenizer: dict[str, Any]
    """Arguments of `load_tokenizer`."""
    folder: str
    """Holds the tokenizer and the sockets of the server's processes; only this user can open it."""
    model: str

    def process(self) -> ProcessSpec:
        """The HTTP process of a server whose first process is busy with an engine."""
        options = self._json()
        return ProcessSpec(name="http", role="http", options=options, is_worker=True, hang_timeout_s=HTTP_HANG_S)

    def worker(self, index: int, *, listening: int, started: float) -> ProcessSpec:
        """One of several HTTP processes. listening: the descriptor of their socket. started: see `HttpServer`."""
        name = f"http{index}"
        return ProcessSpec(
            name=name,
            role="http_worker",
            options={**self._json(), "name": name, "listening": listening, "started": started},
            is_worker=True,
            hang_timeout_s=HTTP_HANG_S,
            inherited=(listening,),
        )

    def _json(self) -> dict[str, Any]:
        return {**asdict(self), "key": None if self.key is None else self.key.hex()}

    @classmethod
    def from_json(cls, *, settings: dict[str, Any], key: str | None, **others: Any) -> HttpOptions:
        """The options that a process was started with."""
        return cls(settings=ServerConfig(**settings), key=None if key is None else bytes.fromhex(key), **others)
