"""Runs the frameworks' own code on this package, one framework after another, and prints a table.

    python tools/frameworks.py [--folder .venv/frameworks] [NAME ...]

`make frameworks` calls it. Each framework is in an environment of its own below the folder, on top of this one, made
from requirements/frameworks-NAME.txt. What no package index has is a checkout that a variable names: MEGATRON_LM,
NEMO_RL, SLIME. The exit code is 1 if a test failed, or an environment could not be made; tests that were skipped are
named with their reason.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLIENTS = "tests/server/test_weight_clients.py"


@dataclass(frozen=True)
class Framework:
    tests: tuple[str, ...]
    """Files."""
    chosen: str
    """Of them, as pytest's -k has it."""
    version: str
    """An expression that gives it, in the framework's environment."""
    checkouts: tuple[str, ...] = ()
    """Variables that name one."""


def package(name: str) -> str:
    return f"importlib.metadata.version({name!r})"


FRAMEWORKS = {
    "areal": Framework((CLIENTS,), "areal", package("areal")),
    "megatron": Framework(
        ("tests/mcore/test_megatron_scripts.py", "tests/rl/test_megatron_lm.py"),
        "not nemo",
        "importlib.import_module('megatron.core').__version__",
        ("MEGATRON_LM",),
    ),
    "nemo_rl": Framework(
        ("tests/rl/test_framework_nemo_rl.py", "tests/mcore/test_megatron_scripts.py"),
        "nemo",
        "importlib.import_module('nemo_rl.package_info').__version__",
        ("NEMO_RL", "MEGATRON_LM"),
    ),
    "slime": Framework((CLIENTS,), "slime", "'checkout'", ("SLIME",)),
    "tinker": Framework(("tests/rl/test_framework_tinker.py",), "tinker", package("tinker-cookbook")),
    "trl": Framework(("tests/rl/test_framework_trl.py", CLIENTS), "trl", package("trl")),
    "skyrl": Framework((CLIENTS,), "skyrl", package("skyrl")),
    "verl": Framework(("tests/rl/test_framework_verl.py",), "verl", package("verl")),
}
SHARED = {"skyrl": "trl", "slime": "areal"}
"""Frameworks that are in the environment of another one."""


@dataclass
class Result:
    version: str = ""
    passed: int = 0
    failed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> tests."""
    seconds: float = 0.0
    error: str = ""
    """Why nothing ran."""


def made(name: str, folder: str) -> tuple[Path, str]:
    """The framework's interpreter, and why there is none."""
    own = f"{folder}/{SHARED.get(name, name)}"
    command = ["make", "-s", f"FRAMEWORKS_FOLDER={folder}", f"{own}/.installed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = (done.stderr or done.stdout).strip().splitlines()
    return ROOT / own / "bin" / "python", "" if done.returncode == 0 else (lines or ["make failed"])[0]


def with_path(*variables: str) -> dict[str, str]:
    """The environment with these checkouts in PYTHONPATH. Tests themselves put others there, for what they start."""
    path = [*(os.environ.get(one, "") for one in variables), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def run(name: str, folder: str) -> Result:
    framework, result = FRAMEWORKS[name], Result()
    python, result.error = made(name, folder)
    if result.error:
        return result
    code = f"import importlib.metadata; print({framework.version})"
    asked = subprocess.run(
        [python, "-W", "ignore", "-c", code], env=with_path(*framework.checkouts), capture_output=True, text=True
    )
    result.version = asked.stdout.strip().splitlines()[-1] if asked.returncode == 0 else "not there"
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [python, "-m", "pytest", "-q", "-n0", "-m", "", "-k", framework.chosen, f"--junitxml={report}"]
        # Megatron-LM compiles by the first python3 of PATH, with its pybind11, and the first python3-config
        places = [str(python.parent), str(Path(sys.base_exec_prefix, "bin")), os.environ["PATH"]]
        path = {"PATH": os.pathsep.join(places)}
        done = subprocess.run([*command, *framework.tests], cwd=ROOT, env=with_path("SLIME") | path)
        result.seconds = time.perf_counter() - began
        if not report.exists():
            result.error = f"pytest ended with {done.returncode}"
            return result
        read(report, result)
    if done.returncode and not result.failed:
        result.error = f"pytest ended with {done.returncode}"
    return result


def read(report: Path, result: Result) -> None:
    """Count what a report of pytest in JUnit's form has."""
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if skipped is not None:
            result.skipped[skipped.get("message", "").partition("\n")[0]] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            result.failed += 1
        else:
            result.passed += 1


def table(results: dict[str, Result]) -> str:
    rows = [("framework", "version", "passed", "failed", "skipped", "seconds", "")]
    for name, one in results.items():
        reasons = [one.error, *(f"{count} skipped: {reason}" for reason, count in one.skipped.items())]
        numbers = (one.passed, one.failed, one.skipped.total(), round(one.seconds))
        rows.append((name, one.version, *map(str, numbers), "; ".join(filter(None, reasons))))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[6]]).rstrip()
        for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FRAMEWORKS)}; none: all of them")
    parser.add_argument("--folder", default=".venv/frameworks", help="of the environments (default: %(default)s)")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in FRAMEWORKS]:
        parser.error(f"not known: {', '.join(unknown)}; there are {', '.join(FRAMEWORKS)}")
    results = {name: run(name, given.folder) for name in given.names or FRAMEWORKS}
    print(table(results))
    return int(any(one.failed or one.error for one in results.values()))


if __name__ == "__main__":
    sys.exit(main())
