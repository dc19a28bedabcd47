"""The tree keeps its own rules, and every rule can fail."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "check_layout.py"


def _load():
    spec = importlib.util.spec_from_file_location("check_layout", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


layout = _load()


def _rules(tmp_path: Path, name: str, text: str) -> set[str]:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return {violation.rule for violation in layout.check_tree(tmp_path)}


def test_the_tree_keeps_its_rules():
    run = subprocess.run([sys.executable, str(TOOL), str(ROOT)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout


MANY = "\n".join(f"        self.a{i} = {i}" for i in range(21))
METHODS = "\n".join(f"    def m{i}(self) -> None: ..." for i in range(8))
PLANTED = {
    "long file": ("megatron_infer/schedule/plan.py", "x = 1\n" * 601, "file-size"),
    "long test file": ("tests/pure/test_a.py", "x = 1\n" * 601, "file-size"),
    "long function": ("tools/a.py", "def f():\n" + "    x = 1\n" * 80, "function-size"),
    "long coroutine": ("tools/a.py", "async def f():\n" + "    x = 1\n" * 80, "function-size"),
    "long class": ("tools/a.py", "class A:\n" + "    x = 1\n" * 300, "class-size"),
    "many attributes": ("tools/a.py", f"class A:\n    def __init__(self):\n{MANY}\n", "class-attributes"),
    "many fields": (
        "tools/a.py",
        "@dataclass(slots=True)\nclass A:\n" + "\n".join(f"    a{i}: int = 0" for i in range(21)),
        "class-attributes",
    ),
    "wide interface": ("tools/a.py", f"class A(Protocol):\n{METHODS}\n", "interface-size"),
    "import up": ("megatron_infer/kernels/base.py", "from megatron_infer.engine import X\n", "layer"),
    "import up by name": ("megatron_infer/schedule/plan.py", "from megatron_infer import engine\n", "layer"),
    "import up inside a function": (
        "megatron_infer/context/context.py",
        "def f():\n    import megatron_infer.llm\n",
        "layer",
    ),
    "relative import up": ("megatron_infer/context/block_pool.py", "from . import store\n", "layer"),
    "relative import up two": ("megatron_infer/context/block_pool.py", "from ..forward.batch import B\n", "layer"),
    "module without a layer": ("megatron_infer/stray.py", "x = 1\n", "layer"),
    "models know forward": ("megatron_infer/models/a.py", "from megatron_infer.forward.batch import B\n", "peers"),
    "forward knows models": ("megatron_infer/forward/a.py", "import megatron_infer.models.adopt\n", "peers"),
    "megatron away from home": ("megatron_infer/forward/a.py", "from megatron.core import x\n", "home"),
    "torch.cuda imported": ("megatron_infer/sampling/a.py", "import torch.cuda\n", "home"),
    "torch.cuda from": ("megatron_infer/sampling/a.py", "from torch import cuda\n", "home"),
    "torch.cuda used": ("megatron_infer/engine.py", "import torch\nx = torch.cuda.is_available()\n", "home"),
    "torch in the core": ("megatron_infer/schedule/plan.py", "import torch\n", "pure"),
    "numpy in the core": ("megatron_infer/metrics/core.py", "from numpy import array\n", "pure"),
    "torch later in config": ("megatron_infer/config.py", "def f():\n    import torch\n", "pure"),
}


@pytest.mark.parametrize("case", PLANTED, ids=str)
def test_a_planted_violation_is_found(tmp_path, case):
    name, text, rule = PLANTED[case]
    assert rule in _rules(tmp_path, name, text)


ALLOWED = {
    "import down": ("megatron_infer/engine.py", "from megatron_infer.schedule.plan import Plan\n"),
    "annotation only": (
        "megatron_infer/schedule/plan.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n    import megatron_infer.engine\n",
    ),
    "megatron at home": ("megatron_infer/models/a.py", "from megatron.core import x\n"),
    "torch.cuda at home": ("megatron_infer/forward/device.py", "import torch\nx = torch.cuda.is_available()\n"),
    "a value with many fields": (
        "tools/a.py",
        "@dataclass(frozen=True)\nclass A:\n" + "\n".join(f"    a{i}: int = 0" for i in range(30)),
    ),
    "limits themselves": ("tools/a.py", "def f():\n" + "    x = 1\n" * 79),
}


@pytest.mark.parametrize("case", ALLOWED, ids=str)
def test_what_is_allowed_passes(tmp_path, case):
    assert _rules(tmp_path, *ALLOWED[case]) == set()


def test_else_of_a_typing_guard_is_not_exempt(tmp_path):
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import torch\n"
    assert "pure" in _rules(tmp_path, "megatron_infer/schedule/plan.py", text)


def test_pure_modules_import_without_torch_and_numpy():
    names = [name.removesuffix(".__init__") for name in layout.PURE]
    modules = [f"megatron_infer.{name}" for name in names if _exists(name)]
    assert "megatron_infer.config" in modules
    code = (
        "import sys\n"
        f"for root in {layout.IMPURE_ROOTS}: sys.modules[root] = None\n"
        "import importlib\n"
        f"for name in {modules}: importlib.import_module(name)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert run.returncode == 0, run.stderr


def _exists(name: str) -> bool:
    path = ROOT / "megatron_infer" / Path(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()
