"""Launches run, are seen, and can be played again; where they cannot run there is a reason."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
import torch

from megatron_infer.kernels.triton import launch as launching

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def double():
    import triton
    import triton.language as tl

    @triton.jit
    def double_kernel(x, out, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

    return double_kernel


def test_a_launch_is_seen_and_can_be_played_again_on_other_content(device, double):
    x, out = torch.arange(10.0, device=device), torch.zeros(10, device=device)
    seen = []
    with launching.listening(lambda *call: seen.append(call)):
        launching.launch(double, (3,), x, out, 10, BLOCK=4, num_warps=1)
    assert out.tolist() == [2.0 * i for i in range(10)]
    x.fill_(7)
    ((launch, kernel, grid, args, options),) = seen
    launch(kernel, grid, *args, **options)
    assert out.tolist() == [14.0] * 10
    launching.launch(double, (3,), x, out, 10, BLOCK=4)
    assert len(seen) == 1


def test_without_the_interpreter_a_cpu_has_no_triton(monkeypatch):
    monkeypatch.setenv(launching.INTERPRET_VARIABLE, "0")
    assert "runs on a GPU" in launching.unavailable(torch.device("cpu"))


def test_a_numpy_that_the_interpreter_does_not_stand_is_named(monkeypatch):
    monkeypatch.setenv(launching.INTERPRET_VARIABLE, "1")
    monkeypatch.setattr(launching.np, "__version__", "2.5.2")
    assert "numpy below 2.4" in launching.unavailable(torch.device("cpu"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Failed to find C compiler. Please specify"), "Failed to find C compiler"),
        (subprocess.CalledProcessError(1, ["gcc", "main.c"]), "returned non-zero exit status 1"),  # no Python.h
        (AssertionError("libcuda.so cannot found!\nPossible files are"), "libcuda.so cannot found!"),
        (None, None),
    ],
)
def test_a_gpu_whose_machine_cannot_build_launchers_has_no_triton(monkeypatch, error, said):
    from triton.runtime import driver

    class Driver:
        @property
        def utils(self):
            if error is not None:
                raise error

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(driver, "_active", Driver())
    launching._no_launcher.cache_clear()
    reason = launching.unavailable(torch.device("cuda", 0))
    launching._no_launcher.cache_clear()
    assert (reason is None) if said is None else said in reason and "C compiler" in reason and "\n" not in reason


def test_a_grid_without_programs_is_no_launch(device, double):
    x, seen = torch.ones(0, device=device), []
    with launching.listening(lambda *call: seen.append(call)):
        for grid in ((0,), (3, 0), (0, 5, 1)):
            launching.launch(double, grid, x, x, 0, BLOCK=4)
    assert not seen


@pytest.mark.parametrize("grid", [(2**31,), (1, 65536), (1, 1, 65536), (2**16, 2**15)])
def test_a_grid_that_a_gpu_cannot_have_is_refused_by_name(device, double, grid):
    x = torch.ones(4, device=device)
    with pytest.raises(ValueError, match=r"double_kernel over a grid of .* at most"):
        launching.launch(double, grid, x, x, 4, BLOCK=4)


def test_a_number_that_the_compiler_does_not_take_is_refused_by_the_interpreter_too(device, double):
    if device.type != "cpu":
        pytest.skip("Triton says so itself")
    x = torch.ones(4, device=device)
    with pytest.raises(TypeError, match="double_kernel: n is a int32"):
        launching.launch(double, (1,), x, x, np.int32(4), BLOCK=4)


def test_a_launch_runs_on_the_device_of_its_tensors(monkeypatch):
    class Elsewhere:
        is_cuda = True

        def get_device(self) -> int:
            return 1

    current = [0]

    class Guard:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *error) -> None:
            current.pop()

    class Kernel:
        arg_names, fn = (), len

        def run(self, *args, **options):
            ran.append(current[-1])

    class Compiled:
        def __init__(self, kernel, options, args) -> None:
            self.kernel = kernel

        def __call__(self, device, grid, args) -> None:
            assert device == current[-1]
            self.kernel.run(*args)

    ran = []
    monkeypatch.setattr(launching, "CompiledLaunches", Compiled)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    launching.launch(Kernel(), (1,), Elsewhere())
    assert ran == [1] and current == [0]
    current.append(1)
    launching.launch(Kernel(), (1,), Elsewhere())
    with launching.listening(lambda *call: ran.append("heard")):
        launching.launch(Kernel(), (1,), Elsewhere())
    assert ran == [1, 1, "heard", 1]


def test_launches_overlap_only_where_they_are_asked_to_and_the_device_can(monkeypatch):
    where = torch.device("cuda")
    monkeypatch.setattr(launching, "_can_overlap", lambda device: True)
    monkeypatch.delenv(launching.PDL_VARIABLE, raising=False)
    assert launching.overlapping(where) == {"PDL": False}
    monkeypatch.setenv(launching.PDL_VARIABLE, "1")
    assert launching.overlapping(where) == {"PDL": True, "launch_pdl": True}
    assert launching.overlapping(torch.device("cpu")) == {"PDL": False}
    monkeypatch.setattr(launching, "_can_overlap", lambda device: False)
    assert launching.overlapping(where) == {"PDL": False}
