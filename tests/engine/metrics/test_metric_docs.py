"""The docs and the dashboard name exactly the exported metrics."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_infer.engine.metrics.definitions import FIELDS, MISMATCH, SPECS, TRAINER, engine_families
from megatron_infer.engine.metrics.engine_meter import EngineMeter
from megatron_infer.engine.metrics.engine_snapshot import EngineSnapshot
from megatron_infer.engine.metrics.server_meter import ServerMeter
from megatron_infer.server.audio.meter import SpeechMeter
from megatron_infer.server.tinker.figures import ClientFigures, families_of

ROOT = Path(__file__).parents[3]
SUFFIXES = re.compile("_(bucket|count|sum)$")


@pytest.fixture(scope="module")
def metric_docs():
    spec = importlib.util.spec_from_file_location("metric_docs", ROOT / "tools" / "metric_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def figures():
    meter = EngineMeter()
    meter.adapter_ended("french", 3)
    for spec in MISMATCH.values():
        meter.registry.gauge(spec.full_name, spec.help).set(1.0)
    for spec in TRAINER.values():
        meter.registry.counter(spec.full_name, spec.help)
    SpeechMeter(meter.registry)
    drafts = {
        "drafted": {"1": 3, "2": 2},
        "drafts_accepted": {"1": 2, "2": 0},
        "draft_depths": {"0": 4, "1": 1, "2": 1},
    }
    return EngineSnapshot(
        state="running", weight_version=0, **drafts, **meter.as_figures()
    )  # no drafts: no such series


def exported():
    """Metric families of an engine and of a server with a replica and a worker, by name."""
    counts = "submitted finished refused moved relieved resent replicas_lost fenced waiting clients".split()
    replica = {"name": "a", "incarnation": 1, "running": 0, "waiting": 0, "free_rows": 1}
    parcels = {"parcels": 1, "bytes": 2, "seconds": 0.5, "failures": 0}
    replica["stats"] = {"figures": figures().to_dict(), "parcels": {"out": parcels, "in": parcels}}
    meter = ServerMeter()
    meter.sources.append(lambda: families_of({"client": ClientFigures(loss=1.0).row()}))
    meter.call_began()
    meter.call_ended("GET", "/health", 200, 0.1)
    stats = {**dict.fromkeys(counts, 0), "started": 1.0, "replicas": [replica]}
    meter.update(stats, [{"name": "replica0", "state": "running", "restarts": 0}])
    return {family.name: family for family in [*engine_families(figures()), *meter.families()]}


def test_exactly_the_defined_metrics_are_exported_with_their_labels():
    found = exported()
    assert set(found) == {spec.full_name for spec in SPECS.values()}
    for spec in SPECS.values():
        family = found[spec.full_name]
        assert (family.kind, family.help) == (spec.kind, spec.help)
        labels = {name for key in family.series for name, _ in key} - (
            {"replica"} if spec.name.startswith(("engine_", "mismatch_", "trainer_", "speech_")) else set()
        )
        assert labels == set(spec.labels), spec.name
        assert spec.name.endswith("_total") == (spec.kind == "counter")


def test_every_figure_is_the_value_of_one_series():
    numbers = [one.name for one in fields(EngineSnapshot) if one.type in ("int", "float") and one.name != "born"]
    snapshot = EngineSnapshot(born=0.0, state="", **{name: place for place, name in enumerate(numbers, 2)})
    values = [metric.value for family in engine_families(snapshot) for metric in family.series.values()]
    assert sorted(value for value in values if value > 1) == list(range(2, 2 + len(numbers)))
    labelled = [pair for source in FIELDS.values() if isinstance(source, dict) for pair in source.items()]
    assert all(label in name.split("_") for label, name in labelled)


def test_docs_have_the_tables_of_the_definitions(metric_docs):
    text = (ROOT / metric_docs.DOCS).read_text()
    assert metric_docs.with_tables(text) == text, "run: python tools/metric_docs.py"


def test_every_query_of_the_dashboard_asks_for_what_is_exported(metric_docs):
    text = (ROOT / metric_docs.DASHBOARD).read_text()
    board = json.loads(text)
    assert board == metric_docs.dashboard(), "run: python tools/metric_docs.py"
    kinds = {name: family.kind for name, family in exported().items()}
    num_queries = 0
    for panel in board["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"megatron_infer_\w+", target["expr"])
            assert names, target
            for name in names:
                base = SUFFIXES.sub("", name)
                assert name in kinds or kinds.get(base) == "histogram", name
                if "histogram_quantile" in target["expr"]:
                    assert name.endswith("_bucket")
            num_queries += 1
    assert num_queries >= 20
