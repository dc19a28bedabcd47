"""Ranks on one machine, each a gloo process: weights that change their layout, stages that wait for each other, and
experts on two ranks whose requests are shared or each rank's own.

    python tools/bench/ranks.py --part reshard [--model smollm2] [--dtype bfloat16] [--rounds 5]
    python tools/bench/ranks.py --part generation [--model smollm2] [--dtype bfloat16] [--requests 32] [--tokens 24]
    python tools/bench/ranks.py --part stages [--stages 2] [--requests 32] [--tokens 24]
        [--device-ms 4 --per-token-us 4000]
    python tools/bench/ranks.py --part experts [--tokens 24] [--prompt 512] [--rounds 5] [--dtype float32]
    python tools/bench/ranks.py --part context [--requests 64] [--tokens 64] [--rounds 5]
    python tools/bench/ranks.py --part shared [--rounds 5]
    python tools/bench/ranks.py --part prompts [--ranks 4] [--requests 16] [--tokens 64] [--rounds 5]

reshard: a trainer's weights into an engine's model of another layout, against what gloo alone takes for the bytes.
"must" is what targets want and their own ranks do not have, over both ranks; "gloo" sends as many bytes in the same
directions in messages as large, and does nothing else. Medians of the same run. A training step lies between two
updates, so that nothing is in a cache by accident. The plan is made in the first update.

generation: sessions of one trainer with TP2, that generate with TP2 and, by `generation_model`, with TP1 on each rank,
in turns. Seconds until the block of generating() has begun and has ended, and of the rollout between; MiB of weights on
a rank within the block and outside. A training step lies between two blocks.

stages: pipeline stages with one micro-batch in flight, and with one for each stage. Without --device-ms the layers are
computed, which takes a core for each stage: on a smaller machine stages wait for the core, not for each other. With
--device-ms a step costs device-ms / stages + per-token-us x tokens / stages on each stage, spent asleep. Each
micro-batch pays device-ms whatever its size: where device-ms is most of a step, as in decoding few requests, stages
are busy and nothing is gained, except that more requests can run in the same time.

experts: a model of `EXPERTS` with attention as large models have it, over two ranks of one thread each. "shared": both
compute the attention of all requests. "own": `dp_attention`. Decoding alone is timed, in turns of both; medians.

context: a rollout of the same prompts by one rank while the other one waits, and by two context-parallel ranks, in
turns. Seconds of the clock, and CPU seconds of the busier rank, which other processes of the machine change less.

shared: one prompt of each length of LENGTHS and one token of it, by two context-parallel ranks without the option
`context_parallel="prompt"` and with it, whatever the length, in turns. Seconds as for "context".

prompts: expert-parallel ranks that each give `requests` prompts of 512 tokens, 4 samples of `tokens` each, to one
engine, against rank 0 giving all of them, which a trainer would gather first. Of a rollout: "compare" is the round that
compares the ranks' prompts, with its digests, on the rank that came last, which waits for no other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.distributed.generation_groups import generation_groups
from megatron_infer.engine import build_engine
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.sources import open_source
from megatron_infer.models.mcore_compat import parallel_state
from megatron_infer.rl import shared_prefill
from megatron_infer.rl.rollout import Rollout
from megatron_infer.rl.session import RolloutSession
from megatron_infer.rl.updates import ReshardSource, apply, verify_update
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt
from megatron_infer.utils.host import cpu_name

RANKS, MIB, BUCKET_MIB = 2, 2**20, 16.0
Name = TypeVar("Name")
Figures = TypeVar("Figures")


def in_turns(runs: Mapping[Name, Callable[[int], Figures]], rounds: int) -> dict[Name, list[Figures]]:
    """What each run gives in each round, by the number of the round. The first round, 0, warms up and is left out."""
    found: dict[Name, list[Figures]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            figures = run(turn)
            if turn:
                found[name].append(figures)
    return found


def medians(rows: Iterable[Iterable[float]]) -> list[float]:
    """The median of each column."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def random_prompts(count: int, length: int, *, seed: int = 1) -> list[list[int]]:
    return torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def train(model: torch.nn.Module) -> None:
    """Change every weight, as a training step does."""
    for parameter in model.parameters():
        parameter.mul_(1.001)


