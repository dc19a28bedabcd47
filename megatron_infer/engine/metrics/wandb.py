"""Writes the engine's steps as wandb metrics and console lines, every `logging_step_interval` steps.

The writer is the wandb module that the training script has imported and initialized, or a wandb run: this module
never imports wandb and makes no network call.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from megatron_infer.engine.metrics.definitions import as_row, engine_families
from megatron_infer.engine.metrics.engine_snapshot import EngineSnapshot
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

    def write(self, row: Mapping[str, float], engine: EngineSnapshot | None = None) -> None:
        """One console line and, with a writer, one row: `step_row`, and the series that Prometheus gets."""
        logger.info("%s", console_line(row))
        if self.writer is not None:
            values = {**row, **({} if engine is None else as_row(engine_families(engine)))}
            values[STEP_METRIC] += self.offset
            self.writer.log(values)


def step_row(
    engine: EngineSnapshot,
    *,
    step: int,
    seconds: float,
    num_tokens: int,
    num_requests: int,
    num_blocks: int,
    num_active_blocks: int,
    block_size: int,
) -> dict[str, float]:
    """The engine after one step, by the names that Megatron's engine logs.

    step: since the engine was built; the x axis. num_tokens: computed by the step. num_requests: unfinished ones.
    num_active_blocks: held by running requests, a shared one counted once. Utilizations are in percent.
    """
    available = engine.blocks_free + engine.blocks_cached
    allocated = num_blocks - available
    row = {
        "inference_step": step,
        "step_time_s": seconds,
        "waiting_queue_len": engine.num_waiting,
        "total_requests_dict_size": num_requests,
        "total_blocks": num_blocks,
        "allocated_blocks": allocated,
        "allocated_utilization": 100.0 * allocated / max(num_blocks, 1),
        "active_unique_blocks": num_active_blocks,
        "active_utilization": 100.0 * num_active_blocks / max(num_blocks, 1),
        "active_request_count": engine.num_running,
        "paused_request_count": engine.num_paused,
        "block_count_avail": available,
        "active_token_count": num_tokens,
        "total_request_count": engine.num_running + engine.num_paused,
        "max_requests": engine.capacity,
        "prefix_cache_hits": engine.prefix_hits,
        "prefix_cache_blocks_matched": engine.prefix_hit_tokens // block_size,
    }
    return {f"inference/{name}": value for name, value in row.items()}


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


def console_line(row: Mapping[str, float]) -> str:
    """A `step_row` in one line for the log."""
    of = {name.removeprefix("inference/"): value for name, value in row.items()}
    seconds, num_tokens = of["step_time_s"], of["active_token_count"]
    rate = num_tokens / seconds if seconds > 0 else 0.0
    return (
        f"step {of['inference_step']}: {seconds * 1e3:.1f} ms, {num_tokens} tokens ({rate:,.0f}/s), "
        f"{of['active_request_count']} active, {of['paused_request_count']} paused, {of['waiting_queue_len']} waiting, "
        f"blocks {of['allocated_blocks']}/{of['total_blocks']} ({of['allocated_utilization']:.1f} %), "
        f"prefix hits {of['prefix_cache_hits']}"
    )


def _last_step(writer: object) -> int:
    """The run's last x value, from its summary, which is local, unlike its history."""
    run = getattr(writer, "run", writer)
    summary: Any = getattr(run, "summary", None)
    return int(summary.get(STEP_METRIC) or 0) if hasattr(summary, "get") else 0
