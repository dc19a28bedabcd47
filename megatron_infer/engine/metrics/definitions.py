"""Definitions of all metrics: name, type, unit, help; and how snapshots become series of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_infer.engine.metrics.engine_snapshot import EngineSnapshot
from megatron_infer.engine.metrics.registry import (
    Counter,
    Family,
    Gauge,
    Histogram,
    Labels,
    Metric,
    Registry,
    labels_of,
)

PREFIX = "megatron_infer_"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    name: str
    """Without PREFIX; counters end in _total."""
    kind: str
    unit: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _specs(*rows: tuple[str, str, str, str] | tuple[str, str, str, str, tuple[str, ...]]) -> dict[str, MetricSpec]:
    made = {}
    for name, kind, unit, text, *labels in rows:
        made[name] = MetricSpec(name=name, kind=kind, unit=unit, help=text, labels=labels[0] if labels else ())
    return made


ENGINE = _specs(
    ("engine_state", "gauge", "1", "1 for the state the engine is in, 0 for the others", ("state",)),
    ("engine_weight_version", "gauge", "version", "Version of the weights in use"),
    ("engine_requests", "gauge", "requests", "Requests by status: waiting, running, paused", ("status",)),
    ("engine_capacity", "gauge", "requests", "Most requests in one step"),
    ("engine_blocks", "gauge", "blocks", "Blocks of the KV cache: used, cached, paused, free", ("kind",)),
    ("engine_state_slots", "gauge", "slots", "Recurrent-state slots: used, cached, free; hybrid models", ("kind",)),
    ("engine_steps_total", "counter", "steps", "Steps computed"),
    ("engine_prompt_tokens_total", "counter", "tokens", "Prompt tokens of requests that have sampled a token"),
    ("engine_cached_prompt_tokens_total", "counter", "tokens", "Those of them that the prefix cache served"),
    ("engine_output_tokens_total", "counter", "tokens", "Tokens sampled"),
    ("engine_requests_ended_total", "counter", "requests", "Requests by outcome", ("outcome",)),
    ("engine_prefix_queries_total", "counter", "admissions", "Admissions that looked up a cached prefix"),
    ("engine_prefix_hits_total", "counter", "admissions", "Those of them that found one"),
    ("engine_prefix_hit_tokens_total", "counter", "tokens", "Tokens found, readmissions included"),
    ("engine_pauses_total", "counter", "preemptions", "Requests paused for lack of blocks"),
    ("engine_evictions_total", "counter", "preemptions", "Requests whose memory was taken, to the host or dropped"),
    ("engine_swaps_total", "counter", "evictions", "Evictions to the host (out) and returns from it (in)", ("way",)),
    ("engine_retracted_steps_total", "counter", "steps", "Steps that ran out of memory and were tried again smaller"),
    ("engine_recomputed_tokens_total", "counter", "tokens", "Computed tokens that evictions dropped"),
    ("engine_drafted_tokens_total", "counter", "tokens", "Tokens drafted, by place in their step", ("position",)),
    ("engine_accepted_drafts_total", "counter", "tokens", "Those of them that equalled what was drawn", ("position",)),
    (
        "engine_draft_depth_total",
        "counter",
        "proposals",
        "Proposals by tokens verified of each, 0 included",
        ("depth",),
    ),
    ("engine_verifications_total", "counter", "verifications", "Requests that verified drafts, once a step"),
    ("engine_drafting_seconds_total", "counter", "seconds", "Host time spent on drafting"),
    ("engine_adapters", "gauge", "adapters", "Loaded LoRA adapters: on the device, or on the host alone", ("place",)),
    ("engine_adapter_loads_total", "counter", "loads", "LoRA adapters written into a slot on the device"),
    ("engine_adapter_requests_total", "counter", "requests", "Requests that ended, of a LoRA adapter", ("adapter",)),
    ("engine_adapter_output_tokens_total", "counter", "tokens", "Tokens of these requests", ("adapter",)),
    ("engine_graphs", "gauge", "graphs", "CUDA graphs that exist now"),
    ("engine_graph_bytes", "gauge", "bytes", "Device memory of the CUDA graphs, measured"),
    ("engine_graph_captures_total", "counter", "captures", "CUDA graphs captured"),
    ("engine_graph_steps_total", "counter", "steps", "Steps with graphs on: replayed, padded, eager", ("how",)),
    (
        "engine_graph_draws_outside_total",
        "counter",
        "steps",
        "Those not eager that sampled outside the graph",
    ),
    ("engine_transitions_total", "counter", "transitions", "Suspends and resumes", ("command",)),
    ("engine_transition_seconds_total", "counter", "seconds", "Duration of suspends and resumes", ("command",)),
    ("engine_ttft_seconds", "histogram", "seconds", "From a request's arrival at the engine to its first token"),
    ("engine_itl_seconds", "histogram", "seconds", "Between two tokens of a sequence"),
    ("engine_e2e_seconds", "histogram", "seconds", "From arrival to the end, of completed requests"),
)
"""Metrics of an engine; behind a coordinator with the label replica. The value is the field of `EngineSnapshot` that
FIELDS names, or the one of the same name."""
FIELDS: dict[str, str | dict[str, str]] = {
    "engine_state": "states",
    "engine_requests": {"waiting": "num_waiting", "running": "num_running", "paused": "num_paused"},
    "engine_blocks": {kind: f"blocks_{kind}" for kind in ("used", "cached", "paused", "free")},
    "engine_state_slots": {kind: f"state_slots_{kind}" for kind in ("used", "cached", "free")},
    "engine_steps_total": "num_steps",
    "engine_requests_ended_total": "ended",
    "engine_swaps_total": {"out": "swaps_out", "in": "swaps_in"},
    "engine_drafted_tokens_total": "drafted",
    "engine_accepted_drafts_total": "drafts_accepted",
    "engine_draft_depth_total": "draft_depths",
    "engine_adapters": {"device": "adapters_on_device", "host": "adapters_on_host"},
    "engine_adapter_output_tokens_total": "adapter_tokens",
    "engine_ttft_seconds": "ttft",
    "engine_itl_seconds": "itl",
    "engine_e2e_seconds": "e2e",
}
"""By name of a metric; for a metric with a label also the fields by its values."""
MISMATCH = _specs(
    ("mismatch_num_tokens", "gauge", "tokens", "Sampled tokens that the trainer's forward scored"),
    ("mismatch_num_samples", "gauge", "samples", "Samples with such tokens"),
    (
        "mismatch_num_stale_tokens",
        "gauge",
        "tokens",
        "Tokens of chosen samples sampled by, or from keys of, other weights",
    ),
    ("mismatch_num_unscored_samples", "gauge", "samples", "Chosen samples without log probabilities"),
    ("mismatch_abs_diff_mean_nats", "gauge", "nats", "Mean of |log p_train - log p_rollout|"),
    ("mismatch_abs_diff_max_nats", "gauge", "nats", "Largest of these"),
    ("mismatch_kl_k1_nats", "gauge", "nats", "KL(rollout || train), estimator k1"),
    ("mismatch_kl_k3_nats", "gauge", "nats", "KL(rollout || train), estimator k3; never negative"),
    ("mismatch_token_mult_prob_error", "gauge", "ratio", "Mean of exp(|d|); 1 where both agree"),
    ("mismatch_ratio_mean", "gauge", "ratio", "Mean of exp(d)"),
    ("mismatch_share_outside", "gauge", "share", "Tokens with exp(d) outside 0.9 .. 1.1"),
    ("mismatch_num_processed_tokens", "gauge", "tokens", "Tokens compared after the sampler too"),
    ("mismatch_processed_abs_diff_mean_nats", "gauge", "nats", "Mean difference after the sampler"),
    ("mismatch_processed_abs_diff_max_nats", "gauge", "nats", "Largest of these"),
    ("mismatch_sampler_excess_mean_nats", "gauge", "nats", "Mean of those differences beyond |d| of the same token"),
    ("mismatch_seconds", "gauge", "seconds", "Spent on scoring"),
    ("mismatch_weight_version", "gauge", "version", "Weight version that both sides have"),
)
"""The latest window of a mismatch meter that writes to the engine's `EngineMeter.registry`."""
TRAINER = _specs(
    (
        "trainer_dropped_expert_pairs_total",
        "counter",
        "pairs",
        "Pairs of a token and an expert that routers dropped over moe_expert_capacity_factor in a session's scores",
    ),
)
"""Metrics of a session whose model has a capacity factor."""
SPEECH = _specs(
    ("speech_seconds_total", "counter", "seconds", "Seconds of sound made"),
    ("speech_windows_total", "counter", "windows", "Windows of speech tokens decoded"),
    ("speech_first_chunks_total", "counter", "requests", "Requests whose first sound was made"),
    ("speech_first_chunk_seconds_total", "counter", "seconds", "Seconds until their first sound, added up"),
    (
        "speech_processing_seconds_total",
        "counter",
        "seconds",
        "Seconds that requests took from beginning to end, added up; over those of sound: the real-time factor",
    ),
    ("speech_decoder_queue", "gauge", "windows", "Windows that wait for the audio decoder"),
)
"""Metrics of a pipeline or server that speaks."""
TINKER = _specs(
    ("tinker_client_steps_total", "counter", "steps", "Steps of a client's optimizer", ("client",)),
    ("tinker_client_trained_tokens_total", "counter", "tokens", "Targets of its forward_backward", ("client",)),
    ("tinker_client_sampled_tokens_total", "counter", "tokens", "Tokens sampled from its adapters", ("client",)),
    ("tinker_client_training_seconds_total", "counter", "seconds", "Its operations on the live model", ("client",)),
    (
        "tinker_client_sampling_seconds_total",
        "counter",
        "seconds",
        "Of its samples from call to end, added up; calls overlap",
        ("client",),
    ),
    ("tinker_client_loss", "gauge", "nats", "Loss of its last forward_backward, a sum over tokens", ("client",)),
    ("tinker_client_queue", "gauge", "calls", "Its training calls that wait or run", ("client",)),
    ("tinker_client_age_seconds", "gauge", "seconds", "Since it was made", ("client",)),
)
"""Metrics of the training clients of a Tinker server, of those that exist."""
SERVER = _specs(
    (
        "http_requests_total",
        "counter",
        "calls",
        "Calls; status 499: client disconnected; a stream that ends by an error has the error's",
        ("method", "route", "code"),
    ),
    ("http_request_seconds", "histogram", "seconds", "From a call's headers to its last byte", ("route",)),
    ("http_calls", "gauge", "calls", "Calls in flight"),
    ("requests_total", "counter", "requests", "Requests to engines by outcome; refused: not accepted", ("outcome",)),
    ("requests_in_flight", "gauge", "requests", "Requests to engines in flight"),
    ("prompt_tokens_total", "counter", "tokens", "Prompt tokens of requests that have returned a token"),
    ("cached_prompt_tokens_total", "counter", "tokens", "Those of them that prefix caches served"),
    ("output_tokens_total", "counter", "tokens", "Tokens that engines returned"),
    ("ttft_seconds", "histogram", "seconds", "To the first token, of streams"),
    (
        "itl_seconds",
        "histogram",
        "seconds",
        "Between tokens, of streams; for several tokens at once the mean of each",
    ),
    ("e2e_seconds", "histogram", "seconds", "To the end, of completed requests"),
)
"""Metrics of the HTTP process, as its clients see them."""
_PARCELS = ("replica", "way")
COORDINATOR = _specs(
    ("coordinator_up", "gauge", "1", "1 while the coordinator answers"),
    ("coordinator_waiting", "gauge", "requests", "Requests that wait for a replica"),
    ("coordinator_clients", "gauge", "clients", "Clients connected"),
    ("coordinator_replicas", "gauge", "replicas", "Replicas that serve"),
    ("coordinator_submitted_total", "counter", "requests", "Requests accepted"),
    ("coordinator_finished_total", "counter", "requests", "Requests that ended on a replica"),
    ("coordinator_refused_total", "counter", "requests", "Requests refused because the queue was full"),
    ("coordinator_moved_total", "counter", "requests", "Requests handed from one replica to another"),
    ("coordinator_relieved_total", "counter", "requests", "Those of them that would have been evicted"),
    ("coordinator_resent_total", "counter", "requests", "Requests sent again after a replica was lost"),
    ("coordinator_replicas_lost_total", "counter", "replicas", "Replicas lost"),
    ("coordinator_fenced_total", "counter", "messages", "Dropped messages of earlier incarnations"),
    ("replica_up", "gauge", "1", "1 while the replica serves, 0 once it is lost", ("replica",)),
    (
        "replica_requests",
        "gauge",
        "requests",
        "At the replica (running), or queued for it (waiting)",
        ("replica", "status"),
    ),
    ("replica_free_rows", "gauge", "rows", "Further requests that the replica has rows for", ("replica",)),
    ("replica_parcels_total", "counter", "parcels", "Memory of requests that moved here (in) or away (out)", _PARCELS),
    ("replica_parcel_bytes_total", "counter", "bytes", "Bytes of these parcels", _PARCELS),
    ("replica_parcel_seconds_total", "counter", "seconds", "Their way from replica to replica", _PARCELS),
    ("replica_parcel_failures_total", "counter", "parcels", "Lost parcels: their requests went on by tokens", _PARCELS),
    ("worker_up", "gauge", "1", "1 while the process serves: an engine's, or one of --http-workers", ("worker",)),
    ("worker_restarts_total", "counter", "restarts", "Restarts of its process", ("worker",)),
)
SPECS = ENGINE | MISMATCH | TRAINER | SPEECH | TINKER | SERVER | COORDINATOR


