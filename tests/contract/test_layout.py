"""The tree keeps its own rules, and every rule can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from load_file import ROOT, load_file

TOOL = ROOT / "tools" / "check_layout.py"
layout = load_file("tools/check_layout.py")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=60)


def _rules(tmp_path: Path, name: str, text: str) -> set[str]:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return {violation.rule for violation in layout.check_tree(layout.read_modules(tmp_path))}


@pytest.mark.long  # `make lint` checks the tree, too
def test_the_tree_keeps_its_rules():
    run = _run()
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("planted", ["", "import", "page"])
def test_the_command_prints_what_it_found_and_its_status_says_whether_there_was_any(planted, tmp_path):
    path, page = tmp_path / "megatron_infer" / "scheduler" / "step_plan.py", tmp_path / layout.PAGE
    path.parent.mkdir(parents=True)
    path.write_text("import torch\n" if planted == "import" else "")
    page.parent.mkdir()
    page.write_text("".join(f"<!-- {name} begin -->\n<!-- {name} end -->\n" for name in ("folders", "picture")))
    if planted != "page":
        assert _run("--write", str(tmp_path)).returncode == 0
        assert "* `scheduler`: " in page.read_text() and "```mermaid" in page.read_text()
    run = _run(str(tmp_path))
    assert run.returncode == bool(planted) and f"check_layout: {int(bool(planted))} violation" in run.stdout, run.stdout
    assert ("docs/architecture.md:1: page: " in run.stdout) == (planted == "page")


PLANTED = {
    "import up": ("megatron_infer/kernels/base.py", "from megatron_infer.engine.engine import X\n", "order"),
    "import up by name": ("megatron_infer/scheduler/step_plan.py", "from megatron_infer import engine\n", "order"),
    "import up inside a function": (
        "megatron_infer/scheduler/context/dynamic_context.py",
        "def f():\n    import megatron_infer.engine.llm\n",
        "order",
    ),
    "import up for annotations": (
        "megatron_infer/scheduler/step_plan.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import megatron_infer.engine.engine\n",
        "order",
    ),
    "relative import up": ("megatron_infer/scheduler/context/block_pool.py", "from ...runner import batch\n", "order"),
    "relative import up two": (
        "megatron_infer/scheduler/context/block_pool.py",
        "from ...runner.batch import B\n",
        "order",
    ),
    "public name inside": ("megatron_infer/runner/a.py", "from megatron_infer import LLM\n", "front"),
    "module without a folder": ("megatron_infer/stray.py", "x = 1\n", "folder"),
    "folder without a place": ("megatron_infer/stray/a.py", "x = 1\n", "folder"),
    "models know the runner": ("megatron_infer/models/a.py", "from megatron_infer.runner.batch import B\n", "order"),
    "runner knows models": ("megatron_infer/runner/a.py", "import megatron_infer.models.adopt\n", "peers"),
    "option on the path": (
        "megatron_infer/engine/step_loop.py",
        "from megatron_infer.runner.cuda_graphs.graph_pool import GraphPool\n",
        "path",
    ),
    "megatron away from home": ("megatron_infer/runner/a.py", "from megatron.core import x\n", "home"),
    "torch.cuda imported": ("megatron_infer/runner/sampling/a.py", "import torch.cuda\n", "home"),
    "torch.cuda from": ("megatron_infer/runner/sampling/a.py", "from torch import cuda\n", "home"),
    "torch.cuda used": ("megatron_infer/engine/engine.py", "import torch\nx = torch.cuda.is_available()\n", "home"),
    "torch in the core": ("megatron_infer/scheduler/step_plan.py", "import torch\n", "pure"),
    "numpy in the core": ("megatron_infer/engine/metrics/registry.py", "from numpy import array\n", "pure"),
    "torch later in config": ("megatron_infer/config/inference.py", "def f():\n    import torch\n", "pure"),
    "else of a typing guard": (
        "megatron_infer/scheduler/step_plan.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import torch\n",
        "pure",
    ),
}


@pytest.mark.parametrize("violation", PLANTED, ids=str)
def test_a_planted_violation_is_found(tmp_path, violation):
    name, text, rule = PLANTED[violation]
    assert rule in _rules(tmp_path, name, text)


ALLOWED = {
    "import down": ("megatron_infer/engine/a.py", "from megatron_infer.scheduler.step_plan import StepPlan\n"),
    "annotation only": (
        "megatron_infer/scheduler/step_plan.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
    ),
    "the version": ("megatron_infer/cli/a.py", "from megatron_infer import __version__\n"),
    "megatron at home": ("megatron_infer/models/a.py", "from megatron.core import x\n"),
    "torch.cuda at home": ("megatron_infer/memory/device.py", "import torch\nx = torch.cuda.is_available()\n"),
}


@pytest.mark.parametrize("file", ALLOWED, ids=str)
def test_what_is_allowed_passes(tmp_path, file):
    assert _rules(tmp_path, *ALLOWED[file]) == set()


def test_rooms_of_a_door_stand_next_to_each_other():
    """So an order of the rooms is one of the doors."""
    doors = [layout.door_of(name) for name, _ in layout.FOLDERS]
    changes = [door for before, door in zip(["", *doors], doors, strict=False) if door != before]
    assert len(changes) == len(set(doors))


def test_pure_modules_import_without_torch_and_numpy_and_need_the_standard_library_only():
    package = ROOT / layout.PACKAGE
    found = [".".join(path.relative_to(package).with_suffix("").parts) for path in package.rglob("*.py")]
    names = sorted(name.removesuffix(".__init__") for name in found if layout.any_covers(layout.PURE, name))
    assert {
        "config.inference",
        "scheduler.scheduler",
        "scheduler.context.dynamic_context",
        "coordinator.router",
    } <= set(names)
    code = (
        "import sys\n"
        f"for root in {layout.IMPURE_ROOTS}: sys.modules[root] = None\n"
        "before = set(sys.modules)\n"
        "import importlib\n"
        f"for name in {names}: importlib.import_module('megatron_infer.' + name)\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert not new - set(sys.stdlib_module_names) - {'megatron_infer'}, new\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert run.returncode == 0, run.stderr
