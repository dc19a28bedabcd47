"""A backend that cannot be had is a reason, not an import error."""

from __future__ import annotations

import sys

import pytest
import torch

from megatron_infer.errors import ConfigError
from megatron_infer.kernels import backend_candidates
from megatron_infer.kernels.select import BACKEND_VARIABLE, choose
from megatron_infer.kernels.triton import launch


def test_without_triton_its_kernels_are_not_imported_and_the_reason_is_given(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "megatron_infer.kernels.triton.sampling", raising=False)
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    found = backend_candidates.available(backend_candidates.SAMPLING, torch.device("cuda"), torch.float32, forced=None)
    assert found == ([], {"triton": "triton is not installed"})


def test_forcing_kernels_that_cannot_run_is_an_error_with_the_reason(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"MEGATRON_INFER_BACKEND=triton, but .*runs on a GPU"):
        choose("cpu", torch.float32, specs=[], block_size=16)
