"""New weights over HTTP: paths below the root, safetensors bodies, versions; all engines get them or none."""

from __future__ import annotations

import json
import os

import pytest
from control_case import (
    WEIGHTS,
    Background,
    call,
    get,
    num_requests,
    put_weights,
    safetensors,
    serving_with_control,
    state_of,
    wait_for,
)
from echo import EchoEngine, echo_tokens

from megatron_infer.coordinator.client import InferenceClient
from megatron_infer.coordinator.commands import ReplicaCommands

OCTETS = {"Content-Type": "application/octet-stream"}
PROMPT = {"prompt": [1], "max_tokens": 60, "temperature": 0, "return_token_ids": True}


@pytest.fixture
def case(tmp_path):
    put_weights(tmp_path, "step1")
    put_weights(tmp_path, "step2", a=("F32", [2], b"\1" * 8))
    with serving_with_control(EchoEngine(step_s=0.01), EchoEngine(step_s=0.01), weights_root=str(tmp_path)) as one:
        yield one


def load(case, path, expected=200, **more):
    return call(case, "/update_weights_from_disk", {"model_path": path, **more}, expected=expected)


def digests(case):
    return [engine.controls.digest for engine in case.engines]


def versions(case):
    return [engine.controls.weight_version for engine in case.engines]


def send(case, data, expected=200, **headers):
    reply = case.http.post("/update_weights", content=data, headers=OCTETS | headers)
    assert reply.status_code == expected, reply.text
    return reply.json()


# ---------------------------------------------------------------------- files


def test_files_reach_every_engine_under_the_requested_version(case):
    assert get(case, "/get_weight_version") == {"weight_version": "0"}
    reply = load(case, "step1", weight_version="7", flush_cache=True)
    assert reply["success"] and reply["weight_version"] == "7" and reply["state"] == "SERVING"
    one, two = digests(case)
    assert one == two != "made" and versions(case) == [7, 7]
    assert get(case, "/get_weight_version") == {"weight_version": "7"}
    load(case, "step2")
    assert versions(case) == [8, 8] and digests(case) != [one, two]
    assert get(case, "/weight_info")["replicas"] == {"r0": 8, "r1": 8}
    load(case, "step2", weight_version=3)  # a restarted loop may count from any number
    assert versions(case) == [3, 3]
    choice = call(case, "/v1/completions", PROMPT | {"max_tokens": 2})["choices"][0]
    assert [span["policy_version"] for span in choice["version_spans"]] == [3]


def test_requests_continue_over_an_update_and_their_spans_name_both_versions(case):
    calls = [Background(case, "/v1/completions", PROMPT | {"prompt": [i]}) for i in range(2)]
    wait_for(lambda: all(engine.num_prompt_tokens for engine in case.engines) or num_requests(case) == 2)
    wait_for(lambda: sum(engine.stats()["num_running"] for engine in case.engines) == 2)
    load(case, "step1")
    for i, one in enumerate(calls):
        choice = one.result().json()["choices"][0]
        assert choice["token_ids"] == echo_tokens([i], 60)
        assert [span["policy_version"] for span in choice["version_spans"]] == [0, 1]


@pytest.mark.security
def test_files_outside_the_root_are_neither_read_nor_disclosed(case, tmp_path):
    root = case.config.weights_root
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    put_weights(outside)
    os.symlink(outside / "step1", f"{root}/link")
    os.mkdir(f"{root}/mixed")
    os.symlink(outside / "step1" / "model.safetensors", f"{root}/mixed/model.safetensors")
    os.symlink(f"{root}/step1", f"{root}/latest")
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickle.bin").write_bytes(b"x")
    for path, status in (
        ("..", 403), (f"../{outside.name}/step1", 403), (str(outside / "step1"), 403), ("link", 403), ("mixed", 403),
        ("/etc/passwd", 403), ("/etc/nothing", 403), ("nothing", 400), ("", 400), ("a\0b", 400), ("empty", 400),
        ("pickle.bin", 400),
    ):  # fmt: skip
        message = load(case, path, expected=status)["error"]["message"]
        assert outside.name not in message and "passwd" not in message
    assert digests(case) == ["made", "made"] and state_of(case) == "SERVING"
    load(case, "latest")
    load(case, f"{root}/step1/model.safetensors")
    assert versions(case) == [2, 2]


@pytest.mark.security
def test_server_without_a_root_reads_no_files():
    with serving_with_control() as case:
        assert "--weights-root" in load(case, "/tmp", expected=403)["error"]["message"]
        call(case, "/start_weight_update")
        error = call(case, "/update_weights", {"update_info": {"path": "/tmp"}}, expected=403)["error"]
        assert error["code"] == "no_weights_root" and state_of(case) == "UPDATING"
        call(case, "/cancel_weight_update")


# ---------------------------------------------------------------------- updates in several calls


