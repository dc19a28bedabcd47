"""Requests while engines are paused or asleep: frozen, ended with partial output, waited for, queued, refused."""

from __future__ import annotations

import json
import time

import httpx
import pytest
from control_case import Background, call, get, num_requests, serving_with_control, state_of, wait_for
from echo import VOCAB, EchoEngine, echo_tokens
from server_case import events, raw_stream, tokenizer

LONG = 120
"""Tokens of a call that others join while it runs: 1.2 s in an engine of `slow`."""
COMPLETION = "/v1/completions"


def ask(prompt, count=LONG, **changes):
    return {"prompt": prompt, "max_tokens": count, "temperature": 0, "return_token_ids": True, **changes}


def native(prompt, count=LONG, **changes):
    return {"input_ids": prompt, "sampling_params": {"max_new_tokens": count, "temperature": 0}, **changes}


def all_running(case, count):
    wait_for(lambda: sum(engine.stats()["num_running"] for engine in case.engines) == count)


@pytest.fixture
def slow():
    with serving_with_control(EchoEngine(step_s=0.01), EchoEngine(step_s=0.01), show_cached_tokens=True) as case:
        yield case


def test_pause_keep_freezes_requests_and_resume_continues_them_unchanged(slow):
    calls = [Background(slow, COMPLETION, ask([i])) for i in range(4)]
    all_running(slow, 4)
    assert call(slow, "/pause?mode=keep")["num_aborted"] == 0
    steps = [engine.num_prompt_tokens for engine in slow.engines]
    late = Background(slow, COMPLETION, ask([9], 4))
    time.sleep(0.3)
    assert not any(one.is_done for one in (*calls, late))
    assert steps == [engine.num_prompt_tokens for engine in slow.engines]
    assert get(slow, "/is_paused") == {"is_paused": True, "state": "PAUSED(keep)"}
    call(slow, "/resume")
    for i, one in enumerate(calls):
        choice = one.result().json()["choices"][0]
        assert choice["token_ids"] == echo_tokens([i], LONG) and choice["finish_reason"] == "length"
    assert late.result().json()["choices"][0]["token_ids"] == echo_tokens([9], 4)


def test_frozen_stream_sends_keepalive_comments_and_loses_nothing():
    with serving_with_control(EchoEngine(step_s=0.01), keep_alive_s=0.05) as case:
        connection = raw_stream(case, COMPLETION, **ask([5]))
        all_running(case, 1)
        call(case, "/pause?mode=keep")
        data = b""
        connection.settimeout(10)
        while data.count(b": keep-alive") < 4:
            data += connection.recv(4096)
        call(case, "/resume")
        while b"[DONE]" not in data:
            data += connection.recv(4096)
        connection.close()
        lines = [line.split("\r\n")[-1] for line in data.decode().split("\n") if line.startswith("data: ")]
        tokens = [token for chunk in events(lines) for token in chunk["choices"][0].get("token_ids", [])]
        assert tokens == echo_tokens([5], LONG)


@pytest.mark.parametrize(
    ("path", "body"), [("/pause?mode=abort", None), ("/pause", None), ("/pause_generation", {"mode": "abort"})]
)
def test_pause_abort_returns_every_client_its_partial_output(slow, path, body):
    calls = [Background(slow, COMPLETION, ask([i], 500)) for i in range(3)]
    calls.append(Background(slow, "/generate", native([3], 500)))
    all_running(slow, 4)
    assert call(slow, path, body)["num_aborted"] == 4
    assert state_of(slow) == "PAUSED(abort)"
    for i, one in enumerate(calls[:3]):
        choice = one.result().json()["choices"][0]
        assert choice["finish_reason"] == "abort" and choice["token_ids"] == echo_tokens([i], len(choice["token_ids"]))
    reply = calls[3].result().json()
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert reply["output_ids"] == echo_tokens([3], len(reply["output_ids"])) and 0 < len(reply["output_ids"]) < 500
    assert num_requests(slow) == 0


def test_pause_wait_lets_requests_end_while_new_ones_wait(slow):
    first = Background(slow, COMPLETION, ask([1]))
    all_running(slow, 1)
    pausing = Background(slow, "/pause?mode=wait", None)
    time.sleep(0.5)  # it has arrived by then, and the first one runs for longer
    second = Background(slow, COMPLETION, ask([2], 4))
    choice = first.result().json()["choices"][0]
    assert choice["finish_reason"] == "length" and choice["token_ids"] == echo_tokens([1], LONG)
    assert pausing.result().json()["state"] == "PAUSED(wait)"
    time.sleep(0.1)
    assert not second.is_done
    call(slow, "/resume")
    assert second.result().json()["choices"][0]["token_ids"] == echo_tokens([2], 4)


