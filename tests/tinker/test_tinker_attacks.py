"""The Tinker API under attack: what is damaged, too large, late or another's is an error by name, and others go on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import time

import httpx
import numpy as np
import pytest
import torch
from mutations import altered, damaged, no_errors_logged, rounds, shown
from test_tinker import ADAM, TOKENS, Api, Held, message_of_batch, serving

from megatron_infer.coordinator.protocol import Overloaded
from megatron_infer.server.endpoint import Call
from megatron_infer.server.engine_client import EngineClient
from megatron_infer.server.server_config import ServerConfig
from megatron_infer.server.tinker import messages, service
from megatron_infer.server.tinker.routes import PROTOBUF
from megatron_infer.server.tinker.training import TrainingClient

__all__ = ["rounds"]
pytestmark = pytest.mark.security

UNAVAILABLE = (501, 503, 504)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("state"), max_body_bytes=1 << 22) as one:
        yield one


@pytest.fixture
def api(case):
    return Api(case.http)


def bodies_of(api, id):
    """Valid bodies by route."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 9, 2]}]}
    how = {"max_tokens": 2, "seed": 1, "temperature": 1.0, "top_k": 5, "top_p": 0.9, "stop": ["a", "b"]}
    sampler = {"session_id": api.session, "sampling_session_seq_id": 1, "base_model": "tiny"}
    return {
        "create_session": {"tags": [], "user_metadata": {}, "sdk_version": "0.38"},
        "session_heartbeat": {"session_id": api.session},
        "create_model": {
            "session_id": api.session,
            "model_seq_id": 9,
            "base_model": "tiny",
            "lora_config": {"rank": 2, "seed": 3, "train_mlp": True, "train_attn": True, "train_unembed": True},
        },
        "get_info": {"model_id": id},
        "optim_step": {"model_id": id, "seq_id": 0, "adam_params": ADAM},
        "save_weights": {"model_id": id, "seq_id": 0, "path": "one", "overwrite": True},
        "load_weights": {"model_id": id, "seq_id": 0, "path": f"tinker://{id}/weights/one", "optimizer": True},
        "weights_info": {"tinker_path": f"tinker://{id}/weights/one"},
        "save_weights_for_sampler": {"model_id": id, "seq_id": 0, "path": "two"},
        "create_sampling_session": sampler,
        "asample": {
            "prompt": prompt,
            "sampling_params": how,
            "base_model": "tiny",
            "num_samples": 2,
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 1,
            "topk_sample_logprobs": 1,
        },
        "retrieve_future": {"request_id": "0" * 32},
        "cancel_future": {"request_id": "0" * 32},
    }


def answered(api, reply):
    """A reply that is no failure of the server, nor is its future's."""
    assert reply.status_code < 500 or reply.status_code in UNAVAILABLE, reply.text
    if reply.status_code == 200 and "request_id" in (content := reply.json()) and "type" not in content:
        late = api.http.post("/api/v1/retrieve_future", json={"request_id": content["request_id"]})
        assert late.status_code in (200, 408, 410), late.text
        if late.headers["content-type"] != PROTOBUF:
            assert late.json().get("category") != "server", late.text


def trains_as_before(api, id, number):
    loss, _ = api.batch(id, number, "cross_entropy")
    assert math.isfinite(loss)


def test_damaged_bodies_are_errors_by_name_and_others_train_on(api, rounds, monkeypatch):
    id, other = api.train(0), api.train(1)
    bodies = bodies_of(api, id)
    batch = message_of_batch(id, 0, "ppo")
    with no_errors_logged():
        for place, rng in enumerate(rounds(long=150)):
            route = rng.choice(list(bodies))
            body, content = altered(bodies[route], rng), damaged(batch, rng)
            with monkeypatch.context() as patch:
                patch.setattr(service, "HOLD_S", 1.0)  # a call may wait for a smaller number, which does not come
                with shown((route, body)):
                    answered(api, api.http.post(f"/api/v1/{route}", json=body))
                with shown(content):
                    answered(api, api.send(content))
            if place % 20 == 0:
                trains_as_before(api, other, 0)


def why(reply, status=400):
    assert reply.status_code == status, reply.text
    return reply.json()["error"]["message"]


