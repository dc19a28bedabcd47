"""What the routes by which trainers broadcast weights take and refuse, and where engines may meet a trainer."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import socket
import time

import pytest
import torch
from broadcasting_trainer import Trainer
from control_case import GREEDY, WEIGHTS, call, get, safetensors, serving_with_control, state_of, wait_for
from echo import EchoEngine
from engines import make_engine
from server_case import tiny_model
from torch.distributed import TCPStore

from megatron_infer.errors import ConfigError, WeightUpdateError
from megatron_infer.rl.trainer_group import GroupAddress, checked_specs, tensors
from megatron_infer.rl.weight_receiver import WeightReceiver
from megatron_infer.server.control import weight_updates
from megatron_infer.server.control.trainer_groups import checked_port, trainer_address
from megatron_infer.server.http_errors import ApiError
from megatron_infer.server.server_config import ServerConfig

JOIN = {"master_address": "127.0.0.1", "master_port": "29500", "rank_offset": 1, "world_size": 3, "group_name": "g"}
TENSORS = {"names": ["a", "b"], "dtypes": ["float32", "bfloat16"], "shapes": [[2], [3, 1]], "group_name": "g"}


@pytest.fixture
def case():
    with serving_with_control(EchoEngine(), EchoEngine(), text=False) as one:
        yield one


def digests(case):
    return {engine.controls.digest for engine in case.engines}


# ---------------------------------------------------------------------- the dialects


def test_update_of_slime_ends_at_continue_on_all_engines_with_the_version_of_its_buckets(case):
    call(case, "/init_weights_update_group", {**JOIN, "backend": "gloo"})
    assert all(engine.controls.weight_groups == {"g"} for engine in case.engines)
    error = call(case, "/update_weights_from_distributed", TENSORS, expected=409)["error"]["message"]
    assert "SERVING" in error and "pause" in error
    assert not any(engine.controls.weight_groups for engine in case.engines)  # what the trainer broadcasts fails
    call(case, "/init_weights_update_group", JOIN)
    call(case, "/pause_generation", {})
    for version in ({"weight_version": "6"}, {"weight_version": "7"}, {}):  # the latest that is given counts
        call(case, "/update_weights_from_distributed", {**TENSORS, "flush_cache": False, **version})
    assert state_of(case) == "UPDATING" and digests(case) == {"made"}
    assert call(case, "/continue_generation", {})["state"] == "SERVING"
    assert len(digests(case)) == 1 and digests(case) != {"made"}
    assert get(case, "/get_weight_version")["weight_version"] == "7"
    call(case, "/destroy_weights_update_group", {"group_name": "g"})
    assert not any(engine.controls.weight_groups for engine in case.engines)


def test_update_between_begin_and_end_is_not_ended_by_its_tensors(case):
    call(case, "/init_weights_update_group", JOIN)
    call(case, "/begin_weight_update")
    call(case, "/update_weights_from_distributed", TENSORS)
    call(case, "/continue_generation", {}, expected=409)
    assert call(case, "/end_weight_update", {"weight_version": 4})["state"] == "SERVING"
    assert get(case, "/get_weight_version")["weight_version"] == "4"


def test_areals_two_calls_are_one(case):
    call(case, "/areal_init_weights_update_group", {**JOIN, "pp_rank": 0})
    call(case, "/areal_pause_generation", {})
    call(case, "/areal_update_weights_xccl", {}, expected=400)
    call(case, "/areal_set_update_weight_meta", TENSORS)
    call(case, "/areal_update_weights_xccl", {})
    call(case, "/areal_continue_generation", {})
    assert digests(case) != {"made"}


def areal_adapter(name, group="g", **changes):
    # As `VLLMBackend.build_distributed_weight_update_requests` of AReaL 1.0.4 makes it.
    names = [f"base_model.model.model.layers.0.mlp.down_proj.lora_{side}.default.weight" for side in "AB"]
    return {
        "names": names, "dtypes": ["float32"] * 2, "shapes": [[2, 3], [3, 2]], "group_name": group, "lora_name": name,
        "lora_int_id": 1, "lora_target_modules": ["down_proj"], "lora_rank": 2, "lora_alpha": 4, "lora_bias": "none",
        "base_model_name": "echo",
    } | changes  # fmt: skip


def received(case):
    return [sorted(engine.controls.adapters) for engine in case.engines]


def test_areals_adapter_is_there_when_every_stage_has_sent_its_tensors_and_retires_the_one_before(case):
    for group in ("stage 0", "stage 1"):
        call(case, "/areal_init_weights_update_group", {**JOIN, "group_name": group})
    for version in (1, 2):
        name = f"default_lora-v{version}"
        body = areal_adapter(name, "stage 0")
        call(case, "/areal_update_weights_lora_xccl", body, expected=409)
        left = [engine.controls.weight_groups for engine in case.engines]
        assert left == [{"stage 1"}] * 2, "what the trainer broadcasts fails and does not wait"
        call(case, "/areal_init_weights_update_group", {**JOIN, "group_name": "stage 0"})
        call(case, "/areal_pause_generation", {})
        assert call(case, "/areal_set_update_weight_meta_lora", body)["success"]
        call(case, "/areal_update_weights_lora_xccl", body)
        assert state_of(case) == "UPDATING" and name not in received(case)[0]
        error = call(case, "/areal_update_weights_xccl", {}, expected=400)["error"]["message"]
        assert "no tensors were announced" in error
        done = call(case, "/areal_update_weights_lora_xccl", areal_adapter(name, "stage 1"))
        assert done["success"] and done["num_tensors"] == 2 and done["state"].startswith("PAUSED")
        assert received(case) == [[name]] * 2
        call(case, "/areal_continue_generation", {})
        models = {one["id"]: one.get("parent") for one in get(case, "/v1/models")["data"]}
        assert models == {"tiny": None, name: "tiny"}
    assert digests(case) == {"made"} and get(case, "/get_weight_version")["weight_version"] == "0"
    assert len({engine.controls.adapters[name] for engine in case.engines}) == 1


def test_tensors_of_the_model_do_not_enter_an_adapters_update_nor_an_adapters_the_models(case):
    for group in ("g", "h"):
        call(case, "/init_weights_update_group", {**JOIN, "group_name": group})
    call(case, "/pause_generation", {})
    call(case, "/areal_update_weights_lora_xccl", areal_adapter("a"))
    assert state_of(case) == "UPDATING"
    for path, body in (
        ("/update_weights_from_distributed", {**TENSORS, "group_name": "h"}),
        ("/areal_update_weights_lora_xccl", areal_adapter("b", "h")),
    ):
        error = call(case, path, body, expected=409)["error"]["message"]
        assert "adapter 'a'" in error and "finish or cancel" in error
    octets = {"Content-Type": "application/octet-stream"}
    reply = case.http.post("/update_weights", content=safetensors(**WEIGHTS), headers=octets)
    assert reply.status_code == 409 and "adapter 'a'" in reply.text
    call(case, "/cancel_weight_update")
    call(case, "/update_weights_from_distributed", TENSORS)
    error = call(case, "/areal_update_weights_lora_xccl", areal_adapter("a"), expected=409)["error"]["message"]
    assert "the model" in error
    call(case, "/cancel_weight_update")
    call(case, "/continue_generation", {})
    assert received(case) == [[], []] and digests(case) == {"made"}
    call(case, "/weights_checker", {"action": "reset"})
    assert state_of(case) == "SPOILED"
    error = call(case, "/areal_update_weights_lora_xccl", areal_adapter("a"), expected=409)["error"]["message"]
    assert "finish an update of the model first" in error and state_of(case) == "SPOILED"


@pytest.mark.parametrize("failing", ["begin_weights", "receive_weights", "finish_weights"])
def test_adapter_that_fails_on_one_engine_is_on_none(case, failing):
    case.engines[1].controls.faults[failing] = 1
    call(case, "/areal_init_weights_update_group", JOIN)
    call(case, "/areal_pause_generation", {})
    error = call(case, "/areal_update_weights_lora_xccl", areal_adapter("a"), expected=400)["error"]
    assert "r1" in error["message"] and error["state"].startswith("PAUSED")
    call(case, "/areal_continue_generation", {})
    assert received(case) == [[], []] and state_of(case) == "SERVING"
    groups = {"g"} if failing == "finish_weights" else set()
    assert [engine.controls.weight_groups for engine in case.engines] == [groups] * 2


def test_adapter_that_one_engine_cannot_load_in_the_end_is_no_success(case):
    case.engines[1].controls.faults["settle_weights"] = 1
    call(case, "/areal_init_weights_update_group", JOIN)
    call(case, "/areal_pause_generation", {})
    error = call(case, "/areal_update_weights_lora_xccl", areal_adapter("a"), expected=400)["error"]
    assert error["phase"] == "weight update (load)" and [one["name"] for one in error["replicas"]] == ["r1"]
    assert call(case, "/areal_continue_generation", {})["state"] == "SERVING"
    assert received(case) == [["a"], []]


BEYOND = 10**30
"""No message to the engines has such a number."""


@pytest.mark.security
@pytest.mark.parametrize("phase", ["begin", "receive"])
def test_number_that_no_message_has_ends_the_update_and_the_engines_serve(case, phase):
    call(case, "/init_weights_update_group", JOIN)
    about = {"config_dict": {"r": BEYOND}} if phase == "begin" else {"shapes": [[BEYOND], [3, 1]]}
    body = {**MILES, **TENSORS, **about}
    error = call(case, "/load_lora_adapter_from_distributed", body, expected=400)["error"]
    assert "cannot be sent" in error["message"] and error["phase"] == f"weight update ({phase})"
    assert state_of(case) == "SERVING" and received(case) == [[], []]
    assert not any(engine.controls.weight_groups for engine in case.engines), "the trainer does not wait for them"
    call(case, "/pause_generation", {})
    call(case, "/init_weights_update_group", JOIN)
    call(case, "/update_weights_from_distributed", {**TENSORS, "shapes": [[BEYOND], [3, 1]]}, expected=400)
    assert call(case, "/continue_generation", {})["state"] == "SERVING" and digests(case) == {"made"}


MILES = {"lora_name": "miles_lora", "config_dict": {"peft_type": "LORA", "r": 2, "lora_alpha": 4}, "pinned": False}
"""What miles' engines send of each adapter."""


