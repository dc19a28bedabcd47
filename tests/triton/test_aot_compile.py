"""What the compiler refuses, or what does not fit a GPU, fails the check; the interpreter would have let it pass."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

pytestmark = pytest.mark.triton

ROOT = Path(__file__).resolve().parents[2]
ARCHS = (80, 90, 100)
MODULE = """
from functools import partial
import torch
import triton
import triton.language as tl
from megatron_infer.kernels.triton.launch import launch


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


def case(label, kernel, dtype, options):
    x, out = torch.empty(256, dtype=dtype, device="meta"), torch.empty(256, device="meta")
    launch(kernel, (1,), x, out, *((40, 2) if kernel is scaled else ()), **options)
    yield label


CASES = [(200 * 1024 if row[0] == "roomy" else 0, partial(case, *row)) for row in [VARIANTS]]
"""
VERSION = ".".join(triton.__version__.split(".")[:2])
PLANTED = """
    ("double", scaled, torch.float32, {"N": 64}),
    ("dot", product, torch.float16, {"N": 16, "K": 16}),
    ("odd", scaled, torch.float32, {"N": 48}),
    ("wide", product, torch.float16, {"N": 32, "K": 2048}),
    ("spilling", product, torch.float16, {"N": 64, "K": 64, "maxnreg": 32}),
    ("roomy", scaled, torch.float32, {"N": 128}),
