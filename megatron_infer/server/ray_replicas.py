"""Replicas as Ray actors: Ray places them on the machines of a cluster, starts their engines and restarts them.

    with RayReplicas("smollm2", 4, resources={"CPU": 8}) as replicas:
        outputs = replicas.generate(prompts, SamplingParams(max_tokens=64))

    driver      RayReplicas: coordinator (a thread), client
                   |    |    requests, tokens and commands: ZMQ, with a key of this run
    Ray actors  Replica Replica ...           placed and restarted by Ray; each has an engine of one process
                   '----'    requests that move, with their memory

Each call of `add` has one placement group, so that the replicas of a role are placed by the same strategy.

Requests do not pass through Ray but through the coordinator, so that prefix routing, streams, commands with deadlines
and the recovery of a dead replica's requests are the same as without Ray.

    serve.run(serve_application("smollm2", 2, resources={"CPU": 8}), route_prefix="/generate")

serves through Ray Serve instead: its proxy, its routing to replicas, its scaling; without a coordinator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_infer.config.coordinator_options import CoordinatorOptions, ReplicaRole
from megatron_infer.engine.lifecycle_commands import EngineCommands
from megatron_infer.errors import ConfigError, InferenceError, check_known

if TYPE_CHECKING:
    from megatron_infer.config.inference import InferenceConfig
    from megatron_infer.config.sampling_params import SamplingParams
    from megatron_infer.coordinator.client import Encoder, Prompt
    from megatron_infer.coordinator.protocol import Answer
    from megatron_infer.outputs.request_output import OnError, RequestOutput

log = logging.getLogger("megatron_infer.ray")

INSTALL = 'pip install "megatron-infer[ray]"'
INSTALL_SERVE = 'pip install "ray[serve]"'
_WATCH_S = 0.5

Model = str | Callable[[], Any]
"""A model's name, or a function that returns an engine or an LLM; Ray pickles the function for the actors."""


class RayMissing(InferenceError, ImportError):
    """Ray, or another package that its replicas need, is not installed."""


class ReplicasLost(InferenceError, RuntimeError):
    """No actor could be started, or every actor has died and used up its restarts."""