def test_pause_wait_for_paused_requests_is_refused(slow):
    one = Background(slow, COMPLETION, ask([1]))
    all_running(slow, 1)
    call(slow, "/pause?mode=keep")
    assert "resume first" in call(slow, "/pause?mode=wait", expected=409)["error"]["message"]
    call(slow, "/pause?mode=abort")
    assert one.result().json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/get_sequence_logprobs/", {"sequences": [[1, 2]], "prompt_lengths": [1], "top_logprobs": 1}),
        ("/v1/embeddings", {"input": [1, 2]}),
        ("/v1/score", {"query": [1], "items": [[2]], "label_token_ids": [3]}),
    ],
)
def test_scores_and_vectors_that_an_abort_cut_are_an_error_and_never_short(slow, path, body):
    call(slow, "/pause?mode=keep")
    one = Background(slow, path, body)
    wait_for(lambda: sum(engine.stats()["num_waiting"] for engine in slow.engines) == 1)
    call(slow, "/pause?mode=abort")
    reply = one.result()
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "aborted", reply.text


def test_retract_recomputes_requests_and_gives_the_same_tokens(slow):
    calls = [Background(slow, "/generate", native([i])) for i in range(2)]
    all_running(slow, 2)
    call(slow, "/pause_generation", {"mode": "retract"})
    assert [engine.controls.num_requeued for engine in slow.engines] == [1, 1]
    call(slow, "/continue_generation", {})
    assert [one.result().json()["output_ids"] for one in calls] == [echo_tokens([i], LONG) for i in range(2)]
    call(slow, "/reset_prefix_cache?reset_running_requests=true")
    assert [engine.controls.num_requeued for engine in slow.engines] == [2, 2]


def test_abort_ends_the_named_request_alone_also_one_that_waits(slow):
    calls = {
        "r1": Background(slow, "/generate", native([1], 500, rid="r1")),
        "r2": Background(slow, "/generate", native([2], 500, rid="r2")),
        "r3": Background(
            slow, "/inference/v1/generate",
            {"token_ids": [3], "request_id": "r3", "sampling_params": {"max_tokens": 500, "temperature": 0}},
        ),
    }  # fmt: skip
    all_running(slow, 3)
    assert call(slow, "/abort_request", {"rid": "nobody"})["num_aborted"] == 0
    assert call(slow, "/abort_request", {"rid": "r1"})["num_aborted"] == 1
    assert calls["r1"].result().json()["meta_info"]["finish_reason"]["type"] == "abort"
    call(slow, "/pause?mode=keep")
    late = Background(slow, "/generate", native([4], 500, rid="r4"))
    wait_for(lambda: num_requests(slow) == 3)
    assert call(slow, "/inference/v1/abort_requests", {"request_ids": ["r3", "r4"]})["num_aborted"] == 2
    choice = calls["r3"].result().json()["choices"][0]
    assert choice["finish_reason"] == "abort" and choice["token_ids"] == echo_tokens([3], len(choice["token_ids"]))
    assert late.result().json()["output_ids"] == []
    assert not calls["r2"].is_done
    assert call(slow, "/abort_request", {"abort_all": True})["num_aborted"] == 1
    assert calls["r2"].result().json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_abort_takes_the_ids_that_openai_s_replies_and_the_caller_s_header_name(slow):
    one = Background(slow, COMPLETION, ask([1], 500))
    two = Background(slow, COMPLETION, ask([2], 500), **{"X-Request-Id": "mine"})
    three = Background(slow, COMPLETION, ask([3], 500))
    all_running(slow, 3)
    assert call(slow, "/abort_requests", {"request_ids": ["mine"]})["num_aborted"] == 1
    assert two.result().json()["choices"][0]["finish_reason"] == "abort"
    assert not one.is_done and not three.is_done
    call(slow, "/abort_requests")
    assert {x.result().json()["choices"][0]["finish_reason"] for x in (one, three)} == {"abort"}


