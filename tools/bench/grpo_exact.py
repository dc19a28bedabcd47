"""What exact mode costs a GRPO step: examples/grpo.py's rollouts and update with and without it, interleaved.

python tools/bench/grpo_exact.py [--rounds 3] [--task facts|sums]

Every group is trained on, at learning rate 0, so that both have the same weights and train on the same answers.
"""

from __future__ import annotations

from megatron_infer.utils.openmp import limit_spinning

limit_spinning()  # before torch is imported

# ruff: noqa: E402
import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import grpo
import grpo_task
from grpo_options import options

PHASES = ("generate", "train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--task", default="facts")
    asked = parser.parse_args()
    args = options(None, ["--lr", "0", "--task", asked.task])
    sides = {}
    for mode in ("normal", "exact"):
        args.exact = mode == "exact"
        sides[mode] = grpo.set_up(args, first_step=0)
    found: dict[tuple[str, str], list[tuple[float, float]]] = {(phase, mode): [] for phase in PHASES for mode in sides}
    for round_ in range(asked.rounds + 1):  # the first is warm-up
        count = args.prompts_per_step
        prompts, params = grpo_task.batch(args.task, round_, count, 0), grpo.sampling(args, round_, count)
        groups = []
        for mode, (session, _, _) in sides.items():
            with session.generating() as roll:
                began = time.perf_counter(), time.process_time()
                groups = roll.generate(prompts, params)
                found["generate", mode].append(since(began))
        for group in groups:
            for number, sample in enumerate(group.samples):
                sample.reward = float(number % 2)
        for mode, (session, trainer, reference) in sides.items():
            with session.training():
                began = time.perf_counter(), time.process_time()
                grpo.train_on(session, trainer, groups, args, reference)
                found["train", mode].append(since(began))
            session.update_weights()
    print(
        f"{torch.get_num_threads()} threads, medians of {asked.rounds} rounds of {count} x {args.group_size} answers, s"
    )
    for place, clock in enumerate(("elapsed", "CPU")):
        medians = {key: statistics.median(pair[place] for pair in pairs[1:]) for key, pairs in found.items()}
        for phase in PHASES:
            normal, exact = medians[phase, "normal"], medians[phase, "exact"]
            print(f"{clock:<8} {phase:<9} normal {normal:6.2f}  exact {exact:6.2f}  {exact / normal:.2f}x")
        normal, exact = (sum(medians[phase, mode] for phase in PHASES) for mode in sides)
        print(f"{clock:<8} {'both':<9} normal {normal:6.2f}  exact {exact:6.2f}  {exact / normal:.2f}x")


def since(began: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - began[0], time.process_time() - began[1]


if __name__ == "__main__":
    main()
