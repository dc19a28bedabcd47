"""Adapters over HTTP: loaded and unloaded on all engines, named as models, with answers that engines give offline."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from control_case import call, get
from safetensors.torch import save_file
from server_case import serving, supervised_coordinator, wait_for

from megatron_infer import DynamicInferenceEngine, InferenceConfig, LoRAConfig, SamplingParams
from megatron_infer.coordinator.adapter_commands import AdapterCommands
from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.coordinator.commands import ReplicaCommands
from megatron_infer.errors import AdapterInUse
from megatron_infer.testing.tiny import tiny_gpt

PROMPT = [3 * i % 101 + 4 for i in range(40)]
SHORT = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
SETTINGS = {
    "buffer_size_gb": 0.005,
    "block_size_tokens": 16,
    "max_sequence_length": 128,
    "max_requests": 8,
    "enable_prefix_caching": True,
    "lora": LoRAConfig(max_loras=2, max_rank=8),
}


def write_adapter(folder, model, *, rank=4, seed=0, **changes):
    """A PEFT directory under megatron-core's names."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for path, module in model.named_modules():
        if path.endswith(("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")):
            out, width = module.weight.shape
            tensors[f"base_model.model.{path}.lora_A.weight"] = torch.randn(rank, width, generator=generator) / 4
            tensors[f"base_model.model.{path}.lora_B.weight"] = torch.randn(out, rank, generator=generator) / 4
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))


def make_engine():
    return DynamicInferenceEngine(tiny_gpt(), InferenceConfig(**SETTINGS))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("adapters"), tiny_gpt()
    for seed in range(3):
        write_adapter(folder / f"a{seed}", model, seed=seed)
    write_adapter(folder / "large", model, rank=9)
    write_adapter(folder / "dora", model, use_dora=True)
    write_adapter(folder / "narrow", tiny_gpt(hidden_size=32))
    write_adapter(folder / "cut", model)
    (folder / "cut" / "adapter_model.safetensors").write_bytes(
        (folder / "a0" / "adapter_model.safetensors").read_bytes()[:99]
    )
    (folder / "empty").mkdir()
    (folder / "out").symlink_to("/etc")
    outside = tmp_path_factory.mktemp("outside")
    write_adapter(outside / "a", model)
    (folder / "linked").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / "linked" / name).symlink_to(outside / "a" / name)
    return folder


@pytest.fixture(scope="module")
def offline(root):
    engine = make_engine()
    answers = {None: None, "a0": "a0", "a1": "a1", "a2": "a2"}
    for name in ("a0", "a1", "a2"):
        engine.load_adapter(name, root / name)
    for name in answers:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, adapter=name)
        answers[name] = engine.generate([PROMPT], params)[0].outputs[0].token_ids
    assert len({tuple(tokens) for tokens in answers.values()}) == 4
    return answers


@pytest.fixture(scope="module")
def case(root):
    with serving(make_engine(), make_engine(), text=False, decodes=False, lora_root=str(root)) as one:
        for replica in one.replicas:
            replica._commands = ReplicaCommands(None, AdapterCommands(replica.engine, root=str(root)).commands())
        wait_for(lambda: len(one.coordinator.core.stats()["replicas"]) == 2)
        wait_for(lambda: one.http.get("/health").status_code == 200)
        yield one


def load(case, name, path, expected=200, **more):
    reply = case.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})
    assert reply.status_code == expected, (name, path, reply.status_code, reply.text)
    return reply


def unload(case, name, expected=200, **more):
    reply = case.http.post("/v1/unload_lora_adapter", json={"lora_name": name, **more})
    assert reply.status_code == expected, reply.text
    return reply


def tokens_of(case, model=None, **more):
    body = call(case, "/v1/completions", SHORT | more | ({} if model is None else {"model": model}))
    assert body["model"] == (model or "tiny")
    return body["choices"][0]["token_ids"]