def test_requests_queue_while_paused_up_to_the_limit_and_are_refused_beyond():
    with serving_with_control(EchoEngine(max_requests=1), max_queue=2) as case:
        call(case, "/pause?mode=keep")
        calls = [Background(case, COMPLETION, ask([i], 2)) for i in range(4)]  # two fit the replica, two wait
        wait_for(lambda: case.coordinator.core.dispatch.num_waiting == 2)
        refused = case.http.post(COMPLETION, json=ask([9], 2))
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
        call(case, "/resume")
        assert {one.result().status_code for one in calls} == {200}


def test_sleep_ends_keeps_or_waits_for_requests_and_refuses_new_ones(slow):
    kept = Background(slow, COMPLETION, ask([1]))
    all_running(slow, 1)
    call(slow, "/sleep?mode=keep")
    refused = slow.http.post(COMPLETION, json=ask([2], 2))
    assert refused.status_code == 503 and "ASLEEP(weights, graphs, kv_cache)" in refused.json()["error"]["message"]
    assert refused.json()["error"]["code"] == "asleep" and refused.headers["retry-after"]
    assert slow.http.get("/health_generate").status_code == 503
    call(slow, "/wake_up")
    assert kept.result().json()["choices"][0]["token_ids"] == echo_tokens([1], LONG)
    ended = Background(slow, COMPLETION, ask([1], 500))
    all_running(slow, 1)
    call(slow, "/sleep")
    assert ended.result().json()["choices"][0]["finish_reason"] == "abort"
    call(slow, "/wake_up")
    waited = Background(slow, COMPLETION, ask([1]))
    all_running(slow, 1)
    call(slow, "/sleep?mode=wait")
    assert waited.result().json()["choices"][0]["finish_reason"] == "length"


def test_sleep_of_level_0_queues_requests_as_a_pause_does(slow):
    call(slow, "/sleep?level=0&mode=keep")
    assert get(slow, "/is_sleeping") == {"is_sleeping": True, "state": "ASLEEP", "tags": []}
    one = Background(slow, COMPLETION, ask([1], 3))
    wait_for(lambda: num_requests(slow) == 1)
    call(slow, "/wake_up")
    assert one.result().json()["choices"][0]["token_ids"] == echo_tokens([1], 3)


def test_caller_that_leaves_does_not_leave_a_change_half_done(slow):
    one = Background(slow, COMPLETION, ask([1], 80))
    all_running(slow, 1)
    with pytest.raises(httpx.ReadTimeout):
        slow.http.post("/pause?mode=wait", timeout=0.1)
    assert one.result().status_code == 200
    wait_for(lambda: state_of(slow) == "PAUSED(wait)")
    call(slow, "/resume")


def test_slime_s_recorded_request_is_answered_with_the_fields_that_it_reads(slow):
    recorded = json.loads(
        """{"input_ids": [1, 2, 3], "return_logprob": true, "sampling_params": {"max_new_tokens": 6,
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": null, "stop_token_ids": null, "no_stop_trim": true,
        "skip_special_tokens": false, "spaces_between_special_tokens": false, "sampling_seed": 7}}"""
    )
    reply = call(slow, "/generate", recorded)
    tokens = echo_tokens([1, 2, 3], 6, seed=7)
    meta = reply["meta_info"]
    assert reply["output_ids"] == tokens and reply["text"] == "".join(f"{token} " for token in tokens)
    assert meta["output_token_logprobs"] == [[-token / VOCAB, token, None] for token in tokens]
    assert meta["output_token_logprobs_length"] == 6 and meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 6, 0)
    assert meta["weight_version"] == "0" and meta["version_spans"][0]["policy_version"] == 0
    longer = recorded | {"input_ids": [1, 2, 3, *range(40)]}
    assert call(slow, "/generate", longer)["meta_info"]["cached_tokens"] == 0
    wait_for(lambda: call(slow, "/generate", longer)["meta_info"]["cached_tokens"] == 32)