def test_sglangs_adapters_come_in_a_group_in_one_call_in_any_state(case):
    call(case, "/init_weights_update_group", JOIN)
    body = {**MILES, **TENSORS, "upsert": True}
    reply = call(case, "/load_lora_adapter_from_distributed", body)
    assert reply["success"] and reply["loaded_adapters"] == {"miles_lora": "miles_lora"}
    assert state_of(case) == "SERVING" and received(case) == [["miles_lora"]] * 2
    call(case, "/pause_generation", {"mode": "in_place"})
    call(case, "/load_lora_adapter_from_distributed", body)
    assert state_of(case) == "PAUSED(keep)"
    error = call(case, "/load_lora_adapter_from_distributed", {**body, "lora_name": "tiny"}, expected=400)["error"]
    assert error["param"] == "lora_name" and not any(engine.controls.weight_groups for engine in case.engines)
    error = call(case, "/load_lora_adapter_from_distributed", body, expected=400)["error"]
    assert "there is no group" in error["message"]
    call(case, "/init_weights_update_group", JOIN)
    call(case, "/begin_weight_update")
    assert "UPDATING" in call(case, "/load_lora_adapter_from_distributed", body, expected=409)["error"]["message"]
    assert not any(engine.controls.weight_groups for engine in case.engines)
    call(case, "/cancel_weight_update")
    added = {**body, "added_tokens_config": {"x": 1}}
    assert "embeddings" in call(case, "/load_lora_adapter_from_distributed", added, expected=400)["error"]["message"]


