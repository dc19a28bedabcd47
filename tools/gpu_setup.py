"""One command for the owner of a GPU: finds out what the machine is, installs what it can use, checks, reports.

    make gpu                                    or  python3 tools/gpu_setup.py, where there is no make
    make gpu GPU_ARGS=--dry-run                 what would be installed and run; nothing is
    make gpu GPU_ARGS="-- --quick"              what follows -- goes to tools/gpu_check.py

Everything goes into an environment of its own (.venv-gpu, about 8 GiB); torch with CUDA that Python has already, as in
NVIDIA's containers, is used from there. The report is docs/results/gpu_NAME.json and, for an issue, gpu_NAME.md. The
exit status is that of the checks: 0, or 1 if one failed; 2 if the machine lacks something, which is named before
anything is installed, or if an installation fails. Needs Python's standard library alone. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
TORCH = next(
    line.split(";")[0]
    for line in (ROOT / "requirements" / "gpu.txt").read_text().splitlines()
    if re.match(r"torch[<>=~]", line)
)
"""Those whose sources were read. One that is there already need only be 2.11."""
OLDEST_TORCH, OLDEST_PYTHON, OLDEST_CAPABILITY = (2, 11), (3, 11), (8, 0)
UV_PYTHON = "3.12"
"""What uv brings where this Python is too old or lacks its headers."""
FIELDS = ("index", "name", "driver_version", "compute_cap", "memory.total", "memory.used")
PYPI = ""
CUDA_13, CUDA_12 = "https://download.pytorch.org/whl/cu130", "https://download.pytorch.org/whl/cu126"
DRIVER_13, DRIVER_12 = (580, 65, 6), (525, 60, 13)
"""Oldest drivers for CUDA 13 and CUDA 12, by NVIDIA's release notes. On PyPI torch 2.11 to 2.13 is for CUDA 13."""
BLACKWELL = (10, 0)
"""The wheels for CUDA 12.6 have no kernels for it."""
NEEDED_BYTES = 12 << 30
"""On disk: torch and NVIDIA's libraries, and what pip unpacks meanwhile."""
FREE_MIB = 8 << 10
"""Of the GPU's memory: what the checks of correctness take several at a time."""
CHECK_S = 1800
"""Seconds for all checks: of a first run a large part goes into compiling kernels."""
COMPILERS = ("cc", "gcc", "clang")
ISSUE_CHARACTERS = 65_000
"""GitHub takes 65,536 in an issue."""
NUMBERED = re.compile(r"[\d,\s-]*")
"""CUDA_VISIBLE_DEVICES without UUIDs."""
TRIES = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda, torch.cuda.is_available()]))"


class Unfit(Exception):
    """Why this machine cannot run the checks, and what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    index: int
    name: str
    driver: tuple[int, ...]
    capability: tuple[int, int]
    total_mib: int
    used_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What decides over what is installed."""

    gpus: tuple[Gpu, ...]
    gpu: Gpu
    """The one that is checked."""
    torch: str | None
    """Version of the torch with CUDA that Python has already and that sees the GPU."""
    nvcc: str | None
    uv: str | None
    system: str


@dataclass(frozen=True, slots=True)
class Step:
    """One command; needed: the run ends if it fails."""

    command: tuple[str, ...]
    needed: bool = True


def numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cu130 -> (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found.group().split("."))) if found else ()


# What the machine is


def read_gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """All GPUs by nvidia-smi. Raises Unfit."""
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        raise Unfit(
            "there is no nvidia-smi: no NVIDIA driver is installed, or this is a container that was started without "
            "its GPUs (docker run --gpus all, apptainer exec --nv)"
        )
    command = [program, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=dict(environment))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unfit(f"nvidia-smi does not answer ({error}): the driver hangs or is broken") from None
    said = " ".join((done.stdout + done.stderr).split())[:300]
    if done.returncode:
        raise Unfit(f"nvidia-smi ends with status {done.returncode}: {said}")
    gpus = tuple(_gpu_of(line) for line in done.stdout.splitlines() if line.strip())
    if not gpus:
        raise Unfit("nvidia-smi lists no GPU")
    return gpus


