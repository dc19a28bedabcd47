"""Replicas on Ray answer as one engine does, whatever becomes of their actors. Ray runs here, on this machine alone."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from echo import echo_tokens
from ray_case import save_model, tokens_of

from megatron_infer.config.coordinator_options import CoordinatorOptions
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator.protocol import ControlFailed
from megatron_infer.errors import ConfigError
from megatron_infer.server.ray_replicas import RayMissing, RayReplicas, ReplicasLost, serve_application

PROMPTS = [[3 + i, 5, 7 * i + 1, 11] * (3 + i) for i in range(6)]
CONFIG = {"buffer_size_gb": 0.01, "enable_prefix_caching": True}
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -r requirements/ray.txt")
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets lie below: a longer path would not fit
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=folder,
    )
    yield ray
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def one_engine(model_dir, params):
    from megatron_infer.engine.llm import LLM

    return tokens_of(LLM(model_dir, config=CONFIG, dtype="float32").generate(PROMPTS, params))


def slow_echo():
    """Makes engines of 50 ms a step. A local function, as it travels by value: actors cannot import this file."""
    support = str(Path(__file__).parents[1] / "support")

    def make():
        import sys

        sys.path.append(support)
        from echo import EchoEngine

        return EchoEngine(step_s=0.05)

    return make


@pytest.mark.slow
def test_two_replicas_give_the_tokens_of_one_engine_and_obey_together(ray, model_dir):
    expected = one_engine(model_dir, GREEDY)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)

    async def streamed(replicas):
        news = [output async for output in replicas.stream(PROMPTS[0], GREEDY)]
        assert len(news) > 1
        return news[-1]

    with RayReplicas(model_dir, 2, config=CONFIG, model_options={"dtype": "float32"}) as replicas:
        assert tokens_of(replicas.generate(PROMPTS, GREEDY)) == expected
        assert asyncio.run(streamed(replicas)).outputs[0].token_ids == expected[0]
        seats = replicas.stats()["replicas"]
        assert sorted(seat["name"] for seat in seats) == ["ray-0", "ray-1"]
        replicas.pause(timeout_s=60)
        assert until(lambda: {seat["state"] for seat in replicas.stats()["replicas"]} == {"paused"})
        replicas.unpause(timeout_s=60)
        assert all(answer.ok for answer in replicas.suspend(timeout_s=60).values())
        replicas.resume(timeout_s=60)
        replicas.set_weight_version(7, timeout_s=60)
        assert until(lambda: {seat["weight_version"] for seat in replicas.stats()["replicas"]} == {7})
        assert tokens_of(replicas.generate(PROMPTS, GREEDY)) == expected
        with pytest.raises(ControlFailed, match=r"ray-0.*ray-1|ray-1.*ray-0"):
            replicas.set_weight_version(-1, timeout_s=60)


@pytest.mark.slow
def test_requests_of_a_killed_actor_go_on_elsewhere_and_it_joins_again(ray, model_dir):
    params = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
    expected = one_engine(model_dir, params)

    def make():
        import time

        from megatron_infer.engine.llm import LLM

        engine = LLM(model_dir, config={"buffer_size_gb": 0.01, "enable_prefix_caching": True}, dtype="float32").engine
        step = engine.step
        engine.step = lambda: (time.sleep(0.03), step())[1]
        return engine

    answers = []
    with RayReplicas(make, 2, coordinator=CoordinatorOptions(policy="round_robin")) as replicas:
        caller = threading.Thread(target=lambda: answers.append(replicas.generate(PROMPTS, params)))
        caller.start()
        assert until(lambda: [seat["running"] for seat in replicas.stats()["replicas"]] == [3, 3])
        time.sleep(1.0)  # a third of the way
        ray.kill(replicas.actors[0], no_restart=False)
        caller.join(120)
        stats = replicas.stats()
        assert until(lambda: len(replicas.stats()["replicas"]) == 2, 120)
        again = replicas.generate(PROMPTS, params)
    assert tokens_of(answers[0]) == expected
    assert (stats["replicas_lost"], stats["resent"]) == (1, 3)
    assert tokens_of(again) == expected


def until(true, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def post(url, body):
    """Status and lines of the answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, [json.loads(line) for line in answer.read().splitlines()]
    except urllib.error.HTTPError as error:
        return error.code, [json.loads(error.read())]


