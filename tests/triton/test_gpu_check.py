"""The tool that checks a GPU runs whole on a CPU, tells what fails from what was skipped, and outlives its checks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_packages
import pytest
import torch

from megatron_infer.kernels.triton import launch

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "gpu_check.py"

PLANTED = """
import os, time
from gpu_checks.registry import Target, Unavailable, check


@check(budget_s=5, what="error")
def fine(ctx, compare):
    '''Works.'''
    compare.add("one", 0.5, 1.0)
    compare.targets = [Target("speed", 0.5, 0.8)]
    return {"note": 1}


@check(budget_s=5)
def raises(ctx, compare):
    '''Raises.'''
    raise ValueError("planted trouble")


@check(budget_s=5)
def wrong(ctx, compare):
    '''Is not equal.'''
    compare.add("a case", float("nan"), 1.0)


@check(budget_s=5)
def dies(ctx, compare):
    '''Takes its process with it.'''
    os.abort()


@check(budget_s=0.25)
def hangs(ctx, compare):
    '''Never ends.'''
    time.sleep(600)


@check(budget_s=5)
def poisons(ctx, compare):
    '''Leaves a device that answers no more.'''
    def broken():
        raise RuntimeError("sticky")

    type(ctx.cuda).synchronize = lambda self: broken()
    raise RuntimeError("illegal memory access")


@check(budget_s=5)
def absent(ctx, compare):
    '''Needs what a gpu machine may lack.'''
    import pydantic


@check(budget_s=5)
def elsewhere(ctx, compare):
    '''Cannot be made here.'''
    raise Unavailable("there is none")


@check(budget_s=5, long=True)
def last(ctx, compare):
    '''Still runs.'''
    compare.require("reached", True)
"""


def test_a_device_waits_for_the_host_in_gaps_longer_than_a_launch():
    from light.machine import LAUNCH_GAP_US, waiting

    spans = [(0.0, 10.0), (4.0, 8.0), (11.0, 20.0), (60.0, 70.0)]  # a kernel within another, a launch, the host
    assert waiting(spans, least=LAUNCH_GAP_US) == (40.0, 41.0)
    assert waiting([(0.0, 1.0)], least=LAUNCH_GAP_US) == (0.0, 0.0)


@pytest.fixture(scope="module", autouse=True)
def tools():
    """Their modules can be imported."""
    with pytest.MonkeyPatch.context() as patched:
        for folder in (ROOT / "tools" / "bench", ROOT / "tools"):
            patched.syspath_prepend(str(folder))
        yield


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(launch.INTERPRET_VARIABLE, "1")
        if (reason := launch.unavailable(torch.device("cpu"))) is not None:
            pytest.skip(f"rehearsals need Triton's interpreter: {reason}")


def ran(*options: str, seconds: float, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The tool as a user runs it, without a GPU and without the interpreter asked for."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(folder) if folder else ""}
    command = [sys.executable, str(TOOL), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=seconds)


@pytest.mark.triton
def test_every_check_runs_on_a_cpu_with_nothing_that_a_gpu_machine_may_lack(tmp_path):
    result = ran("--rehearse", "--patience", "20", "--out", str(tmp_path / "report.json"), seconds=290)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    by_status: dict[str, list[str]] = {}
    for row in report["checks"]:
        by_status.setdefault(row["status"], []).append(row["name"])
    packages = {"flashinfer_rope", "fp8_training_model"}
    assert set(by_status.get("skipped", ())) <= packages, result.stdout
    assert report["rehearsal"] and report["facts"]["packages"]["torch"]
    assert "# A rehearsal" in (tmp_path / "report.md").read_text()


@pytest.mark.triton
def test_the_check_of_models_that_train_in_fp8_runs_where_transformer_engine_is_found():
    stand_ins = TOOL.parents[1] / "tests" / "models" / "stand_ins"
    result = ran("--rehearse", "--only", "fp8_training_model", "--patience", "20", seconds=200, folder=stand_ins)
    assert result.returncode == 0 and "1 ok, 0 failed, 0 skipped" in result.stdout, result.stdout + result.stderr


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """(the finished process, check -> its row of the JSON, the Markdown)."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted_checks.py").write_text(PLANTED)
    options = ("--rehearse", "--checks", "planted=planted_checks", "--out", str(folder / "out.json"), "--jobs", "3")
    process = ran(*options, seconds=120, folder=folder)
    rows = {row["name"]: row for row in json.loads((folder / "out.json").read_text())["checks"]}
    return process, rows, (folder / "out.md").read_text()


