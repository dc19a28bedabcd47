"""The scheduling core needs the standard library only."""

from __future__ import annotations

import subprocess
import sys

MODULES = [
    "errors",
    "schedule.params",
    "schedule.policy",
    "schedule.plan",
    "schedule.pressure",
    "schedule.prompts",
    "schedule.queue",
    "schedule.request",
    "schedule.roster",
    "schedule.scheduler",
    "context.block_pool",
    "context.context",
    "context.host",
    "context.prefix",
    "context.slots",
]

PROGRAM = """
import sys
for name in ("torch", "numpy", "megatron"):
    sys.modules[name] = None  # an import of it raises
before = set(sys.modules)
import importlib
for module in {modules!r}:
    importlib.import_module("megatron_infer." + module)
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(new - set(sys.stdlib_module_names) - {{"megatron_infer"}}))
"""


def test_core_imports_with_torch_and_numpy_absent():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(modules=MODULES)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
