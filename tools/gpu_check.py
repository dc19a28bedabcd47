"""Everything that can only be known on a GPU, in one command: parity, graphs, waiting, memory, speed.

    python tools/gpu_check.py [--quick] [--out report.json]      a GPU; no network, no model files, 8 minutes
    python tools/gpu_check.py --rehearse                         a CPU: every line of it, at tiny shapes
    python tools/gpu_check.py --list                             what no report under docs/results has told of yet

One line a check: ok, FAILED or skipped, what was found, the tolerance it was held to. Exits 1 if a check failed; a
target of speed that is missed is reported and fails nothing. --out writes JSON, and Markdown next to it, after
each check: a run that is killed leaves what it had found. A further run with the same FILE, commit and GPU keeps what
was ok and runs the rest. Needs torch, triton, numpy, msgspec and megatron-core. Under NVIDIA's
memory checker: compute-sanitizer --target-processes all python tools/gpu_check.py --group attention --patience 50
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CASES = tuple(f"tests/{name}" for name in ("kernels", "models/lora", "runner/sampling", "support"))
"""Where the cases are that checks and tests share."""
for folder in (ROOT, *(ROOT / name for name in ("tools", "tools/bench", *CASES))):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from gpu_checks import interpreter, report, worker
from gpu_checks.registry import FAILED, GROUPS, SKIPPED, Check, Result, load, never_run, not_yet

Rows = list[tuple[Check, Result]]
REPORTS = ROOT / "docs" / "results"
TIME_LIMIT_S = 460.0
"""With ending and the report under 8 minutes."""
ALONE = ("memory", "speed", "sync")
"""Groups that have the device to themselves; the others share it, each check in a process of its own."""
ORDER = ("attention", "models", "graphs", "sampling", "scan", "operations", *ALONE)
"""Groups in the order in which they are begun, others after them: whether the engine is right at all, then whether
steps are captured. Checks that have the device to themselves come after those that share it."""
SHARE_FIRST = 0.5
"""Share of the time limit for the checks that share the device; those that run alone have the rest of it."""
MOST_JOBS = 6


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="leave out the long checks, speed above all")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="write a report here, and one in Markdown next to it"
    )
    parser.add_argument("--list", action="store_true", help="print what has never been run on a GPU")
    parser.add_argument("--rehearse", action="store_true", help="run every check on the CPU at tiny shapes")
    parser.add_argument("--only", action="append", metavar="NAME", help="checks whose name contains this")
    parser.add_argument("--group", action="append", metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--patience", type=float, default=worker.PATIENCE, help="times its budget a check may take")
    parser.add_argument(
        "--time-limit", type=float, default=TIME_LIMIT_S, metavar="SECONDS", help="what runs then is stopped"
    )
    parser.add_argument("--jobs", type=int, help="checks at a time; 0: all in one process (a rehearsal's default)")
    parser.add_argument("--checks", action="append", metavar="GROUP=MODULE", help="other groups than the tool's own")
    parser.add_argument("--worker", nargs="*", metavar="NAME", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def chosen(checks: Sequence[Check], options: argparse.Namespace) -> list[Check]:
    """Those that were asked for."""
    return [
        one
        for one in checks
        if (not options.group or one.group in options.group)
        and (not options.only or any(part in one.name for part in options.only))
        and not (options.quick and one.long)
    ]


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """A worker's environment. One thread in a rehearsal; the interpreter must be asked for before kernels exist."""
    environment = dict(os.environ) | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else every process starts one helper a core
    environment.pop("TRITON_INTERPRET", None)
    if options.rehearse:
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return environment


