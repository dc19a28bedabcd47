"""What is measured of one model: decode, prefill, mixed steps, suspend and resume; rows for JSON and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from light.engine import BLOCK, Bench
from light.machine import Ceilings, idle_share
from megatron_infer.testing.inspect import inspect

Row = dict[str, Any]
STEADY = 8
"""Steps before the clock starts: shapes are captured, kernels compiled."""


def decode(bench: Bench, ceilings: Ceilings, *, batches: Sequence[int], context: int, steps: int) -> list[Row]:
    """Milliseconds of a decode step, and the bytes it moves a second against a copy of the same run."""
    rows = []
    for batch in batches:
        bench.fill(batch, context, STEADY + steps + 16)
        bench.steps(STEADY)
        taken = bench.steps(steps)
        moved = bench.counter.decode(batch, context + STEADY + steps // 2).num_bytes
        bench.drain()
        rate = moved / taken / 1e9
        rows.append(
            {
                "what": f"decode batch {batch} context {context}",
                "batch": batch,
                "ms": taken * 1e3,
                "gb_s": rate,
                "share": rate / ceilings.copy_gb_s,
                "tokens_s": batch / taken,
            }
        )
    return rows


def graphs(bench: Bench) -> Row:
    """What the graphs captured so far took: seconds, and memory by their own account. Empty where there are none."""
    captured = inspect(bench.engine).runner.graphs
    if captured is None:
        return {}
    pool = captured.pool
    return {
        "what": f"graphs captured: {len(pool.captured)}, refused: {len(pool.refused)}",
        "ms": pool.counts.capture_s * 1e3,
        "graphs_mib": pool.num_bytes / 2**20,
        "replays": pool.counts.replays,
    }


def idle(bench: Bench, *, batch: int, context: int, steps: int) -> Row:
    """Share of a decode trace in which the device waits for the host."""
    bench.fill(batch, context, STEADY + steps + 16)
    bench.steps(STEADY)
    share, no_kernel, kernels = idle_share(lambda: bench.steps(steps), bench.device)
    bench.drain()
    return {"what": f"idle batch {batch} context {context}", "share": share, "no_kernel": no_kernel, "kernels": kernels}


def prefill(bench: Bench, ceilings: Ceilings, *, lengths: Sequence[int]) -> list[Row]:
    """Milliseconds until a prompt's first token, and its arithmetic against a matrix product of the same run."""
    rows = []
    for length in lengths:
        times = []
        for seed in range(3):  # the first compiles
            bench.add(length, 1, seed)
            num_steps = -(-length // bench.engine.sizes.max_tokens) + 1  # with overlap the last one commits
            times.append(bench.steps(num_steps) * num_steps)
            bench.drain()
        taken = min(times[1:])
        rate = bench.counter.prefill(length).flops / taken / 1e12
        rows.append(
            {
                "what": f"prefill {length}",
                "ms": taken * 1e3,
                "tflop_s": rate,
                "share": rate / ceilings.matmul_tflop_s,
                "tokens_s": length / taken,
            }
        )
    return rows


def mixed(bench: Bench, ceilings: Ceilings, *, batch: int, context: int, prompt: int, prompts: int) -> Row:
    """A step in which `batch` requests decode while `prompts` prompts of `prompt` tokens begin."""
    rounds = 4
    bench.fill(batch, context, STEADY + 4 * rounds + 16)
    bench.steps(STEADY)
    times = []
    for number in range(rounds):  # the first ones compile and capture
        for seed in range(prompts):
            bench.add(prompt, 1, 100 + number * prompts + seed)
        times.append(bench.steps(1))
        bench.steps(2)
    bench.drain()
    taken, fresh = min(times[1:]), prompts * prompt
    tokens = min(bench.engine.sizes.max_tokens, batch + fresh)
    decoded, whole = bench.counter.decode(batch, context), bench.counter.step(prompts, prompt, prompt)
    flops = decoded.flops + whole.flops * (tokens - batch) / fresh
    needed = max(decoded.num_bytes / ceilings.copy_gb_s / 1e9, flops / ceilings.matmul_tflop_s / 1e12)
    return {
        "what": f"mixed: {batch} decode, {prompts} prompts of {prompt}",
        "ms": taken * 1e3,
        "share": needed / taken,
        "tokens_s": tokens / taken,
    }


def suspend(bench: Bench, ceilings: Ceilings, *, modes: Sequence[str], shares: Sequence[float]) -> list[Row]:
    """Milliseconds to give the cache back and to have it again, by mode and by the share of the pool in use.

    first_step_ms: from the call of the resume until the first step is done. hidden: of the time that copies back take,
    the share which does not make that longer than a step, the rest of the resume counted against it.
    """
    rows, sizes, store = [], bench.engine.sizes, inspect(bench.engine).store
    for mode in modes:
        for share in shares:
            blocks = max(1, int(sizes.num_usable_blocks * share))
            length = max(1, min(blocks * BLOCK // sizes.max_requests, sizes.max_sequence_length - 40))
            bench.fill(min(sizes.max_requests, max(1, blocks * BLOCK // length)), length, 32)
            reports = []
            for _ in range(3):
                away, (back, first_s) = bench.engine.suspend(mode, {"kv_cache"}), bench.wake()
                step_s = bench.steps(2)
                assert store.pending_restore() is None, "the device has nothing left to do"
                reports.append((away, back, first_s, step_s, store.restore_copy_s))
            away, back, first_s, step_s, copies_s = min(reports, key=lambda report: report[0].seconds + report[2])
            bench.drain()
            copied = away.tags["kv_cache"].bytes_copied
            row: Row = {
                "what": f"suspend {mode} {share:.0%} live",
                "mode": mode,
                "copied_mib": copied / 2**20,
                "freed_mib": away.tags["kv_cache"].bytes_freed / 2**20,
                "ms": away.seconds * 1e3,
                "resume_ms": back.seconds * 1e3,
                "first_step_ms": first_s * 1e3,
            }
            if copied and copies_s:
                row["gb_s"] = copied / away.seconds / 1e9
                row["share"] = row["gb_s"] / ceilings.to_host_gb_s
                row["resume_share"] = copied / copies_s / 1e9 / ceilings.from_host_gb_s
            if copies_s and back.tags["kv_cache"].bytes_under_way:
                row["hidden"] = min(1.0, max(0.0, 1 - (first_s - step_s) / copies_s))
            rows.append(row)
    return rows


def lines(rows: Sequence[Row]) -> list[str]:
    """A table for people."""
    out = [f"{'':<46} {'ms':>9} {'GB/s':>8} {'TFLOP/s':>8} {'of ceiling':>10} {'tokens/s':>10}"]
    extra = ("no_kernel", "resume_ms", "resume_share", "first_step_ms", "hidden", "freed_mib", "graphs_mib")
    for row in rows:
        cells = [
            f"{row['ms']:9.3f}" if "ms" in row else " " * 9,
            f"{row['gb_s']:8.1f}" if "gb_s" in row else " " * 8,
            f"{row['tflop_s']:8.1f}" if "tflop_s" in row else " " * 8,
            f"{row['share']:10.1%}" if "share" in row else " " * 10,
            f"{row['tokens_s']:10,.0f}" if "tokens_s" in row else " " * 10,
        ]
        also = "".join(f"  {key} {row[key]:.4g}" for key in extra if key in row)
        out.append(f"{row['what']:<46} {' '.join(cells)}{also}")
    return out
