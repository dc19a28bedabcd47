"""Time per decode step on two tensor-parallel CPU ranks: our layers beside megatron-core's own modules, in one run.

    python tools/bench/tp_decode.py [--layers 12] [--rows 1 8 32] [--steps 24] [--dtype float32]

"layers" are the operations of `fused_layers`. "modules" runs every linear and the embedding as a module with its
autograd functions, and gathers the logits on every rank. The floor beside them is the time of the step's all_reduces
alone, measured in the same processes.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_infer.testing.inspect import inspect

RANKS, PROMPT = 2, 16


class GatheringSampler:
    """The ordinary sampler on logits gathered from all ranks."""

    def __init__(self, sampler: Any) -> None:
        self._sampler, self.params = sampler, sampler.params
        self.vocab_size, self.score = sampler.vocab_size, sampler.score

    def sample(self, logits_SW: Tensor, inputs: Any) -> Any:
        parts = [torch.empty_like(logits_SW) for _ in range(RANKS)]
        dist.all_gather(parts, logits_SW.contiguous())
        return self._sampler.sample(torch.cat(parts, dim=-1), inputs)


@contextlib.contextmanager
def as_modules(engine: Any) -> Iterator[None]:
    """Within the block every linear and the embedding run as modules, and the sampler on gathered logits."""
    from megatron_infer.models.adopt import AdoptedModel
    from megatron_infer.models.fused_layers import AllReduce, FusedLinear

    live, runner = inspect(engine).adopted.live, inspect(engine).runner
    modules = {id(module._parameters): module for module in live.modules()}

    def run(self: FusedLinear, step: Any, x_TX: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out, bias = modules[id(self.parameters)](x_TX.unsqueeze(1))  # a row-parallel one sums over the ranks
        out = out.squeeze(1)
        return (out if bias is None else out + bias), residual_TD

    def nothing(self: AllReduce, step: Any, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return x_TD, residual_TD

    def embed(self: AdoptedModel, step: Any) -> Tensor:
        return live.embedding(step.token_ids_T.unsqueeze(0), step.positions_T.unsqueeze(0)).squeeze(1)

    sharded = runner.sampler
    runner.sampler = GatheringSampler(sharded._sampler)
    with (
        mock.patch.object(FusedLinear, "run", run),
        mock.patch.object(AllReduce, "run", nothing),
        mock.patch.object(AdoptedModel, "_embed", embed),
    ):
        yield
    runner.sampler = sharded


def decode_ms(engine: Any, rows: int, steps: int) -> list[float]:
    """Milliseconds of each decode step of `rows` requests, first and last steps left out."""
    from megatron_infer.config.sampling_params import SamplingParams

    if dist.get_rank() == 0:
        for i in range(rows):
            prompt = [(7 * i + j) % 1000 for j in range(PROMPT)]
            engine.add_request(prompt, SamplingParams(max_tokens=steps + 4, temperature=0.0))
    times = []
    while engine.has_unfinished():
        start = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - start))
    return times[3:-2]


def floor_ms(layers: int, rows: int, hidden: int, dtype: torch.dtype) -> float:
    """The all_reduces of a step alone: two a layer and the embedding's."""
    x, samples = torch.zeros(rows, hidden, dtype=dtype), []
    for _ in range(12):
        start = time.perf_counter()
        for _ in range(2 * layers + 1):
            dist.all_reduce(x)
        samples.append(1e3 * (time.perf_counter() - start))
    return statistics.median(samples)


def worker(rank: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    from megatron_infer.config.inference import InferenceConfig
    from megatron_infer.engine.engine import DynamicInferenceEngine
    from megatron_infer.models.mcore_compat import parallel_state
    from megatron_infer.testing.tiny import tiny_gpt

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    dtype, hidden = getattr(torch, args.dtype), 576
    model = tiny_gpt(
        num_layers=args.layers, hidden_size=hidden, num_attention_heads=8, num_query_groups=4, kv_channels=64,
        ffn_hidden_size=1536, vocab_size=49152, params_dtype=dtype, tensor_model_parallel_size=RANKS, randomize=False,
    )  # fmt: skip
    engine = DynamicInferenceEngine(model, InferenceConfig(buffer_size_gb=0.5, max_requests=max(args.rows)))
    if rank == 0:
        print(f"{args.layers} layers of {hidden}, vocabulary 49152, {args.dtype}, {RANKS} ranks; ms per decode step")
        print("rows    layers   modules   all_reduces alone   layers / modules")
    for rows in args.rows:
        times: dict[str, list[float]] = {"layers": [], "modules": []}
        for _ in range(args.rounds):
            times["layers"] += decode_ms(engine, rows, args.steps)
            with as_modules(engine):
                times["modules"] += decode_ms(engine, rows, args.steps)
        layers, modules = (statistics.median(times[kind]) for kind in ("layers", "modules"))
        floor = floor_ms(args.layers, rows, hidden, dtype)
        if rank == 0:
            print(f"{rows:4} {layers:9.2f} {modules:9.2f} {floor:19.2f} {layers / modules:18.2f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, args=(folder, args), nprocs=RANKS)


if __name__ == "__main__":
    main()
