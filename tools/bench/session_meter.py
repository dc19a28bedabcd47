"""What a session's mismatch meter costs, and how near its figures come to an alarm where there is no fault.

    python tools/bench/session_meter.py [--model smollm2] [--dtype auto] [--prompts 8] [--group-size 8] ...

A round is what a loop does without its backward pass: draw every group, score every sample. Sessions without a meter
and with the default one, on the same weights, take turns; CPU seconds, which other load on the machine hardly changes.
Then all samples of a round, in windows of 1 and of 4 samples: the largest figures. (The session's own windows go on
until they have 256 tokens in half precision.)
"""

from __future__ import annotations

from megatron_infer.utils.openmp import limit_spinning

limit_spinning()  # before torch is imported

# ruff: noqa: E402
import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

from megatron_infer.config.machine_defaults import machine_config
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.entrypoints.llm import chat_prompt
from megatron_infer.kernels.threads import apply_cpu_settings
from megatron_infer.memory.device import Device, choose_dtype
from megatron_infer.model_loader.build import build_model
from megatron_infer.model_loader.description_shape import shape_of
from megatron_infer.model_loader.sources import open_source
from megatron_infer.rl.mismatch_figures import LIMITS
from megatron_infer.rl.mismatch_meter import MismatchMeter
from megatron_infer.rl.samples import RolloutGroup
from megatron_infer.rl.session import RolloutSession

TOPICS = ["the sea", "a bee", "snow", "the moon", "bread", "a river", "gold", "the wind", "salt", "a horse"]


def play(session: RolloutSession, prompts: list[list[int]], params: SamplingParams) -> tuple[float, list[RolloutGroup]]:
    """A round -> its CPU seconds and its groups."""
    started = time.process_time()
    with session.generating() as roll:
        groups = roll.generate(prompts, params)
    with session.training():
        samples = [sample for group in groups for sample in group.samples]
        session.score([sample.ids for sample in samples], start=[len(sample.prompt_ids) for sample in samples])
    return time.process_time() - started, groups


def largest_figures(
    session: RolloutSession, groups: list[RolloutGroup], size: int
) -> tuple[int, int, dict[str, float]]:
    """Windows of `size` samples -> their number, the number of alarms, and the largest of each figure with a limit."""
    meter = MismatchMeter(session, share=1.0, attribute=False)
    singles = [replace(group, samples=[sample]) for group in groups for sample in group.samples]
    windows = [singles[start : start + size] for start in range(0, len(singles), size)]
    reports = [report for window in windows if (report := meter.observe(window)) is not None]
    worst = {name: max(float(getattr(report.figures, name)) for report in reports) for name in LIMITS}
    return len(reports), meter.num_alarms, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="an alias, a Hugging Face directory, a .gguf file")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=8, help="at most 10 (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    device, threads = Device("cpu"), apply_cpu_settings().num_threads
    source = open_source(args.model)
    plan, dtype, tokenizer = source.config(), choose_dtype(args.dtype, device, trains=True), source.tokenizer()
    shape = shape_of(plan, dtype=str(dtype).removeprefix("torch."))
    wanted = {"buffer_size_gb": 0.5}
    config = machine_config(wanted, shape, is_cuda=False, available_bytes=device.available_bytes())
    sessions: dict[Any, RolloutSession] = {
        meter: RolloutSession(build_model(source, dtype=dtype), config, tokenizer, eos_ids=plan.eos_ids, meter=meter)
        for meter in (None, "auto")
    }
    questions = [f"Tell me something about {topic}." for topic in TOPICS[: args.prompts]]
    prompts = [chat_prompt(tokenizer, [{"role": "user", "content": question}]) for question in questions]
    seconds: dict[Any, list[float]] = {meter: [] for meter in sessions}
    groups: list[RolloutGroup] = []
    for number in range(args.rounds + 1):  # the first round warms up
        params = SamplingParams(n=args.group_size, max_tokens=args.max_tokens, seed=number)
        for meter, session in sessions.items():
            spent, groups = play(session, prompts, params)
            seconds[meter] += [spent] if number else []
    without, with_it = (statistics.median(found) for found in seconds.values())
    metered = sessions["auto"]
    assert metered.meter is not None
    print(f"{args.model}, {dtype}, {threads} threads, {args.prompts} x {args.group_size} x {args.max_tokens} tokens")
    print(f"a round: {without:.2f} CPU s without a meter, {with_it:.2f} with: {100 * (with_it / without - 1):+.1f} %")
    print(f"the meter itself: {metered.meter.num_tokens} tokens in {metered.meter.num_windows} windows of ", end="")
    print(f"{args.rounds + 1} rounds, {metered.meter.seconds:.2f} s in all")
    for size in (1, 4):
        count, alarms, worst = largest_figures(metered, groups, size)
        shown = ", ".join(f"{name} {value:.3g}" for name, value in worst.items())
        print(f"{count} windows of {size} samples: {alarms} alarms; at most {shown}")


if __name__ == "__main__":
    main()