# ---------------------------------------------------------------------- reshard

Layout = dict[str, int]
MOVES: tuple[tuple[str, Layout, Layout, tuple[int, ...], tuple[int, ...]], ...] = (
    ("TP2 -> TP1 on rank 0", {"tensor": 2}, {}, (0, 1), (0,)),
    ("TP1 on rank 0 -> TP2", {}, {"tensor": 2}, (0,), (0, 1)),
    ("TP2 -> TP1 on each rank", {"tensor": 2}, {}, (0, 1), (0, 1)),
    ("PP2 -> TP2", {"pipeline": 2}, {"tensor": 2}, (0, 1), (0, 1)),
    ("EP2 -> EP1, 8 experts", {"expert": 2}, {}, (0, 1), (0, 1)),
)
"""What, the trainer's layout and the engine's, and which ranks have either."""
EXPERTS = {"num_layers": 8, "hidden_size": 512, "ffn_hidden_size": 1024, "num_moe_experts": 8, "moe_router_topk": 2}


def build_layout(args: argparse.Namespace, layout: Layout, *, experts: bool) -> Any:
    """MODEL, or one of `EXPERTS` with random weights, as this rank has it."""

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**{f"{name}_model_parallel_size": size for name, size in layout.items()})
    if experts:
        model = tiny_gpt(**EXPERTS, expert_model_parallel_size=layout.get("expert", 1))
        return model.to(getattr(torch, args.dtype))
    sizes = {f"{name}_parallel": size for name, size in layout.items()}
    return build_model(open_source(args.model), dtype=args.dtype, **sizes)


def measure_updates(args: argparse.Namespace, trainer: Any, target: Any) -> tuple[list[float], Any]:
    """Seconds of every update on this rank (the first one plans), and the last report."""

    source, seconds = ReshardSource(trainer, bucket_mib=BUCKET_MIB), []
    for _ in range(args.rounds + 1):
        if trainer is not None:
            train(trainer)
        dist.barrier()
        start = time.perf_counter()
        if target is None:
            source.send()
        else:
            apply(target, source)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if target is None:
        source.verify()
    else:
        verify_update(target, source)
    return seconds, source.report


def plain_gloo(args: argparse.Namespace, report: Any) -> float:
    """Seconds for this rank's bytes, sent and received with nothing packed or unpacked."""
    size = int(BUCKET_MIB * MIB)
    out, back = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    peer, samples = 1 - dist.get_rank(), []
    for _ in range(args.rounds):
        dist.barrier()
        start, works = time.perf_counter(), []
        for buffer, total, call in ((back, report.bytes_received, dist.irecv), (out, report.bytes_sent, dist.isend)):
            for at in range(0, total, size):
                works.append(call(buffer[: min(size, total - at)], peer))
        for work in works:
            work.wait()
        dist.barrier()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def reshard(rank: int, args: argparse.Namespace) -> None:
    """The part on a rank; the first one prints."""
    if rank == 0:
        print(f"{args.model}, {args.dtype}, {RANKS} ranks, buckets of {BUCKET_MIB:g} MiB")
        print(f"{'':<26}{'must':>8}{'moved':>8}{'messages':>10}{'first':>8}{'update':>8}{'gloo':>8}  of the ceiling")
        print(f"{'':<26}{'MiB':>8}{'MiB':>8}{'':>10}{'ms':>8}{'ms':>8}{'ms':>8}")
    for name, before, after, trains, infers in MOVES:
        experts = "expert" in before
        trainer, target = build_layout(args, before, experts=experts), build_layout(args, after, experts=experts)
        seconds, report = measure_updates(args, trainer if rank in trains else None, target if rank in infers else None)
        moved = torch.tensor([report.bytes_received, report.messages_received])
        dist.all_reduce(moved)
        gloo, update = plain_gloo(args, report), statistics.median(seconds[1:])
        if rank == 0:
            print(
                f"{name:<26}{report.bytes_must_move / MIB:8.1f}{int(moved[0]) / MIB:8.1f}{int(moved[1]):10}"
                f"{seconds[0] * 1e3:8.0f}{update * 1e3:8.0f}{gloo * 1e3:8.0f}{gloo / update:10.0%}",
                flush=True,
            )


