"""GET /metrics: what clients did, per route and replica; counts that never decrease; the key it needs."""

from __future__ import annotations

import contextlib
import json

import httpx
from coordinator_case import Child
from echo import EchoEngine
from scrape import check_histograms, parse
from server_case import post, raw_stream, serving, stream, wait_for

from megatron_infer.engine.metrics.definitions import SPECS
from megatron_infer.engine.metrics.prometheus import exposition

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def scrape(case, **headers):
    reply = case.http.get("/metrics", headers=headers)
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain")
    series = parse(reply.text)
    check_histograms(series, reply.text)
    return series


def settled(case, name, value):
    """The scrape once it meets the condition: replicas report a few times a second."""
    found = {}

    def is_there():
        found.update(scrape(case))
        return found.get(name) == value

    wait_for(is_there, 15)
    return found


def test_scripted_load_is_counted_exactly():
    slow = EchoEngine(step_s=0.004)
    with serving(slow, max_n=4) as case:
        for i in range(5):
            events = stream(case, COMPLETIONS, model="tiny", prompt=[7] * 40, max_tokens=6 + i)
            assert events
        for _ in range(3):
            assert post(case, COMPLETIONS, model="tiny", prompt=[1, 2, 3], max_tokens=4, n=2).status_code == 200
        chat = post(case, CHAT, model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=5).json()
        assert post(case, COMPLETIONS, model="tiny", prompt=[], max_tokens=4).status_code == 400
        assert post(case, COMPLETIONS, model="tiny", prompt=[1], no_such_field=4).status_code == 400
        assert post(case, COMPLETIONS, model="gpt", prompt=[1]).status_code == 404
        assert case.http.get("/nowhere/at/all").status_code == 404
        assert case.http.request("PROPFIND", "/v1/models").status_code == 405
        leaver = raw_stream(case, COMPLETIONS, model="tiny", prompt=[5] * 20, max_tokens=3000)
        leaver.recv(4000)
        wait_for(lambda: scrape(case)["requests_in_flight"] == 1)
        leaver.close()
        wait_for(lambda: scrape(case)["requests_total/abort"] == 1)
        series = settled(case, "engine_requests_ended_total/abort/r0", 1)

        assert series["http_requests_total/200/POST/" + COMPLETIONS] == 5 + 3
        assert series["http_requests_total/499/POST/" + COMPLETIONS] == 1
        assert series["http_requests_total/400/POST/" + COMPLETIONS] == 2
        assert series["http_requests_total/404/POST/" + COMPLETIONS] == 1
        assert series["http_requests_total/200/POST/" + CHAT] == 1
        assert series["http_requests_total/404/GET/other"] == series["http_requests_total/405/other/other"] == 1
        assert series["http_calls"] == 1, "this scrape"
        assert series["http_request_seconds_count/" + COMPLETIONS] == 5 + 3 + 1 + 2 + 1
        assert series["requests_total/length"] == 5 + 3 + 1 and series["requests_in_flight"] == 0
        assert series["requests_total/refused"] == series["requests_total/error"] == series["requests_total/stop"] == 0
        num_chat = chat["usage"]["prompt_tokens"]
        assert series["prompt_tokens_total"] == 5 * 40 + 3 * 3 + num_chat + 20
        aborted = series["output_tokens_total"] - (sum(6 + i for i in range(5)) + 3 * 2 * 4 + 5)
        assert 0 < aborted < 3000
        assert series["cached_prompt_tokens_total"] == slow.num_cached_tokens == 4 * 32
        assert series["ttft_seconds_count"] == 6, "of streams"
        assert series["e2e_seconds_count"] == 9
        assert series["engine_output_tokens_total/r0"] >= series["output_tokens_total"]
        assert series["engine_requests_ended_total/length/r0"] == 9
        assert series["engine_ttft_seconds_count/r0"] == 10
        kinds = [series[f"engine_blocks/{kind}/r0"] for kind in ("used", "cached", "paused", "free")]
        assert sum(kinds) == 4096 and kinds[0] == 0 < kinds[1]
        assert series["coordinator_submitted_total"] == 10 and series["coordinator_up"] == 1
        assert series["replica_up/r0"] == 1 and series["coordinator_replicas"] == 1


