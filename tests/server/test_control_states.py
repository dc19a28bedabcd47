"""Each control route in each state: its reply; a refusal names the state and changes nothing."""

from __future__ import annotations

import base64

import httpx
import pytest
from control_case import (
    NAMES,
    STATES,
    WEIGHTS,
    call,
    enter_state,
    get,
    put_weights,
    safetensors,
    serving_with_control,
    state_of,
)
from echo import EchoEngine
from server_case import serving

from megatron_infer.coordinator.protocol import Answer
from megatron_infer.server.control import fanout, sglang_routes, vllm_routes

GROUP = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3, "group_name": "g"}
TENSORS = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]], "group_name": "g"}
IN_BODY = {"serialized_named_tensors": [base64.b64encode(safetensors(**WEIGHTS)).decode()]}
ADAPTER = {"lora_name": "a", "config_dict": {"r": 1, "lora_alpha": 1}}
AREAL_ADAPTER = {
    **TENSORS,
    "lora_name": "b",
    "lora_int_id": 1,
    "lora_target_modules": [],
    "lora_rank": 1,
    "lora_alpha": 1,
}
PUBLISHED = {"source_dir": ".", "local_checkpoint_dir": "/local", "target_version": 1}
SLEEP = {"method": "skyrl_sleep_for_weight_sync", "kwargs": {"offload_kv": True}}
WAKE = {"method": "skyrl_wake_for_weight_sync", "kwargs": {"tags": ["kv_cache"]}}
SHORT = {"max_new_tokens": 1, "temperature": 0}
WAITS = 0
"""No answer yet: the request is queued until the engines go on."""
ALWAYS = (200,) * 6
STILL = (200, 200, 409, 409, 409, 409)
AT_ALL = (200, 200, 200, 200, 409, 409)
WHOLE = (200, 200, 200, 409, 409, 200)
BRACKET = (409, 409, 409, 409, 200, 409)
VERSIONS = (200, 200, 200, 409, 409, 409)
JOINS = (200, 200, 200, 200, 409, 200)
RECEIVES = (409, 200, 409, 409, 400, 200)
"""In UPDATING no engine has joined."""
LOADS = (200, 200, 200, 409, 409, 409)
DRAWS = (200, WAITS, 503, 503, WAITS, WAITS)

