"""Compiles every Triton kernel of the package for GPUs that need not be there, and says what each takes of one.

    python tools/aot_compile.py [--arch 80 --arch 90] [--only NAME] [--quick] [--jobs 2] [--json OUT] [--table FOLDER]

Variants are what the calls of tools/aot_cases.py launch, for sizes of real models (`launches.Launched.at_any_size`).
One line each: seconds, registers and spilled bytes of a thread, shared memory of a block. Exits 1 if one does not
compile, takes more shared memory than its architecture has, or spills more than 64 bytes a thread (512 in kernels of
fp32 alone). It proves that the compiler accepts a kernel, which the interpreter does not, and nothing about what the
kernel computes.

Each variant is compiled for one of the architectures, that of the table or in turn, and for the others where Triton
compiles it in another way for each (products on tensor cores, 8-bit floats, inline assembly) or its shared memory does
not fit them. What a case launches in bf16, too, is compiled for the others in bf16 alone: models run in it, and the
code is the same. With --quick each variant is compiled for one architecture alone.

With --table, what FOLDER has of the Triton that runs (`aot_table`) is not compiled again, save for --recheck variants
taken at random, whose figures must be those of FOLDER. --write writes all of it from what was compiled or found;
`make kernels-table` does.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import random
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import aot_table
from launches import Launched, launched

from megatron_infer.kernels.triton.attention_tiles import FP8_ARCH
from megatron_infer.kernels.triton.launch import PDL_CAPABILITY, interpreted, listening
from megatron_infer.utils.child_process import end_with_parent

SMALL_SHARED = 99 * 1024
SHARED_LIMIT = {
    80: 163 * 1024, 86: SMALL_SHARED, 89: SMALL_SHARED, 90: 227 * 1024, 100: 227 * 1024, 120: SMALL_SHARED,
}  # fmt: skip
"""Compute capability -> bytes of shared memory one block can have."""
ARCHS = (80, 90, 100)
"""Compiled for unless told: workstation and consumer cards (86, 89, 120) run the same instructions in less memory."""
MAX_SPILL = 64
"""Bytes of a thread's registers that may live in memory instead."""
FP32_FACTOR = 8
"""So many times that in kernels none of whose pointers is to 16 bit: those in fp32 are for exactness, not speed."""
BY_ARCH = ("tt.dot", "tt.elementwise_inline_asm", "f8E", "descriptor")
"""In Triton's IR of a kernel: what it compiles in another way for each architecture. `ptxas` makes the rest differ."""
ALIGNMENT = 16
NO_FIGURE = -1


@dataclass(frozen=True, slots=True)
class Job:
    """One variant for one architecture."""

    name: str
    arch: int
    launched: Launched

    @property
    def label(self) -> str:
        """Example: "norms.norm-rms-fp32-bf16"."""
        return f"{self.launched.module.rpartition('.')[2]}.{self.name}"

    @property
    def key(self) -> str:
        """Key of the table; empty if Triton cannot read the kernel: the error is told where it is compiled."""
        try:
            return aot_table.key_of(self.launched, self.arch)
        except Exception:
            return ""

    @property
    def only_fp32(self) -> bool:
        """Whether it points to numbers in fp32, and to none in fp16 or bf16."""
        kinds = {kind for _, kind in self.launched.types}
        return "*fp32" in kinds and not kinds & {"*fp16", "*bf16"}


Cases = Iterable[tuple[int, Callable[[], Iterator[str]]]]
"""As `aot_cases.CASES`."""
Figures = Mapping[str, Mapping[str, Any]]
"""Key of a job -> what compiling it gave (`aot_table.FIGURES`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What compiling one job gave; figures are NO_FIGURE where there is none."""

    job: Job
    seconds: float = 0.0
    error: str | None = None
    num_registers: int = NO_FIGURE
    spill_bytes: int = NO_FIGURE
    shared_bytes: int = NO_FIGURE
    by_arch: bool = True
    """Whether another architecture may compile it in another way."""

    @property
    def failure(self) -> str | None:
        """Why this one does not pass; None: it does."""
        if self.error is not None:
            return self.error
        limit = SHARED_LIMIT[self.job.arch]
        if self.shared_bytes > limit:
            return f"takes {self.shared_bytes:,} bytes of shared memory, sm_{self.job.arch} has {limit:,}"
        max_spill = MAX_SPILL * (FP32_FACTOR if self.job.only_fp32 else 1)
        if self.spill_bytes > max_spill:
            return f"spills {self.spill_bytes} bytes a thread, the limit is {max_spill}"
        return None

    @property
    def figures(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in aot_table.FIGURES}

    @property
    def line(self) -> str:
        """One row of what is printed."""
        figures = (self.num_registers, self.spill_bytes, self.shared_bytes)
        shown = " ".join(f"{figure if figure != NO_FIGURE else '?':>8}" for figure in figures)
        return f"{self.job.label:<66} sm_{self.job.arch:<4} {self.seconds:>7.2f} {shown}  {self.failure or 'ok'}"


