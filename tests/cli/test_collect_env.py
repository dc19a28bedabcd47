"""The report on a machine is complete, whatever is broken there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from megatron_infer.cli import collect_env, gpu_packages
from megatron_infer.cli.main import main
from megatron_infer.kernels import select

SECTIONS = [
    *("versions", "cpu", "memory", "compilers", "gpu", "gpu packages"),
    *("torch", "environment", "kernels", "cache memory"),
]


def test_report_covers_every_section_and_every_kernel_and_none_failed():
    facts = collect_env.collect()
    assert list(collect_env.as_dict(facts)) == SECTIONS
    assert [fact for fact in facts if fact.name == "failed"] == []
    assert {fact.name for fact in facts} >= {"python", "torch", "megatron-core", "features", "threads"}
    kernels = {fact.name: fact for fact in facts if fact.section == "kernels"}
    for dtype in ("bfloat16", "float32"):
        assert any(name.startswith("exact mode") and dtype in name for name in kernels)
        for operation in ("attention", "selective scan"):
            assert kernels[f"{operation}, cpu {dtype}"].value in {"native", "torch", "reference"}
    if torch.cuda.is_available():
        assert "attention, cuda bfloat16" in kernels
    else:
        assert kernels["cuda"].value == "no GPU" and "triton" in kernels["cuda"].note


def test_exact_mode_that_no_kernels_have_is_said_to_be_missing(monkeypatch):
    monkeypatch.setenv(select.BACKEND_VARIABLE, "torch")
    row = {fact.name: fact for fact in collect_env._kernels()}["exact mode, cpu float32"]
    assert row.value == "not available" and select.BACKEND_VARIABLE in row.note


def test_each_nvidia_package_is_listed_with_its_import_and_its_use():
    rows = {fact.name: fact for fact in collect_env._gpu_packages()}
    asked = {package.name for package in gpu_packages.PACKAGES}
    assert asked | {"NCCL", "symmetric memory"} == set(rows)
    assert asked >= {"transformer-engine", "apex", "flashinfer-python"}
    assert all(fact.note for fact in rows.values())
    for name in asked:
        assert rows[name].value == "not installed" or "import" in rows[name].value
    if torch.version.cuda is None:
        assert rows["NCCL"].value == "none: torch is built without CUDA"


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("x = 1", "unknown version, imports"),
        (
            "raise RuntimeError('built for CUDA 12')",
            "unknown version, does not import: RuntimeError: built for CUDA 12",
        ),
        ("import os\nos.abort()", "unknown version, does not import: the process ended with -6"),
    ],
)
def test_a_broken_package_is_reported_even_where_it_ends_its_process(tmp_path, monkeypatch, content, value):
    gpu_packages.run_in_subprocess.cache_clear()
    gpu_packages._state.cache_clear()
    (tmp_path / "some_gpu_package.py").write_text(content, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    package = gpu_packages.Package("some-gpu-package", "some_gpu_package", "tests")
    assert gpu_packages._state(package) == value
    assert gpu_packages._state(gpu_packages.Package("no-such", "no_such_module", "tests")) == "not installed"
    gpu_packages.run_in_subprocess.cache_clear()


def test_text_and_json_hold_every_fact():
    facts = [collect_env.Fact("cpu", "cores", "2", "of 4"), collect_env.Fact("gpu", "devices", "none")]
    assert collect_env.as_text(facts).splitlines() == ["[cpu]", "  cores    2  (of 4)", "[gpu]", "  devices  none"]
    assert collect_env.as_dict(facts)["gpu"] == [{"name": "devices", "value": "none", "note": ""}]


@pytest.mark.parametrize(
    "probe",
    ["_versions", "_cpu", "_memory", "_compilers", "_gpu", "_gpu_packages", "_torch", "_environment", "_kernels"],
)
def test_a_broken_probe_is_a_line_of_the_report(monkeypatch, probe):
    def broken():
        yield collect_env.Fact("x", "before", "kept")
        raise OSError("no such device")

    monkeypatch.setattr(collect_env, probe, broken)
    failed = [fact for fact in collect_env.collect() if fact.name == "failed"]
    assert [fact.value for fact in failed] == ["OSError: no such device"]


def test_a_compiler_that_fails_does_not_hide_the_others(monkeypatch, tmp_path):
    bad = tmp_path / "g++"
    bad.write_text("#!/bin/sh\necho broken >&2\nexit 3\n", encoding="utf-8")
    bad.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    facts = {fact.name: fact.value for fact in collect_env._guarded("compilers", collect_env._compilers)}
    assert "exited 3: broken" in facts["failed"]
    assert set(facts) >= {"c++", "ninja"}


def test_report_works_without_any_requirement():
    code = (
        "import sys\n"
        "for root in ('torch', 'numpy', 'megatron', 'rich'): sys.modules[root] = None\n"
        "from megatron_infer.cli.collect_env import as_text, collect\nprint(as_text(collect()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "[torch]" in run.stdout
    assert "failed" in run.stdout


def test_env_command_prints_tables_and_json(capsys):
    assert main(["env"]) == 0
    table = capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == SECTIONS
    assert all(section in table for section in SECTIONS)