def test_adapters_are_models_that_answer_as_offline(case, offline):
    assert load(case, "french", "a0").text == "Success: LoRA adapter 'french' added successfully."
    reply = call(case, "/load_lora_adapter", {"lora_name": "sql", "lora_path": "a1"})
    assert reply["success"] and reply["loaded_adapters"].keys() == {"french", "sql"}
    models = {card["id"]: card for card in get(case, "/v1/models")["data"]}
    assert models.keys() == {"tiny", "french", "sql"} and models["sql"]["parent"] == "tiny"
    assert get(case, "/v1/models/sql")["id"] == "sql"
    for _ in range(3):  # on both engines
        assert tokens_of(case) == tokens_of(case, "tiny") == offline[None]
        assert tokens_of(case, "french") == offline["a0"] and tokens_of(case, "sql") == offline["a1"]
    for engine in case.engines:
        assert [info.name for info in engine.adapters()] == ["french", "sql"]
    load(case, "sql", "a1")  # the same again
    assert load(case, "sql", "a2", 409).json()["error"]["code"] == "adapter_in_use"
    load(case, "sql", "a2", load_inplace=True)
    assert [tokens_of(case, "sql") for _ in range(3)] == [offline["a2"]] * 3
    assert tokens_of(case, "french") == offline["a0"]
    unload(case, "sql")
    assert unload(case, "sql", 404).json()["error"]["code"] == "model_not_found"
    error = call(case, "/v1/completions", SHORT | {"model": "sql"}, expected=404)["error"]
    assert error["code"] == "model_not_found" and "tiny, french" in error["message"]
    unload(case, "french")


def test_every_endpoint_takes_an_adapter_as_its_model(case, offline):
    load(case, "one", "a0")
    base = call(case, "/v1/embeddings", {"input": PROMPT})
    found = call(case, "/v1/embeddings", {"input": PROMPT, "model": "one"})
    assert found["model"] == "one" and found["data"][0]["embedding"] != base["data"][0]["embedding"]
    scores = {"query": [5], "items": [[6], [7]], "label_token_ids": [8, 9]}
    base, found = (call(case, "/v1/score", scores | more) for more in ({}, {"model": "one"}))
    assert found["scores"] != base["scores"]
    spans = call(case, "/v1/completions", SHORT | {"model": "one", "return_token_ids": True})["choices"][0].get(
        "version_spans"
    )
    assert spans is None or spans[0]["adapter_version"] >= 1
    with case.http.stream("POST", "/v1/completions", json=SHORT | {"model": "one", "stream": True}) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    assert {event["model"] for event in events} == {"one"}
    assert [t for event in events for one in event["choices"] for t in one["token_ids"]] == offline["a0"]
    unload(case, "one")


BAD = {
    "nothing": 404,
    "../outside": 403,
    "/etc": 403,
    "out": 403,
    "linked": 403,
    "empty": 400,
    "large": 400,
    "dora": 400,
    "narrow": 400,
    "cut": 400,
    "": 400,
    "a0\0": 400,
    "a0/../../outside/a": 403,
    "a0/adapter_config.json": 404,
    "~": 404,
    "file:///etc": 404,
    "a" * 5000: 404,
}


# What is wrong with a directory's content is refused as `test_bad_adapters` has it, with 400.
@pytest.mark.parametrize("path", BAD)
def test_what_is_no_adapter_below_the_root_is_refused_without_a_path_of_the_machine(path, case, root, offline):
    reply = load(case, "bad", path, BAD[path])
    assert "Traceback" not in reply.text and str(root) not in reply.text and "site-packages" not in reply.text
    assert {card["id"] for card in get(case, "/v1/models")["data"]} == {"tiny"}
    assert all(engine.adapters() == [] for engine in case.engines) and tokens_of(case) == offline[None]


def test_a_load_that_is_refused_changes_nothing_though_the_file_has_changed(case, root, offline):
    write_adapter(root / "trained", tiny_gpt(), seed=0)
    load(case, "t", "trained")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "trained" / name).write_bytes((root / "a1" / name).read_bytes())
    load(case, "t", "trained", 409)
    load(case, "t", "large", 400, load_inplace=True)
    assert [tokens_of(case, "t") for _ in range(3)] == [offline["a0"]] * 3
    load(case, "t", "trained", load_inplace=True)
    assert [tokens_of(case, "t") for _ in range(3)] == [offline["a1"]] * 3
    unload(case, "t")


def test_an_unload_that_one_engine_refuses_takes_the_adapter_from_none(case, offline, monkeypatch):
    load(case, "busy", "a0")
    with monkeypatch.context() as patch:
        patch.setitem(case.replicas[0]._commands._own, "unload_adapter", refuse)
        assert unload(case, "busy", 409).json()["error"]["code"] == "adapter_in_use"
    assert all([info.name for info in engine.adapters()] == ["busy"] for engine in case.engines)
    assert [tokens_of(case, "busy") for _ in range(3)] == [offline["a0"]] * 3
    unload(case, "busy")