def test_update_takes_tensor_bytes_in_chunks_and_ends_with_the_version(case, monkeypatch):
    from megatron_infer.server.control import weight_files

    monkeypatch.setattr(weight_files, "CHUNK_BYTES", 3)
    waiting = Background(case, "/v1/completions", PROMPT)
    wait_for(lambda: num_requests(case) == 1)
    call(case, "/init_weight_transfer_engine", {"init_info": {"backend": "http"}})
    assert call(case, "/start_weight_update")["state"] == "UPDATING"
    data = safetensors(**WEIGHTS, empty=("F16", [0, 4], b""))
    assert send(case, data)["num_tensors"] == 3
    send(case, safetensors(c=("I8", [5], b"hello")))
    assert not waiting.is_done
    assert call(case, "/finish_weight_update", {"weight_version": 5}) == {
        "status": "ok", "state": "SERVING", "weight_version": 5,
    }  # fmt: skip
    one, two = digests(case)
    assert one == two and versions(case) == [5, 5]
    spans = waiting.result().json()["choices"][0]["version_spans"]
    assert [span["policy_version"] for span in spans] == [0, 5]


def test_cancelled_update_leaves_everything_as_it_was(case):
    call(case, "/pause?mode=keep")
    call(case, "/start_weight_update")
    send(case, safetensors(**WEIGHTS))
    assert call(case, "/cancel_weight_update")["state"] == "PAUSED(keep)"
    assert digests(case) == ["made", "made"] and versions(case) == [0, 0]
    call(case, "/resume")
    assert call(case, "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})["output_ids"]


def header(about, data=b""):
    head = json.dumps(about).encode()
    return len(head).to_bytes(8, "little") + head + data


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "does not begin with the length"),
        (b"\x80\x04\x95garbage that is a pickle", "does not begin with the length"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "does not begin with the length"),
        ((4).to_bytes(8, "little") + b"[][]", "no JSON object"),
        (header({"a": 5}), "no JSON object"),
        (header({"a": {"dtype": "PICKLE", "shape": [], "data_offsets": [0, 0]}}), "a is PICKLE"),
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)), "a has 4 bytes"),
        (header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)), "no shape"),
        (header({"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}, bytes(4)), "no shape"),
        (header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)), "does not begin where"),
        (header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(9)), "5 bytes do not belong"),
        (header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(3)), "1 bytes do not belong"),
        (header({"x" * 600: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "600 characters"),
    ],
)  # fmt: skip
def test_body_other_than_safetensors_is_refused_and_the_update_continues(shared, data, named):
    error = send(shared, data, expected=400)["error"]
    assert named in error["message"].replace("-1 bytes", "1 bytes") and error["code"] == "invalid_safetensors"
    assert state_of(shared) == "UPDATING"


@pytest.fixture(scope="module")
def shared():
    with serving_with_control(max_weight_bytes=4096) as one:
        call(one, "/start_weight_update")
        yield one


def test_body_of_another_type_or_size_is_refused(shared):
    large = safetensors(a=("U8", [5000], bytes(5000)))
    assert "max_weight_bytes" in send(shared, large, expected=413)["error"]["message"]
    send(shared, safetensors(**WEIGHTS), expected=415, **{"Content-Type": "application/x-pickle"})
    for info in (None, {}, {"path": 5}, {"path": "a", "names": []}):
        assert "path" in call(shared, "/update_weights", {"update_info": info}, expected=400)["error"]["message"]
    assert state_of(shared) == "UPDATING"


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("phase", ["begin_weights", "write_weights", "finish_weights"])
def test_engine_that_fails_in_an_update_is_named_and_all_engines_keep_what_they_had(case, phase):
    load(case, "step1")
    before = digests(case)
    case.engines[1].controls.faults[phase] = 1
    replies = []
    for path, how in (
        ("/start_weight_update", {}),
        ("/update_weights", {"content": safetensors(**WEIGHTS), "headers": OCTETS}),
        ("/finish_weight_update", {"json": {"weight_version": 9}}),
    ):
        replies.append(case.http.post(path, **how))
        if replies[-1].status_code != 200:
            break
    error = replies[-1].json()["error"]
    assert replies[-1].status_code == 400 and [one["name"] for one in error["replicas"]] == ["r1"]
    assert phase.partition("_")[0] in error["phase"] and "1 of 2 replicas" in error["message"]
    assert error["state"] == state_of(case) == "SERVING"
    assert digests(case) == before and versions(case) == [1, 1]
    assert call(case, "/v1/completions", PROMPT | {"max_tokens": 2})["choices"][0]["token_ids"] == echo_tokens([1], 2)
    load(case, "step2")
    assert versions(case) == [2, 2] and len(set(digests(case))) == 1


def test_update_that_cannot_be_rolled_back_is_reported_and_the_next_one_repairs_it(case):
    case.engines[1].controls.faults |= {"load_weights": 1, "cancel_weights": 1}
    error = load(case, "step1", expected=500)["error"]
    assert "r1" in error["message"] and state_of(case) == "SPOILED"
    late = Background(case, "/v1/completions", PROMPT | {"max_tokens": 3})
    assert "finish an update" in call(case, "/resume", expected=409)["error"]["message"]
    case.engines[1].settle_weights()
    load(case, "step2", weight_version=4)
    assert late.result().json()["choices"][0]["token_ids"] == echo_tokens([1], 3)
    assert versions(case) == [4, 4] and len(set(digests(case))) == 1


