"""Import paths that pages once named still work, and give the very modules that have their content now."""

from __future__ import annotations

import importlib
import runpy
import sys

import pytest

from megatron_infer.utils.former_paths import MOVED, present


@pytest.mark.parametrize("old", MOVED)
def test_former_path_gives_the_present_module_and_says_where_it_is(old, monkeypatch):
    monkeypatch.delitem(sys.modules, f"megatron_infer.{old}", raising=False)
    with pytest.warns(DeprecationWarning, match=f"megatron_infer.{MOVED[old]} now"):
        found = importlib.import_module(f"megatron_infer.{old}")
    assert found is importlib.import_module(f"megatron_infer.{MOVED[old]}")
    assert found.__spec__.name == f"megatron_infer.{MOVED[old]}"


def test_a_module_below_a_former_package_is_not_loaded_twice(monkeypatch):
    monkeypatch.delitem(sys.modules, "megatron_infer.rl.weights.sources", raising=False)
    assert present("rl.weights.sources") == "rl.updates.sources"
    with pytest.warns(DeprecationWarning):
        found = importlib.import_module("megatron_infer.rl.weights.sources")
    assert found is importlib.import_module("megatron_infer.rl.updates.sources")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_former_program_runs_by_its_former_name(monkeypatch, capsys):
    """As `python -m` runs it."""
    monkeypatch.delitem(sys.modules, "megatron_infer.debug.collect_env", raising=False)
    monkeypatch.setattr(sys, "argv", ["collect_env"])
    runpy.run_module("megatron_infer.debug.collect_env", run_name="__main__", alter_sys=True)
    assert "torch" in capsys.readouterr().out


def test_a_path_that_never_was_is_missing():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("megatron_infer.comm.nothing")
