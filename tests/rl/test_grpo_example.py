"""examples/grpo.py: resumed runs equal uninterrupted ones, two ranks learn what one learns, mistakes are refused,
and no constant answer gets what the untrained model gets."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import free_port
from safetensors.torch import load_file
from tiny_llama import save_tiny_llama

from megatron_infer.errors import ConfigError

ROOT = Path(__file__).parents[2]
SMALL = ["--dtype", "float32", "--prompts-per-step", "3", "--group-size", "4", "--max-tokens", "6", "--lr", "1e-2"]
LORA = ["--lora-rank", "4", "--kl", "0.1", "--lr", "0.05"]
METERED = ["--mismatch-share", "1", "--no-exact"]
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
    port = str(free_port())
    alone = [{}]
    pair = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(2)
    ]
    common = ["--model", model, *SMALL, "--save-every", "2", "--evaluate-every", "2", "--mismatch-share", "0"]
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
        "lora first": (alone, ["--steps", "2", *LORA, "--out-dir", "lora"]),
        "lora": (alone, ["--steps", "3", *LORA, "--out-dir", "lora", "--resume"]),
        "never": (alone, ["--steps", "2", "--evaluate-every", "0", "--out-dir", "never"]),
        "torch": (alone, ["--steps", "4", "--optimizer", "torch", "--no-exact", "--out-dir", "torch"]),
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


@pytest.mark.long
def test_every_run_ends_as_it_should(runs):
    refused = ("another", "done", "again")
    wanted = {name: [2] if name in refused else [0] * (2 if name == "pair" else 1) for name in runs["statuses"]}
    assert runs["statuses"] == wanted, runs["stderr"]
    assert "--seed 0, not 3" in runs["stderr"] and "has made 4 steps" in runs["stderr"]
    assert "holds a run; give --resume" in runs["stderr"]


@pytest.mark.long
def test_a_resumed_run_equals_an_uninterrupted_run(runs):
    assert history(runs, "parts") == history(runs, "whole")
    first, second = (
        torch.load(runs["folder"] / name / "checkpoint" / "rank0.pt", weights_only=True) for name in ("whole", "parts")
    )
    for name, weight in first["model"].items():
        assert torch.equal(weight, second["model"][name]), name
    assert first["run"]["step"] == second["run"]["step"] == 4


@pytest.mark.long
def test_the_reward_rises_and_the_ratio_is_one(runs):
    for name in ("whole", "torch", "pair"):
        rows = history(runs, name)
        assert all(abs(row["ratio_mean"] - 1) < 1e-4 and row["trained_groups"] == 3 for row in rows)
        assert all(row["ratio_min"] == row["ratio_max"] == 1.0 for row in rows) == (name != "torch")
    summary = json.loads((runs["folder"] / "whole" / "summary.json").read_text())
    figures = summary["figures"]
    assert figures["train/after/sampled/reward"] > figures["train/before/sampled/reward"]
    assert set(summary["seconds"]) == {"generate", "train", "switch"}
    assert "switch" in runs["stdout"] and "trained: mean reward train" in runs["stdout"]


@pytest.mark.long
def test_an_adapter_is_trained_alone_resumed_and_written_for_peft(runs):
    rows = history(runs, "lora")
    assert len(rows) == 3 and rows[0]["kl"] == 0 < rows[1]["kl"] < rows[2]["kl"], "away from the base model"
    assert all(row["ratio_min"] == row["ratio_max"] == 1.0 for row in rows)
    saved = torch.load(runs["folder"] / "lora" / "checkpoint" / "rank0.pt", weights_only=True)
    assert saved["model"] and all(".lora." in name for name in saved["model"])
    figures = json.loads((runs["folder"] / "lora" / "summary.json").read_text())["figures"]
    assert figures["train/after/sampled/reward"] > figures["train/before/sampled/reward"]
    tensors = load_file(runs["folder"] / "lora" / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 7 and all(tensor.any() for tensor in tensors.values())


@pytest.mark.long
def test_held_out_questions_are_evaluated_and_never_trained_on(runs, grpo):
    rows = history(runs, "whole")
    assert [name for row in rows for name in row if name.startswith("held_out")] == 2 * [
        "held_out_greedy",
        "held_out_sampled",
    ]
    answers = [json.loads(line) for line in (runs["folder"] / "whole" / "answers.jsonl").read_text().splitlines()]
    held_out = {row["question"] for row in answers if row["set"] == "held_out"}
    assert len(answers) == 10 and len(held_out) == 2
    for task, least in (("facts", 200), ("sums", 200)):
        questions = grpo.task.questions(task)
        assert len({question.text for question in questions}) == len(questions) >= least
        held_out = {question.text for question in questions if question.held_out}
        drawn = {prompt["asked"]["text"] for step in range(30) for prompt in grpo.task.batch(task, step, 8, 0)}
        assert drawn == {question.text for question in questions} - held_out
        assert 0.18 < len(held_out) / len(questions) < 0.21


@pytest.mark.long
def test_nothing_is_evaluated_every_0_steps(runs, grpo, tmp_path):
    report, folder = importlib.import_module("grpo_report"), runs["folder"] / "never"
    assert not any(key.startswith("held_out") for row in history(runs, "never") for key in row)
    assert report.read_summary(folder)["figures"] == {} and not report.answers(folder)
    assert [row["loss"] for row in history(runs, "never")] == [row["loss"] for row in history(runs, "whole")[:2]]
    whole = runs["folder"] / "whole"
    figures, costs, changes = report.table([folder, whole]).split("\n\n")
    assert (figures, changes) == tuple(report.table([whole]).split("\n\n")[::2])
    assert [line.split("|")[1].strip() for line in costs.splitlines()[2:]] == ["never", "whole"]
    report.draw([folder], tmp_path / "curve.png")


@pytest.mark.long
def test_two_ranks_learn_what_one_learns(runs):
    for one, two in zip(history(runs, "whole"), history(runs, "pair"), strict=True):
        assert (
            two["reward"] == pytest.approx(one["reward"], abs=1e-6) and two["trained_groups"] == one["trained_groups"]
        )
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


@pytest.mark.long
def test_batches_drawn_ahead_are_as_old_as_the_lag(runs):
    assert [row["staleness"] for row in history(runs, "far")] == [0.0, 1.0, 1.0]
    assert history(runs, "far")[-1]["kl"] > 0
    assert 0 < sum(row["staleness"] for row in history(runs, "partial")) <= 4


@pytest.mark.long
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


def test_an_answer_is_rewarded_if_it_commits_to_the_right_one(grpo):
    france, australia = (
        next(question for question in grpo.task.questions("facts") if question.answers == (answer,))
        for answer in ("Paris", "Canberra")
    )
    for text, finish_reason, reward in (
        ("Paris.", "stop", 1.0),
        ("The capital of France is Paris.", "stop", 1.0),
        ("Paris", "length", 0.5),
        ("The answer is that it is called Paris.", "stop", 0.5),
        ("Paris, which lies on the Seine", "length", 0.5),
        ("Paris or Lyon", "stop", 0.5),
        ("Lyon or Paris", "stop", 0.0),
        ("Paris Rome Tokyo", "stop", 0.0),
        ("Paris, Rome", "length", 0.0),
        ("Not Paris", "stop", 0.0),
        ("東京 Paris", "stop", 0.0),
        ("Paris is not the capital of France", "stop", 0.0),
        ("Paris isn't", "stop", 0.0),
        ("Parisian", "stop", 0.0),
        ("France", "stop", 0.0),
        ("", "stop", 0.0),
    ):
        assert grpo.task.reward(text, finish_reason, france) == reward, text
    assert grpo.task.reward("Canbérra", "stop", australia) == 1.0
    sum_ = grpo.task.questions("sums")[0]
    right = sum_.answers[0]
    for text, reward in ((f"{right}", 1.0), (f"{right}, 12", 0.0), (f"12 {right}", 0.0), (f"-{right}", 0.0)):
        assert grpo.task.reward(text, "stop", sum_) == reward, text
    orders = [[prompt["asked"] for prompt in grpo.task.batch("facts", 0, 8, seed)] for seed in range(2)]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("task", ["facts", "sums"])
def test_no_constant_answer_gets_what_the_untrained_model_gets(grpo, task):
    """The model's greedy answers are those of docs/results; their rewards are computed again."""
    questions = {question.text: question for question in grpo.task.questions(task)}
    lines = (ROOT / "docs" / "results" / "grpo" / f"{task}-seed0" / "answers.jsonl").read_text().splitlines()
    untrained = {row["question"]: row["before"] for row in map(json.loads, lines)}
    assert set(untrained) == set(questions)
    rewards = {asked: grpo.task.reward(text, why, questions[asked]) for asked, (text, why, _) in untrained.items()}
    assert rewards == {asked: reward for asked, (_, _, reward) in untrained.items()}

    def mean(text: str) -> float:
        return sum(grpo.task.reward(text, "stop", question) for question in questions.values()) / len(questions)

    words = sorted({answer for question in questions.values() for answer in question.answers})
    listed = [" ".join(words), ", ".join(words), " or ".join(words[:6])]
    templates = ("{}.", "Not {}", "The answer is {}.", "It is {}, of course.", "{0} or {0}")
    best = max((mean(word), word) for word in words)
    others = max(mean(template.format(best[1])) for template in templates)
    while True:  # as long as another word, before or after it, makes it better
        longer = max((mean(text), text) for word in words for text in (f"{best[1]} {word}", f"{word} {best[1]}"))
        if longer <= best:
            break
        best = longer
    assert max(best[0], others, *map(mean, listed)) < sum(rewards.values()) / len(rewards)