@pytest.mark.security
def test_adapter_in_a_body_is_safetensors_with_the_checksums_that_are_said_and_never_a_pickle(case, tmp_path):
    data = safetensors(**WEIGHTS)
    text = base64.b64encode(data).decode()
    sums = {name: hashlib.sha256(content).hexdigest() for name, (_, _, content) in WEIGHTS.items()}
    for given in ({"serialized_tensors": text}, {"serialized_named_tensors": [text, text], "expected_checksums": sums}):
        case.engines[0].controls.adapters.clear()
        reply = call(case, "/load_lora_adapter_from_tensors", {**MILES, **given, "load_format": None})
        assert reply["success"] and "miles_lora" in received(case)[0]
    pickled = base64.b64encode(pickle.dumps(open)).decode()
    for given, code in (
        ({"serialized_tensors": pickled}, "pickle_refused"),
        ({"serialized_named_tensors": [pickled]}, "pickle_refused"),
        ({"serialized_tensors": text, "serialized_named_tensors": [text]}, "invalid_value"),
        ({}, "invalid_value"),
        ({"serialized_tensors": "!"}, "invalid_value"),
        ({"serialized_tensors": text, "expected_checksums": sums | {"a": "0"}}, "checksum_mismatch"),
        ({"serialized_tensors": text, "expected_checksums": {"a": sums["a"]}}, "checksum_mismatch"),
    ):
        error = call(case, "/load_lora_adapter_from_tensors", {**MILES, **given}, expected=400)["error"]
        assert error["code"] == code, error
    assert state_of(case) == "SERVING"


