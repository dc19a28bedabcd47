"""examples/grpo.py: resumed runs equal uninterrupted ones, two ranks learn what one learns, mistakes are refused."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import save_tiny_llama

from megatron_infer.errors import ConfigError

ROOT = Path(__file__).parents[2]
SMALL = ["--dtype", "float32", "--prompts-per-step", "3", "--group-size", "4", "--max-tokens", "6", "--lr", "1e-2"]
METERED = ["--mismatch-share", "1"]
MEASURED = ("generate_s", "train_s", "switch_s", "other_s")


@pytest.fixture(scope="module")
def grpo() -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    yield importlib.import_module("grpo")
    sys.path.remove(str(ROOT / "examples"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Any]:
    """All runs of the example, run once."""
    folder = tmp_path_factory.mktemp("grpo")
    model = str(save_tiny_llama(folder / "model"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = [{}]
    pair = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(2)
    ]
    common = ["--model", model, *SMALL, "--save-every", "2", "--mismatch-share", "0"]
    cases = {
        "whole": (alone, ["--steps", "4", "--out-dir", "whole"]),
        "first": (alone, ["--steps", "2", "--out-dir", "parts"]),
        "rest": (alone, ["--steps", "4", "--out-dir", "parts", "--resume"]),
        "another": (alone, ["--steps", "6", "--out-dir", "parts", "--resume", "--seed", "3"]),
        "done": (alone, ["--steps", "4", "--out-dir", "parts", "--resume"]),
        "again": (alone, ["--out-dir", "parts"]),
        "pair": (pair, ["--steps", "4", "--tp", "2", "--out-dir", "pair"]),
        "far": (
            alone,
            ["--steps", "3", "--rollout-lag", "1", "--kl", "0.1", "--epochs", "2", "--out-dir", "far", *METERED],
        ),
        "partial": (alone, ["--steps", "4", "--rollout-lag", "1", "--partial-rollouts", "--out-dir", "partial"]),
        "torch": (alone, ["--steps", "4", "--optimizer", "torch", "--out-dir", "torch"]),
    }
    plan = folder / "runs.json"
    plan.write_text(json.dumps([[ranks, [*common, *options]] for ranks, options in cases.values()]))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(Path(__file__).parent / "grpo_runs.py"), str(plan)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    statuses = dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))
    return {"folder": folder, "statuses": statuses, "stderr": done.stderr, "stdout": done.stdout}


def history(runs: dict[str, Any], name: str) -> list[dict[str, float]]:
    lines = (runs["folder"] / name / "history.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in MEASURED} for line in lines]


def test_every_run_ends_as_it_should(runs):
    refused = ("another", "done", "again")
    wanted = {name: [2] if name in refused else [0] * (2 if name == "pair" else 1) for name in runs["statuses"]}
    assert runs["statuses"] == wanted, runs["stderr"]
    assert "--seed 0, not 3" in runs["stderr"] and "has made 4 steps" in runs["stderr"]
    assert "holds a run; give --resume" in runs["stderr"]


def test_a_resumed_run_equals_an_uninterrupted_run(runs):
    assert history(runs, "parts") == history(runs, "whole")
    first, second = (
        torch.load(runs["folder"] / name / "checkpoint" / "rank0.pt", weights_only=True) for name in ("whole", "parts")
    )
    for name, weight in first["model"].items():
        assert torch.equal(weight, second["model"][name]), name
    assert first["run"]["step"] == second["run"]["step"] == 4


def test_the_reward_rises_and_the_ratio_is_one(runs):
    for name in ("whole", "torch", "pair"):
        rows = history(runs, name)
        assert all(abs(row["ratio_mean"] - 1) < 1e-4 and row["trained_groups"] == 3 for row in rows)
    summary = json.loads((runs["folder"] / "whole" / "summary.json").read_text())
    assert summary["reward_after"] > summary["reward_before"] and set(summary["seconds"]) == {
        "generate",
        "train",
        "switch",
    }
    assert "switch" in runs["stdout"] and "mean reward over all 24 questions" in runs["stdout"]


def test_two_ranks_learn_what_one_learns(runs):
    for one, two in zip(history(runs, "whole"), history(runs, "pair"), strict=True):
        assert (
            two["reward"] == pytest.approx(one["reward"], abs=1e-6) and two["trained_groups"] == one["trained_groups"]
        )
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


def test_batches_drawn_ahead_are_as_old_as_the_lag(runs):
    assert [row["staleness"] for row in history(runs, "far")] == [0.0, 1.0, 1.0]
    assert history(runs, "far")[-1]["kl"] > 0
    assert 0 < sum(row["staleness"] for row in history(runs, "partial")) <= 4


def test_a_metered_run_reports_the_mismatch_of_rollout_and_trainer(runs):
    first = history(runs, "far")[0]
    assert first["mismatch/num_tokens"] > 0 and 0 < first["mismatch/abs_diff_max"] < 1e-4
    assert not any(name.startswith("mismatch") for name in history(runs, "whole")[0])


def test_options_that_exclude_each_other_are_refused(grpo, tmp_path, monkeypatch):
    options, check = grpo.options, grpo.check
    for arguments, world, message in (
        (["--tp", "2"], 1, "torchrun --nproc-per-node 2"),
        (["--group-size", "1"], 1, "--group-size is 1, it must be at least 2"),
        (["--temperature", "0"], 1, "--temperature is 0.0, it must be above 0"),
        (["--partial-rollouts"], 1, "--rollout-lag 1 or more"),
        (["--optimizer", "torch", "--tp", "2"], 2, "take megatron"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(options(None, [*arguments, "--out-dir", str(tmp_path)]), world)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="wandb is not installed: pip install wandb"):
        check(options(None, ["--wandb", "offline", "--out-dir", str(tmp_path)]), 1)
    check(argparse.Namespace(**vars(options(None, ["--out-dir", str(tmp_path)]))), 1)


def test_objective_is_clipped_in_the_direction_of_the_advantage(grpo):
    zero, up, down = torch.zeros(2), torch.tensor([0.5, -0.5]).exp().log(), torch.tensor([1.0, -1.0])
    scores = up.clone().requires_grad_()
    loss = grpo.objective(scores, zero, zero, down, clip=0.2, max_weight=2.0)
    loss.sum().backward()
    assert torch.equal(scores.grad, torch.zeros(2))  # beyond the clip in the direction of the advantage
    scores = (-up).requires_grad_()
    grpo.objective(scores, zero, zero, down, clip=0.2, max_weight=2.0).sum().backward()
    assert (scores.grad.abs() > 0).all()
    weighted = grpo.objective(zero, zero, torch.tensor([-5.0, 1.0]), down, clip=0.2, max_weight=2.0)
    torch.testing.assert_close(weighted, torch.tensor([-2.0, torch.tensor(-1.0).exp().item()]))


def test_rewards_need_the_answer_and_an_end(grpo):
    reward = grpo.task.reward
    assert reward("Paris.", "stop", "Paris") == 1.0
    assert reward("The capital of France is Paris.", "length", "Paris") == 0.5
    assert reward("It is, as everyone knows, Paris.", "stop", "Paris") == 1.0
    assert reward("It is, as almost everyone knows, Paris.", "stop", "Paris") == 0.5
    assert reward("Parisian", "stop", "Paris") == reward("", "stop", "Paris") == 0.0
    epoch = [prompt["question"] for step in range(3) for prompt in grpo.task.batch(step, 8, 0)]
    assert sorted(epoch) == sorted(grpo.task.QUESTIONS)
    assert [p["question"] for p in grpo.task.batch(1, 20, 0)][:4] != epoch[:4]


def test_the_table_compares_runs_and_a_missing_matplotlib_is_reported(runs, grpo, capsys, monkeypatch):
    report = importlib.import_module("grpo_report")
    table = report.table([runs["folder"] / name for name in ("whole", "torch")]).splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == ["whole", "torch", "mean"]
    with pytest.raises(ConfigError, match="has no finished run"):
        report.table([runs["folder"]])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report.draw([runs["folder"] / "whole"], runs["folder"] / "curve.png")
    assert "pip install matplotlib" in capsys.readouterr().err


def test_the_curve_is_a_small_picture(runs, grpo, tmp_path):
    pytest.importorskip("matplotlib")
    importlib.import_module("grpo_report").draw([runs["folder"] / "whole"], tmp_path / "curve.png")
    content = (tmp_path / "curve.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) < 100_000


def test_a_missing_or_broken_checkpoint_is_refused_by_name(grpo, tmp_path):
    trainer = importlib.import_module("grpo_trainer")
    with pytest.raises(ConfigError, match=r"there is no .*rank0\.pt"):
        trainer.load(tmp_path, rank=0)
    (tmp_path / "rank0.pt").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"rank0\.pt cannot be read"):
        trainer.load(tmp_path, rank=0)
