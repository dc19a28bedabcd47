"""`make gpu` names what a machine lacks before it installs anything, and installs what the machine can use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from load_file import load_file
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "gpu_setup.py"
H100 = "0, NVIDIA H100 80GB HBM3, 580.95.05, 9.0, 81559, 4"
A100 = "1, NVIDIA A100-SXM4-40GB, 580.95.05, 8.0, 40960, 0"
V100 = "0, Tesla V100-SXM2-16GB, 580.95.05, 7.0, 16384, 0"


@pytest.fixture(scope="module")
def setup():
    return load_file("tools/gpu_setup.py")


@pytest.fixture
def programs(tmp_path):
    """Makes a program of that name, which prints a text; the environment's PATH has these alone."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def make(name: str, text: str = "", status: int = 0) -> None:
        path = folder / name
        path.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{text}\nEND\nexit {status}\n")
        path.chmod(0o755)

    make.environment = {"PATH": str(folder), "CUDA_HOME": str(tmp_path / "no_cuda")}
    return make


def looked(setup, programs, line: str, *, status: int = 0, torch: str | None = None, tmp_path: Path, **variables: str):
    programs("nvidia-smi", line, status)
    programs("cc")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(setup, "read_torch", lambda environment: torch)
        patched.setattr(setup, "NEEDED_BYTES", 1)
        patched.setattr(setup.platform, "machine", lambda: "x86_64")
        return setup.look(programs.environment | variables, tmp_path)


def commands(setup, machine, folder: Path = Path("/venv")) -> list[str]:
    return [" ".join(step.command) for step in setup.steps_for(machine, folder)]


