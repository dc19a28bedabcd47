"""megatron-core's import leaves torch's compiler alone until a compiled function is called."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_infer.models.late_compile import compiling_late


@pytest.fixture
def compiled(monkeypatch):
    """(name, options) of each call of torch.compile, which takes the backend that runs functions as they are."""
    names, compile_now = [], torch.compile

    def record(function=None, **options):
        names.append((getattr(function, "__name__", None), options))
        return compile_now(function, backend="eager")

    monkeypatch.setattr(torch, "compile", record)
    return names


def test_function_is_compiled_once_when_it_is_first_called(compiled):
    before = torch.compile
    with compiling_late():

        @torch.compile
        def double(x):
            """Twice x."""
            return x + x

    assert torch.compile is before
    assert (double.__name__, double.__doc__, compiled) == ("double", "Twice x.", [])
    x = torch.arange(3.0, requires_grad=True)
    double(double(x)).sum().backward()
    assert compiled == [("double", {})]
    assert x.grad.tolist() == [4.0] * 3


def test_function_called_by_a_compiled_one_is_compiled_as_part_of_it(compiled):
    with compiling_late():

        @torch.compile
        def inner(x):
            return x * 3

        @torch.compile
        def outer(x):
            return inner(x) + 1

    assert outer(torch.ones(2)).tolist() == [4.0, 4.0]
    assert compiled == [("outer", {})]


def test_decorator_with_options_and_modules_compile_at_once(compiled):
    module = torch.nn.Linear(2, 2)
    with compiling_late():
        torch.compile(module, dynamic=True)
        torch.compile(lambda x: x, fullgraph=True)
    assert [options for _, options in compiled] == [{"dynamic": True}, {"fullgraph": True}]


@pytest.mark.long
def test_engine_is_imported_without_torchs_compiler():
    code = "import sys, megatron_infer.engine.llm; print('torch._inductor.lowering' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