def test_a_page_of_another_site_can_send_nothing_that_is_read(api):
    id = api.train()
    plain = {"content-type": "text/plain"}
    for route, body in bodies_of(api, id).items():
        reply = api.http.post(f"/api/v1/{route}", content=json.dumps(body), headers=plain)
        assert "application/json" in why(reply, 415), route
    batch = message_of_batch(id, 1, "cross_entropy")
    assert PROTOBUF in why(api.http.post("/api/v1/forward_backward", content=batch, headers=plain), 415)
    api.batch(id, 1, "cross_entropy")


def test_samples_and_batches_are_within_the_servers_limits(case, api):
    id, settings = api.train(), ServerConfig()
    prompt = {"chunks": [{"tokens": [5, 9]}]}
    for name, most, option in [
        ("num_samples", settings.max_n, "max_n"),
        ("topk_sample_logprobs", settings.max_logprobs, "max_logprobs"),
        ("topk_prompt_logprobs", settings.max_logprobs, "max_logprobs"),
    ]:
        body = {"base_model": "tiny", "prompt": prompt, "sampling_params": {"max_tokens": 1}, name: most + 1}
        text = why(api.http.post("/api/v1/asample", json=body))
        assert text.startswith(name) and option in text
    for stop in (["x"] * (settings.max_stop + 1), ["x" * (settings.max_stop_chars + 1)], [1] * (settings.max_stop + 1)):
        body = {"base_model": "tiny", "prompt": prompt, "sampling_params": {"stop": stop}}
        assert "max_stop" in why(api.http.post("/api/v1/asample", json=body))
    values = json.dumps({"base_model": "tiny", "prompt": prompt, "sampling_params": {}, "x": [0] * (1 << 20)})
    assert (
        api.http.post("/api/v1/asample", content=values, headers={"content-type": "application/json"}).status_code
        == 413
    )
    assert "4097 sequences" in why(api.send_batch(id, 0, "cross_entropy", [[1, 2]] * 4097))
    assert api.send_batch(id, 1, "cross_entropy", [[1] * 40_000] * 6).status_code == 413
    api.batch(id, 1, "cross_entropy", [[1, 2]] * 500)
    assert api.result(api.step(id, 2))["metrics"]["version"] == 1


def test_another_call_with_a_number_that_is_taken_is_refused_and_the_first_goes_on(api):
    id = api.train()
    first = api.send_batch(id, 1, "cross_entropy")
    for other in (
        api.send_batch(id, 1, "importance_sampling"),
        api.http.post("/api/v1/optim_step", json={"model_id": id, "seq_id": 1, "adam_params": ADAM}),
        api.send_batch(id, 1, "no loss"),
    ):
        assert "another call has the number 1" in why(other) or "unknown loss" in why(other)
    assert api.send_batch(id, 1, "cross_entropy").json() == first.json()
    api.result(first.json())
    assert api.result(api.step(id, 2))["metrics"]["version"] == 1
    how = {"session_id": api.session, "sampling_session_seq_id": 3, "base_model": "tiny"}
    sampler = api.call("create_sampling_session", **how)["sampling_session_id"]
    assert api.call("create_sampling_session", **how)["sampling_session_id"] == sampler
    drawn = api.send_sample([5, 9], sampling_session_id=sampler, seq_id=0)
    assert api.send_sample([5, 9], sampling_session_id=sampler, seq_id=0) == drawn
    chunks = [{"tokens": [9, 5]}]
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": chunks}, "sampling_params": {}}
    assert "another call has the number 0" in why(api.http.post("/api/v1/asample", json=body))


def test_gradients_and_steps_beyond_fp32_cost_their_own_client_alone(case, api):
    id, other = api.train(0), api.train(1)
    large = {"weights": np.full(4, 1e25, "<f4")}
    api.batch(id, 1, "cross_entropy", TOKENS[:1], given=large)
    assert "beyond fp32" in api.result(api.step(id, 2))["error"]
    assert "no gradients" in api.result(api.step(id, 3))["error"]
    for name, value in {"learning_rate": 1e300, "weight_decay": 1e16, "eps": 1e-300, "beta2": 1}.items():
        assert name in why(api.http.post("/api/v1/optim_step", json={"model_id": id, "adam_params": {name: value}}))
    api.batch(id, 4, "cross_entropy")
    assert api.result(api.step(id, 5))["metrics"]["version"] == 1
    assert all(bool(torch.isfinite(one).all()) for one in case.service.model(id).client.parameters)
    good = api.sampler(other, 1)["sampling_session_id"]
    before = api.sample([5, 9], sampling_session_id=good)[0][0]
    api.batch(id, 6, "cross_entropy")
    api.result(api.step(id, 7, learning_rate=1e15))
    ruined = api.sampler(id, 8)["sampling_session_id"]
    wrong = api.send_sample([5, 9], sampling_session_id=ruined)
    again = api.sample([5, 9], sampling_session_id=good)[0][0]
    assert again[0] == before[0]
    print(api.result(wrong))
    assert "not finite" in api.result(api.send_batch(id, 9, "cross_entropy").json())["error"]
    trains_as_before(api, other, 2)


