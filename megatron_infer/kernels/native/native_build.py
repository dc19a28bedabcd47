"""Compile the C++ kernels once per machine into a user cache directory.

A missing compiler or directory is no error: it becomes the reason in the table of choices.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_infer.utils import openmp
from megatron_infer.utils.child_process import run

log = logging.getLogger("megatron_infer")
BACKEND_VARIABLE = "MEGATRON_INFER_BACKEND"
"""For debugging only: forces one of `select.BACKENDS`, or names `TorchKernels` as module:class. `triton` on a CPU needs
TRITON_INTERPRET=1."""
FOLDER = Path(__file__).parent
SOURCES, HEADERS = (tuple(sorted(path.name for path in FOLDER.glob(kind))) for kind in ("*.cpp", "*.h"))
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-w")
BUILD_TIMEOUT_S = 180.0


class NativeUnavailable(Exception):
    """The native kernels cannot be built or loaded here; str() is the reason."""


def find_compiler() -> str:
    """Path of a C++ compiler: $CXX, else the first of c++, g++, clang++."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise NativeUnavailable("no C++ compiler (c++, g++ or clang++) on PATH")


def runs_linears(linear_backend: str) -> bool:
    """Whether linears on a CPU will run on these kernels with this option. Compiles nothing: a compiler that is there
    may still fail."""
    if linear_backend == "vendor" or os.environ.get(BACKEND_VARIABLE) not in (None, "", "native"):
        return False
    try:
        return os.name == "posix" and bool(find_compiler()) and cache_directory().is_dir()
    except NativeUnavailable:
        return False


def _cpu_identity() -> str:
    """What -march=native depends on: a cache shared between machines must not serve code for another CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return "\n".join(re.findall(r"^(?:flags|Features|model name)\s*:.*$", text, re.MULTILINE)[:2])


def _run(command: list[str], timeout_s: float) -> str:
    try:
        done = run(command, timeout_s=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} did not run: {error}") from None
    if done.returncode:
        lines = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
        )
        raise NativeUnavailable(f"{command[0]} failed: {lines[0].strip()}")
    return done.stdout


def cache_directory() -> Path:
    """Where built libraries live: $XDG_CACHE_HOME or ~/.cache, else a folder of this user's own in the temp folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    uid = os.getuid() if hasattr(os, "getuid") else 0
    for path in (base / "megatron_infer" / "native", Path(tempfile.gettempdir()) / f"megatron_infer-{uid}"):
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            info = path.stat()
        except OSError:
            continue
        # A library is code: never load one from a directory that other users can write to.
        if info.st_uid == uid and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.access(path, os.W_OK):
            return path
    raise NativeUnavailable(f"no private writable cache directory (tried {base} and the temp folder)")


@contextlib.contextmanager
def _exclusive(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold an advisory lock on `path`: ranks that start at once build the library once."""
    import fcntl

    with open(path, "w") as handle:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise NativeUnavailable(f"another process holds {path} for over {timeout_s:.0f} s") from None
                time.sleep(0.05)
        yield


def _compile(compiler: str, tune: str, work: Path) -> Path:
    """Compile the sources side by side and link them -> a library in `work`."""

    def compile_one(name: str) -> str:
        target = str(work / f"{name}.o")
        _run([compiler, *FLAGS, tune, "-c", str(FOLDER / name), "-o", target], BUILD_TIMEOUT_S)
        return target

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        objects = list(pool.map(compile_one, SOURCES))
    linked = work / "kernels.so"
    _run([compiler, "-shared", "-pthread", *objects, "-o", str(linked)], BUILD_TIMEOUT_S)
    return linked


def build() -> Path:
    """The compiled library for these sources, compiler and CPU; compiles it when the cache has none.

    Raises NativeUnavailable with the reason.
    """
    if os.name != "posix":
        raise NativeUnavailable(f"needs a POSIX system, this is {os.name}")
    compiler = find_compiler()
    tune = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
    digest = hashlib.sha256()
    for part in (compiler, _run([compiler, "--version"], 20.0), tune, *FLAGS, _cpu_identity(), platform.machine()):
        digest.update(part.encode() + b"\0")
    for name in (*HEADERS, *SOURCES):
        digest.update((FOLDER / name).read_bytes() + b"\0")
    cache = cache_directory()
    library = cache / f"kernels-{digest.hexdigest()[:20]}.so"
    if library.exists():
        return library
    with _exclusive(library.with_suffix(".lock"), BUILD_TIMEOUT_S):
        if not library.exists():  # the previous holder of the lock may have built it
            log.warning("compiling the CPU kernels for this machine: half a minute on 2 cores, once; kept in %s", cache)
            with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as work:
                os.replace(_compile(compiler, tune, Path(work)), library)
    return library


_libraries: list[ctypes.CDLL] = []
"""The library, once it is loaded."""


@functools.cache
def load() -> ctypes.CDLL:
    """The native library, built if need be; raises NativeUnavailable.

    torch's idle threads leave the cores to its own from then on.
    """
    path = build()
    try:
        _libraries.append(ctypes.CDLL(str(path)))
    except OSError as error:
        raise NativeUnavailable(f"{path} does not load: {error}") from None
    openmp.crowd_cores()
    return _libraries[-1]


def loaded() -> ctypes.CDLL | None:
    """The native library if this process has loaded it; compiles nothing."""
    return _libraries[-1] if _libraries else None