@pytest.mark.triton
def test_a_failure_of_any_kind_is_that_checks_alone_and_fails_the_run(planted):
    process, rows, _ = planted
    assert process.returncode == 1
    failed = {"raises", "wrong", "dies", "hangs", "poisons", "absent"}
    assert {name for name, row in rows.items() if row["status"] == "failed"} == failed, process.stdout
    assert rows["fine"]["status"] == rows["last"]["status"] == "ok"
    assert "planted trouble" in rows["raises"]["reason"] and "signal 6" in rows["dies"]["reason"]
    assert "nan > 1" in rows["wrong"]["reason"] and "longer than 1 s" in rows["hangs"]["reason"]
    assert "illegal memory access" in rows["poisons"]["reason"]
    assert "absent in a rehearsal" in rows["absent"]["reason"]


@pytest.mark.triton
def test_what_cannot_be_made_is_skipped_with_its_reason_and_a_missed_target_is_no_failure(planted):
    process, rows, markdown = planted
    assert (rows["elsewhere"]["status"], rows["elsewhere"]["reason"]) == ("skipped", "there is none")
    assert rows["fine"]["targets"][0]["met"] is False and "TARGET NOT MET" in process.stdout
    assert "0 of 1 targets met" in process.stdout and "* speed: 0.5" in markdown
    told = process.stdout.splitlines()[-5:]
    assert "gpu_check: FAILED: raises, wrong, dies, hangs, poisons, absent" in told
    assert "gpu_check: not run: elsewhere (there is none)" in told and "gpu_check: targets not met: speed" in told


@pytest.mark.triton
def test_without_a_gpu_nothing_is_called_checked():
    result = ran("--only", "attention_decode", seconds=60)
    assert result.returncode == 1 and "no CUDA device" in result.stdout and "nothing was run" in result.stdout


@pytest.mark.triton
def test_the_tests_for_a_gpu_are_found_where_what_other_tests_import_is_missing(tmp_path):
    (tmp_path / "absent_plugin.py").write_text("from gpu_checks import worker\nworker.refuse_absent()\n")
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), str(TOOL.parent)))
    options = (f"PYTHON={sys.executable}", "PYTEST_ARGS=--collect-only -p absent_plugin")
    command = ["make", "--old-file=cuda-device", "gpu-tests", *options]  # collects without a GPU
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "test_device.py" in found.stdout and "test_attention.py" in found.stdout, found.stdout


@pytest.mark.triton
def test_the_tests_for_a_gpu_are_not_called_run_without_one():
    command = ["make", "gpu-tests", f"PYTHON={sys.executable}"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode and "no CUDA device" in result.stderr and "pytest" not in result.stdout


class Device:
    """As much of torch.cuda as a worker of checks uses. free: GiB, until it has been asked for; the last one stays."""

    def __init__(self, *, seconds: float = 1.0, total: int = 80, free: tuple[int, ...] = (79,)) -> None:
        self.seconds, self.total, self.free = seconds, total, list(free)

    def synchronize(self):
        pass

    def memory_reserved(self):
        return 0

    def mem_get_info(self):
        free = self.free.pop(0) if len(self.free) > 1 else self.free[0]
        return free << 30, self.total << 30

    def take(self, num_gib: int):
        if num_gib > self.free[0]:
            raise torch.OutOfMemoryError(f"tried to allocate {num_gib} GiB")


def on_a_clock(monkeypatch, seconds: float, outcome) -> list[str]:
    """Checks take so long on a clock of their own, and give outcome(check) -> the names of those that have begun."""
    import gpu_check
    from gpu_checks import worker
    from gpu_checks.registry import Result

    now, begun = [0.0], []

    def run_group(unit, command, environment, hear, *, deadline, patience):
        for check in unit:
            if now[0] >= deadline:
                hear(check, Result("skipped", reason=worker.NO_TIME))
                continue
            begun.append(check.name)
            now[0] += seconds
            hear(check, outcome(check))

    monkeypatch.setattr(worker, "run_group", run_group)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: now[0])
    return begun


