"""Traces of HTTP calls by OpenTelemetry. All spans are made in this process, from the times that replicas report.

POST /v1/chat/completions     a POST call: from its headers to its last byte, within the caller's trace (traceparent)
|-- tokenize                  chat template and tokenizer, with the wait for a thread
'-- chat MODEL                one of its engine requests; these are made when all of them have ended
    |-- wait                  until it is in a step for the first time: in the coordinator's queue, then in the engine's
    |-- prefill               until its first token
    '-- decode                until its last one

Spans hold no prompts and no texts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_infer.outputs.request_output import RequestOutput

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

    from megatron_infer.server.inflight import EngineRequest

log = logging.getLogger("megatron_infer.server")

MAX_REQUEST_SPANS = 64
"""Most engine requests of one call with spans of their own; the call's span has the number of all."""
MAX_MESSAGE = 300
"""Most characters of an error in a span."""
PARENT_BYTES = {b"traceparent": 256, b"tracestate": 4096}
"""Most bytes of the headers with the caller's trace; a longer one is left unread. W3C asks for 512 of the second."""
FLUSH_S = 0.5
"""Seconds that the last spans have to leave the process when the server ends."""
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}
"""Routes -> gen_ai.operation.name; of all others it is text_completion."""


@contextmanager
def tracing_to(endpoint: str | None, *, model: str) -> Iterator[Tracing | None]:
    """What makes the spans of this process; None without an endpoint."""
    if endpoint is None:
        yield None
        return
    tracing = Tracing(span_exporter(endpoint), model=model)
    try:
        yield tracing
    finally:
        tracing.close()


def span_exporter(endpoint: str) -> SpanExporter:
    """Sends spans to an OTLP collector by HTTP. Headers, certificates, time limit: OTEL_EXPORTER_OTLP_..."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # `_log_export` says it once
    return OTLPSpanExporter(endpoint=endpoint)


class Tracing:
    """Makes the spans of one HTTP process; a thread of the SDK sends them in batches and drops what it cannot send."""

    def __init__(self, exporter: SpanExporter, *, model: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create()  # OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "megatron-infer"}))
        self.model, self._exporter = model, exporter
        self._provider: TracerProvider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_log_export(exporter)))
        self.tracer = self._provider.get_tracer("megatron_infer.server")

    def begin_call(self, scope: Any, call_id: str) -> CallSpan | None:
        """The span of an HTTP call; None: a call that is not traced, any but a POST."""
        if scope["method"] != "POST":
            return None
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if len(value) <= PARENT_BYTES.get(name, -1)
        }
        attributes = {
            "http.request.method": "POST",
            "url.path": scope["path"][:200],
            "client.address": scope["client"][0] if scope.get("client") else "",
            "gen_ai.request.id": call_id,
        }
        parent = TraceContextTextMapPropagator().extract(carrier)
        return CallSpan(self.tracer.start_span("POST", context=parent, kind=SpanKind.SERVER, attributes=attributes))

    def span(self, name: str) -> AbstractContextManager[Any]:
        """A span within that of the current call; nothing outside a traced call."""
        from opentelemetry.trace import get_current_span

        return self.tracer.start_as_current_span(name) if get_current_span().is_recording() else nullcontext()

    def begin_requests(self, requests: Sequence[EngineRequest], *, stream: bool) -> RequestSpans | None:
        """The spans of a call's engine requests, which begin now; None: the current call is not traced."""
        from opentelemetry.trace import get_current_span

        call = get_current_span()
        if not call.is_recording():
            return None
        call.set_attribute("megatron_infer.num_requests", len(requests))
        return RequestSpans(self, call, requests, stream=stream)

    def close(self) -> None:
        """Send what is left, for FLUSH_S at most."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(FLUSH_S)
        if closing.is_alive():
            log.warning("the last traces were not sent within %g s", FLUSH_S)
            self._exporter.shutdown()


class CallSpan:
    """The span of one HTTP call."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def active(self) -> AbstractContextManager[Any]:
        """Within it, and in tasks started within it, further spans are this one's children."""
        from opentelemetry.trace import use_span

        return use_span(self._span, record_exception=False, set_status_on_exception=False)

    def end(self, *, route: str | None, status: int, error: str | None) -> None:
        """status: as the log line has it. error: the message that the call ended with."""
        from opentelemetry.trace import StatusCode

        span, shown = self._span, None if error is None else error[:MAX_MESSAGE]
        if route is not None:
            span.update_name(f"POST {route}")
            span.set_attribute("http.route", route)
        span.set_attribute("http.response.status_code", status)
        if shown is not None:
            span.set_attribute("error.message", shown)
        if status >= 500:
            span.set_attribute("error.type", str(status))
            span.set_status(StatusCode.ERROR, shown)
        span.end()


