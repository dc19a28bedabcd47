"""How long pipeline stages wait for each other with one micro-batch in flight, and with one for each stage.

    python tools/bench/pipeline_bubble.py [--stages 2] [--requests 32] [--tokens 24] [--device-ms 4 --per-token-us 4000]

Starts `--stages` gloo processes, one thread each, and generates on all of them. Without --device-ms the layers are
computed, which takes a core for each stage: on a smaller machine stages wait for the core, not for each other. With it
a step costs device-ms / stages + per-token-us x tokens / stages on each stage, spent asleep beside a tiny model.
What a step costs whatever its size (device-ms) is paid by each micro-batch: where that is most of it, as in decoding
few requests, stages are busy and nothing is gained, but that more requests can run in the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine import build_engine
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.testing.inspect import inspect


class Busy:
    """Seconds spent in functions it wraps, less those that others of them waited."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def work(self, function: Callable[..., Any], sign: int = 1) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += sign * (time.perf_counter() - started)

        return timed

    def wait(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self.work(function, -1)


def make_model(arguments: argparse.Namespace) -> torch.nn.Module:
    from megatron.core import parallel_state

    from megatron_infer.testing.tiny import tiny_gpt

    stage = parallel_state.get_pipeline_model_parallel_rank()
    size = {} if arguments.device_ms else {"hidden_size": 512, "ffn_hidden_size": 1536, "num_attention_heads": 8}
    return tiny_gpt(
        num_layers=arguments.stages * (1 if arguments.device_ms else 4),
        pipeline_model_parallel_size=arguments.stages,
        pre_process=stage == 0,
        post_process=stage == arguments.stages - 1,
        max_sequence_length=1024,
        **size,
    )


def measure(model: torch.nn.Module, arguments: argparse.Namespace, num_micro_batches: int) -> dict[str, float]:
    """Tokens a second, and the share of the time that this stage did nothing."""
    build_engine.num_micro_batches_of = lambda groups, config: num_micro_batches
    engine = DynamicInferenceEngine(
        model,
        InferenceConfig(buffer_size_gb=0.25, max_requests=max(arguments.requests, 4), max_tokens=2048, overlap=False),
    )
    runner, busy = inspect(engine).runner, Busy()
    if arguments.device_ms:
        hidden = inspect(engine).adopted.hidden

        def asleep(step: Any, *received: Any) -> Any:
            milliseconds = arguments.device_ms + arguments.per_token_us * step.num_tokens / 1e3
            time.sleep(milliseconds / 1e3 / arguments.stages)
            return hidden(step, *received)

        inspect(engine).adopted.hidden = asleep
    runner._compute, runner._draw = busy.work(runner._compute), busy.work(runner._draw)
    runner.link.receive = busy.wait(runner.link.receive)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        {"prompt_token_ids": torch.randint(0, 128, (16,), generator=generator).tolist()}
        for _ in range(arguments.requests)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    engine.generate(prompts[:2], params)
    busy.seconds, started = 0.0, time.perf_counter()
    engine.generate(prompts, params)
    seconds = time.perf_counter() - started
    return {"tokens_per_s": arguments.requests * arguments.tokens / seconds, "idle": 1 - busy.seconds / seconds}


def run_stage(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", arguments.stages)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=arguments.stages)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=arguments.stages)
    model = make_model(arguments)
    found = {
        num_micro_batches: measure(model, arguments, num_micro_batches)
        for num_micro_batches in (1, arguments.stages, arguments.stages + 1)
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--device-ms", type=float, default=0.0, help="pretend that a whole step takes so long at least")
    parser.add_argument("--per-token-us", type=float, default=100.0, help="and so long for each of its tokens")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_stage, args=(arguments, folder), nprocs=arguments.stages)
        stages = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(arguments.stages)]
    kind = (
        f"asleep, {arguments.device_ms:g} ms + {arguments.per_token_us:g} us/token" if arguments.device_ms else "fp32"
    )
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {arguments.stages} stages, {kind}")
    print(f"{arguments.requests} requests, 16 prompt and {arguments.tokens} output tokens each")
    one = stages[0]["1"]["tokens_per_s"]
    for num_micro_batches, first in stages[0].items():
        idle = "  ".join(f"stage {rank} {found[num_micro_batches]['idle']:5.1%}" for rank, found in enumerate(stages))
        rate = first["tokens_per_s"]
        print(f"{num_micro_batches} in flight: {rate:8.0f} tokens/s ({rate / one:4.2f}x)   idle: {idle}")


if __name__ == "__main__":
    main()