def test_skyrls_calls_by_name_release_and_restore_memory_and_others_are_named(case):
    call(case, "/pause?mode=keep")
    done = call(case, "/collective_rpc", {"method": "skyrl_sleep_for_weight_sync", "kwargs": {"offload_kv": True}})
    assert done["results"] == [None, None] and done["state"].startswith("ASLEEP")
    call(case, "/collective_rpc", {"method": "skyrl_wake_for_weight_sync", "kwargs": {"tags": ["weights"]}})
    call(case, "/start_weight_update")
    call(case, "/cancel_weight_update")
    call(case, "/collective_rpc", {"method": "skyrl_wake_for_weight_sync", "kwargs": {"tags": ["kv_cache"]}})
    assert state_of(case) == "PAUSED(keep)"
    for method, reason in (("os.system", "not called by name"), ("skyrl_set_lora_receive_target", "/v1/load_lora")):
        error = call(case, "/collective_rpc", {"method": method}, expected=501)["error"]["message"]
        assert reason in error and method in error
    assert "deltas" in call(case, "/fetch_weights", {"target_version": 1}, expected=501)["error"]["message"]


@pytest.mark.parametrize("failing", ["join_weight_group", "receive_weights", "finish_weights"])
def test_what_fails_on_one_engine_happens_on_none(case, failing):
    case.engines[1].controls.faults[failing] = 1
    joined = call(case, "/init_weights_update_group", JOIN, expected=500 if failing.startswith("join") else 200)
    if failing.startswith("join"):
        assert "r1" in joined["error"]["message"] and not any(engine.controls.weight_groups for engine in case.engines)
        return
    call(case, "/pause_generation", {})
    expected = 400 if failing == "receive_weights" else 200
    call(case, "/update_weights_from_distributed", TENSORS, expected=expected)
    call(case, "/continue_generation", {}, expected=200 if failing == "receive_weights" else 400)
    call(case, "/continue_generation", {})
    assert digests(case) == {"made"} and state_of(case) == "SERVING"
    groups = set() if failing == "receive_weights" else {"g"}
    assert [engine.controls.weight_groups for engine in case.engines] == [groups] * 2, (
        "in step with the trainer, or left"
    )


def test_update_that_its_trainer_has_left_is_cancelled_after_a_time(case, monkeypatch):
    monkeypatch.setattr(weight_updates, "IDLE_S", 0.5)
    call(case, "/init_weights_update_group", JOIN)
    call(case, "/pause_generation", {})
    call(case, "/update_weights_from_distributed", TENSORS)
    wait_for(lambda: state_of(case).startswith("PAUSED"))
    call(case, "/continue_generation", {})
    assert digests(case) == {"made"}


@pytest.mark.security
def test_tensors_in_a_body_are_safetensors_and_a_pickle_is_never_loaded(case, tmp_path):
    class Command:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    call(case, "/pause_generation", {})
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        text = base64.b64encode(pickle.dumps(Command(), protocol)).decode()
        body = {"serialized_named_tensors": [text], "load_format": None, "flush_cache": True}
        error = call(case, "/update_weights_from_tensor", body, expected=400)["error"]
        assert error["code"] == "pickle_refused" and not (tmp_path / "ran").exists()
    text = base64.b64encode(safetensors(**WEIGHTS)).decode()
    call(case, "/update_weights_from_tensor", {"serialized_named_tensors": [text, text], "weight_version": 9})
    call(case, "/continue_generation", {})
    assert digests(case) != {"made"} and get(case, "/get_weight_version")["weight_version"] == "9"


