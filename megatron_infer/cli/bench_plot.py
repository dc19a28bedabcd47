"""A load's latencies and throughput as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_infer.errors import ConfigError, InferenceError

if TYPE_CHECKING:
    from megatron_infer.cli.serve_load import Load


def require_matplotlib() -> None:
    """Raises ConfigError that says what to install: told before the load is run."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None


def plot(load: Load, report: dict[str, Any], path: str) -> None:
    """Three panels as PNG: latencies as shares of requests, gaps between pieces, tokens per second over time."""
    from matplotlib.figure import Figure

    complete = [one for one in load.answers if one.is_complete]
    figure = Figure(figsize=(13, 4), layout="constrained")
    latencies, gaps, rates = figure.subplots(1, 3)
    for name, values in (
        ("first token", [one.token_times[0] - one.sent for one in complete if one.token_times]),
        ("whole request", [one.ended - one.sent for one in complete]),
    ):
        ordered = sorted(values)
        latencies.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=name)
    latencies.set(xlabel="seconds", ylabel="share of requests", title="Latency")
    latencies.legend()
    between = [1e3 * (b - a) for one in complete for a, b in zip(one.token_times, one.token_times[1:], strict=False)]
    gaps.hist(between, bins=60)
    gaps.set(xlabel="ms", ylabel="pieces", title="Between pieces")
    times = [moment for one in load.answers for moment in one.token_times]
    width = max(load.seconds / 60, 1e-3)
    rates.hist(times, bins=60, weights=[1 / width] * len(times), histtype="step")
    rates.set(xlabel="seconds", ylabel="pieces per second", title="Throughput")
    figure.suptitle(f"{report['model']}, {report['load']}: {report['output_tokens_per_s']:,.0f} output tokens/s")
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise InferenceError(f"{path}: cannot be written: {error.strerror or error}") from None