def _gpu_of(line: str) -> Gpu:
    """Example: "0, NVIDIA H100 80GB HBM3, 580.95.05, 9.0, 81559, 4"."""
    try:
        index, name, driver, capability, *memory = (part.strip() for part in line.split(","))
        total, used = (0 if "N/A" in part else int(part) for part in memory)  # where the host's memory is the GPU's
        major, minor = map(int, capability.split("."))
        if not (known := numbers(driver)):
            raise ValueError(driver)
        return Gpu(index=int(index), name=name, driver=known, capability=(major, minor), total_mib=total, used_mib=used)
    except ValueError:
        raise Unfit(
            f"nvidia-smi says {line.strip()!r} where {', '.join(FIELDS)} were asked for: its driver is too old, or the "
            "GPU has fallen off the bus"
        ) from None


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves; all, where it names them by something else than numbers. Raises Unfit."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is None or not NUMBERED.fullmatch(given):
        return list(gpus)
    left = [one for one in gpus if str(one.index) in re.split(r"[,\s]+", given)]
    if not left:
        raise Unfit(f"CUDA_VISIBLE_DEVICES={given!r} leaves none of the {len(gpus)} GPUs here: unset it")
    return left


def choose(gpus: Sequence[Gpu]) -> Gpu:
    """The new enough one on which most memory is free. Raises Unfit."""
    able = [one for one in gpus if one.capability >= OLDEST_CAPABILITY]
    if not able:
        found = ", ".join(f"{one.name} ({dotted(one.capability)})" for one in gpus)
        raise Unfit(f"a GPU of compute capability {dotted(OLDEST_CAPABILITY)} is needed (A100 or newer), here: {found}")
    return max(able, key=lambda one: (one.total_mib - one.used_mib, -one.index))


def dotted(parts: Sequence[int]) -> str:
    return ".".join(map(str, parts))


def read_torch(environment: Mapping[str, str]) -> str | None:
    """The version of a torch that this Python has, that is new enough and sees a GPU; None: there is none.

    One in a virtual environment is none: another environment cannot share it.
    """
    if sys.prefix != sys.base_prefix:
        return None
    done = subprocess.run(
        [sys.executable, "-c", TRIES], capture_output=True, text=True, check=False, env=dict(environment)
    )
    if done.returncode:
        return None
    version, cuda, sees = json.loads(done.stdout.strip().splitlines()[-1])
    return str(version) if cuda and sees and numbers(version) >= OLDEST_TORCH else None


def look(environment: Mapping[str, str], room: Path) -> Machine:
    """Raises Unfit for all that keeps the checks from running. room: where the environment will be."""
    if platform.system() != "Linux":
        raise Unfit(f"Triton's and NVIDIA's wheels are for Linux, this is {platform.system()}")
    gpus = read_gpus(environment)
    gpu = choose(visible(gpus, environment))
    path = environment.get("PATH")
    uv = shutil.which("uv", path=path)
    torch = read_torch(environment)
    missing = []
    own_python = python_of(uv, shared=torch is not None)
    if own_python == sys.executable:
        if sys.version_info < OLDEST_PYTHON:
            wanted = dotted(OLDEST_PYTHON)
            found = f"Python {wanted} or newer is needed, this is {platform.python_version()}"
            missing.append(f"{found}: install uv, which brings one (pip install uv), or make gpu PYTHON=...")
        header = Path(sysconfig.get_paths()["include"], "Python.h")
        if not header.exists():
            missing.append(f"Triton needs Python's headers, there is no {header}: apt-get install python3-dev")
    if (free := gpu.total_mib - gpu.used_mib) < min(FREE_MIB, gpu.total_mib):
        found = f"GPU {gpu.index} has {free:,} of {gpu.total_mib:,} MiB free, {FREE_MIB:,} are needed"
        missing.append(f"{found}: nvidia-smi names the processes that hold the rest, end them")
    named = environment.get("CC")
    if named is None and not any(shutil.which(name, path=path) for name in COMPILERS):
        missing.append("Triton needs a C compiler: apt-get install gcc, or set CC")
    if torch is None:
        if (left := shutil.disk_usage(room).free) < NEEDED_BYTES:
            missing.append(f"{room} has {left / 2**30:.1f} GiB free, torch with CUDA takes {NEEDED_BYTES >> 30}")
        try:
            index_for(gpu, platform.machine())
        except Unfit as reason:
            missing.append(str(reason))
    if missing:
        raise Unfit("\ngpu: ".join(missing))
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc", path=path) or shutil.which("nvcc", path=str(Path(home, "bin")))
    return Machine(gpus=gpus, gpu=gpu, torch=torch, nvcc=nvcc, uv=uv, system=platform.machine())


