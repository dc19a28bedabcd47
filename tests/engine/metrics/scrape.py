"""Reads metrics: text as Prometheus does, with the library's parser, and rows in the place of wandb."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "megatron_infer_"


def parse(text: str) -> dict[str, float]:
    """engine_blocks{kind="used"} -> "engine_blocks/used": series by name and label values; buckets by their bound."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            key = "/".join([name, *(sample.labels[label] for label in sorted(sample.labels))])
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def check_histograms(series: dict[str, float], text: str) -> int:
    """Buckets grow with their bounds and end with the count -> histograms seen."""
    buckets: dict[str, list[tuple[float, float]]] = {}
    for family in text_string_to_metric_families(text):
        if family.type != "histogram":
            continue
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                labels = sorted((k, v) for k, v in sample.labels.items() if k != "le")
                key = "/".join([family.name.removeprefix(PREFIX), *(v for _, v in labels)])
                buckets.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
    for key, values in buckets.items():
        name, _, rest = key.partition("/")
        bounds, counts = zip(*values, strict=True)
        assert list(bounds) == sorted(bounds) and bounds[-1] == float("inf")
        assert list(counts) == sorted(counts)
        assert counts[-1] == series["/".join(filter(None, [f"{name}_count", rest]))]
    return len(buckets)


class Writer:
    """Takes rows as the wandb module does."""

    def __init__(self, summary=None):
        self.rows = []
        self.metrics = []
        self.summary = summary or {}

    def log(self, data):
        self.rows.append(data)

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))