def test_without_a_driver_the_command_says_so_and_installs_nothing(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PATH"} | {"PATH": str(tmp_path)}
    venv = tmp_path / "venv"
    command = [sys.executable, str(TOOL), "--venv", str(venv)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 2 and ended.stdout == "" and not venv.exists()
    assert "there is no nvidia-smi" in ended.stderr and "--gpus all" in ended.stderr


@pytest.mark.parametrize(
    ("line", "status", "word"),
    [
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
            9,
            "status 9: NVIDIA-SMI has",
        ),
        ('Field "compute_cap" is not a valid field to query.', 2, "status 2: Field"),
        ("", 0, "lists no GPU"),
        ("garbage", 0, "says 'garbage' where index, name"),
        ("0, NVIDIA H100, [GPU is lost], 9.0, 81559, 4", 0, "fallen off the bus"),
        ("0, NVIDIA H100, 580.95.05, [N/A], 81559, 4", 0, "too old"),
        (V100, 0, "compute capability 8.0 is needed (A100 or newer), here: Tesla V100-SXM2-16GB (7.0)"),
        (H100.replace(", 4", ", 81000"), 0, "GPU 0 has 559 of 81,559 MiB free, 8,192 are needed: nvidia-smi names"),
        (H100.replace("580.95.05", "470.256.02"), 0, "the driver is 470.256.2, CUDA 12 needs 525.60.13"),
        ("0, NVIDIA B200, 575.57.08, 10.0, 183359, 4", 0, "built for CUDA 13, which needs 580.65.6 or newer"),
    ],
)
def test_what_is_wrong_with_the_driver_or_the_gpu_is_named(setup, programs, tmp_path, line, status, word):
    with pytest.raises(setup.Unfit) as raised:
        looked(setup, programs, line, status=status, tmp_path=tmp_path)
    assert word in str(raised.value)


def test_all_that_is_missing_next_to_the_gpu_is_named_at_once(setup, programs, tmp_path, monkeypatch):
    programs("nvidia-smi", H100)
    monkeypatch.setattr(setup, "read_torch", lambda environment: None)
    monkeypatch.setattr(setup, "NEEDED_BYTES", 1 << 60)
    monkeypatch.setattr(setup.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(setup.sys, "version_info", (3, 10, 12))
    with pytest.raises(setup.Unfit) as raised:
        setup.look(programs.environment, tmp_path)
    for what in (
        "C compiler: apt-get install gcc",
        "GiB free, torch with CUDA takes",
        "Python.h: apt-get install python3-dev",
        "Python 3.11 or newer is needed",
    ):
        assert what in str(raised.value)
    monkeypatch.setattr(setup.platform, "system", lambda: "Darwin")
    with pytest.raises(setup.Unfit, match="this is Darwin"):
        setup.look(programs.environment, tmp_path)


@pytest.mark.parametrize("lacks", ["version", "headers"])
def test_uv_brings_a_python_where_the_own_one_is_too_old_or_lacks_its_headers(
    setup, programs, tmp_path, monkeypatch, lacks
):
    programs("uv")
    if lacks == "version":
        monkeypatch.setattr(setup.sys, "version_info", (3, 10, 12))
    else:
        monkeypatch.setattr(setup.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    found = commands(setup, looked(setup, programs, H100, tmp_path=tmp_path))
    assert "--managed-python --python 3.12 /venv" in found[0]


@pytest.mark.parametrize(
    ("driver", "system", "index"),
    [
        ("580.95.05", "x86_64", ""),
        ("580.65.06", "x86_64", ""),
        ("580.65.05", "x86_64", "cu126"),
        ("550.54.15", "x86_64", "cu126"),
        ("525.60.13", "x86_64", "cu126"),
        ("590.10", "aarch64", "cu130"),
    ],
)
def test_torch_is_one_that_the_driver_can_run(setup, driver, system, index):
    gpu = setup._gpu_of(H100.replace("580.95.05", driver))
    assert setup.index_for(gpu, system).endswith(index) and bool(setup.index_for(gpu, system)) == bool(index)


def test_pip_installs_torch_the_package_and_what_the_machine_can_use(setup, programs, tmp_path):
    found = commands(setup, looked(setup, programs, H100, tmp_path=tmp_path))
    pip = f"/venv/bin/python -m pip --disable-pip-version-check install -q {setup.TORCH}"
    assert found == [
        f"{sys.executable} -m venv /venv",
        pip,
        f"{pip} -e {ROOT}",
        f"{pip} torch-memory-saver>=0.0.10,<1",
    ]
    programs("nvcc")
    machine = looked(setup, programs, H100, tmp_path=tmp_path)
    assert commands(setup, machine)[-1] == f"{pip} flashinfer-python>=0.7.2,<1"
    assert [step.needed for step in setup.steps_for(machine, tmp_path)] == [True] * 3 + [False] * 2


def test_uv_is_used_where_it_is_there(setup, programs, tmp_path):
    programs("uv")
    found = commands(setup, looked(setup, programs, H100.replace("580.95.05", "550.54.15"), tmp_path=tmp_path))
    uv = f"{programs.environment['PATH']}/uv"
    assert found[0] == f"{uv} venv --seed --allow-existing --python {sys.executable} /venv"
    install = f"{uv} pip install --python /venv/bin/python {setup.TORCH}"
    assert found[1] == f"{install} --index-url {setup.CUDA_12}" and found[2] == f"{install} -e {ROOT}"


def test_a_torch_that_is_there_is_shared_and_never_replaced(setup, programs, tmp_path):
    programs("uv")
    machine = looked(setup, programs, H100, torch="2.12.0a0+5228986c39.nv25.12", tmp_path=tmp_path)
    first, *others = commands(setup, machine)
    assert first == f"{sys.executable} -m venv --system-site-packages /venv"
    assert others and all(" torch==2.12.0a0+5228986c39.nv25.12 " in one and setup.TORCH not in one for one in others)
    assert not any("--index-url" in one for one in others)


def test_only_a_torch_that_sees_the_gpu_counts(setup, monkeypatch):
    """The one here is for CPUs. In a virtual environment none is looked for, as no other environment can share it."""
    assert setup.read_torch(dict(os.environ)) is None
    for prefix, said, found in (
        ("/usr", '["2.13.0+cu130", "13.0", true]', "2.13.0+cu130"),
        ("/usr", '["2.13.0+cu130", "13.0", false]', None),
        ("/usr", '["2.10.0+cu130", "13.0", true]', None),
        ("/usr", '["2.13.0", null, false]', None),
        ("/venv", '["2.13.0+cu130", "13.0", true]', None),
    ):
        monkeypatch.setattr(setup.sys, "prefix", prefix)
        monkeypatch.setattr(setup.sys, "base_prefix", "/usr")
        ended = subprocess.CompletedProcess([], 0, stdout=f"a notice\n{said}\n")
        monkeypatch.setattr(setup.subprocess, "run", lambda *args, ended=ended, **more: ended)
        assert setup.read_torch({}) == found


@pytest.mark.parametrize(
    ("lines", "given", "wanted"),
    [
        ((H100, A100), None, "0"),
        ((H100.replace(", 4", ", 81000"), A100), None, "1"),
        ((V100, A100), None, "1"),
        ((H100, A100), "1", "1"),
        ((H100, A100), "0,1", "0"),
        ((H100, A100), "GPU-5f7a", "GPU-5f7a"),
        (("0, NVIDIA GB10, 580.95.05, 12.1, [N/A], [N/A]",), None, "0"),
    ],
)
def test_of_several_gpus_the_one_with_most_free_memory_is_checked(setup, programs, tmp_path, lines, given, wanted):
    variables = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    machine = looked(setup, programs, "\n".join(lines), tmp_path=tmp_path, **variables)
    assert setup.environment_for(machine, variables)["CUDA_VISIBLE_DEVICES"] == wanted
    assert ("1 more" in setup.describe(machine)) == (len(lines) == 2)


@pytest.mark.parametrize("given", ["", "-1", "7"])
def test_a_choice_that_leaves_no_gpu_is_named(setup, programs, tmp_path, given):
    with pytest.raises(setup.Unfit, match=r"CUDA_VISIBLE_DEVICES=.* leaves none of the 1 GPUs"):
        looked(setup, programs, H100, tmp_path=tmp_path, CUDA_VISIBLE_DEVICES=given)


def test_a_dry_run_prints_every_command_and_runs_none(setup, programs, tmp_path, monkeypatch, capsys):
    programs("nvidia-smi", H100)
    programs("cc")
    monkeypatch.setattr(setup, "NEEDED_BYTES", 1)
    monkeypatch.setattr(setup.platform, "machine", lambda: "x86_64")
    venv = tmp_path / "venv"
    assert setup.main(["--dry-run", "--venv", str(venv), "--", "--quick"], programs.environment) == 0
    printed = capsys.readouterr().out
    report = ROOT / "docs" / "results" / "gpu_nvidia_h100_80gb_hbm3.json"
    assert printed.endswith(f"+ {venv}/bin/python {ROOT}/tools/gpu_check.py --out {report} --time-limit 1800 --quick\n")
    assert "not installed: flashinfer-python: compiles its kernels with nvcc" in printed and not venv.exists()


def run_whole(setup, programs, tmp_path, monkeypatch, *, steps: list[str], checks: int) -> int:
    """Everything but pip: the steps are shell commands, the checks a program that writes a report."""
    monkeypatch.setattr(setup, "RESULTS", tmp_path)
    machine = looked(setup, programs, H100, tmp_path=tmp_path)
    monkeypatch.setattr(setup, "look", lambda environment, room: machine)
    made = [setup.Step(("/bin/sh", "-c", text), needed=not text.startswith("exit 3")) for text in steps]
    monkeypatch.setattr(setup, "steps_for", lambda machine, venv: made)
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$2" = --out ] || exit 0\necho report > "${{3%.json}}.md"\nexit {checks}\n')
    python.chmod(0o755)
    return setup.main(["--venv", str(tmp_path / "venv")], programs.environment)


@pytest.mark.parametrize("status", [0, 1])
def test_the_exit_status_is_that_of_the_checks_and_what_is_optional_may_fail(
    setup, programs, tmp_path, monkeypatch, capsys, status
):
    assert run_whole(setup, programs, tmp_path, monkeypatch, steps=["true", "exit 3"], checks=status) == status
    said = capsys.readouterr().out
    assert "that failed; the checks go on without it" in said
    assert "gpu_nvidia_h100_80gb_hbm3.md and gpu_nvidia_h100_80gb_hbm3.json are the report; paste the first" in said


def test_an_installation_that_fails_ends_the_run(setup, programs, tmp_path, monkeypatch, capsys):
    assert run_whole(setup, programs, tmp_path, monkeypatch, steps=["false", "touch never"], checks=0) == 2
    assert "this failed: /bin/sh -c false" in capsys.readouterr().err and not list(tmp_path.glob("gpu_*"))


def test_a_report_too_long_for_an_issue_is_attached(setup, tmp_path):
    report = tmp_path / "gpu_x.json"
    assert "was not written" in setup.farewell(report)
    report.with_suffix(".md").write_text("x" * (setup.ISSUE_CHARACTERS + 1))
    assert "attach both" in setup.farewell(report)


def test_torch_that_is_installed_is_of_a_version_whose_sources_were_read(setup):
    asked = Requirement(setup.TORCH).specifier
    assert asked.contains("2.11.0") and asked.contains("2.13.0+cu126")
    assert not asked.contains("2.10.0") and not asked.contains("2.14.0")
