"""Writes what follows from the metric definitions: the tables of docs/metrics.md and the Grafana dashboard.

    python tools/metric_docs.py [ROOT]

A test holds both to what this writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megatron_infer.engine.metrics.definitions import (
    COORDINATOR,
    ENGINE,
    MISMATCH,
    SERVER,
    SPEECH,
    TINKER,
    TRAINER,
    MetricSpec,
)

DOCS, DASHBOARD = Path("docs/metrics.md"), Path("docs/grafana/megatron_infer.json")
TABLES = {
    "engine": ENGINE,
    "mismatch": MISMATCH,
    "trainer": TRAINER,
    "speech": SPEECH,
    "tinker": TINKER,
    "server": SERVER,
    "coordinator": COORDINATOR,
}
P = "megatron_infer_"
WINDOW = "[$__rate_interval]"


def table(specs: dict[str, MetricSpec]) -> str:
    lines = ["| name | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    for spec in specs.values():
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        meaning = spec.help.replace("|", "\\|")
        lines.append(f"| `{spec.full_name}` | {spec.kind} | {spec.unit} | {labels} | {meaning} |")
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """docs/metrics.md with the text between its marks regenerated."""
    for name, specs in TABLES.items():
        begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
        head, rest = text.split(begin)
        text = head + begin + table(specs) + end + rest.split(end)[1]
    return text


def rate(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({P}{name}{WINDOW}))"


def quantile(q: float, name: str) -> str:
    return f"histogram_quantile({q}, sum by (le) (rate({P}{name}_bucket{WINDOW})))"


def latency(name: str) -> dict[str, str]:
    return {f"p{round(100 * q)}": quantile(q, name) for q in (0.5, 0.9, 0.99)}


HITS = rate("engine_prefix_hits_total", "replica")
QUERIES = rate("engine_prefix_queries_total", "replica")
PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Calls by status", "reqps", {"{{code}}": rate("http_requests_total", "code")}),
    (
        "Requests",
        "short",
        {
            "{{status}} {{replica}}": f"{P}engine_requests",
            "wait for a replica": f"{P}coordinator_waiting",
            "in flight": f"{P}requests_in_flight",
        },
    ),
    (
        "Tokens per second",
        "short",
        {
            "out": rate("output_tokens_total"),
            "prompt": rate("prompt_tokens_total"),
            "prompt, cached": rate("cached_prompt_tokens_total"),
        },
    ),
    ("Time to first token (streams)", "s", latency("ttft_seconds")),
    ("Between tokens (streams)", "s", latency("itl_seconds")),
    ("Whole request", "s", latency("e2e_seconds")),
    ("Time to first token (engine)", "s", latency("engine_ttft_seconds")),
    ("Between tokens (engine)", "s", latency("engine_itl_seconds")),
    ("Blocks", "short", {"{{kind}} {{replica}}": f"{P}engine_blocks"}),
    ("State slots", "short", {"{{kind}} {{replica}}": f"{P}engine_state_slots"}),
    ("Prefix cache hits", "percentunit", {"{{replica}}": f"{HITS} / {QUERIES}"}),
    (
        "Preemptions",
        "short",
        {
            "paused {{replica}}": rate("engine_pauses_total", "replica"),
            "evicted {{replica}}": rate("engine_evictions_total", "replica"),
            "swapped {{way}} {{replica}}": rate("engine_swaps_total", "replica, way"),
        },
    ),
    (
        "Seconds per suspend and resume",
        "s",
        {
            "{{command}}": f"{rate('engine_transition_seconds_total', 'command')} / "
            f"{rate('engine_transitions_total', 'command')}"
        },
    ),
    ("Weight version", "short", {"{{replica}}": f"{P}engine_weight_version"}),
    (
        "Mismatch with the trainer",
        "short",
        {"KL {{replica}}": f"{P}mismatch_kl_k3_nats", "outside {{replica}}": f"{P}mismatch_share_outside"},
    ),
    (
        "Training clients",
        "short",
        {
            "tokens/s {{client}}": rate("tinker_client_trained_tokens_total", "client"),
            "loss {{client}}": f"{P}tinker_client_loss",
            "queue {{client}}": f"{P}tinker_client_queue",
        },
    ),
    (
        "Health",
        "short",
        {
            "coordinator": f"{P}coordinator_up",
            "{{replica}}": f"{P}replica_up",
            "{{worker}} restarts": f"{P}worker_restarts_total",
            "replicas lost": f"{P}coordinator_replicas_lost_total",
        },
    ),
)
"""(title, unit, {legend: PromQL})"""


def dashboard() -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    panels = []
    for number, (title, unit, queries) in enumerate(PANELS):
        targets = [
            {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend, "datasource": source}
            for i, (legend, expr) in enumerate(queries.items())
        ]
        place = {"x": 8 * (number % 3), "y": 8 * (number // 3), "w": 8, "h": 8}
        panels.append(
            {
                "id": number + 1,
                "title": title,
                "type": "timeseries",
                "datasource": source,
                "gridPos": place,
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
                "targets": targets,
            }
        )
    needed = {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}
    return {
        "__inputs": [{**needed, "description": "", "pluginName": "Prometheus"}],
        "title": "megatron_infer",
        "uid": "megatron-infer",
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "tags": ["megatron_infer"],
        "templating": {"list": []},
        "panels": panels,
    }


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])
    docs = root / DOCS
    docs.write_text(with_tables(docs.read_text(encoding="utf-8")), encoding="utf-8")
    (root / DASHBOARD).parent.mkdir(exist_ok=True)
    (root / DASHBOARD).write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