class RayReplicas(EngineCommands["dict[str, Answer]", "dict[str, Answer]", "dict[str, Answer]"]):
    """Replicas of one engine as Ray actors, with the methods of a client.

    The driver must be on a node of the cluster (no ray:// address), as the actors connect to it. Calls `ray.init()`
    unless Ray is initialized, and never shuts it down. A request of an actor that dies continues on another with the
    tokens it has; the actor is restarted up to `max_restarts` times.
    """

    def __init__(
        self,
        model: Model,
        num_replicas: int,
        *,
        num_prefill: int = 0,
        strategy: str = "PACK",
        config: InferenceConfig | Mapping[str, Any] | None = None,
        model_options: Mapping[str, Any] | None = None,
        resources: Mapping[str, float] | None = None,
        coordinator: CoordinatorOptions | None = None,
        tokenizer: Encoder | None = None,
        max_restarts: int = 3,
        start_timeout_s: float = 600.0,
        host: str | None = None,
        weights_root: str | None = None,
    ) -> None:
        """config and model_options (dtype, threads, ...) are LLM's, for a model given by name.

        num_prefill: how many of them compute prompts only; the others then decode. strategy: Ray's for the placement
        group of a role, such as SPREAD. weights_root: `load_weights` reads below this directory.
        resources: Ray's, for each replica, {"CPU": 8, "GPU": 1, "big_memory": 1}; None is {"CPU": 1}. CPU is also the
        number of threads. tokenizer: tokenizes texts in the driver, so that they can be routed by prefix. host: the
        driver's address for the actors; None is its node's in Ray. Returns when all replicas serve.
        Raises RayMissing, ConfigError, and ReplicasLost when they do not start within start_timeout_s seconds.
        """
        self._ray = require_ray()
        from megatron_infer.coordinator.client import AsyncInferenceClient
        from megatron_infer.coordinator.coordinator import Coordinator, running

        options = _llm_options(model, config, model_options)
        if num_replicas < 1:
            raise ConfigError(f"num_replicas is {num_replicas}, it must be at least 1")
        if not 0 <= num_prefill < num_replicas:
            raise ConfigError(f"num_prefill is {num_prefill}, it must be 0 to {num_replicas - 1}: one has to decode")
        if max_restarts < 0:
            raise ConfigError(f"max_restarts is {max_restarts}, it must be at least 0")
        coordinator = CoordinatorOptions() if coordinator is None else coordinator
        if coordinator.key is None:
            coordinator = dataclasses.replace(coordinator, key=secrets.token_bytes(32))
        if not self._ray.is_initialized():
            self._ray.init()
        if host is None:
            host = self._ray.util.get_node_ip_address()
        self._resources = dict({"CPU": 1} if resources is None else resources)
        self._max_restarts = max_restarts
        self._strategy = strategy
        self._start_timeout_s = start_timeout_s
        self._closing = threading.Event()
        self._last_death = ""
        """Name and error of the latest actor that has died and used up its restarts."""
        self._stack = contextlib.ExitStack()
        try:
            served = self._stack.enter_context(running(Coordinator(f"tcp://{_bracketed(host)}:0", coordinator)))
            self.access: dict[str, Any] = {"address": served.address, "key": coordinator.key}
            self._async_client = AsyncInferenceClient(**self.access, name="ray driver", tokenizer=tokenizer)
            self._client = self._async_client.blocking
            self._stack.callback(self._client.close)
            self._new_actor = (model, options, self.access, weights_root)
            self._num_added = 0
            self._started: dict[str, _Started] = {}
            self._serving: dict[Any, _Started] = {}
            """Ray's reference of each running `serve` call, which ends with its actor."""
            self._stack.callback(self._kill_all)
            new = [] if not num_prefill else self._start(num_prefill, ReplicaRole.PREFILL)
            new += self._start(num_replicas - num_prefill, ReplicaRole.DECODE if num_prefill else ReplicaRole.BOTH)
            watcher = threading.Thread(target=self._watch, name="megatron-infer-ray", daemon=True)
            watcher.start()
            self._stack.callback(watcher.join)
            self._wait_until_serving(new, start_timeout_s)
        except BaseException:
            self.shutdown()
            raise

    # ------------------------------------------------------------------ requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Run prompts to the end -> outputs in their order. Raises as `InferenceClient.generate`."""
        with self._explaining_loss():
            return self._client.generate(prompts, params, on_error=on_error)

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """Cumulative outputs of one request as it grows. Closing the iterator aborts the request."""
        with self._explaining_loss():
            stream: Any = self._async_client.stream(prompt, params)
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    yield output

    def _command(self, name: str, *, timeout_s: float | None, **args: Any) -> dict[str, Answer]:
        with self._explaining_loss():
            return self._client.control(name, timeout_s=timeout_s, **args)

    def stats(self) -> dict[str, Any]:
        """The coordinator's counters, and the state of every replica."""
        with self._explaining_loss():
            return self._client.stats()

    @property
    def actors(self) -> tuple[Any, ...]:
        """Ray's actor handles, `ray-0` first, without those that have died and used up their restarts."""
        return tuple(one.actor for one in list(self._started.values()))

    # ------------------------------------------------------------------ start, restarts, end

    def shutdown(self) -> None:
        """Kill the actors and end the coordinator; pending requests fail with ConnectionLost."""
        self._closing.set()
        self._stack.close()

    def __enter__(self) -> RayReplicas:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def add(
        self, count: int, *, role: ReplicaRole | str = ReplicaRole.BOTH, timeout_s: float | None = None
    ) -> list[str]:
        """Start more replicas in a placement group -> their names, once they serve.

        Raises ReplicasLost when they do not within timeout_s (start_timeout_s) seconds; none of them is left then.
        """
        if count < 1:
            raise ConfigError(f"count is {count}, it must be at least 1")
        with self._explaining_loss():
            new = self._start(count, ReplicaRole(role))
            try:
                self._wait_until_serving(new, self._start_timeout_s if timeout_s is None else timeout_s)
            except BaseException:
                for one in new:
                    self._end(one)
                raise
        return [one.name for one in new]

    def remove(self, *names: str, timeout_s: float = 60.0) -> None:
        """End replicas: their requests move to others with what is computed of them.

        Those that have requests after timeout_s seconds are killed; the requests go on from their tokens.
        """
        from megatron_infer.coordinator.protocol import ControlFailed

        started = dict(self._started)
        unknown = [name for name in names if name not in started]
        if unknown:
            raise ConfigError(f"no replica {unknown[0]!r}; there are {', '.join(started)}")
        if all(one.name in names for one in self._staying()):
            raise ConfigError("no replica would be left; shutdown() ends all of them")
        leaving = [started[name] for name in set(names)]
        with self._explaining_loss():
            for one in leaving:
                one.is_leaving = True
                with contextlib.suppress(ControlFailed):  # it has just died: its requests are elsewhere already
                    self._client.drain(one.name, move=True)
                one.actor.leave.remote()
            self._ray.wait([one.call for one in leaving], num_returns=len(leaving), timeout=timeout_s)
        for one in leaving:
            self._end(one)

    def _start(self, count: int, role: ReplicaRole) -> list[_Started]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = {name: amount for name, amount in self._resources.items() if amount}
        group = self._ray.util.placement_group([bundle] * count, strategy=self._strategy)
        new = []
        for index in range(count):
            name = f"ray-{self._num_added}"
            self._num_added += 1
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            remote = self._ray.remote(_ReplicaActor).options(
                max_restarts=self._max_restarts,
                max_concurrency=2,  # `leave` is called while `serve` runs
                scheduling_strategy=where,
                **_actor_options(self._resources),
            )
            actor = remote.remote(*self._new_actor, name, role.value)
            one = _Started(name, actor, group, actor.serve.remote(), self._max_restarts, time.monotonic())
            self._started[name] = self._serving[one.call] = one
            new.append(one)
        return new

    def _end(self, one: _Started) -> None:
        one.is_leaving = True
        self._started.pop(one.name, None)
        self._ray.kill(one.actor, no_restart=True)
        if all(other.group is not one.group for other in list(self._started.values())):
            self._ray.util.remove_placement_group(one.group)

    def _staying(self) -> list[_Started]:
        return [one for one in list(self._started.values()) if not one.is_leaving]

    @property
    def _lost_reason(self) -> str:
        """Why no replica is left; "": some are."""
        is_lost = self._last_death and not self._staying()
        return f"every replica has died; the last was {self._last_death}" if is_lost else ""

    def _wait_until_serving(self, new: list[_Started], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            names = {replica["name"] for replica in self._client.stats()["replicas"]}
            for one in new:
                one.has_served |= one.name in names
            if (failed := next((one for one in new if one.error is not None), None)) is not None:
                raise ReplicasLost(f"{failed.name} did not start: {failed.error}") from failed.error
            missing = [one.name for one in new if not one.has_served]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise ReplicasLost(
                    f"{', '.join(missing)} of {len(new)} replicas do not serve after {timeout_s:g} s; does the cluster "
                    f"have {self._resources} free for each (`ray status`), and can its nodes reach "
                    f"{self.access['address']}?"
                )
            self._closing.wait(_WATCH_S / 5)

    def _watch(self) -> None:
        """Have restarted actors serve again; when none is left, fail pending requests."""
        while not self._closing.is_set() and not (self._lost_reason and not self._serving):
            if not self._serving:
                self._closing.wait(_WATCH_S)
                continue
            ended, _ = self._ray.wait(list(self._serving), timeout=_WATCH_S)
            for call in ended:
                one, error = self._serving.pop(call), self._error_of(call)
                if self._closing.is_set():
                    return
                if not one.is_leaving:
                    self._has_died(one, error)
        if not self._closing.is_set():
            self._client.close()

    def _has_died(self, one: _Started, error: BaseException) -> None:
        restarts = isinstance(error, self._ray.exceptions.ActorUnavailableError)  # raised while Ray restarts it
        if not one.has_served and not restarts:
            one.error = error
            return
        if not restarts and not one.restarts_left:
            log.error("%s has died and used up its restarts: %s", one.name, error)
            self._last_death = f"{one.name}: {error}"
            self._end(one)
            return
        if not restarts:  # in some versions of Ray the interrupted call only says that the actor has died
            one.restarts_left -= 1
        if time.monotonic() - one.began > 10 * _WATCH_S:
            log.warning("%s has died and is restarted: %s", one.name, error)
        one.began = time.monotonic()
        self._closing.wait(_WATCH_S)
        one.call = one.actor.serve.remote()
        self._serving[one.call] = one

    def _error_of(self, call: Any) -> BaseException:
        try:
            self._ray.get(call)
        except Exception as error:  # Ray's, with the actor's own inside
            return error
        return InferenceError("it was stopped")

    def _kill_all(self) -> None:
        for one in list(self._started.values()):
            self._end(one)

    @contextlib.contextmanager
    def _explaining_loss(self) -> Iterator[None]:
        from megatron_infer.coordinator.protocol import ConnectionLost

        if self._lost_reason and not self._closing.is_set():
            raise ReplicasLost(self._lost_reason)
        try:
            yield
        except ConnectionLost as error:
            if self._lost_reason and not self._closing.is_set():
                raise ReplicasLost(self._lost_reason) from error
            raise


@dataclasses.dataclass(slots=True, eq=False)
class _Started:
    """An actor that was started."""

    name: str
    actor: Any
    group: Any
    """Ray's placement group, which has its place."""
    call: Any
    """Ray's reference of its `serve` call."""
    restarts_left: int
    began: float
    has_served: bool = False
    is_leaving: bool = False
    error: BaseException | None = None
    """Why it did not start."""


class _ReplicaActor:
    """The Ray actor of one engine."""

    def __init__(
        self,
        model: Model,
        options: dict[str, Any],
        access: dict[str, Any],
        weights_root: str | None,
        name: str,
        role: str,
    ) -> None:
        from megatron_infer.server.engine_replica import engine_replica

        self._replica = engine_replica(
            _build_engine(model, options),
            access["address"],
            key=access["key"],
            name=name,
            control=True,
            weights_root=weights_root,
            role=role,
        )

    def serve(self) -> None:
        """Serve until the actor ends. If the engine fails, the process exits, so that Ray restarts it."""
        from megatron_infer.coordinator.protocol import AccessRefused

        try:
            self._replica.run()
        except AccessRefused:
            raise
        except BaseException:
            log.exception("the engine has failed")
            os._exit(1)

    def leave(self) -> None:
        """End `serve` when the requests have ended or moved."""
        self._replica.drain()


def serve_application(
    model: Model,
    num_replicas: int = 1,
    *,
    config: InferenceConfig | Mapping[str, Any] | None = None,
    model_options: Mapping[str, Any] | None = None,
    resources: Mapping[str, float] | None = None,
    **deployment: Any,
) -> Any:
    """A Ray Serve application for `serve.run`; each replica has an engine of one process.

    POST {"prompt": text or token ids, "params": {"max_tokens": 64, ...}, "stream": false} returns {"prompt_token_ids",
    "outputs": [{"index", "text", "token_ids", "finish_reason"}]}; with "stream" one such line per update, with what is
    new. An invalid request gets 400 and {"error"}; one that fails gets 500, or in a stream that has begun a last line
    with "error". Python code calls `handle.generate.remote(prompt, params)` instead.
    Requests of a replica that dies fail with 500; the caller may repeat them.

    model: a function returns an LLM. deployment: options of `serve.deployment` (max_ongoing_requests, ...); here 256
    requests at a time per replica, as Serve's default of 5 would leave most rows empty.
    """
    require_ray()
    try:
        from ray import serve
    except ImportError as error:
        raise RayMissing(f"Ray Serve needs {error.name}, which is not installed: {INSTALL_SERVE}") from error
    options = _llm_options(model, config, model_options)
    actor = _actor_options({"CPU": 1} if resources is None else resources)
    settings = {"name": "megatron_infer", "max_ongoing_requests": 256} | deployment
    made = serve.deployment(_ServeDeployment).options(num_replicas=num_replicas, ray_actor_options=actor, **settings)
    return made.bind(model, options)


def application(args: dict[str, Any]) -> Any:
    """`serve_application` of arguments by name: the `import_path` of a Ray Serve config, as in a RayService."""
    return serve_application(**args)


class _ServeDeployment:
    """The deployment class: one replica of Ray Serve."""

    def __init__(self, model: Model, options: dict[str, Any]) -> None:
        from megatron_infer.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM(model, **options) if isinstance(model, str) else AsyncLLM(model())

    async def __call__(self, request: Any) -> Any:
        from starlette.responses import JSONResponse, StreamingResponse

        from megatron_infer.errors import RequestError

        try:
            prompt, params, stream = _parse_body(await request.json())
            outputs = self._outputs(prompt, params, stream=stream, on_error="return")
            first = await anext(outputs)  # raises what is wrong with the request
        except (RequestError, ValueError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        if "error" in first:
            await outputs.aclose()
            return JSONResponse(first, status_code=500)
        if not stream:
            return first

        async def lines() -> AsyncIterator[str]:
            async with contextlib.aclosing(outputs):
                yield json.dumps(first) + "\n"
                async for output in outputs:
                    yield json.dumps(output) + "\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def generate(self, prompt: Any, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """For a DeploymentHandle."""
        prompt, checked, _ = _parse_body({"prompt": prompt, "params": params})
        async with contextlib.aclosing(self._outputs(prompt, checked, stream=False, on_error="raise")) as outputs:
            return await anext(outputs)

    async def _outputs(
        self, prompt: Any, params: SamplingParams, *, stream: bool, on_error: OnError
    ) -> AsyncGenerator[dict[str, Any]]:
        mode: Any = "delta" if stream else "final"
        outputs: Any = self._llm.generate(prompt, params, stream=mode, on_error=on_error)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield _to_json(output)

    async def check_health(self) -> None:
        """Raises EngineStopped when the engine has failed; Serve then replaces this replica."""
        from megatron_infer.errors import UnknownRequest

        with contextlib.suppress(UnknownRequest):
            await self._llm.abort("")  # no request has this id, but the engine's thread has to answer


def _parse_body(body: Any) -> tuple[Any, SamplingParams, bool]:
    """Raises RequestError."""
    from megatron_infer.config.sampling_params import SamplingParams
    from megatron_infer.errors import RequestError

    if not isinstance(body, dict) or "prompt" not in body:
        raise RequestError('a request is {"prompt": text or token ids, "params": {...}, "stream": false}')
    check_known("field", body, ("prompt", "params", "stream"), error=RequestError)
    return body["prompt"], SamplingParams.from_dict(dict(body.get("params") or {})), bool(body.get("stream", False))


def _to_json(output: RequestOutput) -> dict[str, Any]:
    outputs = [
        {"index": one.index, "text": one.text, "token_ids": list(one.token_ids), "finish_reason": one.finish_reason}
        for one in output.outputs
    ]
    error = {} if output.error is None else {"error": str(output.error)}
    return {"prompt_token_ids": list(output.prompt_token_ids), "outputs": outputs, **error}


def require_ray() -> Any:
    """The module `ray`. Raises RayMissing, which says how to install it."""
    try:
        import msgspec  # noqa: F401
        import ray
        import zmq  # noqa: F401
    except ImportError as error:
        raise RayMissing(f"replicas on Ray need {error.name}, which is not installed: {INSTALL}") from error
    return ray


def _llm_options(
    model: Model, config: InferenceConfig | Mapping[str, Any] | None, model_options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """LLM's keywords."""
    if isinstance(model, str):
        return {**(model_options or {}), "config": config}
    if config is not None or model_options:
        raise ConfigError("config and model_options are for a model given by name; a function makes its engine itself")
    return {}


def _build_engine(model: Model, options: dict[str, Any]) -> Any:
    if isinstance(model, str):
        from megatron_infer.engine.llm import LLM

        return LLM(model, **options).engine
    made = model()
    return getattr(made, "engine", made)


def _actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    custom = dict(resources)
    return {
        "num_cpus": custom.pop("CPU", 0),
        "num_gpus": custom.pop("GPU", 0),
        "resources": custom,
    }


def _bracketed(host: str) -> str:
    """A host as part of a URL."""
    return f"[{host}]" if ":" in host else host