# ---------------------------------------------------------------------- generation


def weights_mib(*models: Any) -> float:
    tensors = {id(one): one for model in models for one in model.parameters()}
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors.values()}
    return sum(storages.values()) / MIB


def timed_block(_: int, session: Any, args: argparse.Namespace, models: list[Any]) -> dict[str, float]:
    """Seconds and MiB of one block of generating()."""

    prompts = random_prompts(args.requests, 16)
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    at, figures = [], {}
    dist.barrier()
    at.append(time.perf_counter())
    with session.generating() as roll:
        dist.barrier()
        at.append(time.perf_counter())
        assert len(roll.generate(prompts, params)) == args.requests
        dist.barrier()
        at.append(time.perf_counter())
        figures["within, MiB"] = weights_mib(*models)
    dist.barrier()
    at.append(time.perf_counter())
    with session.training():
        train(session.model)
        session.update_weights()
    begins, rollout, ends = (later - earlier for earlier, later in zip(at, at[1:], strict=False))
    report = session.reshard_report
    moved = 0.0 if report is None else report.bytes_received / MIB
    reshard = 0.0 if report is None else report.seconds
    seconds = {"begin, s": begins, "of that reshard, s": reshard, "rollout, s": rollout, "end, s": ends}
    return figures | {"outside, MiB": weights_mib(*models), "received, MiB": moved} | seconds


def generation(rank: int, args: argparse.Namespace) -> None:
    """The part on a rank; the first one prints."""

    options = {"buffer_size_gb": 0.5, "max_requests": args.requests, "max_sequence_length": 512}
    trainers = {name: build_layout(args, {"tensor": RANKS}, experts=False) for name in ("TP2", "TP1 on each rank")}
    other = build_model(
        open_source(args.model).config(), dtype=args.dtype, pg_collection=generation_groups(trainers["TP2"])
    )
    runs = {}
    for name, generates in (("TP2", None), ("TP1 on each rank", other)):
        how = {"meter": None, "suspend_mode": "recompute", "generation_model": generates}
        session = RolloutSession(trainers[name], options, **how)
        models = [one for one in (trainers[name], generates) if one is not None]
        runs[name] = partial(timed_block, session=session, args=args, models=models)
    found = in_turns(runs, args.rounds)  # the first round also plans
    if rank == 0:
        print(f"{args.model}, {args.dtype}, {args.requests} requests of 16 and {args.tokens} tokens, rank 0")
        for figure in found["TP2"][0]:
            values = [
                f"{name} {statistics.median(one[figure] for one in rounds):9.3f}" for name, rounds in found.items()
            ]
            print(f"{figure:<20}" + "   ".join(values))


# ---------------------------------------------------------------------- stages


