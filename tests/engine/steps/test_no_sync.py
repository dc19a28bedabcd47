"""A step asks nothing of the device and copies nothing from pageable memory: the host waits once, for its tokens."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial

import engines
import pytest
import torch
from model_kinds import make_model
from replay_recorder import REPLAY
from static_kernels import STATIC
from sync_watch import SyncWatch

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.memory.device import Device, HostRead
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt

ENDLESS = {"max_tokens": 100, "ignore_eos": True}
CASES = {
    "greedy": SamplingParams(temperature=0.0, **ENDLESS),
    "filtered": SamplingParams(temperature=0.8, top_p=0.9, top_k=7, **ENDLESS),
    "samples": SamplingParams(n=3, temperature=1.0, seed=3, **ENDLESS),
    "edited": SamplingParams(
        temperature=0.9, min_p=0.1, logit_bias={5: 1.0}, bad_token_ids=(7, 8), presence_penalty=0.5, **ENDLESS
    ),
    "stops late": SamplingParams(min_tokens=40, stop_token_ids=(9,), repetition_penalty=1.2, **ENDLESS),
    "detailed": SamplingParams(
        temperature=0.9, top_k=5, logprobs=3, return_sampled_logprobs=True, return_support=True, **ENDLESS
    ),
    "scored": SamplingParams(temperature=0.0, prompt_logprobs=2, **ENDLESS),
}

OF_HYBRIDS = {
    "samples": CASES["samples"],
    "detailed": SamplingParams(return_routing=True, logprobs=1, **ENDLESS),
}


make_engine = partial(engines.make_engine, max_sequence_length=256, max_requests=12, check_invariants=False)


def waits_of(device: Device, steps) -> Counter:
    before = device.syncs.copy()
    steps()
    return device.syncs - before


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("attention", {}),
        ("attention", {"overlap": True}),
        ("attention", {"overlap": True, "num_cuda_graphs": -1}),
        ("hybrid", {"overlap": True}),
    ],
)
def test_a_step_waits_once_and_asks_the_device_nothing(kind, settings, monkeypatch):
    monkeypatch.setenv("MEGATRON_INFER_BACKEND", STATIC)
    monkeypatch.setenv("MEGATRON_INFER_GRAPHS", REPLAY)
    watch = SyncWatch(monkeypatch)
    engine = make_engine(make_model(kind), **settings)
    engine.add_request(list(range(4, 20)), CASES["greedy"], stream="delta")
    for _ in range(3):  # weights are compared before the first step, and read for that
        engine.step()
    for name, params in CASES.items() if kind == "attention" else OF_HYBRIDS.items():
        engine.add_request(list(range(4, 40)), params, stream="delta")
        for what, count in (("its prefill", 1), ("the steps behind it", 2)):
            watch.hits.clear()
            with watch:
                waits = waits_of(engine.device, lambda n=count: [engine.step() for _ in range(n)])
            assert waits == {"read": count}, (name, what, waits)
            hits = [hit for hit in watch.hits if not hit.startswith(KNOWN)]
            assert not hits, (name, what, hits)
        for group in engine.output_processor.requests[1:]:
            engine.abort(group.id)


def test_blocks_that_go_to_the_host_and_come_back_make_no_step_wait(monkeypatch):
    monkeypatch.setenv("MEGATRON_INFER_BACKEND", STATIC)
    watch, model = SyncWatch(monkeypatch), make_model("attention")
    swap = {"preemption_mode": "swap", "swap_buffer_size_gb": 0.01}
    engine = make_engine(model, pool_blocks=6, overlap=True, max_requests=6, **swap)
    for first in range(4):
        params = SamplingParams(temperature=1.0, max_tokens=50, ignore_eos=True)
        engine.add_request(list(range(4 + first, 24)), params, stream="delta")
    for _ in range(2):
        engine.step()
    device, stats = engine.device, inspect(engine).scheduler.stats
    with watch:
        while not stats.swapped_in:
            assert waits_of(device, engine.step) in ({"read": 1}, {})  # no request may have room for a while
    assert not [hit for hit in watch.hits if not hit.startswith(KNOWN)], watch.hits


KNOWN = (
    "models/moe.py",
    "memory/store.py: _copy_blocks",
    "memory/host_arena.py: offload",
    "memory/host_arena.py: reload",
)
"""Experts that run one after the other ask how many tokens each has. The others have a way of their own on CUDA."""


@pytest.mark.parametrize("overlap", [False, True])
def test_a_launch_waits_for_nothing_and_with_overlap_comes_before_the_read(overlap, monkeypatch):
    engine, order = make_engine(make_model("attention"), overlap=overlap), []
    launch, wait, device = engine.loop._launch, HostRead.wait, engine.device

    def launched(*args):
        order.append("launch")
        assert waits_of(device, lambda: launch(*args)) == {}
        return True

    monkeypatch.setattr(engine.loop, "_launch", launched)
    monkeypatch.setattr(HostRead, "wait", lambda self: (order.append("read"), wait(self))[1])
    engine.add_request(list(range(4, 20)), CASES["detailed"], stream="delta")
    for _ in range(3):
        engine.step()
    behind = ["launch", "launch", "read", "launch", "read"]
    assert order == (behind if overlap else ["launch", "read"] * 3)


def test_a_step_that_draws_nothing_waits_for_nothing():
    engine = make_engine(make_model("attention"), enable_chunked_prefill=True, max_tokens=16)
    engine.add_request(list(range(4, 60)), CASES["greedy"], stream="delta")
    assert waits_of(engine.device, engine.step) == {}


@pytest.mark.parametrize("graphs", [False, True])
def test_decode_steps_upload_nothing_while_no_block_is_added(graphs, monkeypatch):
    monkeypatch.setenv("MEGATRON_INFER_BACKEND", STATIC)
    monkeypatch.setenv("MEGATRON_INFER_GRAPHS", REPLAY)
    engine = make_engine(make_model("attention"), num_cuda_graphs=-1 if graphs else None)
    for first in range(3):
        engine.add_request(list(range(4 + first, 20)), CASES["greedy"], stream="delta")
    for _ in range(6):  # the last of them has its second block
        engine.step()
    uploads, replays = [], []
    device, runner = engine.device, inspect(engine).runner
    upload, to_device = device.upload, device.to_device
    monkeypatch.setattr(device, "upload", lambda host, target: (uploads.append("upload"), upload(host, target)))
    monkeypatch.setattr(device, "to_device", lambda array: (uploads.append("to_device"), to_device(array))[1])
    if graphs:
        launch = runner.graphs.launch
        monkeypatch.setattr(runner.graphs, "launch", lambda *args, **kw: (replays.append(1), launch(*args, **kw))[1])
    for _ in range(8):
        engine.step()
    assert uploads == [] and len(replays) == (8 if graphs else 0)


# ---------------------------------------------------------------------- the watch itself


def fine(device: Device, x: torch.Tensor) -> None:
    index = device.to_device(torch.tensor([1, 0]).numpy())
    chosen = x.index_select(0, index) + torch.arange(2, device=x.device)
    torch.where(chosen > 0, chosen, 0.0)[:1].fill_(2.0)
    device.begin_read(chosen).wait()[0].tolist()


LEAKS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "mask": lambda x: x[x > 0],
    "branch": lambda x: bool((x > 0).any()),
    "pageable": lambda x: torch.tensor([1, 0]).to(x.device, non_blocking=True),
    "tensor": lambda x: torch.tensor([1, 0], device=x.device),
    "host index": lambda x: x.index_select(0, torch.tensor([1, 0])),
    "list index": lambda x: x[[1, 0]],
    "list": lambda x: (x + 1).tolist(),
    "cpu": lambda x: (x * 2).cpu(),
}


@pytest.mark.parametrize("leak", [*LEAKS, "none"])
def test_the_watch_sees_what_would_wait_or_copy(leak, monkeypatch):
    watch, device, x = SyncWatch(monkeypatch), Device("cpu"), torch.ones(4)
    with watch:
        fine(device, x) if leak == "none" else LEAKS[leak](x)
    assert bool(watch.hits) == (leak != "none"), watch.hits


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_torch_sees_no_synchronisation_in_a_step(name, overlap):
    model = tiny_gpt(params_dtype=torch.bfloat16, num_query_groups=2).cuda()
    engine = make_engine(model, overlap=overlap)
    engine.add_request(list(range(4, 20)), CASES["greedy"], stream="delta")
    for attempt in range(2):  # the first compiles kernels
        with no_synchronisation() if attempt else contextlib.nullcontext():
            engine.add_request(list(range(4, 40)), CASES[name], stream="delta")
            for _ in range(4):
                engine.step()


@pytest.mark.gpu
def test_on_a_gpu_that_is_behind_a_step_is_launched_all_the_same():
    engine = make_engine(tiny_gpt(params_dtype=torch.bfloat16).cuda(), overlap=True)
    engine.add_request(list(range(4, 20)), CASES["detailed"], stream="delta")
    for _ in range(4):
        engine.step()
    engine.drain()
    launch, behind = engine.loop._launch, []

    def launched(*args):
        torch.cuda._sleep(400_000_000)  # some 0.2 s
        mark = torch.cuda.Event()
        mark.record()
        done = launch(*args)
        behind.append(not mark.query())
        return done

    engine.loop._launch = launched
    for _ in range(3):
        engine.step()
    assert behind == [True] * 3, "a launch waited until the device had caught up"


@contextlib.contextmanager
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
