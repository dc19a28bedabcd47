"""Who may connect to a coordinator, and what those who may not can cost it: the attacks of docs/security.md."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from coordinator_case import cluster, replica, wait_for
from echo import EchoEngine, echo_tokens

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator import access, connection, protocol
from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.coordinator.coordinator import Coordinator, CoordinatorOptions
from megatron_infer.engine.lifecycle_commands import COMMANDS, Group
from megatron_infer.errors import ConfigError, ModelError
from megatron_infer.models.loading.hf_weights import SafetensorsReader
from megatron_infer.rl.weight_receiver import WeightReceiver

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
KEY = b"sixteen bytes or more"


def tokens_of(output):
    return output.outputs[0].token_ids


@contextlib.contextmanager
def coordinator_command(home, *options, bind="tcp://127.0.0.1:0"):
    """`megatron-infer coordinator` of the user whose home is `home` -> (process, address, its line about the key)."""
    command = [sys.executable, "-m", "megatron_infer", "coordinator", "--bind", bind, *options]
    environment = os.environ | {"HOME": str(home)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        yield process, process.stdout.readline().split()[-1], process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


# ---------------------------------------------------------------------- keys


@pytest.mark.security
def test_coordinator_without_a_key_makes_one_that_only_its_user_finds(home, tmp_path, monkeypatch):
    with coordinator_command(home) as (_, address, told):
        path = home / ".megatron_infer" / "coordinator.key"
        assert told.endswith(str(path))
        assert [one.stat().st_mode & 0o777 for one in (path, path.parent)] == [0o600, 0o700]
        with replica(address), InferenceClient(address) as client:
            assert tokens_of(client.generate([[1, 2]], GREEDY)[0]) == echo_tokens([1, 2], 8)
            monkeypatch.setenv("HOME", str(tmp_path / "of another user"))
            with InferenceClient(address) as stranger, pytest.raises(protocol.AccessRefused, match="asks for a key"):
                stranger.generate([[1]], GREEDY)
            with replica(address, name="intruder") as intruder:
                intruder.thread.join(60)
                assert isinstance(intruder.failure, protocol.AccessRefused)
            assert [one["name"] for one in client.stats()["replicas"]] == ["r"]


@pytest.mark.security
def test_key_file_that_others_can_read_is_not_used(home):
    path = home / ".megatron_infer" / "coordinator.key"
    path.parent.mkdir()
    path.write_bytes(KEY)
    path.chmod(0o644)
    for make in (lambda: Coordinator("tcp://127.0.0.1:0"), lambda: InferenceClient("tcp://127.0.0.1:9")):
        with pytest.raises(ConfigError, match=r"others can read or write the key file .*\(-rw-r--r--\)"):
            make()


def test_key_that_cannot_be_made_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere" / "at all"))
    with pytest.raises(ConfigError, match=r"cannot make a key for tcp://.*give one \(--key-file, key=\)"):
        Coordinator("tcp://127.0.0.1:0")


@pytest.mark.security
@pytest.mark.parametrize(("mode", "needs_key"), [(0o700, False), (0o755, True), (0o770, True)])
def test_socket_in_a_folder_of_the_user_alone_needs_no_key_and_any_other_does(home, mode, needs_key):
    folder = home / "s"
    folder.mkdir()
    folder.chmod(mode)
    with Coordinator(f"ipc://{folder}/c") as one:
        assert (one.key is not None) == needs_key


def test_users_first_two_coordinators_at_once_agree_on_one_key(home):
    found = []

    def start():
        found.append(access.coordinator_key("tcp://x:1", None))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1
    assert os.listdir(home / ".megatron_infer") == ["coordinator.key"]


class Delay:
    """A TCP relay to `address` that passes on what comes after delay_s seconds, in both directions."""

    def __init__(self, address, delay_s):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target, self._delay_s = (host, int(port)), delay_s
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, far = self._listening.accept()[0], socket.create_connection(self._target)
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, source, target):
        waiting = queue.SimpleQueue()
        threading.Thread(target=self._pass_on, args=(waiting, target), daemon=True).start()
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                waiting.put((time.monotonic() + self._delay_s, data))
        waiting.put((0.0, None))

    def _pass_on(self, waiting, target):
        with contextlib.suppress(OSError):
            while (entry := waiting.get())[1] is not None:
                time.sleep(max(0.0, entry[0] - time.monotonic()))
                target.sendall(entry[1])
        target.close()

    def close(self):
        self._listening.close()


@pytest.mark.security
def test_right_key_is_taken_however_slow_the_handshake_is(monkeypatch):
    """Hellos are repeated before the first welcome is back."""
    monkeypatch.setattr(connection, "HELLO_INTERVAL_S", 0.05)
    engine = EchoEngine(step_s=0.005)
    with cluster(0, key=KEY, timeout_s=20.0) as (one, _, near):
        slow = Delay(one.address, 0.15)
        with contextlib.closing(slow), replica(slow.address, engine, key=KEY) as served:
            with InferenceClient(slow.address, key=KEY) as client:
                outputs = client.generate([[i] for i in range(20)], GREEDY)
                assert [tokens_of(output) for output in outputs] == [echo_tokens([i], 8) for i in range(20)]
            stats = near.stats()
            assert (stats["fenced"], stats["replicas_lost"], stats["resent"], served.failure) == (0, 0, 0, None)
            assert one.core._num_entered == 3, "of each peer one hello counted"


# ---------------------------------------------------------------------- memory before the key


def resident_mib(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"%s" + bytes(32)
"""ZMTP 3.1; the mechanism has 20 bytes."""


def greet(address, mechanism):
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    peer = socket.create_connection((host, int(port)), timeout=5)
    peer.sendall(GREETING % mechanism.ljust(20, b"\0"))
    return peer


def frame(data, *, flags):
    return struct.pack(">BQ", flags | 2, len(data)) + data


def send_until_refused(peer, data, limit):
    """Bytes that were taken until the connection was closed or, `limit` bytes on, was not."""
    sent = 0
    with contextlib.suppress(OSError):
        while sent < limit:
            peer.sendall(data)
            sent += len(data)
    return sent


READY = frame(b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER", flags=4)
ATTACKS = {
    "one message without end": (b"NULL", READY, frame(bytes(1 << 15), flags=1)),
    "a handshake command without end": (b"CURVE", struct.pack(">BQ", 6, 1 << 40), bytes(1 << 15)),
    "handshake commands without end": (b"CURVE", b"", frame(bytes(1 << 15), flags=4)),
}


@pytest.mark.security
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads memory in /proc")
@pytest.mark.parametrize("attack", ATTACKS)
def test_who_has_no_key_cannot_make_the_coordinator_hold_memory(home, attack):
    mechanism, first, rest = ATTACKS[attack]
    with coordinator_command(home) as (process, address, _), InferenceClient(address) as client:
        assert client.stats()["waiting"] == 0
        before, peers = resident_mib(process.pid), []
        for _ in range(20):
            peer = greet(address, mechanism)
            peers.append(peer)
            peer.settimeout(0.2)
            with contextlib.suppress(OSError):
                peer.sendall(first)
            assert send_until_refused(peer, rest, 32 << 20) < 8 << 20, "the connection was not closed"
        assert resident_mib(process.pid) - before < 16
        assert client.stats()["waiting"] == 0
        for peer in peers:
            peer.close()


@pytest.mark.security
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads memory in /proc")
def test_unfinished_handshakes_hold_little_each(home):
    """The largest command that libzmq waits for, begun and not finished."""
    with coordinator_command(home) as (process, address, _), InferenceClient(address) as client:
        assert client.stats()["waiting"] == 0
        before = resident_mib(process.pid)
        peers = [greet(address, b"CURVE") for _ in range(200)]
        for peer in peers:
            peer.sendall(struct.pack(">BQ", 6, protocol.MAX_FRAME) + bytes(protocol.MAX_FRAME - 1))
        time.sleep(0.5)
        assert resident_mib(process.pid) - before < 200 * 3 * protocol.MAX_FRAME / 2**20
        assert client.stats()["clients"] == 1
        for peer in peers:
            peer.close()


def test_refused_connections_are_logged_together(caplog):
    with cluster(1, key=KEY) as (one, _, client):
        stranger = InferenceClient(one.address, key=b"another key, also long")
        with stranger as other, pytest.raises(protocol.AccessRefused):
            other.generate([[1]], GREEDY)
        wait_for(lambda: "connections did not prove the key" in caplog.text)
        assert caplog.text.count("did not prove") == 1 and tokens_of(client.generate([[1]], GREEDY)[0])


@pytest.mark.security
def test_old_and_foreign_protocols_are_not_served(home):
    with Coordinator("tcp://127.0.0.1:0", CoordinatorOptions(key=KEY)) as one:
        thread = threading.Thread(target=one.run)
        thread.start()
        host, port = "127.0.0.1", int(one.address.rpartition(":")[2])
        older = (b"\x01\x00" + bytes(64), b"\xff" + bytes(8) + b"\x7f\x01\x05")  # ZMTP 1.0 and 2.0
        for first in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", *older):
            with socket.create_connection((host, port), timeout=3) as peer:
                peer.sendall(first + bytes(256))
                with contextlib.suppress(ConnectionResetError):
                    while peer.recv(4096):
                        pass  # until it is closed
        one.stop()
        thread.join()
        assert one.core._num_entered == 0


# ---------------------------------------------------------------------- commands and weights


@pytest.mark.security
def test_replica_takes_commands_only_where_it_was_started_with_control():
    engine = EchoEngine()
    with cluster(0) as (one, _, client), replica(one.address, engine, name="r0", control=False):
        wait_for(lambda: client.stats()["replicas"])
        for command, row in COMMANDS.items():
            is_for_adapter = row.group is Group.ADAPTERS
            args = {"sources": []} if command == "restore_weights" else {"name": "a"} if is_for_adapter else {}
            answer = client.control(command, check=False, **args)["r0"]
            option = "--lora-root" if is_for_adapter else "--control"
            assert (answer.ok, answer.kind) == (False, "AccessRefused") and f"start it with {option}" in answer.message
        assert engine.state == "running" and tokens_of(client.generate([[1]], GREEDY)[0]) == echo_tokens([1], 8)


@pytest.mark.security
@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/etc", "leads out"), ("..", "leads out"), ("link", "leads out"), ("mixed", "holds a link"),
        ("run/latest", "several checkpoints"), ("model.bin", "another kind"), ("a\0b", "no path"), ("no", "nothing at"),
    ],
)  # fmt: skip
def test_engine_process_reads_no_weights_outside_its_root_whoever_asks(tmp_path, path, named):
    """A client of the coordinator asks: no HTTP server is between."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "mixed", root / "run" / "latest", outside):
        folder.mkdir(parents=True)
    for file in (outside / "x.safetensors", root / "run" / "latest" / "x.safetensors", root / "model.bin"):
        file.touch()
    (root / "run" / "latest" / "latest_checkpointed_iteration.txt").touch()
    (root / "link").symlink_to(outside)
    (root / "mixed" / "x.safetensors").symlink_to(outside / "x.safetensors")
    for held, expected in ((root, named), (None, "start it with --weights-root")):
        commands = WeightReceiver(None, weights_root=held).commands()
        with cluster(0) as (one, _, client), replica(one.address, name="r0", commands=commands):
            wait_for(lambda client=client: client.stats()["replicas"])
            answer = client.control("load_weights", path=path, check=False)["r0"]
            assert (answer.kind, expected in answer.message) == ("WeightsPathRefused", True), answer
            again = client.control("restore_weights", sources=[[path, ""]], version=1, check=False)["r0"]
            assert (again.kind, again.message) == (answer.kind, answer.message)


@pytest.mark.security
def test_index_of_a_directory_names_no_file_elsewhere(tmp_path):
    (tmp_path / "m").mkdir()
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="no file of this directory"):
        SafetensorsReader(tmp_path / "m")
