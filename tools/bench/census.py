"""What it costs to notice that modules changed, beside the guard of the weights and a decode step.

    python tools/bench/census.py [--model smollm2] [--rounds 200]

The engine compares modules before every step, and reads all weights at the first step after idling.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.entrypoints.llm import LLM
from megatron_infer.models.census import Census
from megatron_infer.testing.inspect import inspect


def median_ms(run: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    engine = LLM(args.model, config=InferenceConfig(buffer_size_gb=0.2)).engine
    adopted, guard, few = inspect(engine).adopted, engine.weights.guard, max(5, args.rounds // 10)
    params = SamplingParams(max_tokens=2 * few + 8, temperature=0.0, ignore_eos=True)
    engine.generate([[1, 2, 3]], params)
    compared = median_ms(adopted.has_changed, args.rounds)
    described = median_ms(adopted.changed_module, few)
    moved, changed = median_ms(guard.moved, args.rounds), median_ms(guard.changed, few)
    engine.add_request([1, 2, 3], params)
    engine.step()
    step = median_ms(engine.step, few)
    print(f"modules {len(Census(engine.model).records)}")
    print(f"comparison before a step   {compared:8.3f} ms")
    print(f"whole comparison           {described:8.3f} ms  (when it found something, and at verify_weights)")
    print(f"weights moved              {moved:8.3f} ms  (every step)")
    print(f"weights changed            {changed:8.3f} ms  (after idling): comparison {compared / changed:.1%} of it")
    print(f"decode step, one request   {step:8.3f} ms  : comparison {compared / step:.1%} of it")


if __name__ == "__main__":
    main()