def checks_called(*names: str, **more):
    """Checks that do nothing."""
    from gpu_checks.registry import Check

    return [Check(name, "", lambda ctx, compare: None, 1.0, **more) for name in names]


@pytest.mark.parametrize(
    ("device", "large_gib", "difference", "status", "said"),
    [
        (Device(), 30, 0.5, 0, ["all ok: attention, graphs, speed", "3 ok, 0 failed, 0 skipped"]),
        (Device(), 30, 2.0, 1, ["all ok: graphs, speed", "FAILED: right", "2 ok, 1 failed, 0 skipped"]),
        (Device(), 90, 0.5, 1, ["FAILED: large", "2 ok, 1 failed, 0 skipped"]),
        (Device(total=24, free=(23,)), 30, 0.5, 0, ["not run: large (no room: the device has 24 GiB)"]),
        (Device(free=(2,)), 30, 0.5, 0, ["not run: large (no room: other processes hold 78 of 80 GiB)", "2 ok"]),
        (Device(free=(2, 79)), 30, 0.5, 0, ["all ok: attention, graphs, speed", "3 ok, 0 failed, 0 skipped"]),
        (Device(seconds=60.0), 30, 2.0, 1, ["FAILED: right", "not run: large (no time left)", "run it again"]),
        (Device(seconds=200.0), 30, 0.5, 0, ["not run: large, fast (no time left)", "1 ok, 0 failed, 2 skipped"]),
    ],
    ids=["sound", "wrong", "leaks", "small", "full", "crowded", "slow and wrong", "slow"],
)
def test_the_verdict_on_a_device_is_true(monkeypatch, capsys, tmp_path, device, large_gib, difference, status, said):
    """Whole runs of the tool, in this process, on a device and a clock of their own."""
    import gpu_check
    from gpu_checks import worker
    from gpu_checks.context import Context
    from gpu_checks.registry import Check

    ctx = Context(torch.device("cpu"), device)
    on_a_clock(monkeypatch, device.seconds, lambda check: worker.run_one(check, ctx))

    def large(ctx, compare):
        device.take(large_gib)
        compare.require("fits", True)

    checks = [
        Check("right", "", lambda ctx, compare: compare.add("a case", difference, 1.0), 1.0, group="attention"),
        Check("large", "", large, 1.0, group="graphs"),
        Check("fast", "", lambda ctx, compare: compare.require("fast", True), 1.0, group="speed"),
    ]
    monkeypatch.setattr(gpu_check, "load", lambda groups: checks)
    monkeypatch.setattr(gpu_check, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_check.signal, "signal", lambda number, handler: None)
    out = tmp_path / "out.json"
    assert gpu_check.main(["--jobs", "1", "--time-limit", "100", "--out", str(out)]) == status
    printed = capsys.readouterr().out
    assert all(f"gpu_check: {line}" in printed for line in said), printed
    assert len(json.loads(out.read_text())["checks"]) == 3


class LateDevice:
    """As much of torch.cuda as the check of the last stage uses: a device that is done with a step 100 ms later."""

    def __init__(self) -> None:
        self.busy_until, self.ends = 0.0, []
        device = self

        class Event:
            def record(self):
                self.at = device.busy_until
                device.ends.append(self)

            def query(self):
                return time.perf_counter() >= self.at

        self.Event = Event

    def _sleep(self, cycles):
        self.busy_until = max(self.busy_until, time.perf_counter()) + 0.1


