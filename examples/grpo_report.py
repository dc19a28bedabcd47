"""Reports of a run of examples/grpo.py: seconds by kind, history, table, curve, wandb.

python examples/grpo_report.py run/seed0 run/seed1 ... --curve curve.png      a table and a plot of several runs
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

import megatron_infer
from megatron_infer.cli.collect_env import collect
from megatron_infer.errors import ConfigError

KINDS = ("generate", "train", "switch")
SETS = ("train", "held_out")
DECODINGS = ("greedy", "sampled")
FIGURES = ("reward", "right", "form", "length")
COSTS = ("run", "exact", "generate s", "train s", "switch s", "tokens trained on", "ratio outside 0.9 to 1.1")
COSTS += ("1 % to 99 % of a step's tokens", "all tokens")
CHANGES = ("run", "greedy answers", "right before and after", "only before", "only after", "never")
SPREADS = (("ratio_q01", "ratio_q99"), ("ratio_min", "ratio_max"))
COLORS = {
    ("train", "greedy"): "tab:cyan",
    ("held_out", "greedy"): "tab:red",
    ("held_out", "sampled"): "tab:orange",
}


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

    def finish(self, *, before: dict[str, Any], after: dict[str, Any], options: dict[str, Any]) -> None:
        """before, after: figures of each set by each decoding, with the greedy answers, which become answers.jsonl; {}
        where nothing was evaluated."""
        total = {kind: sum(row[f"{kind}_s"] for row in self.rows) for kind in KINDS}
        figures = {name: {"before": before[name], "after": after[name]} for name in before}
        content = {
            "figures": each_figure(figures),
            "steps": len(self.rows),
            "seconds": total,
            "process": {
                "cpu_s": time.process_time(),
                "elapsed_s": time.time() - psutil.Process().create_time(),
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            },
            "options": {name: str(value) for name, value in options.items() if name != "out_dir"},
            "machine": machine(),
        }
        (self.folder / "summary.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        rows = [
            {"set": name, "question": old[0], "before": old[1:], "after": new[1:]}
            for name in before
            for old, new in zip(before[name]["greedy"]["answers"], after[name]["greedy"]["answers"], strict=True)
        ]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (self.folder / "answers.jsonl").write_text(lines, encoding="utf-8")
        draw([self.folder], self.folder / "curve.png")
        if self._writer is not None:
            self._writer.summary.update(content["figures"])
            self._writer.finish()


def each_figure(figures: dict[str, Any]) -> dict[str, float]:
    """{"held_out": {"before": {"greedy": {"reward": ...}}}} -> {"held_out/before/greedy/reward": ...}."""
    return {
        "/".join((name, when, how, figure)): found[how][figure]
        for name, times in figures.items()
        for when, found in times.items()
        for how in DECODINGS
        for figure in FIGURES
    }


def summary(found: dict[str, Any]) -> str:
    """Mean rewards as a line for the console."""
    parts = (f"{label(name)} {found[name][how]['reward']:.3f} {how}" for name in SETS for how in DECODINGS)
    return f"mean reward {', '.join(parts)}"


def label(name: str) -> str:
    return name.replace("_", "-")


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
    """Markdown tables of runs: figures before and after of those that evaluate, then seconds and importance ratios."""
    found = {folder.name: read_summary(folder) for folder in folders}
    evaluated = {name: run for name, run in found.items() if run["figures"]}
    lines = [
        f"| questions | decoding | figure | {' | '.join(evaluated)} | mean before | after |",
        "|---" * (len(evaluated) + 5) + "|",
    ]
    for name, how, figure in itertools.product(SETS if evaluated else (), DECODINGS, FIGURES):
        pairs = [
            [run["figures"][f"{name}/{when}/{how}/{figure}"] for when in ("before", "after")]
            for run in evaluated.values()
        ]
        means = [sum(column) / len(pairs) for column in zip(*pairs, strict=True)]
        digits = 1 if figure == "length" else 3
        cells = [f"{before:.{digits}f} → {after:.{digits}f}" for before, after in pairs]
        cells += [f"{mean:.{digits}f}" for mean in means]
        lines.append(f"| {label(name)} | {how} | {figure} | {' | '.join(cells)} |")
    lines += ["", f"| {' | '.join(COSTS)} |", "|---" * len(COSTS) + "|"]
    for folder in folders:
        run, seconds, rows = found[folder.name], found[folder.name]["seconds"], history(folder)
        tokens = sum(row["num_tokens"] for row in rows)
        outside = sum(row["ratio_outside"] * row["num_tokens"] for row in rows) / max(1.0, tokens)
        cells = [folder.name, run["options"]["exact"], *(f"{seconds[kind]:.0f}" for kind in KINDS[:2])]
        cells += [f"{seconds['switch']:.2f} ({seconds['switch'] / sum(seconds.values()):.2%})"]
        cells += [f"{tokens:.0f}", f"{outside:.2%}"]
        cells += [
            f"{min(row[low] for row in rows):.3f} to {max(row[high] for row in rows):.3f}" for low, high in SPREADS
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"| {' | '.join(CHANGES)} |", "|---" * len(CHANGES) + "|"]
    for folder, name in itertools.product([folder for folder in folders if folder.name in evaluated], SETS):
        pairs = [(row["before"][2] > 0, row["after"][2] > 0) for row in answers(folder) if row["set"] == name]
        counts = [pairs.count(change) for change in itertools.product((True, False), repeat=2)]
        lines.append(f"| {folder.name} | {label(name)} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def answers(folder: Path) -> list[dict[str, Any]]:
    """Greedy answers to all questions, before and after: [text, finish reason, reward]."""
    return [json.loads(text) for text in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()]


def history(folder: Path) -> list[dict[str, float]]:
    """The rows of a run, one for each step."""
    return [json.loads(text) for text in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()]


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

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6), constrained_layout=True)
    rewards, spread, seconds = axes
    for number, folder in enumerate(folders):
        rows, shade = history(folder), 1.0 if len(folders) == 1 else 0.6
        steps = [row["step"] for row in rows]
        named = {"label": "train, samples"} if number == 0 else {}
        rewards.plot(steps, [row["reward"] for row in rows], color="tab:blue", alpha=shade, lw=1, **named)
        for (name, how), color in COLORS.items():
            held_out = [(row["step"] + 1, row[f"held_out_{how}"]) for row in rows if f"held_out_{how}" in row]
            points = held_out if name == "held_out" else []
            figures = read_summary(folder)["figures"] if (folder / "summary.json").exists() else {}
            if figures:
                ends = [figures[f"{name}/{when}/{how}/reward"] for when in ("before", "after")]
                points = [(0, ends[0]), *points, (steps[-1] + 1, ends[1])]
            named = {"label": f"{label(name)}, {how}"} if number == 0 else {}
            marker = "s--" if how == "greedy" else "o-"
            at, values = [step for step, _ in points], [reward for _, reward in points]
            rewards.plot(at, values, marker, color=color, alpha=shade, ms=4, lw=1.2, **named)
        low, high = ([row[f"ratio_{end}"] for row in rows] for end in ("q01", "q99"))
        spread.fill_between(steps, low, high, alpha=0.2, color=f"C{number}")
        spread.plot(steps, low, color=f"C{number}", lw=1.2, label=folder.name)
        spread.plot(steps, high, color=f"C{number}", lw=1.2)
    kinds = [[row[f"{kind}_s"] for row in history(folders[0])] for kind in KINDS]
    seconds.stackplot(range(len(kinds[0])), kinds, labels=KINDS)
    seconds.set_title(f"seconds of a step, {folders[0].name}", fontsize=9)
    rewards.set_title("mean reward", fontsize=9)
    rewards.set(xlabel="updates", ylim=(0, 1.02))
    spread.set_title("importance ratio, 1 % to 99 % of the tokens", fontsize=9)
    for axis in axes:
        axis.set_xlabel("updates")
        axis.legend(fontsize=7)
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