def python_of(uv: str | None, *, shared: bool) -> str:
    """The Python of the environment: this one, or a version that uv brings with its headers where this one lacks some.

    shared: the environment has this Python's packages.
    """
    fits = sys.version_info >= OLDEST_PYTHON and Path(sysconfig.get_paths()["include"], "Python.h").exists()
    return sys.executable if fits or shared or uv is None else UV_PYTHON


# What is installed


def index_for(gpu: Gpu, system: str) -> str:
    """The index with a torch that this driver can run; "": PyPI. Raises Unfit."""
    if gpu.driver >= DRIVER_13:
        return PYPI if system == "x86_64" else CUDA_13
    if gpu.driver < DRIVER_12:
        raise Unfit(f"the driver is {dotted(gpu.driver)}, CUDA 12 needs {dotted(DRIVER_12)} or newer: update it")
    if gpu.capability >= BLACKWELL or system != "x86_64":
        raise Unfit(
            f"the driver is {dotted(gpu.driver)}; for {gpu.name} on {system} torch is built for CUDA 13, which needs "
            f"{dotted(DRIVER_13)} or newer: update it"
        )
    return CUDA_12


def optional(machine: Machine) -> tuple[list[str], dict[str, str]]:
    """Lines of requirements/gpu.txt -> (those that this machine can use, why not the others by name)."""
    text = (ROOT / "requirements" / "gpu.txt").read_text(encoding="utf-8")
    lines = [line.split("#")[0].split(";")[0].strip() for line in text.splitlines()]
    wanted, left = [], {}
    for line in filter(None, lines):
        name = re.split(r"[<>=!~]", line)[0]
        if name == "torch":
            continue
        if name == "triton":
            left[name] = "comes with torch, in the version that torch was built with"
        elif name == "flashinfer-python" and machine.nvcc is None:
            left[name] = "compiles its kernels with nvcc, which is not here"
        elif name == "torch-memory-saver" and machine.system != "x86_64":
            left[name] = f"has no wheel for {machine.system}"
        else:
            wanted.append(line)
    return wanted, left


def steps_for(machine: Machine, venv: Path) -> list[Step]:
    """The commands that install, in order."""
    python = str(venv / "bin" / "python")
    shared = machine.torch is not None
    make: tuple[str, ...]
    if machine.uv is not None and not shared:  # uv does not look at what an environment shares
        chosen = python_of(machine.uv, shared=shared)
        managed = ("--managed-python",) if chosen == UV_PYTHON else ()
        make = (machine.uv, "venv", "--seed", "--allow-existing", *managed, "--python", chosen)
        install: tuple[str, ...] = (machine.uv, "pip", "install", "--python", python)
    else:
        make = (sys.executable, "-m", "venv")
        install = (python, "-m", "pip", "--disable-pip-version-check", "install", "-q")
    steps = [Step((*make, *(("--system-site-packages",) if shared else ()), str(venv)))]
    if shared:
        keep: tuple[str, ...] = (f"torch=={machine.torch}",)  # whatever else is installed must leave it alone
    else:
        index = index_for(machine.gpu, machine.system)
        steps.append(Step((*install, TORCH, *(("--index-url", index) if index else ()))))
        keep = (TORCH,)
    steps.append(Step((*install, *keep, "-e", str(ROOT))))
    return steps + [Step((*install, *keep, line), needed=False) for line in optional(machine)[0]]