"""


def plant(folder, variants, package="planted", replaced=("", "")):
    (folder / package).mkdir(exist_ok=True)
    (folder / package / "__init__.py").touch()
    (folder / package / "kernels.py").write_text(MODULE.replace("VARIANTS", variants).replace(*replaced))


def ran(folder, *options, planted=PLANTED, replaced=("", ""), **environment):
    """tools/aot_compile.py over a module whose cases launch these variants, as a user runs it."""
    plant(folder, planted, replaced=replaced)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    environment |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, str(ROOT / "tools/aot_compile.py"), "--cases", "planted.kernels", "--jobs=1", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """(the finished process, label -> its row of the JSON)."""
    folder = tmp_path_factory.mktemp("aot")
    process = ran(folder, "--arch", "80", "--json", str(folder / "out.json"))
    return process, rows_of(folder / "out.json")


def rows_of(report):
    return {row["variant"].partition("-")[2]: row for row in json.loads(report.read_text())}


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
    assert any(line.startswith("FAILED kernels.scaled-odd") for line in process.stdout.splitlines())


def test_a_kernel_with_more_shared_memory_than_the_gpu_fails_the_check(planted):
    assert "shared memory, sm_80 has 166,912" in planted[1]["wide"]["failure"]


def test_a_kernel_whose_registers_do_not_suffice_fails_the_check(planted):
    row = planted[1]["spilling"]
    assert row["num_registers"] <= 32 and f"spills {row['spill_bytes']} bytes" in row["failure"]


def test_a_kernel_that_may_start_early_and_does_not_wait_first_fails_the_check(tmp_path, monkeypatch):
    """The devices that can start it early are those from compute capability 9.0 on."""
    hasty = '("hasty", scaled, torch.float32, {"N": 32, "launch_pdl": True}),'
    process = ran(tmp_path, *("--arch", "80", "--arch", "90", "--json", str(tmp_path / "out.json")), planted=hasty)
    row = rows_of(tmp_path / "out.json")["hasty"]
    assert process.returncode == 1 and row["arch"] == 90 and "before it has waited" in row["failure"]
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from aot_compile import waits_first

    wait, load = "griddepcontrol.wait; // dummy\n", "@%p1 ld.global.v4.b32 {%r1}, [%rd1];\n"
    assert waits_first("ld.param.b64 %rd1;\n" + wait + load)
    assert not waits_first(load + wait)


def test_a_kernel_is_compiled_for_no_device_that_has_too_little_memory_for_it(planted):
    assert "roomy" not in planted[1]


def test_what_compiles_alike_everywhere_is_compiled_once_and_products_in_bf16_for_every_architecture(tmp_path):
    some = """
    ("double", scaled, torch.float32, {"N": 64}),
    ("dot", product, torch.float16, {"N": 32, "K": 16}),
    ("dot_bf16", product, torch.bfloat16, {"N": 16, "K": 16}),
    ("dot_fp16", product, torch.float16, {"N": 16, "K": 16}),
    """
    report = tmp_path / "out.json"
    process = ran(tmp_path, "--json", str(report), planted=some)
    assert process.returncode == 0, process.stdout
    found = {}
    for row in json.loads(report.read_text()):
        found.setdefault(row["variant"], set()).add(row["arch"])
    counts = {name.partition("-")[2]: len(archs) for name, archs in found.items()}
    assert counts == {"dot": 3, "dot_bf16": 3, "dot_fp16": 1, "double": 1}


def test_what_the_table_has_is_not_compiled_again_until_the_kernel_changes(tmp_path):
    both = '("double", scaled, torch.float32, {"N": 64}), ("dot", product, torch.float16, {"N": 16, "K": 16})'
    folder = tmp_path / "table"
    table = folder / f"{VERSION}.txt"

    def told(*options, replaced=("", "")):
        return ran(tmp_path, "--arch", "90", *options, planted=both, replaced=replaced)

    assert "2 compiled" in told("--table", str(folder), "--write").stdout
    again = told("--table", str(folder), "--recheck", "1", "--write")
    assert again.returncode == 0 and "1 compiled" in again.stdout and "1 in the table" in again.stdout
    for change in (("constexpr(2)", "constexpr(3)"), ("(40, 2)", "(2**40, 2)")):  # of a function that it calls; a type
        changed = told("--table", str(folder), replaced=change)
        assert "1 compiled" in changed.stdout and "1 in the table" in changed.stdout
    lines = table.read_text().splitlines()
    assert len(lines) == 2
    key, figures, name = lines[0].split()
    registers, rest = figures.split("/", 1)
    table.write_text(f"{key} {int(registers) + 1}/{rest} {name}\n")
    checked = told("--table", str(folder), "--recheck", "5")
    assert checked.returncode == 1 and "make kernels-table" in checked.stdout
    table.write_text(f"{key} {registers} {name}\n")
    assert f"{VERSION}.txt:1: is no line of the table" in told("--table", str(folder)).stderr


def test_each_version_of_triton_has_a_file_of_its_own(tmp_path):
    other = tmp_path / "table" / "2.9.txt"
    other.parent.mkdir()
    other.write_text("of another version\n")
    one = '("double", scaled, torch.float32, {"N": 64})'
    arguments = ("--arch", "90", "--table", str(other.parent), "--write")
    assert "1 compiled" in ran(tmp_path, *arguments, planted=one).stdout
    assert "0 compiled" in ran(tmp_path, *arguments, planted=one).stdout
    assert other.read_text() == "of another version\n" and other.with_name(f"{VERSION}.txt").exists()


def test_a_table_of_some_kernels_is_not_written_over_that_of_all(tmp_path):
    one = '("double", scaled, torch.float32, {"N": 64})'
    process = ran(tmp_path, "--table", str(tmp_path), "--only", "double", "--write", planted=one)
    assert process.returncode == 2 and "without --only" in process.stderr and not [*tmp_path.glob("*.txt")]


def test_it_refuses_to_run_where_kernels_are_interpreted(tmp_path):
    process = ran(tmp_path, TRITON_INTERPRET="1")
    assert process.returncode == 2 and "unset it" in process.stdout


def test_cases_launch_every_kernel_of_the_package(monkeypatch):
    """Those that no other kernel calls."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from aot_cases import CASES
    from aot_compile import variants_of

    trees = [ast.parse(path.read_text()) for path in (ROOT / "megatron_infer/kernels/triton").glob("*.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    kernels = {node.name: node for node in functions if "triton.jit" in " ".join(map(ast.unparse, node.decorator_list))}
    named = {one.id for node in kernels.values() for one in ast.walk(node) if isinstance(one, ast.Name)}
    found = {one.launched.kernel for one in variants_of(CASES)}
    assert found and kernels.keys() - named == found
