"""Optional GPU packages on this machine: version, whether they import, what they are used for. Stdlib only.

Each import is tried in a subprocess, as an extension built against another CUDA may crash the process.
"""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from megatron_infer.utils.child_process import run

IMPORT_TIMEOUT_S = 90


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    """Name of its distribution."""
    module: str
    use: str
    """What this package uses it for."""
    code: str = ""
    """Python code that must run; empty: `import module`."""


PACKAGES = (
    Package("triton", "triton", "attention, scan, norms, sampling: first choice on a GPU"),
    Package(
        "flashinfer-python",
        "flashinfer",
        "rotation (use_flashinfer_fused_rope); not its samplers, which draw other tokens for a seed",
        "import flashinfer.rope",
    ),
    Package(
        "transformer-engine",
        "transformer_engine",
        "models built from its specs are adopted as they are; FP8 matrix products of models that train in FP8",
        "import transformer_engine.pytorch",
    ),
    Package(
        "apex",
        "apex",
        "models with its FusedLayerNorm are adopted; NVIDIA's, from source: apex on PyPI is another project",
        "import apex.normalization",
    ),
    Package("torch-memory-saver", "torch_memory_saver", "suspend and resume at fixed addresses"),
)


def packages() -> Iterator[tuple[str, str, str]]:
    """(name, version and whether it imports, use) of each package."""
    for package in PACKAGES:
        yield package.name, _state(package), package.use


@functools.cache
def _state(package: Package) -> str:
    try:
        version = metadata.version(package.name)
    except metadata.PackageNotFoundError:
        version = "unknown version"
    if _spec_of(package.module) is None:
        return (
            "not installed" if version == "unknown version" else f"{version}, but there is no module {package.module}"
        )
    error = run_in_subprocess(package.code or f"import {package.module}")[1]
    return f"{version}, imports" if error is None else f"{version}, does not import: {error}"


def _spec_of(module: str) -> object:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a module in sys.modules without a spec
        return None


@functools.cache
def run_in_subprocess(code: str) -> tuple[str, str | None]:
    """Run Python code in a subprocess -> (its output, its error or None)."""
    try:
        done = run([sys.executable, "-c", code], timeout_s=IMPORT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return "", f"{type(error).__name__}: {error}"[:200]
    if done.returncode == 0:
        return done.stdout.strip(), None
    lines = done.stderr.strip().splitlines()
    return "", lines[-1].strip()[:200] if lines else f"the process ended with {done.returncode}"


_NCCL = "import torch; print('.'.join(map(str, torch.cuda.nccl.version())))"
_SYMMETRIC = (
    "import torch, torch.distributed._symmetric_memory as s; assert torch.cuda.is_available(), 'no GPU'; "
    "print('multicast' if torch.cuda.get_device_capability() >= (9, 0) else 'peer to peer')"
)


def communication(*, cuda: str | None) -> Iterator[tuple[str, str, str]]:
    """NCCL and symmetric memory, as rows like those of `packages`. cuda: version torch is built for; None: without."""
    for name, code, use in (
        ("NCCL", _NCCL, "collectives between GPUs"),
        ("symmetric memory", _SYMMETRIC, "all-reduce of tensor parallelism within a node"),
    ):
        if cuda is None:
            yield name, "none: torch is built without CUDA", use
            continue
        value, error = run_in_subprocess(code)
        yield name, value if error is None else f"not available: {error}", use
