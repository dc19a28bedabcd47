"""Two torchrun agents, as on two hosts, give the file that one process gives, and tell when the other host is gone.

Once both on this machine's loopback, once in two network namespaces with a wire between them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "generate.py"
CASE = Path(__file__).with_name("agent_case.py")
LIMIT_S = 200
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT_S)]

_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """Where an agent runs."""

    address: str
    prefix: tuple[str, ...] = ()
    interface: str = "lo"
    port: int = 29400


@pytest.fixture
def loopback():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return [Host("127.0.0.1", port=port)] * 2


@pytest.fixture
def namespaces():
    """Two hosts that see nothing but each other."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces take root and iproute2")
    number = f"{os.getpid()}-{next(_numbers)}"
    names, wires = [f"mi-{number}-{i}" for i in range(2)], [f"v{number}-{i}"[-15:] for i in range(2)]
    with contextlib.ExitStack() as stack:
        for name in names:
            if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
                pytest.skip("this machine lets nobody make network namespaces")
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
        ip("link", "add", wires[0], "netns", names[0], "type", "veth", "peer", "name", wires[1], "netns", names[1])
        hosts = []
        for i, (name, wire) in enumerate(zip(names, wires, strict=True)):
            address = f"10.77.0.{i + 1}"
            ip("-n", name, "addr", "add", f"{address}/24", "dev", wire)
            ip("-n", name, "link", "set", wire, "up")
            ip("-n", name, "link", "set", "lo", "up")
            hosts.append(Host(address, ("ip", "netns", "exec", name), wire))
        yield hosts


def ip(*words):
    subprocess.run(["ip", *words], check=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a tokenizer, prompts, and what one process answers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("agents")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path / "model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(path / "model" / "tokenizer.json"))
    prompts = ["w1 w2 w3", "w5 w8 w13 w21 w34", list(range(40)), "w9"]
    (path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    command = [sys.executable, str(EXAMPLE), *arguments(path, path / "one.jsonl", 24)]
    subprocess.run(command, check=True, timeout=LIMIT_S, env=environment("lo"))
    answers = [json.loads(line)["token_ids"] for line in (path / "one.jsonl").read_text().splitlines()]
    assert len({tuple(answer) for answer in answers}) == len(prompts)
    return path


def arguments(folder, output, max_tokens):
    return (
        f"--model {folder / 'model'} --dtype float32 --max-tokens {max_tokens} "
        f"--prompts-file {folder / 'prompts.jsonl'} --output {output}"
    ).split()


def environment(interface):
    root = str(EXAMPLE.parents[1])
    paths = [root, os.environ.get("PYTHONPATH", "")]
    return {
        **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")},
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface,
    }


@contextlib.contextmanager
def agents(hosts, log_folder, *script):
    """Start an agent on each host; whatever is left of them at the end is killed."""
    started, logs = [], []
    try:
        for rank, host in enumerate(hosts):
            logs.append(log_folder / f"agent{rank}.log")
            torchrun = (
                f"-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank {rank} --rdzv-backend c10d "
                f"--rdzv-id test --rdzv-endpoint {hosts[0].address}:{hosts[0].port} --local-addr {host.address} "
                f"--rdzv-conf is_host={int(rank == 0)}"  # otherwise told by the host's name, which is the same for both
            ).split()
            with open(logs[-1], "w") as log:
                started.append(
                    subprocess.Popen(
                        [*host.prefix, sys.executable, *torchrun, *map(str, script)],
                        stdout=log,
                        stderr=log,
                        env=environment(host.interface),
                    )
                )
        yield started, logs
    finally:
        for agent in started:
            kill_tree(agent.pid)
            agent.wait()


def kill_tree(pid):
    """The agent and its workers, at once, as when a host loses power."""
    with contextlib.suppress(psutil.NoSuchProcess):
        agent = psutil.Process(pid)
        for process in [*agent.children(recursive=True), agent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("where", ["loopback", "namespaces"])
def test_two_agents_write_the_file_of_one_process(where, folder, tmp_path, request):
    hosts, output = request.getfixturevalue(where), tmp_path / "two.jsonl"
    with agents(hosts, tmp_path, EXAMPLE, "--tp", 2, *arguments(folder, output, 24)) as (started, logs):
        codes = [agent.wait(LIMIT_S) for agent in started]
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    assert output.read_text() == (folder / "one.jsonl").read_text()


def until_both_draw(marker, logs):
    deadline = time.monotonic() + LIMIT_S
    while not all(Path(f"{marker}.{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline, "\n".join(log.read_text()[-3000:] for log in logs)
        time.sleep(0.1)


def test_when_an_agent_and_its_workers_die_the_other_ends_with_the_rank_named(loopback, folder, tmp_path):
    marker = tmp_path / "draws"
    script = (CASE, marker, 30, "--tp", 2, *arguments(folder, tmp_path / "two.jsonl", 4000))
    with agents(loopback, tmp_path, *script) as (started, logs):
        until_both_draw(marker, logs)
        kill_tree(started[1].pid)
        code = started[0].wait(60)
    assert code == 1
    assert "of the engine failed in" in logs[0].read_text()
    assert not (tmp_path / "two.jsonl").exists()


def test_when_the_wire_is_cut_both_hosts_end_with_the_rank_named_within_the_timeout(namespaces, folder, tmp_path):
    marker, timeout_s = tmp_path / "draws", 8
    script = (CASE, marker, timeout_s, "--tp", 2, *arguments(folder, tmp_path / "two.jsonl", 4000))
    with agents(namespaces, tmp_path, *script) as (_, logs):
        until_both_draw(marker, logs)
        ip("-n", namespaces[0].prefix[-1], "link", "set", namespaces[0].interface, "down")
        deadline = time.monotonic() + 3 * timeout_s
        while not all("of the engine failed in" in log.read_text() for log in logs):
            assert time.monotonic() < deadline, "\n".join(log.read_text()[-3000:] for log in logs)
            time.sleep(0.2)
    assert not (tmp_path / "two.jsonl").exists()
