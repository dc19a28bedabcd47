"""`megatron-infer tinker`, or a rank of it, is killed while four clients train and sample: no acknowledged step is lost
or made twice, and no sample is of another client's adapter.

FAULT_MINUTES=10 pytest -s -n0 -m slow tests/tinker/test_tinker_kills.py
"""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from ports import free_port
from server_case import tokenizer
from test_command import processes
from test_tinker import ADAM, Api, output_of

from megatron_infer import RolloutSession, attach_lora, open_source
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.server.tinker.serve import live_model
from megatron_infer.server.tinker.training import Datum

MINUTES = float(os.environ.get("FAULT_MINUTES", "1"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + 90 * MINUTES)]

KILLS_SHARE = 0.7
"""Of the time; nobody is killed in the rest, in which memory is watched."""
CLIENTS, RANK = 4, 4
WEIGHTS = {"weights": np.ones(9, "<f4")}
STEP = {"learning_rate": 1e-3}
LIMIT_S, START_S = 120.0, 600.0
"""Most seconds of a call, and of a start of the server on a machine that is busy."""
COMPARED = 200
"""Steps that are compared with a plain loop, which rounds in another order: in hundreds of steps of AdamW that adds up.
All steps are compared with those of clients that nobody kills, bit by bit."""


class Server:
    """The command, on one port however often it is started; with options of a layout a job of torchrun."""

    def __init__(self, folder: Path, layout: tuple[str, ...]) -> None:
        config = transformers.LlamaConfig(
            vocab_size=258,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=None,
        )
        torch.manual_seed(1)
        self.model_dir, port = folder / "model", free_port()
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(self.model_dir)
        tokenizer().backend.save(str(self.model_dir / "tokenizer.json"))
        self.url = f"http://127.0.0.1:{port}"
        flags = {
            "--port": port,
            "--served-model-name": "tiny",
            "--state-dir": folder / "state",
            "--lora-rank": RANK,
            "--dtype": "float32",
            "--threads": 1,
            "--buffer-size-gb": 0.05,
        }
        self.is_job = bool(layout)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if layout else []
        command = [sys.executable, *launcher, "-m", "megatron_infer", "tinker", str(self.model_dir), *layout]
        self._command = [*command, *(str(part) for pair in flags.items() for part in pair)]
        self._process: subprocess.Popen[str] | None = None
        self._env = os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, env=self._env, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        lines = []
        for line in self._process.stderr:
            lines.append(line)
            if self.url in line:
                break
        else:
            raise AssertionError("".join(lines))
        threading.Thread(target=self._process.stderr.read, daemon=True).start()

    @property
    def _ranks(self) -> list[int]:
        """The ids of the processes that hold the model."""
        return processes(self._process.pid, b"tinker") if self.is_job else [self._process.pid]

    def kill_one(self, rng: random.Random) -> None:
        """SIGKILL to one of the ranks; the others end by themselves."""
        os.kill(rng.choice(self._ranks), signal.SIGKILL)
        self._process.wait(LIMIT_S)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def resident_mib(self) -> float:
        texts = [Path(f"/proc/{id}/status").read_text() for id in self._ranks]
        return sum(int(re.search(r"VmRSS:\s+(\d+)", text)[1]) for text in texts) / 1024


class Interrupted(Exception):
    """The server has ended before the call did."""


