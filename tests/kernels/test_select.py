"""Choices are made once, explained, and never fail for lack of a compiler."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_packages
import pytest
import torch
from static_kernels import STATIC, StaticAttention, StaticScan

from megatron_infer.errors import ConfigError
from megatron_infer.kernels import backend_candidates, flashinfer_rope, select, threads
from megatron_infer.kernels.base import AttendSpec
from megatron_infer.kernels.native import native_build
from megatron_infer.kernels.ssm import SsmSpec
from megatron_infer.kernels.torch.cpu_torch import TorchPagedAttention
from megatron_infer.kernels.triton import launch

SPEC = AttendSpec(num_kv_heads=2, group_size=3, head_dim=64, scale=0.125)
MAMBA = SsmSpec(num_heads=4, head_dim=64, state_dim=128, num_groups=1, conv_width=4)


@pytest.fixture
def fresh_build(tmp_path, monkeypatch):
    """An empty cache directory and no library loaded yet; what is built there is never run: each source is one line."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "sources").mkdir()
    for name in (*native_build.HEADERS, *native_build.SOURCES):
        (tmp_path / "sources" / name).write_text(f"int mi_{name.partition('.')[0]}() {{ return 1; }}\n")
    monkeypatch.setattr(native_build, "FOLDER", tmp_path / "sources")
    native_build.load.cache_clear()
    yield tmp_path
    native_build.load.cache_clear()


def choose(dtype=torch.float32, specs=(SPEC,), **more):
    return select.choose("cpu", dtype, specs=list(specs), block_size=16, **more)


def backends(chosen) -> dict[str, str]:
    return {row.operation: row.chosen for row in chosen.rows}


def test_native_is_chosen_where_it_builds(native_library):
    chosen = choose()
    assert backends(chosen)["attention"] == chosen.attention.name == "native"
    assert chosen.ops.name == "native"
    assert "attention" in chosen.table() and "native" in chosen.table()


def test_without_a_compiler_torch_is_used_and_the_table_says_why(fresh_build, monkeypatch):
    monkeypatch.setenv("PATH", str(fresh_build))
    monkeypatch.delenv("CXX", raising=False)
    chosen = choose()
    assert backends(chosen)["attention"] == chosen.attention.name == chosen.ops.name == "torch"
    row = next(row for row in chosen.rows if row.operation == "attention")
    assert "no C++ compiler" in row.reasons["native"]
    assert [got.tolist() for got in chosen.argmax(torch.tensor([[1.0, 3.0, 3.0]]))] == [[1], [3.0]]


def test_a_compiler_that_fails_becomes_a_reason_with_its_message(fresh_build, monkeypatch):
    fake = fresh_build / "c++"
    fake.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'x.cpp:1: error: out of cheese' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    with pytest.raises(native_build.NativeUnavailable, match="out of cheese"):
        native_build.load()
    assert choose().attention.name == "torch"


def test_a_damaged_library_becomes_a_reason(native_library, fresh_build):
    library = native_build.build()
    library.unlink()
    library.write_bytes(b"not a library")
    with pytest.raises(native_build.NativeUnavailable, match="does not load"):
        native_build.load()


def test_a_cache_directory_others_can_write_is_not_trusted(tmp_path, monkeypatch):
    folder = tmp_path / "megatron_infer" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native_build.cache_directory() != folder


