"""Every call of another package's function binds to it in the oldest version admitted and in the newest that was read.

What was read is in `foreign_signatures.json`; where a package is installed, its own sources are held against it, too.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import fake_packages as fakes
import foreign_signatures as foreign
import pytest
import torch
from fake_saver import Saver
from packaging.requirements import Requirement
from packaging.version import Version

from megatron_infer.kernels import flashinfer_rope
from megatron_infer.kernels.optional_packages import numbers
from megatron_infer.memory.regions import saver

RECORDED = foreign.recorded()
MODULES = {
    "flashinfer": "flashinfer-python",
    "torch_memory_saver": "torch-memory-saver",
    "transformer_engine": "transformer-engine",
}
OLDEST = {
    "flashinfer-python": flashinfer_rope.MIN_VERSION,
    "torch-memory-saver": saver.MIN_VERSION,
    "transformer-engine": (2, 4, 0),
    "triton": (3, 6, 0),
    "torch": (2, 11, 0),
}
"""Of each package, as its module refuses older ones; of the last three as requirements/ has it."""
CALLS = [(package, call) for package, calls in foreign.CALLS.items() for call in calls]


@pytest.mark.parametrize(("package", "call"), CALLS, ids=[f"{call.within} {call.callee}" for _, call in CALLS])
def test_every_call_binds_in_every_version(package, call):
    found = foreign.found_calls(call)
    assert found, f"{call.file}: {call.within} calls no {call.callee}"
    for node, scopes in found:
        for name in call.names:
            for version, parameters in foreign.of_versions(RECORDED[package][name]):
                reason = foreign.refusal(node, scopes, name, parameters)
                assert reason is None, f"{call.file}:{node.lineno}, {package} {version}: {reason}"


def test_every_call_of_tritons_language_binds_in_every_version():
    number = 0
    for where, node, scopes in foreign.triton_calls():
        for version, parameters in foreign.of_versions(RECORDED["triton"][foreign.triton_name(node)]):
            reason = foreign.refusal(node, scopes, ast.unparse(node.func), parameters)
            assert reason is None, f"{where}, Triton {version}: {reason}"
            number += 1
    assert number > 2000


@pytest.mark.parametrize("package", OLDEST)
def test_the_oldest_version_admitted_is_recorded_and_none_that_is_not_admitted(package):
    files = (
        foreign.ROOT / "requirements" / name for name in ("nvidia.txt", "gpu.txt", "core.txt")
    )  # the last range counts
    lines = [line.split(";")[0].strip() for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    ranges = {one.name: one.specifier for one in map(Requirement, filter(lambda line: line[:1].isalpha(), lines))}
    for functions in RECORDED[package].values():
        versions = sorted(Version(version) for version, _ in foreign.of_versions(functions))
        assert numbers(str(versions[0])) == OLDEST[package]
        assert all(ranges[package].contains(one) for one in versions if package in ranges), versions


def test_nothing_is_recorded_that_is_not_called():
    assert {package: sorted(functions) for package, functions in RECORDED.items()} == {
        package: sorted(foreign.names_of(package)) for package in (*foreign.CALLS, "triton")
    }


def test_no_other_file_takes_functions_of_these_packages():
    """A file that imports one of them, or names one of its modules, is listed."""
    listed = {call.file for calls in foreign.CALLS.values() for call in calls}
    naming = {
        str(path.relative_to(foreign.OURS)) for path in foreign.OURS.rglob("*.py") if _modules_in(path) & set(MODULES)
    }
    assert naming <= listed, naming - listed


def _modules_in(path: Path) -> set[str]:
    """First parts of what is imported, and of strings that are names of modules."""
    text, names = path.read_text(encoding="utf-8"), []
    if not any(module in text for module in MODULES):
        return set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
        elif _is_about_modules(node):
            names += [str(one.value) for one in ast.walk(node) if isinstance(one, ast.Constant)]
    return {name.partition(".")[0] for name in names}


def _is_about_modules(node: ast.AST) -> bool:
    """An import by name, or an assignment to a name like MODULE."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).endswith(("import_module", "missing"))
    return isinstance(node, ast.Assign) and "MODULE" in ast.unparse(node.targets[0])


FAKES = [
    ("flashinfer-python", foreign.ROPE, fakes.apply_rope_with_cos_sin_cache_inplace),
    ("torch-memory-saver", f"{foreign.SAVER}.region", Saver.region.__wrapped__),
    ("torch-memory-saver", f"{foreign.SAVER}.pause", Saver.pause),
    ("torch-memory-saver", f"{foreign.SAVER}.resume", Saver.resume),
]  # fmt: skip


@pytest.mark.parametrize(("package", "function", "fake"), FAKES, ids=[one.partition(":")[2] for _, one, _ in FAKES])
def test_stand_ins_take_what_the_real_functions_take_in_every_version(package, function, fake):
    ours = foreign.inspect.signature(fake).parameters
    positional = [key for key, item in ours.items() if item.kind is item.POSITIONAL_OR_KEYWORD]
    for version, parameters in foreign.of_versions(RECORDED[package][function]):
        real = list(foreign.signature(parameters).parameters)
        assert positional == real[: len(positional)], f"{version}: in the same order"
        assert set(ours) <= set(real), version


@pytest.mark.parametrize(("module", "package"), [*MODULES.items(), ("torch", "torch")])
def test_an_installed_package_takes_every_call(module, package):
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or "stand_ins" in spec.origin:
        pytest.skip(f"{package} is not installed")
    file = Path(spec.origin)
    installed = foreign.read_package(package, file.parents[1])
    for call in foreign.CALLS[package]:
        for node, scopes in foreign.found_calls(call):
            for name in call.names:
                assert (reason := foreign.refusal(node, scopes, name, installed[name])) is None, reason


def test_the_installed_triton_takes_every_call():
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        pytest.skip("triton is not installed")
    installed = foreign.read_package("triton", Path(spec.origin).parents[1])
    for where, node, scopes in foreign.triton_calls():
        reason = foreign.refusal(node, scopes, ast.unparse(node.func), installed[foreign.triton_name(node)])
        assert reason is None, f"{where}: {reason}"


def test_operators_of_symmetric_memory_take_what_they_are_given():
    """They are compiled; the installed torch has a schema of each on every machine, that of 2.11 to 2.14."""
    tree = foreign.parsed(foreign.OURS / "kernels" / "symmetric_allreduce.py")
    named = {one.attr for one in ast.walk(tree) if isinstance(one, ast.Attribute) and "_all_reduce" in one.attr}
    assert "one_shot_all_reduce_copy_out" in named
    for name in named:
        arguments = getattr(torch.ops.symm_mem, name).default._schema.arguments
        tensors = ["Tensor", "Tensor"] if "_copy_" in name else ["Tensor"]
        assert [str(one.type) for one in arguments] == [*tensors, "str", "str", "Tensor"], name