def check_step(machine: Machine, venv: Path, report: Path, more: Sequence[str]) -> Step:
    check = (str(venv / "bin" / "python"), str(ROOT / "tools" / "gpu_check.py"), "--out", str(report))
    return Step((*check, "--time-limit", str(CHECK_S), *more))


def report_path(gpu: Gpu) -> Path:
    """Example: docs/results/gpu_nvidia_h100_80gb_hbm3.json."""
    return RESULTS / f"gpu_{re.sub(r'[^a-z0-9]+', '_', gpu.name.lower()).strip('_')}.json"


# The run


def describe(machine: Machine) -> str:
    gpu, others = machine.gpu, len(machine.gpus) - 1
    lines = [
        f"GPU {gpu.index}: {gpu.name}, compute capability {dotted(gpu.capability)}, driver {dotted(gpu.driver)}, "
        f"{gpu.total_mib - gpu.used_mib:,} of {gpu.total_mib:,} MiB free" + (f"; {others} more" if others else "")
    ]
    lines.append(f"torch: {machine.torch}, which is here" if machine.torch else f"torch: {TORCH} will be installed")
    wanted, left = optional(machine)
    lines.append(f"optional: {', '.join(wanted) or 'nothing'}")
    lines += [f"not installed: {name}: {reason}" for name, reason in left.items()]
    lines.append("not installed: what requirements/nvidia.txt tells how to build; what is there already is checked")
    return "\n".join(lines)


def environment_for(machine: Machine, environment: Mapping[str, str]) -> dict[str, str]:
    """The checks see the chosen GPU alone; where the user names GPUs by UUID, those."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is not None and not NUMBERED.fullmatch(given):
        return dict(environment)
    return dict(environment) | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(machine.gpu.index)}


def run(steps: Sequence[Step], environment: Mapping[str, str]) -> None:
    """Raises Unfit where a command that is needed fails."""
    for step in steps:
        print(f"+ {shlex.join(step.command)}", flush=True)
        if subprocess.run(step.command, check=False, env=dict(environment)).returncode:
            if step.needed:
                raise Unfit(f"this failed: {shlex.join(step.command)}")
            print("gpu: that failed; the checks go on without it", flush=True)


def farewell(report: Path) -> str:
    """How the report is sent."""
    text = report.with_suffix(".md")
    if not text.exists():
        return f"gpu: {text} was not written"
    long = len(text.read_text(encoding="utf-8")) > ISSUE_CHARACTERS
    how = "attach both to an issue" if long else "paste the first into an issue and attach the second"
    return f"gpu: {text} and {report.name} are the report; {how}, or commit both: docs/cuda_checks.md, Sending a report"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="print what would be installed and run")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-gpu", metavar="DIR", help="where all is installed")
    parser.add_argument("check", nargs="*", help="after --: options of tools/gpu_check.py")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    options = parse(arguments)
    venv = options.venv.absolute()
    try:
        room = next(folder for folder in (venv, *venv.parents) if folder.exists())
        machine = look(environment, room)
        print(describe(machine), flush=True)
        report = report_path(machine.gpu)
        steps, check = steps_for(machine, venv), check_step(machine, venv, report, options.check)
        seen = environment_for(machine, environment)
        if options.dry_run:
            print("\n".join(f"+ {shlex.join(step.command)}" for step in (*steps, check)))
            return 0
        run(steps, seen)
        run([Step((str(venv / "bin" / "python"), "-c", "import torch; torch.zeros(1, device='cuda')"))], seen)
    except Unfit as reason:
        print(f"gpu: {reason}", file=sys.stderr)
        return 2
    print(f"+ {shlex.join(check.command)}", flush=True)
    status = subprocess.run(check.command, check=False, env=seen).returncode
    print(farewell(report))
    return status


if __name__ == "__main__":
    sys.exit(main())
