"""Engines that are killed at random points of weight updates, under streams: no stream hangs or is altered, and the
engines that serve have one version.

    python tools/bench/update_kills.py [--kills 200] [--engine echo|tiny] [--clients 8] [--seed 0] [--json FILE]

Two engines, each a process, behind a coordinator and an HTTP server with the control routes. An update comes as files
or in buckets of bytes, from the serving or the paused state. At one of its calls, after a random part of the time that
this call takes, one of the engines gets SIGKILL; it is started again at once. echo: engines without a model, whose
weights are a digest. tiny: a model of two layers, whose tokens tell the weights apart. After every update requests
must be served, within 60 s and without another call than the update's own, by engines with the same weights. The next
update begins once both engines are back; where one cannot read the weights again, as they came as bytes, there is an
update without a kill before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save
from serve_case import events

from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.coordinator.coordinator import Coordinator, CoordinatorOptions
from megatron_infer.coordinator.coordinator import running as running_coordinator
from megatron_infer.utils.child_process import ChildProcess

ENGINES = ("r0", "r1")
LIMIT_S = 60.0
"""After so long a stream, or an engine that does not serve, counts as a hang."""
NUM_BUCKETS = 4
NUM_TOKENS = 40
PROMPT = [5, 9, 30, 7]
OCTETS = {"Content-Type": "application/octet-stream"}
SHAPE = {"vocab_size": 128, "max_sequence_length": 128, "init_method_std": 0.2}


# ---------------------------------------------------------------------- an engine's process


def tiny_engine(seed: int = 0) -> Any:
    import torch

    from megatron_infer.config.inference import InferenceConfig
    from megatron_infer.engine.engine import DynamicInferenceEngine
    from megatron_infer.testing.tiny import tiny_gpt

    torch.set_num_threads(1)
    config = InferenceConfig(buffer_size_gb=0.02, block_size_tokens=16, max_sequence_length=128, max_requests=16)
    return DynamicInferenceEngine(tiny_gpt(**SHAPE, seed=seed), config)


def serve_engine(kind: str, address: str, name: str, root: str) -> None:
    from megatron_infer.coordinator.replica import Replica

    if kind == "echo":
        from echo import EchoEngine

        Replica(EchoEngine(step_s=0.01), address, name=name, control=True).run()
        return
    from megatron_infer.rl.weight_receiver import WeightReceiver

    engine = tiny_engine()
    commands = WeightReceiver(engine, weights_root=root).commands()
    Replica(engine, address, name=name, control=True, commands=commands).run()


class Engines(threading.Thread):
    """The processes of the engines; one that has ended is started again."""

    def __init__(self, kind: str, address: str, root: str) -> None:
        super().__init__(daemon=True)
        self._command = [sys.executable, __file__, "--serve", kind, address, root]
        self._processes = {name: self._start_one(name) for name in ENGINES}
        self._ending = threading.Event()

    def _start_one(self, name: str) -> ChildProcess:
        return ChildProcess([*self._command, name], env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=sys.stderr)

    def run(self) -> None:
        while not self._ending.wait(0.05):
            for name, process in self._processes.items():
                if process.poll() is not None:
                    self._processes[name] = self._start_one(name)

    def kill(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGKILL)

    def end(self) -> None:
        self._ending.set()
        self.join()
        for process in self._processes.values():
            process.end()


# ---------------------------------------------------------------------- weights and tokens


class Weights:
    """Two sets of weights, as files below `root` and as buckets of bytes, with their tokens, and those of the model as
    it is loaded."""

    def __init__(self, kind: str, root: Path) -> None:
        self.buckets: dict[str, list[bytes]] = {}
        self.tokens: dict[str, list[int]] = {}
        for index, name in enumerate(("one", "two")):
            (root / name).mkdir()
            parts = _echo_parts(index) if kind == "echo" else _tiny_parts(index)
            self.buckets[name] = [save(part) for part in parts]
            whole = {key: value for part in parts for key, value in part.items()}
            (root / name / "model.safetensors").write_bytes(save(whole))
        if kind == "echo":
            from echo import echo_tokens

            self.tokens = dict.fromkeys(("loaded", "one", "two"), echo_tokens(PROMPT, NUM_TOKENS))
            return
        from megatron_infer.config.sampling_params import SamplingParams

        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
        for seed, name in ((0, "loaded"), (1, "one"), (2, "two")):
            self.tokens[name] = list(tiny_engine(seed).generate([PROMPT], [params])[0].outputs[0].token_ids)


def _echo_parts(index: int) -> list[dict[str, np.ndarray]]:
    return [{f"w{number}": np.full(4 << 20, index + 1, dtype=np.uint8)} for number in range(NUM_BUCKETS)]


def _tiny_parts(index: int) -> list[dict[str, np.ndarray]]:
    from megatron_infer.testing.tiny import tiny_gpt

    named = tiny_gpt(**SHAPE, seed=index + 1).named_parameters()
    found = {name: value.detach().contiguous().numpy() for name, value in named}
    return [dict(itertools.islice(found.items(), at, None, NUM_BUCKETS)) for at in range(NUM_BUCKETS)]


# ---------------------------------------------------------------------- streams


class Streams(threading.Thread):
    """Clients that stream one reply after the other."""

    def __init__(self, url: str, weights: Weights, count: int) -> None:
        super().__init__(daemon=True)
        self._url, self._count = url, count
        self._right = weights.tokens if weights.tokens["one"] == weights.tokens["two"] else None
        self._body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        self._body |= {"return_token_ids": True, "stream": True}
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.ending = False

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        await asyncio.gather(*(self._stay() for _ in range(self._count)))

    async def _stay(self) -> None:
        while not self.ending:
            tokens: list[int] = []
            outcome = "right"
            try:
                async with (
                    asyncio.timeout(LIMIT_S),
                    contextlib.aclosing(events(self._url, self._body, 0.0, 1 << 16)) as found,
                ):
                    async for event in found:
                        if "error" in event:
                            outcome = "error"
                            self.errors[event["error"]["code"]] += 1
                            break
                        for choice in event["choices"]:
                            tokens += choice.get("token_ids") or []
            except TimeoutError:
                outcome = "hang"
            except (OSError, EOFError, ValueError) as error:
                outcome = "error"
                self.errors[str(error).partition(":")[0]] += 1
                await asyncio.sleep(0.2)
            if outcome == "right":
                is_right = len(tokens) == NUM_TOKENS and (self._right is None or tokens == self._right["one"])
                outcome = outcome if is_right else "altered"
            self.outcomes[outcome] += 1


# ---------------------------------------------------------------------- updates


class Updates:
    """Updates, at one call of each of which an engine is killed."""

    def __init__(self, url: str, engines: Engines, weights: Weights, client: InferenceClient, *, seed: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=LIMIT_S)
        self._engines, self._weights, self._client, self._rng = engines, weights, client, random.Random(seed)
        self._seconds: dict[str, float] = {}
        """How long each call took last, without a kill."""
        self.now = "loaded"
        self.kills: Counter[str] = Counter()
        self.results: Counter[str] = Counter()
        self.longest = 0.0
        self.problems: list[str] = []

    def run_one(self) -> None:
        new = self._rng.choice(("one", "two"))
        calls = self._calls(new)
        at = self._rng.randrange(len(calls))
        name, killed = calls[at][0], self._rng.choice(ENGINES)
        killer = threading.Timer(
            self._rng.uniform(0.0, 1.2) * self._seconds.get(name, 0.05), self._engines.kill, (killed,)
        )
        is_new, failed = False, ""
        for index, (phase, path, how) in enumerate(calls):
            if index == at:
                killer.start()
            began = time.monotonic()
            reply = self._http.post(path, **how)
            if index < at:
                self._seconds[phase] = time.monotonic() - began
            if reply.status_code != 200:
                failed = f"{phase} {reply.status_code}"
                if phase == "resume":
                    self.problems.append(f"resume failed: {reply.text[:300]}")
                if phase != "pause" and calls[0][0] == "pause":
                    self._http.post("/resume")
                break
            is_new |= phase in ("finish", "load")
        killer.join()
        self.kills[name] += 1
        self.results["done" if is_new else f"undone at {failed}"] += 1
        self.now = new if is_new else self.now
        self._check(f"{'+'.join(call[0] for call in calls)}, {killed} killed at {name}, {failed or 'done'}")

    def _calls(self, new: str) -> list[tuple[str, str, dict[str, Any]]]:
        if self._rng.random() < 0.4:
            calls = [("load", "/update_weights_from_disk", {"json": {"model_path": new}})]
        else:
            parts = [
                (f"bucket {number}", "/update_weights", {"content": data, "headers": OCTETS})
                for number, data in enumerate(self._weights.buckets[new])
            ]
            calls = [("start", "/start_weight_update", {}), *parts, ("finish", "/finish_weight_update", {})]
        if self._rng.random() < 0.5:
            return calls
        return [("pause", "/pause?mode=keep", {}), *calls, ("resume", "/resume", {})]

    def _check(self, what: str) -> None:
        """The engines serve by themselves, with the same weights."""
        began = time.monotonic()
        problem = "nothing was asked"
        while problem and time.monotonic() - began < LIMIT_S:
            time.sleep(0.02)
            problem = self._problem()
        self.longest = max(self.longest, time.monotonic() - began)
        if problem:
            self.problems.append(f"{what}: {problem}")
            return
        while len(there := self._client.stats()["replicas"]) < len(ENGINES) or any(one["restoring"] for one in there):
            if time.monotonic() - began > 2 * LIMIT_S:
                self.problems.append(f"{what}: an engine is not back: {there}")
                return
            time.sleep(0.02)
        if any(one["outdated"] for one in there):  # the weights came as bytes: the engine waits for the next update
            self.results["then one engine waits for the next update"] += 1
            reply = self._http.post("/update_weights_from_disk", json={"model_path": "one"})
            self.now = "one"
            self._check(f"{what}, and an update without a kill: {reply.status_code}")

    def _problem(self) -> str:
        body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        try:
            health = self._http.get("/health").json()
            if health["status"] != "ok":
                return f"{health['status']}: /health"
            state = self._http.get("/is_paused").json()["state"]
            if state != "SERVING":
                return f"the state is {state}"
            reply = self._http.post("/v1/completions", json=body | {"return_token_ids": True})
        except httpx.TimeoutException:
            return "a call hangs"
        if reply.status_code != 200:
            return f"{reply.status_code}: {reply.text[:200]}"
        tokens = reply.json()["choices"][0]["token_ids"]
        if tokens != self._weights.tokens[self.now]:
            return f"tokens of other weights than {self.now}"
        serving = [one for one in self._client.stats()["replicas"] if not (one["outdated"] or one["restoring"])]
        if len({one["weight_version"] for one in serving}) != 1:
            return f"several versions: {[(one['name'], one['weight_version']) for one in serving]}"
        answers = self._client.control("check_weights", action="checksum", check=False)
        names = {one["name"] for one in serving}
        sums = {answer.value["checksum"] for name, answer in answers.items() if answer.ok and name in names}
        return "" if len(sums) <= 1 else "engines that serve have different weights"


def measure(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    from megatron_infer.server.http_server import HttpServer, listen, url_of
    from megatron_infer.server.server_config import ServerConfig

    weights = Weights(args.engine, root)
    settings = ServerConfig(port=0, log_requests=False, control=True, weights_root=str(root))
    address = f"ipc://{root}/coordinator"
    with contextlib.ExitStack() as stack:
        stack.enter_context(running_coordinator(Coordinator(address, CoordinatorOptions(max_attempts=10))))
        engines = Engines(args.engine, address, str(root))
        engines.start()
        stack.callback(engines.end)
        client = stack.enter_context(InferenceClient(address))
        listening = stack.enter_context(contextlib.closing(listen("127.0.0.1", 0)))
        server, ready = HttpServer(settings, coordinator=address, tokenizer=None, model=args.engine), threading.Event()
        thread = threading.Thread(target=server.run, args=(listening,), kwargs={"on_ready": lambda url: ready.set()})
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shut_down)
        assert ready.wait(2 * LIMIT_S), "the server does not come up"
        streams = Streams(url_of(listening), weights, args.clients)
        streams.start()
        updates = Updates(url_of(listening), engines, weights, client, seed=args.seed)
        began = time.monotonic()
        while sum(updates.kills.values()) < args.kills:
            updates.run_one()
        streams.ending = True
        streams.join(2 * LIMIT_S)
        return {
            "engine": args.engine,
            "kills": sum(updates.kills.values()),
            "seconds": round(time.monotonic() - began, 1),
            "killed at": dict(sorted(updates.kills.items())),
            "updates": dict(sorted(updates.results.items())),
            "streams": dict(streams.outcomes),
            "errors of streams": dict(streams.errors),
            "hangs": streams.outcomes["hang"] + streams.is_alive(),
            "longest until all serve, s": round(updates.longest, 1),
            "problems": updates.problems,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--engine", choices=("echo", "tiny"), default="echo")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=4, metavar=("ENGINE", "ADDRESS", "ROOT", "NAME"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        kind, address, root, name = args.serve
        serve_engine(kind, address, name, root)
        return 0
    with tempfile.TemporaryDirectory(prefix="mi-") as root:
        result = measure(args, Path(root))
    print(json.dumps(result, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if result["problems"] or result["hangs"] or result["streams"].get("altered") else 0


if __name__ == "__main__":
    sys.exit(main())