def test_concurrent_builds_compile_once(native_library, fresh_build, monkeypatch):
    compiled = []
    run = native_build._run

    def counting(command, timeout_s):
        if "-shared" in command:
            compiled.append(command)
        return run(command, timeout_s)

    monkeypatch.setattr(native_build, "_run", counting)
    paths: list[Path] = []
    workers = [threading.Thread(target=lambda: paths.append(native_build.build())) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(compiled) == 1 and len(set(paths)) == 1 and len(paths) == 4
    assert {path.suffix for path in paths[0].parent.iterdir()} == {".so", ".lock"}


@pytest.mark.long
def test_changed_source_is_another_library(native_library, fresh_build, monkeypatch):
    first = native_build.build()
    (fresh_build / "sources" / native_build.HEADERS[0]).write_text("// another\n")
    second = native_build.build()
    monkeypatch.setattr(native_build, "FLAGS", (*native_build.FLAGS, "-DANOTHER"))
    assert len({first, second, native_build.build()}) == 3


@pytest.mark.parametrize(
    ("layer", "word"),
    [
        (AttendSpec(num_kv_heads=1, group_size=1, head_dim=24, scale=1.0), "head_dim"),
        (AttendSpec(num_kv_heads=1, group_size=1, head_dim=1024, scale=1.0), "head_dim"),
        (AttendSpec(num_kv_heads=1, group_size=1, head_dim=64, scale=-1.0), "scale"),
        (AttendSpec(num_kv_heads=1, group_size=1, head_dim=64, scale=1.0, rotary_dim=7), "rotary_dim"),
    ],
)
def test_a_layer_the_kernel_cannot_run_moves_attention_to_torch(native_library, layer, word):
    chosen = choose(specs=[SPEC, layer])
    row = next(row for row in chosen.rows if row.operation == "attention")
    assert row.chosen == "torch" and word in row.reasons["native"]
    assert chosen.ops.name == "native"


def test_other_dtypes_run_on_torch():
    chosen = choose(dtype=torch.float16)
    assert chosen.attention.name == chosen.ops.name == "torch"
    assert all("native" in row.reasons for row in chosen.rows if row.operation == "attention")


def test_a_model_without_mamba_layers_has_no_scan():
    chosen = choose()
    assert chosen.scan is None and "selective scan" not in backends(chosen)


def test_a_pure_mamba_model_has_a_scan_and_no_row_for_attention():
    chosen = choose(specs=(), ssm_specs=[MAMBA])
    assert chosen.scan is not None and backends(chosen)["selective scan"] == chosen.scan.name
    assert "attention" not in backends(chosen)


@pytest.mark.parametrize(
    ("fields", "more", "word"),
    [
        ({"state_dim": 512}, {}, "state_dim"),
        ({"conv_width": 9}, {}, "conv_width"),
        ({}, {"ssm_dtype": torch.float16}, "SSM states"),
        ({}, {"conv_dtype": torch.float64}, "convolution states"),
    ],
)
def test_a_scan_the_kernel_cannot_run_moves_to_torch(native_library, fields, more, word):
    spec = dataclasses.replace(MAMBA, **fields)
    chosen = choose(ssm_specs=[MAMBA, spec], **more)
    row = next(row for row in chosen.rows if row.operation == "selective scan")
    assert row.chosen == "torch" and word in row.reasons["native"]
    assert chosen.attention.name == "native"


@pytest.mark.parametrize("name", ["native", "torch", "reference"])
def test_debug_variable_forces_the_scan_too(monkeypatch, native_library, name):
    monkeypatch.setenv(select.BACKEND_VARIABLE, name)
    chosen = choose(ssm_specs=[MAMBA])
    assert chosen.scan is not None and chosen.scan.name == backends(chosen)["selective scan"] == name
    assert backends(chosen)["attention"] == name


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_debug_variable_forces_a_backend_and_shows_in_the_table(monkeypatch, name):
    monkeypatch.setenv(select.BACKEND_VARIABLE, name)
    chosen = choose()
    assert chosen.attention.name == chosen.ops.name == name
    assert select.BACKEND_VARIABLE in chosen.table()


@pytest.mark.parametrize("name", ["native", "torch"])
def test_the_option_forces_attention_and_nothing_else(native_library, name):
    chosen = choose(attention=name, ssm_specs=[MAMBA])
    assert chosen.attention.name == backends(chosen)["attention"] == name
    assert chosen.ops.name == chosen.scan.name == "native"


@pytest.mark.parametrize(("name", "kind"), [("native", "NativeSampling"), ("torch", "NoneType")])
def test_the_option_forces_sampling_and_nothing_else(native_library, name, kind):
    chosen = choose(sampling=name)
    assert backends(chosen)["argmax, sampling"] == name and type(chosen.sampling).__name__ == kind
    assert (chosen.argmax is select.lowest_argmax) == (name == "torch")
    assert chosen.attention.name == chosen.ops.name == "native"


WIDE = dataclasses.replace(MAMBA, state_dim=512)
HALF = {"dtype": torch.float16}
ELSEWHERE = "but attention: runs on a GPU, the model is on cpu"
NO_CLASSES = ("nowhere:Kernels", "static_kernels:Nothing", "megatron_infer.testing.tiny:")
REFUSED: list[tuple[str | None, dict[str, Any], str]] = [
    (None, {"attention": "triton"}, f"attention_backend=triton, {ELSEWHERE}"),
    (
        None,
        {"attention": "native", "specs": [dataclasses.replace(SPEC, scale=-1.0)]},
        "attention_backend=native, but attention needs a positive scale",
    ),
    (None, {"attention": "native", **HALF}, "attention_backend=native, but attention: needs float32 or bfloat16"),
    (None, {"sampling": "triton"}, r"sampling_backend=triton, but sampling: .*runs on a GPU"),
    (None, {"sampling": "native", **HALF}, "sampling_backend=native, but sampling: needs float32 or bfloat16"),
    ("reference", {"attention": "torch"}, "unset one of them"),
    ("reference", {"sampling": "torch"}, "but sampling_backend=torch; unset one of them"),
    ("native", {"ssm_specs": [WIDE]}, "selective scan needs state_dim up to 256, got 512"),
    ("native", HALF, "float16"),
    ("cuda", {}, "native, torch, reference"),
    *((name, {}, f"{name}.*or module:class of attention and scan") for name in NO_CLASSES),
]
"""Value of the debug variable, what is asked, words of the error."""


@pytest.mark.parametrize(("variable", "asked", "words"), REFUSED)
def test_what_cannot_be_had_is_an_error_with_the_reason(monkeypatch, native_library, variable, asked, words):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if variable is not None:
        monkeypatch.setenv(select.BACKEND_VARIABLE, variable)
    with pytest.raises(ConfigError, match=words):
        choose(**asked)


def test_a_backend_for_gpus_comes_first_and_is_refused_with_its_reason(monkeypatch):
    class Kernels(TorchPagedAttention):
        name = "triton"

        def supports(self, spec, *, dtype, block_size, kv_dtype):
            return "needs head_dim 128" if spec.head_dim == 64 else None

    there = ModuleType("there")
    there.unavailable, there.make = lambda device, dtype: None, lambda device, dtype: Kernels()
    monkeypatch.setitem(sys.modules, "megatron_infer.kernels.there", there)
    monkeypatch.setattr(backend_candidates, "ATTENTION", (backend_candidates.Candidate("triton", "there"),))
    assert choose(attention="triton", specs=[dataclasses.replace(SPEC, head_dim=128)]).attention.name == "triton"
    with pytest.raises(ConfigError, match="triton, but attention needs head_dim 128"):
        choose(attention="triton")
    monkeypatch.setenv(select.BACKEND_VARIABLE, "triton")
    for name in ("OPS", "SAMPLING", "STEP"):
        monkeypatch.setattr(backend_candidates, name, ())
    with pytest.raises(ConfigError, match="MEGATRON_INFER_BACKEND=triton, but attention needs head_dim 128"):
        choose()


def test_what_stands_behind_the_first_that_can_is_not_even_imported(monkeypatch):
    there = ModuleType("there")
    there.unavailable, there.make = lambda device, dtype: None, lambda device, dtype: TorchPagedAttention()
    monkeypatch.setitem(sys.modules, "megatron_infer.kernels.there", there)
    behind = (
        backend_candidates.Candidate("first", "there"),
        backend_candidates.Candidate("second", "no_such_module"),
    )
    gpu = torch.device("cuda")
    found, missing, refused = backend_candidates.first(
        behind, gpu, torch.bfloat16, forced=None, refuses=lambda backend: None
    )
    assert found is not None and missing == refused == {}
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        backend_candidates.first(behind, gpu, torch.bfloat16, forced=None, refuses=lambda backend: "cannot")


def test_flashinfers_rotation_is_used_where_it_can_be_and_the_table_says_why_not(monkeypatch):
    rotating = dataclasses.replace(SPEC, rotary_dim=64)
    why = "runs on a GPU, the model is on cpu"
    assert "rotation" not in backends(choose(specs=[rotating]))
    row = next(row for row in choose(specs=[rotating], fused_rope=None).rows if row.operation == "rotation")
    assert row.reasons == {"flashinfer": why}
    with pytest.raises(ConfigError, match=f"use_flashinfer_fused_rope=True, but FlashInfer {why}"):
        choose(specs=[rotating], fused_rope=True)

    fake_packages.install(monkeypatch)
    monkeypatch.setattr(flashinfer_rope, "unavailable", lambda device, dtype: None)
    asked = {"specs": [rotating], "dtype": torch.bfloat16}
    chosen = choose(**asked, fused_rope=None, attention="torch")
    assert type(chosen.attention) is flashinfer_rope.FlashInferRope and chosen.attention.name == "torch"
    assert backends(chosen)["rotation"] == "flashinfer"
    odd = choose(specs=[dataclasses.replace(SPEC, rotary_dim=20)], dtype=torch.bfloat16, fused_rope=None)
    assert "in sixteens" in next(row for row in odd.rows if row.operation == "rotation").reasons["flashinfer"]


def test_attention_that_rotates_by_itself_keeps_doing_so_unless_forced(monkeypatch, native_library):
    fake_packages.install(monkeypatch)
    monkeypatch.setattr(flashinfer_rope, "unavailable", lambda device, dtype: None)
    asked = {"specs": [dataclasses.replace(SPEC, rotary_dim=64)], "dtype": torch.bfloat16}
    assert choose(**asked, fused_rope=None).attention.name == "native"
    assert type(choose(**asked, fused_rope=None).attention) is not flashinfer_rope.FlashInferRope
    assert type(choose(**asked, fused_rope=True).attention) is flashinfer_rope.FlashInferRope


def test_debug_variable_can_name_attention_and_scan_in_torch_by_module_and_class(monkeypatch):
    monkeypatch.setenv(select.BACKEND_VARIABLE, STATIC)
    chosen = choose(ssm_specs=[MAMBA])
    assert type(chosen.attention) is StaticAttention and type(chosen.scan) is StaticScan
    assert backends(chosen)["attention"] == backends(chosen)["selective scan"] == "static"
    assert backends(chosen)["linear"] == backends(chosen)["norms, activations"] == "torch"


def test_thread_advice_counts_cores_once_and_obeys_quota_and_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    for cpu in range(4):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    none = tmp_path / "missing"
    assert threads.default_threads(topology=tmp_path, cpu_max=none) == 2
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert threads.default_threads(topology=tmp_path, cpu_max=tmp_path / "cpu.max") == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert threads.default_threads(topology=tmp_path, cpu_max=tmp_path / "cpu.max") == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads.default_threads(topology=tmp_path, cpu_max=none) == 3


def test_cpu_settings_apply_the_asked_thread_count():
    threads.apply_cpu_settings(1)
    assert torch.get_num_threads() == 1


def test_a_gpu_without_triton_gives_the_reason_and_nothing_imports_it(monkeypatch):
    module = "megatron_infer.kernels.triton.attention"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    made, reasons = backend_candidates.available(
        backend_candidates.ATTENTION, torch.device("cuda"), torch.bfloat16, forced="triton"
    )
    assert made == [] and reasons == {"triton": "triton is not installed"} and module not in sys.modules
