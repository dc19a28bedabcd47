"""What the compiler refuses, or what does not fit a GPU, fails the check; the interpreter would have let it pass."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from launches import recording

from megatron_infer.kernels.triton.launch import launch

pytestmark = pytest.mark.triton

ROOT = Path(__file__).resolve().parents[2]
ARCHS = (80, 90, 100)
MODULE = """
from dataclasses import replace
import triton
import triton.language as tl
from megatron_infer.kernels.triton.launch import AotVariant


FACTOR = tl.constexpr(2)


@triton.jit
def twice(x):
    return x * FACTOR


@triton.jit
def scaled(x, out, n, stride, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at * stride, twice(tl.load(x + at, mask=at < n)), mask=at < n)


@triton.jit
def product(x, out, N: tl.constexpr, K: tl.constexpr):
    rows, columns = tl.arange(0, N), tl.arange(0, K)
    a = tl.load(x + rows[:, None] * K + columns[None, :])
    b = tl.load(x + columns[:, None] * N + rows[None, :])
    tl.store(out + rows[:, None] * N + rows[None, :], tl.dot(a, b))


def variant(name, kernel, signature, options={}, **constexprs):
    signature |= dict.fromkeys(constexprs, "constexpr")
    return AotVariant(name=name, kernel=kernel, signature=signature, constexprs=constexprs, options=options)


def aot_variants():
    scaled_types = {"x": "*fp32", "out": "*fp32", "n": "i32", "stride": "i32"}
    product_types = {"x": "*fp16", "out": "*fp32"}
    return [VARIANTS]
"""
VERSION = ".".join(triton.__version__.split(".")[:2])
PLANTED = """
    variant("double", scaled, scaled_types, N=64),
    variant("dot", product, product_types, N=16, K=16),
    variant("odd", scaled, scaled_types, N=48),
    variant("wide", product, product_types, N=32, K=2048),
    variant("spilling", product, product_types, {"maxnreg": 32}, N=64, K=64),
    variant("hasty", scaled, scaled_types, {"launch_pdl": True}, N=32),
    replace(variant("newer", scaled, scaled_types, N=128), min_arch=90),
    replace(variant("roomy", scaled, scaled_types, N=128), min_shared=200 * 1024),
