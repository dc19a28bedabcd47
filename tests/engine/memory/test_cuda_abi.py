"""Structures and constants used with ctypes are those of the CUDA headers on this machine."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
from pathlib import Path

import fake_cuda
import pytest

from megatron_infer.memory.regions import managed

pytestmark = pytest.mark.skipif(fake_cuda.COMPILER is None, reason="needs a C compiler")


def folders(header):
    """Folders that have it: a toolkit's, and the one Triton brings."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", *sorted(map(str, Path("/usr/local").glob("cuda-*")))]
    found = [Path(home) / "include" for home in homes if home]
    if (triton := importlib.util.find_spec("triton")) is not None and triton.origin is not None:
        found.append(Path(triton.origin).parent / "backends/nvidia/include")
    return sorted({folder.resolve() for folder in found if (folder / header).exists()})


def check(folder, lines, tmp_path):
    source = tmp_path / "abi.cpp"
    source.write_text("\n".join(lines))
    command = [fake_cuda.COMPILER, "-std=c++17", "-fsyntax-only", "-Werror", f"-I{folder}", str(source)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def layout_of(name, structure):
    yield f'static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "size of {name}");'
    for field, *_ in structure._fields_:
        offset = getattr(structure, field).offset
        yield f'static_assert(__builtin_offsetof({name}, {field}) == {offset}, "{name}.{field}");'


def equal(constant, value):
    return f'static_assert((int){constant} == {value}, "{constant}");'


@pytest.mark.parametrize("folder", folders("cuda_runtime_api.h") or [None], ids=str)
def test_runtime_structures_and_numbers_are_those_of_its_header(folder, tmp_path):
    if folder is None:
        pytest.skip("no cuda_runtime_api.h on this machine")
    lines = ["#include <cuda_runtime_api.h>"]
    lines += layout_of("struct cudaMemLocation", managed.MemLocation)
    lines += [
        equal("cudaDevAttrManagedMemory", managed.MANAGED_MEMORY),
        equal("cudaDevAttrConcurrentManagedAccess", managed.CONCURRENT_ACCESS),
        equal("cudaMemAttachGlobal", managed.ATTACH_GLOBAL),
        equal("cudaMemAdviseSetPreferredLocation", managed.SET_PREFERRED),
        equal("cudaMemAdviseUnsetPreferredLocation", managed.UNSET_PREFERRED),
        equal("cudaMemAdviseSetAccessedBy", managed.SET_ACCESSED_BY),
        equal("cudaMemLocationTypeDevice", managed.LOCATION_DEVICE),
        "#if CUDART_VERSION >= 13000",
        "cudaError_t (*advise)(const void *, size_t, enum cudaMemoryAdvise, struct cudaMemLocation) = cudaMemAdvise;",
        "#else",
        "cudaError_t (*advise)(const void *, size_t, enum cudaMemoryAdvise, int) = cudaMemAdvise;",
        "#endif",
        "cudaError_t (*allocate)(void **, size_t, unsigned) = cudaMallocManaged;",
    ]
    check(folder, lines, tmp_path)