def refuse(**_):
    raise AdapterInUse("adapter 'busy' is used by 1 unfinished requests")


def test_a_load_that_one_engine_refuses_gives_the_others_back_what_they_had(case, root, offline, monkeypatch):
    """Also an adapter of the start, of which HTTP knows no directory, and one whose directory has changed since."""
    write_adapter(root / "was", tiny_gpt(), seed=0)
    for engine in case.engines:
        engine.load_adapter("first", root / "was")
    (root / "was" / "adapter_model.safetensors").write_bytes(
        (root / "large" / "adapter_model.safetensors").read_bytes()
    )
    with monkeypatch.context() as patch:
        patch.setitem(case.replicas[0]._commands._own, "load_adapter", refuse)
        load(case, "first", "a1", 409, load_inplace=True)
        load(case, "other", "a1", 409)
    assert all([info.name for info in engine.adapters()] == ["first"] for engine in case.engines)
    assert [tokens_of(case, "first") for _ in range(3)] == [offline["a0"]] * 3
    unload(case, "first")


def test_engines_that_read_different_contents_load_none(case, root, offline, monkeypatch):
    load(case, "same", "a0")
    adapters = case.replicas[1]._commands._own
    read = adapters["read_adapter"]
    with monkeypatch.context() as patch:
        patch.setitem(adapters, "read_adapter", lambda **given: read(**given | {"path": "a2"}))
        error = load(case, "same", "a1", 409, load_inplace=True).json()["error"]
        assert error["code"] == "adapters_differ" and str(root) not in error["message"]
    assert [tokens_of(case, "same") for _ in range(3)] == [offline["a0"]] * 3
    unload(case, "same")


def test_commands_for_an_adapter_keep_their_order_while_it_is_read(case, offline):
    """Two HTTP processes are two clients of the coordinator."""
    reader = case.engines[0].controls.adapters._reader
    may_read, read = threading.Event(), reader.read
    reader.read = lambda *given: read(*given) if may_read.wait(20) else None
    queues = case.replicas[0]._commands
    try:
        with ThreadPoolExecutor(3) as pool, InferenceClient(case.coordinator.address) as other:
            control = partial(pool.submit, other.control, check=False, name="slow")
            first = control("load_adapter", path="a0")
            wait_for(lambda: queues._queues)
            assert tokens_of(case) == offline[None], "steps go on"
            second = control("unload_adapter")
            wait_for(lambda: any(len(queue) == 2 for queue in queues._queues.values()))
            may_read.set()
            answers = [answer for calls in (first, second) for answer in calls.result(20).values()]
            assert len(answers) == 4 and all(answer.ok for answer in answers), answers
    finally:
        may_read.set()
        reader.read = read
    assert all(engine.adapters() == [] for engine in case.engines) and not queues._queues


def test_an_engine_that_is_lost_while_it_reads_does_not_keep_an_adapter_from_the_others(case, root, offline):
    from coordinator_case import replica

    engine, reads, may_read = make_engine(), threading.Event(), threading.Event()
    commands = AdapterCommands(engine, root=str(root)).commands()
    engine.controls.adapters._reader.read = lambda *given: reads.set() or may_read.wait(20)
    with ThreadPoolExecutor(1) as pool:
        with replica(case.coordinator.address, engine, name="r9", control=False, adapter_commands=commands):
            wait_for(lambda: len(case.coordinator.core.stats()["replicas"]) == 3)
            loading = pool.submit(load, case, "left", "a1")
            assert reads.wait(20)
        loading.result(30)
    may_read.set()
    assert [tokens_of(case, "left") for _ in range(3)] == [offline["a1"]] * 3
    unload(case, "left")