def test_results_that_nobody_fetches_are_dropped_and_no_call_is_computed_twice(api, case, monkeypatch):
    id, held = api.train(), case.service
    monkeypatch.setattr(service, "MAX_RESULT_BYTES", 400)
    sent = [api.send_batch(id, number, "cross_entropy").json() for number in range(1, 21)]
    assert api.result(api.step(id, 21))["metrics"]["version"] == 1
    api.sampler(id, 0)
    gone = api.http.post("/api/v1/retrieve_future", json={"request_id": sent[0]["request_id"]})
    assert gone.status_code == 410
    assert sum(one.num_bytes for one in held._futures.values()) < 1000
    assert len(held.model(id).futures) < 10
    assert "not held any more" in why(api.send_batch(id, 1, "cross_entropy"), 410)
    assert api.result(api.step(id, 22))["error"].startswith("optim_step before any")
    how = {"session_id": api.session, "base_model": "tiny"}
    sampler = api.call("create_sampling_session", sampling_session_seq_id=0, **how)["sampling_session_id"]
    for number in range(10):
        api.sample([5, 9], sampling_session_id=sampler, seq_id=number)
    assert len(held.sampler(sampler).futures) < 10


def test_batches_that_wait_take_room_of_bodies(tmp_path, monkeypatch):
    held = Held(monkeypatch, TrainingClient, "forward_backward")
    with serving(tmp_path, max_body_bytes=20_000, max_bodies_bytes=40_000) as case:
        api = Api(case.http)
        id, tokens = api.train(), [[1, 2, 3]] * 100
        size = len(message_of_batch(id, 1, "cross_entropy", tokens))
        replies = []
        while (reply := api.send_batch(id, len(replies) + 1, "cross_entropy", tokens)).status_code == 200:
            replies.append(reply)
            assert len(replies) * size < 40_000
        assert reply.status_code == 503 and reply.headers["retry-after"] and replies
        assert "max_bodies_bytes" in reply.json()["error"]["message"]
        held.go_on.set()
        for one in replies:
            api.result(one.json())
        api.batch(id, len(replies) + 1, "cross_entropy", tokens)


@pytest.mark.parametrize("loss", ["cross_entropy", "no loss"])
def test_a_large_batch_is_read_outside_of_the_event_loop(api, monkeypatch, loss):
    loops, read, tokens = [], messages.read, [[1, 2, 3]] * 1000
    monkeypatch.setattr(messages, "read", lambda *sent: loops.append(asyncio._get_running_loop()) or read(*sent))
    id = api.train()
    small = api.send_batch(id, 1, loss).json()
    large = api.send_batch(id, 2, loss, tokens).json()
    assert [isinstance(api.result(sent), dict) for sent in (small, large)] == [loss == "no loss"] * 2
    assert [loop is None for loop in loops] == [False, True]


def test_a_batch_of_a_client_that_is_gone_has_its_room_until_no_thread_reads_it(tmp_path, monkeypatch):
    with serving(tmp_path, max_body_bytes=200_000, max_bodies_bytes=300_000) as case:
        api = Api(case.http)
        id, tokens = api.train(), [[1, 2, 3]] * 1000
        with monkeypatch.context() as patch:
            held = Held(patch, messages, "read")
            with pytest.raises(httpx.TimeoutException):
                content, headers = message_of_batch(id, 1, "cross_entropy", tokens), {"content-type": PROTOBUF}
                case.http.post("/api/v1/forward_backward", content=content, headers=headers, timeout=1)
            assert held.begun.wait(60) and len(content) > 100_000
            padded = {"content": b" " * 190_000, "headers": {"content-type": "application/json"}}
            for _ in range(10):  # the server learns of it meanwhile
                assert "max_bodies_bytes" in why(case.http.post("/api/v1/create_session", **padded), 503)
                time.sleep(0.1)
            held.go_on.set()
        end = time.monotonic() + 60
        while (status := case.http.post("/api/v1/create_session", **padded).status_code) != 400:
            assert status == 503 and time.monotonic() < end
        api.batch(id, 1, "cross_entropy", tokens)