@pytest.mark.triton
@pytest.mark.parametrize(("reads_first", "wanted"), [(False, "ok"), (True, "failed")])
def test_a_last_stage_that_reads_a_step_before_it_launches_the_next_fails_its_check(monkeypatch, reads_first, wanted):
    from gpu_checks import sync
    from gpu_checks.context import Context

    from megatron_infer.runner.in_flight import LocalStep

    class ReadsFirst(sync.StageRunner):
        def sample(self, step, masks=None):
            drawn = self._thread.submit(lambda: self._draw(step, masks))
            step.result = self._thread.submit(lambda: self._send_result(step, drawn))

    device, read, number = LateDevice(), LocalStep.read, iter(range(10_000))

    def late(step):
        if device.ends:  # else it is of the engine without stages
            time.sleep(max(0.0, device.ends[next(number)].at - time.perf_counter()))
        return read(step)

    monkeypatch.setattr(LocalStep, "read", late)
    if reads_first:
        monkeypatch.setattr(sync, "StageRunner", ReadsFirst)
    result = sync.last_stage_launches(Context(torch.device("cpu"), device))
    assert result.status == wanted and (result.details["share"] >= 0.8) is not reads_first, result


@pytest.mark.triton
def test_the_check_of_flashinfers_rotation_runs_on_a_stand_in_of_it(monkeypatch):
    fake_packages.install(monkeypatch)
    from gpu_checks.context import make_context
    from gpu_checks.registry import GROUPS, load

    from megatron_infer.kernels import flashinfer_rope, optional_packages, select

    monkeypatch.setattr(select, "_library_if", lambda *args: (None, "not here"))  # as on a GPU
    monkeypatch.setattr(select.packing, "unavailable", lambda dtype: "not here")
    monkeypatch.setattr(flashinfer_rope, "unavailable", lambda device, dtype: None)
    monkeypatch.setattr(optional_packages, "HALF", (torch.float32, torch.float16, torch.bfloat16))
    (check,) = (one for one in load({"backends": GROUPS["backends"]}) if one.name == "flashinfer_rope")
    result = check(make_context(rehearse=True, quick=False))
    assert result.status == "ok", result


@pytest.mark.triton
def test_a_run_that_is_killed_leaves_what_it_had_found_and_no_check_running(tmp_path):
    psutil = pytest.importorskip("psutil")
    (tmp_path / "planted_checks.py").write_text(PLANTED)
    out = tmp_path / "out.json"
    options = "--rehearse --checks planted=planted_checks --only fine --only hangs --patience 1e4".split()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen([sys.executable, str(TOOL), *options, "--out", str(out)], env=environment)
    try:
        wait_for(lambda: out.exists() and psutil.Process(process.pid).children(), 60)
        (worker,) = psutil.Process(process.pid).children()
    finally:
        process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 10)
    report = json.loads(out.read_text())
    assert [(row["name"], row["status"]) for row in report["checks"]] == [("fine", "ok")] and report["asked"] == 2
    assert "It ended before its end: 1 of 2 checks" in out.with_suffix(".md").read_text()


