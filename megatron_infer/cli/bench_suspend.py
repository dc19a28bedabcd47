"""The cost of suspends in a running workload, from the engine's reports."""

from __future__ import annotations

import statistics
from typing import Any

from megatron_infer.cli.bench_workload import RunResult


def summarize_suspensions(suspending: list[RunResult], plain: list[RunResult], *, every: int) -> dict[str, Any]:
    """Medians over every suspend and resume of all rounds, and whether the tokens equal those without suspends."""
    reports = [report for result in suspending for report in result.suspensions]
    by_command = {
        command: _summary([report for report in reports if report["command"] == command])
        for command in ("suspend", "resume")
    }
    return {
        "every": every,
        "mode": reports[0]["mode"] if reports else None,
        "cycles": len(reports) // 2,
        "tokens_identical": all(result.outputs == plain[0].outputs for result in [*suspending, *plain]),
        "commands": by_command,
    }


def _summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    if not reports:
        return {}
    seconds = [report["seconds"] for report in reports]
    tags: dict[str, dict[str, float]] = {}
    for report in reports:
        for tag in report["tags"]:
            rows = [other["tags"][tag] for other in reports if tag in other["tags"]]
            tags[tag] = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {
        "seconds": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
        "requests": statistics.median(report["num_requests"] for report in reports),
        "tags": tags,
    }


def render_suspensions(summary: dict[str, Any]) -> list[str]:
    """Lines of the report."""
    if not summary["cycles"]:
        return [f"no suspend happened: the workload ended before step {summary['every']}"]
    same = "identical to" if summary["tokens_identical"] else "DIFFERENT from"
    lines = [
        f"{summary['cycles']} suspends, one every {summary['every']} steps, mode {summary['mode']}: tokens {same} "
        "those without"
    ]
    for command, one in summary["commands"].items():
        s = one["seconds"]
        lines.append(
            f"{command:<8} {s['median'] * 1e3:8.1f} ms ({s['min'] * 1e3:.1f}..{s['max'] * 1e3:.1f}), "
            f"{one['requests']:.0f} requests held"
        )
        for tag, row in one["tags"].items():
            freed, copied, resident = (row[name] / 2**20 for name in ("bytes_freed", "bytes_copied", "bytes_resident"))
            lines.append(
                f"  {tag:<10} freed {freed:9.1f} MiB   copied {copied:9.1f} MiB   resident {resident:9.1f} MiB"
            )
    return lines