@pytest.mark.long
def test_requests_of_an_engine_that_is_lost_go_on_with_their_adapter_elsewhere(case, root):
    """The engine that joins gets the adapters from the coordinator; it is lost in the middle of its requests."""
    from coordinator_case import replica

    def params(name):
        return SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True, adapter=name)

    alone, paths = make_engine(), {"one": "a0", "two": "a1"}
    for name, path in paths.items():
        alone.load_adapter(name, root / path)
        load(case, name, path)
    names = [None, "one", "two"] * 6
    want = {name: alone.generate([PROMPT], params(name))[0].outputs[0].token_ids for name in set(names)}
    assert len({tuple(tokens) for tokens in want.values()}) == 3
    core, engine, is_lost, is_busy = case.coordinator.core, make_engine(), threading.Event(), threading.Event()
    step, resent = engine.step, core.counts.resent

    def step_until_busy():
        if engine.num_steps > 15 and len(engine.output_processor) >= 3:
            is_busy.set()
            is_lost.wait(20)
        return step()

    engine.step = step_until_busy
    commands = AdapterCommands(engine, root=str(root)).commands()
    with ThreadPoolExecutor(len(names)) as pool:
        with replica(case.coordinator.address, engine, name="r9", control=False, adapter_commands=commands) as joined:
            wait_for(lambda: sorted(info.name for info in engine.adapters()) == ["one", "two"])
            wait_for(lambda: len(core.stats()["replicas"]) == 3)
            replies = [pool.submit(tokens_of, case, name, max_tokens=80) for name in names]
            assert is_busy.wait(20)
            joined.stop()
            is_lost.set()
        assert [reply.result(60) for reply in replies] == [want[name] for name in names]
    assert core.counts.resent >= resent + 3
    for name in paths:
        unload(case, name)


@pytest.mark.long
def test_replies_are_those_of_the_version_that_they_name_while_adapters_change(case, root, offline):
    """Six names over two slots of two engines, each changed by its own client."""
    contents, names, ended = ("a0", "a1", "a2"), [f"n{i}" for i in range(6)], threading.Event()
    history = {name: [] for name in names}
    """The contents of each name, in order: those of its versions, from 1 on."""
    wrong, count = [], 0

    def change(number):
        name, draw = names[number], random.Random(number)
        for turn in range(8):
            content = draw.choice([one for one in contents if one != (history[name] or [None])[-1]])
            history[name].append(content)
            load(case, name, content, load_inplace=turn > 0, running="recompute")
            time.sleep(0.02)

    def ask(number):
        nonlocal count
        draw = random.Random(number)
        while not ended.is_set():
            name = draw.choice(names)
            if not history[name]:
                continue
            reply = case.http.post("/v1/completions", json=SHORT | {"model": name})
            if reply.status_code == 404:  # not loaded yet
                continue
            choice = reply.json()["choices"][0]
            versions = [span["adapter_version"] for span in choice["version_spans"]]
            right = [offline[history[name][version - first[name] - 1]] for version in versions]
            count += 1
            if len(versions) == 1 and choice["token_ids"] != right[0]:
                wrong.append((name, versions, choice["token_ids"]))

    load(case, "n0", "a0")
    first = dict.fromkeys(names, 0)
    unload(case, "n0")
    first["n0"] = 1
    with ThreadPoolExecutor(14) as pool:
        asking = [pool.submit(ask, number) for number in range(8)]
        for done in [pool.submit(change, number) for number in range(6)]:
            done.result(60)
        ended.set()
        for done in asking:
            done.result(60)
    assert not wrong and count > 20, (wrong, count)
    for name in names:
        assert [tokens_of(case, name) for _ in range(2)] == [offline[history[name][-1]]] * 2
        unload(case, name)


def test_bad_names_and_bodies_are_refused(case):
    for name in ("tiny", "", "a b", "../x", "x" * 200):
        load(case, name, "a0", 400)
    for body in (
        {},
        {"lora_name": "x"},
        {"lora_name": 5, "lora_path": "a0"},
        {"lora_name": "x", "lora_path": "a0", "y": 1},
    ):
        assert case.http.post("/v1/load_lora_adapter", json=body).status_code == 400
    load(case, "x", "a0", 400, running="stop")
    assert case.http.post("/v1/load_lora_adapter", content=b"{").status_code in (400, 415)


def test_without_a_root_nothing_is_loaded():
    with serving(make_engine(), text=False, decodes=False) as case:
        assert case.http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "a0"}).status_code == 404
    with serving(make_engine(), text=False, decodes=False, control=True) as case:
        wait_for(lambda: case.http.get("/health").status_code == 200)
        error = load(case, "x", "a0", 403).json()["error"]
        assert error["code"] == "no_lora_root" and "--lora-root" in error["message"]


