"""Launches run, are seen, and can be played again; where they cannot run there is a reason."""

from __future__ import annotations

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
