"""Replicas on a Ray cluster of several nodes: placed by role, moved between nodes, emptied, brought back elsewhere.

The nodes are processes of this machine (`ray.cluster_utils`). `test_ray.py` has replicas on one node.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time

import pytest
from ray_case import save_model, tokens_of

from megatron_infer.config.coordinator_options import CoordinatorOptions
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.errors import ConfigError
from megatron_infer.server.ray_replicas import RayReplicas, ReplicasLost

PROMPTS = [[3 + i, 5, 7 * i + 1, 11] * (9 + i) for i in range(6)]
CONFIG = {"buffer_size_gb": 0.01, "enable_prefix_caching": True}
PARAMS = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
ALL_MOVE = CoordinatorOptions(policy="round_robin", role_min_prompt_tokens=8)


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs for replicas, and three nodes with one each."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -r requirements/ray.txt")
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    settings = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "temp_dir": folder, **settings})
    for _ in range(3):
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / name, seed) for seed, name in enumerate(("first", "second"))]


def one_engine(model_dir):
    from megatron_infer.engine.llm import LLM

    return tokens_of(LLM(model_dir, config=CONFIG, dtype="float32").generate(PROMPTS, PARAMS))


def slow_engine(model_dir, step_s=0.03):
    """Makes engines that sleep in each step. A local function travels by value: actors cannot import this file."""

    def make():
        import time

        from megatron_infer.engine.llm import LLM

        engine = LLM(model_dir, config={"buffer_size_gb": 0.01, "enable_prefix_caching": True}, dtype="float32").engine
        step = engine.step
        engine.step = lambda: (time.sleep(step_s), step())[1]
        return engine

    return make


def until(true, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it was not so in time"
        time.sleep(0.05)


def nodes_of_all():
    """The nodes that have a place for a replica."""
    from ray.util import placement_group_table

    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    return {node for group in groups for node in group["bundles_to_node_id"].values()}


def running(replicas):
    return {one["name"]: one["running"] for one in replicas.stats()["replicas"]}


@pytest.mark.slow
def test_roles_lie_on_nodes_of_their_own_and_requests_move_between_them_also_after_new_weights(cluster, models):
    options = {"config": CONFIG, "model_options": {"dtype": "float32"}, "coordinator": ALL_MOVE}
    root = models[1].rpartition("/")[0]
    with RayReplicas(models[0], 3, num_prefill=1, strategy="STRICT_SPREAD", weights_root=root, **options) as replicas:
        roles = {one["name"]: one["role"] for one in replicas.stats()["replicas"]}
        assert roles == {"ray-0": "prefill_only", "ray-1": "decode_only", "ray-2": "decode_only"}
        assert len(nodes_of_all()) == 3
        assert tokens_of(replicas.generate(PROMPTS, PARAMS)) == one_engine(models[0])
        assert replicas.stats()["moved"] == len(PROMPTS)
        with InferenceClient(**replicas.access) as client:
            client.control("load_weights", path=models[1])
            client.control("finish_weights", version=1)
            client.control("settle_weights")
        assert tokens_of(replicas.generate(PROMPTS, PARAMS)) == one_engine(models[1])
        assert replicas.stats()["moved"] == 2 * len(PROMPTS)


@pytest.mark.slow
def test_replicas_come_and_go_while_their_requests_go_on(cluster, models):
    import ray

    expected, answers = one_engine(models[0]), []
    free = ray.available_resources()["CPU"]
    with RayReplicas(slow_engine(models[0]), 1, coordinator=ALL_MOVE) as replicas:
        with pytest.raises(ConfigError, match="no replica would be left"):
            replicas.remove("ray-0")
        assert replicas.add(1) == ["ray-1"]
        caller = threading.Thread(target=lambda: answers.append(replicas.generate(PROMPTS, PARAMS)))
        caller.start()
        until(lambda: running(replicas) == {"ray-0": 3, "ray-1": 3})
        time.sleep(1.0)
        replicas.remove("ray-1")
        stats = replicas.stats()
        assert [one["name"] for one in stats["replicas"]] == ["ray-0"]
        assert (stats["moved"], stats["resent"], stats["replicas_lost"]) == (3, 0, 0)
        caller.join(120)
        assert tokens_of(answers[0]) == expected
        until(lambda: ray.available_resources()["CPU"] == free - 1)
        with pytest.raises(ConfigError, match="no replica 'ray-1'"):
            replicas.remove("ray-1")
        with pytest.raises(ReplicasLost, match=r"ray-5, ray-6 of 5 replicas do not serve after 5 s; .*'CPU': 1"):
            replicas.add(5, timeout_s=5)
    until(lambda: ray.available_resources().get("CPU") == free)


@pytest.mark.slow
def test_a_node_that_is_lost_costs_no_request_and_its_replica_comes_back_on_another(cluster, models):
    expected, answers = one_engine(models[0]), []
    with RayReplicas(slow_engine(models[0]), 2, strategy="STRICT_SPREAD", coordinator=ALL_MOVE) as replicas:
        caller = threading.Thread(target=lambda: answers.append(replicas.generate(PROMPTS, PARAMS)))
        caller.start()
        until(lambda: running(replicas) == {"ray-0": 3, "ray-1": 3})
        before = nodes_of_all()
        lost = next(node for node in cluster.worker_nodes if node.node_id in before)
        cluster.remove_node(lost, allow_graceful=False)
        caller.join(120)
        assert tokens_of(answers[0]) == expected
        until(lambda: len(running(replicas)) == 2, 120)
        assert lost.node_id not in nodes_of_all()
        assert tokens_of(replicas.generate(PROMPTS, PARAMS)) == expected