class Calls:
    """Posts to a server that may end at any moment."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=LIMIT_S)

    def post(self, path: str, **content: Any) -> httpx.Response:
        try:
            reply = self._http.post(path, **content)
        except httpx.TransportError as error:
            raise Interrupted(repr(error)) from None
        if reply.status_code == 410 or reply.status_code >= 500:  # a future of the last server, or what the SDK repeats
            raise Interrupted(reply.text)
        return reply


class Client(threading.Thread):
    """Trains and samples an adapter by the protocol alone; what was interrupted is sent again with the same numbers."""

    def __init__(self, number: int, url: str) -> None:
        super().__init__(name=f"client {number}", daemon=True)
        self.number, self.ending = number, threading.Event()
        self.api = Api(Calls(url))
        self.id = self.api.train(rank=RANK, seed=number)
        self.seq, self.version = 1, 0
        self.losses: list[float | None] = []
        """Of each step; None where the reply was lost with the server."""
        self.norms: list[float] = []
        self.saved: dict[str, int] = {}
        self.sampled: tuple[list[int], np.ndarray] = [], np.empty(0)
        self.num_samples = self.num_interrupted = 0
        self.problem = ""

    def run(self) -> None:
        try:
            while not self.ending.is_set():
                self.train()
                if self.version % 3 == 0:
                    self.sample()
                if self.version % 5 == 0:
                    self.save()
        except BaseException as error:
            self.problem = f"{self.name} at step {self.version}: {error!r}"
            raise

    def again(self, work: Callable[[int], Any], *, numbers: int) -> Any:
        """What `work` gives with the next of these numbers, once the server lives for so long."""
        seq, deadline = self.seq, time.monotonic() + START_S
        self.seq += numbers
        while True:
            try:
                return work(seq)
            except Interrupted as error:
                assert time.monotonic() < deadline, error
                self.num_interrupted += 1
                time.sleep(0.2)

    def train(self) -> None:
        loss = None

        def step(seq: int) -> Any:
            nonlocal loss
            sent = self.api.send_batch(self.id, seq, "cross_entropy", batch(self.number, self.version), given=WEIGHTS)
            result = self.api.result(sent.json())
            if isinstance(result, bytes):
                loss, _ = output_of(result)
            else:
                assert "computed before" in result["error"], "the step was made, its replies were lost"
            return self.api.result(self.api.step(self.id, seq + 1, **STEP))

        reply = self.again(step, numbers=2)
        self.version += 1
        assert reply["metrics"]["version"] == self.version, reply
        self.losses.append(loss)
        self.norms.append(reply["metrics"]["grad_norm"])

    def scores(self, seq: int, tokens: list[int]) -> np.ndarray:
        weights = {"weights": np.ones(len(tokens) - 1, "<f4")}
        (scores,) = self.api.batch(self.id, seq, "cross_entropy", [tokens], given=weights, forward_only=True)[1]
        return scores

    def sample(self) -> None:
        prompt = batch(self.number, 0)[0][:4]

        def draw(seq: int) -> tuple[list[int], np.ndarray, np.ndarray]:
            sampler = self.api.sampler(self.id, seq)["sampling_session_id"]
            ((tokens, logprobs),) = self.api.sample(prompt, sampling_session_id=sampler)[0]
            return [*prompt, *tokens], logprobs, self.scores(seq + 1, [*prompt, *tokens])

        tokens, logprobs, scores = self.again(draw, numbers=2)
        np.testing.assert_allclose(logprobs, scores[3:], atol=1e-3, err_msg="not of this client's adapter")
        self.sampled = tokens, scores
        self.num_samples += 1

    def save(self) -> None:
        name = f"s{self.version}"

        def save(seq: int) -> Any:
            return self.api.result(
                self.api.call("save_weights", model_id=self.id, seq_id=seq, path=name, overwrite=True)
            )

        self.saved[self.again(save, numbers=1)["path"]] = self.version

    def load(self, path: str) -> None:
        def load(seq: int) -> Any:
            return self.api.result(
                self.api.call("load_weights", model_id=self.id, seq_id=seq, path=path, optimizer=True)
            )

        assert self.again(load, numbers=1)["path"] == path


def batch(number: int, step: int) -> list[list[int]]:
    """What a client trains with in a step."""
    rng = random.Random(100 * number + step % 7)
    return [[rng.randrange(256) for _ in range(10)] for _ in range(2)]


def undisturbed(model_dir: Path, number: int, steps: int) -> list[tuple[float, float]]:
    """(loss, norm of the gradient) of each of these steps in a plain loop."""
    model = build_model(open_source(str(model_dir)), dtype=torch.float32)
    adapter = attach_lora(model, rank=RANK, alpha=32, seed=number)
    session = RolloutSession(model, {"buffer_size_gb": 0.01, "max_requests": 4}, meter=None)
    optimizer = torch.optim.AdamW(
        adapter.parameters(), lr=STEP["learning_rate"], betas=(0.9, 0.95), eps=ADAM["eps"], weight_decay=0.01
    )
    found = []
    for step in range(steps):
        loss = -sum(scores.sum() for scores in session.score(batch(number, step), grad=True))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(adapter.parameters(), ADAM["grad_clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    return found


def not_killed(model_dir: Path, number: int, steps: int) -> list[tuple[float, float]]:
    """(loss, norm of the gradient) of each of these steps of a client in this process."""
    torch.set_num_threads(1)  # as the server
    live = live_model(open_source(str(model_dir)), None, lora_rank=RANK, config={"buffer_size_gb": 0.05})
    client, found = live.create("client", rank=RANK, seed=number), []
    for step in range(steps):
        data = [Datum(ids[:-1], ids[1:], WEIGHTS) for ids in batch(number, step)]
        loss, _ = client.forward_backward(data, "cross_entropy", {}, backward=True)
        client.take_batch()
        found.append((loss, client.optim_step(**{**ADAM, **STEP})["grad_norm"]))
    return found


@pytest.fixture(params=[(), ("--tp", "2")], ids=lambda layout: " ".join(layout) or "one process")
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(tmp_path, request.param)
    server.start()
    yield server
    server.kill()


def test_kills_lose_no_acknowledged_step_and_mix_no_adapters(server: Server) -> None:
    rng = random.Random(int(os.environ.get("FAULT_SEED", "0")))
    clients = [Client(number, server.url) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    began, kills = time.monotonic(), 0
    while kills < 2 or time.monotonic() - began < KILLS_SHARE * 60 * MINUTES:
        time.sleep(rng.uniform(0.2, 5.0))
        server.kill_one(rng)
        kills += 1
        server.start()
        assert not any(client.problem for client in clients), [client.problem for client in clients]
    resident, until = [], time.monotonic() + (1 - KILLS_SHARE) * 60 * MINUTES
    while time.monotonic() < until:
        time.sleep(0.5)
        resident.append(server.resident_mib)
    for client in clients:
        client.ending.set()
    for client in clients:
        client.join(LIMIT_S)
        assert not client.is_alive() and not client.problem, client.problem
    a_third = len(resident) // 3
    early, late = (statistics.median(part) for part in (resident[a_third : 2 * a_third], resident[2 * a_third :]))
    steps = [client.version for client in clients]
    print(
        f"\n{kills} kills in {MINUTES:g} minutes; steps {steps}; samples {[one.num_samples for one in clients]}; "
        f"interrupted calls {[one.num_interrupted for one in clients]}; "
        f"resident {resident[0]:.0f} MiB after the last start, {early:.0f} MiB a third later, {late:.0f} MiB at the end"
    )
    assert min(steps) > 10 and min(one.num_samples for one in clients) > 2
    assert late < early + 32, resident
    for client, other in zip(clients, clients[1:] + clients[:1], strict=True):
        tokens, scores = client.sampled
        others = other.again(lambda seq, tokens=tokens, other=other: other.scores(seq, tokens), numbers=1)
        assert np.abs(others - scores).max() > 0.1, "samples of these adapters cannot be told apart"
        for path, version in list(client.saved.items())[-3:]:
            client.version = version
            client.load(path)
            client.train()  # which checks the version
        alone = [] if server.is_job else not_killed(server.model_dir, client.number, steps[client.number])
        for step, (want, norm) in enumerate(alone):  # sums over ranks round in another way
            loss, place = client.losses[step], f"{client.name}, step {step} of a client that is not killed"
            assert loss in (None, want) and client.norms[step] == norm, place
        expected = undisturbed(server.model_dir, client.number, min(COMPARED, steps[client.number]))
        for step, (want, norm) in enumerate(expected):
            loss, place = client.losses[step], f"{client.name}, step {step}"
            assert loss is None or loss == pytest.approx(want, rel=1e-2), place
            assert client.norms[step] == pytest.approx(norm, rel=0.2), f"{place}: gradients were lost or added twice"