def within(*keys, inner):
    """A protobuf field in others, by their keys, the outermost first."""
    for key in reversed(keys):
        size, length = len(inner), b""
        while size > 127:
            size, length = size >> 7, length + bytes([size & 127 | 128])
        inner = bytes([key]) + length + bytes([size]) + inner
    return inner


DATUM, CHUNK, TEXT, PAIR, TENSOR = 0x1A, 0x0A, 0x0A, 0x12, 0x12
MANY = 1 << 20
CROWDED = {
    "sequences": within(DATUM, inner=b"") * MANY,
    "chunks": within(DATUM, inner=within(CHUNK, inner=b"") * MANY),
    "texts": within(DATUM, CHUNK, inner=within(TEXT, inner=b"") * MANY),
    "pairs": within(DATUM, inner=within(PAIR, inner=b"") * MANY),
    "settings": b"\x2a\x00" * MANY,
    "sizes": within(DATUM, PAIR, TENSOR, inner=b"\x20\x01" * MANY),
    "packed sizes": within(DATUM, PAIR, TENSOR, 0x22, inner=b"\x01" * 2 * MANY),
    "unknown fields": b"\x78\x01" * MANY,
    "groups": b"\x7b" * 2 * MANY,
}


@pytest.mark.parametrize("name", CROWDED)
def test_a_batch_of_more_fields_than_others_can_wait_for_is_refused_before_it_is_parsed(api, name):
    assert "more than 524,288 fields" in why(api.send(CROWDED[name]), 413)


def test_what_is_large_by_its_bytes_is_parsed_and_a_number_without_end_is_no_batch(api):
    content = within(DATUM, CHUNK, TEXT, CHUNK, inner=bytes(3 << 20))
    (datum,) = messages.read("ForwardBackwardRequest", content).data
    assert len(datum.model_input[0].encoded_text.tokens) == 3 << 20
    for damaged_one in (b"\x1a" + b"\xff" * (3 << 20), content[:-1], content[: 2 << 20] + b"\xff"):
        assert "no ForwardBackwardRequest" in why(api.send(damaged_one))


def test_a_batch_that_was_refused_leaves_nothing_of_its_body(api):
    id, tokens = api.train(), [[1, 2, 3]] * 1000
    missing = {"given": {"advantages": np.ones(2, "<f4")}}
    wrong = {"given": {"weights": np.ones(2, "<f4"), "target_tokens": np.ones((1, 2), "<i8")}}
    for number, (loss, how) in enumerate((("no loss", {}), ("cross_entropy", missing), ("cross_entropy", wrong)), 1):
        assert "error" in api.result(api.send_batch(id, number, loss, tokens, **how).json())
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, Call) and len(one.body) > 10_000]


def test_a_sample_that_finds_the_queue_full_is_gone_so_that_the_sdk_draws_it_again(api, monkeypatch):
    @contextlib.asynccontextmanager
    async def full(*args, **options):
        raise Overloaded("the queue is full")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(EngineClient, "submit", full)
        sent = api.send_sample([5, 9], base_model="tiny")
        assert "draw it again" in why(api.http.post("/api/v1/retrieve_future", json=sent), 410)
    api.sample([5, 9], base_model="tiny")


def test_names_of_files_that_are_being_written_are_refused(case, api):
    id = api.train()
    for name in ("one.tmp", "one\n", "..", ".", "a/b", "\0", "", "é", "a" * 129):
        for route in ("save_weights", "save_weights_for_sampler"):
            assert "path" in why(api.http.post(f"/api/v1/{route}", json={"model_id": id, "path": name})), name


def test_a_clock_that_jumps_ends_nothing(case, api, monkeypatch):
    id = api.train()
    now = time.time
    for jump in (1e9, -1e9):
        monkeypatch.setattr(time, "time", lambda jump=jump: now() + jump)
        loss, _ = api.batch(id, 0, "cross_entropy")
        assert math.isfinite(loss) and api.call("session_heartbeat", session_id=api.session)
        assert "metrics" in api.result(api.step(id, 0))
