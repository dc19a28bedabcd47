"""What exact mode costs: tokens a second with batch_invariant on and off, rounds interleaved, medians.

python tools/bench/exact.py [--dtype float32|bfloat16] [--rounds 5] [--threads 1] [--source smollm2]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.model_loader.build import build_model
from megatron_infer.model_loader.sources import open_source
from megatron_infer.models.exact_forward import exact_logprobs

PROMPT, CONTEXT, STEPS = 512, 128, 24


def make_engine(model: torch.nn.Module, *, exact: bool) -> DynamicInferenceEngine:
    config = InferenceConfig(
        buffer_size_gb=0.5,
        block_size_tokens=64,
        max_requests=16,
        max_tokens=2048,
        max_sequence_length=2048,
        batch_invariant=exact,
    )
    return DynamicInferenceEngine(model, config)


def tokens_of(count: int, seed: int) -> list[int]:
    return torch.randint(10, 40000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def decode_speed(engine: DynamicInferenceEngine, batch: int) -> float:
    """Tokens a second of `batch` requests, from CONTEXT tokens on."""
    params = SamplingParams(max_tokens=STEPS + 2, temperature=0.0, ignore_eos=True)
    for i in range(batch):
        engine.add_request(tokens_of(CONTEXT, i), params)
    engine.step()
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    spent = time.perf_counter() - began
    while engine.has_unfinished():
        engine.step()
    return batch * STEPS / spent


def prefill_speed(engine: DynamicInferenceEngine, length: int) -> float:
    """Prompt tokens a second of one prompt."""
    began = time.perf_counter()
    engine.add_request(tokens_of(length, 99), SamplingParams(max_tokens=1, temperature=0.0))
    while engine.has_unfinished():
        engine.step()
    return length / (time.perf_counter() - began)


def score_speed(model: torch.nn.Module) -> float:
    """Tokens a second of the trainer's exact scoring forward."""
    began = time.perf_counter()
    exact_logprobs(model, [tokens_of(PROMPT, 99)])
    return PROMPT / (time.perf_counter() - began)


def stock_score_speed(model: torch.nn.Module) -> float:
    """The same by the stock forward and log_softmax."""
    ids = torch.tensor([tokens_of(PROMPT, 99)])
    began = time.perf_counter()
    with torch.no_grad():
        logits = model(ids, torch.arange(PROMPT)[None], None)
        logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])
    return PROMPT / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--source", default="smollm2")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build_model(open_source(args.source), dtype=getattr(torch, args.dtype))
    engines = {name: make_engine(model, exact=name == "exact") for name in ("normal", "exact")}
    cases = {
        "decode, batch 1": lambda name: decode_speed(engines[name], 1),
        "decode, batch 16": lambda name: decode_speed(engines[name], 16),
        "prefill 512": lambda name: prefill_speed(engines[name], PROMPT),
        "prefill 1536": lambda name: prefill_speed(engines[name], 3 * PROMPT),
        "score 512 (trainer)": lambda name: score_speed(model) if name == "exact" else stock_score_speed(model),
    }
    print(f"{args.source}, {args.dtype}, {args.threads} threads, medians of {args.rounds} rounds, tokens/s")
    print(f"{'':<22}{'normal':>10}{'exact':>10}{'cost':>8}   (time exact / time normal; lowest and highest of rounds)")
    for case, speed in cases.items():
        found: dict[str, list[float]] = {"normal": [], "exact": []}
        for _ in range(args.rounds + 1):
            for name, figures in found.items():
                figures.append(speed(name))
        normal, exact = (statistics.median(figures[1:]) for figures in found.values())  # the first is warm-up
        ratios = [a / b for a, b in zip(*(figures[1:] for figures in found.values()), strict=True)]
        cost = f"{normal / exact:>7.2f}x   {min(ratios):.2f} .. {max(ratios):.2f}"
        print(f"{case:<22}{normal:>10.1f}{exact:>10.1f}{cost}")


if __name__ == "__main__":
    main()
