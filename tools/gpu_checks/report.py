"""What a run leaves behind: JSON for tools, Markdown for docs/results, and the reports that are there already."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu_checks import worker
from gpu_checks.registry import FAILED, OK, SKIPPED, Check, Result

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "megatron-core",
    "transformers",
    "flashinfer-python",
    "transformer-engine",
    "torch-memory-saver",
)


def facts(root: Path) -> dict[str, Any]:
    """Hardware, driver, versions and commit; what cannot be found out is None."""
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": _output(["git", "-C", str(root), "rev-parse", "HEAD"]),
        "tree_is_clean": _output(["git", "-C", str(root), "status", "--porcelain"]) == "",
        "python": platform.python_version(),
        "processor": _processor(),
        "gpus": _gpus(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _output(command: Sequence[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    return done.stdout.strip() if done.returncode == 0 else None


def _gpus() -> list[dict[str, str]]:
    fields = ("name", "driver_version", "memory.total", "pcie.link.gen.max", "pcie.link.width.max", "power.limit")
    rows = _output(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"])
    return [dict(zip(fields, line.split(", "), strict=False)) for line in (rows or "").splitlines()]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def as_dict(
    found: Mapping[str, Any], rows: Iterable[tuple[Check, Result]], *, rehearsal: bool, seconds: float, asked: int
) -> dict[str, Any]:
    """The report as JSON has it. asked: checks that were to be run, some of which may not have been yet."""
    checks = [{"name": c.name, "group": c.group, "promise": c.promise} | r.to_dict() for c, r in rows]
    return {"rehearsal": rehearsal, "seconds": seconds, "asked": asked, "facts": dict(found), "checks": checks}


def write(path: Path, report: Mapping[str, Any], rows: Sequence[tuple[Check, Result]], command: str) -> None:
    """JSON at `path` and Markdown beside it; who is killed meanwhile leaves those that were there."""
    for target, text in (
        (path, json.dumps(report, indent=1)),
        (path.with_suffix(".md"), as_markdown(report, rows, command)),
    ):
        new = target.with_suffix(target.suffix + ".new")
        new.write_text(text, encoding="utf-8")
        new.replace(target)


def load_reports(folder: Path) -> list[dict[str, Any]]:
    """Those of GPUs: gpu_*.json, by name."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("gpu_*.json"))]


def known_ok(path: Path, found: Mapping[str, Any], checks: Iterable[Check]) -> list[tuple[Check, Result]]:
    """What an earlier run at the same commit on the same GPUs, whose report is at `path`, found to be ok."""
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        facts, told = earlier["facts"], {row["name"]: row for row in earlier["checks"]}
    except (OSError, ValueError, KeyError, TypeError):
        return []
    same = ("commit", "gpus", "packages")
    if earlier.get("rehearsal") or not found["tree_is_clean"] or any(facts.get(name) != found[name] for name in same):
        return []
    fields = Result.__dataclass_fields__
    rows = [
        (one, Result.from_dict({name: told[one.name][name] for name in fields})) for one in checks if one.name in told
    ]
    return [(check, result) for check, result in rows if result.status == OK]


def line_of(check: Check, result: Result) -> str:
    """One check on one line, and a line for each target."""
    said = result.reason if result.status == SKIPPED else result.figure
    limit = f", tolerance {result.tolerance}" if result.tolerance and result.status != SKIPPED else ""
    shown = {OK: "ok", FAILED: "FAILED", SKIPPED: "skipped"}[result.status]
    lines = [f"{shown:<8} {check.name:<30} {result.seconds:6.1f} s  {said}{limit}"]
    if result.status == FAILED:
        lines.append(f"{'':>8} why: {result.reason}")
    lines += [f"{'':>8} {target}" for target in result.targets]
    return "\n".join(lines)


def summary(rows: Sequence[tuple[Check, Result]], seconds: float) -> str:
    counts = Counter(result.status for _, result in rows)
    targets = [target for _, result in rows for target in result.targets]
    met = sum(target.met for target in targets)
    return (
        f"gpu_check: {counts[OK]} ok, {counts[FAILED]} failed, {counts[SKIPPED]} skipped; "
        f"{met} of {len(targets)} targets met; {seconds:.0f} s"
    )


def verdict(rows: Sequence[tuple[Check, Result]], seconds: float) -> str:
    """The run in at most ten lines: what failed and what was not run, by name, then the sum."""
    lines = []
    groups = dict.fromkeys(check.group for check, _ in rows)
    whole = [name for name in groups if all(result.status == OK for check, result in rows if check.group == name)]
    if whole:
        lines.append(f"all ok: {', '.join(whole)}")
    for status, said in ((FAILED, "FAILED"), (SKIPPED, "not run")):
        reasons: dict[str, list[str]] = {}
        for check, result in rows:
            if result.status == status:
                reasons.setdefault("" if status == FAILED else result.reason, []).append(check.name)
        shown = sorted(reasons.items(), key=lambda row: -len(row[1]))
        lines += [f"{said}: {', '.join(names)}{why and f' ({why})'}" for why, names in shown[:3]]
        if len(shown) > 3:
            lines.append(
                f"{said}, for {len(shown) - 3} other reasons: {sum(len(names) for _, names in shown[3:])} checks"
            )
    if any(result.reason.startswith(worker.NO_TIME) for _, result in rows):
        lines.append("run it again: what was ok is kept, and kernels are compiled")
    missed = [target.name for _, result in rows for target in result.targets if not target.met]
    if missed:
        lines.append(f"targets not met: {', '.join(missed)}")
    return "\n".join(f"gpu_check: {line}" for line in lines) + "\n" + summary(rows, seconds)


def as_markdown(report: Mapping[str, Any], rows: Sequence[tuple[Check, Result]], command: str) -> str:
    """The report for people, ready to be committed under docs/results."""
    found, lines = report["facts"], []
    where = ", ".join(f"{gpu['name']} (driver {gpu['driver_version']})" for gpu in found["gpus"]) or "no GPU"
    title = "A rehearsal of the GPU checks on a CPU" if report["rehearsal"] else "What was checked on a GPU"
    lines += [f"# {title}", "", f"{where}; {found['processor']}; Python {found['python']}; {found['time']}.", ""]
    versions = ", ".join(f"{name} {version}" for name, version in found["packages"].items() if version)
    dirty = "" if found["tree_is_clean"] else ", with changes that are not committed"
    lines += [f"{versions}.", "", f"Commit {found['commit'] or 'unknown'}{dirty}.", "", "```", command, "```", ""]
    lines += [summary(rows, report["seconds"])]
    if len(rows) < report["asked"]:
        lines += ["", f"It ended before its end: {len(rows)} of {report['asked']} checks are told of."]
    lines += ["", "| check | | what it promises | found | tolerance |"]
    lines.append("|---|---|---|---|---|")
    for check, result in rows:
        said = result.figure if result.status == OK else f"{result.figure} {result.reason}".strip()
        cells = (check.name, result.status, check.promise, said, result.tolerance)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    lines += ["", *(f"* {target}" for _, result in rows for target in result.targets)]
    for check, result in rows:
        if "table" in result.details:
            lines += ["", f"## {check.name}", "", "```", *result.details["table"], "```"]
    return "\n".join(lines) + "\n"
