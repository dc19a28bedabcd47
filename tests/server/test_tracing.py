"""Traces: a span for each call and each stage of its requests, at the times that engines report, and never a delay."""

from __future__ import annotations

import contextlib
import http.server
import sys
import threading
import time
from types import SimpleNamespace

import opentelemetry
import pytest
from coordinator_case import replica
from echo import EchoEngine
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from server_case import post, raw_stream, serving, stream, wait_for

from megatron_infer.errors import ConfigError, RequestError
from megatron_infer.server import server_config, tracing
from megatron_infer.server.server_config import ServerConfig

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STEP_S = 0.02


@contextlib.contextmanager
def traced(*engines, **settings):
    """A server whose spans stay here: `.spans()` are those of whole calls since the last time, by name."""
    kept = InMemorySpanExporter()
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
            patch.setattr(tracing, "span_exporter", lambda endpoint: kept)
            case = stack.enter_context(serving(*engines, otlp_traces_endpoint="http://127.0.0.1:9", **settings))

        def spans():
            wait_for(lambda: any(one.name.startswith("POST") for one in kept.get_finished_spans()), 30)
            found = list(kept.get_finished_spans())
            kept.clear()
            return found

        case.spans = spans
        yield case


class Choosy(EchoEngine):
    def add_request(self, prompt, params=None, **options):
        if prompt["prompt_token_ids"] == [9]:
            raise RequestError("this engine takes no nines")
        return super().add_request(prompt, params, **options)


@pytest.fixture(scope="module")
def case():
    with traced(Choosy(step_s=STEP_S), max_n=4) as one:
        yield one


def named(spans, name):
    (found,) = [one for one in spans if one.name == name]
    return found


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


def test_stages_of_a_chat_lie_within_its_call_and_follow_each_other(case):
    began = time.time_ns()
    reply = post(case, CHAT, model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=10, temperature=0.5)
    spans = case.spans()
    call, request = named(spans, f"POST {CHAT}"), named(spans, "chat tiny")
    tokenize, wait, prefill, decode = (named(spans, name) for name in ("tokenize", "wait", "prefill", "decode"))
    assert len(spans) == 6 and len({one.context.trace_id for one in spans}) == 1
    assert call.parent is None and call.kind.name == "SERVER"
    assert tokenize.parent.span_id == request.parent.span_id == call.context.span_id
    assert {one.parent.span_id for one in (wait, prefill, decode)} == {request.context.span_id}
    assert began <= call.start_time <= tokenize.start_time <= tokenize.end_time <= request.start_time
    assert request.start_time == wait.start_time and wait.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time and decode.end_time == request.end_time <= call.end_time
    assert seconds(prefill) + 1e-6 >= STEP_S and seconds(prefill) < seconds(decode), "though the reply did not stream"
    assert seconds(decode) + 1e-6 >= 9 * STEP_S

    usage, call_id = reply.json()["usage"], reply.headers["x-request-id"]
    assert dict(call.attributes) == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "url.path": CHAT,
        "client.address": "127.0.0.1",
        "http.response.status_code": 200,
        "gen_ai.request.id": call_id,
        "megatron_infer.num_requests": 1,
    }
    given = dict(request.attributes)
    assert given.pop("gen_ai.request.seed", None) is None
    assert given == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "megatron_infer",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.id": call_id,
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 10,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": given["gen_ai.request.top_k"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
        "megatron_infer.weight_versions": (case.engines[0].controls.weight_version,),
        "megatron_infer.num_pauses": 0,
        "megatron_infer.num_evictions": 0,
    }
    (assigned,) = request.events
    assert assigned.name == "assign" and dict(assigned.attributes) == {"replica": "r0"}
    assert wait.start_time <= assigned.timestamp <= call.end_time


