"""A trainer's weights into an engine's model of another layout, beside what gloo alone takes for the bytes.

    python tools/bench/reshard.py [--model smollm2] [--dtype bfloat16] [--bucket-mib 16] [--rounds 5]

Two CPU ranks. "must" is what targets want and their own ranks do not have, over both ranks; "gloo" sends as many bytes,
the same way round, in messages as large, and does nothing else. Medians of the same run; a training step lies between
two updates, so that nothing is in a cache by accident. The plan is made in the first update.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

RANKS, MIB = 2, 2**20
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


def build(args: argparse.Namespace, layout: Layout, *, experts: bool) -> Any:
    """MODEL, or one of `EXPERTS` with random weights, as this rank has it."""
    from megatron_infer.models.loading.build_model import build_model
    from megatron_infer.models.loading.sources import open_source
    from megatron_infer.models.mcore_compat import parallel_state
    from megatron_infer.testing.tiny import tiny_gpt

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**{f"{name}_model_parallel_size": size for name, size in layout.items()})
    if experts:
        model = tiny_gpt(**EXPERTS, expert_model_parallel_size=layout.get("expert", 1))
        return model.to(getattr(torch, args.dtype))
    sizes = {f"{name}_parallel": size for name, size in layout.items()}
    return build_model(open_source(args.model), dtype=args.dtype, **sizes)


def measure(args: argparse.Namespace, trainer: Any, target: Any) -> tuple[list[float], Any]:
    """Seconds of every update on this rank (the first one plans), and the last report."""
    from megatron_infer.rl.updates import ReshardSource, apply, verify_update

    source, seconds = ReshardSource(trainer, bucket_mib=args.bucket_mib), []
    for _ in range(args.rounds + 1):
        if trainer is not None:
            with torch.no_grad():
                for parameter in trainer.parameters():
                    parameter.mul_(1.001)
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
    size = int(args.bucket_mib * MIB)
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


def worker(rank: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    if rank == 0:
        print(f"{args.model}, {args.dtype}, {RANKS} ranks, buckets of {args.bucket_mib:g} MiB, {args.rounds} rounds")
        print(f"{'':<26}{'must':>8}{'moved':>8}{'messages':>10}{'first':>8}{'update':>8}{'gloo':>8}  of the ceiling")
        print(f"{'':<26}{'MiB':>8}{'MiB':>8}{'':>10}{'ms':>8}{'ms':>8}{'ms':>8}")
    for name, before, after, trains, infers in MOVES:
        experts = "expert" in before
        trainer, target = build(args, before, experts=experts), build(args, after, experts=experts)
        seconds, report = measure(args, trainer if rank in trains else None, target if rank in infers else None)
        moved = torch.tensor([report.bytes_received, report.messages_received])
        dist.all_reduce(moved)
        gloo, update = plain_gloo(args, report), statistics.median(seconds[1:])
        if rank == 0:
            print(
                f"{name:<26}{report.bytes_must_move / MIB:8.1f}{int(moved[0]) / MIB:8.1f}{int(moved[1]):10}"
                f"{seconds[0] * 1e3:8.0f}{update * 1e3:8.0f}{gloo * 1e3:8.0f}{gloo / update:10.0%}",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--bucket-mib", type=float, default=16.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, args=(folder, args), nprocs=RANKS)


if __name__ == "__main__":
    main()
