"""The commands: a coordinator process with a key, its output, its end; missing packages are reported."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys

import pytest
from child_paths import python_path
from coordinator_case import replica
from echo import echo_tokens
from gloo_ranks import start_ranks

from megatron_infer.cli.main import main
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.coordinator.coordinator import Coordinator

KEY = b"a key of sixteen bytes"


def test_coordinator_command_serves_with_a_key_and_ends_on_sigterm(tmp_path):
    (tmp_path / "key").write_bytes(KEY + b"\n")
    command = [sys.executable, "-m", "megatron_infer", "coordinator", "--bind", "tcp://127.0.0.1:0"]
    options = ["--key-file", str(tmp_path / "key"), "--prefix-caching-coordinator-policy", "round_robin"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().split()[-1]
        with replica(address, key=KEY, name="echo"), InferenceClient(address, key=KEY) as client:
            output = client.generate([[1, 2]], SamplingParams(max_tokens=4, temperature=0.0))[0]
            assert output.outputs[0].token_ids == echo_tokens([1, 2], 4)
            assert client.stats()["policy"] == "round_robin"
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
    finally:
        process.kill()
        stderr = process.communicate()[1]
    assert "replica echo joined" in stderr and "Traceback" not in stderr


def test_the_coordinators_process_is_not_stopped_by_full_collections(tmp_path, monkeypatch):
    seen, before = [], gc.get_threshold()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(Coordinator, "run", lambda self: seen.append(gc.get_threshold()))
    try:
        assert main(["coordinator", "--bind", f"ipc://{tmp_path}/c"]) == 0
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
            signal.signal(number, handler)
    ((*_, oldest),) = seen
    assert oldest > 1_000_000 and gc.get_threshold() == before


def test_short_or_missing_key_file_is_misuse(tmp_path, capsys):
    (tmp_path / "short").write_bytes(b"short")
    for path, message in (
        (tmp_path / "short", "holds 5 bytes, a key has at least 16"),
        (tmp_path / "no", "No such file"),
    ):
        assert main(["coordinator", "--key-file", str(path)]) == 2
        assert message in capsys.readouterr().err


def import_without_the_extra(_: int) -> None:
    for name in list(sys.modules):  # torch and megatron-core stay: they know nothing of the extra
        if name.partition(".")[0] in ("megatron_infer", "zmq"):
            del sys.modules[name]
    real = importlib.util.find_spec
    sys.modules["zmq"] = None
    importlib.util.find_spec = lambda name, *rest: None if name == "zmq" else real(name, *rest)
    for part in ("config.inference", "coordinator.router", "engine.engine", "engine.llm", "engine.async_llm"):
        importlib.import_module(f"megatron_infer.{part}")
    with pytest.raises(ModuleNotFoundError, match=r"need zmq: pip install 'megatron-infer\[coordinator\]'"):
        importlib.import_module("megatron_infer.coordinator.client")


def test_root_of_weights_that_nothing_would_read_is_misuse(tmp_path, capsys):
    assert main(["replica", "no-model", "--weights-root", str(tmp_path)]) == 2
    assert "--weights-root without --control" in capsys.readouterr().err
    assert main(["replica", "no-model", "--control", "--weights-root", str(tmp_path / "no")]) == 2
    assert "which is no directory" in capsys.readouterr().err


def test_package_imports_without_the_extra_and_names_it_when_missing():
    start_ranks(import_without_the_extra, (), 1)


def test_coordinator_client_and_replica_need_no_torch_and_no_numpy():
    code = (
        "import sys\nfor root in ('torch', 'numpy', 'megatron'): sys.modules[root] = None\n"
        "import megatron_infer.coordinator.coordinator, megatron_infer.coordinator.client\n"
        "import megatron_infer.coordinator.replica\n"
        "import megatron_infer.cli.coordinator, echo\n"
    )
    environment = os.environ | {"PYTHONPATH": python_path()}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert run.returncode == 0, run.stderr