def test_the_callers_trace_goes_on_unless_it_says_that_it_is_not_kept(case):
    body = {"model": "tiny", "prompt": [1, 2], "max_tokens": 2, "n": 2}
    for sampled in ("00", "01"):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-{sampled}", "tracestate": "vendor=1"}
        assert case.http.post(COMPLETIONS, json=body, headers=headers).status_code == 200
    spans = case.spans()
    assert {format(one.context.trace_id, "032x") for one in spans} == {TRACE}
    call, request = named(spans, f"POST {COMPLETIONS}"), named(spans, "text_completion tiny")
    assert format(call.parent.span_id, "016x") == PARENT and call.context.trace_state["vendor"] == "1"
    assert request.attributes["gen_ai.request.choice.count"] == 2
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    for nonsense in ("nonsense", "0" * 60_000):
        headers = {"traceparent": nonsense, "tracestate": "a=" * 2000}
        assert case.http.post(COMPLETIONS, json=body, headers=headers).status_code == 200
        assert named(case.spans(), f"POST {COMPLETIONS}").parent is None


def test_each_prompt_has_its_request_up_to_a_number_that_the_call_has(case):
    assert post(case, COMPLETIONS, model="tiny", prompt=["a", "bc"], max_tokens=2).status_code == 200
    spans = case.spans()
    assert len([one for one in spans if one.name == "text_completion tiny"]) == 2
    assert (
        named(spans, "tokenize") and named(spans, f"POST {COMPLETIONS}").attributes["megatron_infer.num_requests"] == 2
    )
    many = tracing.MAX_REQUEST_SPANS + 3
    assert post(case, COMPLETIONS, model="tiny", prompt=[[1]] * many, max_tokens=1).status_code == 200
    spans = case.spans()
    assert len([one for one in spans if one.name == "text_completion tiny"]) == tracing.MAX_REQUEST_SPANS
    assert named(spans, f"POST {COMPLETIONS}").attributes["megatron_infer.num_requests"] == many


def test_calls_that_are_refused_say_why_and_others_than_post_are_not_traced(case):
    assert case.http.get("/health").status_code == 200
    assert post(case, COMPLETIONS, model="gpt", prompt=[1]).status_code == 404
    call = named(case.spans(), f"POST {COMPLETIONS}")
    assert (
        call.attributes["http.response.status_code"] == 404
        and "'gpt' is not served" in call.attributes["error.message"]
    )
    assert call.status.status_code is StatusCode.UNSET, "the caller's mistake is no error of the server"
    assert case.http.post(COMPLETIONS, json={}, headers={"host": "evil.example"}).status_code == 403
    call = named(case.spans(), "POST")
    assert call.attributes["http.response.status_code"] == 403 and call.attributes["url.path"] == COMPLETIONS


def test_a_request_of_a_client_that_leaves_ends_there_aborted(case):
    leaver = raw_stream(case, COMPLETIONS, model="tiny", prompt=[5], max_tokens=1000)
    leaver.recv(4000)
    leaver.close()
    spans = case.spans()
    call, request = named(spans, f"POST {COMPLETIONS}"), named(spans, "text_completion tiny")
    assert call.attributes["http.response.status_code"] == 499
    assert request.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert 0 < request.attributes["gen_ai.usage.output_tokens"] < 1000
    assert named(spans, "decode").end_time == request.end_time <= call.end_time


def test_a_request_that_an_engine_refuses_is_an_error_and_its_call_is_not(case):
    assert post(case, COMPLETIONS, model="tiny", prompt=[9], max_tokens=3).status_code == 400
    spans = case.spans()
    call, request = named(spans, f"POST {COMPLETIONS}"), named(spans, "text_completion tiny")
    assert request.status.status_code is StatusCode.ERROR and "no nines" in request.status.description
    assert request.attributes["error.type"] == "RequestError" and named(spans, "wait").end_time == request.end_time
    assert call.status.status_code is StatusCode.UNSET and "no nines" in call.attributes["error.message"]


def test_a_call_that_the_server_ends_is_an_error_and_its_request_is_aborted():
    with traced(EchoEngine(step_s=0.05), request_timeout_s=1.0) as case:
        assert stream(case, COMPLETIONS, model="tiny", prompt=[1, 2], max_tokens=1000)[-1]["error"]
        spans = case.spans()
        call, request = named(spans, f"POST {COMPLETIONS}"), named(spans, "text_completion tiny")
        assert call.attributes["http.response.status_code"] == 504 and call.attributes["error.type"] == "504"
        assert call.status.status_code is StatusCode.ERROR and request.attributes["gen_ai.request.stream"] is True
        assert request.attributes["gen_ai.response.finish_reasons"] == ("abort",)


