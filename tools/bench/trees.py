"""Two checkouts of this project, measured in turns: what a change costs the shapes that it does not name.

    git worktree add ../before 8d7f8caf
    python tools/bench/trees.py ../before . [--model smollm2] [--rounds 8] [--processes 5] [--dtype float32]

Each tree has a process of its own with one thread, on one core for both. The processes work in turns of a fraction of a
second, so that what else the machine does meets both. A round is before, after, after, before. Where a process has its
memory makes a percent: figures are of several pairs of processes. A ratio is the median over the pairs of a pair's
median of CPU time after divided by CPU time before, with the least and the most of the pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

PROMPT_TOKENS, PREFILL_TOKENS = 32, 512


def work(model: str, dtype: str) -> None:
    """In one tree: runs the case that a line of stdin names and writes the CPU seconds of it."""
    sys.path.insert(0, os.getcwd())
    begin = time.process_time()
    from megatron_infer import LLM, InferenceConfig, SamplingParams

    imported = time.process_time() - begin
    llm = LLM(model, config=InferenceConfig(enable_prefix_caching=False, buffer_size_gb=1), dtype=dtype)
    numbers = random.Random(0)

    def generate(prompts: int, prompt_tokens: int, max_tokens: int) -> None:
        ids: Any = [[numbers.randrange(1000, 20000) for _ in range(prompt_tokens)] for _ in range(prompts)]
        llm.generate(ids, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))

    cases: dict[str, Callable[[], None]] = {
        "single": lambda: generate(1, PROMPT_TOKENS, 24),
        "16 at once": lambda: generate(16, PROMPT_TOKENS, 8),
        "prefill": lambda: generate(1, PREFILL_TOKENS, 1),
    }
    print(json.dumps({"import": imported, "cases": list(cases)}), flush=True)
    for line in sys.stdin:
        begin = time.process_time()
        cases[line.strip()]()
        print(json.dumps(time.process_time() - begin), flush=True)


class Tree:
    """A process that works in one checkout."""

    def __init__(self, root: Path, args: argparse.Namespace) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        command = [sys.executable, str(Path(__file__).resolve()), "--work", args.model, args.dtype]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            ["taskset", "-c", str(args.core), *command], cwd=root, env=environment, stdin=pipe, stdout=pipe, text=True
        )
        self.first = self.read()

    def read(self) -> Any:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line[0] in "{0123456789":
                return json.loads(line)
        raise SystemExit(f"the process of a tree ended with {self.process.wait()}")

    def run(self, case: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        seconds: float = self.read()
        return seconds

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--core", type=int, default=0)
    args = parser.parse_args()
    rounds: dict[str, list[list[tuple[float, float]]]] = {}
    for _ in range(args.processes):
        for case, measured in run_pair(args).items():
            rounds.setdefault(case, []).append(measured)
    for case, pairs in rounds.items():
        ratios = [statistics.median(new / old for old, new in pair) for pair in pairs]
        old, new = (statistics.median(column) * 1e3 for column in zip(*chain(*pairs), strict=True))
        low, high = min(ratios), max(ratios)
        print(f"{case:12} {old:8.1f} ms -> {new:8.1f} ms  {statistics.median(ratios):.4f}x ({low:.4f} to {high:.4f})")


def run_pair(args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Case -> CPU seconds before and after of each round, by one process a tree. Case "import" has one round."""
    before, after = trees = [Tree(root.resolve(), args) for root in (args.before, args.after)]
    rounds = {"import": [(before.first["import"], after.first["import"])]}
    for case in after.first["cases"]:
        turns = [[tree.run(case) for tree in (before, after, after, before)] for _ in range(args.rounds + 1)]
        rounds[case] = [((a + d) / 2, (b + c) / 2) for a, b, c, d in turns[1:]]
    for tree in trees:
        tree.end()
    return rounds


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        main()
