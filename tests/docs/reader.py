"""A reader of a page, who pastes its blocks: Python into one namespace, commands into a shell.

What differs from the print: "smollm2" is a small model of that name (`small_model.py`), and the ports that pages use
are free ones. The folder has the files that command lines name (`fill`).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import small_model
import yaml
from gloo_ranks import fork_server
from pages import ROOT, Block, blocks_of
from ports import free_port

from megatron_infer.cli.main import main
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import save_checkpoint
from megatron_infer.models.loading.sources import open_source
from megatron_infer.testing.tiny import tiny_hybrid

PORTS = ("8000", "5757", "9400")
READY = {"serve": r"serving .* at ", "coordinator": r"tcp://", "replica": r"joined|serving|registered|connected"}
"""Commands that run on, and what they print when they are ready."""
TYPED = {"chat": "Hello.\n/quit\n"}
"""What is typed into a command that asks."""
LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


def fill(folder: Path, package: Path, page: str) -> None:
    """The files that a page's command lines name, in a reader's folder. package: of the small model."""
    words = {word for block in blocks_of(page) for command in block.commands for word in shlex.split(command)}
    (folder / ".curlrc").write_text("silent\nshow-error\nfail-with-body\n")
    for name in ("examples", "tools", "docs"):
        (folder / name).symlink_to(ROOT / name)
    for name, make in FILES.items():
        if name in words:
            make(folder / name, package)


def _prompts(path: Path, package: Path) -> None:
    path.write_text('{"prompt": "The capital of France is"}\n{"prompt": [1, 2, 3]}\n')


def _schema(path: Path, package: Path) -> None:
    path.write_text(json.dumps({"type": "object", "properties": {"large": {"type": "boolean"}}, "required": ["large"]}))


def _llama_8b(path: Path, package: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA_8B))


def _hybrid(path: Path, package: Path) -> None:
    tokenizer = open_source("smollm2").tokenizer()
    save_checkpoint(
        tiny_hybrid("M*-M", vocab_size=small_model.VOCAB, max_sequence_length=512), path, tokenizer=tokenizer
    )


def _weights(path: Path, package: Path) -> None:
    (path / "step_40").mkdir(parents=True)
    tensors = {name: tensor.contiguous() for name, tensor in open_source("smollm2").tensors()}
    safetensors.torch.save_file(tensors, path / "step_40" / "model.safetensors")


def _checkpoint(path: Path, package: Path) -> None:
    source = open_source("smollm2")
    save_checkpoint(build_model(source), path, tokenizer=source.tokenizer())


FILES: dict[str, Callable[[Path, Path], None]] = {
    "MODEL": lambda path, package: path.symlink_to(package / small_model.PACKAGE),
    "LLAMA_8B": _llama_8b,
    "PATH_TO_HYBRID": _hybrid,
    "CHECKPOINT": _checkpoint,
    "weights": _weights,
    "DIR": _weights,
    "prompts.jsonl": _prompts,
    "P.jsonl": _prompts,
    "city.json": _schema,
    "person.json": _schema,
}


INSTALLS = "mcore.install()"
"""Replaces names of megatron-core in the process: a block with that runs in a process of its own."""


class Reader:
    """Runs blocks in a folder; `close` ends what it has started, but for the server."""

    def __init__(self, folder: Path, package: Path, server: Server) -> None:
        self.folder, self._server = folder, server
        self.names: dict[str, Any] = {"__name__": "__main__"}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self._environment = os.environ | {
            "PATH": path,
            "PYTHONPATH": os.pathsep.join([str(package), str(ROOT)]),
            "MEGATRON_INFER_PORT": server.ports["8000"],
            "PET_STANDALONE": "1",  # torchrun takes a free port
            "CURL_HOME": str(folder),
            "KEY": "none",
        }
        self._started: list[Started] = []

    def run(self, block: Block, *, takes: Callable[[str], bool]) -> None:
        """takes: which commands of it."""
        if block.language == "python" and INSTALLS in block.text:
            process = fork_server().Process(target=exec, args=(block.text, {"__name__": "__main__"}))
            process.start()
            process.join(300)
            assert process.exitcode == 0, f"{block.page}:{block.line}"
        elif block.language == "python" and block.launcher is None:
            exec(compile(self._with_ports(block.compiled_text), block.page, "exec"), self.names)
        elif block.language == "python":
            (self.folder / block.launcher[-1]).write_text(block.text)
            self._shell(shlex.join(block.launcher))
        elif block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict)
        elif block.language == "json":
            json.loads(block.text)
        for command in block.commands:
            if takes(command):
                self._run_command(self._with_ports(command), block)

    def close(self) -> None:
        for one in reversed(self._started):
            one.end()

    def _with_ports(self, text: str) -> str:
        return re.sub("|".join(PORTS), lambda match: self._server.ports[match[0]], text)

    def _run_command(self, command: str, block: Block) -> None:
        words = shlex.split(command)
        if words[0] == "torchrun" and {"serve", "tinker"} & set(words):
            self._server.start(command, self.folder, self._environment)
        elif words[0] != "megatron-infer":
            self._shell(command)
        elif words[1] in ("serve", "tinker"):
            self._server.start(command, self.folder, self._environment)
        elif words[1] in READY:
            self._started.append(Started(command, self.folder, self._environment))
            self._started[-1].wait(READY[words[1]])
        else:
            printed = io.StringIO()
            typed = mock.patch("sys.stdin", io.StringIO(TYPED.get(words[1], "")))
            with typed, contextlib.redirect_stdout(printed):
                code = main(words[1:])
            assert code == 0, f"{block.page}:{block.line}: {command}: exit code {code}"
            if block.language == "console":
                lines = {_spaced(line) for line in printed.getvalue().splitlines()}
                shown = [line for line in block.text.splitlines() if not line.startswith("$ ")]
                missing = [line for line in shown if _spaced(line) not in lines]
                assert not missing, f"{block.page}:{block.line}: not printed: {missing}\n{printed.getvalue()}"

    def _shell(self, command: str) -> None:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout[-4000:]}"


class Started:
    """A command that runs on."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str]) -> None:
        self._command, self._text = command, ""
        self._process = subprocess.Popen(
            ["bash", "-c", "exec " + command],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._text += line

    def wait(self, pattern: str, timeout_s: float = 150.0) -> None:
        until = time.monotonic() + timeout_s
        while not re.search(pattern, self._text):
            assert self._process.poll() is None, f"{self._command}: ended\n{self._text}"
            assert time.monotonic() < until, f"{self._command}: not ready\n{self._text}"
            time.sleep(0.02)

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._reading.join(10)
            self._process.stdout.close()


class Server:
    """The server that runs now: pages that print the same command share it."""

    def __init__(self) -> None:
        self.ports = {port: str(free_port()) for port in PORTS}
        """Port that pages print -> port in its place."""
        self._command, self._started = "", None

    def start(self, command: str, folder: Path, environment: dict[str, str]) -> None:
        if command == self._command:
            return
        self.close()
        self._command, self._started = command, Started(command, folder, environment)
        self._started.wait(READY["serve"])
        engines = map(int, re.findall(r"--(?:dp|prefill|decode) (\d+)", command))
        self._started.wait(r"(?s)" + r"replica\d+ joined.*" * sum(engines))  # one of them is enough to serve

    def close(self) -> None:
        if self._started is not None:
            self._started.end()
        self._command, self._started = "", None


def _spaced(line: str) -> str:
    return " ".join(line.split())