class Busy:
    """Seconds spent in functions it wraps, less those that others of them waited."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def work(self, function: Callable[..., Any], sign: int = 1) -> Callable[..., Any]:
        def timed(*values: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*values, **options)
            finally:
                self.seconds += sign * (time.perf_counter() - started)

        return timed

    def wait(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.work(function, -1)


def make_model(args: argparse.Namespace) -> torch.nn.Module:

    stage = parallel_state.get_pipeline_model_parallel_rank()
    size = {} if args.device_ms else {"hidden_size": 512, "ffn_hidden_size": 1536, "num_attention_heads": 8}
    return tiny_gpt(
        num_layers=args.stages * (1 if args.device_ms else 4),
        pipeline_model_parallel_size=args.stages,
        pre_process=stage == 0,
        post_process=stage == args.stages - 1,
        max_sequence_length=1024,
        **size,
    )


def measure_stages(model: torch.nn.Module, args: argparse.Namespace, num_micro_batches: int) -> dict[str, float]:
    """Tokens a second, and the share of the time that this stage did nothing."""

    build_engine.num_micro_batches_of = lambda groups, config: num_micro_batches
    engine = DynamicInferenceEngine(
        model,
        InferenceConfig(buffer_size_gb=0.25, max_requests=max(args.requests, 4), max_tokens=2048, overlap=False),
    )
    runner, busy = inspect(engine).runner, Busy()
    if args.device_ms:
        hidden = inspect(engine).adopted.hidden

        def asleep(step: Any, *received: Any) -> Any:
            milliseconds = args.device_ms + args.per_token_us * step.num_tokens / 1e3
            time.sleep(milliseconds / 1e3 / args.stages)
            return hidden(step, *received)

        inspect(engine).adopted.hidden = asleep
    runner._compute, runner._draw = busy.work(runner._compute), busy.work(runner._draw)
    runner.link.receive = busy.wait(runner.link.receive)
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts(args.requests, 16)]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    engine.generate(prompts[:2], params)
    busy.seconds, started = 0.0, time.perf_counter()
    engine.generate(prompts, params)
    seconds = time.perf_counter() - started
    return {"tokens_per_s": args.requests * args.tokens / seconds, "idle": 1 - busy.seconds / seconds}


def stages(rank: int, args: argparse.Namespace) -> None:
    """The part on a rank; the first one prints."""

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=args.stages)
    model = make_model(args)
    found = {count: measure_stages(model, args, count) for count in (1, args.stages, args.stages + 1)}
    by_rank: list[Any] = [None] * args.stages
    dist.all_gather_object(by_rank, found)
    if rank > 0:
        return
    kind = f"asleep, {args.device_ms:g} ms + {args.per_token_us:g} us/token" if args.device_ms else "fp32"
    print(f"{args.stages} stages, {kind}; {args.requests} requests, 16 prompt and {args.tokens} output tokens each")
    for count, first in found.items():
        idle = "  ".join(f"stage {number} {one[count]['idle']:5.1%}" for number, one in enumerate(by_rank))
        rate = first["tokens_per_s"]
        print(f"{count} in flight: {rate:8.0f} tokens/s ({rate / found[1]['tokens_per_s']:4.2f}x)   idle: {idle}")


# ---------------------------------------------------------------------- experts

REQUESTS = (1, 4, 16, 32)
"""Of each rank."""
MOE = EXPERTS | {
    "num_layers": 4,
    "num_attention_heads": 8,
    "num_query_groups": 8,
    "moe_ffn_hidden_size": 512,
    "vocab_size": 16384,
}


def decode_costs(engine: Any, prompts: list[dict[str, Any]], args: argparse.Namespace) -> list[float]:
    """Seconds, and seconds of this rank's core, from when all requests have drawn a token until each has drawn
    args.tokens more."""

    params = SamplingParams(temperature=0.0, max_tokens=args.tokens + 1, ignore_eos=True)
    if engine.relay.is_leader:
        for prompt in prompts:
            engine.add_request(prompt, params)
    assert len(engine.step()) == len(prompts), "all prompts fit into one step"
    start, core = time.perf_counter(), time.process_time()
    for _ in range(args.tokens):
        assert len(engine.step()) == len(prompts), "all requests decode together"
    costs = [time.perf_counter() - start, time.process_time() - core]
    assert not engine.has_unfinished()
    return costs


def experts(rank: int, args: argparse.Namespace) -> None:
    """The part on a rank; the first one prints."""

    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    model = tiny_gpt(**MOE, max_sequence_length=2048, expert_model_parallel_size=RANKS)
    model = model.to(getattr(torch, args.dtype))
    if rank == 0:
        print(f"{args.dtype}; {args.prompt} prompt and {args.tokens} timed tokens a request; ms a token of any rank")
    for count in REQUESTS:
        every = [{"prompt_token_ids": ids} for ids in random_prompts(RANKS * count, args.prompt, seed=count)]
        kv_bytes = RANKS * count * (args.prompt + args.tokens + 64) * MOE["num_layers"] * 2 * MOE["hidden_size"] * 4
        how = {
            "buffer_size_gb": kv_bytes / 2**30 + 0.1,
            "block_size_tokens": 64,
            "enable_prefix_caching": True,
            "prefix_caching_eviction_policy": "lru",  # later rounds find their prompts
            "max_requests": RANKS * count,
            "max_tokens": RANKS * count * args.prompt,
            "overlap": False,
        }

        def run(_: int, engine: Any, prompts: list[dict[str, Any]], most: int = RANKS * count) -> list[float]:
            costs = torch.tensor(decode_costs(engine, prompts, args))
            dist.all_reduce(costs, dist.ReduceOp.MAX)
            return (costs * 1e3 / (most * args.tokens)).tolist()

        engines = [DynamicInferenceEngine(model, InferenceConfig(**how, dp_attention=own)) for own in (False, True)]
        runs = {
            "shared": partial(run, engine=engines[0], prompts=every),
            "own": partial(run, engine=engines[1], prompts=every[rank::RANKS]),
        }
        found = in_turns(runs, args.rounds)
        (shared, shared_core), (own, own_core) = (medians(found[name]) for name in runs)
        if rank == 0:
            print(
                f"{count:3} requests a rank: wall shared {shared:7.3f} own {own:7.3f} ({shared / own:4.2f}x)   "
                f"core shared {shared_core:7.3f} own {own_core:7.3f} ({shared_core / own_core:4.2f}x)",
                flush=True,
            )


# ---------------------------------------------------------------------- context-parallel ranks


LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)


def make_session(num_ranks: int, args: argparse.Namespace, longest: int = 1024, **how: Any) -> Any:
    """A session of a model that trains with as many context-parallel ranks."""

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=num_ranks)
    sizes = {"hidden_size": 512, "ffn_hidden_size": 1536, "num_attention_heads": 8, "max_sequence_length": longest}
    model = tiny_gpt(num_layers=4, context_parallel_size=num_ranks, position_embedding_type="rope", **sizes)
    options = {"buffer_size_gb": 0.5, "max_requests": args.requests, "max_sequence_length": longest}
    return RolloutSession(model, options, meter=None, **how)


def timed_rollout(session: Any, prompts: list[list[int]], num_tokens: int, *, draws: bool) -> tuple[float, float]:
    """Seconds of the clock until all ranks are done, and CPU seconds of the busier one."""

    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    dist.barrier()
    started, cpu = time.perf_counter(), time.process_time()
    if draws:
        with session.generating() as roll:
            assert len(roll.generate(prompts, params)) == len(prompts)
    used = torch.tensor(time.process_time() - cpu)
    dist.barrier()
    seconds = time.perf_counter() - started
    dist.all_reduce(used, dist.ReduceOp.MAX)
    return seconds, float(used)


def context(rank: int, args: argparse.Namespace) -> None:
    """The part on a rank; the first one prints."""
    prompts = random_prompts(args.requests, 16)
    sessions = {count: make_session(count, args) for count in (1, RANKS)}

    def run(_: int, count: int) -> tuple[float, float]:
        return timed_rollout(sessions[count], prompts, args.tokens, draws=rank < count)

    found = in_turns({count: partial(run, count=count) for count in sessions}, args.rounds)
    if rank > 0:
        return
    print(f"fp32; {args.requests} requests, 16 prompt and {args.tokens} output tokens each")
    first: dict[str, float] = {}
    for count, rounds in found.items():
        for kind, median in zip(("clock", "CPU"), medians(rounds), strict=True):
            first.setdefault(kind, median)
            print(f"{count} rank(s): {median:7.3f} s {kind} ({first[kind] / median:4.2f}x)")


def shared(rank: int, args: argparse.Namespace) -> None:
    """The part on a rank; the first one prints."""

    shared_prefill.LEAST_TOKENS = 1
    how = {"longest": LENGTHS[-1] + 16}
    sessions = {"without": make_session(RANKS, args, **how)}
    sessions["with"] = make_session(RANKS, args, **how, context_parallel="prompt")
    if rank == 0:
        print("fp32: without, with")
    for length in LENGTHS:

        def run(turn: int, session: Any, length: int = length) -> tuple[float, float]:
            session.engine.reset_prefix_cache()
            return timed_rollout(session, random_prompts(1, length, seed=turn), 1, draws=True)

        found = in_turns({name: partial(run, session=one) for name, one in sessions.items()}, args.rounds)
        without, with_option = (medians(found[name]) for name in sessions)
        if rank == 0:
            pairs = zip(("clock", "CPU"), without, with_option, strict=True)
            texts = [f"{kind} {one * 1e3:8.1f} {two * 1e3:8.1f} ms ({one / two:4.2f}x)" for kind, one, two in pairs]
            print(f"{length:6} tokens: {'   '.join(texts)}", flush=True)


# ---------------------------------------------------------------------- prompts


def prompts_of_ranks(rank: int, args: argparse.Namespace) -> None:
    """The part on a rank; the first one prints."""

    parallel_state.initialize_model_parallel(expert_model_parallel_size=args.ranks)
    model = tiny_gpt(**EXPERTS, expert_model_parallel_size=args.ranks, max_sequence_length=1024)
    roll = Rollout(DynamicInferenceEngine(model, InferenceConfig(buffer_size_gb=0.25, max_requests=64)))
    how = SamplingParams(n=4, max_tokens=args.tokens, ignore_eos=True)
    busy = Busy()
    roll.engine.relay.exchange = busy.work(roll.engine.relay.exchange)

    def run(turn: int, gathers: bool) -> list[float]:
        own, gathering = random_prompts(args.requests, 512, seed=100 * turn + rank), 0.0
        busy.seconds = 0.0
        dist.barrier()
        started, given = time.perf_counter(), own
        if gathers:
            parts: list[Any] = [None] * args.ranks
            dist.all_gather_object(parts, own)
            given = [prompt for part in parts for prompt in part] if rank == 0 else []
            gathering = time.perf_counter() - started
        roll.generate(given, how)
        mine: list[Any] = [None] * args.ranks
        dist.all_gather_object(mine, (time.perf_counter() - started, busy.seconds, gathering))
        return [max(one[0] for one in mine), *(min(one[at] for one in mine) for at in (1, 2))]

    runs = {"each its own": partial(run, gathers=False), "gathered": partial(run, gathers=True)}
    found = in_turns(runs, args.rounds)
    if rank:
        return
    print(f"{args.ranks} expert-parallel ranks, {args.requests} prompts of 512 tokens each, 4 samples of {args.tokens}")
    for name, figures in found.items():
        total, comparing, gathering = medians(figures)
        print(
            f"{name:<14} rollout {total:7.2f} s   compare {comparing * 1e3:7.2f} ms ({comparing / total:.3%})   "
            f"gather {gathering * 1e3:7.2f} ms ({gathering / total:.3%})"
        )


# ---------------------------------------------------------------------- command line


PARTS = {
    "reshard": reshard,
    "generation": generation,
    "stages": stages,
    "experts": experts,
    "context": context,
    "shared": shared,
    "prompts": prompts_of_ranks,
}


def run_rank(rank: int, folder: str, num_ranks: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if rank == 0:
        print(f"{cpu_name()}, {os.cpu_count()} cores, one thread a rank; medians of {args.rounds} rounds")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank, world_size=num_ranks)
    PARTS[args.part](rank, args)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--device-ms", type=float, default=0.0, help="pretend that a whole step takes so long at least")
    parser.add_argument("--per-token-us", type=float, default=100.0, help="and so long for each of its tokens")
    args = parser.parse_args()
    num_ranks = {"stages": args.stages, "prompts": args.ranks}.get(args.part, RANKS)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, args=(folder, num_ranks, args), nprocs=num_ranks)


if __name__ == "__main__":
    main()