def wait_for(condition, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it does not come"
        time.sleep(0.05)


@pytest.mark.triton
def test_what_runs_when_the_time_is_up_is_stopped_and_reported_as_skipped():
    from gpu_checks import worker

    checks = checks_called("slow", "next")
    code = 'import time; print(\'{"start": "slow"}\', flush=True); time.sleep(600)'
    reported = []
    started = time.monotonic()
    worker.run_group(
        *(checks, lambda names: [sys.executable, "-c", code], dict(os.environ)),
        *(lambda check, result: reported.append((check.name, result.status, result.reason)),),
        deadline=started + 2,
    )
    assert time.monotonic() - started < 15
    assert [row[:2] for row in reported] == [("slow", "skipped"), ("next", "skipped")]
    assert "no time left: stopped after" in reported[0][2] and reported[1][2] == "no time left"


@pytest.mark.triton
def test_a_process_that_dies_before_its_first_check_fails_all_and_a_silent_one_the_check_that_it_should_begin(
    monkeypatch,
):
    from gpu_checks import worker

    def reported(code):
        rows = []
        worker.run_group(
            *(checks_called("one", "two"), lambda names: [sys.executable, "-c", f"names = {names}; {code}"]),
            *(dict(os.environ), lambda check, result: rows.append((check.name, result.status, result.reason))),
            deadline=time.monotonic() + 60,
        )
        return rows

    dead = reported("raise SystemExit('no driver')")
    assert dead == [(name, "failed", "its process died, exit status 1: no driver") for name in ("one", "two")]
    monkeypatch.setattr(worker, "START_S", 1.0)
    silent = reported("import time; time.sleep(600 if len(names) == 2 else 0); raise SystemExit('it began')")
    assert [row[:2] for row in silent] == [("one", "failed"), ("two", "failed")]
    assert "did not begin within 1 s" in silent[0][2] and "process died" in silent[1][2]


@pytest.mark.triton
def test_what_matters_most_is_begun_first_and_slow_groups_leave_time_for_suspends_and_speed(monkeypatch):
    import gpu_check
    from gpu_checks.registry import OK, Result

    begun = on_a_clock(monkeypatch, 30.0, lambda check: Result(OK))
    groups = ("backends", "speed", "memory", "attention", "graphs")
    checks = [one for group in groups for one in checks_called(f"{group}0", f"{group}1", group=group)]
    checks += checks_called("graphs2", group="graphs", alone=True)
    rows = gpu_check.run(checks, gpu_check.parse(["--jobs", "1", "--time-limit", "200"]))
    assert begun == ["attention0", "attention1", "graphs0", "graphs1", "graphs2", "memory0", "memory1"]
    reported = {check.name: result.status for check, result in rows}
    assert list(reported) == [check.name for check in checks] and list(reported.values()).count("skipped") == 4


def test_a_second_run_at_the_same_commit_keeps_what_was_ok_and_a_rehearsal_or_another_tree_keeps_nothing(
    monkeypatch, tmp_path
):
    from gpu_checks import report
    from gpu_checks.registry import FAILED, OK, SKIPPED, Result

    checks = checks_called("good", "bad", "late", "new", group="graphs")
    facts = report.facts(ROOT) | {"tree_is_clean": True, "gpus": [{"name": "a", "driver_version": "1"}]}
    rows = list(zip(checks, (Result(OK, figure="1"), Result(FAILED), Result(SKIPPED)), strict=False))
    path = tmp_path / "out.json"
    assert report.known_ok(path, facts, checks) == []
    path.write_text(json.dumps(report.as_dict(facts, rows, rehearsal=False, seconds=1.0, asked=4)))
    assert [(check.name, result.figure) for check, result in report.known_ok(path, facts, checks)] == [("good", "1")]
    for other in ({"commit": "x"}, {"gpus": []}, {"tree_is_clean": False}, {"packages": {}}):
        assert report.known_ok(path, facts | other, checks) == []
    path.write_text(json.dumps(report.as_dict(facts, rows, rehearsal=True, seconds=1.0, asked=4)))
    assert report.known_ok(path, facts, checks) == []
    path.write_text("cut")
    assert report.known_ok(path, facts, checks) == []


def test_the_verdict_of_any_run_is_at_most_ten_lines():
    from gpu_checks import report
    from gpu_checks.registry import FAILED, SKIPPED, Result, Target

    skipped, failed = (
        checks_called(*(f"{name}{i}" for i in range(num)), group=name) for name, num in (("s", 40), ("f", 9))
    )
    rows = [(check, Result(SKIPPED, reason=f"reason {i % 7}")) for i, check in enumerate(skipped)]
    missed = [Target("speed", 0.5, 0.9, "x", True)]
    rows += [(check, Result(FAILED, reason=f"why {check.name}", targets=missed)) for check in failed]
    lines = report.verdict(rows, 1.0).splitlines()
    assert len(lines) <= 10 and all(line.startswith("gpu_check: ") for line in lines)
    assert f"gpu_check: FAILED: {', '.join(f'f{i}' for i in range(9))}" in lines
