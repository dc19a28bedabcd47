"""What the package uses of verl: recorded from an installed verl, and stand-ins made of the record where there is none.

PYTHON_WITH_VERL tests/rl/verl_surface.py > tests/rl/verl_surface.json
"""

from __future__ import annotations

import abc
import asyncio
import functools
import importlib
import inspect
import json
import re
import threading
import types
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import MISSING, fields, make_dataclass
from pathlib import Path
from typing import Any

import torch

RECORD = Path(__file__).with_suffix(".json")
CLASSES = (
    "verl.workers.rollout.base.BaseRollout",
    "verl.workers.rollout.replica.RolloutReplica",
    "verl.workers.rollout.replica.RolloutReplicaRegistry",
    "verl.checkpoint_engine.base.CheckpointEngine",
    "verl.checkpoint_engine.base.CheckpointEngineRegistry",
)
VALUES = {
    "token_output": "verl.workers.rollout.replica.TokenOutput",
    "rollout_config": "verl.workers.config.rollout.RolloutConfig",
}


def _found(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def method_of(owner: type, name: str) -> dict[str, Any]:
    function = inspect.unwrap(inspect.getattr_static(owner, name))
    plain = getattr(function, "__func__", function)
    return {
        "parameters": ", ".join(str(one.replace(annotation=one.empty)) for one in _parameters(plain)),
        "async": inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain),
        "abstract": getattr(plain, "__isabstractmethod__", False),
        "classmethod": isinstance(function, classmethod),
    }


def _parameters(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def record() -> dict[str, Any]:
    classes = {}
    for path in CLASSES:
        owner = _found(path)
        names = [name for name, value in vars(owner).items() if inspect.isfunction(getattr(value, "__func__", value))]
        classes[path] = {name: method_of(owner, name) for name in names if name == "__init__" or name[0] != "_"}
    replica = inspect.getsource(_found(CLASSES[1]))
    config = _found(VALUES["rollout_config"])
    registry = _found("verl.workers.rollout.base._ROLLOUT_REGISTRY")
    return {
        "version": importlib.import_module("verl").__version__,
        "classes": classes,
        "server_calls": sorted(set(re.findall(r"server\.(\w+)\.remote\(", replica))),
        "token_output": sorted(_found(VALUES["token_output"]).model_fields),
        "rollout_config": {one.name: _plain(one) for one in fields(config)},
        "backends": sorted(name for name, _ in registry if name != "megatron_infer"),
    }


def _plain(field: Any) -> Any:
    """A field's default as JSON has it; a dataclass as the mapping of its own fields."""
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if hasattr(value, "__dataclass_fields__"):
        return {one.name: _plain(one) for one in fields(value)}
    if isinstance(value, str) and value.startswith("/"):  # a path on some machine
        return ""
    return value if isinstance(value, bool | int | float | str | dict | list | None) else None


# ------------------------------------------------------------------ stand-ins


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def class_of(name: str, methods: dict[str, Any]) -> type:
    """A class with the abstract methods of the record, and an `__init__` that keeps its arguments."""

    def init(self: Any, *args: Any, **how: Any) -> None:
        names = [one.partition("=")[0] for one in methods["__init__"]["parameters"].split(", ")[1:]]
        vars(self).update(dict(zip(names, args, strict=False)) | how)

    def registered(key: str, value: Any = None) -> Any:
        return value if value is not None else lambda one: one

    members: dict[str, Any] = {"__init__": init} if "__init__" in methods else {}
    for method, facts in methods.items():
        if facts["abstract"]:
            members[method] = abc.abstractmethod(lambda self: None)
    if "register" in methods:
        members["register"] = staticmethod(registered)
    return abc.ABCMeta(name, (), members)


class StandInRay:
    """`ray` in one process: an actor's coroutines run on a loop of a thread of its own, as many at once as its options
    allow, and each of its concurrency groups on another."""

    class exceptions:
        class RayError(Exception):
            pass

    class util:
        @staticmethod
        def get_node_ip_address() -> str:
            return "127.0.0.1"

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}

    def get_actor(self, name: str) -> Any:
        return self.actors[name]

    @staticmethod
    def get(calls: Any) -> Any:
        return [call.result() for call in calls] if isinstance(calls, list) else calls.result()

    @staticmethod
    def method(*, concurrency_group: str) -> Any:
        def marked(function: Any) -> Any:
            function.concurrency_group = concurrency_group
            return function

        return marked

    def remote(self, kind: type | None = None, *, concurrency_groups: Mapping[str, int] = {}) -> Any:
        if kind is None:
            return functools.partial(self.remote, concurrency_groups=concurrency_groups)
        return types.SimpleNamespace(
            options=lambda name=None, max_concurrency=1000, **_: types.SimpleNamespace(
                remote=lambda *args: self.actors.setdefault(
                    name or object(), _Actor(kind, args, {"": max_concurrency, **concurrency_groups})
                )
            )
        )