@pytest.mark.slow
def test_serve_answers_over_http_and_to_handles_as_one_engine(ray, model_dir):
    pytest.importorskip("ray.serve", reason='Ray Serve is not installed: pip install "ray[serve]"')
    from ray import serve

    expected = one_engine(model_dir, GREEDY)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    params = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        application = serve_application(model_dir, 1, config=CONFIG, model_options={"dtype": "float32"})
        handle = serve.run(application, route_prefix="/generate")
        url = f"http://127.0.0.1:{port}/generate"
        status, answers = post(url, {"prompt": PROMPTS[0], "params": params})
        assert status == 200 and answers[0]["outputs"][0]["token_ids"] == expected[0]
        status, news = post(url, {"prompt": PROMPTS[1], "params": params, "stream": True})
        assert len(news) > 1 and sum((one["outputs"][0]["token_ids"] for one in news), []) == expected[1]
        assert news[-1]["outputs"][0]["finish_reason"] == "length"
        pending = [handle.generate.remote(prompt, params) for prompt in PROMPTS]
        assert [one.result(timeout_s=60)["outputs"][0]["token_ids"] for one in pending] == expected
        for body, words in (
            ({"promt": [1]}, "a request is"),
            ({"prompt": [1], "params": {"max_token": 3}}, "max_tokens"),
            ({"prompt": [10**6]}, "1,?000,?000|vocabulary"),
        ):
            status, answers = post(url, body)
            assert status == 400 and re.search(words, answers[0]["error"])
    finally:
        serve.shutdown()


@pytest.mark.slow
def test_when_no_actor_is_left_whoever_waits_is_told(ray):
    failures = []

    def ask():
        try:
            replicas.generate([[1, 2, 3]], SamplingParams(max_tokens=500))
        except ReplicasLost as error:
            failures.append(error)

    with RayReplicas(slow_echo(), 1, max_restarts=1) as replicas:
        outputs = replicas.generate([1, 2, 3], SamplingParams(max_tokens=5, temperature=0.0))
        assert tokens_of(outputs) == [echo_tokens([1, 2, 3], 5)]
        caller = threading.Thread(target=ask)
        caller.start()
        for _ in range(2):
            assert until(lambda: [seat["running"] for seat in replicas.stats()["replicas"]] == [1])
            ray.kill(replicas.actors[0], no_restart=False)
            time.sleep(0.5)
        caller.join(30)
        assert len(failures) == 1 and "ray-0" in str(failures[0])


@pytest.mark.slow
def test_an_actor_that_has_used_up_its_restarts_is_no_replica(ray):
    def served():
        return [one["name"] for one in replicas.stats()["replicas"]]

    with RayReplicas(slow_echo(), 2, max_restarts=0) as replicas:
        ray.kill(replicas.actors[1])
        assert until(lambda: len(replicas.actors) == 1 and served() == ["ray-0"])
        with pytest.raises(ConfigError, match="no replica 'ray-1'; there are ray-0"):
            replicas.remove("ray-1")
        with pytest.raises(ConfigError, match="no replica would be left"):
            replicas.remove("ray-0")
        assert replicas.add(2) == ["ray-2", "ray-3"]
        replicas.remove("ray-0")
        assert sorted(served()) == ["ray-2", "ray-3"]
        for actor in replicas.actors:
            assert replicas.generate([[1, 2]], SamplingParams(max_tokens=2))[0].error is None
            ray.kill(actor)
            assert until(lambda gone=actor: gone not in replicas.actors)
        for call in (lambda: replicas.add(1), replicas.stats):
            with pytest.raises(ReplicasLost, match="every replica has died; the last was ray-3"):
                call()


@pytest.mark.slow
def test_remove_ends_all_it_is_given_where_one_of_them_has_just_died(ray):
    with RayReplicas(slow_echo(), 3) as replicas:
        ray.kill(replicas.actors[1], no_restart=False)
        assert until(lambda: len(replicas.stats()["replicas"]) == 2)
        replicas.remove("ray-1", "ray-2", timeout_s=5)
        assert len(replicas.actors) == 1
        outputs = replicas.generate([1, 2], SamplingParams(max_tokens=5, temperature=0.0))
        assert tokens_of(outputs) == [echo_tokens([1, 2], 5)]


@pytest.mark.slow
def test_an_engine_that_cannot_be_made_is_reported_with_its_reason(ray):
    def broken():
        raise ValueError("no such weights")

    with pytest.raises(ReplicasLost, match="no such weights"):
        RayReplicas(broken, 1)


@pytest.mark.slow
def test_replicas_that_find_no_room_are_reported_with_what_they_ask_for(ray):
    with pytest.raises(ReplicasLost, match="unobtainium"):
        RayReplicas(slow_echo(), 1, resources={"CPU": 1, "unobtainium": 1}, start_timeout_s=2)


def test_wrong_arguments_are_refused_before_an_actor_starts():
    pytest.importorskip("ray", reason="Ray is not installed: pip install -r requirements/ray.txt")
    with pytest.raises(ConfigError, match="num_replicas is 0"):
        RayReplicas("smollm2", 0)
    with pytest.raises(ConfigError, match="a function makes its engine itself"):
        RayReplicas(slow_echo(), 1, config={"seed": 1})


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayMissing, match=r'need ray, .*pip install "megatron-infer\[ray\]"'):
        RayReplicas("smollm2", 2)
