"""Writes the engine's steps as wandb metrics and console lines, every `logging_step_interval` steps.

The writer is the wandb module that the training script has imported and initialized, or a wandb run: this module
never imports wandb and makes no network call.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from megatron_infer.engine.metrics.definitions import as_row, engine_families
from megatron_infer.engine.metrics.engine_snapshot import EngineSnapshot, StepSnapshot
from megatron_infer.errors import ConfigError

STEP_METRIC = "inference/inference_step"
LOGGER = "megatron_infer.metrics"
logger = logging.getLogger(LOGGER)


class MetricsWriter(Protocol):
    """The interface of `metrics_writer`, which the wandb module and a wandb run both have."""

    def log(self, data: dict[str, float]) -> Any: ...

    def define_metric(self, name: str, step_metric: str | None = None) -> Any: ...


class WandbSink:
    """Writes snapshots as console lines and, with a writer, as rows of its run.

    The x axis continues from the run's summary, so that a rebuilt engine or a resumed run does not overwrite earlier
    steps. Raises ConfigError (a ValueError) for a writer without log and define_metric, and for the
    wandb module before wandb.init().
    """

    def __init__(self, writer: MetricsWriter | None = None) -> None:
        check_writer(writer)
        self.writer = writer
        self.offset = 0
        self._families: set[str] = set()
        if writer is not None:
            self.offset = _last_step(writer)
            writer.define_metric(STEP_METRIC)
            writer.define_metric("inference/*", step_metric=STEP_METRIC)

    def write_rollout(self, values: Mapping[str, float]) -> None:
        """One row of `RolloutStats.as_metrics()`, over the weight version."""
        self._write_family("rollout", values)

    def write_mismatch(self, values: Mapping[str, float]) -> None:
        """One row of `MismatchFigures.as_metrics()`, over the weight version."""
        self._write_family("mismatch", values)

    def _write_family(self, name: str, values: Mapping[str, float]) -> None:
        """A row of numbers named `name`/..., one of which is the weight version."""
        if self.writer is None:
            return
        if name not in self._families:
            self.writer.define_metric(f"{name}/*", step_metric=f"{name}/weight_version")
            self._families.add(name)
        self.writer.log(dict(values))

    def write(self, snapshot: StepSnapshot, engine: EngineSnapshot | None = None) -> None:
        """One console line and, with a writer, one row: Megatron's keys, and the series that Prometheus gets."""
        logger.info("%s", console_line(snapshot))
        if self.writer is not None:
            values = snapshot.as_metrics() | ({} if engine is None else as_row(engine_families(engine)))
            values[STEP_METRIC] += self.offset
            self.writer.log(values)


def check_writer(writer: object) -> None:
    """Raises ConfigError unless `writer` is None or can log and define metrics now."""
    if writer is None:
        return
    missing = [name for name in ("log", "define_metric") if not callable(getattr(writer, name, None))]
    if missing:
        raise ConfigError(
            f"metrics_writer is {type(writer).__name__} without {' and '.join(missing)}; "
            "pass the wandb module or a wandb run, or None"
        )
    if getattr(writer, "run", True) is None:
        raise ConfigError("metrics_writer is the wandb module but no run is active; call wandb.init() first")


def console_line(s: StepSnapshot) -> str:
    """The step in one line for the log."""
    rate = s.active_token_count / s.step_time_s if s.step_time_s > 0 else 0.0
    return (
        f"step {s.step}: {s.step_time_s * 1e3:.1f} ms, {s.active_token_count} tokens ({rate:,.0f}/s), "
        f"{s.active_request_count} active, {s.paused_request_count} paused, {s.waiting_queue_len} waiting, "
        f"blocks {s.allocated_blocks}/{s.total_blocks} ({s.allocated_utilization:.1f} %), "
        f"prefix hits {s.prefix_cache_hits}"
    )


def _last_step(writer: object) -> int:
    """The run's last x value, from its summary, which is local, unlike its history."""
    run = getattr(writer, "run", writer)
    summary: Any = getattr(run, "summary", None)
    return int(summary.get(STEP_METRIC) or 0) if hasattr(summary, "get") else 0
