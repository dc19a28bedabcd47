"""What suspend gives back, by the driver's account, and what comes back with resume."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch
from launches import captured
from torch import Tensor

from gpu_checks.context import Context
from gpu_checks.engines import answers, make_engine, make_model, tokens_of, workload
from gpu_checks.registry import Comparison, Unavailable, add_check, check
from megatron_infer.errors import ConfigError
from megatron_infer.memory.regions.choose import make_region, table
from megatron_infer.memory.store import CacheStore
from megatron_infer.memory.store_layout import StoreLayout
from megatron_infer.scheduler.context.copies import Copy, CopyKind
from megatron_infer.testing.inspect import inspect

MIB = 2**20
MANAGED_ROOM = 6 << 30
"""Bytes that must be free before managed memory is asked for."""
SLACK = 8 * MIB
"""Of memory: pages of several sizes, and what the driver takes for itself."""


def _cycle(
    ctx: Context, compare: Comparison, *, mode: str, keeps_address: bool = False, needs_bytes: int = 0, **options: Any
) -> dict[str, Any]:
    """Suspend and resume in the middle of requests, with everything looked at on the way.

    needs_bytes: of free device memory; options: of the engine.
    """
    if (free := ctx.free_bytes()) < needs_bytes:
        raise Unavailable(f"{free / 2**30:.1f} GiB are free, {needs_bytes / 2**30:.0f} are needed")
    pool, work = ctx.pick(1.0, 0.06), workload(ctx)
    model = make_model("attention", torch.float32, ctx.device)
    wanted = tokens_of(answers(make_engine(model, ctx.device, buffer_size_gb=pool), work))
    try:
        engine = make_engine(model, ctx.device, buffer_size_gb=pool, **options)
    except ConfigError as reason:
        raise Unavailable(str(reason)) from None
    ids = [engine.add_request(prompt, params, stream="final") for prompt, params in work]
    done: dict[str, Any] = {}

    def step() -> None:
        done.update({output.request_id: output for output in engine.step() if output.finished})

    def content() -> Tensor:
        """The cache's blocks that requests hold, in order."""
        return store.kv_cache[:, :, sorted(inspect(engine).context.held_blocks())].clone()

    for number in range(ctx.pick(6, 2)):
        if number == 1:  # what is loaded for a first suspend stays on the device, and is not the second one's
            engine.suspend(mode, {"kv_cache"})
            engine.resume()
        step()
    store = inspect(engine).store
    before, address = content(), store.kv_cache.data_ptr()
    free = ctx.free_bytes()
    away = engine.suspend(mode, {"kv_cache"})
    freed = ctx.free_bytes() - free
    back = engine.resume()
    ctx.wait()
    store.pending_restore()  # the copies have arrived: their staging buffers are given up
    left = ctx.free_bytes() - free
    is_kept, pool_bytes = store.kv_cache.data_ptr() == address, engine.sizes.kv_bytes
    if mode != "recompute":
        compare.require(f"{mode}: content is not what it was", bool(torch.equal(content(), before)))
    while engine.has_unfinished():
        step()
    compare.require(f"{mode}: other tokens afterwards", tokens_of([done[one] for one in ids]) == wanted)
    compare.require("the address moved", is_kept or not keeps_address)
    if mode != "persist" and not ctx.rehearse:
        compare.require(f"{mode}: {freed:,} of {pool_bytes:,} bytes came free", freed >= pool_bytes - SLACK)
        compare.require(f"{mode}: {-left:,} bytes less are free after it", -left <= SLACK)
    compare.figure = (
        f"freed {freed / MIB:,.0f} of {pool_bytes / MIB:,.0f} MiB, {away.seconds * 1e3:.1f} + "
        f"{back.seconds * 1e3:.1f} ms, address {'kept' if is_kept else 'moved'}"
    )
    return {
        "pool_bytes": pool_bytes,
        "freed_bytes": freed,
        "reported_bytes": away.tags["kv_cache"].bytes_freed,
        "suspend_ms": away.seconds * 1e3,
        "resume_ms": back.seconds * 1e3,
        "address_kept": is_kept,
        "left_over_bytes": left,
    }


SUSPENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "suspend_persist": ("Persist keeps content and addresses.", {"mode": "persist", "keeps_address": True}),
    "suspend_offload": (
        "Offload gives the whole pool back to the driver; contents return bit for bit.",
        {"mode": "offload"},
    ),
    "suspend_recompute": (
        "Recompute gives the whole pool back to the driver; requests go on with the same tokens.",
        {"mode": "recompute"},
    ),
    "suspend_static_pointers": (
        "With static pointers the pool leaves, and comes back at the address it had.",
        {"mode": "offload", "keeps_address": True, "static_kv_memory_pointers": True},
    ),
    # More managed memory than the device has free makes pages move without end, which can hang it. An engine's region
    # refuses that by itself (`managed.check_room`).
    "unified_memory": (
        "A cache in unified memory gives the same tokens and keeps content and address over suspend.",
        {"mode": "persist", "keeps_address": True, "needs_bytes": MANAGED_ROOM, "unified_memory_level": 1},
    ),
}
"""Check -> (promise, how `_cycle` is called)."""
for _name, (_promise, _asked) in SUSPENDS.items():
    add_check(__name__, _name, _promise, partial(_cycle, **_asked), budget_s=30)


@check(budget_s=20)
def restore_by_layer(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """A layer is whole once its event is done, while later layers are still copied."""
    num_layers, num = ctx.pick(16, 3), ctx.pick(4096, 12)
    store = _make_store(ctx, num_layers, num + 1)
    kept = [(7 * block) % num for block in range(0, num, 2)]
    stamps: list[Any] = []
    for _ in range(3):  # the first pins
        store.kv_cache.normal_()
        before = store.kv_cache[:, :, kept].clone()
        store.offload(kept, _quiet)
        ctx.wait()
        begun = ctx.cuda.Event(enable_timing=True)
        begun.record()
        store.restore(set(kept), _quiet)
        restore, stamps = store.pending_restore(), []
        for layer in range(num_layers):
            if restore is not None:
                restore.wait_for_layer(("blocks", layer))
            cache = store.kv_cache if restore is None else restore.kv_cache
            compare.require(f"layer {layer} is not whole", bool(torch.equal(cache[layer][:, kept], before[layer])))
            stamps.append(ctx.cuda.Event(enable_timing=True))
            stamps[-1].record()
        ctx.wait()
        compare.require("the host copy is kept for ever", store.pending_restore() is None and not store.host_bytes())
    times = [begun.elapsed_time(stamp) for stamp in stamps]
    compare.figure = f"layer 0 of {num_layers} after {times[0]:.2f} ms, the last after {times[-1]:.2f} ms"
    return {"milliseconds": times}


def _make_store(ctx: Context, num_layers: int, num_blocks: int, *, host_blocks: int = 0) -> CacheStore:
    layout = StoreLayout(
        kv_shape=(num_layers, 2, num_blocks, 16, 8, 128), dtype=ctx.pick(torch.bfloat16, torch.float32)
    )
    region = make_region((layout.num_bytes,), torch.uint8, ctx.device, static_pointers=False, unified_memory=False)
    return CacheStore(layout, region, (host_blocks, 0))


def _quiet(what: str) -> None:
    """For work that is not to be stopped."""


@check(budget_s=20)
def static_region(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """Torch_memory_saver's memory comes and goes at one address, and a captured graph writes to it again."""
    _needs_saver(ctx)
    size, free = ctx.pick(2048, 8) * MIB, ctx.free_bytes()
    best = _static_cycles(ctx, compare, size)
    if not ctx.rehearse:
        try:
            make_region((free + size,), torch.uint8, ctx.device, static_pointers=True, unified_memory=False)
            compare.require("more memory was given than is free", False)
        except torch.OutOfMemoryError:
            pass
    left = free - ctx.free_bytes()
    compare.require(f"{left:,} bytes are not back", ctx.rehearse or left <= SLACK)
    gave, took = best["release"], best["restore"]
    compare.figure = f"{size / MIB:,.0f} MiB given back in {gave:.1f} ms, taken again in {took:.1f} ms"
    return {"milliseconds": best}


def _needs_saver(ctx: Context) -> None:
    chosen, why = {asked: row for asked, *row in table(ctx.device)}["static pointers"]
    if not ctx.rehearse and chosen != "SaverRegion":
        raise Unavailable(why)


def _static_cycles(ctx: Context, compare: Comparison, size: int) -> dict[str, float]:
    """Release and restore a region that a graph writes to -> the fastest of each, in milliseconds."""
    region = make_region((size,), torch.uint8, ctx.device, static_pointers=True, unified_memory=False)
    cell_X, address = region.tensor[:4096].view(torch.float32), region.tensor.data_ptr()
    step_X = torch.full_like(cell_X, 3.0)

    def work() -> None:
        cell_X.add_(step_X).mul_(2)

    replay = captured(work, ctx.device)
    seconds: dict[str, list[float]] = {"release": [], "restore": []}
    for _ in range(3):
        region.tensor.fill_(1)
        full = ctx.free_bytes()
        for name in seconds:
            start = time.perf_counter()
            getattr(region, name)()
            ctx.wait()
            seconds[name].append(time.perf_counter() - start)
            if name == "release" and not ctx.rehearse:
                given = ctx.free_bytes() - full
                compare.require(f"release gave {given:,} of {size:,} bytes", given >= size - SLACK)
        cell_X.fill_(1)
        replay()
        ctx.wait()
        compare.require("a replay after the restore wrote something else", bool((cell_X == 8).all()))
        compare.require("the address moved", region.tensor.data_ptr() == address)
    return {name: min(times) * 1e3 for name, times in seconds.items()}


LIFE = """
import torch
from megatron_infer.memory.regions.choose import make_region

def make():
    return make_region((64 << 20,), torch.uint8, torch.device("{device}"), static_pointers=True, unified_memory=False)

first, second, last = make(), make(), make()
first.release()
del first, second
last.release()
last.restore()
last.tensor.fill_(1)
print("done", int(last.tensor[-1]))
"""


@check(budget_s=30)
def static_region_life(ctx: Context, compare: Comparison) -> None:
    """A process that drops regions with static pointers, released or not, and keeps one, ends without an error."""
    _needs_saver(ctx)
    command = [sys.executable, "-c", LIFE.format(device=ctx.device)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    said = " ".join((ended.stdout + ended.stderr).split())[-400:]
    compare.require(f"exit status {ended.returncode}: {said}", ended.returncode == 0 and "done 1" in ended.stdout)


@check(budget_s=20)
def swap_moves(ctx: Context, compare: Comparison) -> dict[str, Any]:
    """Blocks of evicted requests go to the host and back bit for bit, and no step pins memory or waits for it."""
    num = ctx.pick(512, 12)
    store = _make_store(ctx, ctx.pick(16, 2), 2 * num + 1, host_blocks=num)
    out = [Copy(CopyKind.BLOCK_OUT, block, block) for block in range(num)]
    back = [Copy(CopyKind.BLOCK_IN, slot, num + (7 * slot) % num) for slot in range(num)]
    for _ in range(2):  # the first one takes the staging buffers
        store.kv_cache.normal_()
        before = store.kv_cache[:, :, :num].clone()
        pinned = store.host_bytes()
        with ctx.no_sync():
            store.run_copies(out)
            store.kv_cache[:, :, :num].zero_()
            store.run_copies(back)
        places = [num + (7 * slot) % num for slot in range(num)]
        compare.require("content is not what it was", bool(torch.equal(store.kv_cache[:, :, places], before)))
        if not ctx.rehearse:
            compare.require("host memory was pinned in the step", store.host_bytes() == pinned)

    milliseconds = ctx.milliseconds(lambda: store.run_copies(out), rounds=5)
    rate = num * store.layout.block_bytes / milliseconds / 1e6
    compare.figure = f"{num} blocks of {store.layout.block_bytes:,} bytes out, enqueued and gathered at {rate:.1f} GB/s"
    return {"gb_per_s": rate}