def test_refused_and_failed_requests_have_different_outcomes():
    with serving(EchoEngine(max_requests=1, step_s=0.02), max_queue=1) as case, contextlib.ExitStack() as stack:
        for _ in range(3):
            one = raw_stream(case, COMPLETIONS, model="tiny", prompt=[5] * 20, max_tokens=3000)
            stack.enter_context(contextlib.closing(one))
        replies = [post(case, COMPLETIONS, model="tiny", prompt=[1, 2], max_tokens=2) for _ in range(3)]
        refused = sum(reply.status_code == 429 for reply in replies)
        series = scrape(case)
        assert refused >= 1 and series["requests_total/refused"] >= refused
        assert series["http_requests_total/429/POST/" + COMPLETIONS] >= refused
        assert series["coordinator_refused_total"] == series["requests_total/refused"]


def test_counts_never_decrease_when_a_replica_is_killed_and_restarted():
    with serving() as case:
        with Child(case.coordinator.address, "echo", "worker", step_s=0.001):
            wait_for(lambda: scrape(case).get("replica_up/worker") == scrape(case).get("replica_up/r0") == 1, 30)
            case.replicas[0].drain()  # every request goes to the separate process
            wait_for(lambda: scrape(case)["replica_up/r0"] == 0)
            for _ in range(4):
                assert post(case, COMPLETIONS, model="tiny", prompt=[1] * 30, max_tokens=5).status_code == 200
            before = settled(case, "engine_output_tokens_total/worker", 20)
        wait_for(lambda: scrape(case)["replica_up/worker"] == 0)
        gone = scrape(case)
        assert "engine_blocks/used/worker" not in gone, "gauges of who is gone are not shown"
        with Child(case.coordinator.address, "echo", "worker", step_s=0.001):
            wait_for(lambda: scrape(case)["replica_up/worker"] == 1, 30)
            again = scrape(case)
            assert post(case, COMPLETIONS, model="tiny", prompt=[1] * 30, max_tokens=5).status_code == 200
            after = settled(case, "engine_output_tokens_total/worker", 25)
        for earlier, later in ((before, gone), (gone, again), (again, after)):
            for name, value in earlier.items():
                if name.partition("/")[0].endswith(("_total", "_count", "_sum", "_bucket")):
                    assert later[name] >= value, name
        assert after["engine_ttft_seconds_count/worker"] == 5


def test_scrape_needs_the_key_and_a_server_of_its_own_does_not():
    with serving(api_key="secret", prometheus_metrics_mode="launch_server", metrics_port=0) as case:
        assert case.http.get("/metrics").status_code == 401
        assert scrape(case, Authorization="Bearer secret")["http_requests_total/401/GET/other"] == 1
        reply = httpx.get(case.server.metrics_url)
        assert "secret" not in reply.text and parse(reply.text)["coordinator_up"] == 1


def test_accept_header_with_a_version_that_is_none_gets_the_usual_format():
    assert exposition(list, "application/openmetrics-text;version=zzz") == exposition(list)


def test_every_series_is_in_the_catalog():
    with serving() as case:
        post(case, COMPLETIONS, model="tiny", prompt=[1, 2], max_tokens=2)
        settled(case, "engine_output_tokens_total/r0", 2)
        text = case.http.get("/metrics").text
        names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
        assert names <= {spec.full_name for spec in SPECS.values()}
        assert len(names) > 30


def test_calls_are_recorded_without_headers_and_keys(tmp_path):
    path = tmp_path / "calls.jsonl"
    key = "sk-very-secret"
    with serving(api_key=key, record=str(path)) as case:
        case.http.headers["Authorization"] = f"Bearer {key}"
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4}
        assert post(case, COMPLETIONS, **body).status_code == 200
        assert stream(case, COMPLETIONS, **body)
        assert post(case, COMPLETIONS, **body, api_key=key).status_code == 400
        assert case.http.get("/v1/models").status_code == 200
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["body"] for line in lines] == [body, {**body, "stream": True}]
    assert all(line["complete"] and 0 <= line["first_s"] <= line["seconds"] for line in lines)
    assert 0 <= lines[0]["at"] <= lines[1]["at"]
    assert key not in path.read_text() and path.stat().st_mode & 0o777 == 0o600
