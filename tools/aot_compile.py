"""Compiles every Triton kernel of the package for GPUs that need not be there, and says what each takes of one.

    python tools/aot_compile.py [--arch 80 --arch 90] [--only NAME] [--quick] [--jobs 2] [--json OUT] [--table FILE]

Variants are what the calls of tools/aot_cases.py launch, for sizes of real models, and with --launches what a run of
the tests in the interpreter launched besides. One line each: seconds, registers and spilled bytes of a thread, shared
memory of a block. Exits 1 if one does not compile, takes more shared memory than its architecture has, or spills more
than --max-spill bytes. It proves that the compiler accepts a kernel, which the interpreter does not, and nothing about
what the kernel computes.

Each variant is compiled for one of the architectures, that of the table or in turn, and for the others where Triton
compiles it in another way for each (products on tensor cores, 8-bit floats, inline assembly) or its shared memory does
not fit them. What a case launches in bf16, too, is compiled for the others in bf16 alone: models run in it, and the
code is the same.

With --table, what FILE has from an earlier run is not compiled again, save for --recheck variants taken at random,
whose figures must be those of FILE. --write writes FILE from what was compiled or found, with --quick next to what it
has; `make kernels-table` does.

A case's launches are compiled as those of any size (`launches.Launched.at_any_size`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import random
import re
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import aot_table
from launches import Launched, launched, read

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
WIDE = ("*fp8e4nv", "*fp32", "*fp64", "*i1", "*i8", "*i16", "*i32", "*i64", "*u8")
ALIGNMENT = 16
NO_FIGURE = -1
LAUNCHED_ARCH = 90
"""For what was launched."""
ATTR_REGCOUNT, ATTR_FRAME_SIZE, FORMAT_SIZED = 0x2F, 0x11, 4
"""Entries of a cubin's .nv.info section, as `cuobjdump -elf` names them."""


@dataclass(frozen=True, slots=True)
class Job:
    """One variant for one architecture."""

    name: str
    arch: int
    launched: Launched

    @property
    def module(self) -> str:
        return self.launched.module.rpartition(".")[2]

    @property
    def key(self) -> str:
        """Key of the table; empty if Triton cannot read the kernel: the error is told where it is compiled."""
        try:
            return aot_table.key_of(self.launched, self.arch)
        except Exception:
            return ""


Cases = Iterable[tuple[int, Callable[[], Iterator[str]]]]
"""As `aot_cases.CASES`."""
Figures = Mapping[str, Mapping[str, Any]]
"""Key of a job -> what compiling it gave (`aot_table.FIGURES`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What compiling one job gave; figures are NO_FIGURE where there is none."""

    module: str
    variant: str
    arch: int
    seconds: float
    error: str | None = None
    num_registers: int = NO_FIGURE
    spill_bytes: int = NO_FIGURE
    only_fp32: bool = False
    shared_bytes: int = NO_FIGURE
    cubin_bytes: int = NO_FIGURE
    by_arch: bool = True
    """Whether another architecture may compile it in another way."""

    def failure(self, max_spill: int) -> str | None:
        """Why this one does not pass; None: it does."""
        if self.error is not None:
            return self.error
        limit = SHARED_LIMIT[self.arch]
        if self.shared_bytes > limit:
            return f"takes {self.shared_bytes:,} bytes of shared memory, sm_{self.arch} has {limit:,}"
        max_spill *= FP32_FACTOR if self.only_fp32 else 1
        if self.spill_bytes > max_spill:
            return f"spills {self.spill_bytes} bytes a thread, the limit is {max_spill}"
        return None


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
        if one is None or job.arch == one.arch:
            continue
        in_bf16 = twin != job.name and twin in names
        if (one.by_arch and not in_bf16) or one.shared_bytes > SHARED_LIMIT[job.arch]:
            left.append(job)
    return left


def jobs_launched(folder: Path, archs: Sequence[int], *, only: str | None) -> list[Job]:
    """What a run noted in `folder`, for one architecture."""
    arch = LAUNCHED_ARCH if LAUNCHED_ARCH in archs else archs[-1]
    found = [Job(one.name, arch, one) for one in read(folder)]
    found = [job for job in found if not only or only in f"{job.module}.{job.name}"]
    if not found and not only:
        raise SystemExit(f"aot_compile: no launch was noted in {folder}; run `make check-kernels`")
    print(f"aot_compile: {len(found)} specialisations were launched")
    return found


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) of a thread, from a cubin with one kernel; NO_FIGURE for what it lacks.

    A kernel without arrays of its own, as Triton's are, has local memory for spilled registers alone. The largest
    frame counts: a kernel may have functions below it.
    """
    if cubin[:5] != b"\x7fELF\x02":
        return NO_FIGURE, NO_FIGURE
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, num_entries, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(num_entries)]
    names_at = sections[names_index][4]
    found = {ATTR_REGCOUNT: NO_FIGURE, ATTR_FRAME_SIZE: NO_FIGURE}
    for name, _, _, _, offset, size in sections:
        end = cubin.index(b"\0", names_at + name)
        if cubin[names_at + name : end] != b".nv.info":
            continue
        at = offset
        while at + 4 <= offset + size:
            layout, attribute, value = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if layout != FORMAT_SIZED:
                continue
            if attribute in found and value >= 8:
                found[attribute] = max(found[attribute], struct.unpack_from("<I", cubin, at + 4)[0])
            at += value
    return found[ATTR_REGCOUNT], found[ATTR_FRAME_SIZE]


def is_wide(types: Iterable[str]) -> bool:
    """Whether no argument points to 16-bit numbers."""
    return all(kind in WIDE for kind in types if kind.startswith("*"))


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
    cubin = compiled.asm["cubin"]
    num_registers, spill_bytes = resources(cubin)
    return {
        "num_registers": num_registers,
        "spill_bytes": spill_bytes,
        "shared_bytes": int(compiled.metadata.shared),
        "cubin_bytes": len(cubin),
        "by_arch": any(mark in compiled.asm["ttir"] for mark in BY_ARCH),
        "only_fp32": "*fp32" in signature.values() and is_wide(signature.values()),
    }


def compile_job(job: Job) -> Compiled:
    """Runs in a process of its own; whatever the compiler raises is that job's error."""
    start = time.perf_counter()
    try:
        figures = compile_variant(job.launched, job.arch)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return outcome_of(job, seconds=time.perf_counter() - start, error=text[:2000])
    return outcome_of(job, seconds=time.perf_counter() - start, **figures)