TABLE = [
    # method, path, body, answers in SERVING, PAUSED, DROWSY (asleep but for the weights), ASLEEP, UPDATING, SPOILED
    ("POST", "/pause?mode=keep", None, STILL),
    ("POST", "/pause?mode=abort", None, STILL),
    ("POST", "/pause?mode=wait", None, STILL),
    ("POST", "/resume", None, STILL),
    ("GET", "/is_paused", None, ALWAYS),
    ("POST", "/abort_requests", None, ALWAYS),
    ("POST", "/inference/v1/abort_requests", {"request_ids": ["x"]}, ALWAYS),
    ("POST", "/sleep?level=0", None, AT_ALL),
    ("POST", "/sleep?level=1&mode=keep", None, AT_ALL),
    ("POST", "/sleep?level=2", None, AT_ALL),
    ("POST", "/sleep?tags=weights", None, AT_ALL),
    ("POST", "/wake_up", None, (409, 409, 200, 200, 409, 409)),
    ("POST", "/wake_up?tags=weights", None, (409, 409, 409, 200, 409, 409)),
    ("POST", "/wake_up?tags=kv_cache", None, (409, 409, 200, 200, 409, 409)),
    ("GET", "/is_sleeping", None, ALWAYS),
    ("POST", "/reset_prefix_cache", None, AT_ALL),
    ("POST", "/reset_prefix_cache?reset_running_requests=true", None, AT_ALL),
    ("GET", "/get_world_size", None, ALWAYS),
    ("GET", "/get_world_size/", None, ALWAYS),
    ("GET", "/health/", None, ALWAYS),
    ("POST", "/reset_prefix_cache/", None, AT_ALL),
    ("POST", "/init_weight_transfer_engine", {"init_info": {"backend": "disk"}}, ALWAYS),
    ("POST", "/start_weight_update", None, WHOLE),
    ("POST", "/update_weights", {"update_info": {"path": "step1"}}, BRACKET),
    ("POST", "/finish_weight_update", {"weight_version": 100}, BRACKET),
    ("POST", "/cancel_weight_update", None, BRACKET),
    ("POST", "/update_weight_version", {"weight_version": 200}, VERSIONS),
    ("GET", "/weight_info", None, ALWAYS),
    ("POST", "/pause_generation", {"mode": "in_place"}, STILL),
    ("POST", "/pause_generation", {"mode": "retract"}, STILL),
    ("POST", "/pause_generation", {}, STILL),
    ("POST", "/continue_generation", {}, STILL),
    ("GET", "/flush_cache", None, AT_ALL),
    ("POST", "/flush_cache", None, AT_ALL),
    ("POST", "/abort_request", {"abort_all": True}, ALWAYS),
    ("POST", "/release_memory_occupation", {}, AT_ALL),
    ("POST", "/release_memory_occupation", {"tags": ["kv_cache"]}, AT_ALL),
    ("POST", "/resume_memory_occupation", {}, (409, 409, 200, 200, 409, 409)),
    ("POST", "/resume_memory_occupation", {"tags": ["weights"]}, (409, 409, 409, 200, 409, 409)),
    ("POST", "/update_weights_from_disk", {"model_path": "step1"}, WHOLE),
    ("POST", "/update_weight_version", {"new_version": "step-200", "abort_all_requests": True}, VERSIONS),
    ("POST", "/init_weights_update_group", GROUP, JOINS),
    ("POST", "/areal_init_weights_update_group", GROUP, JOINS),
    ("POST", "/update_weights_from_distributed", TENSORS, RECEIVES),
    ("POST", "/areal_init_weights_update_group", GROUP, JOINS),
    ("POST", "/areal_set_update_weight_meta", TENSORS, ALWAYS),
    ("POST", "/areal_update_weights_xccl", {}, RECEIVES),
    ("POST", "/update_weights_from_tensor", IN_BODY, (409, 200, 409, 409, 200, 200)),
    ("POST", "/init_weights_update_group", GROUP, JOINS),  # a refused call before has left it
    ("POST", "/load_lora_adapter_from_distributed", {**ADAPTER, **TENSORS}, LOADS),
    ("POST", "/load_lora_adapter_from_tensors", {**ADAPTER, **IN_BODY}, LOADS),
    ("POST", "/areal_set_update_weight_meta_lora", AREAL_ADAPTER, ALWAYS),
    ("POST", "/areal_update_weights_lora_xccl", AREAL_ADAPTER, (409, 200, 409, 409, 409, 409)),
    ("POST", "/destroy_weights_update_group", {"group_name": "g"}, ALWAYS),
    ("POST", "/pull_weights", PUBLISHED, ALWAYS),
    ("POST", "/collective_rpc", SLEEP, AT_ALL),
    ("POST", "/collective_rpc", WAKE, (409, 409, 200, 200, 409, 409)),
    ("GET", "/get_weight_version", None, ALWAYS),
    ("POST", "/weight_checker", {"action": "checksum"}, WHOLE),
    ("POST", "/shutdown_weight_transfer_engine", None, ALWAYS),
    ("POST", "/release_kv_cache_memory", None, AT_ALL),
    ("POST", "/reset_mm_cache", None, ALWAYS),
    ("POST", "/finish_session?session_id=7", None, ALWAYS),
    ("POST", "/reset_encoder_cache", None, ALWAYS),
    ("GET", "/release_memory_occupation", {"tags": ["kv_cache"]}, AT_ALL),
    ("GET", "/resume_memory_occupation", {}, (409, 409, 200, 200, 409, 409)),
    ("GET", "/weights_checker", {"action": "checksum"}, WHOLE),
    ("POST", "/begin_weight_update", {"selector": "all"}, WHOLE),
    ("POST", "/end_weight_update", {}, BRACKET),
    ("POST", "/areal_pause_generation", {}, STILL),
    ("POST", "/areal_continue_generation", {}, STILL),
    ("POST", "/areal_update_weights", {"model_path": "step1"}, WHOLE),
    ("POST", "/weights_checker", {"action": "checksum"}, WHOLE),
    ("POST", "/weights_checker", {"action": "snapshot"}, WHOLE),
    ("POST", "/weights_checker", {"action": "reset"}, WHOLE),
    ("GET", "/server_info", None, ALWAYS),
    ("GET", "/get_server_info", None, ALWAYS),
    ("GET", "/v1/loads?include=core", None, ALWAYS),
    ("GET", "/health", None, ALWAYS),
    ("GET", "/v1/health", None, ALWAYS),
    ("POST", "/generate", {"input_ids": [1], "sampling_params": SHORT}, DRAWS),
    ("POST", "/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1}}, DRAWS),
    ("POST", "/generate/", {"prompts": [[1]], "max_tokens": 1}, DRAWS),
    ("POST", "/v1/completions", {"prompt": [1], "max_tokens": 1}, DRAWS),
    ("POST", "/v1/embeddings", {"input": [1]}, DRAWS),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, DRAWS),
]


def answer(case, method, path, body, *, timeout):
    try:
        return case.http.request(method, path, json=body, timeout=timeout)
    except httpx.ReadTimeout:
        return None