class _Actor:
    def __init__(self, kind: type, args: Any, limits: Mapping[str, int]) -> None:
        """limits: coroutines at once, by concurrency group; "" has all other methods."""
        self.groups = {name: (asyncio.new_event_loop(), asyncio.Semaphore(limit)) for name, limit in limits.items()}
        for loop, _ in self.groups.values():
            threading.Thread(target=loop.run_forever, daemon=True).start()

        async def make() -> Any:
            return kind(*args)

        self.object = asyncio.run_coroutine_threadsafe(make(), self.groups[""][0]).result()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.object, name)
        loop, limit = self.groups[getattr(method, "concurrency_group", "")]

        async def call(*args: Any, **how: Any) -> Any:
            async with limit:
                return await method(*args, **how)

        return types.SimpleNamespace(
            remote=lambda *args, **how: _Reference(asyncio.run_coroutine_threadsafe(call(*args, **how), loop))
        )


class _Reference:
    """To a call's result, for threads and for coroutines."""

    def __init__(self, call: Future[Any]) -> None:
        self.result = call.result
        self._call = call

    def __await__(self) -> Any:
        return asyncio.wrap_future(self._call).__await__()


def stand_ins() -> dict[str, Any]:
    """Modules by name, for `sys.modules`."""
    found = recorded()
    modules: dict[str, Any] = {}

    def put(path: str, value: Any) -> None:
        parts = path.split(".")
        for end in range(1, len(parts)):
            name = ".".join(parts[:end])
            modules.setdefault(name, types.ModuleType(name)).__path__ = []
            if end > 1:
                setattr(modules[name.rsplit(".", 1)[0]], parts[end - 1], modules[name])
        setattr(modules[".".join(parts[:-1])], parts[-1], value)

    for path, methods in found["classes"].items():
        put(path, class_of(path.rsplit(".", 1)[1], methods))
    for path, name in (("verl.workers.rollout.replica.TokenOutput", "token_output"),):
        put(path, make_dataclass("TokenOutput", [(one, Any, None) for one in found[name]]))
    put("verl.workers.rollout.base._ROLLOUT_REGISTRY", {})
    put("verl.utils.device.get_device_id", lambda: torch.device("cpu"))  # as tests/support/verl_on_cpu.py gives it
    modules["ray"] = StandInRay()
    return modules


def rollout_config(**changes: Any) -> Any:
    """A RolloutConfig of the recorded defaults."""

    def made(values: Any, depth: int = 0) -> Any:
        is_config = depth == 0 or (isinstance(values, dict) and values)
        return types.SimpleNamespace(**{k: made(v, 1) for k, v in values.items()}) if is_config else values

    unknown = set(changes) - set(recorded()["rollout_config"])
    assert not unknown, unknown
    return types.SimpleNamespace(**vars(made(recorded()["rollout_config"])) | changes)


if __name__ == "__main__":
    print(json.dumps(record(), indent=1, sort_keys=True))