def test_version_that_was_pulled_is_read_where_it_was_published(tmp_path):
    for number in (1, 2):
        folder = tmp_path / "shared" / f"weight_v{number:06d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(safetensors(**WEIGHTS))
    index = {"metadata": {"delta_encoding": "xor"}, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with serving_with_control(EchoEngine(), text=False, weights_root=str(tmp_path)) as case:
        local = "/somewhere/local"
        body = {"local_checkpoint_dir": local, "source_dir": str(tmp_path / "shared")}
        assert (
            call(case, "/pull_weights", {**body, "target_version": 2}, expected=400)["error"]["code"] == "delta_refused"
        )
        call(case, "/pull_weights", {**body, "target_version": 3}, expected=400)
        call(case, "/update_weights_from_disk", {"model_path": local}, expected=403)
        call(case, "/pull_weights", {**body, "target_version": 1})
        call(case, "/update_weights_from_disk", {"model_path": local, "weight_version": "1"})
        assert digests(case) != {"made"}
        outside = {**body, "source_dir": "/etc", "target_version": 1}
        assert "etc" not in call(case, "/pull_weights", outside, expected=403)["error"]["message"]


# ---------------------------------------------------------------------- where engines connect to


def this_machine():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("192.0.2.1", 9))
        return one.getsockname()[0]


@pytest.mark.security
def test_engines_meet_a_trainer_at_the_callers_address_or_at_one_that_is_allowed():
    assert trainer_address("127.0.0.1", "127.0.0.1", ()) == "127.0.0.1"
    assert trainer_address("localhost", "127.0.0.1", ()) in ("127.0.0.1", "::1")
    assert trainer_address("[::1]", "127.0.0.1", ()) == "::1"
    assert trainer_address("192.0.2.7", "192.0.2.7", ()) == "192.0.2.7"
    assert trainer_address("10.1.2.3", "127.0.0.1", ("10.0.0.0/8",)) == "10.1.2.3"
    assert trainer_address("10.1.2.3", "192.0.2.7", ("10.1.2.3",)) == "10.1.2.3"
    for given, caller in (
        ("169.254.169.254", "127.0.0.1"), ("192.0.2.7", "127.0.0.1"), ("127.0.0.1", "192.0.2.7"),
        ("10.1.2.3", "192.0.2.7"), ("127.0.0.1", ""), ("::ffff:169.254.169.254", "127.0.0.1"),
    ):  # fmt: skip
        with pytest.raises(ApiError, match="--trainer-host") as raised:
            trainer_address(given, caller, ("11.0.0.0/8",))
        assert raised.value.status == 403
    for given in ("", "0.0.0.0", "224.0.0.1", "no such host", "http://127.0.0.1", "\0", "a" * 300):
        with pytest.raises(ApiError, match="no host"):
            trainer_address(given, "127.0.0.1", ())
    for port in (0, 22, 80, 1023, 65536, "22", "x", "-1", "٣٣٣٣", -5):
        with pytest.raises(ApiError, match="master_port"):
            checked_port(port)
    assert checked_port("29500") == checked_port(29500) == 29500
    with pytest.raises(ConfigError, match="trainer_host"):
        ServerConfig(trainer_host=("10.0.0.1/8",))


@pytest.mark.security
def test_groups_need_control_its_key_and_an_allowed_address():
    init = {"init_info": {"master_address": "192.0.2.9", "master_port": 29500, "rank_offset": 1, "world_size": 3}}
    with serving_with_control(EchoEngine(), text=False, api_key="key") as case:
        for path, body in (
            ("/init_weights_update_group", JOIN), ("/init_weight_transfer_engine", init),
            ("/update_weights_from_distributed", TENSORS), ("/collective_rpc", {"method": "x"}),
        ):  # fmt: skip
            call(case, path, body, expected=401)
        key = {"authorization": "Bearer key"}
        error = call(case, "/init_weight_transfer_engine", init, expected=403, **key)["error"]
        assert error["code"] == "trainer_host_not_allowed" and case.engines[0].controls.weight_groups == set()
        error = call(case, "/init_weights_update_group", {**JOIN, "master_port": 22}, expected=400, **key)["error"]
        assert error["param"] == "master_port"


# ---------------------------------------------------------------------- limits, before anything is allocated


