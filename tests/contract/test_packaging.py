"""What is declared can be installed: every folder is a package, and CI's pins lie within the declared ranges."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import megatron_infer
from megatron_infer.cli.gpu_packages import PACKAGES

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"


def _requirements(name: str) -> list[Requirement]:
    lines = (line.split("#")[0].strip() for line in (REQUIREMENTS / name).read_text(encoding="utf-8").splitlines())
    return [Requirement(line) for line in lines if line]


PINS = {item.name.lower(): next(iter(item.specifier)).version for item in _requirements("constraints-cpu.txt")}


def test_every_folder_with_code_is_a_package():
    folders = {path.parent for path in (ROOT / "megatron_infer").rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("file", ["core.txt", "dev.txt", "plot.txt", "speech.txt"])
def test_pins_of_ci_lie_within_the_ranges(file):
    for item in _requirements(file):
        assert item.name.lower() in PINS, f"{item.name} is not pinned in constraints-cpu.txt"
        assert item.specifier.contains(PINS[item.name.lower()]), item


def test_constraints_are_exact_and_pull_no_cuda():
    for item in _requirements("constraints-cpu.txt"):
        assert [clause.operator for clause in item.specifier] == ["=="], item
        assert not item.name.startswith(("nvidia-", "cuda-"))


def test_every_requirement_has_a_range():
    for path in REQUIREMENTS.glob("*.txt"):
        for item in _requirements(path.name):
            assert item.specifier, f"{path.name}: {item}"


def test_packages_that_are_someone_elses_are_never_asked_for():
    """`apex` on PyPI is another project; the others are built against one CUDA, which only the user knows."""
    asked = {item.name.lower() for path in REQUIREMENTS.glob("*.txt") for item in _requirements(path.name)}
    assert not asked & {"apex", "transformer-engine", "mamba-ssm", "causal-conv1d", "flash-attn", "flash-attn-3"}


def test_every_package_for_gpus_is_either_asked_for_or_told_how_to_build():
    told = (REQUIREMENTS / "nvidia.txt").read_text(encoding="utf-8")
    assert _requirements("nvidia.txt") == []
    asked = {item.name.lower() for item in _requirements("gpu.txt")}
    for package in PACKAGES:
        assert (package.name in asked) != (f"\n# {package.name} " in told), package.name


def test_every_extra_reads_a_file_that_is_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["tool"]["setuptools"]["dynamic"]["optional-dependencies"]
    for extra in extras.values():
        assert all((ROOT / file).exists() for file in extra["file"])


def test_project_file_names_the_command_and_the_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"megatron-infer": "megatron_infer.cli.main:main"}
    assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "megatron_infer.__version__"
    assert megatron_infer.__version__
