"""Prometheus metrics of an engine: exact for a scripted load, equal to wandb's, in each of the three modes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import fields
from functools import partial
from pathlib import Path

import engines
import prometheus_client
import pytest
from ports import free_port
from scrape import Writer, check_histograms, parse

from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.speculative import SpeculativeConfig
from megatron_infer.engine import stats
from megatron_infer.engine.metrics.definitions import engine_families
from megatron_infer.engine.metrics.engine_snapshot import EngineSnapshot
from megatron_infer.engine.metrics.prometheus import PrometheusExporter, exposition
from megatron_infer.errors import ConfigError
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_hybrid

BLOCK = 16


make_engine = partial(engines.make_engine, max_requests=8)


def scrape(engine):
    text = exposition(lambda: engine_families(engine.figures()))[0].decode()
    series = parse(text)
    check_histograms(series, text)
    return series


def run_load(engine):
    """Eight requests that share a prefix, one of n=3, two aborted, a short one -> (outputs, the aborted one's)."""
    prefix = list(range(4, 4 + 2 * BLOCK))
    for i in range(8):
        params = SamplingParams(max_tokens=20 + i, ignore_eos=True)
        engine.add_request([*prefix, i + 40, i + 41], params, request_id=f"r{i}", stream="final")
    params = SamplingParams(n=3, max_tokens=6, ignore_eos=True, temperature=1.0)
    engine.add_request([9, 8, 7], params, request_id="three")
    engine.add_request(list(range(50)), SamplingParams(max_tokens=90, ignore_eos=True), request_id="cut")
    engine.add_request([5, 6], SamplingParams(max_tokens=5, ignore_eos=True), request_id="never")
    never = engine.abort("never")
    done, cut, before = [], None, scrape(engine)
    while engine.has_unfinished():
        done += [output for output in engine.step() if output.finished]
        state = engine.output_processor.get("cut")
        if state is not None and state.sequences[0].request.num_output >= 7:
            cut = engine.abort("cut")
        now = scrape(engine)
        for name, value in before.items():
            if name.partition("/")[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert now[name] >= value, name
        before = now
    assert never.metrics.num_output_tokens == 0 and cut is not None
    params = SamplingParams(max_tokens=2, ignore_eos=True)  # wandb rows come with steps: one after the abort
    done += engine.generate([[1, 2, 3]], params)
    return done, cut


@pytest.mark.parametrize("overlap", [False, True])
def test_scrape_and_wandb_agree_with_what_was_done_and_with_each_other(model, overlap):
    writer = Writer()
    tight = {"pool_blocks": 14, "paused_buffer_size_gb": 0}  # too few for all: some are evicted
    logging = {"metrics_writer": writer, "logging_step_interval": 1}
    engine = make_engine(model, overlap=overlap, prefix="lru", **tight, **logging)
    done, cut = run_load(engine)
    series, counters = scrape(engine), engine.stats().counters
    outputs = [*done, cut]
    assert series["engine_output_tokens_total"] == sum(o.metrics.num_output_tokens for o in outputs)
    assert series["engine_output_tokens_total"] >= sum(20 + i for i in range(8)) + 18 + 7 + 2
    assert series["engine_prompt_tokens_total"] == sum(len(o.prompt_token_ids) for o in outputs) == 8 * 34 + 3 + 50 + 3
    assert series["engine_requests_ended_total/length"] == len(done) == 10
    assert series["engine_requests_ended_total/abort"] == 2
    assert series["engine_requests_ended_total/stop"] == series["engine_requests_ended_total/error"] == 0
    assert series["engine_ttft_seconds_count"] == 11 and series["engine_e2e_seconds_count"] == 10
    num_sequences = 8 + 3 + 1 + 1
    assert series["engine_itl_seconds_count"] == series["engine_output_tokens_total"] - num_sequences
    latencies = sum(o.metrics.latency_s for o in done)
    assert series["engine_e2e_seconds_sum"] == pytest.approx(latencies, rel=1e-6)
    assert series["engine_ttft_seconds_sum"] == pytest.approx(sum(o.metrics.ttft_s for o in outputs), rel=1e-6)
    assert series["engine_pauses_total"] == counters["paused"]
    assert series["engine_evictions_total"] == counters["evicted"] == sum(o.metrics.num_evictions for o in outputs) > 0
    assert series["engine_prefix_hits_total"] == counters["prefix_hits"] > 0
    assert 0 < series["engine_cached_prompt_tokens_total"] <= series["engine_prompt_tokens_total"]
    kinds = {kind: series[f"engine_blocks/{kind}"] for kind in ("used", "cached", "paused", "free")}
    assert kinds["used"] == kinds["paused"] == 0 and sum(kinds.values()) == engine.stats().num_blocks
    assert kinds["cached"] == inspect(engine).context.pool.num_cached > 0
    agree(series, writer.rows[-1])


def agree(series, row):
    """Every series except buckets is in the row under its name, with the same value."""
    shown = {name: value for name, value in series.items() if "_bucket/" not in name}
    for name, value in shown.items():
        for suffix in ("_count", "_sum"):
            head, _, rest = name.partition("/")
            if head.endswith(suffix):
                name = "/".join(filter(None, [head.removesuffix(suffix), rest, suffix[1:]]))
        assert row[f"inference/{name}"] == value, name
    assert row["inference/block_count_avail"] == series["engine_blocks/free"] + series["engine_blocks/cached"]
    assert row["inference/prefix_cache_hits"] == series["engine_prefix_hits_total"]


def test_suspends_paused_blocks_and_versions_show_while_they_last(model):
    engine = make_engine(model)
    engine.add_request(list(range(20)), SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(3):
        engine.step()
    running = scrape(engine)
    assert (running["engine_requests/running"], running["engine_blocks/used"]) == (1, 2)
    first, second = engine.suspend(mode="offload"), engine.resume()
    series = scrape(engine)
    assert series["engine_transitions_total/suspend"] == series["engine_transitions_total/resume"] == 1
    assert series["engine_transition_seconds_total/suspend"] == first.seconds
    assert series["engine_transition_seconds_total/resume"] == second.seconds
    engine.suspend()
    assert scrape(engine)["engine_state/suspended"] == 1
    engine.resume()
    engine.set_weight_version(7)
    series = scrape(engine)
    assert series["engine_weight_version"] == 7 and series["engine_state/running"] == 1


def test_metrics_of_other_registries_are_shown_with_the_engines(model):
    engine = make_engine(model)
    registry = engine.output_processor.meter.registry
    registry.gauge("megatron_infer_mismatch_kl_k3_nats", "KL", layer="attention").set(0.01)
    registry.counter("megatron_infer_mismatch_alarms_total", "alarms").inc(2)
    series = scrape(engine)
    assert series["mismatch_kl_k3_nats/attention"] == 0.01 and series["mismatch_alarms_total"] == 2
    before = engine.figures()
    registry.counter("megatron_infer_mismatch_alarms_total", "alarms").inc()
    assert before.beside[1].series[()].value == 2 and scrape(engine)["mismatch_alarms_total"] == 3
    figures = EngineSnapshot.from_dict(json.loads(json.dumps(engine.figures().to_dict())))
    assert figures == engine.figures() == EngineSnapshot.from_dict({**figures.to_dict(), "of_a_later_release": 1})
    (family,) = [one for one in engine_families(figures, replica="a") if one.name.endswith("kl_k3_nats")]
    assert list(family.series) == [(("layer", "attention"), ("replica", "a"))]


def test_hybrid_engine_shows_its_state_slots():
    model = tiny_hybrid(vocab_size=128, max_sequence_length=256)
    engine = make_engine(model, max_sequence_length=128)
    engine.add_request(list(range(20)), SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    series = scrape(engine)
    assert series["engine_state_slots/used"] == 1
    assert sum(series[f"engine_state_slots/{kind}"] for kind in ("used", "cached", "free")) >= 8


def test_an_engine_gives_every_figure_of_a_snapshot(model, monkeypatch):
    """A figure that is given nowhere would be exported as 0 for ever. Graphs are not captured here."""
    features = {"lora": LoRAConfig(max_loras=1, max_rank=4), "speculative": SpeculativeConfig()}
    hybrid = tiny_hybrid(vocab_size=128, max_sequence_length=256)
    engines = make_engine(model, **features), make_engine(hybrid, max_sequence_length=128)
    monkeypatch.setattr(stats, "EngineSnapshot", dict)
    given = set().union(*(engine.figures() for engine in engines))
    assert given == {one.name for one in fields(EngineSnapshot) if not one.name.startswith("graph")}


# ---------------------------------------------------------------------- modes


def read(url):
    with urllib.request.urlopen(url, timeout=10) as reply:
        return parse(reply.read().decode())


def test_instrument_only_leaves_serving_to_the_application(model):
    registry = prometheus_client.CollectorRegistry()
    with PrometheusExporter.of_engine(make_engine(model), replica="a", registry=registry) as exporter:
        assert exporter.url is None
        assert parse(prometheus_client.generate_latest(registry).decode())["engine_capacity/a"] == 8
    assert not prometheus_client.generate_latest(registry)


def test_launched_server_shows_the_current_state_of_the_engine(model):
    engine = make_engine(model)
    registry = prometheus_client.CollectorRegistry()
    with PrometheusExporter.of_engine(engine, mode="launch_server", registry=registry) as exporter:
        assert read(exporter.url)["engine_output_tokens_total"] == 0
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert read(exporter.url)["engine_output_tokens_total"] == 4
        port = int(exporter.url.rpartition(":")[2].split("/")[0])
        for host, is_served in (("localhost", True), ("[::1]:1", True), ("127.evil.example", False), ("[", False)):
            asked = urllib.request.Request(exporter.url, headers={"Host": host})
            with contextlib.nullcontext() if is_served else pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(asked).close()
        with pytest.raises(ConfigError, match=f"port {port}"):
            PrometheusExporter.of_engine(engine, mode="launch_server", port=port, registry=registry)


def test_unknown_mode_and_missing_folder_are_refused(model, monkeypatch):
    with pytest.raises(ConfigError, match="did you mean 'launch_server'"):
        PrometheusExporter.of_engine(make_engine(model), mode="launch_serve")
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    with pytest.raises(ConfigError, match="PROMETHEUS_MULTIPROC_DIR is not set"):
        PrometheusExporter.of_engine(make_engine(model), mode="launch_multiproc_server")


CHILD = """
import sys, time
from megatron_infer.engine.metrics import prometheus
from megatron_infer.engine.metrics.definitions import engine_families
from megatron_infer.engine.metrics.engine_snapshot import EngineSnapshot
from megatron_infer.engine.metrics.engine_meter import EngineMeter
prometheus.WRITE_S = 0.1
name, tokens, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
meter = EngineMeter()
meter.tokens([name] * tokens, time.monotonic())
meter.first_token(0.2, prompt=5, cached=1)
def read():
    return engine_families(EngineSnapshot(
        state="running", weight_version=1, num_running=tokens, **meter.as_figures()), replica=name)
exporter = prometheus.PrometheusExporter(read, mode="launch_multiproc_server", port=port)
print(exporter.url, flush=True)
sys.stdin.readline()
exporter.close()
"""


def test_processes_of_one_folder_are_served_together_and_outlive_each_other(tmp_path):
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    port = free_port()

    def start(name, tokens):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, name, str(tokens), str(port)],
            env=environment, cwd=Path(__file__).parents[3], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        return child, child.stdout.readline().strip()

    children = []
    try:
        for name, tokens in (("a", 10), ("b", 20)):
            children.append(start(name, tokens))
        (first, url), (_second, other) = children
        assert url == f"http://127.0.0.1:{port}/metrics" and other == "None"
        series = read(url)
        assert (series["engine_output_tokens_total/a"], series["engine_output_tokens_total/b"]) == (10, 20)
        assert series["engine_requests/b/running"] == 20 and series["engine_ttft_seconds_count/b"] == 1
        first.kill()
        first.wait()
        deadline = time.monotonic() + 20
        while (series := try_read(url)) is None or "engine_requests/a/running" in series:
            assert time.monotonic() < deadline, "no process took over"
            time.sleep(0.05)
        assert series["engine_output_tokens_total/a"] == 10, "counts of who is gone stay"
        assert series["engine_requests/b/running"] == 20
        children.append(start("a", 3))
        assert read(url)["engine_output_tokens_total/a"] == 13, "and go on when it comes back"
    finally:
        for child, _ in children:
            child.kill()
            child.wait()
            child.stdin.close()
            child.stdout.close()


def try_read(url):
    try:
        return read(url)
    except OSError:
        return None
