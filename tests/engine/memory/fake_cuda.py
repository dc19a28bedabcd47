"""The C stand-in of libcudart, built once and loaded afresh for each test."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
SOURCE = Path(__file__).with_name("fake_cuda.c")
VERSIONS = (12080, 13000)


def build(folder: Path, version: int) -> Path:
    """The library as of one version of the runtime."""
    assert COMPILER is not None
    target = folder / f"fake_cuda_{version}.so"
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-DRUNTIME_VERSION={version}"]
    subprocess.run([*command, "-o", str(target), str(SOURCE)], check=True)
    return target


def load(library: Path, folder: Path) -> ctypes.CDLL:
    """Load a copy of the file, which is another library with state of its own."""
    copy = folder / f"{os.urandom(4).hex()}.so"
    shutil.copy(library, copy)
    fake = ctypes.CDLL(str(copy))
    fake.fake_managed_bytes.restype = ctypes.c_size_t
    for name in ("fake_last_refusal", "fake_journal"):
        getattr(fake, name).restype = ctypes.c_char_p
    fake.fake_set_limit.argtypes, fake.fake_fail_at.argtypes = (ctypes.c_size_t,), (ctypes.c_long,)
    return fake
