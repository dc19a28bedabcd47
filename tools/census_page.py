"""What the censuses of models and of layouts share: outcomes, tables, and pages that are renewed or compared."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SAME = 1e-4
"""Largest difference of log probabilities from the model's own forward."""


def figure(value: float) -> str:
    """A difference rounded up to a power of ten: what another CPU gives too."""
    power = next((power for power in range(8, 0, -1) if value <= 10.0**-power), 0)
    return "0" if value < 1e-9 else f"1e-{power}" if power else f"{value:.1f}"


@dataclass
class Outcome:
    """What one way to the answers gave. reason: why it is refused, or what went wrong."""

    kind: str = "failed"
    reason: str = ""
    difference: float = 0.0
    tokens_wrong: int = 0
    checks: dict[str, bool] = field(default_factory=dict)
    meter: float | None = None
    """The largest difference that the mismatch meter saw, where it was asked."""

    def __str__(self) -> str:
        if self.kind != "served":
            return self.kind
        wrong = [name for name, is_kept in self.checks.items() if not is_kept]
        wrong += [f"{self.tokens_wrong} tokens"] if self.tokens_wrong else []
        figures = [figure(one) for one in (self.difference, self.meter) if one is not None]
        return " / ".join(figures) + (f" wrong: {', '.join(wrong)}" if wrong else "")

    @property
    def holds(self) -> bool:
        return self.kind == "served" and self.difference <= SAME and not self.tokens_wrong and all(self.checks.values())

    def add(self, log_probs_TV: Any, ids: list[int], logprobs: Iterable[float]) -> None:
        """Add an engine's answer to the log probabilities of a forward that was given the same tokens."""
        for at, id, logprob in zip(log_probs_TV, ids, logprobs, strict=True):
            self.difference = max(self.difference, abs(at[id].item() - logprob))
            self.tokens_wrong += int(at.argmax()) != id and (at.max() - at[id]).item() > SAME


def tried(run: Callable[[], Any], *, folder: Path) -> tuple[Any, Outcome]:
    """(what `run` gives, or None and the outcome with the reason): a refusal is an error of the package's own."""
    from megatron_infer.errors import InferenceError

    try:
        return run(), Outcome()
    except Exception as error:
        is_refused = isinstance(error, InferenceError)
        text = f"{'' if is_refused else type(error).__name__ + ': '}{error}".replace(f"{folder}: ", "")
        text = text.replace(str(folder), "DIRECTORY")
        if os.environ.get("CENSUS_TRACEBACK"):
            traceback.print_exc()
        return None, Outcome(kind="refused" if is_refused else "failed", reason=" ".join(text.split()))


def table_of(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)]


def reasons(outcomes: Iterable[tuple[str, Outcome]]) -> list[str]:
    """A line for each reason, with the names of those that it keeps out."""
    named: dict[str, list[str]] = {}
    for name, outcome in outcomes:
        if outcome.reason:
            named.setdefault(outcome.reason, []).append(name)
    return [f"* {', '.join(names)}: {reason}" for reason, names in named.items()]


def masked(page: str) -> str:
    """A page without the figures that differ from CPU to CPU; the sums say which of them are small enough to count."""
    small = "(?:0|1e-[3-9])"
    return re.sub(rf"\| {small}(?: / {small})? (?=\|)", "| same ", page)


def add_arguments(parser: argparse.ArgumentParser, page: Path) -> None:
    parser.add_argument("--write", action="store_true", help=f"renew {page.relative_to(page.parents[1])}")
    parser.add_argument("--check", action="store_true", help="compare with that page or its rows that were asked for")


def finish(options: argparse.Namespace, path: Path, page: str, *, only_rows: tuple[str, ...] | None = None) -> int:
    """Print the page, renew or compare it as asked -> the exit code. only_rows: how the rows begin that were run, where
    not all were."""
    print("\n" + page)
    if options.write:
        path.write_text(page)
    if not options.check:
        return 0
    committed, now = (masked(text).splitlines() for text in (path.read_text(), page))
    if only_rows is not None:
        committed, now = ([line for line in text if line.startswith(only_rows)] for text in (committed, now))
    difference = list(difflib.unified_diff(committed, now, "committed", "now", lineterm=""))
    print("\n".join(difference))
    return int(bool(difference))