@pytest.mark.long
def test_the_table_compares_runs_and_a_missing_matplotlib_is_reported(runs, grpo, capsys, monkeypatch):
    report = importlib.import_module("grpo_report")
    figures, costs, changes = report.table([runs["folder"] / name for name in ("whole", "torch")]).split("\n\n")
    assert "| whole | torch | mean before | after |" in figures.splitlines()[0] and len(figures.splitlines()) == 18
    assert [line.split("|")[1].strip() for line in costs.splitlines()[2:]] == ["whole", "torch"]
    assert sum(int(cell) for line in changes.splitlines()[2:] for cell in line.split("|")[3:7]) == 2 * 10
    with pytest.raises(ConfigError, match="has no finished run"):
        report.table([runs["folder"]])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report.draw([runs["folder"] / "whole"], runs["folder"] / "curve.png")
    assert "pip install matplotlib" in capsys.readouterr().err


def test_the_page_of_results_shows_the_tables_of_its_runs(grpo):
    results = ROOT / "docs" / "results"
    page, report = (results / "grpo.md").read_text(), importlib.import_module("grpo_report")
    seeds = {task: sorted((results / "grpo").glob(f"{task}-seed[0-9]")) for task in ("facts", "sums")}
    for folders in seeds.values():
        assert len(folders) == 3 and all(part in page for part in report.table(folders).split("\n\n"))
    both_modes = [results / "grpo" / name for name in ("facts-seed0", "facts-seed0-normal")]
    assert report.table(both_modes).split("\n\n")[1] in page


@pytest.mark.long
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
