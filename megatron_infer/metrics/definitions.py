"""Every metric there is: name, type, unit, meaning; and how figures become series of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_infer.metrics.core import Counter, Family, Gauge, Histogram, Registry
from megatron_infer.metrics.engine_snapshot import GRAPH_STEPS, BucketCounts, EngineSnapshot, Reading

PREFIX = "megatron_infer_"
STATES = ("running", "paused", "suspended", "changing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    name: str
    """Without the prefix; counters end in _total."""
    kind: str
    unit: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _specs(*rows: tuple[str, str, str, str] | tuple[str, str, str, str, tuple[str, ...]]) -> dict[str, Spec]:
    made = {}
    for name, kind, unit, text, *labels in rows:
        made[name] = Spec(name=name, kind=kind, unit=unit, help=text, labels=labels[0] if labels else ())
    return made


ENGINE = _specs(
    ("engine_state", "gauge", "1", "1 for the state the engine is in, 0 for the others", ("state",)),
    ("engine_weight_version", "gauge", "version", "Version of the weights in use"),
    ("engine_requests", "gauge", "requests", "Requests by where they stand: waiting, running, paused", ("status",)),
    ("engine_capacity", "gauge", "requests", "Requests computed at once, at most"),
    ("engine_blocks", "gauge", "blocks", "Blocks of the KV cache: used, cached, paused, free", ("kind",)),
    ("engine_state_slots", "gauge", "slots", "Recurrent-state slots: used, cached, free; hybrid models", ("kind",)),
    ("engine_steps_total", "counter", "steps", "Steps computed"),
    ("engine_prompt_tokens_total", "counter", "tokens", "Prompt tokens of requests that have drawn a token"),
    ("engine_cached_prompt_tokens_total", "counter", "tokens", "Of these, served from the prefix cache"),
    ("engine_output_tokens_total", "counter", "tokens", "Tokens drawn"),
    ("engine_requests_ended_total", "counter", "requests", "Requests by outcome", ("outcome",)),
    ("engine_prefix_queries_total", "counter", "admissions", "Admissions that looked for a cached prefix"),
    ("engine_prefix_hits_total", "counter", "admissions", "Those that found one"),
    ("engine_prefix_hit_tokens_total", "counter", "tokens", "Tokens they found, readmissions included"),
    ("engine_pauses_total", "counter", "preemptions", "Requests paused for lack of blocks"),
    ("engine_evictions_total", "counter", "preemptions", "Requests whose memory was taken, to the host or dropped"),
    ("engine_swaps_total", "counter", "evictions", "Evictions to the host (out) and returns from it (in)", ("way",)),
    ("engine_recomputed_tokens_total", "counter", "tokens", "Computed tokens that evictions dropped"),
    ("engine_graphs", "gauge", "graphs", "CUDA graphs that are captured now"),
    ("engine_graph_bytes", "gauge", "bytes", "Device memory that they take, as measured"),
    ("engine_graph_captures_total", "counter", "captures", "CUDA graphs captured"),
    ("engine_graph_steps_total", "counter", "steps", "Steps with graphs on: replayed, padded, eager", ("how",)),
    ("engine_graph_draws_outside_total", "counter", "steps", "Those not eager whose tokens were drawn outside of them"),
    ("engine_transitions_total", "counter", "transitions", "Suspends and resumes", ("command",)),
    ("engine_transition_seconds_total", "counter", "seconds", "Time that the calls took", ("command",)),
    ("engine_ttft_seconds", "histogram", "seconds", "From a request's arrival at the engine to its first token"),
    ("engine_itl_seconds", "histogram", "seconds", "Between two tokens of a sequence"),
    ("engine_e2e_seconds", "histogram", "seconds", "From arrival to the end, of requests that were completed"),
)
"""Of an engine; behind a coordinator with the label replica."""
MISMATCH = _specs(
    ("mismatch_num_tokens", "gauge", "tokens", "Drawn tokens that were scored by the trainer's forward"),
    ("mismatch_num_samples", "gauge", "samples", "Samples they belong to"),
    (
        "mismatch_num_stale_tokens",
        "gauge",
        "tokens",
        "Tokens of chosen samples drawn by, or from keys of, other weights",
    ),
    ("mismatch_num_unscored_samples", "gauge", "samples", "Chosen samples without log probabilities"),
    ("mismatch_abs_diff_mean_nats", "gauge", "nats", "Mean of |log p_train - log p_rollout|"),
    ("mismatch_abs_diff_max_nats", "gauge", "nats", "Largest of them"),
    ("mismatch_kl_k1_nats", "gauge", "nats", "KL(rollout || train), estimator k1"),
    ("mismatch_kl_k3_nats", "gauge", "nats", "KL(rollout || train), estimator k3; never negative"),
    ("mismatch_token_mult_prob_error", "gauge", "ratio", "Mean of exp(|d|); 1 where both agree"),
    ("mismatch_ratio_mean", "gauge", "ratio", "Mean of exp(d)"),
    ("mismatch_share_outside", "gauge", "share", "Tokens with exp(d) outside 0.9 .. 1.1"),
    ("mismatch_num_processed_tokens", "gauge", "tokens", "Tokens compared behind the sampler, too"),
    ("mismatch_processed_abs_diff_mean_nats", "gauge", "nats", "Mean difference there"),
    ("mismatch_processed_abs_diff_max_nats", "gauge", "nats", "Largest of them"),
    ("mismatch_sampler_excess_mean_nats", "gauge", "nats", "Mean of those differences beyond |d| of the same token"),
    ("mismatch_seconds", "gauge", "seconds", "Spent on scoring"),
    ("mismatch_weight_version", "gauge", "version", "Of the weights that both sides have"),
)
"""Of the latest window of a mismatch meter that was given the engine's `EngineMeter.registry`."""
SERVER = _specs(
    ("http_requests_total", "counter", "calls", "Calls by route and status; 499: left", ("method", "route", "code")),
    ("http_request_seconds", "histogram", "seconds", "From a call's head to its last byte", ("route",)),
    ("http_calls", "gauge", "calls", "Calls under way"),
    ("requests_total", "counter", "requests", "Requests to engines by outcome; refused: not taken", ("outcome",)),
    ("requests_in_flight", "gauge", "requests", "Requests to engines under way"),
    ("prompt_tokens_total", "counter", "tokens", "Prompt tokens of requests that have brought a token"),
    ("cached_prompt_tokens_total", "counter", "tokens", "Of these, served from prefix caches"),
    ("output_tokens_total", "counter", "tokens", "Tokens that engines brought"),
    ("ttft_seconds", "histogram", "seconds", "To the first token, of streams"),
    ("itl_seconds", "histogram", "seconds", "Between tokens, of streams; of a larger piece its mean, once a token"),
    ("e2e_seconds", "histogram", "seconds", "To the end, of requests that were completed"),
)
"""Of the HTTP process: what its clients see."""
COORDINATOR = _specs(
    ("coordinator_up", "gauge", "1", "1 while the coordinator answers"),
    ("coordinator_waiting", "gauge", "requests", "Requests that wait for a replica"),
    ("coordinator_clients", "gauge", "clients", "Clients connected"),
    ("coordinator_replicas", "gauge", "replicas", "Replicas that serve"),
    ("coordinator_submitted_total", "counter", "requests", "Requests taken"),
    ("coordinator_finished_total", "counter", "requests", "Requests that ended on a replica"),
    ("coordinator_refused_total", "counter", "requests", "Requests not taken, the queue being full"),
    ("coordinator_resent_total", "counter", "requests", "Requests sent once more, a replica being lost"),
    ("coordinator_replicas_lost_total", "counter", "replicas", "Replicas lost"),
    ("coordinator_fenced_total", "counter", "messages", "Messages of earlier incarnations, dropped"),
    ("replica_up", "gauge", "1", "1 while the replica serves, 0 once it is lost", ("replica",)),
    (
        "replica_requests",
        "gauge",
        "requests",
        "At the replica (running), or kept for it (waiting)",
        ("replica", "status"),
    ),
    ("replica_free_rows", "gauge", "rows", "Requests it could compute beside", ("replica",)),
    ("worker_up", "gauge", "1", "1 while the engine's process serves", ("worker",)),
    ("worker_restarts_total", "counter", "restarts", "Times its process was started again", ("worker",)),
)
SPECS = ENGINE | MISMATCH | SERVER | COORDINATOR