class Variant(NamedTuple):
    """What a case launches."""

    name: str
    launched: Launched
    min_shared: int
    """Least shared memory of a block in bytes on devices that launch it."""

    def is_for(self, arch: int) -> bool:
        least = 10 * PDL_CAPABILITY[0] if dict(self.launched.options).get("launch_pdl") else 0
        if any("fp8" in kind for _, kind in self.launched.types):
            least = max(least, FP8_ARCH)
        return arch >= least and SHARED_LIMIT[arch] >= self.min_shared


def variants_of(cases: Cases) -> list[Variant]:
    """What the cases launch, each specialisation once, under the first name; see tools/aot_cases.py."""
    found: dict[Launched, Variant] = {}
    heard: list[Launched] = []
    taken: Counter[str] = Counter()
    with listening(lambda _, kernel, grid, args, options: heard.append(launched(kernel, args, options))):
        for min_shared, case in cases:
            for label in case():
                for one in dict.fromkeys(one.at_any_size() for one in heard):
                    if one in found:
                        continue
                    name = f"{one.kernel.strip('_').removesuffix('_kernel')}-{label}"
                    taken[name] += 1
                    name += f"-{taken[name]}" if taken[name] > 1 else ""
                    found[one] = Variant(name, one, min_shared)
                heard.clear()
    return list(found.values())


def jobs_of(variants: Iterable[Variant], archs: Sequence[int], *, quick: bool, table: Figures) -> list[Job]:
    """Every variant for every architecture that it is for; with `quick` each variant for one of them: that of the
    table, or by its name."""
    jobs = []
    for variant in variants:
        some = [Job(variant.name, arch, variant.launched) for arch in archs if variant.is_for(arch)]
        if quick and some:
            known = [job for job in some if job.key in table]
            some = known[:1] or [some[zlib.crc32(variant.name.encode()) % len(some)]]
        jobs += some
    return jobs


def jobs_left(jobs: Sequence[Job], outcomes: Mapping[Job, Compiled]) -> list[Job]:
    """Of the jobs those that no outcome answers: all of the same kernel on another architecture where that matters."""
    done = {job.name: one for job, one in outcomes.items()}
    names, left = {job.name for job in jobs}, []
    for job in jobs:
        one, twin = done.get(job.name), re.sub("fp(16|32|64)", "bf16", job.name)
        if one is None or job.arch == one.job.arch:
            continue
        in_bf16 = twin != job.name and twin in names
        if (one.by_arch and not in_bf16) or one.shared_bytes > SHARED_LIMIT[job.arch]:
            left.append(job)
    return left


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) of a thread, by NVIDIA's cuobjdump.

    A kernel without arrays of its own, as Triton's are, has local memory for spilled registers alone. The largest
    stack counts: a kernel may have functions below it.
    """
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [(int(registers), int(stack)) for registers, stack in re.findall(r"REG:(\d+) STACK:(\d+)", printed)]
    return max(registers for registers, _ in found), max(stack for _, stack in found)


def waits_first(ptx: str) -> bool:
    """Whether a kernel that may start early waits before its first access of global memory."""
    access = re.search(r"\b(?:ld|st|atom|red|cp|prefetch)\.[\w.:]*global", ptx)
    wait = ptx.find("griddepcontrol.wait")
    return 0 <= wait < (len(ptx) if access is None else access.start())


def compile_variant(launched: Launched, arch: int) -> dict[str, Any]:
    """Figures of one kernel compiled for sm_`arch`; raises what the compiler raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, options = dict(launched.types), dict(launched.options)
    aligned = {
        (index,): [["tt.divisibility", ALIGNMENT]] for index, name in enumerate(signature) if name in launched.aligned
    }
    source = ASTSource(fn=launched.function, signature=signature, constexprs=dict(launched.values), attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    if options.get("launch_pdl") and not waits_first(compiled.asm["ptx"]):
        raise ValueError("touches global memory before it has waited for the launch before")
    num_registers, spill_bytes = resources(compiled.asm["cubin"])
    return {
        "num_registers": num_registers,
        "spill_bytes": spill_bytes,
        "shared_bytes": int(compiled.metadata.shared),
        "by_arch": any(mark in compiled.asm["ttir"] for mark in BY_ARCH),
    }


def compile_job(job: Job) -> Compiled:
    """Runs in a process of its own; whatever the compiler raises is that job's error."""
    start = time.perf_counter()
    try:
        figures = compile_variant(job.launched, job.arch)
    except Exception as error:
        figures = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:2000]}
    return Compiled(job=job, seconds=time.perf_counter() - start, **figures)


