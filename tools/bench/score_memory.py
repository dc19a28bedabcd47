"""Peak memory of a session's gradients beside Megatron's own training step: bytes of torch's CPU allocator.

python tools/bench/score_memory.py [--layers 8] [--hidden 256] [--vocab 16384] [--length 256] [--rows 4]
                                   [--micro-batches 4] [--recompute]

Both compute the mean negative log probability of the same sequences on the same model, in megatron-core's DDP, fp32.
The peak counts what a step allocates beside the weights and gradient buffers, which are there before it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.rl.session import RolloutSession
from megatron_infer.testing.cpu_shim import cpu_shim
from megatron_infer.testing.tiny import tiny_gpt


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes that are allocated at once during `run`, beyond those before it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    live = most = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def megatron_step(model: Any, batches: list[torch.Tensor]) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(given: Iterator[torch.Tensor], module: Any) -> tuple[torch.Tensor, Any]:
        ids = next(given)
        positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
        losses = module(ids, positions, None, labels=ids.roll(-1, 1))
        return losses, lambda out: (out[:, :-1].mean(), {})

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=batches[0].shape[1],
        micro_batch_size=len(batches[0]),
        forward_only=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 8), ("hidden", 256), ("vocab", 16384), ("length", 256), ("rows", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--recompute", action="store_true", help="full activation recomputation")
    args = parser.parse_args()
    torch.set_num_threads(1)
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    batches = [
        torch.randint(0, args.vocab, (args.rows, args.length), generator=torch.Generator().manual_seed(seed))
        for seed in range(args.micro_batches)
    ]
    sequences = [row.tolist() for batch in batches for row in batch]
    with cpu_shim(4):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        model = tiny_gpt(
            num_layers=args.layers,
            hidden_size=args.hidden,
            ffn_hidden_size=3 * args.hidden,
            vocab_size=args.vocab,
            max_sequence_length=args.length,
            **(recompute if args.recompute else {}),
        )
        ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        ddp.train()
        session = RolloutSession(ddp, InferenceConfig(buffer_size_gb=0.05, max_sequence_length=args.length))
        num_tokens = len(sequences) * (args.length - 1)

        def scored() -> None:
            session.score_and_backward(
                sequences,
                lambda scores, _: -sum(score.sum() for score in scores) / num_tokens,
                micro_batch_tokens=args.rows * args.length,
            )

        def all_at_once() -> None:
            scores = session.score(sequences, grad=True, micro_batch_tokens=args.rows * args.length)
            (-torch.cat(scores).mean()).backward()

        with session.training():
            runs = {
                "Megatron's own step": lambda: megatron_step(ddp, batches),
                "session.score_and_backward": scored,
                "session.score(grad=True), one backward": all_at_once,
            }
            norms, base = {}, 0
            print(f"{model.config.num_layers} layers of {args.hidden}, vocabulary {args.vocab}, "
                  f"{args.micro_batches} micro-batches of {args.rows} x {args.length} tokens")  # fmt: skip
            for name, run in runs.items():
                ddp.zero_grad_buffer()
                run()  # buffers that are allocated once
                ddp.zero_grad_buffer()
                found = peak_bytes(run)
                base = base or found
                norms[name] = torch.cat([parameter.main_grad.flatten() for parameter in model.parameters()]).norm()
                print(f"{name:40} {found / 2**20:9.1f} MiB   {found / base:5.3f}x   gradient norm {norms[name]:.6f}")


if __name__ == "__main__":
    main()
