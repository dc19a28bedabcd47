"""Reports of a run of examples/grpo.py: seconds by kind, history, table, curve, wandb.

python examples/grpo_report.py run/seed0 run/seed1 ... --curve curve.png      a table and a plot of several runs
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import megatron_infer
from megatron_infer.debug.collect_env import collect
from megatron_infer.errors import ConfigError

KINDS = ("generate", "train", "switch")


class Stopwatch:
    """Seconds by kind: each `lap` adds the time since the last one to a kind."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*KINDS, "other"), 0.0)
        self._since = time.perf_counter()

    def lap(self, kind: str) -> None:
        now = time.perf_counter()
        self.seconds[kind] += now - self._since
        self._since = now

    def taken(self) -> dict[str, float]:
        """Seconds by kind since the last call."""
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return {f"{kind}_s": seconds for kind, seconds in taken.items()}


class Log:
    """A run's rows, written to history.jsonl. writer: a wandb run or None."""

    def __init__(self, folder: Path, rows: list[dict[str, float]], *, writer: Any = None) -> None:
        """rows: those of a resumed run so far."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rows, self._writer = folder, list(rows), writer
        self._file = folder / "history.jsonl"
        self._file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def add(self, row: dict[str, float]) -> None:
        self.rows.append(row)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self._writer is not None:
            self._writer.log(row, step=int(row["step"]))

    def finish(self, *, before: float, after: float, options: dict[str, Any]) -> None:
        """Write summary.json and curve.png, and end the wandb run."""
        total = {kind: sum(row[f"{kind}_s"] for row in self.rows) for kind in KINDS}
        summary = {
            "reward_before": before,
            "reward_after": after,
            "steps": len(self.rows),
            "seconds": total,
            "options": {name: str(value) for name, value in options.items()},
            "machine": machine(),
        }
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        draw([self.folder], self.folder / "curve.png")
        if self._writer is not None:
            self._writer.summary.update({"reward_before": before, "reward_after": after})
            self._writer.finish()


def line(row: dict[str, float]) -> str:
    """A step as a line for the console."""
    step_s = sum(row[f"{kind}_s"] for kind in KINDS)
    return (
        f"step {row['step']:3.0f}  reward {row['reward']:.3f}  right {row['right']:.2f}  length {row['length']:4.1f}  "
        f"ratio {row['ratio_mean']:.3f} ({row['ratio_outside']:.0%} outside 0.9..1.1)  "
        f"generate {row['generate_s']:.1f} s  train {row['train_s']:.1f} s  "
        f"switch {row['switch_s'] * 1e3:.0f} ms ({row['switch_s'] / step_s:.1%})"
    )


def machine() -> str:
    facts = {(fact.section, fact.name): fact.value for fact in collect()}
    cpu = facts.get(("cpu", "model"), "unknown CPU")
    versions = f"torch {torch.__version__}, megatron_infer {megatron_infer.__version__}"
    return f"{cpu}, {torch.get_num_threads()} threads, {versions}"


def open_wandb(args: argparse.Namespace) -> Any:
    """A wandb run; None with --wandb off."""
    if args.wandb == "off":
        return None
    import wandb

    config = {name: str(value) for name, value in vars(args).items()}
    return wandb.init(project="megatron-infer-grpo", mode=args.wandb, dir=args.out_dir, config=config)


def table(folders: list[Path]) -> str:
    """A Markdown table of runs."""
    lines = [
        "| run | reward before | after | times | generate s | train s | switch s | switch of a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    means = []
    for folder in folders:
        summary = read_summary(folder)
        before, after, seconds = summary["reward_before"], summary["reward_after"], summary["seconds"]
        means.append((before, after))
        lines.append(
            f"| {folder.name} | {before:.3f} | {after:.3f} | {after / before:.1f} | {seconds['generate']:.0f} | "
            f"{seconds['train']:.0f} | {seconds['switch']:.2f} | {seconds['switch'] / sum(seconds.values()):.2%} |"
        )
    if len(means) > 1:
        before, after = (sum(column) / len(means) for column in zip(*means, strict=True))
        lines.append(f"| mean | {before:.3f} | {after:.3f} | {after / before:.1f} | | | | |")
    return "\n".join(lines)


def read_summary(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{folder} has no finished run of examples/grpo.py: {error.strerror}") from error


def draw(folders: list[Path], path: Path) -> None:
    """Plot reward and seconds over the steps as a PNG; without matplotlib print a message."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{path} is not drawn: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for folder in folders:
        rows = [json.loads(text) for text in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()]
        steps = [row["step"] for row in rows]
        (drawn,) = left.plot(steps, [row["reward"] for row in rows], marker=".", label=folder.name)
        if folder == folders[0]:
            kinds = [[row[f"{kind}_s"] for row in rows] for kind in KINDS]
            right.stackplot(steps, kinds, labels=KINDS)
            right.set_title(f"seconds of a step, {folder.name}", fontsize=9)
        summary = folder / "summary.json"
        if summary.exists():
            values = read_summary(folder)
            ends = [values["reward_before"], values["reward_after"]]
            left.plot([steps[0] - 0.5, steps[-1] + 0.5], ends, "s", color=drawn.get_color(), fillstyle="none")
    left.set_title("mean reward (squares: all questions, before and after)", fontsize=9)
    left.set(xlabel="step", ylim=(0, 1.02))
    left.legend(fontsize=8)
    right.set(xlabel="step")
    right.legend(fontsize=8, loc="upper right")
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="--out-dir of finished runs")
    parser.add_argument("--curve", type=Path, help="write a PNG here")
    args = parser.parse_args()
    try:
        print(table(args.folders))
        print(f"\n{read_summary(args.folders[0])['machine']}")
        if args.curve is not None:
            draw(args.folders, args.curve)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