def test_a_request_that_loses_its_engine_is_one_request_with_the_second_engine_as_an_event():
    with traced(EchoEngine(step_s=0.05)) as case:
        done = []
        body = {"model": "tiny", "prompt": [1, 2], "max_tokens": 400, "temperature": 0}
        streaming = threading.Thread(target=lambda: done.append(stream(case, COMPLETIONS, **body)))
        streaming.start()
        wait_for(lambda: "megatron_infer_ttft_seconds_count 1" in case.http.get("/metrics").text, 30)
        with replica(case.coordinator.address, EchoEngine(), name="second"):
            case.replicas[0].stop()
            streaming.join(20)
            request = named(case.spans(), "text_completion tiny")
        assert done and request.attributes["gen_ai.usage.output_tokens"] == 400
        assert [one.name for one in request.events] == ["assign", "reassign"]
        assert [one.attributes["replica"] for one in request.events] == ["r0", "second"]
        first, second = (one.timestamp for one in request.events)
        assert request.start_time < first < second < request.end_time


# ---------------------------------------------------------------------- collectors


@contextlib.contextmanager
def collector(status=200):
    """An OTLP collector: .url, .posts, and of the spans it got .names and .services."""
    got = SimpleNamespace(names=[], services=set(), posts=0, status=status)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            data = self.rfile.read(int(self.headers["content-length"]))
            got.posts += 1
            if got.status == 200:
                assert self.path == "/v1/traces"
                for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                    names = {item.key: item.value.string_value for item in resource.resource.attributes}
                    got.services.add(names["service.name"])
                    got.names += [span.name for scope in resource.scope_spans for span in scope.spans]
            self.send_response(got.status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    got.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_spans_reach_a_collector_also_those_that_are_left_at_the_end(monkeypatch):
    monkeypatch.setattr(tracing, "FLUSH_S", 20.0)
    with collector() as got:
        with serving(otlp_traces_endpoint=got.url) as case:  # the SDK sends every 5 s
            assert post(case, COMPLETIONS, model="tiny", prompt=[1], max_tokens=2).status_code == 200
        assert sorted(got.names) == sorted([f"POST {COMPLETIONS}", "text_completion tiny", "wait", "prefill", "decode"])
        assert got.services == {"megatron-infer"}


def test_a_collector_that_refuses_or_is_gone_costs_calls_nothing_and_one_line(caplog, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with collector(status=400) as got, serving(otlp_traces_endpoint=got.url) as case:
        for _ in range(3):
            num_posts = got.posts
            assert post(case, COMPLETIONS, model="tiny", prompt=[1], max_tokens=2).status_code == 200
            wait_for(lambda before=num_posts: got.posts > before, 30)
        assert [record.message for record in caplog.records if "traces" in record.message] == [
            "traces are lost: the collector does not take them (the log of the collector may say why)"
        ]
    with serving(otlp_traces_endpoint="http://127.0.0.1:9") as case:
        assert post(case, COMPLETIONS, model="tiny", prompt=[1], max_tokens=2).status_code == 200
        began = time.monotonic()
    assert time.monotonic() - began < 8, "the SDK goes on trying for 10 s"


@pytest.mark.parametrize(
    ("given", "sent_to"),
    [("http://c:4318", "http://c:4318/v1/traces"), ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces")],
)
def test_endpoint_is_a_collectors_url_with_or_without_the_path(given, sent_to):
    assert ServerConfig(otlp_traces_endpoint=given).otlp_traces_endpoint == sent_to


def test_endpoint_that_cannot_be_used_is_refused_before_anything_starts(monkeypatch):
    for given in ("localhost:4317", "grpc://localhost:4317", "", "http://"):
        with pytest.raises(ConfigError, match="4318"):
            ServerConfig(otlp_traces_endpoint=given)
    with monkeypatch.context() as patch:  # opentelemetry itself came with another package
        patch.delitem(sys.modules, "opentelemetry.exporter", raising=False)
        patch.setattr(opentelemetry, "__path__", [])
        with pytest.raises(ConfigError, match=r"needs opentelemetry\.[a-z]+: pip install 'megatron-infer\[otel\]'"):
            ServerConfig(otlp_traces_endpoint="http://localhost:4318")
    monkeypatch.setattr(server_config, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'megatron-infer\[otel\]'"):
        ServerConfig(otlp_traces_endpoint="http://localhost:4318")