def test_the_calls_of_trls_adapter_only_path(root, offline):
    """Those of `trl/experimental/async_grpo/vllm_client.py` and its trainer: each policy has a name of its own, and is
    loaded while generation is paused, beside the one before."""
    with serving(make_engine(), text=False, decodes=False, control=True, lora_root=str(root)) as case:
        replica = case.replicas[0]
        replica._commands = ReplicaCommands({}, AdapterCommands(replica.engine, root=str(root)).commands())
        wait_for(lambda: case.http.get("/health").status_code == 200)
        config = get(case, "/server_info?config_format=json")["vllm_config"]
        assert config["lora_config"] == {"max_loras": 2, "max_lora_rank": 8}
        assert config["parallel_config"]["data_parallel_size"] == 1
        for number in range(3):
            assert case.http.post("/pause", params={"mode": "keep"}).status_code == 200
            load(case, f"trl-policy-v{number}", str(root / f"a{number}"), load_inplace=False)
            assert case.http.post("/resume").status_code == 200
            case.http.post("/v1/unload_lora_adapter", json={"lora_name": f"trl-policy-v{number - 2}"})
            assert tokens_of(case, f"trl-policy-v{number}") == offline[f"a{number}"]
        assert [info.name for info in case.engines[0].adapters()] == ["trl-policy-v1", "trl-policy-v2"]


def test_an_engine_that_joins_gets_the_adapters_that_are_loaded(case, root, offline):
    from coordinator_case import replica

    load(case, "late", "a1")
    engine = make_engine()
    commands = AdapterCommands(engine, root=str(root)).commands()
    with replica(case.coordinator.address, engine, name="r9", control=False, adapter_commands=commands):
        wait_for(lambda: [info.name for info in engine.adapters()] == ["late"])
    unload(case, "late")


def test_many_names_are_loaded_at_once_though_few_are_read_at_a_time(case, offline, monkeypatch):
    monkeypatch.setattr("megatron_infer.coordinator.commands.MAX_READINGS", 2)
    managers = [engine.controls.adapters for engine in case.engines]
    most = []
    for manager in managers:
        read = manager.read
        note = lambda *given, read=read, manager=manager: most.append(len(manager._readings)) or read(*given)  # noqa: E731
        monkeypatch.setattr(manager, "read", note)
    names = [f"many-{number}" for number in range(12)]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: load(case, name, "a1" if name == "many-8" else "a0"), names))
        assert max(most) < 2 <= len(most)
        assert tokens_of(case, names[8]) == offline["a1"]
        load(case, "bad", "cut", 400)
        list(pool.map(lambda name: unload(case, name), names))
    for replica, manager in zip(case.replicas, managers, strict=True):
        assert not manager._readings and not manager._changes and not replica._commands._queues


@pytest.mark.long
def test_a_coordinator_that_is_killed_and_started_again_knows_the_adapters(root, offline, tmp_path):
    """Requests for one wait meanwhile, and engines that join later load what is loaded, from the others' knowledge."""
    from coordinator_case import replica

    def commands(engine):
        return AdapterCommands(engine, root=str(root)).commands()

    engines = [make_engine() for _ in range(2)]
    with supervised_coordinator(tmp_path) as process, ThreadPoolExecutor(4) as pool:
        address = process.ready["address"]
        with serving(*engines, address=address, text=False, decodes=False, lora_root=str(root)) as case:
            for one in case.replicas:
                one._commands = ReplicaCommands(None, commands(one.engine))
            wait_for(lambda: sorted(one["name"] for one in case.server._running[1].replicas) == ["r0", "r1"])
            load(case, "kept", "a0")
            load(case, "kept", "a1", load_inplace=True)
            load(case, "gone", "a0")
            unload(case, "gone")
            process.signal(signal.SIGKILL)
            replies = [pool.submit(tokens_of, case, "kept") for _ in range(4)]
            wait_for(lambda: process.restarts and process.ready)
            assert [reply.result(60) for reply in replies] == [offline["a1"]] * 4
            assert tokens_of(case, "kept") == offline["a1"]
            engines.append(make_engine())
            engines[2].load_adapter("gone", root / "a0")
            with replica(address, engines[2], name="r2", control=False, adapter_commands=commands(engines[2])):
                wait_for(lambda: [info.name for info in engines[2].adapters()] == ["kept"])
                assert engines[2].adapters()[0].digest == engines[0].adapters()[0].digest
                load(case, "kept", "a2", load_inplace=True)
                assert [tokens_of(case, "kept") for _ in range(3)] == [offline["a2"]] * 3
    assert all(not engine.controls.adapters._changes and not engine.controls.adapters._readings for engine in engines)