def test_generate_takes_texts_batches_and_samples_and_streams_cumulative_output(slow):
    texts = call(slow, "/generate", {"text": ["ab", "c"], "sampling_params": {"max_new_tokens": 3, "temperature": 0}})
    assert [one["output_ids"] for one in texts] == [echo_tokens([97, 98], 3), echo_tokens([99], 3)]
    samples = call(slow, "/generate", native([1], 3) | {"sampling_params": {"n": 3, "max_new_tokens": 3}})
    assert len(samples) == 3 and len({tuple(one["output_ids"]) for one in samples}) == 3
    many = call(slow, "/generate", {"input_ids": [[1], [2]], "sampling_params": [
        {"max_new_tokens": 2, "temperature": 0}, {"max_new_tokens": 4, "temperature": 0}]})  # fmt: skip
    assert [one["output_ids"] for one in many] == [echo_tokens([1], 2), echo_tokens([2], 4)]
    with slow.http.stream("POST", "/generate", json=native([1], 8, stream=True, return_logprob=True)) as reply:
        chunks = events(list(reply.iter_lines()))
    assert [len(chunk["output_ids"]) for chunk in chunks] == sorted(len(chunk["output_ids"]) for chunk in chunks)
    assert chunks[-1]["output_ids"] == echo_tokens([1], 8)
    assert [chunk["meta_info"]["finish_reason"] is None for chunk in chunks][-1] is False
    assert len(chunks[-1]["meta_info"]["output_token_logprobs"]) == 8


def test_log_probabilities_name_tokens_as_texts_where_asked_for(slow):
    asked = {"return_logprob": True, "return_text_in_logprobs": True}
    one = next(token for token in range(1000) if echo_tokens([token], 1)[0] < 128)
    reply = call(slow, "/generate", native([one], 1) | asked)
    (drawn,) = reply["output_ids"]
    assert reply["meta_info"]["output_token_logprobs"] == [[-drawn / VOCAB, drawn, tokenizer().decode([drawn])]]


def test_tokens_in_tokens_out_in_vllm_s_dialect(slow):
    body = {
        "request_id": "a",
        "token_ids": [1, 2],
        "sampling_params": {"max_tokens": 4, "temperature": 0, "logprobs": 1},
    }
    reply = call(slow, "/inference/v1/generate", body)
    tokens = echo_tokens([1, 2], 4)
    (choice,) = reply["choices"]
    assert reply["request_id"] == "a" and choice["token_ids"] == tokens and choice["finish_reason"] == "length"
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{token}" for token in tokens]
    assert [one["logprob"] for one in content] == [-token / VOCAB for token in tokens]
    assert choice["weight_version"] == 0
    with slow.http.stream("POST", "/inference/v1/generate", json=body | {"stream": True}) as stream:
        chunks = events(list(stream.iter_lines()))
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == tokens


def test_trl_s_recorded_requests_are_answered_with_the_fields_that_its_worker_reads(slow):
    assert slow.http.get("/health").status_code == 200
    model = get(slow, "/v1/models")["data"][0]["id"]
    info = get(slow, "/server_info")
    assert info["vllm_config"]["model_config"]["max_model_len"] > 0 and info["dp_size"] == 2
    assert get(slow, "/get_world_size") == {"world_size": 2}
    recorded = {
        "model": model, "prompt": [5, 6, 7], "max_tokens": 5, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
        "repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0, "seed": 1234,
    }  # fmt: skip
    choice = call(slow, COMPLETION, recorded)["choices"][0]
    tokens = echo_tokens([5, 6, 7], 5, seed=1234)
    assert choice["prompt_token_ids"] == [5, 6, 7] and choice["token_ids"] == tokens
    assert choice["logprobs"]["token_logprobs"] == [-token / VOCAB for token in tokens]


def test_requests_of_smaller_priority_overtake_waiting_ones():
    begun = []

    class Recording(EchoEngine):
        def _queue(self, request_id, prompt, params, drawn, salt):
            begun.append((prompt[0], params.priority))
            super()._queue(request_id, prompt, params, drawn, salt)

    with serving_with_control(Recording(step_s=0.01, max_requests=1)) as case:
        first = [Background(case, COMPLETION, ask([i], 30)) for i in range(2)]  # a full row, and one request more
        wait_for(lambda: len(begun) == 2)
        later = []
        for i, priority in ((5, 3), (6, 0), (7, -3)):
            later.append(Background(case, COMPLETION, ask([i], 2, priority=priority)))
            wait_for(lambda: case.coordinator.core.stats()["waiting"] == len(later))
        later.append(Background(case, "/inference/v1/generate", {
            "token_ids": [8], "priority": -9, "sampling_params": {"max_tokens": 2, "temperature": 0}}))  # fmt: skip
        for one in (*first, *later):
            assert one.result().status_code == 200
        assert later[2].result().json()["choices"][0]["token_ids"] == echo_tokens([7], 2)
    assert begun[2:] == [(8, -9), (7, -3), (6, 0), (5, 3)]