class Sheet:
    """A registry whose metrics are those of the catalog."""

    def __init__(self) -> None:
        self._registry = Registry()

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

    def _spec(self, name: str, kind: str) -> Spec:
        spec = SPECS[name]
        assert spec.kind == kind, f"{name} is a {spec.kind}"
        return spec


def engine_families(figures: EngineSnapshot, **labels: str) -> list[Family]:
    """An engine's series, each with `labels`."""
    sheet = Sheet()
    f = figures

    def gauge(name: str, value: float, **more: str) -> None:
        sheet.gauge(name, **labels, **more).set(value)

    def count(name: str, value: float, **more: str) -> None:
        sheet.counter(name, **labels, **more).inc(value)

    current = f.state if f.state in STATES else "changing"
    for state in STATES:
        gauge("engine_state", float(state == current), state=state)
    gauge("engine_weight_version", f.weight_version)
    for status, value in (("waiting", f.num_waiting), ("running", f.num_running), ("paused", f.num_paused)):
        gauge("engine_requests", value, status=status)
    gauge("engine_capacity", f.capacity)
    blocks = {"used": f.blocks_used, "cached": f.blocks_cached, "paused": f.blocks_paused, "free": f.blocks_free}
    for kind, value in blocks.items():
        gauge("engine_blocks", value, kind=kind)
    slots = {"used": f.state_slots_used, "cached": f.state_slots_cached, "free": f.state_slots_free}
    for kind, value in slots.items():
        gauge("engine_state_slots", value, kind=kind)
    gauge("engine_graphs", f.graphs)
    gauge("engine_graph_bytes", f.graph_bytes)
    for name, value in _plain_counts(f).items():
        count(name, value)
    for way, value in (("out", f.swaps_out), ("in", f.swaps_in)):
        count("engine_swaps_total", value, way=way)
    for how in GRAPH_STEPS:
        count("engine_graph_steps_total", f.graph_steps.get(how, 0), how=how)
    for outcome, value in f.ended.items():
        count("engine_requests_ended_total", value, outcome=outcome)
    for command, value in f.transitions.items():
        count("engine_transitions_total", value, command=command)
        count("engine_transition_seconds_total", f.transition_seconds[command], command=command)
    for name, buckets in (("ttft", f.ttft), ("itl", f.itl), ("e2e", f.e2e)):
        if buckets is not None:
            _fill(sheet.histogram(f"engine_{name}_seconds", buckets.bounds, **labels), buckets)
    return [*sheet.families(), *_of_others(f.beside, labels)]