@pytest.mark.security
@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "reason"),
    [
        (["a"], [], [[1]], "as many of each"),
        (["a"] * ((1 << 17) + 1), ["int8"] * ((1 << 17) + 1), [[0]] * ((1 << 17) + 1), "131,072 at most"),
        (["a" * 513], ["int8"], [[1]], "513 characters"),
        ([""], ["int8"], [[1]], "0 characters"),
        (["a"], ["torch.save"], [[1]], "a is save; known are"),
        (["a"], ["int8"], [[1] * 9], "no shape"),
        (["a"], ["int8"], [[-1]], "no shape"),
        (["a"], ["int8"], [[1 << 48]], "no shape"),
        (["a"], ["int8"], [[101]], "100 elements"),
        (["a", "b"], ["int8"] * 2, [[60], [41]], "b \\[41\\].* 100 elements"),
        (["a"], ["int8"], [[1 << 40, 1 << 40]], "100 elements"),
    ],
)
def test_tensors_beyond_the_limits_are_refused_before_anything_is_allocated(names, dtypes, shapes, reason):
    with pytest.raises(WeightUpdateError, match=reason):
        checked_specs(names, dtypes, shapes, most_elements=100)


def test_packed_tensors_are_cut_as_vllm_cuts_them():
    """A buffer takes tensors until it has more than its size; the last one may be anything above it."""
    sizes, asked = [3, 4, 1, 9, 2], []
    specs = checked_specs([str(n) for n in sizes], ["uint8"] * 5, [[n] for n in sizes], most_elements=100)

    class Group:
        def receive(self, num_bytes):
            asked.append(num_bytes)
            return torch.zeros(num_bytes, dtype=torch.uint8)

    for size, cuts in ((None, sizes), (1, [3, 4, 10, 2]), (7, [8, 9, 2]), (8, [17, 2]), (100, [19])):
        asked.clear()
        found = [(name, tensor.numel()) for name, tensor in tensors(Group().receive, specs, buffer_bytes=size)]
        assert found == [(str(n), n) for n in sizes]
        assert asked == cuts, size
    mixed = checked_specs(["a", "b"], ["int8", "float32"], [[3], []], most_elements=100)
    assert [tensor.shape for _, tensor in tensors(Group().receive, mixed, buffer_bytes=100)] == [(3,), ()]


def test_group_that_no_engine_can_be_in_is_refused_by_name():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    where = {"address": "127.0.0.1", "port": 2000, "world_size": 3, "rank_offset": 1, "prefix": "g"}
    for device, ranks, changes, reason in (
        (cpu, 3, {}, "the 3 ranks of the engines need a world_size of 4"),
        (cpu, 1, {"rank_offset": 0}, "the trainer is rank 0"),
        (cpu, 1, {"backend": "nccl"}, "with engines on cpu; take gloo"),
        (cpu, 1, {"backend": "mpi"}, "one of gloo, nccl"),
        (gpu, 1, {"kind": "stateless"}, "hands over a pickle"),
    ):
        with pytest.raises(ConfigError, match=reason):
            GroupAddress(**{"kind": "torch", "backend": "", **where, **changes}).checked(ranks, device)
    assert GroupAddress(**where, kind="torch", backend="").checked(2, gpu).backend == "nccl"


@pytest.mark.long
@pytest.mark.parametrize(
    ("trainer", "world_size", "reason"),
    [
        ("none", 2, "nothing listens at"),
        ("ends before the group stands", 2, "joining the group 'g'"),
        ("of more ranks than come", 3, "joining the group 'g'"),
    ],
)
def test_trainer_that_does_not_come_is_waited_for_a_limited_time_and_named(trainer, world_size, reason):
    engine = make_engine(tiny_model(), collective_timeout_s=4)
    with serving_with_control(engine, commands_of=lambda one: WeightReceiver(one).commands()) as case:
        other, began = Trainer(world_size=world_size), time.monotonic()
        if trainer.startswith("ends"):
            store = TCPStore("127.0.0.1", other.port, is_master=True, wait_for_workers=False)
        elif trainer != "none":
            other.begin()
        body = {**JOIN, "master_port": other.port, "world_size": world_size}
        error = call(case, "/init_weights_update_group", body, expected=400)["error"]["message"]
        assert reason in error and str(other.port) in error and time.monotonic() - began < 60
        assert state_of(case) == "SERVING" and call(case, "/v1/completions", {**GREEDY, "max_tokens": 2})
        if trainer.startswith("ends"):
            del store