@pytest.mark.parametrize(
    "place",
    [pytest.param(i, marks=[pytest.mark.long] * (i % 2)) for i in range(len(STATES))],
    ids=STATES,
)
def test_every_route_answers_as_in_the_table(place, tmp_path):
    path, wrong = put_weights(tmp_path), []
    put_weights(tmp_path, "weight_v000001")
    with serving_with_control(EchoEngine(), EchoEngine(), weights_root=str(tmp_path)) as case:
        for method, route, body, expected in TABLE:
            enter_state(case, STATES[place], path)
            name = NAMES[STATES[place]]
            reply = answer(case, method, route, body, timeout=0.3 if expected[place] == WAITS else 30)
            status = WAITS if reply is None else reply.status_code
            if status != expected[place]:
                wrong.append((method, route, body, status, expected[place], reply and reply.text))
            if status == 409:
                error = reply.json()["error"]
                assert name.split("(")[0] in error["message"] and error["code"] == "wrong_state", (route, error)
                assert state_of(case) == name, route
            if status == 503:
                assert name in reply.json()["error"]["message"] and int(reply.headers["retry-after"]) > 0
        enter_state(case, "SERVING", path)
        call(case, "/generate", {"input_ids": [1], "sampling_params": SHORT})
    assert not wrong


def routes_of(case):
    document = get(case, "/openapi.json")["paths"]
    return {(method.upper(), path) for path, methods in document.items() for method in methods}


@pytest.mark.parametrize(
    ("kinds", "status"),
    [
        (("WrongState", "WrongState"), 409),
        (("WrongState", "AdapterInUse"), 500),
        (("WrongState", "ReplicaLost"), 503),
        (("RequestError", "AccessRefused"), 403),
        (("TransitionTimeout", "RuntimeError"), 504),
    ],
)
def test_command_that_fails_in_several_ways_has_the_status_of_all_or_the_gravest(kinds, status):
    failed = {f"replica{at}": Answer(ok=False, kind=kind, message="no") for at, kind in enumerate(kinds)}
    error = fanout._failure(failed, 3, "pause", "SERVING")
    assert error.status == status and "2 of 3 replicas" in str(error)


def test_table_has_every_route_of_control():
    with serving_with_control() as case, serving() as plain:
        added = routes_of(case) - routes_of(plain)
    listed = {(method, path.partition("?")[0]) for method, path, _, _ in TABLE}
    listed |= {("POST", path) for path in ("/chat/", "/get_sequence_logprobs/", "/skyrl/v1/generate")}  # as /generate/
    listed |= {("POST", path) for path in ("/start_profile", "/stop_profile")}  # test_control_engine.py
    listed |= {("POST", f"/v1/replicas/{{name}}/{verb}") for verb in ("drain", "undrain")}  # test_replica_routes.py
    adapters = {f"{prefix}/{verb}_lora_adapter" for prefix in ("", "/v1") for verb in ("load", "unload")}
    listed |= {("POST", path) for path in adapters}  # tests/models/lora/test_serve.py
    refused = {("POST", path) for path in (*sglang_routes.NOT_SERVED, *vllm_routes.NOT_SERVED)}
    assert added - refused - {("POST", "/get_weight_version")} <= listed and refused < added


def test_refusal_of_an_unserved_control_names_what_is_served():
    with serving_with_control() as case:
        for path, reason in (sglang_routes.NOT_SERVED | vllm_routes.NOT_SERVED).items():
            error = call(case, path, expected=501)["error"]
            assert error["code"] == "not_served" and reason in error["message"]
        for name, info in (("nccl", {"backend": "nccl"}), ("handles", {"backend": "disk", "handles": 1})):
            error = call(case, "/init_weight_transfer_engine", {"init_info": info}, expected=400)["error"]
            assert name in error["message"] and "disk" in error["message"] and "master_address" in error["message"]
        assert state_of(case) == "SERVING"


@pytest.fixture(scope="module")
def shared():
    with serving_with_control() as case:
        yield case


@pytest.mark.security
def test_control_without_a_key_is_refused_to_pages_of_other_sites(shared):
    host = shared.url.removeprefix("http://")
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example"},
    ):
        error = call(shared, "/pause", expected=403, **headers)["error"]
        assert error["code"] == ("host_not_allowed" if "Host" in headers else "foreign_page")
    assert state_of(shared) == "SERVING"
    for headers in ({"Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}):
        call(shared, "/flush_cache", **headers)
    with serving_with_control(api_key="k") as case:
        assert case.http.post("/pause").status_code == 401
        key = {"Authorization": "Bearer k", "Origin": "http://other.example"}
        assert case.http.post("/pause", headers=key).status_code == 200
