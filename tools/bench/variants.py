"""Variants of one thing, measured in turns: rates, times and CPU times of each, and their ratios to the first variant.

    python tools/bench/variants.py kinds [--rounds 5]     one case of the table
    python tools/bench/variants.py --help                 all cases
    python tools/bench/variants.py kinds --help           the options of a case

A round runs every variant once, and the next round begins with the other end of the list. The first round warms up.
Figures are medians of the rounds, with the least and the most in brackets. A ratio is the median over the rounds of a
variant's time divided by the first variant's.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "tools" / "bench", ROOT / "tests" / "support"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from megatron_infer.utils.openmp import limit_spinning

limit_spinning()  # before torch is imported

# ruff: noqa: E402
import argparse
import importlib
import json
import os
import statistics

from cases.case import Case, Clock, Done, Measure

from megatron_infer.utils.host import cpu_name

CASES = {
    "moves": "moves",
    "latent-prompts": "latent",
    "chosen-keys": "latent",
    "kinds": "kinds",
    "tinker": "tinker",
}
"""Case -> its module in tools/bench/cases."""


def load(name: str) -> Case:
    case: Case = importlib.import_module(f"cases.{CASES[name]}").CASES[name]
    return case


def parse_args() -> tuple[Case, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subparsers = parser.add_subparsers(dest="case", metavar="CASE", required=True)
    asked = next((text for text in sys.argv[1:] if text in CASES), None)
    for name in CASES if asked is None else [asked]:
        case = load(name)
        about = case.about.splitlines()[0]
        sub = subparsers.add_parser(
            name, help=about, description=case.about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        sub.add_argument("--rounds", type=int, default=case.rounds, help="default: %(default)s")
        sub.add_argument("--json", type=Path, metavar="FILE", help="write all figures of all rounds")
        for option, default in case.options.items():
            flag = "--" + option.replace("_", "-")
            if isinstance(default, bool):
                sub.add_argument(flag, action="store_true")
            else:
                sub.add_argument(flag, type=type(default), default=default, help="default: %(default)s")
    args = parser.parse_args()
    return load(args.case), args


def run_rounds(measures: list[Measure], rounds: int) -> list[dict[str, list[tuple[Clock, Done]]]]:
    """For each measure and variant, the clock and the result of each round; a round before them warms up."""
    found: list[dict[str, list[tuple[Clock, Done]]]] = [{name: [] for name in one.variants} for one in measures]
    for index in range(rounds + 1):
        for one, taken in zip(measures, found, strict=True):
            names = list(one.variants)
            for name in names if index % 2 else names[::-1]:
                print(f"round {index} of {rounds}: {one.what}: {name}", file=sys.stderr)
                clock = Clock()
                done = one.variants[name](clock)
                assert clock.seconds > 0, f"{name} has not run its clock"
                if index:
                    taken[name].append((clock, done))
    return found


def rows_of(measure: Measure, taken: dict[str, list[tuple[Clock, Done]]]) -> list[dict[str, object]]:
    """A row for each variant."""
    first = next(iter(taken.values()))
    rows: list[dict[str, object]] = []
    for name, ones in taken.items():
        figures = ones[0][1].figures
        pairs = [(mine, theirs) for (mine, _), (theirs, _) in zip(ones, first, strict=True)]
        rows.append(
            {
                "measure": measure.what,
                "variant": name,
                "per_s": [done.count / clock.seconds for clock, done in ones],
                "seconds": [clock.seconds / done.count for clock, done in ones],
                "cpu_seconds": [clock.cpu_seconds / done.count for clock, done in ones],
                "time_ratio": [mine.seconds / theirs.seconds for mine, theirs in pairs],
                "cpu_ratio": [mine.cpu_seconds / theirs.cpu_seconds for mine, theirs in pairs if theirs.cpu_seconds],
                "figures": {key: statistics.median(done.figures[key] for _, done in ones) for key in figures},
            }
        )
    return rows


def duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds * 1e9:,.3g} ns"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show(measure: Measure, rows: list[dict[str, object]]) -> None:
    width = max(len(str(row["variant"])) for row in rows)
    print(f"\n{measure.what}")
    for row in rows:
        values = {key: value for key, value in row.items() if isinstance(value, list) and value}
        middle = {key: statistics.median(value) for key, value in values.items()}
        rates = values["per_s"]
        rate = f"{number(middle['per_s'])} {measure.unit}s/s ({number(min(rates))} to {number(max(rates))})"
        times = f"{duration(middle['seconds'])} a {measure.unit}, CPU {duration(middle['cpu_seconds'])}"
        ratios = (
            f"time {middle['time_ratio']:.3g}x ({min(values['time_ratio']):.3g} to {max(values['time_ratio']):.3g})"
        )
        if "cpu_ratio" in middle:
            ratios += f", CPU {middle['cpu_ratio']:.3g}x"
        print(f"  {row['variant']:<{width}}  {rate:<40} {times:<36} {ratios}")
        figures = row["figures"]
        assert isinstance(figures, dict)
        if figures:
            print(f"  {'':<{width}}  " + "; ".join(f"{key} {number(value)}" for key, value in figures.items()))


def main() -> None:
    case, args = parse_args()
    options = {name: getattr(args, name) for name in case.options}
    shown = ", ".join(f"{name} {value}" for name, value in options.items())
    print(f"{args.case}: {shown}; {args.rounds} rounds; {cpu_name()}, load average {os.getloadavg()[0]:.0f}")
    rows = []
    with case.prepare(args) as measures:
        found = run_rounds(measures, args.rounds)
        for measure, taken in zip(measures, found, strict=True):
            rows.append(rows_of(measure, taken))
            show(measure, rows[-1])
    if args.json is not None:
        flat = [row for of_measure in rows for row in of_measure]
        args.json.write_text(json.dumps({"case": args.case, "options": options, "rows": flat}, indent=1) + "\n")


if __name__ == "__main__":
    main()
