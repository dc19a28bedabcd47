"""Shared by tests of the coordinator: a coordinator in a thread, replicas in threads and in processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import zmq
from child_paths import python_path
from echo import EchoEngine

from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.coordinator.coordinator import Coordinator, CoordinatorOptions
from megatron_infer.coordinator.coordinator import running as running_coordinator
from megatron_infer.coordinator.replica import Replica

QUICK = {"timeout_s": 5.0}
"""The timeout is no shorter than a busy machine may keep a thread waiting; tests of silent peers have their own."""
CHILD = Path(__file__).with_name("replica_child.py")


@contextlib.contextmanager
def coordinator(**options):
    """At tcp:// with a key, else in a folder of its own, where it needs none."""
    with tempfile.TemporaryDirectory(prefix="mi-") as folder:
        bind = f"ipc://{folder}/c" if options.get("key") is None else "tcp://127.0.0.1:0"
        with running_coordinator(Coordinator(bind, CoordinatorOptions(**{**QUICK, **options}))) as one:
            yield one


@contextlib.contextmanager
def replica(address, engine=None, *, name="r", **options):
    """A replica in a thread; what ends its run is in `.failure`."""
    options = {"control": True, **options}
    one = Replica(EchoEngine() if engine is None else engine, address, name=name, **options)
    one.failure = None

    def run():
        try:
            one.run()
        except Exception as error:
            one.failure = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    one.thread = thread
    try:
        yield one
    finally:
        one.stop()
        thread.join(60)
        assert not thread.is_alive()


@contextlib.contextmanager
def cluster(count=2, *, engines=None, **options):
    """(coordinator, replicas, client); the replicas have registered."""
    engines = [EchoEngine() for _ in range(count)] if engines is None else engines
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(coordinator(**options))
        client = stack.enter_context(InferenceClient(one.address, key=options.get("key")))
        replicas = []
        for i, engine in enumerate(engines):  # one after the other, so that their order is known
            made = replica(one.address, engine, name=f"r{i}", key=options.get("key"))
            replicas.append(stack.enter_context(made))
            wait_for(lambda: len(client.stats()["replicas"]) == len(replicas))
        yield one, replicas, client


def serve_roles(rank, engine, folder, talk, **options):
    """`serve_ranks` of two engines of two ranks each: one computes prompts, the other goes on with the requests.
    options: of the coordinator."""
    role = "decode_only" if rank >= 2 else "prefill_only"
    serve_ranks(rank, engine, folder, talk, count=2, options=options, role=role)


def serve_ranks(rank, engine, folder, talk, *, count, options=None, followed=(), **how):
    """One rank of `count` engines behind a coordinator, which is on rank 0. talk(coordinator, client): called on rank 0
    while they serve. options: of the coordinator; followed: arguments of `follow`; how: options of the replica."""
    if not engine.rank_group.groups.is_leader:
        engine.follow(*followed)
        return
    address, ended, failures = folder / "address", folder / "ended", []

    def speak(one, serving):
        try:
            if rank == 0:
                with InferenceClient(one.address, timeout_s=60.0) as client:
                    wait_for(lambda: len(client.stats()["replicas"]) == count, 120)
                    talk(one, client)
            else:
                wait_for(ended.exists, 900)
        except BaseException as error:
            failures.append(error)
        finally:
            ended.touch()
            serving.stop()

    with contextlib.ExitStack() as stack:
        one = stack.enter_context(coordinator(**(options or {}))) if rank == 0 else None
        if one is not None:
            (folder / "new").write_text(one.address)
            (folder / "new").rename(address)
        wait_for(address.exists, 300)
        serving = stack.enter_context(Replica(engine, address.read_text(), **how))
        thread = threading.Thread(target=speak, args=(one, serving))
        thread.start()
        serving.run()
        thread.join()
    engine.dismiss()
    if failures:
        raise failures[0]


def wait_for(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.01)


class RawPeer:
    """A connection to a coordinator, whose `socket` sends whatever it is given."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def __enter__(self):
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()
        self.context.term()


class Child:
    """A replica in a separate process."""

    def __init__(self, address: str, kind: str, name: str, **settings) -> None:
        arguments = [f"{key}={value}" for key, value in settings.items()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), address, kind, name, *arguments], env=environment, stderr=subprocess.PIPE
        )

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def __enter__(self):
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def end(self) -> str:
        """Kill it -> what it wrote to stderr."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        return self.process.communicate(timeout=60)[1].decode()