class MetricSet:
    """A registry of metrics that are in SPECS, by their short names."""

    def __init__(self) -> None:
        self._registry = Registry()

    @property
    def registry(self) -> Registry:
        return self._registry

    def counter(self, name: str, **labels: str) -> Counter:
        spec = self._spec(name, "counter")
        return self._registry.counter(spec.full_name, spec.help, **labels)

    def gauge(self, name: str, **labels: str) -> Gauge:
        spec = self._spec(name, "gauge")
        return self._registry.gauge(spec.full_name, spec.help, **labels)

    def histogram(self, name: str, bounds: Iterable[float], **labels: str) -> Histogram:
        spec = self._spec(name, "histogram")
        return self._registry.histogram(spec.full_name, spec.help, tuple(bounds), **labels)

    def families(self) -> list[Family]:
        return list(self._registry.collect())

    def _spec(self, name: str, kind: str) -> MetricSpec:
        spec = SPECS[name]
        assert spec.kind == kind, f"{name} is a {spec.kind}"
        return spec


def engine_families(snapshot: EngineSnapshot, **labels: str) -> list[Family]:
    """An engine's series, each with `labels`, and those of `snapshot.beside`."""
    families = []
    for spec in ENGINE.values():
        series: dict[Labels, Metric] = {}
        for more, value in _values_of(spec, snapshot):
            series[labels_of(labels | more)] = _metric(spec, value)
        if series:
            families.append(Family(spec.full_name, spec.kind, spec.help, series))
    for family in snapshot.beside:
        shown = {labels_of(dict(own) | labels): metric for own, metric in family.series.items()}
        families.append(replace(family, series=shown))
    return families


