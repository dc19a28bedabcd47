"""Least milliseconds of one sampling step, by what its rows want; beside each, what reading the logits once would cost.

    python tools/bench/sampling.py [--rows 32] [--vocab 49152] [--dtype bfloat16] [--threads 2] [--repeat 30]
        [--device cpu] [--json out.json]

Two kinds of logits: `text` (Zipf-like: a nucleus of tens of tokens) and `flat` (normal noise: half of the vocabulary is
in the nucleus, the worst case of top_p). Parameters stay in their rows from step to step, as in decoding.
MEGATRON_INFER_BACKEND=torch measures the path without a compiler. On a GPU a step is timed from its call to the end of
its work, and `captured ...` is the draw that a captured graph holds, launched from the host (of `logprobs 5` the log
probability and rank alone).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.cuda_graphs.captured_draw import CapturedDraw
from megatron_infer.kernels.draw_columns import DrawRoom
from megatron_infer.kernels.select import ChosenKernels, choose
from megatron_infer.memory.device import Device
from megatron_infer.sampling.draw_groups import DeviceOps
from megatron_infer.sampling.row_params import RowParams
from megatron_infer.sampling.sampler import Sampler, SamplerInput
from megatron_infer.sampling.token_masks import forbid
from megatron_infer.scheduler.request import Request

PROMPT, OUTPUT = 256, 64
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.7": {"temperature": 0.7},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "temperature 0.7, penalties": {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "greedy, logprobs 0": {"temperature": 0.0, "logprobs": 0},
    "top_p 0.9, logprobs 5": {"top_p": 0.9, "logprobs": 5},
    "greedy, logit_bias": {"temperature": 0.0, "logit_bias": {7: 1.0, 8: -1.0}},
}
MIXED = ["greedy", "temperature 0.7", "top_k 50", "top_p 0.9"]


def make_logits(kind: str, rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, vocab] of the kind the module's docstring names."""
    torch.manual_seed(0)
    noise = torch.randn(rows, vocab)
    if kind == "flat":
        return noise.to(dtype)
    rank = torch.stack([torch.randperm(vocab) for _ in range(rows)]) + 1
    return (noise * 0.3 - 1.4 * rank.log()).to(dtype)


def make_step(
    logits: torch.Tensor, wants: list[dict[str, Any]], kernels: ChosenKernels, device: Device, *, captured: bool = False
) -> Callable[[], object]:
    """A call that samples one step whose row i wants wants[i]."""
    rows, vocab = logits.shape
    params = RowParams(rows, vocab)
    pool = torch.randint(0, vocab, (rows, PROMPT + OUTPUT + 1), dtype=torch.int32)
    for row, want in enumerate(wants):
        tokens = pool[row, : PROMPT + OUTPUT].tolist()
        request = Request(
            id=str(row),
            tokens=tokens,
            prompt_len=PROMPT,
            params=SamplingParams(max_tokens=None, **want),
            max_total=len(tokens) + 1,
            seed=row,
        )
        params.set(row, request)
    masks = forbid if kernels.device_sampling is None else kernels.device_sampling.forbid
    sampler = Sampler(
        params,
        padded_vocab_size=vocab,
        argmax=kernels.argmax,
        kernels=kernels.sampling,
        ops=DeviceOps(to_device=device.to_device, forbid=masks),
    )
    pool = pool.to(device.torch)
    inputs = SamplerInput(
        rows=np.arange(rows, dtype=np.int32), positions=np.full(rows, PROMPT + OUTPUT), token_pool=pool
    )
    if captured:
        draw = CapturedDraw(sampler, kernels.device_sampling)
        draw.refresh()
        row_S, position_S = (device.to_device(array.astype(np.int32)) for array in (inputs.rows, inputs.positions))
        room = DrawRoom.make(rows, device.torch)
        return lambda: draw.draw(logits, row_S, position_S, pool, room)
    return lambda: sampler.sample(logits, inputs)


def best_ms(step: Callable[[], object], repeat: int, device: Device) -> float:
    """Fastest of `repeat` calls after two of warm-up: what the work takes when nobody else wants the cores."""
    times = []
    for i in range(repeat + 2):
        began = time.perf_counter()
        step()
        device.synchronize("bench")
        if i >= 2:
            times.append((time.perf_counter() - began) * 1e3)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    where = f"torch {torch.__version__}, {platform.machine()}"
    print(f"{args.rows} rows x {args.vocab} {args.dtype}, {args.threads} threads, {where}")
    device = Device(args.device)
    kernels = choose(device.torch, dtype, specs=[], block_size=16)
    print(kernels.table())
    results: dict[str, dict[str, float]] = {}
    kinds = {kind: make_logits(kind, args.rows, args.vocab, dtype).to(device.torch) for kind in ("text", "flat")}
    with torch.inference_mode():
        floor = best_ms(lambda: kinds["text"].amax(-1), args.repeat, device)
        print(
            f"{'ms per step':<35}"
            + "".join(f"{kind:>9}" for kind in kinds)
            + f"   (one read of the logits: {floor:.2f})"
        )
        names = [*CASES, "mixed"]
        for name in [*names, *(f"captured {name}" for name in names * device.is_cuda)]:
            case, captured = name.removeprefix("captured "), name.startswith("captured ")
            wants = [CASES[case if case in CASES else MIXED[i % 4]] for i in range(args.rows)]
            results[name] = {
                kind: best_ms(make_step(logits, wants, kernels, device, captured=captured), args.repeat, device)
                for kind, logits in kinds.items()
            }
            print(f"{name:<35}" + "".join(f"{ms:>9.2f}" for ms in results[name].values()))
    if args.json is not None:
        args.json.write_text(
            json.dumps({"floor_ms": floor, "ms": results, **{k: str(v) for k, v in vars(args).items()}})
        )


if __name__ == "__main__":
    main()
