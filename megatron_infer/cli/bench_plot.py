"""Pictures of a load test, and of engines side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_infer.errors import ConfigError, InferenceError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from megatron_infer.cli.load_generator import LoadResult


def require_matplotlib() -> None:
    """Raises ConfigError if matplotlib is not installed; called before anything is measured."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None


def plot(load: LoadResult, report: dict[str, Any], path: str) -> None:
    """Write a PNG with three panels: latency distribution, gaps between chunks, tokens per second over time."""
    from matplotlib.figure import Figure

    complete = [one for one in load.results if one.is_complete]
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
    gaps.set(xlabel="ms", ylabel="chunks", title="Between chunks")
    times = [moment for one in load.results for moment in one.token_times]
    width = max(load.seconds / 60, 1e-3)
    rates.hist(times, bins=60, weights=[1 / width] * len(times), histtype="step")
    rates.set(xlabel="seconds", ylabel="chunks per second", title="Throughput")
    figure.suptitle(f"{report['model']}, {report['load']}: {report['output_tokens_per_s']:,.0f} output tokens/s")
    _save(figure, path)


def plot_engines(report: dict[str, Any], path: str) -> None:
    """Write a PNG of a report of `megatron-infer bench`: for each workload a bar of each engine's median rate, with the
    least and the most of its rounds."""
    from matplotlib.figure import Figure

    names = list(report["engines"])
    columns = report["columns"]
    figure = Figure(figsize=(2.6 * len(columns) + 1, 4), layout="constrained")
    panels = figure.subplots(1, len(columns), squeeze=False)[0]
    for panel, (title, column) in zip(panels, columns.items(), strict=True):
        for place, name in enumerate(names):
            if (found := column["engines"].get(name)) is None:
                continue
            rate = found["tok_s"]
            spread = [[rate["median"] - rate["min"]], [rate["max"] - rate["median"]]]
            panel.bar(place, rate["median"], yerr=spread, capsize=3, color=f"C{place}", label=name)
        panel.set(title=title, xticks=[])
    panels[0].set(ylabel="tokens per second")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    settings = report["settings"]
    figure.suptitle(f"{report['model']}, {report['shape']['dtype']}, {settings['threads']} threads")
    _save(figure, path)


def _save(figure: Figure, path: str) -> None:
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise InferenceError(f"{path}: cannot be written: {error.strerror or error}") from None