def _values_of(spec: MetricSpec, snapshot: EngineSnapshot) -> Iterator[tuple[dict[str, str], Any]]:
    """(labels, value) of each series of a metric of ENGINE."""
    source = FIELDS.get(spec.name) or spec.name.removeprefix("engine_").removesuffix("_total")
    if isinstance(source, str):
        values = getattr(snapshot, source)
    else:
        values = {label: getattr(snapshot, name) for label, name in source.items()}
    if spec.labels:
        (name,) = spec.labels
        yield from (({name: label}, value) for label, value in values.items())
    elif values is not None:
        yield {}, values


def _metric(spec: MetricSpec, value: Any) -> Metric:
    if spec.kind == "histogram":
        return Histogram(spec.full_name, value.bounds, value.counts, value.total)
    return (Counter if spec.kind == "counter" else Gauge)(spec.full_name, float(value))


def as_row(families: Iterable[Family], prefix: str = "inference/") -> dict[str, float]:
    """Series as numbers by name, for a metrics writer: inference/engine_blocks/used, .../engine_ttft_seconds/p99.

    A histogram gives count, sum and, unless it is empty, p50 and p99.
    """
    row: dict[str, float] = {}
    for family in families:
        for labels, metric in family.series.items():
            name = prefix + "/".join([family.name.removeprefix(PREFIX), *(value for _, value in labels)])
            if isinstance(metric, Histogram):
                row |= {f"{name}/count": metric.count, f"{name}/sum": metric.total}
                if metric.count:
                    row |= {f"{name}/p50": metric.quantile(0.5), f"{name}/p99": metric.quantile(0.99)}
            else:
                row[name] = metric.value
    return row


def parcel_families(counts: Mapping[str, Mapping[str, float]], *, replica: str) -> list[Family]:
    """Series of a replica's parcels. counts: of each way, by what is counted (`ParcelTransfer.counts`)."""
    metrics = MetricSet()
    for way in counts:
        for name in ("parcels", "parcel_bytes", "parcel_seconds", "parcel_failures"):
            value = counts[way][name.removeprefix("parcel_")]
            metrics.counter(f"replica_{name}_total", replica=replica, way=way).inc(value)
    return metrics.families()


def coordinator_families(stats: Mapping[str, Any] | None) -> list[Family]:
    """A coordinator's series. stats: its report; None: it does not answer."""
    metrics = MetricSet()
    metrics.gauge("coordinator_up").set(float(stats is not None))
    if stats is None:
        return metrics.families()
    for name in ("waiting", "clients"):
        metrics.gauge(f"coordinator_{name}").set(stats[name])
    metrics.gauge("coordinator_replicas").set(len(stats["replicas"]))
    for name in ("submitted", "finished", "refused", "moved", "relieved", "resent", "replicas_lost", "fenced"):
        metrics.counter(f"coordinator_{name}_total").inc(stats[name])
    return metrics.families()