def run(checks: Sequence[Check], options: argparse.Namespace, keep: Callable[[Rows], None] = lambda rows: None) -> Rows:
    """Run them, a line each as they end; `keep` is given all there is each time."""
    rows: dict[str, tuple[Check, Result]] = {}
    lock = threading.Lock()

    def ordered() -> Rows:
        return [rows[one.name] for one in checks if one.name in rows]

    def tell(check: Check, result: Result) -> None:
        with lock:
            rows[check.name] = check, result
            print(report.line_of(check, result), flush=True)
            keep(ordered())

    def command(names: Sequence[str]) -> list[str]:
        switches = [f"--{name}" for name in ("quick", "rehearse") if getattr(options, name)]
        planted = [part for given in options.checks or () for part in ("--checks", given)]
        return [sys.executable, str(Path(__file__).resolve()), *switches, *planted, "--worker", *names]

    start = time.monotonic()
    deadline = start + options.time_limit
    jobs = options.jobs if options.jobs is not None else default_jobs(options.rehearse)

    def run_unit(unit: Sequence[Check], hear: Callable[[Check, Result], None] = tell) -> None:
        worker.run_group(unit, command, environment_of(options), hear, deadline=deadline, patience=options.patience)

    crowded: list[Check] = []

    def unless_crowded(check: Check, result: Result) -> None:
        """What had no memory next to others is run again without them."""
        crowded.append(check) if result.reason.startswith(worker.NO_ROOM) else tell(check, result)

    def together(some: Sequence[Check], until: float) -> list[Check]:
        """Run them several at a time; those that had not begun by `until`."""
        late: list[Check] = []

        def one_of(check: Check) -> None:
            run_unit([check], unless_crowded) if time.monotonic() < until else late.append(check)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one_of, some))
        return late

    in_order = sorted(checks, key=lambda one: ORDER.index(one.group) if one.group in ORDER else len(ORDER))
    if not jobs:
        run_unit(in_order)
        return ordered()
    alone = [one for one in in_order if one.alone or one.group in ALONE]
    others = [one for one in in_order if one not in alone]
    late = together(others, start + SHARE_FIRST * options.time_limit if alone else deadline)
    for _, group in itertools.groupby(alone, key=lambda one: one.group):
        run_unit(list(group))
    for one in together(late, deadline):
        tell(one, Result(SKIPPED, reason=worker.NO_TIME))
    run_unit(crowded)
    return ordered()


def default_jobs(rehearse: bool) -> int:
    """Checks at a time: most of their time goes into compiling kernels. 0: all in one process, one after the other."""
    return 0 if rehearse else max(1, min(MOST_JOBS, (os.cpu_count() or 2) // 2))


def has_gpu() -> bool:
    import torch  # takes a second, which --list and a mistyped name need not wait for

    return torch.cuda.is_available()


def _end(number: int, frame: Any) -> None:
    """SIGTERM: no check goes on alone on the device; what had been found is written already."""
    worker.stop_all()
    os._exit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    groups = dict(given.split("=", 1) for given in options.checks) if options.checks else GROUPS
    if options.worker is not None and options.rehearse:
        worker.refuse_absent()
    checks = load(groups)
    if options.worker is not None:
        from gpu_checks.context import make_context

        if options.rehearse:
            interpreter.quicken()
        named = {one.name: one for one in checks}
        wanted = [named[name] for name in options.worker]
        worker.work(wanted, lambda: make_context(rehearse=options.rehearse, quick=options.quick))
    if options.list:
        print(not_yet(never_run(checks, report.load_reports(REPORTS))))
        return 0
    wanted = chosen(checks, options)
    if not wanted:
        print(f"gpu_check: no check matches; there are {', '.join(one.name for one in checks)}")
        return 2
    if not options.rehearse and not has_gpu():
        print("gpu_check: torch finds no CUDA device, nothing was run; --rehearse runs every check on a CPU")
        return 1
    signal.signal(signal.SIGTERM, _end)
    start = time.monotonic()
    said = shlex.join(["python", "tools/gpu_check.py", *(sys.argv[1:] if arguments is None else arguments)])
    facts = report.facts(ROOT) if options.out else {}

    def keep(rows: Rows) -> None:
        if options.out:
            spent = time.monotonic() - start
            made = report.as_dict(facts, rows, rehearsal=options.rehearse, seconds=spent, asked=len(wanted))
            report.write(options.out, made, rows, said)

    known = [] if options.rehearse or not options.out else report.known_ok(options.out, facts, wanted)
    if known:
        print(f"gpu_check: {len(known)} checks were ok in {options.out} and are not run again; delete it to run all")
    left = [one for one in wanted if one.name not in {check.name for check, _ in known}]
    rows = [*known, *run(left, options, lambda rows: keep([*known, *rows]))]
    print(report.verdict(rows, time.monotonic() - start))
    if options.out:
        print(f"gpu_check: report in {options.out} and {options.out.with_suffix('.md')}")
    if all(result.status == SKIPPED for _, result in rows):
        print("gpu_check: nothing was run")
        return 1
    return 1 if any(result.status == FAILED for _, result in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
