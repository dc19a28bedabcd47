"""Every front has every lifecycle command, with the parameters, defaults and states of the one table."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import threading
from types import SimpleNamespace

import pytest
from control_case import WEIGHTS, put_weights, safetensors, serving_with_control
from coordinator_case import cluster
from echo import EchoEngine
from echo_controls import EchoControls

from megatron_infer import DynamicInferenceEngine, InferenceConfig
from megatron_infer.coordinator.adapter_commands import AdapterCommands
from megatron_infer.coordinator.client import AsyncInferenceClient
from megatron_infer.coordinator.protocol import Answer, ControlFailed
from megatron_infer.engine.async_llm import AsyncLLM, EngineThread
from megatron_infer.engine.controls import EngineControls
from megatron_infer.engine.lifecycle_commands import COMMANDS, ENDED_BY, Group, names_of
from megatron_infer.engine.states import TRANSITIONS, EngineState
from megatron_infer.errors import WrongState
from megatron_infer.rl.engine_groups import EngineGroups
from megatron_infer.rl.weight_receiver import WeightReceiver
from megatron_infer.server.control.fanout import Fanout
from megatron_infer.server.ray_replicas import RayReplicas
from megatron_infer.testing.tiny import tiny_gpt

BEGUN_BY = {EngineState.PAUSED: "pause", EngineState.SUSPENDED: "suspend"}
STANDING = (EngineState.RUNNING, *BEGUN_BY)
ARGUMENTS = {"set_weight_version": {"version": 3}}
"""Of commands that need some."""


def test_every_declared_command_has_a_row_and_every_end_is_a_command():
    for group in Group:
        declared = [name for name, one in vars(group.value).items() if inspect.isfunction(one) and name[0] != "_"]
        assert list(names_of(group)) == declared
    assert set(ENDED_BY.values()) <= set(COMMANDS) and all(row.meaning for row in COMMANDS.values())
    assert {row.transition for row in COMMANDS.values()} - {None} == set(TRANSITIONS)


# ---------------------------------------------------------------------- every front carries every command out


@contextlib.contextmanager
def engine_front():
    config = InferenceConfig(buffer_size_gb=0.01, max_sequence_length=64, enable_prefix_caching=True)
    engine = DynamicInferenceEngine(tiny_gpt(), config)
    yield engine, lambda: engine


@contextlib.contextmanager
def async_llm_front():
    with engine_front() as (engine, _):
        llm = AsyncLLM.__new__(AsyncLLM)
        llm.llm, llm._thread = SimpleNamespace(engine=engine), EngineThread(engine)
        try:
            yield waited(llm), lambda: engine
        finally:
            llm.shutdown()


@contextlib.contextmanager
def client_front():
    with cluster(engines=[EchoEngine(), EchoEngine()]) as (_, replicas, client):
        yield client, lambda: replicas[1].engine


@contextlib.contextmanager
def async_client_front():
    with cluster(engines=[EchoEngine(), EchoEngine()]) as (one, replicas, _):
        client = AsyncInferenceClient(one.address)
        try:
            yield waited(client), lambda: replicas[1].engine
        finally:
            client.blocking.close()


@contextlib.contextmanager
def ray_front():
    """Without Ray: its actors are replicas of a coordinator in threads."""
    with client_front() as (client, engine):
        replicas = RayReplicas.__new__(RayReplicas)
        replicas._client, replicas._closing, replicas._last_death = client, threading.Event(), ""
        yield replicas, engine


@contextlib.contextmanager
def echo_front():
    engine = EchoEngine()
    yield engine, lambda: engine


def waited(front):
    """An asynchronous front whose commands are awaited here."""

    def of(name):
        async def run(**args):
            return await getattr(front, name)(**args)

        return lambda **args: asyncio.run(run(**args))

    return SimpleNamespace(**{name: of(name) for name in names_of(Group.ENGINE)})


FRONTS = {
    "engine": engine_front,
    "AsyncLLM": async_llm_front,
    "InferenceClient": client_front,
    "AsyncInferenceClient": async_client_front,
    "RayReplicas": ray_front,
    "EchoEngine": echo_front,
}


@pytest.mark.parametrize("front", FRONTS)
def test_every_front_carries_out_every_command_of_an_engine_and_leads_to_the_tables_states(front):
    with FRONTS[front]() as (it, engine):
        for name, before in itertools.product(names_of(Group.ENGINE), STANDING):
            if before in BEGUN_BY:
                getattr(it, BEGUN_BY[before])()
            assert engine().state == before.value
            states, args = COMMANDS[name].states, ARGUMENTS.get(name, {})
            if states is None or before in states:
                getattr(it, name)(timeout_s=60, **args)
            else:
                with pytest.raises((WrongState, ControlFailed), match=f"{name}.* while the engine is {before.name}"):
                    getattr(it, name)(timeout_s=60, **args)
            after = before if states is None else states.get(before, before)
            assert engine().state == after.value, (name, before)
            while engine().state != "running":  # a suspend that began while paused ends there
                getattr(it, ENDED_BY[BEGUN_BY[EngineState(engine().state)]])()


def test_a_client_takes_tags_from_any_iterable():
    with client_front() as (client, engine):
        client.suspend(tags=iter(["kv_cache"]))
        assert engine().controls.suspended == {"kv_cache"}


@pytest.mark.parametrize("front", [DynamicInferenceEngine, AsyncLLM, AsyncInferenceClient, RayReplicas])
def test_signatures_of_a_front_are_the_tables(front):
    for name in names_of(Group.ENGINE):
        _, *parameters = inspect.signature(getattr(front, name)).parameters.values()
        assert parameters == list(COMMANDS[name].parameters.values())
        assert inspect.getdoc(getattr(front, name)) == COMMANDS[name].meaning


# ---------------------------------------------------------------------- what carries a command out takes what is sent


def takes(method):
    return set(inspect.signature(method).parameters) - {"self"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_carried_out_with_the_parameters_of_the_table(command):
    row, sent = COMMANDS[command], set(COMMANDS[command].parameters)
    if row.group is Group.ENGINE:
        assert takes(getattr(EngineControls, command)) == sent
    elif row.group is Group.WEIGHTS:
        if command == "receive_weights":  # all but the group is passed on
            assert takes(EngineGroups.receive_into) - {"update", "name"} == sent - {"group"}
            return
        assert takes(getattr(WeightReceiver, command)) - {"files"} == sent  # files: of restore_weights alone
        assert takes(getattr(EchoControls, command)) == sent
    elif row.group is Group.ADAPTERS:
        carried_out = AdapterCommands(None, root="").commands()[command]
        assert takes(carried_out) - {"source"} == sent  # source: what was read of the path before


# ---------------------------------------------------------------------- HTTP

ADAPTER = {"lora_name": "a", "lora_path": "adapter"}
DIFFERS = {"lora_name": "differs", "lora_path": "adapter"}
JOIN = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3, "group_name": "g"}
TENSORS = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]], "group_name": "g"}
CALLS = (
    ("/pause", None, {"pause"}),
    ("/resume", None, {"unpause"}),
    ("/sleep", None, {"suspend"}),
    ("/wake_up", None, {"resume"}),
    ("/update_weight_version", {"new_version": "2"}, {"set_weight_version"}),
    ("/reset_prefix_cache", None, {"reset_prefix_cache"}),
    ("/start_profile", None, {"profile"}),
    ("/init_weights_update_group", JOIN, {"join_weight_group"}),
    ("/start_weight_update", None, {"begin_weights"}),
    ("/update_weights", safetensors(**WEIGHTS), {"write_weights"}),
    ("/update_weights_from_distributed", TENSORS, {"receive_weights"}),
    ("/destroy_weights_update_group", {"group_name": "g"}, {"leave_weight_group"}),
    ("/cancel_weight_update", None, {"cancel_weights"}),
    ("/update_weights_from_disk", {"model_path": "step1"}, {"load_weights", "finish_weights", "settle_weights"}),
    ("/weights_checker", {"action": "checksum"}, {"check_weights"}),
    ("/v1/load_lora_adapter", ADAPTER, {"load_adapter", "settle_adapter"}),
    ("/v1/load_lora_adapter", DIFFERS, {"load_adapter", "undo_adapter"}),
    ("/v1/unload_lora_adapter", {"lora_name": "a"}, {"unload_adapter", "settle_adapter"}),
)
"""Path, body, commands that the call sends to all replicas."""


def test_http_sends_every_command_of_a_client_with_arguments_of_the_table(tmp_path, monkeypatch):
    put_weights(tmp_path)
    (tmp_path / "adapter").mkdir()
    send, sent = Fanout._send, []

    async def note(self, command, **args):
        sent.append(command)
        assert set(args) <= set(COMMANDS[command].parameters) - {"timeout_s"}
        if command == "profile":
            return {"r0": Answer(ok=True)}
        if COMMANDS[command].group is Group.ADAPTERS:
            digests = {"r0": "x", "r1": "y" if args["name"] == "differs" else "x"}
            return {name: Answer(ok=True, value={"digest": digest}) for name, digest in digests.items()}
        return await send(self, command, **args)

    monkeypatch.setattr(Fanout, "_send", note)
    roots = {"weights_root": str(tmp_path), "lora_root": str(tmp_path)}
    with serving_with_control(EchoEngine(), EchoEngine(), **roots) as case:
        for path, body, commands in CALLS:
            sent.clear()
            how = {"content": body, "headers": {"content-type": "application/octet-stream"}}
            case.http.post(path, **how if isinstance(body, bytes) else {"json": body})
            assert commands <= set(sent), (path, sent)
    by_coordinator = {"restore_weights"}  # for a replica that has missed an update
    assert set.union(*(commands for _, _, commands in CALLS)) == set(COMMANDS) - by_coordinator