@pytest.mark.parametrize(
    ("fault", "path", "state"),
    [
        ("pause", "/pause?mode=keep", "SERVING"),
        ("suspend", "/sleep", "SERVING"),
        ("suspend", "/sleep?tags=kv_cache", "SERVING"),
        ("pause", "/start_weight_update", "SERVING"),
    ],
)
def test_engine_that_fails_to_stop_leaves_all_engines_serving(case, fault, path, state):
    case.engines[1].controls.faults[fault] = 1
    error = call(case, path, expected=500)["error"]
    assert [one["name"] for one in error["replicas"]] == ["r1"] and error["state"] == state == state_of(case)
    assert [engine.state for engine in case.engines] == ["running", "running"]
    assert [engine.controls.suspended for engine in case.engines] == [set(), set()]
    call(case, path)


def test_wake_up_that_fails_on_one_engine_leaves_all_asleep_and_a_retry_succeeds(case):
    freed = call(case, "/sleep")
    assert freed["bytes_freed"] == {"weights": 2000, "graphs": 20, "kv_cache": 10000} and set(freed["replicas"]) == {
        "r0",
        "r1",
    }
    case.engines[0].controls.faults["resume"] = 1
    error = call(case, "/wake_up?tags=weights", expected=500)["error"]
    assert error["phase"] == "wake_up" and error["state"] == "ASLEEP(weights, graphs, kv_cache)"
    assert [len(engine.controls.suspended) for engine in case.engines] == [3, 3]
    assert call(case, "/wake_up?tags=weights")["state"] == "ASLEEP(graphs, kv_cache)"
    taken = call(case, "/wake_up?tags=kv_cache")
    assert taken["bytes_freed"]["kv_cache"] == -10000 and taken["state"] == "SERVING"
    call(case, "/v1/completions", PROMPT | {"max_tokens": 1})


def test_resume_that_fails_on_one_engine_leaves_all_paused(case):
    call(case, "/pause?mode=keep")
    case.engines[1].controls.faults["unpause"] = 1
    assert call(case, "/resume", expected=500)["error"]["state"] == state_of(case) == "PAUSED(keep)"
    assert [engine.state for engine in case.engines] == ["paused", "paused"]
    call(case, "/resume")


def test_weights_checker_finds_an_update_that_left_something_out(case):
    load(case, "step1")
    call(case, "/weights_checker", {"action": "snapshot"})
    assert call(case, "/weights_checker", {"action": "compare"})["equal"] is True
    assert call(case, "/weights_checker", {"action": "reset_tensors"})["state"] == "SPOILED"
    assert call(case, "/weights_checker", {"action": "compare"}, expected=400)["error"]["code"] == "weights_differ"
    waits = Background(case, "/v1/completions", PROMPT | {"max_tokens": 2})
    assert load(case, "step1")["state"] == "SERVING"
    assert call(case, "/weights_checker", {"action": "compare"})["equal"] is True
    assert waits.result().status_code == 200
    case.engines[1].controls.digest = "other"
    assert call(case, "/weights_checker", {"action": "checksum"}, expected=500)["error"]["code"] == "weights_differ"


def test_server_sees_a_pause_from_another_client(case):
    with InferenceClient(case.coordinator.address) as client:
        client.pause()
    assert get(case, "/is_paused") == {"is_paused": True, "state": "PAUSED(keep)"}
    call(case, "/resume")
    with InferenceClient(case.coordinator.address) as client:
        client.suspend()
    assert get(case, "/is_sleeping")["is_sleeping"] is True
    assert call(case, "/pause", expected=409)["error"]["code"] == "wrong_state"
    call(case, "/wake_up")
    assert [engine.state for engine in case.engines] == ["running", "running"]


def test_without_an_engine_a_change_is_503_and_the_state_stays(case):
    for one in case.replicas:
        one.stop()
    wait_for(lambda: not case.coordinator.core.stats()["replicas"])
    assert call(case, "/pause?mode=keep", expected=503)["error"]["code"] == "no_engine"
    assert state_of(case) == "SERVING"


def test_replicas_that_take_no_commands_are_a_403_that_says_how_to_start_them():
    """As with `serve --coordinator --control` in front of replicas without --control."""
    with serving_with_control(EchoEngine()) as case:
        case.replicas[0]._commands = ReplicaCommands(None)
        error = call(case, "/pause", expected=403)["error"]
        assert error["code"] == "refused_by_engine" and "r0: this replica takes no commands (pause)" in error["message"]
        assert "--control" in error["message"] and state_of(case) == "SERVING"
        assert call(case, "/v1/completions", PROMPT | {"max_tokens": 2})["choices"][0]["token_ids"] == echo_tokens(
            [1], 2
        )