"""


def plant(folder, variants, package="planted", replaced=("", "")):
    (folder / package).mkdir(exist_ok=True)
    (folder / package / "__init__.py").touch()
    (folder / package / "kernels.py").write_text(MODULE.replace("VARIANTS", variants).replace(*replaced))


def ran(folder, *options, planted=PLANTED, replaced=("", ""), **environment):
    """tools/aot_compile.py over a package whose one module has these variants, as a user runs it."""
    plant(folder, planted, replaced=replaced)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    environment |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, str(ROOT / "tools/aot_compile.py"), "--jobs", "1", "--package", "planted", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """(the finished process, variant -> its row of the JSON)."""
    folder = tmp_path_factory.mktemp("aot")
    process = ran(folder, "--arch", "80", "--json", str(folder / "out.json"))
    return process, {row["variant"]: row for row in json.loads((folder / "out.json").read_text())}


def test_what_there_is_no_time_for_is_counted(planted, tmp_path):
    """What was being compiled, and what waited at once after it, is done; the others are left."""
    process = ran(tmp_path, "--arch", "80", "--seconds", "0", "--json", str(tmp_path / "out.json"))
    compiled = json.loads((tmp_path / "out.json").read_text())
    left = re.search(r"(\d+) not compiled: --seconds", process.stdout)
    assert left and int(left[1]) > 0 and int(left[1]) + len(compiled) == len(planted[1]), process.stdout


def test_kernels_that_compile_pass_with_their_figures(planted):
    _, rows = planted
    assert rows["double"]["failure"] is None and rows["dot"]["failure"] is None
    assert rows["double"]["num_registers"] > 0 and rows["double"]["spill_bytes"] == 0
    assert rows["double"]["shared_bytes"] == 0 and rows["dot"]["shared_bytes"] > 0


def test_a_kernel_the_compiler_refuses_fails_the_check_and_is_named(planted):
    process, rows = planted
    assert process.returncode == 1 and "power of 2" in rows["odd"]["failure"]
    assert any(line.startswith("FAILED kernels odd") for line in process.stdout.splitlines())


def test_a_kernel_with_more_shared_memory_than_the_gpu_fails_the_check(planted):
    assert "shared memory, sm_80 has 166,912" in planted[1]["wide"]["failure"]


def test_a_kernel_whose_registers_do_not_suffice_fails_the_check(planted):
    row = planted[1]["spilling"]
    assert row["num_registers"] <= 32 and f"spills {row['spill_bytes']} bytes" in row["failure"]


def test_a_kernel_that_may_start_early_and_does_not_wait_first_fails_the_check(planted):
    assert "before it has waited" in planted[1]["hasty"]["failure"]
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from aot_compile import waits_first
    finally:
        sys.path.pop(0)
    wait, load = "griddepcontrol.wait; // dummy\n", "@%p1 ld.global.v4.b32 {%r1}, [%rd1];\n"
    assert waits_first("ld.param.b64 %rd1;\n" + wait + load)
    assert not waits_first(load + wait)


def test_a_kernel_is_compiled_for_no_architecture_that_it_is_not_for(planted):
    assert "newer" not in planted[1] and "roomy" not in planted[1]


def test_what_compiles_alike_everywhere_is_compiled_once_and_products_in_bf16_for_every_architecture(tmp_path):
    both = """
    variant("double", scaled, scaled_types, N=64),
    variant("dot", product, product_types, N=16, K=16),
    variant("dot_bf16", product, product_types | {"x": "*bf16"}, N=16, K=16),
    variant("dot_fp16", product, product_types, N=16, K=16),
    """
    report = tmp_path / "out.json"
    process = ran(tmp_path, "--json", str(report), planted=both)
    assert process.returncode == 0, process.stdout
    found = {}
    for row in json.loads(report.read_text()):
        found.setdefault(row["variant"], set()).add(row["arch"])
    assert {name: len(archs) for name, archs in found.items()} == {"dot": 3, "dot_bf16": 3, "dot_fp16": 1, "double": 1}


def test_what_the_table_has_is_not_compiled_again_until_the_kernel_changes(tmp_path):
    both = 'variant("double", scaled, scaled_types, N=64), variant("dot", product, product_types, N=16, K=16)'
    table = tmp_path / "table.txt"

    def told(*options, replaced=("", "")):
        return ran(tmp_path, "--arch", "90", *options, planted=both, replaced=replaced)

    assert "2 compiled" in told("--write", str(table)).stdout
    again = told("--table", str(table), "--recheck", "1", "--write", str(table))
    assert again.returncode == 0 and "1 compiled" in again.stdout and "1 in the table" in again.stdout
    for change in (("constexpr(2)", "constexpr(3)"), ('"n": "i32', '"n": "i64')):  # of a function that it calls; a type
        changed = told("--table", str(table), replaced=change)
        assert "1 compiled" in changed.stdout and "1 in the table" in changed.stdout
    head, *lines = table.read_text().splitlines()
    assert head == f"key {VERSION} kernel" and len(lines) == 2
    key, figures, name = lines[0].split()
    registers, rest = figures.split("/", 1)
    table.write_text(f"{head}\n{key} {int(registers) + 1}/{rest} {name}\n")
    checked = told("--table", str(table), "--recheck", "5")
    assert checked.returncode == 1 and "make kernels-table" in checked.stdout
    table.write_text(f"{head}\n{key} {registers} {name}\n")
    assert "table.txt:2: is no line of the table" in told("--table", str(table)).stderr


def test_another_version_of_triton_has_a_column_of_its_own(tmp_path):
    both = 'variant("double", scaled, scaled_types, N=64), variant("half", scaled, scaled_types, N=32)'
    table = tmp_path / "table.txt"
    arguments = ("--arch", "90", "--table", str(table), "--write", str(table))
    table.write_text("")
    assert "2 compiled" in ran(tmp_path, *arguments, planted=both).stdout
    of_one = table.read_text().replace(f"key {VERSION}", "key 2.9").splitlines()
    table.write_text("\n".join([*of_one[:2], ""]))  # the other kernel is not in the table of that version
    assert "2 compiled" in ran(tmp_path, *arguments, planted=both).stdout
    head, *lines = table.read_text().splitlines()
    assert head == f"key 2.9 {VERSION} kernel"
    assert lines[0] == of_one[1].replace(" kernels", " = kernels")
    assert lines[1] == of_one[2].replace(" ", " - ", 1)
    one = both.partition("),")[0] + ")"
    assert "0 compiled" in ran(tmp_path, *arguments, "--quick", planted=one).stdout
    assert table.read_text().splitlines() == [head, *lines]


def test_it_refuses_to_run_where_kernels_are_interpreted(tmp_path):
    process = ran(tmp_path, TRITON_INTERPRET="1")
    assert process.returncode == 2 and "unset it" in process.stdout


def test_what_a_run_launched_and_no_list_names_is_compiled_as_it_was_launched(tmp_path, device, monkeypatch):
    if device.type != "cpu":
        pytest.skip("a GPU's launches are compiled when they are made")
    plant(tmp_path, 'variant("double", scaled, scaled_types, {"num_warps": 4}, N=64)', "launching")
    monkeypatch.syspath_prepend(str(tmp_path))
    kernels = importlib.import_module("launching.kernels")
    x_X = torch.ones(256)
    with recording(tmp_path / "launches", "launching"):
        launch(kernels.scaled, (1,), x_X, torch.empty(256), 40, 2, N=64, num_warps=4)  # as the list has it
        launch(kernels.product, (1,), x_X.half(), torch.empty(256), N=16, K=8, num_warps=4)  # the interpreter takes it
        launch(kernels.scaled, (1,), x_X[1:], torch.empty(256), 16, 1, N=32, num_warps=4)
    report = tmp_path / "out.json"
    process = ran(
        *(tmp_path, "--package", "launching", "--arch", "90", "--launches", str(tmp_path / "launches")),
        *("--json", str(report)),
    )
    assert process.returncode == 1 and "3 specialisations were launched" in process.stdout
    rows = json.loads(report.read_text())
    assert rows[0]["variant"] == "double"
    failures = [row["failure"] for row in rows if "-launched-" in row["variant"]]
    assert failures.count(None) == 2 and len(failures) == 3 and "K >= 16" in str(failures)
    odd = next(one for one in read_lines(tmp_path / "launches") if ["N", 32] in one["values"])
    assert odd["aligned"] == ["out", "n"] and ["stride", 1] in odd["values"] and ["stride", "constexpr"] in odd["types"]


def read_lines(folder):
    (path,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]