def outcome_of(job: Job, *, seconds: float = 0.0, **figures: Any) -> Compiled:
    return Compiled(module=job.module, variant=job.name, arch=job.arch, seconds=seconds, **figures)


def compile_all(
    jobs: Sequence[Job], num_processes: int, tell: Callable[[Compiled], None], until: float
) -> dict[Job, Compiled]:
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
            tell(done[futures[future]])
    for job in jobs:
        if job in done or job in left:
            continue
        with ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent) as pool:
            try:
                done[job] = pool.submit(compile_job, job).result()
            except BrokenProcessPool:
                done[job] = outcome_of(job, error="the compiler's process died")
        tell(done[job])
    return done


def outcomes_of(
    jobs: Sequence[Job],
    table: Figures,
    *,
    recheck: int,
    num_processes: int,
    tell: Callable[[Compiled], None],
    until: float,
) -> dict[Job, Compiled]:
    """Jobs' outcomes: the table's, or the compiler's, in an order by chance, of those that begin before `until`.

    recheck: so many that the table has are compiled all the same; other figures than the table's are their error.
    """
    done = {job: outcome_of(job, **table[job.key]) for job in jobs if job.key in table}
    again = random.sample(list(done), min(recheck, len(done)))
    unknown = [job for job in jobs if job not in done]
    asked = again + random.sample(unknown, len(unknown))
    for job, new in compile_all(asked, num_processes, tell, until).items():
        old = done.get(job)
        if old is not None and new.error is None and replace(new, seconds=0.0, cubin_bytes=NO_FIGURE) != old:
            new = replace(new, error=f"the table has {table[job.key]}; write it again: make kernels-table")
        done[job] = new
    return done


def line_of(outcome: Compiled, max_spill: int) -> str:
    """One row of the table."""
    figures = [outcome.num_registers, outcome.spill_bytes, outcome.shared_bytes]
    shown = " ".join(f"{figure if figure != NO_FIGURE else '?':>8}" for figure in figures)
    name, verdict = f"{outcome.module} {outcome.variant}", outcome.failure(max_spill)
    return f"{name:<66} sm_{outcome.arch:<4} {outcome.seconds:>7.2f} {shown}  {'ok' if verdict is None else verdict}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arch", type=int, action="append", choices=sorted(SHARED_LIMIT), help="default: 80, 90, 100")
    parser.add_argument("--only", metavar="NAME", help="variants whose module and name contain this")
    parser.add_argument("--quick", action="store_true", help="each variant for one architecture alone")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--max-spill", type=int, default=MAX_SPILL, help="bytes a thread; 8 times that in fp32")
    parser.add_argument("--cases", metavar="MODULE", default="aot_cases", help="whose CASES launch the kernels")
    parser.add_argument(
        "--launches", type=Path, metavar="FOLDER", help="compile also what a run of the tests noted there"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--table", type=Path, metavar="FILE", help="what it has is not compiled again")
    parser.add_argument("--recheck", type=int, default=0, metavar="N", help="compile N that the table has all the same")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, metavar="S", help="begin no compilation later; the rest is counted"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write a table")
    return parser.parse_args(arguments)


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
    launched = jobs_launched(options.launches, archs, only=options.only) if options.launches else []
    if not jobs and not launched:
        print(f"aot_compile: no variant matches {options.only!r}")
        return 2
    print(f"{'kernel':<66} {'arch':<7} {'seconds':>7} {'registers':>8} {'spilled':>7} {'shared':>8}")

    def tell(outcome: Compiled) -> None:
        print(line_of(outcome, options.max_spill), flush=True)

    how = {"num_processes": options.jobs, "tell": tell, "until": time.monotonic() + options.seconds}
    done = outcomes_of(jobs, table, recheck=options.recheck, **how)
    if not options.quick:
        launched = jobs_left(jobs_of(variants, archs, quick=False, table=table), done) + launched
    done |= outcomes_of(launched, table, recheck=options.recheck, **how)
    outcomes = list(done.values())
    if options.write:
        rows = {job.key: (f"{one.module}.{one.variant}", asdict(one)) for job, one in done.items() if not one.error}
        aot_table.write(options.write, rows, keep=options.quick)
    failed = [outcome for outcome in outcomes if outcome.failure(options.max_spill) is not None]
    if options.json:
        rows = [asdict(outcome) | {"failure": outcome.failure(options.max_spill)} for outcome in outcomes]
        options.json.write_text(json.dumps(rows, indent=1))
    wall = time.perf_counter() - start
    known = sum(not one.seconds for one in outcomes)
    left = len({*jobs, *launched} - done.keys())
    print(
        f"aot_compile: {len(outcomes) - known} compiled by Triton {triton.__version__} in {wall:.0f} s, "
        f"{known} in the table, {len(failed)} failed" + (f", {left} not compiled: --seconds" if left else "")
    )
    for outcome in failed:
        print("FAILED", line_of(outcome, options.max_spill))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
