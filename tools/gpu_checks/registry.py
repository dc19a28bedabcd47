"""What a check is, what it gives, and the list of all of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

GROUPS: dict[str, str] = {
    "attention": "gpu_checks.attention",
    "fp8": "gpu_checks.fp8",
    "fp8 products": "gpu_checks.fp8_products",
    "scan": "gpu_checks.scan",
    "operations": "gpu_checks.operations",
    "sampling": "gpu_checks.sampling",
    "models": "gpu_checks.models",
    "graphs": "gpu_checks.graphs",
    "sync": "gpu_checks.sync",
    "memory": "gpu_checks.memory",
    "backends": "gpu_checks.backends",
    "speed": "gpu_checks.speed",
}
"""Group -> module that registers its checks, in the order of reports."""
OK, FAILED, SKIPPED = "ok", "failed", "skipped"


class Unavailable(Exception):
    """Raised by a check that cannot be made here; says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that is wished for: missing it is reported, and is not a failure."""

    name: str
    figure: float
    wanted: float
    unit: str = ""
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.figure >= self.wanted if self.at_least else self.figure <= self.wanted

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "target met" if self.met else "TARGET NOT MET"
        return f"{self.name}: {self.figure:.4g} {self.unit} ({sign} {self.wanted:g} wanted): {verdict}"


@dataclass(slots=True)
class Result:
    """What one check found."""

    status: str
    figure: str = ""
    tolerance: str = ""
    reason: str = ""
    """Why it failed or was skipped."""
    targets: list[Target] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    """JSON values: single measurements."""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"targets": [asdict(target) | {"met": target.met} for target in self.targets]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Result:
        names = ("name", "figure", "wanted", "unit", "at_least")
        targets = [Target(**{name: target[name] for name in names}) for target in values["targets"]]
        return cls(**{**values, "targets": targets})


class Comparison:
    """Collects differences of many cases, each against its tolerance, and makes one result of them."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._worst: tuple[float, str, float, float] = (-1.0, "nothing was compared", 0.0, 0.0)
        self._wrong: list[str] = []
        self.num_cases = 0
        self.figure = ""
        """What was found, where that is not the largest difference."""
        self.targets: list[Target] = []

    def add(self, label: str, error: float, tolerance: float) -> None:
        """One case; an error that is NaN is wrong."""
        self.num_cases += 1
        share = error / tolerance if tolerance else float(error > 0) * 2
        if not error <= tolerance:
            self._wrong.append(f"{label}: {error:.3g} > {tolerance:.3g}")
        if share > self._worst[0] or share != share:
            self._worst = (share, label, error, tolerance)

    def require(self, label: str, holds: bool) -> None:
        """One case that is right or wrong."""
        self.num_cases += 1
        if not holds:
            self._wrong.append(label)

    def result(self, details: Mapping[str, Any]) -> Result:
        _, label, error, tolerance = self._worst
        figure = f"{self.num_cases} cases"
        if tolerance or error:
            figure += f", {self._what} at most {error:.2e} ({label})"
        shown = f"{tolerance:.0e}" if tolerance else "exact" if self.num_cases else ""
        if not self.num_cases and not self.figure:
            return Result(FAILED, reason="nothing was compared")
        if self._wrong:
            more = f" and {len(self._wrong) - 4} more" if len(self._wrong) > 4 else ""
            reason = "; ".join(self._wrong[:4]) + more
            return Result(FAILED, figure, shown, reason, details={**details, "wrong": self._wrong})
        return Result(OK, self.figure or figure, shown, targets=self.targets, details=dict(details))


@dataclass(frozen=True, slots=True)
class Check:
    """One promise and the function that holds the device to it."""

    name: str
    promise: str
    function: Callable[[Any, Comparison], Mapping[str, Any] | None]
    budget_s: float
    """What it should take at most on one GPU; it is stopped after several times that."""
    what: str = "difference"
    """What its cases are compared by."""
    long: bool = False
    """Left out by --quick."""
    alone: bool = False
    """It fills the device's memory or measures it: nothing else may run there meanwhile."""
    group: str = ""

    def __call__(self, ctx: Any) -> Result:
        """The function adds cases to a `Comparison` -> the result, with what the function returns as details.

        Raises Unavailable where it cannot be made; anything else that it raises is a failure.
        """
        compare = Comparison(self.what)
        details = self.function(ctx, compare)
        return compare.result(details or {})


_CHECKS: dict[str, dict[str, Check]] = {}
"""Module -> its checks by name."""


Function = Callable[[Any, Comparison], Mapping[str, Any] | None]


def add_check(module: str, name: str, promise: str, function: Function, **more: Any) -> Check:
    """Register a check of a module. more: fields of `Check`."""
    if any(name in registered for registered in _CHECKS.values()):
        raise ValueError(f"two checks are called {name}")
    made = _CHECKS.setdefault(module, {})[name] = Check(name, promise, function, **more)
    return made


def check(**more: Any) -> Callable[[Function], Check]:
    """Register a function: its name is the check's, the first paragraph of its docstring the promise."""

    def register(function: Function) -> Check:
        promise = " ".join((function.__doc__ or "").split("\n\n")[0].split())
        return add_check(function.__module__, function.__name__, promise, function, **more)

    return register


def load(groups: Mapping[str, str]) -> list[Check]:
    """All checks of these groups, in order."""
    checks = []
    for group, module in groups.items():
        importlib.import_module(module)
        if module not in _CHECKS:
            raise ValueError(f"{module} registers no check")
        checks += [replace(one, group=group) for one in _CHECKS[module].values()]
    return checks


def never_run(checks: Sequence[Check], reports: Sequence[Mapping[str, Any]]) -> list[Check]:
    """The checks whose outcome, good or bad, is in no report of a GPU."""
    outcomes = {
        row["name"]
        for report in reports
        if not report["rehearsal"]
        for row in report["checks"]
        if row["status"] != SKIPPED
    }
    return [one for one in checks if one.name not in outcomes]


def not_yet(checks: Sequence[Check]) -> str:
    """The checks as docs/cuda_checks.md lists them: one line a group."""
    names: dict[str, list[str]] = {}
    for one in checks:
        names.setdefault(one.group, []).append(one.name)
    return "\n".join(f"{group}: {', '.join(members)}" for group, members in names.items())
