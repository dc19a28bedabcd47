"""megatron-core's import leaves torch's compiler alone until a compiled function is called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_infer.models.late_compile import compiling_late


@pytest.fixture
def compiled(monkeypatch):
    """(name, options) of each call of torch.compile, which takes the backend that runs functions as they are."""
    import torch._dynamo  # not while tests are collected

    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    names, compile_now = [], torch.compile

    def record(function=None, **options):
        names.append((getattr(function, "__name__", None), options))
        return compile_now(function, backend="eager")

    monkeypatch.setattr(torch, "compile", record)
    with torch._dynamo.config.patch(disable=False):  # the variable's value when torch's compiler was imported
        yield names


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


def test_functions_stay_as_they_are_written_where_torch_is_told_to_compile_none(compiled, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")

    def double(x):
        return x + x

    with compiling_late():
        assert torch.compile(double) is double
    assert not compiled


COMPILED = (
    "engine/answers/test_exact_training.py::test_gradients_are_those_of_the_stock_forward[delta-train]",
    "engine/answers/test_same_answer.py::test_first_tokens_equal_the_full_forward_of_the_training_path[hybrid]",
    "engine/suspend/test_suspend.py::test_training_between_suspend_and_resume_finds_its_modules_and_is_noticed[delta]",
    "rl/test_training_step.py",
)
"""Tests of what megatron-core compiles: gates of attention and of delta nets, biases of routers."""


@pytest.mark.long
def test_training_holds_its_promises_with_what_megatron_core_compiles():
    tests = Path(__file__).parent.parent
    command = [sys.executable, "-m", "pytest", "-q", "-n0", *(str(tests / name) for name in COMPILED)]
    environment = os.environ | {"TORCH_COMPILE_DISABLE": "0"}
    done = subprocess.run(command, env=environment, cwd=tests.parent, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_engine_is_imported_without_torchs_compiler():
    code = "import sys, megatron_infer.engine.llm; print('torch._inductor.lowering' in sys.modules)"
    environment = os.environ | {"TORCH_COMPILE_DISABLE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "False"