def compile_all(jobs: Sequence[Job], num_processes: int, until: float) -> dict[Job, Compiled]:
    """Jobs' outcomes; a compiler that dies takes down its own job only. No job begins later than `until`, by
    time.monotonic()."""
    done: dict[Job, Compiled] = {}
    left: set[Job] = set()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context, initializer=end_with_parent) as pool:
        futures = {pool.submit(compile_job, job): job for job in jobs}
        for future in as_completed(futures):
            if time.monotonic() > until:
                left |= {job for other, job in futures.items() if other.cancel()}
            try:
                done[futures[future]] = future.result()
            except (BrokenProcessPool, CancelledError):
                continue
            print(done[futures[future]].line, flush=True)
    for job in jobs:
        if job in done or job in left:
            continue
        with ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent) as pool:
            try:
                done[job] = pool.submit(compile_job, job).result()
            except BrokenProcessPool:
                done[job] = Compiled(job=job, error="the compiler's process died")
        print(done[job].line, flush=True)
    return done


def outcomes_of(
    jobs: Sequence[Job],
    table: Figures,
    *,
    recheck: int,
    num_processes: int,
    until: float,
) -> dict[Job, Compiled]:
    """Jobs' outcomes: the table's, or the compiler's, in an order by chance, of those that begin before `until`.

    recheck: so many that the table has are compiled all the same; other figures than the table's are their error.
    """
    done = {job: Compiled(job=job, **table[job.key]) for job in jobs if job.key in table}
    again = random.sample(list(done), min(recheck, len(done)))
    unknown = [job for job in jobs if job not in done]
    asked = again + random.sample(unknown, len(unknown))
    for job, new in compile_all(asked, num_processes, until).items():
        old = done.get(job)
        if old is not None and new.error is None and new.figures != old.figures:
            new = replace(new, error=f"the table has {table[job.key]}; write it again: make kernels-table")
        done[job] = new
    return done


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arch", type=int, action="append", choices=sorted(SHARED_LIMIT), help="default: 80, 90, 100")
    parser.add_argument("--only", metavar="NAME", help="variants whose module and name contain this")
    parser.add_argument("--quick", action="store_true", help="each variant for one architecture alone")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--cases", metavar="MODULE", default="aot_cases", help="whose CASES launch the kernels")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="what it has is not compiled again")
    parser.add_argument("--recheck", type=int, default=0, metavar="N", help="compile N that the table has all the same")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, metavar="S", help="begin no compilation later; the rest is counted"
    )
    parser.add_argument("--write", action="store_true", help="write the table")
    options = parser.parse_args(arguments)
    if options.write and (options.table is None or options.only):
        parser.error("--write writes the whole of --table FOLDER, without --only")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if interpreted():
        print("aot_compile: TRITON_INTERPRET is set, and interpreted kernels have no compiler; unset it")
        return 2
    start = time.perf_counter()
    import triton

    table = aot_table.read(options.table) if options.table else {}
    archs = options.arch or ARCHS
    variants = variants_of(importlib.import_module(options.cases).CASES)
    variants = [one for one in variants if not options.only or options.only in f"{one.launched.module}.{one.name}"]
    jobs = jobs_of(variants, archs, quick=True, table=table)
    if not jobs:
        print(f"aot_compile: no variant matches {options.only!r}")
        return 2
    print(f"{'kernel':<66} {'arch':<7} {'seconds':>7} {'registers':>8} {'spilled':>7} {'shared':>8}")
    how = {"num_processes": options.jobs, "until": time.monotonic() + options.seconds}
    done = outcomes_of(jobs, table, recheck=options.recheck, **how)
    more = [] if options.quick else jobs_left(jobs_of(variants, archs, quick=False, table=table), done)
    done |= outcomes_of(more, table, recheck=options.recheck, **how)
    if options.write:
        compiled = [one for one in done.values() if one.error is None]
        aot_table.write(options.table, {one.job.key: (one.job.label, one.figures) for one in compiled})
    failed = [one for one in done.values() if one.failure is not None]
    if options.json:
        rows = [
            {"variant": one.job.name, "arch": one.job.arch, **one.figures, "failure": one.failure}
            for one in done.values()
        ]
        options.json.write_text(json.dumps(rows, indent=1))
    wall, known = time.perf_counter() - start, sum(not one.seconds for one in done.values())
    left = len({*jobs, *more} - done.keys())
    print(
        f"aot_compile: {len(done) - known} compiled by Triton {triton.__version__} in {wall:.0f} s, "
        f"{known} in the table, {len(failed)} failed" + (f", {left} not compiled: --seconds" if left else "")
    )
    for one in failed:
        print("FAILED", one.line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