class _Clocks(NamedTuple):
    """One moment on time.monotonic's clock and on that of spans."""

    s: float
    ns: int

    @classmethod
    def now(cls) -> _Clocks:
        return cls(time.monotonic(), time.time_ns())


class RequestSpans:
    """The spans of the engine requests of one call, made by `end` of what `put` was given."""

    def __init__(self, tracing: Tracing, call: Span, requests: Sequence[EngineRequest], *, stream: bool) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer, self._model, self._stream = tracing.tracer, tracing.model, stream
        self._context, self._requests = set_span_in_context(call), requests[:MAX_REQUEST_SPANS]
        self._began = self._ended = _Clocks.now()
        self._outputs: dict[int, RequestOutput] = {}
        self._errors: dict[int, BaseException] = {}

    def put(self, index: int, item: RequestOutput | BaseException) -> None:
        """Take the newest output, or the error, of a request; from any thread."""
        if isinstance(item, BaseException):
            self._errors.setdefault(index, item)
        else:
            self._outputs[index] = item

    def end(self) -> None:
        """Make the spans. A request that has not ended ends now, aborted."""
        self._ended = _Clocks.now()
        for index, request in enumerate(self._requests):
            self._add(request, self._outputs.get(index), self._errors.get(index))

    def _stages(self, output: RequestOutput | None) -> list[tuple[str, int]]:
        """Where the stages of a request that were reached begin, in ns, and at the end ("", where the last one ends).

        None is before the one before it, or outside the time that this process has seen, whatever clocks do.
        """
        first, last = self._began, self._ended
        times: list[tuple[str, float | None]] = [("wait", first.s)]
        end = last.s
        if output is not None:
            metrics = output.metrics
            times += [("prefill", metrics.first_scheduled_time), ("decode", metrics.first_token_time)]
            end = metrics.finished_time or end
        stages, before = [], first.ns
        for name, at in (*times, ("", end)):
            if at is not None:
                before = min(last.ns, max(before, last.ns - int(1e9 * (last.s - at))))
                stages.append((name, before))
        return stages

    def _add(self, request: EngineRequest, output: RequestOutput | None, error: BaseException | None) -> None:
        from opentelemetry.trace import StatusCode, set_span_in_context

        operation = OPERATIONS.get(request.route, "text_completion")
        stages = self._stages(output)
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._context,
            start_time=stages[0][1],
            attributes=_asked(request, operation, self._model, self._stream) | _given(output, error),
        )
        error = error if error is not None or output is None else output.error
        if error is not None:
            span.set_status(StatusCode.ERROR, str(error)[:MAX_MESSAGE])
        for event in () if output is None else output.events:
            span.add_event(event.kind.lower(), event.payload, timestamp=int(event.time_s * 1e9))
        inner = set_span_in_context(span)
        for (name, at), (_, until) in pairwise(stages):
            self._tracer.start_span(name, context=inner, start_time=at).end(until)
        span.end(stages[-1][1])


def _asked(request: EngineRequest, operation: str, model: str, stream: bool) -> dict[str, Any]:
    """Attributes of a request, by the names of OpenTelemetry's conventions for generative AI."""
    params = request.params
    asked = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "megatron_infer",
        "gen_ai.request.model": model,
        "gen_ai.request.id": request.call_id,
        "gen_ai.request.stream": stream,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.usage.input_tokens": len(request.prompt_ids),
    }
    return {name: value for name, value in asked.items() if value is not None}


def _given(output: RequestOutput | None, error: BaseException | None) -> dict[str, Any]:
    """Attributes of what was drawn, and of how it ended."""
    given: dict[str, Any] = {}
    if output is not None:
        sequences, error = output.outputs, error or output.error
        versions = {span.policy_version for one in sequences for span in one.spans}
        reason = "abort" if error is None else "error"
        given = {
            "gen_ai.usage.output_tokens": sum(len(one.token_ids) for one in sequences),
            "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens,
            "gen_ai.response.finish_reasons": [one.finish_reason or reason for one in sequences],
            "megatron_infer.weight_versions": sorted(versions),
            "megatron_infer.num_pauses": output.metrics.num_pauses,
            "megatron_infer.num_evictions": output.metrics.num_evictions,
        }
    return given if error is None else given | {"error.type": type(error).__name__}


def _log_export(exporter: SpanExporter) -> SpanExporter:
    """`exporter`, which says in the log when it begins to fail, and when it sends again."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class LoggedExporter(SpanExporter):
        is_failing = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            why = "the log of the collector may say why"
            try:
                result = exporter.export(spans)
            except Exception as error:
                result, why = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
            is_failing = result is not SpanExportResult.SUCCESS
            if is_failing and not self.is_failing:
                log.warning("traces are lost: the collector does not take them (%s)", why)
            elif self.is_failing and not is_failing:
                log.info("traces are sent again")
            self.is_failing = is_failing
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return LoggedExporter()