def _plain_counts(f: EngineSnapshot) -> dict[str, int]:
    return {
        "engine_steps_total": f.num_steps,
        "engine_prompt_tokens_total": f.prompt_tokens,
        "engine_cached_prompt_tokens_total": f.cached_prompt_tokens,
        "engine_output_tokens_total": f.output_tokens,
        "engine_prefix_queries_total": f.prefix_queries,
        "engine_prefix_hits_total": f.prefix_hits,
        "engine_prefix_hit_tokens_total": f.prefix_hit_tokens,
        "engine_pauses_total": f.pauses,
        "engine_evictions_total": f.evictions,
        "engine_recomputed_tokens_total": f.recomputed_tokens,
        "engine_graph_captures_total": f.graph_captures,
        "engine_graph_draws_outside_total": f.graph_draws_outside,
    }


def _of_others(readings: Iterable[Reading], labels: Mapping[str, str]) -> list[Family]:
    registry = Registry()
    for one in readings:
        shown = {**dict(one.labels), **labels}
        if one.kind == "counter":
            registry.counter(one.name, one.help, **shown).inc(one.value)
        else:
            registry.gauge(one.name, one.help, **shown).set(one.value)
    return list(registry.collect())


def _fill(histogram: Histogram, buckets: BucketCounts) -> None:
    histogram.counts = list(buckets.counts)
    histogram.total = buckets.total


def as_row(families: Iterable[Family], prefix: str = "inference/") -> dict[str, float]:
    """Series as names and numbers for a metrics writer: inference/engine_blocks/used, .../engine_ttft_seconds/p99.

    A histogram is count, sum and, once it holds anything, p50 and p99.
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


def coordinator_families(stats: Mapping[str, Any] | None) -> list[Family]:
    """A coordinator's series from its report; None: it does not answer."""
    sheet = Sheet()
    sheet.gauge("coordinator_up").set(float(stats is not None))
    if stats is None:
        return sheet.families()
    for name in ("waiting", "clients"):
        sheet.gauge(f"coordinator_{name}").set(stats[name])
    sheet.gauge("coordinator_replicas").set(len(stats["replicas"]))
    for name in ("submitted", "finished", "refused", "resent", "replicas_lost", "fenced"):
        sheet.counter(f"coordinator_{name}_total").inc(stats[name])
    return sheet.families()
